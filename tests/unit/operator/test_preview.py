"""`python -m dp_operator plan`: everything that is wrong at once, and what would be made."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dp_operator import preview, versions
from tests.unit.operator.world import resource, spec

EXAMPLES = Path(__file__).parents[3] / "examples"


def write(path: Path, name: str = "web", **changes: Any) -> str:
    document = {
        "apiVersion": "dataparallel.io/v1alpha1",
        "kind": "DataParallelDeployment",
        "metadata": {"name": name},
        "spec": spec(**changes),
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(path)


def test_all_errors_come_at_once_and_the_status_says_so(tmp_path, capsys):
    file = write(
        tmp_path / "cr.yaml",
        engine={"imag": "x", "port": 70000, "env": [{"name": "A"}, {"name": "A"}]},
        dataParallel={"size": "8", "loadBalancing": "external"},
    )
    assert preview.main(["-f", file]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "web: spec.engine.image: is required",
        "web: spec.engine.imag: unknown field",
        "web: spec.engine.port: 70000 is not within 1 to 65535",
        "web: spec.engine.env[1]: duplicate A",
        "web: spec.dataParallel.size: must be of type integer, not string",
        "web: spec.dataParallel.loadBalancing: 'external' is none of External, Hybrid, Internal",
    ]


def test_rules_are_all_told_too(tmp_path, capsys):
    file = write(
        tmp_path / "cr.yaml",
        engine={"image": "i", "args": ["--headless"]},
        dataParallel={"size": 8, "sizeLocal": 3, "loadBalancing": "External"},
    )
    assert preview.main(["-f", file]) == 1
    said = capsys.readouterr().err
    assert "spec.dataParallel.sizeLocal: every pod runs the same number of ranks" in said
    assert "vLLM refuses External for Dense models" in said
    assert "--headless" in said


def test_schema_errors_do_not_hide_the_rules_where_the_object_can_be_read(tmp_path, capsys):
    file = write(tmp_path / "cr.yaml", "-web", engine={"image": "i", "prot": 80, "args": ["--headless"]})
    assert preview.main(["-f", file]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == ["spec.engine.prot", "metadata.name", "spec.engine.args"]


def test_an_object_without_metadata_is_refused_with_everything_else(tmp_path, capsys):
    file = tmp_path / "cr.yaml"
    file.write_text("apiVersion: v1\nkind: DataParallelDeployment\nmetadata: x\nspec: {model: {}}\n")
    assert preview.main(["-f", str(file)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        "(no name): apiVersion: write dataparallel.io/v1alpha1",
        "(no name): metadata: must be an object with a name",
        "(no name): spec.engine: is required",
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


def test_whatever_stands_at_a_place_of_the_document_the_answer_is_a_verdict(tmp_path):
    whole = yaml.safe_load(Path(write(tmp_path / "cr.yaml", **EVERYTHING)).read_text())
    for *path, last in places(whole)[1:]:
        for junk in (None, -1, 0, 10**12, "x", [], {}, [1], {"x": 1}, True):
            document = copy.deepcopy(whole)
            place = document
            for key in path:
                place = place[key]
            place[last] = junk
            try:
                preview.check(document, version=None)
            except preview.Invalid as invalid:
                assert invalid.lines  # noqa: PT017 - accepted or refused, never a crash


EVERYTHING: dict[str, Any] = {
    "engine": {"image": "i", "version": "0.32", "args": ["--device-ids", "0"], "env": [{"name": "A", "value": "1"}]},
    "dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"},
    "devices": {"assignment": "Slots", "perNode": 4},
    "tensorParallelSize": 1,
    "service": {"ports": [{"port": 80, "name": "http"}]},
    "template": {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "hostNetwork": False,
            "containers": [
                {"name": "engine", "env": [{"name": "B"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
            ],
            "volumes": [{"name": "v"}],
        },
    },
}


def env(**values: str) -> dict[str, Any]:
    return {"image": "i", "env": [{"name": name, "value": value} for name, value in values.items()]}


# The rows of the protocol notes' tables of rejections (§1.4, §6) that depend on two values or on places of words: CEL
# cannot tell them, plan and operator do (see tests/unit/crd/test_refusal_table.py for all others).
NOT_BY_CEL: list[tuple[str, dict[str, Any], str]] = [
    (
        "HIP and CUDA values that differ",
        {"engine": env(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")},
        "spec.engine.env: vLLM refuses CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES that differ",
    ),
    (
        "names of devices where integers are read",
        {
            "engine": env(ZE_AFFINITY_MASK="GPU-1") | {"version": "0.23.0"},
            "devices": {"assignment": "None", "visibleDevicesEnvName": "ZE_AFFINITY_MASK"},
        },
        "spec.engine.env: ZE_AFFINITY_MASK=GPU-1: vLLM 0.23.0 reads integers only",
    ),
    (
        "names of too few devices",
        {"engine": env(CUDA_VISIBLE_DEVICES="GPU-1,GPU-2,GPU-3"), "dataParallel": {"size": 4, "sizeLocal": 4}},
        "local rank 3 needs the devices 3 to 3 of it",
    ),
    (
        "too few device ids",
        {"engine": {"image": "i", "args": ["--device_ids", "0,1,2"]}, "tensorParallelSize": 4},
        "spec.engine.args: --device-ids=0,1,2: local rank 0 needs the devices 0 to 3 of it",
    ),
    (
        "an elastic size below the size",
        {
            "model": {"name": "m", "architecture": "MoE"},
            "enableExpertParallel": True,
            "engine": {"image": "i", "args": ["--enable-eplb", "--enable-elastic-ep", "--elastic-ep-max-dp-size=2"]},
        },
        "--elastic-ep-max-dp-size 2: write at least dataParallel.size, 4",
    ),
]


@pytest.mark.parametrize(("what", "changes", "words"), NOT_BY_CEL, ids=[what for what, _, _ in NOT_BY_CEL])
def test_what_vllm_refuses_and_the_api_server_cannot_tell_is_refused_by_the_plan(
    tmp_path, capsys, what, changes, words
):
    file = write(tmp_path / "cr.yaml", **changes)
    assert preview.main(["-f", file]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("how", ["field", "tag", "option"])
def test_a_version_that_cannot_do_it_is_refused_wherever_it_is_named(tmp_path, capsys, how):
    """A vLLM bump that breaks multi-node is seen before anything is deleted: ai-dynamo/dynamo#4934, PR#5006."""
    engine = {"image": "vllm/vllm-openai:v0.13.0" if how == "tag" else "i"}
    if how == "field":
        engine["version"] = "0.13"
    file = write(tmp_path / "cr.yaml", engine=engine, dataParallel={"size": 4, "headPlacement": "Dedicated"})
    assert preview.main(["-f", file, *(["--version", "0.13.2"] if how == "option" else [])]) == 1
    assert "Dedicated needs vLLM 0.14 or newer" in capsys.readouterr().err


