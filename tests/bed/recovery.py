"""How long a fault takes to be named and to be over: the table of docs/lifecycle.md, filled in by the tests."""

from __future__ import annotations

from typing import NamedTuple

from tests.e2e.page import show


class Recovery(NamedTuple):
    """What one fault did to one group."""

    fault: str
    named: str  # the failure's reason; empty where nothing is a failure
    named_after_s: float | None
    begun_after_s: float | None  # the next incarnation: the one before has ended, and the back-off is over
    ready_after_s: float
    cold_start_s: float  # of the same group in the same run
    waited_s: float = 0.0  # the back-off, and the time in which nobody could know of the fault or do anything

    @property
    def ratio(self) -> float:
        """Recovery without what had to be waited for, in cold starts."""
        return (self.ready_after_s - self.waited_s) / self.cold_start_s


class Table:
    """Rows in the order of the tests."""

    def __init__(self) -> None:
        self.rows: list[Recovery] = []

    def add(self, row: Recovery) -> None:
        self.rows.append(row)

    def markdown(self) -> str:
        lines = [
            "| fault | named as | after | next begins after | Ready after | of which waiting | own cold start | rest : cold start |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            named = f"`{row.named}`" if row.named else "–"
            lines.append(
                f"| {row.fault} | {named} | {_seconds(row.named_after_s)} | {_seconds(row.begun_after_s)} "
                f"| {_seconds(row.ready_after_s)} | {_seconds(row.waited_s or None)} "
                f"| {_seconds(row.cold_start_s)} | {row.ratio:.2f} |"
            )
        return "\n".join(lines)

    def save(self) -> None:
        if self.rows:
            show("faults", self.markdown())


def _seconds(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f} s"
