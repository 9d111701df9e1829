"""Each fault that memq is tested with shows in a metric and in an event: the table of docs/events.md, row by row."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c
from prometheus_client import CollectorRegistry

import memq
from memq.broker.broker import Broker
from memq.broker.ingest.quotas import ClientLimits, RatePerSecond
from memq.broker.metrics import StoreCollector
from memq.broker.process import metrics_of
from memq.broker.spool.files import SpoolFiles, sizes_in
from memq.errors import UnreachableError
from memq.format.spool import HEAD
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.observe.metrics import METRICS
from memq.protocol.frames import AckLevel
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from memq.topic import ReadPartition, TopicSettings
from tests.brokers import BareClient, block_of, running_broker, until, write_frame
from tests.component.cluster_rig import rig
from tests.component.faulty_brokers import (
    BUDGET,
    ON_DISK,
    QUICK,
    GatedDisk,
    gate_of,
    gated_broker,
    left_behind,
    overload,
    replayed,
    seized,
)
from tests.s3_faults import Fault, faulty_s3, place_of

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
TIMEOUT_S = 60.0
Values = Mapping[str, float]


def values_of(registry: CollectorRegistry) -> Values:
    """Return each exported line, summed over its labels."""
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def values_at(broker: Broker) -> Values:
    return values_of(metrics_of(broker))


# ---- faults ------------------------------------------------------------------------------------


def s3(method: str, fault: Fault) -> Callable[[Path], Coroutine[Any, Any, Values]]:
    """The next request of a method meets a fault."""

    async def scenario(folder: Path) -> Values:
        async with faulty_s3() as server:
            store = place_of(server, request_timeout_ms=1_000).open("f")
            body = bytes(1_000)
            try:
                server.plan(method, fault)
                await store.put("k/1", [body], crc32c(body))
                assert await store.get("k/1") == body
            finally:
                await store.close()
            registry = CollectorRegistry()
            registry.register(StoreCollector({"main": store}))
            return values_of(registry)

    return scenario


def failing(call: str) -> Callable[[Path], Coroutine[Any, Any, Values]]:
    """A call of the broker's store or queue fails once."""

    async def scenario(folder: Path) -> Values:
        return await asyncio.to_thread(_sent_in_spite_of, call)

    return scenario


