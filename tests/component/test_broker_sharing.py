"""Small topics share objects: few PUTs, each batch by its own pointer, no named object is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from memq.audit.checks.object_reads import ReadObject
from memq.audit.collector import audit
from memq.audit.finding import Kind
from memq.broker.broker import Broker
from memq.broker.partition.batch import seal_batch
from memq.broker.partition.storing import SharedObjects
from memq.broker.restore.restore import Restorer
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import ObjectExistsError, StoreError
from memq.format.blocks.header import Buffer
from memq.format.key import shared_prefix
from memq.format.pointer import Location
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic
from tests.brokers import GatedStore, batch_pointers, run, running_broker
from tests.sweeps import sweep_twice
from tests.unit.sealed_batches import ORIGIN, filled_slot

TOPICS = [f"small-{number}" for number in range(30)]


class FailingStore(MemoryHandler):
    """Fails the first puts with the given errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(SystemClock())
        self.errors = list(errors)
        self.tried: list[str] = []

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.tried.append(key)
        if self.errors:
            raise self.errors.pop(0)
        await super().put(key, buffers, checksum)


async def make_topics(broker: Broker, names: Sequence[str] = TOPICS, **settings: Any) -> dict[str, Topic]:
    async with AsyncAdmin(broker.address) as admin:
        return {name: await admin.create_topic(name, settings={"shared_objects": True, **settings}) for name in names}


async def send_each(broker: Broker, names: Sequence[str] = TOPICS, text: str = "") -> None:
    """Send one record to each topic at about the same time, and wait until all are acked."""
    async with AsyncProducer(broker.address, linger_ms=1) as producer:
        deliveries = [await producer.send(name, f"{text}of {name}".encode()) for name in names]
        await asyncio.gather(*deliveries)


async def read_all(broker: Broker, names: Sequence[str] = TOPICS) -> dict[str, list[bytes | None]]:
    found: dict[str, list[bytes | None]] = {name: [] for name in names}
    async with AsyncConsumer(broker.address, list(names), end="end", read="broker", on_damaged="skip") as consumer:
        async for batch in consumer:
            found[batch.topic] += batch.values()
    return found


def expected(*texts: str) -> dict[str, list[bytes]]:
    return {name: [f"{text}of {name}".encode() for text in texts] for name in TOPICS}


def test_many_small_topics_make_few_objects_and_lose_nothing() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=1_000) as broker:  # as long as a slow machine takes to send them
            topics = await make_topics(broker)
            await send_each(broker, text="1 ")
            await send_each(broker, text="2 ")
            store = broker.services.store
            keys = [entry.key async for entry in store.list()]
            assert all(key.startswith(shared_prefix(broker.services.settings.cluster)) for key in keys)
            assert len(keys) <= len(TOPICS) // 5
            assert broker.services.counters.stored_objects == len(keys)
            assert await read_all(broker) == expected("1 ", "2 ")
            counters = broker.services.counters
            assert counters.read_hot_requests + counters.poll_batches >= len(TOPICS), "served from memory"
            broker.services.recent_batches.clear()
            assert await read_all(broker) == expected("1 ", "2 ")
            for topic in topics.values():
                verdict = await audit(topic, broker.services.queue, store_reader(broker), SystemClock().wall_ms())
                assert not [finding for finding in verdict.findings if finding.kind.value in ("lost", "corrupt")]
                named = [
                    place
                    for pointer in await batch_pointers(broker.services.queue, topic)
                    for place in pointer.locations
                ]
                assert sum(place.length for place in named) < 1_000, "a reader fetches its own bytes alone"

    run(work())


def store_reader(broker: Broker) -> ReadObject:
    async def read(location: Location, *, whole: bool) -> Buffer:
        store = broker.services.stores[location.store]
        if whole:
            return await store.get(location.key)
        return await store.get_range(location.key, location.offset, location.length)

    return read


def test_a_store_that_fails_is_tried_again_and_a_taken_start_epoch_left_behind() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=20) as broker:
            store = FailingStore(StoreError("not now"), ObjectExistsError("taken"))
            broker.services.stores["main"] = store
            await make_topics(broker, TOPICS[:1])
            await send_each(broker, TOPICS[:1])
            assert await read_all(broker, TOPICS[:1]) == {TOPICS[0]: [f"of {TOPICS[0]}".encode()]}
            first, again, other = store.tried
            assert first == again, "the same object is tried again"
            assert other.rsplit("/", 1)[-1].split("-")[2] > first.rsplit("/", 1)[-1].split("-")[2]

    run(work())


