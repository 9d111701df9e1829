"""A consumer whose brokers do not know its topic for a moment, or whose topic was deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.core import GONE_TRIES
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.metadata import ClusterMetadata
from memq.client.producer.producer import AsyncProducer
from memq.errors import NotFoundError, PositionExpiredError, QueueError
from memq.format.pointer import decode_pointer
from memq.governor.planning import split
from memq.notification import Span
from memq.notification.remote import RemoteQueue
from memq.protocol.messages import TopicMetadata
from memq.topic import ReadPartition, TopicSettings, read_partitions, slot_of_key
from tests.brokers import run, running_broker, until

LOW, HIGH = (
    next(key for key in map(str.encode, "abcdefgh") if (slot_of_key(key) >= 1 << 15) == high) for high in (0, 1)
)

END_ANSWERS = 2  # of the queue, before the owners are asked for the end


@pytest.mark.parametrize("group", [None, "g"])
def test_a_broker_that_does_not_know_the_topic_yet_costs_no_place(
    group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.client.consumer.core.REFRESH_S", 0.05)

    async def scenario() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"before"))
            async with AsyncConsumer(broker.address, "clicks", group=group, auto_commit=False) as consumer:
                first = await consumer.poll(20)
                assert first is not None
                refresh, asked, known = ClusterMetadata.refresh, 0, asyncio.Event()

                async def not_known(self: ClusterMetadata, name: str, *, create: bool = False) -> TopicMetadata | None:
                    nonlocal asked
                    found = await refresh(self, name, create=create)
                    task = asyncio.current_task()
                    if task is None or task.get_name() != "consumer refreshes metadata":
                        return found
                    asked += 1
                    if asked <= GONE_TRIES:
                        return None
                    known.set()
                    return found

                monkeypatch.setattr(ClusterMetadata, "refresh", not_known)  # as a broker that has just come up
                await known.wait()
                await (await producer.send("clicks", b"after"))
                second = await consumer.poll(20)
                assert second is not None
                assert second.values() == [b"after"], "not once more what was read before"

    run(scenario())


def test_a_topic_that_is_deleted_while_its_end_is_asked_for_ends_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners of its end were looked up in a topic that was gone: a KeyError ended the whole consumer."""
    monkeypatch.setattr("memq.client.consumer.core.REFRESH_S", 0.05)
    monkeypatch.setattr("memq.client.consumer.core.GONE_RETRY_S", 0.001)
    asked, gone, answers = asyncio.Event(), asyncio.Event(), list[Span]()
    span, keep = RemoteQueue.span, FetchScheduler.keep

    async def awaited(self: RemoteQueue, partition: ReadPartition) -> Span:
        found = await span(self, partition)
        if partition.topic == "gone":
            answers.append(found)
            if len(answers) == END_ANSWERS:
                asked.set()
                await gone.wait()
        return found

    def kept(self: FetchScheduler, wanted: Mapping[ReadPartition, int]) -> None:
        keep(self, wanted)
        if "gone" not in [partition.topic for partition in wanted]:
            gone.set()

    monkeypatch.setattr(RemoteQueue, "span", awaited)
    monkeypatch.setattr(FetchScheduler, "keep", kept)

    async def scenario() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address) as producer:
            topic = await broker.partitions.create("gone", 1, TopicSettings(), exist_ok=False)
            await (await producer.send("clicks", b"before"))
            async with AsyncConsumer(broker.address, ["clicks", "gone"], start="end") as consumer:
                assert await consumer.poll(0.1) is None
                await asked.wait()
                await broker.partitions.delete(topic)
                await gone.wait()
                with pytest.raises(NotFoundError, match="topic 'gone' does not exist any more"):
                    await consumer.poll(20)
                await (await producer.send("clicks", b"after"))
                batch = await consumer.poll(20)
                assert batch is not None
                assert batch.values() == [b"after"]

    run(scenario())


def test_retention_in_a_new_write_partition_is_no_silent_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals before the first remaining pointer were asked for the write partitions of the beginning alone."""
    monkeypatch.setattr("memq.client.consumer.core.REFRESH_S", 0.05)
    away, widened = asyncio.Event(), asyncio.Event()
    poll, refresh = RemoteQueue.poll, ClusterMetadata.refresh
    asked: list[int] = []  # offsets

    async def polled(queue: RemoteQueue, offsets: dict[ReadPartition, int], *arguments: Any) -> Any:
        if away.is_set():
            raise QueueError("away")
        asked.extend(offsets.values())
        return await poll(queue, offsets, *arguments)

    async def refreshed(self: ClusterMetadata, name: str, *, create: bool = False) -> TopicMetadata | None:
        found, task = await refresh(self, name, create=create), asyncio.current_task()
        if found is not None and len(found.topic.partitions) == 2 and task and "refreshes" in task.get_name():
            widened.set()
        return found

    monkeypatch.setattr(RemoteQueue, "poll", polled)
    monkeypatch.setattr(ClusterMetadata, "refresh", refreshed)

    async def scenario() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(write_partitions_max=2), exist_ok=False)
            consumer = AsyncConsumer(broker.address, "clicks", audit=False)
            (log,) = read_partitions(topic)

            async def send(key: bytes, *values: bytes) -> None:
                async with AsyncProducer(broker.address, audit=False) as producer:
                    for value in values:
                        await (await producer.send("clicks", value, key=key))

            async def read(count: int) -> list[bytes | None]:
                found: list[bytes | None] = []
                while len(found) < count:
                    batch = await consumer.poll(20)
                    assert batch is not None
                    found += batch.values()
                return found

            await send(LOW, b"first")
            assert await read(1) == [b"first"]
            now_ms = broker.services.runtime.clock.wall_ms()  # of late: the governor leaves it alone
            await broker.services.coordinator.alter_topic(split(topic, 0, now_ms))
            await broker.partitions.refresh()
            await widened.wait()
            await send(HIGH, b"1", b"2", b"3")
            assert await read(3) == [b"1", b"2", b"3"]
            end = (await broker.services.queue.span(log)).end
            await until(lambda: asked[-1] == end)
            away.set()
            await send(HIGH, b"4")  # it answers the poll under way
            assert await read(1) == [b"4"]
            await send(HIGH, b"gone", b"gone, too")
            await send(LOW, b"left")
            await send(HIGH, b"the last pointer of a write partition stays")
            entries = await broker.services.queue.read(log, 0, 1 << 20)
            pointers = {entry.offset: decode_pointer(entry.body) for entry in entries}
            left = max(at for at, pointer in pointers.items() if (pointer.kind, pointer.partition) == ("data", 0))
            await broker.services.queue.trim(log, left)
            broker.services.recent_pointers.forget(log)  # as another broker, which has them only in the log
            away.clear()
            with pytest.raises(PositionExpiredError, match="2 records are gone"):
                await read(1)
            await consumer.close()

    run(scenario())
