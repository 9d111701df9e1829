"""Records become blocks by partition, and blocks one staged object, as brokers write them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.client.bulk.block_cutter import Cut, RecordCutter
from memq.client.producer.fields import RecordColumns, RecordFields, check_size
from memq.client.producer.partitioner import PartitionMap
from memq.errors import NotFoundError
from memq.format.blocks.builder import SealedBlock
from memq.format.blocks.header import BlockHeader, Buffer, scope_of
from memq.format.held_sequences import is_held
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.report import MINUTE_MS
from memq.format.staged_manifest import DIGEST_END, StagedObject, StagedPiece, digest_of
from memq.limits import SLOTS
from memq.topic import Topic


@dataclass(slots=True)
class StagedBlocks:
    """Sealed blocks of one partition."""

    topic: Topic
    partition: int
    blocks: list[SealedBlock] = field(default_factory=list)


def _times(headers: Iterable[BlockHeader]) -> tuple[tuple[int, int], ...]:
    """Return the least timestamps of blocks in order, see `StagedPiece.times`."""
    runs: list[tuple[int, int]] = []
    for header in headers:
        if runs and runs[-1][0] // MINUTE_MS == header.base_ms // MINUTE_MS:
            runs[-1] = (min(runs[-1][0], header.base_ms), header.next_sequence)
        else:
            runs.append((header.base_ms, header.next_sequence))
    return tuple(runs)


def staged_object(
    parts: Sequence[StagedBlocks], cluster: str, writer: str, key: str, producer_id: int, now_ms: int
) -> tuple[list[Buffer], int, StagedObject]:
    """Return an object's bytes in pieces, their crc32c, and its entry in the manifest, without a digest.

    All blocks are of one producer. Each part has at least one.
    """
    batches: list[BatchEntry] = []
    entries: list[BlockEntry] = []
    pieces: list[StagedPiece] = []
    buffers: list[Buffer] = []
    topics: dict[ObjectTopic, int] = {}
    offset = 0
    for part in parts:
        first_block, start = len(entries), offset
        for block in part.blocks:
            entries.append(BlockEntry.from_header(block.header, offset))
            buffers.append(block.data)
            offset += len(block.data)
        number = topics.setdefault(ObjectTopic(part.topic.name, part.topic.id), len(topics))
        records, count = part.blocks[-1].header.next_sequence - part.blocks[0].header.first_sequence, len(part.blocks)
        batches.append(
            BatchEntry(
                start, offset - start, now_ms, len(batches), records, first_block, count, part.partition, 0, number
            )
        )
        held = is_held(part.blocks[0].header.first_sequence)  # the audit counts those, and needs no times
        pieces.append(
            StagedPiece(
                topic=part.topic.name,
                topic_id=part.topic.id,
                partition=part.partition,
                offset=start,
                length=offset - start,
                records=records,
                raw_bytes=sum(block.header.raw_length for block in part.blocks),
                times=() if held else _times(block.header for block in part.blocks),
            )
        )
    meta = ObjectMeta(cluster=cluster, broker=writer, topics=tuple(topics), created_ms=now_ms)
    buffers.append(encode_index(meta, batches, entries, offset))
    checksum = 0
    for piece in buffers:
        checksum = crc32c(piece, checksum)
    staged = StagedObject(
        key=key,
        bytes=offset + len(buffers[-1]),
        index_offset=offset,
        pieces=tuple(pieces),
        producer=f"{producer_id:016x}",
        created_ms=now_ms,
    )
    return buffers, checksum, staged


class StagedObjectBuilder:
    """One object on its way. `bytes` is about what it holds; its blocks have a producer id of their own."""

    def __init__(self, topics: Mapping[str, Topic], producer_id: int, *, block_bytes: int, codec: str) -> None:
        self.bytes = 0
        self._digest = 0
        self._topics = topics
        self._maps: dict[str, PartitionMap] = {}
        self._cutter = RecordCutter(block_bytes)
        self._parts: dict[tuple[str, int], StagedBlocks] = {}
        self._producer_id = producer_id
        self._codec = codec

    @property
    def empty(self) -> bool:
        """Whether it has no record. `bytes` does not show that: records may have no byte."""
        return not self._parts and self._cutter.empty

    def add(self, topic: str, fields: RecordFields, partition: int | None, now_ms: int) -> None:
        """Add a record. `now_ms` is the time of those without one, Unix ms.

        Raises: NotFoundError for a topic that was not named before, or a partition; TooLargeError, InvalidRequestError.
        """
        partition_map, size = self._map_of(topic, fields.size), fields.size
        cut = self._cutter.add(topic, partition_map, fields, size, partition)
        self.bytes += size
        self._digest += digest_of((fields.value,), (fields.key,))
        if cut is not None:
            self._seal(cut, now_ms)

    def add_many(self, topic: str, many: RecordColumns, now_ms: int) -> None:
        """Add records by key, or without. Raises: as `add`."""
        sizes = many.sizes(0, len(many.values))
        partition_map = self._map_of(topic, max(sizes))
        for cut in self._cutter.add_many(topic, partition_map, many, sizes):
            self._seal(cut, now_ms)
        self.bytes += sum(sizes)
        self._digest += digest_of(many.values, many.keys or ())

    def build(self, cluster: str, writer: str, key: str, now_ms: int) -> tuple[list[Buffer], int, StagedObject]:
        """Return the object's bytes in pieces, their crc32c, and what the manifest says of it.

        It must not be empty.
        """
        for cut in self._cutter.end():
            self._seal(cut, now_ms)
        parts = [part for _, part in sorted(self._parts.items())]
        buffers, checksum, staged = staged_object(parts, cluster, writer, key, self._producer_id, now_ms)
        return buffers, checksum, replace(staged, digest=f"{self._digest % DIGEST_END:016x}")

    def _map_of(self, topic: str, size: int) -> PartitionMap:
        """Return the partitions for a record of `size` bytes."""
        known = self._topics.get(topic)
        if known is None:
            raise NotFoundError(f"topic {topic[:60]!a} is unknown to this writer")
        check_size(size, known)
        partition_map = self._maps.get(topic)
        if partition_map is None:
            partition_map = self._maps[topic] = PartitionMap(known)
        return partition_map

    def _seal(self, cut: Cut, now_ms: int) -> None:
        topic, partition_map = self._topics[cut.topic], self._maps[cut.topic]
        part = self._parts.setdefault((cut.topic, cut.partition), StagedBlocks(topic, cut.partition))
        slots = partition_map.slots[partition_map.index_of(cut.partition)]
        sealed = cut.builder.seal(
            producer_id=self._producer_id,
            first_sequence=cut.first,
            scope=scope_of(topic.id_bytes, cut.partition),
            now_ms=now_ms,
            codec=self._codec,
            slot_range=(0, SLOTS - 1) if cut.chosen else slots,
        )
        part.blocks.append(sealed)
        self.bytes += len(sealed.data) - cut.size
