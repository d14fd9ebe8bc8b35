"""The metrics page, the OpenAI schema, faults and the group's rendezvous."""

import os
import re
import socket
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dp_engine.faults import Fault, find, parse_fault, parse_faults
from dp_engine.metrics import SharedMetrics
from dp_engine.openai_schema import (
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    StopWatch,
    chat_prompt,
    decode_request,
    prompts_of,
    sampling_of,
)
from dp_engine.rendezvous import GroupBrokenError, join
from dp_engine.versions import wire_of


def page(metrics, name="m"):
    """{(sample name, sorted labels): value} as a Prometheus server reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render(model_name=name))
        for sample in family.samples
    }


def value(samples, name, engine, **labels):
    return samples[name, tuple(sorted({"engine": str(engine), "model_name": "m", **labels}.items()))]


def test_counters_of_all_api_servers_are_added_up_per_engine():
    metrics = SharedMetrics(clients=2, engines=2)
    metrics.writer(0).count(1, "generation_tokens", 3)
    metrics.writer(1).count(1, "generation_tokens", 4)
    metrics.writer(1).count(0, "stop")
    samples = page(metrics)
    assert value(samples, "vllm:generation_tokens_total", 1) == 7
    assert value(samples, "vllm:generation_tokens_total", 0) == 0
    assert value(samples, "vllm:request_success_total", 0, finished_reason="stop") == 1
    assert value(samples, "vllm:cache_config_info", 1, block_size="16", num_gpu_blocks="8192", cache_dtype="auto") == 1


def test_the_newest_gauge_wins_whichever_api_server_heard_it():
    metrics = SharedMetrics(clients=2, engines=1)
    metrics.writer(1).gauges(0, running=5, waiting=2, kv_usage=0.5)
    metrics.writer(0).gauges(0, running=1, waiting=0, kv_usage=0.25)
    samples = page(metrics)
    assert value(samples, "vllm:num_requests_running", 0) == 1
    assert value(samples, "vllm:kv_cache_usage_perc", 0) == 0.25


def test_histograms_are_cumulative():
    metrics = SharedMetrics(clients=1, engines=1)
    for seconds in (0.0005, 0.3, 1000):
        metrics.writer(0).observe(0, "e2e_request", seconds)
    samples = page(metrics)
    name = "vllm:e2e_request_latency_seconds"
    found = [value(samples, f"{name}_bucket", 0, le=bound) for bound in ("0.001", "0.5", "120.0", "+Inf")]
    assert found == [1, 2, 2, 3]
    assert value(samples, f"{name}_sum", 0) == pytest.approx(1000.3005)


def test_a_model_name_with_quotes_does_not_break_the_page():
    assert page(SharedMetrics(clients=1, engines=1), name='a"b\\c')


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("hi", [[104, 105]]), (["a", "b"], [[97], [98]]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_shapes(prompt, found):
    assert prompts_of(prompt) == found


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"]])
def test_an_unusable_prompt_is_refused(prompt):
    with pytest.raises(BadRequestError):
        prompts_of(prompt)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"model": "m"}', "missing required field `prompt`"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens must be at least 1"),
        (b'{"prompt": "x", "n": 0}', "n must be between"),
        (b'{"prompt": "x", "temperature": -1}', "temperature must be non-negative"),
        (b'{"prompt": "x", "top_p": 0}', "top_p must be in"),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "when `stream=True`"),
    ],
)
def test_a_bad_body_is_refused_with_the_reason(body, message):
    with pytest.raises(BadRequestError, match=re.escape(message)):
        decode_request(body, CompletionRequest)


def test_unknown_fields_and_content_parts_are_accepted():
    body = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "new": 1}'
    assert bytes(chat_prompt(decode_request(body, ChatRequest).messages)) == b"user: hi\nassistant:"


def test_the_context_length_is_kept():
    call = decode_request(b'{"prompt": "x"}', CompletionRequest)
    assert sampling_of(call, prompt_tokens=10, max_tokens=None, max_model_len=50)["max_tokens"] == 40
    with pytest.raises(BadRequestError, match="maximum context length is 50 tokens"):
        sampling_of(call, prompt_tokens=10, max_tokens=41, max_model_len=50)


def fed(stops, pieces):
    watch, shown = StopWatch(stops), []
    for index, piece in enumerate(pieces):
        text, stop = watch.feed(piece, final=index == len(pieces) - 1)
        shown.append(text)
        if stop:
            return "".join(shown), stop
    return "".join(shown), None


def test_a_stop_string_is_found_across_pieces_and_the_first_one_wins():
    assert fed(["lo w", "zz"], list("hello world")) == ("hel", "lo w")
    assert fed(["world", "o"], ["hello world"]) == ("hell", "o")
    assert fed(["xyz"], list("abxy")) == ("abxy", None)
    assert fed([], list("abc")) == ("abc", None)


def test_faults_are_read_with_ranks_and_found_by_rank():
    fault = parse_fault("slow-load:ranks=5-7;9,seconds=2.5")
    assert fault == Fault(kind="slow-load", ranks=frozenset({5, 6, 7, 9}), seconds=2.5)
    assert find([fault], "slow-load", 9) is fault
    assert find([fault], "slow-load", 8) is None
    assert find([fault], "slow-import", 9) is None
    assert parse_fault("crash-on-request:n=3,code=4").hits(0)


@pytest.mark.parametrize("text", ["nonsense", "slow-load:seconds", "slow-load:seconds=x", "slow-load:ranks=a-b"])
def test_a_fault_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="fault"):
        parse_fault(text)


def test_the_environment_adds_faults(monkeypatch):
    monkeypatch.setenv("DP_ENGINE_FAULT", "slow-load:seconds=1 wrong-hash:ranks=1")
    assert [fault.kind for fault in parse_faults(["late-bind"])] == ["late-bind", "slow-load", "wrong-hash"]


@pytest.fixture
def wake():
    read_fd, write_fd = os.pipe()
    yield read_fd
    os.close(read_fd)
    os.close(write_fd)


def joined(size, *, host="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    groups = [None] * size

    def enter(rank):
        groups[rank] = join(rank=rank, size=size, host=host, port=port, timeout_s=10)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def reduce(groups, flags, wake_fd):
    results = [None] * len(groups)

    def call(rank):
        results[rank] = groups[rank].any(mine=flags[rank], wake_fd=wake_fd, timeout_s=10)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_of_a_group_hears_whether_anyone_has_work(wake):
    groups = joined(4)
    assert reduce(groups, [False, False, True, False], wake) == [True] * 4
    assert reduce(groups, [False] * 4, wake) == [False] * 4
    groups[3].close()
    with pytest.raises(GroupBrokenError, match="rank 3"):
        reduce_one(groups, wake)


def reduce_one(groups, wake_fd):
    for rank in (1, 2):
        groups[rank]._peers[0].sendall(b"\0")
    groups[0].any(mine=False, wake_fd=wake_fd, timeout_s=10)


def test_only_ranks_of_the_group_count_as_its_members():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    groups = {}

    def enter(rank):
        groups[rank] = join(rank=rank, size=3, host="127.0.0.1", port=port, timeout_s=10)

    lead = threading.Thread(target=enter, args=(0,))
    lead.start()

    def introduced(number):
        while True:
            try:
                peer = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except ConnectionRefusedError:
                assert lead.is_alive()
        peer.sendall(b"DPG1" + number.to_bytes(2, "little"))
        return peer

    strangers = [introduced(number) for number in (0, 3, 700)]
    assert [peer.recv(1) for peer in strangers] == [b""] * 3, "told at once that they do not belong here"
    first = introduced(1)
    again = introduced(1)
    assert again.recv(1) == b"", "rank 1 is here already"
    follow = threading.Thread(target=enter, args=(2,))
    follow.start()
    assert first.recv(1) == b"\x01"
    for thread in (lead, follow):
        thread.join(10)
    assert sorted(groups) == [0, 2]
    for sock in (*strangers, first, again):
        sock.close()


def test_rank_0_cannot_lead_a_group_at_an_address_of_another_machine():
    with pytest.raises(GroupBrokenError, match=r"failed to listen on 192\.0\.2\.1:29501: Cannot assign"):
        join(rank=0, size=2, host="192.0.2.1", port=29501, timeout_s=5)


def test_a_group_that_does_not_come_together_names_who_is_missing():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(GroupBrokenError, match=r"ranks \[1, 2\] did not join"):
        join(rank=0, size=3, host="127.0.0.1", port=port, timeout_s=0.2)
    with pytest.raises(GroupBrokenError, match="rank 0 was not reached"):
        join(rank=1, size=3, host="127.0.0.1", port=port, timeout_s=0.2)


@pytest.mark.parametrize(
    ("version", "there", "not_there"),
    [
        ("0.11", ["gpu_cache_usage_perc", "time_per_output_token_seconds_count"], ["engine_sleep_state"]),
        ("0.17", ["engine_sleep_state", "prompt_tokens_by_source_total"], ["gpu_cache_usage_perc"]),
        ("0.31", ["engine_sleep_state"], ["num_requests_waiting_by_reason"]),
        ("0.32", ["num_requests_waiting_by_reason"], ["gpu_prefix_cache_hits_total"]),
    ],
)
def test_metrics_have_the_names_of_their_release(version, there, not_there):
    names = {name for name, _ in page(SharedMetrics(clients=1, engines=1, family=wire_of(version)))}
    always = {"num_requests_running", "kv_cache_usage_perc", "e2e_request_latency_seconds_sum", "request_success_total"}
    assert {f"vllm:{name}" for name in [*always, *there]} <= names
    assert not {f"vllm:{name}" for name in not_there} & names


@pytest.mark.parametrize(("version", "count"), [("0.12", 3), ("0.13", 4), ("0.17", 5)])
def test_requests_end_for_the_reasons_of_their_release(version, count):
    samples = page(SharedMetrics(clients=1, engines=1, family=wire_of(version)))
    assert sum(name == "vllm:request_success_total" for name, _ in samples) == count


def test_waiting_requests_prompts_and_sleep_are_split_by_label():
    metrics = SharedMetrics(clients=2, engines=1)
    metrics.writer(0).gauges(0, running=1, waiting=7, kv_usage=0)
    metrics.writer(1).count(0, "prompt_tokens", 5)
    samples = page(metrics)
    waiting = "vllm:num_requests_waiting_by_reason"
    assert [value(samples, waiting, 0, reason=reason) for reason in ("capacity", "deferred")] == [7, 0]
    assert value(samples, "vllm:prompt_tokens_by_source_total", 0, source="local_compute") == 5
    states = ("awake", "weights_offloaded", "discard_all")
    assert [value(samples, "vllm:engine_sleep_state", 0, sleep_state=state) for state in states] == [1, 0, 0]
    metrics.writer(1).sleep_level(0, 2)
    samples = page(metrics)
    assert [value(samples, "vllm:engine_sleep_state", 0, sleep_state=state) for state in states] == [0, 0, 1]


def test_the_sizes_of_prompts_and_answers_are_counted_in_tokens():
    metrics = SharedMetrics(clients=1, engines=1)
    metrics.writer(0).observe(0, "prompt_size", 7)
    samples = page(metrics)
    found = [value(samples, "vllm:request_prompt_tokens_bucket", 0, le=bound) for bound in ("5.0", "10.0", "+Inf")]
    assert found == [0, 1, 1]
