"""What holds a group up before its common release is said with its length, is bounded, and ends in a named failure."""

from __future__ import annotations

from typing import Any

import pytest

from dp_operator.observe import timestamp
from tests.unit.operator.world import START, World

IMAGE = "registry.example/vllm:large"
WAITING = {"waiting": {"reason": "PodInitializing"}}
LIMITS = {"scheduleTimeoutSeconds": 60, "timeoutSeconds": 100}


def placed(**startup: int) -> tuple[World, str]:
    """A group whose pods all have nodes, at START; the engines run, but for what a test then says."""
    world = World(startup={**LIMITS, **startup})
    world.reconcile()
    incarnation = world.entry().incarnation
    world.run_pods(incarnation)
    world.reconcile()
    return world, incarnation


def prepares(
    world: World,
    pod: str,
    *,
    mounted: bool = True,
    inits: list[dict[str, Any]] | None = None,
    sidecars: tuple[str, ...] = (),
) -> None:
    """The kubelet is at what comes before the engine of a pod."""
    found = world.pod(pod)
    named = [{"name": status["name"]} for status in inits or []]
    found["spec"] |= {
        "initContainers": [c | ({"restartPolicy": "Always"} if c["name"] in sidecars else {}) for c in named]
    }
    at = timestamp(START)
    found["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": at},
            {"type": "PodReadyToStartContainers", "status": str(mounted), "lastTransitionTime": at},
        ],
        "initContainerStatuses": inits or [],
        "containerStatuses": [{"name": "engine", "image": IMAGE, "state": WAITING}],
    }


def running(name: str, since_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"running": {"startedAt": timestamp(START + since_s)}}, **more}


def ended(name: str, at_s: float, code: int = 0) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "finishedAt": timestamp(START + at_s)}}}


# The case, what is said of it, and since when.
AT_WORK = {
    "a pull": ({}, f"pulling image {IMAGE}", 0),
    "a pull of an init container's image": (
        {"inits": [{"name": "fetch", "image": "fetch:1", "state": WAITING}]},
        "pulling image fetch:1",
        0,
    ),
    "a mount": ({"mounted": False}, "waiting for its mounts and network", 0),
    "an init container": ({"inits": [running("fetch", 5)]}, "init container fetch is still running", 5),
    "a second init container": (
        {"inits": [ended("check", 8), running("fetch", 9)]},
        "init container fetch is still running",
        9,
    ),
    "a pull after an init container": ({"inits": [ended("fetch", 20)]}, f"pulling image {IMAGE}", 20),
    "an init container between two attempts": (
        {"inits": [ended("fetch", 20, code=3)]},
        "init container fetch ended with exit code 3",
        0,
    ),
    "a pull beside a sidecar": (
        {"inits": [running("proxy", 4, started=True)], "sidecars": ("proxy",)},
        f"pulling image {IMAGE}",
        4,
    ),
    "an init container after a sidecar": (
        {"inits": [running("proxy", 4), running("fetch", 7)], "sidecars": ("proxy",)},
        "init container fetch is still running",
        7,
    ),
    "a sidecar whose startup probe fails": (
        {"inits": [running("proxy", 4, started=False)], "sidecars": ("proxy",)},
        "sidecar proxy is still starting",
        4,
    ),
}


@pytest.mark.parametrize("case", AT_WORK)
def test_what_goes_on_past_schedule_timeout_seconds_ends_in_a_failure_that_says_stage_pod_and_length(case: str):
    how, words, since_s = AT_WORK[case]
    world, incarnation = placed(timeoutSeconds=3600)
    pod = f"web-0-{incarnation}-w-1"
    prepares(world, pod, **how)
    world.now = START + 59
    decided = world.reconcile()
    assert world.entry().state == "Starting"
    assert decided.look_again_at == START + 60
    world.now = START + 61
    world.reconcile()
    (entry,) = world.cr.status.groups
    (failure,) = entry.last_failures
    assert (failure.reason, failure.pod, failure.rank, failure.node) == ("ContainersNotStarted", pod, 2, "n2")
    assert f"pod {pod} on n2 does not run its engine: {words} for {61 - since_s} s" in failure.message
    assert "(startup.scheduleTimeoutSeconds, to be raised if that takes long by its nature)" in failure.message
    assert (failure.charged, entry.restarts) == (True, 1), "the next attempt would take as long"
    assert entry.node_failures == {"n2": 1}


