"""What survives a restart of the relay: two files on the pod's emptyDir.

`ranks.log` is written ahead: one line per step of a rank that must not happen twice, and one for the INIT that the ranks
are sent. `state.json` holds everything else; it is replaced as a whole, and what is told to the operator has been written
before.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from dp_handshake.messages import CheckIn, Local, PodRestarted, RankLost, Violation
from dp_handshake.protocol import Stage

log = logging.getLogger(__name__)


class Saved(Struct, kw_only=True, omit_defaults=True):
    """Content of state.json."""

    incarnation: str
    check_ins: list[CheckIn] = []
    released_at: float | None = None
    restarted: list[PodRestarted] = []
    listening_at: float | None = None
    ready_at: float | None = None
    api_ready: bool = False
    local: Local = Local()
    loaded_pods: list[str] = []
    lost: list[RankLost] = []
    violations: list[Violation] = []
    violation_count: int = 0


class Journal:
    """Append-only lines, `rank stage` and `init hex`. Without a directory to write to it goes on, and says so once."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            log.warning("cannot write %s; a restart of the relay will forget its ranks: %s", path, error)

    def write(self, steps: list[tuple[int, Stage]]) -> None:
        self._append("".join(f"{rank} {stage.value}\n" for rank, stage in steps))

    def write_init(self, frame: bytes) -> None:
        self._append(f"init {frame.hex()}\n")

    def _append(self, text: str) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, text.encode())
        except OSError as error:
            log.warning("cannot write ranks.log; a restart of the relay will forget its ranks: %s", error)

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def read_journal(path: Path, *, size: int) -> tuple[bytes, bytes | None]:
    """Give the furthest stage of every rank, and INIT; damaged lines, such as a cut last one, are left out."""
    stages = bytearray(size)
    init = None
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return bytes(stages), None
    lines = text.split("\n")[:-1]
    for line in lines:
        rank, _, stage = line.partition(" ")
        if rank == "init":
            with contextlib.suppress(ValueError):
                init = init or bytes.fromhex(stage)
        elif rank.isascii() and rank.isdigit() and stage.isascii() and stage.isdigit():
            index, value = int(rank), int(stage)
            if index < size and value <= Stage.READY:
                stages[index] = max(stages[index], value)
    return bytes(stages), init


def save(path: Path, saved: Saved) -> bool:
    """Replace the file atomically. False, and a line in the log, if that does not work."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(saved))
        temporary.replace(path)
    except OSError as error:
        log.warning("cannot write %s; a restart of the relay will forget what it knows: %s", path, error)
        return False
    return True


def load(path: Path, *, incarnation: str) -> Saved | None:
    """Read what an earlier process left; None if there is nothing, or nothing of this incarnation."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("cannot read %s, starting anew: %s", path, error)
        return None
    return saved if saved.incarnation == incarnation else None
