"""The wall clock of work that deletes: a jump forward counts after a while, a jump back at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from memq.runtime.logs import EventLog
from memq.runtime.steady_clock import SteadyClock
from memq.topic import CLOCK_ERROR_MS

DAY_MS = 86_400_000
START_MS = 1_760_000_000_000


@dataclass
class SetClock:
    """Two clocks that the test sets."""

    wall: int = START_MS
    counted_ms: int = 5_000

    def monotonic(self) -> float:
        return self.counted_ms / 1000

    def wall_ms(self) -> int:
        return self.wall

    def pass_time(self, milliseconds: int) -> None:
        self.wall += milliseconds
        self.counted_ms += milliseconds


def made() -> tuple[SetClock, SteadyClock]:
    clock = SetClock()
    return clock, SteadyClock(clock, EventLog(clock), DAY_MS)


def jumps(caplog: pytest.LogCaptureFixture) -> int:
    return sum(
        "clock-jumped" in record.getMessage() or "went forward" in str(record.__dict__) for record in caplog.records
    )


def test_a_clock_that_was_set_forward_counts_after_a_day(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    clock, steady = made()
    clock.pass_time(60_000)
    assert steady.wall_ms() == clock.wall
    clock.wall += 30 * DAY_MS
    for _ in range(24):
        assert steady.wall_ms() == clock.wall - 30 * DAY_MS
        clock.pass_time(DAY_MS // 24)
    assert steady.wall_ms() == clock.wall
    assert jumps(caplog) == 1
    clock.pass_time(1_000)
    assert steady.wall_ms() == clock.wall


def test_a_clock_that_was_set_right_within_the_day_has_changed_nothing() -> None:
    clock, steady = made()
    clock.wall += 30 * DAY_MS
    assert steady.wall_ms() == START_MS
    clock.pass_time(DAY_MS - 1_000)
    clock.wall -= 30 * DAY_MS
    assert steady.wall_ms() == clock.wall
    clock.wall += 30 * DAY_MS
    clock.pass_time(2_000)
    assert steady.wall_ms() == clock.wall - 30 * DAY_MS, "a second jump has a day of its own"


def test_a_second_jump_begins_a_new_day() -> None:
    clock, steady = made()
    clock.wall += DAY_MS
    steady.wall_ms()
    clock.pass_time(DAY_MS // 2)
    clock.wall += DAY_MS
    assert steady.wall_ms() == clock.wall - 2 * DAY_MS
    clock.pass_time(DAY_MS - 1)
    assert steady.wall_ms() == clock.wall - 2 * DAY_MS
    clock.pass_time(1)
    assert steady.wall_ms() == clock.wall


@pytest.mark.parametrize("by_ms", [CLOCK_ERROR_MS, 1_000, -1_000, -DAY_MS])
def test_a_clock_within_the_allowed_error_or_set_back_counts_at_once(by_ms: int) -> None:
    clock, steady = made()
    clock.wall += by_ms
    assert steady.wall_ms() == clock.wall
    clock.pass_time(1_000)
    assert steady.wall_ms() == clock.wall


def test_clocks_may_run_at_slightly_different_rates() -> None:
    clock, steady = made()
    clock.pass_time(365 * DAY_MS)
    clock.wall += 365 * DAY_MS // 1_000
    assert steady.wall_ms() == clock.wall


def test_a_clock_that_is_ahead_of_the_coordinators_counts_after_a_day(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that started with a wrong clock has no jump that its own clocks could show."""
    caplog.set_level(logging.ERROR)
    clock, steady = made()
    for _ in range(24):
        steady.compare(clock.wall - 30 * DAY_MS, clock.wall, "the coordinator")  # each time it registers
        assert steady.wall_ms() == clock.wall - 30 * DAY_MS
        clock.pass_time(DAY_MS // 24)
    assert steady.wall_ms() == clock.wall
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("clock-jumped: the wall clock is 2592000 s ahead of that of the coordinator: retention")


@pytest.mark.parametrize("other_ms", [-CLOCK_ERROR_MS, 0, CLOCK_ERROR_MS, 30 * DAY_MS])
def test_a_coordinator_whose_clock_is_near_or_ahead_changes_nothing(other_ms: int) -> None:
    clock, steady = made()
    steady.compare(clock.wall + other_ms, clock.wall, "the coordinator")
    assert steady.wall_ms() == clock.wall


def test_a_coordinators_clock_never_ends_the_doubt_about_a_jump() -> None:
    """Both may be clocks of one machine, which was set forward."""
    clock, steady = made()
    clock.wall += 30 * DAY_MS
    assert steady.wall_ms() == START_MS
    steady.compare(clock.wall, clock.wall, "the coordinator")
    assert steady.wall_ms() == START_MS
