"""When a rank of a lock-stepped group may pause, and how it learns that others have work (protocol notes §3, Waves).

Pure: every method returns the wave to announce to the coordinator as `start_wave`, or None.
"""

from __future__ import annotations

from msgspec import Struct

from dp_engine.versions import Wire


class Finished(Struct, frozen=True, kw_only=True):
    """All ranks have stopped; `report` is the wave that rank 0 tells the coordinator is complete."""

    report: int | None


class Waves:
    """One rank's part in the waves; `sync_interval_steps` overrides the release's own."""

    def __init__(self, *, rank: int, wire: Wire, sync_interval_steps: int | None = None) -> None:
        self._rank = rank
        self._wire = wire
        self._sync_interval_steps = sync_interval_steps or wire.sync_interval_steps
        self.wave = 0
        self.running = False
        self.step_counter = 0

    def request_arrived(self, wave: int) -> int | None:
        """A request came that was sent while its front end believed in `wave`."""
        stale = wave < self.wave
        self.wave = max(self.wave, wave)
        if self.running:
            return None
        self.running = True
        if self._wire.idle_engine_starts_waves or stale:
            return self.wave
        return self._edge()

    def start_received(self, wave: int, exclude: object) -> int | None:
        """The coordinator says that `wave` runs. `exclude` is a rank, or bytes or None, which exclude nobody."""
        if exclude == self._rank or wave < self.wave:
            return None
        self.wave = wave
        if self.running:
            return None
        self.running = True
        return self._edge()

    def _edge(self) -> int | None:
        return self.wave if self._rank == 0 and self._wire.rank0_reports_edge else None

    def stepped(self, *, any_unfinished: bool) -> Finished | None:
        """Count one common step. `any_unfinished` is the group's answer, used only on the steps that ask."""
        self.step_counter += 1
        asks = self.step_counter % self._sync_interval_steps == 0
        asks = asks or (self.step_counter == 1 and self._wire.sync_after_first_step)
        if not asks or any_unfinished:
            return None
        self.running = False
        complete, self.wave, self.step_counter = self.wave, self.wave + 1, 0
        return Finished(report=complete if self._rank == 0 else None)
