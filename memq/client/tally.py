"""What one client is to report, folded from what it does: events in, reports out. Pure.

Theory. A client does thousands of things in an interval, and nearly all of them follow on each other: so they are kept
as range sets by write partition, stage, producer and event-time minute, and an event costs one range that grows and one
count. What is kept is bounded: at the bound a report is due at once, and what can't be sent is dropped. Nothing says
that a report was dropped but its number, which no report has: see `memq.format.report`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memq.format.ranges import RangeSet
from memq.format.report import (
    MINUTE_MS,
    Begin,
    BeginReason,
    Damage,
    Kind,
    Part,
    Report,
    Span,
    Stage,
    bucket_of,
    fitting,
    home_of,
)

NOTES_MAX = 20_000  # events between two reports: then one is due; twice as many are kept if none can be sent
HEARTBEAT_INTERVALS = 6  # a report is promised within so many intervals, and comes within half of them


@dataclass(slots=True)
class _Span:
    """The sequences of one producer and minute that passed a stage, and how late they were, in records by bucket."""

    level: int
    ranges: RangeSet = field(default_factory=RangeSet)
    latency: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Home:
    """What a partition of the audit topic was told: the next number, and up to when."""

    until_ms: int
    number: int = 0


class PartTally:
    """What is to be said of one write partition."""

    __slots__ = ("_begins", "_committed", "_damages", "_room", "_spans", "lacks", "partition", "topic", "topic_id")

    def __init__(self, topic: str, topic_id: str, partition: int, room: Callable[[], bool]) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.lacks = False  # something was not noted
        self._room = room
        self._forget()

    def pass_stage(
        self, stage: Stage, producer: int, first: int, next_: int, base_ms: int, now_ms: int, level: int = 0
    ) -> None:
        """Note that sequences `first` up to `next_` of a block passed a stage; `base_ms` is its least timestamp."""
        if not self._room():
            self.lacks = True
            return
        key = (stage, producer, base_ms // MINUTE_MS)
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = _Span(level)
        span.ranges.add(first, next_)
        bucket = bucket_of(now_ms - base_ms)
        span.latency[bucket] = span.latency.get(bucket, 0) + next_ - first

    def damage(self, damage: Damage) -> None:
        """Note a block that could not be read; how often it was tried makes no difference."""
        if self._room():
            self._damages[damage.offset, damage.block] = damage
        else:
            self.lacks = True

    def begin(self, at: str, reason: BeginReason) -> None:
        """Note that a reader began at a position."""
        if self._room():
            self._begins.append(Begin(at=at, reason=reason))
        else:
            self.lacks = True

    def commit(self, position: str) -> None:
        """Note the position that the group has stored."""
        self._room()
        self._committed = position

    def take(self) -> Part | None:
        """Return what was noted, and forget it; None for nothing."""
        self.lacks = False
        if not (self._spans or self._damages or self._begins or self._committed):
            return None
        part = Part(
            topic=self.topic,
            topic_id=self.topic_id,
            partition=self.partition,
            spans=tuple(
                Span(
                    stage=stage,
                    producer=producer,
                    minute=minute,
                    ranges=tuple(span.ranges),
                    level=span.level,
                    latency=tuple(sorted(span.latency.items())),
                )
                for (stage, producer, minute), span in self._spans.items()
            ),
            damages=tuple(self._damages.values()),
            begins=tuple(self._begins),
            committed=self._committed,
        )
        self._forget()
        return part

    def _forget(self) -> None:
        self._spans: dict[tuple[Stage, int, int], _Span] = {}
        self._damages: dict[tuple[int, int], Damage] = {}
        self._begins: list[Begin] = []
        self._committed = ""


class Tally:
    """What one client is to report. `full` is called when a report is due before its time."""

    def __init__(
        self, client: int, kind: Kind, name: str, host: str, interval_ms: int, full: Callable[[], None]
    ) -> None:
        self._client = client
        self._kind: Kind = kind
        self._name = name
        self._host = host
        self._interval_ms = interval_ms
        self._full = full
        self._parts: dict[tuple[str, int], PartTally] = {}
        self._began_ms: int | None = None
        self._homes: dict[int, _Home] = {}
        self._notes = 0

    def part(self, topic: str, topic_id: str, partition: int, now_ms: int) -> PartTally:
        """Return the tally of a write partition."""
        if self._began_ms is None:
            self._began_ms = now_ms
        found = self._parts.get((topic_id, partition))
        if found is None:
            found = PartTally(topic, topic_id, partition, self._room)
            self._parts[topic_id, partition] = found
        return found

    def due(self, now_ms: int) -> bool:
        """Whether there is something to say, or it is time to say that there is nothing."""
        return self._notes > 0 or any(self._is_silent(home, now_ms) for home in self._homes.values())

    def take(self, now_ms: int, homes: int, *, last: bool = False) -> list[tuple[int, Report]]:
        """Return the reports that are due, each with the partition of the audit topic, of `homes`, that it goes to.

        With `last` they are the last ones. What was noted is forgotten, and the numbers are used, whatever becomes of
        the reports.
        """
        found: dict[int, list[Part]] = {}
        for tally in self._parts.values():
            lacks, part = tally.lacks, tally.take()
            if part is None and not lacks:
                continue
            number = home_of(tally.topic_id, tally.partition, homes)
            self._home(number, now_ms).number += int(lacks)
            found.setdefault(number, []).extend([part] if part is not None else [])
        self._notes = 0
        for number, home in self._homes.items():
            if last or self._is_silent(home, now_ms):
                found.setdefault(number, [])
        return [
            (number, report)
            for number, parts in found.items()
            for report in self._reports(self._home(number, now_ms), parts, now_ms, last=last)
        ]

    # ---- inside ----------------------------------------------------------------------------------

    def _room(self) -> bool:
        """Count a note, and say whether it can be kept."""
        self._notes += 1
        if self._notes == NOTES_MAX:
            self._full()
        return self._notes <= 2 * NOTES_MAX

    def _home(self, number: int, now_ms: int) -> _Home:
        home = self._homes.get(number)
        if home is None:
            began_ms = now_ms if self._began_ms is None else self._began_ms
            home = self._homes[number] = _Home(until_ms=min(began_ms, now_ms))
        return home

    def _is_silent(self, home: _Home, now_ms: int) -> bool:
        """Whether half of the time has passed within which a report was promised; a clock may be set back, too."""
        return not 0 <= now_ms - home.until_ms < self._interval_ms * HEARTBEAT_INTERVALS // 2

    def _reports(self, home: _Home, parts: list[Part], now_ms: int, *, last: bool) -> list[Report]:
        until_ms = max(now_ms, home.until_ms)
        report = Report(
            client=self._client,
            kind=self._kind,
            number=home.number,
            name=self._name,
            host=self._host,
            since_ms=home.until_ms,
            until_ms=until_ms,
            next_ms=until_ms + self._interval_ms * HEARTBEAT_INTERVALS,
            last=last,
            parts=tuple(parts),
        )
        reports = fitting(report)
        home.number += len(reports)
        home.until_ms = until_ms
        return reports