@pytest.mark.parametrize("case", AT_WORK)
def test_what_a_pod_is_at_before_its_engine_runs_is_said_with_how_long_it_has_lasted(case: str):
    how, words, since_s = AT_WORK[case]
    world, incarnation = placed(scheduleTimeoutSeconds=3600)
    prepares(world, f"web-0-{incarnation}-w-1", **how)
    decided = world.reconcile()
    said = f"rank 2 (pod web-0-{incarnation}-w-1 on n2): {words}"
    assert said in world.entry().waiting_for
    assert "for over" not in world.entry().waiting_for
    for after_s, long in ((10, "10 s"), (120, "2 min"), (600, "10 min")):
        world.now = max(START + since_s + after_s, decided.look_again_at)
        decided = world.reconcile()
        assert f"{said}, for over {long}" in world.entry().waiting_for


def test_pods_that_are_at_the_same_thing_are_named_together_with_the_longest_wait():
    world, incarnation = placed()
    for number, since_s in enumerate((3, 0, 9)):
        prepares(world, f"web-0-{incarnation}-w-{number}", inits=[running("fetch", since_s)])
    world.now = START + 31
    world.reconcile()
    pods = ", ".join(f"web-0-{incarnation}-w-{n} on n{n + 1}" for n in range(3))
    words = f"ranks 1-3 (pods {pods}): init container fetch is still running, for over 30 s"
    assert words in world.entry().waiting_for


def test_a_pod_without_a_node_is_said_to_wait_with_how_long_it_has():
    world = World()
    world.reconcile()
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    for pod in world.pods_of(world.entry().incarnation):
        pod["status"] = {"conditions": [scheduled | {"lastTransitionTime": timestamp(world.now)}]}
    world.now += 130
    world.reconcile()
    assert "Unschedulable: 0/4 nodes, for over 2 min" in world.entry().waiting_for


def test_how_many_pods_are_late_is_said_with_the_first_of_them():
    world, incarnation = placed()
    for number in (2, 1):
        prepares(world, f"web-0-{incarnation}-w-{number}")
    world.now += 61
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert (failure.pod, failure.rank) == (f"web-0-{incarnation}-w-1", 2)
    assert "does not run its engine (nor do 1 more): pulling image" in failure.message
    assert world.cr.status.groups[0].node_failures == {}, "a registry that is slow is no node's fault"


def test_what_cannot_start_is_named_before_what_goes_on():
    world, incarnation = placed()
    prepares(world, f"web-0-{incarnation}-head")
    stuck = world.pod(f"web-0-{incarnation}-w-2")
    stuck["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CreateContainerConfigError"}}
    world.now += 61
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert (failure.reason, failure.pod) == ("ContainerStuck", stuck["metadata"]["name"])


def test_an_image_that_cannot_be_pulled_is_no_launcher_that_is_late():
    world, incarnation = placed(scheduleTimeoutSeconds=900, timeoutSeconds=60)
    stuck = world.pod(f"web-0-{incarnation}-w-2")
    stuck["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ImagePullBackOff"}}
    world.now += 899
    world.reconcile()
    assert world.entry().state == "Starting"
    world.now += 2
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert (failure.reason, failure.pod) == ("ImagePullFailed", stuck["metadata"]["name"])


def test_a_worker_that_vanishes_before_the_release_was_deleted_and_is_not_late():
    """By `kubectl delete --force` or the pod garbage collector: it was never seen to end."""
    world, incarnation = placed(timeoutSeconds=3600)
    world.now += 110
    del world.objects["Pod", f"web-0-{incarnation}-w-1"]
    world.reconcile()
    (entry,) = world.cr.status.groups
    (failure,) = entry.last_failures
    assert (failure.reason, failure.charged, entry.restarts) == ("MemberDeleted", False, 0)


def test_a_worker_that_is_made_again_before_the_release_has_the_whole_time_for_a_node_and_its_engine():
    world, incarnation = placed(timeoutSeconds=3600)
    world.now += 110
    pod = world.pod(f"web-0-{incarnation}-w-1")
    pod["metadata"] |= {"uid": "another", "creationTimestamp": timestamp(world.now)}
    pod["spec"]["nodeName"] = ""
    lacking = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    pod["status"] = {"conditions": [lacking | {"lastTransitionTime": timestamp(world.now)}]}
    world.now += 59
    world.reconcile()
    assert world.entry().incarnation == incarnation
    world.now += 2
    world.reconcile()
    (entry,) = world.cr.status.groups
    (failure,) = entry.last_failures
    assert (failure.reason, failure.charged, entry.restarts) == ("WaitingForCapacity", False, 0)
    assert "0/4 nodes" in failure.message


