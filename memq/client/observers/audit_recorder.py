"""A client's reports to the audit, computed from events of its work. Pure: time is an argument.

Theory. A client does thousands of things in an interval, and nearly all of them follow on each other: so they are kept
as range sets by write partition, stage, producer and event-time minute, and an event costs one range that grows and one
count. What is kept is bounded: at the bound a report is due at once, and what can't be sent is dropped. Nothing says
that a report was dropped but its number, which no report has: see `memq.format.report`.

`ReadRecorder` reports on one read partition: start, delivered, left out, skipped, damaged, committed. Consumers know
read partitions; its notes go to the tallies of the write partitions whose pointers lie there. `StagedRecorder` reports
on a staged batch, from its manifest: sent when decided, acked when published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, cast

from memq.client.consumer.batch import Damage
from memq.client.consumer.fetch.cursor_outcomes import Copy, LeftOut, ReadyRange
from memq.client.consumer.record_filter import runs_of
from memq.errors import CorruptDataError
from memq.format.held_sequences import HELD_BEGIN, held_minute
from memq.format.ranges import Range, RangeSet
from memq.format.report import (
    MINUTE_MS,
    Begin,
    BeginReason,
    HeldSpan,
    HeldStage,
    Kind,
    Report,
    ReportedDamage,
    ReportPart,
    ReportSpan,
    Stage,
    Stretch,
    damage_of,
    fitting,
    home_of,
)
from memq.format.staged_manifest import StagedObject, StagedPiece
from memq.protocol.frames import AckLevel
from memq.topic import Committed, Position

NOTES_MAX = 20_000  # events between two reports: then one is due; twice as many are kept if none can be sent
BUCKETS = 65  # see `memq.format.blocks.latency.bucket_of`
HEARTBEAT_INTERVALS = 6  # a report is promised within so many intervals, and comes within half of them
Pieces = Sequence[tuple[StagedObject, StagedPiece]]
RUNS_MAX = 8  # of wanted and left out records in one block
HANDED_MAX = 20_000  # blocks that were given out and are not committed


class _Handed(NamedTuple):
    """Records of one block that were given out: they pass `stage` when `behind` is committed.

    `at` is the position of the first one.
    """

    at: Position
    behind: Position
    part: PartRecorder
    producer: int
    first: int
    next: int
    base_ms: int
    stage: Stage = "processed"

    def before(self, position: Position) -> int:
        """Return how many of the records are before a position."""
        if self.behind <= position:
            return self.next - self.first
        if self.at.pointer_offset != position.pointer_offset:
            return 0
        return min(self.next - self.first, max(0, position.record_index - self.at.record_index))

    def split(self, records: int) -> tuple[_Handed, _Handed]:
        """Return the first `records` records, and the others."""
        at = replace(self.at, record_index=self.at.record_index + records)
        middle = self.first + records
        return self._replace(next=middle, behind=at), self._replace(at=at, first=middle)


class ReadRecorder:
    """The notes on one read partition, while a consumer reads it.

    `part` finds the recorder of a write partition; `writers` are those known to come here. `commits`: there is a group.

    The map of the topic may be older than the log, or lack a write partition that is retired. So the beginning is kept,
    and noted for each write partition that appears later: without it the audit takes a seek for a double delivery.
    """

    def __init__(self, part: Callable[[int], PartRecorder | None], writers: Iterable[int], *, commits: bool) -> None:
        self._part = part
        self._commits = commits
        self._writers = dict.fromkeys(writers)
        self._handed: deque[_Handed] = deque()
        self._begun: tuple[str, BeginReason] | None = None
        self._storing = False
        self._later: list[Callable[[], None]] = []

    def begin(self, at: Position, reason: BeginReason, before: ReadRecorder | None = None) -> None:
        """Note that reading begins at a position, in place of `before`: after what that one stores just now."""
        if before is not None and before._storing:
            self._storing = True  # nothing is stored of this one before it has begun: commits come one by one
            before._later.append(partial(self.begin, at, reason))
            return
        self._begun = (str(at), reason)
        for part in self._parts():
            part.begin(str(at), reason)
        self.end_storing()

    def begin_storing(self) -> None:
        """Note that the group is asked to store a position: what is read instead meanwhile begins after that."""
        self._storing = True

    def end_storing(self) -> None:
        """Note that the group has answered, or will not."""
        self._storing = False
        later, self._later = self._later, []
        for begin in later:
            begin()

    def deliver(self, delivery: ReadyRange, now_ms: int) -> None:
        """Note what goes to the user (at Unix ms), and what of it is damaged."""
        if delivery.pointer is None:
            return
        part = self._part_met(delivery.pointer.partition)
        if part is None:
            return
        for each in delivery.slices:
            header = each.piece.header
            assert header is not None, "what is given out is sound"
            producer, base_ms = header.producer_id, header.base_ms
            for wanted, (low, high) in noted_runs(each.mask, each.low, each.high):
                first, next_ = header.first_sequence + low, header.first_sequence + high
                part.pass_stage("fetched" if wanted else "passed", producer, first, next_, base_ms, now_ms)
                if self._commits and wanted:
                    at = replace(delivery.first, record_index=each.piece.first + low)
                    self._keep(_Handed(at, delivery.behind.position, part, producer, first, next_, base_ms))
        key = delivery.pointer.locations[0].key
        for piece in delivery.damaged:
            if not isinstance(piece.cause, CorruptDataError):
                continue  # newer than this reader, or its key is missing: no damage
            part.damage(damage_of(key, piece.number, delivery.first.pointer_offset, piece.records, piece.cause))

    def set_aside(self, position: Position) -> None:
        """Note that a record that was given out is passed over when it is committed: it became a dead letter."""
        for number, found in enumerate(self._handed):
            records = found.before(position)
            if found.at <= position and records < found.next - found.first:
                before, rest = found.split(records)
                one, after = rest.split(1)
                del self._handed[number]
                for part in (after, one._replace(stage="passed"), before):
                    if part.next > part.first:
                        self._handed.insert(number, part)
                return

    def leave_out(self, left_out: Iterable[LeftOut], now_ms: int) -> None:
        """Note blocks of which the filter wants no record."""
        for writer, producer, first, next_, base_ms in left_out:
            part = self._part_met(writer)
            if part is not None:
                part.pass_stage("passed", producer, first, next_, base_ms, now_ms)

    def drop_copies(self, copies: Iterable[Copy], now_ms: int) -> None:
        """Note blocks that are copies of delivered ones."""
        for writer, header in copies:
            part = self._part(writer)
            if part is not None:
                first, next_ = header.first_sequence, header.next_sequence
                part.pass_stage("dropped", header.producer_id, first, next_, header.base_ms, now_ms)

    def note_damage(self, writer: int, damage: Damage) -> None:
        """Note a block of a write partition whose payload turned out to be damaged when the user read it."""
        part = self._part(writer)
        if part is not None:
            offset = damage.position.pointer_offset
            part.damage(damage_of(damage.object_key, damage.block, offset, damage.records, damage.cause))

    def store(self, committed: Committed, now_ms: int) -> None:
        """Note that the group has stored a position: records before it are processed, or were set aside."""
        handed = self._handed
        while handed and (records := handed[0].before(committed.position)):
            found = handed.popleft()
            if records < found.next - found.first:
                found, left = found.split(records)
                handed.appendleft(left)
            found.part.pass_stage(found.stage, found.producer, found.first, found.next, found.base_ms, now_ms)
        for part in self._parts():
            part.commit(str(committed.position))

    # ---- inside ----------------------------------------------------------------------------------

    def _part_met(self, writer: int) -> PartRecorder | None:
        """Return the recorder of a write partition; note where reading began if the partition is new."""
        part = self._part(writer)
        if writer not in self._writers:
            self._writers[writer] = None
            if part is not None and self._begun is not None:
                part.begin(*self._begun)
        return part

    def _parts(self) -> list[PartRecorder]:
        found = [self._part(writer) for writer in self._writers]
        return [part for part in found if part is not None]

    def _keep(self, handed: _Handed) -> None:
        if len(self._handed) >= HANDED_MAX:
            self._handed.popleft().part.lacks = True
        self._handed.append(handed)


def noted_runs(mask: bytes | None, low: int, high: int) -> list[tuple[int, Range]]:
    """Return the runs of wanted (1) and left out (0) records of a block; one run if there are too many.

    So a block in which wanted and other records alternate is noted as a whole: notes are not for single records.
    """
    runs = list(islice(runs_of(mask, low, high), RUNS_MAX + 1)) if mask is not None else []
    return runs if 0 < len(runs) <= RUNS_MAX else [(1, (low, high))]


class StagedRecorder:
    """The notes on the pieces of one batch in one write partition.

    `part` is None when nobody wants to know.
    """

    def __init__(self, part: PartRecorder | None, pieces: Pieces) -> None:
        self._part = part
        self._pieces = pieces
        self._acked = 0

    def send(self, now_ms: int) -> None:
        """Note (at Unix ms) that the pieces are to be published, since their manifest is there."""
        self._note("sent", self._pieces, now_ms)

    def ack(self, published: int, now_ms: int) -> None:
        """Note that the owner has published so many of them."""
        self._note("acked", self._pieces[self._acked : published], now_ms)
        self._acked = max(self._acked, published)

    def _note(self, stage: Stage, pieces: Iterable[tuple[StagedObject, StagedPiece]], now_ms: int) -> None:
        if self._part is None:
            return
        for staged, piece in pieces:
            first, producer = 0, int(staged.producer, 16)
            for base_ms, next_ in piece.times:
                self._part.pass_stage(stage, producer, first, next_, base_ms, now_ms, AckLevel.ALL)
                first = next_


class _Span:
    """Sequences of one producer and minute that passed a stage, with lateness in records by bucket.

    Those from `first` up to `next` are not in `ranges` yet: nearly always the next event continues there.
    """

    __slots__ = ("first", "latency", "level", "minute", "next", "producer", "ranges")

    def __init__(self, producer: int, minute: int, first: int, level: int) -> None:
        self.producer = producer
        self.minute = minute
        self.level = level
        self.first = self.next = first
        self.ranges = RangeSet()
        self.latency = [0] * BUCKETS

    def to_report(self, stage: Stage) -> ReportSpan:
        """Return the span of the report."""
        self.ranges.add(self.first, self.next)
        latency = tuple((bucket, records) for bucket, records in enumerate(self.latency) if records)
        ranges = tuple(self.ranges)
        return ReportSpan(
            stage=stage, producer=self.producer, minute=self.minute, ranges=ranges, level=self.level, latency=latency
        )


class _Room:
    """How many more events may be noted; `full` is called once, when half of them are."""

    __slots__ = ("_full", "left")

    def __init__(self, full: Callable[[], None]) -> None:
        self.left = 2 * NOTES_MAX
        self._full = full

    @property
    def noted(self) -> bool:
        """Whether anything was noted."""
        return self.left < 2 * NOTES_MAX

    def take(self) -> bool:
        """Take the room of one event; false when there is none."""
        self.left -= 1
        if self.left == NOTES_MAX:
            self._full()
        return self.left >= 0


@dataclass(slots=True)
class _ReportProgress:
    """The state of a partition of the audit topic: next report number, and end of the last report."""

    until_ms: int
    number: int = 0


class PartRecorder:
    """Counts of one write partition for the next report."""

    __slots__ = (
        "_begins",
        "_committed",
        "_current",
        "_damages",
        "_held",
        "_parts",
        "_read",
        "_room",
        "_spans",
        "lacks",
        "partition",
        "topic",
        "topic_id",
    )

    def __init__(self, topic: str, topic_id: str, partition: int, room: _Room) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.lacks = False  # something was not noted
        self._room = room
        self._parts: list[ReportPart] = []  # over, as a reader began again after what they say
        self._forget()

    def pass_stage(
        self, stage: Stage, producer: int, first: int, next_: int, base_ms: int, now_ms: int, level: int = 0
    ) -> None:
        """Note that sequences `first` up to `next_` of a block passed a stage.

        `base_ms` is its least timestamp. Held records are counted only.
        """
        # Four times for each block: so the likely way is as short as it can be, half of what look-ups would cost.
        if not self._room.take():
            self.lacks = True
            return
        if first >= HELD_BEGIN:  # each is of a producer of its own
            count = (cast(HeldStage, stage), held_minute(first))
            self._held[count] = self._held.get(count, 0) + next_ - first
            return
        minute, span = base_ms // MINUTE_MS, self._current.get(stage)
        if span is None or span.producer != producer or span.minute != minute:
            span = self._span(stage, producer, minute, first, level)
        if first != span.next:
            span.ranges.add(span.first, span.next)
            if stage == "processed" and span.ranges.overlaps(first, next_):
                self._end_part()  # done twice: in one range set that would not be seen
                span = self._span(stage, producer, minute, first, level)
            span.first = first
        span.next = next_
        late_ms = now_ms - base_ms
        span.latency[late_ms.bit_length() if late_ms > 0 else 0] += next_ - first

    def _span(self, stage: Stage, producer: int, minute: int, first: int, level: int) -> _Span:
        span = self._spans.get((stage, producer, minute))
        if span is None:
            span = self._spans[stage, producer, minute] = _Span(producer, minute, first, level)
        self._current[stage] = span
        return span

    def damage(self, damage: ReportedDamage) -> None:
        """Note a block that could not be read; how often it was tried makes no difference."""
        if self._room.take():
            self._damages[damage.offset, damage.block] = damage
        else:
            self.lacks = True

    def hold(self, stage: HeldStage, minute: int, records: int) -> None:
        """Note that delayed records, or records of a transaction, came to a stage."""
        if self._room.take():
            self._held[stage, minute] = self._held.get((stage, minute), 0) + records
        else:
            self.lacks = True

    def begin(self, at: str, reason: BeginReason) -> None:
        """Note that a reader began at a position: what it had done until then is over, and goes before it."""
        if self._room.take():
            if self._committed or any(stage == "processed" for stage, _, _ in self._spans):
                self._end_part()
            self._begins.append(Begin(at=at, reason=reason))
        else:
            self.lacks = True

    def commit(self, position: str) -> None:
        """Note the position that the group has stored."""
        self._room.take()
        self._committed = position

    def end(self, begin: str, end: str) -> None:
        """Note that a task has read all from a position up to, not with, another."""
        self._room.take()
        self._read: Stretch | None = (begin, end)

    def take(self) -> list[ReportPart]:
        """Return and remove the noted events, in their order."""
        self.lacks = False
        if self._spans or self._damages or self._begins or self._committed or self._read or self._held:
            self._end_part()
        parts, self._parts = self._parts, []
        return parts

    def _end_part(self) -> None:
        part = ReportPart(
            topic=self.topic,
            topic_id=self.topic_id,
            partition=self.partition,
            spans=tuple(span.to_report(stage) for (stage, _, _), span in self._spans.items()),
            damages=tuple(self._damages.values()),
            begins=tuple(self._begins),
            committed=self._committed,
            read=self._read,
            held=tuple(HeldSpan(stage=s, minute=m, records=count) for (s, m), count in self._held.items()),
        )
        self._parts.append(part)
        self._forget()

    def _forget(self) -> None:
        self._spans: dict[tuple[Stage, int, int], _Span] = {}
        self._current: dict[Stage, _Span] = {}
        self._damages: dict[tuple[int, int], ReportedDamage] = {}
        self._held: dict[tuple[HeldStage, int], int] = {}
        self._begins: list[Begin] = []
        self._committed = ""
        self._read = None


class AuditRecorder:
    """The pending report of one client.

    `full` is called when a report is due early.
    """

    def __init__(
        self, client: int, kind: Kind, name: str, host: str, interval_ms: int, full: Callable[[], None]
    ) -> None:
        self._client = client
        self._kind: Kind = kind
        self._name = name
        self._host = host
        self._interval_ms = interval_ms
        self._room = _Room(full)
        self._parts: dict[tuple[str, int], PartRecorder] = {}
        self._began_ms: int | None = None
        self._homes: dict[int, _ReportProgress] = {}

    def part(self, topic: str, topic_id: str, partition: int, now_ms: int) -> PartRecorder:
        """Return the recorder of a write partition."""
        if self._began_ms is None:
            self._began_ms = now_ms
        found = self._parts.get((topic_id, partition))
        if found is None:
            found = PartRecorder(topic, topic_id, partition, self._room)
            self._parts[topic_id, partition] = found
        return found

    def due(self, now_ms: int) -> bool:
        """Whether there is something to say, or it is time to say that there is nothing."""
        return self._room.noted or any(self._is_silent(home, now_ms) for home in self._homes.values())

    def take(self, now_ms: int, homes: int, *, last: bool = False) -> list[tuple[int, Report]]:
        """Return the due reports, each with its partition (of `homes`) of the audit topic.

        With `last` they are the last ones. What was noted is forgotten, and the numbers are used, whatever becomes of
        the reports.
        """
        found: dict[int, list[ReportPart]] = {}
        for part in self._parts.values():
            lacks, parts = part.lacks, part.take()
            if not parts and not lacks:
                continue
            number = home_of(part.topic_id, part.partition, homes)
            self._home(number, now_ms).number += int(lacks)
            found.setdefault(number, []).extend(parts)
        self._room.left = 2 * NOTES_MAX
        for number, home in self._homes.items():
            if last or self._is_silent(home, now_ms):
                found.setdefault(number, [])
        return [
            (number, report)
            for number, parts in found.items()
            for report in self._reports(self._home(number, now_ms), parts, now_ms, last=last)
        ]

    # ---- inside ----------------------------------------------------------------------------------

    def _home(self, number: int, now_ms: int) -> _ReportProgress:
        home = self._homes.get(number)
        if home is None:
            began_ms = now_ms if self._began_ms is None else self._began_ms
            home = self._homes[number] = _ReportProgress(until_ms=min(began_ms, now_ms))
        return home

    def _is_silent(self, home: _ReportProgress, now_ms: int) -> bool:
        """Whether half of the time has passed within which a report was promised.

        A clock may be set back, too.
        """
        return not 0 <= now_ms - home.until_ms < self._interval_ms * HEARTBEAT_INTERVALS // 2

    def _reports(self, home: _ReportProgress, parts: list[ReportPart], now_ms: int, *, last: bool) -> list[Report]:
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