def test_slabs_stay_leased_until_the_put_ended_when_nobody_waits_for_it_any_more() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=1) as broker:
            store = GatedStore()
            broker.services.stores["main"] = store
            sharing = SharedObjects(broker.services, lambda error: None)
            slots = [filled_slot([7])[0], filled_slot([8])[0]]
            fenced, other = (asyncio.create_task(sharing.store(seal_batch(slot, ORIGIN), slot.slabs)) for slot in slots)
            await store.begun.wait()
            slab = slots[0].slabs[0]
            held = slab.references
            fenced.cancel()
            await asyncio.wait([fenced])
            assert slab.references == held, "the store still reads it"
            store.gate.set()
            await other
            assert slab.references == held - 1
            await sharing.stop()

    run(work())


def test_a_shared_object_stays_while_one_topic_names_it() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=100, audit=False) as broker:  # reports share objects, too
            await make_topics(broker)
            await send_each(broker)
            store = broker.services.store
            before = [entry.key async for entry in store.list()]
            async with AsyncAdmin(broker.address) as admin:
                for name in TOPICS[1:]:
                    await admin.delete_topic(name)
            await sweep_twice(broker.services, -1)
            assert await read_all(broker, TOPICS[:1]) == {TOPICS[0]: [f"of {TOPICS[0]}".encode()]}
            async with AsyncAdmin(broker.address) as admin:
                await admin.delete_topic(TOPICS[0])
            await sweep_twice(broker.services, -1)
            assert before
            assert [entry.key async for entry in store.list()] == []

    run(work())


def test_a_damaged_block_of_a_shared_object_hides_nothing_behind_it() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=500) as broker:
            topics = await make_topics(
                broker, TOPICS[:2], seal_when_idle=False, batch_blocks_max=3, batch_age_ms_max=60_000
            )
            await asyncio.gather(*(send_each(broker, TOPICS[:2], f"{number} ") for number in range(3)))
            services = broker.services
            named = {name: (await batch_pointers(services.queue, topics[name]))[0] for name in TOPICS[:2]}
            name = max(named, key=lambda name: named[name].locations[0].index)  # not the object's last
            topic, place = topics[name], named[name].locations[0]
            assert isinstance(services.store, MemoryHandler)
            body = bytearray(services.store.objects[place.key])
            body[place.offset + 12] ^= 0xFF  # in the length of the first block
            services.store.objects[place.key] = bytes(body)
            services.recent_batches.clear()
            found = await read_all(broker, TOPICS[:2])
            assert {each: len(values) for each, values in found.items()} == dict.fromkeys(named, 3) | {name: 2}
            verdict = await audit(topic, services.queue, store_reader(broker), SystemClock().wall_ms())
            assert verdict.finding(Kind.CORRUPT).count == 1

            queue = MemoryQueue(SystemClock())
            restorer = Restorer(services.settings.cluster, "main", services.store, queue, services.runtime.clock)
            report = await restorer.restore(topic)
            assert (report.pointers, report.damaged_blocks, len(report.findings)) == (1, 1, 1)
            assert [one.locations for one in await batch_pointers(queue, topic)] == [(place,)]

    run(work())


def test_pointers_into_shared_objects_are_restored() -> None:
    async def work() -> None:
        async with running_broker(shared_age_ms_max=100) as broker:
            topics = await make_topics(broker)
            await send_each(broker, text="1 ")
            await send_each(broker, text="2 ")
            services, queue = broker.services, MemoryQueue(SystemClock())
            restorer = Restorer(services.settings.cluster, "main", services.store, queue, services.runtime.clock)
            for topic in topics.values():
                report = await restorer.restore(topic)
                assert (report.pointers, report.findings) == (2, [])
                assert await batch_pointers(queue, topic) == await batch_pointers(services.queue, topic)
            coordinator = MemoryCoordinator(MemoryCluster())
            first, *rest = (topics[name] for name in TOPICS)
            await coordinator.create_topic(first)
            _, *lost = await restorer.restore_all(coordinator)
            assert {each.topic: (each.objects, len(each.findings)) for each in lost} == {
                topic.name: (2, 1) for topic in rest
            }

    run(work())
