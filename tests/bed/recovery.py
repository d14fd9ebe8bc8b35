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
    waited_s: float = 0.0  # on purpose: the back-off, or until a silent node is believed lost

    @property
    def ratio(self) -> float:
        """Recovery without what was waited on purpose, in cold starts."""
        return (self.ready_after_s - self.waited_s) / self.cold_start_s


class Table:
    """Rows in the order of the tests."""

    def __init__(self) -> None:
        self.rows: list[Recovery] = []

    def add(self, row: Recovery) -> None:
        self.rows.append(row)

    def markdown(self) -> str:
        lines = [
            "| fault | named as | after | Ready after | of which waiting on purpose | own cold start | rest : cold start |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            named = f"`{row.named}`" if row.named else "–"
            after = "–" if row.named_after_s is None else f"{row.named_after_s:.1f} s"
            waited = f"{row.waited_s:.1f} s" if row.waited_s else "–"
            lines.append(
                f"| {row.fault} | {named} | {after} | {row.ready_after_s:.1f} s | {waited} "
                f"| {row.cold_start_s:.1f} s | {row.ratio:.2f} |"
            )
        return "\n".join(lines)

    def save(self) -> None:
        if self.rows:
            show("faults", self.markdown())
