"""Blocks acked with 1 are kept on doubt: the broker releases them only for a proof."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from memq.broker.partition.publishing import Publisher
from memq.broker.spool import forwarding
from memq.broker.spool.files import SpoolFiles, inspect_spool, sizes_in
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MovedError,
    NotFoundError,
    ObjectExistsError,
    OutOfSequenceError,
    ProtocolError,
    QueueError,
    TimedOutError,
    TooOldError,
    UnreachableError,
    UnsupportedFormatError,
)
from memq.notification import Entries
from memq.protocol.frames import AckLevel, Api
from memq.protocol.link import Link
from memq.protocol.messages import Forward
from memq.runtime.clock import SystemClock
from memq.runtime.network import format_address
from memq.storage_handlers import Buffer
from memq.topic import ReadPartition
from tests.brokers import BareClient, block_of, until, write_frame
from tests.component.cluster_rig import Rig, rig
from tests.component.faulty_brokers import QUICK, Seized, gate_of, held_at, left_behind, pointers, records, seized

T = TypeVar("T")

REFUSALS: list[type[Exception]] = [
    NotFoundError,
    DeniedError,
    InvalidRequestError,
    CorruptDataError,
    UnsupportedFormatError,
    QueueError,
    TimeoutError,
    ValueError,
]


class Faults:
    """Makes the queue's reads fail in the tasks of the forwarder: `left` times."""

    def __init__(self, cluster: Rig, error: type[Exception], left: float = 1) -> None:
        self.met = 0
        self.left = left
        self._error = error
        self._read = cluster.queue.read
        cluster.queue.read = self.read  # type: ignore[method-assign]  # a queue that lies

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("forward") and self.left > 0:
            self.left -= 1
            self.met += 1
            raise self._error("unknown topic or partition")
        return await self._read(partition, offset, bytes_max)


@asynccontextmanager
async def lost_epoch() -> AsyncIterator[Seized]:
    """Have a live broker hold three records of a lost epoch, acked with 1, whose new owner is ready."""
    async with seized(AckLevel.ONE) as found:
        found.gate.set()
        yield found


def at_once(work: Callable[[T], Coroutine[Any, Any, None]], cases: Iterable[T]) -> None:
    """Run a scenario for all cases at once: each waits a second until no publish of the lost epoch can land."""

    async def all_cases() -> None:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(work(case))

    asyncio.run(all_cases())


# ---- in memory -----------------------------------------------------------------------------------


def test_one_error_of_the_queue_drops_nothing() -> None:
    async def work(error: type[Exception]) -> None:
        async with lost_epoch() as found:
            faults = Faults(found.cluster, error)
            await found.one.drain()
            assert (error, faults.met, await found.records()) == (error, 1, [("two", 3)])

    at_once(work, REFUSALS)


def test_one_refusal_of_the_new_owner_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: dict[str, list[type[Exception]]] = {}  # by the address of the owner: what it says first

    async def forward(self: Link, message: Forward, block: memoryview) -> None:
        if refusals[format_address(self.address)]:
            raise refusals[format_address(self.address)].pop()("no")
        await real(self, message, block)

    real = Link.forward
    monkeypatch.setattr(Link, "forward", forward)

    async def work(error: type[Exception]) -> None:
        async with lost_epoch() as found:
            refusals[found.two.address] = [error]
            await found.one.drain()
            assert (error, refusals[found.two.address], await found.records()) == (error, [], [("two", 3)])

    at_once(work, [*REFUSALS, OutOfSequenceError, ProtocolError, MovedError, TooOldError])


def test_an_answer_alone_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def forward(self: Link, message: Forward, block: memoryview) -> None:
        calls.append(message.partition)
        if len(calls) > 2:
            await real(self, message, block)

    real = Link.forward
    monkeypatch.setattr(Link, "forward", forward)

    async def work() -> None:
        async with lost_epoch() as found:
            await found.one.drain()
            assert (len(calls), await found.records()) == (3, [("two", 3)])

    asyncio.run(work())


