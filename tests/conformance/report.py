"""The table of docs/compatibility.md: filled in by the tests, written between its two marks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
RELEASES = ("0.11", "0.17", "0.32", "0.33")
WRITE_ENV = "CONFORMANCE_WRITE"
WHOLE = "0.32"
# What the table's numbers mean; docs/compatibility.md shows them below it.
NOTES = {
    1: "Whole vLLM runs in 0.32 only: of the other releases just the Python files are installed, since each whole release "
    "would bring its own torch of several GB.",
    2: "Ranks of a whole MoE model meet in torch's process group, ours in a small one of their own, so a group is either "
    "all vLLM or all stand-in. What they say to the head is covered by the rows without whole models.",
    3: "Dense ranks that somebody else balances: from 0.14 on nobody starts their coordinator, and every front end, "
    "vLLM's and ours, ends for want of its address; from 0.21 on a dense model with `--data-parallel-rank` is refused "
    "before that.",
}


def note(role: str, release: str, kind: str, seen: str | None) -> int | None:
    """Number of the note that explains this cell; None when there is none."""
    if seen == "neither":
        return 3
    if seen is None and "whole" in role:
        return 1 if release != WHOLE else 2 if kind == "MoE" else None
    return None


def replace_region(text: str, name: str, body: str) -> str:
    """The page with everything between `<!-- name -->` and `<!-- /name -->` exchanged. Raises ValueError without them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no region {name!r}")
    return pattern.sub(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", text)


def read_cells(page: str) -> dict[tuple[str, str, str], str]:
    """What an earlier run wrote between the marks: cells without their notes, dashes left out."""
    region = page.partition("<!-- table -->")[2].partition("<!-- /table -->")[0]
    rows = [line.strip("| \n").split(" | ") for line in region.splitlines() if line.startswith("| ")]
    if not rows:
        return {}
    columns = [tuple(title.split()) for title in rows[0][1:]]
    cells = {}
    for role, *shown in rows[1:]:
        for (release, kind), text in zip(columns, shown, strict=True):
            word = re.sub(r" \(\d+\)$", "", text)
            if word != "–":
                cells[role, release, kind] = word
    return cells


class Table:
    """Cells by (role, release, kind of model): what the tests saw."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str, str], str] = {}

    @contextmanager
    def cell(self, role: str, release: str, *, moe: bool | None, seen: str = "yes") -> Iterator[None]:
        """Record `seen` if the body ends well. `moe` None: the kind of model makes no difference."""
        minor = ".".join(release.split(".")[:2])
        kinds = ("dense", "MoE") if moe is None else ("MoE" if moe else "dense",)
        for kind in kinds:
            self._cells[role, minor, kind] = "fails"
        yield
        for kind in kinds:
            self._cells[role, minor, kind] = seen

    def cells(self) -> list[tuple[str, str, str, str]]:
        """All that was seen: (role, release, kind, word)."""
        return [(*place, seen) for place, seen in self._cells.items()]

    def add(self, cells: Iterable[Sequence[str]]) -> None:
        """Take in what another process saw."""
        self._cells |= {(role, release, kind): seen for role, release, kind, seen in cells}

    def markdown(self, *, whole: bool = True) -> str:
        """One row a role, and the notes. Raises ValueError for a hole that no note explains, after a whole run."""
        roles = list(dict.fromkeys(role for role, _, _ in self._cells))
        columns = [(release, kind) for release in RELEASES for kind in ("dense", "MoE")]
        lines = [
            "| role | " + " | ".join(f"{release} {kind}" for release, kind in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        lines += [
            f"| {role} | " + " | ".join(self._show(role, *column, whole=whole) for column in columns) + " |"
            for role in roles
        ]
        used = {number for number in NOTES if any(f"({number})" in line for line in lines)}
        return "\n".join([*lines, "", *(f"{number}. {NOTES[number]}" for number in sorted(used))])

    def _show(self, role: str, release: str, kind: str, *, whole: bool) -> str:
        seen = self._cells.get((role, release, kind))
        number = note(role, release, kind, seen)
        if seen is None and number is None and whole:
            raise ValueError(f"{role}, {release} {kind}: no run filled this cell, and no note says why")
        return (seen or "–") + (f" ({number})" if number else "")

    def save(self, shortfalls: Sequence[str] = ()) -> str | None:
        """Write the page: all of it after the whole suite (`make conformance` says 1), `part` keeps cells that were not run.

        Returns why a whole page was not written: tests that did not run or pass (`shortfalls`). Raises ValueError when
        all did and the page would still lose a row or get a hole.
        """
        asked = os.environ.get(WRITE_ENV)
        if not asked or not self._cells:
            return None
        page = PAGE.read_text()
        # Rows stay where they were, whichever test ended first.
        places = {role: number for number, role in enumerate(dict.fromkeys(role for role, _, _ in read_cells(page)))}
        self._cells = dict(sorted(self._cells.items(), key=lambda cell: places.get(cell[0][0], len(places))))
        if asked == "part":
            self._cells = {**read_cells(page), **self._cells}
        elif shortfalls:
            return "; ".join(shortfalls)
        elif lost := set(places) - {role for role, _, _ in self._cells}:
            raise ValueError(f"no test filled a row of the page; if that is meant, delete it there: {sorted(lost)}")
        PAGE.write_text(replace_region(page, "table", self.markdown(whole=asked != "part")))
        return None