def _sent_in_spite_of(call: str) -> Values:
    made: list[Broker] = []

    class Noted(Broker):
        """Notes that it is made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("memq.testing.cluster.Broker", Noted)
        cluster = stack.enter_context(Cluster())
        with memq.Producer(cluster.address) as producer:
            producer.send("clicks", b"0").result(TIMEOUT_S)  # the partition is open, then
            cluster.fail(call)
            producer.send("clicks", b"1").result(TIMEOUT_S)
        return values_at(made[0])


def reading(prepare: Callable[[Cluster], None], what: Callable[[memq.Consumer], float]) -> Any:
    """A consumer meets a fault, and counts it itself."""

    async def scenario(folder: Path) -> Values:
        return await asyncio.to_thread(_read_in_spite_of, prepare, what)

    return scenario


def _read_in_spite_of(prepare: Callable[[Cluster], None], what: Callable[[memq.Consumer], float]) -> Values:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send("clicks", b"0").result(TIMEOUT_S)
        prepare(cluster)
        with memq.Consumer(cluster.address, "clicks", end="end", read="broker", on_damaged="skip") as consumer:
            for _ in consumer:
                pass
            return {"stats()": what(consumer)}


def damage_it(cluster: Cluster) -> None:
    (record,) = cluster.records("clicks")
    cluster.damage(record.position)


async def send_one(broker: Broker) -> None:
    async with memq.aio.Producer(broker.address) as producer:
        await (await producer.send("clicks", b"0"))


async def damaged_block(folder: Path) -> Values:
    async with running_broker() as broker:
        client = await BareClient.connect(broker)
        topic = await client.topic()
        await client.open(topic)
        block = bytearray(block_of(topic, 0, [b"value" * 100]))
        block[-1] ^= 1
        client.write(write_frame(bytes(block)))
        await client.error()
        await client.close()
        return values_at(broker)


async def two_contents(folder: Path) -> Values:
    async with running_broker() as broker:
        client = await BareClient.connect(broker)
        topic = await client.topic()
        await client.open(topic)
        client.write(write_frame(block_of(topic, 0, [b"one"])))
        await client.frame()
        await client.send_again(topic, block_of(topic, 0, [b"two"]))
        await client.close()
        return values_at(broker)


async def foreign_protocol(folder: Path) -> Values:
    async with running_broker() as broker:
        client = await BareClient.connect(broker, hello=False)
        client.write(b"GET / HTTP/1.1\r\n\r\n")
        await client.end()
        await client.close()
        return values_at(broker)


async def too_many_connections(folder: Path) -> Values:
    async with running_broker(connections_per_address_max=1) as broker:
        clients = [await BareClient.connect(broker), await BareClient.connect(broker, hello=False)]
        await clients[1].end()
        for client in clients:
            await client.close()
        return values_at(broker)


async def over_a_limit(folder: Path) -> Values:
    async with running_broker(ClientLimits(named={"loader": RatePerSecond("hard", 1, 0)})) as broker:
        producer = memq.aio.Producer(broker.address, client_id="loader")
        try:
            while True:
                await (await producer.send("clicks", bytes(10_000)))
        except memq.MemqError:
            return values_at(broker)
        finally:
            await producer.close()


async def another_owner(folder: Path) -> Values:
    async with seized(AckLevel.ONE) as found:
        found.gate.set()
        await found.one.drain()
        return values_at(found.one)


async def dead_broker(folder: Path) -> Values:
    async with rig() as cluster:
        one = await cluster.start("one")
        await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
        two = await cluster.start("two")
        await one.close()
        await send_one(two)
        return values_at(two)


class ClockBehind(SystemClock):
    """A wall clock that is an hour behind that of the queue."""

    def wall_ms(self) -> int:
        return super().wall_ms() - 3_600_000


async def wrong_clock(folder: Path) -> Values:
    async with rig() as cluster:
        cluster.queue = MemoryQueue(SystemClock(), refuse="age")
        cluster.runtime = replace(cluster.runtime, clock=ClockBehind())
        one = await cluster.start("one")
        topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
        client = await BareClient.connect(one)
        opening = asyncio.create_task(client.open(topic))
        await until(lambda: one.services.counters.opening_retries > 0)
        values = values_at(one)
        opening.cancel()
        await asyncio.wait((opening,))
        await client.close()
        return values


async def failing_spool(folder: Path) -> Values:
    async with rig() as cluster:
        disk = GatedDisk(folder)
        one = await cluster.start("one", spool=disk)
        gate = gate_of(cluster)
        topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
        client = await BareClient.connect(one)
        await client.open(topic, acks=AckLevel.ONE)
        disk.fails = True
        client.write(write_frame(block_of(topic, 0, [b"a"])))
        await client.frame()
        gate.set()
        await client.close()
        return values_at(one)


async def spool_left_behind(folder: Path) -> Values:
    async with rig() as cluster:
        topic = await left_behind(cluster, folder)
        again = await cluster.start("one", spool=SpoolFiles(folder))
        await replayed(cluster, again, topic, folder)
        return values_at(again)


async def damaged_spool(folder: Path) -> Values:
    async with rig() as cluster:
        topic = await left_behind(cluster, folder)
        (name,) = sizes_in(folder)
        body = bytearray((folder / name).read_bytes())
        body[HEAD.size + 60] ^= 1
        (folder / name).write_bytes(body)
        again = await cluster.start("one", spool=SpoolFiles(folder))
        await replayed(cluster, again, topic, folder)
        return values_at(again)


async def stalled_store(blocks: int, size: int, holds: Callable[[Broker], bool], settings: TopicSettings) -> Values:
    """The store hangs, and more comes than there is room for, until that shows."""
    async with gated_broker() as (broker, store):
        client = await BareClient.connect(broker)
        await broker.partitions.create("clicks", 1, settings, exist_ok=False)
        topic = await client.topic()
        await client.open(topic)
        sending = await overload(client, topic, blocks, size)
        await until(lambda: holds(broker))
        values = values_at(broker)
        store.gate.set()
        sending.cancel()
        await asyncio.wait((sending,))
        await client.close()
        return values


async def full_ring(folder: Path) -> Values:
    small = TopicSettings(ring_slots=2, batch_blocks_max=1)
    return await stalled_store(20, 100, lambda broker: broker.services.counters.throttled_blocks > 0, small)


async def memory_used_up(folder: Path) -> Values:
    return await stalled_store(4 * BUDGET // 60_000, 60_000, lambda broker: broker.intake.starved, TopicSettings())


async def coordinator_away(folder: Path) -> Values:
    async with rig() as cluster:
        one = await cluster.start("one")

        async def away() -> None:
            raise UnreachableError("the coordinator does not answer, as planned")

        one.services.coordinator.topics = away  # type: ignore[method-assign,assignment]  # it does not come back
        await cluster.start("two")  # a change of which it learns
        await until(lambda: one.services.counters.coordinator_failures > 0)
        return values_at(one)


async def damaged_pointer(folder: Path) -> Values:
    async with rig() as cluster:
        one = await cluster.start("one")
        topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
        now_ms = cluster.runtime.clock.wall_ms()
        await cluster.queue.publish(Publication(ReadPartition("clicks", topic.id, 0), 0, 0, now_ms, b"no pointer"))
        await send_one(one)  # the opening reads what is there
        return values_at(one)


@dataclass(frozen=True)
class Shown:
    """One row: how the fault is brought about, and where it shows."""

    fault: str
    metric: str
    event: str
    scenario: Callable[[Path], Coroutine[Any, Any, Values]]


STATS = "stats()"
RETRIES, LOST_ANSWERS = "memq_store_retries_total", "memq_store_lost_answers_total"
SLOW_DOWN = Fault("answer", 503, "SlowDown")
STALL_DONE = s3("PUT", Fault("stall-done"))
UNREAD = reading(lambda cluster: cluster.fail("queue.read"), lambda consumer: consumer.stats().retries)
DAMAGED = reading(damage_it, lambda consumer: consumer.stats().counts.damaged_blocks)
REJECTED = "memq_broker_rejected_connections_total"
TABLE = (
    Shown("the store asks for a lower rate", "memq_store_slow_downs_total", "s3-retry", s3("PUT", SLOW_DOWN)),
    Shown("the store fails", RETRIES, "s3-retry", s3("PUT", Fault("answer", 500, "InternalError"))),
    Shown("the store cuts the connection", RETRIES, "s3-retry", s3("PUT", Fault("close"))),
    Shown("the store does not answer", "memq_store_timeouts_total", "s3-retry", s3("PUT", Fault("stall"))),
    Shown("the store's answer is lost", LOST_ANSWERS, "s3-answer-lost", s3("PUT", Fault("lost"))),
    Shown("the store executes the request and does not answer", LOST_ANSWERS, "s3-answer-lost", STALL_DONE),
    Shown("an object comes back damaged", "memq_store_damaged_total", "s3-retry", s3("GET", Fault("changed"))),
    Shown("an object comes back cut off", RETRIES, "s3-retry", s3("GET", Fault("cut"))),
    Shown("a batch can't be stored", "memq_broker_store_retries_total", "store-retry", failing("store.put")),
    Shown("a pointer can't be published", "memq_broker_publish_retries_total", "queue-retry", failing("queue.publish")),
    Shown("pointers can't be read", STATS, "consumer.retry", UNREAD),
    Shown("a stored block is damaged", STATS, "consumer.damage", DAMAGED),
    Shown("a pointer is damaged", "memq_broker_damaged_pointers_total", "pointer-damaged", damaged_pointer),
    Shown("two blocks have one identity", "memq_broker_conflicting_blocks_total", "identity-conflict", two_contents),
    Shown("a block is damaged on its way", "memq_broker_refused_blocks_total", "block-refused", damaged_block),
    Shown("a peer uses another protocol", REJECTED, "connection-refused", foreign_protocol),
    Shown(
        "an address has too many connections",
        "memq_broker_turned_away_connections_total",
        "connection-refused",
        too_many_connections,
    ),
    Shown("a client is over its limit", "memq_broker_over_limit_total", "over-limit", over_a_limit),
    Shown(
        "a broker was paused, and another one owns its partition", "memq_broker_fenced_total", "fenced", another_owner
    ),
    Shown("a broker dies", "memq_broker_openings_total", "assigned", dead_broker),
    Shown(
        "a broker's clock is off by more than the maximum delay of pointers",
        "memq_broker_opening_retries_total",
        "opening-retry",
        wrong_clock,
    ),
    Shown("a ring is full", "memq_broker_throttled_blocks_total", "throttled", full_ring),
    Shown("the memory budget is used up", "memq_broker_reading_paused", "reading-paused", memory_used_up),
    Shown(
        "a broker dies with blocks in its spool", "memq_broker_replayed_blocks_total", "spool-replay", spool_left_behind
    ),
    Shown("a segment of a spool is damaged", "memq_broker_spool_damages_total", "spool-damaged", damaged_spool),
    Shown("the disk of the spool is full", "memq_broker_spool_refused_blocks_total", "spool-failed", failing_spool),
    Shown(
        "the coordinator does not answer", "memq_broker_coordinator_failures_total", "governor-failed", coordinator_away
    ),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fault.replace(" ", "-"))
def test_the_fault_shows(row: Shown, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memq")

    async def run() -> Values:
        async with asyncio.timeout(TIMEOUT_S):
            return await row.scenario(tmp_path)

    values = asyncio.run(run())
    assert values.get(row.metric, 0) > 0
    assert row.event in {getattr(record, "event", "") for record in caplog.records}


def test_the_table_of_the_page_is_this_one() -> None:
    rows = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(row.fault, row.metric, row.event) for row in TABLE]
    exported = {name for metric in METRICS.values() for name in metric.exported} | {STATS}
    assert {row.metric for row in TABLE} <= exported
