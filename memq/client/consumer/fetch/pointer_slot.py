"""One pointer in a cursor, from the poll to the delivery of its batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memq.client.consumer.progress import Gap
from memq.errors import MemqError
from memq.format.batch import BlockPiece
from memq.format.pointer import Pointer, pointer_mark, read_pointer
from memq.notification import Entry
from memq.notification.stored_blocks import Claim, Copies, claim_of


@dataclass(slots=True)
class PointerSlot:
    """One pointer in progress: planned, being fetched, or with its pieces; or a gap left by retention."""

    offset: int
    time_ms: int
    pointer: Pointer | None = None
    cause: MemqError | None = None  # the pointer itself can't be read
    pieces: Sequence[BlockPiece] | None = None
    fetching: bool = False
    sent: memoryview | None = (
        None  # bytes that came with the pointer and are not the sound batch: they count as its first fetch
    )
    part: tuple[int, int] | None = None  # the needed records, by first index and end; None for all
    gap: Gap | None = None  # retention took it, alone after its pointer was read, or with others before
    damaged: bool = False  # its pointer, or some of its pieces
    missing_since_s: float | None = None  # when all routes first answered that its object does not exist
    judged: int = 0  # pieces before this one were delivered or passed over
    claims: Sequence[Claim] = ()  # its pieces that seem to be copies, when the next one waits to be compared
    stored: Mapping[Claim, Copies] | None = None  # the blocks before it that have the sequences of `claims`

    @property
    def mark(self) -> int:
        """The mark of the pointer (`Committed`); 0 when it can't be read."""
        return pointer_mark(self.pointer) if self.pointer is not None else 0

    @property
    def bytes(self) -> int:
        """Number of stored bytes to fetch; 0 without a batch."""
        return self.pointer.locations[0].length if self.pointer is not None and self.pointer.locations else 0

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
        return self.bytes == 0 or self.pieces is not None or self.gap is not None


def slot_of(entry: Entry) -> PointerSlot:
    """Return the slot of an entry of the queue."""
    pointer = read_pointer(entry.body, newer="return")
    if isinstance(pointer, Pointer):
        return PointerSlot(entry.offset, entry.time_ms, pointer)
    return PointerSlot(entry.offset, entry.time_ms, cause=pointer, damaged=True)
