"""Whose objects are whose: leftovers, copies, orphans, and what is deleted once and not twice."""

from __future__ import annotations

import copy

import msgspec
import pytest

from dp_operator import naming, observe
from dp_operator.plan import Create, Delete
from tests.unit.operator.world import World


def keep_only_dead_head(world: World, incarnation: str) -> None:
    """The node of a head that is being deleted dies; everything else of the pods goes as usual."""
    for kind, name in list(world.objects):
        if kind == "Pod" and incarnation in name and not name.endswith("-head"):
            del world.objects[kind, name]
    world.now += 500


@pytest.mark.parametrize("change", [{"replicas": 0}, {"suspend": True}])
def test_a_head_stuck_on_a_dead_node_after_scaling_down_causes_no_endless_writes(change):
    world = World()
    incarnation = world.make_ready()
    world.change_spec(**change)
    world.reconcile()
    keep_only_dead_head(world, incarnation)
    world.reconcile()
    before = world.status_writes
    for _ in range(8):
        world.now += 1
        world.reconcile()
    assert world.status_writes == before
    assert world.cr.status.groups == []
    world.kubelets_finish_deleting()  # the node is back
    world.reconcile()
    assert not [name for _, name in world.objects if incarnation in name]


def test_a_head_stuck_on_a_dead_node_does_not_make_its_group_forget_a_crash_and_its_back_off():
    world = World(failurePolicy={"backoffSeconds": 100})
    old = world.make_ready()
    world._deleted("Pod", f"web-0-{old}-head")
    world.reconcile()
    keep_only_dead_head(world, old)
    world.reconcile()
    new = world.entry().incarnation
    assert new != old
    world.run_pods(new)
    world.release(new)
    world.reconcile()
    world.engine_ends(f"web-0-{new}-w-1", code=1)
    for _ in range(6):
        world.reconcile()
        for key, obj in list(world.objects.items()):
            if key[0] == "Pod" and new in key[1] and obj["metadata"].get("deletionTimestamp"):
                del world.objects[key]
        world.now += 1
    (entry,) = world.cr.status.groups
    assert (entry.state, entry.restarts, entry.last_failures[0].reason) == ("Waiting", 1, "EngineExited")
    assert not [name for kind, name in world.objects if kind == "Pod" and old not in name]


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "PodDisruptionBudget"])
def test_what_a_finalizer_holds_is_deleted_once(kind):
    world = World()
    incarnation = world.make_ready()
    world.change_spec(replicas=0)
    world.reconcile()
    world.kubelets_finish_deleting()
    name = {"Service": f"web-0-{incarnation}-rpc"}.get(kind, f"web-0-{incarnation}")
    world.objects.setdefault((kind, name), {"kind": kind, "metadata": {"name": name}})
    gone = World()
    gone.make_ready()
    held = copy.deepcopy(next(o for (k, n), o in gone.objects.items() if k == kind and n != "web"))
    held["metadata"] |= {"name": name, "deletionTimestamp": "2027-01-01T00:00:00Z"}
    held["metadata"]["labels"] |= {naming.LABEL_INCARNATION: incarnation}
    world.objects = {key: obj for key, obj in world.objects.items() if incarnation not in key[1]}
    world.objects[kind, name] = held
    world.take_log()
    assert not [action for action in world.plan().actions if isinstance(action, Delete)]


def test_a_policy_that_a_finalizer_holds_is_deleted_once():
    world = World()
    world.reconcile()
    world.objects["NetworkPolicy", "web"]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.change_spec(networkPolicy={"mode": "Unmanaged"})
    assert not [action for action in world.plan().actions if isinstance(action, Delete)]


def test_pods_that_a_deleted_set_left_behind_are_taken_away_and_do_not_block_their_group():
    world = World()
    incarnation = world.make_ready()
    del world.objects["StatefulSet", f"web-0-{incarnation}-w"]
    for pod in world.pods_of(incarnation):
        if not pod["metadata"]["name"].endswith("-head"):
            del pod["metadata"]["ownerReferences"]
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].reason == "MemberDeleted"
    world.kubelets_finish_deleting()
    world.reconcile()
    assert not [name for kind, name in world.objects if incarnation in name]
    assert world.entry().incarnation != incarnation


def test_a_head_that_somebody_orphaned_still_goes_with_its_group():
    world = World()
    incarnation = world.make_ready()
    del world.pod(f"web-0-{incarnation}-head")["metadata"]["ownerReferences"]
    world.reconcile()
    assert world.entry().incarnation == incarnation
    world.change_spec(replicas=0)
    world.reconcile()
    world.kubelets_finish_deleting()
    world.reconcile()
    assert not [name for kind, name in world.objects if kind == "Pod"]


