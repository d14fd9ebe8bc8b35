"""Dense groups: independent ranks behind one API."""

import http.client
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest


def test_a_group_on_one_node_serves_without_opening_the_rpc_port(bed):
    head = bed.head(size=2, local=2)
    bed.wait_ready()
    assert "ipc://" in head.log()
    assert bed.complete()["usage"] == {"prompt_tokens": 5, "total_tokens": 10, "completion_tokens": 5}


def test_a_head_and_a_headless_node_share_the_requests(bed):
    bed.head(size=2, local=1)
    bed.workers(size=2, start=1)
    bed.wait_ready()
    for _ in range(4):
        bed.complete()
    assert bed.metric("vllm:request_success_total", rank=0, finished_reason="length") == 2
    assert bed.metric("vllm:request_success_total", rank=1, finished_reason="length") == 2
    assert bed.metric("vllm:generation_tokens_total", rank=1) == 10
    assert bed.metric("vllm:prompt_tokens_total", rank=1) == 10


def test_a_head_without_ranks_serves_what_headless_nodes_compute(bed):
    bed.head(size=3, local=0)
    bed.workers(size=3, start=0)
    bed.workers(size=3, start=1, local=2)
    bed.wait_ready()
    for _ in range(3):
        bed.complete()
    assert [bed.metric("vllm:generation_tokens_total", rank=rank) for rank in range(3)] == [5, 5, 5]


def test_two_api_servers_share_a_port_and_each_scrape_shows_the_whole_group(bed, wait):
    head = bed.head(size=2, local=1, servers=2)
    bed.workers(size=2, start=1)
    head.wait_for("API server 0 serves")
    head.wait_for("API server 1 serves")
    servers = {head.child("ApiServer_0"), head.child("ApiServer_1")}
    for _ in range(12):
        bed.complete()
    scrapes = {bed.metric("vllm:generation_tokens_total", rank=0) for _ in range(8)}
    assert len(scrapes) == 1, "every API server must show the sum over all of them"
    assert scrapes.pop() + bed.metric("vllm:generation_tokens_total", rank=1) == 60
    assert servers <= set(bed.alive())


def test_the_port_refuses_connections_until_the_last_rank_is_ready(bed):
    head = bed.head(size=2, local=1)
    head.wait_for("1 local, 1 remote core engine proc(s) to connect")
    head.wait_for("INIT received")
    assert bed.health() is None
    bed.workers(size=2, start=1)
    bed.wait_ready()


def test_the_handshake_port_is_closed_once_the_group_is_ready(bed):
    bed.head(size=2, local=1)
    bed.workers(size=2, start=1)
    bed.wait_ready()
    late = bed.workers(size=2, start=1)
    late.wait_for("HELLO sent")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", bed.rpc_port))
    assert "INIT received" not in late.log()


def test_every_rank_gives_the_same_text_for_a_prompt(bed):
    bed.head(size=2, local=2)
    bed.wait_ready()
    texts = [bed.complete(headers={"X-data-parallel-rank": str(rank)})["choices"][0]["text"] for rank in (0, 1)]
    assert texts[0] == texts[1] != bed.complete(seed=7)["choices"][0]["text"]


def test_the_rank_header_chooses_the_rank_and_a_wrong_one_is_refused(bed):
    bed.head(size=2, local=2)
    bed.wait_ready()
    for _ in range(3):
        bed.complete(headers={"X-data-parallel-rank": "1"})
    assert bed.metric("vllm:generation_tokens_total", rank=1) == 15
    status, text, _ = bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "2"})
    assert status == 400
    assert "out of range [0, 2)" in json.loads(text)["error"]["message"]


def test_requests_beyond_max_num_seqs_are_counted_as_waiting(bed, wait):
    bed.head("--max-num-seqs", "1", size=1, local=1)
    bed.wait_ready()
    threads = [threading.Thread(target=bed.complete, kwargs={"max_tokens": 100}) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait(
        lambda: (
            bed.metric("vllm:num_requests_running", rank=0) == 1
            and bed.metric("vllm:num_requests_waiting", rank=0) == 2
        ),
        within_s=5,
        last=lambda: bed.request("GET", "/metrics")[1][:2000],
    )
    for thread in threads:
        thread.join()
    assert bed.metric("vllm:num_requests_running", rank=0) == 0


def test_a_client_that_goes_away_frees_its_place(bed, wait):
    bed.head("--max-num-seqs", "1", size=1, local=1)
    bed.wait_ready()
    endless = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", bed.port, timeout=10)
    connection.request("POST", "/v1/completions", json.dumps(endless), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    assert bed.complete()["choices"][0]["finish_reason"] == "length"
    assert bed.metric("vllm:request_success_total", rank=0, finished_reason="abort") == 1


def test_a_killed_local_rank_turns_health_to_503_and_ends_the_head_with_status_0(bed, wait):
    head = bed.head(size=2, local=2)
    bed.wait_ready()
    os.kill(head.child("EngineCore_DP1"), signal.SIGKILL)
    wait(lambda: bed.health() == 503, within_s=8, last=bed.logs)
    assert head.exit_code() == 0
    assert bed.alive() == []


def test_a_killed_local_rank_ends_a_head_with_several_api_servers_with_status_1(bed):
    head = bed.head(size=2, local=2, servers=2)
    head.wait_for("API server 1 serves")
    os.kill(head.child("EngineCore_DP0"), signal.SIGKILL)
    assert head.exit_code() == 1
    assert bed.alive() == []


def test_a_killed_coordinator_ends_a_head_with_several_api_servers_with_status_1(bed):
    head = bed.head(size=2, local=2, servers=2)
    head.wait_for("API server 1 serves")
    os.kill(head.child("DPCoordinator"), signal.SIGKILL)
    assert head.exit_code() == 1
    assert "DPCoordinator" in head.log().partition("ended unexpectedly")[2]
    assert bed.alive() == []


def test_a_head_with_one_api_server_serves_on_without_its_coordinator(bed, wait):
    head = bed.head(size=2, local=2)
    bed.wait_ready()
    killed = head.child("DPCoordinator")
    os.kill(killed, signal.SIGKILL)
    wait(lambda: killed not in bed.alive(), within_s=5, last=bed.logs)
    assert [bed.complete(headers={"X-data-parallel-rank": rank})["id"] for rank in "01"]
    assert bed.health() == 200
    assert head.popen.poll() is None


def test_a_headless_node_ends_with_status_0_when_its_rank_dies(bed):
    bed.head(size=3, local=1)
    worker = bed.workers(size=3, start=1, local=2)
    bed.wait_ready()
    os.kill(worker.child("EngineCore_DP2"), signal.SIGKILL)
    assert worker.exit_code() == 0


def test_the_head_of_a_dense_group_never_notices_a_killed_remote_rank(bed):
    bed.head(size=2, local=1)
    worker = bed.workers(size=2, start=1)
    bed.wait_ready()
    os.kill(worker.child("EngineCore_DP1"), signal.SIGKILL)
    assert worker.exit_code() == 0
    assert bed.health() == 200
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "1"}, timeout_s=1.0)
    assert bed.complete(headers={"X-data-parallel-rank": "0"})


