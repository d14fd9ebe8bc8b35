"""When an incarnation has failed, and why. Pure.

Pods are never repaired one by one: a rank that ended can never rejoin its handshake, so the first sign that any
member is gone condemns the incarnation. Signs differ in how much they say; the cause that is kept is chosen by rank:
out of memory, signal, non-zero exit; then node loss, eviction and deletion from outside; then exit code 0. An end that
follows a deletion is part of it. Of equals the earliest is kept; container times have one second's resolution, so ends
of the same second are named as a tie.

Exit codes say little about who was first: a headless vLLM always ends with 0, a head with several API servers always
with 1, whoever began it. So where an engine's log only tells of another process's end, another one that ended is taken
whose log tells more. And kubelets report in any order, so an end from before our first deletion may still take the
place of one that was reported earlier.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from dp_operator import preparing, symptoms
from dp_operator.api import Failure, GroupStatus, Spec, Status
from dp_operator.observe import ContainerStatus, IncarnationObjects, Picture, Pod, Terminated, seconds, timestamp

# The relay hears the end of a rank's connection up to a second before the kubelet reports the exit code, and
# only the latter says why. Wait this long for it.
CAUSE_WAIT_S = 3.0
# Kubelets look at their containers every second. An end that is reported later than this after the first one is no news
# about how it began; the clocks of nodes are not that exact either.
CORRECTED_WITHIN_S = 5.0
# So many logs of others that ended are read to find out who was first.
_LOGS_OF_OTHERS = 3
_KEPT_NODES = 8
_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
# Reasons of a failed pod that are nobody's fault: the kubelet makes room or shuts down. With any other the kubelet
# would not even begin with the pod, and would say so again as often as it is asked.
_REMOVALS = ("Evicted", "Preempting", "Terminated", "Shutdown", "NodeShutdown", "NodeLost")
# Containers that do not run in time although nothing is wrong with them yet.
_GOES_ON = "ContainersNotStarted"
_IF_IT_GOES_ON = ", to be raised if that takes long by its nature"
_OOM, _SIGNAL, _ERROR, _OUTSIDE, _CLEAN, _AGAIN = range(6)
# Neither a deletion nor another engine's end ends an engine like that. An abort may be a collective's watchdog.
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
_OF_THE_KERNEL = (*_CRASHES, "SIGKILL")


class Verdict(NamedTuple):
    """A failure, or None; and when to look again although nothing happens until then (seconds since the epoch)."""

    failure: Failure | None
    look_again_at: float | None = None
    others: tuple[Failure, ...] = ()  # further engines that ended, of which exit codes alone do not say who was first
    taken: Failure | None = None  # a member that was taken away before the engine ended


class LogWanted(NamedTuple):
    """The log of an engine that ended, to be read before its pod goes."""

    incarnation: str
    pod: str
    previous: bool  # the container was started again in the same pod
    instead: Failure | None = None  # takes the place of the failure that is known, if the logs say so
    taken: Failure | None = None  # does so, too, if they all only tell that another has gone


def judge(
    spec: Spec, entry: GroupStatus, objects: IncarnationObjects, picture: Picture, now: float, *, heard: bool = True
) -> Verdict:
    """Judge one incarnation whose objects have all been created.

    heard: whether its monitor was heard, or cannot be, since the operator began to listen.
    """
    ended = _first_end(entry, objects, picture, now)
    if ended.failure:
        return ended
    reported = _from_relay(entry, objects, now)
    if reported.failure:
        return reported
    late = _too_late(spec, entry, objects, now)
    if late.failure and entry.state != "Serving" and not heard and not _is_certain(late.failure, entry, objects):
        # An operator that was away for long has yet to hear how far the group has come meanwhile.
        late = Verdict(None, now + CAUSE_WAIT_S)
    if late.failure:
        return late
    times = [at for at in (reported.look_again_at, late.look_again_at) if at is not None]
    return Verdict(None, min(times) if times else None)


def _is_certain(late: Failure, entry: GroupStatus, objects: IncarnationObjects) -> bool:
    """Whether a deadline has passed whatever the monitor says: no group was released of which an engine never ran.

    A pod that was made again may be one that the group lost after its release.
    """
    scheduled = seconds(entry.scheduled_at)
    return late.reason == _GOES_ON and scheduled is not None and not _made_again(entry, objects, scheduled)


def _made_again(entry: GroupStatus, objects: IncarnationObjects, complete: float) -> list[float]:
    """When pods were made that were not there when all of them were. Times have whole seconds, hence the one more."""
    at_latest = _by_their_clock(entry, objects, complete) + 1
    times = [seconds(pod.metadata.creation_timestamp) for pod in objects.pods]
    return [at for at in times if at is not None and at > at_latest]


def suspected_at(entry: GroupStatus, objects: IncarnationObjects, now: float) -> str | None:
    """Since when the relay reports a sign of a failure; None while it reports none.

    By the operator's clock: that of the relay's node may be wrong, and a sign that is repeated is no newer one.
    """
    if objects.snapshot is None:
        return entry.suspected_at
    return (entry.suspected_at or timestamp(now)) if _signs(entry, objects) else None


def unready_at(entry: GroupStatus, objects: IncarnationObjects, now: float) -> str | None:
    """Since when, by the operator's clock, a pod of a group that serves was seen not to be ready; None while all are."""
    return (entry.unready_at or timestamp(now)) if entry.state == "Serving" and _unready(objects) else None


