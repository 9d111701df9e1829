"""Records that a task sends twice exist once: blocks follow from the records, however calls divide them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from memq.client.bulk import direct_writer
from memq.client.bulk.block_cutter import BLOCK_BYTES_MAX
from memq.client.bulk.direct_writer import ORDERS_MAX, DirectIdentity, DirectWriter, FixedIdentityWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.send_buffer import SendBuffer
from memq.errors import IdentityConflictError, MovedError, OutcomeUnknownError, TooLargeError
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


def test_every_part_of_an_identity_makes_another_producer() -> None:
    """Two of them with one producer id would drop each other's records as copies."""
    identities = [
        DirectIdentity(writer, stream, batch_id, task)
        for writer in ("w", "v")
        for stream in ("s", "t")
        for batch_id in (1, 2)
        for task in (1, 2)
    ]
    numbers = [identity.producer_id(order) for identity in identities for order in (0, 1)]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [identity.producer_id(order) for identity in identities for order in (0, 1)]
    kept = [DirectIdentity("w", "s", 1, 2).producer_id(order) for order in (0, 1)]
    assert kept == [6079348571829214892, 9194601301387826910], "a task may run again with another version of memq"


@pytest.mark.parametrize("keys", KEYS)
def test_records_that_come_again_in_other_calls_are_there_once(keys: str) -> None:
    async def work() -> None:
        chance = random.Random(keys)
        rows = rows_of(chance, KEYS[keys], timed=keys == "all")
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 3, TopicSettings(), exist_ok=False)
            for attempt in range(4):
                writer = DirectWriter(broker.address, DirectIdentity("w", "", 1, 0))
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
            writer = DirectWriter(broker.address, DirectIdentity("w", "", 1, 0))
            try:
                with pytest.raises(TooLargeError, match="over record_bytes_max"):
                    await writer.add(TOPIC, bytes(BLOCK_BYTES_MAX + 1))
                with pytest.raises(TooLargeError, match="over record_bytes_max"):
                    await writer.add_many(TOPIC, [b"small", bytes(BLOCK_BYTES_MAX), None], [b"a", b"b", b"c"])
            finally:
                await writer.abandon()

    asyncio.run(work())


# ---- a task that runs again ----------------------------------------------------------------------

LARGE = [b"row %02d " % number + bytes(64 << 10) for number in range(32)]  # several blocks


