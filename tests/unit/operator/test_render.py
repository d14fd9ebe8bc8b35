"""What is rendered: golden files for whole groups, and by name the rules that cost people a night."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given

from dp_operator import render, rules, structural
from dp_operator.render import Incarnation
from tests.kinds_of_others import GANGS, KUEUE
from tests.unit.operator.shapes import specs
from tests.unit.operator.world import SETTINGS, resource

CASES: dict[str, dict[str, Any]] = {
    "colocated": {},
    "dedicated": {"dataParallel": {"size": 4, "headPlacement": "Dedicated"}},
    "slots": {"dataParallel": {"size": 8}, "devices": {"assignment": "Slots", "perNode": 4}},
    "slots-dedicated": {
        "dataParallel": {"size": 8, "headPlacement": "Dedicated"},
        "devices": {"assignment": "Slots", "perNode": 4},
    },
    "wide-moe": {
        "model": {"name": "org/moe", "architecture": "MoE"},
        "dataParallel": {"size": 16, "sizeLocal": 4},
        "tensorParallelSize": 2,
        "enableExpertParallel": True,
        "devices": {"assignment": "DevicePlugin"},
        "engine": {
            "image": "vllm/vllm-openai:v0.32.0",
            "args": ["--max-model-len", "4096"],
            "env": [{"name": "HF_HOME", "value": "/models"}],
            "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
        },
        "headResources": {"limits": {"memory": "96Gi"}},
    },
    "hybrid": {"dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"}},
    "external": {
        "model": {"name": "m", "architecture": "MoE"},
        "dataParallel": {"size": 2, "loadBalancing": "External"},
        "devices": {"assignment": "Slots", "perNode": 2},
    },
    "supervised": {
        "model": {"name": "m", "architecture": "MoE"},
        "engine": {"image": "vllm/vllm-openai:v0.32.0", "scheme": "HTTPS"},
        "dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "External"},
    },
    "volcano": {"scheduling": {"podGroup": "Volcano"}},
    "coscheduling": {
        "scheduling": {"podGroup": "Coscheduling"},
        "template": {"spec": {"schedulerName": "gangs"}},
    },
    "kueue": {
        "scheduling": {"podGroup": "Kueue"},
        "template": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}},
    },
    "templates": {
        "devices": {"assignment": "Slots", "perNode": 4},
        "template": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
            "spec": {
                "priorityClassName": "high",
                "imagePullSecrets": [{"name": "registry"}],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "affinity": {
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "zone", "labelSelector": {"matchLabels": {"team": "b"}}}
                        ]
                    }
                },
                "initContainers": [{"name": "fetch", "image": "fetch:1"}],
                "containers": [
                    {
                        "name": "engine",
                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                    },
                    {"name": "routing", "image": "routing:1", "env": [{"name": "DPD_SIZE", "value": "mine"}]},
                ],
                "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            },
        },
        "headTemplate": {"spec": {"nodeSelector": {"pool": "front"}, "priorityClassName": "higher"}},
    },
    "one-pod": {"dataParallel": {"size": 4, "sizeLocal": 4}},
    "one-rank": {"dataParallel": {"size": 1}},
}


def incarnation(**changes: Any) -> Incarnation:
    return Incarnation(cr=resource(**changes), group=0, id="abcde", revision="0123456789", settings=SETTINGS)


def everything(inc: Incarnation) -> list[dict[str, Any]]:
    found = render.group_objects(inc, "198.19.0.9")
    config_map = next(manifest for manifest in found if manifest["kind"] == "ConfigMap")
    config_map["data"]["launch.py"] = "(the launcher)"
    plan = msgspec.json.decode(config_map["data"]["plan.json"])
    config_map["data"]["plan.json"] = yaml.safe_dump(plan, sort_keys=False, default_flow_style=None, width=110)
    return [_shortened(manifest) for manifest in (*found, *render.kept_objects(inc.cr, SETTINGS))]


def _shortened(part: Any) -> Any:
    """Long lists, such as all slots that share a device, as their beginning: test_devices.py looks at them."""
    if isinstance(part, dict):
        return {name: _shortened(value) for name, value in part.items()}
    if isinstance(part, list):
        if len(part) > 30 and all(isinstance(item, str) for item in part):
            return [*part[:4], f"({len(part)} in all)"]
        return [_shortened(item) for item in part]
    return part


class _Dumper(yaml.SafeDumper):
    """Writes repeated objects out and long texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str, lambda d, s: d.represent_scalar("tag:yaml.org,2002:str", s, style="|" if "\n" in s else None)
)


@pytest.mark.parametrize("case", CASES)
def test_objects_of_a_group_are_as_reviewed(case, golden):
    documents = everything(incarnation(**CASES[case]))
    golden(f"{case}.yaml", yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120))


