"""Which engine gets the next request: vLLM's scores of three generations (protocol notes §5). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dp_engine.versions import NEWEST_WIRE, Wire


class Balancer:
    """Counts of one front end's engines: what the coordinator said last plus what was sent since.

    `clients` front ends share the engines; `client` is the index of this one. `wire` says how a release scores.
    """

    def __init__(self, *, engines: int, client: int, clients: int, wire: Wire = NEWEST_WIRE) -> None:
        self._wire = wire
        self._clients = clients
        self._counts: list[tuple[int, int, float]] = [(0, 0, 0.0)] * engines
        self._in_flight = [0] * engines
        self._start = engines * client // clients

    @property
    def in_flight(self) -> Sequence[int]:
        return tuple(self._in_flight)

    def counts_received(self, counts: Iterable[Sequence[Any]]) -> None:
        """Replace the table by `[waiting, running(, kv usage)]` per engine."""
        table = [(int(item[0]), int(item[1]), float(item[2]) if len(item) > 2 else 0.0) for item in counts]
        if len(table) == len(self._counts):
            self._counts = table

    def score(self, engine: int) -> float:
        """Smaller is better. Own requests are a floor: counts from the coordinator may be 100 ms old."""
        waiting, running, kv_usage = self._counts[engine]
        if not self._wire.balance_by_in_flight:
            return 4 * waiting + running
        pressure = 6 * waiting * max(0.0, kv_usage - 0.5) if waiting else 0.0
        return max(self._clients * self._in_flight[engine], waiting + running) + pressure

    def pick(self) -> int:
        """Choose an engine and count the request as sent there."""
        engines = len(self._counts)
        order = [(self._start + offset) % engines for offset in range(engines)]
        chosen = min(order, key=self.score)  # min keeps the first of equals, which is vLLM's tie rule
        if self._wire.rotating_start:
            self._start = (self._start + 1) % engines
        waiting, running, kv_usage = self._counts[chosen]
        self._counts[chosen] = (waiting + self._clients, running, kv_usage)
        self.sent(chosen)
        return chosen

    def sent(self, engine: int) -> None:
        """Count a request that goes to `engine`, chosen here or by the client's header."""
        self._in_flight[engine] += 1

    def finished(self, engine: int) -> None:
        self._in_flight[engine] = max(0, self._in_flight[engine] - 1)
