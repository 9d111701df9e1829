"""The Kafka queue as its callers use it: entries of other processes, deletions, leaders that are missing, its end."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError

from memq.errors import ClosedError, DeniedError, NotFoundError, QueueError
from memq.notification import Span
from memq.notification.kafka.queue import LEADERLESS_S_MAX, SHOWN_PAUSES_S, KafkaQueue
from memq.notification.kafka.topics import REQUIRED, STALE
from tests.brokers import until
from tests.librdkafka import Library, Log, Message, Report, refused, use
from tests.skipping_loop import now_s
from tests.unit.kafka_records import ALL, PARTITION, RECORDS, TOPIC, few_records, over, over_virtual, publication

PART = KafkaError.UNKNOWN_TOPIC_OR_PART
LONG_S = 3_600


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    found = few_records(monkeypatch)
    found.configs[TOPIC] = {**REQUIRED, STALE: "9000", "min.insync.replicas": "1"}
    return found


async def following(queue: KafkaQueue, library: Library) -> asyncio.Task[None]:
    """Begin a wait for the next entry, and return when the partition is followed."""
    waiting = asyncio.create_task(queue.wait({PARTITION: RECORDS}, LONG_S))
    await until(lambda: (TOPIC, 0) in library.followed)
    return waiting


# ---- entries of other processes ------------------------------------------------------------------


def test_an_entry_of_another_process_wakes_who_waits_and_is_read_from_memory(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        waiting = await following(queue, library)
        later = asyncio.create_task(queue.wait({PARTITION: RECORDS + 1}, LONG_S))
        read = library.read
        library.arrive((TOPIC, 0), 2_000, b"other")
        await waiting
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"other"]
        assert library.read == read, "the entry that arrived is kept"
        library.offsets.extend([0, RECORDS])
        with pytest.raises(QueueError, match=f"the end is {RECORDS}, after it was {RECORDS + 1}"):
            await queue.span(PARTITION)
        assert await queue.span(PARTITION) == Span(0, RECORDS + 1)
        assert not later.done()
        library.arrive((TOPIC, 0), 2_000, b"other")
        await later

    over(work)


def test_an_own_pointer_is_read_where_kafka_shows_it_and_not_where_its_report_says(library: Library) -> None:
    """An entry of another process came before it, and the report had that entry's offset, the known end."""

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)

        def report(deliver: Report, message: Message) -> None:
            deliver(None, Message(message.place, RECORDS, None, None))

        library.reports.append(report)
        library.arrive((TOPIC, 0), 2_000, b"other")
        assert await queue.publish(publication(b"own")) == RECORDS
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"other", b"own"]

    over(work)


def test_a_wait_for_the_first_entry_lasts_until_it_is_there(library: Library) -> None:
    library.topics[TOPIC] = [Log()]

    async def work(queue: KafkaQueue) -> None:
        waiting = asyncio.create_task(queue.wait({PARTITION: 0}, LONG_S))
        await until(lambda: (TOPIC, 0) in library.followed)
        for _ in range(5):  # each of its requests was answered before these
            await queue.span(PARTITION)
        assert not waiting.done()
        assert await queue.publish(publication(b"first")) == 0
        await waiting

    over(work)


def test_a_topic_that_another_process_deletes_wakes_who_waits_and_is_not_made_again(library: Library) -> None:
    """A producer would let Kafka create it, and the cache would show entries of a topic that does not exist."""

    async def work(queue: KafkaQueue) -> None:
        waiting = await following(queue, library)
        library.arrive((TOPIC, 0), 2_000, b"other")
        await waiting
        waiting = asyncio.create_task(queue.wait({PARTITION: RECORDS + 1}, LONG_S))
        await until(lambda: not waiting.done())
        assert len(await queue.read(PARTITION, RECORDS, ALL)) == 1
        library.delete(TOPIC)
        await waiting
        with pytest.raises(QueueError, match="shown before"):
            await queue.read(PARTITION, RECORDS, ALL)
        with pytest.raises(QueueError, match="shown before"):
            await queue.publish(publication(b"never"))
        assert library.topics == {}
        await until(lambda: not library.followed)

    over(work)


# ---- partitions -----------------------------------------------------------------------------------


def test_all_partitions_of_a_name_are_listed_and_no_others(library: Library) -> None:
    again = replace(PARTITION, topic_id="0b" * 16)
    library.topics |= {
        f"memq.clicks.{again.topic_id}": [Log(), Log()],
        "memq.views." + "0c" * 16: [Log()],
        "memq._memq-check": [Log()],
        "clicks": [Log()],
    }

    async def work(queue: KafkaQueue) -> None:
        assert await queue.partitions("clicks") == [PARTITION, again, replace(again, partition=1)]
        assert await queue.partitions("none") == []

    over(work)


