"""How long a fault takes to be named and to be over: the table of docs/lifecycle.md, filled in by the tests."""

from __future__ import annotations

from typing import NamedTuple

from tests.e2e.page import show


class ColdStart(NamedTuple):
    """Of a group, in the same run as its recovery, from its creation."""

    released_s: float  # all its pods have checked in
    ready_s: float


class Recovery(NamedTuple):
    """What one fault did to one group."""

    fault: str
    named: str  # the failure's reason; empty where nothing is a failure
    named_after_s: float | None
    begun_after_s: float  # the next incarnation: the one before has ended, and the back-off is over
    released_after_s: float
    ready_after_s: float
    cold: ColdStart
    waited_s: float = 0.0  # the back-off, and the time in which nobody could know of the fault or do anything

    @property
    def ratio(self) -> float:
        """Recovery without what had to be waited for, in cold starts."""
        return (self.ready_after_s - self.waited_s) / self.cold.ready_s


class Table:
    """Rows in the order of the tests."""

    def __init__(self) -> None:
        self.rows: list[Recovery] = []

    def add(self, row: Recovery) -> None:
        self.rows.append(row)

    def markdown(self) -> str:
        lines = [
            "| fault | named as | after | next begins | released | Ready | of which waiting | cold: released | Ready | rest : cold start |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            named = f"`{row.named}`" if row.named else "–"
            moments = (row.begun_after_s, row.released_after_s, row.ready_after_s, row.waited_s or None, *row.cold)
            cells = [row.fault, named, *map(_seconds, (row.named_after_s, *moments)), f"{row.ratio:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def save(self) -> None:
        if self.rows:
            show("faults", self.markdown())


def _seconds(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f} s"
