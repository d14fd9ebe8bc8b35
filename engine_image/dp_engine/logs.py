"""Log lines shaped like vLLM's, on stderr: `(EngineCore_DP3 pid=77) INFO 11-30 15:16:00 text`."""

from __future__ import annotations

import os
import sys
import time

_role = ""


def set_role(role: str) -> None:
    """Name this process in every line it writes from now on; call once after a fork."""
    global _role  # noqa: PLW0603 - one process, one role
    _role = role


def _write(level: str, text: str) -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    prefix = f"({_role} pid={os.getpid()}) " if _role else ""
    # One write per line: lines of several processes share the pipe and must not interleave.
    line = f"{prefix}{level} {stamp} {text}\n".encode(errors="backslashreplace")
    try:
        os.write(sys.stderr.fileno(), line)
    except (OSError, ValueError):
        return  # nobody reads stderr any more: no reason to die


def info(text: str) -> None:
    _write("INFO", text)


def warning(text: str) -> None:
    _write("WARNING", text)


def error(text: str) -> None:
    _write("ERROR", text)