def test_an_owner_continues_while_its_queue_says_denied_or_not_found() -> None:
    async def work(error: type[Exception]) -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            topic, client = await held_at(one, AckLevel.ONE)
            failed = asyncio.Event()
            publish = cluster.queue.publish
            left = [error("ssl handshake failed"), error("unknown topic")]

            async def refusing(publication: object) -> int:
                if left:
                    failed.set()
                    raise left.pop()
                return await publish(publication)  # type: ignore[arg-type]

            cluster.queue.publish = refusing  # type: ignore[method-assign]
            gate.set()
            await failed.wait()
            processor = one.partitions.processors[topic.id, 0]
            await one.drain()
            assert (processor.ring.batches, left) == (type(processor.ring.batches)(), [])
            assert [each.records for each in await pointers(cluster, topic) if each.records] == [3]
            assert one.services.counters.openings == 1, "it did not have to be opened again"
            await client.close()

    at_once(work, [DeniedError, NotFoundError])


def test_an_opening_is_tried_again_while_the_queue_says_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    async def read_to_end(self: Publisher, end: int = 0) -> None:
        tries.append(self.partition)
        if len(tries) < 3:
            raise DeniedError("ssl handshake failed")
        await real(self, end)

    real = Publisher.read_to_end
    monkeypatch.setattr(Publisher, "read_to_end", read_to_end)

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ALL)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            assert (await client.frame()).argument == 1
            await client.close()

    asyncio.run(work())


def test_blocks_that_no_owner_takes_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwarding, "FORWARD_S_MAX", 0.0)

    async def work() -> None:
        async with lost_epoch() as found:
            Faults(found.cluster, DeniedError, left=2)
            with caplog.at_level(logging.ERROR), pytest.raises(TimedOutError, match="took 1 blocks for 0 s"):
                await found.one.drain()
            assert "topic 'clicks' partition 0, of a lost epoch: producer" in caplog.text
            assert "sequences 0 to 2, acks=one" in caplog.text
            assert found.one.services.counters.given_up_blocks == 1

    asyncio.run(work())


# ---- the store -----------------------------------------------------------------------------------


def test_a_put_is_tried_again_whatever_the_store_answers() -> None:
    async def work(case: tuple[type[Exception], bool]) -> None:
        error, shared = case
        async with rig() as cluster:
            put, left = cluster.store.put, [error("no"), error("no")]

            async def refusing(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
                if left:
                    raise left.pop()
                await put(key, buffers, checksum)

            cluster.store.put = refusing  # type: ignore[method-assign]  # a store that lies
            one = await cluster.start("one")
            settings = msgspec.structs.replace(QUICK, shared_objects=shared)
            topic = await one.partitions.create("clicks", 1, settings, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ALL)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            assert ((await client.frame()).argument, left, error) == (1, [], error)
            assert one.services.counters.openings == 1
            await client.close()

    at_once(work, product(REFUSALS, [False, True]))


def test_a_key_that_the_store_calls_taken_ends_the_epoch_and_loses_nothing() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            put, taken = cluster.store.put, [ObjectExistsError("another object lies there")]

            async def lying(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
                if taken:
                    raise taken.pop()
                await put(key, buffers, checksum)

            cluster.store.put = lying  # type: ignore[method-assign]  # a store that lies
            topic, client = await held_at(one, AckLevel.ONE)
            assert (await client.frame()).api == Api.REDIRECT
            await one.drain()
            assert [each.records for each in await pointers(cluster, topic) if each.records] == [3]
            await client.close()

    asyncio.run(work())


# ---- deletion ------------------------------------------------------------------------------------


def test_only_a_deletion_that_the_coordinator_shows_twice_releases_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwarding, "DELETED_S", 0.01)

    async def work() -> None:
        async with lost_epoch() as found:
            await found.one.services.coordinator.delete_topic(found.topic)
            Faults(found.cluster, NotFoundError, left=1e9)
            with suppress(NotFoundError):  # where the ring held the blocks when their topic went
                await found.one.drain()
            assert len(found.one.partitions.forwarder) == 0
            assert found.one.services.counters.given_up_blocks == 0

    asyncio.run(work())
    (line,) = [line for line in caplog.messages if line.startswith("forward-gone")]
    assert line == "forward-gone: topic 'clicks' partition 0, 1 blocks: the topic was deleted"


def test_one_answer_of_the_coordinator_proves_no_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "DELETED_S", 0.01)

    async def work(answers: tuple[bool | type[Exception], ...]) -> None:
        said = list(answers)

        async def deleted(topic_id: str) -> bool:
            answer = said.pop(0)
            if isinstance(answer, bool):
                return answer
            raise answer("no answer")

        async with lost_epoch() as found:
            monkeypatch.setattr(found.one.services.coordinator, "deleted", deleted)
            Faults(found.cluster, NotFoundError)
            await found.one.drain()
            assert (answers, await found.records()) == (answers, [("two", 3)])

    cases: list[tuple[bool | type[Exception], ...]] = [
        (False, True),
        (True, False),
        (True, UnreachableError),
        (TimeoutError,),
    ]
    at_once(work, cases)


