"""The time of day, without jumps.

Deadlines are compared with times that others wrote (the API server, kubelets, the relay), so they need the time of
day; but when the operator's own clock is set, every group that is starting would be late at once, or never. So a step
is not followed but approached, slowly enough that no deadline is wrong by more than a twentieth of its length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

STEP_S = 2.0  # smaller differences are the ordinary work of a time daemon
SLEW = 0.05


class SteadyClock:
    """Seconds since the epoch; call it. It begins with the first call and never runs backwards."""

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._now: float | None = None
        self._read_at = 0.0

    def __call__(self) -> float:
        if self._now is None:
            self._now, self._read_at = self._wall(), self._monotonic()
        read_at = self._monotonic()
        passed, self._read_at = read_at - self._read_at, read_at
        gap = self._wall() - (self._now + passed)
        if abs(gap) > STEP_S:
            gap = math.copysign(min(abs(gap), passed * SLEW), gap)
        self._now += max(0.0, passed + gap)
        return self._now
