"""Addresses of ZeroMQ sockets: ipc when every rank is on this node, else a random tcp port on the head's address."""

from __future__ import annotations

import os
import tempfile

import zmq


def ipc_endpoint() -> str:
    """A new path under VLLM_RPC_BASE_PATH (default: the temporary directory)."""
    base = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    return f"ipc://{base}/{os.urandom(8).hex()}"


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, *, host: str, local_only: bool
) -> tuple[zmq.Socket[bytes], str]:
    """A bound socket without high-water marks, and the endpoint to tell others. Raises zmq.ZMQError."""
    socket = context.socket(kind)
    prepare(socket)
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(ipc_endpoint() if local_only else tcp_endpoint(host, 0))
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, *, identity: bytes | None = None, linger_ms: int
) -> zmq.Socket[bytes]:
    """A connecting socket; the peer may come later."""
    socket = context.socket(kind)
    prepare(socket)
    socket.setsockopt(zmq.LINGER, linger_ms)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    return socket


def prepare(socket: zmq.Socket[bytes]) -> None:
    """Never block and never drop: vLLM's sockets have no high-water mark.

    Unlike vLLM's, ours let many ranks connect at once: a queue of 100 overflows with a thousand, and TCP asks again
    only after a second.
    """
    socket.setsockopt(zmq.BACKLOG, 4096)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def connect_stats(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A subscriber of the coordinator's counts."""
    socket = connect_socket(context, zmq.XSUB, address, linger_ms=0)
    socket.send(b"\x01")
    return socket
