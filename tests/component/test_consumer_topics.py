"""What a consumer makes of brokers that do not know its topic for a moment, and of a topic that is gone."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.core import GONE_TRIES
from memq.client.metadata import ClusterMetadata
from memq.client.producer.producer import AsyncProducer
from memq.protocol.messages import TopicMetadata
from tests.brokers import run, running_broker


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
