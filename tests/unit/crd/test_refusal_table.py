"""The refusal table: every combination that vLLM refuses and a custom resource can express is refused before a pod is made.

One row per row of the protocol notes' table of rejections (§1.4) and of device errors (§6). What only flags can say is
closed by the flags that the operator owns; that is a row too. Rows that CEL cannot tell are refused by plan and operator
(NOT_BY_CEL in tests/unit/operator/test_preview.py). tests/apiserver asks a real API server about all rules.

Rows that no resource can express, because only the image, the node or the model knows: NIXL for asynchronous expert load
balancing, the platform where the devices are not named, the number of NUMA nodes for `auto`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dp_operator import api, rules

MOE = {"model.architecture": "MoE"}
EP = MOE | {"enableExpertParallel": True}
EXTERNAL = MOE | {"dataParallel.loadBalancing": "External"}
SUPERVISED = EXTERNAL | {"dataParallel.sizeLocal": 2}
HYBRID = {"dataParallel.loadBalancing": "Hybrid", "dataParallel.sizeLocal": 2}


def args(*words: str) -> dict[str, Any]:
    return {"engine.args": list(words)}


def env(name: str, value: str = "0") -> dict[str, Any]:
    return {"engine.env": [{"name": name, "value": value}]}


def template_env(path: str, **values: str) -> dict[str, Any]:
    entries = [{"name": name, "value": value} for name, value in values.items()]
    return {f"{path}.spec.containers": [{"name": "engine", "env": entries}]}


# (what vLLM refuses, the closest that a CR can say, words of the refusal)
TABLE: list[tuple[str, dict[str, Any], str]] = [
    # §1.4
    ("a rank and a local size", EXTERNAL | args("--data-parallel-size-local", "2"), "the operator places the ranks"),
    ("hybrid and headless", HYBRID | args("--headless"), "decides which pod serves the API"),
    ("hybrid without a local size", HYBRID | {"dataParallel.sizeLocal": 1}, "write a sizeLocal of at least 2"),
    ("hybrid and external flags both", HYBRID | args("-dpe"), "the operator places the ranks"),
    ("a rank and a start rank", EXTERNAL | args("-dpr=1"), "the operator places the ranks"),
    ("external with a dense model", {"dataParallel.loadBalancing": "External"}, "vLLM refuses External for Dense"),
    ("headless and API servers", args("--api_server_count", "2"), "write spec.dataParallel.apiServerCount"),
    ("headless and local size 0", args("--headless", "-dpl", "0"), "the operator places the ranks"),
    ("local size above the size", {"dataParallel.sizeLocal": 16}, "write a sizeLocal that divides size"),
    ("a rank outside the group", EXTERNAL | args("--data-parallel-rank=9"), "the operator places the ranks"),
    ("external with size 1", EXTERNAL | {"dataParallel.size": 1}, "External needs at least two ranks"),
    ("a backend other than mp", args("--data-parallel-backend", "ray"), "the operator places the ranks"),
    ("expert parallelism without experts", {"enableExpertParallel": True}, "for a model without experts"),
    ("ranks wider than the operator counts", args("-pcp", "2"), "prefill context parallelism, which is not supported"),
    ("headless in the command", {"engine.command": ["vllm", "serve", "--headless"]}, "a command has wrappers"),
    (
        "a size in the command",
        {"engine.command": ["vllm", "serve", "--data_parallel_size=4"]},
        "a command has wrappers",
    ),
    ("a rank in the command", {"engine.command": ["nice", "-n", "5", "vllm", "serve", "-dpn=1"]}, "places the ranks"),
    ("a port in the command", {"engine.command": ["vllm", "serve", "--port", "1"]}, "write spec.engine.port"),
    (
        "elastic EP before 0.17",
        EP | {"engine.version": "0.16.1"} | args("--enable-eplb", "--enable-elastic-ep"),
        "only vLLM 0.17 and newer know --enable-elastic-ep",
    ),
    (
        "fault tolerance before 0.27",
        EXTERNAL | {"engine.version": "0.26.0"} | args("--enable-fault-tolerance"),
        "only vLLM 0.27 and newer know --enable-fault-tolerance",
    ),
    (
        "devices by flag before 0.24",
        {"engine.version": "0.23.1"} | args("--device_ids=0"),
        "only vLLM 0.24 and newer know --device-ids",
    ),
    (
        "ranks to come before 0.30",
        EP | {"engine.version": "0.29.0"} | args("--enable-eplb", "--enable-elastic-ep", "--elastic-ep-max-dp-size=9"),
        "only vLLM 0.30 and newer know --elastic-ep-max-dp-size",
    ),
    ("several nodes a rank", args("--nnodes", "2"), "one rank lives in one pod"),
    ("a node rank out of range", args("--node-rank", "4"), "one rank lives in one pod"),
    ("elastic EP in hybrid", MOE | HYBRID | args("--enable-elastic-ep"), "no elastic expert parallelism with Hybrid"),
    (
        "elastic EP with pipelines",
        EXTERNAL | {"pipelineParallelSize": 2} | args("--enable-elastic-ep"),
        "no elastic expert parallelism with Hybrid load balancing or pipeline",
    ),
    ("elastic EP without EPLB", EP | args("--enable-elastic-ep"), "write --enable-eplb too"),
    (
        "elastic EP in external before 0.33",
        EP | EXTERNAL | {"engine.version": "0.32.0"} | args("--enable-eplb", "--enable-elastic-ep"),
        "needs vLLM 0.33",
    ),
    ("fault tolerance without external", MOE | args("--enable-fault-tolerance"), "only with External load balancing"),
    (
        "fault tolerance with several API servers",
        EXTERNAL | {"dataParallel.apiServerCount": 2} | args("--enable-fault-tolerance"),
        "one API server",
    ),
    ("offline ranks by environment", env("VLLM_DP_RANK"), "everything that begins with VLLM_DP_"),
    ("EPLB without expert parallelism", MOE | args("--enable-eplb"), "write enableExpertParallel: true"),
    (
        "EPLB on a platform without it",
        EP
        | {"devices.assignment": "Slots", "devices.visibleDevicesEnvName": "TPU_VISIBLE_CHIPS"}
        | args("--enable-eplb"),
        "no expert load balancing on this platform",
    ),
    ("redundant experts without EPLB", EP | args("--num-redundant-experts", "2"), "write --enable-eplb too"),
    ("an internal rank above 0 that serves", args("--data-parallel-start-rank", "1"), "the operator places the ranks"),
    ("a supervisor with gRPC", SUPERVISED | args("--grpc"), "serves HTTP only"),
    ("a supervisor on a Unix socket", SUPERVISED | args("--uds", "/x"), "where it listens"),
    ("a supervisor with API servers", SUPERVISED | {"dataParallel.apiServerCount": 2}, "leave apiServerCount out"),
    ("a supervisor and a rank", SUPERVISED | args("--data-parallel-rank", "1"), "the operator places the ranks"),
    (
        "a supervisor of an uneven group",
        SUPERVISED | {"dataParallel.sizeLocal": 3},
        "write a sizeLocal that divides size",
    ),
    (
        "a supervisor on a server's port",
        SUPERVISED | {"dataParallel.supervisorPort": 8001},
        "write a port outside of it",
    ),
    ("a supervisor before 0.22", SUPERVISED | {"engine.version": "0.21"}, "needs vLLM 0.22 or newer"),
    ("flags from a file", args("--config", "x.yaml"), "write its flags as spec.engine.args"),
    # §9.5: a head without ranks
    ("an MoE head without rank 0", MOE | {"dataParallel.headPlacement": "Dedicated"}, "Dedicated is for Dense models"),
    (
        "a head without ranks before 0.14",
        {"dataParallel.headPlacement": "Dedicated", "engine.version": "0.13"},
        "Dedicated needs vLLM 0.14",
    ),
    # §6
    (
        "too few devices for a local rank",
        {"devices.assignment": "Slots", "devices.perNode": 2, "dataParallel.sizeLocal": 4},
        "write a perNode that is a multiple",
    ),
    (
        "a list of devices too short for the local ranks",
        {"dataParallel.sizeLocal": 2} | env("CUDA_VISIBLE_DEVICES", "3"),
        "there are too few for sizeLocal ranks",
    ),
    (
        "a list of devices by flag",
        {"devices.assignment": "Slots"} | args("--device-ids", "0"),
        "devices.assignment decides which devices",
    ),
    (
        "a list of cores too short for the local ranks",
        {"dataParallel.sizeLocal": 2} | env("VLLM_CPU_OMP_THREADS_BIND", "0-3"),
        "takes one list of cores",
    ),
    (
        "nobind in 0.11",
        {"engine.version": "0.11.0"} | env("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "write all",
    ),
    (
        "HIP and CUDA names that differ",
        {"devices.assignment": "Slots"} | env("HIP_VISIBLE_DEVICES"),
        "HIP_VISIBLE_DEVICES that differ",
    ),
    (
        "a list of devices beside a plugin's own",
        {"devices.assignment": "DevicePlugin"} | env("CUDA_VISIBLE_DEVICES", "3"),
        "the plugin decides which devices",
    ),
    (
        "a list of devices beside the operator's",
        {"devices.assignment": "Slots", "devices.visibleDevicesEnvName": "ZE_AFFINITY_MASK"} | env("ZE_AFFINITY_MASK"),
        "the operator sets devices.visibleDevicesEnvName",
    ),
    ("devices counted by hand", {"engine.resources": {"limits": {"nvidia.com/gpu": 1}}}, "counts devices per pod"),
    *(
        row
        for path in ("template", "headTemplate")
        for row in (
            (
                f"HIP and CUDA names that differ, by {path}",
                {"devices.assignment": "Slots"} | template_env(path, HIP_VISIBLE_DEVICES="9"),
                "devices.assignment decides which devices container engine sees",
            ),
            (
                f"HIP and CUDA names that differ where nobody assigns devices, by {path}",
                env("CUDA_VISIBLE_DEVICES", "0") | template_env(path, HIP_VISIBLE_DEVICES="1"),
                "HIP_VISIBLE_DEVICES that differ",
            ),
            (
                f"a list of devices too short for the local ranks, by {path}",
                {"dataParallel.sizeLocal": 2} | template_env(path, CUDA_VISIBLE_DEVICES="3"),
                f"spec.{path}.spec.containers: CUDA_VISIBLE_DEVICES=3: local rank 1 needs the devices 1 to 1",
            ),
            (
                f"a list of cores that nobody counts, by {path}",
                {"dataParallel.sizeLocal": 2} | template_env(path, VLLM_CPU_OMP_THREADS_BIND="0-3"),
                "write spec.engine.env",
            ),
        )
    ),
    (
        "a TPU's list of devices beside a plugin's own",
        {"devices.assignment": "DevicePlugin"} | env("TPU_VISIBLE_CHIPS", "3"),
        "the plugin decides which devices",
    ),
    # §1.2
    ("a port base that is a URI", env("VLLM_PORT", "tcp://10.0.0.1:80"), "VLLM_PORT"),
    ("another address than the pod's", env("VLLM_HOST_IP", "0.0.0.0"), "VLLM_HOST_IP"),
]


@pytest.mark.parametrize(("what", "changes", "words"), TABLE, ids=[what for what, _, _ in TABLE])
def test_what_vllm_refuses_is_refused_when_it_is_applied(what, changes, words):
    """Said with what to write instead, before devices are taken.

    dynamo#12164, kserve#5773, kserve#4946. Start ranks by hand: gpustack/gpustack#6221, PR#6236,
    vllm-project/vllm-ascend PR#16204. nnodes with dense models: vllm PR#39405. Devices: vllm PR#53743, #54694,
    #22677, #44556. External is for MoE: "Non-MoE models do not support external data parallel mode".
    """
    spec: dict[str, Any] = {
        "model": {"name": "m", "architecture": "Dense"},
        "engine": {"image": "i"},
        "dataParallel": {"size": 8},
        "devices": {"assignment": "None"},
    }
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    said = rules.refusals(name="web", spec=msgspec.convert(spec, api.Spec))
    assert any(words in refusal for refusal in said), said


def test_a_head_without_ranks_may_have_any_devices():
    spec: dict[str, Any] = {
        "model": {"name": "m", "architecture": "Dense"},
        "engine": {"image": "i", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0,1"}]},
        "dataParallel": {"size": 8, "sizeLocal": 2, "headPlacement": "Dedicated"},
        "devices": {"assignment": "None"},
        "headTemplate": {
            "spec": {"containers": [{"name": "engine", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}]}]}
        },
    }
    assert rules.refusals(name="web", spec=msgspec.convert(spec, api.Spec)) == []


@pytest.mark.parametrize(
    "command",
    [["numactl", "-N", "0", "vllm", "serve"], ["nice", "-n", "5", "vllm", "serve"], ["sh", "-c", "x --port 1"]],
)
def test_a_wrapper_may_have_flags_of_its_own(command):
    spec = {
        "model": {"name": "m", "architecture": "Dense"},
        "engine": {"image": "i", "command": command},
        "dataParallel": {"size": 8},
        "devices": {"assignment": "None"},
    }
    assert rules.refusals(name="web", spec=msgspec.convert(spec, api.Spec)) == []
