"""A log that was cut and grew over a reader's position again: no reader skips the new records silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from memq.broker.broker import Broker
from memq.broker.sweep.broker_sweep import sweep
from memq.broker.sweep.sweep import Sweep, Unnamed
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.fetch import polling
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import LogContinuity
from memq.client.producer.producer import AsyncProducer
from memq.errors import InvalidRequestError, PositionLostError
from memq.format.key import parse_object_key, topics_prefix
from memq.format.pointer import decode_pointer, encode_pointer
from memq.notification import Entry
from memq.notification.memory import Log, MemoryQueue
from memq.settings import BrokerSettings
from memq.topic import Position, ReadPartition, Topic, TopicSettings, read_partitions
from tests.brokers import events_of, run, running_broker, until
from tests.contract.manual_clock import ManualClock

READ = 6  # records before the cut, each a batch; the log has `opened` before them, and the producer's end after them
CUT, LEFT = 3, 4  # entries that the log loses, and records that it keeps
WAIT_S = 20.0
DAY_MS = 86_400_000


def reader(broker: Broker, group: str | None, **settings: object) -> AsyncConsumer:
    return AsyncConsumer(broker.address, "clicks", group=group, audit=False, **settings)  # type: ignore[arg-type]


def log_of(broker: Broker, topic: Topic) -> Log:
    queue = broker.services.queue
    assert isinstance(queue, MemoryQueue)
    return queue.logs[read_partitions(topic)[0]]


async def send(broker: Broker, first: int, count: int) -> None:
    """Send records of equal size, each a batch of its own."""
    async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
        for number in range(first, first + count):
            await (await producer.send("clicks", b"%04d" % number))


async def take(consumer: AsyncConsumer, count: int) -> list[int]:
    """Return the numbers in the next records, which are taken batch by batch."""
    found: list[int] = []
    while len(found) < count:
        batch = await consumer.poll(WAIT_S)
        assert batch is not None, f"only {found} came"
        found += [int(record.value or b"") for record in batch]
    return found


@asynccontextmanager
async def filled() -> AsyncIterator[tuple[Broker, Topic]]:
    async with running_broker(audit=False) as broker:
        topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        await send(broker, 0, READ)
        yield broker, topic


@asynccontextmanager
async def next_owner(broker: Broker) -> AsyncIterator[Broker]:
    """Start a broker on the same parts, as after a restart: it opens the next epoch on the log as it is."""
    services = broker.services
    settings = BrokerSettings(port=0, audit=False, broker_id=services.settings.broker_id)
    another = Broker(settings, services.runtime, services.stores, services.queue, services.coordinator)
    await another.start()
    try:
        yield another
    finally:
        await another.close()


async def reads_on(consumer: AsyncConsumer, first: int) -> None:
    """The consumer is refused until it seeks; then it gets what is left and what is new."""
    for _ in range(2):
        with pytest.raises(PositionLostError, match="was cut") as lost:
            await consumer.poll(WAIT_S)
        assert lost.value.topic == "clicks"
    await consumer.seek("clicks", 0, "beginning")
    assert await take(consumer, LEFT + READ) == [*range(LEFT), *range(first, first + READ)]


@pytest.mark.parametrize("restart", [False, True])
def test_a_group_that_resumes_in_a_log_that_was_cut_is_refused(restart: bool) -> None:
    """Its position is not after the end any more, and other records are before it."""

    async def work() -> None:
        async with filled() as (broker, topic):
            async with reader(broker, "g") as consumer:
                assert await take(consumer, READ) == [*range(READ)]
                await consumer.commit()
            del log_of(broker, topic).entries[-CUT:]
            if restart:
                await broker.close()
                resolver, partition = OffsetResolver(broker.services.queue), read_partitions(topic)[0]
                async with next_owner(broker) as another:
                    await send(another, 100, READ)
                    before = await resolver.totals_before(partition, READ + 2, topic.settings, [0])
                    assert before.records == READ, "as many as before the cut: totals do not show it"
                    async with reader(another, "g") as consumer:
                        await reads_on(consumer, 100)
            else:
                await send(broker, 100, READ)
                async with reader(broker, "g") as consumer:
                    await reads_on(consumer, 100)

    run(work())


@pytest.mark.parametrize("group", [None, "g"])
def test_a_reader_that_runs_while_the_log_is_cut_is_refused(group: str | None) -> None:
    async def work() -> None:
        async with filled() as (broker, topic), reader(broker, group) as consumer:
            assert await take(consumer, READ) == [*range(READ)]
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            await reads_on(consumer, 100)

    run(work())


def test_a_position_inside_a_batch_that_the_log_lost_is_refused() -> None:
    """Also while nothing is there: its pointer is after the end, and the next one has other records."""

    async def send_together(broker: Broker, first: int) -> None:
        async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
            await producer.send_many("clicks", [b"%04d" % number for number in range(first, first + 4)])

    async def work() -> None:
        async with filled() as (broker, topic):
            inside = log_of(broker, topic).end
            await send_together(broker, 50)
            async with reader(broker, "g", end=Position(0, inside, 2)) as consumer:
                assert await take(consumer, READ + 2) == [*range(READ), 50, 51]
                await consumer.commit()
            async with reader(broker, "g", auto_commit=False) as consumer:
                assert await take(consumer, 2) == [52, 53], "the log is whole"
            del log_of(broker, topic).entries[inside:]
            async with reader(broker, "g") as consumer:
                with pytest.raises(InvalidRequestError, match=f"position 0:{inside}:2 of topic 'clicks' is after its"):
                    await consumer.poll(WAIT_S)
            await send_together(broker, 100)
            async with reader(broker, "g") as consumer:
                with pytest.raises(PositionLostError, match=f"position 0:{inside}:2"):
                    await consumer.poll(WAIT_S)

    run(work())


def test_a_group_that_is_set_to_a_time_before_the_loss_reads_on() -> None:
    async def work() -> None:
        async with filled() as (broker, topic):
            async with reader(broker, "g") as consumer:
                await take(consumer, READ)
                await consumer.commit()
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            async with AsyncAdmin(broker.address) as admin:
                await admin.reset_group("g", "clicks", to=Position(0, 3))
            async with reader(broker, "g") as consumer:
                assert await take(consumer, READ + 2) == [2, 3, *range(100, 100 + READ)]

    run(work())


def test_a_reader_whose_log_stays_shorter_than_what_it_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited without a bound for the log to grow, and got none of the new records meanwhile."""
    monkeypatch.setattr(polling, "SHORT_S", 0.2)

    async def work() -> None:
        async with filled() as (broker, topic), reader(broker, None) as consumer:
            assert await take(consumer, READ) == [*range(READ)]
            del log_of(broker, topic).entries[-CUT - 1 :]  # the owner publishes `opened`, too
            await send(broker, 100, 1)
            with pytest.raises(PositionLostError, match="was cut before position 0:8:0: it ends at"):
                await consumer.poll(WAIT_S)
            await consumer.seek("clicks", 0, "beginning")
            assert await take(consumer, LEFT) == [*range(LEFT - 1), 100]

    run(work())


