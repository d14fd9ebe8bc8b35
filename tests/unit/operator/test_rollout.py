"""Limits in groups, successors, pauses, refusals and nodes that are emptied, moment by moment."""

from __future__ import annotations

import msgspec
import pytest

from dp_operator import api, naming, rollout
from dp_operator.observe import Node, timestamp
from tests.unit.operator.world import World

NEWER = {"image": "vllm/vllm-openai:v0.33.0"}


def serving(groups: int, **spec: object) -> World:
    world = World(replicas=groups, **spec)
    world.reconcile()
    for index in range(groups):
        world.make_ready(index)
    world.take_log()
    return world


def states(world: World) -> list[tuple[int, str]]:
    return [(e.index, e.state) for e in world.cr.status.groups]


@pytest.mark.parametrize(
    ("surge", "unavailable", "wanted", "expected"),
    [
        (0, 1, 4, (0, 1)),
        ("25%", "25%", 4, (1, 1)),
        ("10%", "10%", 4, (1, 0)),
        (0, "10%", 4, (0, 1)),
        ("50%", "50%", 3, (2, 1)),
        ("100%", 0, 2, (2, 0)),
    ],
)
def test_percentages_of_surge_round_up_and_of_unavailability_down_and_something_can_always_change(
    surge, unavailable, wanted, expected
):
    assert rollout.limits(api.Rollout(max_surge=surge, max_unavailable=unavailable), wanted) == expected


def test_a_percentage_takes_several_groups_at_once_and_never_more():
    world = serving(4, rollout={"maxUnavailable": "50%"})
    world.change_spec(replicas=4, rollout={"maxUnavailable": "50%"}, engine=NEWER)
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Serving"), (2, "Stopping"), (3, "Stopping")]
    assert world.condition("Available").status == "True"


def test_a_group_that_does_not_serve_goes_first_and_counts_as_the_unavailable_one():
    world = serving(3)
    world.ready_head(world.entry(0).incarnation, ready=False)
    world.reconcile()
    world.change_spec(replicas=3, engine=NEWER)
    world.reconcile()
    assert states(world) == [(0, "Stopping"), (1, "Serving"), (2, "Serving")]


def test_surge_and_unavailability_are_used_side_by_side():
    spec = {"replicas": 3, "rollout": {"maxSurge": 1, "maxUnavailable": 1}}
    world = serving(3, rollout=spec["rollout"])
    world.change_spec(**spec, engine=NEWER)
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Stopping"), (2, "Serving"), (2, "Starting")] or states(world) == [
        (0, "Serving"),
        (1, "Stopping"),
        (2, "Starting"),
        (2, "Serving"),
    ]


def test_the_only_group_serves_on_while_its_successor_starts_even_if_it_might_be_unavailable():
    world = serving(1, rollout={"maxSurge": 1})
    world.change_spec(rollout={"maxSurge": 1}, engine=NEWER)
    world.reconcile()
    assert sorted(states(world)) == [(0, "Serving"), (0, "Starting")]
    assert world.cr.status.ready_replicas == 1
    assert world.cr.status.ranks.summary == "4/4"


def test_a_successor_without_a_place_gives_way_to_max_unavailable():
    spec = {"rollout": {"maxSurge": 1}, "startup": {"scheduleTimeoutSeconds": 60}}
    world = serving(1, **spec)
    old = world.entry().incarnation
    world.change_spec(**spec, engine=NEWER)
    world.reconcile()
    world.now += 61
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert old not in {e.incarnation for e in world.cr.status.groups if e.state == "Serving"}


def test_a_broken_successor_is_replaced_at_once_when_the_spec_is_corrected_and_dropped_on_rollback():
    spec = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    world = serving(1, **spec)
    old = world.entry().incarnation
    world.change_spec(**spec, engine={"image": "vllm/vllm-openai:v0.33.1"})
    world.reconcile()
    broken = next(e.incarnation for e in world.cr.status.groups if e.replaces)
    world.run_pods(broken)
    world.engine_ends(f"web-0-{broken}-head", code=1)
    world.reconcile()
    assert world.condition("Progressing").reason == "RolloutStalled"
    world.change_spec(**spec)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert [e.incarnation for e in world.cr.status.groups] == [old]
    assert world.condition("Ready").status == "True"


