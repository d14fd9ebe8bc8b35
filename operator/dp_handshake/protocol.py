"""The relay's state machine: frames and times in, effects out. No socket, no clock.

The relay stands between the workers' ranks and the ROUTER of vLLM's head. Per rank:

    new --HELLO/forward--> asked --INIT/answer--> connected --READY/forward--> leaving --delivered--> ready

vLLM's head dies of any frame it does not expect (notes §2.5), and with it the group. So a frame goes on only if the
head will accept it; everything else is kept as a violation, with rank, peer and likely cause, and goes nowhere.
Frames that go on go on unchanged.

A restarted relay adopts ranks: a rank that it does not know and that says READY had its HELLO before (notes §9.5).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec
from msgspec import Struct, field

from dp_handshake.addresses import canonical
from dp_handshake.messages import LaunchPlan, RankLost, Violation
from dp_handshake.ranks import format_ranks

MAX_VIOLATIONS = 32
MAX_LOST = 16
# A live DEALER reconnects within 0.1 s (libzmq's default) once it knows that its connection has ended. It knows at once
# what its own side closed; so a connection that the peer closed and that stays away longer is a death.
LOST_AFTER_S = 1.0
LOST_AFTER_RESTART_S = 5.0


class Stage(IntEnum):
    """How far a remote rank has come."""

    NEW = 0
    ASKED = 1  # HELLO forwarded, INIT not yet seen
    CONNECTED = 2  # INIT on its way to the rank
    LEAVING = 3  # READY on its way to the head
    READY = 4  # READY delivered


class Peer(Struct, frozen=True, kw_only=True):
    """A pod that checked in: its address and its ranks."""

    pod: str
    address: str
    first_rank: int
    ranks: int


class Released(Struct, frozen=True, tag=True):
    """Every pod has checked in; from here on it is known who may speak for which rank."""

    peers: list[Peer]


class PeerFrames(Struct, frozen=True, tag=True, kw_only=True):
    """A message at the relay's port. `connection` is its descriptor, None if the connection has already ended."""

    identity: bytes
    frames: list[bytes]
    address: str
    connection: int | None


class PeerGone(Struct, frozen=True, tag=True):
    """A connection at the relay's port ended. A rank that does not come back within back_within_s is lost."""

    connection: int
    back_within_s: float = LOST_AFTER_S


class HeadFrames(Struct, frozen=True, tag=True):
    """The engine's ROUTER answered a rank: INIT."""

    rank: int
    frames: list[bytes]


class Undeliverable(Struct, frozen=True, tag=True):
    """An answer could not be sent: the rank is not connected at the moment."""

    rank: int
    frames: list[bytes]


class Delivered(Struct, frozen=True, tag=True):
    """READY of this rank has been handed to the engine's ROUTER."""

    rank: int


class Tick(Struct, frozen=True, tag=True):
    """Time passes. `open` counts the connections at the relay's port by address."""

    open: dict[str, int]


Event = Released | PeerFrames | PeerGone | HeadFrames | Undeliverable | Delivered | Tick


class Forward(Struct, frozen=True, tag=True):
    """Send to the engine's ROUTER under the rank's identity."""

    rank: int
    frame: bytes
    status: Literal["HELLO", "READY"]


class Answer(Struct, frozen=True, tag=True):
    """Send to the rank."""

    rank: int
    frames: list[bytes]


class Violated(Struct, frozen=True, tag=True):
    """Something was refused; the relay's log wants it."""

    violation: Violation


class Lost(Struct, frozen=True, tag=True):
    """A rank went away between HELLO and READY."""

    lost: RankLost


class Found(Struct, frozen=True, tag=True):
    """A rank thought lost is back."""

    rank: int


Effect = Forward | Answer | Violated | Lost | Found


