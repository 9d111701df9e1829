"""The live audit's reads of pointers: a log that fails or hangs delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from memq.audit.live.log_follower import INDEXES_S_MAX, LogFollower
from memq.audit.live.partition import PartitionAudit
from memq.broker.api.reader_requests import LOG_S_MAX, LOGS_S_MAX
from memq.errors import DeniedError, MemqError, NotFoundError, QueueError, StoreError
from memq.format.blocks.header import Buffer
from memq.format.pointer import encode_pointer
from memq.format.ranges import RangeSet
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entries, Span
from memq.notification.remote import Polled
from memq.runtime.logs import EventLog
from memq.topic import ReadPartition, Topic, TopicSettings, Totals, equal_slots
from tests.contract.loopback_queue import LoopbackQueue
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, publication
from tests.skipping_loop import run_skipping, skip
from tests.unit.audited import data_pointer
from tests.unit.lying_queue import FailingQueue

LOGS = 6
TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, settings=TopicSettings(), partitions=equal_slots(LOGS))


class Followed:
    """Audits of the partitions of a topic whose logs may be sick; `store` is raised where objects are read."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sick = FailingQueue(self.clock)
        self.lent = LoopbackQueue(self.sick, self.clock)
        self.store: MemqError | None = None
        self.hangs = False
        self.follower = LogFollower(self.lent, self.read, EventLog(self.clock), self.clock)
        self.logs = [TOPIC.read_partition_of(number) for number in range(LOGS)]
        self.audits = {log: [PartitionAudit(TOPIC, log.partition)] for log in self.logs}
        self.published = 0

    async def read(self, store: str, key: str, offset: int, length: int) -> Buffer:
        assert self.store is not None, "no index is needed"
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        raise self.store

    async def start(self) -> None:
        await self.lent.create(self.logs, STALE_MS)
        await self.publish()

    async def publish(self, producers: Callable[[int], int] = lambda number: 100 + number) -> None:
        """Publish one batch of ten records in each log; those of one producer follow on each other."""
        first = 10 * self.published
        self.published += 1
        for log in self.logs:
            run = (producers(log.partition), first, first + 10)
            totals = Totals(first, self.published)
            body = encode_pointer(data_pointer([run], partition=log.partition, totals=totals))
            await self.lent.publish(publication(self.clock, body, partition=log))

    async def follow(self, due: list[ReadPartition] | None = None) -> float:
        """Follow the logs, let what is asked apart get on for a moment, and return how long it took."""
        begin_s = asyncio.get_running_loop().time()
        await self.follower.follow(self.audits, self.logs if due is None else due)
        return asyncio.get_running_loop().time() - begin_s

    def nexts(self) -> list[int]:
        """Return the next pointer of each log."""
        return [self.audits[log][0].state.next_offset for log in self.logs]

    def lacking(self) -> list[int]:
        return [log.partition for log in self.logs if self.follower.lacks(log)]


@pytest.mark.parametrize("error", [QueueError("no leader"), DeniedError("not you"), NotFoundError("no such log")])
def test_a_log_that_fails_is_read_when_it_answers_again(error: MemqError) -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        world.sick.failing = {1: error, 4: error}
        await world.follow()
        assert (world.nexts(), world.lacking()) == ([1, 0, 1, 1, 0, 1], [1, 4])
        await skip(1)
        await world.publish()
        await world.follow()
        assert (world.nexts(), world.lacking()) == ([2, 0, 2, 2, 0, 2], [1, 4])
        await skip(1)
        del world.sick.failing[4]
        await world.follow()
        await skip(1)
        assert world.lacking() == [1, 4], "it answers, and is not read yet"
        await world.follow([])
        assert (world.nexts(), world.lacking()) == ([2, 0, 2, 2, 2, 2], [1])
        await world.follower.close()

    run_skipping(work())


def test_a_log_that_fails_alone_is_no_failure_of_the_round() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        world.sick.failing = {1: QueueError("no leader")}
        await world.follow(world.logs[1:2])
        assert world.lacking() == [1]
        await world.follow()
        assert world.nexts() == [1, 0, 1, 1, 1, 1]
        await world.follower.close()

    run_skipping(work())