def logs_wanted(verdict: Verdict, objects: IncarnationObjects) -> list[LogWanted]:
    """Which logs explain a failure; none where no engine of a pod that still exists has ended."""
    own = _log_wanted(verdict.failure, objects) if verdict.failure else None
    return [own._replace(taken=verdict.taken), *_logs_of_others(verdict.others, objects)] if own else []


def _log_wanted(failure: Failure, objects: IncarnationObjects) -> LogWanted | None:
    pod = next((p for p in objects.pods if p.name == failure.pod), None)
    engine = pod.engine if pod else None
    if not failure.charged or pod is None or engine is None or _engine_end(pod) is None:
        return None
    return LogWanted(failure.incarnation, failure.pod, previous=engine.last_state.terminated is not None)


def _logs_of_others(others: Iterable[Failure], objects: IncarnationObjects) -> list[LogWanted]:
    wanted = [(_log_wanted(other, objects), other) for other in others]
    return [log._replace(instead=other) for log, other in wanted if log][:_LOGS_OF_OTHERS]


def with_logs(status: Status, read: list[tuple[LogWanted, str]]) -> Status:
    """The status with what logs say about the failures that they were read for, and about who was first."""
    groups = [
        _with_logs(group, [(wanted, text) for wanted, text in read if wanted.incarnation == group.incarnation])
        for group in status.groups
    ]
    return msgspec.structs.replace(status, groups=groups)


def _with_logs(group: GroupStatus, read: list[tuple[LogWanted, str]]) -> GroupStatus:
    if not read or not group.last_failures:
        return group
    return corrected(group, _told_by_logs(group.last_failures[0], read))


def corrected(entry: GroupStatus, found: Failure) -> GroupStatus:
    """The entry with another cause of its newest failure: the books follow, the time of the notice stays."""
    known, *older = entry.last_failures
    tally, before, after = entry.node_failures, _blamed(known), _blamed(found)
    # A spec that changed meanwhile has begun them anew.
    if before != after and entry.restarts and (not before or tally.get(before)):
        left = {node: count - (node == before) for node, count in tally.items()}
        tally = _counted({node: count for node, count in left.items() if count}, after)
    restarts, due = entry.restarts, entry.next_attempt_at
    if known.charged and not found.charged and restarts:
        # Nobody's fault, so at once, as if it had been known; where it is not the first of its kind, the back-off stays.
        first = all(failure.charged for failure in older)
        restarts, due = restarts - 1, known.noticed_at if first else due or known.noticed_at
    found = msgspec.structs.replace(found, noticed_at=known.noticed_at)
    return msgspec.structs.replace(
        entry, last_failures=[found, *older], node_failures=tally, restarts=restarts, next_attempt_at=due
    )


def tallied(tally: dict[str, int], failure: Failure) -> dict[str, int]:
    """Charged failures by the node on which they certainly began, with one more; the busiest are kept."""
    return _counted(tally, _blamed(failure))


def _blamed(failure: Failure) -> str:
    return failure.node if failure.charged and not failure.uncertain else ""


def _counted(tally: dict[str, int], node: str) -> dict[str, int]:
    if not node:
        return tally
    counted = tally | {node: tally.get(node, 0) + 1}
    return dict(sorted(counted.items(), key=lambda item: (item[0] != node, -item[1]))[:_KEPT_NODES])


