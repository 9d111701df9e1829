"""Admin requests to Kafka: the check of a connection, failures with their cause, groups, offsets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from memq.errors import DeniedError, NotFoundError, QueueError
from memq.notification.kafka.admin import POLL_S, KafkaAdmin
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.settings import kafka_settings
from tests.brokers import until
from tests.librdkafka import Library, Log, use
from tests.skipping_loop import run_skipping, skip

TOPIC = "memq.clicks"
LOGIN = KafkaError(KafkaError._AUTHENTICATION, "Invalid password")
TIMED_OUT = KafkaError(KafkaError._TIMED_OUT, "timed out")
NO_CONTROLLER = KafkaError(KafkaError._TIMED_OUT, "Failed while waiting for controller: timed out")
Work = Callable[[KafkaAdmin], Awaitable[None]]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library with one topic of three records."""
    found = Library({TOPIC: [Log()]})
    for number in range(3):
        found.log((TOPIC, 0)).append(1_000 + number, b"%d" % number)
    use(found, monkeypatch)
    return found


def over(work: Work, run: Callable[[Any], object] = run_skipping) -> None:
    async def whole() -> None:
        admin = KafkaAdmin(kafka_settings("kafka://k:1", {}), LastErrors())
        await work(admin)
        await admin.close()

    run(whole())


# ---- the check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED])
def test_any_answer_about_a_topic_proves_the_connection_also_a_late_one(library: Library, error: int | None) -> None:
    library.described = Future()

    async def work(admin: KafkaAdmin) -> None:
        assert library.described is not None
        checking = asyncio.create_task(admin.check())
        await skip(5 * POLL_S)
        assert not checking.done()
        if error is None:
            library.described.set_result(None)
        else:
            library.described.set_exception(KafkaException(KafkaError(error)))
        await checking
        admin.errors.note(LOGIN)
        assert admin.errors.denial("asking Kafka") is None, "it has let memq in before"

    over(work)


def test_a_refused_login_is_raised_before_the_request_times_out(library: Library) -> None:
    library.described = Future()

    async def work(admin: KafkaAdmin) -> None:
        checking = asyncio.create_task(admin.check())
        await skip(5 * POLL_S)
        assert not checking.done()
        library.connection_errors.append(LOGIN)
        with pytest.raises(DeniedError, match="asking Kafka at k:1: invalid password"):
            await checking
        await skip(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    over(work)


def test_a_kafka_that_does_not_answer_is_an_outage_with_its_cause(library: Library) -> None:
    library.refuse = lambda call, subject: TIMED_OUT

    async def work(admin: KafkaAdmin) -> None:
        library.connection_errors.append(KafkaError(KafkaError._TRANSPORT, "Connection refused"))
        with pytest.raises(QueueError, match=r"asking Kafka at k:1: timed out \(connection refused\)"):
            await admin.check()

    over(work)


# ---- answers and failures -----------------------------------------------------------------------------


def test_an_answer_proves_that_kafka_lets_memq_in(library: Library) -> None:
    async def work(admin: KafkaAdmin) -> None:
        await admin.list_offsets({(TOPIC, 0): "end"})
        admin.errors.note(LOGIN)
        assert admin.errors.denial("asking Kafka") is None

    over(work)


def test_a_blocking_call_that_fails_raises_the_error_of_memq(library: Library) -> None:
    library.refuse = lambda call, subject: TIMED_OUT

    async def work(admin: KafkaAdmin) -> None:
        library.connection_errors.append(KafkaError(KafkaError._TRANSPORT, "Connection refused"))
        with pytest.raises(QueueError, match=r"listing Kafka's topics: timed out \(connection refused\)"):
            await admin.partition_counts()

    over(work, asyncio.run)


def test_calls_that_block_have_one_thread(library: Library) -> None:
    held = threading.Event()
    library.refuse = lambda call, subject: None if held.wait(30) else TIMED_OUT

    async def work(admin: KafkaAdmin) -> None:
        asked = [asyncio.create_task(admin.partition_counts()) for _ in range(3)]
        await asyncio.sleep(0)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("memq-kafka-lists")]
        held.set()
        assert await asyncio.gather(*asked) == [{TOPIC: 1}] * 3
        assert len(threads) == 1

    over(work, asyncio.run)


def test_topics_are_listed_with_their_partitions(library: Library) -> None:
    library.topics["other"] = [Log(), Log()]

    async def work(admin: KafkaAdmin) -> None:
        assert await admin.partition_counts() == {TOPIC: 1, "other": 2}

    over(work, asyncio.run)


@pytest.mark.parametrize("listed", [False, True])
def test_a_request_without_a_controller_fails_and_one_of_them_asks_for_the_brokers(
    library: Library, *, listed: bool
) -> None:
    """Librdkafka itself would ask only half a minute later."""
    asked: list[str] = []
    held = threading.Event()

    def refuse(call: str, subject: object) -> KafkaError | None:
        if call != "list_topics":
            return NO_CONTROLLER
        asked.append(call)
        held.wait(30)
        return None if listed else TIMED_OUT

    library.refuse = refuse

    async def work(admin: KafkaAdmin) -> None:
        def ask() -> asyncio.Task[Any]:
            return asyncio.create_task(admin.ask(admin.describe_topics([TOPIC])[TOPIC], "describing"))

        first = ask()
        try:
            await until(lambda: len(asked) == 1)
            with pytest.raises(QueueError, match="describing: failed while waiting for controller"):
                await ask()
            assert not first.done()
        finally:
            held.set()
        with pytest.raises(QueueError, match="describing: failed while waiting for controller"):
            await first
        assert len(asked) == 1
        library.refuse = lambda call, subject: TIMED_OUT if call != "list_topics" else asked.append(call)
        with pytest.raises(QueueError):
            await ask()
        assert len(asked) == 1, "the time-out of another request says nothing about the controller"

    over(work, asyncio.run)


# ---- groups and offsets -------------------------------------------------------------------------------


def test_all_groups_are_listed_or_an_error_is_raised(library: Library) -> None:
    library.groups = ["memq.a", "b"]

    async def work(admin: KafkaAdmin) -> None:
        assert await admin.list_groups() == ["memq.a", "b"]
        library.group_errors = [KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, "loading")]
        with pytest.raises(QueueError, match="listing Kafka's groups: loading"):
            await admin.list_groups()
        library.group_errors = []
        library.refuse = lambda call, subject: KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED)
        with pytest.raises(DeniedError, match="listing Kafka's groups"):
            await admin.list_groups()

    over(work)


def test_offsets_are_asked_for_by_end_begin_and_time(library: Library) -> None:
    library.log((TOPIC, 0)).begin = 1
    place = (TOPIC, 0)

    async def work(admin: KafkaAdmin) -> None:
        for asked, offset in (("end", 3), ("begin", 1), (1_002, 2), (2_000, -1)):
            assert await admin.list_offsets({place: asked}) == {place: offset}
        library.refuse = lambda call, subject: KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        found = (await admin.list_offsets({place: "end"}))[place]
        assert isinstance(found, NotFoundError)
        assert "asking for offsets of partition 0 of Kafka topic 'memq.clicks'" in str(found)

    over(work)


def test_the_end_of_committed_records_lies_before_open_transactions(library: Library) -> None:
    library.log((TOPIC, 0)).stable = 2
    place = (TOPIC, 0)

    async def work(admin: KafkaAdmin) -> None:
        assert await admin.list_offsets({place: "end"}) == {place: 3}
        assert await admin.list_offsets({place: "end"}, committed=True) == {place: 2}

    over(work)
