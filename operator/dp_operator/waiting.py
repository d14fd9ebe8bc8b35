"""What a group that is not ready waits for, in words that a tired person understands. Pure.

The text names the lowest stage that is not complete, how many ranks have it, and for each missing rank its pod,
node and reason. Elapsed time is given in steps (10 s, 30 s, 1 min …), because a text that changed every second
would be a write every second.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from dp_handshake.messages import LaunchPlan, Snapshot
from dp_handshake.ranks import count_ranks, format_ranks, parse_ranks
from dp_operator import preparing
from dp_operator.api import GroupStatus, Stages
from dp_operator.observe import IncarnationObjects, Pod, seconds

_STEPS_S = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
_NAMED_PODS = 4
_MONITOR_PATIENCE_S = 5
# The kubelet alternates between the two, which is no change worth a write.
_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff")
_UNREACHABLE = "MonitorUnreachable: "


class Waiting(NamedTuple):
    """Text, the counts behind it, and when the text changes by itself (seconds since the epoch)."""

    text: str
    stages: Stages
    look_again_at: float | None = None


def reached(snapshot: Snapshot | None) -> Stages:
    """Ranks that reached each stage, from the relay's snapshot."""
    if snapshot is None:
        return Stages()
    seen = snapshot.stages
    return Stages(arrived=seen.arrived, connected=seen.connected, loaded=seen.loaded, ready=seen.ready)


def counts(objects: IncarnationObjects, *, known: Stages, serving: bool) -> tuple[int, int, int, int]:
    """Ranks (arrived, connected, loaded, ready). Local ranks that cannot be named yet are counted.

    known: what the ledger has of it, for as long as the monitor has not been heard or the launch plan is lost.
    """
    plan, snapshot = objects.plan, objects.snapshot
    if plan and serving:
        return plan.size, plan.size, plan.size, plan.size
    if plan is None or snapshot is None:
        texts = (known.arrived, known.connected, known.loaded, known.ready)
        arrived, connected, loaded, ready = (count_ranks(text) for text in texts)
        return arrived, connected, loaded, ready
    size = plan.size
    local = range(plan.head_ranks)
    result = [count_ranks(snapshot.stages.arrived)]
    for text, unnamed in (
        (snapshot.stages.connected, snapshot.local.connected),
        (snapshot.stages.loaded, snapshot.local.loaded),
        (snapshot.stages.ready, snapshot.local.ready),
    ):
        named_local = bool(local) and "…" not in text and set(local) <= parse_ranks(text)
        result.append(count_ranks(text) + (0 if named_local or "…" in text else unnamed))
    arrived, connected, loaded, ready = (min(size, n) for n in result)
    return arrived, connected, loaded, ready


def describe(
    entry: GroupStatus, objects: IncarnationObjects, now: float, monitor_error: str, *, devices_per_rank: int = 0
) -> Waiting:
    """Say what one starting incarnation waits for, and what it holds meanwhile."""
    snapshot, plan = objects.snapshot, objects.plan
    stages = reached(snapshot) if snapshot else entry.stages
    if plan is None:
        return Waiting("its ConfigMap was deleted from outside, so its launch plan is not known", stages)
    size = plan.size
    pods = {pod.name: pod for pod in objects.pods}
    released_at = seconds(entry.released_at)
    if released_at is not None and snapshot is None:
        # The operator has only just begun to listen, or cannot: what was heard last is the best there is.
        known = entry.waiting_for
        if known.startswith(_UNREACHABLE):
            known = known.partition("; ")[2]
        return Waiting(f"{_UNREACHABLE}{monitor_error}; {known}" if monitor_error else known, stages)
    if released_at is None or snapshot is None:
        text, again_at = _before_release(plan, pods, objects, stages, now, monitor_error)
        held, held_until = _held(plan, objects, now, devices_per_rank)
        times = [at for at in (again_at, held_until) if at is not None]
        return Waiting((text[: 1024 - len(held)] + held), stages, min(times) if times else None)
    elapsed, again = _elapsed(now - released_at)
    look_again_at = released_at + again
    _, connected, loaded, ready = counts(objects, known=stages, serving=False)
    for word, count, text in (
        ("connected", connected, stages.connected),
        ("loaded", loaded, stages.loaded),
        ("ready", ready, stages.ready),
    ):
        if count < size:
            missing = _missing_ranks(
                objects, plan, text, pods, absent_local=plan.head_ranks - getattr(snapshot.local, word)
            )
            prefix = f"{count} of {size} ranks {word} {elapsed} release"
            hint = f"; not {word}: {missing}" if missing else ""
            if word == "connected" and snapshot.listening_at is None and size > plan.head_ranks:
                hint = "; the head's engine does not listen for ranks yet"
            return Waiting(f"{prefix}{hint}{_warnings(snapshot)}"[:1024], stages, look_again_at)
    text = f"all {size} ranks ready {elapsed} release; "
    text += (snapshot.ready_at and unready(objects)) or f"the API of {plan.head_pod} does not answer yet"
    return Waiting(text, stages, look_again_at)


