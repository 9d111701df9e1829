"""Pauses of a partition that a member of a group loses and gets again."""

from __future__ import annotations

import asyncio

import pytest

import memq
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.errors import GenerationFencedError, InvalidRequestError
from memq.testing import Cluster
from memq.topic import Position

CLICKS = TopicPartition("clicks", 0)
WAIT_S = 5


def test_a_partition_can_be_paused_only_from_the_notice_of_its_assignment_on() -> None:
    """A pause between the notices of a loss and of the next assignment held the new one until a resume."""

    async def work(cluster: Cluster) -> None:
        notices: list[str] = []

        def assigned(_: list[TopicPartition]) -> None:
            assert consumer.position() == {CLICKS: Position(0, 0)}
            notices.append("assigned")
            if notices.count("assigned") == 3:
                consumer.pause(*CLICKS)

        def lost(_: list[TopicPartition]) -> None:
            notices.append("lost")
            consumer.wakeup()

        async def lose_and_get_again() -> None:
            cluster.fail("groups.heartbeat", 1, GenerationFencedError("the session has expired"))
            while notices[-1] != "lost":
                await consumer.poll(WAIT_S)
            while not await consumer.lag():  # until it is open again
                await consumer.committed()

        consumer = AsyncConsumer(
            cluster.address,
            "clicks",
            group="g",
            auto_commit=False,
            session_timeout_ms=1_500,
            on_assigned=assigned,
            on_lost=lost,
        )
        async with consumer:
            assert await values(consumer) == [b"0"]
            consumer.pause(*CLICKS)
            await lose_and_get_again()
            assert consumer.position() == {}
            with pytest.raises(InvalidRequestError, match="partition 0 of topic 'clicks' is not assigned"):
                consumer.pause(*CLICKS)
            assert await values(consumer) == [b"0"]
            await lose_and_get_again()
            assert await consumer.poll(0.1) is None
            consumer.resume(*CLICKS)
            assert await values(consumer) == [b"0"]
            assert notices == ["assigned", "lost", "assigned", "lost", "assigned"]

    with Cluster() as cluster:
        cluster.create_topic("clicks", partitions=1)
        with memq.Producer(cluster.address) as producer:
            producer.send("clicks", b"0").result(WAIT_S)
        asyncio.run(work(cluster))


async def values(consumer: AsyncConsumer) -> list[bytes | None]:
    batch = await consumer.poll(WAIT_S)
    assert batch is not None
    return batch.values()
