"""What /proc/net/tcp and /proc/net/tcp6 of the head pod tell about its own and its workers' ranks. Pure.

The relay shares the head's network namespace and sees every connection of the engine in it (notes §9.5, checked with
vLLM 0.32): a connection from the pod IP to rpcPort+1 is a local rank in its handshake; connections from a pod's IP to
the input sockets named in INIT are that pod's ranks with the model loaded.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from dp_handshake.addresses import canonical

ESTABLISHED = "01"
LISTEN = "0A"
# A connection that this side has closed first, or is about to: ESTABLISHED, FIN_WAIT1, FIN_WAIT2, TIME_WAIT. What the
# other side closed first is in CLOSE_WAIT, LAST_ACK or gone.
_CLOSED_BY_US = frozenset({ESTABLISHED, "04", "05", "06"})
_WILDCARDS = frozenset({"0.0.0.0", "::"})


class Connection(Struct, frozen=True):
    """One row. Addresses are canonical text; state is the kernel's two hex digits."""

    local_ip: str
    local_port: int
    remote_ip: str
    remote_port: int
    state: str


def parse(text: str, *, local_ports: Collection[int]) -> list[Connection]:
    """Read the rows of /proc/net/tcp or tcp6 whose local port is one of local_ports. Odd rows are left out."""
    wanted = {f"{port:04X}" for port in local_ports}
    rows: list[Connection] = []
    for line in text.splitlines():
        words = line.split(None, 4)
        if len(words) < 4 or words[1][-4:] not in wanted:
            continue
        try:
            local_ip, local_port = _address(words[1])
            remote_ip, remote_port = _address(words[2])
        except ValueError:
            continue
        rows.append(Connection(local_ip, local_port, remote_ip, remote_port, words[3]))
    return rows


def listens(rows: Iterable[Connection], *, ip: str, port: int) -> bool:
    """Tell whether something listens on that address, by its own address or the wildcard."""
    return any(
        row.state == LISTEN and row.local_port == port and (row.local_ip == ip or row.local_ip in _WILDCARDS)
        for row in rows
    )


def peers(rows: Iterable[Connection], *, port: int) -> dict[str, int]:
    """Count established connections to a local port by the peer's address."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.state == ESTABLISHED and row.local_port == port:
            counts[row.remote_ip] = counts.get(row.remote_ip, 0) + 1
    return counts


def closed_by_us(rows: Iterable[Connection]) -> set[tuple[str, int]]:
    """Of connections that are known to have ended: remote address and port of those that this side has closed first."""
    return {(row.remote_ip, row.remote_port) for row in rows if row.state in _CLOSED_BY_US}


def data_port(init: bytes) -> int | None:
    """Find the port to which a rank connects once its model is loaded, from the bytes of INIT (notes §2.2).

    That is the first API server's input socket; in Hybrid and External groups the input sockets are ipc, and the
    coordinator's input tells the same. None when nothing there is tcp (a group in one pod) or INIT is not understood.
    """
    try:
        addresses = msgspec.msgpack.decode(init)["addresses"]
        candidates = [*addresses["inputs"], addresses.get("coordinator_input")]
        ports = [urlsplit(uri).port for uri in candidates if isinstance(uri, str) and uri.startswith("tcp://")]
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return next((port for port in ports if port), None)


def _address(word: str) -> tuple[str, int]:
    # Each 32-bit word of the address is printed as a number in the machine's own byte order.
    digits, _, port = word.partition(":")
    raw = b"".join(int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    if len(raw) not in (4, 16):
        raise ValueError(word)
    text = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return canonical(text) or text, int(port, 16)
