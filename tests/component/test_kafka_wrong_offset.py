"""Kafka answers a publish with the known end, and another broker's pointer lies there: no reader skips it silently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from memq.broker.broker import Broker
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import PositionLostError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.settings import kafka_settings
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import TopicSettings
from tests.brokers import run
from tests.librdkafka import KafkaPartition, Library, Message, Report, use

WAIT_S = 20.0


@dataclass
class Rig:
    """A broker on a Kafka in memory, and the place of its topic there."""

    library: Library
    place: KafkaPartition
    broker: Broker


@asynccontextmanager
async def started(broker: Broker) -> AsyncIterator[Broker]:
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
        await broker.services.queue.close()


@asynccontextmanager
async def late_pointer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Rig, bytes]]:
    """Run a broker; yield also a pointer of the owner before it, which is not in the log, of the record b"late"."""
    library, runtime = Library(), Runtime()
    use(library, monkeypatch)
    store, cluster = MemoryHandler(runtime.clock), MemoryCluster()

    def make() -> Broker:
        queue = KafkaQueue(kafka_settings("kafka://localhost", {}), runtime)
        settings = BrokerSettings(port=0, audit=False, broker_id="b-1")
        return Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(cluster))

    async with started(make()) as broker:
        await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        await send(broker, b"late")
        name = next(name for name in library.topics if "clicks" in name)
    log = library.log((name, 0))
    late = next(record for record in log.records if b'"data"' in (record.value or b""))
    left = [record for record in log.records if record is not late]
    log.records, log.end = [replace(record, offset=number) for number, record in enumerate(left)], len(left)
    async with started(make()) as broker:
        yield Rig(library, (name, 0), broker), late.value or b""


async def send(broker: Broker, *values: bytes) -> None:
    """Send records, each in a batch of its own."""
    async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
        for value in values:
            await (await producer.send("clicks", value))


def lie(rig: Rig, body: bytes) -> None:
    """Let `body` land just before the next pointer, whose delivery report has the offset of `body`."""
    now_ms = rig.broker.services.runtime.clock.wall_ms()

    def land(call: str, subject: object) -> None:
        if call == "produce":
            rig.library.refuse = lambda call, subject: None
            rig.library.mute = True  # the broker receives none of the two before the report
            rig.library.log(rig.place).append(now_ms, body)

    def report(deliver: Report, message: Message) -> None:
        deliver(None, Message(rig.place, (message.offset() or 0) - 1, None, None))

    rig.library.refuse = land
    rig.library.reports.append(report)


async def take(consumer: AsyncConsumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        batch = await consumer.poll(WAIT_S)
        assert batch is not None, f"only {found} came"
        found += [bytes(record.value or b"") for record in batch]
    return found


@pytest.mark.parametrize("more", [True, False], ids=["published on", "silent"])
def test_a_reader_at_the_tail_does_not_skip_the_pointer_at_the_wrong_offset(
    monkeypatch: pytest.MonkeyPatch, *, more: bool
) -> None:
    """It read the broker's own pointer twice, and never the one that came before it."""

    async def work() -> None:
        async with late_pointer(monkeypatch) as (rig, body):
            await send(rig.broker, b"0")
            async with AsyncConsumer(rig.broker.address, "clicks", audit=False) as consumer:
                assert await take(consumer, 1) == [b"0"]
                async with AsyncProducer(rig.broker.address, audit=False, codec="none") as producer:
                    lie(rig, body)
                    wrong = (await (await producer.send("clicks", b"1"))).position
                    assert wrong is not None
                    assert await take(consumer, 1) == [b"1"], "from the broker's memory"
                    rig.library.mute = False
                    if more:
                        await (await producer.send("clicks", b"2"))
                    with pytest.raises(PositionLostError):
                        await take(consumer, 1)
                    await consumer.seek("clicks", 0, wrong)
                    assert await take(consumer, 2 + more) == [b"late", b"1", b"2"][: 2 + more]

    run(work())
