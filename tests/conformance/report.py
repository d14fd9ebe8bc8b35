"""The table of docs/compatibility.md: filled in by the tests, written between its two marks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
RELEASES = ("0.11", "0.17", "0.32", "0.33")
WRITE_ENV = "CONFORMANCE_WRITE"
# Combinations that no run can fill, and why.
EXPLAINED: dict[tuple[str, str, str], str] = {}


def replace_region(text: str, name: str, body: str) -> str:
    """The page with everything between `<!-- name -->` and `<!-- /name -->` exchanged. Raises ValueError without them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no region {name!r}")
    return pattern.sub(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", text)


class Table:
    """Cells by (role, release, kind of model): what the tests saw."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str, str], str] = {}

    @contextmanager
    def cell(self, role: str, release: str, *, moe: bool | None) -> Iterator[None]:
        """Record whether the body ended well. `moe` None: the kind of model makes no difference."""
        minor = ".".join(release.split(".")[:2])
        kinds = ("dense", "MoE") if moe is None else ("MoE" if moe else "dense",)
        for kind in kinds:
            self._cells[role, minor, kind] = "fails"
        yield
        for kind in kinds:
            self._cells[role, minor, kind] = "yes"

    def markdown(self) -> str:
        """One row a role; a hole shows as a dash with the number of its explanation."""
        roles = list(dict.fromkeys(role for role, _, _ in self._cells))
        columns = [(release, kind) for release in RELEASES for kind in ("dense", "MoE")]
        lines = [
            "| role | " + " | ".join(f"{release} {kind}" for release, kind in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for role in roles:
            cells = [self._cells.get((role, *column)) or EXPLAINED.get((role, *column), "–") for column in columns]
            lines.append(f"| {role} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def save(self) -> None:
        """Write the page when the whole suite has run (`make conformance` says so)."""
        if os.environ.get(WRITE_ENV) and self._cells:
            PAGE.write_text(replace_region(PAGE.read_text(), "table", self.markdown()))
