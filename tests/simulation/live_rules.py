"""The live audit against the truth: it plays what landed, in that order, and in a sound run it names nothing wrong.

Then a fault is done to what landed, and the audit plays it again: it must name these records, and no others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from memq.audit.account import apart
from memq.audit.live.finding import IN_GROUP, IN_OBJECT, IN_QUEUE
from memq.audit.live.home import HomeAudit, Key
from memq.audit.live.partition import PartitionAudit
from memq.audit.verdict import Kind
from memq.format.ranges import RangeSet
from memq.format.report import Damage, Part, Report, Span
from memq.topic import Topic
from tests.simulation.reader import LogEntry, Source

Landed = LogEntry | tuple[int, Report]  # an entry of the topic, or a report with its home
Named = dict[tuple[str, str, str, int, int], RangeSet]  # kind, stage, group, partition, producer
History = list[Landed]
ROUND_RATE = 0.2
LATER_MS = 3_600_000
ALL = 2
IDS = (Kind.LOST.title, Kind.DOUBLED.title, Kind.CORRUPT.title)  # of findings that name records


class LiveRules:
    """`history` is what landed, without copies of reports; `fail` is told what the audit says wrongly."""

    def __init__(self, topic: Topic, history: History, fail: Callable[[str], None]) -> None:
        self._topic = topic
        self._history = history
        self._fail = fail
        self.injected = 0
        self._entries = [each for each in history if isinstance(each, LogEntry)]
        self._there: dict[Source, RangeSet] = {}
        for entry in self._entries:
            for block in entry.blocks:
                self._there.setdefault(block.source, RangeSet()).add(block.first, block.following)

    def check(self, draw: random.Random) -> None:
        """Play the history as it is, then once with each fault that can be done to it."""
        sound = self._play(self._history, draw)
        for (kind, stage, group, *source), ranges in sound.items():
            there = self._there.get((source[0], source[1]), RangeSet())
            if (kind, stage) != (Kind.LOST.title, IN_QUEUE) or apart(ranges, there) != list(ranges):
                self._fail(f"the live audit of a sound run says {kind} in {stage} {group} of {source}: {ranges}")
        for injure in (self._lose, self._pass_over, self._double, self._damage):
            history, injected = injure(draw)
            if not injected:
                continue
            self.injected += 1
            found = self._play(history, draw)
            for key in sorted({**found, **injected}):
                wanted = list(sound.get(key, RangeSet())) + list(injected.get(key, RangeSet()))
                if found.get(key, RangeSet()) != RangeSet(wanted):
                    self._fail(f"after {injure.__name__} the live audit says {found.get(key)} of {key}, not {wanted}")

    # ---- the audit -----------------------------------------------------------------------------------

    def _play(self, history: Sequence[Landed], draw: random.Random) -> Named:
        """Let the audit follow in rounds of any size, and return all that it names; nothing is ever taken back."""
        partitions = dict.fromkeys(entry.pointer.partition for entry in self._entries)
        audits: dict[Key, PartitionAudit] = {(self._topic.id, n): PartitionAudit(self._topic, n) for n in partitions}
        homes: dict[int, HomeAudit] = {}
        now_ms, named = 0, Named()
        for landed in history:
            if isinstance(landed, LogEntry):
                now_ms = max(now_ms, landed.time_ms)
                self._take(audits, landed)
            else:
                homes.setdefault(landed[0], HomeAudit(audits.get)).take(landed[1], now_ms)
            if draw.random() < ROUND_RATE:
                self._settle(audits, now_ms, named)
        for later_ms in (0, LATER_MS):
            self._settle(audits, now_ms + later_ms, named)
        return {key: ranges for key, ranges in named.items() if len(ranges)}

    def _take(self, audits: dict[Key, PartitionAudit], entry: LogEntry) -> None:
        place = next(part for part in self._topic.partitions if part.partition == entry.pointer.partition)
        for part in self._topic.partitions:
            audit = audits.get((self._topic.id, part.partition))
            if audit is not None and part.read_partition == place.read_partition:
                blocks = [(block.source[1], block.first, block.following) for block in entry.blocks]
                needed = audit.needs_blocks(entry.pointer)
                audit.take_pointer(entry.offset, entry.time_ms, entry.pointer, blocks if needed else None)

    def _settle(self, audits: dict[Key, PartitionAudit], now_ms: int, named: Named) -> None:
        for (_, partition), audit in audits.items():
            audit.settle(now_ms)
            audit.take_rows()
            for finding in audit.take_findings():
                if finding.kind in IDS and finding.resolved_ms:
                    self._fail(f"the live audit takes back what it said: {finding}")
                key = (finding.kind, finding.stage, finding.group, partition, finding.producer)
                for piece in finding.ranges if finding.kind in IDS else ():
                    named.setdefault(key, RangeSet()).add(*piece)

    # ---- faults --------------------------------------------------------------------------------------

    def _spans(self, stage: str) -> Iterator[tuple[int, Report, Part, Span]]:
        for at, landed in enumerate(self._history):
            for part in () if isinstance(landed, LogEntry) else landed[1].parts:
                for span in part.spans:
                    if span.stage == stage and not isinstance(landed, LogEntry):
                        yield at, landed[1], part, span

    def _lose(self, draw: random.Random) -> tuple[History, Named]:
        """Take away a pointer, all of whose records are reported as acked with all and lie nowhere else."""
        acked: dict[Source, RangeSet] = {}
        for _, _, part, span in self._spans("acked"):
            for piece in span.ranges if span.level == ALL else ():
                acked.setdefault((part.partition, span.producer), RangeSet()).add(*piece)
        whole = [entry for entry in self._entries if entry.blocks and self._is_only(entry, acked)]
        if not whole:
            return [], {}
        lost, injected = draw.choice(whole), Named()
        for block in lost.blocks:
            key = (Kind.LOST.title, IN_QUEUE, "", *block.source)
            injected.setdefault(key, RangeSet()).add(block.first, block.following)
        return [landed for landed in self._history if landed is not lost], injected

    def _is_only(self, entry: LogEntry, acked: dict[Source, RangeSet]) -> bool:
        return all(
            acked.get(block.source, RangeSet()).covers(block.first, block.following)
            and not any(
                other.source == block.source and other.first < block.following and block.first < other.following
                for each in self._entries
                if each is not entry
                for other in each.blocks
            )
            for block in entry.blocks
        )

    def _pass_over(self, draw: random.Random) -> tuple[History, Named]:
        """Take out of a report what was processed: its member committed a position behind that all the same."""
        return self._change(draw, (Kind.LOST, IN_GROUP), lambda span: ())

    def _double(self, draw: random.Random) -> tuple[History, Named]:
        """Report a second time what was processed."""
        return self._change(draw, (Kind.DOUBLED, IN_GROUP), lambda span: (span, span))

    def _change(
        self, draw: random.Random, what: tuple[Kind, str], change: Callable[[Span], tuple[Span, ...]]
    ) -> tuple[History, Named]:
        """Change one span of a group that processed its records once, and never went elsewhere."""
        spans = [found for found in self._spans("processed") if found[2].committed and self._once(found[1].name, found)]
        if not spans:
            return [], {}
        at, report, part, span = draw.choice(spans)
        changed = tuple(new for old in part.spans for new in (change(old) if old is span else (old,)))
        key = (what[0].title, what[1], report.name, part.partition, span.producer)
        return self._with(at, part, replace(part, spans=changed)), {key: RangeSet(span.ranges)}

    def _once(self, group: str, wanted: tuple[int, Report, Part, Span]) -> bool:
        _, _, part, span = wanted
        members = [each[1] for each in self._history if not isinstance(each, LogEntry) and each[1].name == group]
        if any(begin.reason == "seek" for report in members for each in report.parts for begin in each.begins):
            return False
        others = RangeSet(
            piece
            for _, report, here, other in self._spans("processed")
            if other is not span and report.name == group
            if (here.partition, other.producer) == (part.partition, span.producer)
            for piece in other.ranges
        )
        return not any(others.overlaps(*piece) for piece in span.ranges)

    def _damage(self, draw: random.Random) -> tuple[History, Named]:
        """Report a block as damaged."""
        spans = list(self._spans("fetched"))
        if not spans:
            return [], {}
        at, _, part, span = draw.choice(spans)
        first, next_ = span.ranges[0]
        damage = Damage(
            object="o", block=0, offset=0, records=1, cause="c", producer=span.producer, first=first, next=next_
        )
        key = (Kind.CORRUPT.title, IN_OBJECT, "", part.partition, span.producer)
        return self._with(at, part, replace(part, damages=(damage,))), {key: RangeSet([(first, next_)])}

    def _with(self, at: int, old: Part, new: Part) -> History:
        """Return the history with one part of a report replaced."""
        landed = self._history[at]
        assert not isinstance(landed, LogEntry), "a report has parts"
        home, report = landed
        changed = replace(report, parts=tuple(new if part is old else part for part in report.parts))
        return [*self._history[:at], (home, changed), *self._history[at + 1 :]]
