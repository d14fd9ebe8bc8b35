"""What to do about one custom resource, given what is observed. Pure: no clock, no randomness, no API call.

The ledger `status.groups[]` holds one entry per incarnation and is the intent: an incarnation's entry is written
before its first object is made, and a failure is written into it before its first object is deleted. So a crash
between any two writes loses nothing: whoever comes next finds an entry and finishes what it says.

An entry moves

    Starting -> Serving -> Stopping -> (Waiting ->) gone or a new Starting entry

* Starting: objects are made (Service first, its address goes into the launch plan), all pods check in, are released
  together, connect, load, become ready. `createdAt` marks that all objects exist; from then on a missing one is a
  failure, never something to make again.
* Serving: the head was ready once.
* Stopping: the head is deleted first, so that traffic stops at once, then the rest; Service and ConfigMap last,
  because terminating workers still use them.
* Waiting: everything is gone, the next attempt comes at `nextAttemptAt`. Restarts and causes stay in the entry and
  move on into the next incarnation's.

A changed spec (or a requested restart) replaces groups within the limits of `rollout.py`: groups that do not serve go
first and at once; of those that serve at most maxUnavailable may be gone at a time, and up to maxSurge get a successor
that takes over once it is ready. A revision that fails stops there, because its groups use the limits up. What has
begun when a rollout is paused is finished; nothing more begins.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Container
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dp_operator import disruption, naming, render, rollout, status, symptoms, versions
from dp_operator.api import DataParallelDeployment, Failure, GroupStatus, Stages, Status
from dp_operator.failure import (
    LogWanted,
    Verdict,
    corrected,
    judge,
    late_certain,
    late_logs,
    logs_wanted,
    suspected_at,
    tallied,
    unready_at,
)
from dp_operator.observe import AnyObject, IncarnationObjects, Picture, seconds, timestamp
from dp_operator.waiting import describe, reached, stalled, unready

_KEPT_FAILURES = 3
_BEING_MADE = "objects are being made"
_NAME_TAKEN = "NameTaken"
# A pod on a dead node never confirms its end. Past its deletion time by this much it no longer holds up its group.
_STUCK_POD_S = 30.0
_NO_STAGES = Stages()


class Create(Struct, frozen=True):
    """POST with strict field validation. An object of that name that exists already is never adopted."""

    manifest: dict[str, Any]


class Apply(Struct, frozen=True):
    """Server-side apply over an object that is known to be ours (the intent carries its UID)."""

    manifest: dict[str, Any]


class Delete(Struct, frozen=True):
    """DELETE with a UID precondition."""

    kind: str
    name: str
    uid: str
    grace_s: int | None = None  # None: as long as the object itself says


class Event(Struct, frozen=True):
    """A Kubernetes Event about the custom resource."""

    type: str  # Normal | Warning
    reason: str
    note: str


Action = Create | Apply | Delete


class Plan(Struct, frozen=True, kw_only=True):
    """Write `status` first; then post the events; then carry out the sequences.

    A sequence is a list of steps: the actions of a step go side by side, and nothing of a later step may begin before
    the earlier one has succeeded. The sequences have nothing to do with each other, so whoever carries them out begins
    all of them, in this order, and an exception in one must not stop the others: the first one is raised once all have
    ended. A quota that refuses one group's pods would otherwise keep a broken head of another in service for ever.

    look_again_at is in seconds since the epoch; None means that only a change can matter.
    """

    status: Status
    sequences: list[list[list[Action]]] = []  # deletes per incarnation, repairs, creates per incarnation
    events: list[Event] = []
    look_again_at: float | None = None
    # Objects of a new revision that the API server should look at (dry run) before anything is deleted for it.
    checks: list[dict[str, Any]] = []
    # Logs to read before the status is written, because the pods they are of go next.
    logs: list[LogWanted] = []

    @property
    def actions(self) -> list[Action]:
        """All actions, in an order in which they may be carried out one after the other."""
        return [action for sequence in self.sequences for step in sequence for action in step]


class _Draft:
    """What the planning of one resource collects."""

    def __init__(self) -> None:
        self.entries: list[GroupStatus] = []
        self.creates: dict[str, list[list[Action]]] = {}  # by incarnation
        self.deletes: dict[str, list[list[Action]]] = {}  # by incarnation
        self.repairs: list[Action] = []
        self.events: list[Event] = []
        self.times: list[float] = []
        self.checks: list[dict[str, Any]] = []
        self.logs: list[LogWanted] = []
        self.opened = ""  # incarnation whose budget is to let evictions through

    def look_again(self, at: float | None) -> None:
        if at is not None and at != float("inf"):
            self.times.append(at)


class Situation(Struct, frozen=True, kw_only=True, dict=True):
    """The inputs of one planning."""

    cr: DataParallelDeployment
    picture: Picture
    settings: render.Settings
    now: float  # seconds since the epoch
    token: bytes  # fresh randomness for the ids of new incarnations
    errors: list[str] = []  # why the spec cannot be acted on, beyond what the API server refused
    monitor_errors: dict[str, str] = {}  # incarnation -> why its monitor could not be asked
    # Revision -> why the API server refuses its pods, "" where it takes them. None: nobody asks it beforehand.
    verdicts: dict[str, str] | None = None
    unasked: str = ""  # why the API server could not be asked about the newest revision, so far

    @functools.cached_property
    def revision(self) -> str:
        """The newest revision, which is that of the spec."""
        return naming.revision(self.cr.spec)


def plan(situation: Situation) -> Plan:
    """Decide the next writes for one custom resource."""
    cr, now = situation.cr, situation.now
    spec = cr.spec
    draft = _Draft()
    wanted = 0 if spec.suspend else spec.replicas
    revision = situation.revision
    token = naming.restart_token(cr)

    entries = _with_orphans(cr, situation.picture)
    moved = [_step(situation, entry, wanted, draft) for entry in entries]
    stepped = _take_over(situation, [entry for entry in moved if entry is not None], draft)
    stepped = _one_per_group(stepped)
    if not situation.errors:
        stepped = _replace_changed(situation, stepped, wanted, revision, token, draft)
        stepped = _begin(situation, stepped, wanted, revision, token, draft)
    for entry in stepped:
        objects = situation.picture.incarnations.get(entry.incarnation)
        if rollout.alive(entry) and not entry.created_at:
            if not situation.errors:
                _create(situation, entry, objects, draft)
        elif rollout.alive(entry) and objects:
            _repair(situation, entry, objects, draft)
        elif entry.state == "Stopping" and objects:
            _delete(objects, draft, head_grace_s=_head_grace_s(situation, entry))
    _keep(situation, draft)

    draft.entries = sorted(stepped, key=lambda e: (e.index, e.incarnation))
    if _moved(cr.status.groups, draft.entries):
        draft.look_again(now)  # the next step may be due already, and our own write wakes nobody
    new_status = status.build(
        cr,
        situation.picture,
        draft.entries,
        wanted=wanted,
        revision=revision,
        errors=situation.errors,
        refused=(situation.verdicts or {}).get(revision, ""),
        unasked=situation.unasked,
        now=now,
    )
    sequences = [*draft.deletes.values(), [draft.repairs], *draft.creates.values()]
    return Plan(
        status=new_status,
        sequences=_without_obstacles(sequences, situation.picture),
        events=[replace(event, note=_short_note(event.note)) for event in draft.events],
        look_again_at=min(draft.times) if draft.times else None,
        checks=draft.checks,
        logs=draft.logs,
    )


def _without_obstacles(sequences: list[list[list[Action]]], picture: Picture) -> list[list[list[Action]]]:
    """Leave out what cannot be made now with the steps that need it, and what is empty."""
    result = []
    for sequence in sequences:
        steps = []
        for step in sequence:
            possible = [action for action in step if not _in_the_way(action, picture.obstacles)]
            if possible:
                steps.append(possible)
            if holds_up(step, picture.obstacles):
                break
        if steps:
            result.append(steps)
    return result


def holds_up(step: list[Action], obstacles: Container[tuple[str, str]]) -> bool:
    """Whether what comes after a step must wait, because something is in the way of it.

    Pods would mount a stranger's ConfigMap. Only a budget can come later.
    """
    return any(
        _in_the_way(action, obstacles) and action.manifest["kind"] != "PodDisruptionBudget"
        for action in step
        if isinstance(action, Create)
    )


def _in_the_way(action: Action, obstacles: Container[tuple[str, str]]) -> bool:
    if not isinstance(action, Create):
        return False
    return (action.manifest["kind"], action.manifest["metadata"]["name"]) in obstacles


def _short_note(note: str) -> str:
    """The note of an event, of which the API server takes 1 kB."""
    encoded = note.encode()
    return note if len(encoded) <= 1024 else encoded[:1021].decode(errors="ignore") + "…"


def _moved(before: list[GroupStatus], after: list[GroupStatus]) -> bool:
    """Whether anything has changed in the ledger but words, stages, and times that deadlines were counted from already."""

    def bones(entries: list[GroupStatus]) -> list[GroupStatus]:
        return [
            replace(entry, waiting_for="", stages=_NO_STAGES, head_node="", scheduled_at=None, released_at=None)
            for entry in entries
        ]

    return before != after and bones(before) != bones(after)


def _with_orphans(cr: DataParallelDeployment, picture: Picture) -> list[GroupStatus]:
    """Ledger entries, plus one for every incarnation that exists without one.

    If the whole ledger is empty, the status was lost (a restored backup), and a complete group goes on. Anything else is
    a leftover and is taken away: half-made, or stuck on a dead node when its entry had served its purpose.
    """
    entries = list(cr.status.groups)
    lost = not entries
    known = {entry.incarnation for entry in entries}
    taken: set[int] = set()
    strays = [o for o in picture.incarnations.values() if o.id not in known and not o.empty]
    for objects in sorted(strays, key=lambda o: (not o.serves, o.id)):
        entry = GroupStatus(incarnation=objects.id, index=objects.group, revision=objects.revision, state="Stopping")
        head = objects.head
        complete = head and not head.metadata.deletion_timestamp and objects.config_map
        if lost and head and complete and objects.group not in taken:
            entry = replace(
                entry,
                state="Starting",
                head_pod=head.name,
                created_at=head.metadata.creation_timestamp,
                restart_token=naming.restart_token(cr),
            )
            taken.add(objects.group)
        entries.append(entry)
    return entries


def _step(situation: Situation, entry: GroupStatus, wanted: int, draft: _Draft) -> GroupStatus | None:
    """Move one entry on by what is observed of it. None: the entry has served its purpose."""
    objects = situation.picture.incarnations.get(entry.incarnation)
    now = situation.now
    if entry.state == "Waiting":
        return entry if entry.index < wanted else None
    if entry.state == "Stopping":
        return _step_stopping(situation, entry, objects, wanted, draft)
    if entry.index >= wanted:
        why = "suspend is true" if situation.cr.spec.suspend else f"replicas is {wanted}"
        words = f"group {entry.index} ({entry.incarnation}): {why}"
        draft.events.append(Event("Normal", "GroupRemoved", words))
        return replace(entry, state="Stopping", waiting_for="", next_attempt_at=None, replaces="")
    refusal = situation.picture.refused.get(entry.incarnation)
    if refusal:
        failure = Failure(
            reason="ObjectRefused",
            time=timestamp(now) or "",
            incarnation=entry.incarnation,
            message=refusal,
        )
        return _fail(situation, entry, failure, draft)
    if not entry.created_at:
        return _step_creating(situation, entry, objects, draft)
    return _step_live(situation, entry, objects or _nothing(entry), draft)


def _nothing(entry: GroupStatus) -> IncarnationObjects:
    return IncarnationObjects(group=entry.index, id=entry.incarnation, revision=entry.revision)


def _incarnation(situation: Situation, entry: GroupStatus) -> render.Incarnation:
    return render.Incarnation(
        cr=situation.cr,
        group=entry.index,
        id=entry.incarnation,
        revision=entry.revision,
        settings=situation.settings,
        installed=entry.engine_version,
    )


def _step_creating(
    situation: Situation, entry: GroupStatus, objects: IncarnationObjects | None, draft: _Draft
) -> GroupStatus:
    # The shape is that of its own launch plan: by now the spec may say another.
    shape = {ws.name for ws in objects.plan.workers} if objects and objects.plan else None
    if objects and objects.head and shape is not None and shape <= set(objects.stateful_sets):
        return replace(entry, created_at=timestamp(situation.now), head_pod=objects.head.name)
    if situation.errors or entry.revision != situation.revision:
        # The spec that this half-made incarnation was begun with is gone or refused: it cannot be completed.
        return replace(entry, state="Stopping", waiting_for="", replaces="")
    obstacle = _obstacle(situation, entry)
    if obstacle and (objects is None or objects.rpc_service is None):
        # A stranger has the name of the first object, without which there is no other. Another id has another name.
        failure = Failure(
            reason=_NAME_TAKEN,
            time=timestamp(situation.now) or "",
            charged=False,
            incarnation=entry.incarnation,
            message=f"{obstacle}, or leave it: the group takes another name",
        )
        return _fail(situation, entry, failure, draft)
    blocked = situation.picture.blocked.get(entry.incarnation) or obstacle
    begun = seconds(objects.rpc_service.metadata.creation_timestamp) if objects and objects.rpc_service else None
    if blocked and begun is not None:
        # What exists of it already may hold places that others wait for.
        limit = begun + situation.cr.spec.startup.schedule_timeout_seconds
        if situation.now >= limit:
            return _fail(situation, entry, _no_capacity(situation, entry, blocked), draft)
        draft.look_again(limit)
    return replace(entry, waiting_for=blocked or _BEING_MADE)


def _obstacle(situation: Situation, entry: GroupStatus) -> str:
    """What of a stranger's is in the way of an incarnation; "" where nothing is."""
    found = situation.picture.obstacles.items()
    words = (f"{kind} {name}: {what.message}" for (kind, name), what in found if what.incarnation == entry.incarnation)
    return next(words, "")


