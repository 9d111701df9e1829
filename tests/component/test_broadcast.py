"""Broadcast consumers: each reads all partitions, with its own stored positions, and is no group to users."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import memq
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import GenerationFencedError, InvalidNameError, InvalidRequestError
from memq.testing import Cluster
from tests.brokers import run, running_broker


async def read(consumer: AsyncConsumer, count: int) -> set[bytes | None]:
    """Return the values of the next `count` records."""
    values = set[bytes | None]()
    async with asyncio.timeout(20):
        while len(values) < count:
            batch = await consumer.poll(1)
            values |= {record.value for record in batch} if batch is not None else set()
    return values


async def send(address: str, *values: bytes) -> None:
    async with AsyncProducer(address) as producer:
        for value in values:
            await producer.send("clicks", value, key=value)
        await producer.flush()


def test_each_broadcast_consumer_reads_all_and_continues_where_it_was() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=3)
            first = {b"%d" % number for number in range(12)}
            await send(broker.address, *first)
            for name in ("a", "b"):
                async with AsyncConsumer(broker.address, "clicks", broadcast=name) as consumer:
                    assert await read(consumer, len(first)) == first
                    await consumer.poll(0)
                    await consumer.commit()
                    assert {at.topic for at in await consumer.committed()} == {"clicks"}
            await send(broker.address, b"later")
            async with AsyncConsumer(broker.address, "clicks", broadcast="a") as consumer:
                assert await read(consumer, 1) == {b"later"}
                await consumer.poll(0)
                await consumer.commit()  # is not taken for one of the consumer before
            assert await admin.groups() == [], "no group of a user"
            assert await admin.groups(internal=True) == ["_memq_broadcast-a", "_memq_broadcast-b"]

    run(work())


def test_a_newer_consumer_of_a_name_fences_the_older_one() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=2)
            await send(broker.address, b"one")
            older = AsyncConsumer(broker.address, "clicks", broadcast="a", session_timeout_ms=1_000)
            assert await read(older, 1) == {b"one"}
            async with AsyncConsumer(broker.address, "clicks", broadcast="a", session_timeout_ms=1_000) as newer:
                assert await read(newer, 1) == {b"one"}, "the older one has committed nothing"
                for _ in range(2):
                    with pytest.raises(GenerationFencedError, match="another consumer reads as broadcast='a'"):
                        async with asyncio.timeout(10):
                            await older.poll()
                await older.close()
                await send(broker.address, b"two")
                assert await read(newer, 1) == {b"two"}, "the close of the older one takes nothing from it"

    run(work())


def test_a_closed_consumer_leaves_at_once_so_that_its_group_can_be_deleted() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=2)
            await send(broker.address, b"one")
            async with AsyncConsumer(broker.address, "clicks", broadcast="a", session_timeout_ms=3_600_000) as consumer:
                assert await read(consumer, 1) == {b"one"}
                with pytest.raises(InvalidRequestError, match="1 active members"):
                    await admin.delete_group("_memq_broadcast-a")
            await admin.delete_group("_memq_broadcast-a")
            assert await admin.groups(internal=True) == []

    run(work())


def test_a_wrong_broadcast_name_is_refused() -> None:
    for wrong, error in (("", InvalidNameError), ("a b", InvalidNameError), ("_memq_x", InvalidNameError)):
        with pytest.raises(error):
            AsyncConsumer("127.0.0.1:1", "clicks", broadcast=wrong)
    with pytest.raises(InvalidNameError):
        AsyncConsumer("127.0.0.1:1", "clicks", broadcast="a" * 249)
    with pytest.raises(InvalidRequestError, match="has no group"):
        AsyncConsumer("127.0.0.1:1", "clicks", group="g", broadcast="a")
    with pytest.raises(InvalidNameError):
        AsyncConsumer("127.0.0.1:1", "clicks", group="_memq_broadcast-a")
    with pytest.raises(TypeError):
        AsyncConsumer("127.0.0.1:1", "clicks", broadcast=7)  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_the_command_line_consumes_under_a_broadcast_name(
    cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def consumed() -> bytes:
        assert main(["consume", "clicks", "--broadcast", "a", "-e", "-b", cluster.address]) == 0
        return capsysbinary.readouterr().out

    with memq.Producer(cluster.address) as producer:
        for value in ("one", "two"):
            producer.send("clicks", value).result(10)
            assert consumed() == value.encode() + b"\n"
    assert main(["consume", "clicks", "--broadcast", "a", "-G", "g", "-b", cluster.address]) == 2
    with memq.Consumer(cluster.address, "clicks", broadcast="b", end="end") as consumer:
        assert [record.value for batch in consumer for record in batch] == [b"one", b"two"]
