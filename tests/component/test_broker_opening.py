"""Openings and releases when coordinator or queue refuse: retried, logged, or left to another broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import cast

import msgspec
import pytest

from memq.broker.partition.opening import BACKOFF_S_MAX, HELD_RETRY_S, open_partition, release_partition
from memq.broker.partition.ownership import Phase
from memq.broker.services import OPENING_TURN_S, OPENINGS_AT_ONCE_MAX
from memq.errors import (
    CorruptDataError,
    DeniedError,
    DrainingError,
    FencedError,
    MemqError,
    MovedError,
    NotFoundError,
    QueueError,
    UnreachableError,
    VersionConflictError,
)
from memq.format.pointer import NamedProducer, Pointer, ProducerEnd, decode_pointer, encode_pointer
from memq.governor import Assignment, BrokerEntry
from memq.notification import Span
from memq.notification.memory import MemoryQueue
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Totals, equal_slots, read_partitions
from tests.brokers import block_of, events_of, run, write_frame
from tests.partition_owners import Opening, control, failing, owning, pointers, processor_of, publisher_of
from tests.skipping_loop import run_skipping, skip


@pytest.mark.parametrize("error", [QueueError("not now"), DeniedError("not you"), TimeoutError()], ids=repr)
def test_an_opening_that_fails_is_named_and_its_epoch_is_never_used_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            left = failing(broker.services.queue, "publish", error)
            own = await open_partition(broker.services, topic, 0, read_partitions(topic)[0])
            counters = broker.services.counters
            assert (own.epoch, left, counters.opening_retries, counters.openings) == (3, [], 1, 2)
            assert [each.epoch for each in await pointers(broker, topic)] == [1, 3]

    run(work())
    assert "opening-retry" in events_of(caplog)


def test_a_claim_that_another_change_came_before_is_made_again() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            left = failing(broker.services.coordinator, "set_assignment", VersionConflictError("it has changed"))
            own = await open_partition(broker.services, topic, 0, read_partitions(topic)[0])
            assert (own.epoch, left, broker.services.counters.opening_retries) == (2, [], 0)

    run(work())


@pytest.mark.parametrize(("owner", "words"), [("two", "belongs to broker 'two'"), ("", "belongs to nobody")])
def test_a_partition_of_another_broker_is_not_opened(owner: str, words: str) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            coordinator = broker.services.coordinator
            current = await coordinator.assignment(topic.id, 0)
            await coordinator.set_assignment(msgspec.structs.replace(current, broker=owner, epoch=current.epoch + 1))
            with pytest.raises(MovedError, match=words):
                await open_partition(broker.services, topic, 0, read_partitions(topic)[0])

    run(work())


def test_a_partition_that_is_gone_is_not_opened() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            failing(broker.services.coordinator, "assignment", NotFoundError("no such topic"))
            with pytest.raises(MovedError, match="partition 0 was deleted: no such topic"):
                await open_partition(broker.services, topic, 0, read_partitions(topic)[0])

    run(work())


def test_an_opening_ends_with_an_error_that_no_further_try_mends() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            failing(broker.services.coordinator, "assignment", CorruptDataError("the assignment is damaged"))
            with pytest.raises(CorruptDataError, match="is damaged"):
                await open_partition(broker.services, topic, 0, read_partitions(topic)[0])

    run(work())


def test_each_opening_that_fails_doubles_the_pause_before_the_next_up_to_a_bound() -> None:
    pauses_s = [0.04, 0.08, 0.16, 0.32, 0.64, 1.28, BACKOFF_S_MAX, BACKOFF_S_MAX]

    async def work() -> None:
        opening = Opening()
        await opening.assign()
        left = [QueueError("it is down") for _ in pauses_s]

        def fail() -> None:
            if left:
                raise left.pop()

        calls = opening.noted(opening.queue, "publish", fail)
        assert (await opening.open()).epoch == len(pauses_s) + 1
        assert [later[0] - first[0] for first, later in pairwise(calls)] == pytest.approx(pauses_s)

    run_skipping(work())


def test_a_partition_that_its_last_owner_drains_is_asked_for_ten_times_a_second() -> None:
    async def work() -> None:
        opening = Opening()
        await opening.coordinator.register(BrokerEntry(id="two", session="s2", address="h:1"))
        await opening.assign(epoch=4, session="s2")
        calls = opening.noted(opening.coordinator, "assignment")
        task = asyncio.create_task(opening.open())
        await skip(1.05)
        assert [each[0] for each in calls] == pytest.approx([HELD_RETRY_S * number for number in range(11)])
        current = await opening.coordinator.assignment(opening.topic.id, 0)
        await opening.coordinator.set_assignment(msgspec.structs.replace(current, session=""))
        assert (await task).epoch == 5
        assert opening.services.counters.opening_retries == 0, "it is no failure"

    run_skipping(work())


def test_openings_of_partitions_whose_logs_hang_do_not_prevent_others() -> None:
    async def work() -> None:
        opening = Opening()
        opening.topic = msgspec.structs.replace(opening.topic, partitions=equal_slots(OPENINGS_AT_ONCE_MAX + 1))
        reads, span = read_partitions(opening.topic), opening.queue.span
        await opening.queue.create(reads, 30_000)
        await opening.coordinator.create_topic(opening.topic)
        for entry in await opening.coordinator.assignments():
            await opening.coordinator.set_assignment(msgspec.structs.replace(entry, broker="one"))

        async def hanging(partition: ReadPartition) -> Span:
            if partition != reads[-1]:
                await asyncio.get_running_loop().create_future()
            return await span(partition)

        opening.queue.span = hanging  # type: ignore[method-assign]  # of all partitions but the last
        works = [open_partition(opening.services, opening.topic, each.partition, each) for each in reads]
        *hung, last = (asyncio.create_task(work) for work in works)
        await skip(OPENING_TURN_S + 0.1)
        assert last.done()
        assert not any(task.done() for task in hung)
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)

    run_skipping(work())


def test_an_opening_is_dated_when_its_pointer_is_handed_over() -> None:
    """The store took 14 s to show that nothing was lost: the proof is not that of the reading before."""

    class Slow(MemoryHandler):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
            await skip(3.5)
            async for entry in super().list(prefix):
                yield entry

    async def work() -> None:
        opening = Opening()
        opening.store.__class__ = Slow
        await opening.assign(epoch=4)
        calls = opening.noted(opening.queue, "publish")
        own = await opening.open()
        ((_, (publication,)),) = calls
        assert publication.time_ms == opening.clock.wall_ms()
        assert own.proof_s == opening.clock.monotonic() == 14.0

    run_skipping(work())


def test_an_opening_reads_again_when_its_reading_is_old() -> None:
    """Its pointer would be much younger than the late pointers before it: no later opening would read these."""

    async def work() -> None:
        opening, published = Opening(), list[int]()

        class VerySlow(MemoryHandler):
            async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
                await skip(8.0)
                if not published:
                    said = control(opening.topic, "closed", 3)
                    late = msgspec.structs.replace(decode_pointer(said.body), totals=Totals(5, 50))
                    published.append(await opening.queue.publish(replace(said, body=encode_pointer(late))))
                async for entry in super().list(prefix):
                    yield entry

        opening.store.__class__ = VerySlow
        await opening.assign(epoch=4)
        own = await opening.open()
        assert published
        entries = await opening.queue.read(opening.read, 0, 1 << 20)
        stated = [(found.epoch, found.totals) for found in (decode_pointer(entry.body) for entry in entries)]
        assert stated == [(3, Totals(5, 50)), (5, Totals(5, 50))]
        assert own.totals == Totals(5, 50)

    run_skipping(work())


def test_an_opening_after_a_long_silence_reads_no_more_than_its_last_pointer_and_what_may_contend_with_it() -> None:
    async def work() -> None:
        opening = Opening()
        await opening.assign(epoch=4)
        for epoch in (3, 4):
            await skip(1_000.0)
            said = control(opening.topic, "closed", epoch)
            await opening.queue.publish(replace(said, time_ms=opening.clock.wall_ms()))
        await skip(1_000.0)
        calls = opening.noted(opening.queue, "read")
        assert (await opening.open()).epoch == 5
        assert [offset for _, (_, offset, _) in calls] == [1, 2, 1], "the last entry is compared"

    run_skipping(work())


def test_an_opening_reads_the_whole_dedup_window_though_the_clocks_of_brokers_differ() -> None:
    """A block that it has not read it would take again: a copy for every reader."""

    async def work() -> None:
        opening = Opening()
        await opening.assign(epoch=4)
        calls = opening.noted(opening.queue, "seek_time")
        await opening.open()
        window_ms = opening.topic.settings.dedup_window_ms
        assert [time_ms for _, (_, time_ms) in calls] == [opening.clock.wall_ms() - window_ms - CLOCK_ERROR_MS]

    run_skipping(work())


async def opened_long_ago(silent_s: float) -> Opening:
    """Return a log with a name in its `opened`, and a `closed` 1,000 s later, `silent_s` ago."""
    opening = Opening()
    await opening.assign(epoch=4)
    named = NamedProducer(producer=7, epoch=2, last_sequence=30)
    for kind, said in (("opened", {"named": (named,)}), ("closed", {"named_ms": opening.clock.wall_ms()})):
        pointer = Pointer(kind=kind, cluster="c", topic="clicks", topic_id=opening.topic.id, partition=0, epoch=4)
        body = encode_pointer(msgspec.structs.replace(pointer, **said))
        publication = replace(control(opening.topic, kind, 4), time_ms=opening.clock.wall_ms(), body=body)
        await opening.queue.publish(publication)
        await skip((1_000.0, silent_s)[kind == "closed"])
    return opening


@pytest.mark.parametrize("false", [1, 2])
def test_an_opening_reads_the_dedup_window_though_the_queue_says_once_that_there_is_none(false: int) -> None:
    """One answer "nothing is so young" is the end: what lies before would be forgotten, and taken again."""

    async def work() -> None:
        opening = await opened_long_ago(250.0)
        asked, seek = 0, opening.queue.seek_time

        async def late(partition: ReadPartition, time_ms: int) -> int:
            nonlocal asked
            asked += 1
            return (await opening.queue.span(partition)).end if asked == false else await seek(partition, time_ms)

        opening.queue.seek_time = late  # type: ignore[method-assign]
        own = await opening.open()
        assert (own.producer(7).epoch, own.producer(7).next) == (2, 30)
        assert asked > false

    run_skipping(work())


@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize("silent_s", [250.0, 2_500.0])
def test_an_opening_knows_its_names_though_the_queue_says_once_that_its_log_begins_later(
    silent_s: float, begin: int
) -> None:
    """The next `opened` would state no name: an instance would use the sequences of its name again."""

    async def work() -> None:
        opening = await opened_long_ago(silent_s)
        said, span = [begin], opening.queue.span

        async def late(partition: ReadPartition) -> Span:
            found = await span(partition)
            return Span(said.pop(), found.end) if said else found

        opening.queue.span = late  # type: ignore[method-assign]
        own = await opening.open()
        assert (own.producer(7).epoch, own.producer(7).next) == (2, 30)

    run_skipping(work())


def test_an_opening_asks_for_the_begin_of_its_log_twice_where_it_decides_alone() -> None:
    async def work() -> None:
        opening = await opened_long_ago(2_500.0)
        await opening.queue.trim(opening.read, 1)
        calls = opening.noted(opening.queue, "span")
        await opening.open()
        assert len(calls) == 2

    run_skipping(work())


def test_a_partition_that_nobody_has_opened_does_not_ask_the_store_whether_its_log_is_lost() -> None:
    class Counting(MemoryHandler):
        lists = 0

        async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
            self.lists += 1
            async for entry in super().list(prefix):
                yield entry

    async def work() -> None:
        opening = Opening()
        store = opening.store
        store.__class__ = Counting
        assert isinstance(store, Counting)
        await opening.assign()
        left = [QueueError("it is down")]
        failing(opening.queue, "publish", *left)
        assert (await opening.open()).epoch == 2, "what was claimed here and not opened stored nothing"
        assert store.lists == 0

    run_skipping(work())


def test_a_release_says_closed_and_gives_the_session_back() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            client.write(write_frame(block_of(topic, 0, [b"v", b"w"])))
            assert (await client.frame()).argument == 2
            await processor_of(broker, topic).drain()
            last = (await pointers(broker, topic))[-1]
            assert (last.kind, last.epoch, last.totals.records) == ("closed", 1, 2)
            current = await broker.services.coordinator.assignment(topic.id, 0)
            assert (current.session, current.epoch) == ("", 1)

    run(work())


def test_a_release_that_fails_is_named_and_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            failing(broker.services.queue, "publish", DeniedError("not you"))
            await release_partition(broker.services, publisher_of(processor, patient=False), topic)
            assert (await pointers(broker, topic))[-1].kind == "opened"
            session = (await broker.services.coordinator.assignment(topic.id, 0)).session
            assert session == broker.services.session, "its next owner waits until this broker has left"

    run(work())
    assert events_of(caplog) == ["release-failed"]


def test_the_first_failure_of_a_partition_is_the_one_that_all_get() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            processor.fail(FencedError("first"))
            processor.fail(MovedError("second"))
            asks = (
                processor.ready(),
                processor.end_producer(ProducerEnd(producer=7, next_sequence=0)),
                processor.begin_producer(7),
            )
            errors: list[MemqError] = []
            for ask in asks:
                with pytest.raises(MemqError) as caught:
                    await ask
                errors.append(caught.value)
            assert [str(error) for error in errors[:2]] == ["first", "first"]
            await processor.republish_opened()
            assert [each.kind for each in await pointers(broker, topic)] == ["opened"]

    run(work())


def test_a_partition_that_drains_takes_no_new_stream() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            await processor.ready()
            processor.start_draining()
            with pytest.raises(DrainingError, match="partition 0 of topic 'clicks' is being drained"):
                await processor.ready()

    run(work())


def test_an_owner_proves_its_end_by_the_coordinator_or_by_publishing() -> None:
    """A question does not make the log grow while the coordinator answers."""

    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)

            async def length() -> int:
                assert await processor.proven_end() == len(await pointers(broker, topic))
                return len(await pointers(broker, topic))

            assert await length() == 1
            assert await length() == 1
            log = cast(MemoryQueue, broker.services.queue).log(processor.read_partition)
            log.entries.append(replace(log.entries[-1], offset=log.end))  # it landed meanwhile
            failing(broker.services.coordinator, "assignment", UnreachableError("away"))
            assert await length() == 3, "a silent coordinator confirms nothing; what came between counts"
            processor.draining = True
            failing(broker.services.coordinator, "assignment", UnreachableError("away"))
            assert await length() == 4, "also while it drains"

    run(work())


def test_where_a_queue_refuses_by_age_the_end_covers_late_pointers_of_earlier_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Kafka node that lags does not show them; behind an `opened` that no earlier owner can follow there are none."""
    monkeypatch.setattr(MemoryQueue, "refuses_by_age", property(lambda _: True))

    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            own = processor.owned()
            log = cast(MemoryQueue, broker.services.queue).log(processor.read_partition)

            async def length() -> int:
                assert await processor.proven_end() == log.end
                return log.end

            log.entries.append(replace(log.entries[-1], offset=log.end))  # it landed late
            assert await length() == 3
            assert await length() == 4, "another one may have landed"
            own.owned_s = own.published_s - own.stale_publish_s - CLOCK_ERROR_MS / 1000
            assert await length() == 5, "at the last moment at which one can land"
            own.owned_s -= 0.001
            assert await length() == 5
            assert await length() == 5

    run(work())


def test_an_owner_that_met_a_higher_epoch_proves_no_end_whatever_the_coordinator_says() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            own = processor.owned()
            own.owned_s -= 1_000
            own.become(Phase.FENCED)
            coordinator, confirmed = broker.services.coordinator, asyncio.Event()
            assignment = coordinator.assignment

            async def confirm(topic_id: str, partition: int) -> Assignment:
                confirmed.set()
                return await assignment(topic_id, partition)

            coordinator.assignment = confirm  # type: ignore[method-assign]
            asks = asyncio.create_task(processor.proven_end())
            await confirmed.wait()
            processor.fence(FencedError("the publish that met it has ended"))
            with pytest.raises(MovedError, match="lost its epoch"):
                await asks

    run(work())
