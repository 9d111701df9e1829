"""Shared parts of the audit's tests: a topic, and pointers and objects of it as a broker writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from awscrt.checksums import crc32c

from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import BlockHeader, parse_header, scope_of
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, ProducerRanges
from memq.format.ranges import RangeSet
from memq.topic import Topic, Totals, equal_slots
from tests.unit.blocks import NOW_MS

TOPIC = Topic(name="clicks", id="0123456789abcdef" * 2, created_ms=NOW_MS, partitions=equal_slots(1))
KEY = "memq/topics/clicks/01234567/aa/2026-01-01/00/00000-0000000001-0000000000000000"
Run = tuple[int, int, int]  # producer, first sequence, one above the last


def data_pointer(runs: Sequence[Run], **fields: Any) -> Pointer:
    """Return the pointer of a batch that holds these runs; its object is not made."""
    ranges: dict[int, RangeSet] = {}
    for producer, first, next_ in runs:
        ranges.setdefault(producer, RangeSet()).add(first, next_)
    known: dict[str, Any] = {
        "kind": "data",
        "epoch": 1,
        "records": sum(next_ - first for _, first, next_ in runs),
        "producers": tuple(ProducerRanges(producer, tuple(found)) for producer, found in ranges.items()),
        "locations": (Location(store="main", key=KEY, offset=0, length=1),),
    }
    return pointer(**{**known, **fields})


def pointer(**fields: Any) -> Pointer:
    """Return a pointer of the topic's partition 0."""
    known: dict[str, Any] = {"cluster": "memq", "topic": TOPIC.name, "topic_id": TOPIC.id, "partition": 0, "epoch": 1}
    return Pointer(**{**known, **fields})


def block(producer: int, first: int, next_: int, *, partition: int = 0) -> bytes:
    """Return a sealed block of short records, with a key and a tag."""
    builder = BlockBuilder()
    for sequence in range(first, next_):
        builder.append(b"value %d" % sequence, b"key", tag="web")
    sealed = builder.seal(
        producer_id=producer,
        first_sequence=first,
        scope=scope_of(TOPIC.id_bytes, partition),
        now_ms=NOW_MS,
        codec="none",
    )
    return bytes(sealed.data)


def stored(runs: Sequence[Run], **fields: Any) -> tuple[Pointer, bytes]:
    """Return the pointer of a batch with a block for each run, and its whole object."""
    return packed(runs, [block(*run) for run in runs], **fields)


def packed(
    runs: Sequence[Run],
    blocks: Sequence[bytes],
    change: Callable[[BlockEntry], BlockEntry] = lambda entry: entry,
    **fields: Any,
) -> tuple[Pointer, bytes]:
    """Return pointer and object of these blocks, with index entries changed."""
    headers = [parse_header(data) for data in blocks]
    body = b"".join(blocks)
    entries, at = [], 0
    for header in headers:
        entries.append(change(BlockEntry.from_header(header, at)))
        at += header.length
    batch = BatchEntry(0, len(body), NOW_MS, 0, sum(header.count for header in headers), 0, len(blocks), 0, 1)
    meta = ObjectMeta(cluster="memq", broker="b", topics=(ObjectTopic(TOPIC.name, TOPIC.id),), created_ms=NOW_MS)
    facts = {**_facts(headers, body), **fields}
    return data_pointer(runs, **facts), body + encode_index(meta, [batch], entries, len(body))


def _facts(headers: Sequence[BlockHeader], body: bytes) -> dict[str, Any]:
    tag_bits = 0
    for header in headers:
        tag_bits |= header.tag_bits
    return {
        "locations": (Location(store="main", key=KEY, offset=0, length=len(body)),),
        "raw_bytes": sum(header.raw_length for header in headers),
        "stored_bytes": len(body),
        "least_ms": min(header.least_ms for header in headers),
        "greatest_ms": max(header.greatest_ms for header in headers),
        "slots": (min(header.slot_first for header in headers), max(header.slot_last for header in headers)),
        "tag_bits": tag_bits,
        "checksum": crc32c(body),
        "totals": Totals(),
    }
