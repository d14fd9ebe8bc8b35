"""Hybrid and external groups: every node serves, ranks off the head's node shake hands twice."""

import http.client
import os
import signal
import ssl
import subprocess

import pytest


def hybrid(bed, *argv, servers=2):
    common = ["-dpl", "2", "--data-parallel-hybrid-lb", "-asc", str(servers), *argv]
    first = bed.node(*common, "-dpr", "0", size=4)
    second = bed.node(*common, "-dpr", "2", size=4)
    return first, second


def external(bed, *argv, size=2):
    return [bed.node("--moe", "--data-parallel-rank", str(rank), *argv, size=size) for rank in range(size)]


def ready(bed):
    for node in range(len(bed.ports)):
        bed.use(node)
        bed.wait_ready()


@pytest.mark.parametrize("servers", [1, 2])
def test_each_hybrid_node_serves_with_its_own_ranks(bed, servers):
    first, second = hybrid(bed, servers=servers)
    ready(bed)
    for node, ranks in ((0, (0, 1)), (1, (2, 3))):
        bed.use(node)
        # The header counts within the node.
        for position in (0, 1, 1):
            bed.complete(headers={"X-data-parallel-rank": str(position)})
        assert [bed.metric("vllm:generation_tokens_total", rank=rank) for rank in ranks] == [5, 10]
        page = bed.request("GET", "/metrics")[1]
        assert f'engine="{3 - ranks[1]}"' not in page, "a node shows its own ranks only"
        status, text, _ = bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-data-parallel-rank": "2"})
        assert (status, "out of range [0, 2)" in text) == (400, True)
    assert "HELLO sent to tcp://" in second.log()
    assert "HELLO sent to ipc://" in second.log()
    assert "(local=False, headless=False)" in second.log()
    assert "HELLO sent to ipc://" not in first.log()


def test_a_hybrid_moe_group_steps_together_across_nodes(bed):
    first, second = hybrid(bed, "--moe")
    ready(bed)
    for wave, node in enumerate((1, 0)):
        bed.use(node)
        bed.complete()
        for process in (first, second):
            process.wait_for(f"Wave {wave} complete")


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0", "0.20.2", "0.17.1"])
def test_an_external_moe_pair_shares_waves_in_every_generation(bed, version):
    nodes = external(bed, "--emulate-version", version)
    ready(bed)
    for wave, node in enumerate((1, 0, 1)):
        bed.use(node)
        bed.complete()
        for process in nodes:
            process.wait_for(f"Wave {wave} complete")
    bed.use(1)
    assert bed.metric("vllm:generation_tokens_total", rank=1) == 10
    assert 'engine="0"' not in bed.request("GET", "/metrics")[1]


def test_a_node_is_served_only_when_the_whole_group_is_there(bed):
    first = bed.node("--moe", "--data-parallel-rank", "0", size=2)
    first.wait_for("INIT received")
    bed.use(0)
    assert bed.health() is None
    bed.node("--moe", "--data-parallel-rank", "1", size=2)
    ready(bed)


def test_a_headless_rank_in_an_external_group_ends_the_start(bed):
    head = bed.node("--moe", "--data-parallel-rank", "0", size=2)
    bed.workers("--moe", size=2, start=1)
    assert head.exit_code() == 1
    assert "must not use --headless in external or hybrid" in head.log()


def test_a_serving_node_in_an_internal_group_ends_the_start(bed):
    head = bed.head("--moe", size=2, local=1)
    bed.node("--moe", "--data-parallel-rank", "1", size=2)
    assert head.exit_code() == 1
    assert "must use --headless unless in external or hybrid" in head.log()


def test_the_others_notice_a_dead_external_rank_with_their_next_request(bed, wait):
    nodes = external(bed)
    ready(bed)
    os.kill(nodes[0].child("EngineCore_DP0"), signal.SIGKILL)
    bed.use(0)
    wait(lambda: bed.health() in {503, None}, within_s=8, last=bed.logs)
    assert nodes[0].exit_code() == 0
    bed.use(1)
    assert bed.health() == 200
    status, text, _ = bed.request("POST", "/v1/completions", {"prompt": "x"})
    assert status == 500, text
    assert nodes[1].exit_code() == 0