def test_a_dropped_partition_that_is_made_again_is_empty(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.wait({PARTITION: 0}, LONG_S)
        assert await queue.publish(publication(b"old")) == RECORDS
        await queue.drop([PARTITION])
        await until(lambda: not library.followed)
        await queue.create([PARTITION], 60_000)
        assert await queue.span(PARTITION) == Span(0, 0)
        assert list(await queue.read(PARTITION, RECORDS, ALL)) == []
        assert await queue.publish(publication(b"new")) == 0
        assert [entry.body for entry in await queue.read(PARTITION, 0, ALL)] == [b"new"]

    over(work)


def test_a_drop_wakes_who_waits_and_ends_what_follows_before_the_library_learns_of_it(library: Library) -> None:
    library.late = True

    async def work(queue: KafkaQueue) -> None:
        waiting = await following(queue, library)
        await queue.drop([PARTITION])
        async with asyncio.timeout(5):
            await waiting
            await until(lambda: not library.followed)

    over(work)


def test_a_drop_that_is_denied_lets_waits_continue(library: Library) -> None:
    """They were woken by no entry of another process any more."""

    async def work(queue: KafkaQueue) -> None:
        waiting = await following(queue, library)
        library.refuse = lambda call, subject: (
            KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED) if call == "delete_topics" else None
        )
        with pytest.raises(DeniedError):
            await queue.drop([PARTITION])
        await queue.span(PARTITION)
        assert not waiting.done()
        library.arrive((TOPIC, 0), 2_000, b"other")
        await waiting

    over(work)


def test_a_trim_of_nothing_is_no_request_and_one_entry_can_be_trimmed(library: Library) -> None:
    asked: list[str] = []
    library.refuse = lambda call, subject: asked.append(call)

    async def work(queue: KafkaQueue) -> None:
        await queue.trim(PARTITION, 0)
        await queue.trim(PARTITION, -1)
        assert "delete_records" not in asked
        await queue.trim(PARTITION, 1)
        assert await queue.span(PARTITION) == Span(1, RECORDS)

    over_virtual(work)


