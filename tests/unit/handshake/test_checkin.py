from __future__ import annotations

from typing import Any

import pytest

from dp_handshake import checkin
from dp_handshake.checkin import Roster
from dp_handshake.messages import CheckIn, LaunchPlan, WorkerSet
from dp_handshake.places import places


def plan(**changes: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "name": "g",
        "group": 0,
        "incarnation": "abc12",
        "size": 6,
        "size_local": 2,
        "load_balancing": "Internal",
        "head_placement": "Colocated",
        "architecture": "Dense",
        "head_pod": "g-head",
        "workers": [WorkerSet(name="g-w", replicas=2, first_rank=2, rank_stride=2)],
        "monitor_host": "10.96.0.1",
        "rpc_port": 13345,
        "api_port": 8000,
        "head_argv": [],
        "worker_argv": [],
    }
    return LaunchPlan(**{**fields, **changes})


def message(state: Roster, pod: str, **changes: Any) -> CheckIn:
    place = state.places.get(pod) or state.places["g-w-0"]
    fields: dict[str, Any] = {
        "incarnation": "abc12",
        "pod": pod,
        "ip": "10.0.0.9",
        "launch": "one",
        "role": place.role,
        "first_rank": place.first_rank,
        "ranks": place.ranks,
    }
    return CheckIn(**{**fields, **changes})


def released() -> Roster:
    state = checkin.roster(plan())
    for pod in state.places:
        checkin.check_in(state, message(state, pod, ip="10.0.0.1" if pod == "g-head" else "10.0.0.9"), now=5)
    return state


def test_all_are_released_when_the_last_pod_arrives_and_learn_the_heads_address() -> None:
    """The address comes from the head of this incarnation, never from a name that may be stale.

    ai-dynamo/dynamo PR#7954.
    """
    state = checkin.roster(plan())
    first = checkin.check_in(state, message(state, "g-w-1"), now=1)
    assert (first.state, first.arrived, first.expected) == ("waiting", 1, 3)
    assert first.message == "waiting for 2 of 3 pods: g-head, g-w-0"
    assert checkin.check_in(state, message(state, "g-head", ip="fd00::7"), now=2).state == "waiting"
    last = checkin.check_in(state, message(state, "g-w-0"), now=3)
    assert (last.state, last.head_ip, state.released_at) == ("released", "fd00::7", 3)
    assert checkin.reply(state).state == "released"


def test_a_container_that_restarts_while_others_are_missing_just_takes_its_place() -> None:
    state = checkin.roster(plan())
    checkin.check_in(state, message(state, "g-w-1"), now=1)
    again = checkin.check_in(state, message(state, "g-w-1", launch="two", ip="10.0.0.10"), now=2)
    assert (again.state, again.arrived, state.restarted) == ("waiting", 1, [])
    assert state.arrived["g-w-1"].ip == "10.0.0.10"


def test_the_same_launcher_may_ask_again_after_the_release() -> None:
    state = released()
    assert checkin.check_in(state, message(state, "g-w-0"), now=9).state == "released"
    assert state.restarted == []


def test_a_container_that_restarts_after_the_release_is_refused_and_told_once() -> None:
    """It could only reach a head that is gone, or be a second rank of its number.

    ai-dynamo/dynamo PR#7954, ai-dynamo/dynamo#5001.
    """
    state = released()
    for now in (42, 50):
        reply = checkin.check_in(state, message(state, "g-w-0", launch=f"at {now}"), now=now)
        assert reply.state == "refused"
    assert "started again" in reply.message
    assert [(entry.pod, entry.time) for entry in state.restarted] == [("g-w-0", 42)]
    assert "37 s after the group was released" in state.restarted[0].message
    assert checkin.check_in(state, message(state, "g-w-0"), now=51).state == "released"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"incarnation": "old99"}, "left over from an earlier attempt"),
        ({"pod": "g-w-2"}, "not in the launch plan"),
        ({"first_rank": 4}, "the plan says"),
        ({"ranks": 1}, "the plan says"),
        ({"role": "head"}, "the plan says"),
        ({"ip": "node-7"}, "not an IP address"),
    ],
)
def test_a_pod_that_does_not_fit_the_plan_is_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    state = checkin.roster(plan())
    pod = changes.pop("pod", "g-w-0")
    reply = checkin.check_in(state, message(state, pod, **changes), now=1)
    assert reply.state == "refused"
    assert words in reply.message
    assert state.arrived == {}


def test_places_follow_ordinals_strides_and_head_placement() -> None:
    slots = [
        WorkerSet(name="g-s0", replicas=2, first_rank=0, rank_stride=2, ordinal_start=1),
        WorkerSet(name="g-s1", replicas=3, first_rank=1, rank_stride=2),
    ]
    found = places(plan(size=6, size_local=1, workers=slots))
    assert [(place.pod, place.first_rank) for place in found] == [
        ("g-head", 0),
        ("g-s1-0", 1),
        ("g-s0-1", 2),
        ("g-s1-1", 3),
        ("g-s0-2", 4),
        ("g-s1-2", 5),
    ]
    dedicated = places(plan(head_placement="Dedicated"))
    assert (dedicated[0].pod, list(dedicated[0].rank_range)) == ("g-head", [])


def test_thousands_of_missing_pods_are_named_in_a_bounded_message() -> None:
    state = checkin.roster(
        plan(size=4096, size_local=1, workers=[WorkerSet(name="g-w", replicas=4095, first_rank=1, rank_stride=1)])
    )
    reply = checkin.check_in(state, message(state, "g-head"), now=1)
    assert reply.message.endswith("g-w-6, g-w-7 and 4087 more")
    assert len(checkin.missing_pods(state)) == checkin.MAX_NAMED
