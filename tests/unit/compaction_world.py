"""A topic in memory that is compacted and swept, with readers, kills and false answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.broker.sweep.sweep import Sweep
from memq.compaction.plan import CompactionRule
from memq.compaction.reader import CompactedLogReader
from memq.errors import (
    DeniedError,
)
from memq.format.blocks.header import check_block, scope_of
from memq.format.compaction_manifest import (
    CompactionManifest,
    PartRef,
)
from memq.format.key import (
    compaction_prefix,
    is_large_object,
    object_key,
)
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index, open_object
from memq.format.pointer import Location, NamedProducer, Pointer, ProducerRanges, decode_pointer, encode_pointer
from memq.governor import Assignment
from memq.notification import Entry, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.storage_handlers import Buffer, ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic, Totals, equal_slots, read_partitions, writer_id
from tests.compaction import DAY_MS, SWEEP_AGE_MS, CompactionParts, parts_on
from tests.contract.manual_clock import ManualClock
from tests.unit.blocks import build, seal

TOPIC = Topic(name="clicks", id="00112233445566778899aabbccddeeff", created_ms=0, partitions=equal_slots(1))
(PARTITION,) = read_partitions(TOPIC)
CLUSTER, STORE = "memq", "main"
COMPACTION_PREFIX = compaction_prefix(CLUSTER, TOPIC.name, TOPIC.id)
OLD, YOUNG = 24, 4
WRITER = "nightly"
NAMED = (NamedProducer(producer=writer_id(WRITER), epoch=0, last_sequence=1, batch_id="7", manifest=5, pieces=1),)
RULE = CompactionRule(age_ms=DAY_MS, object_bytes=2_500, rest=True)


class KilledError(Exception):
    """The process is no more."""


class Steps:
    """Counts what changes something; at the step `fatal` the process dies, before the change or after it."""

    def __init__(self) -> None:
        self.done = 0
        self.fatal = -1

    def step(self) -> None:
        self.done += 1
        if self.done == self.fatal:
            raise KilledError


class KillingStore(MemoryHandler):
    """`putting` is called with each key before its put."""

    def __init__(self, clock: ManualClock, steps: Steps) -> None:
        super().__init__(clock)
        self._steps = steps
        self.reads = 0
        self.putting: Callable[[str], Awaitable[None]] = nothing
        self.denied = False

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        if self.denied:
            raise DeniedError("s3:ListBucket is missing")
        async for entry in super().list(prefix):
            yield entry

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await self.putting(key)
        self._steps.step()
        await super().put(key, buffers, checksum)
        self._steps.step()

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads += 1
        return await super().get_range(key, offset, length)


class KillingQueue(MemoryQueue):
    def __init__(self, clock: ManualClock, steps: Steps) -> None:
        super().__init__(clock)
        self._steps = steps

    async def trim(self, partition: ReadPartition, before: int) -> None:
        self._steps.step()
        await super().trim(partition, before)
        self._steps.step()


async def nothing(key: str) -> None: ...


class World:
    """A topic with old and young batches, and what a reader must find in it: entries, pointers and bytes."""

    def __init__(self) -> None:
        self.clock, self.steps = ManualClock(), Steps()
        self.store, self.queue = KillingStore(self.clock, self.steps), KillingQueue(self.clock, self.steps)
        self.runtime = Runtime(self.clock, random.Random(5))
        self.expected: list[tuple[Entry, Pointer, bytes]] = []
        self.totals = Totals()

    @classmethod
    async def made(cls) -> World:
        world = cls()
        await world.queue.create([PARTITION], TOPIC.settings.stale_publish_ms)
        start_ms = world.clock.wall_ms() - 3 * DAY_MS
        await world.publish(start_ms, kind="opened")
        for number in range(OLD):
            await world.batch(number, start_ms + number * 60_000)
            if number == OLD // 3:
                await world.publish(start_ms + number * 60_000, kind="closed")
        for number in range(YOUNG):
            await world.batch(OLD + number, world.clock.wall_ms() - 1_000)
        return world

    async def batch(self, number: int, time_ms: int) -> None:
        rows = [(b"%d-%d" % (number, row) * 20, None, (), None, None) for row in range(3)]
        scope = scope_of(TOPIC.id_bytes, 0)
        blocks = [  # every other batch has two
            seal(build(part), producer_id=7, first_sequence=3 * number + first, scope=scope)
            for first, part in (((0, rows[:1]), (1, rows[1:])) if number % 2 else ((0, rows),))
        ]
        data = b"".join(bytes(block.data) for block in blocks)
        starts = [0, len(blocks[0].data)]
        listed = [BlockEntry.from_header(block.header, at) for block, at in zip(blocks, starts, strict=False)]
        key = object_key(CLUSTER, TOPIC.name, TOPIC.id, 0, 1, number, time_ms)
        size = len(data)
        entry = BatchEntry(0, size, time_ms, number, 3, 0, len(blocks), 0, 1)
        meta = ObjectMeta(cluster=CLUSTER, broker="b", topics=(ObjectTopic(TOPIC.name, TOPIC.id),), created_ms=time_ms)
        body = data + encode_index(meta, [entry], listed, size)
        await MemoryHandler.put(self.store, key, [body], crc32c(body))
        await self.publish(
            time_ms,
            kind="data",
            batch_sequence=number,
            locations=(Location(store=STORE, key=key, offset=0, length=size),),
            records=3,
            stored_bytes=size,
            producers=(ProducerRanges(7, ((3 * number, 3 * number + 3),)),),
            checksum=crc32c(data),
            sealed_ms=time_ms,
            named=NAMED if number == 3 else (),
            body=data,
        )
        self.totals = self.totals.plus(3, size)

    async def publish(self, time_ms: int, body: bytes = b"", **fields: object) -> None:
        name = {"cluster": CLUSTER, "topic": TOPIC.name, "topic_id": TOPIC.id, "partition": 0, "epoch": 1}
        pointer = Pointer(**name, totals=self.totals, **fields)  # type: ignore[arg-type]
        encoded = encode_pointer(pointer)
        offset = await self.queue.publish(Publication(PARTITION, 0, 1, time_ms, encoded))
        self.expected.append((Entry(offset, time_ms, encoded), pointer, body))

    def parts(self) -> CompactionParts:
        """Return the parts of a new process."""
        return parts_on(self.queue, self.store, self.runtime, CLUSTER)

    def reader(self) -> CompactedLogReader:
        return CompactedLogReader(self.queue, self.parts().files, self.clock)

    async def compact(self, rule: CompactionRule = RULE) -> int:
        return len(await self.parts().compact(PARTITION, TOPIC.settings, rule))

    async def sweep(self, later_ms: int = 2 * SWEEP_AGE_MS, age_ms: int = SWEEP_AGE_MS) -> int:
        """Sweep as a broker does `later_ms` from now, twice; return how many objects went."""
        self.clock.advance(later_ms)

        class Topics:
            async def topics(self) -> Sequence[Topic]:
                return [TOPIC]

            async def assignments(self) -> Sequence[Assignment]:
                return []

        gone = 0
        for _ in range(2):
            sweep = Sweep(CLUSTER, self.store, self.queue, Topics(), self.clock, pytest.fail, 0)
            gone += len([each async for each in sweep.run(age_ms, age_ms) if each.goes])
        return gone

    async def check(self, reader: CompactedLogReader | None = None, bytes_max: int = 1_000) -> None:
        """Read the whole log as a reader does, with every batch."""
        reader = reader or self.reader()
        assert await reader.span(PARTITION) == Span(0, len(self.expected))
        found: list[Entry] = []
        while entries := await reader.read(PARTITION, len(found), bytes_max):
            found += entries
        assert [(each.offset, each.time_ms) for each in found] == [
            (each.offset, each.time_ms) for each, _, _ in self.expected
        ]
        for entry, (_, pointer, body) in zip(found, self.expected, strict=True):
            await self.check_pointer(entry, pointer, body)

    async def check_pointer(self, entry: Entry, pointer: Pointer, body: bytes) -> None:
        now = decode_pointer(entry.body)
        assert now == replace(pointer, locations=now.locations)
        for location in now.locations:
            assert await MemoryHandler.get_range(self.store, location.key, location.offset, location.length) == body
            whole = await self.store.get(location.key)
            blocks = open_object(whole).blocks_in(location.offset, location.length)
            assert (blocks[0].first_sequence, blocks[-1].next_sequence) == pointer.producers[0].ranges[0]
            for block in blocks:
                header = check_block(memoryview(whole)[block.offset : block.offset + block.length])
                assert header.first_sequence == block.first_sequence

    def keys(self, *, large: bool) -> list[str]:
        objects = self.store.objects
        return [key for key in objects if (is_large_object(key) if large else not key.startswith(COMPACTION_PREFIX))]


def replace_rule(*, rest: bool, object_bytes: int = RULE.object_bytes) -> CompactionRule:
    return CompactionRule(RULE.age_ms, object_bytes, rest)


ID = "00112233445566778899aabbccddeeff"
NOW_MS = 1_700_000_000_000


def ref(first: int, next_: int, **fields: Any) -> PartRef:
    base = {"key": f"c/p{first}", "entries": next_ - first, "bytes": 100, "greatest_ms": NOW_MS, "created_ms": NOW_MS}
    return PartRef(**{**base, "first": first, "next": next_, "objects": (f"c/o{first}",), **fields})


def manifest(*parts: PartRef, **fields: Any) -> CompactionManifest:
    base = {"number": 3, "cluster": "c", "topic": "clicks", "topic_id": ID, "partition": 1}
    return CompactionManifest(**{**base, "next": parts[-1].next if parts else 0, "parts": parts, **fields})
