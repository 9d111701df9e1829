"""Publishes to Kafka: one in flight per write partition, renewed producers, and publishes at the close."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from typing import Any

import pytest
from confluent_kafka import KafkaError

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification import Publication
from memq.notification.kafka import sender as sender_module
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import LastErrors, producer_of
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.sender import Sender
from memq.notification.kafka.settings import kafka_settings
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.brokers import until
from tests.librdkafka import Library, Message, Report, refused
from tests.unit.kafka_records import PARTITION, RECORDS, TOPIC, few_records, over, publication

LANES = 300
Held = list[tuple[Report, Message]]
FATAL = KafkaError(KafkaError._FATAL, "out of order")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    return few_records(monkeypatch)


def hold(library: Library, count: int) -> Held:
    """Keep the next reports of the library."""
    held: Held = []
    library.reports.extend([lambda report, message: held.append((report, message))] * count)
    return held


def written_by(write_partition: int) -> Publication:
    now_ms = int(time.time() * 1000)  # noqa: TID251 - Kafka's clock
    return Publication(PARTITION, write_partition, 1, now_ms, b"%d" % write_partition)


def bodies(library: Library) -> list[bytes]:
    """Return the records that were published."""
    return [record.value or b"" for record in library.log((TOPIC, 0)).records[RECORDS:]]


# ---- one in flight ------------------------------------------------------------------------------------


def test_publishes_of_a_write_partition_wait_for_each_other_and_those_of_others_do_not(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        held = hold(library, 1)
        first, second = (asyncio.create_task(queue.publish(written_by(1))) for _ in range(2))
        await until(lambda: len(held) == 1)
        assert await queue.publish(written_by(2)) == RECORDS + 1
        assert bodies(library) == [b"1", b"2"]
        held[0][0](None, held[0][1])
        assert (await first, await second) == (RECORDS, RECORDS + 2)

    over(work)


def test_a_publish_that_waits_behind_one_that_was_given_up_is_refused_and_the_next_one_lands(
    library: Library,
) -> None:
    async def work(queue: KafkaQueue) -> None:
        held = hold(library, 1)
        given_up = asyncio.create_task(queue.publish(publication(b"late")))
        await until(lambda: len(held) == 1)
        waiting = [asyncio.create_task(queue.publish(publication(b"next"))) for _ in range(2)]
        given_up.cancel()
        await asyncio.wait((given_up,))
        held[0][0](None, held[0][1])
        with pytest.raises(QueueError, match="may have landed since"):
            await waiting[0]
        assert await waiting[1] == RECORDS + 1

    over(work)


def test_a_publish_that_was_given_up_and_is_refused_later_blocks_none(library: Library) -> None:
    """Kafka has not stored it."""

    async def work(queue: KafkaQueue) -> None:
        held = hold(library, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await queue.publish(publication(b"late"))
        waiting = asyncio.create_task(queue.publish(publication(b"next")))
        held[0][0](KafkaError(KafkaError.INVALID_TIMESTAMP), held[0][1])
        assert await waiting == RECORDS + 1

    over(work)


@pytest.mark.parametrize("given_up", [False, True])
def test_publishes_that_ended_take_no_memory(library: Library, *, given_up: bool) -> None:
    """A broker publishes for each write partition of each topic."""

    async def work(queue: KafkaQueue) -> None:
        async def give_up(pointer: Publication) -> None:
            held = hold(library, 1)
            publishing = asyncio.create_task(queue.publish(pointer))
            await until(lambda: len(held) == 1)
            publishing.cancel()
            await asyncio.wait((publishing,))
            held[0][0](KafkaError(KafkaError.INVALID_TIMESTAMP), held[0][1])

        await queue.publish(written_by(0))
        tracemalloc.start()
        for number in range(LANES):
            await (give_up if given_up else queue.publish)(written_by(number))
        await queue.publish(written_by(0))
        own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, sender_module.__file__)])
        tracemalloc.stop()
        assert sum(trace.size for trace in own.traces) < 20 * LANES

    over(work)


# ---- refusals of the library --------------------------------------------------------------------------


def refuse(library: Library, *errors: KafkaError) -> list[object]:
    """Refuse the next records with these errors. Return the list of all that are passed to the library from now on."""
    left, produced = list(errors), list[object]()

    def answer(call: str, subject: object) -> KafkaError | None:
        if call != "produce":
            return None
        produced.append(subject)
        return left.pop(0) if left else None

    library.refuse = answer
    return produced


def test_a_full_library_is_named_with_its_number_of_pointers_and_its_cure(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.away = True
        produced = refuse(library)
        waiting = asyncio.create_task(queue.publish(written_by(1)))
        await until(lambda: len(produced) == 1)
        refuse(library, KafkaError(KafkaError._QUEUE_FULL))
        with pytest.raises(QueueError, match="1 pointers wait for Kafka already") as caught:
            await queue.publish(written_by(2))
        assert "pending_bytes_max" in caught.value.hint
        await queue.close()
        with pytest.raises(QueueError, match="publishing for partition 1"):
            await waiting

    over(work)


def test_a_record_that_the_library_refuses_ends_neither_others_nor_the_write_partition(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        held = hold(library, 1)
        waiting = asyncio.create_task(queue.publish(written_by(1)))
        await until(lambda: len(held) == 1)
        refuse(library, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large"))
        with pytest.raises(MemqError, match=r"publishing for partition 2 to Kafka topic .*: too large"):
            await queue.publish(written_by(2))
        library.reports.append(refused(KafkaError.NOT_ENOUGH_REPLICAS))
        with pytest.raises(QueueError, match="publishing for partition 2"):
            await queue.publish(written_by(2))
        assert await queue.publish(written_by(2)) == RECORDS + 2
        assert not waiting.done(), "only a fatal error ends the records of a producer"
        held[0][0](None, held[0][1])
        assert await waiting == RECORDS

    over(work)


# ---- renewed producers --------------------------------------------------------------------------------


def test_each_producer_that_refuses_all_records_is_replaced_and_its_records_fail_with_their_reason(
    library: Library,
) -> None:
    async def work(queue: KafkaQueue) -> None:
        async def hang(number: int) -> asyncio.Task[int]:
            produced = refuse(library)
            publishing = asyncio.create_task(queue.publish(written_by(number)))
            await until(lambda: len(produced) == 1)
            return publishing

        library.away, waiting = True, list[asyncio.Task[int]]()
        for number in (1, 2):
            waiting.append(await hang(number))
            refuse(library, FATAL)
            with pytest.raises(QueueError, match="out of order"):
                await queue.publish(written_by(9))
        for each in waiting:
            with pytest.raises(QueueError, match="purged in flight"):
                await each
        library.away = False
        assert await queue.publish(written_by(1)) == RECORDS

    over(work)


def test_a_fatal_error_in_a_report_alone_replaces_the_producer(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "out of order", fatal=True)
        library.reports.append(lambda report, message: report(fatal, message))
        with pytest.raises(QueueError, match="out of order"):
            await queue.publish(publication(b"there"))
        assert await queue.publish(publication(b"next")) == RECORDS + 1

    over(work)


def test_a_sender_replaces_a_producer_before_its_epochs_are_used_up(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a record that timed out, librdkafka takes a new epoch. After the last epoch it begins at 0."""
    monkeypatch.setattr(sender_module, "FAILURES_MAX", 3)
    made = list[object]()

    def counted(*arguments: Any) -> Any:
        made.append(producer_of(*arguments))
        return made[-1]

    monkeypatch.setattr(sender_module, "producer_of", counted)

    async def work(queue: KafkaQueue) -> None:
        for failures, producers in ((2, 1), (1, 2), (2, 2), (1, 3)):
            for _ in range(failures):
                library.reports.append(refused(KafkaError._MSG_TIMED_OUT))
                with pytest.raises(QueueError):
                    await queue.publish(publication(b"late"))
            assert len(made) == producers
        assert await queue.publish(publication(b"next")) >= RECORDS

    over(work)


