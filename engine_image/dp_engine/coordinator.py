"""The DP coordinator as a pure state machine: it counts requests, publishes counts, starts and ends waves.

Facts: protocol notes §3. Frames and times in, frames out; `coordinator_process` owns the sockets.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import DecodeError, Struct

from dp_engine import logs, wire
from dp_engine.versions import Wire

CHANGED_INTERVAL_S = 0.1
IDLE_INTERVAL_S = 5.0
AFTER_STEP_S = 0.05


class Send(Struct, frozen=True):
    """Frames for the front ends' or the engines' publisher."""

    to: Literal["front", "back"]
    frames: list[bytes]


class BarrierBrokenError(Exception):
    """Something other than a subscription came before every engine had subscribed; vLLM's coordinator exits."""


class Coordinator:
    """`size` engines; `waves` only for a lock-stepped (MoE) group."""

    def __init__(self, *, size: int, waves: bool, wire_family: Wire) -> None:
        self._size = size
        self._waves = waves
        self._wire = wire_family
        self._subscribed = 0
        self.started = False
        self.wave = 0
        self.running = False
        self._counts = [self._no_counts() for _ in range(size)]
        self._snapshot: list[list[Any]] | None = None
        self._stats_at = (0, -1)  # (wave, step) of the newest counts
        self._changed = False
        self._published_s = 0.0

    def timeout_s(self, now: float) -> float | None:
        """How long to wait for frames before `tick`; None while the barrier is closed."""
        if not self.started:
            return None
        interval = CHANGED_INTERVAL_S if self._changed else IDLE_INTERVAL_S
        # After a step the others' counts of the same step are on their way: give them a moment.
        least = AFTER_STEP_S if self._waves and self._snapshot is None else 0.0
        return max(least, interval - (now - self._published_s))

    def tick(self, now: float) -> list[Send]:
        """Publish the counts. Call when `timeout_s` has passed without a frame."""
        counts = self._snapshot if self._snapshot is not None else self._counts
        # What came after the snapshot still has to be told.
        self._changed = self._snapshot is not None
        self._snapshot = None
        self._published_s = now
        return [self._publish(counts)]

    def from_back(self, frame: bytes, now: float) -> list[Send]:
        """A frame of the engines' publisher: subscriptions. Raises BarrierBrokenError."""
        if not self.started:
            if frame != wire.SUBSCRIBE:
                raise BarrierBrokenError(f"unexpected frame before all engines subscribed: {frame[:32]!r}")
            self._subscribed += 1
            if self._subscribed < self._size:
                return []
            self.started = True
            self._published_s = now - IDLE_INTERVAL_S  # the first counts, all zero, go out at once
            return [Send("back", [wire.COORDINATOR_READY])]
        # A late subscriber needs READY too; those that already run ignore the repetition. Before 0.17 nobody listened.
        greets = frame == wire.SUBSCRIBE and self._wire.late_subscribers
        return [Send("back", [wire.COORDINATOR_READY])] if greets else []

    def from_front(self, frame: bytes) -> list[Send]:
        """A frame of a front end: a subscription, a scale notice, or (up to 0.32) a paused group's first request."""
        if frame in {b"\x00", b"\x01"}:
            return []
        try:
            what, number = wire.decode(frame)
        except (DecodeError, TypeError, ValueError):
            return []
        if not isinstance(number, int):
            return []
        if what == wire.SCALE_NOTICE:
            self._scale(number)
            return []
        if not self._waves or not self._wire.front_end_starts_waves or self.running:
            return []
        # A stale wave: the engine that got the request may have finished it already, so nobody is left out.
        start = self._start(self.wave, what if number >= self.wave else None)
        if not self._wire.front_end_marks_running:
            return [start]
        self.running = True
        return [self._publish(None), start]

    def _scale(self, size: int) -> None:
        """Elastic expert parallelism has changed the number of ranks: the table grows or shrinks at its end."""
        if size < 1:
            return
        if size > self._size and self._wire.scale_resets_running:
            self.running = False
        added = [self._no_counts() for _ in range(size - self._size)]
        self._counts = [*self._counts[:size], *added]
        self._size, self._snapshot = size, None

    def _no_counts(self) -> list[Any]:
        return [0, 0, 0.0][: self._wire.counts_width]

    def from_engine(self, frame: bytes) -> list[Send]:
        """An outputs array of an engine. Raises msgspec.DecodeError or ValueError when it is none."""
        message = wire.decode_outputs(frame)
        if message.stats is not None:
            self._count(message.engine, message.stats)
        sends: list[Send] = []
        if not self._waves:
            return sends
        if message.wave_complete is not None and message.wave_complete >= self.wave:
            self.wave, self.running = message.wave_complete + 1, False
            sends.append(self._publish(None))
        if message.start_wave is not None and (
            message.start_wave > self.wave or (message.start_wave == self.wave and not self.running)
        ):
            self.wave, self.running = message.start_wave, True
            sends += [self._publish(None), self._start(self.wave, message.engine)]
        return sends

    def _count(self, engine: int, stats: dict[str, Any]) -> None:
        if not 0 <= engine < self._size:
            return
        if self._waves:
            at = (int(stats.get("current_wave") or 0), int(stats.get("step_counter") or 0))
            if at > self._stats_at:
                # The step before is complete now, so it is what gets published.
                if self._changed:
                    self._snapshot = [list(counts) for counts in self._counts]
                self._stats_at = at
            elif at < self._stats_at:
                logs.warning(f"Counts of rank {engine} are of an out-of-order step {at}, after {self._stats_at}")
        self._counts[engine] = [
            int(stats.get("num_waiting_reqs") or 0),
            int(stats.get("num_running_reqs") or 0),
            float(stats.get("kv_cache_usage") or 0.0),
        ][: self._wire.counts_width]
        self._changed = True

    def _publish(self, counts: list[list[Any]] | None) -> Send:
        return Send("front", [wire.encode([counts, self.wave, self.running])])

    def _start(self, wave: int, excluded: object) -> Send:
        return Send("back", [wire.START_DP_WAVE, wire.encode([wave, excluded])])
