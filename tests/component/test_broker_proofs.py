"""Proofs of an epoch, conditions of a duplicate's ack, and the start of a replay's read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from memq.broker.partition.opening import _publish_opened, release_partition
from memq.broker.partition.ownership import INSTANCES_PER_EPOCH, Ownership, Phase
from memq.broker.partition.publishing import BACKOFF_S_MAX, Publisher
from memq.errors import DeniedError, EpochFencedError, LogCutError, NotFoundError, QueueError, RetryableError
from memq.format.key import ObjectKey, parse_object_key
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Entries, Entry, Publication
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api, encode_frame
from memq.protocol.messages import Close, MetadataRequest, encode_message
from memq.topic import ReadPartition, Topic, TopicSettings, read_partitions
from tests.brokers import (
    PRODUCER,
    BareClient,
    GatedStore,
    block_of,
    events_of,
    log_lines,
    run,
    running_broker,
    until,
    write_frame,
)
from tests.contract.manual_clock import ManualClock
from tests.partition_owners import (
    READ,
    Owner,
    connected,
    foreign,
    gated,
    pointers,
    processor_of,
    publisher_of,
    until_sealed,
)
from tests.skipping_loop import LongestWait, run_skipping


def test_a_publish_is_no_proof_when_something_came_between() -> None:
    """What came between may be an `opened` of a higher epoch: it is read before the next publish, and dated then."""

    async def work() -> None:
        owner = Owner()
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        proven_s = owner.own.proof_s
        log = owner.queue.log(READ)

        def build() -> Pointer:
            log.entries.append(Entry(log.end, owner.clock.wall_ms(), foreign(owner).body))  # it lands meanwhile
            return owner.batch()

        def unread() -> bool:
            return owner.own.unread

        assert await owner.publisher.publish(build, 1)
        assert unread()
        assert owner.own.proof_s == proven_s
        read_s = owner.clock.monotonic()
        assert await owner.publisher.publish(owner.batch, 2)
        assert not unread()
        assert owner.own.proof_s == read_s

    run(work())


def test_a_publish_is_a_proof_when_nothing_came_between() -> None:
    """Else a busy partition would read its log again and again."""

    async def work() -> None:
        owner = Owner()
        await owner.queue.create([READ], 30_000)
        for number in range(3):
            owner.clock.advance(1_000)
            handed_over_s = owner.clock.monotonic()
            assert await owner.publisher.publish(owner.batch, number)
            assert owner.own.proof_s == handed_over_s

    run(work())


def test_pointers_that_a_comparison_saw_behind_the_end_are_read_before_the_publish() -> None:
    """It may be an `opened` of a higher epoch: then nothing is published."""

    async def work() -> None:
        owner = Owner()
        queue = MemoryQueue(owner.clock)
        await queue.create([READ], 30_000)
        services = replace(owner.services, queue=queue)
        publisher = Publisher(services, owner.own, READ, patient=True)
        assert await publisher.publish(owner.batch, 0)
        compared = 0

        async def compare() -> None:
            nonlocal compared
            compared += 1
            if compared == 1:
                higher = msgspec.structs.replace(owner.batch(), epoch=2)
                await queue.publish(Publication(READ, 0, 2, owner.clock.wall_ms(), encode_pointer(higher)))
                owner.own.unread = True

        refused = services.counters.publish_retries
        with pytest.raises(EpochFencedError):
            await publisher.publish(owner.batch, 1, compare=compare)
        assert compared == 1
        assert services.counters.publish_retries == refused, "it is not left to the queue to refuse"
        assert (await queue.span(READ)).end == 2, "the pointer of the higher epoch is the last"

    run(work())


def test_pointers_that_a_comparison_saw_are_read_by_the_publish_after_a_timeout() -> None:
    async def work() -> None:
        owner = Owner()
        queue = MemoryQueue(owner.clock)
        publisher = await publisher_on(owner, queue)
        assert await publisher.publish(owner.batch, 0)

        async def compare() -> None:
            higher = msgspec.structs.replace(owner.batch(), epoch=2)
            await queue.publish(Publication(READ, 0, 2, owner.clock.wall_ms(), encode_pointer(higher)))
            owner.own.unread = True
            owner.clock.advance(1_000)

        assert not await publisher.publish(owner.batch, 1, owner.clock.monotonic(), compare)
        refused = owner.services.counters.publish_retries
        with pytest.raises(EpochFencedError):
            await publisher.publish(owner.batch, 1)
        assert owner.services.counters.publish_retries == refused, "it is not left to the queue to refuse"

    run(work())


def test_the_queue_is_read_page_by_page_and_proves_as_of_the_last_page_s_request() -> None:
    """The answer took 10 s: a higher epoch that came meanwhile would be dated too late."""

    class Paged(MemoryQueue):
        clock = ManualClock()

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            self.clock.advance(10_000)
            return await super().read(partition, offset, 1)  # one entry: the least that an answer has

    async def work() -> None:
        owner = Owner()
        queue = Paged(owner.clock)
        queue.clock = owner.clock
        await queue.create([READ], 30_000)
        for _ in range(3):
            await queue.publish(foreign(owner))
        owner.own.unread = True
        publisher = Publisher(replace(owner.services, queue=queue), owner.own, READ, patient=True)
        start_s = owner.clock.monotonic()
        await publisher.read_to_end()
        assert owner.own.read_to == 3
        assert not owner.own.unread
        assert owner.own.proof_s == start_s + 50.0, "three pages, two comparisons, then the end"

    run(work())


def test_a_batch_that_landed_though_its_publish_failed_is_not_published_again() -> None:
    """An error says nothing of the log: what landed is recognised by its batch number, and counted once."""

    class Lossy(MemoryQueue):
        failing = 2

        async def publish(self, publication: Publication) -> int:
            offset = await super().publish(publication)
            self.failing -= 1
            if self.failing >= 0:
                raise QueueError("the answer is lost")
            return offset

    async def work() -> None:
        owner = Owner()
        queue = Lossy(owner.clock)
        await queue.create([READ], 30_000)
        publisher = Publisher(replace(owner.services, queue=queue), owner.own, READ, patient=True)
        assert await publisher.publish(owner.batch, 0)
        assert queue.log(READ).end == 1
        assert not owner.own.landed
        assert owner.own.totals.records == 1
        assert list(owner.own.producer(7).queued) == [(0, 1)]

    run(work())


class Scripted(MemoryQueue):
    """A queue whose first publishes and reads fail with given errors."""

    def __init__(self, owner: Owner, publishes: Sequence[Exception] = (), reads: Sequence[Exception] = ()) -> None:
        super().__init__(owner.clock)
        self.publishes, self.reads = list(publishes), list(reads)
        self.asked: list[int] = []

    async def publish(self, publication: Publication) -> int:
        if self.publishes:
            raise self.publishes.pop(0)
        return await super().publish(publication)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.asked.append(offset)
        if self.reads:
            raise self.reads.pop(0)
        return await super().read(partition, offset, bytes_max)


async def publisher_on(owner: Owner, queue: MemoryQueue, *, patient: bool = True) -> Publisher:
    """Return a publisher of `owner` on another queue."""
    await queue.create([READ], 30_000)
    return Publisher(replace(owner.services, queue=queue), owner.own, READ, patient=patient)


PASSING = [QueueError("not now"), TimeoutError(), DeniedError("not you"), NotFoundError("no such topic")]


@pytest.mark.parametrize(
    ("error", "event"),
    [*((error, "queue-retry") for error in PASSING), (EpochFencedError("epoch 2 is there"), "epoch-refused")],
    ids=repr,
)
def test_a_publish_that_fails_is_named_and_the_queue_is_read_before_the_next_try(
    error: Exception, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        owner = Owner()
        queue = Scripted(owner, publishes=[error])
        publisher = await publisher_on(owner, queue)
        assert await publisher.publish(owner.batch, 0)
        assert queue.asked == [0]
        counters = owner.services.counters
        assert (counters.publish_retries, counters.published_pointers) == (1, 1)
        assert not owner.own.unread

    run(work())
    assert events_of(caplog) == [event]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_read_that_fails_is_named_and_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        owner = Owner()
        queue = Scripted(owner, reads=[error])
        publisher = await publisher_on(owner, queue)
        owner.own.unread = True
        await publisher.read_to_end()
        assert queue.asked == [0, 0]
        assert not owner.own.unread
        assert owner.services.counters.publish_retries == 1, "the alert on a queue that fails rests on it"

    run(work())
    assert events_of(caplog) == ["queue-retry"]


@pytest.mark.parametrize("error", [DeniedError("not you"), NotFoundError("no such topic")], ids=repr)
def test_an_opening_does_not_wait_for_a_queue_that_denies(error: Exception) -> None:
    """It is tried again as a whole, since the topic may be gone by now."""

    async def work() -> None:
        owner = Owner()
        publisher = await publisher_on(owner, Scripted(owner, publishes=[error], reads=[error]), patient=False)
        with pytest.raises(type(error)):
            await publisher.publish(owner.batch, 0)
        with pytest.raises(type(error)):
            await publisher.read_to_end()

    run(work())


def test_a_key_counts_up_to_its_last_moment_and_without_a_try_nothing_can_have_landed() -> None:
    async def work() -> None:
        owner = Owner()
        publisher = await publisher_on(owner, Scripted(owner))
        now_s = owner.clock.monotonic()
        assert not await publisher.publish(owner.batch, 0, now_s - 0.001)
        assert not owner.own.unread
        assert await publisher.publish(owner.batch, 0, now_s)

    run(work())


@pytest.mark.parametrize("work_of", ["publish", "read", "compare"])
def test_each_failure_is_numbered_and_doubles_the_pause_up_to_a_bound(
    work_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue that is down is not asked in a busy loop, nor once a minute when it is back."""
    pauses_s = [0.1, 0.2, 0.4, 0.8, 1.6, BACKOFF_S_MAX, BACKOFF_S_MAX]
    asked_s: list[float] = []

    class Down(MemoryQueue):
        def fail(self, work: str) -> None:
            if work == work_of:
                asked_s.append(asyncio.get_running_loop().time())
                if len(asked_s) <= len(pauses_s):
                    raise QueueError("it is down")

        async def publish(self, publication: Publication) -> int:
            self.fail("publish")
            return await super().publish(publication)

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            self.fail("read")
            return await super().read(partition, offset, bytes_max)

    async def work() -> None:
        owner = Owner()
        queue, services = Down(owner.clock), owner.services
        await queue.create([READ], 30_000)
        services = replace(services, queue=queue, runtime=replace(services.runtime, random=LongestWait()))
        publisher = Publisher(services, owner.own, READ, patient=True)
        owner.own.unread = work_of == "read"

        async def compare() -> None:
            queue.fail("compare")

        assert await publisher.publish(owner.batch, 0, compare=compare)

    run_skipping(work())
    assert [later - first for first, later in pairwise(asked_s)] == pytest.approx(pauses_s)
    assert [int(line.partition(", try ")[2].partition(":")[0]) for line in log_lines(caplog)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_comparison_that_took_long_is_made_again_after_the_queue_was_read(caplog: pytest.LogCaptureFixture) -> None:
    """What landed meanwhile may be a copy, too."""

    async def work() -> None:
        owner = Owner()
        queue = Scripted(owner)
        publisher = await publisher_on(owner, queue)
        taken_ms, seen = [4_000, 11_000, 1_000], list[int]()

        async def compare() -> None:
            seen.append(len(queue.asked))
            if len(seen) == 1:
                raise QueueError("the object can not be read now")
            owner.clock.advance(taken_ms[len(seen) - 1])

        assert await publisher.publish(owner.batch, 0, compare=compare)
        assert seen == [0, 0, 1], "the second one ended 11 s after the proof"
        assert events_of(caplog) == ["compare-retry"]

    run(work())


def test_a_comparison_that_can_not_be_made_ends_with_the_time_of_the_key() -> None:
    async def work() -> None:
        owner = Owner()
        queue = Scripted(owner)
        publisher = await publisher_on(owner, queue)
        tries = 0

        async def compare() -> None:
            nonlocal tries
            tries += 1
            owner.clock.advance(2_000)
            raise QueueError("the object can not be read now")

        assert not await publisher.publish(owner.batch, 0, owner.clock.monotonic() + 4.0, compare)
        assert tries == 3
        assert queue.log(READ).end == 0

    run(work())


def test_a_pointer_that_the_queue_puts_below_what_was_read_ends_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        owner = Owner()
        publisher = await publisher_on(owner, Scripted(owner))
        assert await publisher.publish(owner.batch, 0)
        assert not log_lines(caplog)
        owner.own.read_to = 5
        owner.own.become(Phase.OWNING)
        with pytest.raises(LogCutError):
            await publisher.publish(owner.batch, 1)
        assert owner.own.phase is Phase.FENCED

    run(work())
    (line,) = log_lines(caplog)
    assert line.startswith("log-lost: topic 'clicks' partition 0: the queue put a pointer at offset 1, below 5")


def test_an_end_that_lies_before_what_was_read_or_published_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """A queue that shows too little would prove an epoch that a higher one has followed."""

    class Lagging(Scripted):
        lag = 1

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            self.lag -= 1
            return await super().read(partition, offset, bytes_max) if self.lag < 0 else Entries((), offset)

    async def work() -> None:
        owner = Owner()
        queue = Lagging(owner)
        publisher = await publisher_on(owner, queue)
        await queue.publish(foreign(owner))
        await publisher.read_to_end(1)
        assert queue.asked == [0, 1, 0], "the last entry is compared"
        await queue.publish(foreign(owner))
        assert await publisher.publish(owner.batch, 1), "at offset 2, behind what another one published"
        queue.lag = 1
        await publisher.read_to_end()
        assert (owner.own.read_to, owner.own.unread) == (3, False)

    run(work())
    assert events_of(caplog) == ["queue-retry"] * 2


def test_late_pointers_are_counted_once_and_own_ones_and_those_of_the_tail_are_not() -> None:
    async def work() -> None:
        owner = Owner()
        queue = Scripted(owner)
        publisher = await publisher_on(owner, queue)
        own, counters, log = owner.own, owner.services.counters, queue.log(READ)
        own.epoch = 3
        own.stated = False

        def land(kind: str, epoch: int) -> None:
            late = msgspec.structs.replace(owner.batch(), kind=kind, epoch=epoch)
            log.entries.append(Entry(log.end, owner.clock.wall_ms(), encode_pointer(late)))

        land("data", 2)
        await publisher.read_to_end()
        assert counters.late_pointers == 0, "it belongs to the tail"
        own.stated = True
        for kind, epoch in (("data", 2), ("opened", 2), ("data", 1), ("data", 3)):
            land(kind, epoch)
        log.entries.append(Entry(log.end, owner.clock.wall_ms(), b"no pointer"))
        await publisher.read_to_end()
        assert (counters.late_pointers, counters.damaged_pointers, own.read_to) == (2, 1, 6)

    run(work())


def test_a_pointer_says_when_its_batch_was_sealed_and_its_key_in_which_hour() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            clock = broker.services.runtime.clock
            await client.open(topic)
            begin_ms = clock.wall_ms()
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            last = (await pointers(broker, topic))[-1]
            assert begin_ms <= last.sealed_ms <= clock.wall_ms()
            key = parse_object_key(last.locations[0].key)
            assert isinstance(key, ObjectKey)
            assert key.hour_ms == last.sealed_ms // 3_600_000 * 3_600_000
            assert broker.services.counters.sealed_batches == 1
            await client.close()

    run(work())


def test_a_duplicate_is_not_acked_before_what_its_stream_sent_before_it() -> None:
    """An ack covers all below it: the queue holds the second block, and the first one is still on its way."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            client = await BareClient.connect(broker)
            second = block_of(topic, 1, [b"b"])
            await client.open(topic, sequence=1)
            client.write(write_frame(second))
            assert (await client.frame()).argument == 2
            store = broker.services.stores["main"] = GatedStore()
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])) + write_frame(second))
            await until(lambda: broker.services.counters.duplicate_blocks == 1)
            client.write(encode_frame(Api.METADATA, 0, 9, encode_message(MetadataRequest())))
            assert (await client.frame()).api == Api.METADATA, "an ack would have come first"
            store.gate.set()
            assert (await client.frame()).argument == 2
            await client.close()

    run(work())


def test_an_opening_whose_answer_takes_longer_than_a_pointer_may_be_old_does_not_count() -> None:
    """An owner that opened meanwhile has read the queue without it."""

    class Slow(MemoryQueue):
        def __init__(self, clock: ManualClock, taken_ms: int) -> None:
            super().__init__(clock)
            self.clock, self.taken_ms = clock, taken_ms

        async def publish(self, publication: Publication) -> int:
            offset = await super().publish(publication)
            self.clock.advance(self.taken_ms)
            return offset

    async def opened(taken_ms: int) -> Ownership:
        owner = Owner()
        queue = Slow(owner.clock, taken_ms)
        services = replace(owner.services, queue=queue)
        await queue.create([READ], 30_000)
        owner.own.stated = False
        topic = Topic(name=READ.topic, id=READ.topic_id, created_ms=0)
        await _publish_opened(services, topic, owner.own, owner.publisher)
        return owner.own

    async def work() -> None:
        assert (await opened(30_000)).read_to == 1
        with pytest.raises(RetryableError, match="came after 30 s"):
            await opened(30_001)

    run(work())


@pytest.mark.parametrize("kind", ["ended", "closed"])
def test_a_pointer_without_records_counts_the_late_tries_that_its_own_proof_meets(kind: str) -> None:
    """It may be the only pointer that is young enough to settle the totals of a reader that starts behind it."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).argument == 1
            processor = processor_of(broker, topic)
            log = broker.services.queue.log(read_partitions(topic)[0])  # type: ignore[attr-defined]  # the memory queue
            log.entries.append(replace(log.entries[-1], offset=log.end))  # an earlier try of the batch lands late
            processor.owned().proof_s -= 3_600
            if kind == "ended":
                client.write(encode_frame(Api.CLOSE, 1, 3, encode_message(Close(next_sequence=1))))
                assert (await client.frame()).api == Api.CLOSE
            else:
                await release_partition(broker.services, publisher_of(processor), topic)
            last = (await pointers(broker, topic))[-1]
            assert (last.kind, last.totals.records, [late.offset for late in last.adopted]) == (kind, 2, [2])
            await client.close()

    run(work())


def test_an_instance_of_a_named_producer_begins_behind_what_the_one_before_it_has_under_way() -> None:
    """It gets the sequence to continue from: a block that lands later would have those of its first one."""

    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b"])))
            processor = processor_of(broker, topic)
            await until_sealed(processor)
            begun = asyncio.create_task(processor.begin_producer(PRODUCER))
            await asyncio.wait([begun], timeout=0.05)
            assert not begun.done()
            store.gate.set()
            assert ((await begun).epoch, (await begun).last_sequence) == (INSTANCES_PER_EPOCH + 1, 2)
            await client.close()

    run(work())
