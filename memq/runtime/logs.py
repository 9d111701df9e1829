"""Logging: the logger `memq`, silent until the program configures it.

Each line has a stable event code and a rate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from memq.redaction import redacted
from memq.runtime.clock import Clock

LINES_MAX = 10  # for one event
INTERVAL_S = 10.0
EVENTS_MAX = 1_000
SOURCES_MAX = 1_000  # principals and addresses of one event, in INTERVAL_S
SOURCES_LINES_MAX = 200  # for one event, of all sources, without the first line of each
OUTAGE_INTERVAL_S = 60.0

logging.getLogger("memq").addHandler(logging.NullHandler())


@dataclass(slots=True)
class _Count:
    since_s: float
    lines: int = 0
    suppressed: int = 0


@dataclass(slots=True)
class _Sources:
    """The lines of one event by source, in one interval."""

    of_all: _Count
    each: dict[str, _Count] = field(default_factory=dict)


@dataclass(slots=True)
class RateLimit:
    """Lets `LINES_MAX` lines of an event through in `INTERVAL_S`, and counts the others.

    An event with sources has as many lines for each source. Apart from the first one of each, these are
    `SOURCES_LINES_MAX` at most: a source that causes many lines does not hide those of others.
    Pure: the caller passes the time. Events after the first `EVENTS_MAX` names are dropped.
    """

    _counts: dict[str, _Count] = field(default_factory=dict)
    _sources: dict[str, _Sources] = field(default_factory=dict)

    def admit(self, event: str, now_s: float, source: str = "") -> int | None:
        """Return how many lines of the event and source were left out since the last one.

        None: the caller must not log this line either.
        """
        if source:
            return self._admit_source(event, now_s, source)
        count = self._counts.get(event)
        if count is None:
            if len(self._counts) >= EVENTS_MAX:
                return None
            count = self._counts[event] = _Count(now_s)
        return _admitted(count, now_s, LINES_MAX)

    def _admit_source(self, event: str, now_s: float, source: str) -> int | None:
        found = self._sources.get(event)
        if found is None:
            if len(self._sources) >= EVENTS_MAX:
                return None
            found = self._sources[event] = _Sources(_Count(now_s))
        count = found.each.get(source)
        if count is None:
            if len(found.each) >= SOURCES_MAX:
                found.each = {name: each for name, each in found.each.items() if now_s - each.since_s < INTERVAL_S}
            if len(found.each) >= SOURCES_MAX:
                found.of_all.suppressed += 1
                return None
            count = found.each[source] = _Count(now_s)
        suppressed = _admitted(count, now_s, LINES_MAX)
        if suppressed is None or count.lines == 1:
            return suppressed
        others = _admitted(found.of_all, now_s, SOURCES_LINES_MAX)
        if others is None:
            count.suppressed += suppressed
            return None
        return suppressed + others


def _admitted(count: _Count, now_s: float, lines_max: int) -> int | None:
    """Count a line; return how many were left out before it, None if it is left out, too."""
    if now_s - count.since_s >= INTERVAL_S:
        count.since_s, count.lines = now_s, 0
    if count.lines >= lines_max:
        count.suppressed += 1
        return None
    count.lines += 1
    suppressed, count.suppressed = count.suppressed, 0
    return suppressed


class EventLog:
    """Writes events of one part, say a producer or a broker.

    `event` is a name that never changes, such as `producer.block-failed`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limit = RateLimit()
        self._logger = logging.getLogger("memq")

    def debug(self, event: str, text: str) -> None:
        """Log what only a developer wants to see."""
        self._write(logging.DEBUG, event, text, None)

    def info(self, event: str, text: str, *, source: str = "") -> None:
        """Log a change of state. `source`: as for `warning`."""
        self._write(logging.INFO, event, text, None, source)

    def warning(self, event: str, text: str, error: BaseException | None = None, *, source: str = "") -> None:
        """Log a problem that ends by itself, but should be rare. With `error`, its traceback is added.

        `source` names the principal or address that caused it, which has its own limit of lines.
        """
        self._write(logging.WARNING, event, text, error, source)

    def error(self, event: str, text: str, error: BaseException | None = None) -> None:
        """Log an event that needs an operator. With `error`, its traceback is added."""
        self._write(logging.ERROR, event, text, error)

    def now_s(self) -> float:
        """Return the time of the log, in monotonic seconds."""
        return self._clock.monotonic()

    def outage(self, event: str, back: str, after_s: float = 0.0) -> Outage:
        """Return the log of a repeated failure: `event` names the failures, `back` the recovery.

        An outage that ends within `after_s` is not logged.
        """
        return Outage(self, self._clock, event, back, after_s)

    def _write(self, level: int, event: str, text: str, error: BaseException | None, source: str = "") -> None:
        if not self._logger.isEnabledFor(level):
            return
        suppressed = self._limit.admit(event, self._clock.monotonic(), source)
        if suppressed is None:
            return
        if suppressed:
            text = f"{text} ({suppressed} more of {event} were not logged)"
        self._logger.log(level, "%s: %s", event, redacted(text), exc_info=error, extra={"event": event})


class Outage:
    """A repeated failure is logged once it has lasted for a while, then every minute, and at its end."""

    def __init__(self, events: EventLog, clock: Clock, event: str, back: str, after_s: float) -> None:
        self._events = events
        self._clock = clock
        self._event = event
        self._back = back
        self._after_s = after_s
        self._since_s = self._due_s = 0.0
        self._failures = 0
        self._logged = False

    def failed(self, text: str) -> None:
        """Note a failure."""
        now_s = self._clock.monotonic()
        if not self._failures:
            self._since_s, self._due_s, self._logged = now_s, now_s + self._after_s, False
        self._failures += 1
        if now_s < self._due_s:
            return
        self._due_s, self._logged = now_s + OUTAGE_INTERVAL_S, True
        if self._failures > 1:
            text = f"{text} (for {now_s - self._since_s:.0f} s, {self._failures} times)"
        self._events.warning(self._event, text)

    def passed(self) -> None:
        """Note that it works."""
        if self._logged:
            lasted_s = self._clock.monotonic() - self._since_s
            self._events.info(self._back, f"it works again after {lasted_s:.0f} s and {self._failures} failures")
        self._failures, self._logged = 0, False
