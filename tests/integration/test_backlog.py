"""A long backlog in uneven batches on real queues: exact lag, and a reset by time that skips nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from memq.aio import Admin, Consumer, Producer
from memq_localstack.servers import Server
from tests.integration.queued_broker import QUEUES, queued_broker
from tests.time_after_acks import time_after_acks

TOPIC = "clicks"
PARTITIONS = 12
UNREAD = 123_457
MARKS = 5
HANG_S = 240
Sent = list[list[int]]  # by partition


def bursts(records: int) -> Iterator[tuple[int, int]]:
    """Yield partitions and how many records each gets at once: mostly few, at times thousands."""
    rng = random.Random(9)
    while records:
        count = min(records, rng.choice((1, 2, 7, 50, 400, 3_000)) + rng.randrange(5))
        yield rng.randrange(PARTITIONS), count
        records -= count


async def fill(address: str) -> tuple[Sent, list[tuple[datetime, Sent]]]:
    """Send the backlog; return what was sent, and for some moments what was sent after them."""
    sent: Sent = [[] for _ in range(PARTITIONS)]
    marks: list[tuple[datetime, list[int]]] = []
    number, every = 0, list(bursts(UNREAD))
    async with Producer(address) as producer:
        for turn, (partition, count) in enumerate(every):
            if turn % 20 == 0:
                await producer.flush(60)
            if turn % (len(every) // MARKS) == 0:
                await producer.flush(60)
                marks.append((time_after_acks(), [len(values) for values in sent]))
            for _ in range(count):
                await producer.send(TOPIC, b"%d" % number, partition=partition)
                sent[partition].append(number)
                number += 1
        await producer.flush(60)
    after = [(when, [values[start:] for values, start in zip(sent, starts, strict=True)]) for when, starts in marks]
    return sent, after


async def lag_of(admin: Admin) -> list[int]:
    described = await admin.group("report")
    return [progress.lag.records for progress in sorted(described.partitions, key=lambda each: each.topic_partition)]


async def read_some(address: str, records: int) -> list[int]:
    """Read and commit at least so many; return how many of each partition."""
    counts = [0] * PARTITIONS
    async with Consumer(address, [TOPIC], group="report", auto_commit=False) as consumer:
        async for batch in consumer:
            counts[batch.partition] += len(batch.values())
            await consumer.commit(batch)
            if sum(counts) >= records:
                return counts
    raise AssertionError("the consumer ended by itself")


async def read_all(address: str) -> Sent:
    found: Sent = [[] for _ in range(PARTITIONS)]
    async with Consumer(address, [TOPIC], group="report", auto_commit=False, end="end") as consumer:
        async for batch in consumer:
            found[batch.partition] += [int(value) for value in batch.values() if value is not None]
    return found


@QUEUES
def test_the_lag_is_exact_and_a_reset_by_time_misses_nothing(kind: str, tmp_path: Path, kafka: Server) -> None:
    async def work() -> None:
        async with queued_broker(kind, tmp_path, kafka) as broker, Admin(broker.address) as admin:
            await admin.create_topic(TOPIC, partitions=PARTITIONS)
            sent, marks = await fill(broker.address)
            unread = list(map(len, sent))
            await admin.reset_group("report", TOPIC, "beginning", new_ok=True)
            assert await lag_of(admin) == unread
            assert sum(unread) == UNREAD
            for records in (1, 1_000, 50_000):
                read = await read_some(broker.address, records)
                unread = [before - here for before, here in zip(unread, read, strict=True)]
                assert await lag_of(admin) == unread
            for when, after in marks:
                await admin.reset_group("report", TOPIC, when)
                assert await lag_of(admin) == list(map(len, after))
            when, after = marks[MARKS // 2]
            await admin.reset_group("report", TOPIC, when)
            assert await read_all(broker.address) == after

    async def bounded() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(bounded())
