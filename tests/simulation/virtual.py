"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, and every run is repeatable."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from typing import Any

START = 1_800_000_000.0


class DeadlockError(Exception):
    """Nothing is left that could ever happen."""


class FranticError(Exception):
    """Something goes round and round without time passing, or far too often."""


_TURNS = 60_000  # of the loop in one run; a long history needs 10,000


class _Handle(asyncio.TimerHandle):
    """What asyncio needs of a handle, and no more."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: tuple[Any, ...], context: Any) -> None:
        self._when, self._callback, self._args, self._context = when, callback, args, context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True


class Loop(asyncio.BaseEventLoop):
    """asyncio without sockets. `time()` begins at 0, where floats are fine enough; the world's clock adds START.

    Timers and turns are asyncio's, without what a real loop needs besides: half of a history's time was spent there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self._plain = contextvars.copy_context()

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

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = _Handle(self._now, callback, args, context or self._plain)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = _Handle(when, callback, args, context or self._plain)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        self._turns += 1
        if self._turns > _TURNS:
            raise FranticError
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise DeadlockError
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except Exception as error:
                    self.call_exception_handler({"exception": error, "handle": handle})

    def _write_to_self(self) -> None:
        pass
