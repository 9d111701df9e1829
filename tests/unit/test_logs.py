"""Logging: event codes, rates, and silence until the program configures it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import memq
from memq.runtime.logs import (
    EVENTS_MAX,
    INTERVAL_S,
    LINES_MAX,
    SOURCES_LINES_MAX,
    SOURCES_MAX,
    EventLog,
    RateLimit,
)
from tests.brokers import log_lines


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 0


def test_an_event_has_its_rate_and_tells_what_was_left_out() -> None:
    limit = RateLimit()
    assert [limit.admit("a", 0.0) for _ in range(LINES_MAX + 3)] == [0] * LINES_MAX + [None] * 3
    assert limit.admit("b", 0.0) == 0
    assert limit.admit("a", INTERVAL_S) == 3
    assert limit.admit("a", INTERVAL_S) == 0


def test_a_source_of_many_lines_hides_none_of_others() -> None:
    limit = RateLimit()
    assert [limit.admit("a", 0.0, "loud") for _ in range(LINES_MAX + 3)] == [0] * LINES_MAX + [None] * 3
    assert [limit.admit("a", 0.0, "calm") for _ in range(LINES_MAX)] == [0] * LINES_MAX
    assert limit.admit("a", 0.0) == 0
    assert limit.admit("a", INTERVAL_S, "loud") == 3


def test_many_sources_have_a_bound_of_lines_and_each_has_one() -> None:
    limit = RateLimit()
    lines = [limit.admit("a", 0.0, str(number)) for number in range(SOURCES_MAX - 1) for _ in range(LINES_MAX)]
    assert len([each for each in lines if each is not None]) == SOURCES_MAX - 1 + SOURCES_LINES_MAX
    assert limit.admit("a", 0.0, "calm") == 0
    assert limit.admit("a", 0.0, "calm") is None
    assert limit.admit("a", 0.0, "one more") is None
    assert limit.admit("a", INTERVAL_S, "one more") == 0, "the sources of the last interval were kept"


def test_the_number_of_events_is_bounded() -> None:
    limit = RateLimit()
    for number in range(EVENTS_MAX):
        assert limit.admit(str(number), 0.0) == 0
    assert limit.admit("one more", 0.0) is None
    assert limit.admit("0", 0.0) == 0


def test_lines_carry_their_event_and_the_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    events = EventLog(clock)
    with caplog.at_level(logging.INFO, "memq"):
        for _ in range(LINES_MAX + 1):
            events.info("toy.happened", "it happened")
        events.debug("toy.detail", "nobody asked")
        clock.now_s += INTERVAL_S
        events.error("toy.happened", "it happened again", ValueError("why"))
    assert len(caplog.records) == LINES_MAX + 1
    assert {record.event for record in caplog.records} == {"toy.happened"}  # type: ignore[attr-defined]
    assert log_lines(caplog)[-1] == "toy.happened: it happened again (1 more of toy.happened were not logged)"
    assert caplog.records[-1].exc_info


def test_outage_is_logged_once_a_minute_and_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    outage = EventLog(clock).outage("toy.failed", "toy.back")
    with caplog.at_level(logging.INFO, "memq"):
        outage.passed()
        for _ in range(150):
            outage.failed("it is away")
            clock.now_s += 1
        outage.passed()
        outage.passed()
        outage.failed("it is away once more")
    assert log_lines(caplog, logging.INFO) == [
        "toy.failed: it is away",
        "toy.failed: it is away (for 60 s, 61 times)",
        "toy.failed: it is away (for 120 s, 121 times)",
        "toy.back: it works again after 150 s and 150 failures",
        "toy.failed: it is away once more",
    ]


def test_the_package_is_silent_by_default() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("memq").handlers)


def test_there_is_one_way_to_log() -> None:
    package = Path(memq.__file__).parent
    doors = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "import logging" in path.read_text()
    }
    # Three libraries want a logger of their own; the end of a process flushes what was logged.
    theirs = {
        "runtime/process.py",
        "audit/dashboard/server.py",
        "governor/zookeeper/session.py",
        "notification/kafka/librdkafka.py",
    }
    assert doors - theirs == {"runtime/logs.py", "cli/output.py"}, "log by EventLog: it bounds the rate of each event"
