"""The checks of the live auditor in a run: it has read all only when it has read all reports on the topic."""

from __future__ import annotations

import asyncio
import random

from memq.audit.live.partition_state import PartitionState
from memq.audit.live.storage.store import AuditStore, PartitionChanges, Step
from memq.format.report import AUDIT_TOPIC, Report, ReportPart, encode_report
from memq.topic import Position, ReadPartition
from tests.simulation.auditor import AuditDatabase, StoredAudit
from tests.simulation.auditor_rules import AuditorRules
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import LogBlock, LogEntry
from tests.simulation.report_rules import ReportRules
from tests.unit.audited import TOPIC, data_pointer

HOME, PRODUCER, READER = 1, 7, 200
LOG = TOPIC.read_partition_of(0)


class AuditedRun:
    """A run with one data pointer in the log, whose reports and stored audit the test writes."""

    def __init__(self) -> None:
        self.database = AuditDatabase(random.Random(1), lambda: False)
        self.findings: list[str] = []
        self.reports = ReportRules(self.findings.append)
        entry = LogEntry(0, 0, data_pointer([(PRODUCER, 0, 4)]), (LogBlock((0, PRODUCER), 0, 4, 0, (b"",) * 4),))
        self.reports.landed(entry, LOG)
        self.rules = AuditorRules(
            lambda: TOPIC,
            StoredAudit(self.database),
            {LOG: ReadLog(entries=[entry])},
            self.reports.last,
            self.findings.append,
            store_lies=False,
        )
        self._steps = 0

    def land(self, offset: int, *reports: Report) -> None:
        """Publish a batch of reports."""
        values = tuple(encode_report(each) for each in reports)
        made = data_pointer([(READER, offset * 10, offset * 10 + len(values))])
        blocks = (LogBlock((HOME, READER), offset * 10, offset * 10 + len(values), 0, values),)
        self.reports.reported(ReadPartition(AUDIT_TOPIC, "cd" * 16, HOME), LogEntry(offset, 0, made, blocks))

    def store(self, position: str, pointers: int) -> None:
        """Store a position of the auditor in the reports, and a count of pointers that it has read."""

        async def save() -> None:
            store = AuditStore(self.database)
            await store.take_home(HOME, "auditor")
            self._steps += 1
            changes = {(TOPIC.id, 0): PartitionChanges(TOPIC.name, PartitionState(next_offset=pointers), {}, [])}
            await store.save(Step(HOME, "auditor", self._steps, position, {}, changes))

        asyncio.run(save())


def report(number: int, *, idle: bool = False) -> Report:
    part = ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0)
    parts = () if idle else (part,)
    return Report(
        client=READER,
        kind="consumer",
        name="g",
        number=number,
        since_ms=0,
        until_ms=1,
        next_ms=2,
        parts=parts,
    )


def test_an_auditor_that_is_behind_the_reports_has_not_read_all() -> None:
    """It had read the topic's pointers, and its counts were compared while it was still reading reports."""
    run = AuditedRun()
    run.land(0, report(0), report(1))
    assert not run.rules.has_read_all()
    for position, pointers, all_ in ((f"{HOME}:0:1", 1, False), (f"{HOME}:1:0", 0, False), (f"{HOME}:1:0", 1, True)):
        run.store(position, pointers)
        assert run.rules.has_read_all() == all_
    run.land(1, report(2))
    assert not run.rules.has_read_all()
    assert run.findings == []


def test_reports_of_idle_clients_are_not_awaited() -> None:
    """They land as long as the clients live."""
    run = AuditedRun()
    run.land(0, report(0))
    run.land(1, report(1, idle=True))
    run.store(f"{HOME}:1:0", 1)
    assert run.rules.has_read_all()
    assert run.reports.last == {HOME: Position(HOME, 0, 0)}