def _told_by_logs(known: Failure, read: list[tuple[LogWanted, str]]) -> Failure:
    own = next((text for wanted, text in read if wanted.instead is None), None)
    others = [(wanted.instead, text) for wanted, text in read if wanted.instead]
    first = known if own is None else explained(known, own)
    weighed = own or known.first_error_lines
    if symptoms.tells_of_itself(weighed):
        return first
    for other, text in others:
        if symptoms.tells_of_itself(text):
            return explained(other, text)
    if own is None or not symptoms.tells_of_another(own):
        return first
    taken = next((wanted.taken for wanted, _ in read if wanted.taken), None)
    if taken:
        return taken
    words = f"{first.message}; its errors tell of another process's end, so it may not have been the first"
    return msgspec.structs.replace(first, message=words, uncertain=True)


def late_certain(entry: GroupStatus, objects: IncarnationObjects, now: float) -> Failure | None:
    """A kill by the kernel that was reported after what it had caused; None where there is none.

    What ended once the first member was deleted may have ended by that. Times are whole seconds: of the second of the
    notice only that counts which no deletion does.
    """
    known, noticed = _open_case(entry, now)
    if known is None:
        return None

    def is_certain(sign: _Sign) -> bool:
        if sign.klass == _OOM or sign.failure.signal in _CRASHES:
            return sign.at <= noticed
        return sign.failure.signal == "SIGKILL" and sign.at < noticed

    before = (_class_of(known), seconds(known.time) or now)
    found = [s for s in _ends(entry, objects, now) if (s.klass, s.at) < before and is_certain(s)]
    return _first_of(sorted(found, key=_order)) if found else None


def late_logs(entry: GroupStatus, objects: IncarnationObjects, now: float) -> list[LogWanted]:
    """Logs of engines that ended before anything was deleted, which may explain more than the log of the known cause."""
    known, noticed = _open_case(entry, now)
    if known is None or not _doubtful(known) or symptoms.tells_of_itself(known.first_error_lines):
        return []
    ends = sorted(_ends(entry, objects, now), key=_order)
    return _logs_of_others(
        (
            sign.failure
            for sign in ends
            if _doubtful(sign.failure)
            # Of the same second, too: a worker that is told to end waits for its head first.
            and (sign.at < noticed or (sign.at == noticed and not sign.failure.signal))
            and sign.failure.pod != known.pod
        ),
        objects,
    )


def _open_case(entry: GroupStatus, now: float) -> tuple[Failure | None, float]:
    """The failure of a group that is being taken away, and when it was noticed; no failure where its cause is settled."""
    known = entry.last_failures[0] if entry.last_failures else None
    if known is None or not known.charged or known.incarnation != entry.incarnation:
        return None, 0.0
    noticed = seconds(known.noticed_at)
    return (known, noticed) if noticed is not None and now <= noticed + CORRECTED_WITHIN_S else (None, 0.0)


def _doubtful(failure: Failure) -> bool:
    """Whether an engine may have ended like that because another had."""
    return failure.exit_code is not None and _class_of(failure) != _OOM and failure.signal not in _OF_THE_KERNEL


def _class_of(failure: Failure) -> int:
    """How much an engine's end explains."""
    if failure.reason == "OutOfMemory":
        return _OOM
    if failure.signal:
        return _SIGNAL
    return _ERROR if failure.exit_code else _CLEAN


def explained(failure: Failure, text: str) -> Failure:
    """A failure with first error lines, tail and, where the log is clear, a reason."""
    if not text.strip():
        return failure
    found = symptoms.reason(text)
    # A kill by the kernel is told by the kubelet; the log cannot know better.
    reason = found if found and failure.reason in ("EngineExited", "EngineKilled") and not failure.signal else ""
    return msgspec.structs.replace(
        failure,
        reason=reason or failure.reason,
        first_error_lines=symptoms.first_error(text) or failure.first_error_lines,
        log_tail=symptoms.tail(text),
    )


class _Sign(NamedTuple):
    """One member's end."""

    klass: int
    at: float
    failure: Failure


def _ends(entry: GroupStatus, objects: IncarnationObjects, now: float) -> list[_Sign]:
    """The engines that ended by themselves."""
    assumed = objects.plan.assumed_version if objects.plan else ""
    found = []
    for pod in objects.pods:
        ended = _engine_end(pod)
        if ended and not _removal_came_first(pod, ended):
            klass, failure = _explain_end(pod, ended, entry, now, assumed=assumed)
            found.append(_sign_of(klass, failure, objects, now))
    return found


