"""The relay over real sockets: `dp-handshake relay` between ranks (libzmq DEALERs) and a head that does as vLLM's does."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dp_handshake.messages import Snapshot, WorkerSet
from dp_handshake.ranks import parse_ranks
from tests.component.handshake.play import HELLO, READY, Group, Head, Rank, address_of, init_message

Make = Callable[..., Group]
Context = zmq.Context[Any]


def ready(snapshot: Snapshot) -> bool:
    return snapshot.ready_at is not None


def connected(rank: int) -> Callable[[Snapshot], bool]:
    return lambda snapshot: rank in parse_ranks(snapshot.stages.connected)


def kinds(snapshot: Snapshot) -> list[str]:
    return [entry.kind for entry in snapshot.violations]


def test_a_group_goes_from_check_in_to_ready(group: Make, context: Context) -> None:
    one = group(size=8, size_local=2)
    head = one.start()
    ranks = one.ranks(context)
    for rank in ranks:
        rank.hello()
    assert {rank.init() for rank in ranks} == {init_message()}
    before = one.relay.until(lambda snapshot: parse_ranks(snapshot.stages.connected) == set(range(2, 8)))
    assert (before.stages.arrived, before.stages.ready, before.api_ready) == ("0-7", "", False)
    assert one.relay.get("/v1/ready/g-w-0") == (503, "rank 2-3 connected, loading\n")
    for rank in ranks:
        rank.ready()
    head.finished()
    after = one.relay.until(ready)
    assert after.stages.ready == after.stages.loaded == after.stages.connected == "0-7"
    assert (after.local.ready, after.violations, after.lost) == (2, [], [])
    assert one.relay.get("/v1/ready/g-w-0") == one.relay.get("/v1/ready/g-head") == (200, "ready\n")


def test_a_thousand_ranks_get_through_with_a_soft_file_limit_of_1024(group: Make, context: Context) -> None:
    pods = 16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4096, "this test needs a hard limit of 4,096 open files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        one = group(
            size=1024,
            size_local=64,
            head_placement="Dedicated",
            workers=[WorkerSet(name="g-w", replicas=pods, first_rank=0, rank_stride=64)],
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    head = one.start()
    assert "1024" in Path(f"/proc/{one.relay.process.pid}/limits").read_text()
    ranks = one.ranks(context)
    for rank in ranks:
        rank.hello()
    for rank in ranks:
        rank.init()
    descriptors = len(os.listdir(f"/proc/{one.relay.worker_pid()}/fd"))
    assert descriptors > 2048, "both sides of all ranks are open at once"
    for rank in ranks:
        rank.ready()
    head.finished(20)
    one.relay.until(ready)
    assert len(os.listdir(f"/proc/{one.relay.worker_pid()}/fd")) < 100, "a rank that is READY holds nothing open"


def test_a_thousand_times_ready_and_close_at_once_loses_none(group: Make, context: Context) -> None:
    one = group(
        size=1000,
        size_local=250,
        head_placement="Dedicated",
        workers=[WorkerSet(name="g-w", replicas=4, first_rank=0, rank_stride=250)],
    )
    head = one.start()
    for number in range(1000):
        rank = one.rank(context, number)
        rank.hello()
        rank.init()
        rank.ready()
    head.finished(20)
    assert len(head.seen) == 2000
    one.relay.until(ready)


def test_a_stranger_under_a_live_identity_does_not_silence_the_rank(group: Make, context: Context) -> None:
    one = group(size=2)
    head = one.start()
    rank = one.rank(context, 1)
    rank.hello()
    rank.init()
    neighbour = one.rank(context, 1)
    _until(lambda: _connections(one.plan.rpc_port, one.addresses["g-w-0"]) == 2)
    time.sleep(0.3)  # long enough for the relay to see it under the rank's identity
    neighbour.socket.close(0)
    foreigner = one.rank(context, 1, source="127.9.9.9")
    one.relay.until(lambda snapshot: kinds(snapshot) == ["ForeignPeer"])
    foreigner.socket.close(0)
    rank.ready()
    head.finished()
    snapshot = one.relay.until(ready)
    assert kinds(snapshot) == ["ForeignPeer"]
    assert snapshot.violations[0].peer == "127.9.9.9"


def test_a_stranger_that_is_there_first_does_not_take_the_ranks_place(group: Make, context: Context) -> None:
    one = group(size=2)
    head = one.start()
    stranger = Rank(context, 1, one.plan.rpc_port, source="127.9.9.9")
    stranger.hello()
    one.relay.until(lambda snapshot: kinds(snapshot) == ["ForeignPeer"])
    rank = one.rank(context, 1)
    rank.hello()
    rank.init()
    rank.ready()
    head.finished()
    assert head.seen == [(1, "HELLO"), (1, "READY")]


def test_everything_that_would_end_the_head_is_stopped_and_named(group: Make, context: Context) -> None:
    """Duplicate ranks and overridden commands among it.

    ai-dynamo/dynamo#5001, gpustack/gpustack#6221, PR#6236, vllm-project/vllm-ascend PR#16204.
    """
    one = group(size=4)
    head = one.start()
    wrong = one.addresses["g-w-1"]

    def send(rank: int, *frames: bytes, source: str, identity: bytes | None = None) -> None:
        sock = context.socket(zmq.DEALER)
        sock.set(zmq.IDENTITY, identity or rank.to_bytes(2, "little"))
        sock.connect(f"tcp://{source}:0;127.0.0.1:{one.plan.rpc_port}")
        sock.send_multipart(frames)
        before = one.relay.snapshot().violation_count
        one.relay.until(lambda snapshot: snapshot.violation_count > before or snapshot.violation_count >= expected)
        sock.close(0)
        _until(lambda: not _connections(one.plan.rpc_port, source))

    cases: list[tuple[str, int, tuple[bytes, ...], str, bytes | None]] = [
        ("UnexpectedRank", 9, (HELLO,), wrong, None),
        ("OverlappingRank", 0, (HELLO,), wrong, None),
        ("ForeignPeer", 1, (HELLO,), wrong, None),
        ("WrongIdentity", 2, (HELLO,), wrong, b"\x02\x00\x00"),
        ("ExtraFrames", 2, (b"", HELLO), wrong, None),
        ("Undecodable", 2, (b"\xc1junk",), wrong, None),
        ("UnexpectedReady", 2, (READY,), wrong, None),
        ("LocalHeadlessMismatch", 2, (HELLO.replace(b"\xa8headless\xc3", b"\xa8headless\xc2"),), wrong, None),
    ]
    for number, (_, rank, frames, source, identity) in enumerate(cases, start=1):
        expected = number
        send(rank, *frames, source=source, identity=identity)
    snapshot = one.relay.until(lambda snapshot: snapshot.violation_count >= len(cases))
    assert kinds(snapshot) == [case[0] for case in cases]
    assert {entry.pod for entry in snapshot.violations} == {"g-w-1"}
    assert head.seen == []
    for rank in one.ranks(context):
        rank.hello()
        rank.init()
        rank.ready()
    head.finished()


def test_garbage_on_the_port_hurts_nobody(group: Make, context: Context) -> None:
    one = group(size=3)
    head = one.start()
    ranks = one.ranks(context)
    ranks[0].hello()
    ranks[0].init()
    noise = random.Random(7)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".ljust(64, b"\0")
    for number in range(200):
        with socket.socket() as sock:
            sock.settimeout(2)
            sock.bind((one.addresses["g-w-1"] if number % 2 else "127.0.0.1", 0))
            sock.connect(("127.0.0.1", one.plan.rpc_port))
            prefix = (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + b"\x04\x26\x05READY")[number % 4]
            sock.sendall(prefix + noise.randbytes(noise.randrange(200)))
    huge = context.socket(zmq.DEALER)
    huge.set(zmq.IDENTITY, b"\x02\x00")
    huge.connect(f"tcp://{one.addresses['g-w-1']}:0;127.0.0.1:{one.plan.rpc_port}")
    huge.send(bytes(200_000))
    huge.close(0)
    ranks[1].hello()
    ranks[1].init()
    for rank in ranks:
        rank.ready()
    head.finished()
    assert head.seen.count((1, "HELLO")) == head.seen.count((2, "HELLO")) == 1


def test_a_rank_that_dies_while_it_loads_is_named_within_seconds(group: Make, context: Context) -> None:
    one = group(size=4, size_local=2)
    one.start()
    ranks = one.ranks(context)
    for rank in ranks:
        rank.hello()
        rank.init()
    ranks[1].socket.close(0)
    snapshot = one.relay.until(lambda snapshot: bool(snapshot.lost), within_s=4)
    assert [(entry.rank, entry.pod) for entry in snapshot.lost] == [(3, "g-w-0")]


def test_a_rank_that_restarts_is_noticed_before_and_after_ready(group: Make, context: Context) -> None:
    one = group(size=2)
    head = one.start()
    rank = one.rank(context, 1)
    rank.hello()
    rank.init()
    rank.socket.close(0)
    again = one.rank(context, 1)
    again.hello()
    snapshot = one.relay.until(lambda snapshot: kinds(snapshot) == ["SecondHello"])
    assert (snapshot.violations[0].rank, snapshot.violations[0].pod) == (1, "g-w-0")
    # The head would still take READY; what it never gets is the second HELLO.
    again.ready()
    head.finished()
    one.relay.until(ready)
    late = one.rank(context, 1)
    late.hello()
    snapshot = one.relay.until(lambda snapshot: snapshot.violations[0].count == 2)
    assert kinds(snapshot) == ["SecondHello"]
    assert head.seen == [(1, "HELLO"), (1, "READY")]


def test_the_port_opens_only_once_the_engine_listens(group: Make, context: Context) -> None:
    one = group(size=2)
    rank = one.rank(context, 1)
    rank.hello()
    one.relay.check_in_all(one.addresses)
    released = one.relay.until(lambda snapshot: snapshot.released_at is not None)
    assert released.listening_at is None
    with socket.socket() as probe:
        probe.settimeout(1)
        assert probe.connect_ex(("127.0.0.1", one.plan.rpc_port)) != 0
    head = one.start()
    rank.init()
    rank.ready()
    head.finished()


def test_loaded_and_local_ranks_are_seen_in_the_kernels_tables(group: Make, context: Context) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inputs:
        one = group(size=4, size_local=1)
        one.relay.check_in_all(one.addresses)
        one.head = Head(one.plan, init=init_message(input_port=inputs.getsockname()[1]))
        one.relay.until(lambda snapshot: snapshot.listening_at is not None)
        ranks = [Rank(context, 0, one.plan.rpc_port + 1, source="127.0.0.1")]
        _until(lambda: _connections(one.plan.rpc_port + 1, "127.0.0.1") > 0)
        ranks += one.ranks(context)
        for rank in ranks[1:]:
            rank.hello()
            rank.init()
        snapshot = one.relay.until(lambda snapshot: snapshot.local.connected == 1)
        assert snapshot.stages.connected == "0-3"
        assert snapshot.stages.loaded == ""
        with socket.create_connection(inputs.getsockname(), source_address=(one.addresses["g-w-1"], 0)):
            snapshot = one.relay.until(lambda snapshot: snapshot.stages.loaded == "2")
            assert one.relay.get("/v1/ready/g-w-1") == (503, "rank 2 connected, loaded, not READY\n")
            with socket.create_connection(inputs.getsockname(), source_address=("127.0.0.1", 0)):
                one.relay.until(lambda snapshot: snapshot.local.loaded == 1 and snapshot.stages.loaded == "0,2")


def test_a_group_in_one_pod_needs_no_port_and_is_ready_with_its_api(group: Make) -> None:
    one = group(size=2, size_local=2, workers=[])
    head = one.head = None
    one.relay.check_in_all(one.addresses)
    one.relay.until(lambda snapshot: snapshot.released_at is not None)
    assert one.relay.get("/v1/ready/g-head")[0] == 503
    one.head = head = Head(one.plan)
    head.finished()
    snapshot = one.relay.until(ready)
    assert (snapshot.listening_at, snapshot.stages.ready, snapshot.local.ready) == (None, "0-1", 2)


def test_a_relay_killed_between_hello_and_ready_carries_on(group: Make, context: Context) -> None:
    one = group(size=4)
    head = one.start()
    ranks = [one.rank(context, 1), one.rank(context, 2)]
    for rank in ranks:
        rank.hello()
    sent = [rank.init() for rank in ranks]
    bad = one.rank(context, 3)
    bad.socket.send(b"junk")
    before = one.relay.until(lambda snapshot: snapshot.violation_count == 1)
    bad.socket.close(0)
    first = one.relay.worker_pid()
    os.kill(first, signal.SIGKILL)
    after = one.relay.until(lambda snapshot: one.relay.worker_pid() != first and snapshot.stages.connected == "1-2")
    assert (after.released_at, after.listening_at) == (before.released_at, before.listening_at)
    assert after.violations == before.violations
    # What the earlier process sent last may not have left it: a rank gets INIT again, and an engine reads one only.
    assert [rank.init() for rank in ranks] == sent
    ranks.append(one.rank(context, 3))
    ranks[2].hello()
    ranks[2].init()
    for rank in ranks:
        rank.ready()
    head.finished()
    assert sorted(head.seen) == sorted((rank, status) for rank in (1, 2, 3) for status in ("HELLO", "READY"))
    done = one.relay.until(ready)
    assert done.lost == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_relay_killed_at_any_moment_never_ends_the_head_and_names_who_suffers(
    group: Make, context: Context, seed: int
) -> None:
    """Killed while ranks say HELLO: each of them gets through or is named as lost within seconds."""
    one = group(size=48)
    head = one.start()
    first = one.relay.worker_pid()
    killer = threading.Timer(random.Random(seed).uniform(0.001, 0.03), os.kill, (first, signal.SIGKILL))
    killer.start()
    ranks = one.ranks(context)
    for rank in ranks:
        rank.hello()
    killer.join()
    answered: set[int] = set()

    def settled(snapshot: Snapshot) -> bool:
        for rank in ranks:
            if rank.rank not in answered and rank.socket.poll(0):
                rank.socket.recv()
                answered.add(rank.rank)
        # At most 16 are listed.
        return len(answered | {entry.rank for entry in snapshot.lost}) == len(ranks) or len(snapshot.lost) == 16

    one.relay.until(settled, within_s=15)
    for rank in ranks:
        if rank.rank in answered:
            rank.ready()
    one.relay.until(lambda snapshot: answered <= parse_ranks(snapshot.stages.ready))
    assert head.error is None
    assert one.relay.worker_pid() != first


def test_any_frames_from_anybody_leave_relay_and_head_alive(group: Make, context: Context) -> None:
    one = group(size=4)
    head = one.start()
    first = one.relay.worker_pid()
    sources = [*(one.addresses[f"g-w-{number}"] for number in range(3)), "127.9.9.9"]
    identities = st.one_of(
        st.integers(0, 5).map(lambda rank: rank.to_bytes(2, "little")), st.binary(min_size=1, max_size=4)
    )
    payloads = st.one_of(st.sampled_from([HELLO, READY]), st.binary(max_size=30))
    talk = st.tuples(
        identities,
        st.sampled_from(sources),
        st.lists(st.lists(payloads, min_size=1, max_size=3), min_size=1, max_size=3),
    )

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(talk, min_size=1, max_size=4))
    def disturb(talks: list[tuple[bytes, str, list[list[bytes]]]]) -> None:
        sockets = []
        for identity, source, messages in talks:
            sock = context.socket(zmq.DEALER)
            sock.set(zmq.IDENTITY, identity)
            sock.set(zmq.LINGER, 200)
            sock.connect(f"tcp://{source}:0;127.0.0.1:{one.plan.rpc_port}")
            with contextlib.suppress(zmq.Again):  # turned away already
                for frames in messages:
                    sock.send_multipart(frames, zmq.DONTWAIT)
            sockets.append(sock)
        time.sleep(0.01)
        for sock in sockets:
            sock.close()

    disturb()
    snapshot = one.relay.until(lambda snapshot: snapshot.violation_count > 0)
    assert len(snapshot.violations) <= 32
    assert one.relay.worker_pid() == first
    assert head.error is None
    assert len(head.seen) == len(set(head.seen))


def test_a_crash_after_ready_leaves_the_pod_as_it_was(group: Make, context: Context) -> None:
    one = group(size=2)
    head = one.start()
    rank = one.rank(context, 1)
    rank.hello()
    rank.init()
    rank.ready()
    head.finished()
    before = one.relay.until(ready)
    first = one.relay.worker_pid()
    os.kill(first, signal.SIGKILL)
    after = one.relay.until(lambda _: one.relay.worker_pid() != first)
    assert (after.ready_at, after.stages) == (before.ready_at, before.stages)
    assert one.relay.process.poll() is None, "the container's first process lives on"
    late = one.rank(context, 1)
    late.hello()
    one.relay.until(lambda snapshot: kinds(snapshot) == ["SecondHello"])


def test_it_ends_quickly_when_told_to(group: Make, context: Context) -> None:
    one = group(size=2)
    one.start()
    rank = one.rank(context, 1)
    rank.hello()
    rank.init()
    started = time.monotonic()
    one.relay.process.terminate()
    assert one.relay.process.wait(5) == 0
    assert time.monotonic() - started < 1.5


def test_ipv6(group: Make, context: Context) -> None:
    one = group(size=3, ip="::1")
    one.addresses = dict.fromkeys(one.addresses, "::1")
    head = one.start()
    ranks = one.ranks(context)
    for rank in ranks:
        rank.hello()
    for rank in ranks:
        assert rank.init() == init_message("::1")
        rank.ready()
    head.finished()
    assert one.relay.until(ready).stages.ready == "0-2"


def _until(condition: Callable[[], bool], *, within_s: float = 5) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.02)


def _connections(port: int, source: str) -> int:
    packed = f"{int.from_bytes(socket.inet_aton(source), 'little'):08X}"
    rows = Path("/proc/net/tcp").read_text().splitlines()
    return sum(f":{port:04X} {packed}:" in row and " 01 " in row for row in rows)


def test_the_loopback_addresses_of_pods_are_distinct() -> None:
    assert len({address_of(number) for number in range(4096)}) == 4096
