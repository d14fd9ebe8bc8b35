"""Faults on demand: `--fault KIND[:key=value,...]`, so that tests can fail a rank at one exact point.

`ranks=5-7;9` chooses ranks (default all; `;` or `+` separates ranges since `,` separates keys), `seconds=` a
duration, `n=` which request, `code=` the exit status, `mib=` an amount of memory. DP_ENGINE_FAULT holds the same,
faults separated by spaces.

What strikes a serving rank (`RUNTIME`) can also be armed later: `on=signal` waits for SIGUSR1, and with
--enable-fault-endpoint `POST /fault` sends one. Both are off unless asked for.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import NoReturn

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
    "crash": "the same; `seconds` count from READY or from when it was injected",
    "fatal": "raise inside the engine: the front ends hear ENGINE_CORE_DEAD",
    "hang": "stop doing anything; the process stays up",
    "stop-reading": "take no more requests; those that run go on",
    "drop-coordinator": "close the connections to the coordinator",
    "grow-memory": "hold `mib` more MiB every second",
    "garbage-output": "send bytes that are no message to every front end",
    "crash-on-request": "exit when the n-th request arrives",
    "fatal-on-request": "raise inside the engine on the n-th request: the front end hears ENGINE_CORE_DEAD",
    "hang-on-request": "stop answering from the n-th request on; the process stays up",
    "duplicate-rank": "send HELLO twice",
    "wrong-hash": "send READY with a configuration hash of its own",
    "garbage-frame": "send bytes that are no message before HELLO",
}

TIMED = frozenset(
    {"crash-after-ready", "crash", "fatal", "hang", "stop-reading", "drop-coordinator", "grow-memory", "garbage-output"}
)
ON_REQUEST = frozenset({"crash-on-request", "fatal-on-request", "hang-on-request"})
RUNTIME = TIMED | ON_REQUEST


class Fault(Struct, frozen=True, kw_only=True):
    """One fault of a launch. `ranks` None means every rank."""

    kind: str
    ranks: frozenset[int] | None = None
    seconds: float = 0.0
    n: int = 1
    code: int = 1
    mib: int = 64
    on_signal: bool = False

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
    seconds, n, code, mib, on_signal = 0.0, 1, 1, 64, False
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
                case "mib":
                    mib = int(value)
                case "on" if value == "signal" and kind in RUNTIME:
                    on_signal = True
                case _:
                    separator = ""
        except ValueError:
            separator = ""
        if not separator:
            raise ValueError(f"fault {kind}: cannot use {item!r}; keys are ranks=, seconds=, n=, code=, mib=, on=")
    return Fault(kind=kind, ranks=ranks, seconds=seconds, n=n, code=code, mib=mib, on_signal=on_signal)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Faults of the command line and of the environment, in that order."""
    from_env = os.environ.get(FAULT_ENV, "").split()
    return tuple(parse_fault(text) for text in [*texts, *from_env])


def find(faults: Iterable[Fault], kind: str, rank: int) -> Fault | None:
    return next((fault for fault in faults if fault.kind == kind and fault.hits(rank)), None)


class Armed:
    """Faults that one serving rank has yet to suffer: pure, times are the caller's monotonic seconds."""

    def __init__(self, faults: Iterable[Fault], *, rank: int, now: float) -> None:
        self._rank = rank
        mine = [fault for fault in faults if fault.kind in RUNTIME and fault.hits(rank)]
        self._on_signal = [fault for fault in mine if fault.on_signal]
        self._timed: list[tuple[float, Fault]] = []
        self._on_request: list[tuple[int, Fault]] = []  # how many more requests until it strikes
        for fault in mine:
            if not fault.on_signal:
                self.add(fault, now=now)

    @property
    def waits_for_signal(self) -> bool:
        return bool(self._on_signal)

    @property
    def next_s(self) -> float | None:
        """When the next fault is due."""
        return min((at for at, _ in self._timed), default=None)

    def add(self, fault: Fault, *, now: float) -> None:
        """Arm one more, unless it is for other ranks."""
        if not fault.hits(self._rank):
            return
        if fault.kind in ON_REQUEST:
            self._on_request.append((fault.n, fault))
        else:
            self._timed.append((now + fault.seconds, fault))

    def signalled(self, now: float) -> None:
        """SIGUSR1 came: what waited for it counts its seconds or requests from now."""
        for fault in self._on_signal:
            self.add(fault, now=now)
        self._on_signal = []

    def request_arrived(self) -> list[Fault]:
        """Faults that strike with this request: the n-th since they were armed."""
        counted = [(left - 1, fault) for left, fault in self._on_request]
        self._on_request = [(left, fault) for left, fault in counted if left > 0]
        return [fault for left, fault in counted if left <= 0]

    def due(self, now: float) -> list[Fault]:
        """Faults that strike now; memory grows again a second later."""
        struck_now = [fault for at, fault in self._timed if at <= now]
        self._timed = [(at, fault) for at, fault in self._timed if at > now]
        self._timed += [(now + 1.0, fault) for fault in struck_now if fault.kind == "grow-memory"]
        return struck_now


def struck(fault: Fault, detail: str = "") -> None:
    """Say in the log that this is the fault that was asked for, so that nobody takes it for a bug."""
    logs.warning(f"FAULT {fault.kind} strikes{': ' + detail if detail else ''}")


def sleep_if(faults: Iterable[Fault], kind: str, rank: int) -> None:
    if fault := find(faults, kind, rank):
        struck(fault, f"{fault.seconds:g} s")
        time.sleep(fault.seconds)


def sleep_for_ever() -> NoReturn:
    """Hang: the process stays up and does nothing."""
    while True:
        time.sleep(3600)


def crash_if(faults: Iterable[Fault], kind: str, rank: int) -> None:
    if fault := find(faults, kind, rank):
        crash(fault)


def crash(fault: Fault) -> None:
    """End the process at once, with nothing flushed and nobody told: what a segfault looks like from outside."""
    struck(fault, f"exit code {fault.code}")
    os._exit(fault.code)