class Handshake(Struct, kw_only=True):
    """Everything the relay knows about the remote ranks. Ranks below head_ranks are the head's own, never ours."""

    size: int
    head_ranks: int
    headless: bool  # what remote ranks must say: true in Internal groups, false in Hybrid and External ones
    mode: str = "Internal"  # load balancing, for the words
    adopting: bool = False  # an earlier relay process of this incarnation had its port open
    stages: bytearray = field(default_factory=bytearray)
    init: bytes | None = None  # the first INIT that passed
    lost: list[RankLost] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    violation_count: int = 0
    owners: dict[int, Peer] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)  # address -> pod
    head_address: str = ""
    connections: dict[int, int] = field(default_factory=dict)  # descriptor -> rank
    connection_of: dict[int, int] = field(default_factory=dict)  # rank -> descriptor
    suspects: dict[int, float] = field(default_factory=dict)  # rank -> when it is taken for lost
    silent_since: dict[str, float] = field(default_factory=dict)  # address -> since when, after a restart
    undelivered: dict[int, list[bytes]] = field(default_factory=dict)  # rank -> its INIT

    def count(self, stage: Stage) -> int:
        """Count remote ranks that reached at least this stage."""
        return sum(1 for value in self.stages[self.head_ranks :] if value >= stage)

    def reached(self, stage: Stage) -> list[int]:
        """List remote ranks that reached at least this stage."""
        return [rank for rank in range(self.head_ranks, self.size) if self.stages[rank] >= stage]

    @property
    def complete(self) -> bool:
        """Tell whether READY of every remote rank has been delivered."""
        return self.count(Stage.READY) == self.size - self.head_ranks


def handshake(plan: LaunchPlan) -> Handshake:
    """Begin with every rank new."""
    return Handshake(
        size=plan.size,
        head_ranks=plan.head_ranks,
        headless=plan.load_balancing == "Internal",
        mode=plan.load_balancing,
        stages=bytearray(plan.size),
    )


def resume(state: Handshake, stages: bytes, init: bytes | None, *, now: float) -> list[Effect]:
    """Take over from an earlier relay process of the same incarnation, whose sockets are gone.

    Ranks between HELLO and READY must come back by themselves (a DEALER reconnects and does not repeat HELLO). For a
    rank whose HELLO was on its way to the head nobody can know whether the head has heard it: a second HELLO would end
    the head, silence would make the rank wait five minutes. It counts as lost.

    INIT is sent once more to those that were sent it: it may have ended with the earlier process' queues. vLLM's head
    says the same to all ranks (notes §2.2), and an engine reads one INIT and leaves any other unread.
    """
    state.adopting = True
    state.init = init
    state.stages[:] = stages
    effects: list[Effect] = []
    for rank in range(state.head_ranks, state.size):
        if state.stages[rank] == Stage.ASKED:
            text = "the relay restarted while this rank's HELLO was on its way to the head; it will get no answer"
            effects += _lose(state, rank, text, now=now)
        elif state.stages[rank] in (Stage.CONNECTED, Stage.LEAVING):
            state.stages[rank] = Stage.CONNECTED
            state.suspects[rank] = now + LOST_AFTER_RESTART_S
            if init is not None:
                state.undelivered[rank] = [init]
    return effects


def step(state: Handshake, event: Event, *, now: float) -> list[Effect]:
    """Take one event and say what to do. Never raises, whatever the frames hold."""
    if isinstance(event, PeerFrames):
        return _peer_frames(state, event, now=now)
    if isinstance(event, HeadFrames):
        return _head_frames(state, event)
    if isinstance(event, PeerGone):
        rank = state.connections.pop(event.connection, None)
        if rank is not None:
            _disconnect(state, rank, now=now, back_within_s=event.back_within_s)
    elif isinstance(event, Undeliverable):
        if state.stages[event.rank] == Stage.CONNECTED:
            state.undelivered[event.rank] = event.frames
    elif isinstance(event, Delivered):
        state.stages[event.rank] = Stage.READY
        return _find(state, event.rank)
    elif isinstance(event, Released):
        _release(state, event)
    else:
        return _tick(state, event, now=now)
    return []


