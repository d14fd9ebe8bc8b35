"""The head that single dense ranks see: handshake, inputs and outputs of its API servers, no coordinator."""

from __future__ import annotations

import zmq

from dp_engine import wire
from dp_engine.handshake import Addresses, Init
from tests.conformance.conftest import IMPORT_S, Program
from tests.ports import free_port

CALL = ["get_supported_tasks", []]


class FrontEnds:
    """Two API servers and whoever shakes hands with their ranks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.rpc_port = free_port()
        self._shake = context.socket(zmq.ROUTER)
        self._shake.bind(f"tcp://127.0.0.1:{self.rpc_port}")
        self._inputs = [context.socket(zmq.ROUTER) for _ in range(2)]
        self._output = context.socket(zmq.PULL)
        for socket in (self._shake, *self._inputs, self._output):
            socket.setsockopt(zmq.LINGER, 0)
        in_ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._inputs]
        out_port = self._output.bind_to_random_port("tcp://127.0.0.1")
        self.addresses = Addresses(
            inputs=[f"tcp://127.0.0.1:{port}" for port in in_ports], outputs=[f"tcp://127.0.0.1:{out_port}"] * 2
        )

    def shake(self, program: Program, *, ranks: int = 1, init: object = None) -> list[int]:
        """Answer every HELLO with INIT, a good one or this. Returns the ranks' numbers."""
        answer = wire.encode(init or Init(addresses=self.addresses, parallel_config={}))
        found: list[int] = []
        while len(found) < ranks:
            assert self._shake.poll(IMPORT_S * 1000), program.log()
            identity, payload = self._shake.recv_multipart()
            if wire.decode(payload)["status"] != "HELLO":
                continue  # a quicker rank is READY
            self._shake.send_multipart([identity, answer])
            found.append(int.from_bytes(identity, "little"))
        return found

    def start(self, program: Program, *, ranks: int = 1) -> list[int]:
        """From HELLO to the first frames on both inputs. Returns the ranks' numbers."""
        found = self.shake(program, ranks=ranks)
        for socket in self._inputs:
            for _ in range(ranks):
                assert socket.poll(20_000), program.log()
                socket.recv_multipart()
        return found

    def send(self, index: int, rank: int, kind: bytes, frame: bytes) -> None:
        self._inputs[index].send_multipart([wire.identity(rank), kind, frame])

    def call(self, index: int, rank: int, call: int) -> None:
        self.send(index, rank, wire.UTILITY, wire.encode([index, call, *CALL]))

    def heard(self, *, within_ms: int) -> tuple[int, int | None] | None:
        """(rank, call answered or None) of one output; None when there is none."""
        if not self._output.poll(within_ms):
            return None
        message = wire.decode_outputs(self._output.recv_multipart()[0])
        return message.engine, message.utility[0] if message.utility else None

    def answers(self, index: int, rank: int, call: int, *, within_ms: int) -> bool:
        """Whether the rank answers a call on this input."""
        self.call(index, rank, call)
        heard = self.heard(within_ms=within_ms)
        return heard is not None and heard[1] == call
