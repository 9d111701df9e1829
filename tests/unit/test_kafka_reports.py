"""Delivery reports of librdkafka: late, wrong, refused, without an offset or with a false one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from memq.errors import QueueError, QueueRefusedError
from memq.notification import Entries, Entry, Publication, Span
from memq.notification.kafka import queue as queue_module
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading.fetcher import EntryFetcher
from memq.notification.kafka.reading.follower import Follower
from tests.brokers import until
from tests.librdkafka import Library, Log, Message, Report, refused
from tests.unit.kafka_records import ALL, PARTITION, RECORDS, TOPIC, few_records, over, publication


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    return few_records(monkeypatch)


# ---- delivery reports ------------------------------------------------------------------------------


def test_a_record_that_is_refused_may_have_landed(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.reports.append(refused(KafkaError.INVALID_TIMESTAMP))
        with pytest.raises(QueueRefusedError):
            await queue.publish(publication(b"there"))
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"there"]

    over(work)


def test_a_pointer_is_not_too_large_because_kafka_says_so(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.reports.append(refused(KafkaError.MSG_SIZE_TOO_LARGE))
        with pytest.raises(QueueError, match="too large"):
            await queue.publish(publication(b"there"))
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"there"]

    over(work)


def test_a_producer_that_the_library_has_given_up_is_replaced(library: Library) -> None:
    """A fatal error is raised where reports are handed over, before them, and again while the producer is ended."""

    async def work(queue: KafkaQueue) -> None:
        broken = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "out of order", fatal=True)
        library.fatal.extend([broken] * 2)
        library.reports.append(refused(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER))
        with pytest.raises(QueueError, match="out of order"):
            await queue.publish(publication(b"there"))
        assert await queue.publish(publication(b"next")) == RECORDS + 1

    over(work)


def test_a_producer_that_ends_without_its_reports_blocks_no_partition(library: Library) -> None:
    """A busy machine may not flush a producer in time; its reports never come."""

    async def work(queue: KafkaQueue) -> None:
        library.fatal.append(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "out of order", fatal=True))
        library.unflushed = True
        async with asyncio.timeout(10):
            with pytest.raises(QueueError, match="gave no delivery report"):
                await queue.publish(publication(b"there"))
            assert await queue.publish(publication(b"next")) == RECORDS + 1

    over(work)


def test_a_report_without_an_offset_is_no_offset(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.lost.append(True)
        with pytest.raises(QueueError, match="the report has no offset"):
            await queue.publish(publication(b"gone"))
        assert await queue.publish(publication(b"there")) == RECORDS

    over(work)


def test_reports_that_come_late_and_in_another_order_reach_their_own_publishers(library: Library) -> None:
    held: list[tuple[Report, Message]] = []

    async def work(queue: KafkaQueue) -> None:
        library.reports.extend([lambda report, message: held.append((report, message))] * 2)
        first, second = (
            asyncio.create_task(queue.publish(Publication(PARTITION, write, 1, int(time.time() * 1000), b"%d" % write)))  # noqa: TID251
            for write in (1, 2)
        )
        await until(lambda: len(held) == 2)
        for report, message in reversed(held):
            report(None, message)
        assert (await first, await second) == (RECORDS, RECORDS + 1)
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"1", b"2"]

    over(work)


def test_a_publish_after_one_that_was_given_up_is_refused_once(library: Library) -> None:
    """Its report is late: it may have landed behind what its owner has read since."""
    held: list[tuple[Report, Message]] = []

    async def work(queue: KafkaQueue) -> None:
        library.reports.append(lambda report, message: held.append((report, message)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await queue.publish(publication(b"late"))
        held[0][0](KafkaError(KafkaError._MSG_TIMED_OUT), held[0][1])
        with pytest.raises(QueueError, match="may have landed since"):
            await queue.publish(publication(b"next"))
        assert await queue.publish(publication(b"next")) == RECORDS + 1

    over(work)


def test_a_pointer_of_time_zero_is_too_old(library: Library) -> None:
    """The library would replace the time by its own."""

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(QueueRefusedError, match="queue time 0 is too old"):
            await queue.publish(Publication(PARTITION, 0, 1, 0, b"old"))
        assert await queue.publish(Publication(PARTITION, 0, 1, 1, b"young")) == RECORDS

    over(work)


# ---- the offset of a report ------------------------------------------------------------------------


def report_at(offset: int) -> Callable[[Report, Message], None]:
    """Return what reports a record that has landed, at this offset."""
    return lambda deliver, _: deliver(None, Message((TOPIC, 0), offset, None, None))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a pointer back without pauses."""
    monkeypatch.setattr(queue_module, "SHOWN_PAUSES_S", (0.0, 0.0))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("false", "before"),
    [(RECORDS + 100, 0), (RECORDS + 1, 0), (RECORDS - 1, 0), (0, 0), (RECORDS + 1, 2), (RECORDS + 2, 1)],
    ids=["too high", "next", "too low", "first", "of another", "behind another"],
)
def test_a_false_offset_of_a_publish_is_neither_an_end_nor_a_position(
    library: Library, false: int, before: int
) -> None:
    """All ends after one that is too high went back, until a restart; one that is too low was a position in acks.

    `before` entries of other publishers come before the pointer.
    """

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)
        log = library.log((TOPIC, 0))
        for number in range(before):
            log.append(2_000, b"other %d" % number)
        library.reports.append(report_at(false))
        with pytest.raises(QueueError, match=f"the pointer is not at offset {false}, which Kafka answered"):
            await queue.publish(publication(b"there"))
        entries = await queue.read(PARTITION, RECORDS, ALL)
        assert [entry.body for entry in entries][before:] == [b"there"]
        assert await queue.publish(publication(b"next")) == RECORDS + before + 1
        assert await queue.span(PARTITION) == Span(0, RECORDS + before + 2)

    over(work)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("code", [None, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_an_offset_that_leaves_a_gap_counts_as_soon_as_kafka_shows_the_pointer(
    library: Library, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """A node that lags shows nothing there, or denies it; an offset that follows on a known end costs no read."""
    fetched = EntryFetcher.fetch

    async def denied_once(fetcher: EntryFetcher, *args: Any) -> Entries:
        monkeypatch.setattr(EntryFetcher, "fetch", fetched)
        assert code is not None
        raise LastErrors().failure(KafkaError(code), "reading")

    async def work(queue: KafkaQueue) -> None:
        if code is None:
            library.eof_early = 1
        else:
            monkeypatch.setattr(EntryFetcher, "fetch", denied_once)
        assert await queue.publish(publication(b"first")) == RECORDS
        read = library.read
        assert read == (2 if code is None else 1)
        assert await queue.publish(publication(b"second")) == RECORDS + 1
        assert library.read == read, "nothing came between"

    over(work)


def test_a_pointer_is_not_read_back_for_longer_than_its_time(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kafka that stops answering leaves the outcome unknown; a read alone would take the time of a request."""
    monkeypatch.setattr(queue_module, "SHOWN_S_MAX", 0.1)

    async def work(queue: KafkaQueue) -> None:
        library.mute = True
        with pytest.raises(QueueError, match="the pointer is not at offset 5"):
            await queue.publish(publication(b"there"))
        library.mute = False
        await queue.close()

    over(work, request_timeout_ms=500)


@pytest.mark.usefixtures("hurried")
def test_a_pointer_that_the_follower_has_seen_needs_no_read(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[Callable[[KafkaPartition, Entry], None]] = []

    class Noted(Follower):
        """Notes whom it tells of what arrives."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            arrivals.append(given[4])

    monkeypatch.setattr(queue_module, "Follower", Noted)

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)

        def followed(deliver: Report, message: Message) -> None:
            loop.call_soon_threadsafe(arrivals[0], (TOPIC, 0), Entry(RECORDS, 2_000, b"there"))
            deliver(None, message)

        loop, read = asyncio.get_running_loop(), library.read
        library.reports.append(followed)
        assert await queue.publish(publication(b"there")) == RECORDS
        assert library.read == read

    over(work)


@pytest.mark.usefixtures("hurried")
def test_an_offset_that_goes_back_is_believed_of_a_log_that_was_cut(library: Library) -> None:
    """The owner names the lost log by it."""

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)
        library.topics[TOPIC] = [Log()]
        assert await queue.publish(publication(b"there")) == 0
        with pytest.raises(QueueError, match=f"the end is 1, after it was {RECORDS}"):
            await queue.span(PARTITION)

    over(work)
