"""Check-in and common release: a pure state machine.

Every launcher checks in and waits. Once every pod of the plan has checked in, all are released at once, and from
then on a pod may not start a second time: its engine took part in a handshake that cannot be repeated
(vLLM data-parallel ranks never rejoin), so a second launcher is refused and the restart is told to the operator.
"""

from __future__ import annotations

from msgspec import Struct, field

from dp_handshake.addresses import canonical
from dp_handshake.messages import CheckIn, CheckInReply, LaunchPlan, PodRestarted
from dp_handshake.places import Place, places

MAX_RESTARTED = 16
MAX_NAMED = 32


class Roster(Struct, kw_only=True):
    """Who belongs to the incarnation and who has checked in."""

    incarnation: str
    places: dict[str, Place]
    arrived: dict[str, CheckIn] = field(default_factory=dict)
    released_at: float | None = None
    restarted: list[PodRestarted] = field(default_factory=list)

    @property
    def head_pod(self) -> str:
        return next(iter(self.places))


def roster(plan: LaunchPlan) -> Roster:
    """Begin with nobody checked in."""
    return Roster(incarnation=plan.incarnation, places={place.pod: place for place in places(plan)})


def missing_pods(state: Roster, *, limit: int = MAX_NAMED) -> list[str]:
    """Name the pods that have not checked in, by rank, at most `limit` of them."""
    names: list[str] = []
    for pod in state.places:
        if pod not in state.arrived:
            names.append(pod)
            if len(names) == limit:
                break
    return names


def check_in(state: Roster, message: CheckIn, *, now: float) -> CheckInReply:
    """Take one check-in (or the next poll of a waiting launcher) and say what the launcher shall do."""
    refusal = _refusal(state, message, now=now)
    if refusal:
        return CheckInReply(state="refused", arrived=len(state.arrived), expected=len(state.places), message=refusal)
    state.arrived[message.pod] = message
    if state.released_at is None and len(state.arrived) == len(state.places):
        state.released_at = now
    return reply(state)


def reply(state: Roster) -> CheckInReply:
    """Answer a launcher that has checked in."""
    arrived, expected = len(state.arrived), len(state.places)
    if state.released_at is not None:
        return CheckInReply(
            state="released", head_ip=state.arrived[state.head_pod].ip, arrived=arrived, expected=expected
        )
    named = missing_pods(state, limit=8)
    more = expected - arrived - len(named)
    names = ", ".join(named) + (f" and {more} more" if more else "")
    return CheckInReply(
        state="waiting",
        arrived=arrived,
        expected=expected,
        message=f"waiting for {expected - arrived} of {expected} pods: {names}",
    )


def _refusal(state: Roster, message: CheckIn, *, now: float) -> str:
    if message.incarnation != state.incarnation:
        return (
            f"this is incarnation {state.incarnation}, the pod belongs to {message.incarnation}: "
            "it is left over from an earlier attempt"
        )
    place = state.places.get(message.pod)
    if place is None:
        return f"pod {message.pod} is not in the launch plan of incarnation {state.incarnation}"
    if (message.role, message.first_rank, message.ranks) != (place.role, place.first_rank, place.ranks):
        return (
            f"pod {message.pod} says it is a {message.role} with {message.ranks} ranks from {message.first_rank} on; "
            f"the plan says a {place.role} with {place.ranks} ranks from {place.first_rank} on"
        )
    if canonical(message.ip) is None:
        return f"pod {message.pod} gives {message.ip!r} as its address, which is not an IP address"
    if state.released_at is None or state.arrived[message.pod].launch == message.launch:
        return ""
    text = (
        f"pod {message.pod} started again {now - state.released_at:.0f} s after the group was released: its engine is "
        "gone, and a data-parallel rank cannot rejoin; the whole group has to be replaced"
    )
    if all(entry.pod != message.pod for entry in state.restarted):
        state.restarted = [*state.restarted, PodRestarted(time=now, pod=message.pod, message=text)][-MAX_RESTARTED:]
    return text