def _sign_of(klass: int, failure: Failure, objects: IncarnationObjects, now: float) -> _Sign:
    at = seconds(failure.time) or now
    return _Sign(klass, at, _with_rank(failure, objects.first_ranks.get(failure.pod)))


def _first_end(entry: GroupStatus, objects: IncarnationObjects, picture: Picture, now: float) -> Verdict:
    found = _ends(entry, objects, now)
    ended = {sign.failure.pod for sign in found}
    complete_at = _members_complete_at(entry, objects)
    for pod in objects.pods:
        made = seconds(pod.metadata.creation_timestamp)
        if pod.name in ended:
            continue
        if _was_rejected(pod):
            klass, failure = _ERROR, _rejected(pod, entry, now)
        elif init := _failed_init(pod):
            klass, failure = _ERROR, _init_failed(pod, init, entry, now)
        elif pod.metadata.deletion_timestamp or pod.status.phase == "Failed":
            klass, failure = _OUTSIDE, _removed(pod, entry, now)
        elif picture.lost(pod):
            words = f"is on node {pod.spec.node_name}, whose kubelet has fallen silent"
            klass, failure = _OUTSIDE, _outside("NodeLost", pod, words, entry, now)
        elif made is not None and made > complete_at:
            words = "was deleted from outside and made again; it cannot join its group"
            klass, failure = _OUTSIDE, _outside("PodDeleted", pod, words, entry, now)
        else:
            continue
        found.append(_sign_of(klass, failure, objects, now))
    missing = _missing(entry, objects, now)
    if missing and all(sign.klass != _OUTSIDE for sign in found):  # what is still there tells why it goes
        found.append(_Sign(_OUTSIDE, now, missing))
    if not found:
        return Verdict(None)
    first, *others = found = sorted(found, key=_order)
    if not _doubtful(first.failure):
        return Verdict(_first_of(found))
    doubtful = tuple(sign.failure for sign in others if _doubtful(sign.failure))
    taken = next((s.failure for s in others if s.klass == _OUTSIDE and _was_before(s, first, objects)), None)
    return Verdict(_first_of(found), others=doubtful, taken=taken)


def _was_before(taken: _Sign, end: _Sign, objects: IncarnationObjects) -> bool:
    """Whether a member can have been taken away before an engine ended; of one that is gone nobody knows."""
    pod = next((pod for pod in objects.pods if pod.name == taken.failure.pod), None)
    asked_by = seconds(pod.metadata.deletion_timestamp) if pod else None
    return pod is None or asked_by is None or asked_by - pod.metadata.deletion_grace_period_seconds <= end.at


def _missing(entry: GroupStatus, objects: IncarnationObjects, now: float) -> Failure | None:
    """What of a group is not there any more, and was made."""
    firsts = objects.first_ranks
    missing = [] if objects.head else [entry.head_pod]
    if objects.config_map is None and (entry.state == "Starting" or objects.rpc_service is None):
        # Containers that do not run yet need it; running ones have their copy, so of a group that serves it can be made
        # again, as long as the Service still tells the address that is in it.
        missing.append("the ConfigMap")
    if objects.plan:
        missing += sorted(ws.name for ws in objects.plan.workers if ws.name not in objects.stateful_sets)
    if not missing and entry.scheduled_at:
        # All pods were seen once, so one that is not there now is gone.
        here = {pod.name for pod in objects.pods}
        missing = [name for name in firsts if name not in here]
    if not missing:
        return None
    pod_name = next((name for name in missing if name in firsts), "")
    return Failure(
        reason="MemberDeleted",
        time=timestamp(now) or "",
        charged=False,
        incarnation=entry.incarnation,
        pod=pod_name,
        rank=firsts.get(pod_name),
        message=f"{', '.join(missing[:4])} was deleted from outside",
    )


def _order(sign: _Sign) -> tuple[int, float, int]:
    return sign.klass, sign.at, sign.failure.rank if sign.failure.rank is not None else -1


def _first_of(found: list[_Sign]) -> Failure:
    """The first of signs that are in order; others of the same second are named."""
    first = found[0]
    ties = [
        f"{sign.failure.pod} (rank {sign.failure.rank})"
        for sign in found[1:]
        if (sign.klass, sign.at) == (first.klass, first.at) and sign.klass != _OUTSIDE
    ]
    if not ties:
        return first.failure
    more = f" and {len(ties) - 4} more" if len(ties) > 4 else ""
    words = f"{first.failure.message}; ended in the same second, so either may be first: {', '.join(ties[:4])}{more}"
    return msgspec.structs.replace(first.failure, message=words)


