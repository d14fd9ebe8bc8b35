"""Command lines of every mode for every family of releases: tables to read, and what holds for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dp_engine import modes as engine_modes
from dp_engine.options import parse_options
from dp_operator import api, naming, preview, render, rules
from tests.unit.operator.shapes import VERSIONS, specs
from tests.unit.operator.world import resource

MOE = {"name": "m", "architecture": "MoE"}
DENSE = {"name": "m", "architecture": "Dense"}

# File -> cases: model, dataParallel, TP, PP.
TABLES: dict[str, list[tuple[dict[str, Any], dict[str, Any], int, int]]] = {
    "internal": [
        (DENSE, {"size": 1}, 1, 1),
        (DENSE, {"size": 4}, 1, 1),
        (DENSE, {"size": 4, "sizeLocal": 4}, 1, 1),
        (DENSE, {"size": 8, "sizeLocal": 2}, 2, 1),
        (MOE, {"size": 16, "sizeLocal": 8}, 1, 1),
        (MOE, {"size": 64, "sizeLocal": 4}, 2, 2),
    ],
    "internal-dedicated": [
        (DENSE, {"size": 2, "headPlacement": "Dedicated"}, 1, 1),
        (DENSE, {"size": 32, "sizeLocal": 4, "headPlacement": "Dedicated"}, 4, 1),
    ],
    "hybrid": [
        (DENSE, {"size": 4, "sizeLocal": 2, "loadBalancing": "Hybrid"}, 1, 1),
        (MOE, {"size": 16, "sizeLocal": 8, "loadBalancing": "Hybrid"}, 1, 1),
        (MOE, {"size": 64, "sizeLocal": 4, "loadBalancing": "Hybrid"}, 2, 2),
    ],
    "external": [
        (MOE, {"size": 2, "loadBalancing": "External"}, 1, 1),
        (MOE, {"size": 16, "loadBalancing": "External"}, 4, 2),
    ],
    "external-supervised": [
        (MOE, {"size": 4, "sizeLocal": 2, "loadBalancing": "External"}, 1, 1),
        (MOE, {"size": 8, "sizeLocal": 8, "loadBalancing": "External"}, 1, 1),
        (MOE, {"size": 32, "sizeLocal": 4, "loadBalancing": "External"}, 2, 1),
    ],
}


def table(cases: list[tuple[dict[str, Any], dict[str, Any], int, int]]) -> str:
    """Rows of one file; releases with the same command lines share a row."""
    blocks = []
    for model, parallel, tensor, pipeline in cases:
        spec = resource(
            model=model,
            dataParallel=parallel,
            tensorParallelSize=tensor,
            pipelineParallelSize=pipeline,
            engine={"image": "i"},
        ).spec
        rows: dict[str, list[str]] = {}
        for version in VERSIONS:
            refused = rules.refusals(name="web", spec=spec, installed=version)
            text = "\n".join(
                f"refused: {line.replace(version, 'VERSION')}" for line in refused
            ) or preview.command_lines(spec, version=version)
            rows.setdefault(text, []).append(version)
        shape = " ".join(f"{key}={value}" for key, value in parallel.items())
        lines = [f"=== {model['architecture']} {shape} TP={tensor} PP={pipeline}"]
        for text, versions in rows.items():
            wrapped = text.replace(" --", "\n          --")
            lines += [f"{versions[0]} to {versions[-1]}", *(f"  {line}" for line in wrapped.splitlines())]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


@pytest.mark.parametrize("name", TABLES)
def test_command_lines_are_as_reviewed(name, golden):
    """Known-bad pairs of mode and version were shipped by others.

    A changed flag breaks multi-node: ai-dynamo/dynamo#4934, PR#5006, gpustack/gpustack#6221, PR#6236,
    vllm-project/vllm-ascend PR#16204.
    """
    golden(f"argv/{name}.txt", table(TABLES[name]))


def lines_of(spec: api.Spec, version: str) -> dict[int, list[str]]:
    """First rank -> command line of every pod of one group. A Dedicated head is -1."""
    head = -1 if not render.head_ranks(spec) else 0
    found = {head: render.resolve(render.engine_argv(spec, naming.HEAD), version=version, start_rank=0, head_ip="::1")}
    worker = render.engine_argv(spec, naming.WORKER)
    for first in render.worker_pods(spec, "x").values():
        found[first] = render.resolve(worker, version=version, start_rank=first, head_ip="::1")
    return found


def value(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


versions = st.sampled_from(VERSIONS)


def runnable(spec: api.Spec, version: str) -> None:
    assume(not rules.refusals(name="web", spec=spec, installed=version))


@settings(deadline=None, max_examples=60)
@given(specs(), versions)
def test_the_engine_of_that_version_accepts_every_command_line_and_runs_the_ranks_that_were_meant(spec, version):
    """The stand-in's parser and mode rules follow each release; every rank is started exactly once.

    ai-dynamo/dynamo#5001.
    """
    runnable(spec, version)
    started: list[int] = []
    for first, argv in lines_of(spec, version).items():
        options = parse_options([*argv[2:], "--emulate-version", version])
        launch = engine_modes.resolve(options, moe=spec.model.architecture == "MoE", env={})
        if spec.data_parallel.size > 1:
            assert launch.load_balancing == spec.data_parallel.load_balancing.lower(), argv
        assert launch.headless == ("--headless" in argv)
        if launch.children:
            started += range(launch.start_rank, launch.start_rank + launch.children)
        elif first >= 0 and spec.data_parallel.size > 1:
            started += launch.local_ranks
        elif first >= 0:
            started += [0]
    assert sorted(started) == list(range(spec.data_parallel.size))


@given(specs(), versions)
def test_one_address_and_one_port_everywhere(spec, version):
    """All pods name the head's IP, spelt out; the relay stands between the workers and the head's own port.

    opendatahub-io/kserve PR#1171, kserve/kserve PR#5155.
    """
    runnable(spec, version)
    lines = lines_of(spec, version)
    for first, argv in lines.items():
        assert not [word for word in argv if "$" in word]
        assert argv[:3] == ["vllm", "serve", "m"]
        if len(lines) > 1:
            assert value(argv, "--data-parallel-address") == "::1"
            port = spec.data_parallel.rpc_port + (1 if first <= 0 and argv is next(iter(lines.values())) else 0)
            assert value(argv, "--data-parallel-rpc-port") == str(port)
            assert value(argv, "--data-parallel-size") == str(spec.data_parallel.size)


@given(specs(modes=("Internal",)), versions)
def test_an_internal_head_has_no_start_rank_in_any_version(spec, version):
    """Start rank 0 makes vLLM 0.28 and newer go hybrid.

    gpustack/gpustack#6221, PR#6236, vllm-project/vllm-ascend PR#16204.
    """
    runnable(spec, version)
    head = next(iter(lines_of(spec, version).values()))
    assert "--data-parallel-start-rank" not in head
    assert "--data-parallel-rank" not in head


@given(specs(modes=("Hybrid", "External")), versions)
def test_pods_that_all_serve_never_get_headless(spec, version):
    """vLLM's head ends with "Remote engine N must not use --headless in external or hybrid dp lb mode".

    gpustack/gpustack#6221, PR#6236, vllm-project/vllm-ascend PR#16204.
    """
    runnable(spec, version)
    for argv in lines_of(spec, version).values():
        assert "--headless" not in argv
        assert ("--data-parallel-hybrid-lb" in argv) == (spec.data_parallel.load_balancing == "Hybrid")


@given(specs(), versions)
def test_the_number_of_api_servers_is_always_bounded(spec, version):
    """From 0.15 an unset number means one per rank: 64 ranks, 64 API servers."""
    runnable(spec, version)
    for argv in lines_of(spec, version).values():
        count = value(argv, "--api-server-count")
        assert ("--headless" in argv) == (count is None)
        assert count is None or 1 <= int(count) <= 8


@given(specs(modes=("External",)), versions)
def test_external_pods_name_their_rank_once(spec, version):
    """`--data-parallel-rank` means external LB: forbids `--headless`, forces local size 1."""
    runnable(spec, version)
    for first, argv in lines_of(spec, version).items():
        if spec.data_parallel.size_local == 1:
            assert value(argv, "--data-parallel-rank") == str(first)
            assert "--data-parallel-start-rank" not in argv
        else:
            assert "--data-parallel-rank" not in argv
            assert value(argv, "--data-parallel-start-rank") == str(first)


def test_flags_that_a_release_does_not_know_are_left_out():
    spec = resource(model=MOE, dataParallel={"size": 4}).spec
    old, middle, new = (preview.command_lines(spec, version=version) for version in ("0.17.1", "0.18.0", "0.22.0"))
    assert "--shutdown-timeout" not in old
    assert "--shutdown-timeout" in middle
    assert "--cpu-distributed-timeout-seconds" not in middle
    assert "--cpu-distributed-timeout-seconds" in new
