"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, and every run is repeatable."""

from __future__ import annotations

import asyncio
from typing import Any

START = 1_800_000_000.0


class DeadlockError(Exception):
    """Nothing is left that could ever happen."""


class FranticError(Exception):
    """Something goes round and round without time passing, or far too often."""


_TURNS = 60_000  # of the loop in one run; a long history needs 10,000


class Loop(asyncio.BaseEventLoop):
    """asyncio without sockets. `time()` begins at 0, where floats are fine enough; the world's clock adds START."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._now = 0.0
        self._turns = 0
        self._clock_resolution = 1e-9

    def finish(self) -> None:
        """End what still runs, and close."""
        self._turns = 0
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks))
        self.close()

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise DeadlockError
        self._turns += 1
        if self._turns > _TURNS:
            raise FranticError
        self._now += max(0.0, timeout)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
