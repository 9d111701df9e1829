"""The end of an epoch at its owner: what fences it, what it settles, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from memq.broker.partition.ownership import Phase
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.spool.unpublished_blocks import UnpublishedBlocks
from memq.errors import (
    CorruptDataError,
    EpochFencedError,
    FencedError,
    MemqError,
    MovedError,
    ObjectExistsError,
    UnreachableError,
)
from memq.format.blocks.header import Buffer
from memq.format.pointer import Location
from memq.protocol.frames import AckLevel, Api, encode_frame
from memq.protocol.messages import Open, encode_message
from memq.topic import Topic
from tests.brokers import GatedStore, block_of, events_of, run, until, write_frame
from tests.partition_owners import (
    GatedQueue,
    Sink,
    control,
    failing,
    owning,
    pointers,
    processor_of,
    sharing,
    turns,
    unopened,
)


@pytest.mark.parametrize("publishing", [False, True])
def test_an_upload_that_finds_its_key_taken_ends_the_epoch_behind_a_publish_that_is_under_way(
    publishing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor, queue = processor_of(broker, topic), GatedQueue.close_gate(broker.services.queue)
            own, sink = processor.owned(), Sink()
            stream = processor.appender.open_stream(1, sink, 9, 1, 0)
            if publishing:
                await processor.republish_opened()
                await queue.begun.wait()
            caplog.clear()
            processor.fence(ObjectExistsError("another process has this key"))
            processor.fence(ObjectExistsError("and there"))
            assert events_of(caplog) == ["fenced"] * 2
            assert own.phase is Phase.FENCED
            await turns()
            assert (processor.own is own) == publishing
            queue.gate.set()
            await until(lambda: processor.own not in (own, None))
            assert processor.owned().epoch == 2
            assert broker.services.counters.fenced == 1
            assert sink.redirected == [1]
            assert not stream.open
            kinds = [(each.kind, each.epoch) for each in await pointers(broker, topic)]
            assert kinds == [("opened", 1), *[("opened", 1)] * publishing, ("opened", 2)]

    run(work())


def test_only_a_higher_epoch_is_a_fence_and_every_other_error_ends_the_partition(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def events_after(error: MemqError) -> list[str]:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            own = processor.own
            caplog.clear()
            if isinstance(error, FencedError):
                await broker.services.queue.publish(control(topic, "opened", 9))
                processor.owned().unread = True
            else:
                failing(broker.services.queue, "publish", error)
            await processor.republish_opened()
            await until(lambda: processor.own is not own or processor.failure is not None)
            return events_of(caplog)

    async def events_of_an_opening(error: MemqError) -> list[str]:
        async with owning() as (broker, _, topic):
            failing(broker.services.queue, "publish", error)
            opening = unopened(broker, topic)
            caplog.clear()
            opening.start()
            with pytest.raises(type(error)):
                await opening.ready()
            await opening.stop()
            return events_of(caplog)

    async def work() -> None:
        assert (await events_after(EpochFencedError("9")))[0] == "fenced", "it may have opened again since"
        assert await events_after(CorruptDataError("what")) == ["processor-failed"]
        assert await events_of_an_opening(CorruptDataError("what")) == ["processor-failed"]

    run(work())


def test_a_lost_epoch_settles_what_waits_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            processor, queue = processor_of(broker, topic), GatedQueue.close_gate(broker.services.queue)
            store = broker.services.stores["main"] = GatedStore()
            settled: list[MemqError | None] = []
            location = Location(store="main", key="k", offset=0, length=70)
            staged = StagedBatch(location, (), 5, 70, 0, 0, (0, 0), 0, 0, (), settled.append, 1e9)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await store.begun.wait()
            assert processor.ring.add_staged(staged, broker.services.runtime.clock.monotonic(), 1)
            await processor.republish_opened()
            await queue.begun.wait()
            states = asyncio.create_task(processor.begin_producer(9))  # the pointer on its way does not say it
            await turns()
            uploads = [task for task in asyncio.all_tasks() if task.get_name().startswith("upload ")]
            assert len(uploads) == 1
            processor.fence(ObjectExistsError("another process has this key"))
            queue.gate.set()
            with pytest.raises(MovedError, match="lost its epoch"):
                await states
            assert uploads[0].cancelled()
            assert isinstance(settled[0], MovedError)

    run(work())


class Slow(GatedStore):
    """A store whose puts take their time to end also when they are cancelled, as a thread does."""

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        try:
            await super().put(key, buffers, checksum)
        finally:
            await turns(50)


def test_partition_is_not_ready_while_its_epoch_ends_and_opens_with_new_settings() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            processor, queue = processor_of(broker, topic), GatedQueue.close_gate(broker.services.queue)
            store = broker.services.stores["main"] = Slow()

            async def current(name: str) -> Topic:
                return altered

            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await store.begun.wait()
            processor.fence(EpochFencedError("epoch 9 is there"))
            await turns()
            assert not queue.begun.is_set(), "the upload has not ended"
            ready = asyncio.create_task(processor.ready())
            await queue.begun.wait()
            assert processor.own is None
            assert not ready.done()
            failing(broker.services.coordinator, "topics", *[UnreachableError("it knows of no change")] * 9)
            altered = replace_settings(topic, stale_publish_ms=31_000, dedup_window_ms=900_000, ring_slots=3)
            coordinator = cast(Any, broker.services.coordinator)
            coordinator.current_topic = current
            processor.follow(altered)
            queue.gate.set()
            await ready
            own = processor.owned()
            assert (own.stale_publish_s, own.dedup_window_ms, processor.ring.limits.slots) == (31.0, 900_000, 3)
            assert processor.delivery_timeout_ms == topic.settings.delivery_timeout_ms

    run(work())


def replace_settings(topic: Topic, **settings: Any) -> Topic:
    return msgspec.structs.replace(topic, settings=msgspec.structs.replace(topic.settings, **settings))


def test_only_the_streams_of_one_producer_are_redirected_and_forgotten_by_none_but_a_fence() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor, sink = processor_of(broker, topic), Sink()
            streams = [
                processor.appender.open_stream(number, sink, producer, 1, 0) for number, producer in ((1, 9), (2, 8))
            ]
            processor.appender.redirect_streams(of=streams[0].producer)
            assert sink.redirected == [1]
            processor.appender.close_stream(streams[0])
            assert streams[0].producer.streams == 0, "it was not forgotten"
            processor.appender.redirect_streams()
            assert sink.redirected == [1, 2]
            processor.appender.close_stream(streams[1])
            assert streams[1].producer.streams == 1, "it was forgotten"
            assert not any(stream.open for stream in streams)

    run(work())


def test_an_opening_that_another_broker_won_ends_the_partition_and_others_are_tried_again() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            left: list[UnpublishedBlocks] = []
            processor = TopicProcessor(broker.services, sharing(broker.services), left.append, gone(topic), 0)
            processor.start()
            with pytest.raises(MemqError) as caught:
                await processor.ready()
            assert processor.failure is caught.value
            await processor.stop()
            assert processor.failure is caught.value
            assert not left

    def gone(topic: Topic) -> Topic:
        return msgspec.structs.replace(topic, id="f" * 32)

    run(work())


def test_an_epoch_that_is_lost_while_a_named_producer_is_admitted_redirects_its_stream() -> None:
    """The pointer that admits it lands after the epoch was given up: the stream opens before the epoch ends."""

    async def work() -> None:
        async with owning() as (broker, client, topic):
            processor, queue = processor_of(broker, topic), GatedQueue.close_gate(broker.services.queue)
            own = processor.owned()
            ask = Open(
                topic=topic.name,
                topic_id=topic.id,
                partition=0,
                producer=f"{9:016x}",
                acks=AckLevel.ALL,
                sequence=0,
                producer_epoch=1,
            )
            client.write(encode_frame(Api.OPEN, 2, 7, encode_message(ask)))
            await queue.begun.wait()
            processor.fence(ObjectExistsError("another process has this key"))
            queue.gate.set()
            frames = [await client.frame() for _ in range(3)]
            assert {(each.api, each.stream) for each in frames} == {
                (Api.REDIRECT, 1),  # the stream of `owning`
                (Api.OPEN, 2),
                (Api.REDIRECT, 2),
            }
            await until(lambda: processor.own not in (own, None))

    run(work())
