"""MoE groups: ranks that step together and find each other at rank 0's address."""

import os
import signal
import threading
import uuid

import pytest

from tests.component import namespaces


def pair(bed, *argv):
    head = bed.head("--moe", *argv, size=2, local=1)
    worker = bed.workers("--moe", *argv, size=2, start=1)
    return head, worker


def test_a_wave_runs_on_every_rank_and_completes(bed):
    head, worker = pair(bed)
    bed.wait_ready()
    bed.complete(headers={"X-data-parallel-rank": "1"})
    # Rank 0 had no request: it took part with empty steps until nobody had work left.
    head.wait_for("Wave 0 complete")
    worker.wait_for("Wave 0 complete")
    bed.complete(headers={"X-data-parallel-rank": "0"})
    head.wait_for("Wave 1 complete")
    worker.wait_for("Wave 1 complete")


def test_the_waves_of_0_32_are_started_by_the_front_end(bed):
    head, worker = pair(bed, "--emulate-version", "0.32.0")
    bed.wait_ready()
    for rank in ("0", "1"):
        bed.complete(headers={"X-data-parallel-rank": rank})
        head.wait_for(f"Wave {rank} complete")
        worker.wait_for(f"Wave {rank} complete")


def test_many_requests_at_once_all_finish_while_waves_come_and_go(bed):
    bed.head("--moe", size=4, local=2, servers=2)
    bed.workers("--moe", size=4, start=2, local=2)
    bed.wait_ready()
    done = []

    def client(index):
        done.extend(bed.complete(f"{index}", max_tokens=1 + (index * 7 + turn * 5) % 20) for turn in range(6))

    threads = [threading.Thread(target=client, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(done) == 36, bed.logs()


def test_config_json_of_a_local_model_makes_the_group_step_together(bed, tmp_path):
    (tmp_path / "config.json").write_text('{"num_local_experts": 4}')
    head = bed.head(size=2, local=2, model=str(tmp_path))
    bed.wait_ready()
    assert "Joined the data-parallel group of 2" in head.log()


def test_a_rank_that_disagrees_about_the_configuration_ends_the_start(bed):
    head = bed.head("--moe", size=2, local=1)
    bed.workers("--moe", "--enable-expert-parallel", size=2, start=1)
    assert head.exit_code() == 1
    assert "Configuration mismatch detected for engine 1" in head.log()


def test_a_killed_remote_rank_is_noticed_with_the_next_request(bed, wait):
    head, worker = pair(bed)
    bed.wait_ready()
    os.kill(worker.child("EngineCore_DP1"), signal.SIGKILL)
    assert worker.exit_code() == 0
    assert bed.health() == 200
    status, text, _ = bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "0"})
    assert status == 500, text
    assert head.exit_code() == 0
    assert bed.alive() == []


def test_without_its_coordinator_no_wave_starts_and_the_head_looks_healthy(bed, wait):
    head = bed.head("--moe", size=2, local=2)
    bed.wait_ready()
    bed.complete()
    head.wait_for("Wave 0 complete")
    killed = head.child("DPCoordinator")
    os.kill(killed, signal.SIGKILL)
    wait(lambda: killed not in bed.alive(), within_s=5, last=bed.logs)
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=2)
    assert bed.health() == 200
    assert head.popen.poll() is None


@pytest.fixture
def two_machines():
    """Two network namespaces joined by a cable: (first namespace, its address, second namespace)."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    tag = uuid.uuid4().hex[:6]
    first, second = f"dpe-{tag}-a", f"dpe-{tag}-b"
    try:
        namespaces.add(first, second)
        namespaces.connect(first, "eth0", second, "eth0")
        namespaces.address(first, "eth0", "198.18.77.1")
        namespaces.address(second, "eth0", "198.18.77.2")
        yield first, "198.18.77.1", second
    finally:
        namespaces.delete(first, second)


def start_on(bed, machines, *argv, local):
    first, address, second = machines
    head = bed.head(*argv, "-dpa", address, size=2, local=local, prefix=("ip", "netns", "exec", first))
    workers = bed.workers(
        *argv, "-dpa", address, size=2, start=local, local=2 - local, prefix=("ip", "netns", "exec", second)
    )
    return head, workers


def test_an_moe_group_cannot_start_when_rank_0_is_not_on_the_heads_machine(bed, two_machines):
    head, workers = start_on(bed, two_machines, "--moe", local=0)
    assert workers.exit_code() == 0
    assert "DistNetworkError" in workers.log()
    assert "Cannot assign requested address" in workers.log()
    assert "Application startup complete" not in head.log()


def test_an_moe_group_with_rank_0_on_the_head_starts_across_machines(bed, two_machines):
    head, _ = start_on(bed, two_machines, "--moe", local=1)
    head.wait_for("Application startup complete")


def test_a_dense_group_starts_across_machines_without_a_rank_on_the_head(bed, two_machines):
    head, _ = start_on(bed, two_machines, local=0)
    head.wait_for("Application startup complete")