def test_a_stalled_rollout_does_not_take_a_group_that_is_unready_for_a_moment():
    world = serving(3)
    world.change_spec(replicas=3, engine=NEWER)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    broken = world.entry(2).incarnation
    world.run_pods(broken)
    world.engine_ends(f"web-2-{broken}-head", code=1)
    world.reconcile()
    world.ready_head(world.entry(1).incarnation, ready=False)
    world.reconcile()
    assert (1, "Serving") in states(world)


def test_a_paused_rollout_begins_nothing_and_says_so():
    world = serving(2, rollout={"paused": True})
    world.change_spec(replicas=2, rollout={"paused": True}, engine=NEWER)
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Serving")]
    assert world.condition("Progressing").reason == "RolloutPaused"
    world.change_spec(replicas=2, engine=NEWER)
    world.reconcile()
    assert (1, "Stopping") in states(world)


def test_a_group_that_came_up_while_no_status_could_be_written_is_replaced_within_the_limits_like_any_other():
    spec = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    world = World(**spec)
    world.reconcile()
    incarnation = world.entry().incarnation
    unwritten = [msgspec.structs.replace(e, created_at=None) for e in world.cr.status.groups]
    status = msgspec.structs.replace(world.cr.status, groups=unwritten)
    world.run_pods(incarnation)
    world.ready_head(incarnation)
    world.cr = msgspec.structs.replace(world.cr, status=status)
    world.change_spec(**spec, engine=NEWER, dataParallel={"size": 6})
    world.reconcile()
    assert [e.state for e in world.cr.status.groups if e.incarnation == incarnation] == ["Starting"]


def test_nothing_is_deleted_for_a_revision_that_the_api_server_refuses():
    world = serving(2)
    world.verdicts = {}
    world.change_spec(replicas=2, engine=NEWER)
    decided = world.plan()
    assert [m["kind"] for m in decided.checks] == ["Pod", "StatefulSet"]
    assert decided.sequences == []
    world.verdicts = {naming.revision(world.cr.spec): "the API server refuses the Pod: resources invalid"}
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Serving")]
    assert world.condition("Stalled").reason == "RevisionRefused"
    world.verdicts = {naming.revision(world.cr.spec): ""}
    world.reconcile()
    assert (1, "Stopping") in states(world)


def test_a_requested_restart_keeps_within_the_limits():
    world = serving(2)
    meta = msgspec.structs.replace(world.cr.metadata, annotations={naming.ANNOTATION_RESTART: "now"})
    world.cr = msgspec.structs.replace(world.cr, metadata=meta)
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Stopping")]


def test_two_groups_of_one_index_that_stop_together_come_back_as_one():
    spec = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    world = serving(1, **spec)
    world.change_spec(**spec, engine=NEWER)
    world.reconcile()
    world.change_spec(**spec, engine=NEWER, suspend=True)
    world.reconcile()
    world.change_spec(**spec, engine=NEWER)
    world.kubelets_finish_deleting()
    world.reconcile()
    assert states(world) == [(0, "Starting")]


def test_a_successor_that_fails_at_the_moment_its_predecessor_ends_does_not_make_two_groups_of_one():
    spec = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    world = serving(1, **spec)
    old = world.entry().incarnation
    world.change_spec(**spec, engine=NEWER)
    world.reconcile()
    successor = next(e.incarnation for e in world.cr.status.groups if e.replaces)
    world.run_pods(successor)
    world.engine_ends(f"web-0-{successor}-head", code=1)
    world.engine_ends(f"web-0-{old}-head", code=1)
    world.reconcile()
    world.now += 20  # past the back-off
    world.kubelets_finish_deleting()
    world.reconcile()
    assert states(world) == [(0, "Starting")]


def budget(world: World, index: int) -> int:
    name = f"web-{index}-{world.entry(index).incarnation}"
    return world.objects["PodDisruptionBudget", name]["spec"]["minAvailable"]


