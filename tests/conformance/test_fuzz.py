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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from dp_engine import wire
from dp_engine.coordinator import BarrierBrokenError, Coordinator
from dp_engine.engine_core import EngineConfig, EngineCore
from dp_engine.faults import Armed
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init, decode_init
from dp_engine.modes import resolve
from dp_engine.options import parse_options
from dp_engine.versions import wire_of
from tests.conformance.conftest import RELEASES, REPOSITORY, Api, Bed, Program, until
from tests.conformance.front_ends import FrontEnds
from tests.conformance.report import Table
from tests.ports import free_port

SEED = int(os.environ.get("FUZZ_SEED", "20"))
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "20000"))
FRAMES = {
    name: bytes.fromhex(text)
    for name, text in msgspec.json.decode((Path(__file__).parent / "data" / "frames.json").read_bytes()).items()
}
FUZZED = f"{ROUNDS} injured frames at our head, engine and coordinator"
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


VALUES = (float("inf"), float("nan"), -1, 0, 2**63, None, True, "x", [], [None], ["x"], [2**63], {}, {"x": 1}, b"\xc1")


def exchange_value(frame: bytes, random_: random.Random) -> bytes:
    """Another value in one place of a message that stays msgpack: what passes the decoder meets the code behind it."""
    message = wire.decode(frame)
    place = message
    while True:
        key = random_.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], list | dict) or not place[key] or random_.random() < 0.2:
            break
        place = place[key]
    place[key] = random_.choice(VALUES)
    return wire.encode(message)


def mutations(*names: str, rounds: int = ROUNDS) -> Iterator[tuple[int, bytes]]:
    for number in range(rounds):
        random_ = random.Random(f"{SEED}-{number}")
        yield number, mutate(FRAMES[random_.choice(names)], random_)


@pytest.mark.parametrize("name", RELEASES)
def test_the_heads_state_machine_takes_or_refuses_every_injured_frame(name: str, compatibility: Table) -> None:
    """It raises what its caller ends the start for, never anything else, and its states stay states."""
    with compatibility.cell(FUZZED, name, moe=None):
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


KINDS = {"add_011": wire.ADD, "add_017": wire.ADD, "add_022": wire.ADD, "abort": wire.ABORT, "utility": wire.UTILITY}


def requests(rounds: int, seed: str) -> Iterator[tuple[str, bytes, bytes]]:
    """(seed, kind, injured payload): requests to an engine, some under another kind than theirs."""
    for number in range(rounds):
        random_ = random.Random(f"{seed}-{number}")
        name = random_.choice(list(KINDS))
        kind = KINDS[name] if random_.random() < 0.9 else bytes([random_.randrange(256)])
        injure = random_.choice([mutate, exchange_value])
        yield f"{seed}-{number}", kind, injure(FRAMES[name], random_)


