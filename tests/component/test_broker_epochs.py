"""Owners at the edges of their epochs: openings, repeated publishing, fences, drains, known producers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.partition.opening import open_partition, release_partition
from memq.broker.partition.ownership import ADOPTED_MAX
from memq.broker.partition.publishing import Publisher
from memq.errors import DeniedError, MemqError, StoreError
from memq.format.pointer import ProducerRanges, encode_pointer
from memq.limits import POINTER_RANGES_MAX
from memq.notification import Entry, Publication
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import AckLevel, Api, encode_frame
from memq.protocol.messages import Close, MetadataRequest, OpenAnswer, decode_message, encode_message
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, Totals, read_partitions
from tests.brokers import PRODUCER, BareClient, block_of, run, running_broker, until, write_frame
from tests.partition_owners import (
    READ,
    Owner,
    Store,
    connected,
    control,
    gated,
    pointers,
    processor_of,
    until_held,
    until_sealed,
)

# ---- openings ------------------------------------------------------------------------------------


def test_an_epoch_that_the_queue_shows_already_is_not_used_again() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await broker.services.queue.publish(control(topic, "opened", 1))  # the coordinator knows nothing of it
            assert (await client.open(topic)).epoch == 2
            await client.close()

    run(work())


def test_an_opening_after_a_long_silence_counts_what_landed_next_to_the_last_pointer() -> None:
    """The last pointer's owner had not met it, and nothing of it is young enough for the dedup window."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            (read,) = read_partitions(topic)
            log = broker.services.queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            for sequence in range(3):
                client.write(write_frame(block_of(topic, sequence, [b"v"])))
                assert (await client.frame()).argument == sequence + 1
                if sequence == 1:  # the pointer lands once more, and the owner publishes the next one before it reads
                    log.entries.append(replace(log.entries[-1], offset=log.end))
            assert [each.totals.records for each in await pointers(broker, topic)] == [0, 0, 1, 1, 2]
            hour_ms = 3_600_000
            log.entries[:] = [Entry(entry.offset, entry.time_ms - hour_ms, entry.body) for entry in log.entries]
            own = await open_partition(broker.services, topic, 0, read)
            assert (own.epoch, own.totals.records) == (2, 4)
            assert (await pointers(broker, topic))[-1].totals.records == 4
            await client.close()

    run(work())


def test_an_opening_knows_what_lies_in_the_dedup_window_by_the_clock_of_any_broker() -> None:
    """Queue times are those of other brokers' clocks, which may be CLOCK_ERROR_MS apart from the opener's."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            (read,) = read_partitions(topic)
            log = broker.services.queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            for sequence in range(3):
                client.write(write_frame(block_of(topic, sequence, [b"v"])))
                assert (await client.frame()).argument == sequence + 1
            now_ms = broker.services.runtime.clock.wall_ms()
            oldest_ms = now_ms - topic.settings.dedup_window_ms - CLOCK_ERROR_MS
            times = (oldest_ms - 60_000, oldest_ms - 60_000, oldest_ms + 1_000, now_ms)
            log.entries[:] = [
                replace(entry, time_ms=time_ms) for entry, time_ms in zip(log.entries, times, strict=True)
            ]
            own = await open_partition(broker.services, topic, 0, read)
            assert list(own.producer(PRODUCER).queued) == [(1, 3)]
            await client.close()

    run(work())


def test_an_opening_knows_what_lands_just_before_its_pointer() -> None:
    """A pointer of the owner before lies between the tail that was read and `opened`."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            (read,) = read_partitions(topic)
            queue = broker.services.queue
            log = queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            late = (await pointers(broker, topic))[-1]
            late = msgspec.structs.replace(
                late, batch_sequence=1, producers=(ProducerRanges(PRODUCER, ((1, 2),)),), totals=Totals(1, 100)
            )
            publish = queue.publish

            async def publish_behind(publication: Publication) -> int:
                log.entries.append(Entry(log.end, publication.time_ms, encode_pointer(late)))
                return await publish(publication)

            queue.publish = publish_behind  # type: ignore[method-assign]  # one pointer comes first
            own = await open_partition(broker.services, topic, 0, read)
            assert list(own.producer(PRODUCER).queued) == [(0, 2)]
            assert [entry.batch_sequence for entry in own.next_adopted()] == [1]
            queue.publish = publish  # type: ignore[method-assign]
            await client.close()

    run(work())