def test_the_budget_of_one_group_at_a_time_is_open_and_closes_when_the_node_is_back():
    """A budget of pods that lets half a group go wedges drains: pdb-operator/pdb-operator#81, PR#82."""
    world = serving(2)
    assert (budget(world, 0), budget(world, 1)) == (4, 4)
    world.nodes = {"n2": Node(name="n2", unschedulable=True)}
    world.reconcile()
    assert (budget(world, 0), budget(world, 1)) == (4, 0)
    world.nodes = {"n2": Node(name="n2")}
    world.reconcile()
    assert (budget(world, 0), budget(world, 1)) == (4, 4)


def test_no_budget_opens_while_another_group_is_missing_and_the_condition_says_why():
    world = serving(2)
    world.engine_ends(f"web-0-{world.entry(0).incarnation}-w-0", code=1)
    world.reconcile()
    world.nodes = {"n2": Node(name="n2", unschedulable=True)}
    world.reconcile()
    assert budget(world, 1) == 4
    assert world.condition("DrainBlocked").reason == "NoBudget"


def test_a_closed_policy_opens_nothing_until_the_annotation_names_the_node():
    world = serving(1, disruption={"policy": "Closed"})
    world.nodes = {"n2": Node(name="n2", unschedulable=True)}
    world.reconcile()
    assert budget(world, 0) == 4
    assert naming.ANNOTATION_DRAIN_NODES in world.condition("DrainBlocked").message
    meta = msgspec.structs.replace(world.cr.metadata, annotations={naming.ANNOTATION_DRAIN_NODES: "n2"})
    world.cr = msgspec.structs.replace(world.cr, metadata=meta)
    world.reconcile()
    assert budget(world, 0) == 0


def test_an_annotation_that_stays_after_the_drain_moves_no_group_that_has_come_back():
    """With surge and maxUnavailable 0 successors were started without end, one after the other on the named node."""
    world = serving(1, rollout={"maxSurge": 1, "maxUnavailable": 0})
    world.nodes = {"n2": Node(name="n2")}
    meta = msgspec.structs.replace(world.cr.metadata, annotations={naming.ANNOTATION_DRAIN_NODES: "n2"})
    world.cr = msgspec.structs.replace(world.cr, metadata=meta)
    world.reconcile()
    assert states(world) == [(0, "Serving")]
    world.nodes = {"n2": Node(name="n2", tainted=True)}  # as some autoscalers empty a node
    world.reconcile()
    assert sorted(states(world)) == [(0, "Serving"), (0, "Starting")]


def test_the_annotation_alone_counts_where_nodes_may_not_be_read():
    world = serving(1, rollout={"maxSurge": 1, "maxUnavailable": 0})
    meta = msgspec.structs.replace(world.cr.metadata, annotations={naming.ANNOTATION_DRAIN_NODES: "n2"})
    world.cr = msgspec.structs.replace(world.cr, metadata=meta)
    world.reconcile()
    assert sorted(states(world)) == [(0, "Serving"), (0, "Starting")]


def test_an_open_policy_has_no_budget_at_all():
    world = serving(1)
    world.change_spec(disruption={"policy": "Open"})
    world.reconcile()
    assert not [key for key in world.objects if key[0] == "PodDisruptionBudget"]
    assert world.entry().state == "Serving"


def test_a_rollout_goes_on_while_a_node_is_unschedulable_and_no_budget_is_open_meanwhile():
    world = serving(2)
    world.nodes = {"n2": Node(name="n2", unschedulable=True)}
    world.reconcile()
    assert budget(world, 1) == 0
    world.change_spec(replicas=2, engine=NEWER)
    world.reconcile()
    assert states(world) == [(0, "Serving"), (1, "Stopping")]
    assert budget(world, 0) == 4
    world.kubelets_finish_deleting()
    world.reconcile()
    world.bring_up(world.entry(1).incarnation)
    assert states(world) == [(0, "Stopping"), (1, "Serving")]