@given(specs())
def test_ranks_cover_every_number_once_and_no_two_ranks_of_a_node_share_a_device(spec):
    if rules.refusals(name="web", spec=spec):
        return
    seen = list(range(render.head_ranks(spec)))
    for first in render.worker_pods(spec, "base").values():
        seen += range(first, first + spec.data_parallel.size_local)
    assert sorted(seen) == list(range(spec.data_parallel.size))
    if spec.devices.assignment == "Slots":
        sets = render.worker_sets(spec, "base")
        slots = {ws.first_rank // spec.data_parallel.size_local: ws for ws in sets}
        used = [device for slot in slots for device in render.slot_devices(spec, slot)]
        assert len(used) == len(set(used))
        assert all(0 <= device < spec.devices.per_node for device in used)


def test_service_environment_variables_are_off_because_a_service_named_vllm_breaks_vllm():
    """A Service called vllm would inject VLLM_PORT=tcp://…: vllm#34199, #15613, PR#18209."""
    inc = incarnation()
    pods = [render.head_pod(inc)["spec"], *(s["spec"]["template"]["spec"] for s in render.stateful_sets(inc))]
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_the_address_that_pods_wait_for_leads_to_a_head_that_is_not_ready_yet():
    """Nobody is ready before all have met, and a Service hides what is not ready: lws#85/PR#105, aibrix PR#1441."""
    inc = incarnation()
    service = render.rpc_service(inc)
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= render.head_pod(inc)["metadata"]["labels"].items()
    for stateful_set in render.stateful_sets(inc):
        labels = stateful_set["spec"]["template"]["metadata"]["labels"]
        assert not service["spec"]["selector"].items() <= labels.items()


def test_a_cr_deadline_is_vllms_deadline_too():
    """One field of the resource drives both clocks: vllm PR#27444, neutree PR#572."""
    pod = render.head_pod(incarnation(startup={"timeoutSeconds": 7200}))
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"


def test_shared_memory_grows_with_the_ranks_of_a_pod():
    """The default of container runtimes, 64 MiB, ends in bus errors: kserve/kserve PR#5155."""
    pod = render.head_pod(incarnation(dataParallel={"size": 8, "sizeLocal": 4}))
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.parametrize(
    ("quantity", "factor", "expected"),
    [
        ("2Gi", 4, "8Gi"),
        ("1.5Gi", 3, "4.5Gi"),
        ("1.5Gi", 2, "3Gi"),
        (".5Gi", 1, "0.5Gi"),
        (1024, 2, "2048"),
        ("1e3", 2, "2e3"),
        ("100M", 1, "100M"),
    ],
)
def test_quantities_are_multiplied_in_their_own_unit(quantity, factor, expected):
    assert render.multiply(quantity, factor) == expected


def test_the_dedicated_head_has_no_devices_and_the_workers_do():
    inc = incarnation(
        dataParallel={"size": 2, "headPlacement": "Dedicated"},
        devices={"assignment": "DevicePlugin", "resourceName": "example.com/gpu"},
        tensorParallelSize=2,
    )
    head = render.head_pod(inc)["spec"]["containers"][0]
    worker = render.stateful_sets(inc)[0]["spec"]["template"]["spec"]["containers"][0]
    assert "limits" not in head["resources"]
    assert worker["resources"]["limits"] == {"example.com/gpu": 2}


def test_an_empty_api_from_lets_nobody_in_and_an_absent_one_everybody():
    def rules_of(policy: dict[str, Any]) -> list[dict[str, Any]]:
        rendered = render.network_policy(resource(networkPolicy=policy), SETTINGS)
        assert rendered
        return [
            rule for rule in rendered["spec"]["ingress"] if {"protocol": "TCP", "port": "api"} in rule.get("ports", [])
        ]

    assert "from" not in rules_of({})[0]
    assert rules_of({"apiFrom": []}) == []
    assert rules_of({"apiFrom": [{"podSelector": {}}]})[0]["from"] == [{"podSelector": {}}]


def test_a_client_port_leads_to_the_engine_unless_told_otherwise():
    service = render.client_service(resource(service={"ports": [{"port": 80}, {"port": 81, "targetPort": 9000}]}))
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(80, "api"), (81, 9000)]


def serving_pods(**changes: Any) -> dict[str, dict[str, Any]]:
    """Pod templates of a group by name, those that the client Service selects."""
    inc = incarnation(**changes)
    selector = render.client_service(inc.cr)["spec"]["selector"]
    head = render.head_pod(inc)
    templates = {"head": head} | {s["metadata"]["name"]: s["spec"]["template"] for s in render.stateful_sets(inc)}
    return {name: t for name, t in templates.items() if selector.items() <= t["metadata"]["labels"].items()}