def test_objects_of_the_last_batches_that_a_log_lost_are_kept_until_a_restore(caplog: pytest.LogCaptureFixture) -> None:
    """The next owner opens a later epoch, so the numbers of the batches show no loss."""

    async def work() -> None:
        async with filled() as (broker, topic):
            store, clock, notes = broker.services.store, ManualClock(), list[str]()
            keys = [entry.key async for entry in store.list(topics_prefix(broker.services.settings.cluster))]
            assert len(keys) == READ
            del log_of(broker, topic).entries[-CUT:]
            await broker.close()
            async with next_owner(broker) as another:
                await send(another, 100, READ)
                services = another.services
                clock.advance(services.runtime.clock.wall_ms())
                found = list[Unnamed]()
                for _ in range(3):
                    clock.advance(DAY_MS)
                    parts = (store, services.queue, services.coordinator, clock, notes.append, DAY_MS)
                    found = [each async for each in Sweep(services.settings.cluster, *parts).run(0, DAY_MS)]
            left = [entry.key async for entry in store.list("")]
            assert set(keys) <= set(left)
            lost = [key for key in keys if parse_object_key(key).batch_sequence >= LEFT]  # type: ignore[union-attr]
            assert {each.key: each.kept for each in found} == dict.fromkeys(lost, True)
            assert (len(lost), notes) == (READ - LEFT, [])
            for _ in range(2):
                assert (
                    (await sweep(another.services, 0)).unproven == another.services.swept.unproven_objects == len(lost)
                )
            assert events_of(caplog).count("sweep-unproven") == 1, "the second pass keeps no more than the first"

    run(work())


