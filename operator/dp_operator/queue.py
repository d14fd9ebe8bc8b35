"""A work queue of keys: each key is handled by one worker at a time, and many reasons make one visit.

The semantics are those of client-go's work queue. A key added while it is being handled is handled once more
afterwards. A delayed key that is added for earlier is taken earlier. Failures back off exponentially per key.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 60.0
# Due within this time counts as due: a wait shorter than the clock's tick would end before it began.
_TICK_S = 0.001


class Queue(Generic[K]):
    """Deduplicating, delaying queue for one event loop."""

    def __init__(self) -> None:
        self._ready: OrderedDict[K, float] = OrderedDict()  # key -> loop time it was added
        self._active: dict[K, float] = {}  # key -> loop time a worker took it
        self._again: set[K] = set()
        self._due: dict[K, float] = {}  # key -> loop time
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._failures: dict[K, int] = {}
        self._timer: asyncio.TimerHandle | None = None  # to the earliest of the due times
        self._waiting: deque[asyncio.Future[None]] = deque()  # idle workers; one is woken for each key

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def oldest_age_s(self) -> float:
        """How long the first ready key has waited."""
        if not self._ready:
            return 0.0
        return asyncio.get_running_loop().time() - next(iter(self._ready.values()))

    @property
    def longest_visit_s(self) -> float:
        """How long the slowest worker has been with its key: one that hangs inside a call keeps no other key waiting."""
        if not self._active:
            return 0.0
        return asyncio.get_running_loop().time() - min(self._active.values())

    def add(self, key: K) -> None:
        """Handle the key as soon as a worker is free."""
        self._due.pop(key, None)
        if key in self._active:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = asyncio.get_running_loop().time()
            self._wake_one()

    def add_after(self, key: K, delay_s: float) -> None:
        """Handle the key after delay_s, or earlier if it is already due earlier."""
        if delay_s <= 0:
            self.add(key)
            return
        due = asyncio.get_running_loop().time() + delay_s
        if key in self._ready or self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        self._set_timer()

    def retry(self, key: K, *, at_least_s: float = 0.0, at_most_s: float = LONGEST_RETRY_S) -> float:
        """Handle a failed key again after its back-off; returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        back_off_s = FIRST_RETRY_S * 2**failures
        if back_off_s < at_most_s:
            # No further than the limit: a failure of another kind afterwards goes on from there.
            self._failures[key] = failures + 1
        delay: float = max(at_least_s, min(at_most_s, back_off_s))
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """The key was handled well: its next failure starts from the first back-off."""
        self._failures.pop(key, None)

    def done(self, key: K) -> None:
        """The worker has finished with the key."""
        self._active.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def get(self) -> K:
        """Wait for the next key; the caller must call done() with it."""
        loop = asyncio.get_running_loop()
        while not self._ready:
            waiter = loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()  # it was this worker's turn
                raise
        key, _ = self._ready.popitem(last=False)
        self._active[key] = loop.time()
        return key

    def _wake_one(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _set_timer(self) -> None:
        if self._timer is not None:
            if self._timer.when() == self._heap[0][0]:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._heap[0][0], self._move_due)

    def _move_due(self) -> None:
        """Add the keys whose time has come, and wait for the next."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap:
            due, _, key = self._heap[0]
            current = self._due.get(key) == due  # otherwise it was moved or added meanwhile
            if current and due > now + _TICK_S:
                self._set_timer()
                return
            heapq.heappop(self._heap)
            if current:
                self.add(key)
