"""Reports of a client to the audit: when they are sent, and those that can't be sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from memq.client.observers.audit_recorder import HEARTBEAT_INTERVALS, NOTES_MAX, PartRecorder
from memq.client.observers.reporter import CLOSE_S_MAX, JobReporter, ReportCarrier, Reporter
from memq.errors import BufferFullError, MemqError, UnreachableError
from memq.format.report import AUDIT_TOPIC, Kind, Report, decode_report
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.golden.make import TOPIC_ID
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.stepped_time import stepped_runtime
from tests.unit.toy_broker import ToyBroker, pool_of, run, toy_topic, until

INTERVAL_S = 10.0


@dataclass
class Named:
    """A topic as reports name it."""

    name: str = "clicks"
    id: str = TOPIC_ID


class Pool:
    """The connections of a client, as far as reports use them."""

    def __init__(self, audit_ms: int) -> None:
        self.audit_ms = audit_ms
        self.open = True
        self.others: list[Pool] = []

    def separate(self) -> Pool:
        self.others.append(Pool(self.audit_ms))
        return self.others[-1]

    async def close(self) -> None:
        self.open = False

    def sessions(self) -> list[object]:
        return [object()] if self.open else []


class Carrier:
    """Keeps the reports; `errors` are raised by what is asked next, `hang` never answers."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.homes_errors: list[MemqError] = []
        self.send_errors: list[MemqError] = []
        self.hang = False
        self.made = 0
        self.pool: object = None
        self.writes: list[float] = []
        self.closes: list[float] = []

    async def homes(self) -> int:
        if self.hang:
            await asyncio.get_running_loop().create_future()
        if self.homes_errors:
            raise self.homes_errors.pop(0)
        return 1

    def send(self, home: int, report: bytes) -> None:
        assert home == 0
        if self.send_errors:
            raise self.send_errors.pop(0)
        self.reports.append(decode_report(report))

    async def write(self, timeout_s: float) -> None:
        self.writes.append(timeout_s)

    async def close(self, timeout_s: float) -> None:
        self.closes.append(timeout_s)

    def made_for(self, runtime: object, pool: object) -> Carrier:
        self.made += 1
        self.pool = pool
        return self


class Client:
    """A reporter with its carrier; `job` is one without tasks of its own."""

    def __init__(self, audit_ms: int = int(INTERVAL_S * 1000), *, job: bool = False, kind: Kind = "producer") -> None:
        self.runtime = skipping_runtime()
        self.carrier = Carrier()
        self.pool = Pool(audit_ms)
        pool: Any = self.pool
        self.tasks = TaskOwner(lambda error: None, EventLog(self.runtime.clock))
        self.reporter: Reporter
        if job:
            self.reporter = JobReporter("spark-writer", "j", self.runtime, pool, self.carrier.made_for)
        else:
            self.reporter = Reporter(kind, "p", self.runtime, pool, self.tasks, self.carrier.made_for)
        self._next = 0

    def part(self) -> PartRecorder:
        part = self.reporter.part(Named(), 0)
        assert part is not None
        return part

    def note(self, count: int = 1) -> None:
        for _ in range(count):
            self.part().pass_stage("sent", 1, self._next, self._next + 1, 0, 5)
            self._next += 1

    @property
    def said(self) -> list[tuple[int, int]]:
        """Number and records of each report."""
        return [
            (each.number, sum(b - a for p in each.parts for s in p.spans for a, b in s.ranges))
            for each in self.carrier.reports
        ]


def test_reports_come_once_in_each_interval() -> None:
    async def work() -> None:
        client = Client()
        client.note(3)
        assert client.reporter.noted
        await skip(INTERVAL_S - 1)
        assert client.said == []
        await skip(2)
        assert client.said == [(0, 3)]
        client.note(2)
        await skip(INTERVAL_S)
        assert client.said == [(0, 3), (1, 2)]
        (first, second) = client.carrier.reports
        assert (first.kind, first.name, second.client) == ("producer", "p", first.client)
        await skip(INTERVAL_S * HEARTBEAT_INTERVALS)
        quiet = client.said[2:]
        assert 1 <= len(quiet) <= 3, "that there is nothing is said, too, within what was promised"
        assert all(records == 0 for _, records in quiet)
        assert client.carrier.made == 1
        await client.tasks.stop()

    run_skipping(work())


def test_a_report_that_is_full_is_sent_at_once() -> None:
    async def work() -> None:
        client = Client()
        client.note(NOTES_MAX - 1)
        await skip(0.1)
        assert client.said == []
        client.note(1)
        await skip(0.1)
        assert client.said == [(0, NOTES_MAX)], "before its time"
        client.note(1)
        await skip(INTERVAL_S - 1)
        assert len(client.said) == 1
        await client.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize(("audit_ms", "topic"), [(0, "clicks"), (1_000, AUDIT_TOPIC)])
def test_unwanted_reports_are_not_noted(audit_ms: int, topic: str) -> None:
    async def work() -> None:
        client = Client(audit_ms)
        assert client.reporter.part(Named(topic), 0) is None
        assert not client.reporter.wanted(Named(topic))
        await client.reporter.flush(1.0)
        await client.reporter.close(1.0)
        assert (client.carrier.made, client.reporter.lost, client.reporter.noted) == (0, 0, False)

    run_skipping(work())


