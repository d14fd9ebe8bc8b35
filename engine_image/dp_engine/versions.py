"""What differs between vLLM releases, as one table of knobs.

Only the newest families are here; the table grows downwards. Sources: protocol notes §0 and §3 in own words.
"""

from __future__ import annotations

import os

from msgspec import Struct

NEWEST = "0.33.0"
VERSION_ENV = "DP_ENGINE_VERSION"


class Wire(Struct, frozen=True, kw_only=True):
    """How one family of releases speaks. `since` is the first (major, minor) of the family."""

    since: tuple[int, int]
    front_end_starts_waves: bool  # the front end tells the coordinator of a first request while paused
    idle_engine_starts_waves: bool  # any idle engine announces the wave of its first request itself
    rank0_reports_edge: bool = True  # rank 0 announces its own paused -> running edge
    sync_interval_steps: int = 16  # steps between two "is anyone unfinished?" reductions; step 1 syncs too


FAMILIES: tuple[Wire, ...] = (
    Wire(since=(0, 33), front_end_starts_waves=False, idle_engine_starts_waves=True),
    Wire(since=(0, 32), front_end_starts_waves=True, idle_engine_starts_waves=False),
)


def emulated_version(requested: str | None) -> str:
    """Version to show and speak: the flag, else DP_ENGINE_VERSION, else the newest known."""
    return requested or os.environ.get(VERSION_ENV) or NEWEST


def wire_of(version: str) -> Wire:
    """Wire of a version such as 0.33 or 0.33.0. Raises ValueError for one that is not implemented."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise ValueError(f"not a version: {version!r}") from None
    for family in FAMILIES:
        if (major, minor) >= family.since:
            return family
    oldest = ".".join(map(str, FAMILIES[-1].since))
    raise ValueError(f"--emulate-version {version}: the oldest wire that is implemented is {oldest}")
