"""One malformed request, and a rank of vLLM hears nothing any more, on any input; so does ours."""

from __future__ import annotations

import pytest
import zmq

from dp_engine import wire
from dp_engine.handshake import Addresses, Init
from tests.conformance.conftest import IMPORT_S, Bed, Program, Release, free_port
from tests.conformance.report import Table

CALL = ["get_supported_tasks", []]
ANSWER_MS, SILENCE_MS = 20_000, 1500


class FrontEnds:
    """Two API servers of a head without a coordinator, as one dense rank sees them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.rpc_port = free_port()
        self._shake = context.socket(zmq.ROUTER)
        self._shake.bind(f"tcp://127.0.0.1:{self.rpc_port}")
        self._inputs = [context.socket(zmq.ROUTER) for _ in range(2)]
        self._output = context.socket(zmq.PULL)
        for socket in (self._shake, *self._inputs, self._output):
            socket.setsockopt(zmq.LINGER, 0)
        self._in_ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._inputs]
        self._out_port = self._output.bind_to_random_port("tcp://127.0.0.1")
        self._identity = b""

    def start(self, rank: Program) -> None:
        """From HELLO to the first frame on both inputs."""
        assert self._shake.poll(IMPORT_S * 1000), rank.log()
        self._identity = self._shake.recv_multipart()[0]
        addresses = Addresses(
            inputs=[f"tcp://127.0.0.1:{port}" for port in self._in_ports],
            outputs=[f"tcp://127.0.0.1:{self._out_port}"] * 2,
        )
        self._shake.send_multipart([self._identity, wire.encode(Init(addresses=addresses, parallel_config={}))])
        for socket in self._inputs:
            assert socket.poll(20_000), rank.log()
            socket.recv_multipart()

    def send(self, index: int, kind: bytes, frame: bytes) -> None:
        self._inputs[index].send_multipart([self._identity, kind, frame])

    def answers(self, index: int, call: int, *, within_ms: int) -> bool:
        """Whether the rank answers a call on this input."""
        self.send(index, wire.UTILITY, wire.encode([index, call, *CALL]))
        if not self._output.poll(within_ms):
            return False
        answer = wire.decode_outputs(self._output.recv_multipart()[0])
        return answer.utility is not None and answer.utility[0] == call


@pytest.mark.parametrize("whose", ["ours", "vllm"])
def test_a_malformed_request_makes_all_inputs_deaf_and_leaves_the_process_up(
    release: Release, bed: Bed, compatibility: Table, whose: str
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    role = f"deaf on all inputs after a malformed request, process up: {'our rank' if whose == 'ours' else 'a rank of vLLM'}"
    try:
        with compatibility.cell(role, release.name, moe=None):
            front_ends = FrontEnds(context)
            handshake = f"tcp://127.0.0.1:{front_ends.rpc_port}"
            if whose == "ours":
                group = ("-dp", "1", "-dpa", "127.0.0.1", "-dpp", str(front_ends.rpc_port))
                rank = bed.engine("--headless", "--no-moe", *group, version=release.emulated)
            else:
                ranks = [{"rank": 1, "handshake": handshake, "own": None}]
                rank = release.case(bed, "engines", mode="internal", moe=False, ranks=ranks)
            front_ends.start(rank)
            for index in range(2):
                assert front_ends.answers(index, 70 + index, within_ms=ANSWER_MS), rank.log()
            front_ends.send(0, wire.ADD, b"\xc1")
            for index in range(2):
                assert not front_ends.answers(index, 80 + index, within_ms=SILENCE_MS), rank.log()
            assert rank.running(), rank.log()
    finally:
        context.destroy(linger=0)
