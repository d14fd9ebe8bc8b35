"""When a group is condemned, whether it is charged for it, and how soon it is tried again."""

from __future__ import annotations

import msgspec
import pytest

from dp_handshake.messages import RankLost, Violation
from dp_operator import observe
from dp_operator.failure import LogWanted, explained, with_logs
from tests.unit.operator.world import World


def started(world: World) -> str:
    """A group whose pods run and were released."""
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    world.reconcile()
    return incarnation


def test_a_worker_that_vanishes_without_a_trace_ends_the_group():
    world = World()
    incarnation = world.make_ready()
    del world.objects["Pod", f"web-0-{incarnation}-w-1"]
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.rank, failure.charged) == ("MemberDeleted", 2, False)
    assert world.condition("Ready").status == "False"


def test_a_worker_that_was_made_again_and_waits_for_a_node_ends_the_group():
    world = World()
    incarnation = world.make_ready()
    world.now += 60
    again = world.pod(f"web-0-{incarnation}-w-1")
    again["metadata"] |= {"uid": "again", "creationTimestamp": observe.timestamp(world.now)}
    again["spec"], again["status"] = {}, {"phase": "Pending"}
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == "PodDeleted"


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_an_operator_whose_clock_is_wrong_takes_no_pod_for_one_made_again(skew_s):
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    for obj in world.objects.values():
        obj["metadata"]["creationTimestamp"] = observe.timestamp(world.now - skew_s)
    world.run_pods(incarnation)
    world.now += 20
    world.release(incarnation)
    world.reconcile()
    world.now += 1
    world.reconcile()
    assert world.entry().incarnation == incarnation
    assert not world.entry().last_failures


@pytest.mark.parametrize("skew_s", [-5000, 5000])
def test_a_head_node_whose_clock_is_wrong_neither_ends_a_start_nor_hides_a_loss(skew_s):
    world = World(startup={"timeoutSeconds": 100})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    world.relay_says(incarnation, released_at=world.now + skew_s)
    world.reconcile()
    assert world.entry().state == "Starting"
    assert "just after release" in world.entry().waiting_for
    lost = [RankLost(time=world.now + skew_s, rank=2, pod=f"web-0-{incarnation}-w-1", message="connection closed")]
    world.relay_says(incarnation, lost=lost)
    decided = world.reconcile()
    assert world.entry().state == "Starting", "the kubelet may still tell the exit code"
    assert decided.look_again_at <= world.now + 5
    world.now = decided.look_again_at
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == "RankLost"


def test_a_rank_that_repeats_its_violation_every_second_is_condemned_all_the_same():
    world = World()
    incarnation = started(world)
    for count in range(1, 8):
        again = Violation(
            time=world.now, kind="SecondHello", message="m", pod=f"web-0-{incarnation}-w-1", rank=2, count=count
        )
        world.relay_says(incarnation, violations=[again])
        world.reconcile()
        world.now += 1
    assert [f.reason for f in world.cr.status.groups[0].last_failures] == ["HandshakeViolation"]


def test_a_rank_that_comes_back_in_time_leaves_no_suspicion():
    world = World()
    incarnation = started(world)
    lost = [RankLost(time=world.now, rank=2, pod=f"web-0-{incarnation}-w-1", message="connection closed")]
    world.relay_says(incarnation, lost=lost)
    world.reconcile()
    assert world.entry().suspected_at
    world.now += 2
    world.relay_says(incarnation, lost=[])
    world.reconcile()
    assert world.entry().suspected_at is None
    world.now += 60
    lost = [msgspec.structs.replace(lost[0], time=world.now)]
    world.relay_says(incarnation, lost=lost)
    world.reconcile()
    assert world.entry().state == "Starting", "the patience begins anew"


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfnvidia.com/gpu", "NodeAffinity"])
def test_pods_that_the_kubelet_rejects_are_charged_and_tried_again_ever_slower(reason):
    world = World(failurePolicy={"backoffSeconds": 10, "maxBackoffSeconds": 300})
    waits = []
    for _ in range(3):
        world.reconcile()
        incarnation = world.entry().incarnation
        world.run_pods(incarnation)
        world.pod(f"web-0-{incarnation}-w-1")["status"] = {"phase": "Failed", "reason": reason, "message": "Allocate"}
        world.reconcile()
        world.kubelets_finish_deleting()
        decided = world.reconcile()
        waits.append(round(decided.look_again_at - world.now))
        world.now = decided.look_again_at + 1
    assert waits == [10, 20, 40]
    (entry,) = world.cr.status.groups
    assert (entry.last_failures[0].reason, entry.last_failures[0].rank, entry.restarts) == (reason, 2, 3)
    assert world.condition("Degraded").status == "True"


