"""Faults injected into the stored data of a real cluster: objects in S3, pointers in Kafka.

Each says which records the live audit must name for it, and where.
"""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
from awscrt.checksums import crc32c

from memq.audit.finding import IN_GROUP, IN_OBJECT, IN_QUEUE
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header, scope_of
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index, open_object
from memq.format.pointer import Location, Pointer, ProducerRanges, decode_pointer, encode_pointer
from memq.format.ranges import RangeSet
from memq.notification import Publication
from memq.notification.kafka.queue import KafkaQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3 import open_store
from memq.storage_handlers.s3.handler import S3Handler
from memq.topic import Topic
from memq_localstack.servers import Server
from tests.integration.kafka import kafka_queue

BYTES_MAX = 1 << 20  # of pointers that are read at once
Wrong = tuple[str, str, str]  # kind, stage, group of a finding
Named = dict[tuple[str, str, str, int, str], RangeSet]  # the same, with partition and producer as findings print it


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a write partition, its place in the queue, and the blocks of its object."""

    offset: int
    pointer: Pointer
    blocks: tuple[BlockEntry, ...]


def note(named: Named, wrong: Wrong, partition: int, producer: int, first: int, next_: int) -> None:
    """Add records of a producer to what must be named."""
    named.setdefault((*wrong, partition, f"{producer:016x}"), RangeSet()).add(first, next_)


class StoredFaults:
    """Does faults to a topic. `named` is what must be named for them; `groups` are those that will read it."""

    def __init__(self, topic: Topic, queue: KafkaQueue, store: S3Handler, groups: Iterable[str], draw: Random) -> None:
        self.named: Named = {}
        self._topic = topic
        self._queue = queue
        self._store = store
        self._groups = tuple(groups)
        self._draw = draw

    async def batches(self) -> list[Batch]:
        """Return batches in a random order: those whose records lie in them alone, but for the last of a producer."""
        found: list[Batch] = []
        for part in self._topic.partitions:
            pointers = await self._pointers(part.partition)
            reach = _reach(pointers)
            for offset, pointer in pointers:
                others = [each for at, each in pointers if at != offset]
                if pointer.skip or any(_overlap(pointer, other) for other in others):
                    continue
                if all(each.ranges[-1][1] < reach[each.producer] for each in pointer.producers):
                    found.append(Batch(offset, pointer, await self._blocks(pointer)))
        self._draw.shuffle(found)
        return found

    # ---- at the store ------------------------------------------------------------------------------

    async def lose(self, batch: Batch) -> None:
        """Delete an object."""
        await self._store.delete(batch.pointer.locations[0].key)
        self._corrupt(batch, batch.blocks)

    async def cut(self, batch: Batch) -> None:
        """Let an object end within its batch: its index is gone, too."""
        location = batch.pointer.locations[0]
        length = self._draw.randrange(1, location.length)
        body = await self._store.get(location.key)
        await self._put(location.key, body[: location.offset + length])
        end = location.offset + length
        self._corrupt(batch, [block for block in batch.blocks if block.offset + block.length > end])

    async def flip(self, batch: Batch) -> None:
        """Flip a bit of a block, of its header or its payload."""
        key, block = batch.pointer.locations[0].key, self._draw.choice(batch.blocks)
        body = bytearray(await self._store.get(key))
        body[block.offset + self._draw.randrange(block.length)] ^= 1 << self._draw.randrange(8)
        await self._put(key, bytes(body))
        self._corrupt(batch, [block])

    async def _put(self, key: str, body: bytes) -> None:
        await self._store.delete(key)  # objects are written once
        await self._store.put(key, [body], crc32c(body))

    def _corrupt(self, batch: Batch, blocks: Iterable[BlockEntry]) -> None:
        for block in blocks:
            place = (batch.pointer.partition, block.producer_id)
            note(self.named, ("corrupt", IN_OBJECT, ""), *place, block.first_sequence, block.next_sequence)

    # ---- by the queue ------------------------------------------------------------------------------

    async def copy(self, batch: Batch) -> None:
        """Publish a pointer again: readers drop the copy, and nothing is named."""
        await self._publish(batch.pointer)

    async def overlap(self, partition: int) -> None:
        """Publish the last record of a write partition again, in a block with a new one: readers get it twice."""
        pointers = await self._pointers(partition)
        producer, reach = self._draw.choice(sorted(_reach(pointers).items()))
        first, next_ = reach - 1, reach + 1
        last = next(
            each
            for _, each in pointers
            if any(known.producer == producer and known.ranges[-1][1] == reach for known in each.producers)
        )
        builder = BlockBuilder()
        for sequence in range(first, next_):
            builder.append(b"again %d" % sequence, b"key")
        sealed = builder.seal(
            producer_id=producer,
            first_sequence=first,
            scope=scope_of(self._topic.id_bytes, partition),
            now_ms=last.greatest_ms,
        )
        body, pointer = _packed(self._topic, last, bytes(sealed.data))
        await self._store.put(pointer.locations[0].key, [body], crc32c(body))
        await self._publish(pointer)
        for stage, group in ((IN_QUEUE, ""), *((IN_GROUP, group) for group in self._groups)):
            note(self.named, ("doubled", stage, group), partition, producer, first, first + 1)

    async def _blocks(self, pointer: Pointer) -> tuple[BlockEntry, ...]:
        location = pointer.locations[0]
        return open_object(await self._store.get(location.key)).blocks_in(location.offset, location.length)

    async def _pointers(self, partition: int) -> list[tuple[int, Pointer]]:
        """Return the pointers of all batches of a write partition, with their offsets."""
        place = self._topic.read_partition_of(partition)
        offset, end = 0, (await self._queue.span(place)).end
        found: list[tuple[int, Pointer]] = []
        while offset < end:
            entries = await self._queue.read(place, offset, BYTES_MAX)
            found += [(entry.offset, decode_pointer(entry.body)) for entry in entries]
            offset = entries[-1].offset + 1
        return [(offset, each) for offset, each in found if each.kind == "data" and each.partition == partition]

    async def _publish(self, pointer: Pointer) -> None:
        place = self._topic.read_partition_of(pointer.partition)
        now_ms = SystemClock().wall_ms()
        await self._queue.publish(Publication(place, pointer.partition, pointer.epoch, now_ms, encode_pointer(pointer)))


@asynccontextmanager
async def stored_faults_of(
    folder: Path, kafka: Server, topic: Topic, groups: Iterable[str], draw: Random
) -> AsyncIterator[StoredFaults]:
    """Open queue and store of the cluster whose settings lie in `folder`."""
    config = tomllib.loads((folder / "memq.toml").read_text())
    keys = {name: (value, "the test") for name, value in config["s3"].items()}
    queue = kafka_queue(kafka.address, prefix=f"{folder.name}.")
    store = open_store(config["store"], Runtime(), keys)
    try:
        yield StoredFaults(topic, queue, store, groups, draw)
    finally:
        await queue.close()
        await store.close()


def _reach(pointers: Iterable[tuple[int, Pointer]]) -> dict[int, int]:
    """Return by producer one above its last sequence."""
    reach: dict[int, int] = {}
    for _, pointer in pointers:
        for known in pointer.producers:
            reach[known.producer] = max(reach.get(known.producer, 0), known.ranges[-1][1])
    return reach


def _overlap(one: Pointer, other: Pointer) -> bool:
    there = {known.producer: RangeSet(known.ranges) for known in other.producers}
    return any(
        there[known.producer].overlaps(*piece)
        for known in one.producers
        if known.producer in there
        for piece in known.ranges
    )


def _packed(topic: Topic, pointer: Pointer, block: bytes) -> tuple[bytes, Pointer]:
    """Return an object of one block, and its pointer: one of a broker that nobody knows."""
    header = parse_header(block)
    key, number = f"{pointer.locations[0].key}-again", pointer.batch_sequence + 1_000
    batch = BatchEntry(0, len(block), header.least_ms, number, header.count, 0, 1, pointer.partition, pointer.epoch)
    meta = ObjectMeta(
        cluster=pointer.cluster,
        broker="nobody",
        topics=(ObjectTopic(topic.name, topic.id),),
        created_ms=header.least_ms,
    )
    body = block + encode_index(meta, [batch], [BlockEntry.from_header(header, 0)], len(block))
    made = msgspec.structs.replace(
        pointer,
        batch_sequence=number,
        locations=(Location(store=pointer.locations[0].store, key=key, offset=0, length=len(block)),),
        records=header.count,
        raw_bytes=header.raw_length,
        stored_bytes=len(block),
        least_ms=header.least_ms,
        greatest_ms=header.greatest_ms,
        adopted=(),
        slots=(header.slot_first, header.slot_last),
        tag_bits=header.tag_bits,
        producers=(ProducerRanges(header.producer_id, ((header.first_sequence, header.next_sequence),)),),
        checksum=crc32c(block),
    )
    return body, made
