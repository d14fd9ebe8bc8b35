"""Real frames of vLLM, mutated byte by byte from a seed, at our head, coordinator and engine.

What vLLM's documented behaviour would keep alive stays alive, what it would end ends with its exit code, and nothing
hangs or grows. Needs no vLLM. A failure prints the seed; `FUZZ_SEED` and `FUZZ_ROUNDS` choose others.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from dp_engine import wire
from dp_engine.coordinator import BarrierBrokenError, Coordinator
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init, decode_init
from dp_engine.versions import wire_of
from tests.conformance.conftest import RELEASES, REPOSITORY, Api, Bed, free_port, until
from tests.conformance.report import Table

SEED = int(os.environ.get("FUZZ_SEED", "20"))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "20000"))
FRAMES = {
    name: bytes.fromhex(text)
    for name, text in msgspec.json.decode((Path(__file__).parent / "data" / "frames.json").read_bytes()).items()
}
HELLO = wire.encode({"status": "HELLO", "local": False, "headless": True})


def mutate(frame: bytes, random_: random.Random) -> bytes:
    """One to four small injuries: a bit, a byte, a cut, a repetition, a swap of type."""
    data = bytearray(frame)
    for _ in range(random_.randint(1, 4)):
        if not data:
            break
        at = random_.randrange(len(data))
        how = random_.randrange(6)
        if how == 0:
            data[at] ^= 1 << random_.randrange(8)
        elif how == 1:
            data[at] = random_.randrange(256)
        elif how == 2:
            del data[at:]
        elif how == 3:
            data[at:at] = data[at : at + random_.randint(1, 8)]
        elif how == 4:
            data[at] = random_.choice(b"\xc0\xc1\xc2\xc3\xdc\xdd\xde\xdf\xcf\xd3\xcb\xc6\xdb\x00\xff")
        else:
            del data[at]
    return bytes(data)


def mutations(*names: str, rounds: int = ROUNDS) -> Iterator[tuple[int, bytes]]:
    for number in range(rounds):
        random_ = random.Random(f"{SEED}-{number}")
        yield number, mutate(FRAMES[random_.choice(names)], random_)


@pytest.mark.parametrize("name", RELEASES)
def test_the_heads_state_machine_takes_or_refuses_every_injured_frame(name: str, compatibility: Table) -> None:
    """It raises what its caller ends the start for, never anything else, and its states stay states."""
    with compatibility.cell(f"{ROUNDS} injured frames at our head, engine and coordinator", name, moe=None):
        release = wire_of(RELEASES[name])
        init = Init(addresses=Addresses(inputs=["tcp://h:1"], outputs=["tcp://h:2"]), parallel_config={})
        for number, frame in mutations("hello", "ready", "ready_moe", "ready_011"):
            machine = FrontEndHandshake(
                expected=[Expected(rank=0, local=True), Expected(rank=1, local=False)],
                init=init,
                remote_headless=True,
                config_hash="HASH",
                ready_has_blocks=release.ready_has_blocks,
            )
            machine.receive([b"\x01\x00", HELLO])
            try:
                machine.receive([b"\x01\x00", frame])
            except (HandshakeError, msgspec.DecodeError, KeyError, TypeError, ValueError):
                continue
            except Exception as error:
                pytest.fail(f"seed {SEED}-{number}, {frame.hex()}: {type(error).__name__}: {error}")
        for number, frame in mutations("init", "init_moe", rounds=ROUNDS // 4):
            try:
                decode_init(frame)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            except Exception as error:
                pytest.fail(f"seed {SEED}-{number}, {frame.hex()}: {type(error).__name__}: {error}")
        coordinator = Coordinator(size=2, waves=True, wire_family=release)
        for _ in range(2):
            coordinator.from_back(wire.SUBSCRIBE, 0.0)
        for number, frame in mutations("outputs", "outputs_stats", "outputs_wave", "first_request", rounds=ROUNDS // 4):
            try:
                coordinator.from_front(frame)
                coordinator.from_back(frame, 1.0)
                coordinator.from_engine(frame)
            except (BarrierBrokenError, msgspec.DecodeError, TypeError, ValueError, AttributeError):
                pass
            except Exception as error:
                pytest.fail(f"seed {SEED}-{number}, {frame.hex()}: {type(error).__name__}: {error}")
            assert len(coordinator.tick(2.0)) == 1, "it still publishes"


def dealer(context: zmq.Context[zmq.Socket[bytes]], port: int, identity: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, 500)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def head_lines(port: int, api: int) -> tuple[str, ...]:
    group = ("-dp", "2", "-dpl", "0", "-dpa", "127.0.0.1", "-dpp", str(port), "--no-moe")
    return (*group, "--host", "127.0.0.1", "--port", str(api), "--api-server-count", "1")


@pytest.mark.parametrize("number", range(12))
def test_a_head_ends_with_status_1_or_waits_on_when_a_frame_is_injured(bed: Bed, number: int) -> None:
    random_ = random.Random(f"{SEED}-socket-{number}")
    frame = mutate(FRAMES["hello"], random_)
    port, api = free_port(), free_port()
    head = bed.engine(*head_lines(port, api), version="0.33.0", name="head")
    head.wait_for("waiting for", within_s=20)
    with zmq.Context() as context, dealer(context, port, b"\x01\x00") as rank:
        rank.send(frame)
        answered = rank.poll(1500)
        if answered:
            assert head.running(), head.log()
            assert decode_init(rank.recv()).parallel_config == {}
        else:
            assert bed.exit_code(head, within_s=5) == 1, f"seed {SEED}-socket-{number}: {frame.hex()}\n{head.log()}"


def test_an_engine_lives_through_injured_requests_and_ends_when_told(bed: Bed) -> None:
    """One malformed request ends vLLM's input thread and leaves its process up, deaf: so it is here."""
    random_ = random.Random(SEED)
    rpc, first, second = free_port(), free_port(), free_port()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as shake:
        shake.setsockopt(zmq.LINGER, 0)
        shake.bind(f"tcp://127.0.0.1:{rpc}")
        inputs = [context.socket(zmq.ROUTER) for _ in range(2)]
        output = context.socket(zmq.PULL)
        for socket in (*inputs, output):
            socket.setsockopt(zmq.LINGER, 0)
        inputs[0].bind(f"tcp://127.0.0.1:{first}")
        inputs[1].bind(f"tcp://127.0.0.1:{second}")
        out = output.bind_to_random_port("tcp://127.0.0.1")
        engine = bed.engine(
            *("--headless", "-dp", "2", "-dpl", "1", "-dpr", "1", "-dpa", "127.0.0.1", "-dpp", str(rpc), "--no-moe"),
            version="0.33.0",
        )
        assert shake.poll(20_000), engine.log()
        identity, _ = shake.recv_multipart()
        addresses = Addresses(
            inputs=[f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{second}"], outputs=[f"tcp://127.0.0.1:{out}"] * 2
        )
        shake.send_multipart([identity, wire.encode(Init(addresses=addresses, parallel_config={}))])
        for socket in inputs:
            assert socket.poll(20_000), engine.log()
            socket.recv_multipart()
        for _ in range(300):
            kind = bytes([random_.choice([0, 0, 0, 1, 2, 3, 4, 9, 255])])
            frame = mutate(FRAMES[random_.choice(["add_022", "add_011", "utility", "abort"])], random_)
            inputs[0].send_multipart([identity, kind, frame])
        before = rss(engine.pid)
        call = wire.encode([1, 77, "get_supported_tasks", []])
        inputs[1].send_multipart([identity, wire.UTILITY, call])

        def answered_or_deaf() -> bool:
            while output.poll(50):
                message = wire.decode_outputs(output.recv_multipart()[0])
                if message.utility and message.utility[0] == 77:
                    return True
            return "Input thread died" in engine.text()

        until(answered_or_deaf, within_s=15, last=engine.log)
        assert engine.running(), engine.log()
        assert rss(engine.pid) - before < 32 * 2**20
        engine.signal(signal.SIGTERM)
        assert bed.exit_code(engine, within_s=10) == 0
        for socket in (*inputs, output):
            socket.close()


class RunningCoordinator:
    """Our coordinator of two MoE ranks, its barrier passed, as a front end and both ranks see it."""

    def __init__(self, bed: Bed, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        script = str(Path(__file__).parent / "our_coordinator.py")
        env = {"PYTHONPATH": str(REPOSITORY / "engine_image"), "TMPDIR": str(bed.directory)}
        self.program = bed.start("coordinator", [sys.executable, script, "2", "0.32.0", "--moe"], env)
        endpoints = self.program.message("endpoints", within_s=20)
        # Injured frames come from another front end: one that begins with 0 ends its sender's subscription.
        self.front, self.injured, *self.ranks = [context.socket(zmq.XSUB) for _ in range(4)]
        self.output = context.socket(zmq.PUSH)
        for socket, name in ((self.front, "stats"), (self.injured, "stats"), (self.output, "engine_output")):
            socket.connect(endpoints[name])
        for rank in self.ranks:
            rank.connect(endpoints["engine_input"])
            rank.send(wire.SUBSCRIBE)
        for rank in self.ranks:
            assert rank.poll(10_000), self.program.log()
            assert rank.recv() == wire.COORDINATOR_READY
        self.front.send(wire.SUBSCRIBE)

    def publishes(self) -> bool:
        """Whether a rank's new counts reach the front end; False when the process has ended."""
        for busy in range(1, 200):
            stats = {"num_waiting_reqs": 0, "num_running_reqs": busy, "step_counter": busy, "current_wave": 0}
            self.output.send(wire.encode_outputs(wire.Outputs(engine=1, stats=stats), now=0.0))
            while self.front.poll(100):
                counts = wire.decode(self.front.recv())[0]
                if counts is not None and counts[1][1]:
                    return True
            if not self.program.running():
                return False
        return False


def test_the_coordinator_lives_through_injured_frames_of_front_ends_and_ranks(bed: Bed) -> None:
    random_ = random.Random(SEED)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        coordinator = RunningCoordinator(bed, context)
        assert coordinator.publishes(), coordinator.program.log()
        before = rss(coordinator.program.pid)
        for number in range(600):
            coordinator.injured.send(mutate(FRAMES["first_request"], random_) or b"\xc1")
            coordinator.ranks[number % 2].send(
                bytes([random_.choice([2, 3, 9, 0xC1])]) + mutate(FRAMES["abort"], random_)
            )
        assert coordinator.publishes(), coordinator.program.log()
        assert rss(coordinator.program.pid) - before < 32 * 2**20
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("number", range(6))
def test_the_coordinator_serves_on_or_ends_with_status_1_when_a_ranks_output_is_injured(bed: Bed, number: int) -> None:
    """vLLM's does not catch what it cannot decode, and a group without its coordinator ends."""
    random_ = random.Random(f"{SEED}-coordinator-{number}")
    frame = mutate(FRAMES["outputs_stats"], random_)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        coordinator = RunningCoordinator(bed, context)
        coordinator.output.send(frame)
        if not coordinator.publishes():
            assert bed.exit_code(coordinator.program, within_s=5) == 1, f"{frame.hex()}\n{coordinator.program.log()}"
    finally:
        context.destroy(linger=0)


def rss(pid: int) -> int:
    """Resident bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_head_that_serves_lives_through_injured_outputs(bed: Bed) -> None:
    """Garbage on the outputs socket, and at the closed rpc port, ends nothing."""
    random_ = random.Random(SEED)
    rpc, api = free_port(), Api(bed, free_port())
    head = bed.engine(*head_lines(rpc, api.port), version="0.33.0", name="head")
    with zmq.Context() as context:
        ranks = [dealer(context, rpc, bytes([rank, 0])) for rank in range(2)]
        for rank in ranks:
            rank.send(HELLO)
        addresses = []
        for rank in ranks:
            assert rank.poll(20_000), head.log()
            addresses.append(decode_init(rank.recv()).addresses)
        output = context.socket(zmq.PUSH)
        output.setsockopt(zmq.LINGER, 500)
        output.connect(addresses[0].outputs[0])
        sink = context.socket(zmq.PUSH)
        sink.setsockopt(zmq.LINGER, 500)
        assert addresses[0].coordinator_output is not None
        sink.connect(addresses[0].coordinator_output)
        for number in range(200):
            output.send(mutate(FRAMES[random_.choice(["outputs", "outputs_stats"])], random_))
            if number % 20 == 0:
                sink.send(mutate(FRAMES["outputs_stats"], random_))
        for rank in ranks:
            rank.send(wire.encode({"status": "READY", "local": False, "headless": True}))
        head.wait_for("READY", within_s=10)
        assert head.running(), head.log()
        for socket in (*ranks, output, sink):
            socket.close()
