"""Named producers end to end: an instance continues at the name's position and fences the older one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.partition.opening import open_partition
from memq.broker.partition.ownership import (
    INSTANCES_PER_EPOCH,
    NUMBERED_EPOCHS,
    RETRY_MS_MAX,
    NamedProducers,
    Ownership,
    batch_of,
    check_instance,
    next_instance,
)
from memq.broker.partition.topic_processor import TopicProcessor
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    ClosedError,
    EpochFencedError,
    InvalidSettingError,
    MemqError,
    MovedError,
    NotReadyError,
    OutOfSequenceError,
    ProducerFencedError,
    StoreError,
    TooLargeError,
)
from memq.format.pointer import NamedProducer, Pointer, decode_pointer
from memq.limits import NAMED_PRODUCERS_MAX
from memq.notification import EPOCH_END, Entry
from memq.topic import Topic, TopicSettings, producer_id_of, read_partitions
from tests.brokers import PRODUCER, GatedStore, block_of, run, running_broker, write_frame
from tests.partition_owners import GatedQueue, Sink, owning, processor_of, turns
from tests.unit.peers import append_to

HOUR_MS = 3_600_000
FIRST = INSTANCES_PER_EPOCH + 1  # the first instance of a name at the first owner


async def made(broker: Broker, settings: TopicSettings | None = None) -> Topic:
    return await broker.partitions.create("clicks", 1, settings or TopicSettings(), exist_ok=False)


async def sent(producer: AsyncProducer, first: int, following: int) -> None:
    for delivery in [await producer.send("clicks", b"%d" % number) for number in range(first, following)]:
        await delivery


def log_of(broker: Broker, topic: Topic) -> list[Entry]:
    (read,) = read_partitions(topic)
    entries: list[Entry] = broker.services.queue.log(read).entries  # type: ignore[attr-defined]  # the memory queue
    return entries


def pointers(broker: Broker, topic: Topic) -> list[Pointer]:
    return [decode_pointer(entry.body) for entry in log_of(broker, topic)]


def age(broker: Broker, topic: Topic, by_ms: int) -> None:
    """Make all that lies in the queue older."""
    log_of(broker, topic)[:] = [
        Entry(entry.offset, entry.time_ms - by_ms, _aged(entry.body, by_ms)) for entry in log_of(broker, topic)
    ]


def _aged(body: bytes, by_ms: int) -> bytes:
    fields = msgspec.json.decode(body)
    if "named_ms" in fields:
        fields["named_ms"] -= by_ms
    for named in fields.get("named", ()):
        if "last_seen_ms" in named:
            named["last_seen_ms"] -= by_ms
    return msgspec.json.encode(fields)


# ---- instances -----------------------------------------------------------------------------------


def test_an_instance_continues_after_the_last_record_of_its_name() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await made(broker)
            async with AsyncProducer(broker.address, name="job") as first:
                assert await first.resume_points("clicks") == {0: 0}
                await sent(first, 0, 3)
            async with AsyncProducer(broker.address, name="job") as second:
                assert await second.resume_points("clicks") == {0: 3}
                await sent(second, 3, 5)
            said = [each.named[0] for each in pointers(broker, topic) if each.kind == "data"]
            assert {each.producer for each in said} == {producer_id_of("job")}
            assert [each.epoch for each in said] == sorted(each.epoch for each in said)
            assert (said[0].epoch, said[-1].epoch, said[-1].last_sequence) == (FIRST, FIRST + 1, 5)

    run(work())


def test_a_newer_instance_fences_the_older_one() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            await made(broker)
            old = AsyncProducer(broker.address, name="job")
            await sent(old, 0, 2)
            async with AsyncProducer(broker.address, name="job") as new:
                assert await new.resume_points("clicks") == {0: 2}
                with pytest.raises(MemqError) as caught:
                    await sent(old, 2, 3)
                cause: BaseException | None = caught.value
                while cause is not None and not isinstance(cause, ProducerFencedError):
                    cause = cause.__cause__
                assert isinstance(cause, ProducerFencedError)
                assert cause.args[0] == f"instance {FIRST} of producer 'job' was followed by instance {FIRST + 1}"
                with pytest.raises((ProducerFencedError, ClosedError)):
                    await old.send("clicks", b"more")
                await sent(new, 2, 4)
            await old.close()
            async with AsyncProducer(broker.address, name="job") as newest:
                assert await newest.resume_points("clicks") == {0: 4}

    run(work())


def test_an_instance_waits_for_blocks_of_the_one_before_it_that_are_still_in_the_ring() -> None:
    """Also where it began already, and came back before that was done: else its first blocks would be conflicts."""

    async def work() -> None:
        async with running_broker() as broker:
            old = AsyncProducer(broker.address, name="job")
            store = broker.services.stores["main"] = GatedStore()
            topic = await made(broker)
            await old.send("clicks", b"0")
            await store.begun.wait()
            processor, name = broker.partitions.processors[topic.id, 0], producer_id_of("job")
            begins = asyncio.create_task(processor.begin_producer(name, FIRST + 1))
            await asyncio.sleep(0)
            admits = asyncio.create_task(processor.admit_producer(name, FIRST + 1, 0))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not begins.done()
            assert not admits.done()
            store.gate.set()
            assert (await begins).last_sequence == 1, "the one that was in the ring"
            await admits
            await old.send("clicks", b"1")
            with pytest.raises(ProducerFencedError):
                await old.close()

    run(work())


def test_a_producer_without_a_name_begins_nowhere() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await made(broker)
            async with AsyncProducer(broker.address) as producer:
                assert await producer.resume_points("clicks") == {0: 0}
                await sent(producer, 0, 1)
            assert not any(each.named or each.named_ms for each in pointers(broker, topic))

    run(work())


def test_a_named_producer_has_acks_all() -> None:
    with pytest.raises(InvalidSettingError, match="acks = 1 of producer 'job'"):
        AsyncProducer("127.0.0.1:1", name="job", acks=1)


def test_the_id_of_a_name_never_changes() -> None:
    assert producer_id_of("job") == 0x385D45E8C1522B1
    assert producer_id_of("job") != producer_id_of("job2")
    assert producer_id_of("") == 0


# ---- instances at the owner of a partition -----------------------------------------------------------

NAME, OTHER = 5, 6


def named_at(processor: TopicProcessor, epoch: int, following: int) -> None:
    """Have the queue know an instance and its sequences."""
    processor.owned().learn([NamedProducer(producer=NAME, epoch=epoch, last_sequence=following)], 1)


def stated(broker: Broker, topic: Topic) -> list[list[tuple[int, int, int]]]:
    """Return what each `opened` says of names."""
    return [
        [(each.producer, each.epoch, each.last_sequence) for each in pointer.named]
        for pointer in pointers(broker, topic)
        if pointer.kind == "opened"
    ]


def test_an_instance_begins_when_its_epoch_is_in_the_queue_and_redirects_older_ones_alone() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor, sink = processor_of(broker, topic), Sink()
            named_at(processor, FIRST, 7)
            for number, producer in ((1, NAME), (2, OTHER), (3, NAME)):
                processor.appender.open_stream(number, sink, producer, 1, 0)
            queue = GatedQueue.close_gate(broker.services.queue)
            begins = asyncio.create_task(processor.begin_producer(NAME))
            await queue.begun.wait()
            await turns()
            assert not begins.done()
            assert sink.redirected == [1, 3]
            queue.gate.set()
            begun = await begins
            assert not queue.reads, "nothing came between"
            assert (begun.epoch, begun.last_sequence) == (FIRST + 1, 7)
            assert stated(broker, topic) == [[], [(NAME, FIRST + 1, 7)]]

    run(work())


def test_of_two_instances_that_begin_at_once_the_older_one_is_fenced() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            queue = GatedQueue.close_gate(broker.services.queue)
            older = asyncio.create_task(processor.begin_producer(NAME, 2))
            await queue.begun.wait()
            newer = asyncio.create_task(processor.begin_producer(NAME, 3))
            await turns()
            queue.gate.set()
            with pytest.raises(ProducerFencedError):
                await older
            assert (await newer).epoch == 3

    run(work())


@pytest.mark.parametrize("how", ["failed", "lost"])
def test_an_instance_does_not_begin_at_an_owner_that_lost_its_epoch_while_it_waited(how: str) -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            store = broker.services.stores["main"] = GatedStore()
            processor = processor_of(broker, topic)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            await store.begun.wait()
            begins = asyncio.create_task(processor.begin_producer(PRODUCER))
            await turns()
            if how == "failed":
                processor.ring.batches.clear()
                processor.fail(StoreError("gone"))
            else:
                processor.fence(EpochFencedError("epoch 9 is there"))
            with pytest.raises(MovedError, match="lost its epoch while a producer began"):
                await begins
            store.gate.set()

    run(work())


@pytest.mark.parametrize(
    ("epoch", "sequence", "streams_of", "opened", "error"),
    [
        (2, 7, 0, 1, None),  # as the queue shows it
        (2, 6, 0, 1, None),
        (2, 7, 2, 1, None),  # its own stream is in the ring
        (2, 8, 0, 2, OutOfSequenceError),  # the queue may know more: it is read first
        (3, 7, 0, 2, None),  # a new instance begins
        (1, 7, 0, 1, ProducerFencedError),
    ],
)
def test_an_instance_continues_at_once_where_nothing_is_in_doubt(
    epoch: int, sequence: int, streams_of: int, opened: int, error: type[MemqError] | None
) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            named_at(processor, 2, 7)
            slab = broker.services.pool.lease(256 * 1024)
            assert slab is not None
            if streams_of:
                stream = processor.appender.open_stream(1, Sink(), NAME, 1, 7, streams_of)
                append_to(processor.ring, stream, 7, 1, slab, 0, 10, broker.services.runtime.clock.monotonic())
            admits = processor.admit_producer(NAME, epoch, sequence)
            if error is None:
                await admits
            else:
                with pytest.raises(error):
                    await admits
            assert len(stated(broker, topic)) == opened
            if streams_of:
                processor.ring.give_up()
                broker.services.pool.release(slab)  # the reference of the ring
            broker.services.pool.release(slab)

    run(work())


def test_stated_producers_are_answered_after_a_read_to_the_own_pointer() -> None:
    """Another owner's pointer of the same log lies between: nobody is answered before it is read."""

    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            own = processor.owned()
            queue = GatedQueue.close_gate(broker.services.queue)

            async def unread_when_stated() -> bool:
                await processor.begin_producer(NAME)
                return own.unread

            first = asyncio.create_task(unread_when_stated())
            await queue.begun.wait()
            second = asyncio.create_task(processor.begin_producer(NAME + 1))  # the pointer on its way does not say it
            own.read_to -= 1
            await turns()
            queue.gate.set()
            assert not await first
            await second
            await turns()
            assert len(stated(broker, topic)) == 3, "one for each, and none after them"

    run(work())