def test_an_open_budget_is_closed_before_another_group_is_taken_away():
    world = serving(2)
    world.nodes = {"n2": Node(name="n2", unschedulable=True)}
    world.reconcile()
    name = f"web-0-{world.entry(0).incarnation}"
    world.objects["PodDisruptionBudget", name]["spec"]["minAvailable"] = 0  # by somebody's hand
    del world.nodes["n2"]
    world.change_spec(replicas=2, engine=NEWER)
    first = world.plan()
    assert all(entry.state == "Serving" for entry in first.status.groups)
    assert [action.manifest["kind"] for action in first.actions] == ["PodDisruptionBudget"] * 2


def test_a_silent_node_ends_the_group_uncharged_and_its_pods_do_not_hold_up_the_next():
    world = serving(1)
    old = world.entry().incarnation
    world.nodes = {"n2": Node(name="n2", ready="Unknown")}
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.charged, failure.node) == ("NodeLost", False, "n2")
    for key in [k for k, o in world.objects.items() if k[0] == "Pod" and o["spec"]["nodeName"] != "n2"]:
        del world.objects[key]
    world.reconcile()
    assert world.entry().incarnation != old, "no waiting for a confirmation that cannot come"


def test_a_node_that_merely_reports_itself_not_ready_is_no_loss():
    world = serving(1)
    world.nodes = {"n2": Node(name="n2", ready="False")}
    world.reconcile()
    assert world.entry().state == "Serving"


def test_ends_in_the_same_second_are_named_as_a_tie():
    world = serving(1)
    incarnation = world.entry().incarnation
    world.engine_ends(f"web-0-{incarnation}-w-0", code=1)
    world.engine_ends(f"web-0-{incarnation}-w-2", code=1)
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert failure.rank == 1
    assert f"web-0-{incarnation}-w-2 (rank 3)" in failure.message
    assert "either may be first" in failure.message


def test_an_engine_that_ends_because_its_pod_was_deleted_is_not_charged():
    world = serving(1)
    incarnation = world.entry().incarnation
    name = f"web-0-{incarnation}-w-0"
    world.engine_ends(name, code=143, at=world.now + 2)
    world.pod(name)["metadata"] |= {
        "deletionTimestamp": timestamp(world.now + 75),
        "deletionGracePeriodSeconds": 75,
    }
    world.now += 3
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.charged) == ("PodDeleted", False)


def test_a_worker_that_was_deleted_and_made_again_unseen_ends_its_group_uncharged():
    world = serving(1)
    incarnation = world.entry().incarnation
    world.now += 100
    world.pod(f"web-0-{incarnation}-w-1")["metadata"]["creationTimestamp"] = timestamp(world.now)
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.charged, failure.rank) == ("PodDeleted", False, 2)


def test_a_node_that_fails_again_and_again_is_named():
    world = World(failurePolicy={"backoffSeconds": 1, "maxBackoffSeconds": 1})
    blamed = []
    for attempt in range(4):
        incarnation = world.make_ready()
        world.engine_ends(f"web-0-{incarnation}-w-{1 if attempt == 2 else 0}", code=1)
        world.reconcile()
        world.kubelets_finish_deleting()
        world.reconcile()
        world.now += 5
        blamed.append(world.cr.status.groups[0].last_failures[0].node)
    world.reconcile()
    message = world.condition("Degraded").message
    assert blamed.count(blamed[0]) == 3
    assert f"{blamed[0]} failed first in 3 of 4 attempts" in message


def test_an_image_that_cannot_be_pulled_ends_in_a_named_failure_once_the_time_for_pulls_is_over():
    """lws PR#725/#726."""
    world = World(startup={"scheduleTimeoutSeconds": 60, "timeoutSeconds": 3600})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    waiting = {"reason": "ImagePullBackOff"}
    pod = world.pod(f"web-0-{incarnation}-w-1")
    pod["status"]["containerStatuses"] = [{"name": "engine", "image": "i", "state": {"waiting": waiting}}]
    world.reconcile()
    world.now += 59
    world.reconcile()
    assert world.entry().state == "Starting"
    world.now += 2
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.pod, failure.charged) == ("ImagePullFailed", pod["metadata"]["name"], True)