def _no_capacity(situation: Situation, entry: GroupStatus, words: str) -> Failure:
    limit_s = situation.cr.spec.startup.schedule_timeout_seconds
    return Failure(
        reason="WaitingForCapacity",
        time=timestamp(situation.now) or "",
        charged=False,
        incarnation=entry.incarnation,
        message=f"not all objects could be made within {limit_s} s (startup.scheduleTimeoutSeconds): {words}",
    )


def _step_live(situation: Situation, entry: GroupStatus, objects: IncarnationObjects, draft: _Draft) -> GroupStatus:
    spec, now = situation.cr.spec, situation.now
    snapshot = objects.snapshot
    if not entry.released_at and snapshot and snapshot.released_at:
        # Times of the ledger are the operator's: the clock of the relay's node may be wrong.
        entry = replace(entry, released_at=timestamp(now))
    pods, expected = objects.pods, len(objects.first_ranks)
    if not entry.scheduled_at and expected and len(pods) == expected and all(pod.spec.node_name for pod in pods):
        entry = replace(entry, scheduled_at=timestamp(now))
    if snapshot and snapshot.engine_versions:
        # Of several the oldest, which is the one that may lack something.
        entry = replace(entry, engine_version=min(snapshot.engine_versions, key=versions.order)[:32])
    entry = replace(entry, suspected_at=suspected_at(entry, objects, now), unready_at=unready_at(entry, objects, now))
    relay = objects.head.relay if objects.head else None
    to_come = bool(relay and relay.state.running and entry.incarnation not in situation.monitor_errors)
    heard = snapshot is not None or not to_come
    verdict = judge(spec, entry, objects, situation.picture, now, heard=heard)
    draft.look_again(verdict.look_again_at)
    if verdict.failure:
        draft.logs += logs_wanted(verdict, objects)
        found = symptoms.version_too_old(verdict.failure.log_tail)
        if found:
            # What the launcher says last is known even where the monitor was never heard.
            entry = replace(entry, engine_version=found)
        return _fail(situation, entry, verdict.failure, draft)
    entry = replace(
        entry,
        stages=reached(snapshot) if snapshot else entry.stages,
        head_node=objects.head.spec.node_name if objects.head else entry.head_node,
    )
    if entry.state == "Starting":
        if snapshot and snapshot.ready_at and objects.serves:
            draft.events.append(
                Event("Normal", "GroupReady", f"group {entry.index} ({entry.incarnation}): all ranks ready")
            )
            return replace(entry, state="Serving", ready_at=timestamp(now), waiting_for="", served=True)
        waiting = describe(
            entry,
            objects,
            now,
            situation.monitor_errors.get(entry.incarnation, ""),
            devices_per_rank=0 if spec.devices.assignment == "None" else render.devices_per_rank(spec),
        )
        draft.look_again(waiting.look_again_at)
        return replace(entry, waiting_for=waiting.text)
    if entry.restarts:
        stable_at = (seconds(entry.ready_at) or now) + spec.failure_policy.stable_seconds
        if now >= stable_at:
            entry = replace(entry, restarts=0, node_failures={})
        else:
            draft.look_again(stable_at)
    _, again_s = stalled(objects, limit_s=spec.failure_policy.stalled_seconds)
    if again_s is not None:
        draft.look_again(now + max(1.0, again_s))
    return replace(entry, waiting_for="" if objects.serves else unready(objects))