def _release(state: Handshake, event: Released) -> None:
    state.owners = {rank: peer for peer in event.peers for rank in range(peer.first_rank, peer.first_rank + peer.ranks)}
    state.pods = {}
    for peer in event.peers:
        state.pods.setdefault(peer.address, peer.pod)
    state.head_address = event.peers[0].address


def _peer_frames(state: Handshake, event: PeerFrames, *, now: float) -> list[Effect]:
    address = canonical(event.address) or event.address

    def refuse(kind: str, text: str, rank: int | None = None) -> list[Effect]:
        return [violate(state, kind, text, peer=address, rank=rank, now=now)]

    peer = describe(state, address)
    if len(event.identity) != 2:
        return refuse(
            "WrongIdentity",
            f"{peer} has the identity {_hex(event.identity)}; a rank has its number in two bytes. This is no vLLM rank, "
            "or two peers used one identity at once",
        )
    rank = int.from_bytes(event.identity, "little")
    if rank >= state.size:
        return refuse(
            "UnexpectedRank",
            f"{peer} says it is rank {rank}, but the group has ranks 0-{state.size - 1}: "
            "its start rank or its data-parallel size is wrong",
            rank,
        )
    if rank < state.head_ranks:
        cause = (
            "the head's own engine was pointed at the relay's port"
            if address == state.head_address
            else "its start rank is wrong"
        )
        return refuse("OverlappingRank", f"{peer} says it is rank {rank}, which runs in the head pod: {cause}", rank)
    owner = state.owners.get(rank)
    if owner is None or owner.address != address:
        who = f"belongs to pod {owner.pod} at {owner.address}" if owner else "no pod has checked in for"
        return refuse(
            "ForeignPeer",
            f"{peer} says it is rank {rank}, which {who}: its start rank is wrong, it is left over from an "
            "earlier group, or the network between the pods rewrites addresses",
            rank,
        )
    _attach(state, rank, event.connection, now=now)
    if len(event.frames) != 1:
        return refuse(
            "ExtraFrames",
            f"rank {rank} sent {len(event.frames)} frames at once instead of one: not the handshake of a vLLM engine",
            rank,
        )
    decoded = _decode(event.frames[0])
    if isinstance(decoded, str):
        return refuse(
            "Undecodable",
            f"rank {rank} sent {len(event.frames[0])} bytes that are no HELLO or READY ({decoded}): "
            "an engine of another kind or version",
            rank,
        )
    if decoded.local or decoded.headless != state.headless:
        return refuse("LocalHeadlessMismatch", _mismatch(state, rank, decoded), rank)
    stage = state.stages[rank]
    if decoded.status == "HELLO":
        if stage != Stage.NEW:
            return refuse(
                "SecondHello",
                f"rank {rank} of {peer} says HELLO again: its engine restarted, and a rank cannot rejoin; "
                "the whole group has to be replaced",
                rank,
            )
        state.stages[rank] = Stage.ASKED
        return [*_find(state, rank), Forward(rank, event.frames[0], "HELLO")]
    if stage == Stage.CONNECTED or (state.adopting and stage == Stage.NEW):
        state.stages[rank] = Stage.LEAVING
        state.undelivered.pop(rank, None)
        return [*_find(state, rank), Forward(rank, event.frames[0], "READY")]
    when = "again" if stage >= Stage.LEAVING else "before its HELLO was answered"
    return refuse(
        "UnexpectedReady", f"rank {rank} says READY {when}: two engines share the rank, or it is no vLLM engine", rank
    )


def _head_frames(state: Handshake, event: HeadFrames) -> list[Effect]:
    if state.stages[event.rank] == Stage.ASKED:
        state.stages[event.rank] = Stage.CONNECTED
        if state.init is None and event.frames:
            state.init = event.frames[0]
    return [Answer(event.rank, event.frames)]


