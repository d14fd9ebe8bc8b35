"""Every fault does to a real group what its name says, and says so in the log."""

import json
import time

import pytest


def group(bed, fault, **head):
    return bed.head(size=2, local=1, **head), bed.workers("--fault", fault, size=2, start=1)


@pytest.mark.parametrize("kind", ["crash-before-hello", "crash-after-hello", "crash-after-ready"])
def test_a_crash_ends_the_headless_node(bed, kind):
    _, worker = group(bed, f"{kind}:code=7")
    assert worker.exit_code() == 0
    assert f"FAULT {kind} strikes: exit code 7" in worker.log()
    assert "{'EngineCore_DP1': 7}" in worker.log()


def test_a_local_crash_before_hello_fails_the_start_of_the_head(bed):
    head = bed.head("--fault", "crash-before-hello:ranks=0,code=4", size=2, local=1)
    assert head.exit_code() == 1
    assert "Failed core proc(s): {'EngineCore_DP0': 4}" in head.log()


@pytest.mark.parametrize("fault", ["slow-import", "slow-load"])
def test_a_slow_rank_delays_the_whole_group(bed, fault):
    begun = time.monotonic()
    _, worker = group(bed, f"{fault}:seconds=1.5")
    bed.wait_ready()
    assert time.monotonic() - begun > 1.5
    assert f"FAULT {fault} strikes: 1.5 s" in worker.log()


def test_a_late_head_is_waited_for(bed):
    head = bed.head("--fault", "late-bind:seconds=1", size=2, local=1)
    worker = bed.workers(size=2, start=1)
    worker.wait_for("HELLO sent")
    assert "Handshake socket bound" not in head.log()
    bed.wait_ready()


def test_a_rank_that_hangs_before_ready_keeps_everyone_waiting(bed):
    head, worker = group(bed, "hang-before-ready")
    worker.wait_for("FAULT hang-before-ready strikes")
    head.wait_for("READY sent")  # the other rank is through
    assert bed.health() is None
    assert head.popen.poll() is None


def test_a_second_hello_aborts_the_head(bed):
    head, _ = group(bed, "duplicate-rank")
    assert head.exit_code() == 1
    assert "Unexpected HELLO message for remote engine 1 in CONNECTED state" in head.log()


def test_garbage_aborts_the_head(bed):
    head, _ = group(bed, "garbage-frame")
    assert head.exit_code() == 1
    assert "DecodeError" in head.log()


def test_a_wrong_hash_aborts_an_moe_head(bed):
    head = bed.head("--moe", size=2, local=1)
    bed.workers("--moe", "--fault", "wrong-hash", size=2, start=1)
    assert head.exit_code() == 1
    assert "Configuration mismatch detected for engine 1" in head.log()


def test_a_crash_on_the_second_request_takes_the_head_down(bed):
    head = bed.head("--fault", "crash-on-request:n=2", size=1, local=1)
    bed.wait_ready()
    bed.complete()
    status, text, _ = bed.request("POST", "/v1/completions", {"prompt": "x"})
    assert status == 500
    assert json.loads(text)["error"]["type"] == "InternalServerError"
    assert head.exit_code() == 0


def test_an_exception_in_a_remote_rank_reaches_the_head(bed, wait):
    head, worker = group(bed, "fatal-on-request")
    bed.wait_ready()
    status, _, _ = bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "1"})
    assert status == 500
    assert bed.health() in {503, None}
    assert head.exit_code() == 0
    assert "ENGINE_CORE_DEAD" in head.log()
    assert worker.exit_code() == 0


def test_a_hanging_rank_looks_healthy(bed):
    group(bed, "hang-on-request:ranks=1")
    bed.wait_ready()
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "1"}, timeout_s=0.5)
    assert bed.health() == 200


def test_faults_can_come_from_the_environment_and_hit_only_their_ranks(bed):
    faults = {"DP_ENGINE_FAULT": "crash-before-hello:ranks=5-7,code=4 slow-load:ranks=1,seconds=0.1"}
    worker = bed.workers(size=2, start=1, env=faults)
    bed.head(size=2, local=1, env=faults)
    bed.wait_ready()
    assert "FAULT slow-load strikes" in worker.log()
    assert "crash-before-hello" not in worker.log()
