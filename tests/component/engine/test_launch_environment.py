"""What the environment does to a start: addresses, folders, limits, and the endpoints of a server's operators."""

import json
import os
import signal
import time

import pytest

ELSEWHERE = "255.255.255.255"  # nobody's address, and no packet leaves for it


def process_titled(bed, title):
    """Pid of this test's process that `ps` shows under `title`."""
    deadline = time.monotonic() + 20
    while True:
        for pid in bed.alive():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if file.read().rstrip(b"\0").decode() == title:
                        return pid
            except OSError:
                continue
        assert time.monotonic() < deadline, f"no {title}:\n{bed.logs()}"
        time.sleep(0.02)


def test_a_dense_rank_of_0_24_must_reach_itself_at_vllm_host_ip(bed):
    quick = ("--cpu-distributed-timeout-seconds", "0.3")
    head = bed.head("--emulate-version", "0.24", *quick, size=2, local=2, env={"VLLM_HOST_IP": ELSEWHERE})
    assert head.exit_code() == 1
    assert "VLLM_HOST_IP must be an address of this machine" in head.log()
    assert bed.alive() == []


@pytest.mark.parametrize(("version", "address"), [("0.24", "127.0.0.1"), ("0.33", ELSEWHERE)])
def test_its_own_address_is_fine_and_0_33_needs_none(bed, version, address):
    bed.head("--emulate-version", version, size=2, local=2, env={"VLLM_HOST_IP": address})
    bed.wait_ready()


def test_a_folder_for_sockets_that_cannot_be_used_ends_the_start_with_its_name(bed):
    head = bed.head(size=2, local=2, env={"VLLM_RPC_BASE_PATH": "/nowhere"})
    assert head.exit_code() == 1
    assert "VLLM_RPC_BASE_PATH '/nowhere'" in head.log()


def test_a_start_that_fails_half_way_leaves_no_process(bed):
    head = bed.head(size=32, local=32, prefix=("prlimit", "--nofile=24:24"))
    assert head.exit_code() == 1
    assert "(EngineCore_DP0 " in head.log(), "some ranks had started"
    assert bed.alive() == []


def test_a_front_end_that_dies_while_ranks_are_missing_ends_the_start_of_0_33(bed):
    head = bed.head(size=2, local=1, servers=2)
    head.wait_for("INIT received")  # the rank beside it; so the servers have told where they are
    os.kill(process_titled(bed, "VLLM::APIServer_1"), signal.SIGKILL)
    assert head.exit_code() == 1
    assert "front end process(es) ended: {'ApiServer_1': -9}" in head.log()
    assert bed.alive() == []


def test_0_17_notices_a_dead_front_end_only_after_the_handshake(bed, wait):
    version = ("--emulate-version", "0.17.1")
    head = bed.head(*version, size=2, local=1, servers=2)
    pid = process_titled(bed, "VLLM::APIServer_1")
    head.wait_for("Handshake socket bound")
    os.kill(pid, signal.SIGKILL)
    wait(lambda: pid not in bed.alive(), within_s=10, last=bed.logs)
    bed.workers(*version, size=2, start=1)
    assert head.exit_code() == 1
    assert "All engines are READY" in head.log()
    assert "Process(es) ended unexpectedly: {'ApiServer_1': -9}" in head.log()


def test_a_front_end_that_dies_later_ends_its_node_too(bed):
    head = bed.head(size=2, local=2, servers=2)
    bed.wait_ready()
    os.kill(process_titled(bed, "VLLM::APIServer_0"), signal.SIGKILL)
    assert head.exit_code() == 1
    assert bed.alive() == []


def test_a_hanging_rank_is_killed_after_the_time_that_the_environment_gives(bed):
    env = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}
    head = bed.head("--fault", "hang:ranks=1,on=signal", size=2, local=2, env=env)
    bed.wait_ready()
    os.kill(head.child("EngineCore_DP1"), signal.SIGUSR1)
    head.wait_for("FAULT hang strikes")
    begun = time.monotonic()
    head.popen.terminate()
    assert head.exit_code() == 0
    assert time.monotonic() - begun < 4, "5 s without the variable"


def test_servers_have_endpoints_for_their_operators_in_dev_mode_only(bed):
    bed.head(size=2, local=2)
    bed.wait_ready()
    assert bed.request("GET", "/is_sleeping")[0] == bed.request("POST", "/pause")[0] == 404


def test_a_server_in_dev_mode_sleeps_pauses_and_shows_its_settings(bed):
    bed.head(size=2, local=2, env={"VLLM_SERVER_DEV_MODE": "1"})
    bed.wait_ready()

    def ask(method, path):
        status, text, _ = bed.request(method, path)
        assert status == 200, text
        return json.loads(text)

    assert ask("GET", "/is_sleeping") == {"is_sleeping": False}
    assert ask("POST", "/sleep?level=2") == {"status": "sleeping", "level": 2}
    assert ask("GET", "/is_sleeping") == {"is_sleeping": True}
    assert [bed.metric("vllm:engine_sleep_state", rank=rank, sleep_state="discard_all") for rank in (0, 1)] == [1, 1]
    ask("POST", "/wake_up")
    assert bed.metric("vllm:engine_sleep_state", rank=1, sleep_state="awake") == 1
    assert bed.request("POST", "/sleep?level=3")[0] == 400
    assert ask("POST", "/pause") == {"status": "paused"}
    assert ask("GET", "/is_paused") == {"is_paused": True}
    with pytest.raises(TimeoutError):
        bed.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=0.5)
    ask("POST", "/resume")
    assert bed.complete()
    assert ask("POST", "/reset_prefix_cache") == {"success": True}
    assert bed.request("POST", "/reset_mm_cache")[0] == 200
    assert ask("GET", "/server_info")["vllm_config"]["data_parallel_size"] == 2
