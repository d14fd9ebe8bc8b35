"""A clock that is set must not end groups."""

from __future__ import annotations

import pytest

from dp_operator.clock import SteadyClock


class Times:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1_800_000_000.0, 50.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def clock(times: Times) -> SteadyClock:
    return SteadyClock(wall=lambda: times.wall, monotonic=lambda: times.monotonic)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_of_an_hour_moves_no_deadline_by_more_than_a_twentieth(times, clock, step):
    start = clock()
    times.wall += step
    for _ in range(100):
        times.pass_by(1.0)
        clock()
    assert clock() - start == pytest.approx(100, abs=5.1)


def test_in_the_end_the_time_of_day_is_right_again(times, clock):
    times.wall += 60
    for _ in range(1500):
        times.pass_by(1.0)
        clock()
    assert clock() == pytest.approx(times.wall)


def test_time_never_runs_backwards(times, clock):
    before = clock()
    for step in (-1.5, -3600.0, 0.0, -0.5):
        times.wall += step
        times.pass_by(0.1)
        assert clock() >= before
        before = clock()
