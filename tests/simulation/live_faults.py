"""Faults injected into the published data of a run: at each stage a loss, a copy, a delay and damage.

No reader got a lost record, so no report has it. A doubled batch is at the end of the log, where no group has read.
Each fault has the finding that the audit must show for it. Two faults do not exist: an object can't be late, because
its pointer follows it; and an object that is stored twice is no data, because no pointer names the copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from memq.audit.account import apart, common
from memq.audit.checks.object_reads import named
from memq.audit.finding import IN_GROUP, IN_OBJECT, IN_QUEUE, Kind
from memq.format.held_sequences import is_held
from memq.format.object import BlockEntry, open_object
from memq.format.pointer import Pointer, ProducerRanges
from memq.format.ranges import Range, RangeSet
from memq.format.report import Begin, Report, ReportedDamage, ReportPart, ReportSpan
from memq.topic import Position, Topic
from tests.simulation.live_replay import History, Named, Unreadable, Wait
from tests.simulation.reader import LogBlock, LogEntry, Source

ALL = 2
READ = ("fetched", "dropped", "processed")
STRANGER = 0xDEAD  # a client that the run does not have
Found = tuple[int, Report, ReportPart, ReportSpan]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A published history with a fault in it, and the findings that the audit must add.

    `held` is how many held records it must call lost. `counted` is a count of the queue that grows by so many records;
    `unreadable` the offset of a pointer that it can't read. `silent`: a word is missing, so the audit may name less.
    """

    history: History
    named: Named = field(default_factory=dict)
    counted: tuple[str, int] = ("", 0)
    unreadable: int = -1
    silent: bool = False
    held: int = 0