def _members_complete_at(entry: GroupStatus, objects: IncarnationObjects) -> float:
    """A moment after which no pod of the group can have been made, in the API server's time.

    That is when the group was released.
    """
    released = seconds(entry.released_at)
    return float("inf") if released is None else _by_their_clock(entry, objects, released)


def _by_their_clock(entry: GroupStatus, objects: IncarnationObjects, moment: float) -> float:
    """A moment of the ledger in the API server's time.

    The ledger has the operator's; the same span after the head was made corrects a clock that is behind.
    """
    created = seconds(entry.created_at)
    head_made = seconds(objects.head.metadata.creation_timestamp) if objects.head else None
    return moment if created is None or head_made is None else max(moment, head_made + moment - created)


def _was_rejected(pod: Pod) -> bool:
    """Whether the kubelet refused to begin with a pod, such as for devices that it does not have after all."""
    if pod.status.phase != "Failed" or pod.status.reason in ("", *_REMOVALS) or pod.metadata.deletion_timestamp:
        return False
    disrupted = pod.condition("DisruptionTarget")
    return not (disrupted and disrupted.status == "True")


def _rejected(pod: Pod, entry: GroupStatus, now: float) -> Failure:
    words = f"was rejected by the kubelet of {pod.spec.node_name}: {pod.status.message}"
    return msgspec.structs.replace(_outside(pod.status.reason, pod, words, entry, now), charged=True)


def _failed_init(pod: Pod) -> ContainerStatus | None:
    """The init container that a pod failed with, where it is not restarted in place: that of a head."""
    disrupted = pod.condition("DisruptionTarget")
    if pod.status.phase != "Failed" or pod.status.reason or pod.metadata.deletion_timestamp:
        return None
    if preparing.has_begun(pod) or (disrupted and disrupted.status == "True"):
        return None
    beside = preparing.sidecars(pod)
    inits = [status for status in pod.status.init_container_statuses if status.name not in beside]
    return next((status for status in inits if (ended := status.state.terminated) and ended.exit_code), None)


def _init_failed(pod: Pod, init: ContainerStatus, entry: GroupStatus, now: float) -> Failure:
    ended = init.state.terminated or Terminated()
    words = f"failed: its init container {init.name} exited with code {ended.exit_code}"
    return msgspec.structs.replace(
        _outside("InitContainerFailed", pod, words, entry, now),
        charged=True,
        log_tail=symptoms.tail(ended.message),
    )


def _removal_came_first(pod: Pod, ended: Terminated) -> bool:
    """Whether an engine ended because its pod was being removed, or has no end of its own."""
    if ended.reason == "OOMKilled":
        return False
    disrupted = pod.condition("DisruptionTarget")
    if (disrupted and disrupted.status == "True") or pod.status.reason in ("Evicted", "Preempting", "Terminated"):
        return True
    asked_by = seconds(pod.metadata.deletion_timestamp)
    finished = seconds(ended.finished_at)
    if asked_by is None:
        return False
    # deletionTimestamp is when the grace period ends.
    return finished is None or finished >= asked_by - pod.metadata.deletion_grace_period_seconds


def _with_rank(failure: Failure, rank: int | None) -> Failure:
    return msgspec.structs.replace(failure, rank=rank)


def _engine_end(pod: Pod) -> Terminated | None:
    """How the engine of a pod ended first: what was started again in its place is not let into the group."""
    engine = pod.engine
    if engine is None:
        return None
    return engine.last_state.terminated or engine.state.terminated