def failure_event(entry: GroupStatus, failure: Failure) -> Event:
    """What is posted about a failure."""
    where = f" (rank {failure.rank})" if failure.rank is not None else ""
    return Event(
        "Warning", "GroupFailed", _short_note(f"group {entry.index}{where}: {failure.reason}: {failure.message}")
    )


def correction_event(entry: GroupStatus, failure: Failure) -> Event:
    """What is posted when a failure turns out to have begun elsewhere."""
    event = failure_event(entry, failure)
    return replace(event, reason="CauseCorrected", note=_short_note(f"{event.note}; reported after what it caused"))


def _fail(situation: Situation, entry: GroupStatus, failure: Failure, draft: _Draft) -> GroupStatus:
    """Write a failure into the ledger; the objects go in the steps that follow that write."""
    policy = situation.cr.spec.failure_policy
    restarts = entry.restarts + (1 if failure.charged else 0)
    given_up = policy.max_restarts is not None and restarts > policy.max_restarts
    draft.events.append(failure_event(entry, failure))
    failure = replace(failure, noticed_at=timestamp(situation.now))
    return replace(
        entry,
        state="Stopping",
        restarts=restarts,
        last_failures=[failure, *entry.last_failures][:_KEPT_FAILURES],
        node_failures=tallied(entry.node_failures, failure),
        next_attempt_at=None if given_up else timestamp(situation.now + _delay_s(situation, entry, failure, restarts)),
        waiting_for="",
    )


