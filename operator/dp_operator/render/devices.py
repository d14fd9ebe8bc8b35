"""Which accelerators each container may use, and what each rank makes of them."""

from __future__ import annotations

from dp_operator import naming, versions
from dp_operator.api import PER_NODE_MAX, Spec
from dp_operator.render.shape import devices_per_pod

# From here on a device may be given by another name than its number, such as GPU-uuid.
NAMES_SINCE = (0, 24)


def slot_devices(spec: Spec, slot: int) -> range:
    """Device indices of a slot, contiguous."""
    width = devices_per_pod(spec)
    return range(slot * width, (slot + 1) * width)


def device_labels(spec: Spec, slot: int | None) -> dict[str, str]:
    """The devices of a slot as a label, so that pods of different widths and objects still exclude each other."""
    if slot is None:
        return {}
    return {naming.LABEL_DEVICES: _range(slot, devices_per_pod(spec))}


def anti_affinity(spec: Spec, slot: int) -> list[dict[str, object]]:
    """Keep pods that use one of this slot's devices, of whatever object and namespace, off the node.

    One term that lists every slot of any width that shares a device, not one term per device: when a pod goes, the
    scheduler looks again at those waiting pods only whose terms *all* match it (Kubernetes 1.35), so that a pod with a
    term for each of its eight devices would sleep for five minutes beside devices that a narrower pod has given back.
    """
    return [
        {
            "topologyKey": "kubernetes.io/hostname",
            "namespaceSelector": {},
            "labelSelector": {
                "matchExpressions": [
                    {"key": naming.LABEL_DEVICES, "operator": "In", "values": _overlapping(slot_devices(spec, slot))}
                ]
            },
        }
    ]


def _range(slot: int, width: int) -> str:
    return f"{slot * width}-{slot * width + width - 1}"


def _overlapping(devices: range) -> list[str]:
    """All slots of all widths on a node of PER_NODE_MAX devices that share one with these."""
    return [
        _range(slot, width)
        for width in range(1, PER_NODE_MAX + 1)
        for slot in range(devices[0] // width, devices[-1] // width + 1)
        if (slot + 1) * width <= PER_NODE_MAX
    ]


def seen_by_rank(visible: str, *, local_rank: int, world: int, version: str, env_name: str) -> list[str]:
    """Devices that one local rank ends up with, as vLLM of that version slices them (protocol notes §6).

    `visible` is the value of the visible-devices variable in the container, empty if it is not set; `world` is tensor x
    pipeline parallel size. Local ranks count from 0 in every pod. Gives device names of the node ("3"), or indices of
    what the container has where the variable is not set.

    * below 0.11.2, and on other platforms than CUDA and ROCm until 0.23: vLLM's launcher sets the variable anew for each
      rank, to the items from local_rank x world on;
    * 0.11.2 to 0.23 on CUDA and ROCm: the variable stays, the worker adds local_rank x world to its own local rank;
    * from 0.24: the list of each rank goes into its configuration.

    All three give the same items; they differ in what they accept. Raises ValueError where vLLM ends: too few items,
    or names where only integers are read.
    """
    first = local_rank * world
    if not visible:
        return [str(index) for index in range(first, first + world)]
    items = [item.strip() for item in visible.split(",")]
    if first + world > len(items):
        raise ValueError(
            f"{env_name}={visible}: local rank {local_rank} needs the devices {first} to {first + world - 1} of it"
        )
    mine = items[first : first + world]
    release = versions.order(version)
    cuda_like = env_name in {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    rewrites = release < (0, 24) and not (cuda_like and release >= (0, 11, 2))
    if rewrites and release < NAMES_SINCE and not all(item.isdigit() for item in mine):
        raise ValueError(f"{env_name}={visible}: vLLM {version} reads integers only")
    return mine