def test_a_worker_that_was_made_again_while_the_operator_was_away_is_not_late_before_the_monitor_is_heard():
    """Its group may have been released meanwhile, and then it was deleted."""
    world, incarnation = placed(timeoutSeconds=3600)
    head = world.pod(f"web-0-{incarnation}-head")
    world.now += 5000
    pod = f"web-0-{incarnation}-w-1"
    prepares(world, pod)
    world.pod(pod)["metadata"] |= {"uid": "another", "creationTimestamp": timestamp(START + 4000)}
    head["status"]["initContainerStatuses"] = [running("relay")]
    world.reconcile()
    assert world.entry().incarnation == incarnation
    world.pod(pod)["metadata"]["creationTimestamp"] = timestamp(START - 1)
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert failure.reason == "ContainersNotStarted", "an engine that never ran was not released"


def test_what_a_node_says_of_before_the_pod_was_made_is_its_clocks_fault():
    world, incarnation = placed()
    prepares(world, f"web-0-{incarnation}-w-1", inits=[running("fetch", -7200)])
    world.now += 31
    world.reconcile()
    assert "init container fetch is still running, for over 30 s" in world.entry().waiting_for


def test_a_long_preparation_takes_nothing_of_the_time_that_launchers_have():
    world, incarnation = placed(scheduleTimeoutSeconds=500)
    pod = f"web-0-{incarnation}-w-1"
    prepares(world, pod)
    world.now = START + 400
    world.reconcile()
    assert world.entry().state == "Starting", "timeoutSeconds is not for what comes before the engine"
    world.pod(pod)["status"]["containerStatuses"] = [running("engine", 400)]
    world.now = START + 499
    world.reconcile()
    assert world.entry().state == "Starting"
    world.now = START + 501
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert failure.reason == "CheckInDeadlineExceeded"


@pytest.mark.parametrize(("wrong_by_s", "ends_at_s"), [(-3600, 100), (3600, 160)])
def test_a_node_whose_clock_is_wrong_moves_the_launchers_deadline_by_no_more_than_the_containers(
    wrong_by_s: int, ends_at_s: int
):
    world, incarnation = placed()
    for pod in world.pods_of(incarnation):
        pod["status"]["containerStatuses"] = [running("engine", wrong_by_s)]
    world.reconcile()
    world.now = START + ends_at_s - 1
    world.reconcile()
    assert world.entry().state == "Starting"
    world.now = START + ends_at_s + 1
    world.reconcile()
    (failure,) = world.cr.status.groups[0].last_failures
    assert failure.reason == "CheckInDeadlineExceeded"


@pytest.mark.parametrize("begun", [True, False])
def test_an_operator_that_was_away_past_the_deadline_goes_by_what_runs_when_it_is_back(*, begun: bool):
    world, incarnation = placed()
    pod = f"web-0-{incarnation}-w-1"
    prepares(world, pod)
    world.reconcile()
    world.now = START + 5000
    if begun:
        world.pod(pod)["status"]["containerStatuses"] = [running("engine", 4990)]
    world.reconcile()
    failures = [failure.reason for failure in world.cr.status.groups[0].last_failures]
    assert failures == ([] if begun else ["ContainersNotStarted"])


def test_raising_schedule_timeout_seconds_during_a_download_lets_it_go_on_and_touches_no_pod():
    world, incarnation = placed()
    prepares(world, f"web-0-{incarnation}-w-1", inits=[running("fetch")])
    world.now += 50
    world.reconcile()
    world.take_log()
    world.change_spec(startup={"scheduleTimeoutSeconds": 3600})
    world.now += 1000
    world.reconcile()
    assert world.entry().incarnation == incarnation
    assert not [line for line in world.take_log() if line.startswith(("create", "delete"))]


def test_an_init_container_that_fails_for_good_is_named_and_not_taken_for_a_deletion():
    """The kubelet does not restart it in a head, whose pod then fails without a word of its own; the sidecar ends last."""
    world, incarnation = placed()
    head = f"web-0-{incarnation}-head"
    prepares(world, head, inits=[ended("relay", 9, code=143), ended("fetch", 8, code=3)], sidecars=("relay",))
    world.pod(head)["status"]["phase"] = "Failed"
    world.now += 10
    world.reconcile()
    (entry,) = world.cr.status.groups
    (failure,) = entry.last_failures
    assert (failure.reason, failure.pod, failure.charged) == ("InitContainerFailed", head, True)
    assert "its init container fetch exited with code 3" in failure.message
    assert entry.restarts == 1
