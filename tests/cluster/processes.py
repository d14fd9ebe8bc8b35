"""Starting and stopping the bed's own processes, and never anybody else's.

Every process is recorded with its pid and its start time. A pid alone is not an identity: after the process has
died the kernel gives the number to another one. The record is one file for the whole machine, so that a second
checkout sees whose bed is running.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .commands import Words
from .console import POLL_S
from .errors import BedError
from .paths import CHECKOUT, LOGS, OWNER

# Nodes are started in threads; between processes, `bed.alone` keeps the order.
_RECORDING = threading.Lock()


@dataclass(frozen=True)
class Started:
    """A process as it was when it started. `command` is a digest of its argv: a changed one means start anew."""

    pid: int
    start_ticks: int
    command: str


@dataclass(frozen=True)
class Owner:
    """Which checkout runs the bed of this machine, since which boot, with which processes."""

    checkout: str
    boot_id: str
    processes: Mapping[str, Started] = field(default_factory=dict)


def boot_id() -> str:
    """Changes with every boot, so it tells when recorded pids mean nothing any more."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if it is gone or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_stat(stat)


def parse_stat(stat: str) -> int | None:
    """Field 22 of /proc/PID/stat. The name, field 2, may itself hold spaces and brackets: count from its end."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(started: Started) -> bool:
    """Whether that very process still runs."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(started.pid, os.WNOHANG)  # reaps it if it is our own dead child
    return start_ticks(started.pid) == started.start_ticks


def parse_owner(text: str) -> Owner | None:
    """The record as written by `write_owner`; None for one cut off in the middle."""
    try:
        raw = json.loads(text)
        processes = {name: Started(**one) for name, one in raw["processes"].items()}
        return Owner(checkout=raw["checkout"], boot_id=raw["boot_id"], processes=processes)
    except (ValueError, KeyError, TypeError):
        return None


def read_owner() -> Owner | None:
    """The machine's record, if there is a readable one."""
    try:
        return parse_owner(OWNER.read_text())
    except FileNotFoundError:
        return None


def write_owner(owner: Owner) -> None:
    """Replace the record in one step."""
    OWNER.parent.mkdir(parents=True, exist_ok=True)
    fresh = OWNER.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(owner), indent=1))
    fresh.rename(OWNER)


def _owner() -> Owner:
    return read_owner() or Owner(checkout=str(CHECKOUT), boot_id=boot_id())


def recorded(name: str) -> Started | None:
    """The process last started under that name, dead or alive."""
    return _owner().processes.get(name)


def running(name: str) -> bool:
    """Whether the process last started under that name is alive."""
    started = recorded(name)
    return started is not None and is_alive(started)


def ensure(name: str, argv: Words) -> bool:
    """Start the program unless it runs with exactly this command line already; True if it was started."""
    words = [str(word) for word in argv]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    started = recorded(name)
    if started is not None and is_alive(started):
        if started.command == digest:
            return False
        stop([name])
    LOGS.mkdir(parents=True, exist_ok=True)
    with log_path(name).open("ab") as log:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
    ticks = start_ticks(child.pid)
    child.returncode = 0  # it outlives this object on purpose; is_alive reaps it
    if ticks is None:
        raise BedError(f"{name} ended at once:\n{log_tail(name)}")
    with _RECORDING:
        owner = _owner()
        started = Started(pid=child.pid, start_ticks=ticks, command=digest)
        write_owner(replace(owner, processes={**owner.processes, name: started}))
    return True


def stop(names: Iterable[str], *, grace_s: float = 10.0) -> None:
    """Stop these together: SIGTERM, then SIGKILL for those that are left after the grace time."""
    owner = _owner()
    targets = [one for name in names if (one := owner.processes.get(name)) is not None]
    stop_started(targets, grace_s=grace_s)


def identified(pids: Iterable[int]) -> list[Started]:
    """Live processes found by other means than the record, with the identity they have now."""
    return [Started(pid, ticks, "") for pid in pids if (ticks := start_ticks(pid)) is not None]


def stop_started(targets: Iterable[Started], *, grace_s: float) -> None:
    """The same for processes of any record. No grace time means SIGKILL at once."""
    left = [one for one in targets if is_alive(one)]
    if grace_s > 0:
        for one in left:
            _send(one, signal.SIGTERM)
        left = _wait_gone(left, grace_s)
    for one in left:
        _send(one, signal.SIGKILL)
    stuck = _wait_gone(left, 10.0)
    if stuck:
        raise BedError(f"These processes do not die on SIGKILL: {[one.pid for one in stuck]}; see /proc/PID/stack.")


def _send(target: Started, number: signal.Signals) -> None:
    """Signal through a pidfd, checked after it was opened: the pid cannot be reused in between."""
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(target):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def _wait_gone(targets: Sequence[Started], limit_s: float) -> list[Started]:
    end = time.monotonic() + limit_s
    left = list(targets)
    while left := [one for one in left if is_alive(one)]:
        if time.monotonic() > end:
            break
        time.sleep(POLL_S / 4)
    return left


def log_path(name: str) -> Path:
    """Where the process of that name writes."""
    return LOGS / f"{name}.log"


def log_tail(name: str, lines: int = 15) -> str:
    """The end of its log, for error messages."""
    try:
        return "\n".join(log_path(name).read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no log at {log_path(name)})"
