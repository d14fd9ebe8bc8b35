"""What the status says fits the schema, outlives an operator's restart, and names what is missing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dp_handshake.messages import Stages, Stall
from dp_operator import api, naming
from dp_operator.status import bounded
from tests.unit.operator.world import World

TEXT = st.integers(0, 5000).map(lambda length: "ä€𝄞x" * (length // 4))
FAILURES = st.builds(
    api.Failure,
    reason=TEXT,
    time=st.just("2026-01-01T00:00:00Z"),
    incarnation=TEXT,
    pod=TEXT,
    node=TEXT,
    signal=TEXT,
    message=TEXT,
    first_error_lines=TEXT,
    log_tail=TEXT,
)
GROUPS = st.builds(
    api.GroupStatus,
    incarnation=TEXT,
    index=st.integers(0, 63),
    revision=TEXT,
    head_pod=TEXT,
    engine_version=TEXT,
    waiting_for=TEXT,
    restart_token=TEXT,
    replaces=TEXT,
    last_failures=st.lists(FAILURES, max_size=5),
    node_failures=st.dictionaries(st.text(max_size=9), st.integers(0, 9), max_size=12),
    stages=st.builds(api.Stages, arrived=TEXT, ready=TEXT),
)
CONDITIONS = st.builds(
    api.Condition,
    type=TEXT,
    status=st.just("True"),
    reason=TEXT,
    message=TEXT,
    last_transition_time=st.just("2026-01-01T00:00:00Z"),
)


def fits(status: api.Status) -> api.Status:
    """Raises where the schema would not take it."""
    return msgspec.json.decode(msgspec.json.encode(status), type=api.Status)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        api.Status,
        selector=TEXT,
        groups=st.lists(GROUPS, max_size=3),
        conditions=st.lists(CONDITIONS, max_size=20),
    )
)
def test_a_full_status_fits_the_schema(status):
    assert fits(bounded(status))


def test_a_status_that_fits_is_left_as_it_is():
    world = World()
    world.make_ready()
    assert bounded(world.cr.status) is world.cr.status


def test_a_pod_removed_with_a_very_long_reason_still_gives_a_status_that_fits():
    world = World()
    incarnation = world.make_ready()
    world.pod(f"web-0-{incarnation}-w-1")["status"] |= {"phase": "Failed", "reason": "R" * 300, "message": "m" * 5000}
    world.reconcile()
    assert fits(world.cr.status)
    failure = world.cr.status.groups[0].last_failures[0]
    assert (len(failure.reason), len(failure.message)) == (64, 1024)
    assert failure.message.endswith("…")


def test_a_very_long_restart_annotation_restarts_once():
    world = World()
    world.make_ready()
    world.annotate(naming.ANNOTATION_RESTART, "x" * 300)
    decided = world.reconcile()
    fits(decided.status)
    world.kubelets_finish_deleting()
    incarnation = world.make_ready()
    fits(world.cr.status)
    world.now += 10
    world.reconcile()
    assert world.entry().incarnation == incarnation
    assert world.condition("Ready").status == "True"
    world.annotate(naming.ANNOTATION_RESTART, "x" * 299 + "y")
    world.reconcile()
    assert [e.state for e in world.cr.status.groups] == ["Stopping"], "tokens that differ at the end are different"


def test_an_events_note_is_cut_by_bytes():
    world = World()
    incarnation = world.make_ready()
    world.pod(f"web-0-{incarnation}-w-1")["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "€" * 2000}
    (event,) = [e for e in world.plan().events if e.reason == "GroupFailed"]
    assert 1000 < len(event.note.encode()) <= 1024


def test_a_requested_restart_is_not_called_a_changed_spec():
    world = World()
    world.make_ready()
    world.annotate(naming.ANNOTATION_RESTART, "now")
    (event,) = [e for e in world.plan().events if e.reason == "GroupReplaced"]
    assert "restart requested" in event.note
    world = World()
    world.make_ready()
    world.change_spec(engine={"image": "vllm/vllm-openai:v0.33.0"})
    (event,) = [e for e in world.plan().events if e.reason == "GroupReplaced"]
    assert "spec changed" in event.note


def starting(world: World) -> str:
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    world.relay_says(incarnation, stages=Stages(arrived="0-3", connected="0-2"))
    world.reconcile()
    return incarnation


def test_an_operator_that_has_just_begun_says_of_a_starting_group_what_is_known_of_it():
    world = World()
    incarnation = starting(world)
    before = world.entry()
    assert "rank 3" in before.waiting_for
    ranks = world.cr.status.ranks
    world.snapshots.clear()
    world.now += 1
    world.reconcile()
    assert world.entry() == before
    assert world.cr.status.ranks == ranks
    world.monitor_errors[incarnation] = "monitor at 198.18.101.1:9000: refused"
    world.reconcile()
    words = world.entry().waiting_for
    assert words == f"MonitorUnreachable: monitor at 198.18.101.1:9000: refused; {before.waiting_for}"
    world.reconcile()
    assert world.entry().waiting_for == words, "said once"
    world.monitor_errors.clear()
    world.reconcile()
    assert world.entry() == before


def test_a_monitor_that_cannot_be_reached_before_the_release_is_said_after_some_patience():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    head = world.pod(f"web-0-{incarnation}-head")
    head["status"]["initContainerStatuses"] = [
        {"name": "relay", "state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}}}
    ]
    world.monitor_errors[incarnation] = "monitor at 198.18.101.1:9000: refused"
    decided = world.reconcile()
    assert "MonitorUnreachable" not in world.entry().waiting_for
    world.now = decided.look_again_at
    world.reconcile()
    assert world.entry().waiting_for.startswith("MonitorUnreachable: monitor at 198.18.101.1:9000: refused; 0 of 4")
    assert world.entry().state == "Starting"


@pytest.mark.parametrize("missing", [["web-0-{}-w-1"]])
def test_a_list_of_arrived_ranks_that_had_to_be_cut_does_not_make_every_pod_a_missing_one(missing):
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    names = [name.format(incarnation) for name in missing]
    world.relay_says(incarnation, stages=Stages(arrived="0-1,…+1"), missing_pods=names, arrived_pods=0, expected_pods=4)
    world.reconcile()
    words = world.entry().waiting_for
    assert words.startswith("3 of 4 ranks arrived; waiting for rank 2 (pod ")
    assert f"web-0-{incarnation}-w-0" not in words
    assert "and 3 more pods" in words


def test_conditions_are_cut_with_a_mark():
    world = World()
    world.errors = ["e" * 3000]
    world.reconcile()
    message = world.condition("Stalled").message
    assert (len(message), message[-1]) == (2048, "…")
    assert replace(world.cr.status, groups=[]).conditions


def test_requests_without_tokens_are_reported_with_rank_and_pod_and_replace_nothing():
    world = World(failurePolicy={"stalledSeconds": 60})
    incarnation = world.make_ready()
    since = world.now
    world.relay_says(incarnation, stalls=[Stall(rank=1, since=since), Stall(rank=3, since=since + 50)])
    world.reconcile()
    assert world.condition("ServingStalled").status == "False", "not for long yet"
    due = world.reconcile().look_again_at
    assert due is not None
    world.now = max(due, since + 61)
    world.relay_says(incarnation)
    world.reconcile()
    found = world.condition("ServingStalled")
    assert (found.status, found.reason) == ("True", "NoTokens")
    assert found.message == (
        f"group 0: rank 1 (pod web-0-{incarnation}-w-0 on n1): requests run and no token has come for over 1 min"
    )
    writes = world.status_writes
    for _ in range(50):
        world.now += 1
        world.relay_says(incarnation)
        world.reconcile()
    assert world.status_writes <= writes + 1, "rank 3 joins it, and nothing else is written"
    world.now += 4000
    world.relay_says(incarnation)
    world.reconcile()
    assert "ranks 1,3 (pods" in world.condition("ServingStalled").message
    assert "over 1 h" in world.condition("ServingStalled").message
    assert world.entry().incarnation == incarnation
    assert world.condition("Ready").status == "True"
    world.relay_says(incarnation, stalls=[])
    world.reconcile()
    assert world.condition("ServingStalled").status == "False"