def _delay_s(situation: Situation, entry: GroupStatus, failure: Failure, restarts: int) -> float:
    policy = situation.cr.spec.failure_policy
    if failure.reason in ("WaitingForCapacity", _NAME_TAKEN):
        # Two groups that each hold half of what the other needs must not come back in step: the id decides by how much.
        tries = 1 + sum(f.reason == failure.reason for f in entry.last_failures)
        jitter = 1 + int.from_bytes(hashlib.sha256(entry.incarnation.encode()).digest()[:2], "big") / 0xFFFF
        return jitter * float(min(policy.max_backoff_seconds, policy.backoff_seconds * 2 ** (tries - 1)))
    if not failure.charged:
        # Nobody's fault, so the first time at once. But what happens again and again must not do so at full speed.
        since = situation.now - policy.stable_seconds
        before = sum(not f.charged and (seconds(f.time) or 0.0) >= since for f in entry.last_failures)
        return float(min(policy.max_backoff_seconds, policy.backoff_seconds * 2 ** (before - 1))) if before else 0.0
    return float(min(policy.max_backoff_seconds, policy.backoff_seconds * 2 ** min(max(restarts - 1, 0), 20)))


def _step_stopping(
    situation: Situation, entry: GroupStatus, objects: IncarnationObjects | None, wanted: int, draft: _Draft
) -> GroupStatus | None:
    if objects:
        entry = _correct_cause(situation, entry, objects, draft)
    if objects and not objects.empty and not _only_stuck(objects, situation, draft):
        return entry
    if entry.index >= wanted:
        return None
    # A leftover knows nothing; of two that go, the one that knows of failures waits for the next attempt.
    peers = {
        e.incarnation
        for e in situation.cr.status.groups
        if e.index == entry.index
        and e.incarnation != entry.incarnation
        and (e.state != "Stopping" or (_remembers(e) and not _remembers(entry)))
    }
    if peers and entry.replaces not in peers:
        return None
    return replace(
        entry,
        state="Waiting",
        head_pod="",
        head_node="",
        created_at=None,
        scheduled_at=None,
        released_at=None,
        ready_at=None,
        suspected_at=None,
        unready_at=None,
    )


