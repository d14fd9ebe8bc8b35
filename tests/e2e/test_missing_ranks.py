"""A rank that does not get on is named in the status: rank, pod, node, stage and why, within five seconds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.conftest import LateGroup
from tests.e2e.kube import ENGINE_IMAGE, Cluster, Film, Space, condition, dpd, engine_state, identities, until

NAMED_WITHIN_S = 5
GPU = "example.com/gpu-of-e2e"


def says(space: Space, name: str, *words: str) -> str:
    """Wait until condition Ready and the group's own line both have all the words. Returns the latter."""

    def look() -> tuple[str, str]:
        status = space.status(name)
        return condition(status, "Ready")["message"], status["groups"][0]["waitingFor"]

    _, line = until(
        f"Ready and waitingFor say {words}",
        look,
        lambda texts: all(word in text for word in words for text in texts),
        within_s=NAMED_WITHIN_S,
    )
    return line


def where(space: Space, pod: str) -> str:
    return f"{pod} on {space.get('pods', pod)['spec']['nodeName']}"


def worker(space: Space, name: str, ordinal: int) -> Any:
    """A worker pod of a group without device slots."""
    (pod,) = [
        pod for pod in space.pods(name, role="worker").values() if pod["metadata"]["name"].endswith(f"-{ordinal}")
    ]
    return pod


