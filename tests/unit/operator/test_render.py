"""What is rendered: golden files for whole groups, and by name the rules that cost people a night."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dp_handshake.messages import Fill, Versioned
from dp_operator import api, render, rules
from dp_operator.render import Incarnation
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
    "one-pod": {"dataParallel": {"size": 4, "sizeLocal": 4}},
    "one-rank": {"dataParallel": {"size": 1}},
}


def incarnation(**changes: Any) -> Incarnation:
    return Incarnation(cr=resource(**changes), group=0, id="abcde", revision="0123456789", settings=SETTINGS)


def everything(inc: Incarnation) -> list[dict[str, Any]]:
    config_map = render.config_map(inc, "198.19.0.9")
    config_map["data"]["launch.py"] = "(the launcher)"
    plan = msgspec.json.decode(config_map["data"]["plan.json"])
    config_map["data"]["plan.json"] = yaml.safe_dump(plan, sort_keys=False, default_flow_style=None, width=110)
    policy = render.network_policy(inc.cr, SETTINGS)
    return [
        render.rpc_service(inc),
        config_map,
        render.disruption_budget(inc, pods=1 + len(render.worker_pods(inc.cr.spec, inc.base))),
        render.head_pod(inc),
        *render.stateful_sets(inc),
        render.client_service(inc.cr),
        *([policy] if policy else []),
    ]


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


def flags(spec: api.Spec, role: str, *, start: int = 7) -> list[str]:
    argv: list[str] = []
    for item in render.engine_argv(spec, role):
        if isinstance(item, Versioned):
            argv += [str(i) for i in item.items]
        elif isinstance(item, Fill):
            argv.append("198.18.1.1" if item.fill == "headIP" else str(start))
        else:
            argv.append(item)
    return argv


@st.composite
def valid(draw: st.DrawFn) -> api.Spec:
    """Valid specs of Internal groups."""
    local = draw(st.sampled_from([1, 2, 3, 4, 8]))
    size = local * draw(st.integers(1, 24))
    architecture = draw(st.sampled_from(["Dense", "MoE"]))
    parallel = {"size": size, "sizeLocal": local}
    if architecture == "Dense" and size >= 2 and draw(st.booleans()):
        parallel["headPlacement"] = "Dedicated"
    tensor = draw(st.sampled_from([1, 2, 4]))
    devices: dict[str, Any] = {"assignment": draw(st.sampled_from(["None", "DevicePlugin", "Slots"]))}
    if devices["assignment"] == "Slots":
        devices["perNode"] = min(64, local * tensor * draw(st.integers(1, 4)))
    return resource(
        model={"name": "m", "architecture": architecture},
        dataParallel=parallel,
        devices=devices,
        tensorParallelSize=tensor,
    ).spec


@given(valid())
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


@given(valid())
def test_an_internal_head_never_gets_a_start_rank_and_always_a_bounded_number_of_api_servers(spec):
    """vLLM 0.28 and newer take any start rank on the head for hybrid load balancing (problem f1)."""
    head = flags(spec, "head")
    assert "--data-parallel-start-rank" not in head
    assert "--headless" not in head
    assert 1 <= int(head[head.index("--api-server-count") + 1]) <= 4


@given(valid())
def test_workers_are_headless_and_every_pod_agrees_on_size_and_address(spec):
    if not render.worker_sets(spec, "base"):
        return
    head, worker = flags(spec, "head"), flags(spec, "worker")
    assert "--headless" in worker
    assert "--api-server-count" not in worker
    for flag in ("--data-parallel-size", "--data-parallel-address"):
        assert head[head.index(flag) + 1] == worker[worker.index(flag) + 1]
    ports = [int(argv[argv.index("--data-parallel-rpc-port") + 1]) for argv in (head, worker)]
    assert ports == [spec.data_parallel.rpc_port + 1, spec.data_parallel.rpc_port], "the relay stands in between"


def test_service_environment_variables_are_off_because_a_service_named_vllm_breaks_vllm():
    """A Service called vllm would inject VLLM_PORT=tcp://… (problem 20)."""
    inc = incarnation()
    pods = [render.head_pod(inc)["spec"], *(s["spec"]["template"]["spec"] for s in render.stateful_sets(inc))]
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def test_a_cr_deadline_is_vllms_deadline_too():
    """One field drives both clocks (problem 2)."""
    pod = render.head_pod(incarnation(startup={"timeoutSeconds": 7200}))
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"


def test_shared_memory_grows_with_the_ranks_of_a_pod():
    """The default of container runtimes, 64 MiB, ends in bus errors (problem 6)."""
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
            rule for rule in rendered["spec"]["ingress"] if {"protocol": "TCP", "port": 8000} in rule.get("ports", [])
        ]

    assert "from" not in rules_of({})[0]
    assert rules_of({"apiFrom": []}) == []
    assert rules_of({"apiFrom": [{"podSelector": {}}]})[0]["from"] == [{"podSelector": {}}]


def test_a_client_port_leads_to_the_engine_unless_told_otherwise():
    service = render.client_service(resource(service={"ports": [{"port": 80}, {"port": 81, "targetPort": 9000}]}))
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(80, 8000), (81, 9000)]
