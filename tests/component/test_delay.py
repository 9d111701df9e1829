"""Delayed records in a cluster of brokers: none early, none twice, none lost, and a cancel is exact."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memq.broker.broker import Broker
from memq.broker.service_partitions.hosts import shard_name
from memq.broker.service_partitions.machines import ServiceMachines
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.delayed import CancelOutcome
from memq.client.producer.producer import AsyncProducer
from memq.errors import InvalidRequestError, NotFoundError, TimedOutError, TopicSealedError
from memq.format.held_object import Target
from memq.format.key import held_prefix
from memq.holds.machine import HoldMachine
from memq.protocol.link import Link
from memq.state_log.log_reading import read_state_log
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, Topic
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig

PARTITIONS = 2


@asynccontextmanager
async def delaying(count: int = 3, **settings: Any) -> AsyncIterator[tuple[Rig, list[Broker], Topic]]:
    """Yield a cluster with topic `clicks`."""
    async with rig() as cluster:
        brokers = [await cluster.start(name, **settings) for name in "abc"[:count]]
        for broker in brokers:
            await broker.partitions.refresh()
        async with AsyncAdmin(brokers[0].address) as admin:
            topic = await admin.create_topic("clicks", partitions=PARTITIONS)
        yield cluster, brokers, topic


async def read(brokers: list[Broker], count: int) -> list[bytes | None]:
    """Return the values of the first `count` records, and of those that come with them."""
    values: list[bytes | None] = []
    async with AsyncConsumer([each.address for each in brokers], ["clicks"], start="beginning") as consumer:
        async for batch in consumer:
            values += batch.values()
            if len(values) >= count:
                return values
    return values


async def machine_of(cluster: Rig, target: Target) -> HoldMachine:
    """Return the state of the shard of a target, as its log has it."""
    (topic,) = (each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
    number = zlib.crc32(shard_name(target.topic_id, target.partition).encode()) % len(topic.partitions)
    machines = ServiceMachines()
    reading = await read_state_log(cluster.queue, topic.read_partition_of(number))
    reading.scan.fold(machines.by_name, None)
    return machines.holds


async def stored(brokers: list[Broker]) -> list[bytes | None]:
    """Return the values of all records that are in the log now."""
    addresses = [each.address for each in brokers]
    async with AsyncConsumer(addresses, ["clicks"], start="beginning", end="end") as consumer:
        return [value async for batch in consumer for value in batch.values()]


def test_many_records_are_delayed_by_one_time_or_each_by_its_own() -> None:
    async def work() -> None:
        async with delaying(1) as (_, brokers, _topic):
            async with AsyncProducer(brokers[0].address) as producer:
                far = await producer.send_many("clicks", ["c", "d"], deliver_after=3_600)
                near = await producer.send_many("clicks", ["a", "b"], keys=["k", "l"], deliver_after=[0.1, 0.2])
                assert [len(each) for each in (far, near)] == [2, 2], "each record has a delivery"
                for delivery in (*far, *near):
                    ack = await delivery
                    assert (ack.position, ack.records) == (None, 1)
                assert sorted(await read(brokers, 2), key=str) == [b"a", b"b"]
                assert await producer.cancel(far[0]) is CancelOutcome.CANCELLED
                assert await producer.cancel(near[1]) is CancelOutcome.DELIVERED
                with pytest.raises(InvalidRequestError, match="1 times in deliver_after for 2 values"):
                    await producer.send_many("clicks", ["x", "y"], deliver_after=[1])
            assert sorted(await stored(brokers), key=str) == [b"a", b"b"]

    run(work())


def test_a_delayed_record_comes_when_it_is_due() -> None:
    async def work() -> None:
        async with delaying() as (_, brokers, _topic):
            loop = asyncio.get_running_loop()
            async with AsyncProducer(brokers[1].address) as producer:
                began_s = loop.time()
                delayed = await producer.send("clicks", b"late", key=b"k", deliver_after=0.7)
                ack = await delayed
                assert (ack.topic, ack.records, ack.position) == ("clicks", 1, None)
                await (await producer.send("clicks", b"now"))
                assert await stored(brokers) == [b"now"]
                assert sorted(await read(brokers, 2), key=str) == [b"late", b"now"]
                assert loop.time() - began_s >= 0.7
                at = datetime(2020, 1, 1, tzinfo=UTC)  # over: due at once
                await (await producer.send("clicks", b"at", deliver_at=at))
                assert len(await read(brokers, 3)) == 3

    run(work())


@pytest.mark.parametrize("of_broker", [False, True])
def test_a_record_is_held_though_the_handshake_of_a_connection_was_slow(
    monkeypatch: pytest.MonkeyPatch, of_broker: bool
) -> None:
    """By the clock of such a connection each record is too old. The connection is opened again."""
    late: list[Link] = []
    clock_ms = Link.clock_ms

    def late_clock_ms(link: Link, monotonic_s: float) -> int:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("memq.broker") is of_broker and (not late or link in late):
            late[:] = [link]
            return clock_ms(link, monotonic_s) - 1_000_000
        return clock_ms(link, monotonic_s)

    async def work() -> None:
        async with delaying() as (_, brokers, _topic), AsyncProducer(brokers[0].address) as producer:
            monkeypatch.setattr(Link, "clock_ms", late_clock_ms)
            for partition in range(PARTITIONS):  # another broker holds the records of one of them
                ack = await (await producer.send("clicks", b"late", partition=partition, deliver_after=60))
                assert ack.records == 1
            assert [link.open for link in late] == [False]

    run(work())


def test_a_cancelled_record_never_comes_and_the_answer_is_exact() -> None:
    async def work() -> None:
        async with delaying() as (_, brokers, _topic), AsyncProducer(brokers[0].address) as producer:
            first = await producer.send("clicks", b"cancelled", deliver_after=timedelta(seconds=0.6))
            second = await producer.send("clicks", b"kept", deliver_after=0.6)
            await second
            async with AsyncAdmin(brokers[2].address) as admin:
                counts = await admin.delayed("clicks")
                by_topic = await admin.delayed_topics()
            assert sum(each.records for each in counts.values()) == 2
            assert {name: each.records for name, each in by_topic.items()} == {"clicks": 2}
            assert by_topic["clicks"].next_ms == min(each.next_ms for each in counts.values())
            assert await producer.cancel(first) is CancelOutcome.CANCELLED
            assert await producer.cancel(await first) is CancelOutcome.CANCELLED
            assert await read(brokers, 1) == [b"kept"]
            assert await producer.cancel(second) is CancelOutcome.DELIVERED
            foreign = (await first)._replace(producer_id=77)
            assert await producer.cancel(foreign) is CancelOutcome.UNKNOWN
            plain = await (await producer.send("clicks", b"plain"))
            with pytest.raises(InvalidRequestError, match="was not delayed"):
                await producer.cancel(plain)
            with pytest.raises(TypeError, match="delivery must be an AsyncDelivery or an Ack, not NoneType"):
                await producer.cancel(None)  # type: ignore[arg-type]
            assert sorted(await stored(brokers), key=str) == [b"kept", b"plain"]
            async with AsyncAdmin(brokers[1].address) as admin:
                assert await admin.delayed("clicks") == {}
                assert await admin.delayed_topics() == {}

    run(work())


@pytest.mark.parametrize("everything", [False, True])
def test_held_records_survive_their_owner_and_the_whole_cluster(*, everything: bool) -> None:
    async def work() -> None:
        async with delaying() as (cluster, brokers, topic):
            values = [b"%d" % number for number in range(40)]
            async with AsyncProducer([each.address for each in brokers]) as producer:
                sent = [await producer.send("clicks", value, key=value, deliver_after=1.5) for value in values]
                acks = [await each for each in sent]
                dropped = values[::10]
                for number in range(0, 40, 10):
                    assert await producer.cancel(acks[number]) is CancelOutcome.CANCELLED
            gone = brokers if everything else brokers[:2]
            for broker in gone:
                await broker.close()
            left = [broker for broker in brokers if broker not in gone]
            if everything:
                left = [await cluster.start("d")]
            expected = sorted(set(values) - set(dropped))
            assert sorted(await read(left, len(expected)), key=str) == sorted(expected, key=str)
            assert sorted(await stored(left), key=str) == sorted(expected, key=str)
            assert {each.name for each in cluster.shared.registry.topics()} >= {STATE_TOPIC, topic.name}

    run(work())


def test_a_delay_that_is_not_allowed_is_refused() -> None:
    async def work() -> None:
        async with delaying(1) as (_, brokers, _topic):
            async with AsyncProducer(brokers[0].address) as producer:
                for match, delay in {
                    "negative": {"deliver_after": -1},
                    "over the limit of 366 days": {"deliver_after": timedelta(days=367)},
                    "exclude each other": {"deliver_after": 1, "deliver_at": 1},
                    "no time zone": {"deliver_at": datetime(2030, 1, 1)},  # noqa: DTZ001
                    "is no time": {"deliver_after": float("nan")},
                }.items():
                    with pytest.raises(InvalidRequestError, match=match):
                        await producer.send("clicks", b"x", **delay)  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="deliver_after must be seconds or timedelta, not str"):
                    await producer.send("clicks", b"x", deliver_after="5m")  # type: ignore[arg-type]
                with pytest.raises(NotFoundError):
                    await producer.send("clicks", b"x", partition=9, deliver_after=1)
                assert producer.stats().records_acked == 0
            async with AsyncProducer(brokers[0].address, name="loader") as named:
                with pytest.raises(InvalidRequestError, match="'loader' has a name"):
                    await named.send("clicks", b"x", deliver_after=1)

    run(work())


def test_a_unit_goes_without_a_record_that_the_store_has_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all later records would wait behind it."""
    monkeypatch.setattr(confirmed_reads, "MISSING_CONFIRMED_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)

    async def work() -> None:
        async with delaying() as (cluster, brokers, _topic), AsyncProducer(brokers[0].address) as producer:
            await (await producer.send("clicks", b"lost", partition=0, deliver_after=0.5))
            (key,) = [key for key in cluster.store.objects if key.startswith(held_prefix("memq"))]
            await cluster.store.delete(key)
            await (await producer.send("clicks", b"damaged", partition=0, deliver_after=0.6))
            (key,) = [key for key in cluster.store.objects if key.startswith(held_prefix("memq"))]
            data = bytearray(cluster.store.objects[key])
            data[80] ^= 1
            cluster.store.objects[key] = bytes(data)
            await (await producer.send("clicks", b"later", partition=0, deliver_after=0.7))
            assert await read(brokers, 1) == [b"later"]
            assert await stored(brokers) == [b"later"]
            assert sum(broker.services.counters.lost_held_blocks for broker in brokers) == 2

    run(work())
    assert [getattr(each, "event", "") for each in caplog.records].count("held-block-lost") == 2


def test_delayed_records_of_a_deleted_topic_are_dropped() -> None:
    async def work() -> None:
        async with delaying() as (cluster, brokers, topic), AsyncAdmin(brokers[0].address) as admin:
            target = Target("clicks", topic.id, 0)
            async with AsyncProducer(brokers[0].address) as producer:
                await (await producer.send("clicks", b"gone", partition=0, deliver_after=0.3))
            await admin.delete_topic("clicks")
            machine = HoldMachine()
            async with asyncio.timeout(20):
                while not machine.next_number(target) > 1 or machine.units:
                    await asyncio.sleep(0)
                    machine = await machine_of(cluster, target)

    run(work())


def test_delayed_records_of_a_sealed_topic_wait_until_it_is_unsealed(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with (
            delaying(1) as (_, brokers, _topic),
            AsyncAdmin(brokers[0].address) as admin,
            AsyncProducer(brokers[0].address) as producer,
        ):
            await (await producer.send("clicks", b"waits", deliver_after=0.2))
            with pytest.raises(TimedOutError):  # nobody ends it here
                await admin.seal_topic("clicks", timeout_s=0)
            with pytest.raises(TopicSealedError):
                await (await producer.send("clicks", b"refused", deliver_after=0.2))
            async with asyncio.timeout(20):
                while not any(getattr(each, "event", "") == "release-retry" for each in caplog.records):
                    await admin.topic("clicks")
            assert await stored(brokers) == []
            await admin.unseal_topic("clicks")
            assert await read(brokers, 1) == [b"waits"]

    run(work())
