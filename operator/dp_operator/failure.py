"""When an incarnation has failed, and why. Pure.

Pods are never repaired one by one: a rank that ended can never rejoin its handshake, so the first sign that any
member is gone condemns the incarnation. Signs differ in how much they say; the cause that is kept is chosen by rank:
out of memory, signal, non-zero exit; then eviction and deletion from outside; then exit code 0.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

import msgspec

from dp_operator.api import Failure, GroupStatus, Spec
from dp_operator.observe import IncarnationObjects, Pod, Terminated, seconds, timestamp

# The relay hears the end of a rank's connection up to a second before the kubelet reports the exit code, and
# only the latter says why. Wait this long for it.
CAUSE_WAIT_S = 3.0
# Times of container ends have one second's resolution.
_OOM, _SIGNAL, _ERROR, _OUTSIDE, _CLEAN = range(5)


class Verdict(NamedTuple):
    """A failure, or None; and when to look again although nothing happens until then (seconds since the epoch)."""

    failure: Failure | None
    look_again_at: float | None = None


def judge(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    """Judge one incarnation whose objects have all been created."""
    ended = _first_end(entry, objects, now)
    if ended:
        return Verdict(ended)
    heard = _from_relay(entry, objects, now)
    if heard.failure:
        return heard
    late = _too_late(spec, entry, objects, now)
    if late.failure:
        return late
    times = [at for at in (heard.look_again_at, late.look_again_at) if at is not None]
    return Verdict(None, min(times) if times else None)


def _first_end(entry: GroupStatus, objects: IncarnationObjects, now: float) -> Failure | None:
    firsts = objects.first_ranks
    found: list[tuple[int, float, Failure]] = []
    for pod in objects.pods:
        first_rank = firsts.get(pod.name)
        ended = _engine_end(pod)
        if ended:
            klass, failure = _explain_end(pod, ended, entry, now)
        elif pod.metadata.deletion_timestamp or pod.status.phase == "Failed":
            klass, failure = _OUTSIDE, _removed(pod, entry, now)
        else:
            continue
        at = seconds(failure.time) or now
        found.append((klass, at, _with_rank(failure, first_rank)))
    if found:
        return min(found, key=lambda item: item[:2])[2]
    missing = [] if objects.head else [entry.head_pod]
    if objects.plan:
        missing += sorted({ws.name for ws in objects.plan.workers} - set(objects.stateful_sets))
    if missing:
        return Failure(
            reason="MemberDeleted",
            time=timestamp(now) or "",
            charged=False,
            incarnation=entry.incarnation,
            pod=missing[0],
            message=f"{', '.join(missing)} was deleted from outside",
        )
    return None


def _with_rank(failure: Failure, rank: int | None) -> Failure:
    return msgspec.structs.replace(failure, rank=rank)


def _engine_end(pod: Pod) -> Terminated | None:
    engine = pod.engine
    if engine is None:
        return None
    return engine.state.terminated or engine.last_state.terminated


def _explain_end(pod: Pod, ended: Terminated, entry: GroupStatus, now: float) -> tuple[int, Failure]:
    number = ended.signal or (ended.exit_code - 128 if ended.exit_code > 128 else 0)
    signal_name = _signal_name(number)
    if ended.reason == "OOMKilled":
        klass, reason, words = _OOM, "OutOfMemory", "was killed: container memory limit reached"
    elif signal_name:
        klass, reason, words = _SIGNAL, "EngineKilled", f"was ended by {signal_name}"
    elif ended.exit_code:
        klass, reason, words = _ERROR, "EngineExited", f"exited with code {ended.exit_code}"
    else:
        klass, reason, words = _CLEAN, "EngineExited", "exited with code 0, which for an engine is a failure too"
    on = f" on {pod.spec.node_name}" if pod.spec.node_name else ""
    return klass, Failure(
        reason=reason,
        time=ended.finished_at or timestamp(now) or "",
        charged=True,
        incarnation=entry.incarnation,
        pod=pod.name,
        node=pod.spec.node_name,
        exit_code=ended.exit_code,
        signal=signal_name,
        message=f"engine of pod {pod.name}{on} {words}",
        log_tail=ended.message[-2048:],
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _removed(pod: Pod, entry: GroupStatus, now: float) -> Failure:
    disrupted = pod.condition("DisruptionTarget")
    if disrupted and disrupted.status == "True":
        reason, words = disrupted.reason or "Evicted", disrupted.message or "is being evicted"
    elif pod.status.reason:
        reason, words = pod.status.reason, pod.status.message
    else:
        reason, words = "PodDeleted", "was deleted from outside"
    return Failure(
        reason=reason,
        time=timestamp(now) or "",
        charged=False,
        incarnation=entry.incarnation,
        pod=pod.name,
        node=pod.spec.node_name,
        message=f"pod {pod.name} {words}"[:1024],
    )


def _from_relay(entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    """Judge what the relay reports and the kubelet has not (yet): a restarted container, a lost or a misbehaving rank."""
    snapshot = objects.snapshot
    if snapshot is None:
        return Verdict(None)
    signs: list[tuple[float, Failure]] = [
        (restarted.time, _sign("RankRestarted", restarted.pod, restarted.message, entry, objects))
        for restarted in snapshot.restarted
    ]
    for lost in snapshot.lost:
        failure = _sign("RankLost", lost.pod, lost.message, entry, objects)
        signs.append((lost.time, _with_rank(failure, lost.rank)))
    for violation in snapshot.violations:
        # Only the rank's own pod can condemn its group: a stranger who talks to the port must not.
        if violation.pod and violation.rank is not None and _owns(objects, violation.pod, violation.rank):
            failure = _sign("HandshakeViolation", violation.pod, violation.message, entry, objects)
            signs.append((violation.time, _with_rank(failure, violation.rank)))
    if not signs:
        return Verdict(None)
    at, failure = min(signs, key=lambda sign: sign[0])
    if now < at + CAUSE_WAIT_S:
        return Verdict(None, at + CAUSE_WAIT_S)
    return Verdict(failure)


def _owns(objects: IncarnationObjects, pod: str, rank: int) -> bool:
    if objects.plan is None:
        return False
    width = objects.plan.head_ranks if pod == objects.plan.head_pod else objects.plan.size_local
    first = objects.first_ranks.get(pod)
    return first is not None and first <= rank < first + width


def _sign(reason: str, pod: str, message: str, entry: GroupStatus, objects: IncarnationObjects) -> Failure:
    found = next((p for p in objects.pods if p.name == pod), None)
    return Failure(
        reason=reason,
        time=timestamp(objects.snapshot.time if objects.snapshot else 0) or "",
        charged=True,
        incarnation=entry.incarnation,
        pod=pod,
        node=found.spec.node_name if found else "",
        message=message[:1024],
    )


def _too_late(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    if entry.state == "Serving":
        return _unhealthy(spec, entry, objects, now)
    released = seconds(entry.released_at)
    if released is not None:
        deadline = released + spec.startup.timeout_seconds
        if now < deadline:
            return Verdict(None, deadline)
        return Verdict(
            Failure(
                reason="StartupDeadlineExceeded",
                time=timestamp(now) or "",
                charged=True,
                incarnation=entry.incarnation,
                message=(
                    f"not ready {spec.startup.timeout_seconds} s after release "
                    f"(startup.timeoutSeconds): {entry.waiting_for}"
                )[:1024],
            )
        )
    created = seconds(entry.created_at)
    everyone_placed = len(objects.pods) >= len(objects.first_ranks) and all(p.spec.node_name for p in objects.pods)
    if created is None or entry.scheduled_at or everyone_placed:
        return Verdict(None)
    deadline = created + spec.startup.schedule_timeout_seconds
    if now < deadline:
        return Verdict(None, deadline)
    return Verdict(
        Failure(
            reason="WaitingForCapacity",
            time=timestamp(now) or "",
            charged=False,
            incarnation=entry.incarnation,
            message=(
                f"not all pods had a node after {spec.startup.schedule_timeout_seconds} s "
                f"(startup.scheduleTimeoutSeconds), so the group gives its nodes back and tries again: "
                f"{entry.waiting_for}"
            )[:1024],
        )
    )


def _unhealthy(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    unready: list[tuple[float, Pod]] = []
    for pod in objects.serving_pods:
        condition = pod.condition("Ready")
        if condition is not None and condition.status != "True":
            unready.append((seconds(condition.last_transition_time) or now, pod))
    if not unready:
        return Verdict(None)
    since, first = min(unready, key=lambda item: item[0])
    limit = since + spec.failure_policy.unhealthy_seconds
    if now < limit:
        return Verdict(None, limit)
    is_head = first is objects.head
    what = "head" if is_head else "pod"
    return Verdict(
        Failure(
            reason="HeadUnhealthy" if is_head else "PodUnhealthy",
            time=timestamp(now) or "",
            charged=True,
            incarnation=entry.incarnation,
            rank=objects.first_ranks.get(first.name, 0),
            pod=first.name,
            node=first.spec.node_name,
            message=f"{what} {first.name} has not been ready for {spec.failure_policy.unhealthy_seconds} s",
        )
    )
