"""An outage of Kafka, by SIGSTOP and SIGKILL, under a producing broker and a reading group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from memq.aio import Admin, Consumer, Producer
from memq.broker.broker import Broker
from memq.errors import MemqError, QueueError
from memq.notification.kafka.queue import KafkaQueue
from memq_localstack.servers import Server
from tests.contract.queues import HANG_S, part
from tests.integration.kafka import kafka_queue
from tests.integration.queued_broker import broker_on
from tests.soak import report, seconds

PARTITIONS = 4
SHORT: dict[str, Any] = {"request_timeout_ms": 1_000, "publish_timeout_ms": 1_500}
PATIENCE_MS = 900_000  # of producers, more than the longest outage
TOPIC = {"stale_publish_ms": 2_000, "dedup_window_ms": PATIENCE_MS + 50_000, "delivery_timeout_ms": PATIENCE_MS}


async def produce(producer: Producer, until: asyncio.Event, acked: list[bytes]) -> None:
    """Send numbered records one after another, all acked, until asked to stop."""
    number = 0
    while not until.is_set():
        value = b"%d" % number
        delivery = await producer.send("clicks", value, partition=number % PARTITIONS)
        await delivery
        acked.append(value)
        number += 1


async def consume(address: str, found: list[bytes]) -> None:
    options: dict[str, Any] = {"auto_commit": False, "session_timeout_ms": 1000 * HANG_S}  # it stays a member meanwhile
    async with Consumer(address, ["clicks"], group="report", **options) as consumer:
        async for batch in consumer:
            found += [value for value in batch.values() if value is not None]
            await consumer.commit(batch)


async def away(broker: Broker, queue: KafkaQueue, acked: list[bytes], away_s: float) -> int:
    """Have a producer press on while Kafka is away; return how many records were acked before.

    Nothing is acked meanwhile, and the broker stays in its memory.
    """
    clock = broker.services.runtime.clock
    held, until_s = len(acked), clock.monotonic() + away_s
    pressing = asyncio.create_task(press(broker.address))
    most_bytes = 0
    while clock.monotonic() < until_s or not broker.services.counters.received_records:
        await queue.wait({}, 0.05)
        most_bytes = max(most_bytes, broker.services.pool.leased_bytes)
    pressing.cancel()
    await asyncio.wait([pressing])
    assert len(acked) == held, "a record was acked that Kafka can't have"
    assert most_bytes <= broker.services.pool.budget_bytes
    report(f"Kafka away for {away_s:g} s: {most_bytes:,} bytes held at most")
    return held


async def press(address: str) -> None:
    """Send to another topic as much as it takes: nobody reads it, and nothing of it may be acked by mistake."""
    producer = Producer(address, acks="1", delivery_timeout_ms=PATIENCE_MS)
    try:
        while True:
            await producer.send("pressure", bytes(10_000))
    finally:
        with suppress(MemqError):  # what it still has can't be acked
            await producer.close(timeout=0)


async def made(admin: Admin, topic: str) -> None:
    """Create a topic: a Kafka that has just started takes longer than `SHORT` allows on a busy machine."""
    while True:
        with suppress(QueueError):
            await admin.create_topic(topic, partitions=PARTITIONS, settings=TOPIC, exist_ok=True)
            return


async def through(
    kafka: Server, trouble: Callable[[Server], None], mend: Callable[[Server], object], away_s: float
) -> None:
    queue = kafka_queue(kafka.address, **SHORT)
    try:
        async with broker_on(queue) as broker, Admin(broker.address) as admin:
            for topic in ("clicks", "pressure"):
                await made(admin, topic)
            acked: list[bytes] = []
            found: list[bytes] = []
            stop = asyncio.Event()
            producer = Producer(broker.address, acks="all", delivery_timeout_ms=PATIENCE_MS)
            try:
                sending = asyncio.create_task(produce(producer, stop, acked))
                reading = asyncio.create_task(consume(broker.address, found))
                while len(found) < 50:
                    await queue.wait({}, 0.01)
                try:
                    trouble(kafka)
                    before = broker.services.counters.publish_retries
                    while broker.services.counters.publish_retries == before:
                        await queue.wait({}, 0.01)
                    held = await away(broker, queue, acked, away_s)
                finally:  # else a failure waits at the producer's end, for as long as its delivery may take
                    await asyncio.to_thread(mend, kafka)
                clock = broker.services.runtime.clock
                back_s = clock.monotonic()
                while len(acked) == held:
                    await queue.wait({}, 0.01)
                first_s = clock.monotonic() - back_s
                while len(acked) < held + 50:
                    await queue.wait({}, 0.01)
                report(f"Kafka is back: {first_s:.2f} s to an ack, {clock.monotonic() - back_s:.2f} s to 50, in turn")
                stop.set()
                await sending
                while len(found) < len(acked) and not reading.done():
                    await queue.wait({}, 0.01)
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
                await producer.close()
            finally:  # after a failure it would flush for `PATIENCE_MS`
                with suppress(MemqError):
                    await producer.close(timeout=0)
            assert sorted(found) == sorted(acked), "a record is lost or there twice"
    finally:
        await queue.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("memq-kafka")], "one is stuck"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("trouble", "mend", "away_s"),
    [(Server.pause, Server.resume, seconds(2, 60)), (Server.kill, Server.start, seconds(2, 300))],
    ids=["paused", "killed"],
)
def test_an_outage_is_ridden_out(
    kafka: Server, trouble: Callable[[Server], None], mend: Callable[[Server], object], away_s: float
) -> None:
    async def run() -> None:
        async with asyncio.timeout(2 * HANG_S + away_s):
            await through(kafka, trouble, mend, away_s)

    try:
        asyncio.run(run())
    except BaseException:
        report(f"Kafka's log ends with:\n{kafka.tail()}")
        raise
    finally:
        mend(kafka)


def test_ends_are_known_at_once_when_kafka_was_started_again(kafka: Server) -> None:
    """Kafka leads its partitions in a new epoch then, and the library asks in the old one for a while."""

    async def run() -> None:
        queue = kafka_queue(kafka.address)
        parts = [part(number) for number in range(PARTITIONS)]
        try:
            await queue.create(parts, 30_000)
            before = [await queue.span(each) for each in parts]
            kafka.kill()
            await asyncio.to_thread(kafka.restart)
            await queue.wait({}, 1.0)  # at once the library would still be about to connect, and learn it from that
            assert [await queue.span(each) for each in parts] == before
        finally:
            await queue.close()

    asyncio.run(run())