MODES: dict[str, dict[str, Any]] = {
    "Internal": {"dataParallel": {"size": 4}},
    "Hybrid": {"dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"}},
    "External": {
        "model": {"name": "m", "architecture": "MoE"},
        "dataParallel": {"size": 4, "loadBalancing": "External"},
    },
    "supervised": {
        "model": {"name": "m", "architecture": "MoE"},
        "dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "External"},
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_clients_reach_exactly_the_pods_that_have_an_api(mode):
    """A Service that selects headless workers too loses part of the requests.

    vllm-project/aibrix#2116, volcano-sh/kthena#820.
    """
    expected = {"head"} if mode == "Internal" else {"head", "web-0-abcde-w"}
    assert set(serving_pods(**MODES[mode])) == expected


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_that_serves_is_ready_by_its_own_api_and_others_by_the_handshake(mode):
    """Readiness from the engine, not from the process: aws-do-eks PR#79, awslabs PR#1256.

    And nobody has to write probes by hand: llm-d PR#329 (WIP) and its readiness doc.
    """
    inc = incarnation(**MODES[mode])
    worker = render.stateful_sets(inc)[0]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    head = render.head_pod(inc)["spec"]["containers"][0]["readinessProbe"]
    assert ("exec" in worker) == (mode == "Internal")
    if mode == "supervised":
        assert head["httpGet"] == {"path": "/readyz", "port": "supervisor", "scheme": "HTTP"}
    else:
        assert head["httpGet"] == {"path": "/health", "port": "api", "scheme": "HTTP"}
    if mode != "Internal":
        assert worker == head


def test_a_supervised_group_has_a_service_port_for_every_local_rank():
    """One endpoint a rank is what routers that know ranks want.

    gateway-api-inference-extension#2950, aibrix#1858, gpustack#5742.
    """
    service = render.client_service(resource(**MODES["supervised"]))
    assert [(p["name"], p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [
        ("http-0", 8000, "api"),
        ("http-1", 8001, "api-1"),
    ]
    policy = render.network_policy(resource(**MODES["supervised"]), SETTINGS)
    assert policy
    assert policy["spec"]["ingress"][-1]["ports"] == [
        {"protocol": "TCP", "port": "api"},
        {"protocol": "TCP", "port": "api-1"},
    ]


def test_service_ports_that_have_the_number_of_a_rank_lead_to_that_rank():
    """Two ports to one rank would leave the other without requests: gateway-api-inference-extension#2950, aibrix#1858."""
    ports = [{"port": port, "name": f"p{port}"} for port in (80, 8000, 8001)]
    cr = resource(**MODES["supervised"], service={"ports": ports})
    service = render.client_service(cr)
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [
        (80, "api"),
        (8000, "api"),
        (8001, "api-1"),
    ]
    policy = render.network_policy(cr, SETTINGS)
    assert policy
    assert [p["port"] for p in policy["spec"]["ingress"][-1]["ports"]] == ["api", "api-1"]


@pytest.mark.parametrize("path", ["/run/dpd", "/run/dpd/"])
def test_a_guest_that_mounts_something_where_the_group_file_would_be_keeps_its_mount(path):
    """Two mounts at one path are refused by the API server, and then no pod of the group starts."""
    mount = {"name": "mine", "mountPath": path}
    guests = [{"name": "a", "image": "a", "volumeMounts": [mount]}, {"name": "b", "image": "b"}]
    template = {"spec": {"containers": guests, "volumes": [{"name": "mine", "emptyDir": {}}]}}
    pod = render.head_pod(incarnation(template=template))["spec"]
    mounts = {c["name"]: c["volumeMounts"] for c in pod["containers"]}
    assert mounts["a"] == [mount]
    assert mounts["b"] == [{"name": "dpd-group", "mountPath": "/run/dpd", "readOnly": True}]


def test_an_engine_behind_a_sidecar_is_not_open_to_clients():
    cr = resource(service={"ports": [{"port": 80, "targetPort": 8100}]})
    policy = render.network_policy(cr, SETTINGS)
    assert policy
    assert policy["spec"]["ingress"][-1]["ports"] == [{"protocol": "TCP", "port": 8100}]


def test_peers_reach_every_port_and_nobody_else_does():
    """ZeroMQ ports without authentication must not be open to the cluster: ModelTC/LightLLM#1413, sglang#24618."""
    policy = render.network_policy(resource(networkPolicy={"peers": ["decode"]}), SETTINGS)
    assert policy
    assert policy["spec"]["ingress"][0] == {
        "from": [
            {"podSelector": {"matchLabels": {"dataparallel.io/uid": "uid-1"}}},
            {"podSelector": {"matchLabels": {"dataparallel.io/name": "decode"}}},
        ]
    }
    assert all("ports" in rule for rule in policy["spec"]["ingress"][1:])


@given(specs())
def test_a_gang_counts_all_pods_of_a_group(spec):
    inc = msgspec.structs.replace(
        incarnation(scheduling={"podGroup": "Volcano"}),
        cr=msgspec.structs.replace(
            resource(),
            spec=msgspec.structs.replace(spec, scheduling=resource(scheduling={"podGroup": "Volcano"}).spec.scheduling),
        ),
    )
    gang = render.pod_group(inc)
    assert gang
    assert gang["spec"]["minMember"] == 1 + sum(s["spec"]["replicas"] for s in render.stateful_sets(inc))
    name = render.head_pod(inc)["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
    assert name == gang["metadata"]["name"]


def test_in_the_nodes_network_every_port_is_declared_so_that_the_scheduler_keeps_pods_apart():
    """Kubernetes makes a hostPort of each declared port then: vllm#28498, #39015, #43206, gpustack#5657."""
    changes = MODES["supervised"] | {"template": {"spec": {"hostNetwork": True}}}
    pod = render.head_pod(incarnation(**changes))["spec"]
    assert pod["hostNetwork"] is True
    declared = {p["containerPort"] for c in (*pod["containers"], *pod["initContainers"]) for p in c["ports"]}
    assert declared == {8000, 8001, 9256, 13345, 13346, 13350}


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("2Gi", 2**31), ("1.5Ki", 1536), ("1e3", 1000), (1024, 1024), ("100M", 10**8), ("1500m", 1), (".5Ki", 512)],
)
def test_quantities_are_read_as_bytes(quantity, expected):
    assert render.in_bytes(quantity) == expected


@pytest.mark.parametrize("kind", GANGS)
def test_a_pod_group_fits_its_crd_and_every_pod_names_it(kind):
    inc = incarnation(scheduling={"podGroup": kind})
    gang, other = render.pod_group(inc), GANGS[kind]
    assert gang
    assert (gang["apiVersion"], gang["kind"]) == (f"{other.group}/{other.version}", "PodGroup")
    assert list(structural.errors(other.spec, gang["spec"], "spec")) == []
    for metadata in metadata_of_pods(inc):
        assert metadata[other.part][other.key] == gang["metadata"]["name"]


def test_every_pod_has_what_kueue_asks_of_a_pod_group():
    queue = {"kueue.x-k8s.io/queue-name": "team"}
    changes: dict[str, Any] = {"scheduling": {"podGroup": "Kueue"}, "template": {"metadata": {"labels": queue}}}
    inc = incarnation(**changes)
    pods = metadata_of_pods(inc)
    for metadata in pods:
        theirs = {
            part: {key: value for key, value in metadata[part].items() if key.startswith("kueue.")}
            for part in ("labels", "annotations")
        }
        assert list(structural.errors(KUEUE, theirs, "metadata")) == []
        assert theirs["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == str(render.pods(inc.cr.spec))
    assert len({metadata["labels"]["kueue.x-k8s.io/pod-group-name"] for metadata in pods}) == 1


def metadata_of_pods(inc: Incarnation) -> list[dict[str, Any]]:
    """Metadata of the head and of each set of workers."""
    sets = render.stateful_sets(inc)
    return [render.head_pod(inc)["metadata"], *(s["spec"]["template"]["metadata"] for s in sets)]


def test_kueue_and_none_need_no_object():
    for kind in ("None", "Kueue"):
        assert render.pod_group(incarnation(scheduling={"podGroup": kind})) is None


def test_a_changed_engine_port_reaches_old_and_new_pods_alike():
    """Groups are replaced one by one: each is reached at the port that it has."""
    service = render.client_service(resource(engine={"image": "i", "port": 9000}))
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(9000, "api")]
    container = render.head_pod(incarnation(engine={"image": "i", "port": 9000}))["spec"]["containers"][0]
    assert {"name": "api", "containerPort": 9000} in container["ports"]


@pytest.mark.parametrize("path", ["template", "headTemplate"])
@pytest.mark.parametrize(
    "affinity",
    [
        None,
        {"podAntiAffinity": None},
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    ],
)
def test_no_template_takes_away_what_keeps_pods_of_the_same_devices_apart(path, affinity):
    """Two pods would share a device: vllm PR#53743, #54694."""
    slots = {"devices": {"assignment": "Slots", "perNode": 4}}
    cr = resource(**slots, **{path: {"spec": {"affinity": affinity}}})
    inc = Incarnation(cr=cr, group=0, id="abcde", revision="r", settings=SETTINGS)
    pods = [render.head_pod(inc)["spec"], *(s["spec"]["template"]["spec"] for s in render.stateful_sets(inc))]
    for pod in pods:
        (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchExpressions"][0]["key"] == "dataparallel.io/devices"
