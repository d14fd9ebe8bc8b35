"""How many groups may be changed at once, and whether the newest revision is any good. Pure.

Numbers are groups, never pods. Percentages of maxSurge are rounded up and those of maxUnavailable down, as in a
Deployment; if both come out as 0, one group may be unavailable, because nothing could ever change otherwise.

With surge a group has two entries in the ledger for a while: the one that serves, and its successor, whose `replaces`
names it. The successor takes over once it is ready; until then it counts towards maxSurge, whatever its state.
"""

from __future__ import annotations

from typing import NamedTuple

from dp_operator.api import FailurePolicy, GroupStatus, Rollout
from dp_operator.observe import Picture

_STALLED_FROM = 3  # charged failures in a row of a group whose revision works elsewhere


class Limits(NamedTuple):
    """Groups beyond and below the wanted number."""

    surge: int
    unavailable: int


def limits(rollout: Rollout, wanted: int) -> Limits:
    """The two limits in groups."""
    surge = _share(rollout.max_surge, wanted, up=True)
    unavailable = _share(rollout.max_unavailable, wanted, up=False)
    return Limits(surge, unavailable if surge or unavailable else 1)


def _share(value: int | str, whole: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    part = int(value.removesuffix("%")) * whole
    return -(-part // 100) if up else part // 100


def outdated(entry: GroupStatus, revision: str, token: str) -> bool:
    """Whether an incarnation is of another revision, or from before a requested restart."""
    return entry.revision != revision or entry.restart_token != token


def available(entry: GroupStatus, picture: Picture) -> bool:
    """Whether an incarnation answers clients now. A ready head does, even before the ledger calls it Serving."""
    objects = picture.incarnations.get(entry.incarnation)
    return alive(entry) and objects is not None and objects.serves


def alive(entry: GroupStatus) -> bool:
    return entry.state in ("Starting", "Serving")


def successors(entries: list[GroupStatus]) -> dict[str, GroupStatus]:
    """Incarnation that still serves -> the entry that is to take over from it."""
    return {entry.replaces: entry for entry in entries if entry.replaces and entry.state != "Stopping"}


def holding_up(entries: list[GroupStatus], picture: Picture, revision: str, token: str) -> list[GroupStatus]:
    """Groups whose failures in the newest revision stop a rollout; empty while nothing speaks against it.

    One charged failure is enough where the revision has not served anywhere yet. Where it has, a single group has to
    fail repeatedly: then it is rather the group's node.
    """
    if not any(alive(entry) and outdated(entry, revision, token) for entry in entries):
        return []
    newest = [entry for entry in entries if not outdated(entry, revision, token)]
    proven = any(available(entry, picture) for entry in newest)
    return _failing(newest, picture, least=_STALLED_FROM if proven else 1)


def stuck(
    entries: list[GroupStatus], picture: Picture, revision: str, token: str, policy: FailurePolicy
) -> list[GroupStatus]:
    """Groups that keep the newest revision from serving everywhere, although they are tried again, or are given up.

    Where the revision has not served anywhere, one charged failure is enough, unless another group's first attempt is
    under way and may yet show that it works. Where it has, a failure is first of all a reason to try again.
    """
    newest = [entry for entry in entries if not outdated(entry, revision, token)]
    proven = any(entry.served or available(entry, picture) for entry in newest)
    undecided = any(alive(entry) and not entry.restarts for entry in newest)
    failing = _failing(newest, picture, least=_STALLED_FROM if proven or undecided else 1)
    return failing + [entry for entry in newest if entry not in failing and given_up(entry, policy)]


def given_up(entry: GroupStatus, policy: FailurePolicy) -> bool:
    """Whether a group of the newest revision is tried again only after a person has changed something."""
    return entry.state == "Waiting" and policy.max_restarts is not None and entry.restarts > policy.max_restarts


def _failing(newest: list[GroupStatus], picture: Picture, *, least: int) -> list[GroupStatus]:
    return [entry for entry in newest if entry.restarts >= least and not available(entry, picture)]