# ---- what is remembered --------------------------------------------------------------------------


def test_a_name_is_remembered_by_an_opening_long_after_its_last_pointer() -> None:
    """Only `opened` tells of it then: what came since is of others."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await made(broker)
            (read,) = read_partitions(topic)
            async with AsyncProducer(broker.address, name="job") as producer:
                await sent(producer, 0, 3)
            age(broker, topic, HOUR_MS)
            await open_partition(broker.services, topic, 0, read)  # says the name once more
            async with AsyncProducer(broker.address) as other:
                await sent(other, 0, 1)
            age(broker, topic, HOUR_MS)
            own = await open_partition(broker.services, topic, 0, read)
            known = own.named.get(producer_id_of("job"))
            assert known is not None
            assert (known.epoch, known.last_sequence) == (FIRST, 3)
            assert own.producer(producer_id_of("job")).queued.covers(0, 3)

    run(work())


def test_a_name_is_forgotten_after_the_retention_of_its_topic() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await made(broker, TopicSettings(retention_ms=HOUR_MS))
            (read,) = read_partitions(topic)
            async with AsyncProducer(broker.address, name="job") as producer:
                await sent(producer, 0, 3)
            age(broker, topic, 2 * HOUR_MS)
            own = await open_partition(broker.services, topic, 0, read)
            assert len(own.named) == 0

    run(work())


def owned(by: int = 0) -> Ownership:
    own = Ownership(0, 1, opened_s=0.0, opened_wall_ms=0, stale_publish_s=30.0, dedup_window_ms=300_000)
    own.owned_s = 100.0
    own.learn([NamedProducer(producer=number, epoch=1, last_sequence=5) for number in range(1, by + 1)], 1)
    return own


def test_a_known_name_begins_once_no_late_pointer_can_land() -> None:
    own = owned(1)
    producer = own.producer(1)
    assert next_instance(own, producer, 0, 101.0, by_age=False) == FIRST
    with pytest.raises(NotReadyError) as caught:
        next_instance(own, producer, 0, 149.0, by_age=True)
    assert caught.value.retry_after_ms == 1_001, "so that the question after it does not come a moment too early"
    with pytest.raises(NotReadyError) as caught:
        next_instance(own, producer, 0, 101.0, by_age=True)
    assert caught.value.retry_after_ms == RETRY_MS_MAX
    assert next_instance(own, producer, 0, 150.0, by_age=True) == FIRST
    assert next_instance(own, own.producer(9), 0, 101.0, by_age=True) == FIRST, "nobody had this name before"


def test_numbers_of_instances_grow_at_each_owner_and_fit_in_32_bits() -> None:
    """The number of an epoch is not known to be low: a partition may have had millions of owners."""
    numbers = list[int]()
    for epoch in (1, 2, NUMBERED_EPOCHS, EPOCH_END - 1):
        own = Ownership(0, epoch, opened_s=0.0, opened_wall_ms=0, stale_publish_s=30.0, dedup_window_ms=300_000)
        for _ in range(3):
            own.producer(1).epoch = next_instance(own, own.producer(1), 0, 1_000.0, by_age=False)
            numbers.append(own.producer(1).epoch)
    assert numbers[:9] == sorted(set(numbers[:9])), "no owner knew the instances of the one before"
    assert numbers[-1] < EPOCH_END


def test_names_are_bounded() -> None:
    own = owned(NAMED_PRODUCERS_MAX)
    assert next_instance(own, own.producer(1), 0, 1_000.0, by_age=False) == FIRST
    with pytest.raises(TooLargeError, match="remembers 128 named producers"):
        next_instance(own, own.producer(7_777), 0, 1_000.0, by_age=False)


def test_an_instance_leaves_no_gap_and_follows_no_newer_one() -> None:
    own = owned(1)
    check_instance(own.producer(1), 1, 5)
    with pytest.raises(OutOfSequenceError):
        check_instance(own.producer(1), 1, 6)
    own.producer(1).epoch = 3
    with pytest.raises(ProducerFencedError, match=r"instance 2 of named producer .* followed by instance 3"):
        check_instance(own.producer(1), 2)
    check_instance(own.producer(1), 3)
    assert next_instance(own, own.producer(1), 3, 1_000.0, by_age=True) == 3, "an instance may begin again"
    with pytest.raises(ProducerFencedError):
        next_instance(own, own.producer(1), 2, 1_000.0, by_age=True)


def test_a_late_pointer_says_nothing_newer() -> None:
    own = owned(1)
    own.learn([NamedProducer(producer=1, epoch=3, last_sequence=9)], 50)
    own.learn([NamedProducer(producer=1, epoch=2, last_sequence=7)], 20)
    known = own.named.get(1)
    assert known is not None
    assert (known.epoch, known.last_sequence, known.last_seen_ms) == (3, 9, 50)
    assert (own.producer(1).epoch, own.producer(1).next, own.producer(1).seen_ms) == (3, 9, 50)
    assert list(own.producer(1).queued) == [(0, 9)]


def test_of_a_writer_that_stages_its_last_batch_is_remembered_and_how_much_of_it_is_there() -> None:
    own = owned()
    for batch_id, pieces, time_ms in (("9", 3, 10), ("10", 1, 20), ("10", 2, 30), ("9", 4, 40), ("10", 1, 25)):
        own.learn([NamedProducer(producer=1, epoch=0, last_sequence=pieces, batch_id=batch_id)], time_ms)
    known = own.named.get(1)
    assert known is not None
    assert (known.batch_id, known.last_sequence, known.last_seen_ms) == ("10", 2, 40)
    assert 1 not in own.producers, "its blocks have producer ids of their own"


def test_a_name_is_known_since_the_time_that_is_said_of_it_or_else_that_of_its_pointer() -> None:
    named = NamedProducers()
    named.learn(NamedProducer(producer=1, epoch=1, last_sequence=5, last_seen_ms=70), 900)
    named.learn(NamedProducer(producer=2, epoch=1, last_sequence=5), 71)
    named.forget(71)
    assert [(entry.producer, entry.last_seen_ms) for entry in named.entries()] == [(2, 71)]
    assert len(named) == 1


def test_silence_is_forgiven_for_the_retention_and_while_a_stream_is_open() -> None:
    own = owned(2)
    own.producer(2).streams = 1
    own.forget(1_000_000, retention_ms=2_000_000)
    assert len(own.named) == 2
    own.forget(3_000_000, retention_ms=2_000_000)
    assert [entry.producer for entry in own.named.entries()] == [2]
    own.forget(9_000_000, retention_ms=0)
    assert len(own.named) == 1


@pytest.mark.parametrize(
    ("batch_id", "batch"), [("12", 12), ("0", 0), ("", -1), ("-1", -1), ("job", -1), ("1a", -1), ("\u0663", -1)]
)
def test_only_a_writer_that_stages_has_a_last_batch(batch_id: str, batch: int) -> None:
    assert batch_of(NamedProducer(producer=1, epoch=1, last_sequence=1, batch_id=batch_id)) == batch
