"""The status of a custom resource, from its ledger and what is observed. Pure.

Decisions are never read from conditions; they are for people, `kubectl wait` and kstatus.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from dp_operator import naming, versions
from dp_operator.api import Condition, DataParallelDeployment, GroupStatus, Ranks, Stages, Status
from dp_operator.observe import Picture, timestamp
from dp_operator.waiting import counts

_DEGRADED_FROM = 3  # charged failures in a row
_MESSAGE_MAX = 2048


def is_progress(before: Status, after: Status) -> bool:
    """Whether the two differ only in what people watch: no decision and no client depends on it."""
    return _without_progress(before) == _without_progress(after)


def _without_progress(status: Status) -> Status:
    groups = [
        replace(entry, scheduled_at=None, head_node="", stages=Stages(), waiting_for="") for entry in status.groups
    ]
    conditions = [replace(condition, message="") for condition in status.conditions]
    return replace(status, ranks=Ranks(), groups=groups, conditions=conditions)


def build(
    cr: DataParallelDeployment,
    picture: Picture,
    entries: list[GroupStatus],
    *,
    wanted: int,
    revision: str,
    errors: list[str],
    now: float,
) -> Status:
    """Summarise. Every known condition type is set from the first sight on."""
    size = cr.spec.data_parallel.size
    current = [entry for entry in entries if entry.index < wanted]
    serving = [entry for entry in current if _serves(entry, picture)]
    updated = [entry for entry in serving if entry.revision == revision]
    totals = [0, 0, 0, 0]
    for entry in current:
        if entry.state not in ("Starting", "Serving"):
            continue
        objects = picture.incarnations.get(entry.incarnation)
        if objects is None:
            continue
        got = counts(objects, serving=entry in serving)
        totals = [a + b for a, b in zip(totals, got, strict=True)]
    expected = wanted * size
    ranks = Ranks(
        expected=expected,
        arrived=totals[0],
        connected=totals[1],
        loaded=totals[2],
        ready=totals[3],
        summary=f"{totals[3]}/{expected}",
    )
    conditions = [
        _accepted(errors),
        _available(wanted, serving),
        _ready(cr, wanted, serving, updated, current, errors),
        _progressing(wanted, updated, entries),
        _degraded(current),
        _stalled(cr, current, picture, errors),
        _version_assumed(cr, current, revision),
    ]
    return Status(
        observed_generation=cr.metadata.generation,
        selector=naming.selector(cr),
        replicas=len([entry for entry in entries if entry.state != "Waiting"]),
        ready_replicas=len(serving),
        updated_replicas=len([e for e in current if e.revision == revision and e.state in ("Starting", "Serving")]),
        available_replicas=len(serving),
        ranks=ranks,
        groups=entries,
        conditions=_with_times(conditions, cr, now),
    )


def _serves(entry: GroupStatus, picture: Picture) -> bool:
    objects = picture.incarnations.get(entry.incarnation)
    return entry.state == "Serving" and objects is not None and objects.serves


def _condition(kind: str, value: bool | None, reason: str, message: str) -> Condition:  # noqa: FBT001
    state: Literal["True", "False", "Unknown"] = "Unknown" if value is None else "True" if value else "False"
    if len(message) > _MESSAGE_MAX:
        message = message[: _MESSAGE_MAX - 1] + "…"
    return Condition(type=kind, status=state, reason=reason, message=message, last_transition_time="")


def _accepted(errors: list[str]) -> Condition:
    if errors:
        return _condition("Accepted", False, "Invalid", "; ".join(errors))
    return _condition("Accepted", True, "Valid", "the spec can be acted on")


def _available(wanted: int, serving: list[GroupStatus]) -> Condition:
    if not wanted:
        return _condition("Available", True, "NoGroupsWanted", "no group is wanted (replicas 0 or suspended)")
    least = max(1, wanted - 1)
    enough = len(serving) >= least
    reason = "EnoughGroupsServe" if enough else "TooFewGroupsServe"
    return _condition("Available", enough, reason, f"{len(serving)} of {wanted} groups serve, at least {least} needed")


def _ready(
    cr: DataParallelDeployment,
    wanted: int,
    serving: list[GroupStatus],
    updated: list[GroupStatus],
    current: list[GroupStatus],
    errors: list[str],
) -> Condition:
    if errors:
        return _condition("Ready", False, "Invalid", "; ".join(errors))
    if cr.spec.suspend:
        return _condition("Ready", False, "Suspended", "suspend is true: no group runs")
    if len(updated) == wanted:
        groups = "the group serves" if wanted == 1 else f"all {wanted} groups serve"
        return _condition("Ready", True, "AllGroupsServe", f"{groups} the newest revision")
    words = [_group_words(entry) for entry in current if entry not in serving]
    old = [str(entry.index) for entry in serving if entry not in updated]
    if old:
        words.append(f"group {', '.join(old)}: serves an older revision, its replacement is due")
    reason = "GroupsWaiting" if any(entry.state == "Waiting" for entry in current) else "GroupsStarting"
    return _condition("Ready", False, reason, "; ".join(words) or "groups are about to be made")


def _group_words(entry: GroupStatus) -> str:
    words = f"group {entry.index}: "
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


def _progressing(wanted: int, updated: list[GroupStatus], entries: list[GroupStatus]) -> Condition:
    busy = [entry for entry in entries if entry.state in ("Starting", "Stopping")]
    if busy:
        names = ", ".join(f"group {entry.index} {entry.state.lower()}" for entry in busy)
        return _condition("Progressing", True, "GroupsChanging", names)
    if len(updated) < wanted:
        return _condition("Progressing", True, "GroupsWaiting", f"{wanted - len(updated)} groups wait for an attempt")
    return _condition("Progressing", False, "RolloutComplete", "nothing is changing")


def _degraded(current: list[GroupStatus]) -> Condition:
    bad = [entry for entry in current if entry.restarts >= _DEGRADED_FROM]
    if bad:
        words = [f"group {e.index} failed {e.restarts} times in a row" for e in bad]
        return _condition("Degraded", True, "RepeatedFailures", "; ".join(words))
    return _condition("Degraded", False, "AsExpected", "no group fails repeatedly")


def _stalled(cr: DataParallelDeployment, current: list[GroupStatus], picture: Picture, errors: list[str]) -> Condition:
    if errors:
        return _condition("Stalled", True, "Invalid", "; ".join(errors))
    if picture.strangers:
        words = [f"{kind} {name}: {why}" for (kind, name), why in picture.strangers.items()]
        return _condition("Stalled", True, "NameTaken", "; ".join(words))
    limit = cr.spec.failure_policy.max_restarts
    if limit is not None:
        over = [e for e in current if e.state == "Waiting" and e.restarts > limit]
        if over:
            words = [f"group {e.index} failed {e.restarts} times, failurePolicy.maxRestarts is {limit}" for e in over]
            words.append(f"change the spec, or set annotation {naming.ANNOTATION_RESTART} to a new value")
            return _condition("Stalled", True, "TooManyRestarts", "; ".join(words))
    return _condition("Stalled", False, "AsExpected", "no person is needed")


def installed_version(entries: list[GroupStatus], revision: str) -> str | None:
    """Version that launchers found in the image of this revision, if any has looked yet."""
    found = [entry.engine_version for entry in entries if entry.revision == revision and entry.engine_version]
    return min(found, key=versions.order) if found else None


def _version_assumed(cr: DataParallelDeployment, current: list[GroupStatus], revision: str) -> Condition:
    version = versions.known(cr.spec)
    installed = installed_version(current, revision)
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


def _with_times(conditions: list[Condition], cr: DataParallelDeployment, now: float) -> list[Condition]:
    before = {condition.type: condition for condition in cr.status.conditions}
    result = []
    for condition in conditions:
        old = before.get(condition.type)
        at = old.last_transition_time if old and old.status == condition.status else timestamp(now) or ""
        result.append(replace(condition, last_transition_time=at, observed_generation=cr.metadata.generation))
    return result
