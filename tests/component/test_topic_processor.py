"""One partition at its owner: its start, its drain, its streams, and the work of its ring."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.partition.batch import SealedBatch
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.spool.writer import Spool
from memq.errors import (
    CorruptDataError,
    DeniedError,
    DrainingError,
    EpochFencedError,
    MemqError,
    MovedError,
    SpoolError,
    StoreError,
)
from memq.format.blocks.header import Buffer
from memq.format.pointer import ProducerEnd
from memq.governor import Assignment
from memq.topic import TopicSettings, read_partitions
from tests.brokers import PRODUCER, RUN_S_MAX, GatedStore, block_of, events_of, run, running_broker, until, write_frame
from tests.contract.manual_clock import ManualClock
from tests.partition_owners import (
    GatedQueue,
    Sink,
    connected,
    failing,
    owning,
    pointers,
    processor_of,
    sharing,
    turns,
    unopened,
    until_held,
)
from tests.unit.peers import append_to

AGED = TopicSettings(seal_when_idle=False, batch_age_ms_max=60_000)


# ---- its start and its end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ack1", "disk", "refusal", "named"),
    [
        ("disk", None, SpoolError("there is none", hint="make one"), True),
        ("disk", None, None, False),
        ("disk", "disk", SpoolError("it is full"), False),
        ("memory", None, SpoolError("there is none"), False),
    ],
)
def test_a_topic_whose_spool_is_missing_is_named_once(
    ack1: Any, disk: Any, refusal: MemqError | None, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class NoSpool:
        def __init__(self) -> None:
            self.disk, self.refusal = disk, refusal

    async def work() -> None:
        async with owning() as (broker, _, topic):
            services = replace(broker.services, spool=cast(Spool, NoSpool()))
            settings = msgspec.structs.replace(topic.settings, ack1=ack1)
            changed = msgspec.structs.replace(topic, settings=settings)
            processor = TopicProcessor(services, sharing(services), lambda held: None, changed, 0)
            caplog.clear()
            processor.start()
            assert events_of(caplog) == ["no-spool"] * named
            await processor.stop()

    run(work())


def test_first_failure_of_a_partition_reaches_all_waiters() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor, opening = processor_of(broker, topic), unopened(broker, topic)
            queue = GatedQueue.close_gate(broker.services.queue)
            waiting = [
                asyncio.create_task(processor.end_producer(ProducerEnd(producer=1, next_sequence=0))),
                asyncio.create_task(opening.ready()),
                asyncio.create_task(processor.begin_producer(9)),
            ]
            await turns()
            assert not any(task.done() for task in waiting)
            for each in (processor, opening):
                each.fail(StoreError("gone for good"))
                each.fail(StoreError("another reason"))
            for task in waiting:
                with pytest.raises(StoreError, match="gone for good"):
                    await task
            for call in (processor.end_producer(ProducerEnd(producer=1, next_sequence=0)), processor.ready()):
                with pytest.raises(StoreError, match="gone for good"):
                    await call
            with pytest.raises(MovedError, match="is not open any more"):
                await processor.admit_producer(9, 1, 1)  # it would be stated first
            queue.gate.set()

    run(work())


def test_opening_states_the_producers_of_an_earlier_republication() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            opening = unopened(broker, topic)
            await opening.republish_opened()
            opening.start_draining()
            assert len(opening.ring) == 0
            opening.start()
            await until(lambda: opening.own is not None)
            await turns()
            assert [(each.kind, each.epoch) for each in await pointers(broker, topic)] == [("opened", 1), ("opened", 2)]
            await opening.stop()

    run(work())


def test_a_partition_that_dies_of_what_nobody_foresaw_says_so_and_sends_its_clients_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def died_of(error: Exception) -> MemqError | None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            failing(broker.services.queue, "publish", error)
            caplog.clear()
            await processor.republish_opened()
            await until(lambda: processor.failure is not None)
            assert events_of(caplog) == ["processor-failed"]
            return processor.failure

    async def work() -> None:
        error = CorruptDataError("what is this")
        assert await died_of(error) is error
        moved = await died_of(ValueError("what is that"))
        assert isinstance(moved, MovedError)
        assert "what is that" in str(moved)

    run(work())


def test_a_stop_ends_uploads_before_it_gives_the_memory_back_that_they_read() -> None:
    leased: list[int] = []

    class Slow(GatedStore):
        async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
            try:
                await super().put(key, buffers, checksum)
            finally:
                await turns()  # a thread reads the buffers until its put ends
                leased.append(sum(len(memoryview(buffer)) for buffer in buffers) and slots[0].slabs[0].references)

    slots: list[Any] = []

    async def work(end: Callable[[TopicProcessor], Any]) -> None:
        async with owning() as (broker, client, topic):
            store = broker.services.stores["main"] = Slow()
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            processor = processor_of(broker, topic)
            await store.begun.wait()
            slots[:] = processor.ring
            before = slots[0].slabs[0].references
            await end(processor)
            assert leased == [before]
            leased.clear()
            await processor.stop()

    run(work(lambda processor: processor.stop()))
    run(work(lost))


async def lost(processor: TopicProcessor) -> None:
    """Take the epoch of a processor away, and wait until it opens the next one."""
    own = processor.owned()
    processor.fence(EpochFencedError("epoch 9 is there"))
    await until(lambda: processor.own is not own)


def test_held_blocks_are_described_by_their_sequences() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            store = broker.services.stores["main"] = GatedStore()
            client.write(write_frame(block_of(topic, 0, [b"a", b"b", b"c"])))
            processor = processor_of(broker, topic)
            await store.begun.wait()
            assert processor.held_blocks() == [
                f"topic 'clicks' partition 0 batch 0 (storing): producer {PRODUCER:016x} sequences 0 to 2, acks=all"
            ]
            store.gate.set()

    run(work())


# ---- its drain -------------------------------------------------------------------------------------


def test_a_drain_takes_nothing_new_and_waits_for_no_batch_to_come_of_age() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, AGED)
            await client.open(topic)
            processor = processor_of(broker, topic)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await until_held(processor, 1)
            await turns()
            drain = asyncio.create_task(processor.drain())
            await asyncio.sleep(0)
            with pytest.raises(DrainingError):
                await processor.ready()
            await drain
            assert [each.kind for each in await pointers(broker, topic)] == ["opened", "data", "closed"]
            await client.close()

    run(work())


def test_nothing_follows_the_last_word_of_an_epoch() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            queue, coordinator = GatedQueue.close_gate(broker.services.queue), broker.services.coordinator
            processor, assignment = processor_of(broker, topic), coordinator.assignment

            async def slow(topic_id: str, partition: int) -> Assignment:
                await turns()
                return await assignment(topic_id, partition)

            coordinator.assignment = slow  # type: ignore[method-assign]
            drain = asyncio.create_task(processor.drain())
            await queue.begun.wait()
            await processor.republish_opened()
            await turns()
            queue.gate.set()
            await drain
            assert [each.kind for each in await pointers(broker, topic)] == ["opened", "closed"]

    run(work())


def test_a_drain_that_meets_a_cut_log_publishes_no_last_word() -> None:
    """Rule 12: the owner knows that the log was cut, and its epoch publishes nothing any more."""

    async def work() -> None:
        async with owning() as (broker, _, topic):
            queue, processor = GatedQueue.close_gate(broker.services.queue), processor_of(broker, topic)
            await processor.republish_opened()
            await queue.begun.wait()
            drain = asyncio.create_task(processor.drain())
            await turns()
            (partition,) = read_partitions(topic)
            queue.logs[partition].entries.clear()
            queue.gate.set()
            await drain
            assert [each.kind for each in await pointers(broker, topic)] == ["opened"]

    run(work())


def test_a_queue_that_refuses_the_last_word_does_not_keep_the_broker(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            failing(broker.services.queue, "publish", *[DeniedError("not you")] * 9)
            caplog.clear()
            await processor_of(broker, topic).drain()
            assert events_of(caplog) == ["release-failed"]

    run(work())


def test_a_partition_that_failed_without_anything_in_its_ring_is_drained() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            processor.fail(StoreError("gone for good"))
            await processor.drain()
            assert [each.kind for each in await pointers(broker, topic)] == ["opened"]

    run(work())


# ---- streams and producers ---------------------------------------------------------------------------


def test_a_producer_is_remembered_while_one_of_its_streams_is_open() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            forgotten_ms = broker.services.runtime.clock.wall_ms() + 10 * topic.settings.dedup_window_ms
            other = processor.appender.open_stream(3, Sink(), 9, 1, 0)
            processor.appender.redirect_streams()  # as a fence does: its connection closes it later
            streams = [processor.appender.open_stream(number, Sink(), 9, 1, 0) for number in (1, 2)]
            processor.appender.close_stream(other)
            for stream, left in zip(streams, (2, 1), strict=True):
                assert processor.owned().producer(9).streams == left + 1, "the one that was taken away counts"
                processor.forget_silent(forgotten_ms)
                assert 9 in processor.owned().producers
                processor.appender.close_stream(stream)
                assert not stream.open
            processor.owned().producer(9).streams -= 1
            processor.forget_silent(forgotten_ms)
            assert 9 not in processor.owned().producers

    run(work())


def test_a_producer_with_a_block_in_the_ring_is_not_forgotten() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            store = broker.services.stores["main"] = GatedStore()
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            processor = processor_of(broker, topic)
            await store.begun.wait()
            await client.close()
            await until(lambda: processor.owned().producer(PRODUCER).streams == 0)
            processor.forget_silent(broker.services.runtime.clock.wall_ms() + 10 * topic.settings.dedup_window_ms)
            assert PRODUCER in processor.owned().producers
            store.gate.set()

    run(work())


# ---- the ring's work -------------------------------------------------------------------------------------


def kept_of_batches() -> list[object]:
    """Return what the process keeps of sealed batches and their uploads."""
    gc.collect()
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, SealedBatch)
        or (isinstance(each, asyncio.Task) and each.get_name().startswith("upload ") and each.get_loop().is_running())
    ]


def test_a_batch_that_is_stored_while_another_pointer_is_on_its_way_is_published_behind_it() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            processor, counters, kept = processor_of(broker, topic), broker.services.counters, len(kept_of_batches())
            queue = GatedQueue.close_gate(broker.services.queue)
            await processor.republish_opened()
            await queue.begun.wait()
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await until(lambda: counters.stored_objects == 1)
            await turns()
            ends = asyncio.create_task(processor.end_producer(ProducerEnd(producer=1, next_sequence=0)))
            await turns()
            queue.gate.set()
            assert (await client.frame()).argument == 1
            await ends
            await turns()
            assert [each.kind for each in await pointers(broker, topic)] == ["opened", "opened", "data", "ended"]
            assert len(kept_of_batches()) == kept, "it is in the queue"
            assert sum(counters.ack_seconds.counts) == 1
            assert 0 <= counters.ack_seconds.sum_s < RUN_S_MAX

    run(work())


def test_republished_producers_are_published_before_a_stored_batch() -> None:
    """A caller that waits for it holds back blocks of a name; a batch may have to wait for its queue for long."""

    async def work() -> None:
        async with owning() as (broker, client, topic):
            processor, queue = processor_of(broker, topic), GatedQueue.close_gate(broker.services.queue)
            await processor.republish_opened()
            await queue.begun.wait()
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await until(lambda: broker.services.counters.stored_objects == 1)
            begins = asyncio.create_task(processor.begin_producer(9))
            await turns()
            queue.gate.set()
            assert (await client.frame()).argument == 1
            kinds = [each.kind for each in await pointers(broker, topic)]
            assert kinds == ["opened", "opened", "opened", "data"], "the last one says that the producer began"
            await begins

    run(work())


def test_blocks_that_come_in_one_round_after_another_make_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            store = broker.services.stores["main"] = GatedStore()
            processor = processor_of(broker, topic)
            clock = ManualClock()
            runtime = dataclasses.replace(processor.services.runtime, clock=clock)
            monkeypatch.setattr(processor, "services", dataclasses.replace(processor.services, runtime=runtime))
            stream = processor.appender.open_stream(2, Sink(), 9, 1, 0)
            slab = broker.services.pool.lease(256 * 1024)
            assert slab is not None
            slab.view[:48] = bytes(48)
            for number in range(3):
                append_to(processor.ring, stream, number, 1, slab, 0, 72, clock.monotonic())
                processor.pump_soon()
                await asyncio.sleep(0)
            assert [slot.records for slot in processor.ring] == [3], "no round passed without a block"
            assert processor.ring.open is not None
            processor.ring.give_up()[0].drop_blocks()
            for _ in range(2):
                broker.services.pool.release(slab)
            assert not store.begun.is_set()

    run(work())


def test_a_batch_that_comes_of_age_later_is_asked_for_then_and_altered_settings_at_once() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, AGED)
            await client.open(topic)
            processor = processor_of(broker, topic)
            plans = 0
            plan = processor.ring.plan

            def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal plans
                plans += 1
                return plan(*arguments, **options)

            processor.ring.plan = counted  # type: ignore[method-assign]
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await until_held(processor, 1)
            await turns(100)
            assert plans < 10
            processor.follow(msgspec.structs.replace(topic, settings=TopicSettings()))
            assert (await client.frame()).argument == 1
            await client.close()

    run(work())
