"""What Ready means where every pod serves, versions found in the image, and gangs."""

from __future__ import annotations

from typing import Any

import pytest

from dp_handshake.messages import Local, Stages
from dp_operator import observe, rules
from dp_operator.plan import Create
from dp_operator.status import installed_version
from tests.unit.operator.world import World

HYBRID: dict[str, Any] = {"dataParallel": {"size": 8, "sizeLocal": 2, "loadBalancing": "Hybrid"}}
SUPERVISED: dict[str, Any] = {
    "model": {"name": "m", "architecture": "MoE"},
    "dataParallel": {"size": 8, "sizeLocal": 2, "loadBalancing": "External"},
}
EXTERNAL: dict[str, Any] = {
    "model": {"name": "m", "architecture": "MoE"},
    "dataParallel": {"size": 4, "loadBalancing": "External"},
}


def set_ready(world: World, pod: dict[str, Any], *, ready: bool = True) -> None:
    pod["status"]["conditions"] = [
        {
            "type": "Ready",
            "status": "True" if ready else "False",
            "lastTransitionTime": observe.timestamp(world.now),
        }
    ]


def all_ranks_ready(world: World) -> str:
    """Every rank said READY and the head answers; the pods' own probes have not been asked."""
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.release(incarnation)
    plan = world.launch_plan(incarnation)
    everyone = f"0-{plan.size - 1}"
    world.relay_says(
        incarnation,
        ready_at=world.now,
        api_ready=True,
        stages=Stages(arrived=everyone, connected=everyone, loaded=everyone, ready=everyone),
        local=Local(expected=plan.head_ranks, connected=plan.head_ranks, loaded=plan.head_ranks, ready=plan.head_ranks),
    )
    for pod in world.pods_of(incarnation):
        set_ready(world, pod, ready=False)
    world.reconcile()
    return incarnation


@pytest.mark.parametrize("mode", [HYBRID, SUPERVISED, EXTERNAL], ids=["hybrid", "supervised", "external"])
def test_a_group_whose_pods_all_serve_is_ready_when_each_of_them_is(mode):
    """Ready although one of the servers is not, is no Ready (problems 32, 34)."""
    world = World(**mode)
    incarnation = all_ranks_ready(world)
    pods = sorted(world.pods_of(incarnation), key=lambda pod: pod["metadata"]["name"])
    for pod in pods[:-1]:
        set_ready(world, pod)
        world.reconcile()
        assert world.condition("Ready").status == "False"
    last = pods[-1]["metadata"]["name"]
    assert f"not ready: pod {last} on n" in world.entry().waiting_for
    assert last in world.condition("Ready").message
    set_ready(world, pods[-1])
    world.reconcile()
    assert world.condition("Ready").status == "True"
    assert world.entry().waiting_for == ""


def test_a_serving_pod_that_stays_unready_condemns_its_group():
    world = World(**HYBRID)
    incarnation = all_ranks_ready(world)
    pods = world.pods_of(incarnation)
    for pod in pods:
        set_ready(world, pod)
    world.reconcile()
    world.now += 100
    worker = next(pod for pod in pods if pod["metadata"]["name"].endswith("-w-1"))
    set_ready(world, worker, ready=False)
    world.reconcile()
    assert world.condition("Ready").status == "False"
    assert world.entry().waiting_for.startswith(f"not ready: pod web-0-{incarnation}-w-1")
    world.now += 61
    world.reconcile()
    failure = world.cr.status.groups[0].last_failures[0]
    assert (failure.reason, failure.rank, failure.charged) == ("PodUnhealthy", 4, True)
    assert failure.pod.endswith("-w-1")


def test_an_internal_worker_that_is_unready_does_not_matter_to_clients():
    world = World()
    incarnation = world.make_ready()
    worker = next(pod for pod in world.pods_of(incarnation) if pod["metadata"]["name"].endswith("-w-1"))
    set_ready(world, worker, ready=False)
    world.reconcile()
    assert world.condition("Ready").status == "True"