def test_a_log_that_hangs_delays_one_round_and_no_other() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        world.sick.silent = {2}
        assert await world.follow() < 1.5 * LOG_S_MAX
        assert (world.nexts(), world.lacking()) == ([1, 1, 0, 1, 1, 1], [2])
        for number in range(2, 20):
            await world.publish()
            assert await world.follow() == 0.0, "the others do not wait for it"
            assert world.nexts() == [number, number, 0, number, number, number]
            await skip(1)
        world.sick.silent.clear()
        await skip(LOG_S_MAX)
        await world.follow()
        await skip(1)
        await world.follow()
        assert (world.nexts(), world.lacking()) == ([19] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


def test_a_log_that_had_no_room_in_an_answer_is_not_taken_for_read() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        world.sick.slow = {0, 1, 2}  # together they take longer than one answer may
        assert await world.follow() < 2 * LOGS_S_MAX + 2 * LOG_S_MAX
        assert (world.nexts(), world.lacking()) == ([0, 0, 0, 1, 1, 1], [0, 1, 2])
        assert [world.audits[log][0].state.totals is None for log in world.logs] == [True] * 3 + [False] * 3
        await world.follower.close()

    run_skipping(work())


class ForgetfulQueue(LoopbackQueue):
    """Leaves the pointers at `missing` offsets out of the next `answers`, and says that there is more behind them."""

    missing: frozenset[int] = frozenset()
    answers = 0

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = POLL_BYTES_MAX,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        found = await super().poll(offsets, wait_ms, bytes_max)
        if not self.answers:
            return found
        self.answers -= 1
        left = [Entries((e for e in each.entries if e.offset not in self.missing), each.entries.next) for each in found]
        return [replace(each, entries=entries) for each, entries in zip(found, left, strict=True)]


@pytest.mark.parametrize("missing", [{0}, {1}, {3}, {0, 1}, {1, 2}, {0, 1, 2, 3}, {0, 2}])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays"])
def test_pointers_that_one_answer_leaves_out_are_read_and_two_answers_are_believed(
    missing: set[int],
    stays: bool,
) -> None:
    async def work() -> None:
        world = Followed()
        queue = world.lent = ForgetfulQueue(world.sick, world.clock)
        world.follower = LogFollower(queue, world.read, EventLog(world.clock), world.clock)
        for _ in range(4):
            await (world.publish() if world.published else world.start())
        queue.missing, queue.answers = frozenset(missing), 100 if stays else 1
        await world.follow()
        left = missing if stays else set()
        read = [(10 * offset, 10 * offset + 10) for offset in range(4) if offset not in left]
        for log in world.logs:
            (audit,) = world.audits[log]
            stream = audit.state.streams.get(100 + log.partition)
            assert list(stream.account.delivered if stream else []) == list(RangeSet(read))
        assert (world.nexts(), world.lacking()) == ([4] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


class LateBeginning(LoopbackQueue):
    """Says in one answer that the logs begin at offset `begin`, and leaves out what lies before it, if `hides`."""

    begin = 3
    hides = True

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = POLL_BYTES_MAX,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        found = await super().poll(offsets, wait_ms, bytes_max)
        begin, self.begin = self.begin, 0
        if not begin:
            return found
        least = begin if self.hides else 0
        left = [Entries((e for e in each.entries if e.offset >= least), each.entries.next) for each in found]
        spans = [Span(begin, each.span.end) for each in found]
        return [replace(each, span=span, entries=it) for each, span, it in zip(found, spans, left, strict=True)]


@pytest.mark.parametrize("hides", [True, False])
def test_a_beginning_that_one_answer_calls_too_late_costs_no_pointer(hides: bool) -> None:
    async def work() -> None:
        world = Followed()
        queue = LateBeginning(world.sick, world.clock)
        queue.hides = hides
        world.lent, world.follower = queue, LogFollower(queue, world.read, EventLog(world.clock), world.clock)
        for _ in range(4):
            await (world.publish() if world.published else world.start())
        await world.follow()
        for log in world.logs:
            (audit,) = world.audits[log]
            assert list(audit.state.streams[100 + log.partition].account.delivered) == [(0, 40)]
            assert not audit.state.expired
        assert (world.nexts(), world.lacking()) == ([4] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


def test_a_log_is_not_read_to_its_end_before_it_has_shown_what_its_owner_proved() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        await world.follower.follow(world.audits, world.logs, {world.logs[2]: 2})
        assert (world.nexts(), world.lacking()) == ([1] * LOGS, [2])
        await world.publish()
        await skip(1)
        await world.follower.follow(world.audits, world.logs, {world.logs[2]: 2})
        assert (world.nexts(), world.lacking()) == ([2] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


def test_a_log_of_a_topic_that_is_gone_is_not_asked_for_any_more() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        world.sick.failing = {5: NotFoundError("deleted")}
        await world.follow()
        assert world.lacking() == [5]
        del world.audits[world.logs[5]]
        await world.follow(world.logs[:5])
        assert world.lacking() == []
        await world.follower.close()

    run_skipping(work())


def test_an_object_that_can_not_be_read_sets_its_partition_apart() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        await world.follow()
        await world.publish()
        world.published = 0
        await world.publish(lambda number: 103)  # known in the log of partition 3 alone: the index says what is new
        world.store = StoreError("the store is down")
        await world.follow()
        assert (world.nexts(), world.lacking()) == ([3, 3, 3, 2, 3, 3], [3])
        world.store = NotFoundError("no such object")
        await skip(1)
        await world.follow([])
        assert (world.nexts(), world.lacking()) == ([3] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


@pytest.mark.parametrize("complete", [True, False])
def test_only_a_batch_whose_pointer_does_not_name_all_may_hold_what_is_missing_when_its_index_is_gone(
    complete: bool,
) -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        await world.follow()
        log, world.store = world.logs[0], NotFoundError("no such object")
        made = data_pointer([(100, 0, 20)], partition=0, totals=Totals(10, 1), producers_complete=complete)
        await world.lent.publish(publication(world.clock, encode_pointer(made), partition=log))
        await world.follow([log])
        (audit,) = world.audits[log]
        assert (list(audit.state.streams[100].account.delivered), audit.state.next_offset) == ([(0, 20)], 2)
        assert audit.state.expired is not complete
        await world.follower.close()

    run_skipping(work())


def test_objects_that_hang_delay_one_round_and_no_other() -> None:
    async def work() -> None:
        world = Followed()
        await world.start()
        await world.follow()
        world.published = 0
        # Of the first three logs the index says what is new.
        await world.publish(lambda number: (100 if number < 3 else 200) + number)
        world.store, world.hangs = NotFoundError("no such object"), True
        assert await world.follow() == INDEXES_S_MAX, "all are asked at the same time"
        assert (world.nexts(), world.lacking()) == ([1, 1, 1, 2, 2, 2], [0, 1, 2])
        for number in range(3, 12):
            await world.publish(lambda number: 300 + number)
            assert await world.follow() == 0.0, "the logs answer, their objects do not"
            assert world.nexts() == [1, 1, 1, number, number, number]
            await skip(2)
        world.hangs = False
        await skip(INDEXES_S_MAX)
        await world.follow()
        await skip(1)
        await world.follow()
        assert (world.nexts(), world.lacking()) == ([11] * LOGS, [])
        await world.follower.close()

    run_skipping(work())


class HeldReads(Followed):
    """Holds reads of objects until `opens` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opens = asyncio.Event()
        self.begun = 0

    async def read(self, store: str, key: str, offset: int, length: int) -> Buffer:
        self.begun += 1
        await self.opens.wait()
        return await super().read(store, key, offset, length)


def test_a_log_that_comes_back_while_its_old_index_is_asked_for_ends_no_audit() -> None:
    """Its home goes to another auditor for a moment, and its log fails when it is back."""

    async def work() -> None:
        world = HeldReads()
        await world.start()
        await world.follow()
        world.published = 0
        await world.publish(lambda number: 103)
        world.store = NotFoundError("no such object")
        await world.follow()
        assert (world.lacking(), world.begun) == ([3], 1)
        await skip(1)
        assert world.begun == 2, "the index is asked for apart"
        log = world.logs[3]
        gone = world.audits.pop(log)
        await world.follow([])
        world.audits[log] = gone
        world.sick.failing = {3: QueueError("no leader")}
        await world.follow()
        assert world.lacking() == [3]
        world.opens.set()
        await skip(1)
        world.sick.failing.clear()
        for _ in range(3):
            await world.follow()
            await skip(1)
        assert (world.nexts(), world.lacking()) == ([2] * LOGS, [])
        await world.follower.close()

    run_skipping(work())
