"""What differs between vLLM releases: one list of changes, each with the knobs it turns.

A wire is the sum of all changes up to a release, so every release between two changes is covered. Sources: protocol
notes §0 to §7 in own words. `dp-engine versions` prints this table.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

NEWEST = "0.33.0"
VERSION_ENV = "DP_ENGINE_VERSION"

Release = tuple[int, int, int]


class Wire(Struct, frozen=True, kw_only=True):
    """How a release speaks and which command lines it takes. The defaults are those of 0.10.2."""

    # Handshake (§2)
    ready_has_hash: bool = False  # READY carries a hash of the parallel configuration, and the head compares it
    dense_lock_step: bool = True  # dense ranks form a group with waves, too
    ready_has_blocks: bool = True  # READY carries num_gpu_blocks and dp_stats_address; the first input frame is empty
    first_frame_keys: int = 0  # how much of `wire.READY_RESPONSE_KEYS` the first input frame holds; 0: it is empty
    coord_store: bool = False  # INIT names a store from which MoE ranks learn the group's port
    elastic_ready_keys: bool = False  # READY of an elastic group carries what a new rank has to know
    own_init_has_group: bool = True  # the second INIT of a double handshake repeats the group's parallel_config
    front_ends_watched: bool = False  # a front end that ends during the handshake ends the start at once
    ready_timeout_from_env: bool = False  # VLLM_ENGINE_READY_TIMEOUT_S instead of 600 s
    stop_grace_from_env: bool = False  # VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS instead of 5 s
    store_at_own_address: bool = True  # a rank of its own opens a store, which it must reach at VLLM_HOST_IP
    # Coordinator and waves (§3)
    late_subscribers: bool = False  # the coordinator greets an engine that subscribes after the start
    counts_width: Literal[2, 3] = 2  # [waiting, running] or [waiting, running, kv usage] per rank
    dense_counts: bool = True  # dense ranks tell the coordinator their counts
    counts_before_step: bool = False  # counts go out before a step as well as after it
    scale_resets_running: bool = True  # a scale notice that adds engines also ends the running wave
    front_end_starts_waves: bool = True  # the front end tells the coordinator of a first request while paused
    front_end_marks_running: bool = True  # ... and the coordinator takes its word that the wave runs
    rank0_reports_edge: bool = False  # rank 0 announces its own paused -> running edge
    idle_engine_starts_waves: bool = False  # any idle engine announces the wave of its first request itself
    sync_interval_steps: int = 32  # steps between two "is anyone unfinished?" reductions
    sync_after_first_step: bool = False  # step 1 asks, too
    # Data plane (§4) and balancing (§5)
    add_layout: Literal["0.10.2", "0.11", "0.14", "0.15", "0.16", "0.17", "0.20", "0.21", "0.28", "0.31"] = "0.10.2"
    weight_version_slot: bool = False  # a ninth slot in the outputs array
    error_reason: bool = False  # finish reason `error` exists
    elastic_inputs_handover: bool = False  # in an elastic group a rank that comes again takes over its identity
    repetition_reason: bool = False  # finish reason `repetition` exists
    balance_by_in_flight: bool = False  # own requests are a floor, and a full cache weighs
    rotating_start: bool = False  # ties are broken in turns; before, an idle group always uses the same rank
    # HTTP (§8)
    metric_names: Literal["0.11", "0.17", "0.32"] = "0.11"  # as checked at these releases
    # Command line (§1)
    rank_header: bool = False  # X-data-parallel-rank
    api_servers_derived: bool = False  # an unset --api-server-count means one per engine that is managed
    headless_refuses_count: bool = False  # --headless with any count above 0, not only above 1
    start_rank_0_is_hybrid: bool = False  # --data-parallel-start-rank 0 asks for hybrid, too
    one_mode_only: bool = False  # a rank goes with neither a start rank nor the hybrid flag
    dense_external: Literal["works", "starts", "refused"] = "works"  # "starts": then fails for want of a coordinator
    checks_ranges: bool = False  # a port, a negative number of local ranks or of seconds is refused when it is read
    node_rank_must_name_a_rank: bool = False  # external ranks are derived only from nodes that hold one each
    dense_offline: bool = True  # offline data parallelism takes dense models
    elastic_external: bool = False  # elastic expert parallelism goes with external load balancing
    # Devices (§6)
    devices: Literal["launcher", "worker", "list"] = "launcher"  # who gives a rank its part of the visible devices
    device_ids_are_numbers: bool = True  # an item such as GPU-uuid is refused


class Change(Struct, frozen=True, kw_only=True):
    """What is new in `since`. `flags` are flags (without dashes) that older releases do not know."""

    since: Release
    text: str
    knobs: dict[str, Any] = {}
    flags: tuple[str, ...] = ()


CHANGES: tuple[Change, ...] = (
    Change(since=(0, 10, 2), text="oldest wire: requests of 14 slots; every rank steps in waves; READY without a hash"),
    Change(since=(0, 11, 0), text="requests: prompt_embeds (15 slots)", knobs={"add_layout": "0.11"}),
    Change(
        since=(0, 11, 2),
        text="READY carries a hash and the head compares it; external flag; nodes; X-data-parallel-rank; CUDA-like "
        "platforms keep their variable, workers count from their rank on",
        knobs={"ready_has_hash": True, "rank_header": True, "devices": "worker"},
        flags=(
            *("data-parallel-external-lb", "dpe", "dph", "nnodes", "n", "node-rank", "r"),
            *("master-addr", "master-port"),
        ),
    ),
    Change(since=(0, 13, 0), text="finish reason error", knobs={"error_reason": True}),
    Change(
        since=(0, 14, 0),
        text="dense ranks are engines of their own: empty parallel_config, no hash, no waves, no counts; requests of 16 "
        "slots; VLLM_ENGINE_READY_TIMEOUT_S; external dense groups have no coordinator and cannot serve; no offline dense",
        knobs={
            "add_layout": "0.14",
            "dense_lock_step": False,
            "dense_counts": False,
            "ready_timeout_from_env": True,
            "dense_external": "starts",
            "dense_offline": False,
        },
    ),
    Change(
        since=(0, 15, 0),
        text="one API server per managed engine by default; --headless refuses any count; a rank goes with no other "
        "mode; requests of 17 slots",
        knobs={
            "add_layout": "0.15",
            "api_servers_derived": True,
            "headless_refuses_count": True,
            "one_mode_only": True,
        },
    ),
    Change(since=(0, 16, 0), text="requests of 18 slots", knobs={"add_layout": "0.16"}),
    Change(
        since=(0, 17, 0),
        text="requests without eos_token_id (17 slots); finish reason repetition; the coordinator greets late "
        "subscribers; elastic EP flag; metrics without gpu_ names, with engine_sleep_state and prompt_tokens_by_source",
        knobs={
            "metric_names": "0.17",
            "add_layout": "0.17",
            "repetition_reason": True,
            "late_subscribers": True,
            "scale_resets_running": False,
        },
        flags=("enable-elastic-ep",),
    ),
    Change(
        since=(0, 18, 0),
        text="--shutdown-timeout; inputs of an elastic group hand an identity over to whoever comes with it last",
        knobs={"elastic_inputs_handover": True},
        flags=("shutdown-timeout",),
    ),
    Change(
        since=(0, 20, 0),
        text="the first input frame is a map; READY loses num_gpu_blocks and dp_stats_address; requests of 18 slots",
        knobs={"add_layout": "0.20", "ready_has_blocks": False, "first_frame_keys": 3},
    ),
    Change(
        since=(0, 21, 0),
        text="external load balancing is refused for dense models; requests of 20 slots",
        knobs={"add_layout": "0.21", "dense_external": "refused"},
    ),
    Change(
        since=(0, 22, 0),
        text="multi-port supervisor; counts before and after a step; first frame: dtype",
        knobs={"counts_before_step": True, "first_frame_keys": 4},
        flags=(
            *("data-parallel-multi-port-external-lb", "dpm", "data-parallel-supervisor-port"),
            *("dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s"),
            *("dp-supervisor-probe-failure-threshold", "cpu-distributed-timeout-seconds"),
            "grpc",  # absent in 0.17, there in 0.32; the supervisor refuses it by name
        ),
    ),
    Change(since=(0, 23, 0), text="first frame: block_size, vllm_version", knobs={"first_frame_keys": 6}),
    Change(
        since=(0, 24, 0),
        text="--device-ids; a list of devices per rank instead of a variable; device ids need not be numbers; first "
        "frame: world_size, data_parallel_size; VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        knobs={"stop_grace_from_env": True, "devices": "list", "device_ids_are_numbers": False, "first_frame_keys": 10},
        flags=("device-ids",),
    ),
    Change(since=(0, 25, 0), text="balancing: ties are broken in turns", knobs={"rotating_start": True}),
    Change(
        since=(0, 27, 0),
        text="balancing by own requests and cache pressure; counts of three; dense ranks publish counts again; fault "
        "tolerance flags; first frame: 7 more keys",
        knobs={
            "balance_by_in_flight": True,
            "counts_width": 3,
            "dense_counts": True,
            "first_frame_keys": 17,
        },
        flags=("enable-fault-tolerance", "fault-tolerance-config"),
    ),
    Change(
        since=(0, 28, 0),
        text="start rank 0 on a node that serves means hybrid; requests of 21 slots",
        knobs={"add_layout": "0.28", "start_rank_0_is_hybrid": True},
    ),
    Change(
        since=(0, 29, 0),
        text="the coordinator waits for rank 0's word that a wave runs; first frame: supports_lora, max_loras",
        knobs={"front_end_marks_running": False, "rank0_reports_edge": True, "first_frame_keys": 19},
    ),
    Change(
        since=(0, 30, 0),
        text="--dp-sync-interval, 16 by default instead of 32, and step 1 asks as well",
        knobs={"sync_interval_steps": 16, "sync_after_first_step": True},
        flags=("dp-sync-interval", "elastic-ep-max-dp-size"),
    ),
    Change(since=(0, 31, 0), text="requests of 22 slots", knobs={"add_layout": "0.31"}),
    Change(
        since=(0, 32, 0),
        text="INIT: _coord_store_port, from which MoE ranks learn the group's port; outputs: weight_version; node ranks that name "
        "no external rank, and ports and sizes out of range, are refused; a front end that ends during the start ends the start; dense ranks need no store; "
        "metrics: num_requests_waiting_by_reason",
        knobs={
            "coord_store": True,
            "weight_version_slot": True,
            "checks_ranges": True,
            "node_rank_must_name_a_rank": True,
            "front_ends_watched": True,
            "store_at_own_address": False,
            "metric_names": "0.32",
        },
    ),
    Change(
        since=(0, 33, 0),
        text="idle engines start waves, front ends no longer do; the second INIT of a double handshake is without "
        "parallel_config; READY of elastic groups: 3 more keys; elastic EP with external load balancing",
        knobs={
            "elastic_external": True,
            "front_end_starts_waves": False,
            "front_end_marks_running": False,
            "idle_engine_starts_waves": True,
            "own_init_has_group": False,
            "elastic_ready_keys": True,
        },
    ),
)


def emulated_version(requested: str | None) -> str:
    """Version to show and speak: the flag, else DP_ENGINE_VERSION, else the newest known."""
    return requested or os.environ.get(VERSION_ENV) or NEWEST


def release_of(version: str) -> Release:
    """(0, 11, 2) of `0.11.2`, `0.11.2.post1` or `v0.11.2+cpu`; a missing third number is 0. Raises ValueError."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"not a version: {version!r}")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def wire_of(version: str) -> Wire:
    """Wire of a version such as 0.33, 0.33.0 or 0.11.0.post2. Raises ValueError for one older than the table."""
    release = release_of(version)
    if release < CHANGES[0].since:
        oldest = ".".join(map(str, CHANGES[0].since))
        raise ValueError(f"--emulate-version {version}: the oldest wire that is implemented is {oldest}")
    knobs: dict[str, Any] = {}
    for change in CHANGES:
        if change.since <= release:
            knobs.update(change.knobs)
    return msgspec.convert(knobs, Wire)


NEWEST_WIRE = wire_of(NEWEST)


def unknown_flags(version: str) -> frozenset[str]:
    """Names (without dashes) of flags that this version does not have yet."""
    release = release_of(version)
    return frozenset(flag for change in CHANGES if change.since > release for flag in change.flags)


def table() -> str:
    """All changes as text, one release a paragraph, for `dp-engine versions`."""
    lines = [f"{'since':<8} what changes (knob=value; --flag)"]
    for change in CHANGES:
        since = ".".join(map(str, change.since))
        lines.append(f"{since:<8} {change.text}")
        details = [f"{name}={value}" for name, value in change.knobs.items()]
        details += [f"--{flag}" if len(flag) > 3 else f"-{flag}" for flag in change.flags]
        if details:
            lines.append(f"{'':<8}   {', '.join(details)}")
    return "\n".join(lines)
