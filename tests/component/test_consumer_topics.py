"""What a consumer makes of brokers that do not know its topic for a moment, and of a topic that is gone."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.consumer.aio_consumer import AsyncConsumer
from memq.client.consumer.core import GONE_TRIES
from memq.client.producer.aio_producer import AsyncProducer
from memq.protocol.messages import TopicMetadata
from tests.brokers import run, running_broker


@pytest.mark.parametrize("group", [None, "g"])
def test_a_broker_that_does_not_know_the_topic_yet_costs_no_place(group: str | None) -> None:
    async def scenario() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"before"))
            async with AsyncConsumer(broker.address, "clicks", group=group, auto_commit=False) as consumer:
                first = await consumer.poll(20)
                assert first is not None
                core = consumer._core
                read, refresh, asked = dict(core._reading.assigned), core._metadata.refresh, 0
                known = asyncio.Event()

                async def not_known(name: str, *, create: bool = False) -> TopicMetadata | None:
                    nonlocal asked
                    asked += 1
                    found = await refresh(name, create=create)
                    if asked <= GONE_TRIES:
                        return None
                    known.set()
                    return found

                core._metadata.refresh = not_known  # type: ignore[method-assign]  # as a broker that has just come up
                core._stale.set()
                await known.wait()
                await (await producer.send("clicks", b"after"))
                second = await consumer.poll(20)
                assert second is not None
                assert second.values() == [b"after"], "not once more what was read before"
                assert all(core._reading.assigned[partition] is each for partition, each in read.items())

    run(scenario())
