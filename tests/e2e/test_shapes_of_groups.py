"""Groups of other shapes than one colocated rank per pod."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kube import ENGINE_IMAGE, LABELS, Cluster, RefusedError, Space, condition, dpd, identities, until
from tests.kinds_of_others import GANGS


def test_a_dedicated_head_serves_without_running_a_rank(space: Space) -> None:
    space.create(dpd("api", size=2, dataParallel={"headPlacement": "Dedicated"}))
    space.until_ready("api")
    assert len(space.pods("api", role="worker")) == 2
    head = space.head("api")["metadata"]["name"]
    processes = space.kubectl("exec", head, "-c", "engine", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "--data-parallel-size-local 0" in processes
    assert "EngineCore" not in processes
    space.complete_many("api", 8)
    served = space.served("api")
    assert sum(served.values()) == 8
    assert all(served[rank] for rank in (0, 1)), served


def test_the_ranks_of_a_pod_share_its_devices_each_with_its_tensor_parallel_neighbours(space: Space) -> None:
    """vllm PR#53743, #54694, #22677, #44556."""
    devices = {"assignment": "Slots", "perNode": 4}
    space.create(dpd("pairs", size=4, dataParallel={"sizeLocal": 2}, tensorParallelSize=2, devices=devices))
    status = space.until_ready("pairs", within_s=180)
    assert status["ranks"]["summary"] == "4/4"
    pods = space.pods("pairs")
    assert len(pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 2
    log = ""
    for name in pods:
        seen = space.kubectl("exec", name, "-c", "engine", "--", "printenv", "CUDA_VISIBLE_DEVICES").strip()
        assert seen == "0,1,2,3"
        log += space.kubectl("logs", name, "-c", "engine")
    for rank, mine in ((0, "0,1"), (1, "2,3"), (2, "0,1"), (3, "2,3")):
        assert f"DP rank {rank} uses cuda devices {mine}\n" in log
    space.complete_many("pairs", 16)
    served = space.served("pairs")
    assert all(served[rank] for rank in range(4)), served


def test_devices_that_narrow_pods_give_back_are_taken_by_a_wide_pod_at_once(space: Space) -> None:
    """The scheduler would let a pod with an anti-affinity term for each of its devices sleep for five minutes."""
    nodes = len(space.cluster.nodes())
    narrow = {"assignment": "Slots", "perNode": 1}
    space.create(dpd("narrow", size=1, replicas=nodes, devices=narrow))
    space.until_ready("narrow", within_s=240)
    wide = {"assignment": "Slots", "perNode": 2}
    space.create(dpd("wide", size=2, dataParallel={"sizeLocal": 2}, devices=wide))
    until(
        "the wide pod waits for a node",
        lambda: space.group("wide")["waitingFor"],
        lambda text: "Unschedulable" in text,
        within_s=30,
    )
    space.delete("dataparalleldeployments", "narrow")
    space.until_ready("wide", within_s=60)


def test_a_moe_group_with_a_colocated_head_serves(space: Space) -> None:
    space.create(dpd("moe", size=2, args=["--moe"], model={"architecture": "MoE"}))
    space.until_ready("moe")
    space.complete_many("moe", 8)
    served = space.served("moe")
    assert all(served[rank] for rank in (0, 1)), served


def test_a_moe_group_with_a_dedicated_head_is_refused_with_the_reason(space: Space) -> None:
    manifest = dpd("moe", size=2, model={"architecture": "MoE"}, dataParallel={"headPlacement": "Dedicated"})
    with pytest.raises(RefusedError) as refused:
        space.create(manifest)
    assert "rank 0 of an MoE group binds the group's store on the head's IP" in refused.value.message
    assert "write headPlacement: Colocated" in refused.value.message


def test_scaling_adds_and_removes_whole_groups_and_leaves_the_others_alone(space: Space) -> None:
    uid = space.create(dpd("scaled", size=2))["metadata"]["uid"]
    space.until_ready("scaled")
    first = identities(space.pods("scaled"))

    space.kubectl("scale", "dpd/scaled", "--replicas=2")
    status = space.until_ready("scaled", generation=2)
    assert status["readyReplicas"] == 2
    assert status["ranks"]["summary"] == "4/4"
    assert len(space.pods("scaled")) == 4
    assert identities(space.pods("scaled", group=0)) == first
    space.complete_many("scaled", 16)
    assert all(sum(space.served("scaled", group).values()) for group in (0, 1))

    space.kubectl("scale", "dpd/scaled", "--replicas=1")
    until("group 1 is gone", lambda: space.pods("scaled", group=1), lambda pods: not pods, within_s=30)
    status = space.until_ready("scaled", generation=3)
    assert status["readyReplicas"] == 1
    assert identities(space.pods("scaled")) == first

    space.kubectl("scale", "dpd/scaled", "--replicas=0")
    kept = ["services/scaled", "networkpolicies/scaled"]
    until("only what belongs to the resource is left", lambda: space.leftovers(uid), lambda x: x == kept, within_s=30)
    status = space.status("scaled")
    assert status["ranks"] == {"summary": "0/0"} or status["ranks"]["expected"] == 0
    scale = space.cluster.call("GET", space.path("dataparalleldeployments", "scaled") + "/scale")
    assert scale["status"]["replicas"] == 0
    assert scale["status"]["selector"] == f"{LABELS}/uid={uid},{LABELS}/role=head"


def test_what_the_spec_says_later_replaces_a_group_only_where_its_pods_must_change(space: Space) -> None:
    space.create(dpd("changed", size=2))
    space.until_ready("changed")
    before = identities(space.pods("changed"))

    space.spec("changed", startup={"timeoutSeconds": 1234}, failurePolicy={"backoffSeconds": 3})
    space.until_ready("changed", generation=2)
    assert identities(space.pods("changed")) == before

    space.spec("changed", engine={"args": ["--load-seconds", "0.2"]})
    space.until_ready("changed", generation=3)
    after = space.pods("changed")
    assert len(after) == 2
    assert not set(after) & set(before)
    group = space.group("changed")
    assert group["restarts"] == 0
    assert not group.get("lastFailures")


def test_a_suspended_deployment_has_no_pods_until_it_is_resumed(space: Space) -> None:
    space.create(dpd("paused", size=2))
    space.until_ready("paused")
    space.spec("paused", suspend=True)
    until("no pod is left", lambda: space.pods("paused"), lambda pods: not pods, within_s=30)
    said = until(
        "Ready says why it is not",
        lambda: condition(space.status("paused"), "Ready"),
        lambda ready: ready["reason"] == "Suspended",
        within_s=5,
    )
    assert said["status"] == "False"
    space.spec("paused", suspend=False)
    space.until_ready("paused", generation=3)
    assert len(space.pods("paused")) == 2


# Answers any request with what it was told of its group.
SIDECAR = """
import asyncio, os, pathlib, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
async def serve(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    words = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("DPD_"))
    body = "\\n".join([*words, pathlib.Path("/run/dpd/env").read_text()]).encode()
    writer.write(b"HTTP/1.0 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, None, 8000)
    await server.serve_forever()
asyncio.run(main())
"""


def test_a_sidecar_takes_the_clients_and_is_told_its_group_while_the_engine_hides_behind_it(space: Space) -> None:
    sidecar = {
        "name": "routing",
        "image": ENGINE_IMAGE,
        "restartPolicy": "Always",
        "command": ["python3", "-c", SIDECAR],
    }
    space.create(
        dpd(
            "hidden",
            size=2,
            engine={"port": 8200},
            service={"ports": [{"name": "http", "port": 80, "targetPort": 8000}]},
            template={"spec": {"initContainers": [sidecar]}},
        )
    )
    space.until_ready("hidden")
    head = space.head("hidden")
    address = head["status"]["podIP"]
    said = space.cluster.raw("GET", f"{space.path('services', 'hidden')}:80/proxy/").decode()
    assert said.split() == [
        "DPD_GROUP=0",
        "DPD_NAME=hidden",
        f"DPD_POD_IP={address}",
        f"DPD_POD_NAME={head['metadata']['name']}",
        "DPD_ROLE=head",
        "DPD_SIZE=2",
        f"DPD_HEAD_IP={address}",
        "DPD_START_RANK=0",
    ]
    (open_to_clients,) = [
        rule for rule in space.get("networkpolicies", "hidden")["spec"]["ingress"] if "from" not in rule
    ]
    assert open_to_clients["ports"] == [{"protocol": "TCP", "port": 8000}]


def test_shared_memory_that_the_pods_limit_cuts_short_is_said_while_the_group_starts(space: Space) -> None:
    """kserve/kserve PR#5155."""
    space.create(
        dpd(
            "cut",
            size=2,
            faults=["slow-load:ranks=1,seconds=20"],
            engine={"sharedMemory": "4Gi", "resources": {"limits": {"memory": "300Mi"}}},
        )
    )
    until(
        "the status says what preflight found",
        lambda: space.group("cut")["waitingFor"],
        lambda text: "MiB of 4096 MiB in /dev/shm: is the memory limit too low?" in text,
        within_s=60,
    )


def test_pods_in_the_nodes_network_do_not_share_a_node_and_serve_at_its_address(space: Space) -> None:
    """vllm#28498, #39015, #43206, gpustack#5657."""
    space.create(
        dpd(
            "host",
            size=4,
            args=["--moe"],
            model={"architecture": "MoE"},
            dataParallel={"sizeLocal": 2, "loadBalancing": "External"},
            # Ports of its own, because those of other tests are on the same nodes.
            engine={"port": 18000},
            template={"spec": {"hostNetwork": True}},
        )
    )
    status = space.until_ready("host")
    assert status["ranks"]["summary"] == "4/4"
    pods = space.pods("host")
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == len(pods) == 2
    assert all(pod["status"]["podIP"] == pod["status"]["hostIP"] for pod in pods.values())
    for port in (18000, 18001):
        assert space.complete("host", port=port)["usage"]["completion_tokens"] == 20


def test_an_api_with_tls_is_asked_with_tls_by_probe_and_monitor(space: Space, tmp_path: Path) -> None:
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine"
    subprocess.run(["openssl", *words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    space.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "tls"},
            "type": "kubernetes.io/tls",
            "data": {path.name: base64.b64encode(path.read_bytes()).decode() for path in (key, certificate)},
        },
        "secrets",
    )
    mount = {"name": "tls", "mountPath": "/tls", "readOnly": True}
    space.create(
        dpd(
            "secure",
            size=2,
            args=["--ssl-keyfile", "/tls/tls.key", "--ssl-certfile", "/tls/tls.crt"],
            engine={"scheme": "HTTPS"},
            template={
                "spec": {
                    "containers": [{"name": "engine", "volumeMounts": [mount]}],
                    "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
                }
            },
        )
    )
    space.until_ready("secure")
    assert space.snapshot("secure")["apiReady"] is True
    assert space.complete("https:secure")["usage"]["completion_tokens"] == 20


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def install_gangs(cluster: Cluster) -> Iterator[Callable[[str], str]]:
    """Installs the CRD of a gang scheduler for one test; gives the path of its objects."""
    made = []

    def install(kind: str) -> str:
        group, version, spec = GANGS[kind].group, GANGS[kind].version, GANGS[kind].spec
        crd: Any = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"podgroups.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {
                    "kind": "PodGroup",
                    "listKind": "PodGroupList",
                    "plural": "podgroups",
                    "singular": "podgroup",
                },
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
                    }
                ],
            },
        }
        if kind == "Coscheduling":  # a protected group: its CRDs say who let them in
            crd["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, for a test"}
        cluster.call("POST", CRDS, crd)
        made.append(f"{CRDS}/podgroups.{group}")
        return f"/apis/{group}/{version}"

    yield install
    for path in made:
        cluster.call("DELETE", path)


