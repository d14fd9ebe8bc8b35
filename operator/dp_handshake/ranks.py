"""Sets of ranks as bounded, readable range strings: {0,1,2,3,7} <-> "0-3,7"."""

from __future__ import annotations

import functools
from collections.abc import Iterable


def format_ranks(ranks: Iterable[int], *, max_chars: int = 1024) -> str:
    """Render a set of ranks as ascending ranges; past max_chars the rest is given as a count ("…+12")."""
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    text = ",".join(parts)
    if len(text) <= max_chars:
        return text
    kept: list[str] = []
    shown = 0
    length = 0
    for (a, b), part in zip(runs, parts, strict=True):
        if length + len(part) + 1 > max_chars - 8:
            break
        kept.append(part)
        length += len(part) + 1
        shown += b - a + 1
    return ",".join(kept) + f",…+{len(ordered) - shown}"


@functools.lru_cache(maxsize=64)
def parse_ranks(text: str) -> frozenset[int]:
    """Inverse of format_ranks for strings that were not cut. Raises ValueError on anything else."""
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


@functools.lru_cache(maxsize=4096)
def count_ranks(text: str) -> int:
    """Number of ranks in a range string, also in one that format_ranks had to cut."""
    listed, _, cut = text.partition("…+")
    return len(parse_ranks(listed.rstrip(","))) + int(cut or 0)
