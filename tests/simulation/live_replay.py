"""Replays the published data of a run to the live audit, in rounds of any size, and collects its findings.

It may die at any moment, and continue with what was stored; or be away from some moment on, and come ten minutes later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memq.audit.account import apart
from memq.audit.finding import Finding, Kind
from memq.audit.held import HeldAnswer
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client, ReportPartitionAudit
from memq.audit.live.storage.state import decode_state, encode_state
from memq.audit.minutes import MinuteRow
from memq.audit.released import ReleaseAnswer
from memq.errors import CorruptDataError
from memq.format.ranges import RangeSet
from memq.format.report import Report
from memq.topic import PartitionKey, Topic
from tests.simulation.reader import LogEntry

ROUND_RATE = 0.2
ROUNDS = 150  # about so many at most: each of a long run takes as long as all of a short one
DEATH_RATE = 0.5  # of an auditor that dies, after each round
DEATHS = 30  # about so many at most
AWAY_MS = 600_000
LATER_MS = 3_600_000
HELD = (Kind.LOST, Kind.DOUBLED, Kind.EARLY, Kind.UNRELEASED)  # of findings about held records: they name no sequences
IDS = (Kind.LOST, Kind.DOUBLED, Kind.CORRUPT)  # of findings that name records
Named = dict[tuple[Kind, str, str, int, int], RangeSet]  # kind, stage, group, partition, producer


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry of the queue that is no pointer any more."""

    entry: LogEntry


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which nothing lands, and the audit judges."""

    ms: int


Landed = LogEntry | Unreadable | Wait | tuple[int, Report]  # a report comes with its home
History = list[Landed]


@dataclass(slots=True)
class AuditResult:
    """The results of an audit: records that it named, rows by partition and minute, pointers that it could not read.

    `held` has the held records of findings about them, by kind and id.
    """

    named: Named = field(default_factory=dict)
    rows: dict[tuple[int, int], MinuteRow] = field(default_factory=dict)
    unreadable: dict[int, None] = field(default_factory=dict)
    held: dict[tuple[Kind, str], int] = field(default_factory=dict)

    def held_lost(self) -> int:
        """Return how many held records are lost."""
        return sum(records for (kind, _), records in self.held.items() if kind is Kind.LOST)

    def count(self, name: str) -> int:
        """Return how many records have a count on the queue's side."""
        return sum(row.side("")[name] for row in self.rows.values())

    def sides(self) -> list[tuple[int, int, str]]:
        """Return each partition, minute and side that anything is known of."""
        return [(*key, side) for key, row in self.rows.items() for side in sorted(row.sides)]

    def word(self, partition: int, minute: int, side: str) -> str:
        """Return the verdict on a side; one of which nothing is known has that of the queue."""
        return self.rows.get((partition, minute), MinuteRow()).word(side)


