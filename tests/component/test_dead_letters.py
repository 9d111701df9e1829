"""Dead letters of a consumer that polls for short times, and of one that is closed while they are not stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import memq
from memq.client.consumer import dead_letters
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import StoreError
from memq.limits import BLOCK_HEADER_BYTES
from memq.storage_handlers.memory import MemoryHandler
from memq.testing import Cluster
from tests.brokers import run, running_broker, until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def send_damaged(cluster: Cluster) -> None:
    """Send three records in batches of their own; the first one is damaged."""
    with memq.Producer(cluster.address, audit=False) as producer:
        for value in (b"0", b"1", b"2"):
            producer.send("clicks", value).result(10)
    cluster.damage(cluster.records("clicks")[0].position)


def test_a_letter_is_sent_once_by_polls_that_are_shorter_than_its_ack(cluster: Cluster) -> None:
    send_damaged(cluster)
    cluster.create_topic("clicks.dlq")
    cluster.fail("store.put", 3)  # the ack comes after some retries of the broker
    values: list[bytes | None] = []
    polls = 0
    with memq.Consumer(cluster.address, "clicks", on_damaged="dead-letter", audit=False) as consumer:
        while len(values) < 2:
            batch = consumer.poll(0.02)
            polls += 1
            values += batch.values() if batch is not None else []
        assert consumer.stats().dead_letters == 1
    assert polls > 5, "the first polls ended before the ack"
    assert values == [b"1", b"2"]
    assert len(cluster.records("clicks.dlq")) == 1


def test_a_consumer_closes_its_connections_though_a_letter_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "CLOSE_S", 0.1)

    async def away(*_arguments: Any) -> None:
        raise StoreError("away")

    async def test() -> None:
        async with running_broker() as broker:
            async with AsyncProducer(broker.address, audit=False) as producer:
                await (await producer.send("clicks", b"0"))
            store = broker.services.store
            assert isinstance(store, MemoryHandler)
            for key, body in list(store.objects.items()):
                at = BLOCK_HEADER_BYTES + 1
                store.objects[key] = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            broker.services.recent_batches.clear()
            await until(lambda: not broker.intake.readers)
            monkeypatch.setattr(store, "put", away)
            consumer = AsyncConsumer(broker.address, "clicks", on_damaged="dead-letter", audit=False)
            assert await consumer.poll(0.5) is None
            assert len(broker.intake.readers) == 2, "those of the consumer and of its dead letters"
            await consumer.close()
            await until(lambda: not broker.intake.readers)

    run(test())
