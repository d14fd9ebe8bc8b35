"""The plan, moment by moment. Each test is one thing that a user or a person on call would notice."""

from __future__ import annotations

import msgspec
import pytest

from dp_handshake.messages import PodRestarted, RankLost, Stages, Violation
from dp_operator import naming, observe
from dp_operator.plan import Create, Delete, covers
from dp_operator.status import is_progress
from tests.unit.operator.world import World


def test_the_ledger_is_written_before_the_first_object_is_made():
    world = World()
    world.reconcile()
    assert world.log[0] == "status"
    assert world.log[1].startswith("create ")


def test_the_service_comes_first_because_its_address_goes_into_the_launch_plan():
    world = World()
    world.reconcile()
    made = [line for line in world.log if line.startswith("create") and world.entry().incarnation in line]
    assert made[0].startswith("create Service")
    assert world.launch_plan(world.entry().incarnation).monitor_host.startswith("198.19.")
    assert sum(line.startswith("create Pod ") for line in made) == 1
    assert sum(line.startswith("create StatefulSet") for line in made) == 1


def test_a_crash_after_any_single_write_ends_in_the_same_objects():
    reference = World()
    reference.reconcile()
    expected = {kind for kind, _ in reference.objects}
    count = len(reference.objects)
    writes = len([line for line in reference.log if line.startswith("create")])
    for crash_after in range(writes):
        world = World()
        done = 0
        for _ in range(20):
            decided = world.plan()
            world.cr = msgspec.structs.replace(world.cr, status=decided.status)
            actions = decided.actions
            for action in actions[: max(0, crash_after - done)]:
                world.act(action)
            done += len(actions)
            if done >= crash_after:
                break
        world.reconcile()
        assert len({e.incarnation for e in world.cr.status.groups}) == 1
        assert {kind for kind, _ in world.objects} == expected
        assert len(world.objects) == count, f"crash after write {crash_after}"


def test_nothing_is_written_when_nothing_changes():
    world = World()
    world.make_ready()
    world.take_log()
    world.now += 3600
    decided = world.reconcile()
    assert world.take_log() == []
    assert decided.sequences == []


def test_how_far_ranks_are_is_progress_and_what_others_act_on_is_not():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    before = world.cr.status
    world.reconcile()
    assert world.cr.status != before
    assert is_progress(before, world.cr.status)
    world.release(incarnation)
    before = world.cr.status
    world.reconcile()
    assert not is_progress(before, world.cr.status)
    world.relay_says(incarnation, ready_at=world.now)
    world.ready_head(incarnation)
    before = world.cr.status
    world.reconcile()
    assert not is_progress(before, world.cr.status)
    before = world.cr.status
    world.engine_ends(world.entry().head_pod, code=1)
    world.reconcile()
    assert not is_progress(before, world.cr.status)


def test_a_group_is_ready_only_when_the_relay_and_the_head_both_say_so():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    world.relay_says(incarnation, ready_at=world.now)
    world.reconcile()
    assert world.condition("Ready").status == "False"
    world.ready_head(incarnation)
    world.reconcile()
    assert world.condition("Ready").status == "True"
    assert world.cr.status.ranks.summary == "4/4"


def test_two_groups_start_side_by_side():
    world = World(replicas=2)
    world.reconcile()
    assert [e.index for e in world.cr.status.groups] == [0, 1]
    assert len([key for key in world.objects if key[0] == "StatefulSet"]) == 2


def test_a_worker_pod_deleted_while_starting_leads_to_one_clean_replacement_without_charge():
    """The set is replaced together, so that nobody connects to a head that ends: ai-dynamo/dynamo PR#7954."""
    world = World()
    world.reconcile()
    old = world.entry().incarnation
    world.run_pods(old)
    world.reconcile()
    world.take_log()
    world._deleted("Pod", f"web-0-{old}-w-1")
    world.reconcile()
    log = world.take_log()
    assert log[0] == "status", "the failure is in the ledger before anything is deleted"
    deletes = [line for line in log if line.startswith("delete")]
    assert deletes[0] == f"delete Pod web-0-{old}-head"
    assert not any("create" in line for line in log)
    world.kubelets_finish_deleting()
    world.reconcile()
    entry = world.entry()
    assert entry.incarnation != old
    assert entry.restarts == 0
    assert entry.last_failures[0].reason == "PodDeleted"
    assert {e.incarnation for e in world.cr.status.groups} == {entry.incarnation}


