"""Small objects become large ones in S3, and their pointers leave Kafka: consumers see no difference."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import memq
from memq.compaction.compaction import manifest_of
from memq.compaction.plan import CompactionRule
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3 import open_store
from memq.topic import Topic, read_partitions
from memq_localstack.servers import S3Server, Server
from tests.compaction import CLUSTER, all_records, parts_on
from tests.integration.kafka import kafka_queue
from tests.integration.retained_batches import BATCHES, HANG_S, QUICK, old_batches, send
from tests.processes import BrokerProcess

RULE = CompactionRule(age_ms=10 * 60_000, object_bytes=2_500, rest=True)


async def compact(folder: Path, kafka: Server, s3: S3Server, topic: Topic) -> tuple[int, int, int]:
    """Compact the topic; return how many objects that made, and how far the compacted part and the queue go."""
    runtime = Runtime()
    config = tomllib.loads((folder / "memq.toml").read_text())
    queue = kafka_queue(kafka.address, prefix=f"{folder.name}.")
    keys = {name: (value, "the test") for name, value in config.get("s3", {}).items()}
    store = open_store(config["store"], runtime, keys)
    try:
        parts = parts_on(queue, store, runtime, CLUSTER)
        (partition,) = read_partitions(topic)
        done = await parts.compact(partition, topic.settings, RULE)
        manifest = await manifest_of(parts.files, partition)
        span = await queue.span(partition)
        assert span.begin == manifest.next
        return len(done), manifest.next, span.end
    finally:
        await queue.close()
        await store.close()


def read_group(broker: BrokerProcess, batches: int) -> list[memq.Position]:
    """Read so many batches as a group, and commit them."""
    found: list[memq.Position] = []
    with memq.Consumer(broker.address, "aged", group="report", auto_commit=False) as consumer:
        for _ in range(batches):
            batch = consumer.poll(HANG_S)
            assert batch is not None
            found.append(batch.first)
            consumer.commit(batch)
    return found


def test_consumers_read_on_across_the_seam(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with old_batches(tmp_path, zookeeper, kafka, reads_s3) as broker:
        with memq.Admin(broker.address) as admin:
            topic = admin.alter_topic("aged", settings=QUICK)
        send(broker, "aged", 1)
        before = all_records(broker.address, "aged")
        assert len(before) == BATCHES + 1
        first = read_group(broker, 2)
        objects, compacted, end = asyncio.run(compact(tmp_path, kafka, reads_s3, topic))
        assert objects > 1
        assert 2 < compacted < end
        assert all_records(broker.address, "aged") == before
        rest = read_group(broker, BATCHES - 1)
        assert [*first, *rest] == [seen.position for seen in before]