def _correct_cause(situation: Situation, entry: GroupStatus, objects: IncarnationObjects, draft: _Draft) -> GroupStatus:
    """Put an end that was reported late in the place of what it had caused, if it is certain; else logs may do so."""
    found = late_certain(entry, objects, situation.now)
    if not found:
        draft.logs += late_logs(entry, objects, situation.now)
        return entry
    draft.logs += logs_wanted(Verdict(found), objects)
    draft.events.append(correction_event(entry, found))
    return corrected(entry, found)


def _remembers(entry: GroupStatus) -> bool:
    return bool(entry.restarts or entry.last_failures or entry.next_attempt_at)


def _one_per_group(entries: list[GroupStatus]) -> list[GroupStatus]:
    """Leave out entries that wait for an attempt of a group that has another entry already.

    Of two that wait, which is what a group and its successor become when they end together, the one that failed stays.
    """
    kept: list[GroupStatus] = []
    settled = {e.index for e in entries if rollout.alive(e) and not e.replaces}
    for entry in sorted(entries, key=lambda e: -e.restarts):
        if entry.state == "Waiting" and not entry.replaces:
            if entry.index in settled:
                continue
            settled.add(entry.index)
        kept.append(entry)
    return kept


def _only_stuck(objects: IncarnationObjects, situation: Situation, draft: _Draft) -> bool:
    """Whether no pod is left but some that end only when their node comes back.

    Service and ConfigMap stay for them; once the next incarnation has its own entry they are leftovers without one.
    """
    if not objects.pods or objects.stateful_sets:
        return False
    limits = [
        0.0
        if pod.metadata.deletion_timestamp and situation.picture.lost(pod)
        else (seconds(pod.metadata.deletion_timestamp) or float("inf")) + _STUCK_POD_S
        for pod in objects.pods
    ]
    if situation.now >= max(limits):
        return True
    if max(limits) != float("inf"):
        draft.look_again(max(limits))
    return False


def _take_over(situation: Situation, entries: list[GroupStatus], draft: _Draft) -> list[GroupStatus]:
    """A successor that is ready ends its predecessor; one whose predecessor is gone is simply the group."""
    serving = {e.incarnation for e in entries if rollout.alive(e)}
    relieved = set()
    result = []
    for entry in entries:
        if entry.state == "Stopping" or not entry.replaces:
            result.append(entry)
        elif entry.replaces not in serving:
            result.append(replace(entry, replaces=""))
        elif entry.state == "Serving" and rollout.available(entry, situation.picture):
            relieved.add(entry.replaces)
            result.append(replace(entry, replaces=""))
        else:
            result.append(entry)
    for index, entry in enumerate(result):
        if entry.incarnation in relieved:
            words = f"group {entry.index} ({entry.incarnation}): its successor is ready"
            draft.events.append(Event("Normal", "GroupReplaced", words))
            result[index] = _stopped(entry)
    return result