def test_waiting_for_capacity_says_what_is_held_how_long_and_for_what():
    """No spare capacity is said, not left to be guessed: lws#567, #688, #776."""
    devices = {"assignment": "DevicePlugin"}
    world = World(dataParallel={"size": 8, "sizeLocal": 2}, devices=devices, tensorParallelSize=4)
    world.reconcile()
    incarnation = world.entry().incarnation
    for number, pod in enumerate(world.pods_of(incarnation)):
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(world.now)}
        if number == 3:
            scheduled |= {"status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
        else:
            pod["spec"] = {"nodeName": f"n{number}"}
        pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.now += 840
    world.reconcile()
    assert "holding 24 devices over 10 min for 8 more" in world.entry().waiting_for


def test_groups_that_found_no_capacity_do_not_come_back_in_step():
    delays = set()
    for seed in range(8):
        world = World(startup={"scheduleTimeoutSeconds": 60})
        for _ in range(seed):
            world.plan()  # other ids
        world.reconcile()
        world.now += 61
        world.reconcile()
        delays.add(world.cr.status.groups[0].next_attempt_at)
    assert len(delays) > 3


def attempt_fails(world: World, index: int = 0) -> None:
    """The newest incarnation of a group starts and its head ends; its pods go, and the back-off with them."""
    broken = world.entry(index).incarnation
    world.run_pods(broken)
    world.engine_ends(f"web-{index}-{broken}-head", code=1)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()


def back_off_ends(world: World) -> None:
    world.now += 400
    world.reconcile()


@pytest.mark.parametrize("served_before", [False, True])
def test_a_revision_that_crashes_in_the_only_group_stops_progressing_until_the_spec_is_corrected(served_before):
    """`kubectl wait --for=condition=Progressing=false` returns when it is done or stuck; it hung for ever."""
    world = serving(1) if served_before else World()
    world.change_spec(engine=NEWER)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert world.condition("Progressing").status == "True"
    attempt_fails(world)
    for _ in range(2):
        stalled = world.condition("Progressing")
        assert (stalled.status, stalled.reason) == ("False", "RolloutStalled")
        assert "group 0 failed once in the new revision; last: EngineExited" in stalled.message
        assert "it is tried again" in stalled.message
        back_off_ends(world)
        assert world.entry().state == "Starting"
    world.change_spec(engine={"image": "vllm/vllm-openai:v0.33.1"})
    world.reconcile()
    assert world.condition("Progressing").status == "True"
    world.kubelets_finish_deleting()
    world.reconcile()
    world.make_ready()
    assert world.condition("Progressing").reason == "RolloutComplete"


def test_a_group_that_served_and_failed_once_is_on_its_way_back_and_one_that_fails_on_and_on_is_stuck():
    world = serving(1)
    attempt_fails(world)
    assert world.condition("Progressing").status == "True", "the revision works"
    back_off_ends(world)
    attempt_fails(world)
    assert world.condition("Progressing").status == "True"
    back_off_ends(world)
    attempt_fails(world)
    assert world.condition("Progressing").reason == "RolloutStalled"


def test_a_group_that_is_given_up_makes_no_progress():
    world = serving(1, failurePolicy={"maxRestarts": 0})
    attempt_fails(world)
    progressing = world.condition("Progressing")
    assert (progressing.status, progressing.reason) == ("False", "RolloutStalled")
    assert "not tried again, failurePolicy.maxRestarts is 0" in progressing.message
    world.annotate(naming.ANNOTATION_RESTART, "now")
    world.reconcile()
    assert world.condition("Progressing").status == "True"


def test_a_first_failure_is_no_verdict_on_a_revision_while_another_groups_first_attempt_is_under_way():
    world = World(replicas=2)
    world.reconcile()
    attempt_fails(world, 1)
    assert world.condition("Progressing").status == "True"
    attempt_fails(world, 0)
    assert world.condition("Progressing").reason == "RolloutStalled"
