"""The machine of one write partition: pointers and reports in, rows and findings out. Pure.

Rules for a record that no pointer has:

- Acked with `all`: it is lost when the queue was read up to an end that was requested after its report. The end of a
  queue may be too low, so owners have to prove it first (`ends`).
- Acked with less, or sent without acks: it is in flight until its producer must have given up and no late pointer can
  arrive. Then brokers are asked whether they hold it (`sought`).
- Sent and never acked: unproven.
- Below an end that its producer reported: as in `Account`.
- Possibly in pointers that were not read: never lost; see `PartitionState.miss`.

`group_readers.py` judges groups. The caller calls `settle` only after it has given all pointers up to such an end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from memq.audit.account import ACKS_ALL, Account, Balance, Evidence, Fate, HeldWord, RecentRanges, apart, common
from memq.audit.finding import IN_GROUP, IN_QUEUE, Finding, Kind
from memq.audit.held import HELD_MS, HeldAnswer, HeldQuestions, Sought, doubt_of
from memq.audit.live.event_minute import EventMinutes
from memq.audit.live.group_readers import distrust_reading, take_reading
from memq.audit.live.open_findings import OpenFindings
from memq.audit.live.partition_state import (
    NO_END_MS,
    AuditedGroup,
    AuditedProducer,
    GroupProgress,
    PartitionState,
    ReceivedReport,
)
from memq.audit.live.questions.end_questions import EndQuestions
from memq.audit.live.questions.held_minutes import HeldAudit
from memq.audit.live.streams import StreamAudit
from memq.audit.minutes import MINUTE_MS, QUEUE, MinuteRow, active_ms, watermark_ms
from memq.errors import MemqError
from memq.format.held_sequences import held_minute, is_held
from memq.format.pointer import Pointer, pointer_mark
from memq.format.ranges import Range, RangeSet
from memq.format.report import ReportedDamage, ReportPart, ReportSpan
from memq.topic import Topic

STREAMS_MAX = 20_000  # producers of one write partition; those that were seen longest ago are forgotten
DAMAGED_MAX = 4_096
GAP_MINUTES_MAX = 24 * 60  # that are unknown after a gap
WAITING_REPORTS_MAX = 4_096  # parts of reports that wait for the queue
OBJECTS_MAX = 256  # newest pointers of a write partition whose objects a finding can name
SPARK_READER, SPARK_TASK = "spark-reader", "spark-task"
_GROUP_STAGES = ("fetched", "dropped", "passed", "processed")
_LOST_ACKED = "acked with all, in no pointer"
_LOST_WEAK = "acked with 1 or sent without acks, in no pointer: a dead broker takes such records with it"
_LOST_BELOW_END = "below the end that its producer reported, in no pointer"
_UNPROVEN_HELD = "acked with 1 or sent without acks, in no pointer: a broker that did not answer may hold such records"
_UNPROVEN = "sent, neither acked nor given up, in no pointer"
_UNPROVEN_BLIND = "acked, and the pointers of that time were not read"
_SKIPPED = "committed beyond it, not processed"
_UNPROVEN_MEMBER = "committed beyond it, and the report of that time is missing"


class PartitionAudit:
    """Audits one write partition.

    `state` is the stored state of an earlier audit; `ends` has the records whose loss needs a proved end.
    """

    def __init__(self, topic: Topic, partition: int, state: PartitionState | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.state = state or PartitionState()
        self.ends = EndQuestions()
        self._dirty: dict[int, None] = dict.fromkeys(self.state.streams)
        self._rows = defaultdict[int, MinuteRow](MinuteRow)
        # No part refers back to this object, so reference counts free its state, which may be large.
        self._row: Callable[[int], MinuteRow] = self._rows.__getitem__
        self._changed = False
        self._next_offset = self.state.next_offset
        self._questions = HeldQuestions()
        self._findings = OpenFindings((topic.name, topic.id, partition), self.state.findings, self._row)
        parts = (partition, self.state.held, self.state, active_ms(topic.settings), self._row, self._findings.note)
        self.held = HeldAudit(*parts)

    # ---- what comes in -------------------------------------------------------------------------------

    def begin_at(self, offset: int) -> None:
        """Note that the queue begins at `offset`.

        If `offset` is after the next pointer to read, retention was faster than this audit.
        """
        if self.state.next_offset < offset:
            self.state.miss(NO_END_MS)
            self.state.next_offset, self.state.mark = offset, 0

    def cut_at(self, offset: int, time_ms: int, now_ms: int) -> None:
        """Note that the queue has lost its pointers from `offset` on, and continues there with others.

        The lost pointers do not come back, and new ones may have their sequences. So the minutes since the queue time
        `time_ms` of the last pointer that is left are unknown, and no member answers for them.
        """
        state = self.state
        state.miss(NO_END_MS)
        state.next_offset, state.mark = offset, 0
        state.objects = {at: key for at, key in state.objects.items() if at < offset}
        for stream in state.streams.values():
            stream.marks.cut(offset)
        for name, group in state.groups.items():
            for client in group.members:
                distrust_reading(group, client)
                group.members[client].at = -1
            if group.stream is not None:
                for client in list(group.stream.tasks):
                    self._stream_of(name, group).distrust(client)
        first, last = time_ms // MINUTE_MS, now_ms // MINUTE_MS
        self.silence(None, range(max(first, last - GAP_MINUTES_MAX), last + 1), 1)
        self._changed = True

    def add_report(self, report: ReceivedReport) -> None:
        """Take a report; it is judged after the next read of the queue."""
        self.state.told.append(report)
        self._changed = True

    def needs_blocks(self, pointer: Pointer) -> bool:
        """Whether the object's index is needed, because the pointer does not show which blocks are new."""
        if pointer.kind != "data" or pointer.partition != self.partition:
            return False
        return (
            bool(pointer.skip)
            or not pointer.producers_complete
            or any(
                entry.producer in self.state.streams
                and any(self.state.streams[entry.producer].account.delivered.overlaps(*piece) for piece in entry.ranges)
                for entry in pointer.producers
            )
        )

    def take_pointer(
        self, offset: int, time_ms: int, pointer: Pointer, blocks: Sequence[tuple[int, int, int]] | None = None
    ) -> None:
        """Take the next pointer of the read partition; `time_ms` is its queue time.

        `blocks` has producer, first and next of each block that is not skipped; None: the pointer names them.
        """
        state = self.state
        if state.copies_ms == NO_END_MS:
            self._miss(time_ms)
        if state.totals is None and pointer.partition == self.partition:
            state.begin(pointer, state.next_offset, time_ms, self.topic.settings.late_ms)
        state.next_offset, state.mark = offset + 1, pointer_mark(pointer)
        state.queue_ms = max(state.queue_ms, time_ms)
        if pointer.partition != self.partition or state.totals is None:
            return
        minute = (pointer.least_ms or time_ms) // MINUTE_MS
        late, missing = pointer.epoch < state.epoch, state.meet(pointer, time_ms)
        if missing:
            cause = f"the totals of pointer {offset} count {missing} records that no pointer before it shows"
            wrong = self._wrong(Kind.TOTALS, cause)
            wrong.offset, wrong.records = offset, missing
            self._findings.add_unnamed(wrong, minute, time_ms)
        for end in pointer.ended:
            self._stream(end.producer).account.close(end, time_ms)
        if pointer.locations:
            state.objects[offset] = pointer.locations[0].key
            if len(state.objects) > OBJECTS_MAX:
                del state.objects[next(iter(state.objects))]
        plain = self.held.take_pointer(offset, time_ms, pointer, _stated(pointer) if blocks is None else blocks)
        new = [self._deliver(offset, time_ms, minute, block, late=late) for block in plain]
        if any(new):  # else a copy, whose records were timed when they came first
            self._row(minute).side(QUEUE).time("committed", pointer.latency)

    def take_unreadable(self, offset: int, time_ms: int, error: MemqError) -> None:
        """Take an entry of the queue that can't be read as a pointer."""
        self.state.next_offset, self.state.mark = offset + 1, 0
        self.state.forget_totals()
        wrong = self._wrong(Kind.POINTER, str(error))
        wrong.offset = offset
        self._findings.add_unnamed(wrong, time_ms // MINUTE_MS, time_ms)

    def take_unsupported(self, offset: int, time_ms: int, error: MemqError) -> None:
        """Note a pointer whose content is unknown: of a newer version, or with an unreadable index.

        It may hold records that were acked before it and that no other pointer has.
        """
        self.state.next_offset, self.state.mark = offset + 1, 0
        self._miss(time_ms)

    def unseen(self, pointer: Pointer) -> list[tuple[int, int, int]]:
        """Return the sequences that only this pointer names, if its blocks are unknown."""
        known = self.state.streams
        return [
            (entry.producer, *hole)
            for entry in pointer.producers
            for piece in entry.ranges
            for hole in (known[entry.producer].account.delivered.holes(*piece) if entry.producer in known else [piece])
        ]

    def take_damage(self, damage: ReportedDamage, now_ms: int) -> None:
        """Take a block that a reader found damaged."""
        stream = self.state.streams.get(damage.producer)
        known = stream is not None and damage.first < damage.next
        if stream is not None and known:
            stream.corrupt.add(damage.first, damage.next)
            self._dirty[damage.producer] = None
            minute = EventMinutes(stream).minute_of(damage.first, now_ms // MINUTE_MS)
        else:
            self.state.damaged[damage.offset] = True
            while len(self.state.damaged) > DAMAGED_MAX:
                del self.state.damaged[next(iter(self.state.damaged))]
            minute = held_minute(damage.first) if is_held(damage.first) else now_ms // MINUTE_MS
        self._findings.damaged(damage, minute, now_ms)

    def silence(self, group: str | None, minutes: Iterable[int], change: int) -> None:
        """Note that a client's reports on some minutes are missing; with `change` = -1, that they arrived."""
        for minute in minutes:
            self._row(minute).side(group or QUEUE).count("silent", change)

    def distrust(self, client: int, group: str, kind: str = "") -> None:
        """Blame a member for no missing record up to its next commit, because a report of it is missing."""
        self.add_report(ReceivedReport(client, group, ReportPart(topic="", topic_id="", partition=-1), 0, kind))

    @property
    def waits(self) -> bool:
        """Whether reports or missing records wait for the next read of the queue."""
        return bool(self.state.told or self.ends.missing() or self.held.waits)

    def hold(self, now_ms: int) -> None:
        """Judge nothing, because the queue can't be read.

        The present minute and the minutes of waiting reports are unknown. At most WAITING_REPORTS_MAX reports wait.
        Older ones are dropped, and their minutes stay unknown.
        """
        state = self.state
        reported = {span.minute: None for each in state.told for span in each.part.spans}
        for minute in (now_ms // MINUTE_MS, *reported):
            if minute not in state.unread:
                state.unread[minute] = True
                self.silence(None, (minute,), 1)
                self._changed = True
        over = len(state.told) - WAITING_REPORTS_MAX
        for dropped in state.told[: max(over, 0)]:
            self.silence(dropped.group, {span.minute: None for span in dropped.part.spans}, 1)
            if dropped.group is not None:
                lost = msgspec.structs.replace(dropped.part, partition=-1)
                self._apply(ReceivedReport(dropped.client, dropped.group, lost, dropped.time_ms, dropped.kind))
        del state.told[: max(over, 0)]

    def settle(self, now_ms: int) -> None:
        """Judge the waiting reports. The queue was read up to an end that was requested after their arrival."""
        self._changed |= bool(self.state.told or self.state.unread)
        self.silence(None, self.state.unread, -1)
        self.state.unread.clear()
        for report in self.state.told:
            self._apply(report)
        self.state.told.clear()
        for producer, stream in self.state.streams.items():
            if producer in self._dirty or stream.waiting or stream.unplaced:
                EventMinutes(stream).count_waiting(self._row, now_ms)
                if _ripen(stream, now_ms) or producer in self._dirty:
                    self._judge(producer, stream, now_ms)
        for group, state in self.state.groups.items():
            if state.stream is not None:
                covered = state.stream.covered
                self._dirty.update(dict.fromkeys(self._stream_of(group, state).settle(now_ms)))
                self._changed |= state.stream.covered != covered
            self._judge_group(group, state, now_ms)
        self.held.settle(now_ms)
        undecided = [p for p, stream in self.state.streams.items() if self._undecided(stream, now_ms - HELD_MS)]
        self.ends.close()
        self._dirty = dict.fromkeys([*undecided, *self.ends.missing()])
        self._forget()

    # ---- what brokers hold ---------------------------------------------------------------------------

    def sought(self, *, again: bool) -> list[Sought]:
        """Return the records that are lost unless a broker holds them.

        With `again`, also return those that are held or in doubt.
        """
        held = [Sought(self.partition, 0, ())] if self.held.asks(again=again) else []
        return [*held, *self._questions.sought(self.partition, again=again)]

    def take_answer(self, sought: Iterable[Sought], answer: HeldAnswer, now_ms: int) -> str:
        """Take the answer of brokers; the next `settle` uses it.

        Return the reason why brokers may hold more records than they answered, "" for none.
        """
        doubt = ""
        if answer.released is not None:
            self.held.take_answer(answer.released)
        for each in sought:
            stream = self.state.streams.get(each.producer)
            if stream is not None:
                doubt = doubt_of(answer, self.state, self.topic, stream.account.end_ms, now_ms)
                held = answer.held.get((self.partition, each.producer), RangeSet())
                self._questions.take(each.producer, HeldWord(RangeSet(each.ranges), held, doubt))
                self._dirty[each.producer] = None
        return doubt

    # ---- what comes out ------------------------------------------------------------------------------

    def take_rows(self) -> dict[int, MinuteRow]:
        """Return the additions to the rows of minutes since the last call, by Unix minute."""
        rows = {minute: row for minute, row in self._rows.items() if row.sides}
        self._rows.clear()
        return rows

    def take_findings(self) -> list[Finding]:
        """Return the findings that changed since the last call; those that ended have `resolved_ms`."""
        return self._findings.take_changed()

    def changed(self) -> bool:
        """Whether the state changed since the last call."""
        changed, self._changed = self._changed or self.state.next_offset != self._next_offset, False
        self._next_offset = self.state.next_offset
        return changed

    def balances(self, now_ms: int) -> list[Balance]:
        """Return the balances of all producers, as `memq audit` has them."""
        return [self._balance(producer, stream, now_ms) for producer, stream in sorted(self.state.streams.items())]

    # ---- reports -------------------------------------------------------------------------------------

    def _apply(self, report: ReceivedReport) -> None:
        part, state = report.part, self.state
        group = state.groups.setdefault(report.group, AuditedGroup()) if report.group is not None else None
        if part.partition != self.partition:  # see `distrust`
            if group is not None and report.kind == SPARK_TASK:
                self._stream_of(report.group or "", group).distrust(report.client)
            elif group is not None:
                distrust_reading(group, report.client)
            return
        for damage in part.damages:
            self.take_damage(damage, report.time_ms)
        self.held.take_reported(part.held, report.group, task=report.kind == SPARK_TASK)
        for span in part.spans:
            self._take_span(span, report)
        if group is not None:
            self._dirty.update(dict.fromkeys(self._take_reading(group, report)))

    def _take_reading(self, group: AuditedGroup, report: ReceivedReport) -> Iterable[int]:
        """Take the report of a reader; return the producers whose verdict may change."""
        if report.kind == SPARK_TASK:
            return self._stream_of(report.group or "", group).take_task(report.client, report.part, report.time_ms)
        if report.kind == SPARK_READER:
            return self._stream_of(report.group or "", group).take_driver(report.part, report.time_ms)
        return take_reading(self.state, group, report.client, report.part)

    def _stream_of(self, name: str, group: AuditedGroup) -> StreamAudit:
        def count(minute: int, records: int) -> None:
            self._row(minute).side(name).count("processed", records)

        return StreamAudit(self.state, group, count)

    def _take_span(self, span: ReportSpan, report: ReceivedReport) -> None:
        stream = self._stream(span.producer)
        if span.stage != "gave-up":  # a name's next instance may use the sequences again, for other records
            read = span.stage in _GROUP_STAGES
            sure = read or (span.stage == "acked" and span.level == ACKS_ALL)
            EventMinutes(stream).take_report(span.minute, span.ranges, self._row, sure=sure, read=read)
        records = sum(next_ - first for first, next_ in span.ranges)
        name = QUEUE
        if span.stage in _GROUP_STAGES:
            name = report.group or QUEUE
            if report.group is None:
                return  # a reader without a group: only its damages count
            if span.stage == "passed":  # again after each start of a member before its first commit
                progress = self.state.groups[report.group].progress.setdefault(span.producer, GroupProgress())
                records = _add(progress.passed, span.ranges)
        elif span.stage == "sent":
            self._count_once(stream, stream.sent, span)
            records = 0
            self._await(stream, span, report.time_ms)
            if not span.level:
                _add(stream.weak, span.ranges)
        elif span.stage == "acked":
            if span.level == ACKS_ALL:
                self._count_once(stream, stream.acked, span)
                records = 0
            else:
                records = _add(stream.weak, span.ranges)
                self._await(stream, span, report.time_ms)
        elif span.stage == "gave-up":
            records = _add(stream.gave_up, span.ranges)
        self._dirty[span.producer] = None
        side = self._row(span.minute).side(name)
        side.count(span.stage, records)
        side.time(span.stage, span.latency)

    def _count_once(self, stream: AuditedProducer, known: RangeSet, span: ReportSpan) -> None:
        """Count records of a stage that are new, in the minutes of the records in the queue."""
        new = [hole for piece in span.ranges for hole in known.holes(*piece)]
        for minute, first, next_ in EventMinutes(stream).dated(new, span.minute):
            self._row(minute).side(QUEUE).count(span.stage, known.add(first, next_))

    def _await(self, stream: AuditedProducer, span: ReportSpan, time_ms: int) -> None:
        """Wait for sequences that brokers took with 1 or without acks: the next owner may still get them."""
        held_ms = 0 if span.level == ACKS_ALL else HELD_MS
        due_ms = time_ms + active_ms(self.topic.settings) + held_ms
        stream.waiting.extend((due_ms, *piece) for piece in span.ranges)

    # ---- the queue -----------------------------------------------------------------------------------

    def _miss(self, time_ms: int) -> None:
        """Note that no pointer between the last one and this queue time was read: its minutes are unknown."""
        self.state.miss(time_ms + self.topic.settings.late_ms)
        first, last = (self.state.queue_ms or time_ms) // MINUTE_MS, time_ms // MINUTE_MS
        self.silence(None, range(max(first, last - GAP_MINUTES_MAX), last + 1), 1)

    def _deliver(self, offset: int, time_ms: int, minute: int, block: tuple[int, int, int], *, late: bool) -> bool:
        """Take a block of a pointer. Returns whether it is no copy."""
        producer, first, next_ = block
        stream = self._stream(producer)
        new = stream.account.delivered.holes(first, next_)
        fate = stream.account.deliver(first, next_, time_ms)
        if fate is Fate.COPY:
            self._row(minute).side(QUEUE).count("copies", next_ - first)
            return False
        if fate is Fate.DOUBLED:
            stream.doubled_at = offset
        for piece in new:
            stream.marks.add(offset, *piece)
        EventMinutes(stream).wait(new, minute, time_ms, late=late)
        return True

    def _stream(self, producer: int) -> AuditedProducer:
        self._dirty[producer] = None
        stream = self.state.streams.get(producer)
        if stream is None:
            recent = RecentRanges(self.topic.settings.reader_window_ms)
            stream = self.state.streams[producer] = AuditedProducer(Account(recent, self.state.copies_ms))
        return stream

    # ---- the verdict ---------------------------------------------------------------------------------

    def _balance(self, producer: int, stream: AuditedProducer, now_ms: int) -> Balance:
        active_since_ms = watermark_ms(self.topic.settings, now_ms)
        # What is missing below its end, `_judge` asks brokers for.
        asked = HeldWord(RangeSet([(0, stream.account.end or 0)]))
        evidence = Evidence(expired=self.state.expired, active_since_ms=active_since_ms, word=asked)
        return stream.account.settle(self.partition, producer, evidence)

    def _undecided(self, stream: AuditedProducer, now_ms: int) -> bool:
        """Whether time alone may change the verdict: the end is known, and late pointers may still arrive."""
        account = stream.account
        return account.end is not None and account.end_ms >= watermark_ms(self.topic.settings, now_ms)

    def _judge(self, producer: int, stream: AuditedProducer, now_ms: int) -> None:
        """Find the sequences of a producer that are lost, doubled or unproven in the queue."""
        there = [stream.account.delivered, stream.gave_up, stream.account.burned]
        acked, blind = self._seen(stream, apart(stream.acked, stream.account.delivered))
        acked = self.ends.decide(producer, acked, self._lost(producer))
        below = self._below_end(producer, stream, now_ms)
        weak = common(apart(stream.weak, *there, stream.acked, RangeSet(below)), stream.overdue)
        weak, blind_weak = self._seen(stream, weak)
        open_ = apart(stream.overdue, *there, stream.acked, stream.weak, RangeSet(below))
        weak, below, doubtful = self._not_held(producer, weak, below, sure=not stream.account.weak)
        for kind, cause, pieces in (
            (Kind.LOST, _LOST_ACKED, acked),
            (Kind.LOST, _LOST_WEAK, weak),
            (Kind.LOST, _LOST_BELOW_END, below),
            (Kind.HOLE, _UNPROVEN_HELD, doubtful),
            (Kind.HOLE, _UNPROVEN, open_),
            (Kind.HOLE, _UNPROVEN_BLIND, blind + blind_weak),
            (Kind.DOUBLED, "twice in the queue, and no reader drops it", list(stream.account.doubled)),
        ):
            if pieces or self._findings.any_of(producer):
                self._hold(self._wrong(kind, cause, producer), pieces, stream, now_ms)

    def _not_held(
        self, producer: int, weak: list[Range], below: list[Range], *, sure: bool
    ) -> tuple[list[Range], list[Range], list[Range]]:
        """Return the parts of both that are lost, and the doubtful part.

        `sure`: no broker can hold what is below its end.
        """
        self._questions.begin(producer)
        if not weak and not below:
            return [], [], []
        doubted = self._findings.ranges(self._wrong(Kind.HOLE, _UNPROVEN_HELD, producer))
        lost = self._lost(producer)
        of_weak = self._questions.decide(producer, weak, lost, doubted)
        if sure:
            return of_weak.lost, below, of_weak.doubtful
        of_below = self._questions.decide(producer, below, lost, doubted)
        return of_weak.lost, of_below.lost, of_weak.doubtful + of_below.doubtful

    def _lost(self, producer: int) -> RangeSet:
        """Return the sequences in open findings of records lost in the queue, for any cause."""
        if not self._findings.any_of(producer):
            return RangeSet()
        causes = (_LOST_ACKED, _LOST_WEAK, _LOST_BELOW_END)
        known = (self._findings.ranges(self._wrong(Kind.LOST, cause, producer)) for cause in causes)
        return RangeSet(piece for ranges in known for piece in ranges)

    def _below_end(self, producer: int, stream: AuditedProducer, now_ms: int) -> list[Range]:
        """Return the ranges below a producer's reported end that no pointer has.

        A broker may hold records for the next owner if they were sent with less than `all`, or at a level that no
        report names yet. Until that time is over, only overdue records that were sent with `all` are returned. A named
        producer reports several ends: records that were lost below an earlier end stay lost.
        """
        if stream.account.end is None:
            return []
        balance = self._balance(producer, stream, now_ms)
        missing = apart(balance.lost, stream.gave_up, stream.acked)
        known = common(missing, self._lost(producer))
        if self._undecided(stream, now_ms):
            return known
        if self._undecided(stream, now_ms - HELD_MS):
            return list(RangeSet([*common(apart(missing, stream.weak), stream.overdue), *known]))
        return missing

    def _seen(self, stream: AuditedProducer, missing: list[Range]) -> tuple[list[Range], list[Range]]:
        """Split missing records into lost ones, and those that may be in unread pointers."""
        if not missing or not self.state.expired:
            return missing, []
        dated = EventMinutes(stream).dated(missing, 0)
        blind = RangeSet((first, next_) for minute, first, next_ in dated if minute * MINUTE_MS <= self.state.copies_ms)
        return apart(missing, blind), common(missing, blind)

    def _judge_group(self, group: str, state: AuditedGroup, now_ms: int) -> None:
        for producer in list(self._dirty):
            progress, stream = state.progress.get(producer), self.state.streams.get(producer)
            if progress is None or stream is None:
                continue
            handled = (progress.ever, progress.passed)
            for kind, cause, found in (
                (Kind.LOST, _SKIPPED, apart(progress.lost, *handled, stream.corrupt)),
                (Kind.HOLE, _UNPROVEN_MEMBER, apart(progress.unproven, *handled, stream.corrupt)),
                (Kind.DOUBLED, "processed twice", list(progress.doubled)),
            ):
                if found or self._findings.any_of(producer):
                    self._hold(self._wrong(kind, cause, producer, group), found, stream, now_ms)

    def _wrong(self, kind: Kind, cause: str, producer: int = 0, group: str = "") -> Finding:
        stage = IN_GROUP if group else IN_QUEUE
        return Finding(kind=kind, partition=self.partition, stage=stage, producer=producer, group=group, cause=cause)

    def _hold(self, wrong: Finding, pieces: list[Range], stream: AuditedProducer, now_ms: int) -> None:
        fallback = (stream.account.seen_ms or now_ms) // MINUTE_MS
        dating = EventMinutes(stream)

        def locate(sequence: int) -> tuple[int, str]:
            offset = stream.marks.offset_of(sequence) if sequence in stream.account.delivered else -1
            if wrong.kind is Kind.DOUBLED and wrong.stage == IN_QUEUE:
                offset = stream.doubled_at
            return offset, self.state.objects.get(offset, "")

        self._findings.hold(wrong, pieces, lambda left: dating.dated(left, fallback), locate, now_ms)

    def _forget(self) -> None:
        """Forget the producers that were silent longest, also in the groups."""
        over = len(self.state.streams) - STREAMS_MAX
        if over <= 0:
            return
        streams = self.state.streams
        for producer in sorted(streams, key=lambda each: streams[each].account.seen_ms)[:over]:
            del streams[producer]
            self._questions.forget(producer)
            self.ends.forget(producer)
            for group in self.state.groups.values():
                group.progress.pop(producer, None)
                for reading in group.readings():
                    reading.now.pop(producer, None)
                    reading.reached.pop(producer, None)
        self.state.expired = True  # of one that comes back the beginning is not known


def _stated(pointer: Pointer) -> list[tuple[int, int, int]]:
    return [(entry.producer, first, next_) for entry in pointer.producers for first, next_ in entry.ranges]


def _add(ranges: RangeSet, pieces: Iterable[Range]) -> int:
    return sum(ranges.add(*piece) for piece in pieces)


def _ripen(stream: AuditedProducer, now_ms: int) -> bool:
    """Mark records that have waited long enough as overdue; return whether there are any."""
    left, ripe = [], False
    for due_ms, first, next_ in stream.waiting:
        if due_ms > now_ms:
            left += [(due_ms, *hole) for hole in stream.account.delivered.holes(first, next_)]
        else:
            for hole in stream.account.delivered.holes(first, next_):
                ripe = True
                stream.overdue.add(*hole)
    stream.waiting[:] = left
    return ripe
