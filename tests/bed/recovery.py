"""How long a fault takes to be named and to be over: the table of docs/lifecycle.md, filled in by the tests."""

from __future__ import annotations

from typing import NamedTuple

from tests.e2e.page import show


class Recovery(NamedTuple):
    """What one fault did to one group."""

    fault: str
    named: str  # the failure's reason; empty where nothing is a failure
    named_after_s: float | None
    ready_after_s: float
    cold_start_s: float  # of the same group in the same run
    back_off_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Recovery without the back-off, in cold starts."""
        return (self.ready_after_s - self.back_off_s) / self.cold_start_s


class Table:
    """Rows in the order of the tests."""

    def __init__(self) -> None:
        self.rows: list[Recovery] = []

    def add(self, row: Recovery) -> None:
        self.rows.append(row)

    def markdown(self) -> str:
        lines = [
            "| fault | named as | after | Ready after | own cold start | back-off | (Ready − back-off) : cold start |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            named = f"`{row.named}`" if row.named else "–"
            after = "–" if row.named_after_s is None else f"{row.named_after_s:.1f} s"
            back_off = f"{row.back_off_s:g} s" if row.back_off_s else "–"
            lines.append(
                f"| {row.fault} | {named} | {after} | {row.ready_after_s:.1f} s | {row.cold_start_s:.1f} s "
                f"| {back_off} | {row.ratio:.2f} |"
            )
        return "\n".join(lines)

    def save(self) -> None:
        if self.rows:
            show("faults", self.markdown())
