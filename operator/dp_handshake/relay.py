"""The relay's sockets: the ROUTER that workers see, its socket monitor and its admission. Decides nothing by itself.

ROUTER without handover (with it, anybody who connects under a live identity mutes the rank for good) and with
heartbeats: they keep idle NAT entries alive during a long load, and free the identity of a lost node in seconds. The
time to live that goes out with them is longer than our own timeout, so after a silent partition our side has let the
identity go before the rank comes back with a new connection.

Who ended a connection matters. What the peer closed (the kernel does so for a process that died) is over: a live rank is
back at once. What our own heartbeat ended may belong to a rank that cannot know yet; it has the whole time to live.
libzmq does not tell the two apart, the kernel's table does.

libzmq's descriptors are edge-triggered: everything is drained until Again, and once more after sending.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable

import zmq
from msgspec import Struct

from dp_handshake import admission, proctcp, protocol
from dp_handshake.addresses import canonical, endpoint, is_ipv6, upstream_source
from dp_handshake.state import Journal
from dp_handshake.upstream import Upstreams

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 65_536
_BATCH = 256
_MAX_PUMP_S = 0.05
# How a MANDATORY ROUTER says that an identity is not connected, or that its queue is full.
_UNREACHABLE = (zmq.EHOSTUNREACH, zmq.EAGAIN)


class Heartbeat(Struct, frozen=True, kw_only=True):
    """How often a silent connection is tested."""

    interval_s: float = 2.0

    @property
    def timeout_s(self) -> float:
        """After this long without an answer the connection is closed."""
        return 3 * self.interval_s

    @property
    def peer_ttl_s(self) -> float:
        """After this long without our heartbeat the rank closes its side; see the module's text."""
        return 6 * self.interval_s