def test_reports_that_can_not_be_sent_are_lost_and_counted() -> None:
    async def work() -> None:
        client = Client()
        client.note(3)
        client.carrier.send_errors = [BufferFullError("no room")]
        await skip(INTERVAL_S + 1)
        assert (client.said, client.reporter.lost) == ([], 1)
        client.note(2)
        await skip(INTERVAL_S)
        assert client.said == [(1, 2)], "its number is missing"
        client.note(4)
        client.carrier.homes_errors = [UnreachableError("away")]
        await skip(INTERVAL_S)
        assert (len(client.said), client.reporter.lost) == (1, 2)
        await skip(INTERVAL_S)
        assert client.said[1:] == [(2, 4)], "what was not taken yet waits for the next one"
        await client.tasks.stop()

    run_skipping(work())


def test_noted_reports_can_be_sent_at_once() -> None:
    async def work() -> None:
        client = Client()
        await client.reporter.flush(2.0)
        assert client.carrier.made == 0
        client.note(3)
        await client.reporter.flush(2.0)
        assert (client.said, client.carrier.writes) == ([(0, 3)], [2.0])
        client.note(1)
        client.carrier.hang = True
        begin_s = client.runtime.clock.monotonic()
        await client.reporter.flush(2.0)
        assert client.runtime.clock.monotonic() - begin_s == pytest.approx(2.0)
        assert client.reporter.lost == 1
        client.carrier.hang = False
        client.carrier.homes_errors = [UnreachableError("away")]
        await client.reporter.flush(2.0)
        assert client.reporter.lost == 2
        await client.reporter.close(1.0)
        writes = len(client.carrier.writes)
        await client.reporter.flush(2.0)
        assert len(client.carrier.writes) == writes, "it is closed"
        await client.tasks.stop()

    run_skipping(work())


def test_the_shortest_interval_is_a_wish_for_reports() -> None:
    async def work() -> None:
        assert Client(audit_ms=1).reporter.wanted(Named())

    run_skipping(work())


def test_the_last_reports_say_that_they_are() -> None:
    async def work() -> None:
        client = Client()
        await skip(5 * CLOSE_S_MAX)
        client.note(3)
        await client.reporter.flush(2.0)
        client.note(1)
        await client.reporter.close(CLOSE_S_MAX)
        assert client.said == [(0, 3), (1, 1)]
        assert [report.last for report in client.carrier.reports] == [False, True]
        (left_s,) = client.carrier.closes
        assert 0 < left_s <= CLOSE_S_MAX
        assert client.reporter.part(Named(), 0) is None
        await client.reporter.close(CLOSE_S_MAX)
        assert (len(client.said), len(client.carrier.closes)) == (2, 1)
        await client.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize("how", ["hangs", "fails", "no connection"])
def test_a_close_is_not_held_up_by_reports(how: str) -> None:
    async def work() -> None:
        client = Client()
        client.note(3)
        await client.reporter.flush(2.0)
        client.note(1)
        client.carrier.hang = how == "hangs"
        client.carrier.homes_errors = [UnreachableError("away")]
        client.pool.open = how != "no connection"
        begin_s = client.runtime.clock.monotonic()
        await client.reporter.close(1.0)
        took_s = client.runtime.clock.monotonic() - begin_s
        assert took_s == pytest.approx(1.0 if how == "hangs" else 0.0)
        assert client.reporter.lost == (0 if how == "no connection" else 1)
        assert len(client.said) == 1
        assert client.carrier.closes == [pytest.approx(1.0 if how == "fails" else 0.0)]
        await client.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize(("given_s", "took_s"), [(0.4, 0.4), (9.0, CLOSE_S_MAX), (None, CLOSE_S_MAX)])
def test_a_close_takes_the_time_that_is_given_up_to_a_bound(given_s: float | None, took_s: float) -> None:
    async def work() -> None:
        client = Client()
        client.note()
        client.carrier.hang = True
        begin_s = client.runtime.clock.monotonic()
        await client.reporter.close(given_s)
        assert client.runtime.clock.monotonic() - begin_s == pytest.approx(took_s)
        await client.tasks.stop()

    run_skipping(work())


def test_a_job_has_its_reports_in_a_task_of_their_own() -> None:
    async def work() -> None:
        client = Client(job=True)
        client.note(2)
        await skip(INTERVAL_S + 1)
        assert client.said == [(0, 2)]
        await client.reporter.close(1.0)
        assert [report.last for report in client.carrier.reports] == [False, True]
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "nothing is left behind"

    run_skipping(work())


@pytest.mark.parametrize("kind", ["producer", "consumer", "spark-reader"])
def test_reports_of_a_group_member_do_not_share_a_connection_with_its_heartbeats(kind: Kind) -> None:
    """A broker without free memory reads nothing from a connection that has sent blocks."""

    async def work() -> None:
        client = Client(kind=kind)
        client.note()
        await client.reporter.flush(1.0)
        client.note()
        await client.reporter.flush(1.0)
        assert len(client.said) == 2
        own = [] if kind == "producer" else client.pool.others[:1]
        assert client.pool.others == own
        assert client.carrier.pool is (own[0] if own else client.pool)
        await client.reporter.close()
        assert [each.open for each in own] == [False] * len(own)
        assert client.pool.open

    run_skipping(work())


def test_a_written_report_arrives_without_its_client() -> None:
    """The process that flushes its reports may be killed right after."""

    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        await pool.reach(60.0)
        carrier = ReportCarrier(stepped_runtime(), pool)
        assert await carrier.homes() == 1
        carrier.send(0, b"a report")
        await carrier.write(60.0)
        await pool.close()
        await until(lambda: not broker.connections)
        assert broker.values(AUDIT_TOPIC) == [b"a report"]
        await carrier.close(0.0)

    run(test, ToyBroker(toy_topic(AUDIT_TOPIC)))
