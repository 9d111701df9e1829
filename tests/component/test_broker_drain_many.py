"""Drains of very many partitions: a bound on how many close at once, the log's progress, a limit that moves on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.broker.partitions import PROGRESS_S, DrainProgress
from memq.broker.services import CLOSINGS_AT_ONCE_MAX
from memq.format.pointer import decode_pointer
from memq.limits import MIB
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TimedSemaphore
from memq.topic import Topic, TopicSettings, read_partitions
from tests.brokers import log_lines, run, running_broker
from tests.contract.manual_clock import ManualClock
from tests.stepped_time import SteppedLoop, step

PARTITIONS = CLOSINGS_AT_ONCE_MAX * 3


class Slow(MemoryQueue):
    """A queue that counts the publishes that are under way, and lets each wait until a round of the loop brings none.

    So whoever may publish at once does.
    """

    at_once = most = calls = 0

    async def publish(self, publication: Publication) -> int:
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            seen = -1
            while seen != self.calls:
                seen = self.calls
                await asyncio.sleep(0)
            return await super().publish(publication)
        finally:
            self.at_once -= 1


async def _kinds(queue: MemoryQueue, topic: Topic) -> list[list[str]]:
    logs = [await queue.read(partition, 0, MIB) for partition in read_partitions(topic)]
    return [[decode_pointer(entry.body).kind for entry in log] for log in logs]


def test_of_many_partitions_only_some_close_at_once_and_all_do() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", PARTITIONS, TopicSettings(), exist_ok=False)
            processors = [broker.partitions.processor(topic, number) for number in range(PARTITIONS)]
            await asyncio.gather(*(processor.ready() for processor in processors))
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Slow
            assert isinstance(queue, Slow)
            await broker.drain()
            assert queue.most == CLOSINGS_AT_ONCE_MAX
            assert await _kinds(queue, topic) == [["opened", "closed"]] * PARTITIONS
            assert {each.session for each in await broker.services.coordinator.assignments()} == {""}

    run(work())


def test_turns_are_taken_in_order_and_given_back_once() -> None:
    async def work() -> None:
        turns, gate, order = TimedSemaphore(2, 3_600.0), asyncio.Event(), list[int]()

        async def take(number: int) -> None:
            async with turns.turn():
                order.append(number)
                await gate.wait()

        tasks = [asyncio.create_task(take(number)) for number in range(5)]
        while len(order) < 2:  # noqa: ASYNC110 - what has no event: nobody else goes
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1]
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        while len(order) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1, 2], "a work that was cancelled gave back one turn"
        gate.set()
        await asyncio.gather(*tasks[1:])
        assert order == [0, 1, 2, 3, 4]

    run(work())


def test_a_work_that_outlasts_its_turn_goes_on_beside_the_next() -> None:
    async def work() -> None:
        turns, gate, running = TimedSemaphore(1, 1.0), asyncio.Event(), list[int]()

        async def take(number: int) -> None:
            async with turns.turn():
                running.append(number)
                await gate.wait()

        stuck = [asyncio.create_task(take(number)) for number in range(3)]
        while len(running) < 3:
            step(0.5)
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*stuck)
        gate.clear()
        later = [asyncio.create_task(take(number)) for number in (3, 4)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert running == [0, 1, 2, 3], "each gave back one turn, though it ended after that"
        gate.set()
        await asyncio.gather(*later)

    run(work(), SteppedLoop)


def test_progress_is_told_only_of_what_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    progress = DrainProgress(clock, EventLog(clock), 10_000, "partitions are handed over")
    with caplog.at_level(logging.INFO, "memq"):
        progress.reached(400)
        assert not log_lines(caplog, logging.INFO)
        clock.advance(int(PROGRESS_S * 1_000))
        progress.reached(3_000)
        progress.reached(3_001)
        clock.advance(int(PROGRESS_S * 1_000))
        progress.reached(10_000)
    assert log_lines(caplog, logging.INFO) == [
        "draining-progress: 3000 of 10000 partitions are handed over",
        "draining-progress: 10000 of 10000 partitions are handed over",
    ]