def _stopped(entry: GroupStatus) -> GroupStatus:
    """An entry that is taken away although nothing is wrong with it."""
    return replace(
        entry, state="Stopping", restarts=0, node_failures={}, next_attempt_at=None, waiting_for="", replaces=""
    )


def _replace_changed(
    situation: Situation, entries: list[GroupStatus], wanted: int, revision: str, token: str, draft: _Draft
) -> list[GroupStatus]:
    """Take away groups of an old revision or from before a requested restart, within the limits; or begin successors."""
    cr, picture = situation.cr, situation.picture
    successors = rollout.successors(entries)
    limits = rollout.limits(cr.spec.rollout, wanted)
    serving = {e.index for e in entries if e.index < wanted and rollout.available(e, picture)}
    free = limits.unavailable - (wanted - len(serving))
    # A group whose budget is open may go at any moment. It is closed again before another group is taken away.
    exposed = {e.incarnation for e in entries if e.index in serving and disruption.is_open(e, picture)}
    free -= len(exposed)
    changed = [e for e in entries if rollout.alive(e) and e.created_at and rollout.outdated(e, revision, token)]
    stop: dict[str, str] = {}  # incarnation -> why

    def why(entry: GroupStatus) -> str:
        return "spec changed" if entry.revision != revision else "restart requested"

    begin: list[GroupStatus] = []  # serving groups that get a successor
    held = rollout.holding_up(entries, picture, revision, token)
    due = bool(changed) and not cr.spec.rollout.paused and _accepted(situation, revision, changed, draft)
    if due:
        for entry in sorted(changed, key=lambda e: (rollout.available(e, picture), -e.index)):
            successor = successors.get(entry.incarnation)
            if entry.replaces:
                stop[entry.incarnation] = f"{why(entry)} before it was ready"
            elif not rollout.available(entry, picture):
                if entry.state == "Starting" or not held:
                    stop[entry.incarnation] = why(entry)
            elif (
                successor is None
                and len(successors) + len(begin) < limits.surge
                and _room(entries, entry.index, wanted, surge=limits.surge, more=len(begin))
            ):
                begin.append(entry)
            elif free + (entry.incarnation in exposed) > 0 and (
                _no_room(successor) or (successor is None and (not limits.surge or len(serving) > 1))
            ):
                free -= entry.incarnation not in exposed
                stop[entry.incarnation] = why(entry)
    opened = disruption.to_open(cr, picture, entries, wanted=wanted)
    if opened and opened.incarnation not in stop and (opened.index not in serving or not due or held):
        draft.opened = opened.incarnation  # a rollout moves groups too, and comes first
    if not limits.unavailable and limits.surge and not cr.spec.rollout.paused:
        begin += _successors_for_drains(situation, entries, wanted, limits, begun=begin)
    result = []
    for entry in entries:
        if entry.incarnation in stop:
            words = f"group {entry.index} ({entry.incarnation}): {stop[entry.incarnation]}"
            draft.events.append(Event("Normal", "GroupReplaced", words))
            result.append(_stopped(entry))
        elif entry.state == "Waiting" and entry.replaces and _pointless(entry, limits, revision, token):
            continue
        else:
            result.append(entry)
    for entry in begin:
        words = f"group {entry.index} ({entry.incarnation}): it serves until its successor is ready"
        draft.events.append(Event("Normal", "SuccessorStarting", words))
        result.append(_new_entry(situation, entry.index, revision, token, replaces=entry.incarnation))
    return result


def _pointless(entry: GroupStatus, limits: rollout.Limits, revision: str, token: str) -> bool:
    """Whether a successor that waits for its next attempt is not to be tried again."""
    return not limits.surge or rollout.outdated(entry, revision, token)


def _no_room(successor: GroupStatus | None) -> bool:
    """Whether a group that should get a successor finds no place for one, so that maxUnavailable has to do."""
    return bool(
        successor
        and successor.state == "Waiting"
        and successor.last_failures
        and successor.last_failures[0].reason == "WaitingForCapacity"
    )


def _accepted(situation: Situation, revision: str, changed: list[GroupStatus], draft: _Draft) -> bool:
    """Whether the API server takes the pods of a new revision: asked before anything is deleted for it."""
    if situation.verdicts is None or all(e.revision == revision for e in changed):
        return True
    verdict = situation.verdicts.get(revision)
    if verdict is None:
        inc = render.Incarnation(cr=situation.cr, group=0, id="check", revision=revision, settings=situation.settings)
        draft.checks = [render.head_pod(inc), *render.stateful_sets(inc)]
    return verdict == ""