def test_a_seek_is_not_refused_for_the_position_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader was just comparing its last pointer with the log; the seek made the answer void."""
    compare, entered, sought = OffsetResolver.check_continuity, asyncio.Event(), asyncio.Event()

    async def slow(resolver: OffsetResolver, partition: ReadPartition, continuity: LogContinuity) -> None:
        if not entered.is_set():
            entered.set()
            await sought.wait()
        await compare(resolver, partition, continuity)

    async def work() -> None:
        async with filled() as (broker, topic), reader(broker, None) as consumer:
            assert await take(consumer, READ) == [*range(READ)]
            monkeypatch.setattr(OffsetResolver, "check_continuity", slow)
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            await asyncio.wait_for(entered.wait(), WAIT_S)
            await consumer.seek("clicks", 0, "beginning")
            sought.set()
            assert await take(consumer, LEFT + READ) == [*range(LEFT), *range(100, 100 + READ)]

    run(work())


@pytest.mark.parametrize("seeks", [False, True], ids=["start", "seek"])
@pytest.mark.parametrize("point", ["end", Position(0, READ + 1)], ids=["end", "position"])
def test_a_reader_whose_log_is_cut_before_it_has_looked_back_is_refused(
    monkeypatch: pytest.MonkeyPatch, point: str | Position, seeks: bool
) -> None:
    """It took the mark of its start from the log that had grown again, and skipped the new records before it."""
    look_back, entered, grown = OffsetResolver.look_back, asyncio.Event(), asyncio.Event()

    async def late(*args: Any) -> None:
        entered.set()
        await grown.wait()
        await look_back(*args)

    async def work() -> None:
        monkeypatch.setattr(OffsetResolver, "look_back", late)
        start = "beginning" if seeks else point
        async with filled() as (broker, topic), reader(broker, None, start=start) as consumer:
            if seeks:
                grown.set()
                assert await take(consumer, READ) == [*range(READ)]
                entered.clear()
                grown.clear()
                await consumer.seek("clicks", 0, point)
            await asyncio.wait_for(entered.wait(), WAIT_S)
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            grown.set()
            await reads_on(consumer, 100)

    run(work())


def test_a_reader_whose_log_has_grown_to_the_same_end_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """No pointer follows that would show it, and the new records lie before the reader's position."""

    async def work() -> None:
        async with filled() as (broker, topic), reader(broker, None) as consumer:
            assert await take(consumer, READ) == [*range(READ)]
            log = log_of(broker, topic)
            others = [
                Entry(entry.offset, entry.time_ms, encode_pointer(replace(decode_pointer(entry.body), sealed_ms=1)))
                for entry in log.entries[-CUT:]
            ]
            del log.entries[-CUT:]
            await until(lambda: "consumer.retry" in events_of(caplog))
            log.entries += others
            with pytest.raises(PositionLostError, match="was cut before position 0:8:0, and has grown again"):
                await consumer.poll(WAIT_S)

    run(work())