def test_the_version_in_the_image_is_shown_and_ends_the_guessing():
    world = World(engine={"image": "example/custom:1"})
    world.reconcile()
    assert world.condition("VersionAssumed").status == "True"
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.relay_says(incarnation, engine_versions={"0.31.2": 3, "0.32.0": 1})
    world.reconcile()
    assert world.entry().engine_version == "0.31.2"
    condition = world.condition("VersionAssumed")
    assert condition.status == "False"
    assert condition.message == "vLLM 0.31.2, found in the image"


def test_a_wrong_version_in_the_spec_is_pointed_out():
    world = World(engine={"image": "example/custom:1", "version": "0.33"})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.relay_says(incarnation, engine_versions={"0.31.2": 4})
    world.reconcile()
    assert "engine.version says 0.33, the image decides" in world.condition("VersionAssumed").message


def test_a_version_that_cannot_do_it_is_refused_once_it_is_known_and_not_tried_again():
    """Refuse, do not fall back or loop (problems 47, 51)."""
    changes = {"engine": {"image": "example/custom:1"}, "dataParallel": {"size": 4, "headPlacement": "Dedicated"}}
    world = World(**changes)
    world.reconcile()
    assert rules.refusals(name="web", spec=world.cr.spec) == []
    world.relay_says(world.entry().incarnation, engine_versions={"0.13.0": 5})
    world.reconcile()
    entry = world.entry()
    installed = installed_version(world.cr.status.groups, entry.revision)
    (refusal,) = rules.refusals(name="web", spec=world.cr.spec, installed=installed)
    assert "the image has vLLM 0.13.0: Dedicated needs vLLM 0.14 or newer" in refusal


def test_what_was_found_in_an_image_says_nothing_about_another_image():
    world = World(engine={"image": "example/custom:1"})
    world.reconcile()
    world.relay_says(world.entry().incarnation, engine_versions={"0.13.0": 4})
    world.reconcile()
    assert installed_version(world.cr.status.groups, world.entry().revision) == "0.13.0"
    assert installed_version(world.cr.status.groups, "another") is None


def test_what_preflight_found_is_said_while_the_group_starts():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.relay_says(incarnation, warnings=["web-w-1: shared memory: 64 MiB of 2048 MiB in /dev/shm"])
    world.reconcile()
    assert "preflight: web-w-1: shared memory: 64 MiB" in world.entry().waiting_for


def test_pods_with_different_versions_are_named_before_they_disagree():
    """One tag, two images on two nodes: vLLM hangs or ends without saying why (problem 14)."""
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.relay_says(incarnation, engine_versions={"0.31.2": 1, "0.32.0": 3})
    world.reconcile()
    assert "pods have different vLLM versions: 0.31.2 in 1, 0.32.0 in 3" in world.entry().waiting_for


@pytest.mark.parametrize("kind", ["Volcano", "Coscheduling"])
def test_a_gang_exists_before_its_pods_and_goes_with_its_incarnation(kind):
    world = World(scheduling={"podGroup": kind})
    order: list[tuple[str, Any]] = []
    for _ in range(10):
        decided = world.plan()
        world.cr = type(world.cr)(metadata=world.cr.metadata, spec=world.cr.spec, status=decided.status)
        for action in decided.actions:
            if isinstance(action, Create):
                order.append((action.manifest["kind"], action.manifest))
            world.act(action)
        if not decided.sequences:
            break
    kinds = [made for made, _ in order]
    assert kinds.index("PodGroup") < kinds.index("Pod")
    assert kinds.index("ConfigMap") < kinds.index("PodGroup")
    assert kinds.count("PodGroup") == 1
    gang = next(manifest for made, manifest in order if made == "PodGroup")
    config_map = next(o for (made, _), o in world.objects.items() if made == "ConfigMap")
    (owner,) = gang["metadata"]["ownerReferences"]
    assert owner["uid"] == config_map["metadata"]["uid"]
    assert gang["spec"]["minMember"] == 4