@pytest.mark.parametrize("servers", [1, 2])
def test_hybrid_front_ends_of_0_17_hear_of_the_coordinator_through_ready(bed, servers):
    nodes = hybrid(bed, "--moe", "--emulate-version", "0.17.1", servers=servers)
    ready(bed)
    # Only a front end that knows the coordinator can start a wave in these releases.
    bed.use(1)
    bed.complete()
    for process in nodes:
        process.wait_for("Wave 0 complete")


def test_an_external_dense_group_of_0_17_starts_and_cannot_serve(bed):
    """The second node takes its rank along once that is ready, at times before the head has heard so and ends, too."""
    _, second = (bed.node("--data-parallel-rank", str(rank), "--emulate-version", "0.17.1", size=2) for rank in (0, 1))
    assert second.exit_code() == 1
    assert "not their coordinator" in second.log()


def test_a_dense_node_that_became_external_unasked_cannot_serve(bed):
    nodes = [bed.node("-dpl", "1", "-dpr", str(rank), size=2) for rank in (0, 1)]
    for node in nodes:
        assert node.exit_code() == 1
        assert "not their coordinator" in node.log()


def supervisor(bed, free, *argv, start=0, size=2, local=2, **kwargs):
    page = free()
    base = free()
    node = bed.node(
        *("--moe", "--data-parallel-multi-port-external-lb", "-dpl", str(local), "-dpr", str(start)),
        *("--data-parallel-supervisor-port", str(page), "--dp-supervisor-probe-interval-s", "0.1", *argv),
        size=size,
        port=base,
        **kwargs,
    )
    return node, page


def status(port, path, tls=None):
    try:
        if tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=tls)
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return None


@pytest.fixture
def free():
    """Ports whose neighbour is free as well, so that a supervisor's two servers fit."""
    import socket

    def find():
        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("127.0.0.1", port + 1))
                except OSError:
                    continue
                return port

    return find


def test_a_supervisor_runs_one_server_per_rank_and_one_page_for_all(bed, wait, free):
    node, page = supervisor(bed, free)
    node.wait_for("Starting the server of rank 1")
    assert status(page, "/health") is None, "nothing is served before all are healthy"
    wait(lambda: status(page, "/health") == 200, within_s=20, last=bed.logs)
    assert [status(page, path) for path in ("/ready", "/readyz", "/other")] == [200, 200, 404]
    base = bed.ports[0]
    for rank in (0, 1):
        bed.port = base + rank
        bed.complete()
        assert bed.metric("vllm:generation_tokens_total", rank=rank) == 5
    node.popen.terminate()
    assert node.exit_code() == 0
    assert bed.alive() == []


def test_a_supervisor_with_keys_serves_its_page_with_tls_as_its_servers_do(bed, wait, free, tmp_path):
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    subject = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject],
        check=True,
        capture_output=True,
    )
    _, page = supervisor(bed, free, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    trusting = ssl.create_default_context(cafile=certificate)
    wait(lambda: status(page, "/readyz", trusting) == 200, within_s=20, last=bed.logs)
    assert [status(bed.ports[0] + rank, "/health", trusting) for rank in (0, 1)] == [200, 200]
    assert status(page, "/readyz") is None, "no plain HTTP beside it"


def test_a_supervisors_servers_share_the_nodes_devices(bed, wait, free):
    node, page = supervisor(bed, free, env={"CUDA_VISIBLE_DEVICES": "4,5"})
    wait(lambda: status(page, "/readyz") == 200, within_s=20, last=bed.logs)
    assert "DP rank 0 uses cuda devices 4\n" in node.log()
    assert "DP rank 1 uses cuda devices 5\n" in node.log()


def test_two_supervisors_form_one_group(bed, wait, free):
    pages = [supervisor(bed, free, start=start, size=4)[1] for start in (0, 2)]
    for page in pages:
        wait(lambda page=page: status(page, "/readyz") == 200, within_s=25, last=bed.logs)


def test_a_supervisors_node_ends_when_one_of_its_servers_does(bed, wait, free):
    node, page = supervisor(bed, free)
    wait(lambda: status(page, "/health") == 200, within_s=20, last=bed.logs)
    os.kill(node.child("EngineCore_DP1"), signal.SIGKILL)
    assert node.exit_code() == 0, "as vLLM's: whoever restarts it must not look at the status"
    assert bed.alive() == []