def _successors_for_drains(
    situation: Situation,
    entries: list[GroupStatus],
    wanted: int,
    limits: rollout.Limits,
    *,
    begun: list[GroupStatus],
) -> list[GroupStatus]:
    """Serving groups on nodes that are being emptied, where none may be unavailable: their successors come first."""
    nodes = disruption.emptied_nodes(situation.cr, situation.picture)
    if not nodes:
        return []
    successors = rollout.successors(entries)
    chosen: list[GroupStatus] = []
    for entry in sorted(entries, key=lambda e: -e.index):
        if entry in begun or entry.incarnation in successors or entry.replaces or entry.index >= wanted:
            continue
        if not rollout.available(entry, situation.picture) or not disruption.on_nodes(entry, situation.picture, nodes):
            continue
        more = len(begun) + len(chosen)
        if len(successors) + more < limits.surge and _room(entries, entry.index, wanted, surge=limits.surge, more=more):
            chosen.append(entry)
    return chosen


def _room(entries: list[GroupStatus], index: int, wanted: int, *, surge: int, more: int = 0) -> bool:
    """Whether one more incarnation of a group may be made beside those whose pods exist or are about to."""
    holding = [e for e in entries if e.state != "Waiting" and e.index < wanted]
    mine = sum(e.index == index for e in holding)
    return mine <= min(surge, 1) and len(holding) + more < wanted + surge


def _begin(
    situation: Situation, entries: list[GroupStatus], wanted: int, revision: str, token: str, draft: _Draft
) -> list[GroupStatus]:
    """Enter new incarnations into the ledger: for groups that have none, and for those whose wait is over."""
    surge = rollout.limits(situation.cr.spec.rollout, wanted).surge
    result = list(entries)
    for place, entry in enumerate(entries):
        if entry.state != "Waiting":
            continue
        changed = rollout.outdated(entry, revision, token)
        due = seconds(entry.next_attempt_at) or 0.0
        if not changed and rollout.given_up(entry, situation.cr.spec.failure_policy):
            continue
        if due > situation.now and not changed:
            draft.look_again(due)
        elif _room(result, entry.index, wanted, surge=surge):
            new = _new_entry(
                situation,
                entry.index,
                revision,
                token,
                restarts=0 if changed else entry.restarts,
                last_failures=entry.last_failures,
                node_failures={} if changed else entry.node_failures,
                replaces=entry.replaces,
            )
            if not changed:
                new = replace(new, engine_version=entry.engine_version, served=entry.served)
            result[place] = new
    taken = {entry.index for entry in result}
    result += [_new_entry(situation, i, revision, token) for i in range(wanted) if i not in taken]
    return result


def _new_entry(
    situation: Situation,
    index: int,
    revision: str,
    token: str,
    *,
    restarts: int = 0,
    last_failures: list[Failure] | None = None,
    node_failures: dict[str, int] | None = None,
    replaces: str = "",
) -> GroupStatus:
    incarnation = naming.incarnation_id(situation.token + index.to_bytes(2, "big"))
    return GroupStatus(
        incarnation=incarnation,
        index=index,
        revision=revision,
        state="Starting",
        restarts=restarts,
        last_failures=last_failures or [],
        node_failures=node_failures or {},
        restart_token=token,
        replaces=replaces,
        waiting_for=_BEING_MADE,
    )


def _create(situation: Situation, entry: GroupStatus, objects: IncarnationObjects | None, draft: _Draft) -> None:
    inc = _incarnation(situation, entry)
    have = objects or _nothing(entry)
    steps = draft.creates.setdefault(entry.incarnation, [])
    if have.rpc_service is None or not have.rpc_service.spec.cluster_ip:
        if have.rpc_service is None:
            _add(steps, 0, Create(render.rpc_service(inc)))
        return  # its address goes into the launch plan
    if have.config_map is None:
        _add(steps, 0, Create(render.config_map(inc, have.rpc_service.spec.cluster_ip)))
    if have.budget is None and situation.cr.spec.disruption.policy != "Open":
        _add(
            steps,
            0,
            Create(render.disruption_budget(inc, pods=1 + len(render.worker_pods(situation.cr.spec, inc.base)))),
        )
    gang = render.pod_group(inc)
    if gang and have.head is None:
        if have.config_map is None:
            return  # it owns the PodGroup, which so goes with it
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": inc.base, "uid": have.config_map.metadata.uid}
        gang["metadata"]["ownerReferences"] = [owner]
        _add(steps, 0, Create(gang))
    for stateful_set in render.stateful_sets(inc):
        if stateful_set["metadata"]["name"] not in have.stateful_sets:
            _add(steps, 1, Create(stateful_set))
    if have.head is None:
        _add(steps, 1, Create(render.head_pod(inc)))