def test_a_read_from_before_the_log_begins_with_its_first_entry(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        for offset in (-5, 0):
            assert [entry.offset for entry in await queue.read(PARTITION, offset, ALL)] == list(range(RECORDS))

    over(work)


# ---- a topic that is deleted or widened meanwhile -------------------------------------------------------


def test_a_publish_whose_topic_is_deleted_meanwhile_is_not_found(library: Library) -> None:
    held: list[Report] = []
    library.reports.append(lambda report, message: held.append(report))

    async def work(queue: KafkaQueue) -> None:
        publishing = asyncio.create_task(queue.publish(publication(b"late")))
        await until(lambda: len(held) == 1)
        await queue.drop([PARTITION])
        held[0](KafkaError(PART), Message((TOPIC, 0), None, None, None))
        with pytest.raises(NotFoundError):
            await publishing
        assert library.refreshed == []

    over(work)


def test_after_a_publish_without_an_answer_the_topic_is_looked_up_again(library: Library) -> None:
    """It may have been deleted: librdkafka reports that late, and would let Kafka create it."""
    library.reports.append(refused(KafkaError._MSG_TIMED_OUT))

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(QueueError):
            await queue.publish(publication(b"late"))
        library.delete(TOPIC)
        with pytest.raises(QueueError, match="shown before"):
            await queue.publish(publication(b"next"))
        assert library.topics == {}

    over(work)


def test_a_read_at_the_end_is_no_read(library: Library) -> None:
    """A consumer at the end asks for it again and again; each read would take a thread."""

    async def work(queue: KafkaQueue) -> None:
        assert list(await queue.read(PARTITION, RECORDS, ALL)) == []
        assert library.read == 0

    over(work)


def test_a_producer_that_does_not_know_a_new_partition_looks_it_up(library: Library) -> None:
    def unknown(report: Report, message: Message) -> None:
        report(KafkaError(PART), Message((TOPIC, 0), None, None, None))

    library.reports.append(unknown)

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(QueueError, match="as it was before it was widened"):
            await queue.publish(publication(b"first"))
        assert library.refreshed == [TOPIC]
        assert await queue.publish(publication(b"next")) == RECORDS + 1

    over(work)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_read_that_finds_no_topic_is_right_only_if_kafka_lists_none(library: Library, *, dropped: bool) -> None:
    held, reading = threading.Event(), threading.Event()

    def missing(call: str, subject: object) -> KafkaError | None:
        if call != "read":
            return None
        reading.set()
        held.wait(30)
        return KafkaError(PART)

    library.refuse = missing

    async def work(queue: KafkaQueue) -> None:
        read = asyncio.create_task(queue.read(PARTITION, 0, ALL))
        await until(reading.is_set)
        if dropped:
            await queue.drop([PARTITION])
        held.set()
        with pytest.raises(NotFoundError if dropped else QueueError) as caught:
            await read
        assert ("but Kafka shows it to others" in str(caught.value)) is not dropped

    over(work, request_timeout_ms=10_000)


# ---- a Kafka that is not ready ------------------------------------------------------------------------


def test_a_span_waits_a_moment_for_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts may ask for a partition that another one is just making."""
    library = Library({TOPIC: [Log()]})
    use(library, monkeypatch)
    led_s = LEADERLESS_S_MAX / 2

    def leaderless(call: str, subject: object) -> KafkaError | None:
        late = call == "list_offsets" and now_s() < led_s
        return KafkaError(KafkaError.LEADER_NOT_AVAILABLE) if late else None

    library.refuse = leaderless

    async def work(queue: KafkaQueue) -> None:
        nonlocal led_s
        assert await queue.span(PARTITION) == Span(0, 0)
        assert led_s <= now_s() < led_s + 0.2
        led_s, begin_s = float("inf"), now_s()
        with pytest.raises(QueueError, match="asking for offsets"):
            await queue.span(PARTITION)
        assert now_s() - begin_s == pytest.approx(LEADERLESS_S_MAX, abs=0.2)

    over_virtual(work)


def test_readiness_needs_an_answer_although_the_rights_are_proven(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.check()
        library.refuse = lambda call, subject: KafkaError(KafkaError._TIMED_OUT)
        with pytest.raises(QueueError, match="asking Kafka at localhost"):
            await queue.check()
        asked: list[str] = []
        library.refuse = lambda call, subject: asked.append(call)
        await queue.close()
        with pytest.raises(ClosedError):
            await queue.check()
        assert asked == []

    over_virtual(work)


# ---- the end --------------------------------------------------------------------------------------------


def test_a_queue_whose_thread_died_fails_all_that_waits_and_all_later_calls(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        waiting = asyncio.create_task(queue.wait({PARTITION: RECORDS + 9}, LONG_S))
        await until(lambda: (TOPIC, 0) in library.followed)
        library.broken = ValueError("a fault of the library")
        publishes = [asyncio.create_task(queue.publish(publication(b"in flight"))) for _ in range(2)]
        with pytest.raises(QueueError, match="the Kafka queue died: a fault of the library"):
            await waiting
        with pytest.raises(ClosedError) as caught:
            await queue.span(PARTITION)
        assert caught.value.__cause__ is library.broken
        async with asyncio.timeout(5):
            found = await asyncio.gather(*publishes, return_exceptions=True)
        assert [type(each) for each in found] == [QueueError, ClosedError], "the outcome of the first is unknown"

    over(work)


def test_a_closed_queue_leaves_no_task_no_thread_and_no_consumer(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        before = {thread for thread in threading.enumerate() if thread.name.startswith("memq-kafka")}
        waiting = await following(queue, library)
        await queue.publish(publication(b"there"))
        await queue.read(PARTITION, 0, ALL)
        await queue.partitions("clicks")
        await waiting
        assert library.closed == 0
        await queue.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("memq-kafka")]
        assert set(left) == {thread.name for thread in before}
        assert library.closed == 2, "the one that reads and the one that follows"

    over(work)


def test_a_pointer_that_a_node_does_not_show_yet_is_read_again_after_a_pause(library: Library) -> None:
    """Each read creates a consumer."""

    async def work(queue: KafkaQueue) -> None:
        begin_s, library.eof_early = asyncio.get_running_loop().time(), 2
        assert await queue.publish(publication(b"first")) == RECORDS
        assert asyncio.get_running_loop().time() - begin_s >= sum(SHOWN_PAUSES_S[:2])

    over(work)


def test_waits_that_ended_take_no_memory(library: Library) -> None:
    """A consumer of a quiet partition waits again and again."""

    async def work(queue: KafkaQueue) -> None:
        await queue.wait({PARTITION: RECORDS}, 0)
        tracemalloc.start()
        begin_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            await queue.wait({PARTITION: RECORDS}, 0)
        taken_bytes = tracemalloc.get_traced_memory()[0] - begin_bytes
        tracemalloc.stop()
        assert taken_bytes < 100_000

    over(work)
