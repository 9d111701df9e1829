"""A broker that has not read a topic yet never says that it does not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.broker.broker import Broker
from memq.errors import NotFoundError, NotReadyError, UnreachableError
from memq.topic import Topic, TopicSettings
from tests.component.cluster_rig import Rig, rig


def lag_behind(broker: Broker) -> None:
    """Let the coordinator's reads of a broker show no topic, as a server of ZooKeeper that lags behind does."""

    async def topics() -> Sequence[Topic]:
        return []

    broker.services.coordinator.topics = topics  # type: ignore[method-assign]


async def create(cluster: Rig) -> tuple[Broker, Topic]:
    """Create a topic through one broker; another one, that lags behind, is returned with it."""
    one, two = await cluster.start("one"), await cluster.start("two")
    lag_behind(two)
    return two, await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)


def test_a_topic_that_another_broker_created_is_not_ready_and_not_missing() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, topic = await create(cluster)
            for topic_id in ("", topic.id):
                with pytest.raises(NotReadyError, match="broker 'two' has not read topic 'clicks'"):
                    await behind.partitions.current_topic("clicks", topic_id)

    asyncio.run(work())


def test_a_topic_that_another_broker_created_is_read_when_it_is_asked_for() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one, two = await cluster.start("one"), await cluster.start("two")
            read = two.services.coordinator.topics
            lag_behind(two)
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            await two.partitions.refresh()
            two.services.coordinator.topics = read  # type: ignore[method-assign]
            assert await two.partitions.current_topic("clicks") == topic

    asyncio.run(work())


def test_a_topic_that_the_coordinator_does_not_have_is_missing() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, topic = await create(cluster)
            with pytest.raises(NotFoundError, match="topic 'views' does not exist"):
                await behind.partitions.current_topic("views")
            with pytest.raises(NotFoundError, match="topic 'clicks' does not exist"):
                await behind.partitions.current_topic("clicks", "f" * 32)
            await cluster.brokers[0].partitions.delete(cluster.brokers[0].partitions.topic("clicks"))
            with pytest.raises(NotFoundError, match="topic 'clicks' does not exist"):
                await behind.partitions.current_topic("clicks", topic.id)

    asyncio.run(work())


def test_a_coordinator_that_does_not_answer_makes_no_topic_missing() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, _ = await create(cluster)

            async def current_topic(name: str) -> Topic | None:
                raise UnreachableError("ZooKeeper does not answer")

            behind.services.coordinator.current_topic = current_topic  # type: ignore[method-assign]
            with pytest.raises(UnreachableError):
                await behind.partitions.current_topic("clicks")

    asyncio.run(work())
