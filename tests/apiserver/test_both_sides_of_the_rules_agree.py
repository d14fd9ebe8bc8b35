"""The CEL of a rule and its Python say the same of objects that nobody wrote by hand."""

import random
import string

import msgspec
import pytest

from dp_operator import api, rules


def containers(*entries):
    return {"spec": {"containers": list(entries)}}


def engine_env(*names):
    return containers(
        {"name": "side", "env": [{"name": "VLLM_PORT", "value": "1"}]}, {"name": "engine"} | env_of(names)
    )


def env_of(names):
    return {"env": [{"name": name, "value": "0"} for name in names]}


TEMPLATES = [
    {},
    {"spec": {}},
    {"spec": {"affinity": None, "nodeSelector": {"a": "b"}}},
    {"spec": {"hostNetwork": True}},
    {"spec": {"hostNetwork": False, "restartPolicy": "Always"}},
    {"spec": {"volumes": [{"name": "models"}], "initContainers": [{"name": "fetch"}]}},
    {"spec": {"volumes": [{"name": "shm"}], "initContainers": [{"name": "relay"}]}},
    {"metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}}},
    {"metadata": {"labels": {"app.kubernetes.io/instance": "a"}}},
    {"metadata": {"annotations": {"dataparallel.io/x": "a"}}},
    containers({"name": "relay"}, {"name": "side", "image": "i", "readinessProbe": {"periodSeconds": 1}}),
    containers({"name": "engine", "image": "i"}),
    containers({"name": "engine", "securityContext": {"privileged": False}, "lifecycle": {}}),
    containers({"name": "engine", "volumeMounts": [{"name": "m", "mountPath": "/m"}]}),
    containers({"name": "engine", "volumeMounts": [{"name": "m", "mountPath": "/dev/shm"}]}),
    engine_env("A"),
    engine_env("VLLM_PORT"),
    engine_env("DPD_X", "A"),
    engine_env("VLLM_CPU_OMP_THREADS_BIND"),
    engine_env("CUDA_VISIBLE_DEVICES"),
    engine_env("HIP_VISIBLE_DEVICES"),
    engine_env("TPU_VISIBLE_CHIPS"),
    engine_env("MINE"),
]
ENUMS = {
    "model.architecture": ["Dense", "MoE"],
    "dataParallel.loadBalancing": ["Internal", "Internal", "Hybrid", "External"],
    "dataParallel.headPlacement": ["Colocated", "Dedicated"],
    "devices.assignment": ["None", "DevicePlugin", "Slots"],
    "devices.visibleDevicesEnvName": ["CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "MINE"],
    "devices.resourceName": ["nvidia.com/gpu", "amd.com/gpu"],
    "devices.perNode": [1, 2, 4, 6, 8],
    "dataParallel.size": [1, 2, 4, 6, 8],
    "dataParallel.sizeLocal": [1, 1, 2, 3, 4, 8],
    "dataParallel.rpcPort": [13345, 8000, 7999, 13349, 13350, 32766, 32767],
    "dataParallel.supervisorPort": [9256, 8000, 8001, 8003, 7999],
    "dataParallel.apiServerCount": [1, 2],
    "tensorParallelSize": [1, 2, 4],
    "pipelineParallelSize": [1, 2],
    "enableExpertParallel": [False, True, True],
    "engine.command": [
        ["vllm", "serve"],
        ["nice", "-n", "5", "vllm", "serve"],
        ["vllm", "serve", "--headless"],
        ["vllm", "serve", "--data_parallel_size=2"],
        ["vllm", "serve", "--data-parallel"],
        ["vllm", "serve", "--tensor_parallel_size", "é=2"],
    ],
    "engine.port": [8000, 13345, 13346, 13350],
    "engine.resources.limits": [{}, {"nvidia.com/gpu": 1}, {"amd.com/gpu": "2", "cpu": 1}],
    "headResources.requests": [{}, {"nvidia.com/gpu": 1}],
    "failurePolicy.backoffSeconds": [1, 300, 301],
    "rollout.maxSurge": [0, 1, "0%", "1%", "100%"],
    "rollout.maxUnavailable": [0, 1, "0%", "1%"],
    "rollout.paused": [False, False, True],
    "scheduling.podGroup": ["None", "None", "Kueue"],
    "networkPolicy.peers": [[], [], ["a"]],
    "disruption.policy": ["Managed", "Managed", "Open"],
    "service.ports": [
        [],
        [{"port": 1}],
        [{"port": 1}, {"port": 2}],
        [{"port": 1, "name": "a"}, {"port": 2, "name": "a"}],
    ],
}
ENV = ["A", "VLLM_PORT", "VLLM_PORTS", "VLLM_DP_X", "DPD_", "DPD", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "MINE"]
ENV += ["HIP_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "TPU_VISIBLE_CHIPS"]
ENV_VALUES = ["1", "1", "0,1", "0,1,2,3", "0-3|4", "nobind", "all", "", "GPU-1"]
SWITCHES = [
    *("--fault-tolerance-config", "--dp_sync_interval=4", "--elastic-ep-max-dp-size=4", "--device_ids=0"),
    "--enable-eplb",
    "--enable-elastic-ep",
    "--enable-fault-tolerance",
    "--device-ids",
    "--num-redundant-experts",
]
FLAGS = [
    name.strip("#*")
    for owned in rules.OWNED_FLAGS
    for pattern in owned.patterns
    for name in [pattern.replace("[", "").replace("]", "")]
]


def a_version(rng):
    return f"{rng.choice([0, 0, 0, 1])}.{rng.randint(0, 40)}{rng.choice(['', '.0', '.12', 'rc1', '.post2'])}"


def an_argument(rng):
    flag = rng.choice([*FLAGS, "--max-model-len", "--config-format", "-q", "-O3", "", "-1"])
    flag = flag[: rng.randint(max(len(flag) - 3, 0), len(flag))]
    if rng.random() < 0.3:
        flag = flag[:2] + flag[2:].replace("-", "_")
    return flag + rng.choice(["", "", "=1", "8", "x", "_", "=é", "-" + rng.choice(string.ascii_lowercase)])


def a_case(rng):
    changes = {path: rng.choice(values) for path, values in ENUMS.items() if rng.random() < 0.15}
    for path in ("template", "headTemplate"):
        if rng.random() < 0.3:
            changes[path] = rng.choice(TEMPLATES)
    if rng.random() < 0.3:
        changes["engine.version"] = a_version(rng)
    if rng.random() < 0.3:
        names = rng.sample(ENV, rng.randint(1, 3))
        changes["engine.env"] = [{"name": name, "value": rng.choice(ENV_VALUES)} for name in names]
    if rng.random() < 0.5:
        changes["engine.args"] = [an_argument(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        changes["engine.args"] = rng.sample(SWITCHES, rng.randint(1, 3))
    name = rng.choice(["qwen", "qwen", "a" * 38, "a" * 39, "a-b", "a.b", "1a"])
    return {"set": changes, "name": name}


@pytest.mark.parametrize("seed", range(10))
def test_the_api_server_and_the_operator_refuse_for_the_same_reasons(trial, seed):
    rng = random.Random(seed)
    for _ in range(60):
        case = a_case(rng)
        body = trial.body(case)
        ours = rules.broken_rules(name=case["name"], spec=msgspec.convert(body["spec"], api.Spec))
        theirs = [cause.replace(": Forbidden: ", ": ", 1) for cause in trial.causes(case)]
        assert sorted(theirs) == sorted(ours), case
