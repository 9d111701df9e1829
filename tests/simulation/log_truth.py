"""Ends, totals, lag and the dashboard, asked while the log of one partition fails: right, or unknown.

Each answer is compared with the pointers that landed. It must be one that held at some moment between question and
answer, and only a log that failed in that time may be unknown.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from memq.audit.dashboard.poller import TOPICS_S, Poller
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About, GroupRow, PartitionRow
from memq.broker.api.reader_requests import LOG_S_MAX
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.group_admin import PartitionProgress
from memq.client.log_answers import LOG_S, LogAnswers
from memq.errors import MemqError, UnreachableError
from memq.runtime.runtime import Runtime
from memq.simulation.ports.failing_partition import FailingPartition
from memq.topic import Position, ReadPartition, Topic
from tests.simulation.failing_partition_rules import START_S
from tests.simulation.read_log import ReadLog

WATCHER = "watcher"
ASK_S = 1.0
# A round asks all ends, then totals, then rests; a total of one round is shown until the next one has ended.
PAGE_S = 2 * (LOG_S_MAX + LOG_S + TOPICS_S)
ABOUT = About(cluster="", audited=False, acknowledge=False, contents=False)


@dataclass(slots=True)
class _Known:
    """The truth of one partition: records before each offset, and the ends that it had."""

    before: list[int] = field(default_factory=lambda: [0])
    times: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """When something was asked, and where the logs ended then."""

    at_s: float
    ends: dict[int, int]


class LogTruth:
    """Compares answers about logs with the logs."""

    def __init__(
        self,
        partitions: Iterable[ReadPartition],
        logs: dict[ReadPartition, ReadLog],
        failing: FailingPartition,
        now: Callable[[], float],
        fail: Callable[[str], None],
    ) -> None:
        self._partitions = {each.partition: each for each in partitions}
        self._logs = logs
        self._failing = failing
        self._now = now
        self._fail = fail
        self._known = {number: _Known() for number in self._partitions}
        self._stored: dict[tuple[str, int], list[tuple[float, Position]]] = {}  # by group and partition
        self.checked = self.lags = 0

    def asks(self) -> Asked:
        """Return the moment of a question."""
        return Asked(self._now(), {number: self._end(number) for number in self._partitions})

    def check_ends(self, asked: Asked, found: dict[int, int]) -> None:
        """Check the end offsets that were answered."""
        for number in self._partitions:
            self._check("end", asked, number, found.get(number), asked.ends[number], self._end(number))

    def check_totals(self, asked: Asked, found: dict[int, int]) -> None:
        """Check the totals of records that were answered."""
        for number in self._partitions:
            least, most = self._before(number, asked.ends[number]), self._before(number, self._end(number))
            self._check("total", asked, number, found.get(number), least, most)

    def check_lag(self, asked: Asked, number: int, found: int | None, behind: Position, ahead: Position) -> None:
        """Check the lag of a reader that was at `behind` when it asked, and at `ahead` when it had the answer."""
        least = self._before(number, asked.ends[number]) - self._place(number, ahead)
        most = self._before(number, self._end(number)) - self._place(number, behind)
        self._check("lag", asked, number, found, max(0, least), max(0, most))

    def check_page(self, rows: Iterable[PartitionRow]) -> None:
        """Check the totals of the dashboard's page of the topic, which may be PAGE_S old."""
        now_s = self._now()
        for row in rows:
            known = self._known.get(row.partition)
            if known is None:
                continue  # a write partition that was split off
            known.times.append(now_s)
            known.ends.append(self._end(row.partition))
            if known.times[0] > now_s - PAGE_S:
                continue
            least = self._before(row.partition, known.ends[bisect_right(known.times, now_s - PAGE_S) - 1])
            asked = Asked(now_s - PAGE_S, {})
            most = self._before(row.partition, self._end(row.partition))
            self._check("page", asked, row.partition, row.records, least, most)
            if (row.records is None) != bool(row.error):
                self._fail(f"the page of partition {row.partition} has {row.records} records and error '{row.error}'")

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """Note a position of a group that the queue has stored."""
        if self._partitions.get(partition.partition) == partition:
            self._stored.setdefault((group, partition.partition), []).append((self._now(), position))

    def check_progress(self, asked: Asked, group: str, progress: Iterable[PartitionProgress]) -> None:
        """Check the lag of a group in each partition of the topic, as the rows of the dashboard have it."""
        for part in progress:
            number = part.topic_partition.partition
            known = self._partitions.get(number)
            if known is None or known.topic != part.topic_partition.topic:
                continue
            places = self._places(group, number, asked.at_s)
            # Without a stored position, records that retention has removed are no lag.
            least = self._before(number, asked.ends[number]) - max(places) if min(places) else 0
            most = self._before(number, self._end(number)) - min(places)
            records = part.lag.records if part.error is None else None
            self._check(f"lag of group {group}", asked, number, records, max(0, least), most)

    def check_groups(self, rows: Iterable[GroupRow]) -> None:
        """Check the lag of each group on the dashboard's page of the topic, which may be PAGE_S old."""
        since_s = self._now() - PAGE_S
        for row in rows:
            if (row.lag_records is None) != bool(row.error):
                self._fail(f"the page of group {row.group} has lag {row.lag_records} and error '{row.error}'")
            if row.lag_records is None:
                continue
            least = most = 0
            for number, known in self._known.items():
                places = self._places(row.group, number, since_s)
                seen = bisect_right(known.times, since_s)
                end = known.ends[seen - 1] if seen else 0
                # Without a stored position, records that retention has removed are no lag.
                least += max(0, self._before(number, end) - max(places)) if min(places) else 0
                most += self._before(number, self._end(number)) - min(places)
            self.lags += 1
            if not least <= row.lag_records <= most:
                self._fail(f"the page has lag {row.lag_records} of group {row.group}, it was {least} to {most}")

    def _places(self, group: str, number: int, since_s: float) -> list[int]:
        """Return the places that a group has had in a partition since a moment; 0 if nothing was stored."""
        stored = self._stored.get((group, number), [])
        last = bisect_right(stored, since_s, key=lambda each: each[0]) - 1
        places = [self._place(number, position) for _, position in stored[max(0, last) :]]
        return places if last >= 0 else [0, *places]

    def _check(self, what: str, asked: Asked, number: int, found: int | None, least: int, most: int) -> None:
        self.checked += found is not None
        passed_s = self._now() - asked.at_s
        if found is None:
            if asked.at_s >= START_S and not self._failing.did_log_fail(number, asked.at_s):
                self._fail(f"the {what} of partition {number} is unknown for {passed_s:.1f} s, its log does not fail")
        elif not least <= found <= most:
            self._fail(f"the {what} of partition {number} is {found}, it was {least} to {most} in {passed_s:.1f} s")

    def _end(self, number: int) -> int:
        log = self._logs.get(self._partitions[number])
        return len(log.entries) if log is not None else 0

    def _before(self, number: int, offset: int) -> int:
        """Return how many records lie before an offset."""
        before = self._known[number].before
        if len(before) <= offset:
            for entry in self._logs[self._partitions[number]].entries[len(before) - 1 :]:
                before.append(before[-1] + entry.pointer.records)
        return before[offset]

    def _place(self, number: int, position: Position) -> int:
        return self._before(number, position.pointer_offset) + position.record_index


