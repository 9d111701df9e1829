"""Client reports against known facts: no report says too much, and a complete client reports everything.

It knows the log's records by partition, producer and sequence, and the positions that groups have stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from msgspec.structs import replace

from memq.client.observers.audit_recorder import RUNS_MAX
from memq.format.ranges import Range, RangeSet
from memq.format.report import Report, ReportPart, decode_report
from memq.topic import Position, ReadPartition
from tests.simulation.live_replay import History
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import LogBlock, LogEntry, Source
from tests.simulation.wishes import Wish

Client = tuple[int, int]  # its id, and the partition of the audit topic
AuditResult = dict[str, dict[Source, RangeSet]]  # by stage


class ReportRules:
    """`fail` gets each finding; `reports` may be read: all that landed, by client and home, in the queue's order."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.logs: dict[ReadPartition, ReadLog] = {}
        self.history: History = []  # in the order in which it landed; reports with homes
        self.reports: dict[Client, list[Report]] = {}
        self.wishes: Mapping[str, Wish] = {}  # the filters of groups
        self._blocks: dict[tuple[Source, int], LogBlock] = {}  # by sequence, where groups have filters
        self.transient: dict[str, None] = {}  # ids of topics that others check
        self.last: dict[int, Position] = {}  # by home, of the last report on a topic that lasts
        self._fail = fail
        self._places: dict[tuple[Source, int], Position] = {}
        self._stored: dict[tuple[str, int], Position] = {}

    def landed(self, entry: LogEntry, partition: ReadPartition) -> None:
        """Records that clients may report on are in the log."""
        self.history.append(entry)
        for block in entry.blocks:
            for sequence in range(block.first, block.following):
                index = block.record_index + sequence - block.first
                position = Position(partition.partition, entry.offset, index)
                self._places.setdefault((block.source, sequence), position)
                if self.wishes:
                    self._blocks.setdefault((block.source, sequence), block)

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """A group has stored a position."""
        key = (group, partition.partition)
        self._stored[key] = max(position, self._stored.get(key, position))

    def reported(self, partition: ReadPartition, entry: LogEntry) -> None:
        """Reports are in the log, or copies of such."""
        log = self.logs.setdefault(partition, ReadLog())
        log.entries.append(entry)
        for delivered in log.reader.take(entry):
            report = self._of_topic(decode_report(delivered.value))
            known = self.reports.setdefault((report.client, partition.partition), [])
            if any(other.number == report.number for other in known):
                self._fail(f"client {report.client:016x} has two reports of number {report.number}")
            known.append(report)
            self.history.append((partition.partition, report))
            if report.parts:  # else its client was idle
                self.last[partition.partition] = Position(partition.partition, delivered.offset, delivered.record_index)
            for part in report.parts:
                self._check_part(report, part)

    def _of_topic(self, report: Report) -> Report:
        """Return the report without its parts about topics that are deleted during the run."""
        return replace(report, parts=tuple(part for part in report.parts if part.topic_id not in self.transient))

    def _check_part(self, report: Report, part: ReportPart) -> None:
        """Check that all events of a report happened before it landed."""
        for span in part.spans:
            for sequence in (number for first, next_ in span.ranges for number in range(first, next_)):
                place = self._places.get(((part.partition, span.producer), sequence))
                who = f"{span.stage} of sequence {sequence} of producer {span.producer:016x}"
                if place is None and (
                    span.stage in ("fetched", "passed", "processed") or self._is_sure(span.stage, span.level)
                ):
                    self._fail(f"{who} is reported, and it is not in the log")
                if place is not None and span.stage == "processed":
                    stored = self._stored.get((report.name, place.read_partition))
                    if stored is None or stored <= place:
                        self._fail(f"{who} at {place} is reported by '{report.name}', which has stored {stored}")

                if place is not None and not self.fits_wish(
                    report.name, span.stage, (part.partition, span.producer), sequence
                ):
                    self._fail(f"{who} at {place} is reported by '{report.name}', whose filter says otherwise")

    def fits_wish(self, group: str, stage: str, source: Source, sequence: int) -> bool:
        """Whether a record may have passed a stage by the filter of a group.

        A block in which wanted and other records alternate too often is reported as a whole.
        """
        wish, block = self.wishes.get(group), self._blocks.get((source, sequence))
        if wish is None or block is None:
            return stage != "passed"
        wanted = [wish.wants_value(value) for value in block.values]
        if stage == "passed":
            return not wanted[sequence - block.first]
        runs = 1 + sum(one != other for one, other in pairwise(wanted))
        return stage not in ("fetched", "processed") or wanted[sequence - block.first] or runs > RUNS_MAX

    def _is_sure(self, stage: str, level: int) -> bool:
        return stage == "acked" and level == 2

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the reports of a complete client: its report numbers are dense, up to one that is its last."""
        for (client, home), reports in self.reports.items():
            reports.sort(key=lambda report: report.number)
            dense = [report.number for report in reports] == list(range(len(reports)))
            self._check_times(client, reports)
            if dense and reports[0].kind == "producer" and reports[-1].last:
                self._check_producer(client, home, _said(reports), named=bool(reports[0].name))
            elif dense and reports[0].kind == "consumer":
                self._check_consumer(client, _said(reports))

    def _check_times(self, client: int, reports: list[Report]) -> None:
        for before, after in pairwise(reports):
            if after.number == before.number + 1 and after.since_ms != before.until_ms:
                self._fail(f"client {client:016x} says nothing of {before.until_ms} to {after.since_ms}")

    def _check_producer(self, client: int, home: int, said: AuditResult, *, named: bool) -> None:
        """All that it sent was acked or given up; and all of it in the log was sent, when nobody has its name."""
        sent, settled = said.get("sent", {}), (said.get("acked", {}), said.get("gave-up", {}))
        for source, ranges in sent.items():
            left = _without(ranges, [each.get(source) for each in settled])
            if left and not self._asks_no_acks(client, home):
                self._fail(f"client {client:016x} neither acked nor gave up {left} of {source}")
        if named:
            return
        for (source, sequence), place in self._places.items():
            if source in sent and sequence not in sent[source]:
                self._fail(f"client {client:016x} does not tell that it sent sequence {sequence}, which is at {place}")

    def _asks_no_acks(self, client: int, home: int) -> bool:
        reports = self.reports[client, home]
        return any(
            span.stage == "sent" and span.level == 0 for each in reports for part in each.parts for span in part.spans
        )

    def _check_consumer(self, client: int, said: AuditResult) -> None:
        for source, ranges in said.get("processed", {}).items():
            left = _without(ranges, [said.get("fetched", {}).get(source)])
            if left:
                self._fail(f"client {client:016x} has processed {left} of {source}, and fetched it never")


def _said(reports: Iterable[Report]) -> AuditResult:
    found: AuditResult = {}
    for part in (part for report in reports for part in report.parts):
        for span in part.spans:
            source = (part.partition, span.producer)
            ranges = found.setdefault(span.stage, {}).setdefault(source, RangeSet())
            for piece in span.ranges:
                ranges.add(*piece)
    return found


def _without(pieces: Iterable[Range], others: Iterable[RangeSet | None]) -> list[Range]:
    """Return what of `pieces` is in none of the others."""
    left = list(pieces)
    for other in others:
        if other is not None:
            left = [hole for piece in left for hole in other.holes(*piece)]
    return left


def reports_landed(reports: Mapping[Client, list[Report]]) -> int:
    """Return how many reports landed."""
    return sum(len(each) for each in reports.values())