def unready(objects: IncarnationObjects) -> str:
    """Name the pods whose API is not ready; in an Internal group only the head has one."""
    waiting = [pod for pod in objects.serving_pods if not pod.ready]
    if not waiting:
        return ""
    named = [_pod_words(pod.name, pod) for pod in waiting[:_NAMED_PODS]]
    more = f", and {len(waiting) - len(named)} more" if len(waiting) > len(named) else ""
    if waiting == [objects.head]:
        return f"head {waiting[0].name} is not ready"
    return f"not ready: {'pods' if len(waiting) > 1 else 'pod'} {', '.join(named)}{more}"


def stalled(objects: IncarnationObjects, *, limit_s: int) -> tuple[str, float | None]:
    """(which ranks have requests and no token for limit_s, in words, or ""; seconds until that changes by itself).

    Both times are the relay's, so nobody's clock matters; its newest line is at most ten seconds old.
    """
    snapshot = objects.snapshot
    if snapshot is None or not snapshot.stalls:
        return "", None
    ages = {stall.rank: snapshot.time - stall.since for stall in snapshot.stalls}
    late = [rank for rank, age_s in ages.items() if age_s >= limit_s]
    if not late:
        return "", limit_s - max(ages.values())
    passed, until_s = _step(max(ages.values()))
    pods = [name for name in objects.first_ranks if any(objects.holds(name, rank) for rank in late)]
    found = {pod.name: pod for pod in objects.pods}
    named = ", ".join(_pod_words(name, found.get(name)) for name in pods[:_NAMED_PODS])
    more = f", and {len(pods) - _NAMED_PODS} more" if len(pods) > _NAMED_PODS else ""
    words = f"rank{'s' if len(late) > 1 else ''} {format_ranks(late)} (pod{'s' if len(pods) > 1 else ''} {named}{more})"
    text = f"{words}: requests run and no token has come for over {_duration(passed)}"
    return text, until_s - max(ages.values())


def _before_release(
    plan: LaunchPlan,
    pods: dict[str, Pod],
    objects: IncarnationObjects,
    stages: Stages,
    now: float,
    monitor_error: str,
) -> tuple[str, float | None]:
    snapshot = objects.snapshot
    arrived = stages.arrived
    firsts = objects.first_ranks
    unnamed = 0
    if "…" not in arrived:
        here = parse_ranks(arrived)
        head_absent = plan.head_pod in snapshot.missing_pods if snapshot else 0 not in here
        absent = [
            (name, first)
            for name, first in firsts.items()
            if (head_absent if name == plan.head_pod else first not in here)
        ]
    else:
        # So scattered that the list of ranks had to be cut; the monitor names the first pods that are missing.
        named = snapshot.missing_pods if snapshot else []
        absent = [(name, firsts[name]) for name in named if name in firsts]
        if snapshot:
            unnamed = max(0, snapshot.expected_pods - snapshot.arrived_pods - len(named))
    words, look_again_at = _by_reason(absent, plan, pods, now)
    text = f"{count_ranks(arrived)} of {plan.size} ranks arrived"
    if words:
        text += f"; waiting for {words}"
    if unnamed:
        text += f", and {unnamed} more pods"
    text += _warnings(snapshot)
    relay = objects.head.relay if objects.head else None
    running_since = seconds(relay.state.running.started_at) if relay and relay.state.running else None
    if monitor_error and running_since is not None:
        if now - running_since >= _MONITOR_PATIENCE_S:
            text = f"{_UNREACHABLE}{monitor_error}; {text}"
        else:
            patient_until = running_since + _MONITOR_PATIENCE_S
            look_again_at = min(look_again_at or patient_until, patient_until)
    return text[:1024], look_again_at


