"""A full ring: tiny blocks, while the store hangs, are throttled, sent again, and delivered once in order."""

from __future__ import annotations

import asyncio

from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.limits import KIB
from memq.topic import TopicSettings
from tests.brokers import TIMEOUT_S, GatedStore, running_broker

RECORDS = 60
RING = TopicSettings(ring_slots=2, batch_blocks_max=4)


def test_blocks_throttled_by_a_full_ring_are_resent_without_loss() -> None:
    values = [b"%03d" % number + bytes(800) for number in range(RECORDS)]  # each fills a block

    async def scenario() -> None:
        async with asyncio.timeout(TIMEOUT_S), running_broker() as broker:
            store = broker.services.stores["main"] = GatedStore()
            await broker.partitions.create("clicks", 1, RING, exist_ok=False)
            async with AsyncProducer(broker.address, linger_ms=0, block_bytes=KIB, codec="none") as producer:
                deliveries = [await producer.send("clicks", value) for value in values]
                while not broker.services.counters.throttled_blocks:  # noqa: ASYNC110 - the broker has no event for it
                    await asyncio.sleep(0)
                assert not any(delivery.done() for delivery in deliveries)
                store.gate.set()
                for delivery in deliveries:
                    await delivery
                assert (producer.stats().records_acked, producer.stats().blocks_failed) == (RECORDS, 0)
            got: list[bytes | None] = []
            async with AsyncConsumer(broker.address, "clicks", end="end", read="broker") as consumer:
                async for batch in consumer:
                    got += batch.values()
            assert got == values

    asyncio.run(scenario())
