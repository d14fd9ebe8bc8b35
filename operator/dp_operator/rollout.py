"""How many groups may be changed at once, and whether the newest revision is any good. Pure.

Numbers are groups, never pods. Percentages of maxSurge are rounded up and those of maxUnavailable down, as in a
Deployment; if both come out as 0, one group may be unavailable, because nothing could ever change otherwise.

With surge a group has two entries in the ledger for a while: the one that serves, and its successor, whose `replaces`
names it. The successor takes over once it is ready; until then it counts towards maxSurge, whatever its state.
"""

from __future__ import annotations

from typing import NamedTuple

from dp_operator.api import GroupStatus, Rollout
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
    least = _STALLED_FROM if proven else 1
    return [entry for entry in newest if entry.restarts >= least and not available(entry, picture)]