async def run_task(
    address: str, rows: Sequence[bytes], identity: DirectIdentity, dies_after: int | None = None
) -> None:
    """Run a task to its end, or until it is killed with all that it had sent in the queue."""
    made: list[FixedIdentityWriter] = []

    class Noted(FixedIdentityWriter):
        """Notes that it is made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(direct_writer, "FixedIdentityWriter", Noted)
        writer = DirectWriter(address, identity)
        for row in rows[:dies_after]:
            await writer.add(TOPIC, row)
    if dies_after is None:
        await writer.finish()
    else:
        await made[-1].drain()
        await writer.abandon()


async def values_of(address: str) -> list[bytes]:
    async with AsyncConsumer(address, [TOPIC], start="beginning", end="end") as consumer:
        return [record.value or b"" async for batch in consumer for record in batch]


@pytest.mark.parametrize("restarted", [False, True], ids=["same-owner", "next-owner"])
@pytest.mark.parametrize("orders", ["same", "reversed", "reversed-twice", "shuffled-thrice"])
def test_a_task_that_runs_again_loses_no_row_in_any_order(orders: str, restarted: bool) -> None:
    """What was sent before the kill is doubled where it comes in another order, else it is there once."""
    chance = random.Random(orders)
    attempts = {
        "same": [LARGE],
        "reversed": [LARGE[::-1]],
        "reversed-twice": [LARGE[::-1], LARGE[::-1]],
        "shuffled-thrice": [chance.sample(LARGE, len(LARGE)) for _ in range(3)],
    }[orders]

    async def work() -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            topic = await broker.partitions.create(TOPIC, 1, TopicSettings(), exist_ok=False)
            identity = DirectIdentity("job", "query", 7, 0)
            await run_task(broker.address, LARGE, identity, dies_after=20)
            for rows in attempts:
                if restarted:  # the next owner knows sequences by pointers, and looks the checksums up
                    processor = broker.partitions.processors[topic.id, 0]
                    processor.fence(MovedError("in a test"))
                await run_task(broker.address, rows, identity)
            found = await values_of(broker.address)
            assert set(found) == set(LARGE)
            if orders == "same":
                assert found == LARGE
            if orders == "reversed-twice":  # the second one finds what the first one has sent in its order
                assert len(found) < 2 * len(LARGE)

    asyncio.run(work())


def test_another_run_of_a_writer_with_the_same_batch_and_task_loses_nothing() -> None:
    """A stream with a new checkpoint counts its batches from 0, and its tasks bear the numbers of the first run's."""
    new = [b"new" + row[3:] for row in LARGE]

    async def work(stream: str) -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 1, TopicSettings(), exist_ok=False)
            await run_task(broker.address, LARGE, DirectIdentity("job", "first", 0, 0))
            await run_task(broker.address, new, DirectIdentity("job", stream, 0, 0))
            assert sorted(await values_of(broker.address)) == sorted(LARGE + new)
            assert bool(broker.services.counters.conflicting_blocks) is (stream == "first")

    asyncio.run(work("second"))
    asyncio.run(work("first"))


def test_a_block_whose_outcome_is_unknown_is_not_sent_under_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a conflict of identities shows that none of a block is there."""

    async def work() -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 1, TopicSettings(), exist_ok=False)
            writer = DirectWriter(broker.address, DirectIdentity("w", "", 1, 0))
            put_block, unknown = SendBuffer.put_block, [AsyncDelivery()]
            unknown[0].settle(OutcomeUnknownError("sent and not acked"))

            def put(*arguments: Any) -> Any:
                delivery = put_block(*arguments)
                return unknown.pop() if unknown else delivery

            for row in LARGE:
                await writer.add(TOPIC, row)
            monkeypatch.setattr(SendBuffer, "put_block", put)
            with pytest.raises(OutcomeUnknownError):
                await writer.finish()
            assert unknown == [], "a block was left for the end"
            await writer.abandon()
            found = await values_of(broker.address)
        assert len(found) == len(set(found))

    asyncio.run(work())


def test_the_producers_of_all_orders_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProducerCore] = []
    closed: list[ProducerCore] = []

    class Noted(ProducerCore):
        """Notes that it is made, and that it is closed."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(self)

        async def close(self, timeout_s: float | None = None) -> None:
            await super().close(timeout_s)
            closed.append(self)

    monkeypatch.setattr("memq.client.bulk.direct_writer.ProducerCore", Noted)

    async def work() -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 1, TopicSettings(), exist_ok=False)
            for row in (b"a", b"b", b"c"):
                await run_task(broker.address, [row], DirectIdentity("w", "", 1, 0))
        assert (len(made), closed) == (1 + 2 + 3, made)

    asyncio.run(work())


def test_more_orders_than_there_are_identities_fail_by_name() -> None:
    async def work() -> None:
        async with asyncio.timeout(END_S), running_broker() as broker:
            await broker.partitions.create(TOPIC, 1, TopicSettings(), exist_ok=False)
            for number in range(ORDERS_MAX):
                await run_task(broker.address, [b"%d" % number], DirectIdentity("w", "", 1, 0))
            with pytest.raises(IdentityConflictError, match="differs from what is known under the same sequences"):
                await run_task(broker.address, [b"one more"], DirectIdentity("w", "", 1, 0))
            assert len(await values_of(broker.address)) == ORDERS_MAX

    asyncio.run(work())
