"""A topic on a data folder with old pointers, and the parts that compaction needs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import memq
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.compaction import compaction
from memq.compaction.compaction import BatchCopier, Copied, TrimmedQueue
from memq.compaction.plan import CompactionRule
from memq.compaction.reader import ManifestFiles
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from memq.runtime.sqlite_file import checksum
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import ReadPartition, Topic, TopicSettings, read_partitions

DAY_MS = 24 * 3_600_000
CLUSTER = "memq"
STORE = "main"
RULE = CompactionRule(age_ms=DAY_MS, object_bytes=8_192, rest=True)
SWEEP_AGE_MS = 3_600_000


def make_old(data: Path, topic: str, before: int, by_ms: int = 2 * DAY_MS) -> None:
    """Let the queue's entries of a topic below offset `before`, in each read partition, be older than they are."""
    with closing(sqlite3.connect(data / "queue.sqlite", timeout=60)) as file, file:
        for partition in log.partitions(file, topic):
            row = log.partition_row(file, partition)
            ids = (row.entry_id(row.begin), row.entry_id(before))
            found = file.execute("SELECT id, time_ms, time_max, body FROM entries WHERE id >= ? AND id < ?", ids)
            for number, time_ms, time_max, body in found.fetchall():
                older = (number, time_ms - by_ms, time_max - by_ms, body)
                file.execute(
                    "UPDATE entries SET time_ms = ?, time_max = ?, checksum = ? WHERE id = ?",
                    (*older[1:3], checksum("entries", older, row.identity), number),
                )


@dataclass(frozen=True, slots=True)
class CompactionParts:
    """The parts of one compactor."""

    queue: TrimmedQueue
    store: StorageHandler
    files: ManifestFiles
    copier: BatchCopier
    runtime: Runtime

    async def compact(
        self, partition: ReadPartition, settings: TopicSettings, rule: CompactionRule = RULE
    ) -> Sequence[Copied]:
        """Compact a read partition."""
        rounds = compaction.compact(
            self.queue,
            self.files,
            self.copier,
            partition,
            settings,
            rule,
            self.runtime.clock,
            partial(compaction.leave_queue, self.queue, self.files, partition),
            named_within_ms=SWEEP_AGE_MS // 2,
        )
        return [each async for copied in rounds for each in copied]


def parts_on(queue: TrimmedQueue, store: StorageHandler, runtime: Runtime, cluster: str = CLUSTER) -> CompactionParts:
    """Return the parts of a compactor on a queue and a store."""
    copier = BatchCopier(cluster, queue, {STORE: store}.__getitem__, (STORE, store), runtime)
    return CompactionParts(queue, store, ManifestFiles(cluster, store), copier, runtime)


@asynccontextmanager
async def folder_parts(data: Path) -> AsyncIterator[CompactionParts]:
    """Open the queue and the objects of a data folder, next to the broker that runs on it."""
    runtime = Runtime()
    queue = SqliteQueue(data / "queue.sqlite", runtime.clock)
    store = FilesystemHandler(data / "objects", data / "tmp")
    try:
        cluster = json.loads((data / "cluster.json").read_text())["id"]
        yield parts_on(queue, store, runtime, cluster)
    finally:
        await queue.close()
        await store.close()


async def compact_topic(parts: CompactionParts, topic: Topic, rule: CompactionRule = RULE) -> list[Copied]:
    """Compact all read partitions of a topic, one after another."""
    done: list[Copied] = []
    for partition in read_partitions(topic):
        done += await parts.compact(partition, topic.settings, rule)
    return done


@dataclass(frozen=True, slots=True)
class Seen:
    """One record as a consumer gets it."""

    position: memq.Position
    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    tag: str | None


def seen_by(consumer: memq.Consumer) -> list[Seen]:
    """Return all records up to the consumer's end."""
    return [
        Seen(
            record.position,
            record.value,
            record.key,
            tuple(record.headers),
            record.timestamp_ms,
            record.tag,
        )
        for batch in consumer
        for record in batch
    ]


def all_records(address: str, topic: str, start: object = "beginning", read: ReadMode = "auto") -> list[Seen]:
    """Return all records from a start to the end."""
    with memq.Consumer(address, [topic], start=start, end="end", read=read) as consumer:  # type: ignore[arg-type]
        return sorted(seen_by(consumer), key=lambda seen: seen.position)
