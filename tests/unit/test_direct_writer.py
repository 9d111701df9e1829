"""What a task sends twice is there once: its blocks follow from its records, however these come in calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from memq.client.aio_consumer import AsyncConsumer
from memq.client.direct_writer import DirectWriter, direct_id
from memq.client.import_plan import BLOCK_BYTES_MAX
from memq.errors import TooLargeError
from memq.topic import TopicSettings
from tests.brokers import running_broker

Row = tuple[bytes | None, bytes | None, int | None]
END_S = 120.0
TOPIC = "clicks"


def rows_of(chance: random.Random, key: Callable[[int], bytes | None], *, timed: bool) -> list[Row]:
    """Return numbered records of several blocks in each of three partitions, some without a value."""
    found: list[Row] = []
    for number in range(1_500):
        value = b"%05d" % number + bytes(chance.choice((0, 900, 40_000 if chance.random() < 0.1 else 10)))
        found.append((value, key(number), 1_767_225_600_000 + number if timed else None))
    return found


KEYS: dict[str, Callable[[int], bytes | None]] = {
    "none": lambda number: None,
    "all": lambda number: b"%d" % (number % 40),
    "some": lambda number: b"%d" % (number % 40) if number % 3 else None,
}


async def send_in_parts(writer: DirectWriter, rows: Sequence[Row], chance: random.Random) -> None:
    """Send records in calls of any size, now and then one by itself."""
    at = 0
    while at < len(rows):
        part = rows[at : at + chance.choice((1, 7, 400, 1_000))]
        at += len(part)
        values, keys, times = (list(column) for column in zip(*part, strict=True))
        if len(part) == 1:
            await writer.add(TOPIC, values[0], keys[0], None, times[0])
            continue
        timed = [time_ms for time_ms in times if time_ms is not None]
        await writer.add_many(TOPIC, values, keys if any(keys) else None, timed or None)


@pytest.mark.parametrize("keys", KEYS)
def test_records_that_come_again_in_other_calls_are_there_once(keys: str) -> None:
    async def work() -> None:
        chance = random.Random(keys)
        rows = rows_of(chance, KEYS[keys], timed=keys == "all")
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 3, TopicSettings(), exist_ok=False)
            for attempt in range(4):
                writer = DirectWriter(broker.address, direct_id("w", 1, 0))
                if attempt:
                    await send_in_parts(writer, rows, chance)
                else:
                    for value, key, time_ms in rows:
                        await writer.add(TOPIC, value, key, None, time_ms)
                await writer.finish()
            async with AsyncConsumer(broker.address, [TOPIC], start="beginning", end="end") as consumer:
                found = [record async for batch in consumer for record in batch]
            places = {record.position.read_partition for record in found}
        assert sorted((each.value or b"", each.key) for each in found) == sorted(
            (row[0] or b"", row[1]) for row in rows
        )
        assert places == {0, 1, 2}
        if keys == "all":
            assert {each.value: each.timestamp_ms for each in found} == {row[0]: row[2] for row in rows}

    asyncio.run(work())


def test_a_record_over_the_topics_bound_is_refused_by_name() -> None:
    async def work() -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 1, TopicSettings(record_bytes_max=BLOCK_BYTES_MAX), exist_ok=False)
            writer = DirectWriter(broker.address, direct_id("w", 1, 0))
            try:
                with pytest.raises(TooLargeError, match="over record_bytes_max"):
                    await writer.add(TOPIC, bytes(BLOCK_BYTES_MAX + 1))
                with pytest.raises(TooLargeError, match="over record_bytes_max"):
                    await writer.add_many(TOPIC, [b"small", bytes(BLOCK_BYTES_MAX), None], [b"a", b"b", b"c"])
            finally:
                await writer.abandon()

    asyncio.run(work())
