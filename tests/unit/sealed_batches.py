"""Blocks and batches as brokers seal them: slots of a ring, and shared objects."""

from __future__ import annotations

from typing import Any, cast

from memq.broker.ingest.slabs import SlabPool
from memq.broker.partition.append import AckSink, Partition, ProducerState, Stream
from memq.broker.partition.batch import (
    Origin,
)
from memq.broker.partition.ring import BatchSlot, Ring, RingLimits, RingStream
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header, scope_of
from memq.format.object import (
    BatchEntry,
    BlockEntry,
    ObjectMeta,
    ObjectTopic,
    encode_index,
)
from memq.protocol.frames import AckLevel
from memq.topic import Topic, TopicSettings, equal_slots
from tests.unit.peers import append_to

SLOT_TOPIC = Topic(name="clicks", id="0" * 31 + "1", created_ms=1, partitions=equal_slots(1))
ORIGIN = Origin("c", "b", "main", SLOT_TOPIC, 0, 3)


def filled_slot(producers: list[int], cell_bytes: int = 7) -> tuple[BatchSlot, bytes]:
    """A sealed slot with one block of each producer in turn, and the bytes of all blocks."""
    slab = SlabPool(1 << 21, 1 << 20).lease(1 << 20)
    assert slab is not None
    ring = Ring(RingLimits(4, 1 << 21, 1000, 1.0, True, 2))
    streams: dict[int, tuple[Stream, int]] = {}
    at, body = 0, b""
    for number, producer in enumerate(producers):
        nobody = cast(AckSink, None)
        new = RingStream(producer, nobody, cast(Partition, None), ProducerState(producer), AckLevel.ALL, 0)
        stream, first = streams.get(producer, (new, 0))
        data, count = _block(producer, first, number, cell_bytes)
        at += 16  # where a frame's prefix would be
        slab.view[at : at + len(data)] = data
        assert append_to(ring, stream, first, count, slab, at, at + len(data), 0.0)
        streams[producer] = (stream, first + count)
        at, body = at + len(data), body + data
    slot = ring.open
    assert slot is not None
    slot.sealed_ms = 1_700_000_000_000
    ring.seal()
    return slot, body


def _block(producer: int, first: int, number: int, cell_bytes: int) -> tuple[bytes, int]:
    builder = BlockBuilder()
    for cell in range(number % 3 + 1):
        builder.append(b"v" * (number * cell_bytes + cell), None, (), 1_000 + number, f"tag{number % 5}")
    sealed = builder.seal(producer_id=producer, first_sequence=first, scope=1, now_ms=5, codec="none")
    return bytes(sealed.data), builder.count


TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, partitions=equal_slots(2), settings=TopicSettings())
OTHER = Topic(name="views", id="0b" * 16, created_ms=0, partitions=equal_slots(1), settings=TopicSettings())


def block(first: int, values: list[bytes], producer: int = 1, *, topic: Topic = TOPIC, **fields: Any) -> bytes:
    """A block that compresses well, so that its raw and stored bytes differ."""
    builder = BlockBuilder()
    partition, tag = fields.pop("partition", 0), fields.pop("tag", None)
    for value in values:
        builder.append(value * 100, key=b"k", tag=tag)
    times = {"now_ms": 1_000 + first, "first_sequence": first, "producer_id": producer, **fields}
    return bytes(builder.seal(scope=scope_of(topic.id_bytes, partition), **times).data)


def joined(*batches: tuple[BatchEntry, list[bytes]]) -> bytes:
    """An object with batches of the two topics, one after another; what entries say of bytes and blocks is set here."""
    body, entries, blocks = b"", list[BatchEntry](), list[BlockEntry]()
    for entry, found in batches:
        first, offset = len(blocks), len(body)
        for each in found:
            blocks.append(BlockEntry.from_header(parse_header(each), len(body)))
            body += each
        records = sum(each.count for each in blocks[first:])
        length = len(body) - offset
        entries.append(
            entry._replace(offset=offset, length=length, records=records, first_block=first, blocks=len(found))
        )
    topics = (ObjectTopic(TOPIC.name, TOPIC.id), ObjectTopic(OTHER.name, OTHER.id))
    meta = ObjectMeta(cluster="c-1", broker="b-1", topics=topics, created_ms=1)
    return body + encode_index(meta, entries, blocks, len(body))


def batch(sequence: int, *, partition: int = 0, epoch: int = 4, topic: int = 0) -> BatchEntry:
    return BatchEntry(0, 0, 2_000 + sequence, sequence, 0, 0, 0, partition, epoch, topic)


ONE = [
    block(0, [b"a", b"b"], tag="x", slot_range=(5, 9)),
    block(7, [b"c"], 2, producer_epoch=3, slot_range=(2, 60_000)),
]
TWO = [block(2, [b"d"], partition=1)]
SHARED = joined((batch(6), ONE), (batch(8, partition=1), TWO), (batch(6, topic=1), [block(0, [b"e"], topic=OTHER)]))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