class LivePlay:
    """One audit of the `partitions` of a topic; `fail` is called when it takes back what it said.

    `released` is what the shards of held records say at the end; before, they do not answer.
    """

    def __init__(
        self,
        topic: Topic,
        partitions: Sequence[int],
        draw: random.Random,
        fail: Callable[[str], None],
        released: ReleaseAnswer,
        *,
        dies: bool,
    ) -> None:
        self._released: ReleaseAnswer | None = None
        self._released_at_end = released
        self.said = AuditResult()
        self._topic = topic
        self._draw = draw
        self._fail = fail
        self._dies = dies
        self._audits: dict[PartitionKey, PartitionAudit] = {(topic.id, n): PartitionAudit(topic, n) for n in partitions}
        self._homes: dict[int, ReportPartitionAudit] = {}
        self._now_ms = 0
        self._death_rate = DEATH_RATE

    def play(self, history: Sequence[Landed], away_from: int | None = None) -> AuditResult:
        """Hear all of it and return what was said; from the place `away_from` on all is heard ten minutes later."""
        heard = history if away_from is None else history[:away_from]
        rounds = min(ROUND_RATE, ROUNDS / max(len(history), 1))
        self._death_rate = min(DEATH_RATE, DEATHS / max(rounds * len(history), 1))
        for landed in heard:
            self._hear(landed)
            if isinstance(landed, Wait) or self._draw.random() < rounds:
                self._settle()
        if away_from is not None:
            self._settle()
            self._restart()
            self._now_ms += AWAY_MS
            for landed in history[away_from:]:
                self._hear(landed)
        self._released = self._released_at_end
        for later_ms in (0, LATER_MS):
            self._now_ms += later_ms
            self._settle()
        self.said.named = {key: ranges for key, ranges in self.said.named.items() if len(ranges)}
        self.said.held = {key: records for key, records in self.said.held.items() if records}
        return self.said

    def _hear(self, landed: Landed) -> None:
        if isinstance(landed, Wait):
            self._now_ms += landed.ms
        elif isinstance(landed, LogEntry):
            self._now_ms = max(self._now_ms, landed.time_ms)
            self._take(landed)
        elif isinstance(landed, Unreadable):
            for audit in self._beside(landed.entry):
                audit.take_unreadable(landed.entry.offset, landed.entry.time_ms, CorruptDataError("cut"))
        else:
            home, report = landed
            self._homes.setdefault(home, ReportPartitionAudit(self._audits.get)).take(report, self._now_ms)

    def _take(self, entry: LogEntry) -> None:
        for audit in self._beside(entry):
            blocks = [(block.source[1], block.first, block.following) for block in entry.blocks]
            needed = audit.needs_blocks(entry.pointer)
            audit.take_pointer(entry.offset, entry.time_ms, entry.pointer, blocks if needed else None)

    def _beside(self, entry: LogEntry) -> list[PartitionAudit]:
        """Return the audits of all write partitions whose pointers lie in the read partition of an entry."""
        here = self._topic.read_partition_of(entry.pointer.partition)
        return [audit for audit in self._audits.values() if self._topic.read_partition_of(audit.partition) == here]

    def _settle(self) -> None:
        for home in self._homes.values():
            home.settle(self._now_ms)
        for (_, partition), audit in self._audits.items():
            audit.settle(self._now_ms)
            missing = audit.ends.missing()
            if missing:
                audit.ends.confirm(missing)
                audit.settle(self._now_ms)
            sought = audit.sought(again=True)
            if sought:  # all that brokers held is in the queue by now
                answered = frozenset(audit.state.holders())
                audit.take_answer(sought, HeldAnswer(answered=answered, released=self._released), self._now_ms)
                audit.settle(self._now_ms)
            for minute, row in audit.take_rows().items():
                self.said.rows.setdefault((partition, minute), MinuteRow()).add(row)
            self._note_findings(partition, audit)
        if self._dies and self._draw.random() < self._death_rate:
            self._restart()

    def _note_findings(self, partition: int, audit: PartitionAudit) -> None:
        for finding in audit.take_findings():
            if finding.kind in IDS and finding.resolved_ms and not _is_held_otherwise(finding, audit):
                self._fail(f"the live audit takes back what it said: {finding}")
            if finding.kind is Kind.POINTER:
                self.said.unreadable[finding.offset] = None
            if finding.kind in HELD and not finding.producer:
                self.said.held[finding.kind, finding.id] = 0 if finding.resolved_ms else finding.records
            key = (finding.kind, finding.stage, finding.group, partition, finding.producer)
            for piece in finding.ranges if finding.kind in IDS else ():
                self.said.named.setdefault(key, RangeSet()).add(*piece)

    def _restart(self) -> None:
        """Continue with what is stored after a round, as another auditor does."""
        for key, audit in self._audits.items():
            books = decode_state(PartitionState, encode_state(audit.state))
            self._audits[key] = PartitionAudit(self._topic, audit.partition, books)
        for number, home in self._homes.items():
            clients = decode_state(dict[int, Client], encode_state(home.clients))
            self._homes[number] = ReportPartitionAudit(self._audits.get, clients)


def _is_held_otherwise(finding: Finding, audit: PartitionAudit) -> bool:
    """Whether the records of a finding that is over are named by others: a late report may tell a better cause."""
    others = RangeSet()
    for other in audit.state.findings.values():
        if (other.kind, other.stage, other.group, other.producer) == (
            finding.kind,
            finding.stage,
            finding.group,
            finding.producer,
        ):
            for piece in other.ranges:
                others.add(*piece)
    return not apart(finding.ranges, others)
