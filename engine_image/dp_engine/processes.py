"""Child processes: forked from a lean launcher, dead with their parent, watched through pidfds.

Forking before any ZeroMQ context or thread exists shares the imported modules, so that a rank costs a few MB of its
own and starts in milliseconds. Nothing may create a context in the launcher before its last fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import setproctitle

from dp_engine import logs

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Child:
    """A running or finished child. `pidfd` becomes readable when it ends."""

    def __init__(self, *, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._exit_code: int | None = None

    def exit_code(self) -> int | None:
        """None while it runs, else its exit status, or minus the signal that ended it."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code() is None:
            signal.pidfd_send_signal(self.pidfd, number)


def name_process(*, title: str, command: str) -> None:
    """Set what `ps` shows: the title in place of the command line, and the command, of which the kernel keeps 15 bytes."""
    # Otherwise the title overwrites the environment that /proc shows, by which supervisors and tests find processes.
    os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(title)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, command.encode()[:15], 0, 0, 0)


def fork(name: str, run: Callable[[], int], *, title: str, command: str, close: Iterable[int] = ()) -> Child:
    """Run `run` in a child whose exit code is what it returns.

    The child gets default signals (SIGINT ignored: the launcher decides what Ctrl-C means), dies with the launcher
    and closes the descriptors in `close`.
    """
    parent = os.getpid()
    sys.stdout.flush()
    gc.freeze()  # keeps the collector from touching, and so copying, the shared pages
    pid = os.fork()
    if pid:
        return Child(name=name, pid=pid)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in close:
            os.close(descriptor)
        name_process(title=title, command=command)
        logs.set_role(name)
        code = run()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        logs.error(f"{name} failed:\n{traceback.format_exc()}")
    finally:
        os._exit(code)


def finished(children: Iterable[Child]) -> dict[str, int]:
    """Names and exit codes of children that have ended."""
    return {child.name: code for child in children if (code := child.exit_code()) is not None}


def wait_for_any(children: Iterable[Child], *, wake_fd: int) -> None:
    """Until a child ends or `wake_fd` becomes readable: a signal asks to stop."""
    poll = select.poll()
    poll.register(wake_fd, select.POLLIN)
    for child in children:
        poll.register(child.pidfd, select.POLLIN)
    poll.poll()


def wait_for_all(children: Iterable[Child], *, timeout_s: float) -> bool:
    """Wait until all have ended; False when some have not."""
    waiting = [child for child in children if child.exit_code() is None]
    deadline = time.monotonic() + timeout_s
    while waiting:
        poll = select.poll()
        for child in waiting:
            poll.register(child.pidfd, select.POLLIN)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return False
        waiting = [child for child in waiting if child.exit_code() is None]
    return True


def stop(children: Iterable[Child], *, grace_s: float = 5.0) -> None:
    """SIGTERM all, wait `grace_s`, SIGKILL what is left, and reap."""
    children = list(children)
    for child in children:
        child.signal(signal.SIGTERM)
    if not wait_for_all(children, timeout_s=grace_s):
        for child in children:
            child.signal(signal.SIGKILL)
        wait_for_all(children, timeout_s=5.0)


class Stopper:
    """SIGTERM and SIGINT as a readable descriptor and a flag, instead of an exception at a random line.

    With `pokes`, SIGUSR1 does the same for `poked`.
    """

    def __init__(self, *, pokes: bool = False) -> None:
        self.requested = False
        self.poked = False
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        if pokes:
            signal.signal(signal.SIGUSR1, self._poke)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def _handle(self, _number: int, _frame: object) -> None:
        self.requested = True

    def _poke(self, _number: int, _frame: object) -> None:
        self.poked = True

    def clear(self) -> None:
        """Make `fd` wait for the next signal; look at the flags after this."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
