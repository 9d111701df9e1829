"""Records become blocks by partition, and blocks one staged object, as brokers write them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from awscrt.checksums import crc32c

from memq.client.producer.fields import RecordColumns, RecordFields, check_size
from memq.client.producer.partitioner import PartitionMap
from memq.errors import NotFoundError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import BlockHeader, Buffer, scope_of
from memq.format.manifest import DIGEST_END, StagedObject, StagedPiece, digest_of
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.report import MINUTE_MS
from memq.limits import SLOTS
from memq.topic import Topic


@dataclass(slots=True)
class _Part:
    """Content for one partition: its open block, and its sealed blocks."""

    topic: Topic
    partition: int
    slots: tuple[int, int]
    open: BlockBuilder = field(default_factory=BlockBuilder)
    blocks: list[tuple[BlockHeader, bytes | bytearray]] = field(default_factory=list)
    next_sequence: int = 0
    slots_hold: bool = True  # nobody chose the partition of a record in the open block himself


def _times(headers: Iterable[BlockHeader]) -> tuple[tuple[int, int], ...]:
    """Return the least timestamps of blocks in order, see `StagedPiece.times`."""
    runs: list[tuple[int, int]] = []
    for header in headers:
        if runs and runs[-1][0] // MINUTE_MS == header.base_ms // MINUTE_MS:
            runs[-1] = (min(runs[-1][0], header.base_ms), header.next_sequence)
        else:
            runs.append((header.base_ms, header.next_sequence))
    return tuple(runs)


class StagedObjectBuilder:
    """One object on its way. `bytes` is about what it holds; its blocks have a producer id of their own."""

    def __init__(self, topics: Mapping[str, Topic], producer_id: int, *, block_bytes: int, codec: str) -> None:
        self.bytes = 0
        self._digest = 0
        self._topics = topics
        self._maps: dict[str, PartitionMap] = {}
        self._turns: dict[str, int] = {}
        self._parts: dict[tuple[str, int], _Part] = {}
        self._producer_id = producer_id
        self._block_bytes = block_bytes
        self._codec = codec

    def add(self, topic: str, fields: RecordFields, partition: int | None, now_ms: int) -> None:
        """Add a record. `now_ms` is the time of those without one, Unix ms.

        Raises: NotFoundError for a topic that was not named before, or a partition; TooLargeError, InvalidRequestError.
        """
        known = self._known(topic)
        check_size(fields.size, known)
        places = self._maps[topic]
        if partition is not None:
            place = places.place_of(partition)
        else:
            place = self._turns[topic] if fields.key is None else places.place_of_key(fields.key)
        part = self._part(known, place)
        before = part.open.raw_bytes
        part.open.append(*fields)
        self.bytes += part.open.raw_bytes - before
        self._digest += digest_of((fields.value,), (fields.key,))
        part.slots_hold = part.slots_hold and partition is None
        self._seal_full(part, place, now_ms, keyless=fields.key is None and partition is None)

    def add_many(self, topic: str, many: RecordColumns, now_ms: int) -> None:
        """Add records by key, or without. Raises: as `add`."""
        known = self._known(topic)
        places = self._maps[topic]
        self._digest += digest_of(many.values, many.keys or ())
        if many.keys is None:
            self._extend(known, self._turns[topic], many, now_ms)
            return
        rows: dict[int, list[int]] = {}
        for row, key in enumerate(many.keys):
            place = self._turns[topic] if key is None else places.place_of_key(key)
            rows.setdefault(place, []).append(row)
        for place, chosen in rows.items():
            self._extend(known, place, many.pick(chosen), now_ms)

    def _extend(self, topic: Topic, place: int, many: RecordColumns, now_ms: int) -> None:
        sizes = many.sizes(0, len(many.values))
        check_size(max(sizes), topic)
        start, size = 0, 0
        for row, each in enumerate(sizes, 1):
            size += each
            if size < self._block_bytes and row < len(sizes):
                continue
            part = self._part(topic, place)
            before = part.open.raw_bytes
            part.open.append_many(*many.part(start, row))
            self.bytes += part.open.raw_bytes - before
            place = self._seal_full(part, place, now_ms, keyless=many.keys is None)
            start, size = row, 0

    def build(self, cluster: str, writer: str, key: str, now_ms: int) -> tuple[list[Buffer], int, StagedObject]:
        """Return the object's bytes in pieces, their crc32c, and what the manifest says of it.

        It must not be empty.
        """
        batches: list[BatchEntry] = []
        entries: list[BlockEntry] = []
        pieces: list[StagedPiece] = []
        buffers: list[Buffer] = []
        topics: dict[ObjectTopic, int] = {}
        offset = 0
        for part in self._sealed(now_ms):
            first_block, start = len(entries), offset
            for header, data in part.blocks:
                entries.append(BlockEntry.from_header(header, offset))
                buffers.append(data)
                offset += len(data)
            number = topics.setdefault(ObjectTopic(part.topic.name, part.topic.id), len(topics))
            records, count = part.next_sequence, len(part.blocks)
            batches.append(
                BatchEntry(
                    start, offset - start, now_ms, len(batches), records, first_block, count, part.partition, 0, number
                )
            )
            pieces.append(
                StagedPiece(
                    topic=part.topic.name,
                    topic_id=part.topic.id,
                    partition=part.partition,
                    offset=start,
                    length=offset - start,
                    records=records,
                    raw_bytes=sum(header.raw_length for header, _ in part.blocks),
                    times=_times(header for header, _ in part.blocks),
                )
            )
        meta = ObjectMeta(cluster=cluster, broker=writer, topics=tuple(topics), created_ms=now_ms)
        buffers.append(encode_index(meta, batches, entries, offset))
        checksum = 0
        for piece in buffers:
            checksum = crc32c(piece, checksum)
        size = offset + len(buffers[-1])
        staged = StagedObject(
            key=key,
            bytes=size,
            index_offset=offset,
            pieces=tuple(pieces),
            producer=f"{self._producer_id:016x}",
            digest=f"{self._digest % DIGEST_END:016x}",
        )
        return buffers, checksum, staged

    def _known(self, topic: str) -> Topic:
        known = self._topics.get(topic)
        if known is None:
            raise NotFoundError(f"topic {topic[:60]!a} is none that this writer knows")
        if topic not in self._maps:
            self._maps[topic], self._turns[topic] = PartitionMap(known), 0
        return known

    def _part(self, topic: Topic, place: int) -> _Part:
        places = self._maps[topic.name]
        partition = places.partitions[place]
        part = self._parts.get((topic.name, partition))
        if part is None:
            part = self._parts[topic.name, partition] = _Part(topic, partition, places.slots[place])
        return part

    def _seal_full(self, part: _Part, place: int, now_ms: int, *, keyless: bool) -> int:
        """Seal the open block when it is full; return the place that comes next for records without a key."""
        if part.open.raw_bytes < self._block_bytes:
            return place
        self._seal(part, now_ms)
        if keyless:
            name = part.topic.name
            place = self._turns[name] = self._maps[name].next_place(place, lambda _: False)
        return place

    def _sealed(self, now_ms: int) -> Iterator[_Part]:
        for _, part in sorted(self._parts.items()):
            if part.open.count:
                self._seal(part, now_ms)
            yield part

    def _seal(self, part: _Part, now_ms: int) -> None:
        raw_bytes = part.open.raw_bytes
        sealed = part.open.seal(
            producer_id=self._producer_id,
            first_sequence=part.next_sequence,
            scope=scope_of(part.topic.id_bytes, part.partition),
            now_ms=now_ms,
            codec=self._codec,
            slot_range=part.slots if part.slots_hold else (0, SLOTS - 1),
        )
        part.next_sequence += sealed.header.count
        part.blocks.append((sealed.header, sealed.data))
        part.open, part.slots_hold = BlockBuilder(), True
        self.bytes += len(sealed.data) - raw_bytes