def _warnings(snapshot: Snapshot | None) -> str:
    """What the launchers noticed before the start, such as a /dev/shm that is too small."""
    if snapshot is None:
        return ""
    found = list(snapshot.warnings)
    # An MoE group would end with a hash mismatch or hang, and nobody would say why.
    for what, versions in (("Python", snapshot.python_versions), ("vLLM", snapshot.engine_versions)):
        if len(versions) > 1:
            counts = ", ".join(f"{version} in {pods}" for version, pods in sorted(versions.items()))
            found.insert(0, f"pods have different {what} versions: {counts}")
    return f" (preflight: {'; '.join(found)})"[:400] if found else ""


def _held(plan: LaunchPlan, objects: IncarnationObjects, now: float, devices_per_rank: int) -> tuple[str, float | None]:
    """What the pods that have a node keep from others, since when, and what is still missing."""
    unit, units = ("device", devices_per_rank) if devices_per_rank else ("rank's place", 1)

    def amount(names: list[str]) -> int:
        return units * sum(plan.head_ranks if name == plan.head_pod else plan.size_local for name in names)

    placed = [pod for pod in objects.pods if pod.spec.node_name]
    missing = amount(list(objects.first_ranks)) - amount([pod.name for pod in placed])
    held = amount([pod.name for pod in placed])
    times = [
        at
        for pod in placed
        if (scheduled := pod.condition("PodScheduled")) and (at := seconds(scheduled.last_transition_time)) is not None
    ]
    if not held or not times:
        return "", None
    passed, again = _step(now - min(times))
    plural = "s" if held > 1 else ""
    what = f"device{plural}" if devices_per_rank else f"{unit}" if held == 1 else "ranks' places"
    long = f" over {_duration(passed)}" if passed else ""
    more = f" for {missing} more" if missing > 0 else ""
    look_again_at = min(times) + again
    return f"; holding {held} {what}{long}{more}", look_again_at


def _by_reason(
    absent: list[tuple[str, int]], plan: LaunchPlan, pods: dict[str, Pod], now: float
) -> tuple[str, float | None]:
    """Pods that share a reason are named together; what is stuck comes before what has merely not come yet.

    With how long the one that waits longest does so; and when that changes.
    """
    reasons: dict[tuple[int, str], list[tuple[str, int, float | None]]] = {}
    for name, first in absent:
        why = pod_reason(pods.get(name))
        reasons.setdefault((why.urgency, why.words), []).append((name, first, why.since))
    parts = []
    times = []
    for (_, words), members in sorted(reasons.items(), key=lambda item: (item[0][0], item[1][0][1])):
        ranks = [
            rank
            for name, first, _ in members
            for rank in range(first, first + (plan.head_ranks if name == plan.head_pod else plan.size_local))
        ]
        who = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}" if ranks else "the head"
        named = [_pod_words(name, pods.get(name)) for name, *_ in members[:_NAMED_PODS]]
        more = f", and {len(members) - len(named)} more" if len(members) > len(named) else ""
        long = ""
        since = min((at for *_, at in members if at is not None), default=None)
        if since is not None:
            passed, again = _step(now - since)
            long = f", for over {_duration(passed)}" if passed else ""
            times.append(since + again)
        parts.append(f"{who} (pod{'s' if len(members) > 1 else ''} {', '.join(named)}{more}): {words}{long}")
    return "; ".join(parts), min(times) if times else None