@pytest.fixture
def devices_per_node(cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """Give every node some devices of a resource that exists only here."""
    field = GPU.replace("/", "~1")

    def give(count: int) -> None:
        for node in cluster.nodes():
            amounts = {GPU: str(count)}
            patch = {"status": {"capacity": amounts, "allocatable": amounts}}
            path = f"/api/v1/nodes/{node}/status"
            cluster.call("PATCH", path, patch, content_type="application/merge-patch+json")

    yield give
    for node in cluster.nodes():
        for place in ("capacity", "allocatable"):
            patch = [{"op": "remove", "path": f"/status/{place}/{field}"}]
            path = f"/api/v1/nodes/{node}/status"
            cluster.call("PATCH", path, patch, content_type="application/json-patch+json")


def test_a_rank_without_a_free_device_is_named_until_there_is_one(
    space: Space, devices_per_node: Callable[[int], None]
) -> None:
    """vllm-project/vllm#17676."""
    devices_per_node(1)
    nodes = len(space.cluster.nodes())
    space.create(dpd("gpus", size=nodes + 1, devices={"assignment": "DevicePlugin", "resourceName": GPU}))

    def pods_by_place() -> tuple[list[str], list[str]]:
        """Names of pods that found a node, and of those that found none."""
        pods = space.pods("gpus")
        refused = [
            name
            for name, pod in pods.items()
            for found in pod["status"].get("conditions", [])
            if found["type"] == "PodScheduled" and found["status"] == "False"
        ]
        return [name for name, pod in pods.items() if pod["spec"].get("nodeName")], refused

    placed, (name,) = until(
        "every node has one pod, and one pod has no node",
        pods_by_place,
        lambda names: (len(names[0]), len(names[1])) == (nodes, 1),
        within_s=30,
    )
    rank = 0 if name.endswith("-head") else int(name.rpartition("-")[2]) + 1
    says(space, "gpus", f"rank {rank} (pod {name}): Unschedulable: 0/", f"Insufficient {GPU}")
    assert {space.get("pods", pod)["spec"]["nodeName"] for pod in placed} == set(space.cluster.nodes())
    devices_per_node(2)
    space.until_ready("gpus")
    assert space.group("gpus")["restarts"] == 0


def test_ranks_whose_image_cannot_be_pulled_are_named_with_the_image(space: Space) -> None:
    """vllm-project/vllm#17676, lws PR#725/#726."""
    image = f"localhost/dp-engine:absent-{uuid.uuid4().hex[:6]}"
    space.create(dpd("unpulled", size=2, engine={"image": image}))

    def held() -> list[str]:
        states = [engine_state(pod).get("waiting", {}).get("reason", "") for pod in space.pods("unpulled").values()]
        return [reason for reason in states if reason in ("ErrImagePull", "ImagePullBackOff")]

    until("both pods cannot pull", held, lambda reasons: len(reasons) == 2, within_s=30)
    head, other = space.head("unpulled")["metadata"]["name"], worker(space, "unpulled", 0)["metadata"]["name"]
    text = says(space, "unpulled", "0 of 2 ranks arrived", where(space, head), where(space, other), image)
    assert "ImagePullBackOff" in text
    assert "rank 0 (" in text or "ranks 0-1 (" in text


def test_an_init_container_that_outlasts_its_time_is_named_and_a_corrected_spec_goes_on_at_once(space: Space) -> None:
    """A download before the engine is waited for in words, but not for ever: lws PR#725/#726."""

    def fetching(seconds: int) -> Any:
        command = ["python3", "-c", f"import time; time.sleep({seconds})"]
        return {"spec": {"initContainers": [{"name": "fetch", "image": ENGINE_IMAGE, "command": command}]}}

    limits = {"scheduleTimeoutSeconds": 20}
    policy = {"backoffSeconds": 600, "maxBackoffSeconds": 600}
    space.create(dpd("fetched", size=2, startup=limits, failurePolicy=policy, template=fetching(600)))
    until(
        "what is waited for is said with its length",
        lambda: space.group("fetched")["waitingFor"],
        lambda text: "init container fetch is still running, for over 10 s" in text,
        within_s=40,
    )
    group = until(
        "the group has failed",
        lambda: space.group("fetched"),
        lambda group: group.get("lastFailures"),
        within_s=40,
    )
    (failure,) = group["lastFailures"]
    assert (failure["reason"], failure["rank"], failure["charged"]) == ("ContainersNotStarted", 0, True), failure
    assert failure["node"] in space.cluster.nodes()
    words = (
        f"pod {failure['pod']} on {failure['node']} does not run its engine (nor do 1 more): init container fetch is "
    )
    assert words in failure["message"]
    assert "startup.scheduleTimeoutSeconds, to be raised" in failure["message"]
    waited_s = datetime.fromisoformat(failure["time"]) - datetime.fromisoformat(group["scheduledAt"])
    assert 20 <= waited_s.total_seconds() < 20 + NAMED_WITHIN_S
    space.spec("fetched", template=fetching(1))
    space.until_ready("fetched", generation=2)


def test_a_rank_that_crashes_is_named_with_pod_node_and_exit_code(space: Space) -> None:
    """vllm#50282."""
    space.create(dpd("crash", size=3, faults=["crash-before-hello:ranks=2"], failurePolicy={"backoffSeconds": 60}))
    status = until(
        "the failure is in the ledger",
        lambda: space.status("crash"),
        lambda status: status["groups"][0]["lastFailures"],
        within_s=60,
    )
    named_at = time.time()
    group = status["groups"][0]
    failure = group["lastFailures"][0]
    ended_at = datetime.fromisoformat(failure["time"]).timestamp()
    assert named_at - ended_at < NAMED_WITHIN_S
    assert failure["rank"] == 2
    assert failure["reason"] == "EngineExited"
    assert failure["pod"].endswith("-w-1")
    assert failure["node"] in space.cluster.nodes()
    # As with vLLM: a headless node whose rank dies ends with exit code 0.
    assert failure["exitCode"] == 0
    message = condition(status, "Ready")["message"]
    assert "rank 2" in message
    assert f"pod {failure['pod']} on {failure['node']} exited with code 0" in message


def test_clients_are_sent_to_nobody_while_the_group_starts(space: Space) -> None:
    def ready_in(slice_: Any) -> list[str]:
        return [
            address
            for endpoint in slice_["endpoints"] or []
            if endpoint["conditions"].get("ready", True)  # as the API says: unknown counts as ready
            for address in endpoint["addresses"]
        ]

    ours = {"kubernetes.io/service-name": "quiet"}
    with Film(space, "endpointslices") as film:
        space.create(dpd("quiet", size=2, faults=["slow-load:ranks=1,seconds=8"]))
        until(
            "rank 1 loads",
            lambda: space.snapshot("quiet")["stages"],
            lambda seen: seen.get("connected") == "0-1" and seen.get("loaded") == "0",
            within_s=60,
        )
        address = space.head("quiet")["status"]["podIP"]
        (slice_,) = space.find("endpointslices", "kubernetes.io/service-name=quiet")
    frames = [frame for frame in film.frames if ours.items() <= frame["metadata"]["labels"].items()]
    assert frames
    assert [ready_in(frame) for frame in [*frames, slice_]] == [[]] * (len(frames) + 1)
    assert address in [address for endpoint in slice_["endpoints"] for address in endpoint["addresses"]]
    space.until_ready("quiet")
    until(
        "the head is sent clients",
        lambda: space.find("endpointslices", "kubernetes.io/service-name=quiet"),
        lambda slices: [ready_in(slice_) for slice_ in slices] == [[address]],
        within_s=10,
    )


def test_ranks_that_do_not_connect_or_do_not_load_are_named_with_their_stage(space: Space) -> None:
    """Not connected is another reason than connected and not loaded.

    vllm-project/vllm#17676, vllm#50282, vllm#13778, #17167, #49594.
    """
    faults = ["slow-import:ranks=1,seconds=7", "slow-load:ranks=2,seconds=15"]
    space.create(dpd("slow", size=4, faults=faults))

    def stages() -> Any:
        return space.snapshot("slow")["stages"]

    until("all but rank 1 are connected", stages, lambda seen: seen.get("connected") == "0,2-3", within_s=60)
    importing = where(space, worker(space, "slow", 0)["metadata"]["name"])
    text = says(space, "slow", "3 of 4 ranks connected", f"not connected: rank 1 (pod {importing})")
    assert "after release" in text
    assert space.status("slow")["ranks"]["arrived"] == 4

    until("all but rank 2 are loaded", stages, lambda seen: seen.get("loaded") == "0-1,3", within_s=60)
    loading = where(space, worker(space, "slow", 1)["metadata"]["name"])
    says(space, "slow", "3 of 4 ranks loaded", f"not loaded: rank 2 (pod {loading})")
    group = space.group("slow")
    assert group["stages"]["connected"] == "0-3"
    assert group["stages"]["loaded"] == "0-1,3"
    space.until_ready("slow")
    assert space.group("slow")["restarts"] == 0


def test_a_head_whose_image_comes_a_minute_late_costs_nobody_a_restart(
    late_group: LateGroup, bed: Bed | KindCluster
) -> None:
    """The clock starts with the release, not with the pod: lws PR#725/#726, aws-samples/aws-do-eks PR#70."""
    space, image, head_node, since = late_group
    pods = space.pods("late")
    early = [pod for pod in pods.values() if pod["spec"]["nodeName"] != head_node]

    def minute_over() -> bool:
        running = [bool(engine_state(space.get("pods", pod["metadata"]["name"])).get("running")) for pod in early]
        return all(running) and time.monotonic() - since > 60

    until("the others run, and a minute is over", minute_over, within_s=100)
    head = space.head("late")["metadata"]["name"]
    says(space, "late", "ranks arrived; waiting for rank", f"{head} on {head_node}", image, "ImagePullBackOff")
    bed.tag_image(ENGINE_IMAGE, image, node_name=head_node)
    space.until_ready("late", within_s=120)
    assert {name: uid for name, (uid, _) in identities(space.pods("late")).items()} == {
        name: pod["metadata"]["uid"] for name, pod in pods.items()
    }
    assert all(restarts == 0 for _, restarts in identities(space.pods("late")).values())
    assert space.group("late")["restarts"] == 0
    space.complete_many("late", 4)
