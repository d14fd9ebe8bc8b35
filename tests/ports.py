"""Ports for tests: below the ephemeral range, from which outgoing connections take theirs, and not those of another worker."""

from __future__ import annotations

import os
import socket

_LOWEST, _HIGHEST = 20_000, 32_000
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_COUNT = (_HIGHEST - _LOWEST) // _WORKERS
_FIRST = _LOWEST + _WORKER * _COUNT

# What one test has closed may linger, so the next one goes on from there; and so that two runs seldom meet, each begins
# somewhere else.
_next = _FIRST + os.getpid() * 7 % _COUNT


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """First of `count` adjacent free ports."""
    global _next  # noqa: PLW0603
    while True:
        first = _next if _next + count <= _FIRST + _COUNT else _FIRST
        _next = first + count
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("0.0.0.0", port))
        except OSError:
            continue
        return first
