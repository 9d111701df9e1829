"""A topic as brokers leave it: a SQLite queue with its pointers, and a folder with its objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.format.blocks.header import parse_header, scope_of
from memq.format.key import object_key
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Publication
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import ReadPartition, Topic
from tests.unit.audited import TOPIC, packed
from tests.unit.blocks import NOW_MS, Record, build, seal

Answer = TypeVar("Answer")
STALE_MS = 30_000


def block(
    rows: Sequence[Record | bytes],
    *,
    producer: int = 1,
    first: int = 0,
    partition: int = 0,
    now_ms: int = NOW_MS,
    topic: Topic = TOPIC,
) -> bytes:
    """Return a block of records; a record that is bytes has this value and nothing else."""
    builder = build([(row, None, (), None, None) if isinstance(row, bytes) else row for row in rows])
    scope = scope_of(topic.id_bytes, partition)
    return bytes(seal(builder, producer_id=producer, first_sequence=first, scope=scope, now_ms=now_ms).data)


class StoredTopic:
    """Topic `clicks` in a folder. Each call opens the queue and closes it again."""

    def __init__(self, folder: Path, *, partitions: int = 1, topic: Topic = TOPIC) -> None:
        self._file = folder / "queue.sqlite"
        self.objects = folder / "objects"
        self.objects.mkdir(exist_ok=True)
        self.topic = topic
        self.logs = [ReadPartition(topic.name, topic.id, number) for number in range(partitions)]
        self._batches = 0
        self.ask(lambda queue: queue.create(self.logs, STALE_MS))

    @property
    def options(self) -> dict[str, str]:
        """The options that read it without a broker."""
        return {"topics": self.topic.name, "queue": f"sqlite:{self._file}", "store": self.objects.as_uri()}

    def ask(self, question: Callable[[SqliteQueue], Awaitable[Answer]]) -> Answer:
        """Ask the queue."""

        async def work() -> Answer:
            queue = SqliteQueue(self._file, SystemClock())
            try:
                return await question(queue)
            finally:
                await queue.close()

        return asyncio.run(work())

    def publish(self, body: bytes, *, partition: int = 0, time_ms: int = NOW_MS) -> int:
        """Publish any bytes as a pointer; return its offset."""
        return self.ask(lambda queue: queue.publish(Publication(self.logs[partition], 0, 1, time_ms, body)))

    def write(
        self,
        *blocks: bytes,
        partition: int = 0,
        time_ms: int = NOW_MS,
        change: Callable[[Pointer], Pointer] = lambda pointer: pointer,
        harm: Callable[[bytes], bytes] = lambda body: body,
        **fields: Any,
    ) -> str:
        """Store a batch and publish its pointer after `change`; return the key of its object, stored after `harm`."""
        headers = [parse_header(data) for data in blocks]
        runs = [(header.producer_id, header.first_sequence, header.next_sequence) for header in headers]
        facts = {"partition": partition, "topic": self.topic.name, "topic_id": self.topic.id, "sealed_ms": time_ms}
        pointer, body = packed(runs, blocks, **{**facts, "batch_sequence": self._batches, **fields})
        key = object_key("memq", self.topic.name, self.topic.id, partition, 1, self._batches, NOW_MS)
        named = replace(pointer, locations=(replace(pointer.locations[0], key=key),))
        self._batches += 1
        self.put(key, harm(body))
        self.publish(encode_pointer(change(named)), partition=partition, time_ms=time_ms)
        return key

    def put(self, key: str, body: bytes) -> None:
        """Store an object."""

        async def work() -> None:
            store = FilesystemHandler(self.objects, self.objects)
            await store.put(key, [body], crc32c(body))
            await store.close()

        asyncio.run(work())

    def cut(self, end: int, *, partition: int = 0) -> None:
        """Lose the pointers from an offset on, as an unclean election of Kafka does: the log is made again without."""
        log = self.logs[partition]
        kept = self.ask(lambda queue: queue.read(log, 0, 1 << 30))[:end]
        self.ask(lambda queue: queue.drop([log]))
        self.ask(lambda queue: queue.create([log], STALE_MS))
        for entry in kept:
            self.publish(entry.body, partition=partition, time_ms=entry.time_ms)

    def trim(self, before: int, *, partition: int = 0) -> None:
        """Remove the pointers below an offset, as retention does."""
        self.ask(lambda queue: queue.trim(self.logs[partition], before))