def test_an_owner_counts_at_once_all_that_a_former_owner_published_while_it_opened() -> None:
    """The former owner fills its ring again and again until it meets `opened`, which may take S to land."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings(ring_slots=4))
            await client.open(topic)
            (read,) = read_partitions(topic)
            queue, late = broker.services.queue, ADOPTED_MAX + 4
            publish = queue.publish

            async def publish_behind(publication: Publication) -> int:
                queue.publish = publish  # type: ignore[method-assign]  # the former owner's do not wait
                for sequence in range(late):
                    client.write(write_frame(block_of(topic, sequence, [b"v"])))
                    assert (await client.frame()).argument == sequence + 1
                return await publish(publication)

            queue.publish = publish_behind  # type: ignore[method-assign]
            own = await open_partition(broker.services, topic, 0, read)
            await release_partition(broker.services, Publisher(broker.services, own, read, patient=True), topic)
            found = [(each.kind, each.epoch, each.totals.records) for each in (await pointers(broker, topic))[-2:]]
            assert found == [("opened", 2, 0), ("closed", 2, late)]
            await client.close()

    run(work())


def test_release_of_an_old_epoch_keeps_the_session_of_a_younger_one() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            processor, coordinator = processor_of(broker, topic), broker.services.coordinator
            current = await coordinator.assignment(topic.id, 0)
            younger = await coordinator.set_assignment(msgspec.structs.replace(current, epoch=current.epoch + 1))
            publisher = Publisher(broker.services, processor.owned(), processor.read_partition, patient=True)
            await release_partition(broker.services, publisher, topic)
            assert await coordinator.assignment(topic.id, 0) == younger
            assert (await pointers(broker, topic))[-1].kind == "closed"
            await coordinator.set_assignment(msgspec.structs.replace(younger, epoch=younger.epoch + 1))
            await client.close()

    run(work())


def test_a_duplicate_is_acked_with_the_batch_that_it_duplicates_and_not_before() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            again = await BareClient.connect(broker)
            block = write_frame(block_of(topic, 0, [b"v"]))
            await client.open(topic)
            client.write(block)
            await until_sealed(processor_of(broker, topic))
            await again.open(topic)
            again.write(block)
            await until(lambda: broker.services.counters.duplicate_blocks == 1)
            again.write(encode_frame(Api.METADATA, 0, 9, encode_message(MetadataRequest())))
            assert (await again.frame()).api == Api.METADATA, "an ack would have come first"
            store.gate.set()
            assert (await again.frame()).argument == 1
            assert (await client.frame()).argument == 1
            assert [each.records for each in await pointers(broker, topic)] == [0, 1]
            await client.close()
            await again.close()

    run(work())


def test_altered_batches_hold_at_once_and_what_the_window_does_not_allow_with_the_next_epoch() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            processor = processor_of(broker, topic)
            await broker.partitions.alter(
                broker.partitions.topic("clicks"), TopicSettings(ring_slots=2, delivery_timeout_ms=60_000)
            )
            assert (processor.ring.limits.slots, processor.delivery_timeout_ms) == (2, 60_000)
            longer = TopicSettings(ring_slots=3, delivery_timeout_ms=600_000, dedup_window_ms=900_000)
            await broker.partitions.alter(broker.partitions.topic("clicks"), longer)
            assert (processor.ring.limits.slots, processor.delivery_timeout_ms) == (3, 200_000), "W - 2 (S + 20 s)"
            await broker.services.queue.publish(control(topic, "opened", 7))
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).api == Api.REDIRECT
            assert (await client.open(topic)).epoch == 8
            assert (processor.ring.limits.slots, processor.delivery_timeout_ms) == (3, 600_000)
            await client.close()

    run(work())


def test_a_queue_hears_of_altered_settings_at_once_and_an_owner_of_what_late_pointers_may_do() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings(stale_publish_ms=2_000))
            await client.open(topic)
            await broker.partitions.alter(
                broker.partitions.topic("clicks"), TopicSettings(stale_publish_ms=20_000, dedup_window_ms=400_000)
            )
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            assert queue.log(ReadPartition(topic.name, topic.id, 0)).stale_publish_ms == 20_000
            own = processor_of(broker, topic).own
            assert own is not None
            assert (own.stale_publish_s, own.dedup_window_ms) == (20.0, 400_000)
            await broker.partitions.alter(broker.partitions.topic("clicks"), TopicSettings(stale_publish_ms=1_000))
            assert queue.log(ReadPartition(topic.name, topic.id, 0)).stale_publish_ms == 1_000
            assert (own.stale_publish_s, own.dedup_window_ms) == (20.0, 400_000), "until its next epoch"
            await client.close()

    run(work())


def test_an_object_of_somebody_else_under_our_key_ends_the_epoch() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            processor = processor_of(broker, topic)
            await until_sealed(processor)
            (key,) = store.begun
            store.objects[key] = b"of another owner of the same epoch"
            store.gate.set()
            assert (await client.frame()).api == Api.REDIRECT
            assert (await client.open(topic)).epoch == 2
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            assert [(each.kind, each.epoch) for each in await pointers(broker, topic)] == [
                ("opened", 1),
                ("opened", 2),
                ("data", 2),
            ]
            assert store.objects[key] == b"of another owner of the same epoch"
            await client.close()

    run(work())


def test_blocks_acked_at_level_one_survive_an_object_of_somebody_else() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic, acks=AckLevel.ONE)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            processor = processor_of(broker, topic)
            await until_sealed(processor)
            (key,) = store.begun
            store.objects[key] = b"of another owner of the same epoch"
            store.gate.set()
            await broker.drain()
            kinds = [each.kind for each in await pointers(broker, topic)]
            assert (kinds.count("data"), kinds[-1]) == (1, "closed")
            await client.close()

    run(work())


# ---- publishing ----------------------------------------------------------------------------------


def test_the_last_hand_over_is_that_of_the_last_try() -> None:
    async def work() -> None:
        owner = Owner(failing=3)
        start_s = owner.clock.monotonic()
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        assert owner.own.handed_over_s == start_s + 30.0

    run(work())


def test_a_queue_that_fails_thousands_of_times_is_tried_again() -> None:
    async def work() -> None:
        owner = Owner(failing=3_000)
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        assert owner.queue.tries == 3_001

    run(work())


def test_nothing_is_handed_over_when_the_object_has_grown_old() -> None:
    async def work() -> None:
        owner = Owner(failing=100)
        await owner.queue.create([READ], 30_000)
        owner.own.owned_s = -math.inf
        assert not await owner.publisher.publish(owner.batch, 0, owner.clock.monotonic() + 25)
        assert owner.queue.tries == 3
        assert owner.own.unread, "one of the tries may land: read before the next one"
        owner.queue.failing, owner.queue.late[1:] = 0, []
        assert await owner.publisher.publish(owner.batch, 0, owner.clock.monotonic() + 25)
        assert owner.queue.tries == 4
        assert owner.publisher.pointer_offset is None, "one has landed, and readers take that one"

    run(work())


# ---- what an owner knows --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreError("not now"), DeniedError("403")])
def test_a_block_of_a_producer_that_its_pointer_does_not_name_is_known(error: MemqError) -> None:
    producers = range(1, POINTER_RANGES_MAX + 3)

    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings(uploads_in_flight_max=1, batch_age_ms_max=60_000))
            await client.open(topic, stream=1_000)
            client.write(write_frame(block_of(topic, 0, [b"v"]), stream=1_000))  # on its way, so the others gather
            await until_sealed(processor_of(broker, topic))
            for producer in producers:
                await client.open(topic, stream=producer, producer=producer)
                client.write(write_frame(block_of(topic, 0, [b"v"], producer=producer), stream=producer))
            await until_held(processor_of(broker, topic), len(producers))
            store.gate.set()
            acked = {(await client.frame()).stream for _ in range(1 + len(producers))}
            assert acked == {1_000, *producers}
            large = (await pointers(broker, topic))[-1]
            assert (large.records, large.producers_complete) == (len(producers), False)
            await client.open(topic, stream=2_000, producer=producers[-1])
            client.write(write_frame(block_of(topic, 0, [b"v"], producer=producers[-1]), stream=2_000))
            assert (await client.frame()).argument == 1
            assert broker.services.counters.duplicate_blocks == 1
            assert (await pointers(broker, topic))[-1] == large
            # The next owner reads it out of the object, and waits for a store that does not answer, or denies.
            store.failing_ranges, store.read_error = 2, error
            await broker.services.queue.publish(control(topic, "opened", 7))
            client.write(write_frame(block_of(topic, 1, [b"v"], producer=producers[-1]), stream=2_000))
            while (await client.frame()).api != Api.REDIRECT:
                pass
            await client.close()
            again = await BareClient.connect(broker)
            await again.open(topic, producer=producers[-1])
            assert store.failing_ranges == 0
            block = block_of(topic, 0, [b"v"], producer=producers[-1])
            assert (await again.send_again(topic, block, producer=producers[-1])).argument == 1
            assert broker.services.counters.duplicate_blocks == 2
            await again.close()

    run(work())


# ---- streams --------------------------------------------------------------------------------------


def test_an_ack_does_not_go_to_the_next_stream_of_the_same_number() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings(), partitions=2)
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b", b"c"])))
            await until_sealed(processor_of(broker, topic))
            client.send_open(topic, partition=1)
            assert (await client.frame()).api == Api.OPEN
            client.write(write_frame(block_of(topic, 0, [b"d"], partition=1)))
            store.gate.set()
            ack = await client.frame()
            assert (ack.api, ack.argument) == (Api.ACK, 1), "three records of another partition are not acked here"
            client.write(encode_frame(Api.METADATA, 0, 9, encode_message(MetadataRequest())))
            assert (await client.frame()).api == Api.METADATA
            assert [each.records for each in await pointers(broker, topic)] == [0, 3]
            await client.close()

    run(work())


def test_the_end_of_a_producer_is_recorded_across_a_fence() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            await broker.services.queue.publish(control(topic, "opened", 7))
            client.write(encode_frame(Api.CLOSE, 1, 3, encode_message(Close(next_sequence=1))))
            answer = await client.frame()
            assert (answer.api, answer.argument) == (Api.CLOSE, 3)
            last = (await pointers(broker, topic))[-1]
            assert (last.kind, last.epoch, [end.producer for end in last.ended]) == ("ended", 8, [PRODUCER])
            await client.close()

    run(work())


# ---- the end --------------------------------------------------------------------------------------


def test_a_partition_that_fails_does_not_keep_the_others_from_draining() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings(), partitions=2)
            for partition in (0, 1):
                client.send_open(topic, stream=1 + partition, partition=partition)
                assert decode_message((await client.frame()).body, OpenAnswer).epoch == 1
                block = block_of(topic, 0, [b"v"], partition=partition)
                client.write(write_frame(block, stream=1 + partition))
                await until_sealed(processor_of(broker, topic, partition))
            assert len(broker.held_blocks()) == 2
            drain = asyncio.create_task(broker.drain())
            await asyncio.sleep(0)
            assert broker.partitions.draining
            processor_of(broker, topic).fail(StoreError("gone for good"))
            asyncio.get_running_loop().call_later(0, store.gate.set)
            with pytest.raises(StoreError, match="gone for good"):
                await drain
            assert [each.kind for each in await pointers(broker, topic, 1)] == ["opened", "data", "closed"]
            await client.close()

    run(work())


def test_a_partition_that_was_moved_is_drained_or_ended_with_the_broker() -> None:
    async def moved(broker: Broker, store: Store) -> Topic:
        client, topic = await connected(broker, TopicSettings())
        await client.open(topic)
        client.write(write_frame(block_of(topic, 0, [b"v"])))
        processor = processor_of(broker, topic)
        await until_sealed(processor)
        current = await broker.services.coordinator.assignment(topic.id, 0)
        elsewhere = msgspec.structs.replace(current, broker="another")
        broker.governor = None  # the other broker is alive, as far as this one is to know
        await broker.services.coordinator.set_assignment(elsewhere)
        await broker.partitions.refresh()
        assert not broker.partitions.processors
        assert len(broker.held_blocks()) == 1
        await client.close()
        return topic

    async def work() -> None:
        async with running_broker() as broker:
            await moved(broker, gated(broker))  # the close ends it: its memory is back
        async with running_broker() as broker:
            store = gated(broker)
            topic = await moved(broker, store)
            asyncio.get_running_loop().call_later(0, store.gate.set)
            await broker.drain()
            assert [each.kind for each in await pointers(broker, topic)] == ["opened", "data", "closed"]

    run(work())
