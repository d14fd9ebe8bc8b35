"""Which devices a rank gets: a slice of what its node may see, in the platform's control variable (protocol notes §6).

Pure, apart from `applied`, which changes the environment around the start of one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from dp_engine.versions import Wire

# Platform: its control variable. ROCm reads CUDA's name too; Ascend is vLLM's out-of-tree plugin.
PLATFORMS = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "tpu": "TPU_VISIBLE_CHIPS",
    "ascend": "ASCEND_RT_VISIBLE_DEVICES",
    "cpu": "CPU_VISIBLE_MEMORY_NODES",
}
_HIP = "HIP_VISIBLE_DEVICES"
# Here the variable stays the node's, and each worker adds its rank's offset.
_COUNT_IN_WORKER = {
    "launcher": frozenset[str](),
    "worker": frozenset({"cuda", "rocm"}),
    "list": frozenset({"cuda", "xpu"}),
}


class DeviceError(ValueError):
    """The node's visible devices do not suffice for a rank, or contradict each other."""


def detect_platform(env: Mapping[str, str]) -> str:
    """The platform whose variable is set: ROCm by HIP's, else the first of the table; CUDA when none is."""
    if env.get(_HIP):
        return "rocm"
    return next((platform for platform, variable in PLATFORMS.items() if env.get(variable)), "cuda")


def visible(platform: str, env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Items of the control variable, None when all devices may be seen (unset or empty). Raises DeviceError."""
    variable = PLATFORMS[platform]
    value = env.get(variable) or ""
    if platform == "rocm" and env.get(_HIP):
        if value and value != env[_HIP]:
            raise DeviceError(f"Inconsistent GPU visibility env vars: {_HIP}={env[_HIP]} but {variable}={value}")
        value = env[_HIP]
    return tuple(item.strip() for item in value.split(",")) if value else None


def of_rank(
    *,
    local_rank: int,
    world_size: int,
    platform: str,
    env: Mapping[str, str],
    ids: tuple[str, ...] | None,
    wire: Wire,
    alone: bool = False,
) -> tuple[str, ...]:
    """Devices [local_rank x world_size, + world_size) of the node. Raises DeviceError when there are too few.

    `ids` is --device-ids, which goes before the variable. All visible: the logical numbers themselves. A rank `alone` is
    handed nothing by its launcher, so nobody reads the items as numbers.
    """
    first, end = local_rank * world_size, (local_rank + 1) * world_size
    if ids is not None:
        if end > len(ids):
            raise DeviceError(
                f"--device-ids provides {len(ids)} devices, but DP rank {local_rank} needs [{first}, {end})"
            )
        return ids[first:end]
    items = visible(platform, env)
    if items is None:
        return tuple(map(str, range(first, end)))
    variable = PLATFORMS[platform]
    if platform in _COUNT_IN_WORKER[wire.devices]:
        if end > len(items):
            raise DeviceError(f"DP adjusted local rank {end - 1} is out of bounds: {variable}={','.join(items)}")
        return items[first:end]
    if end > len(items):
        what = "Error setting" if wire.device_ids_are_numbers else "Error computing device indices for"
        raise DeviceError(f'{what} {variable}: local range [{first}, {end}) base value: "{",".join(items)}"')
    chosen = items[first:end]
    if wire.device_ids_are_numbers and not alone and not all(item.isdecimal() for item in chosen):
        raise DeviceError(f"Error setting {variable}: {','.join(chosen)} are not device numbers")
    return chosen


def sets_variable(platform: str, wire: Wire) -> bool:
    """Whether the launcher hands a rank its slice in the variable; else the variable stays the node's."""
    return wire.devices != "list" and platform not in _COUNT_IN_WORKER[wire.devices]


@contextlib.contextmanager
def applied(variable: str, devices: tuple[str, ...] | None) -> Iterator[None]:
    """Start a process inside with the variable set; it is as before afterwards. None: left alone."""
    if devices is None:
        yield
        return
    before = os.environ.get(variable)
    os.environ[variable] = ",".join(devices)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
