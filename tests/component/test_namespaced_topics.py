"""Topics, groups, queues, pop groups and listeners with namespaces: from the first record to a sweep and a restore."""

from __future__ import annotations

import pytest

from memq.broker.restore.restore import Restorer
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.client.queue.queue import AsyncQueue
from memq.errors import InvalidNameError, NotFoundError
from memq.format.key import topics_prefix
from memq.governor.memory import MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig
from tests.sweeps import sweep_twice

SIMILAR = ("billing/invoices", "billing.invoices", "billing_invoices", "invoices", "billing")


async def send(address: str, topics: tuple[str, ...]) -> None:
    async with AsyncProducer(address, audit=False) as producer:
        for topic in topics:
            await (await producer.send(topic, topic))


async def values(address: str, topic: str, group: str | None = None) -> list[bytes | None]:
    async with AsyncConsumer(address, topic, group=group, end="end", audit=False) as consumer:
        return [value async for batch in consumer for value in batch.values()]


async def keys(cluster: Rig) -> list[str]:
    return [entry.key async for entry in cluster.store.list(topics_prefix("memq"))]


def test_topics_with_similar_names_keep_their_own_records_and_objects() -> None:
    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncAdmin(broker.address) as admin:
                for topic in SIMILAR:
                    await admin.create_topic(topic)
                await send(broker.address, SIMILAR)
                for topic in SIMILAR:
                    assert await values(broker.address, topic) == [topic.encode()]
                assert {topic.name for topic in await admin.topics()} == set(SIMILAR)
                await admin.delete_topic("billing/invoices")
                with pytest.raises(NotFoundError):
                    await admin.topic("billing/invoices")
                with pytest.raises(InvalidNameError, match="more than one '/'"):
                    await admin.create_topic("billing/invoices/2026")
            assert [key for key in await keys(cluster) if key.startswith("memq/topics/billing/-/invoices/")]
            assert await sweep_twice(broker.services, 0) != (0, 0)
            kept = await keys(cluster)
            assert not [key for key in kept if key.startswith("memq/topics/billing/-/")]
            assert len(kept) == len(SIMILAR) - 1
            for topic in SIMILAR[1:]:
                assert await values(broker.address, topic) == [topic.encode()]

    run(work())


def test_groups_queues_and_pop_groups_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            await send(broker.address, ("billing/invoices",) * 3)
            async with AsyncAdmin(broker.address) as admin, AsyncQueue(broker.address) as queue:
                assert len(await values(broker.address, "billing/invoices", "billing/reports")) == 3
                assert await values(broker.address, "billing/invoices", "billing/reports") == []
                assert await admin.groups() == ["billing/reports"]
                await admin.begin_pop("billing/invoices", "billing/pops")
                await queue.enqueue_many("billing/jobs", [b"1", b"2"])
                (item,) = await queue.dequeue("billing/jobs", wait=5)
                await queue.ack(item)
                (record,) = await queue.dequeue("billing/invoices@billing/pops", wait=5)
                assert record.payload == b"billing/invoices"
                assert await queue.dequeue("billing/none", wait=0.5) == [], "a snapshot is due meanwhile"
            await cluster.brokers[0].close()
            cluster.queue = MemoryQueue(cluster.runtime.clock)
            parts = ("memq", "main", cluster.store, cluster.queue, cluster.runtime.clock)
            found = await Restorer(*parts).restore_all(MemoryCoordinator(cluster.shared))
            assert not any(each.findings for each in found)
            restored = await cluster.start("b")
            assert await values(restored.address, "billing/invoices") == [b"billing/invoices"] * 3
            async with AsyncQueue(restored.address) as queue:
                counts = await queue.queues()
                assert (counts["billing/jobs"].ready, "jobs" in counts) == (1, False)

    run(work())
