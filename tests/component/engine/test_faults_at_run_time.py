"""Faults that strike a serving rank: after a while, by signal, or by the endpoint that is off unless asked for."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest


def inject(bed, text):
    return bed.request("POST", "/fault", {"fault": text})


def group(bed, *argv):
    head = bed.head("--enable-fault-endpoint", *argv, size=2, local=1)
    worker = bed.workers("--enable-fault-endpoint", *argv, size=2, start=1)
    bed.wait_ready()
    return head, worker


def test_the_endpoint_does_not_exist_unless_asked_for(bed):
    bed.head(size=1, local=1)
    bed.wait_ready()
    assert inject(bed, "crash")[0] == 404


def test_an_injected_crash_takes_exactly_its_rank(bed):
    head, worker = group(bed)
    status, text, _ = inject(bed, "crash:ranks=1,code=42,seconds=0.1")
    assert (status, json.loads(text)) == (200, {"ranks": [1]})
    assert worker.exit_code() == 0
    assert "{'EngineCore_DP1': 42}" in worker.log()
    assert head.popen.poll() is None


REFUSED = [
    ("slow-load", "cannot come at run time"),
    ("what", "unknown fault"),
    ("crash:on=signal", "on=signal belongs to --fault"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_cannot_be_injected_is_refused_by_name(bed, text, message):
    group(bed)
    status, body, _ = inject(bed, text)
    assert status == 400
    assert message in body


def test_a_signal_strikes_the_rank_that_waits_for_it(bed):
    head = bed.head("--fault", "fatal:on=signal", size=2, local=2)
    bed.wait_ready()
    bed.complete()
    os.kill(head.child("EngineCore_DP1"), signal.SIGUSR1)
    assert head.exit_code() == 0
    assert "FAULT fatal strikes" in head.log()
    assert "ENGINE_CORE_DEAD" in head.log() or "engine core processes ended" in head.log()


# What the log of a rank's node says once the fault has struck, and whether the rank is gone then.
STRIKES = [
    ("crash-after-ready", True),
    ("crash:code=9", True),
    ("fatal", True),
    ("hang", False),
    ("stop-reading", False),
    ("drop-coordinator", False),
    ("grow-memory:mib=1", False),
    ("garbage-output", False),
    ("crash-on-request:n=2", True),
    ("fatal-on-request:n=2", True),
    ("hang-on-request:n=2", False),
]


def ask(bed, headers):
    """One request, to which perhaps nobody answers any more."""
    with contextlib.suppress(OSError):
        bed.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers, timeout_s=0.3)


@pytest.mark.parametrize("how", ["signal", "endpoint"])
@pytest.mark.parametrize(("text", "gone"), STRIKES)
def test_every_fault_of_a_serving_rank_can_be_armed_while_it_serves(bed, wait, text, gone, how):
    kind, _, keys = text.partition(":")
    waits = f"{kind}:ranks=1,on=signal" + (keys and f",{keys}")
    _, worker = group(bed, *(("--fault", waits) if how == "signal" else ()))
    rank_1 = {"X-data-parallel-rank": "1"}
    bed.complete(headers=rank_1)
    pid = worker.child("EngineCore_DP1")
    if how == "signal":
        os.kill(pid, signal.SIGUSR1)
    else:
        # A rank that falls at once may do so before its answer has left it, and the head of a dense group never notices.
        with contextlib.suppress(OSError) if gone else contextlib.nullcontext():
            inject(bed, f"{kind}:ranks=1" + (keys and f",{keys}"))
    if kind.endswith("-on-request"):
        if how == "endpoint":  # after a signal nobody says when the rank has taken notice
            bed.complete(headers=rank_1)
            assert "strikes" not in worker.log()
        wait(lambda: ask(bed, rank_1) or "strikes" in worker.log(), within_s=10, last=bed.logs)
    worker.wait_for(f"FAULT {kind} strikes")
    if gone:
        assert worker.exit_code() == 0
        assert f"'EngineCore_DP1': {9 if 'code=9' in text else 1}" in worker.log()
    else:
        assert pid in bed.alive()


def test_a_rank_that_stops_reading_finishes_what_it_has(bed, wait):
    group(bed)
    answers = []
    header = {"X-data-parallel-rank": "1"}
    thread = threading.Thread(target=lambda: answers.append(bed.complete(max_tokens=60, headers=header)))
    thread.start()
    wait(lambda: bed.metric("vllm:num_requests_running", rank=1) == 1, within_s=10, last=bed.logs)
    inject(bed, "stop-reading:ranks=1")
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == 60
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, header, timeout_s=0.5)
    assert bed.health() == 200


def test_a_rank_without_its_coordinator_still_answers_and_its_counts_freeze(bed):
    group(bed)
    inject(bed, "drop-coordinator:ranks=1")
    for _ in range(3):
        bed.complete(headers={"X-data-parallel-rank": "1"})
    assert bed.health() == 200


def test_an_moe_rank_without_its_coordinator_starts_no_wave(bed):
    group(bed, "--moe")
    inject(bed, "drop-coordinator:ranks=1")
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "1"}, timeout_s=1)


def test_garbage_from_a_rank_is_dropped_and_the_front_end_lives(bed):
    head, _ = group(bed)
    inject(bed, "garbage-output:ranks=1")
    head.wait_for("Dropped a malformed output")
    assert bed.complete(headers={"X-data-parallel-rank": "1"})


def memory_mib(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_rank_grows_by_the_second(bed, wait):
    _, worker = group(bed)
    pid = worker.child("EngineCore_DP1")
    before = memory_mib(pid)
    inject(bed, "grow-memory:ranks=1,mib=20")
    wait(lambda: memory_mib(pid) > before + 35, within_s=5, last=lambda: str(memory_mib(pid)))
    assert bed.health() == 200


def test_a_draining_moe_group_loses_no_token(bed, wait):
    argv = ("--moe", "--shutdown-timeout", "10")
    head = bed.head(*argv, size=2, local=2)
    bed.wait_ready()
    answers = []

    def ask(rank):
        answers.append(bed.complete(max_tokens=80, headers={"X-data-parallel-rank": rank}))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in "01"]
    for thread in threads:
        thread.start()
    wait(
        lambda: all(bed.metric("vllm:num_requests_running", rank=rank) == 1 for rank in (0, 1)),
        within_s=5,
        last=bed.logs,
    )
    head.popen.terminate()
    for thread in threads:
        thread.join()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [80, 80]
    assert head.exit_code() == 0


def test_a_long_prompt_delays_its_first_token(bed):
    bed.head("--max-num-batched-tokens", "100", "--tokens-per-second", "50", size=1, local=1)
    bed.wait_ready()

    def seconds(prompt):
        begun = time.monotonic()
        bed.complete(prompt, max_tokens=1)
        return time.monotonic() - begun

    assert seconds("x" * 3000) > 30 / 50 > seconds("x")
