"""The status of a custom resource, from its ledger and what is observed. Pure.

Decisions are never read from conditions; they are for people, `kubectl wait` and kstatus.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, inspect
from msgspec.structs import replace

from dp_operator import disruption, naming, rollout, versions
from dp_operator.api import Condition, DataParallelDeployment, GroupStatus, Ranks, Stages, Status
from dp_operator.observe import Picture, timestamp
from dp_operator.waiting import counts, stalled

_DEGRADED_FROM = 3  # charged failures in a row
_NO_STAGES = Stages()
_NO_RANKS = Ranks()


def is_progress(before: Status, after: Status) -> bool:
    """Whether the two differ only in what people watch: no decision and no client depends on it."""
    return _without_progress(before) == _without_progress(after)


def _without_progress(status: Status) -> Status:
    groups = [
        replace(entry, scheduled_at=None, head_node="", stages=_NO_STAGES, waiting_for="") for entry in status.groups
    ]
    conditions = [replace(condition, message="") for condition in status.conditions]
    return replace(status, ranks=_NO_RANKS, groups=groups, conditions=conditions)


def build(
    cr: DataParallelDeployment,
    picture: Picture,
    entries: list[GroupStatus],
    *,
    wanted: int,
    revision: str,
    errors: list[str],
    refused: str = "",
    unasked: str = "",
    now: float,
) -> Status:
    """Summarise. Every known condition type is set from the first sight on."""
    size = cr.spec.data_parallel.size
    token = naming.restart_token(cr)
    current = [entry for entry in entries if entry.index < wanted]
    serving = [entry for entry in current if rollout.available(entry, picture)]
    updated = [entry for entry in serving if not rollout.outdated(entry, revision, token)]
    totals = _ranks(current, serving, picture)
    expected = wanted * size
    ranks = Ranks(
        expected=expected,
        arrived=min(expected, totals[0]),
        connected=min(expected, totals[1]),
        loaded=min(expected, totals[2]),
        ready=min(expected, totals[3]),
        summary=f"{min(expected, totals[3])}/{expected}",
    )
    held = rollout.holding_up(current, picture, revision, token)
    stuck = rollout.stuck(current, picture, revision, token, cr.spec.failure_policy)
    conditions = [
        _accepted(errors),
        _available(cr, wanted, serving),
        _ready(cr, wanted, serving, updated, current, errors),
        _progressing(cr, wanted, updated, entries, held, stuck, refused, unasked),
        _degraded(current),
        _stalled(cr, current, picture, errors, refused),
        _serving_stalled(cr, current, picture),
        _drain_blocked(cr, picture, entries, wanted),
        _version_assumed(cr, installed_version(current, revision, token)),
    ]
    built = Status(
        observed_generation=cr.metadata.generation,
        selector=naming.selector(cr),
        replicas=len(_groups([entry for entry in entries if entry.state != "Waiting"])),
        ready_replicas=len(_groups(serving)),
        updated_replicas=len(_groups([e for e in current if rollout.alive(e) and e.revision == revision])),
        available_replicas=len(_groups(serving)),
        ranks=ranks,
        groups=entries,
        conditions=_with_times(conditions, cr, now),
    )
    # The API server took an unchanged one before.
    return built if built == cr.status else bounded(built)


def bounded(status: Status) -> Status:
    """The status with every text, list and map cut to what the schema takes: the API server would refuse all of it."""
    try:
        msgspec.json.decode(msgspec.json.encode(status), type=Status)
    except msgspec.ValidationError:
        cut: Status = _cut(status, inspect.type_info(Status))
        return cut
    return status


def with_internal_error(status: dict[str, Any], words: str, *, generation: int, now: float) -> dict[str, Any]:
    """A status, as the API server has it, that says that the operator itself has failed over its resource.

    It is not decoded, because that may be what fails. Unchanged where it says so already: saying it is no news.
    """
    message = (
        f"the operator itself failed over this resource ({words}); its groups are left as they are. Please report it with "
        "the traceback in the operator's log. It is tried again every minute, and at once when the spec changes"
    )
    before = {condition["type"]: condition for condition in status.get("conditions") or []}
    old = before.get("Stalled", {})
    new = {
        "type": "Stalled",
        "status": "True",
        "reason": "InternalError",
        "message": message,
        "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == "True" else timestamp(now),
        "observedGeneration": generation,
    }
    return status if new == old else status | {"conditions": list((before | {"Stalled": new}).values())}


def _cut(value: Any, kind: inspect.Type) -> Any:
    match kind:
        case inspect.Metadata():
            return _cut(value, kind.type)
        case inspect.UnionType():
            return value if value is None else _cut(value, next(t for t in kind.types if not _is_none(t)))
        case inspect.StrType(max_length=int(most)):
            return value if len(value) <= most else value[: most - 1] + "…"
        case inspect.ListType():
            return [_cut(item, kind.item_type) for item in value[: kind.max_length]]
        case inspect.DictType():
            return {key: _cut(item, kind.value_type) for key, item in list(value.items())[: kind.max_length]}
        case inspect.StructType():
            return replace(value, **{field.name: _cut(getattr(value, field.name), field.type) for field in kind.fields})
        case _:
            return value


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)


def _groups(entries: list[GroupStatus]) -> set[int]:
    """Indices: a group and its successor are one group."""
    return {entry.index for entry in entries}


def _ranks(current: list[GroupStatus], serving: list[GroupStatus], picture: Picture) -> list[int]:
    """Ranks (arrived, connected, loaded, ready) over all groups; of a group and its successor the one that serves."""
    totals = [0, 0, 0, 0]
    counted: set[int] = set()
    answering = {entry.incarnation for entry in serving}
    for entry in sorted(current, key=lambda e: (e.incarnation not in answering, bool(e.replaces))):
        objects = picture.incarnations.get(entry.incarnation)
        if not rollout.alive(entry) or objects is None or entry.index in counted:
            continue
        counted.add(entry.index)
        got = counts(objects, known=entry.stages, serving=entry.incarnation in answering)
        totals = [a + b for a, b in zip(totals, got, strict=True)]
    return totals


class _Finding(Struct, frozen=True):
    """A condition without its times."""

    type: str
    status: Literal["True", "False"]
    reason: str
    message: str


def _condition(kind: str, value: bool, reason: str, message: str) -> _Finding:  # noqa: FBT001
    return _Finding(kind, "True" if value else "False", reason, message)


def _accepted(errors: list[str]) -> _Finding:
    if errors:
        return _condition("Accepted", False, "Invalid", "; ".join(errors))
    return _condition("Accepted", True, "Valid", "the spec can be acted on")


def _available(cr: DataParallelDeployment, wanted: int, serving: list[GroupStatus]) -> _Finding:
    if not wanted:
        return _condition("Available", True, "NoGroupsWanted", "no group is wanted (replicas 0 or suspended)")
    least = max(1, wanted - rollout.limits(cr.spec.rollout, wanted).unavailable)
    count = len(_groups(serving))
    reason = "EnoughGroupsServe" if count >= least else "TooFewGroupsServe"
    return _condition("Available", count >= least, reason, f"{count} of {wanted} groups serve, at least {least} needed")


def _ready(
    cr: DataParallelDeployment,
    wanted: int,
    serving: list[GroupStatus],
    updated: list[GroupStatus],
    current: list[GroupStatus],
    errors: list[str],
) -> _Finding:
    if errors:
        return _condition("Ready", False, "Invalid", "; ".join(errors))
    if cr.spec.suspend:
        return _condition("Ready", False, "Suspended", "suspend is true: no group runs")
    if len(_groups(updated)) == wanted:
        groups = "the group serves" if wanted == 1 else f"all {wanted} groups serve"
        return _condition("Ready", True, "AllGroupsServe", f"{groups} the newest revision")
    words = [_group_words(entry) for entry in current if entry not in serving]
    coming = _groups([entry for entry in current if entry.replaces])
    old = [str(entry.index) for entry in serving if entry not in updated and entry.index not in coming]
    if old:
        due = "rollout.paused is true" if cr.spec.rollout.paused else "its replacement is due"
        words.append(f"group {', '.join(old)}: serves an older revision, {due}")
    reason = "GroupsWaiting" if any(entry.state == "Waiting" for entry in current) else "GroupsStarting"
    return _condition("Ready", False, reason, "; ".join(words) or "groups are about to be made")


def _group_words(entry: GroupStatus) -> str:
    words = f"group {entry.index}: "
    if entry.replaces and entry.state != "Stopping":
        words += f"{entry.replaces} serves until its successor is ready; successor "
    if entry.state == "Stopping":
        words += f"incarnation {entry.incarnation} is being taken away"
    elif entry.state == "Waiting" and entry.next_attempt_at:
        words += f"next attempt at {entry.next_attempt_at}"
    elif entry.state == "Waiting":
        words += "not tried again"
    else:
        words += entry.waiting_for or "starting"
    if entry.last_failures and entry.state != "Serving":
        last = entry.last_failures[0]
        rank = f"rank {last.rank}, " if last.rank is not None else ""
        words += f" (last failure: {rank}{last.reason}: {last.message})"
    return words


def _progressing(
    cr: DataParallelDeployment,
    wanted: int,
    updated: list[GroupStatus],
    entries: list[GroupStatus],
    held: list[GroupStatus],
    stuck: list[GroupStatus],
    refused: str,
    unasked: str,
) -> _Finding:
    if refused:
        return _condition("Progressing", False, "RevisionRefused", f"nothing was deleted: {refused}")
    if held or stuck:
        bad = held or stuck
        words = [f"group {e.index} failed {_times(e.restarts)} in the new revision" for e in bad]
        if bad[0].last_failures:
            words.append(f"last: {bad[0].last_failures[0].reason}: {bad[0].last_failures[0].message}")
        if held:
            words.append("the other groups keep the old revision")
        if any(rollout.given_up(e, cr.spec.failure_policy) for e in bad):
            words.append(f"it is not tried again, failurePolicy.maxRestarts is {cr.spec.failure_policy.max_restarts}")
        elif not held:
            words.append("it is tried again")
        words.append("correct the spec or roll it back")
        return _condition("Progressing", False, "RolloutStalled", "; ".join(words))
    missing = wanted - len(_groups(updated))
    if cr.spec.rollout.paused and missing:
        words_paused = f"rollout.paused is true: {missing} of {wanted} groups do not serve the newest revision"
        return _condition("Progressing", False, "RolloutPaused", words_paused)
    if unasked and missing > 0:
        words_unasked = (
            "nothing is deleted for the new revision before the API server was asked whether it takes its pods, and it "
            f"could not be asked so far: {unasked}"
        )
        return _condition("Progressing", True, "RevisionUnchecked", words_unasked)
    busy = [entry for entry in entries if entry.state in ("Starting", "Stopping")]
    if busy:
        names = ", ".join(f"group {entry.index} {entry.state.lower()}" for entry in busy)
        return _condition("Progressing", True, "GroupsChanging", names)
    if missing > 0:
        return _condition("Progressing", True, "GroupsWaiting", f"{missing} groups wait for an attempt")
    return _condition("Progressing", False, "RolloutComplete", "nothing is changing")


def _degraded(current: list[GroupStatus]) -> _Finding:
    bad = [entry for entry in current if entry.restarts >= _DEGRADED_FROM]
    if bad:
        return _condition("Degraded", True, "RepeatedFailures", "; ".join(_repeated(entry) for entry in bad))
    return _condition("Degraded", False, "AsExpected", "no group fails repeatedly")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _repeated(entry: GroupStatus) -> str:
    words = f"group {entry.index} failed {entry.restarts} times in a row"
    if entry.node_failures:
        node, count = max(entry.node_failures.items(), key=lambda item: item[1])
        if count > 1:
            words += f"; {node} failed first in {count} of {entry.restarts} attempts"
    return words


def _stalled(
    cr: DataParallelDeployment, current: list[GroupStatus], picture: Picture, errors: list[str], refused: str
) -> _Finding:
    if errors:
        return _condition("Stalled", True, "Invalid", "; ".join(errors))
    if refused:
        return _condition("Stalled", True, "RevisionRefused", refused)
    if picture.obstacles:
        words = [f"{kind} {name}: {obstacle.message}" for (kind, name), obstacle in picture.obstacles.items()]
        taken = any(obstacle.reason == "NameTaken" for obstacle in picture.obstacles.values())
        return _condition("Stalled", True, "NameTaken" if taken else "ObjectRefused", "; ".join(words))
    over = [e for e in current if rollout.given_up(e, cr.spec.failure_policy)]
    if over:
        limit = cr.spec.failure_policy.max_restarts
        words = [f"group {e.index} failed {_times(e.restarts)}, failurePolicy.maxRestarts is {limit}" for e in over]
        words.append(f"change the spec, or set annotation {naming.ANNOTATION_RESTART} to a new value")
        return _condition("Stalled", True, "TooManyRestarts", "; ".join(words))
    return _condition("Stalled", False, "AsExpected", "no person is needed")


def _serving_stalled(cr: DataParallelDeployment, current: list[GroupStatus], picture: Picture) -> _Finding:
    """Only reported: whether a replacement helps is for a person to say."""
    limit_s = cr.spec.failure_policy.stalled_seconds
    words = []
    for entry in current:
        objects = picture.incarnations.get(entry.incarnation)
        text = stalled(objects, limit_s=limit_s)[0] if objects and entry.state == "Serving" else ""
        if text:
            words.append(f"group {entry.index}: {text}")
    if words:
        return _condition("ServingStalled", True, "NoTokens", "; ".join(words))
    return _condition("ServingStalled", False, "AsExpected", "no group has requests without making tokens")


def _drain_blocked(cr: DataParallelDeployment, picture: Picture, entries: list[GroupStatus], wanted: int) -> _Finding:
    found = disruption.blocked(cr, picture, entries, wanted=wanted)
    if found:
        return _condition("DrainBlocked", True, *found)
    return _condition("DrainBlocked", False, "AsExpected", "no node that is being emptied waits for a group")


def installed_version(entries: list[GroupStatus], revision: str, token: str) -> str | None:
    """Version that launchers found in the image of this revision, if any has looked since a restart was asked for."""
    found = [e.engine_version for e in entries if e.engine_version and not rollout.outdated(e, revision, token)]
    return min(found, key=versions.order) if found else None


def _version_assumed(cr: DataParallelDeployment, installed: str | None) -> _Finding:
    version = versions.known(cr.spec)
    if installed:
        differs = cr.spec.engine.version and versions.parse(cr.spec.engine.version) != versions.order(installed)[:2]
        said = f"; engine.version says {cr.spec.engine.version}, the image decides" if differs else ""
        return _condition("VersionAssumed", False, "VersionKnown", f"vLLM {installed}, found in the image{said}")
    if version:
        return _condition("VersionAssumed", False, "VersionKnown", f"vLLM {version}")
    return _condition(
        "VersionAssumed",
        True,
        "NewestAssumed",
        f"the image does not tell its vLLM version: {versions.NEWEST_KNOWN} is assumed; write engine.version if it differs",
    )


def _with_times(findings: list[_Finding], cr: DataParallelDeployment, now: float) -> list[Condition]:
    before = {condition.type: condition for condition in cr.status.conditions}
    result = []
    for found in findings:
        old = before.get(found.type)
        at = old.last_transition_time if old and old.status == found.status else timestamp(now) or ""
        result.append(
            Condition(
                type=found.type,
                status=found.status,
                reason=found.reason,
                message=found.message,
                last_transition_time=at,
                observed_generation=cr.metadata.generation,
            )
        )
    return result
