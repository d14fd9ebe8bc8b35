from __future__ import annotations

from dp_handshake import admission
from dp_handshake.admission import Gate


def test_a_stranger_is_turned_away_before_it_can_take_an_identity() -> None:
    assert admission.request(Gate(capacity={"10.0.0.2": 1}), ticket=1, address="10.0.0.9", now=0) == "refuse"


def test_a_rank_that_reconnects_waits_until_its_stale_connection_is_gone() -> None:
    state = Gate(capacity={"10.0.0.2": 1})
    admission.accepted(state, 7, "10.0.0.2")
    assert admission.request(state, ticket=1, address="10.0.0.2", now=0) == "admit"
    admission.accepted(state, 8, "10.0.0.2")
    assert admission.request(state, ticket=2, address="10.0.0.2", now=10) == "hold"
    assert admission.due(state, now=11) == []
    admission.closed(state, 7)
    assert admission.due(state, now=12) == [2]
    assert admission.due(state, now=13) == []


def test_all_ranks_of_a_pod_get_in_at_once() -> None:
    state = Gate(capacity={"10.0.0.2": 4})
    for descriptor in range(4):
        admission.accepted(state, descriptor, "10.0.0.2")
    verdicts = [admission.request(state, ticket=n, address="10.0.0.2", now=0) for n in range(4)]
    assert verdicts == ["admit"] * 4


def test_nobody_waits_longer_than_heartbeats_need() -> None:
    state = Gate(capacity={"10.0.0.2": 1})
    admission.accepted(state, 7, "10.0.0.2")
    admission.accepted(state, 8, "10.0.0.2")
    assert admission.request(state, ticket=2, address="10.0.0.2", now=100) == "hold"
    assert admission.due(state, now=119) == []
    assert admission.due(state, now=120) == [2]


def test_a_reused_descriptor_counts_once() -> None:
    state = Gate(capacity={"10.0.0.2": 1, "10.0.0.3": 1})
    admission.accepted(state, 7, "10.0.0.2")
    admission.accepted(state, 7, "10.0.0.3")
    admission.closed(state, 99)
    assert state.counts == {"10.0.0.3": 1}
