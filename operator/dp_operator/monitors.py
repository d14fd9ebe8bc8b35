"""Follow the relay's monitor of every live incarnation: one long-lived request each, one JSON object a line.

What is kept is the latest snapshot, or in words why there is none. A monitor that cannot be reached is never a
failure by itself: the pods say what is wrong with the group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec
from msgspec.structs import replace

from dp_handshake.messages import MONITOR_PORT, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 1.0
# The monitor sends a line at least every 10 s.
_SILENCE_S = 30.0


class Monitors:
    """Latest snapshot per incarnation. `changed` is called with an incarnation's key when what is known changed."""

    def __init__(self, changed: Callable[[tuple[str, str]], None]) -> None:
        self._changed = changed
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.errors: dict[str, str] = {}

    def follow(self, key: tuple[str, str], wanted: dict[str, str]) -> None:
        """Follow exactly the wanted incarnations (id -> head pod IP) of one custom resource."""
        mine = {inc for inc, (_, task) in self._tasks.items() if task.get_name() == _task_name(key)}
        for incarnation in mine - set(wanted):
            self._drop(incarnation)
        for incarnation, ip in wanted.items():
            known = self._tasks.get(incarnation)
            if known and known[0] == ip:
                continue
            if known:
                self._drop(incarnation)
            task = asyncio.create_task(self._follow(key, incarnation, ip), name=_task_name(key))
            self._tasks[incarnation] = (ip, task)

    def close(self) -> None:
        for incarnation in list(self._tasks):
            self._drop(incarnation)

    def _drop(self, incarnation: str) -> None:
        self._tasks.pop(incarnation)[1].cancel()
        self.snapshots.pop(incarnation, None)
        self.errors.pop(incarnation, None)

    async def _follow(self, key: tuple[str, str], incarnation: str, ip: str) -> None:
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{MONITOR_PORT}/v1/handshake?watch=1"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
            while True:
                try:
                    async with session.get(url) as response:
                        response.raise_for_status()
                        async for line in response.content:
                            self._take(key, incarnation, msgspec.json.decode(line, type=Snapshot))
                    reason = "the monitor ended the stream"
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    reason = str(error) or type(error).__name__
                message = f"monitor at {ip}:{MONITOR_PORT}: {reason}"
                if incarnation not in self.errors:
                    self.errors[incarnation] = message
                    self._changed(key)
                await asyncio.sleep(_RETRY_S)

    def _take(self, key: tuple[str, str], incarnation: str, snapshot: Snapshot) -> None:
        if snapshot.incarnation != incarnation:
            # A pod IP that now belongs to another group's head.
            raise ValueError(f"it speaks for incarnation {snapshot.incarnation}")
        before = self.snapshots.get(incarnation)
        self.snapshots[incarnation] = snapshot
        recovered = self.errors.pop(incarnation, None) is not None
        if recovered or before is None or replace(before, time=snapshot.time) != snapshot:
            self._changed(key)


def _task_name(key: tuple[str, str]) -> str:
    return f"monitor of {key[0]}/{key[1]}"