def test_a_group_whose_pods_somebody_keeps_deleting_is_made_again_at_once_but_not_in_a_circle():
    world = World(failurePolicy={"backoffSeconds": 10, "stableSeconds": 600})
    waits = []
    for _ in range(4):
        incarnation = world.make_ready()
        world._deleted("Pod", f"web-0-{incarnation}-w-1")
        world.reconcile()
        world.kubelets_finish_deleting()
        decided = world.reconcile()
        waiting = world.entry().state == "Waiting"
        waits.append(round(decided.look_again_at - world.now) if waiting else 0)
        world.now += waits[-1] + 1
    assert waits == [0, 10, 20, 40]
    world.make_ready()
    world.now += 601
    world._deleted("Pod", f"{world.entry().head_pod}")
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert world.entry().state == "Starting", "after a stable time the first deletion is forgiven again"
    assert world.entry().restarts == 0


def test_two_groups_that_hold_half_of_the_cluster_each_do_not_come_back_in_step():
    world = World(replicas=2, startup={"scheduleTimeoutSeconds": 60}, failurePolicy={"backoffSeconds": 30})
    world.reconcile()
    world.now += 61
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    first, second = (observe.seconds(e.next_attempt_at) for e in world.cr.status.groups)
    assert [e.last_failures[0].reason for e in world.cr.status.groups] == ["WaitingForCapacity"] * 2
    assert abs(first - second) >= 1
    assert min(first, second) - world.now >= 29


def test_the_log_of_a_headless_rank_that_ended_with_0_is_read_before_its_pod_goes():
    world = World()
    incarnation = world.make_ready()
    pod = f"web-0-{incarnation}-w-1"
    ended = {"exitCode": 0, "reason": "Completed", "finishedAt": observe.timestamp(world.now)}
    world.pod(pod)["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    ]
    decided = world.plan()
    assert decided.logs == [LogWanted(incarnation, pod, previous=True)]
    text = "INFO ok\nERROR rank died: RuntimeError: device lost\nINFO bye"
    failure = with_logs(decided.status, [(decided.logs[0], text)]).groups[0].last_failures[0]
    assert (failure.exit_code, failure.rank) == (0, 2)
    assert "device lost" in failure.first_error_lines
    assert failure.log_tail.endswith("INFO bye")
    assert explained(failure, "  \n") == failure, "an empty log takes nothing away"


def test_a_refusal_of_the_spec_makes_no_objects_and_is_said():
    world = World()
    world.errors = ["spec.engine.args: --enable-eplb: no"]
    world.reconcile()
    assert world.objects == {}
    assert world.condition("Accepted").status == "False"
    assert "--enable-eplb" in world.condition("Accepted").message
    assert world.condition("Stalled").status == "True"
    world.errors = []
    world.reconcile()
    assert world.condition("Accepted").status == "True"
    world.errors = ["spec.engine.args: --enable-eplb: no"]
    begun = world.cr.status.groups[0]
    again = World()
    again.cr = msgspec.structs.replace(
        again.cr,
        status=msgspec.structs.replace(world.cr.status, groups=[msgspec.structs.replace(begun, created_at=None)]),
    )
    again.errors = world.errors
    again.reconcile()
    assert again.objects == {}, "nothing is made of an entry that was begun before the refusal"