async def run_watcher(runtime: Runtime, brokers: list[str], topic: Topic, truth: LogTruth) -> None:
    """Ask for ends and totals, and open the dashboard's page, again and again."""
    async with AsyncAdmin(brokers, runtime=runtime) as admin:
        poller = Poller(admin, None, Feed("sim"), runtime, ABOUT)
        await asyncio.sleep(START_S)
        poller.start()
        try:
            while True:
                with suppress(UnreachableError):  # a thin broker takes few requests of a connection
                    found = next(each for each in await admin.topics() if each.id == topic.id)
                    asked = truth.asks()
                    truth.check_ends(asked, (await admin.ends([found]))[topic.name])
                    asked = truth.asks()
                    totals = await admin.end_totals(found)
                    truth.check_totals(asked, {number: each.records for number, each in totals.items()})
                    page = await poller.topic_page(topic.name, 60, None)
                    truth.check_page(page.partitions)
                    await ask_groups(admin, truth)
                    truth.check_groups(page.groups or ())
                await asyncio.sleep(ASK_S)
        finally:
            await poller.stop()


async def ask_groups(admin: AsyncAdmin, truth: LogTruth) -> None:
    """Ask for the lag of all groups, once."""
    with suppress(MemqError):  # the log of the groups fails, or the group is gone
        for name in await admin.groups():
            asked = truth.asks()
            truth.check_progress(asked, name, (await admin.group(name)).partitions)


async def watch_lag(consumer: AsyncConsumer, rebalances: Callable[[], int], truth: LogTruth) -> None:
    """Ask a consumer of one topic for its lag, again and again; answers across a rebalance are left out."""
    while True:
        await asyncio.sleep(ASK_S)
        asked, before, behind = truth.asks(), rebalances(), consumer.position()
        if not behind:
            continue
        try:
            found = await consumer.lag()
        except MemqError as error:  # none of its logs answered
            found = LogAnswers(dict.fromkeys(behind, error))
        ahead = consumer.position()
        if rebalances() != before:
            continue
        for place in behind.keys() & ahead.keys() & (found.keys() | found.unknown.keys()):
            lag = found.get(place)
            records = lag.records if lag is not None else None
            truth.check_lag(asked, place.partition, records, behind[place], ahead[place])