class Port:
    """The open rpc port of one incarnation. `pump` handles what its descriptors announce."""

    def __init__(
        self,
        *,
        pod_ip: str,
        rpc_port: int,
        state: protocol.Handshake,
        peers: list[protocol.Peer],
        journal: Journal,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._state = state
        self._journal = journal
        self._on_change = on_change
        self._clock = clock
        self._family = socket.AF_INET6 if is_ipv6(pod_ip) else socket.AF_INET
        self._gate = admission.Gate(capacity=_capacity(peers, head_ranks=state.head_ranks))
        self._remote_ports: dict[int, int] = {}  # descriptor -> the peer's port
        self._tickets: dict[int, list[bytes]] = {}
        self._next_ticket = 0
        self._due: list[int] = []
        self._context = zmq.Context()
        self._rpc_port = rpc_port
        self._heartbeat = heartbeat or Heartbeat()
        try:
            self._open(pod_ip, rpc_port, self._heartbeat)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._upstreams = Upstreams(
            address=pod_ip,
            port=rpc_port + 1,
            source=upstream_source(pod_ip),
            on_frames=self._head_frames,
            on_delivered=self._delivered,
        )

    def _open(self, pod_ip: str, rpc_port: int, heartbeat: Heartbeat) -> None:
        # The handler of ZAP (https://rfc.zeromq.org/spec/27/) must be there before the first peer.
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        options: dict[int, int | bytes] = {
            zmq.ROUTER_HANDOVER: 0,
            zmq.ROUTER_MANDATORY: 1,
            zmq.HEARTBEAT_IVL: round(heartbeat.interval_s * 1000),
            zmq.HEARTBEAT_TIMEOUT: round(heartbeat.timeout_s * 1000),
            zmq.HEARTBEAT_TTL: round(heartbeat.peer_ttl_s * 1000),
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.IPV6: int(is_ipv6(pod_ip)),
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.BACKLOG: 4096,
            zmq.LINGER: 0,
            zmq.ZAP_DOMAIN: b"dp",
        }
        for option, value in options.items():
            self._router.set(option, value)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._router.bind(endpoint(pod_ip, rpc_port))

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when `pump` has something to do."""
        return [*(int(sock.getsockopt(zmq.FD)) for sock in self._sockets()), self._upstreams.fileno()]

    def pump(self) -> bool:
        """Handle everything that has arrived. True if it stopped early and wants to be called again soon."""
        end = time.monotonic() + _MAX_PUMP_S
        while True:
            self._upstreams.poll()
            self._drain_monitor()
            busy = self._drain_zap()
            busy = self._drain_router() or busy
            if not busy:
                return False
            if time.monotonic() > end:
                return True

    def tick(self) -> None:
        """Let time pass; to be called several times a second."""
        now = self._clock()
        self.pump()
        # Let in one tick late, when the ROUTER has certainly let go of the identities of what ended.
        for ticket in self._due:
            self._reply(self._tickets.pop(ticket), b"200")
        self._due = admission.due(self._gate, now=now)
        self._run(protocol.step(self._state, protocol.Tick(self._gate.counts), now=now))
        self._upstreams.tick(now)
        self.pump()

    def close(self) -> None:
        self._upstreams.close()
        self._router.disable_monitor()
        self._context.destroy(linger=0)

    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return self._router, self._monitor, self._zap

    def _drain_monitor(self) -> None:
        events: list[tuple[int, int]] = []
        while True:
            try:
                event, _ = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            events.append(struct.unpack("=HI", event))
        closed_by_us: set[tuple[str, int]] | None = None
        for kind, descriptor in events:
            if kind == zmq.EVENT_ACCEPTED:
                if (peer := _peer(descriptor, self._family)) is not None:
                    address, self._remote_ports[descriptor] = peer
                    admission.accepted(self._gate, descriptor, address)
                continue
            peer_place = (self._gate.open.get(descriptor, ""), self._remote_ports.pop(descriptor, 0))
            patience_s = protocol.LOST_AFTER_S
            if protocol.between(self._state, descriptor):
                if closed_by_us is None:
                    closed_by_us = proctcp.closed_by_us(_connections(self._rpc_port))
                if peer_place in closed_by_us:
                    patience_s = self._heartbeat.peer_ttl_s
            admission.closed(self._gate, descriptor)
            gone = protocol.PeerGone(descriptor, back_within_s=patience_s)
            self._run(protocol.step(self._state, gone, now=self._clock()))

    def _drain_zap(self) -> bool:
        requests: list[list[bytes]] = []
        while len(requests) < _BATCH:
            try:
                requests.append(self._zap.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
        if not requests:
            return False
        # A peer that closed and connects anew is let in only when the ROUTER has let go of its identity. The ROUTER does
        # so while it is read; what libzmq told it about the old connection was told before the new one asked.
        while self._drain_router():
            pass
        self._drain_monitor()
        for request in requests:
            self._admit(request)
        return True

    def _admit(self, request: list[bytes]) -> None:
        # Envelope, empty, version, request id, domain, address, identity (empty under NULL), mechanism.
        text = request[5].decode(errors="replace") if len(request) > 5 else ""
        address = canonical(text) or text
        now = self._clock()
        self._next_ticket += 1
        verdict = admission.request(self._gate, ticket=self._next_ticket, address=address, now=now)
        if verdict == "hold":
            self._tickets[self._next_ticket] = request
            return
        if verdict == "refuse":
            text = (
                f"{protocol.describe(self._state, address)} tried to connect and was turned away: it is left over from "
                "an earlier group, or the network between the pods rewrites addresses"
            )
            violated = protocol.violate(self._state, "ForeignPeer", text, peer=address, rank=None, now=now)
            self._run([violated])
        self._reply(request, b"200" if verdict == "admit" else b"400")

    def _reply(self, request: list[bytes], status: bytes) -> None:
        self._zap.send_multipart([*request[:4], status, b"", b"", b""])

    def _drain_router(self) -> bool:
        """Take a batch of messages.

        A descriptor may be reused at once by another peer. What the monitor knows after the messages are read says
        whether a message's connection is still there.
        """
        batch: list[list[zmq.Frame]] = []
        while len(batch) < _BATCH:
            try:
                batch.append(self._router.recv_multipart(zmq.DONTWAIT, copy=False))
            except zmq.Again:
                break
        if not batch:
            return False
        self._drain_monitor()
        effects: list[protocol.Effect] = []
        now = self._clock()
        for identity, *frames in batch:
            event = protocol.PeerFrames(
                identity=identity.bytes,
                frames=[frame.bytes for frame in frames],
                address=_metadata(frames),
                connection=self._connection(frames),
            )
            effects += protocol.step(self._state, event, now=now)
        self._run(effects)
        return True

    def _connection(self, frames: list[zmq.Frame]) -> int | None:
        try:
            descriptor = int(frames[-1].get(zmq.SRCFD))
        except (IndexError, zmq.ZMQError, ValueError):
            return None
        return descriptor if descriptor in self._gate.open else None

    def _head_frames(self, rank: int, frames: list[bytes]) -> None:
        known = self._state.init
        effects = protocol.step(self._state, protocol.HeadFrames(rank, frames), now=self._clock())
        if known is None and self._state.init is not None:
            self._journal.write_init(self._state.init)
        # A relay that is killed from here on sends it again, and an engine leaves a second one unread.
        self._journal.write([(rank, protocol.Stage.CONNECTED)])
        self._run(effects)

    def _delivered(self, rank: int) -> None:
        self._journal.write([(rank, protocol.Stage.READY)])
        self._run(protocol.step(self._state, protocol.Delivered(rank), now=self._clock()))
        self._on_change()

    def _run(self, effects: list[protocol.Effect]) -> None:
        # Before a HELLO goes on, it is written down: a relay that is killed must not forward a second one.
        asked = [effect.rank for effect in effects if isinstance(effect, protocol.Forward) and effect.status == "HELLO"]
        if asked:
            self._journal.write([(rank, protocol.Stage.ASKED) for rank in asked])
        for effect in effects:
            if isinstance(effect, protocol.Forward):
                self._upstreams.send(effect.rank, effect.frame, last=effect.status == "READY")
            elif isinstance(effect, protocol.Answer):
                self._answer(effect)
            elif isinstance(effect, protocol.Violated):
                count = effect.violation.count
                # The first, second, fourth, eighth … time: a peer that repeats itself must not fill the log.
                if count & (count - 1) == 0:
                    log.warning("%s (%d times): %s", effect.violation.kind, count, effect.violation.message)
            elif isinstance(effect, protocol.Lost):
                log.warning("rank %d (pod %s) lost: %s", effect.lost.rank, effect.lost.pod, effect.lost.message)
            else:
                log.info("rank %d is back", effect.rank)
        if effects:
            self._on_change()

    def _answer(self, effect: protocol.Answer) -> None:
        try:
            self._router.send_multipart([effect.rank.to_bytes(2, "little"), *effect.frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in _UNREACHABLE:
                log.warning("answer to rank %d: %s", effect.rank, error)
            event = protocol.Undeliverable(effect.rank, effect.frames)
            protocol.step(self._state, event, now=self._clock())


def _capacity(peers: list[protocol.Peer], *, head_ranks: int) -> dict[str, int]:
    """Count, by address, the connections that are let in at once: one for each rank.

    The head's own ranks have no business here. They are let in all the same, so that their frames tell what is wrong.
    """
    capacity: dict[str, int] = {}
    for peer in peers:
        is_head = peer is peers[0]
        capacity[peer.address] = capacity.get(peer.address, 0) + (max(1, head_ranks) if is_head else peer.ranks)
    return capacity


def _peer(descriptor: int, family: int) -> tuple[str, int] | None:
    """Ask the kernel who is at the other end of a connection of libzmq (address, port); None if it is gone already."""
    with contextlib.suppress(OSError):
        duplicate = socket.socket(family, socket.SOCK_STREAM, fileno=os.dup(descriptor))
        with duplicate:
            text, port = duplicate.getpeername()[:2]
            return canonical(str(text)) or str(text), int(port)
    return None


def _connections(local_port: int) -> list[proctcp.Connection]:
    """Rows of the kernel's tables at a local port; what cannot be read has none."""
    rows: list[proctcp.Connection] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as text:
            rows += proctcp.parse(text.read(), local_ports={local_port})
    return rows


def _metadata(frames: list[zmq.Frame]) -> str:
    try:
        return str(frames[-1].get("Peer-Address"))
    except (IndexError, zmq.ZMQError):
        return ""
