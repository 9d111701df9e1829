"""The list of early takeovers: it has every registration of a member, and forgets sessions that have ended."""

from __future__ import annotations

import pytest

from memq.governor import TAKEOVER_INTERVAL_MS
from memq.governor.registry import Takeover, may_take_over, with_takeover
from tests.contract.test_takeover import NOW_MS, suspect


def taken(session: str, age_ms: int, *, registered_again: bool = False) -> Takeover:
    return Takeover(broker="b1", session=session, at_ms=NOW_MS - age_ms, registered_again=registered_again)


@pytest.mark.parametrize(
    ("age_ms", "is_member", "stays"),
    [
        (TAKEOVER_INTERVAL_MS, False, False),
        (TAKEOVER_INTERVAL_MS - 1, False, True),
        (1 - TAKEOVER_INTERVAL_MS, False, True),
        (TAKEOVER_INTERVAL_MS, True, True),
        (0, True, True),
    ],
)
def test_a_takeover_is_forgotten_after_a_minute_unless_its_session_lives(
    age_ms: int, is_member: bool, stays: bool
) -> None:
    """Clocks of brokers may differ, so a takeover may also lie in the future."""
    before = taken("s1", age_ms)
    after = with_takeover([before], suspect("b2", "s2"), NOW_MS, {"s1"} if is_member else set())
    new = Takeover(broker="b2", session="s2", at_ms=NOW_MS)
    assert after == ((before, new) if stays else (new,))


@pytest.mark.parametrize("age_ms", [TAKEOVER_INTERVAL_MS - 1, 0, 1 - TAKEOVER_INTERVAL_MS])
def test_a_registration_is_not_taken_over_twice_in_a_minute(age_ms: int) -> None:
    assert not may_take_over([taken("s1", age_ms, registered_again=True)], suspect("b1", "s1"), NOW_MS)


def test_a_clock_that_was_an_hour_ahead_forbids_no_takeover_for_an_hour() -> None:
    takeovers = [taken("s1", -3_600_000, registered_again=True)]
    assert may_take_over(takeovers, suspect("b1", "s1"), NOW_MS)


def test_a_registration_is_listed_once_with_its_last_takeover() -> None:
    before = [taken("s1", 70_000, registered_again=True), taken("s2", 0)]
    after = with_takeover(before, suspect("b1", "s1"), NOW_MS, {"s1", "s2"})
    assert after == (before[1], taken("s1", 0))