class LiveFaults:
    """Does faults to `history`; None where it has nothing to do one to. `objects` are those of the store, by key."""

    def __init__(self, topic: Topic, history: History, objects: Mapping[str, bytes], draw: random.Random) -> None:
        self._topic = topic
        self._history = history
        self._objects = objects
        self._draw = draw
        self._entries = [each for each in history if isinstance(each, LogEntry)]
        self.there: dict[Source, RangeSet] = {}
        self._twice: dict[Source, RangeSet] = {}
        for block in (block for entry in self._entries for block in entry.blocks):
            there = self.there.setdefault(block.source, RangeSet())
            for piece in common([(block.first, block.following)], there):
                self._twice.setdefault(block.source, RangeSet()).add(*piece)
            there.add(block.first, block.following)

    # ---- a client, after its ack ---------------------------------------------------------------------

    def acked_and_not_sent(self) -> InjectedFault | None:
        """A client reports an ack of records that it never sent."""
        spans = [each for each in self._spans("acked") if each[3].level == ALL and self._has(each[2].partition)]
        if not spans:
            return None
        at, _, part, span = self._draw.choice(spans)
        first = self._reach((part.partition, span.producer)) + 10
        wrong = replace(span, ranges=(*span.ranges, (first, first + 3)))
        key = (Kind.LOST, IN_QUEUE, "", part.partition, span.producer)
        return InjectedFault(self._with(at, part, span, (wrong,)), {key: RangeSet([(first, first + 3)])})

    def half_a_block_again(self) -> InjectedFault | None:
        """A client sends the last record of a block again, in a block with a new one: readers deliver it twice."""
        blocks = [
            (entry, block)
            for entry in self._whole()
            for block in entry.blocks
            if block.following == self._reach(block.source) and block.source not in self._ended()
        ]
        if not blocks:
            return None
        entry, last = self._draw.choice(blocks)
        block = LogBlock(last.source, last.following - 1, last.following + 1, 0, (b"", b""))
        key = (Kind.DOUBLED, IN_QUEUE, "", *last.source)
        doubled = RangeSet([(last.following - 1, last.following)])
        return InjectedFault([*self._history, self._behind(entry.pointer, (block,))], {key: doubled})

    def producer_heard_late(self) -> InjectedFault | None:
        """All reports of a producer come when all else is over."""
        return self._heard_late("producer")

    def report_damaged(self) -> InjectedFault | None:
        """A report can't be read: its number is missing then."""
        reports = [each for each in self._history if isinstance(each, tuple)]
        if not reports:
            return None
        damaged = self._draw.choice(reports)
        return InjectedFault([landed for landed in self._history if landed is not damaged], silent=True)

    # ---- a broker ------------------------------------------------------------------------------------

    def block_left_out(self) -> InjectedFault | None:
        """A broker acks a batch, and leaves a block of it out."""
        batches = [entry for entry in self._whole_and_acked(ALL) if len(entry.blocks) > 1]
        if not batches:
            return None
        entry = self._draw.choice(batches)
        lost = self._draw.choice(entry.blocks)
        left = tuple(block for block in entry.blocks if block is not lost)
        less = LogEntry(entry.offset, entry.time_ms, _with_blocks(entry.pointer, left), left)
        history = [less if landed is entry else landed for landed in self._unread([lost])]
        return InjectedFault(history, _named(Kind.LOST, IN_QUEUE, [lost]))

    def acked_with_1_and_lost(self) -> InjectedFault | None:
        """A broker dies with a batch that it has acked with 1, and nobody has it."""
        return self._lost(self._whole_and_acked(1))

    def batch_again_too_late(self) -> InjectedFault | None:
        """A broker publishes a batch once more when its readers have forgotten it."""
        return self._again(2 * self._topic.settings.reader_window_ms, lambda entry: True)

    def queue_stands_still(self) -> InjectedFault | None:
        """Nothing lands for a while, as long as pointers may be late; what was sent and acked is judged meanwhile."""
        at = self._draw.randrange(len(self._history) + 1)
        wait = Wait(self._draw.randint(1, self._topic.settings.stale_publish_ms))
        return InjectedFault([*self._history[:at], wait, *self._history[at:]])

    def block_damaged(self) -> InjectedFault | None:
        """A bit of a block's payload flips before it is stored: readers know whose it is."""
        found = self._pick_read()
        if found is None:
            return None
        entry, block = found
        damage = self._damage(entry, block, producer=block.source[1], first=block.first, next=block.following)
        return self._read_badly(entry, [block], [damage])

    # ---- the queue -----------------------------------------------------------------------------------

    def pointer_lost(self) -> InjectedFault | None:
        """A pointer is gone."""
        return self._lost(self._whole_and_acked(ALL))

    def pointer_again(self) -> InjectedFault | None:
        """A pointer comes again, soon enough to be known: readers drop the copy."""
        last_ms = max((entry.time_ms for entry in self._entries), default=0)
        injected = self._again(0, lambda entry: entry.time_ms > last_ms - self._topic.settings.reader_window_ms // 2)
        if injected is None:
            return None
        records = sum(ranges.total for ranges in injected.named.values())
        return InjectedFault(injected.history, counted=("copies", records))

    def pointer_late(self) -> InjectedFault | None:
        """A pointer of an older epoch comes among those of a newer one."""
        epochs: dict[int, int] = {}
        late: list[LogEntry] = []
        whole = self._whole()
        for entry in self._entries:
            known, epoch = epochs.get(entry.pointer.partition, -1), entry.pointer.epoch
            if entry in whole and known == epoch > 0:
                late.append(entry)
            epochs[entry.pointer.partition] = max(known, epoch)
        if not late:
            return None
        entry = self._draw.choice(late)
        older = LogEntry(
            entry.offset, entry.time_ms, replace(entry.pointer, epoch=entry.pointer.epoch - 1), entry.blocks
        )
        history: History = [older if landed is entry else landed for landed in self._history]
        return InjectedFault(history, counted=("late", _records(entry.blocks)))

    def pointer_damaged(self) -> InjectedFault | None:
        """A pointer can't be read any more."""
        batches = self._whole_and_acked(ALL)
        if not batches:
            return None
        entry = self._draw.choice(batches)
        history = [Unreadable(entry) if landed is entry else landed for landed in self._unread(entry.blocks)]
        return InjectedFault(history, _named(Kind.LOST, IN_QUEUE, entry.blocks), unreadable=entry.offset)

    # ---- the store -----------------------------------------------------------------------------------

    def object_gone(self) -> InjectedFault | None:
        """An object is gone."""
        found = self._pick_read()
        if found is None:
            return None
        entry, _ = found
        damage = self._damage(entry, entry.blocks[0], records=entry.pointer.records)
        return self._read_badly(entry, entry.blocks, named(damage, entry.pointer, ()))

    def object_cut(self) -> InjectedFault | None:
        """An object ends too soon, and its index is gone with its end: the headers of what is left tell the rest."""
        entry, entries = self._pick_indexed()
        if entry is None:
            return None
        left = self._draw.randrange(1, len(entries))
        damage = self._damage(entry, entry.blocks[left], records=_records(entry.blocks[left:]))
        return self._read_badly(entry, entry.blocks[left:], named(damage, entry.pointer, entries[:left]))

    def header_damaged(self) -> InjectedFault | None:
        """A block's header is damaged: the object's index says whose it is."""
        entry, entries = self._pick_indexed()
        if entry is None:
            return None
        block = self._draw.choice(entry.blocks)
        return self._read_badly(entry, [block], named(self._damage(entry, block), entry.pointer, entries))

    # ---- a consumer ----------------------------------------------------------------------------------

    def passed_over(self) -> InjectedFault | None:
        """A member commits behind records that it did not process."""
        return self._in_group(Kind.LOST, lambda span: ())

    def processed_twice(self) -> InjectedFault | None:
        """A member processes records twice."""
        return self._in_group(Kind.DOUBLED, lambda span: (span, span))

    def consumer_heard_late(self) -> InjectedFault | None:
        """All reports of a consumer come when all else is over."""
        return self._heard_late("consumer")

    def died_after_fetch(self) -> InjectedFault | None:
        """One more member of a group begins where the group is, fetches, and dies."""
        spans = list(self._spans("fetched"))
        if not spans:
            return None
        at, report, part, span = self._draw.choice(spans)
        stood = [
            other.committed
            for landed in self._history[:at]
            if isinstance(landed, tuple) and landed[1].name == report.name
            for other in landed[1].parts
            if other.partition == part.partition and other.committed
        ]
        begins = tuple(Begin(at=position, reason="stored") for position in stood[-1:])
        said = replace(part, spans=(span,), damages=(), committed="", begins=begins)
        stranger = replace(report, client=STRANGER, number=0, last=False, parts=(said,))
        home = next(landed[0] for landed in self._history if isinstance(landed, tuple) and landed[1] is report)
        return InjectedFault([*self._history[: at + 1], (home, stranger), *self._history[at + 1 :]])

    # ---- what there is to do it to -------------------------------------------------------------------

    def _spans(self, stage: str) -> Iterator[Found]:
        for at, landed in enumerate(self._history):
            for part in landed[1].parts if isinstance(landed, tuple) else ():
                for span in part.spans:
                    if span.stage == stage and isinstance(landed, tuple) and not is_held(span.ranges[0][0]):
                        yield at, landed[1], part, span

    def _has(self, partition: int) -> bool:
        return any(entry.pointer.partition == partition for entry in self._entries)

    def _reach(self, source: Source) -> int:
        """Return one above all sequences that anybody knows of."""
        ends = [
            end.next_sequence for entry in self._entries for end in entry.pointer.ended if end.producer == source[1]
        ]
        reported = [
            span.ranges[-1][1]
            for stage in ("sent", "acked", "gave-up")
            for _, _, part, span in self._spans(stage)
            if (part.partition, span.producer) == source
        ]
        return max(self.there.get(source, RangeSet([(0, 1)])).next, *ends, *reported, 0)

    def _ended(self) -> list[Source]:
        return [(entry.pointer.partition, end.producer) for entry in self._entries for end in entry.pointer.ended]

    def _whole(self) -> list[LogEntry]:
        """Return the batches all of whose records lie in them alone, and were not held."""
        batches = self._batches_with_no_copies()
        return [each for each in batches if not any(is_held(block.first) for block in each.blocks)]

    def _batches_with_no_copies(self) -> list[LogEntry]:
        return [
            entry
            for entry in self._entries
            if entry.blocks
            and not entry.pointer.skip
            and entry.pointer.producers_complete
            and not any(
                self._twice.get(block.source, RangeSet()).overlaps(block.first, block.following)
                for block in entry.blocks
            )
        ]

    def _whole_and_acked(self, level: int) -> list[LogEntry]:
        """Return those of which all is reported as acked at a level."""
        acked: dict[Source, RangeSet] = {}
        for _, _, part, span in self._spans("acked"):
            for piece in span.ranges if span.level == level else ():
                acked.setdefault((part.partition, span.producer), RangeSet()).add(*piece)
        return [
            entry
            for entry in self._whole()
            if all(acked.get(each.source, RangeSet()).covers(each.first, each.following) for each in entry.blocks)
        ]

    def _read(self) -> list[LogEntry]:
        """Return the batches all of whose records somebody fetched."""
        read: dict[Source, RangeSet] = {}
        for _, _, part, span in self._spans("fetched"):
            for piece in span.ranges:
                read.setdefault((part.partition, span.producer), RangeSet()).add(*piece)
        return [
            entry
            for entry in self._whole()
            if all(read.get(each.source, RangeSet()).covers(each.first, each.following) for each in entry.blocks)
        ]

    def _pick_read(self) -> tuple[LogEntry, LogBlock] | None:
        """Return a block of such a batch, with its batch."""
        found = self._read()
        if not found:
            return None
        entry = self._draw.choice(found)
        return entry, self._draw.choice(entry.blocks)

    def _pick_indexed(self) -> tuple[LogEntry | None, Sequence[BlockEntry]]:
        """Return a batch of several blocks that somebody fetched, with the entries of its object's index."""
        found = [
            entry for entry in self._read() if len(entry.blocks) > 1 and entry.pointer.locations[0].key in self._objects
        ]
        if not found:
            return None, ()
        entry = self._draw.choice(found)
        location = entry.pointer.locations[0]
        return entry, open_object(self._objects[location.key]).blocks_in(location.offset, location.length)

    # ---- what is done --------------------------------------------------------------------------------

    def _lost(self, batches: Sequence[LogEntry]) -> InjectedFault | None:
        if not batches:
            return None
        lost = self._draw.choice(batches)
        history = [landed for landed in self._unread(lost.blocks) if landed is not lost]
        return InjectedFault(history, _named(Kind.LOST, IN_QUEUE, lost.blocks))

    def _again(self, after_ms: int, usable: Callable[[LogEntry], bool]) -> InjectedFault | None:
        batches = [entry for entry in self._whole() if usable(entry)]
        if not batches:
            return None
        entry = self._draw.choice(batches)
        again = self._behind(entry.pointer, entry.blocks, after_ms)
        return InjectedFault([*self._history, again], _named(Kind.DOUBLED, IN_QUEUE, entry.blocks))

    def _behind(self, pointer: Pointer, blocks: tuple[LogBlock, ...], after_ms: int = 0) -> LogEntry:
        """Return an entry behind all others of a read partition, with these blocks of a batch."""
        place = self._topic.read_partition_of(pointer.partition)
        here = [entry for entry in self._entries if self._topic.read_partition_of(entry.pointer.partition) == place]
        last = max((entry for entry in here if entry.pointer.partition == pointer.partition), key=lambda e: e.offset)
        records, size = last.pointer.records, last.pointer.stored_bytes
        made = replace(pointer, epoch=last.pointer.epoch, totals=last.pointer.totals.plus(records, size))
        time_ms = max(entry.time_ms for entry in self._entries) + after_ms
        return LogEntry(max(entry.offset for entry in here) + 1, time_ms, _with_blocks(made, blocks), blocks)

    def _unread(self, blocks: Sequence[LogBlock]) -> History:
        """Return the history in which no reader reports these blocks."""
        return self._map_parts(lambda part: _without(part, blocks))

    def _read_badly(self, entry: LogEntry, blocks: Sequence[LogBlock], damages: list[ReportedDamage]) -> InjectedFault:
        """Let each reader of these blocks report damage instead of them."""

        def read(part: ReportPart) -> ReportPart:
            without = _without(part, blocks)
            fetched = any(
                span.stage == "fetched"
                and (part.partition, span.producer) == block.source
                and RangeSet(span.ranges).overlaps(block.first, block.following)
                for span in part.spans
                for block in blocks
            )
            return replace(without, damages=(*part.damages, *damages)) if fetched else without

        return InjectedFault(self._map_parts(read), _named(Kind.CORRUPT, IN_OBJECT, blocks))

    def _damage(self, entry: LogEntry, block: LogBlock, *, records: int = 0, **source: int) -> ReportedDamage:
        return ReportedDamage(
            object=entry.pointer.locations[0].key,
            block=entry.blocks.index(block),
            offset=entry.offset,
            records=records or block.following - block.first,
            cause="checksum",
            **source,
        )

    def _heard_late(self, kind: str) -> InjectedFault | None:
        reports = [landed for landed in self._history if isinstance(landed, tuple) and landed[1].kind == kind]
        if not reports:
            return None
        client = self._draw.choice(reports)[1].client
        late = [landed for landed in reports if landed[1].client == client]
        rest = [landed for landed in self._history if not isinstance(landed, tuple) or landed[1].client != client]
        return InjectedFault([*rest, *late])

    def _in_group(self, kind: Kind, change: Callable[[ReportSpan], tuple[ReportSpan, ...]]) -> InjectedFault | None:
        """Change one span of a group that processed its records once, and never went elsewhere."""
        spans = [each for each in self._spans("processed") if each[2].committed]
        self._draw.shuffle(spans)
        checks = (self._once, self._is_committed, self._is_heard, self._is_judged)
        usable = (each for each in spans if all(check(each) for check in checks) and not self._is_damaged(each))
        found = next(usable, None)
        if found is None:
            return None
        at, report, part, span = found
        key = (kind, IN_GROUP, report.name, part.partition, span.producer)
        return InjectedFault(self._with(at, part, span, change(span)), {key: RangeSet(span.ranges)})

    def _is_committed(self, wanted: Found) -> bool:
        """Whether the group has come to the end of all batches that hold a span: the audit judges whole batches."""
        _, report, part, span = wanted
        stored = self._commits(report, part)
        ends = [
            Position(max(stored).read_partition, entry.offset, entry.pointer.records)
            for entry in self._batches_of(part, span)
        ]
        return all(end <= max(stored) for end in ends)

    def _commits(self, report: Report, part: ReportPart) -> list[Position]:
        """Return what the group has committed in a partition, as its members report it."""
        return [
            Position.parse(here.committed)
            for landed in self._history
            if isinstance(landed, tuple) and landed[1].name == report.name
            for here in landed[1].parts
            if here.partition == part.partition and here.committed
        ]

    def _is_judged(self, wanted: Found) -> bool:
        """Whether members that were heard answer for all batches that hold a part of a span.

        A member that began inside of a batch answers for whole batches only. If one began after a batch whose end no
        report has committed, another one passed that end, and nothing was heard of it.
        """
        _, report, part, span = wanted
        begins = [
            Position.parse(begin.at)
            for landed in self._history
            if isinstance(landed, tuple) and landed[1].name == report.name
            for here in landed[1].parts
            if here.partition == part.partition
            for begin in here.begins
            if begin.at
        ]
        inside = {begin.pointer_offset for begin in begins if begin.record_index}
        commits = self._commits(report, part)
        for entry in self._batches_of(part, span):
            later = min((begin for begin in begins if begin.pointer_offset > entry.offset), default=None)
            if later is not None:
                end = Position(later.read_partition, entry.offset, entry.pointer.records)
                if not any(end <= commit <= later for commit in commits):
                    return False
            if entry.offset in inside:
                return False
        return True

    def _batches_of(self, part: ReportPart, span: ReportSpan) -> list[LogEntry]:
        wanted, source = RangeSet(span.ranges), (part.partition, span.producer)
        return [
            entry
            for entry in self._entries
            if any(block.source == source and wanted.overlaps(block.first, block.following) for block in entry.blocks)
        ]

    def _is_heard(self, wanted: Found) -> bool:
        """Whether no report of the member is missing before this one: else the audit does not know where it began."""
        at, report, _, _ = wanted
        until = [each for each in self._history[: at + 1] if isinstance(each, tuple)]
        home = until[-1][0]
        heard = [each.number for where, each in until if (where, each.client) == (home, report.client)]
        return sorted(heard) == list(range(report.number + 1))

    def _is_damaged(self, wanted: Found) -> bool:
        """Whether a reader reports records of a span as damaged, which explains why a group has not processed them."""
        _, _, part, span = wanted
        damages = (
            damage
            for landed in self._history
            if isinstance(landed, tuple)
            for here in landed[1].parts
            if here.partition == part.partition
            for damage in here.damages
        )
        return any(
            damage.producer == span.producer and RangeSet(span.ranges).overlaps(damage.first, damage.next)
            for damage in damages
        )

    def _once(self, wanted: Found) -> bool:
        _, report, part, span = wanted
        members = [each[1] for each in self._history if isinstance(each, tuple) and each[1].name == report.name]
        if any(begin.reason == "seek" for member in members for each in member.parts for begin in each.begins):
            return False
        others = RangeSet(
            piece
            for _, member, here, other in self._spans("processed")
            if other is not span and member.name == report.name
            if (here.partition, other.producer) == (part.partition, span.producer)
            for piece in other.ranges
        )
        return not any(others.overlaps(*piece) for piece in span.ranges)

    def _with(self, at: int, part: ReportPart, span: ReportSpan, instead: tuple[ReportSpan, ...]) -> History:
        """Return the history with one span of a report replaced."""
        spans = tuple(new for old in part.spans for new in (instead if old is span else (old,)))
        return self._map_parts(lambda old: replace(old, spans=spans) if old is part else old)

    def _map_parts(self, change: Callable[[ReportPart], ReportPart]) -> History:
        changed: History = []
        for landed in self._history:
            if isinstance(landed, tuple):
                home, report = landed
                landed = (home, replace(report, parts=tuple(map(change, report.parts))))
            changed.append(landed)
        return changed


FAULTS: dict[str, tuple[Callable[[LiveFaults], InjectedFault | None], ...]] = {
    "client": (
        LiveFaults.acked_and_not_sent,
        LiveFaults.half_a_block_again,
        LiveFaults.producer_heard_late,
        LiveFaults.report_damaged,
    ),
    "broker": (
        LiveFaults.block_left_out,
        LiveFaults.acked_with_1_and_lost,
        LiveFaults.batch_again_too_late,
        LiveFaults.queue_stands_still,
        LiveFaults.block_damaged,
    ),
    "pointer": (
        LiveFaults.pointer_lost,
        LiveFaults.pointer_again,
        LiveFaults.pointer_late,
        LiveFaults.pointer_damaged,
    ),
    "object": (LiveFaults.object_gone, LiveFaults.object_cut, LiveFaults.header_damaged),
    "consumer": (
        LiveFaults.passed_over,
        LiveFaults.processed_twice,
        LiveFaults.consumer_heard_late,
        LiveFaults.died_after_fetch,
    ),
}


def _named(kind: Kind, stage: str, blocks: Iterable[LogBlock]) -> Named:
    found = Named()
    for block in blocks:
        found.setdefault((kind, stage, "", *block.source), RangeSet()).add(block.first, block.following)
    return found


def _records(blocks: Iterable[LogBlock]) -> int:
    return sum(block.following - block.first for block in blocks)


def _with_blocks(pointer: Pointer, blocks: Sequence[LogBlock]) -> Pointer:
    """Return the pointer as one of these blocks."""
    ranges: dict[int, RangeSet] = {}
    for block in blocks:
        ranges.setdefault(block.source[1], RangeSet()).add(block.first, block.following)
    producers = tuple(ProducerRanges(producer, tuple(found)) for producer, found in ranges.items())
    return replace(pointer, producers=producers, records=_records(blocks))


def _without(part: ReportPart, blocks: Sequence[LogBlock]) -> ReportPart:
    """Return what a part says without that these blocks were read."""
    gone: dict[int, list[Range]] = {}
    for block in blocks:
        if block.source[0] == part.partition:
            gone.setdefault(block.source[1], []).append((block.first, block.following))
    spans = []
    for span in part.spans:
        if span.stage in READ and span.producer in gone:
            span = replace(span, ranges=tuple(apart(span.ranges, RangeSet(gone[span.producer]))), latency=())
        if span.ranges:
            spans.append(span)
    return replace(part, spans=tuple(spans))
