"""What a restore reads of large and shared objects: their batches, and what it says of those that it can't read."""

from __future__ import annotations

import asyncio

from memq.broker.restore.cold_parts import cold_batches, places_below
from memq.compaction.reader import ColdFiles
from memq.format.key import cold_prefix
from memq.topic import read_partitions
from tests.unit.bare_cluster import CLUSTER, Cluster, indexed, newer, topic_of

TOPIC = topic_of("clicks", 2)
OTHER = topic_of("views")


def test_the_batches_below_a_prefix_are_found_by_topic_and_unreadable_indexes_are_named() -> None:
    async def work() -> None:
        cluster, moved = Cluster(), list[int]()
        await cluster.put("p/a", indexed(TOPIC, 1, epoch=4, number=2))
        await cluster.put("p/b", newer(indexed(TOPIC, 0)))
        await cluster.put("p/c", indexed(OTHER, 0)[:-5])
        await cluster.put("p/d", indexed(OTHER, 0))
        await cluster.put("q/e", indexed(TOPIC, 0))
        findings: list[tuple[str, str]] = []
        found = await places_below(cluster.store, "p/", findings, moved.append)
        assert {topic_id: [place.key for place in places] for topic_id, places in found.items()} == {
            TOPIC.id: ["p/a"],
            OTHER.id: ["p/d"],
        }
        assert [key for key, _ in findings] == ["p/b", "p/c"]
        assert all(text for _, text in findings)
        assert moved == [1, 1, 1, 1]

    asyncio.run(work())


def test_a_manifest_that_can_not_be_read_is_named_and_the_others_count() -> None:
    async def work() -> None:
        cluster = Cluster()
        files = ColdFiles(CLUSTER, cluster.store)
        first, _ = read_partitions(TOPIC)
        prefix = f"{cold_prefix(CLUSTER, TOPIC.name, TOPIC.id)}objects/"
        await cluster.put(f"{prefix}a", indexed(TOPIC, 1))
        await cluster.put(files.manifest_key(first, 1), b"no manifest")
        batches = await cold_batches(CLUSTER, cluster.store, TOPIC)
        assert [place.key for place in batches.places] == [f"{prefix}a"]
        ((key, text),) = batches.findings
        assert key == files.manifest_key(first, 0)
        assert text.startswith("cold part 0: ")

    asyncio.run(work())
