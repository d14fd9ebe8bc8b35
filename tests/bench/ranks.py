"""All ranks of a handshake in one process, for both handshake benchmarks."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import zmq

from tests.component.handshake.play import HELLO, READY, address_of, many_sockets


def be_all_ranks(pipe: Connection, port: int, size: int, ranks_per_pod: int | None = None) -> None:
    """Say HELLO, wait for INIT, say READY and close, as `size` DEALERs; each pod's ranks come from its own address.

    Over `pipe`: says "up", waits for the word to begin, says when it began, and stays until another word comes.
    """
    with many_sockets() as context:
        pipe.send("up")
        pipe.recv()
        pipe.send(time.monotonic())
        sockets = []
        for rank in range(size):
            sock = context.socket(zmq.DEALER)
            sock.set(zmq.IDENTITY, rank.to_bytes(2, "little"))
            sock.set(zmq.LINGER, 5000)
            source = f"{address_of(rank // ranks_per_pod)}:0;" if ranks_per_pod else ""
            sock.connect(f"tcp://{source}127.0.0.1:{port}")
            sock.send(HELLO)
            sockets.append(sock)
        for sock in sockets:
            sock.recv()
        for sock in sockets:
            sock.send(READY)
            sock.close()
        pipe.recv()