def test_a_users_copy_of_a_policy_is_not_ours_to_delete():
    world = World(networkPolicy={"mode": "Unmanaged"})
    world.reconcile()
    other = World()
    other.reconcile()
    mine = copy.deepcopy(other.objects["NetworkPolicy", "web"])
    mine["metadata"] |= {"name": "mine", "uid": "mine"}
    world.objects["NetworkPolicy", "mine"] = mine
    mine_without_owner = copy.deepcopy(mine)
    del mine_without_owner["metadata"]["ownerReferences"]
    mine_without_owner["metadata"] |= {"name": "web", "uid": "mine-too"}
    world.objects["NetworkPolicy", "web"] = mine_without_owner
    assert not [action for action in world.plan().actions if isinstance(action, Delete)]


def test_a_copied_worker_that_ends_ends_no_group():
    world = World()
    incarnation = world.make_ready()
    debug = copy.deepcopy(world.pod(f"web-0-{incarnation}-w-0"))
    debug["metadata"] |= {"name": "debug", "uid": "debug", "ownerReferences": []}
    world.objects["Pod", "debug"] = debug
    world.engine_ends("debug", code=1)
    world.reconcile()
    assert world.entry().state == "Serving"
    assert world.entry().incarnation == incarnation


def test_a_copied_head_does_not_take_the_place_of_the_real_one():
    world = World()
    incarnation = world.make_ready()
    debug = copy.deepcopy(world.pod(f"web-0-{incarnation}-head"))
    debug["metadata"] |= {"name": "debug", "uid": "debug"}
    world.objects["Pod", "debug"] = debug
    world.engine_ends("debug", code=1)
    world.reconcile()
    assert (world.entry().state, world.condition("Ready").status) == ("Serving", "True")


def test_a_lost_launch_plan_of_a_serving_group_is_made_again_as_it_was():
    world = World()
    incarnation = world.make_ready()
    before = copy.deepcopy(world.objects["ConfigMap", f"web-0-{incarnation}"]["data"])
    del world.objects["ConfigMap", f"web-0-{incarnation}"]
    world.take_log()
    world.reconcile()
    assert world.take_log() == [f"create ConfigMap web-0-{incarnation}"], "nobody need hear of it"
    assert world.objects["ConfigMap", f"web-0-{incarnation}"]["data"] == before
    assert world.entry().incarnation == incarnation
    assert world.cr.status.ranks.summary == "4/4"


def test_a_launch_plan_that_is_lost_while_pods_still_need_it_begins_the_group_anew():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    del world.objects["ConfigMap", f"web-0-{incarnation}"]
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.pod, failure.charged) == ("MemberDeleted", "", False)
    world.kubelets_finish_deleting()
    world.reconcile()
    assert world.entry().incarnation != incarnation


def test_an_object_whose_name_a_stranger_has_is_not_tried_in_a_circle():
    world = World()
    incarnation = world.make_ready()
    name = f"web-0-{incarnation}-rpc"
    del world.objects["Service", name]
    world.obstacles["Service", name] = observe.Obstacle("NameTaken", "an object of this name exists that is not ours")
    assert not [action for action in world.plan().actions if isinstance(action, Create)]


def test_a_group_whose_first_name_a_stranger_has_takes_another_one_uncharged_and_ever_more_rarely():
    world = World(failurePolicy={"backoffSeconds": 10})
    names, waits = [], []
    for _ in range(3):
        decided = world.plan()
        world.cr = msgspec.structs.replace(world.cr, status=decided.status)
        names.append(f"web-0-{world.entry().incarnation}-rpc")
        world.obstacles = {
            ("Service", names[-1]): observe.Obstacle("NameTaken", "it is not ours", world.entry().incarnation)
        }
        world.reconcile()
        entry = world.entry()
        failure = entry.last_failures[0]
        assert (entry.state, entry.restarts) == ("Waiting", 0)
        assert (failure.reason, failure.charged, failure.incarnation) == ("NameTaken", False, entry.incarnation)
        assert f"Service {names[-1]}: it is not ours" in failure.message
        waits.append(observe.seconds(entry.next_attempt_at) - world.now)
        world.now += waits[-1] + 1
        world.obstacles = {}  # of an incarnation that is in the ledger no more
    assert len(set(names)) == 3
    assert [waits[n] >= 10 * 2**n - 1 for n in range(3)] == [True] * 3
    world.make_ready()
    assert world.entry().state == "Serving"


def test_a_name_that_a_stranger_takes_from_a_serving_group_ends_nothing():
    world = World()
    incarnation = world.make_ready()
    name = f"web-0-{incarnation}-rpc"
    del world.objects["Service", name]
    world.obstacles["Service", name] = observe.Obstacle("NameTaken", "it is not ours", incarnation)
    world.reconcile()
    assert (world.entry().incarnation, world.entry().state) == (incarnation, "Serving")
    assert world.condition("Stalled").reason == "NameTaken"
