"""Calls of the Kafka queue that are in flight at its close end, with an error that says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification import Publication
from memq.notification.kafka import librdkafka as kafka_library
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.settings import Names, kafka_settings
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition
from tests.brokers import until
from tests.contract.queues import check_close_ends_a_wait
from tests.librdkafka import Library, Log, Message, Report, use

PARTITION = ReadPartition("clicks", "0a" * 16, 0)
TOPIC = Names("memq.").kafka_topic(PARTITION)


@pytest.mark.parametrize("steps", [*range(12), 50])
@pytest.mark.parametrize("followed", [False, True])
def test_a_wait_ends_with_the_close_of_its_queue(
    monkeypatch: pytest.MonkeyPatch, steps: int, *, followed: bool
) -> None:
    """It lasted for its whole time, was cancelled, or failed with an AssertionError."""

    async def work() -> None:
        use(Library({TOPIC: [Log()]}), monkeypatch)
        queue = KafkaQueue(kafka_settings("kafka://localhost", {}), Runtime())
        await check_close_ends_a_wait(queue, steps, followed=followed)

    asyncio.run(work())


CALLS: dict[str, Callable[[KafkaQueue], Coroutine[Any, Any, object]]] = {
    "span": lambda queue: queue.span(PARTITION),
    "read": lambda queue: queue.read(PARTITION, 0, 1 << 20),
    "seek": lambda queue: queue.seek_time(PARTITION, 1),
    "trim": lambda queue: queue.trim(PARTITION, 1),
    "create": lambda queue: queue.create([PARTITION], 1_000),
    "publish": lambda queue: queue.publish(Publication(PARTITION, 0, 1, 1, b"pointer")),
}


@pytest.mark.parametrize("steps", [*range(12), 50])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_flight_at_the_close_answers_or_raises_an_error_of_memq(
    monkeypatch: pytest.MonkeyPatch, call: str, steps: int
) -> None:
    """It was cancelled, or failed with an AssertionError."""

    async def work() -> None:
        log = Log()
        log.append(1, b"first")
        use(Library({TOPIC: [log]}), monkeypatch)
        queue = KafkaQueue(kafka_settings("kafka://localhost", {}), Runtime())
        calling = asyncio.create_task(CALLS[call](queue))
        for _ in range(steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await queue.close()
            with suppress(MemqError):
                await calling

    asyncio.run(work())


def test_publishes_end_with_the_close_also_if_librdkafka_hangs_or_another_one_was_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one was passed to librdkafka when the first one failed by the close: no report of it ever came."""

    async def work() -> None:
        library = Library({TOPIC: [Log()]})
        held = threading.Event()

        def hang(deliver: Report, message: Message) -> None:
            held.wait()

        library.reports.append(hang)
        use(library, monkeypatch)
        monkeypatch.setattr(kafka_library, "CLOSE_S", 0.1)
        queue = KafkaQueue(kafka_settings("kafka://localhost", {}), Runtime())
        publication = Publication(PARTITION, 0, 1, 1, b"pointer")
        publishes = [asyncio.create_task(queue.publish(publication)) for _ in range(3)]
        try:
            await until(lambda: not library.reports)
            await queue.close()
            async with asyncio.timeout(30):
                found = await asyncio.gather(*publishes, return_exceptions=True)
        finally:
            held.set()
        assert [type(each) for each in found] == [QueueError, ClosedError, ClosedError]

    asyncio.run(work())
    for thread in threading.enumerate():
        if thread.name.startswith("memq-kafka"):
            thread.join(30)
