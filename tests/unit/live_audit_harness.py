"""A harness of the live audit: one write partition, its pointers and reports, written by the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memq.audit.finding import Finding
from memq.audit.held import HeldAnswer
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.report_partition import Client, ReportPartitionAudit
from memq.audit.live.storage.state import decode_state, encode_state
from memq.audit.minutes import MinuteRow
from memq.format.pointer import Pointer, ProducerEnd, decode_pointer, encode_pointer
from memq.format.ranges import Range
from memq.format.report import Begin, Report, ReportedDamage, ReportPart, ReportSpan, decode_report, encode_report
from memq.topic import Totals
from tests.unit.audited import TOPIC, Run, data_pointer, pointer
from tests.unit.blocks import NOW_MS

MINUTE = NOW_MS // 60_000
PRODUCER, SENDER, READER, GROUP = 5, 100, 200, "g"


def span(stage: Any, *ranges: Range, producer: int = PRODUCER, minute: int = MINUTE, level: int = 2) -> ReportSpan:
    """Return what one stage of one producer and minute saw."""
    return ReportSpan(stage=stage, producer=producer, minute=minute, ranges=tuple(ranges), level=level)


class LiveAuditHarness:
    """Gives a home, and the one partition in it, what the test says, and asks for its judgement.

    Everything goes through the formats, and after each judgement through the stored state.
    """

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.audit = PartitionAudit(TOPIC, 0)
        self.home = ReportPartitionAudit(lambda key: self.audit if key == (TOPIC.id, 0) else None)
        self.rows: dict[int, MinuteRow] = {}
        self.findings: dict[str, Finding] = {}
        self.totals = Totals()
        self.offset = 0
        self.answer = HeldAnswer()  # what the brokers say that are asked: nobody holds anything
        self._numbers: dict[int, int] = {}

    # ---- the queue -----------------------------------------------------------------------------------

    def queue(self, *runs: Run, **fields: Any) -> int:
        """Publish a batch, and return the offset of its pointer."""
        made = data_pointer(runs, totals=self.totals, stored_bytes=1, least_ms=NOW_MS, greatest_ms=NOW_MS, **fields)
        blocks = None
        if self.audit.needs_blocks(made):
            blocks = [run for number, run in enumerate(runs) if number not in made.skip]
        return self.publish(made, blocks)

    def end(self, next_sequence: int, *burned: Range, producer: int = PRODUCER, acks: int | None = None) -> int:
        """Publish what a producer said at its end."""
        ended = ProducerEnd(producer=producer, next_sequence=next_sequence, burned=burned, acks=acks)
        return self.publish(pointer(kind="ended", ended=(ended,), totals=self.totals))

    def publish(self, made: Pointer, blocks: Sequence[Run] | None = None) -> int:
        """Publish a pointer."""
        offset, self.offset = self.offset, self.offset + 1
        self.audit.take_pointer(offset, self.now_ms, decode_pointer(encode_pointer(made)), blocks)
        self.totals = self.totals.plus(made.records, made.stored_bytes)
        return offset

    # ---- reports -------------------------------------------------------------------------------------

    def sent(self, *spans: ReportSpan, client: int = SENDER, **fields: Any) -> None:
        """Report as a producer."""
        self.report(
            client, "producer", "", ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0, spans=spans), fields
        )

    def read(
        self,
        *spans: ReportSpan,
        begin: str = "",
        reason: Any = "stored",
        committed: str = "",
        damages: Sequence[ReportedDamage] = (),
        client: int = READER,
        group: str = GROUP,
        **fields: Any,
    ) -> None:
        """Report as a member of a group."""
        begins = (Begin(at=begin, reason=reason),) if begin else ()
        part = ReportPart(
            topic=TOPIC.name,
            topic_id=TOPIC.id,
            partition=0,
            spans=spans,
            damages=tuple(damages),
            begins=begins,
            committed=committed,
        )
        self.report(client, "consumer", group, part, fields)

    def report(self, client: int, kind: Any, name: str, part: ReportPart | None, fields: dict[str, Any]) -> None:
        """Send one report; its number follows on the client's last one."""
        number = fields.pop("number", self._numbers.get(client, 0))
        self._numbers[client] = number + 1
        known = {"since_ms": self.now_ms - 5_000, "until_ms": self.now_ms, "next_ms": self.now_ms + 10_000}
        parts = () if part is None else (part,)
        made = Report(client=client, kind=kind, name=name, number=number, parts=parts, **{**known, **fields})
        self.home.take(decode_report(encode_report(made)), self.now_ms)

    # ---- the judgement -------------------------------------------------------------------------------

    def settle(self, later_ms: int = 0, *, unread: bool = False) -> None:
        """Judge after some time, or not while the queue is `unread`; then start again from the stored state."""
        self.now_ms += later_ms
        self.home.settle(self.now_ms)
        if unread:
            self.audit.hold(self.now_ms)
        else:
            self.judge()
            sought = self.audit.sought(again=True)
            if sought:
                self.audit.take_answer(sought, self.answer, self.now_ms)
                self.audit.settle(self.now_ms)
        for minute, row in self.audit.take_rows().items():
            self.rows.setdefault(minute, MinuteRow()).add(row)
        for finding in self.audit.take_findings():
            self.findings[finding.id] = finding
        books = decode_state(type(self.audit.state), encode_state(self.audit.state))
        self.audit = PartitionAudit(TOPIC, 0, books)
        clients = decode_state(dict[int, Client], encode_state(self.home.clients))
        self.home = ReportPartitionAudit(lambda key: self.audit if key == (TOPIC.id, 0) else None, clients)

    def judge(self) -> None:
        """Judge what is there; the queue shows its true end, as its owner proves."""
        self.audit.settle(self.now_ms)
        self.audit.ends.confirm(self.audit.ends.missing())
        self.audit.settle(self.now_ms)

    def found(self, *, grave: bool = True) -> list[tuple[str, str, str, int, tuple[Range, ...]]]:
        """Return kind, stage, group, producer and ranges of the findings that hold."""
        return sorted(
            (each.kind.value, each.stage, each.group, each.producer, each.ranges)
            for each in self.findings.values()
            if not each.resolved_ms and each.grave >= grave
        )

    def word(self, group: str = "", minute: int = MINUTE) -> str:
        """Return the verdict on a minute."""
        return self.rows.get(minute, MinuteRow()).word(group)