def _pod_words(name: str, pod: Pod | None) -> str:
    return f"{name} on {pod.spec.node_name}" if pod and pod.spec.node_name else name


class _Reason(NamedTuple):
    """Why a pod has not arrived, and since when; urgency 0 is stuck and needs a person."""

    urgency: int
    words: str
    since: float | None = None


def pod_reason(pod: Pod | None) -> _Reason:
    """Why a pod has not arrived."""
    if pod is None:
        return _Reason(1, "not created yet")
    if pod.metadata.deletion_timestamp:
        return _Reason(0, "being deleted")
    scheduled = pod.condition("PodScheduled")
    if not pod.spec.node_name:
        if scheduled and scheduled.status == "False":
            words = f"{scheduled.reason}: {_short(scheduled.message)}"
            return _Reason(0, words, seconds(scheduled.last_transition_time))
        return _Reason(1, "Pending: no node yet")
    work = preparing.at_work(pod)
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        ended = status.state.terminated or status.last_state.terminated
        if ended and status.name == "engine":
            words = f"engine ended with exit code {ended.exit_code}: {_short(ended.message or ended.reason)}"
            return _Reason(0, words)
        held = preparing.stuck(status)
        if held and held.reason in _PULL_FAILURES:
            words = f"ImagePullBackOff: {status.image}: {_short(held.message.rpartition(': ')[2])}"
            return _Reason(0, words, work.since)
        if held:
            return _Reason(0, f"{held.reason}: {_short(held.message)}" if held.message else held.reason, work.since)
    if preparing.has_begun(pod):
        return _Reason(1, "container runs, launcher has not checked in")
    return _Reason(2, work.words, work.since)


def _short(message: str, limit: int = 160) -> str:
    line = " ".join(message.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _missing_ranks(
    objects: IncarnationObjects, plan: LaunchPlan, text: str, pods: dict[str, Pod], *, absent_local: int
) -> str:
    """Name the ranks that lack a stage, with pod and node, pods in rank order; local ranks by count."""
    if "…" in text:
        return f"all but {text}"
    here = parse_ranks(text)
    parts: list[str] = []
    more = 0
    for name, first in objects.first_ranks.items():
        if name == plan.head_pod:
            if absent_local <= 0:
                continue
            words = "rank 0" if plan.head_ranks == 1 else f"{absent_local} of {plan.head_ranks} local ranks"
        else:
            absent = [rank for rank in range(first, first + plan.size_local) if rank not in here]
            if not absent:
                continue
            words = f"{'rank' if len(absent) == 1 else 'ranks'} {format_ranks(absent)}"
        if len(parts) == _NAMED_PODS:
            more += 1
            continue
        why = pod_reason(pods.get(name))
        trouble = f", {why.words}" if why.urgency == 0 else ""
        parts.append(f"{words} (pod {_pod_words(name, pods.get(name))}{trouble})")
    if more:
        parts.append(f"and the ranks of {more} more pods")
    return ", ".join(parts)


def _elapsed(seconds_passed: float) -> tuple[str, float]:
    """(words, seconds until which they hold)."""
    passed, until = _step(seconds_passed)
    return f"over {_duration(passed)} after" if passed else "just after", until


def _step(seconds_passed: float) -> tuple[int, float]:
    """(the last step that has passed or 0, the next one)."""
    index = bisect.bisect_right(_STEPS_S, seconds_passed)
    return _STEPS_S[index - 1] if index else 0, float(_STEPS_S[index]) if index < len(_STEPS_S) else float("inf")


def _duration(amount_s: int) -> str:
    if amount_s < 60:
        return f"{amount_s} s"
    if amount_s < 3600:
        return f"{amount_s // 60} min"
    return f"{amount_s // 3600} h"
