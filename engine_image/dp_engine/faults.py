"""Faults on demand: `--fault KIND[:key=value,...]`, so that tests can fail a rank at one exact point.

`ranks=5-7;9` chooses ranks (default all; `;` or `+` separates ranges since `,` separates keys), `seconds=` a
duration, `n=` which request, `code=` the exit status. DP_ENGINE_FAULT holds the same, faults separated by spaces.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable

from msgspec import Struct

from dp_engine import logs

FAULT_ENV = "DP_ENGINE_FAULT"

KINDS: dict[str, str] = {
    "slow-import": "sleep `seconds` before HELLO",
    "slow-load": "sleep `seconds` between HELLO and READY",
    "late-bind": "the head binds its ROUTER `seconds` late",
    "hang-before-ready": "load, open the data sockets, never send READY",
    "crash-before-hello": "exit before HELLO",
    "crash-after-hello": "exit once INIT has come",
    "crash-after-ready": "exit `seconds` after READY",
    "crash-on-request": "exit when the n-th request arrives",
    "fatal-on-request": "raise inside the engine on the n-th request: the front end hears ENGINE_CORE_DEAD",
    "hang-on-request": "stop answering from the n-th request on; the process stays up",
    "duplicate-rank": "send HELLO twice",
    "wrong-hash": "send READY with a configuration hash of its own",
    "garbage-frame": "send bytes that are no message before HELLO",
}


class Fault(Struct, frozen=True, kw_only=True):
    """One fault of a launch. `ranks` None means every rank."""

    kind: str
    ranks: frozenset[int] | None = None
    seconds: float = 0.0
    n: int = 1
    code: int = 1

    def hits(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


def _parse_ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in filter(None, re.split(r"[;+]", text)):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def parse_fault(text: str) -> Fault:
    """Parse `KIND[:key=value,...]`. Raises ValueError naming what is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(KINDS)}")
    ranks: frozenset[int] | None = None
    seconds, n, code = 0.0, 1, 1
    for item in filter(None, rest.split(",")):
        key, separator, value = item.partition("=")
        try:
            match key:
                case "ranks":
                    ranks = _parse_ranks(value)
                case "seconds":
                    seconds = float(value)
                case "n":
                    n = int(value)
                case "code":
                    code = int(value)
                case _:
                    separator = ""
        except ValueError:
            separator = ""
        if not separator:
            raise ValueError(f"fault {kind}: cannot use {item!r}; keys are ranks=, seconds=, n=, code=")
    return Fault(kind=kind, ranks=ranks, seconds=seconds, n=n, code=code)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Faults of the command line and of the environment, in that order."""
    from_env = os.environ.get(FAULT_ENV, "").split()
    return tuple(parse_fault(text) for text in [*texts, *from_env])


def find(faults: Iterable[Fault], kind: str, rank: int) -> Fault | None:
    return next((fault for fault in faults if fault.kind == kind and fault.hits(rank)), None)


def struck(fault: Fault, detail: str = "") -> None:
    """Say in the log that this is the fault that was asked for, so that nobody takes it for a bug."""
    logs.warning(f"FAULT {fault.kind} strikes{': ' + detail if detail else ''}")


def sleep_if(faults: Iterable[Fault], kind: str, rank: int) -> None:
    if fault := find(faults, kind, rank):
        struck(fault, f"{fault.seconds:g} s")
        time.sleep(fault.seconds)


def crash_if(faults: Iterable[Fault], kind: str, rank: int) -> None:
    if fault := find(faults, kind, rank):
        crash(fault)


def crash(fault: Fault) -> None:
    """End the process at once, with nothing flushed and nobody told: what a segfault looks like from outside."""
    struck(fault, f"exit code {fault.code}")
    os._exit(fault.code)