@pytest.mark.parametrize("kind", GANGS)
def test_a_gang_waits_for_its_schedulers_kind_exists_before_its_pods_and_goes_with_them(
    space: Space, install_gangs: Callable[[str], str], kind: str
) -> None:
    """The default scheduler places the pods: gang schedulers are not run here. kserve#6043."""
    template = {"spec": {"schedulerName": "default-scheduler"}}
    space.create(dpd("gang", size=2, scheduling={"podGroup": kind}, template=template))
    until(
        "the status says that the kind is missing",
        lambda: space.group("gang")["waitingFor"],
        lambda text: "PodGroup" in text and "is its CustomResourceDefinition installed?" in text,
        within_s=20,
    )
    assert not space.pods("gang")
    path = f"{install_gangs(kind)}/namespaces/{space.name}/podgroups"
    space.until_ready("gang")

    def gangs() -> Any:
        return space.cluster.call("GET", path)["items"]

    (gang,) = gangs()
    assert gang["spec"]["minMember"] == 2
    created = gang["metadata"]["creationTimestamp"]
    assert all(pod["metadata"]["creationTimestamp"] >= created for pod in space.pods("gang").values())
    for pod in space.pods("gang").values():
        assert pod["metadata"][GANGS[kind].part][GANGS[kind].key] == gang["metadata"]["name"]
    space.delete("dataparalleldeployments", "gang")
    until("the gang is gone", gangs, lambda found: not found, within_s=60)
