"""A start with very many topics batches its requests, and loops over all partitions stay cheap."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from memq.broker.broker import Broker
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import DeniedError, InvalidSettingError, MemqError, NotFoundError, QueueError
from memq.governor import Assignment
from memq.governor.memory import MemoryCoordinator
from memq.notification import Span
from memq.notification.memory import MemoryQueue
from memq.runtime.tasks import PARTITIONS_AT_ONCE_MAX, bunches
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots, read_partitions
from tests.brokers import log_lines, run, running_broker, until

TOPICS = 30


class Counting(MemoryQueue):
    """A queue that counts what is under way, and lets each wait until a round of the loop brings none."""

    at_once = most = calls = 0
    wrong = ""

    async def _wait(self) -> None:
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        seen = -1
        while seen != self.calls:
            seen = self.calls
            await asyncio.sleep(0)
        self.at_once -= 1

    async def span(self, partition: ReadPartition) -> Span:
        await self._wait()
        return await super().span(partition)

    async def create(self, partitions: list[ReadPartition], stale_publish_ms: int) -> None:  # type: ignore[override]
        await self._wait()
        if partitions[0].topic == self.wrong:
            raise InvalidSettingError(f"Kafka topic of '{self.wrong}' loses pointers")
        await super().create(partitions, stale_publish_ms)


def topic_of(number: int, partitions: int) -> Topic:
    return Topic(name=f"t{number:03d}", id=f"{number:032x}", created_ms=0, partitions=equal_slots(partitions))


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([], []),
        ([1] * 3, [3]),
        ([PARTITIONS_AT_ONCE_MAX + 1], [1]),
        ([PARTITIONS_AT_ONCE_MAX, 1, 1], [1, 2]),
        ([PARTITIONS_AT_ONCE_MAX // 2] * 5, [2, 2, 1]),
        ([1, PARTITIONS_AT_ONCE_MAX + 1, 1], [1, 1, 1]),
    ],
)
def test_topics_go_together_as_long_as_their_partitions_are_few(widths: list[int], expected: list[int]) -> None:
    topics = [topic_of(number, width) for number, width in enumerate(widths)]
    found = list(bunches(topics))
    assert [len(bunch) for bunch in found] == expected
    assert [topic for bunch in found for topic in bunch] == topics


async def filled(broker: Broker) -> None:
    for number in range(TOPICS):
        await broker.partitions.create(f"t{number:03d}", 2, TopicSettings(), exist_ok=False)


async def started(before: Broker, queue: MemoryQueue) -> Broker:
    services = before.services
    coordinator = services.coordinator
    settings = replace(services.settings, broker_id="b2")
    broker = Broker(settings, services.runtime, services.stores, queue, coordinator, slab_bytes=256 * 1024)
    try:
        await broker.start()
    finally:
        await broker.close()
    return broker


def test_a_start_asks_its_queue_for_all_topics_together() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            await filled(broker)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Counting
            assert isinstance(queue, Counting)
            assert await broker.services.lost_queue.check() == []
            assert (queue.most, queue.calls) == (2 * TOPICS, 2 * TOPICS)
            queue.most = queue.calls = 0
            await started(broker, queue)
            assert queue.calls == 3 * TOPICS, "two spans and one creation of each"
            assert queue.most == 2 * TOPICS

    run(work())


def test_a_start_ends_with_what_is_wrong_with_the_first_topic() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            await filled(broker)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Counting
            assert isinstance(queue, Counting)
            queue.wrong = "t017"
            with pytest.raises(InvalidSettingError, match="'t017' loses pointers"):
                await started(broker, queue)
            assert queue.at_once == 0, "nothing goes on behind it"

    run(work())


def test_a_queue_that_does_not_answer_ends_a_start() -> None:
    class Silent(MemoryQueue):
        async def span(self, partition: ReadPartition) -> Span:
            raise QueueError("it is away")

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            await filled(broker)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Silent
            with pytest.raises(QueueError, match="it is away"):
                await broker.services.lost_queue.check()

    run(work())


def test_concurrent_owner_lookups_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await broker.partitions.create("clicks", 50, TopicSettings(), exist_ok=False)
            reads = 0
            read = MemoryCoordinator.assignments

            async def assignments(self: MemoryCoordinator) -> list[Assignment]:
                nonlocal reads
                task = asyncio.current_task()
                reads += task is not None and task.get_name() == "look for owners"
                await asyncio.sleep(0)
                return list(await read(self))

            monkeypatch.setattr(MemoryCoordinator, "assignments", assignments)
            first = asyncio.create_task(broker.partitions.locate(topic, 0))
            await until(lambda: reads == 1)
            rest = [broker.partitions.locate(topic, number) for number in range(1, 50)]
            found = await asyncio.gather(first, *rest)
            assert [each.partition for each in found if isinstance(each, TopicProcessor)] == list(range(50))
            assert reads == 2, "what was under way when the others asked may be of before"

    run(work())


@pytest.mark.parametrize(("silent", "answer"), [(TOPICS, True), (2 * TOPICS - 1, False), (2 * TOPICS, False)])
def test_a_start_continues_while_half_of_all_logs_answer(
    silent: int, answer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`silent`: for how many of two logs a topic there is no answer; the opening of each checks it again."""

    class Partly(MemoryQueue):
        silent: set[ReadPartition]
        error: MemqError = QueueError("it has no leader")

        async def span(self, partition: ReadPartition) -> Span:
            if partition in self.silent:
                raise self.error
            return await super().span(partition)

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            await filled(broker)
            queue, check = broker.services.queue, broker.services.lost_queue.check
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Partly
            assert isinstance(queue, Partly)
            logs = [log for topic in broker.partitions.topics() for log in read_partitions(topic)]
            queue.silent = set(logs[:silent])
            failed: list[ReadPartition] = []
            with nullcontext() if answer else pytest.raises(QueueError, match="no leader"):
                assert await check(lambda log, error: failed.append(log)) == []
            assert sorted(failed, key=str) == (sorted(queue.silent, key=str) if answer else [])
            with pytest.raises(QueueError, match="no leader"):
                await check()
            if answer:
                caplog.clear()
                await started(broker, queue)
                assert sorted(log_lines(caplog)[:2]) == [text.format(number) for number in (0, 1)]
            queue.error = DeniedError("not you")
            with pytest.raises(DeniedError):
                await check(lambda log, error: None)

    text = "log-unanswered: topic 't000' partition {} is compared with the store when it is opened: it has no leader"
    run(work())


@pytest.mark.parametrize(("deleted", "wrong"), [(True, ""), (False, "t017"), (True, "t020")])
def test_a_topic_that_is_deleted_during_a_start_does_not_end_it(
    deleted: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deleting(MemoryQueue):
        async def create(self, partitions: list[ReadPartition], stale_publish_ms: int) -> None:  # type: ignore[override]
            if partitions[0].topic == "t017":
                raise NotFoundError("Kafka topic of 't017' does not exist")
            if partitions[0].topic == wrong:
                raise InvalidSettingError(f"Kafka topic of '{wrong}' loses pointers")
            await super().create(partitions, stale_publish_ms)

    async def said(self: MemoryCoordinator, topic_id: str) -> bool:
        return deleted

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            await filled(broker)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            queue.__class__ = Deleting
            monkeypatch.setattr(MemoryCoordinator, "deleted", said)
            with pytest.raises(MemqError, match=wrong) if wrong else nullcontext():
                await started(broker, queue)

    run(work())
