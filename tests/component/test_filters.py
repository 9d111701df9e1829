"""Filters of consumers on a broker: what is delivered, what is read for it, what the group and the audit know."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import memq
from memq.audit.live.service import live_audit
from memq.broker.broker import Broker
from memq.client.bulk.arrow_reader import read_arrow
from memq.client.bulk.staged_writer import StagedWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import InvalidFilterError
from memq.limits import KIB
from memq.runtime.runtime import Runtime
from memq.storage_handlers.memory import MemoryHandler
from memq.testing import Cluster
from memq.topic import Position
from tests.brokers import batch_pointers, run, running_broker
from tests.component.live_reports import KEEP_MS, until, with_database
from tests.component.staged_rig import WRITER, Rig

WAIT_S = 20.0
BATCHES, RECORDS = 100, 20
OTHER_TAG = "x"  # `other` has the bit of `T`


class CountingStore(MemoryHandler):
    """Counts the bytes that are read."""

    read_bytes = 0

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return await super().get_range(key, offset, length)


def with_broker(test: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_broker() as broker:
            await test(broker)

    run(main())


async def fill(broker: Broker, tag_of: Callable[[int], str | None], batches: int = BATCHES) -> None:
    """Send batches of `RECORDS` records with one tag each; record number n has the header n."""
    async with AsyncProducer(broker.address, audit=False, codec="none", linger_ms=60_000) as producer:
        for batch in range(batches):
            for number in range(batch * RECORDS, (batch + 1) * RECORDS):
                text = b"%d" % number
                await producer.send("clicks", text * 10, headers={"n": text, "half": text[-1:]}, tag=tag_of(batch))
            await producer.flush()


async def values(broker: Broker, **settings: Any) -> list[bytes | None]:
    async with AsyncConsumer(broker.address, "clicks", end="end", audit=False, **settings) as consumer:
        return [record.value async for batch in consumer for record in batch]


def with_counting_store(broker: Broker) -> CountingStore:
    """Give a broker an empty store that counts, and no memory of batches: all are read from the store."""
    store = CountingStore(broker.services.runtime.clock)
    broker.services.stores["main"] = store
    broker.services.recent_batches.bytes_max = 0
    return store


async def read_with_bytes(broker: Broker, store: CountingStore, tags: str) -> tuple[list[bytes | None], int]:
    """Return all values with these tags, and how many bytes were read from the store for them."""
    before = store.read_bytes
    found = await values(broker, tags=tags, read="broker")
    return found, store.read_bytes - before


def numbered(numbers: Sequence[int]) -> list[bytes]:
    return [b"%d" % number * 10 for number in numbers]


def test_a_tag_in_5_of_100_batches_is_read_with_few_bytes_from_the_store() -> None:
    async def main() -> None:
        async with running_broker() as broker:
            store = with_counting_store(broker)
            await fill(broker, lambda batch: "T" if batch % 20 == 3 else OTHER_TAG)
            topic = next(each for each in await broker.services.coordinator.topics() if each.name == "clicks")
            pointers = await batch_pointers(broker.services.queue, topic)
            assert len(pointers) == BATCHES
            found, fetched = await read_with_bytes(broker, store, "T")
            _, fetched_of_all = await read_with_bytes(broker, store, "*")
        wanted = [number for number in range(BATCHES * RECORDS) if number // RECORDS % 20 == 3]
        assert found == numbered(wanted)
        stored = sum(pointer.stored_bytes for pointer in pointers)
        assert fetched <= 0.15 * stored
        assert fetched_of_all >= stored

    run(main())


def test_a_tag_in_5_of_100_blocks_of_each_large_batch_is_read_with_few_bytes_from_the_store() -> None:
    async def main() -> None:
        async with running_broker() as broker:
            store = with_counting_store(broker)
            rig = await Rig.made(broker, 1)
            draw = random.Random(1)
            wanted: list[bytes] = []
            for batch in range(3):
                writer = StagedWriter(rig.commits.cluster, {"clicks": rig.topic}, store, WRITER, block_bytes=8 * KIB)
                tagged = draw.sample(range(100), 5)
                for number in range(100):
                    value = draw.randbytes(8_000)
                    wanted += [value] if number in tagged else []
                    await writer.add("clicks", value, tag="T" if number in tagged else OTHER_TAG)
                await rig.commits.commit(batch, await writer.finish(), store)
            stored = sum(pointer.stored_bytes for pointer in await rig.pointers())
            assert stored >= 3 * 800_000
            found, fetched = await read_with_bytes(broker, store, "T")
            _, fetched_of_all = await read_with_bytes(broker, store, "*")
            await rig.commits.close()
        assert found == wanted
        assert fetched <= 0.15 * stored
        assert fetched_of_all >= stored

    run(main())


def test_tags_and_a_condition_choose_records_together() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, lambda batch: ("A", "B", None)[batch % 3], batches=6)
        rows = [(number, ("A", "B", None)[number // RECORDS % 3]) for number in range(6 * RECORDS)]
        assert await values(broker, tags="A || B") == numbered([n for n, tag in rows if tag])
        assert await values(broker, tags=["B"]) == numbered([n for n, tag in rows if tag == "B"])
        assert await values(broker, tags="*") == numbered([n for n, _ in rows])
        assert await values(broker, where="n BETWEEN 30 AND 50") == numbered(range(30, 51))
        both = await values(broker, tags="A", where="n > 50 AND half IN ('1', '7')")
        assert both == numbered([n for n, tag in rows if tag == "A" and n > 50 and n % 10 in (1, 7)])
        assert await values(broker, tags="nothing has it") == []

    with_broker(test)


def test_a_group_moves_over_what_its_filter_leaves_out() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, lambda batch: "A" if batch == 1 else "B", batches=5)
        async with AsyncConsumer(broker.address, "clicks", group="g", tags="A", audit=False) as consumer:
            batch = await consumer.poll(WAIT_S)
            assert batch is not None
            assert len(batch) == RECORDS
            assert await consumer.poll(1) is None
            await consumer.commit()
            ((_, position),) = (await consumer.committed()).items()
            (lag,) = (await consumer.lag()).values()
            assert lag.records == 0
            assert consumer.stats().counts.filtered_records == 4 * RECORDS
            assert consumer.stats().counts.records == RECORDS
        assert position == Position(0, 7)  # after an opening, five batches, and the end of their producer

    with_broker(test)


def test_a_consumer_at_the_end_gets_only_wanted_records_that_come() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, lambda batch: "B", batches=1)
        async with AsyncConsumer(broker.address, "clicks", start="end", tags="A", audit=False) as consumer:
            waiting = asyncio.create_task(consumer.poll(WAIT_S))
            await fill(broker, lambda batch: "A" if batch == 3 else "B", batches=5)
            batch = await waiting
            assert batch is not None
            assert [record.value for record in batch] == numbered(range(3 * RECORDS, 4 * RECORDS))
            assert batch.first == Position(0, batch.first.pointer_offset)

    with_broker(test)


@pytest.mark.parametrize(("option", "text"), [({"tags": "A |"}, "single"), ({"where": "n >"}, "at its end")])
def test_a_malformed_filter_is_refused_before_anything_is_connected(option: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidFilterError, match=text):
        memq.Consumer("127.0.0.1:1", "clicks", **option)  # type: ignore[arg-type]
    with pytest.raises(InvalidFilterError, match=text):
        read_arrow("127.0.0.1:1", "clicks", **option)  # type: ignore[arg-type]


def test_the_live_audit_counts_what_a_filter_leaves_out_as_passed() -> None:
    with Cluster(audit=True, audit_interval_ms=100) as cluster:
        with memq.Producer(cluster.address, linger_ms=60_000) as producer:
            for number in range(300):
                producer.send("clicks", b"%d" % number, tag="A" if number < 60 else "B", headers={"n": str(number)})
                if number % 30 == 29:
                    producer.flush()
        with memq.Consumer(cluster.address, "clicks", group="g", end="end", tags="A", where="n >= 30") as consumer:
            assert [int(value or 0) for batch in consumer for value in batch.values()] == list(range(30, 60))
        assert read_arrow(cluster.address, "clicks", tags="B", where="n < 62")["value"].to_pylist() == [b"60", b"61"]

        async def judge(database: Any) -> None:
            async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
                summary = await until([audit], database, lambda each: each.row.side("g")["passed"] == 270)
            assert summary.row.side("g")["processed"] == 30
            assert (summary.row.word("g"), summary.findings) == ("ok", 0)

        with_database("sqlite::memory:", judge)


def test_the_command_prints_only_wanted_records() -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            for number in range(20):
                producer.send("clicks", b"%d" % number, tag="AB"[number % 2], headers={"n": str(number)})
        command = ["consume", "clicks", "-b", cluster.address, "-e", "--tags", "B", "--where", "n > 10"]
        printed = subprocess.run(
            [sys.executable, "-m", "memq", *command, "-c", "3"], capture_output=True, text=True, timeout=60, check=True
        )
    assert printed.stdout.split() == ["11", "13", "15"]
