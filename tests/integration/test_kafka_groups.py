"""Groups that an earlier release had in a real Kafka: read, set and removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from memq.errors import InvalidRequestError, NotFoundError
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.settings import Names
from memq.topic import Committed, Position, Totals
from memq_localstack.servers import Server
from tests.contract.queues import HANG_S, STALE_MS, committed, part
from tests.integration.kafka import joined_in_kafka, kafka_queue

FOUR = [part(number) for number in range(4)]


def over_kafka(kafka: Server, work: Callable[[KafkaQueue], Awaitable[None]], **section: Any) -> None:
    async def run() -> None:
        queue = kafka_queue(kafka.address, **section)
        try:
            async with asyncio.timeout(HANG_S):
                await queue.create(FOUR, STALE_MS)
                await work(queue)
        finally:
            await queue.close()

    asyncio.run(run())


def test_positions_keep_index_totals_and_mark_and_are_removed_with_their_group(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        most = Totals((1 << 63) - 1, (1 << 63) - 1)
        stored = {
            part(0): Committed(Position(0, 17, 3), Totals(1_000, 123_456)),
            part(1): committed(9, partition=1),
            part(2): Committed(Position(2, (1 << 39) - 1, (1 << 24) - 1), most, (1 << 32) - 1),
        }
        await queue.former.store("report", stored)
        found = await queue.former.read("report")
        assert (found.group, found.generation, found.members, found.committed) == ("report", 0, (), stored)
        lower = {part(1): committed(3, partition=1)}
        await queue.former.store("report", lower)
        assert (await queue.former.read("report")).committed == stored | lower
        assert await queue.former.names() == ["report"]
        await queue.former.remove("report")
        assert await queue.former.names() == []
        for call in (queue.former.read("report"), queue.former.remove("report")):
            with pytest.raises(NotFoundError, match="group 'report' is not in Kafka"):
                await call

    over_kafka(kafka, work)


def test_a_group_with_members_is_neither_set_nor_removed(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        names = Names("joined.")
        stored = {part(0): committed(5)}
        await queue.former.store("report", stored)
        with joined_in_kafka(kafka, names.kafka_group("report"), names.kafka_topic(part(0))):
            assert (await queue.former.read("report")).members == ("m",)
            with pytest.raises(InvalidRequestError, match="positions can't be set: the group has 1 active members"):
                await queue.former.store("report", {part(0): committed(8)})
            with pytest.raises(InvalidRequestError, match="can't be deleted: the group has 1 active members"):
                await queue.former.remove("report")
        found = await queue.former.read("report")
        assert (found.members, found.committed) == ((), stored)

    over_kafka(kafka, work, prefix="joined.")


def test_groups_of_others_are_not_seen(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.former.store("mine", {part(0): committed(1)})
        other = kafka_queue(kafka.address)
        try:
            assert (await queue.former.names(), await other.former.names()) == (["mine"], [])
            with pytest.raises(NotFoundError):
                await other.former.read("mine")
        finally:
            await other.close()

    over_kafka(kafka, work)
