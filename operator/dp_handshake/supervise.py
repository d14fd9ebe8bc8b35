"""Keep the working process alive inside the sidecar's container.

The kubelet restarts a crashed container only after a back-off, and until then the head pod is unready and takes no
traffic although its engine serves. So the container's first process is this one, which does nothing but start the
worker again; the worker finds its state on the emptyDir.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_STABLE_S = 10.0
_STOP_S = 2.0


class _Stop(Exception):  # noqa: N818 - a request, not an error
    pass


def supervise(work: Callable[[], None]) -> int:
    """Fork, run work in the child, and start it again whenever it ends, until SIGTERM or SIGINT. Gives exit code 0."""
    pause_s = 0.1
    child = 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        while True:
            started = time.monotonic()
            child = _spawn(work)
            status = _wait(child)
            child = 0
            pause_s = 0.1 if time.monotonic() - started > _STABLE_S else min(5.0, pause_s * 2)
            log.error("the relay's working process ended (%s), starting it again in %.1f s", status, pause_s)
            time.sleep(pause_s)
    except _Stop:
        # A second signal while stopping changes nothing.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end(child)
        return 0


def _spawn(work: Callable[[], None]) -> int:
    # Signals wait until the parent knows its child and the child has its own handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    parent = os.getpid()
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        return child
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A worker without supervisor would keep the ports of the next one.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        if os.getppid() == parent:
            work()
        code = 0
    except BaseException:
        log.exception("the relay's working process failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _wait(child: int) -> str:
    """Wait for this child; as the container's first process, reap whatever else ends meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(child: int) -> None:
    if not child:
        return
    try:
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return
