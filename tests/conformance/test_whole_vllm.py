"""Whole `vllm serve` 0.32 with a tiny dense model, in either role; the largest and slowest of these tests."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from dp_engine import logprobs
from tests.conformance.conftest import DRIVERS, WHOLE, Api, Bed, Program, Vllm, until
from tests.conformance.report import Table
from tests.ports import free_port

# Torch, model and HTTP stack from a cold disk, while other programs use both cores.
START_S = 240.0


@pytest.fixture(scope="session")
def tiny_dense(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    command = [str(vllm.python), str(DRIVERS / "tiny_models.py"), str(folder)]
    subprocess.run(command, check=True, env=vllm.env(WHOLE, folder), timeout=START_S, capture_output=True)
    return folder / "tiny-dense"


def serve(vllm: Vllm, bed: Bed, model: Path, *argv: str) -> Program:
    vllm.stop()  # two copies of torch at a time are enough
    return bed.start(
        "vllm-serve",
        [
            *(str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"),
            *("--load-format", "dummy", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"),
            *("--dtype", "float32"),
            *("--gpu-memory-utilization", "0.1", *argv),
        ],
        vllm.env(WHOLE, bed.directory),
    )


def group(port: int, *, local: int) -> tuple[str, ...]:
    return ("-dp", "2", "-dpl", str(local), "-dpa", "127.0.0.1", "-dpp", str(port))


def assert_logprobs(api: Api) -> None:
    """vLLM's front end reads out of our outputs what our rank put in: the chosen token, and the best."""
    asked = {"model": "m", "prompt": "hi", "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    status, text = api.call("/v1/completions", {**asked, "return_tokens_as_token_ids": True})
    assert status == 200, text
    found = json.loads(text)["choices"][0]["logprobs"]
    ours = [logprobs.of_token(int(name.removeprefix("token_id:")), 3) for name in found["tokens"]]
    assert len(ours) == 6
    assert found["token_logprobs"] == [item.logprob for item in ours]
    assert found["top_logprobs"] == [{f"token_id:{token}": value for token, value in item.top} for item in ours]


def test_vllm_serve_without_ranks_answers_through_our_engines(
    vllm: Vllm, bed: Bed, compatibility: Table, tiny_dense: Path
) -> None:
    with compatibility.cell("our engines behind a whole `vllm serve`", WHOLE, moe=False):
        api, rpc = Api(bed, free_port()), free_port()
        serve(
            *(vllm, bed, tiny_dense, *group(rpc, local=0)),
            *("--host", "127.0.0.1", "--port", str(api.port), "--api-server-count", "1"),
        )
        engines = ("--headless", "-dpr", "0", "--max-model-len", "256", "--no-moe", *group(rpc, local=2))
        bed.engine(*engines, version=WHOLE)
        until(
            lambda: api.call("/health")[0] == 200 or not all(map(Program.running, bed.started)),
            within_s=START_S,
            last=bed.logs,
        )
        assert api.complete(tokens=7) == 7
        for rank in (0, 1):
            assert api.complete(tokens=5, rank=rank) == 5
        assert_logprobs(api)
        status, metrics = api.call("/metrics")
        assert status == 200
        for rank, tokens in ((0, 5), (1, 5)):
            counted = re.search(rf'vllm:generation_tokens_total{{engine="{rank}",[^}}]*}} ([\d.e+]+)', metrics)
            assert counted, metrics[:2000]
            assert float(counted[1]) >= tokens


def test_a_whole_headless_vllm_serves_our_front_end(
    vllm: Vllm, bed: Bed, compatibility: Table, tiny_dense: Path
) -> None:
    with compatibility.cell("a whole headless vLLM behind our head", WHOLE, moe=False):
        api, rpc = Api(bed, free_port()), free_port()
        bed.engine(
            *(*group(rpc, local=1), "--host", "127.0.0.1", "--port", str(api.port), "--api-server-count", "1"),
            *("--max-model-len", "256", "--no-moe"),
            version=WHOLE,
            name="head",
        )
        serve(vllm, bed, tiny_dense, "--headless", "-dpr", "1", *group(rpc, local=1))
        until(
            lambda: api.call("/health")[0] == 200 or not all(map(Program.running, bed.started)),
            within_s=START_S,
            last=bed.logs,
        )
        assert api.complete(tokens=9, rank=1) == 9
        assert api.complete(tokens=4, rank=0) == 4