def connections(pid):
    """How many TCP connections a process has, as the kernel sees it."""
    inodes = {os.readlink(entry).partition("[")[2].rstrip("]") for entry in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in inodes for row in rows)


def test_a_headless_node_outlives_its_head_and_leaves_on_sigterm(bed, wait):
    head = bed.head(size=2, local=1)
    worker = bed.workers(size=2, start=1)
    bed.wait_ready()
    rank = worker.child("EngineCore_DP1")
    assert connections(rank) > 0
    head.popen.kill()
    head.exit_code()
    wait(lambda: connections(rank) == 0, within_s=10, last=worker.log)
    assert rank in bed.alive()
    assert worker.popen.poll() is None
    worker.popen.terminate()
    assert worker.exit_code() == 0


@pytest.mark.parametrize("servers", [1, 2])
def test_sigterm_closes_the_port_and_leaves_no_process(bed, servers):
    head = bed.head(size=4, local=2, servers=servers)
    worker = bed.workers(size=4, start=2, local=2)
    bed.wait_ready()
    head.popen.terminate()
    worker.popen.terminate()
    assert head.exit_code() == 0
    assert worker.exit_code() == 0
    assert bed.health() is None
    assert bed.alive() == []


def test_a_killed_head_takes_its_children_with_it(bed, wait):
    head = bed.head(size=2, local=2, servers=2)
    bed.wait_ready()
    head.popen.kill()
    wait(lambda: bed.alive() == [], within_s=5, last=lambda: str(bed.alive()))


def test_shutdown_timeout_lets_running_requests_finish(bed, wait):
    head = bed.head("--shutdown-timeout", "10", size=1, local=1)
    bed.wait_ready()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(bed.complete(max_tokens=100)))
    thread.start()
    wait(lambda: bed.metric("vllm:num_requests_running", rank=0) == 1, within_s=5, last=bed.logs)
    head.popen.terminate()
    wait(lambda: bed.health() is None, within_s=5, last=bed.logs)
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == 100
    assert head.exit_code() == 0


def test_a_taken_port_ends_the_start_with_status_1(bed):
    bed.head(size=1, local=1)
    bed.wait_ready()
    second = bed.head(size=1, local=1)
    assert second.exit_code() == 1
    assert "Address already in use" in second.log()


def test_an_address_of_another_machine_ends_the_head_with_status_1(bed):
    head = bed.head("--data-parallel-address", "192.0.2.1", size=2, local=1)
    assert head.exit_code() == 1
    assert "Cannot assign requested address" in head.log()
    assert bed.alive() == []


@pytest.mark.parametrize("servers", [1, 2])
def test_sigterm_ends_a_head_that_still_waits_for_ranks(bed, servers):
    head = bed.head(size=2, local=1, servers=servers)
    head.wait_for("Handshake socket bound")
    head.popen.terminate()
    assert head.exit_code() == 0
    assert bed.alive() == []


def test_a_group_can_live_on_ipv6(bed):
    head = bed.head("-dpa", "::1", size=2, local=1)
    bed.workers("-dpa", "::1", size=2, start=1)
    bed.wait_ready()
    assert f"tcp://[::1]:{bed.rpc_port}" in head.log()
    assert bed.complete(headers={"X-data-parallel-rank": "1"})


def test_a_head_may_be_told_to_stay_after_a_death(bed, wait):
    head = bed.head(size=2, local=2, env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    bed.wait_ready()
    os.kill(head.child("EngineCore_DP0"), signal.SIGKILL)
    wait(lambda: bed.health() == 503, within_s=8, last=bed.logs)
    assert bed.request("POST", "/v1/completions", {"prompt": "x"})[0] == 500
    head.popen.terminate()
    assert head.exit_code() == 0


def test_a_headless_node_drains_before_it_leaves(bed, wait):
    bed.head(size=2, local=1)
    worker = bed.workers("--shutdown-timeout", "300", size=2, start=1)
    bed.wait_ready()
    answers = []
    chosen = {"headers": {"X-data-parallel-rank": "1"}, "max_tokens": 80}
    thread = threading.Thread(target=lambda: answers.append(bed.complete(**chosen)))
    thread.start()
    wait(lambda: bed.metric("vllm:num_requests_running", rank=1) == 1, within_s=5, last=bed.logs)
    worker.popen.terminate()
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == 80
    assert worker.exit_code() == 0