def _explain_end(pod: Pod, ended: Terminated, entry: GroupStatus, now: float, *, assumed: str) -> tuple[int, Failure]:
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
    message = ended.message
    if symptoms.started_again(message):
        klass = _AGAIN  # what had ended before is unknown: the kubelet remembers one end
    if reason == "EngineExited":
        reason = symptoms.reason(message) or reason
    # Only this attempt could show the true version, so it is not held against the group. The next one knows it.
    found = symptoms.version_too_old(message)
    if found:
        reason = "EngineTooOld"
    on = f" on {pod.spec.node_name}" if pod.spec.node_name else ""
    return klass, Failure(
        reason=reason,
        time=ended.finished_at or timestamp(now) or "",
        charged=not found or found == assumed,
        incarnation=entry.incarnation,
        pod=pod.name,
        node=pod.spec.node_name,
        exit_code=ended.exit_code,
        signal=signal_name,
        message=f"engine of pod {pod.name}{on} {words}",
        first_error_lines=symptoms.first_error(message),
        log_tail=symptoms.tail(message),
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
    return _outside(reason, pod, words, entry, now)


def _outside(reason: str, pod: Pod, words: str, entry: GroupStatus, now: float) -> Failure:
    return Failure(
        reason=reason,
        time=timestamp(now) or "",
        charged=False,
        incarnation=entry.incarnation,
        pod=pod.name,
        node=pod.spec.node_name,
        message=f"pod {pod.name} {words}",
    )


def _from_relay(entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    """Judge what the relay reports and the kubelet has not (yet): a restarted container, a lost or a misbehaving rank."""
    signs = _signs(entry, objects)
    if not signs:
        return Verdict(None)
    condemned_at = (seconds(entry.suspected_at) or now) + CAUSE_WAIT_S
    if now < condemned_at:
        return Verdict(None, condemned_at)
    return Verdict(min(signs, key=lambda sign: sign[0])[1])


def _signs(entry: GroupStatus, objects: IncarnationObjects) -> list[tuple[float, Failure]]:
    """What the relay reports against the group, each with the relay's time of it."""
    snapshot = objects.snapshot
    if snapshot is None:
        return []
    signs: list[tuple[float, Failure]] = [
        (restarted.time, _sign("RankRestarted", restarted.pod, restarted.message, entry, objects))
        for restarted in snapshot.restarted
    ]
    for lost in snapshot.lost:
        failure = _sign("RankLost", lost.pod, lost.message, entry, objects)
        signs.append((lost.time, _with_rank(failure, lost.rank)))
    for violation in snapshot.violations:
        # Only the rank's own pod can condemn its group: a stranger who talks to the port must not.
        if violation.pod and violation.rank is not None and objects.holds(violation.pod, violation.rank):
            failure = _sign("HandshakeViolation", violation.pod, violation.message, entry, objects)
            signs.append((violation.time, _with_rank(failure, violation.rank)))
    return signs


def _sign(reason: str, pod: str, message: str, entry: GroupStatus, objects: IncarnationObjects) -> Failure:
    found = next((p for p in objects.pods if p.name == pod), None)
    return Failure(
        reason=reason,
        time=timestamp(objects.snapshot.time if objects.snapshot else 0) or "",
        charged=True,
        incarnation=entry.incarnation,
        pod=pod,
        node=found.spec.node_name if found else "",
        message=message,
    )


def _too_late(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    if entry.state == "Serving":
        return _unhealthy(spec, entry, objects, now)
    if objects.serves:
        # Became ready, if only while nothing could be written: whoever looks too late must not end it.
        return Verdict(None)
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
                ),
            )
        )
    return _not_released(spec, entry, objects, now)


