"""Shared parts of the tests of reading: a read partition with batches and entries, written by the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from memq.format.batch import BlockPiece, cut_batch
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of, tag_bit
from memq.format.pointer import Adopted, Location, Pointer, ProducerRanges, decode_pointer, encode_pointer
from memq.notification import Entry, Span
from memq.notification.stored_blocks import Claim, Copies, claim_of, stored_block
from memq.topic import ReadPartition, Totals

TOPIC_ID = "0123456789abcdef" * 2
PARTITION = ReadPartition("clicks", TOPIC_ID, 0)
WINDOW_MS = 1_000


@dataclass(frozen=True)
class Block:
    """One block: producer, first sequence, records."""

    producer: int
    first: int
    count: int = 3
    more: bytes = b""  # what makes it another block than that of the same sequences
    sealed_ms: int = 1
    tags: tuple[str | None, ...] = ()  # of its records; none has one without
    headers: tuple[tuple[tuple[str, bytes | None], ...], ...] = ()

    def values(self) -> list[bytes]:
        return [b"%d:%d" % (self.producer, self.first + number) + self.more for number in range(self.count)]

    def data(self, partition: int = 0) -> bytes:
        builder = BlockBuilder()
        for number, value in enumerate(self.values()):
            builder.append(
                value,
                tag=self.tags[number] if self.tags else None,
                headers=self.headers[number] if self.headers else (),
            )
        scope = scope_of(bytes.fromhex(TOPIC_ID), partition)
        sealed = builder.seal(
            producer_id=self.producer, first_sequence=self.first, scope=scope, now_ms=self.sealed_ms, codec="none"
        )
        return bytes(sealed.data)


@dataclass
class Log:
    """A read partition that a test writes: entries with growing offsets, and the bytes of their batches."""

    entries: list[Entry] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    records: int = 0
    stored: int = 0
    next_offset: int = 0

    def add(self, pointer: Pointer, body: bytes = b"", time_ms: int | None = None) -> int:
        offset = self.next_offset
        self.next_offset += 1
        self.entries.append(Entry(offset, offset if time_ms is None else time_ms, encode_pointer(pointer)))
        self.bodies[offset] = body
        return offset

    def control(self, kind: str = "opened", epoch: int = 1, adopted: tuple[Adopted, ...] = ()) -> int:
        self._adopt(adopted)
        totals = Totals(self.records, self.stored)
        return self.add(self._pointer(kind=kind, epoch=epoch, totals=totals, adopted=adopted))

    def batch(
        self,
        *blocks: Block,
        epoch: int = 1,
        skip: tuple[int, ...] = (),
        adopted: tuple[Adopted, ...] = (),
        late: bool = False,
        time_ms: int | None = None,
        named: bool = True,
    ) -> int:
        body = b"".join(block.data() for block in blocks)
        count = sum(block.count for block in blocks)
        self._adopt(adopted)
        pointer = self._pointer(
            kind="data",
            epoch=epoch,
            batch_sequence=self.next_offset,
            locations=(Location(store="main", key=f"o/{self.next_offset}", offset=0, length=len(body)),),
            records=count,
            stored_bytes=len(body),
            totals=Totals(self.records, self.stored),
            adopted=adopted,
            skip=skip,
            producers=_ranges(blocks) if named else (),
            producers_complete=named,
            tag_bits=reduce(or_, (tag_bit(tag) for block in blocks for tag in block.tags if tag is not None), 0),
            least_ms=min(block.sealed_ms for block in blocks),
            greatest_ms=max(block.sealed_ms for block in blocks),
        )
        if not late:
            self.records += count
            self.stored += len(body)
        return self.add(pointer, body, time_ms)

    def _adopt(self, adopted: tuple[Adopted, ...]) -> None:
        for entry in adopted:
            self.records += entry.records
            self.stored += entry.bytes

    def span(self) -> Span:
        return Span(self.entries[0].offset if self.entries else self.next_offset, self.next_offset)

    def pieces(self, offset: int, pointer: Pointer) -> list[BlockPiece]:
        return cut_batch(pointer, self.bodies[offset])

    def copies(self, claims: Sequence[Claim], before: int) -> dict[Claim, Copies]:
        """Return what lies before an offset under some sequences, as a search of the queue finds it."""
        found: dict[Claim, Copies] = {}
        for entry in self.entries:
            pointer = decode_pointer(entry.body)
            if entry.offset >= before or pointer.kind != "data":
                continue
            for piece in self.pieces(entry.offset, pointer):
                if piece.header is None or piece.number in pointer.skip:
                    continue
                producer, low, high = claim_of(piece.header)
                for claim in claims:
                    if claim[0] == producer and claim[1] < high and low < claim[2]:
                        known = found.get(claim, Copies()).blocks
                        found[claim] = Copies((*known, stored_block(piece.header)))
        return found

    def _pointer(self, **fields: object) -> Pointer:
        values = {"cluster": "test", "topic": "clicks", "topic_id": TOPIC_ID, "partition": 0} | fields
        return Pointer(**values)  # type: ignore[arg-type]


def _ranges(blocks: tuple[Block, ...]) -> tuple[ProducerRanges, ...]:
    producers = sorted({block.producer for block in blocks})
    return tuple(
        ProducerRanges(producer, _merged([block for block in blocks if block.producer == producer]))
        for producer in producers
    )


def _merged(blocks: list[Block]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, next_ in sorted((block.first, block.first + block.count) for block in blocks):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], next_))
        else:
            merged.append((first, next_))
    return tuple(merged)