def test_service_and_plan_stay_until_the_last_worker_has_ended():
    world = World()
    incarnation = world.make_ready()
    world.change_spec(replicas=0)
    world.reconcile()
    assert ("Service", f"web-0-{incarnation}-rpc") in world.objects
    assert ("ConfigMap", f"web-0-{incarnation}") in world.objects
    world.kubelets_finish_deleting()
    world.reconcile()
    assert not [key for key in world.objects if incarnation in key[1]]
    assert world.cr.status.groups == []


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [(1, "Error", "EngineExited"), (0, "Completed", "EngineExited"), (137, "OOMKilled", "OutOfMemory")],
)
def test_an_engine_that_ends_is_charged_and_named_with_rank_pod_and_node(code, reason, expected):
    world = World()
    incarnation = world.make_ready()
    world.engine_ends(f"web-0-{incarnation}-w-1", code=code, reason=reason)
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.rank, failure.exit_code) == (expected, 2, code)
    assert failure.pod.endswith("-w-1")
    assert failure.node
    assert failure.log_tail == "the last words"
    assert world.cr.status.groups[0].restarts == 1


def test_a_signal_is_named_and_outranks_the_exits_it_caused():
    world = World()
    incarnation = world.make_ready()
    world.engine_ends(f"web-0-{incarnation}-head", code=1, at=world.now - 1)
    world.engine_ends(f"web-0-{incarnation}-w-2", code=139)
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.signal, failure.rank) == ("SIGSEGV", 3)


def test_back_off_doubles_and_is_capped_and_a_stable_group_starts_from_the_first_again():
    world = World(failurePolicy={"backoffSeconds": 10, "maxBackoffSeconds": 30, "stableSeconds": 600})
    waits = []
    for _ in range(4):
        incarnation = world.make_ready()
        world.now += 5
        world.engine_ends(f"web-0-{incarnation}-w-0", code=1)
        world.reconcile()
        world.kubelets_finish_deleting()
        decided = world.reconcile()
        assert world.entry().state == "Waiting"
        waits.append(round(decided.look_again_at - world.now))
        world.now = decided.look_again_at + 1
    assert waits == [10, 20, 30, 30]
    assert world.condition("Degraded").status == "True"
    world.make_ready()
    world.now += 601
    world.reconcile()
    assert world.entry().restarts == 0


def test_after_max_restarts_it_stops_and_says_how_to_go_on():
    world = World(failurePolicy={"maxRestarts": 0})
    incarnation = world.make_ready()
    world.engine_ends(f"web-0-{incarnation}-w-0", code=1)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    world.now += 86_400
    world.reconcile()
    assert world.entry().state == "Waiting"
    stalled = world.condition("Stalled")
    assert stalled.status == "True"
    assert naming.ANNOTATION_RESTART in stalled.message
    meta = msgspec.structs.replace(world.cr.metadata, annotations={naming.ANNOTATION_RESTART: "once more"})
    world.cr = msgspec.structs.replace(world.cr, metadata=meta)
    world.reconcile()
    assert world.entry().state == "Starting"
    assert world.condition("Stalled").status == "False"


def test_a_changed_spec_replaces_groups_one_at_a_time():
    world = World(replicas=2)
    world.make_ready(0)
    world.make_ready(1)
    world.take_log()
    world.change_spec(replicas=2, engine={"image": "vllm/vllm-openai:v0.33.0"})
    world.reconcile()
    assert sorted(e.state for e in world.cr.status.groups) == ["Serving", "Stopping"]
    world.kubelets_finish_deleting()
    world.reconcile()
    assert sorted(e.state for e in world.cr.status.groups) == ["Serving", "Starting"]
    changed = next(e.index for e in world.cr.status.groups if e.state == "Starting")
    world.make_ready(changed)
    assert sorted(e.state for e in world.cr.status.groups) == ["Serving", "Stopping"]
    assert all(e.restarts == 0 for e in world.cr.status.groups)


def test_fields_outside_the_revision_touch_no_pod():
    world = World()
    world.make_ready()
    world.take_log()
    world.change_spec(
        startup={"timeoutSeconds": 99}, service={"annotations": {"a": "b"}}, failurePolicy={"backoffSeconds": 1}
    )
    world.reconcile()
    assert [line for line in world.take_log() if line != "status"] == ["apply Service web"]


def test_a_group_of_another_size_is_judged_by_the_shape_it_was_made_with():
    world = World(replicas=2)
    world.make_ready(0)
    world.make_ready(1)
    world.change_spec(replicas=2, dataParallel={"size": 8})
    world.reconcile()
    assert not any(e.last_failures for e in world.cr.status.groups), "the old shape is no failure"