def _not_released(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    """Before the release nothing has failed, but nothing may be held for ever either.

    scheduleTimeoutSeconds is the limit for a node for every pod, and then for every engine to run, whatever the kubelets
    are at meanwhile. Launchers that run and do not check in have timeoutSeconds.
    """
    created, scheduled = seconds(entry.created_at), seconds(entry.scheduled_at)
    if created is None:
        return Verdict(None)
    startup = spec.startup
    if scheduled is None:
        placed = len(objects.pods) >= len(objects.first_ranks) and all(p.spec.node_name for p in objects.pods)
        deadline = created + startup.schedule_timeout_seconds
        if placed or now < deadline:
            return Verdict(None, None if placed else deadline)
        return Verdict(_without_nodes(startup.schedule_timeout_seconds, entry, now))
    # A pod that was deleted and made again meanwhile has the whole time once more.
    soon = max([scheduled, *_made_again(entry, objects, scheduled)]) + startup.schedule_timeout_seconds
    if not all(pod.spec.node_name for pod in objects.pods):
        if now < soon:
            return Verdict(None, soon)
        return Verdict(_without_nodes(startup.schedule_timeout_seconds, entry, now))
    held = _stuck(objects) or _not_begun(objects, now)
    if held and now >= soon:
        pod, reason, why, uncertain = held
        name, node = pod.name, pod.spec.node_name
        message = (
            f"pod {name} on {node} {why}, {startup.schedule_timeout_seconds} s after all pods had a "
            f"node (startup.scheduleTimeoutSeconds{_IF_IT_GOES_ON if reason == _GOES_ON else ''}): {entry.waiting_for}"
        )
        failure = _late(reason, message, entry, now, charged=True)
        rank = objects.first_ranks.get(name)
        return Verdict(msgspec.structs.replace(failure, pod=name, node=node, rank=rank, uncertain=uncertain))
    if held:
        return Verdict(None, soon)
    late = _all_begun_at(objects, scheduled, soon, now) + startup.timeout_seconds
    if now < late:
        return Verdict(None, min(soon, late) if now < soon else late)
    message = (
        f"not every pod checked in within {startup.timeout_seconds} s after all pods had a node and all engines had begun "
        f"(startup.timeoutSeconds): {entry.waiting_for}"
    )
    return Verdict(_late("CheckInDeadlineExceeded", message, entry, now, charged=True))


def _without_nodes(limit_s: int, entry: GroupStatus, now: float) -> Failure:
    message = (
        f"not all pods had a node after {limit_s} s (startup.scheduleTimeoutSeconds), "
        f"so the group gives its nodes back and tries again: {entry.waiting_for}"
    )
    return _late("WaitingForCapacity", message, entry, now, charged=False)


def _late(reason: str, message: str, entry: GroupStatus, now: float, *, charged: bool) -> Failure:
    return Failure(
        reason=reason,
        time=timestamp(now) or "",
        charged=charged,
        incarnation=entry.incarnation,
        message=message,
    )


class _Held(NamedTuple):
    """A pod whose engine is not to be waited for any longer."""

    pod: Pod
    reason: str
    why: str
    uncertain: bool = False  # others are as late, on other nodes


def _stuck(objects: IncarnationObjects) -> _Held | None:
    """The first pod whose image or container does not come up."""
    for pod in objects.pods:
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
            held = preparing.stuck(status)
            if held:
                reason = "ImagePullFailed" if held.reason in _PULL_FAILURES else "ContainerStuck"
                words = f"does not come up: {held.reason}: container {status.name}: {held.message}"
                return _Held(pod, reason, words[:400])
    return None


def _not_begun(objects: IncarnationObjects, now: float) -> _Held | None:
    """The first pod, by rank, whose engine does not run yet, with what its kubelet is at."""
    here = {pod.name: pod for pod in objects.pods}
    late = [here[name] for name in objects.first_ranks if name in here and not preparing.has_begun(here[name])]
    if not late:
        return None
    first, *others = late
    work = preparing.at_work(first)
    long = f" for {max(0.0, now - work.since):.0f} s" if work.since is not None else ""
    more = f" (nor do {len(others)} more)" if others else ""
    nodes = {pod.spec.node_name for pod in late}
    words = f"does not run its engine{more}: {work.words}{long}"
    return _Held(first, _GOES_ON, words[:400], uncertain=len(nodes) > 1)


def _all_begun_at(objects: IncarnationObjects, scheduled: float, soon: float, now: float) -> float:
    """When the last engine began: nobody may have looked at that time, so it is the kubelets' that count.

    A node's clock may be wrong. What cannot be yet counts as the latest that is allowed.
    """
    running = [pod.engine.state.running for pod in objects.pods if pod.engine]
    times = [at for state in running if state and (at := seconds(state.started_at)) is not None]
    return max([scheduled, *(at if at <= now else min(now, soon) for at in times)])


def _unhealthy(spec: Spec, entry: GroupStatus, objects: IncarnationObjects, now: float) -> Verdict:
    unready = _unready(objects)
    if not unready:
        return Verdict(None)
    # The kubelet's clock tells which of several pods it is; where it says what cannot be, only what was seen counts.
    seen = seconds(entry.unready_at) or now
    times = [(at if at is not None and seen <= at <= now else seen, pod) for at, pod in unready]
    since, first = min(times, key=lambda item: item[0])
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


def _unready(objects: IncarnationObjects) -> list[tuple[float | None, Pod]]:
    """The pods whose API is not ready, with the time since when, as their kubelets have it."""
    conditions = [(pod.condition("Ready"), pod) for pod in objects.serving_pods]
    return [(seconds(c.last_transition_time), pod) for c, pod in conditions if c is not None and c.status != "True"]
