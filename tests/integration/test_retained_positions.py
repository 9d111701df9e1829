"""Retention on real queues: a reader before the first available position gets that position."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memq.aio import Admin, Consumer, Producer
from memq.broker.broker import Broker
from memq.errors import PositionExpiredError
from memq.topic import Position, ReadPartition
from memq_localstack.servers import Server
from tests.integration.queued_broker import QUEUES, queued_broker

TOPIC, GROUP = "clicks", "report"
HANG_S = 240


async def send(address: str, *values: bytes) -> None:
    """Send each as a batch of its own."""
    async with Producer(address) as producer:
        for value in values:
            await producer.send(TOPIC, value)
            await producer.flush(60)


async def read(address: str, **options: object) -> list[bytes]:
    """Read to the end for the group; an expired position is reported once and then sought."""
    found: list[bytes] = []
    async with Consumer(address, TOPIC, group=GROUP, end="end", **options) as consumer:  # type: ignore[arg-type]
        try:
            async for batch in consumer:
                found += [value for value in batch.values() if value is not None]
        except PositionExpiredError as error:
            with pytest.raises(PositionExpiredError):
                await consumer.poll(60)
            await consumer.seek(TOPIC, 0, Position.parse(error.first))
            found.append(str(error).encode())
            async for batch in consumer:
                found += [value for value in batch.values() if value is not None]
    return found


async def begin(broker: Broker, before: int) -> Position:
    """Let retention take what lies before an offset; return the first position that is left."""
    async with Admin(broker.address) as admin:
        partition = ReadPartition(TOPIC, (await admin.topic(TOPIC)).topic.id, 0)
    await broker.services.queue.trim(partition, before)
    broker.services.recent_pointers.forget(partition)
    return Position(0, before)


@QUEUES
def test_reader_before_the_first_position_gets_it_with_the_error(kind: str, tmp_path: Path, kafka: Server) -> None:
    async def work() -> None:
        async with queued_broker(kind, tmp_path, kafka) as broker, Admin(broker.address) as admin:
            await send(broker.address, b"0", b"1")
            assert await read(broker.address) == [b"0", b"1"]
            await send(broker.address, b"2", b"3", b"4")
            here = (await admin.group(GROUP)).partitions[0].position
            assert here is not None
            assert await begin(broker, here.pointer_offset) == here
            gone = Position(0, here.pointer_offset - 1)
            async with Consumer(broker.address, TOPIC, group="other") as consumer:
                batch = await consumer.poll(60)
                assert batch is not None
                assert batch.values() == [b"2"], "the beginning is what is left"
                with pytest.raises(PositionExpiredError, match=f"position {gone} .* is before {here}") as refused:
                    await consumer.seek(TOPIC, 0, gone)
                assert refused.value.first == str(here)
            with pytest.raises(PositionExpiredError):
                await admin.reset_group(GROUP, TOPIC, gone)
            async with Consumer(broker.address, TOPIC, start=gone) as named:
                with pytest.raises(PositionExpiredError):
                    await named.poll(60)
            async with Consumer(broker.address, TOPIC, start=gone, on_expired="skip") as passing:
                batch = await passing.poll(60)
                assert batch is not None
                assert batch.values() == [b"2"], "as the error's hint says"
            first = await begin(broker, here.pointer_offset + 1)
            words = f"position {here} of topic 'clicks' is before {first}, the first remaining one"
            report = f"{words}: 1 records are gone".encode()
            assert await read(broker.address, auto_commit=False) == [report, b"3", b"4"]
            assert await read(broker.address, on_expired="skip") == [b"3", b"4"]
            await begin(broker, first.pointer_offset + 2)
            await send(broker.address, b"5")
            assert await read(broker.address) == [b"5"], "nothing that it had not read is gone"

    async def bounded() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(bounded())
