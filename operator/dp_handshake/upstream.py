"""The relay's connections to the engine's own ROUTER: one DEALER per rank, all in one epoll.

Work is done per event, not per socket (notes §9.3). Connections are opened at most WINDOW at a time, because libzmq
listens with a backlog of 100 and what overflows it is retried by the kernel only after a second. A connection ends
once READY is delivered: left open, they would all reconnect for ever after the head closes its port (notes §9.5).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections import deque
from collections.abc import Callable

from msgspec import Struct, field

from dp_handshake import zmtp
from dp_handshake.addresses import is_ipv6

log = logging.getLogger(__name__)

WINDOW = 64
RETRY_S = 0.5
LINGER_S = 5.0
_READ_BYTES = 65_536
# From Linux's in.h, missing in Python's socket module: choose the port at connect, not at bind, so that ports are not
# used up per source address.
_IP_BIND_ADDRESS_NO_PORT = 24


class _Link(Struct, kw_only=True, eq=False):
    rank: int
    socket: socket.socket | None = None
    incoming: zmtp.Incoming = field(default_factory=zmtp.Incoming)
    pending: list[bytes] = field(default_factory=list)  # frames that wait for the connection
    outbox: bytes = b""  # bytes that the kernel did not take yet
    ending: bool = False  # the last pending frame is READY
    close_at: float | None = None  # everything is sent; reading on until the head closes, at most until then


class Upstreams:
    """Send frames under a rank's identity; `on_frames` gets what the head answers, `on_delivered` each READY gone out.

    `fileno` becomes readable when `poll` has something to do; `tick` wants to be called a few times a second.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        source: str | None,
        on_frames: Callable[[int, list[bytes]], None],
        on_delivered: Callable[[int], None],
    ) -> None:
        self._target = (address, port)
        self._family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
        self._source = source
        self._on_frames = on_frames
        self._on_delivered = on_delivered
        self._epoll = select.epoll()
        self._links: dict[int, _Link] = {}  # by rank
        self._by_fd: dict[int, _Link] = {}
        self._waiting: deque[_Link] = deque()
        self._opening: set[int] = set()  # descriptors that have not finished ZMTP's handshake
        self._closing: set[int] = set()
        self._pause_until = 0.0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send(self, rank: int, frame: bytes, *, last: bool) -> None:
        """Send one frame, opening the rank's connection if there is none. `last` closes it afterwards."""
        link = self._links.get(rank)
        if link is None:
            link = self._links[rank] = _Link(rank=rank)
            self._waiting.append(link)
        link.pending.append(frame)
        link.ending = link.ending or last
        if link.incoming.ready:
            self._flush(link)
        else:
            self._open_some()

    def poll(self) -> None:
        """Handle everything that has happened on the connections."""
        while True:
            events = self._epoll.poll(0, 1024)
            for descriptor, mask in events:
                link = self._by_fd.get(descriptor)
                if link is not None:
                    self._handle(link, mask)
            if len(events) < 1024:
                break
        self._open_some()

    def tick(self, now: float) -> None:
        """Retry refused connections and end those that the head does not close."""
        if self._pause_until:
            if self._pause_until < 0:
                self._pause_until = now + RETRY_S
            elif now >= self._pause_until:
                self._pause_until = 0.0
        for descriptor in list(self._closing):
            link = self._by_fd[descriptor]
            if link.close_at == 0.0:
                link.close_at = now + LINGER_S
            elif link.close_at is not None and now >= link.close_at:
                self._drop(link)
        self._open_some()

    def close(self) -> None:
        for link in list(self._by_fd.values()):
            self._drop(link)
        self._links.clear()
        self._waiting.clear()
        self._epoll.close()

    def _open_some(self) -> None:
        while self._waiting and len(self._opening) < WINDOW and not self._pause_until:
            self._open(self._waiting.popleft())

    def _open(self, link: _Link) -> None:
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            log.warning("no connection to the engine for rank %d: %s", link.rank, error)
            self._fail(link)
            return
        link.socket = sock
        link.incoming = zmtp.Incoming()
        self._by_fd[sock.fileno()] = link
        self._opening.add(sock.fileno())
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._source is not None:
                if self._family == socket.AF_INET:
                    sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((self._source, 0))
            with contextlib.suppress(BlockingIOError):
                sock.connect(self._target)
        except OSError as error:
            log.debug("rank %d: %s", link.rank, error)
            self._fail(link)
            return
        link.outbox = zmtp.opening(link.rank.to_bytes(2, "little"))
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _handle(self, link: _Link, mask: int) -> None:
        sock = link.socket
        if sock is None:
            return
        try:
            if mask & select.EPOLLOUT:
                self._write(link)
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed by the engine")
                messages, reply = zmtp.receive(link.incoming, data)
                if link.incoming.ready and sock.fileno() in self._opening:
                    self._opening.discard(sock.fileno())
                link.outbox += reply
                for frames in messages:
                    self._on_frames(link.rank, frames)
            if link.incoming.ready:
                self._flush(link)
        except BlockingIOError:
            return
        except (OSError, zmtp.ProtocolError) as error:
            log.debug("connection to the engine for rank %d: %s", link.rank, error)
            self._fail(link)

    def _flush(self, link: _Link) -> None:
        """Write what waits; after READY, half-close and wait for the head to do the same.

        A plain close could leave bytes of the head unread in our socket; the kernel then resets the connection, and a
        reset makes the head's side lose READY.
        """
        sock = link.socket
        if sock is None or link.close_at is not None:
            return
        link.outbox += b"".join(zmtp.message(frame) for frame in link.pending)
        link.pending.clear()
        try:
            self._write(link)
            if link.outbox or not link.ending:
                return
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("connection to the engine for rank %d: %s", link.rank, error)
            self._fail(link)
            return
        link.close_at = 0.0
        self._closing.add(sock.fileno())
        self._links.pop(link.rank, None)
        self._on_delivered(link.rank)

    def _write(self, link: _Link) -> None:
        sock = link.socket
        if sock is None:
            return
        if link.outbox:
            with contextlib.suppress(BlockingIOError):
                link.outbox = link.outbox[sock.send(link.outbox) :]
        self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if link.outbox else 0))

    def _fail(self, link: _Link) -> None:
        """End a connection; what it had not sent is tried again on a new one, after a pause for all."""
        self._drop(link)
        if link.close_at is None and link.pending:
            self._links[link.rank] = link
            self._waiting.append(link)
            self._pause_until = -1.0
        else:
            self._links.pop(link.rank, None)

    def _drop(self, link: _Link) -> None:
        sock, link.socket = link.socket, None
        if sock is None:
            return
        descriptor = sock.fileno()
        self._by_fd.pop(descriptor, None)
        self._opening.discard(descriptor)
        self._closing.discard(descriptor)
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)
        sock.close()
        link.outbox = b""
