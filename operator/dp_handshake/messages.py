"""What the operator, the relay and the launchers say to each other.

* The operator writes one `LaunchPlan` per incarnation into its ConfigMap (`plan.json`, next to `launch.py`).
* Every launcher sends a `CheckIn` to the monitor (`POST /v1/check-in`, long poll) and gets a `CheckInReply`.
* The operator reads `Snapshot` objects from the monitor (`GET /v1/handshake`, `?watch=1` for one JSON a line).

The launcher is stdlib-only and reads and writes the same JSON by hand; tests hold both sides together.
Ranks are global DP ranks (0 … size-1). Sets of ranks travel as range strings such as `0-3,7`, bounded whatever
the size of the group. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

MONITOR_PORT = 13350
PLAN_SCHEMA = 1


class _Message(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class Fill(_Message, frozen=True):
    """An argv item that only the running group can know; the launcher fills it in.

    headIP is the head's pod IP; startRank is the first global rank of the pod.
    """

    fill: Literal["headIP", "startRank"]


class Versioned(_Message, frozen=True):
    """Argv items for a range of installed engine versions: since <= version < until. Kept when unknown."""

    items: list[str | Fill]
    since: str | None = None
    until: str | None = None


class WorkerSet(_Message, frozen=True):
    """The pods of one StatefulSet: ordinals ordinalStart … ordinalStart+replicas-1.

    The pod with ordinal n runs `sizeLocal` ranks from `firstRank + rankStride * n` on (n is the ordinal itself,
    not counted from ordinalStart).
    """

    name: str
    replicas: int
    first_rank: int
    rank_stride: int
    ordinal_start: int = 0


class LaunchPlan(_Message, frozen=True):
    """Everything about one incarnation that is known before any of its pods runs."""

    name: str
    group: int
    incarnation: str
    size: int
    size_local: int
    load_balancing: Literal["Internal", "Hybrid", "External"]
    head_placement: Literal["Colocated", "Dedicated"]
    architecture: Literal["Dense", "MoE"]
    head_pod: str
    workers: list[WorkerSet]
    monitor_host: str  # ClusterIP of the incarnation's -rpc Service
    rpc_port: int  # the relay's; the engine's own ROUTER is at rpc_port + 1 on the head's pod IP
    api_port: int
    # Items are str, Fill or Versioned. Not typed as such: msgspec decodes no union of two structs without a tag, and
    # only the launcher, which reads JSON by hand, looks into them.
    head_argv: list[Any]
    worker_argv: list[Any]
    api_scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    # What answers 200 once all ranks of a serving pod are ready, where it is not /health on api_port: a supervisor.
    health_port: int = 0
    health_path: str = ""
    visible_devices_env_name: str = ""
    head_devices: int = 0  # accelerators that the head's container must have; 0: not checked
    worker_devices: int = 0
    shared_memory_bytes: int = 0  # what /dev/shm should have per local rank; 0: not checked
    assumed_version: str = ""  # what the operator believes where the image does not tell; empty: nothing
    needs_version: str = ""  # oldest vLLM that can do this, such as 0.22; empty: any
    needs_version_for: str = ""  # what it is needed for
    monitor_port: int = MONITOR_PORT
    schema: int = PLAN_SCHEMA

    @property
    def head_ranks(self) -> int:
        """Ranks that run in the head pod: 0 … head_ranks-1."""
        return self.size_local if self.head_placement == "Colocated" else 0


class CheckIn(_Message, frozen=True):
    """A launcher says that its container runs and what it found. `launch` is random per launcher process."""

    incarnation: str
    pod: str
    ip: str
    launch: str
    role: Literal["head", "worker"]
    first_rank: int
    ranks: int
    visible_devices: str | None = None
    device_count: int | None = None
    shared_memory_bytes: int | None = None
    engine_version: str | None = None
    python_version: str | None = None
    warnings: list[str] = []  # what preflight found and does not stop the start; a few short lines
    wait_seconds: float = 20.0


class CheckInReply(_Message, frozen=True):
    """waiting: ask again. released: exec the engine. refused (HTTP 409): never exec; `message` says why."""

    state: Literal["waiting", "released", "refused"]
    head_ip: str = ""
    arrived: int = 0  # pods
    expected: int = 0  # pods
    message: str = ""


class Violation(_Message, frozen=True):
    """A frame or peer that does not belong in this handshake. Never forwarded to the engine."""

    time: float
    kind: str  # CamelCase, such as UnexpectedRank, SecondHello, LocalHeadlessMismatch, ForeignPeer, Undecodable
    message: str  # what came, from whom, and the likely cause
    peer: str = ""
    pod: str = ""  # the pod whose address the peer has, if any
    rank: int | None = None
    count: int = 1


class RankLost(_Message, frozen=True):
    """A rank whose connection ended between HELLO and READY: the fastest sign of its death."""

    time: float
    rank: int
    pod: str
    message: str


class PodRestarted(_Message, frozen=True):
    """A container that checked in again after the release: its engine is gone and can never rejoin."""

    time: float
    pod: str
    message: str


class Stall(_Message, frozen=True):
    """A rank that has running requests and, at two looks in a row or more, no new token."""

    rank: int
    since: float


class Stages(_Message, frozen=True):
    """Ranks that reached at least each stage, as range strings.

    Local ranks (those in the head pod) cannot be told apart before the API answers: until all of them have
    reached a stage they are missing here and counted in `Local`.
    """

    arrived: str = ""
    connected: str = ""
    loaded: str = ""
    ready: str = ""


class Local(_Message, frozen=True):
    """Counts of the head pod's own ranks, read from /proc/net/tcp and the engine's /health."""

    expected: int = 0
    connected: int = 0
    loaded: int = 0
    ready: int = 0


class Snapshot(_Message, frozen=True):
    """State of one incarnation's start, as the relay sees it."""

    incarnation: str
    time: float
    size: int
    expected_pods: int
    arrived_pods: int = 0
    missing_pods: list[str] = []  # not checked in; the first 32 by rank
    released_at: float | None = None
    listening_at: float | None = None  # rpcPort open: the engine's own ROUTER listens
    ready_at: float | None = None  # every rank READY and the API answers 200
    api_ready: bool = False
    stages: Stages = field(default_factory=Stages)
    local: Local = field(default_factory=Local)
    engine_versions: dict[str, int] = {}  # installed version -> pods
    python_versions: dict[str, int] = {}  # of the images' python3 -> pods
    warnings: list[str] = []  # "pod: what its preflight found"; the first 8
    lost: list[RankLost] = []  # newest 16
    restarted: list[PodRestarted] = []  # newest 16
    violations: list[Violation] = []  # newest 32
    violation_count: int = 0
    stalls: list[Stall] = []  # of a group that is ready: the oldest 16
