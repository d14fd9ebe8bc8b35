"""What Ready means where every pod serves, versions found in the image, and gangs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dp_handshake import launch
from dp_handshake.messages import Local, Stages
from dp_operator import naming, observe, rules, symptoms
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


def found_version(world: World) -> str | None:
    """Version that the image is known to have, as the rules are asked about it."""
    return installed_version(world.cr.status.groups, naming.revision(world.cr.spec), naming.restart_token(world.cr))


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
    """Ready although one of the servers is not, is no Ready: dsx-ai-factory/workload-map#228, kserve#3845."""
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
    """A supervisor that answers 503 for ever has no deadline of its own: vllm#46509, PR#46534."""
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
    """Refuse, do not fall back or loop: lws#820/PR#877, dynamo#12164, kserve#5773."""
    changes = {"engine": {"image": "example/custom:1"}, "dataParallel": {"size": 4, "headPlacement": "Dedicated"}}
    world = World(**changes)
    world.reconcile()
    assert rules.refusals(name="web", spec=world.cr.spec) == []
    world.relay_says(world.entry().incarnation, engine_versions={"0.13.0": 5})
    world.reconcile()
    installed = found_version(world)
    (refusal,) = rules.refusals(name="web", spec=world.cr.spec, installed=installed)
    assert "with vLLM 0.13.0: Dedicated needs vLLM 0.14 or newer" in refusal


def test_what_was_found_in_an_image_says_nothing_about_another_image():
    world = World(engine={"image": "example/custom:1"})
    world.reconcile()
    world.relay_says(world.entry().incarnation, engine_versions={"0.13.0": 4})
    world.reconcile()
    assert found_version(world) == "0.13.0"
    world.change_spec(engine={"image": "example/custom:2"})
    assert found_version(world) is None


def test_a_restart_that_is_asked_for_looks_at_the_image_again():
    """The tag may be another image by now."""
    world = World(engine={"image": "example/custom:latest"})
    world.reconcile()
    world.relay_says(world.entry().incarnation, engine_versions={"0.13.0": 4})
    world.reconcile()
    world.annotate(naming.ANNOTATION_RESTART, "again")
    assert found_version(world) is None


def too_old(world: World, version: str) -> str:
    """What a launcher says at its end in an image with that version, by its own words over the real launch plan."""
    plan = json.loads(msgspec.json.encode(world.launch_plan(world.entry().incarnation)))
    found = {"role": "head", "ranks": 0, "engineVersion": version}
    return f"not started: {launch.obstacle(plan, found)}"


def test_the_attempt_that_finds_a_version_too_old_is_not_charged_and_the_spec_is_refused_with_the_true_one():
    world = World(engine={"image": "example/custom:1"}, dataParallel={"size": 4, "headPlacement": "Dedicated"})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.engine_ends(f"web-0-{incarnation}-head", code=1, message=too_old(world, "0.13.0"))
    world.reconcile()
    entry = world.cr.status.groups[0]
    assert entry.last_failures[0].reason == "EngineTooOld"
    assert (entry.last_failures[0].charged, entry.restarts, entry.state) == (False, 0, "Stopping")
    world.errors = rules.refusals(name="web", spec=world.cr.spec, installed=found_version(world))
    assert "with vLLM 0.13.0" in world.errors[0]
    world.kubelets_finish_deleting()
    world.reconcile()
    assert [group.state for group in world.cr.status.groups] == ["Waiting"], "made again although it cannot work"
    assert world.condition("Accepted").status == "False"


