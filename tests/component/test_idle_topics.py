"""Idle topics expire: sealed, checked again, and deleted; never with a reader, a new record or an open question."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from memq.broker.api import service_lookup
from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import InvalidSettingError, QueueError
from memq.groups.coordinator import GroupCoordinator
from memq.holds.keeper import HoldKeeper
from memq.runtime.clock import SystemClock
from memq.topic import Topic, TopicSettings, parse_settings
from tests.brokers import run, running_broker

LIMIT_MS = 400_000


@asynccontextmanager
async def idle_topic() -> AsyncIterator[tuple[Broker, AsyncAdmin, int]]:
    """Yield a broker with a topic that has a record and may expire, an admin, and the time of a first check."""
    async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
        await admin.create_topic("clicks", settings={"expire_idle_ms": LIMIT_MS})
        await admin.create_topic("lasting")
        await send(broker)
        now_ms = SystemClock().wall_ms()
        await broker.idle_topics.check(at(now_ms))
        yield broker, admin, now_ms


def at(*times_ms: int) -> Callable[[], int]:
    """Return a clock that shows these times one after the other, and then the last one."""
    left = list(times_ms)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


async def send(broker: Broker) -> None:
    async with AsyncProducer(broker.address) as producer:
        await (await producer.send("clicks", b"one"))


async def found(broker: Broker) -> Topic | None:
    return await broker.services.coordinator.current_topic("clicks")


async def sealed(broker: Broker, now_ms: int) -> Topic:
    """Check until the topic is sealed and has ended."""
    await broker.idle_topics.check(at(now_ms))
    topic = await found(broker)
    assert topic is not None
    assert topic.expiring
    assert await broker.sealing.end(topic)
    return topic


def test_an_idle_topic_is_sealed_and_then_deleted() -> None:
    async def work() -> None:
        async with idle_topic() as (broker, admin, now_ms):
            await broker.idle_topics.check(at(now_ms + LIMIT_MS - 1))
            topic = await found(broker)
            assert topic is not None
            assert not topic.sealed_ms
            await broker.idle_topics.check(at(now_ms + LIMIT_MS))
            await broker.idle_topics.check(at(now_ms + LIMIT_MS + 1))
            topic = await found(broker)
            assert topic is not None, "it has not ended, so a record may still be on its way"
            assert await broker.sealing.end(topic)
            await broker.idle_topics.check(at(now_ms + LIMIT_MS + 2))
            assert await found(broker) is None
            assert [each.name for each in await admin.topics()] == ["lasting"]
            assert broker.services.counters.expired_topics == 1

    run(work())


def test_a_topic_is_idle_since_its_log_answered() -> None:
    """A check that waited for long was dated at its begin, and records that came meanwhile counted as older."""

    async def work() -> None:
        async with idle_topic() as (broker, _, now_ms):
            await send(broker)
            answered_ms = now_ms + LIMIT_MS // 2
            await broker.idle_topics.check(at(now_ms + LIMIT_MS // 4, answered_ms))
            for asked_ms, expires in ((answered_ms + LIMIT_MS - 1, False), (answered_ms + LIMIT_MS, True)):
                await broker.idle_topics.check(at(asked_ms, asked_ms + LIMIT_MS))
                topic = await found(broker)
                assert topic is not None
                assert topic.expiring is expires

    run(work())


def test_a_record_begins_the_time_again() -> None:
    async def work() -> None:
        async with idle_topic() as (broker, _admin, now_ms):
            await send(broker)
            await broker.idle_topics.check(at(now_ms + LIMIT_MS))
            await broker.idle_topics.check(at(now_ms + 2 * LIMIT_MS - 1))
            topic = await found(broker)
            assert topic is not None
            assert not topic.sealed_ms
            await sealed(broker, now_ms + 2 * LIMIT_MS)

    run(work())


def test_a_topic_with_a_reader_stays_however_idle() -> None:
    async def work() -> None:
        async with (
            idle_topic() as (broker, _admin, now_ms),
            AsyncConsumer(broker.address, "clicks", group="g") as consumer,
        ):
            assert await consumer.poll(10) is not None
            for times in range(1, 5):
                await broker.idle_topics.check(at(now_ms + times * LIMIT_MS))
                topic = await found(broker)
                assert topic is not None
                assert not topic.sealed_ms

    run(work())


def test_a_group_that_reads_after_the_seal_keeps_the_topic() -> None:
    async def work() -> None:
        async with idle_topic() as (broker, admin, now_ms):
            await sealed(broker, now_ms + LIMIT_MS)
            await admin.reset_group("g", "clicks", "beginning", new_ok=True)
            await broker.idle_topics.check(at(now_ms + LIMIT_MS + 1))
            topic = await found(broker)
            assert topic is not None
            assert (topic.sealed_ms, topic.ended, topic.expiring) == (0, False, False)
            await send(broker)

    run(work())


def test_an_operator_keeps_an_expiring_topic_by_an_unseal_and_a_seal_of_its_own_stays() -> None:
    async def work() -> None:
        async with idle_topic() as (broker, admin, now_ms):
            await sealed(broker, now_ms + LIMIT_MS)
            await admin.unseal_topic("clicks")
            await broker.idle_topics.check(at(now_ms + LIMIT_MS + 1))
            topic = await admin.seal_topic("clicks")
            assert not topic.expiring
            since_ms = SystemClock().wall_ms() + 1
            await broker.idle_topics.check(at(since_ms + LIMIT_MS))
            await sealed(broker, since_ms + 2 * LIMIT_MS)
            await admin.reset_group("g", "clicks", "beginning", new_ok=True)
            await broker.idle_topics.check(at(since_ms + 2 * LIMIT_MS + 1))
            kept = await found(broker)
            assert kept is not None
            assert (kept.sealed_ms, kept.ended, kept.expiring) == (topic.sealed_ms, True, False)

    run(work())


@pytest.mark.parametrize("call", ["groups", "waiting", "span"])
def test_a_question_without_an_answer_decides_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with idle_topic() as (broker, _admin, now_ms):
            topic = await sealed(broker, now_ms + LIMIT_MS)
            queue, version = broker.services.queue, topic.version + 1  # the end is a version of its own

            async def fails(*_: object, **__: object) -> object:
                raise QueueError("no answer")

            with monkeypatch.context() as broken:
                broken.setattr(service_lookup, "ASK_S", 0.2)
                broken.setattr({"groups": GroupCoordinator, "waiting": HoldKeeper}.get(call, queue), call, fails)
                await broker.idle_topics.check(at(now_ms + 9 * LIMIT_MS))
            kept = await found(broker)
            assert kept is not None
            assert kept.version == version
            await broker.idle_topics.check(at(now_ms + 9 * LIMIT_MS))
            assert await found(broker) is None

    run(work())


def test_a_topic_refuses_a_time_that_is_too_short() -> None:
    with pytest.raises(InvalidSettingError, match="below dedup_window_ms"):
        parse_settings({"expire_idle_ms": 1_000}, TopicSettings())


def test_a_delayed_record_keeps_its_topic_until_it_is_in_the_log() -> None:
    async def work() -> None:
        async with idle_topic() as (broker, _admin, now_ms), AsyncProducer(broker.address) as producer:
            late = await producer.send("clicks", b"late", deliver_after=3_600)
            await late
            for times in range(1, 5):
                await broker.idle_topics.check(at(now_ms + times * LIMIT_MS))
                topic = await found(broker)
                assert topic is not None
                assert not topic.sealed_ms
            await producer.cancel(late)
            await broker.idle_topics.check(at(now_ms + 5 * LIMIT_MS))
            await sealed(broker, now_ms + 6 * LIMIT_MS)

    run(work())


def test_the_records_of_a_transaction_keep_their_topic_until_they_are_in_the_log() -> None:
    async def work() -> None:
        async with (
            idle_topic() as (broker, admin, now_ms),
            AsyncProducer(broker.address, transactional_id="t") as producer,
        ):
            async with producer.transaction() as transaction:
                await transaction.send("clicks", b"two")
                await transaction.flush()
                await broker.idle_topics.check(at(now_ms + LIMIT_MS))
                topic = await found(broker)
                assert topic is not None
                assert not topic.sealed_ms, "the transaction may be committed"
                await admin.seal_topic("clicks")
            now_ms = SystemClock().wall_ms()
            for times in range(1, 5):
                await broker.idle_topics.check(at(now_ms + times * LIMIT_MS))
                topic = await found(broker)
                assert topic is not None, "committed records wait until an operator unseals it"
            await admin.unseal_topic("clicks")
            async with AsyncConsumer(broker.address, "clicks", start="beginning") as consumer:
                values: list[bytes | None] = []
                while len(values) < 2:
                    batch = await consumer.poll(10)
                    assert batch is not None
                    values += batch.values()
            assert values == [b"one", b"two"]

    run(work())
