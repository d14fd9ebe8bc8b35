"""What networks do to idle connections, in network namespaces that the test makes (root and iptables needed).

worker 10.77.2.2 ---- 10.77.2.1 nat 10.77.1.1 ---- 10.77.1.2 head pod with relay and head
the worker is given 10.77.2.1 as the head's address; nat rewrites it to 10.77.1.2 and keeps the worker's own
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from dp_handshake import proctcp
from tests.component import namespaces
from tests.component.handshake.play import HELLO, READY, REPOSITORY, Group, Head, Rank, many_sockets
from tests.component.namespaces import inside, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and NAT need root")

Make = Callable[..., Group]
HEAD, NAT, WORKER = (f"dph{os.getpid()}{name}" for name in "hnw")
HEAD_IP, WORKER_IP, VIRTUAL_IP = "10.77.1.2", "10.77.2.2", "10.77.2.1"


def sysctl(namespace: str, name: str, value: int) -> None:
    with inside(namespace):
        Path("/proc/sys", name.replace(".", "/")).write_text(f"{value}\n")


@pytest.fixture
def network() -> Iterator[None]:
    try:
        namespaces.add(HEAD, NAT, WORKER)
        for inner, inner_ip, outer_ip, port in (
            (HEAD, HEAD_IP, "10.77.1.1", "to-h"),
            (WORKER, WORKER_IP, VIRTUAL_IP, "to-w"),
        ):
            namespaces.connect(NAT, port, inner, "eth0")
            namespaces.address(NAT, port, outer_ip)
            namespaces.address(inner, "eth0", inner_ip)
            run("ip", "-n", inner, "route", "add", "default", "via", outer_ip)
        sysctl(NAT, "net.ipv4.ip_forward", 1)
        iptables("-t", "nat", "-A", "PREROUTING", "-d", VIRTUAL_IP, "-p", "tcp", "-j", "DNAT", "--to", HEAD_IP)
        # A packet of a connection without entry is dropped, as by a load balancer that has forgotten it.
        iptables("-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
        sysctl(NAT, "net.netfilter.nf_conntrack_tcp_loose", 0)
        yield
    finally:
        namespaces.delete(HEAD, NAT, WORKER)


def iptables(*words: str) -> None:
    run("ip", "netns", "exec", NAT, "iptables", "-w", *words)


@contextmanager
def start(group: Make, **options: float) -> Iterator[tuple[Group, Head, zmq.Context[Any]]]:
    """A group of two in the namespaces: relay and head in one, rank 1 in the other."""
    with inside(HEAD):
        one = group(ip=HEAD_IP, size=2, **options)
        one.addresses["g-w-0"] = WORKER_IP
        head = one.start()
    with many_sockets() as context:
        yield one, head, context
        with inside(HEAD):
            one.close()


def rank_behind_nat(context: zmq.Context[Any], one: Group) -> Rank:
    with inside(WORKER):  # the context's I/O thread starts with its first socket, and stays there
        return Rank(context, 1, one.plan.rpc_port, ip=VIRTUAL_IP)


@pytest.mark.usefixtures("network")
def test_a_long_load_behind_nat_does_not_cost_the_ready(group: Make) -> None:
    """Between HELLO and READY nothing is said for longer than the NAT entry lives: heartbeats keep it."""
    with start(group, heartbeat_s=0.4) as (one, head, context):
        sysctl(NAT, "net.netfilter.nf_conntrack_tcp_timeout_established", 1)
        rank = rank_behind_nat(context, one)
        rank.hello()
        rank.init()
        time.sleep(3)  # the load itself; the entry lives for 1 s
        rank.ready()
        with inside(HEAD):
            head.finished()
            assert one.relay.until(lambda snapshot: snapshot.ready_at is not None).lost == []


def ports(one: Group) -> list[int]:
    """The worker's ports of its connections to the relay, as the relay's side still has them."""
    with inside(HEAD):
        text = Path("/proc/thread-self/net/tcp").read_text()
    rows = proctcp.parse(text, local_ports={one.plan.rpc_port})
    return [row.remote_port for row in rows if row.remote_ip == WORKER_IP and row.state == proctcp.ESTABLISHED]


def until_ports(one: Group, condition: Callable[[list[int]], bool], *, within_s: float = 15) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        last = ports(one)
        if condition(last):
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s; the relay has connections from ports {last}")


@pytest.mark.usefixtures("network")
def test_a_silently_dropped_nat_entry_between_hello_and_ready_does_not_cost_the_ready(group: Make) -> None:
    """Packets of the connection vanish both ways. Both ends notice, the rank comes back by a new connection.

    With the heartbeat that is shipped: the relay gives the connection up seconds before the rank can know of it, and must
    not call the rank lost meanwhile, which would condemn the group.
    """
    with start(group) as (one, head, context):
        rank = rank_behind_nat(context, one)
        rank.hello()
        rank.init()
        time.sleep(2.5)  # a heartbeat passes; it tells the rank to expect more
        (old,) = ports(one)
        iptables("-I", "FORWARD", "-p", "tcp", "--sport", str(old), "-j", "DROP")
        iptables("-I", "FORWARD", "-p", "tcp", "--dport", str(old), "-j", "DROP")
        until_ports(one, lambda found: found != [] and old not in found, within_s=25)
        rank.ready()
        with inside(HEAD):
            head.finished()
            done = one.relay.until(lambda snapshot: snapshot.ready_at is not None)
        assert (done.lost, done.violations) == ([], [])
        assert " lost: " not in one.relay.log()


@pytest.mark.usefixtures("network")
def test_a_rank_whose_old_connection_lives_on_at_the_relay_is_not_swallowed(group: Make) -> None:
    """Only the rank's side is reset, as by a NAT box without entry; it is back while the relay has the old connection."""
    with start(group, heartbeat_s=0.6) as (one, head, context):
        rank = rank_behind_nat(context, one)
        rank.hello()
        rank.init()
        (old,) = ports(one)
        iptables("-I", "FORWARD", "-p", "tcp", "--dport", str(old), "-j", "DROP")
        flow = ("-p", "tcp", "-s", WORKER_IP, "--sport", str(old))
        iptables("-I", "FORWARD", *flow, "-j", "REJECT", "--reject-with", "tcp-reset")
        rank.socket.send(b"")  # anything that makes the rank's kernel speak, and be told that there is no connection
        until_ports(one, lambda found: len(found) == 2 and old in found)
        rank.ready()
        with inside(HEAD):
            head.finished(20)
            one.relay.until(lambda snapshot: snapshot.ready_at is not None)


