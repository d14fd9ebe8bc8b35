"""What the monitor tells: one `Snapshot` out of check-ins, the relay's state and what /proc and /health show. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, field

from dp_handshake.checkin import Roster, missing_pods
from dp_handshake.messages import LaunchPlan, Local, Snapshot, Stages, Stall
from dp_handshake.protocol import Handshake, Stage
from dp_handshake.ranks import format_ranks

MAX_WARNINGS = 8


class Seen(Struct, kw_only=True):
    """What no frame tells. Counts and pods of the start only grow: a connection that ended later was there once."""

    listening_at: float | None = None
    api_ready: bool = False
    ready_at: float | None = None
    local_connected: int = 0
    local_loaded: int = 0
    loaded_pods: set[str] = field(default_factory=set)
    stalls: list[Stall] = field(default_factory=list)


def local(plan: LaunchPlan, seen: Seen) -> Local:
    """Count the head's own ranks by stage; a 200 of the API means that all of them are through."""
    expected = plan.head_ranks
    if seen.api_ready:
        return Local(expected=expected, connected=expected, loaded=expected, ready=expected)
    return Local(
        expected=expected,
        connected=max(min(expected, seen.local_connected), min(expected, seen.local_loaded)),
        loaded=min(expected, seen.local_loaded),
    )


def build(plan: LaunchPlan, roster: Roster, handshake: Handshake, seen: Seen, *, now: float) -> Snapshot:
    """Put together what is known."""
    own = local(plan, seen)
    head = range(own.expected)
    ready = handshake.reached(Stage.READY)
    loaded = {rank for pod in seen.loaded_pods for rank in roster.places[pod].rank_range}
    return Snapshot(
        incarnation=plan.incarnation,
        time=now,
        size=plan.size,
        expected_pods=len(roster.places),
        arrived_pods=len(roster.arrived),
        missing_pods=missing_pods(roster),
        released_at=roster.released_at,
        listening_at=seen.listening_at,
        ready_at=seen.ready_at,
        api_ready=seen.api_ready,
        stages=Stages(
            arrived=format_ranks(rank for pod in roster.arrived for rank in roster.places[pod].rank_range),
            connected=format_ranks(
                [*(head if own.connected == own.expected else ()), *handshake.reached(Stage.CONNECTED)]
            ),
            loaded=format_ranks([*(head if own.loaded == own.expected else ()), *loaded, *ready]),
            ready=format_ranks([*(head if own.ready == own.expected else ()), *ready]),
        ),
        local=own,
        engine_versions=dict(
            Counter(message.engine_version for message in roster.arrived.values() if message.engine_version)
        ),
        python_versions=dict(
            Counter(message.python_version for message in roster.arrived.values() if message.python_version)
        ),
        warnings=[
            f"{message.pod}: {text[:200]}" for message in roster.arrived.values() for text in message.warnings[:4]
        ][:MAX_WARNINGS],
        lost=handshake.lost,
        restarted=roster.restarted,
        violations=handshake.violations,
        violation_count=handshake.violation_count,
        stalls=seen.stalls,
    )


def pod_readiness(roster: Roster, handshake: Handshake, seen: Seen, pod: str) -> str:
    """Say why a pod is not ready; empty if it is."""
    place = roster.places.get(pod)
    if place is None:
        return f"pod {pod} is not in the launch plan"
    if pod not in roster.arrived:
        return "not checked in"
    if place.role == "head":
        return "" if seen.api_ready else "the API does not answer 200 on /health yet"
    if roster.released_at is None:
        return f"waiting for {len(roster.places) - len(roster.arrived)} of {len(roster.places)} pods to check in"
    waiting = [rank for rank in place.rank_range if handshake.stages[rank] < Stage.READY]
    if not waiting:
        return ""
    connected = [rank for rank in waiting if handshake.stages[rank] >= Stage.CONNECTED]
    if len(connected) < len(waiting):
        absent = format_ranks(set(waiting) - set(connected))
        return f"no handshake yet from rank {absent}"
    step = "loaded, not READY" if pod in seen.loaded_pods else "loading"
    return f"rank {format_ranks(waiting)} connected, {step}"


def metrics(snapshot: Snapshot, handshake: Handshake) -> str:
    """Prometheus text format."""
    remote_base = {"connected": Stage.CONNECTED, "ready": Stage.READY}
    own = snapshot.local
    counts = {
        "connected": own.connected + handshake.count(remote_base["connected"]),
        "ready": own.ready + handshake.count(remote_base["ready"]),
    }
    lines = [
        "# HELP dp_handshake_ranks Ranks that reached at least this stage.",
        "# TYPE dp_handshake_ranks gauge",
        *(f'dp_handshake_ranks{{stage="{stage}"}} {count}' for stage, count in counts.items()),
        "# HELP dp_handshake_ranks_expected Ranks of the group.",
        "# TYPE dp_handshake_ranks_expected gauge",
        f"dp_handshake_ranks_expected {snapshot.size}",
        "# HELP dp_handshake_pods Pods that checked in.",
        "# TYPE dp_handshake_pods gauge",
        f"dp_handshake_pods {snapshot.arrived_pods}",
        f"dp_handshake_pods_expected {snapshot.expected_pods}",
        "# HELP dp_handshake_released Whether all pods have been released to start.",
        "# TYPE dp_handshake_released gauge",
        f"dp_handshake_released {int(snapshot.released_at is not None)}",
        "# HELP dp_handshake_api_ready Whether the engine's API answered 200.",
        "# TYPE dp_handshake_api_ready gauge",
        f"dp_handshake_api_ready {int(snapshot.api_ready)}",
        "# HELP dp_handshake_violations_total Frames and peers that were refused.",
        "# TYPE dp_handshake_violations_total counter",
        f"dp_handshake_violations_total {snapshot.violation_count}",
        "# HELP dp_handshake_lost_ranks Ranks whose connection ended between HELLO and READY.",
        "# TYPE dp_handshake_lost_ranks gauge",
        f"dp_handshake_lost_ranks {len(snapshot.lost)}",
    ]
    if snapshot.released_at is not None:
        end = snapshot.ready_at if snapshot.ready_at is not None else snapshot.time
        lines += [
            "# HELP dp_handshake_seconds Seconds from the release until ready, or until now.",
            "# TYPE dp_handshake_seconds gauge",
            f"dp_handshake_seconds {max(0.0, end - snapshot.released_at):.3f}",
        ]
    return "\n".join(lines) + "\n"
