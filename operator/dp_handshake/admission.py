"""Who may open a connection to the relay's port, and when. Pure.

Only an address that checked in is let in: a peer that merely connects under a rank's identity before the rank itself
would mute that rank for good, because a ROUTER without handover ignores the second peer of an identity.

For the same reason a newcomer waits while its address still holds as many connections as it has ranks. One of them is
then a stale half of a connection that the peer has already given up (a lost NAT entry, a partition); heartbeats end it
within seconds, and only then is the newcomer's identity free. Without the wait the newcomer's READY is swallowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

# Longer than heartbeat interval + timeout, shorter than libzmq's handshake limit of 30 s, after which a peer tries anew.
MAX_HOLD_S = 20.0

Verdict = Literal["admit", "refuse", "hold"]


class Held(Struct, frozen=True):
    """A connection whose admission waits; ticket is the caller's."""

    ticket: int
    address: str
    since: float


class Gate(Struct, kw_only=True):
    """Open connections and those that wait. `capacity` is the number of ranks by address."""

    capacity: Mapping[str, int]
    open: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)


def accepted(gate: Gate, connection: int, address: str) -> None:
    """Note a TCP connection, by its descriptor; a reused descriptor ends the earlier one."""
    closed(gate, connection)
    gate.open[connection] = address
    gate.counts[address] = gate.counts.get(address, 0) + 1


def closed(gate: Gate, connection: int) -> None:
    """Note the end of a TCP connection; unknown ones are ignored."""
    address = gate.open.pop(connection, None)
    if address is None:
        return
    gate.counts[address] -= 1
    if not gate.counts[address]:
        del gate.counts[address]


def request(gate: Gate, *, ticket: int, address: str, now: float) -> Verdict:
    """Decide about a peer that asks to be let in; a held one is decided by a later call of `due`."""
    if address not in gate.capacity:
        return "refuse"
    if gate.counts.get(address, 0) > gate.capacity[address]:
        gate.held.append(Held(ticket, address, now))
        return "hold"
    return "admit"


def due(gate: Gate, *, now: float) -> list[int]:
    """Give the tickets of held peers whose turn has come, and forget them."""
    if not gate.held:
        return []
    ready = [
        held
        for held in gate.held
        if gate.counts.get(held.address, 0) <= gate.capacity[held.address] or now - held.since >= MAX_HOLD_S
    ]
    gate.held = [held for held in gate.held if held not in ready]
    return [held.ticket for held in ready]
