"""One pointer in a cursor, from the poll to the delivery of its batch. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memq.client.consumer.fetch.cursor_outcomes import LeftOut
from memq.client.consumer.progress import Gap, lost_error
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import MemqError
from memq.format.batch import BlockPiece, NumberedEntry
from memq.format.pointer import Pointer, pointer_mark, read_pointer
from memq.format.ranges import Range
from memq.format.report import MINUTE_MS
from memq.notification import Entry
from memq.notification.stored_blocks import Claim, Copies, claim_of
from memq.topic import Position, ReadPartition

SAVED_SHARE = 4  # of the bytes of a large batch one in so many, at least, is to be saved by its index
WHOLE_BATCHES = 15  # that are fetched whole after one of which the index saved less


@dataclass(slots=True)
class PointerSlot:
    """One pointer in progress: planned, being fetched, or with its pieces; or a gap left by retention."""

    offset: int
    time_ms: int
    pointer: Pointer | None = None
    cause: MemqError | None = None  # the pointer itself can't be read
    pieces: Sequence[BlockPiece] | None = None
    fetching: bool = False
    held_bytes: int = 0  # of its batch, that are fetched or are being fetched
    sent: memoryview | None = (
        None  # bytes that came with the pointer and are not the sound batch: they count as its first fetch
    )
    part: tuple[int, int] | None = None  # the needed records, by first index and end; None for all
    gap: Gap | None = None  # retention took it, alone after its pointer was read, or with others before
    damaged: bool = False  # its pointer, or some of its pieces
    unwanted: bool = False  # the filter wants no record of it: its blocks are not fetched
    cut: bool = False  # start or end of the reader lies within it
    left_out: Sequence[LeftOut] | None = None  # the blocks of an unwanted batch, when they are known
    missing_since_s: float | None = None  # when all routes first answered that its object does not exist
    passed: Sequence[NumberedEntry] = ()  # blocks without a wanted record that were not fetched, and are left out
    judged: int = 0  # pieces before this one were delivered or passed over
    claims: Sequence[Claim] = ()  # its pieces that seem to be copies, when the next one waits to be compared
    stored: Mapping[Claim, Copies] | None = None  # the blocks before it that have the sequences of `claims`

    def take_passed(self, index: int) -> Sequence[NumberedEntry]:
        """Return and remove the blocks that were not fetched and begin before a record index."""
        count = bisect_left(self.passed, index, key=lambda item: item.first)
        taken, self.passed = self.passed[:count], self.passed[count:]
        return taken

    @property
    def mark(self) -> int:
        """The mark of the pointer (`Committed`); 0 when it can't be read."""
        return pointer_mark(self.pointer) if self.pointer is not None else 0

    @property
    def bytes(self) -> int:
        """Number of stored bytes to fetch; 0 without a wanted batch."""
        if self.pointer is None or not self.pointer.locations or self.unwanted:
            return 0
        return self.pointer.locations[0].length

    @property
    def needs_index(self) -> bool:
        """Whether only the index says how many records of an unwanted batch are left out."""
        return self.cut or (self.pointer is not None and bool(self.pointer.skip))

    def move(self, entry: Entry, partition: ReadPartition) -> bool:
        """Note the new location of a batch that was not at its pointer's location; false if they are equal.

        Raises: PositionLostError if the log has another pointer there: it was cut and has grown again.
        """
        moved = slot_of(entry).pointer
        if moved is None or self.pointer is None or moved.locations == self.pointer.locations:
            return False
        if pointer_mark(moved) != self.mark:
            raise lost_error(partition, Position(partition.partition, self.offset + 1))
        self.pointer = moved
        return True

    def compare(self, stored: Mapping[Claim, Copies]) -> None:
        """Take the blocks before the batch that have the sequences of its claims."""
        self.claims, self.stored = (), stored

    def is_compared(self, claim: Claim, copies: Copies) -> bool:
        """Whether all its blocks under a claim are among the copies; if not, older blocks may match."""
        skip = frozenset(self.pointer.skip) if self.pointer is not None else ()
        headers = [piece.header for piece in self.pieces or () if piece.header is not None and piece.number not in skip]
        return all(
            any(stored.is_copied_by(header) for stored in copies.blocks)
            for header in headers
            if claim_of(header) == claim
        )

    @property
    def ready(self) -> bool:
        """Whether it can be delivered."""
        if self.unwanted:
            return self.left_out is not None or self.gap is not None
        return self.bytes == 0 or self.pieces is not None or self.gap is not None


class PartChoice:
    """Whether a reader with a filter fetches a large batch by its index.

    It does so only while that saves enough bytes.
    """

    def __init__(self, wanted: RecordFilter | None) -> None:
        self._has_tags = wanted is not None and wanted.tag_bits != 0
        self._whole = 0  # how many batches are fetched whole until the index is tried again

    def take(self) -> bool:
        """Choose for the next batch."""
        tries = self._has_tags and not self._whole
        self._whole = max(0, self._whole - 1)
        return tries

    def learn(self, slot: PointerSlot) -> None:
        """Take a batch that was fetched by its index."""
        if sum(item.entry.length for item in slot.passed) < slot.bytes // SAVED_SHARE:
            self._whole = WHOLE_BATCHES


def slot_of(entry: Entry, wanted: RecordFilter | None = None) -> PointerSlot:
    """Return the slot of an entry of the queue."""
    pointer = read_pointer(entry.body, newer="return")
    if isinstance(pointer, Pointer):
        slot = PointerSlot(entry.offset, entry.time_ms, pointer)
        if wanted is not None and pointer.locations and wanted.excludes(pointer.tag_bits):
            slot.unwanted, slot.left_out = True, left_out_of(pointer)
        return slot
    return PointerSlot(entry.offset, entry.time_ms, cause=pointer, damaged=True)


def left_out_of(pointer: Pointer) -> list[LeftOut] | None:
    """Return the sequences of a batch; None if its pointer does not name exactly them, or one minute."""
    if not pointer.producers_complete or pointer.skip:
        return None
    if pointer.least_ms // MINUTE_MS != pointer.greatest_ms // MINUTE_MS:
        return None
    return [
        LeftOut(pointer.partition, each.producer, first, next_, pointer.least_ms)
        for each in pointer.producers
        for first, next_ in each.ranges
    ]


def part_between(first: int, records: int, start: int, end: int | None) -> Range:
    """Return the part of a block that lies between two record indexes of its batch."""
    return max(0, start - first), records if end is None else min(records, end - first)


def left_out_part(pointer: Pointer, producer: int, first_sequence: int, part: Range, base_ms: int) -> LeftOut:
    """Return the sequences of a part of a block: the records from the first index up to the second."""
    return LeftOut(pointer.partition, producer, first_sequence + part[0], first_sequence + part[1], base_ms)