ELASTIC = {
    "model": {"name": "m", "architecture": "MoE"},
    "enableExpertParallel": True,
    "dataParallel": {"size": 4, "loadBalancing": "External"},
    "engine": {"image": "example/custom:1", "args": ["--enable-eplb", "--enable-elastic-ep"]},
}
TOO_OLD = [
    (ELASTIC, "0.32.0", "0.33"),
    (ELASTIC, "0.16.1", "0.33"),
    ({"engine": {"image": "x", "env": [{"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"}]}}, "0.11.2", "0.12"),
    ({"engine": {"image": "x", "args": ["--device-ids", "0"]}}, "0.23.0", "0.24"),
    ({"engine": {"image": "x", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-1"}]}}, "0.11.0", "0.11.2"),
    (
        {
            "engine": {"image": "x", "env": [{"name": "ZE_AFFINITY_MASK", "value": "GPU-1"}]},
            "devices": {"assignment": "None", "visibleDevicesEnvName": "ZE_AFFINITY_MASK"},
        },
        "0.23.0",
        "0.24",
    ),
]


@pytest.mark.parametrize(("changes", "version", "least"), TOO_OLD)
def test_whatever_needs_a_newer_version_is_noticed_before_the_engine_starts_and_is_not_charged(changes, version, least):
    """The launcher knows before the operator: an engine that started would end, and count against the group."""
    world = World(**changes)
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    said = too_old(world, version)
    assert f"the image has vLLM {version}, and " in said
    assert said.endswith(f" needs {least} or newer")
    assert too_old(world, f"{least}.0" if least.count(".") == 1 else least) == "not started: "
    world.engine_ends(f"web-0-{incarnation}-head", code=1, message=said)
    world.reconcile()
    assert not world.cr.status.groups[0].last_failures[0].charged
    assert rules.refusals(name="web", spec=world.cr.spec, installed=found_version(world))


def test_a_version_too_old_is_forgiven_once_per_image_and_then_held_against_the_group():
    """A loop without back-off would be the price if operator and launcher ever disagreed about a version."""
    world = World(engine={"image": "example/custom:1"}, dataParallel={"size": 4, "headPlacement": "Dedicated"})
    charged = []
    for _ in range(2):
        world.reconcile()
        incarnation = world.entry().incarnation
        world.run_pods(incarnation)
        world.engine_ends(f"web-0-{incarnation}-head", code=1, message=too_old(world, "0.13.0"))
        world.reconcile()
        charged.append(world.cr.status.groups[0].last_failures[0].charged)
        world.kubelets_finish_deleting()
        world.now += 60
    assert charged == [False, True]
    world.change_spec(engine={"image": "example/custom:2"}, dataParallel={"size": 4, "headPlacement": "Dedicated"})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.engine_ends(f"web-0-{incarnation}-head", code=1, message=too_old(world, "0.12.1"))
    world.reconcile()
    assert not world.cr.status.groups[0].last_failures[0].charged, "another image, another first time"


def test_a_log_that_merely_quotes_the_launcher_is_an_end_like_any_other():
    assert symptoms.version_too_old("not started: the image has vLLM 0.13.0, and x needs 0.14 or newer") == "0.13.0"
    assert not symptoms.version_too_old("ERROR: not started: the image has vLLM 0.13.0, and x needs 0.14 or newer")
    assert not symptoms.version_too_old("not started: 1 devices are visible")


def test_what_preflight_found_is_said_while_the_group_starts():
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.relay_says(incarnation, warnings=["web-w-1: shared memory: 64 MiB of 2048 MiB in /dev/shm"])
    world.reconcile()
    assert "preflight: web-w-1: shared memory: 64 MiB" in world.entry().waiting_for


def test_pods_with_different_versions_are_named_before_they_disagree():
    """One tag, two images on two nodes: vLLM hangs or ends without saying why: vllm PR#26218, PR#44718."""
    world = World()
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.relay_says(incarnation, engine_versions={"0.31.2": 1, "0.32.0": 3})
    world.reconcile()
    assert "pods have different vLLM versions: 0.31.2 in 1, 0.32.0 in 3" in world.entry().waiting_for
    world.relay_says(incarnation, python_versions={"3.10.12": 1, "3.12.3": 3})
    world.reconcile()
    assert "pods have different Python versions: 3.10.12 in 1, 3.12.3 in 3" in world.entry().waiting_for


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