def test_a_report_that_comes_after_the_publish_has_failed_changes_nothing(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(queue: KafkaQueue) -> None:
        held = hold(library, 1)
        waiting = asyncio.create_task(queue.publish(written_by(1)))
        await until(lambda: len(held) == 1)
        refuse(library, FATAL)
        with pytest.raises(QueueError):
            await queue.publish(written_by(2))
        with pytest.raises(QueueError, match="gave no delivery report"):
            await waiting
        held[0][0](None, held[0][1])
        assert await queue.publish(written_by(1)) == RECORDS + 1

    over(work)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# ---- connections and the close ------------------------------------------------------------------------


def test_a_stored_pointer_proves_that_kafka_lets_memq_in(library: Library) -> None:
    async def work() -> None:
        died: list[BaseException] = []
        tasks = TaskOwner(died.append, EventLog(SystemClock()))
        settings, errors = kafka_settings("kafka://localhost", {}), LastErrors()
        admin = KafkaAdmin(settings, errors)
        sender = Sender(settings, admin, tasks)
        denied = KafkaError(KafkaError._AUTHENTICATION, "invalid password")
        errors.note(denied)
        assert await sender.send(TOPIC, publication(b"there")) == RECORDS
        errors.note(denied)
        assert errors.denial("asking Kafka") is None
        await sender.close()
        await admin.close()
        await tasks.stop()
        assert died == []

    asyncio.run(work())


def test_records_without_an_answer_are_purged_at_the_close_and_those_that_wait_are_not_passed_on(
    library: Library,
) -> None:
    """They would reach the log after the close."""
    purging, purge = threading.Event(), threading.Event()

    def hold_up() -> None:
        purging.set()
        purge.wait(30)

    async def work(queue: KafkaQueue) -> None:
        await queue.publish(written_by(0))  # the thread has begun
        library.away, library.before_purge = True, hold_up
        produced = refuse(library)
        first, second = (asyncio.create_task(queue.publish(written_by(1))) for _ in range(2))
        await until(lambda: len(produced) == 1)
        closing = asyncio.create_task(queue.close())
        await until(purging.is_set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done(), "its report may come"
        purge.set()
        await closing
        with pytest.raises(QueueError, match="purged in flight"):
            await first
        with pytest.raises(ClosedError):
            await second
        assert produced == [(TOPIC, 0)]

    over(work)
