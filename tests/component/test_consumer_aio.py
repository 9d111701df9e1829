"""The asyncio consumer on a real broker, and reading straight from a filesystem store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import memq.aio
from memq.broker.broker import Broker
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.errors import CorruptDataError, DeniedError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import KIB
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.memory import MemoryHandler


@asynccontextmanager
async def broker_on(store: StorageHandler) -> AsyncIterator[Broker]:
    runtime = Runtime()
    settings = BrokerSettings(port=0, http_port=-1)
    broker = Broker(
        settings, runtime, {"main": store}, MemoryQueue(runtime.clock), MemoryCoordinator(MemoryCluster("test"))
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
        await store.close()


async def send(broker: Broker, *values: bytes) -> None:
    """Send values, each of them as a batch of its own."""
    async with memq.aio.Producer(broker.address) as producer:
        for value in values:
            await (await producer.send("clicks", value))


def files(folder: Path) -> FilesystemHandler:
    (folder / "objects").mkdir()
    (folder / "tmp").mkdir()
    return FilesystemHandler(folder / "objects", folder / "tmp")


def objects_of(folder: Path) -> list[Path]:
    """Return the files of the topics' own objects; reports to the audit lie in shared ones."""
    return sorted(path for path in (folder / "objects").glob("*/topics/**/*") if path.is_file())


def test_iteration_commit_and_callbacks() -> None:
    async def main() -> None:
        async with broker_on(MemoryHandler(Runtime().clock)) as broker:
            await send(broker, b"0", b"1")
            calls = []

            async def assigned(places: list[TopicPartition]) -> None:
                await asyncio.sleep(0)
                calls.append(places)

            async with memq.aio.Consumer(
                broker.address, "clicks", group="g", end="end", auto_commit=False, on_assigned=assigned
            ) as consumer:
                found = []
                async for batch in consumer:
                    found += batch.values()
                    await consumer.commit(batch)
                assert found == [b"0", b"1"]
                assert calls == [[TopicPartition("clicks", 0)]]
                await consumer.commit()  # what followed the last batch, without records
                assert await consumer.committed() == consumer.position()
                assert (await consumer.lag())[calls[0][0]].records == 0

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["auto", "direct", "broker"])
def test_every_way_of_reading_brings_the_same(tmp_path: Path, mode: ReadMode) -> None:
    async def main() -> None:
        async with broker_on(files(tmp_path)) as broker:
            await send(broker, b"0", b"1")
            async with memq.aio.Consumer(broker.address, "clicks", end="end", read=mode) as consumer:
                assert [value async for batch in consumer for value in batch.values()] == [b"0", b"1"]

    asyncio.run(main())


def test_a_store_that_does_not_open_here_is_read_through_the_broker_or_not_at_all() -> None:
    async def main() -> None:
        async with broker_on(MemoryHandler(Runtime().clock)) as broker:
            await send(broker, b"0")
            async with memq.aio.Consumer(broker.address, "clicks", end="end") as consumer:
                assert [value async for batch in consumer for value in batch.values()] == [b"0"]
            async with memq.aio.Consumer(broker.address, "clicks", end="end", read="direct") as consumer:
                with pytest.raises(DeniedError, match="can't be opened here"):
                    await consumer.poll(10)

    asyncio.run(main())


def test_an_object_that_was_cut_delivers_the_blocks_before_the_cut(tmp_path: Path) -> None:
    async def main() -> None:
        async with broker_on(files(tmp_path)) as broker:
            async with memq.aio.Producer(broker.address, codec="none", block_bytes=KIB, linger_ms=50) as producer:
                for number in range(40):
                    await producer.send("clicks", b"%03d" % number * 40)
            path = objects_of(tmp_path)[-1]
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:1_500])
            async with memq.aio.Consumer(
                broker.address, "clicks", end="end", read="direct", on_damaged="skip"
            ) as consumer:
                batches = [batch async for batch in consumer]
            found = sum(len(batch) for batch in batches)
            lost = sum(damage.records for batch in batches for damage in batch.damaged)
            assert 0 < found < 40
            assert found + lost == 40

    asyncio.run(main())


def test_a_block_with_a_damaged_length_hides_only_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with broker_on(files(tmp_path)) as broker:
            async with memq.aio.Producer(broker.address, codec="none", block_bytes=KIB, linger_ms=50) as producer:
                for number in range(40):
                    await producer.send("clicks", b"%03d" % number * 40)
            path = max(objects_of(tmp_path), key=_size)
            body = bytearray(path.read_bytes())
            body[12] ^= 0xFF  # the first block's payload length
            path.chmod(0o600)
            path.write_bytes(body)
            async with memq.aio.Consumer(
                broker.address, "clicks", end="end", read="direct", on_damaged="skip"
            ) as consumer:
                batches = [batch async for batch in consumer]
            damages = [damage for batch in batches for damage in batch.damaged]
            assert len(damages) == 1
            assert sum(len(batch) for batch in batches) + damages[0].records == 40
            async with memq.aio.Consumer(broker.address, "clicks", end="end", read="direct") as consumer:
                with pytest.raises(CorruptDataError):
                    [batch async for batch in consumer]

    asyncio.run(main())


def _size(path: Path) -> int:
    return path.stat().st_size


def test_a_poll_that_is_cancelled_loses_nothing() -> None:
    async def main() -> None:
        async with broker_on(MemoryHandler(Runtime().clock)) as broker:
            await send(broker, b"0")
            async with memq.aio.Consumer(broker.address, "clicks") as consumer:
                assert await consumer.poll(10) is not None
                poll = asyncio.create_task(consumer.poll())
                await asyncio.sleep(0)
                poll.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await poll
                await send(broker, b"1")
                batch = await consumer.poll(10)
                assert batch is not None
                assert batch.values() == [b"1"]

    asyncio.run(main())


def test_a_budget_smaller_than_a_batch_still_lets_one_through() -> None:
    async def main() -> None:
        async with broker_on(MemoryHandler(Runtime().clock)) as broker:
            values = [b"%d" % number * 9_000 for number in range(5)]
            async with memq.aio.Producer(broker.address, codec="none") as producer:
                for value in values:
                    await (await producer.send("clicks", value))
            async with memq.aio.Consumer(broker.address, "clicks", end="end", prefetch_bytes_max=4 * KIB) as consumer:
                assert [value async for batch in consumer for value in batch.values()] == values

    asyncio.run(main())
