"""Injects faults into a topic of a running `memq dev`: removes a pointer, doubles a block, damages a block.

A broken disk, a bad restore or a bug might have these effects. So this works on the files and tables of memq.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
from awscrt.checksums import crc32c

from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header, scope_of
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, ProducerRanges, decode_pointer, encode_pointer
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification import Publication
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import ReadPartition, Topic

DOUBLED = 10  # records of the block that comes twice
OFFSET_END = 1 << 40


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: the records of one producer, half-open, and where."""

    what: str
    partition: int
    producer: int
    first: int
    next: int
    object: str

    def __str__(self) -> str:
        records = f"producer {self.producer:016x} sequences {self.first} to {self.next - 1}"
        return f"{self.what}: partition {self.partition} {records}, object {self.object}"


def inject_faults(data: Path, topic: Topic) -> list[Fault]:
    """Lose, damage and double records of the first partitions that have enough batches, one fault in each batch."""
    batches = [(part.partition, *found) for part in topic.partitions for found in _batches(data, topic, part.partition)]
    usable = [found for found in batches if len(found[2].producers) == 1 and len(found[2].producers[0].ranges) == 1]
    if len(usable) < 3:
        raise SystemExit(
            f"memq: error: {len(usable)} batches of one producer are too few to inject_faults (send more records)"
        )
    lost, damaged = usable[0], usable[len(usable) // 2]
    last = {partition: pointer for partition, _, pointer in usable}
    return [_lose(data, *lost), _damage(data, *damaged), asyncio.run(_double(data, topic, last[usable[-1][0]]))]


def _batches(data: Path, topic: Topic, partition: int) -> list[tuple[int, Pointer]]:
    """Return row id and pointer of each batch of a partition, in their order."""
    with closing(sqlite3.connect(data / "queue.sqlite")) as queue:
        (number,) = queue.execute(
            "SELECT id FROM partitions WHERE topic_id = ? AND partition = ? AND dropped = 0", (topic.id, partition)
        ).fetchone()
        first = number * OFFSET_END
        rows = queue.execute(
            "SELECT id, body FROM entries WHERE id >= ? AND id < ? ORDER BY id", (first, first + OFFSET_END)
        ).fetchall()
    pointers = [(row, decode_pointer(body)) for row, body in rows]
    return [(row, pointer) for row, pointer in pointers if pointer.kind == "data"]


def _told(what: str, pointer: Pointer, first: int, next_: int) -> Fault:
    (producer,) = pointer.producers
    return Fault(what, pointer.partition, producer.producer, first, next_, pointer.locations[0].key)


def _lose(data: Path, _: int, row: int, pointer: Pointer) -> Fault:
    """Take a pointer out of the queue: nobody finds its batch any more."""
    with closing(sqlite3.connect(data / "queue.sqlite", timeout=30)) as queue, queue:
        queue.execute("DELETE FROM entries WHERE id = ?", (row,))
    return _told("lost", pointer, *pointer.producers[0].ranges[0])


def _damage(data: Path, _: int, __: int, pointer: Pointer) -> Fault:
    """Flip a bit in the payload of a batch's first block."""
    location = pointer.locations[0]
    path = data / "objects" / location.key
    body = bytearray(path.read_bytes())
    header = parse_header(body, location.offset)
    body[location.offset + BLOCK_HEADER_BYTES + header.payload_length // 2] ^= 1
    path.write_bytes(body)
    return _told("corrupt", pointer, header.first_sequence, header.next_sequence)


async def _double(data: Path, topic: Topic, pointer: Pointer) -> Fault:
    """Publish a block of the last records of a batch and a new one: readers that know half of it deliver all of it."""
    (producer,) = pointer.producers
    end = producer.ranges[-1][1]
    builder = BlockBuilder()
    for sequence in range(end - DOUBLED, end + 1):
        builder.append(b'{"again": %d}' % sequence, b"again")
    sealed = builder.seal(
        producer_id=producer.producer,
        first_sequence=end - DOUBLED,
        scope=scope_of(topic.id_bytes, pointer.partition),
        now_ms=pointer.greatest_ms,
    )
    key = f"{pointer.locations[0].key}-again"
    body, made = _packed(topic, pointer, bytes(sealed.data), key)
    clock = SystemClock()
    store, queue = FilesystemHandler(data / "objects", data / "tmp"), SqliteQueue(data / "queue.sqlite", clock)
    try:
        await store.put(key, [body], crc32c(body))
        place = ReadPartition(topic.name, topic.id, pointer.partition)
        await queue.publish(Publication(place, pointer.partition, pointer.epoch, clock.wall_ms(), encode_pointer(made)))
    finally:
        await queue.close()
        await store.close()
    return _told("doubled", made, end - DOUBLED, end)


def _packed(topic: Topic, pointer: Pointer, block: bytes, key: str) -> tuple[bytes, Pointer]:
    """Return an object of one block, and its pointer: a later batch of the same epoch."""
    header = parse_header(block)
    number, location = (
        pointer.batch_sequence + 1,
        Location(store=pointer.locations[0].store, key=key, offset=0, length=len(block)),
    )
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
        locations=(location,),
        records=header.count,
        raw_bytes=header.raw_length,
        stored_bytes=len(block),
        least_ms=header.least_ms,
        greatest_ms=header.greatest_ms,
        totals=pointer.totals.plus(pointer.records, pointer.stored_bytes),
        adopted=(),
        skip=(),
        slots=(header.slot_first, header.slot_last),
        tag_bits=header.tag_bits,
        producers=(ProducerRanges(header.producer_id, ((header.first_sequence, header.next_sequence),)),),
        checksum=crc32c(block),
    )
    return body, made
