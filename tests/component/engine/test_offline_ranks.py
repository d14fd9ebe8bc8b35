"""Offline data parallelism: ranks share a file of prompts and meet at the master, with no server and no coordinator."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.ports import free_port

ENGINE_PATH = str(Path(__file__).parents[3] / "engine_image")


def offline(tmp_path, *argv, prompts=("one", "two", "three", "four", "five"), env=None):
    (tmp_path / "prompts").write_text("".join(f"{prompt}\n" for prompt in prompts))
    return subprocess.run(
        [
            *(sys.executable, "-m", "dp_engine.offline", "m", "--prompts", str(tmp_path / "prompts")),
            *("--load-seconds", "0.05", "--tokens-per-second", "0", "--max-tokens", "7", *argv),
        ],
        env={**os.environ, "PYTHONPATH": ENGINE_PATH, "TMPDIR": str(tmp_path), **(env or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def results(run):
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("version", ["0.33.0", "0.17.1"])
def test_ranks_split_the_prompts_and_results_come_back_in_order(tmp_path, version):
    run = offline(tmp_path, "-dp", "2", "--moe", "--emulate-version", version)
    found = results(run)
    assert [(item["rank"], item["index"], item["prompt"]) for item in found] == [
        (0, 0, "one"),
        (0, 1, "two"),
        (0, 2, "three"),
        (1, 3, "four"),
        (1, 4, "five"),
    ]
    assert {len(item["text"]) for item in found} == {7}
    assert run.stderr.count("Joined the data-parallel group of 2") == 2
    assert "DPCoordinator" not in run.stderr


def test_ranks_of_two_nodes_meet_at_the_same_master(tmp_path):
    port = str(free_port())
    folders = [tmp_path / str(node) for node in range(2)]
    found = []

    def node(number):
        folders[number].mkdir()
        where = ("--nnodes", "2", "--node-rank", str(number), "--dp-master-port", port)
        found.append([item["rank"] for item in results(offline(folders[number], "-dp", "4", "--moe", *where))])

    threads = [threading.Thread(target=node, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [[0, 0, 1], [2, 3]]


def test_a_rank_without_a_prompt_keeps_in_step(tmp_path):
    found = results(offline(tmp_path, "-dp", "3", "--moe", prompts=("one", "two")))
    assert [item["rank"] for item in found] == [0, 1]


def test_more_ranks_do_not_change_the_answers(tmp_path):
    texts = [[item["text"] for item in results(offline(tmp_path, "-dp", size, "--moe"))] for size in ("1", "2")]
    assert texts[0] == texts[1]


def test_dense_models_are_refused_since_0_14_and_ran_before(tmp_path):
    refused = offline(tmp_path, "-dp", "2")
    assert refused.returncode == 1
    assert "Offline data parallel mode" in refused.stderr
    assert len(results(offline(tmp_path, "-dp", "2", "--emulate-version", "0.11"))) == 5


def test_sigterm_ends_a_run_that_still_answers_at_once(tmp_path, wait):
    (tmp_path / "prompts").write_text("one\ntwo\n")
    command = ["-m", "dp_engine.offline", "m", "--prompts", "prompts", "-dp", "2", "--moe", "--max-tokens", "200"]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [sys.executable, *command, "--tokens-per-second", "1", "--load-seconds", "0.05"],
            env={**os.environ, "PYTHONPATH": ENGINE_PATH, "TMPDIR": str(tmp_path)},
            cwd=tmp_path,
            stderr=log,
        )
    said = (tmp_path / "log").read_text
    wait(lambda: said().count("needs to process 1 prompts") == 2, within_s=20, last=said)
    asked_s = time.monotonic()
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=20) == 1
    assert time.monotonic() - asked_s < 4, "after 5 s ranks that ignore SIGTERM are killed"
    assert said().count("told to stop") == 2, said()


def test_a_rank_that_fails_ends_all_of_them(tmp_path):
    run = offline(tmp_path, "-dp", "2", "--moe", "--fault", "crash-before-hello:ranks=1,code=9")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "{'EngineCore_DP1': 9}" in run.stderr


def test_the_output_may_be_a_file_and_missing_prompts_are_said_plainly(tmp_path):
    run = offline(tmp_path, "-dp", "2", "--moe", "--output", str(tmp_path / "out"))
    assert run.stdout == ""
    assert len((tmp_path / "out").read_text().splitlines()) == 5
    missing = offline(tmp_path, "--prompts", str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert "nowhere" in missing.stderr