def test_scaling_down_takes_the_highest_group_and_leaves_the_others_alone():
    world = World(replicas=2)
    kept = world.make_ready(0)
    world.make_ready(1)
    world.change_spec(replicas=1)
    world.reconcile()
    states = {e.index: e.state for e in world.cr.status.groups}
    assert states == {0: "Serving", 1: "Stopping"}
    world.kubelets_finish_deleting()
    world.reconcile()
    assert [e.incarnation for e in world.cr.status.groups] == [kept]


def test_suspend_takes_every_group_away_and_resume_brings_them_back():
    world = World()
    world.make_ready()
    world.change_spec(suspend=True)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert world.condition("Ready").reason == "Suspended"
    assert not [key for key in world.objects if key[0] == "Pod"]
    world.change_spec()
    world.make_ready()
    assert world.condition("Ready").status == "True"


def test_the_startup_deadline_counts_from_the_release_and_names_what_was_missing():
    """vllm#46509, PR#46534, vllm#13778, #17167, #49594, lws PR#725/#726, neutree PR#572."""
    world = World(startup={"timeoutSeconds": 100})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.now += 5000  # a slow image pull is not a slow start
    world.reconcile()
    assert world.entry().state == "Starting"
    world.release(incarnation)
    world.relay_says(incarnation, stages=Stages(arrived="0-3", connected="0-2"))
    decided = world.reconcile()
    assert decided.look_again_at <= world.now + 100
    world.now += 101
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert failure.reason == "StartupDeadlineExceeded"
    assert "rank 3" in failure.message


def with_relay(world: World, incarnation: str) -> None:
    head = world.pod(f"web-0-{incarnation}-head")
    head["status"]["initContainerStatuses"] = [{"name": "relay", "state": {"running": {}}}]


def test_a_group_that_became_ready_while_nobody_looked_is_not_ended_for_its_deadline():
    """An operator or an API server that was away for longer than timeoutSeconds ended every group that had started."""
    world = World(startup={"timeoutSeconds": 100})
    incarnation = world.make_ready()
    world.cr.status.groups[:] = [msgspec.structs.replace(world.entry(), state="Starting", ready_at=None)]
    known = world.snapshots.pop(incarnation)
    world.now += 5000
    world.reconcile()
    assert world.entry().state == "Starting"
    world.snapshots[incarnation] = known
    world.reconcile()
    assert world.entry().state == "Serving"


@pytest.mark.parametrize("released", [True, False])
def test_no_deadline_is_over_before_the_monitor_could_be_heard(released):
    world = World(startup={"timeoutSeconds": 100})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    with_relay(world, incarnation)
    world.reconcile()
    if released:
        world.release(incarnation)
        world.reconcile()
    known = world.snapshots.pop(incarnation, None)
    world.now += 5000
    decided = world.reconcile()
    assert world.entry().state == "Starting"
    assert decided.look_again_at <= world.now + 5
    if released:
        world.snapshots[incarnation] = known
    else:
        world.monitor_errors[incarnation] = "connection refused"
    world.reconcile()
    reason = "StartupDeadlineExceeded" if released else "CheckInDeadlineExceeded"
    assert world.cr.status.groups[0].last_failures[0].reason == reason


def test_pods_that_find_no_node_are_given_back_without_charge():
    world = World(startup={"scheduleTimeoutSeconds": 60})
    world.reconcile()
    world.now += 61
    world.reconcile()
    entry = world.cr.status.groups[0]
    assert entry.last_failures[0].reason == "WaitingForCapacity"
    assert entry.restarts == 0
    assert entry.state == "Stopping"


def test_a_head_that_stays_unready_is_replaced_after_unhealthy_seconds():
    world = World(failurePolicy={"unhealthySeconds": 30})
    incarnation = world.make_ready()
    world.ready_head(incarnation, ready=False)
    world.reconcile()
    assert world.condition("Ready").status == "False"
    assert world.entry().state == "Serving"
    world.now += 31
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == "HeadUnhealthy"


@pytest.mark.parametrize(("endpoint_s", "timeout_s", "grace_s"), [(5, 60, 65), (0, 5, 5), (0, 0, 1)])
def test_a_head_that_hangs_has_the_time_of_its_requests_to_end_and_no_margin(endpoint_s, timeout_s, grace_s):
    """It heeds no SIGTERM, so its group would wait for all that it is given; without any the kubelet is not awaited."""
    drain = {"endpointSeconds": endpoint_s, "timeoutSeconds": timeout_s}
    world = World(failurePolicy={"unhealthySeconds": 30}, drain=drain)
    incarnation = world.make_ready()
    world.ready_head(incarnation, ready=False)
    world.reconcile()
    world.now += 31
    deletes = [action for action in world.plan().actions if isinstance(action, Delete)]
    assert {action.kind: action.grace_s for action in deletes} == {
        "Pod": grace_s,
        "StatefulSet": None,
        "PodDisruptionBudget": None,
    }


