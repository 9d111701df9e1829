"""Reports of clients in a test cluster, and the live audit that reads them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import memq
from memq.audit.live.service import LiveAudit
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import PartitionChanges, Step
from memq.audit.live.view import AuditView, TopicSummary
from memq.cli.cluster.embedded_services import database_at
from memq.client.consumer.consumer import Consumer
from memq.errors import (
    UnreachableError,
)
from memq.format.ranges import RangeSet
from memq.format.report import (
    AUDIT_TOPIC,
    Kind,
    Report,
    ReportPart,
    decode_report,
)
from memq.testing import Cluster
from tests.unit.audited import TOPIC
from tests.unit.live_audit_harness import LiveAuditHarness

KEEP_MS = 86_400_000
WAIT_S = 240.0
RECORDS = 300


def produce(cluster: Cluster, records: int = RECORDS) -> None:
    with memq.Producer(cluster.address, linger_ms=1) as producer:
        for number in range(records):
            producer.send("clicks", b"%d" % number, key=b"k%d" % (number % 10))
            if number % 50 == 49:
                producer.flush()


def consume(cluster: Cluster) -> int:
    """Read the topic as the group `g` to its end, and return how many records came."""
    with memq.Consumer(cluster.address, ["clicks"], group="g", end="end", on_damaged="skip") as consumer:
        return sum(len(batch.values()) for batch in consumer)


def all_of(records: int) -> Callable[[TopicSummary], bool]:
    """Whether so many records were sent, queued, and have come to an end in the group."""
    return lambda summary: counts(summary) == (records,) * 3


async def until(audits: list[LiveAudit], database: Database, done: Callable[[TopicSummary], bool]) -> TopicSummary:
    """Let the auditors work until what they know of the topic is as it should be."""
    view = AuditView(database)
    async with asyncio.timeout(WAIT_S):
        while True:
            for audit in audits:
                with suppress(UnreachableError):
                    await audit.step()
            for summary in await view.topics(0, 1 << 40):
                if summary.topic == "clicks" and done(summary):
                    return summary


def counts(summary: TopicSummary) -> tuple[int, int, int]:
    queue, group = summary.row.side(""), summary.row.side("g")
    return queue["sent"], queue["committed"], group["processed"] + group["lost"] + queue["corrupt"]


def with_database(url: str, work: Callable[[Database], Awaitable[None]]) -> None:
    async def run() -> None:
        database = database_at(url)()
        try:
            await work(database)
        finally:
            await database.close()

    asyncio.run(run())


KEY = (TOPIC.id, 0)


def a_step(owner: str, position: str, harness: LiveAuditHarness) -> Step:
    """Judge at a harness, and return what an auditor stores of that."""
    harness.judge()
    changes = PartitionChanges(
        TOPIC.name, harness.audit.state, harness.audit.take_rows(), harness.audit.take_findings()
    )
    return Step(2, owner, next(_numbers), position, harness.home.clients, {KEY: changes})


_numbers = itertools.count()


Stages = dict[str, RangeSet]


class ReceivedReports:
    """The reports of the audit topic, read as far as a test needs."""

    def __init__(self, cluster: Cluster) -> None:
        self.reports: list[Report] = []
        self._cluster = cluster

    def until(self, enough: Callable[[], bool]) -> None:
        """Read on from the beginning until it is enough; every client's numbers must be dense."""
        self.reports = []
        with Consumer(self._cluster.address, AUDIT_TOPIC, audit=False) as consumer:
            while not enough():
                batch = consumer.poll(timeout=WAIT_S)
                assert batch is not None, f"this is not enough: {self.reports}"
                self.reports += [decode_report(record.value or b"") for record in batch]
        numbers: dict[int, list[int]] = {}
        for report in self.reports:
            numbers.setdefault(report.client, []).append(report.number)
        assert all(sorted(found) == list(range(len(found))) for found in numbers.values()), "one topic, one home"

    def parts(self, kind: Kind, topic: str = "clicks") -> list[ReportPart]:
        return [part for each in self.reports if each.kind == kind for part in each.parts if part.topic == topic]

    def stages(self, kind: Kind) -> Stages:
        found: Stages = {}
        for span in (span for part in self.parts(kind) for span in part.spans):
            for piece in span.ranges:
                found.setdefault(span.stage, RangeSet()).add(*piece)
        return found