@pytest.mark.usefixtures("network")
def test_ipv6_pods_are_told_apart_from_the_relay_in_the_kernels_tables(group: Make) -> None:
    with inside(HEAD), many_sockets() as context:
        for ip in ("fd00::1", "fd00::2"):
            run("ip", "addr", "add", f"{ip}/128", "dev", "lo", "nodad")
        one = group(ip="fd00::1", size=2)
        one.addresses["g-w-0"] = "fd00::2"
        head = one.start()
        local = context.socket(zmq.DEALER)
        local.set(zmq.IPV6, 1)
        local.connect(f"tcp://[fd00::1]:0;[fd00::1]:{one.plan.rpc_port + 1}")
        remote = context.socket(zmq.DEALER)
        remote.set(zmq.IPV6, 1)
        remote.set(zmq.IDENTITY, b"\x01\x00")
        remote.connect(f"tcp://[fd00::2]:0;[fd00::1]:{one.plan.rpc_port}")
        remote.send(HELLO)
        assert remote.poll(5000)
        snapshot = one.relay.until(lambda snapshot: snapshot.local.connected == 1)
        assert snapshot.stages.connected == "0-1"
        remote.send(READY)
        remote.close()
        head.finished()
        one.relay.until(lambda snapshot: snapshot.ready_at is not None)
        one.close()


FROZEN = """
import sys, zmq
sys.path.insert(0, sys.argv[1])
from tests.component.handshake.play import Rank
rank = Rank(zmq.Context(), 1, int(sys.argv[2]), source="127.1.0.2")
rank.hello()
rank.init()
print("connected", flush=True)
sys.stdin.readline()
rank.ready()
"""


def test_a_frozen_rank_is_noticed_and_its_ready_still_arrives(group: Make) -> None:
    one = group(size=2, heartbeat_s=0.3)
    head = one.start()
    assert one.addresses["g-w-0"] == "127.1.0.2"
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(REPOSITORY), str(one.plan.rpc_port)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "connected\n"
        process.send_signal(signal.SIGSTOP)
        one.relay.until(lambda snapshot: [entry.rank for entry in snapshot.lost] == [1])
        process.send_signal(signal.SIGCONT)
        one.relay.until(lambda snapshot: snapshot.lost == [])
        process.stdin.write("go\n")
        process.stdin.flush()
        head.finished()
    finally:
        process.kill()
        process.wait()