def test_a_newer_version_may_be_tried(tmp_path, capsys):
    file = write(
        tmp_path / "cr.yaml",
        engine={"image": "vllm/vllm-openai:v0.13.0"},
        dataParallel={"size": 4, "headPlacement": "Dedicated"},
    )
    assert preview.main(["-f", file, "--version", "0.32", "-o", "argv"]) == 0
    assert "--data-parallel-size-local 0" in capsys.readouterr().out


def test_the_option_counts_more_than_the_version_in_the_file(tmp_path, capsys):
    file = write(
        tmp_path / "cr.yaml",
        engine={"image": "i", "version": "0.13"},
        dataParallel={"size": 4, "headPlacement": "Dedicated"},
    )
    assert preview.main(["-f", file]) == 1
    assert preview.main(["-f", file, "--version", "0.32"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("needs vLLM 0.14") == 1
    assert "vLLM 0.32\n" in captured.out


def test_what_is_no_version_is_no_version_to_render_for(tmp_path, capsys):
    with pytest.raises(SystemExit):
        preview.main(["-f", write(tmp_path / "cr.yaml"), "--version", "garbage"])
    assert "'garbage' is no vLLM version such as 0.32" in capsys.readouterr().err


def test_argv_is_shown_for_every_pod_with_its_first_rank(tmp_path, capsys):
    file = write(tmp_path / "cr.yaml", dataParallel={"size": 6, "sizeLocal": 2, "loadBalancing": "Hybrid"})
    assert preview.main(["-f", file, "-o", "argv"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    first = [line.split()[line.split().index("--data-parallel-start-rank") + 1] for line in lines]
    pods = [line.split()[0] for line in lines]
    assert list(zip(pods, first, strict=True)) == [
        ("web-0-xxxxx-head", "0"),
        ("web-0-xxxxx-w-0", "2"),
        ("web-0-xxxxx-w-1", "4"),
    ]


def test_ranks_devices_and_objects_are_shown(tmp_path, capsys):
    file = write(
        tmp_path / "cr.yaml",
        dataParallel={"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"},
        devices={"assignment": "Slots", "perNode": 8},
        tensorParallelSize=2,
    )
    assert preview.main(["-f", file]) == 0
    out = capsys.readouterr().out
    assert "head    vllm serve m --port 8000" in out
    assert "    3  web-0-xxxxx-s1-0                         :8000        6,7 (CUDA_VISIBLE_DEVICES=4,5,6,7)" in out
    assert "kind: StatefulSet" in out


def test_the_objects_alone_are_yaml(tmp_path, capsys):
    file = write(tmp_path / "cr.yaml")
    assert preview.main(["-f", file, "-o", "yaml"]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == [
        *("Service", "ConfigMap", "PodDisruptionBudget", "Pod", "StatefulSet"),
        *("Service", "NetworkPolicy"),
    ]


def test_a_file_without_our_kind_or_without_yaml_is_an_error(tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text("kind: Pod\n")
    assert preview.main(["-f", str(other)]) == 1
    other.write_text("a: [")
    assert preview.main(["-f", str(other)]) == 1
    assert preview.main(["-f", str(tmp_path / "none.yaml")]) == 1
    said = capsys.readouterr().err
    assert "no object of kind DataParallelDeployment" in said
    assert "not YAML" in said
    assert "No such file" in said


WARNINGS: list[tuple[str, dict[str, Any], str]] = [
    ("a version that is only assumed", {"engine": {"image": "i"}}, "write engine.version"),
    ("dense ranks in lock-step", {"engine": {"image": "i", "version": "0.13"}}, "step together"),
    ("no draining before 0.18", {"engine": {"image": "i", "version": "0.17"}}, "aborts its requests"),
    (
        "DeepEP across pods",
        {"engine": {"image": "i", "args": ["--all2all-backend", "deepep_low_latency"]}},
        "one pod per node",
    ),
    (
        "DeepEP across pods, by environment",
        {"engine": env(VLLM_ALL2ALL_BACKEND="deepep_high_throughput")},
        "one pod per node",
    ),
    (
        "DeepEP across pods, by a template's environment",
        {
            "template": {
                "spec": {
                    "containers": [
                        {"name": "engine", "env": [{"name": "VLLM_ALL2ALL_BACKEND", "value": "deepep_low_latency"}]}
                    ]
                }
            }
        },
        "one pod per node",
    ),
    (
        "ranks that see one device of their node",
        {
            "model": {"name": "m", "architecture": "MoE"},
            "dataParallel": {"size": 4, "loadBalancing": "External"},
            "devices": {"assignment": "Slots", "perNode": 4},
        },
        "kernels that share memory between the ranks of a node",
    ),
    (
        "XPU ranks that do not see each other's devices",
        {"devices": {"assignment": "Slots", "perNode": 4, "visibleDevicesEnvName": "ZE_AFFINITY_MASK"}},
        "ranks on XPU reach each other only on devices that all of them see",
    ),
    ("the node's network", {"template": {"spec": {"hostNetwork": True}}}, "NetworkPolicy does not reach"),
    (
        "one port for several ranks",
        {
            "model": {"name": "m", "architecture": "MoE"},
            "dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "External"},
            "service": {"ports": [{"port": 80}]},
        },
        "no port of the Service leads to the local ranks 1 of each pod: write one port per local rank",
    ),
    (
        "a Service does not balance load",
        {"dataParallel": {"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"}},
        "gateway",
    ),
    ("a gang scheduler without name", {"scheduling": {"podGroup": "Coscheduling"}}, "schedulerName"),
    ("Kueue without a queue", {"scheduling": {"podGroup": "Kueue"}}, "queue-name"),
]


@pytest.mark.parametrize(("why", "changes", "words"), WARNINGS, ids=[why for why, _, _ in WARNINGS])
def test_what_may_surprise_is_warned_of(why, changes, words):
    """Dense ranks in lock-step.

    vllm#28224, verl#6856, vllm-ascend#11863. DeepEP across pods: vllm#21261, #21238. No draining before 0.18:
    llm-d#927/PR#2444, vllm#24885. Slots hide devices that other ranks need to see: vllm PR#53037, vllm#44556.
    """
    cr = resource(**changes)
    version = versions.known(cr.spec) or versions.NEWEST_KNOWN
    assert any(words in text for text in preview.warnings(cr.spec, name="web", version=version))


@pytest.mark.parametrize(
    "changes",
    [
        {"service": {"ports": [{"port": 8000, "name": "a"}, {"port": 8001, "name": "b"}]}},
        {"service": {"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "b", "targetPort": 8001}]}},
        {"service": {"ports": [{"port": 80, "targetPort": 9000}]}},  # a sidecar that knows the ranks
        {"devices": {"assignment": "Slots", "perNode": 2}},
        {"devices": {"assignment": "Slots", "perNode": 2, "visibleDevicesEnvName": "ZE_AFFINITY_MASK"}},
    ],
)
def test_a_supervised_group_that_is_reached_and_sees_all_devices_is_not_warned_of(changes):
    cr = resource(
        model={"name": "m", "architecture": "MoE"},
        dataParallel={"size": 4, "sizeLocal": 2, "loadBalancing": "External"},
        **changes,
    )
    assert [text for text in preview.warnings(cr.spec, name="web", version="0.32.0") if "gateway" not in text] == []


def test_a_plain_object_has_no_warnings_and_one_named_vllm_has():
    """A Service called vllm breaks its neighbours: vllm#34199, #15613, PR#18209."""
    assert preview.warnings(resource().spec, name="web", version="0.32.0") == []
    assert "VLLM_PORT" in preview.warnings(resource().spec, name="vllm", version="0.32.0")[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted(path):
    for document in preview.load(path.read_text()):
        preview.check(document, version=None)


def test_an_example_that_raises_a_limit_may_do_so_and_ends_if_it_cannot():
    (document,) = preview.load((EXAMPLES / "real" / "moe-deepep.yaml").read_text())
    script = document["spec"]["engine"]["command"][2]
    (engine,) = document["spec"]["template"]["spec"]["containers"]
    assert script == 'ulimit -l unlimited && exec "$@"'
    assert "SYS_RESOURCE" in engine["securityContext"]["capabilities"]["add"]