def test_a_head_that_goes_for_other_reasons_has_its_pods_own_time_to_end_also_if_the_one_before_it_hung():
    world = World(failurePolicy={"unhealthySeconds": 30, "backoffSeconds": 1})
    world.ready_head(world.make_ready(), ready=False)
    world.reconcile()
    world.now += 31
    world.reconcile()
    world.kubelets_finish_deleting()
    world.now += 31
    world.make_ready()
    assert world.entry().last_failures[0].reason == "HeadUnhealthy"
    world.change_spec(replicas=0)
    deletes = [action for action in world.plan().actions if isinstance(action, Delete)]
    assert [action.grace_s for action in deletes if action.kind == "Pod"] == [None]


@pytest.mark.parametrize("wrong_by_s", [-3600, 3600])
def test_a_head_is_not_replaced_sooner_or_later_because_its_nodes_clock_is_wrong(wrong_by_s):
    world = World(failurePolicy={"unhealthySeconds": 30})
    incarnation = world.make_ready()
    world.now += wrong_by_s
    world.ready_head(incarnation, ready=False)
    world.now -= wrong_by_s
    world.reconcile()
    world.now += 28
    world.reconcile()
    assert not world.entry().last_failures
    world.now += 3
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == "HeadUnhealthy"


def test_a_head_that_recovers_has_its_whole_patience_again():
    world = World(failurePolicy={"unhealthySeconds": 30})
    incarnation = world.make_ready()
    for _ in range(3):
        world.ready_head(incarnation, ready=False)
        world.reconcile()
        world.now += 20
        world.reconcile()
        world.ready_head(incarnation)
        world.reconcile()
        world.now += 5
    assert not world.entry().last_failures


@pytest.mark.parametrize(
    ("sign", "reason"),
    [
        ({"lost": [RankLost(time=1.0, rank=2, pod="web-0-{}-w-1", message="connection closed")]}, "RankLost"),
        ({"restarted": [PodRestarted(time=1.0, pod="web-0-{}-w-1", message="again")]}, "RankRestarted"),
        (
            {"violations": [Violation(time=1.0, kind="SecondHello", message="m", pod="web-0-{}-w-1", rank=2)]},
            "HandshakeViolation",
        ),
    ],
)
def test_what_the_relay_hears_of_a_groups_own_pod_condemns_the_group(sign, reason):
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    field, items = next(iter(sign.items()))
    items = [msgspec.structs.replace(i, pod=i.pod.format(incarnation), time=world.now) for i in items]
    world.relay_says(incarnation, **{field: items})
    decided = world.reconcile()
    assert world.entry().state == "Starting", "the kubelet may still tell the exit code"
    world.now = decided.look_again_at + 0.1
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == reason


def test_a_stranger_at_the_rpc_port_condemns_nobody():
    world = World()
    incarnation = world.make_ready()
    strange = Violation(time=world.now, kind="ForeignPeer", message="m", peer="198.18.9.9", rank=2)
    world.relay_says(incarnation, violations=[strange], violation_count=1)
    world.now += 60
    world.reconcile()
    assert world.entry().state == "Serving"


def test_a_deleted_service_of_a_live_group_is_made_again_under_the_address_the_launchers_know():
    world = World()
    incarnation = world.make_ready()
    address = world.launch_plan(incarnation).monitor_host
    del world.objects["Service", f"web-0-{incarnation}-rpc"]
    del world.objects["Service", "web"]
    del world.objects["PodDisruptionBudget", f"web-0-{incarnation}"]
    world.reconcile()
    assert world.objects["Service", f"web-0-{incarnation}-rpc"]["spec"]["clusterIP"] == address
    assert ("Service", "web") in world.objects
    assert ("PodDisruptionBudget", f"web-0-{incarnation}") in world.objects
    assert world.entry().state == "Serving"


def test_an_edited_service_is_set_right_and_foreign_additions_are_left_alone():
    world = World()
    world.make_ready()
    world.objects["Service", "web"]["metadata"]["annotations"] = {"other": "tool"}
    world.take_log()
    world.reconcile()
    assert world.take_log() == []
    world.objects["Service", "web"]["spec"]["selector"] = {"app": "hijacked"}
    world.reconcile()
    assert "apply Service web" in world.take_log()