def _repair(situation: Situation, entry: GroupStatus, objects: IncarnationObjects, draft: _Draft) -> None:
    """Make Service, launch plan and budget of a live incarnation again where somebody took them; never pods."""
    inc = _incarnation(situation, entry)
    service, config_map = objects.rpc_service, objects.config_map
    if service is None and config_map is not None:
        address = config_map.metadata.annotations.get(naming.ANNOTATION_MONITOR_HOST)
        draft.repairs.append(Create(render.rpc_service(inc, cluster_ip=address)))
    if config_map is None and service is not None and entry.revision == situation.revision:
        draft.repairs.append(Create(render.config_map(inc, service.spec.cluster_ip)))
    if situation.cr.spec.disruption.policy == "Open":
        if objects.budget and not objects.budget.metadata.deletion_timestamp:
            budget = objects.budget.metadata
            draft.repairs.append(Delete("PodDisruptionBudget", budget.name, budget.uid))
    elif objects.plan is not None:
        opened = entry.incarnation == draft.opened
        _ensure(situation, render.disruption_budget(inc, pods=len(objects.first_ranks), opened=opened), draft)


def _head_grace_s(situation: Situation, entry: GroupStatus) -> int | None:
    """How long a head has to end, where that is not what its pod says.

    One that hangs heeds no SIGTERM and would use up its whole grace period. One that is only too busy for its probe may
    have requests to finish, so these keep their time; what comes on top of it, to end neatly in, is of use to nobody.
    """
    failure = entry.last_failures[0] if entry.last_failures else None
    if failure is None or failure.incarnation != entry.incarnation or failure.reason != "HeadUnhealthy":
        return None
    drain = situation.cr.spec.drain
    return max(1, drain.endpoint_seconds + drain.timeout_seconds)  # 0 would not wait for the kubelet


def _delete(objects: IncarnationObjects, draft: _Draft, *, head_grace_s: int | None) -> None:
    """Head first, then workers and budget, then what terminating workers still use."""
    steps = draft.deletes.setdefault(objects.id, [])
    if objects.head and not objects.head.metadata.deletion_timestamp:
        _add(steps, 0, Delete("Pod", objects.head.name, objects.head.metadata.uid, head_grace_s))
    for stateful_set in objects.stateful_sets.values():
        if not stateful_set.metadata.deletion_timestamp:
            _add(steps, 1, Delete("StatefulSet", stateful_set.metadata.name, stateful_set.metadata.uid))
    for pod in objects.workers.values():
        # Deleted with its pods orphaned, a StatefulSet leaves pods behind that nobody else will ever take away.
        if not pod.metadata.owner_references and not pod.metadata.deletion_timestamp:
            _add(steps, 1, Delete("Pod", pod.name, pod.metadata.uid))
    if objects.budget and not objects.budget.metadata.deletion_timestamp:
        _add(steps, 1, Delete("PodDisruptionBudget", objects.budget.metadata.name, objects.budget.metadata.uid))
    if not objects.pods and not objects.stateful_sets:
        rest: list[tuple[str, AnyObject | None]] = [("ConfigMap", objects.config_map)]
        if objects.rpc_service:
            rest.append(("Service", AnyObject(metadata=objects.rpc_service.metadata)))
        for kind, obj in rest:
            if obj and not obj.metadata.deletion_timestamp:
                _add(steps, 1, Delete(kind, obj.metadata.name, obj.metadata.uid))


def _add(steps: list[list[Action]], number: int, action: Action) -> None:
    while len(steps) <= number:
        steps.append([])
    steps[number].append(action)


def _keep(situation: Situation, draft: _Draft) -> None:
    """Make and repair what lives as long as the custom resource."""
    if situation.errors:
        return
    _ensure(situation, render.client_service(situation.cr), draft)
    policy = render.network_policy(situation.cr, situation.settings)
    if policy:
        _ensure(situation, policy, draft)
    else:
        existing = situation.picture.kept.get(("NetworkPolicy", situation.cr.metadata.name))
        if existing and not existing["metadata"].get("deletionTimestamp"):
            meta = existing["metadata"]
            draft.repairs.append(Delete("NetworkPolicy", meta["name"], meta["uid"]))


def _ensure(situation: Situation, intent: dict[str, Any], draft: _Draft) -> None:
    key = (intent["kind"], intent["metadata"]["name"])
    if key in situation.picture.obstacles:
        return  # reported as a condition; never adopted
    existing = situation.picture.kept.get(key)
    if existing is None:
        draft.repairs.append(Create(intent))
    elif not existing["metadata"].get("deletionTimestamp") and not covers(existing, intent):
        uid = existing["metadata"]["uid"]
        draft.repairs.append(Apply(intent | {"metadata": intent["metadata"] | {"uid": uid}}))


def covers(existing: Any, intent: Any) -> bool:
    """Whether everything intended is there. What the API server or others added does not count as a difference."""
    if isinstance(intent, dict) and isinstance(existing, dict):
        for key, value in intent.items():
            # Most branches are equal, and comparing a whole one is ten times cheaper than going through it.
            here = existing.get(key)
            if here != value and not covers(here, value):
                return False
        return True
    if isinstance(intent, list) and isinstance(existing, list):
        return len(existing) == len(intent) and all(map(covers, existing, intent))
    return bool(existing == intent)