def _tick(state: Handshake, event: Tick, *, now: float) -> list[Effect]:
    effects: list[Effect] = [Answer(rank, frames) for rank, frames in state.undelivered.items()]
    state.undelivered = {}
    effects += _unheard(state, event.open, now=now)
    due = [rank for rank, at in state.suspects.items() if now >= at]
    if not due and not state.lost:
        return effects
    missing = _missing(state, event.open)
    unnamed = dict(missing)
    for rank in due:
        del state.suspects[rank]
        address = state.owners[rank].address if rank in state.owners else ""
        if unnamed.get(address, 0) > 0:
            unnamed[address] -= 1
            text = f"the connection of rank {rank} ended between HELLO and READY and did not come back"
            effects += _lose(state, rank, text, now=now)
    for entry in state.lost:
        owner = state.owners.get(entry.rank)
        # A rank that waits for an answer stays lost even when it is connected: its INIT went to an earlier process.
        if owner and state.stages[entry.rank] == Stage.CONNECTED and missing[owner.address] == 0:
            effects += _find(state, entry.rank)
    return effects


def _unheard(state: Handshake, open_: dict[str, int], *, now: float) -> list[Effect]:
    """Find ranks whose HELLO an earlier relay process had received and not read when it was killed.

    Such a rank is connected, will not say HELLO again, and would wait for its INIT until it gives up. A rank says HELLO
    with its connection, so one that is connected for a while and silent is one of them.
    """
    if not state.adopting:
        return []
    unheard: dict[str, list[int]] = {}
    known: dict[str, int] = {}
    for rank, owner in state.owners.items():
        if rank >= state.head_ranks and state.stages[rank] == Stage.NEW:
            unheard.setdefault(owner.address, []).append(rank)
        elif rank >= state.head_ranks and state.stages[rank] < Stage.LEAVING:
            known[owner.address] = known.get(owner.address, 0) + 1
    effects: list[Effect] = []
    silent: dict[str, float] = {}
    for address, ranks in unheard.items():
        excess = open_.get(address, 0) - known.get(address, 0)
        if excess <= 0:
            continue
        silent[address] = state.silent_since.get(address, now)
        if now - silent[address] >= LOST_AFTER_RESTART_S:
            for rank in ranks[:excess]:
                text = f"rank {rank} is connected and silent: the relay restarted when it had received its HELLO"
                effects += _lose(state, rank, text, now=now)
    state.silent_since = silent
    return effects


def _missing(state: Handshake, open_: dict[str, int]) -> dict[str, int]:
    """Count, by address, ranks between HELLO and READY that have no connection."""
    missing: dict[str, int] = {}
    for rank, peer in state.owners.items():
        if rank >= state.head_ranks and state.stages[rank] in (Stage.ASKED, Stage.CONNECTED):
            missing[peer.address] = missing.get(peer.address, 0) + 1
    return {address: max(0, count - open_.get(address, 0)) for address, count in missing.items()}


def _attach(state: Handshake, rank: int, connection: int | None, *, now: float) -> None:
    if connection is None:
        _disconnect(state, rank, now=now)
        return
    previous = state.connections.get(connection)
    if previous is not None and previous != rank:
        _disconnect(state, previous, now=now)
    old = state.connection_of.get(rank)
    if old is not None and old != connection:
        state.connections.pop(old, None)
    state.connections[connection] = rank
    state.connection_of[rank] = connection


def between(state: Handshake, connection: int) -> bool:
    """Tell whether a connection is that of a rank between HELLO and READY, whose end may be a death."""
    rank = state.connections.get(connection)
    return rank is not None and state.stages[rank] in (Stage.ASKED, Stage.CONNECTED)


def _disconnect(state: Handshake, rank: int, *, now: float, back_within_s: float = LOST_AFTER_S) -> None:
    connection = state.connection_of.pop(rank, None)
    if connection is not None and state.connections.get(connection) == rank:
        # Its end, which the socket monitor may still tell, must not count again for a later connection of the rank.
        del state.connections[connection]
    if state.stages[rank] in (Stage.ASKED, Stage.CONNECTED):
        state.suspects[rank] = now + back_within_s


