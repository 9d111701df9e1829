"""Drains: all partitions at once, frames that arrive meanwhile, a bound, progress in the log, a limit."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.broker.partitions import PROGRESS_S, WAITS_LOGGED_S, DrainProgress
from memq.broker.services import CLOSINGS_AT_ONCE_MAX
from memq.format.pointer import decode_pointer
from memq.limits import MIB
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TimedSemaphore
from memq.runtime.waits import Waits
from memq.topic import Topic, TopicSettings, read_partitions
from tests.brokers import BareClient, GatedStore, block_of, log_lines, run, running_broker, write_frame
from tests.component.scripted_coordinator import ScriptedCoordinator, owned_by
from tests.contract.manual_clock import ManualClock
from tests.partition_owners import turns
from tests.skipping_loop import run_skipping, skip, skipping_runtime
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


def test_work_that_outlasts_its_turn_continues_next_to_the_next_one() -> None:
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


def test_progress_is_reported_only_for_long_work(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_drain_that_can_not_end_logs_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        clock = skipping_runtime().clock
        waits = Waits(clock)
        progress = DrainProgress(clock, EventLog(clock), 1, "partitions are drained and closed")
        logging_waits = asyncio.create_task(progress.log_waits(waits))
        await skip(WAITS_LOGGED_S + 1)
        assert log_lines(caplog, logging.WARNING) == [], "it waits for nobody"
        with waits.on("store 'main' at file:///data", "topic 'clicks' partition 0 batch 1") as wait:
            wait.cause = "the folder of the store is gone"
            await skip(2 * WAITS_LOGGED_S)
        logging_waits.cancel()

    with caplog.at_level(logging.INFO, "memq"):
        run_skipping(work())
    first, second = log_lines(caplog, logging.WARNING)
    assert first == second
    assert first.startswith("draining-waits: 0 of 1 partitions are drained and closed; the drain waits: store 'main'")
    assert first.endswith("the folder of the store is gone")


def test_a_drain_waits_for_what_was_let_go_of_and_for_what_comes_meanwhile() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            client, store = await BareClient.connect(broker), GatedStore()
            broker.services.stores["main"] = store
            await said.opened(1)
            await client.open(said.topic)
            client.write(write_frame(block_of(said.topic, 0, [b"v"])))
            await store.begun.wait()
            owned_by(said, 0, "near", said.session)
            await said.partitions.refresh()
            drain = asyncio.create_task(said.partitions.drain())
            await turns()
            assert list(said.partitions.processors) == []
            assert not drain.done()
            late = said.partitions.processor(said.topic, 1, to_end=True)
            assert said.partitions.draining
            store.gate.set()
            await drain
            assert (late.draining, late.own) == (True, None)
            assert said.partitions.at_work() == []
            await client.close()

    run(work())


class ReportedProgress:
    """The progress of a drain, as it is reported."""

    def __init__(self) -> None:
        self.done, self.numbers = 0, list[int]()

    def reached(self, done: int) -> None:
        self.done = done
        self.numbers.append(done)

    async def log_waits(self, waits: Waits) -> None:
        """Nothing waits here."""


def test_a_drain_begins_in_all_partitions_at_once_and_tells_of_each_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            client, store = await BareClient.connect(broker), GatedStore()
            broker.services.stores["main"] = store
            await said.opened(1)
            await client.open(said.topic)
            client.write(write_frame(block_of(said.topic, 0, [b"v"])))
            await store.begun.wait()
            progress = ReportedProgress()
            monkeypatch.setattr(said.partitions, "progress", lambda total, text: progress)
            drain = asyncio.create_task(said.partitions.drain())
            await asyncio.sleep(0)
            processors = list(said.partitions.processors.values())
            assert [processor.draining for processor in processors] == [True, True]
            await turns()
            assert {f"leave clicks/{number}" for number in (0, 1)} & {task.get_name() for task in asyncio.all_tasks()}
            store.gate.set()
            await drain
            assert progress.numbers == [1, 2]
            await client.close()

    run(work())