def test_the_name_of_a_stranger_is_never_taken_over_and_is_said():
    world = World()
    world.obstacles["Service", "web"] = observe.Obstacle("NameTaken", "an object of this name exists that is not ours")
    world.reconcile()
    assert ("Service", "web") not in world.objects
    assert world.condition("Stalled").reason == "NameTaken"


def test_an_object_that_the_api_server_refuses_is_named_and_not_tried_in_a_loop():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.refused[incarnation] = "the API server refuses Pod x: spec.containers[0].resources invalid"
    world.reconcile()
    entry = world.cr.status.groups[0]
    assert entry.last_failures[0].reason == "ObjectRefused"
    assert entry.next_attempt_at is not None


def test_a_quota_that_stands_in_the_way_is_said_in_the_status_and_forgotten_when_it_is_gone():
    world = World()
    decided = world.plan()
    world.cr = msgspec.structs.replace(world.cr, status=decided.status)
    incarnation = world.entry().incarnation
    world.blocked[incarnation] = "the API server does not take Pod x: exceeded quota: pods=4"
    decided = world.plan()
    assert "exceeded quota" in next(c for c in decided.status.conditions if c.type == "Ready").message
    world.blocked.clear()
    world.reconcile()
    assert "quota" not in world.condition("Ready").message


def test_a_leftover_without_ledger_entry_is_removed_and_a_complete_group_goes_on():
    world = World()
    incarnation = world.make_ready()
    world.cr = msgspec.structs.replace(world.cr, status=type(world.cr.status)())
    world.take_log()
    world.reconcile()
    assert [e.incarnation for e in world.cr.status.groups] == [incarnation]
    assert not [line for line in world.take_log() if not line.startswith(("status", "event"))]

    world = World()
    world.reconcile()
    half = world.entry().incarnation
    del world.objects["Pod", f"web-0-{half}-head"]
    world.cr = msgspec.structs.replace(world.cr, status=type(world.cr.status)())
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert half not in {e.incarnation for e in world.cr.status.groups}


def test_objects_of_an_earlier_resource_of_the_same_name_are_not_touched():
    world = World()
    world.make_ready()
    before = set(world.objects)
    meta = msgspec.structs.replace(world.cr.metadata, uid="uid-1")
    for obj in world.objects.values():
        obj["metadata"]["labels"] = obj["metadata"]["labels"] | {naming.LABEL_UID: "uid-0"}
    world.cr = msgspec.structs.replace(world.cr, metadata=meta, status=type(world.cr.status)())
    decided = world.plan()
    assert not [a for a in decided.actions if isinstance(a, Delete)]
    assert [a for a in decided.actions if isinstance(a, Create)]
    assert before == set(world.objects)


def test_pods_stuck_on_a_dead_node_do_not_hold_up_the_next_incarnation_for_ever():
    world = World()
    incarnation = world.make_ready()
    world._deleted("Pod", f"web-0-{incarnation}-w-0")
    world.reconcile()
    world.reconcile()
    stuck = f"web-0-{incarnation}-w-0"
    for key in [k for k, o in world.objects.items() if k[0] == "Pod" and k[1] != stuck]:
        del world.objects[key]
    world.reconcile()
    world.now += 200
    world.reconcile()
    assert world.entry().incarnation != incarnation
    world.kubelets_finish_deleting()
    world.reconcile()
    assert not [name for _, name in world.objects if incarnation in name], "the leftovers go with the last pod"


@pytest.mark.parametrize(
    ("existing", "intent", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]}, True),
        ({"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}]}, False),
        ({}, {"a": 1}, False),
    ],
)
def test_only_what_is_intended_is_compared(existing, intent, same):
    assert covers(existing, intent) is same


def test_a_broken_head_is_deleted_whatever_stands_in_the_way_of_repairs_and_of_other_groups():
    world = World(replicas=2)
    world.make_ready(0)
    second = world.entry(1).incarnation
    del world.objects["Pod", f"web-1-{second}-head"]
    entries = [
        msgspec.structs.replace(e, created_at=None) if e.incarnation == second else e for e in world.cr.status.groups
    ]
    world.cr = msgspec.structs.replace(world.cr, status=msgspec.structs.replace(world.cr.status, groups=entries))
    del world.objects["Service", "web"]
    broken = world.entry(0).head_pod
    world.engine_ends(broken, code=1)
    decided = world.plan()
    firsts = [
        [(type(a), a.name if isinstance(a, Delete) else a.manifest["kind"]) for a in s[0]] for s in decided.sequences
    ]
    assert firsts == [[(Delete, broken)], [(Create, "Service")], [(Create, "Pod")]]