def _lose(state: Handshake, rank: int, text: str, *, now: float) -> list[Effect]:
    if any(entry.rank == rank for entry in state.lost):
        return []
    pod = state.owners[rank].pod if rank in state.owners else ""
    entry = RankLost(time=now, rank=rank, pod=pod, message=text)
    state.lost = [*state.lost, entry][-MAX_LOST:]
    return [Lost(entry)]


def _find(state: Handshake, rank: int) -> list[Effect]:
    state.suspects.pop(rank, None)
    kept = [entry for entry in state.lost if entry.rank != rank]
    if len(kept) == len(state.lost):
        return []
    state.lost = kept
    return [Found(rank)]


def violate(state: Handshake, kind: str, text: str, *, peer: str, rank: int | None, now: float) -> Violated:
    """Keep a violation; the same again from the same peer is counted, not listed a second time.

    Its time stays that of the first: whoever waits for more signs before acting must not wait for ever on a repeater.
    """
    state.violation_count += 1
    same = [entry for entry in state.violations if (entry.kind, entry.peer, entry.rank) == (kind, peer, rank)]
    entry = Violation(
        time=min((old.time for old in same), default=now),
        kind=kind,
        message=text,
        peer=peer,
        pod=state.pods.get(peer, ""),
        rank=rank,
        count=sum(old.count for old in same) + 1,
    )
    state.violations = [*(old for old in state.violations if old not in same), entry][-MAX_VIOLATIONS:]
    return Violated(entry)


def describe(state: Handshake, address: str) -> str:
    """Name a peer for a person."""
    pod = state.pods.get(address)
    return f"pod {pod} ({address})" if pod else f"a peer at {address}, which is no pod of this group,"


class _Decoded(Struct, frozen=True):
    status: str
    local: bool
    headless: bool


def _decode(frame: bytes) -> _Decoded | str:
    """Read what vLLM's head reads: a map with status, local and headless; more keys are fine (notes §2.2)."""
    try:
        # Untyped, as the head does it: what it cannot decode must not reach it, even in keys that we do not read.
        message = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        return f"not msgpack: {error}"
    if not isinstance(message, dict):
        return f"not a map but {type(message).__name__}"
    status, local, headless = (message.get(key) for key in ("status", "local", "headless"))
    if not isinstance(local, bool) or not isinstance(headless, bool):
        return "local or headless is missing"
    if status not in ("HELLO", "READY"):
        return f"status is {str(status)[:40]!r}"
    return _Decoded(str(status), local, headless)


def _mismatch(state: Handshake, rank: int, decoded: _Decoded) -> str:
    said = f"rank {rank} says local={str(decoded.local).lower()}, headless={str(decoded.headless).lower()}; "
    if decoded.local:
        cause = "it believes that it runs beside the head: its local size or start rank is wrong"
    elif state.headless:
        cause = "but the group is Internal, whose workers run with --headless"
    else:
        cause = f"but the group is {state.mode}, whose pods all serve: nothing may give them --headless"
    return f"{said}{cause}. Is this pod's command overridden?"


def _hex(identity: bytes) -> str:
    return f"{identity[:16].hex()}{'…' if len(identity) > 16 else ''} ({len(identity)} bytes)"


def summary(state: Handshake) -> str:
    """One line for people: which remote ranks stand where."""
    names = {
        Stage.NEW: "new",
        Stage.ASKED: "asked",
        Stage.CONNECTED: "connected",
        Stage.LEAVING: "leaving",
        Stage.READY: "ready",
    }
    remote = range(state.head_ranks, state.size)
    groups = {stage: [rank for rank in remote if state.stages[rank] == stage] for stage in Stage}
    return " ".join(f"{names[stage]}={format_ranks(ranks)}" for stage, ranks in groups.items() if ranks)