class PureEngine:
    """A dense rank of a release without any socket: what it does with a request, and with the steps that follow."""

    def __init__(self, version: str) -> None:
        options = parse_options(["m", "--headless", "-dp", "2", "-dpl", "1", "--no-moe", "--emulate-version", version])
        launch = resolve(options, moe=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._config = EngineConfig(
            rank=1, launch=launch, options=options, handshake_address="", local=False, headless=True
        )

    def hears(self, kind: bytes, frame: bytes) -> bool:
        """Whether it still reads after this message; steps and what they send may fail in no case."""
        core = EngineCore(self._config, self._context, Addresses(inputs=[], outputs=[]), None)
        core._armed = Armed((), rank=1, now=0.0)
        known = wire.encode_add(
            request_id="req-1",
            external_id="req-1",
            prompt_token_ids=[1, 2],
            sampling={},
            rank=None,
            client_index=0,
            wave=0,
        )
        core._take([wire.ADD, known])  # the recorded abort names it
        try:
            core._take([kind, frame])
        except wire.MALFORMED:
            hears = False
        else:
            hears = True
        for _ in range(3):
            for message in core._scheduler.step().values():
                core._encoded(message)
            core._encoded(wire.Outputs(engine=1, stats=core._stats()))
        return hears


@pytest.mark.parametrize("name", RELEASES)
def test_an_engine_takes_every_injured_request_or_grows_deaf_and_answers_the_others(
    name: str, compatibility: Table
) -> None:
    """A request that passes the decoder never fails later, in a step, where it would end the rank."""
    with compatibility.cell(FUZZED, name, moe=None):
        engine = PureEngine(RELEASES[name])
        verdicts = set()
        before = rss(os.getpid())
        for seed, kind, frame in requests(ROUNDS, f"{SEED}-engine"):
            try:
                verdicts.add(engine.hears(kind, frame))
            except Exception as error:
                pytest.fail(f"seed {seed}, {kind!r} {frame.hex()}: {type(error).__name__}: {error}")
        assert verdicts == {True, False}
        assert rss(os.getpid()) - before < 64 * 2**20


def test_every_rank_at_a_socket_hears_or_is_deaf_after_one_injured_request_as_the_pure_engine_says(bed: Bed) -> None:
    """Each frame goes to a rank of its own, fresh from its handshake: after the first bad one nothing more is read."""
    pure = PureEngine("0.33.0")
    judged = [(pure.hears(kind, frame), kind, frame) for _, kind, frame in requests(1000, f"{SEED}-socket")]
    frames = [*[one for one in judged if one[0]][:12], *[one for one in judged if not one[0]][:12]]
    ranks, hearing = len(frames), {rank for rank, (hears, _, _) in enumerate(frames) if hears}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        front_ends = FrontEnds(context)
        group = ("-dp", str(ranks), "-dpl", str(ranks), "-dpr", "0", "-dpa", "127.0.0.1")
        program = bed.engine(
            "--headless",
            *group,
            "-dpp",
            str(front_ends.rpc_port),
            "--no-moe",
            "--api-server-count",
            "0",
            version="0.33.0",
        )
        assert sorted(front_ends.start(program, ranks=ranks)) == list(range(ranks))
        answered: set[int] = set()
        for rank, (_, kind, frame) in enumerate(frames):
            front_ends.send(0, rank, kind, frame)
            front_ends.call(0, rank, 1000 + rank)  # behind the frame, so whoever answers has read it

        def all_known() -> bool:
            while (heard := front_ends.heard(within_ms=50)) is not None:
                if heard[1] == 1000 + heard[0]:
                    answered.add(heard[0])
            return len(answered) + program.text().count("Input thread died") >= ranks

        until(
            all_known, within_s=60, last=lambda: f"answered: {sorted(answered)} of {sorted(hearing)}\n{program.log()}"
        )
        assert answered == hearing, [frames[rank] for rank in answered ^ hearing]
        assert program.running(), program.log()
        program.signal(signal.SIGTERM)
        assert bed.exit_code(program, within_s=20) == 0
    finally:
        context.destroy(linger=0)


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


class PretendedRanks:
    """Two dense ranks of a head, played from here: a start until /health says 200, then whatever a test sends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], head: Program, rpc: int, api: Api) -> None:
        shakes = [dealer(context, rpc, wire.identity(rank)) for rank in range(2)]
        for shake in shakes:
            shake.send(HELLO)
        for shake in shakes:
            assert shake.poll(20_000), head.log()
            addresses = decode_init(shake.recv()).addresses
        self.inputs, subscribers = [], []
        for rank in range(2):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, wire.identity(rank))
            socket.connect(addresses.inputs[0])
            socket.send(wire.encode({"max_model_len": 2048, "num_gpu_blocks": 8}))
            self.inputs.append(socket)
            subscriber = context.socket(zmq.XSUB)
            assert addresses.coordinator_input is not None
            subscriber.connect(addresses.coordinator_input)
            subscriber.send(wire.SUBSCRIBE)
            subscribers.append(subscriber)
        self.output = context.socket(zmq.PUSH)
        self.output.connect(addresses.outputs[0])
        for subscriber in subscribers:
            assert subscriber.poll(20_000), head.log()
            assert subscriber.recv() == wire.COORDINATOR_READY
        for shake in shakes:
            shake.send(wire.encode({"status": "READY", "local": False, "headless": True}))
        for rank, socket in enumerate(self.inputs):
            assert socket.poll(20_000), head.log()
            kind, payload = socket.recv_multipart()
            client, call, method, _ = wire.decode(payload)
            assert (kind, client, method) == (wire.UTILITY, 0, "get_supported_tasks")
            self.say(wire.Outputs(engine=rank, utility=[call, None, [None, ["generate"]]]))
        api.ready(within_s=20)

    def say(self, message: wire.Outputs) -> None:
        self.output.send(wire.encode_outputs(message, now=0.0))

    def answer(self, *, within_s: float) -> None:
        """Give one request all its tokens at once."""
        poller = zmq.Poller()
        for socket in self.inputs:
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(within_s * 1000):
            kind, payload = socket.recv_multipart()
            assert kind == wire.ADD
            request = wire.decode_add(payload)
            item = [request.request_id, [7] * request.sampling["max_tokens"], None, None, None, 1, None]
            self.say(wire.Outputs(engine=0, outputs=[item], finished=[request.request_id]))


def test_a_head_that_serves_drops_injured_outputs_and_answers_the_next_request(bed: Bed) -> None:
    """Not as vLLM, whose front end ends; docs/compatibility.md names the difference."""
    random_ = random.Random(SEED)
    rpc, api = free_port(), Api(bed, free_port())
    head = bed.engine(*head_lines(rpc, api.port), version="0.33.0", name="head")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ranks = PretendedRanks(context, head, rpc, api)
        for _ in range(200):
            ranks.output.send(mutate(FRAMES[random_.choice(["outputs", "outputs_stats"])], random_))
        # The answer comes by the same connection, so all of the above has been read before it.
        with ThreadPoolExecutor(1) as pool:
            tokens = pool.submit(api.complete, tokens=5)
            ranks.answer(within_s=20)
            assert tokens.result() == 5
        assert "Dropped a malformed output" in head.text()
        assert api.call("/health")[0] == 200, head.log()
    finally:
        context.destroy(linger=0)