# ---- on disk -------------------------------------------------------------------------------------


def test_a_start_brings_what_is_in_the_spool_whatever_the_queue_says_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.broker.spool.replay.RETRY_S", 0.01)

    async def work(case: tuple[str, type[Exception]]) -> None:
        call, error = case
        folder = tmp_path / f"{call}-{error.__name__}"
        async with rig() as cluster:
            topic = await left_behind(cluster, folder)
            real = getattr(cluster.queue, call)
            met: list[str] = []

            async def failing(*arguments: object) -> object:
                task = asyncio.current_task()
                if task is not None and task.get_name().startswith(("forward", "replay")) and not met:
                    met.append(call)
                    raise error("unknown topic or partition")
                return await real(*arguments)

            monkeypatch.setattr(cluster.queue, call, failing)
            again = await cluster.start("one", spool=SpoolFiles(folder))
            await again.replay.wait()
            assert (met, sum(count for _, count in await records(cluster, topic))) == ([call], 6)
            assert again.failure is None

    at_once(work, product(["read", "span", "seek_time"], [NotFoundError, DeniedError, QueueError]))


def test_blocks_that_forwarding_gives_up_stay_in_the_spool_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(forwarding, "FORWARD_S_MAX", 0.0)
                faults = Faults(cluster, DeniedError, left=1e9)
                again = await cluster.start("one", spool=SpoolFiles(tmp_path))
                await again.replay.wait()
                assert "they stay in the spool, and the next start brings them" in caplog.text
                assert again.services.counters.spool_kept_blocks == 3
                await again.close()
            text, hint = inspect_spool(tmp_path, 0, SystemClock().wall_ms() + 601_000)
            assert "1 segments wait for over 600 s" in text
            assert "the next start of the broker brings them" in hint
            faults.left = 0
            third = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await third.replay.wait()
            await until(lambda: not sizes_in(tmp_path))
            assert sum(count for _, count in await records(cluster, topic)) == 6

    asyncio.run(work())


def test_blocks_of_a_topic_that_the_coordinator_does_not_know_stay_in_the_spool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restore of the coordinator from a backup that is older than the topic."""

    async def work() -> None:
        async with rig() as cluster, rig() as restored:
            topic = await left_behind(cluster, tmp_path)
            without = await restored.start("one", spool=SpoolFiles(tmp_path))
            await without.replay.wait()
            assert without.services.counters.spool_kept_blocks == 3
            assert f"3 blocks of topic id {topic.id}, which the coordinator does not know" in caplog.text
            await without.close()
            assert sizes_in(tmp_path)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.replay.wait()
            assert sum(count for _, count in await records(cluster, topic)) == 6

    asyncio.run(work())


def test_blocks_of_a_deleted_topic_leave_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "DELETED_S", 0.01)

    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            two = await cluster.start("two", spool=SpoolFiles(tmp_path / "two"))
            await two.partitions.delete(two.partitions.topic(topic.name))
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.replay.wait()
            await until(lambda: not sizes_in(tmp_path))
            assert again.services.counters.spool_undecided_blocks == 0

    asyncio.run(work())


def test_a_segment_that_is_read_short_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.broker.spool.replay.RETRY_S", 0.01)

    class Short(SpoolFiles):
        async def read(self, name: str) -> bytes:
            return (await super().read(name))[:-1]

    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            short = await cluster.start("one", spool=Short(tmp_path))
            await short.replay.wait()
            assert short.services.counters.spool_damages == 1
            await short.close()
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.replay.wait()
            assert sum(count for _, count in await records(cluster, topic)) == 6

    asyncio.run(work())
