"""Whole groups as older releases ran them, end to end over HTTP, and what each node gives its ranks."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENGINE_PATH = str(Path(__file__).parents[3] / "engine_image")
VERSIONS = [
    "0.10.2",
    "0.11.0",
    "0.13.0",
    "0.14.0",
    "0.16.0",
    "0.17.1",
    "0.20.2",
    "0.22.1",
    "0.27.0",
    "0.29.0",
    "0.31.0",
]


def pair(bed, version, *argv, **kwargs):
    common = ["--emulate-version", version, *argv]
    head = bed.head(*common, size=2, local=1, **kwargs)
    worker = bed.workers(*common, size=2, start=1, **kwargs)
    return head, worker


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dense_pair_of_every_family_serves(bed, version):
    pair(bed, version)
    bed.wait_ready()
    texts = [bed.complete()["choices"][0]["text"] for _ in range(4)]
    assert len(set(texts)) == 1
    assert json.loads(bed.request("GET", "/version")[1]) == {"version": version}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_moe_pair_of_every_family_serves_in_waves(bed, version):
    nodes = pair(bed, version, "--moe", "--tokens-per-second", "0")
    bed.wait_ready()
    for wave in range(3):
        bed.complete()
        for node in nodes:
            node.wait_for(f"Wave {wave} complete")


def test_dense_ranks_of_0_11_step_in_waves_and_those_of_0_14_do_not(bed):
    nodes = pair(bed, "0.11.0")
    bed.wait_ready()
    bed.complete()
    for node in nodes:
        node.wait_for("Wave 0 complete")
        assert "Joined the data-parallel group of 2" in node.log()


def test_an_idle_group_of_0_17_always_uses_the_same_rank(bed):
    pair(bed, "0.17.1", "--moe")
    bed.wait_ready()
    for _ in range(3):
        bed.complete()
        # Until the counts are zero again, the front end remembers what it sent.
        time.sleep(0.3)
    assert bed.metric("vllm:generation_tokens_total", rank=0) == 15
    assert bed.metric("vllm:generation_tokens_total", rank=1) == 0


def test_the_rank_header_is_ignored_before_0_11_2(bed):
    bed.head("--emulate-version", "0.11.0", size=2, local=2)
    bed.wait_ready()
    bed.complete(headers={"X-data-parallel-rank": "7"})


def test_a_pair_of_different_versions_is_refused_where_hashes_are_compared(bed):
    head = bed.head("--moe", "--emulate-version", "0.32.0", size=2, local=1)
    bed.workers("--moe", "--emulate-version", "0.32.1", size=2, start=1)
    assert head.exit_code() == 1
    assert "Configuration mismatch" in head.log()


def seen(process):
    """{rank: (what the variable held, the rank's devices)}."""
    process.wait_for("READY sent")
    visible = dict(re.findall(r"\(EngineCore_DP(\d+) .*Visible devices: \w+=(\S+)", process.log()))
    own = dict(re.findall(r"DP rank (\d+) uses \w+ devices (\S+)", process.log()))
    return {rank: (visible[rank], own[rank]) for rank in visible}


@pytest.mark.parametrize(
    ("version", "variable", "expected"),
    [
        ("0.11.0", "CUDA_VISIBLE_DEVICES", {"0": ("4,5", "4,5"), "1": ("6,7", "6,7")}),
        ("0.17.1", "CUDA_VISIBLE_DEVICES", {"0": ("4,5,6,7", "4,5"), "1": ("4,5,6,7", "6,7")}),
        ("0.17.1", "ASCEND_RT_VISIBLE_DEVICES", {"0": ("4,5", "4,5"), "1": ("6,7", "6,7")}),
        ("0.33.0", "ZE_AFFINITY_MASK", {"0": ("4,5,6,7", "4,5"), "1": ("4,5,6,7", "6,7")}),
    ],
)
def test_each_local_rank_gets_its_devices_as_its_release_hands_them_out(bed, version, variable, expected):
    node = bed.head("--emulate-version", version, "-tp", "2", size=2, local=2, env={variable: "4,5,6,7"})
    bed.wait_ready()
    assert seen(node) == expected


def test_the_only_rank_of_0_11_keeps_its_nodes_variable_whatever_the_devices_are_called(bed):
    head = bed.head("--emulate-version", "0.11", size=1, local=1, env={"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"})
    bed.wait_ready()
    assert "Visible devices: CUDA_VISIBLE_DEVICES=GPU-1a,GPU-2b\n" in head.log()


def test_too_few_devices_end_the_start_and_leave_nothing(bed):
    node = bed.head("-tp", "2", size=2, local=2, env={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert node.exit_code() == 1
    assert "DP adjusted local rank 3 is out of bounds" in node.log()
    assert bed.alive() == []


def test_processes_have_vllms_titles(bed):
    node = bed.head(size=2, local=2, servers=2)
    bed.wait_ready()
    node.wait_for("API server 1 serves")
    titles = set()
    for pid in bed.alive():
        titles.add(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode())
    assert {
        *("VLLM::DPCoordinator", "VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1"),
        *("VLLM::APIServer_0", "VLLM::APIServer_1"),
    } <= titles


def test_a_service_called_vllm_is_refused_as_vllm_refuses_it(bed):
    node = bed.head(size=1, local=1, env={"VLLM_PORT": "tcp://10.96.0.7:80"})
    assert node.exit_code() == 1
    assert "appears to be a URI" in node.log()


def test_the_table_of_differences_is_printed():
    run = subprocess.run(
        [sys.executable, "-m", "dp_engine", "versions"],
        env={"PYTHONPATH": ENGINE_PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in ("0.11.2", "0.27.0", "counts_width=3", "--device-ids", "idle_engine_starts_waves=True"):
        assert line in run.stdout
