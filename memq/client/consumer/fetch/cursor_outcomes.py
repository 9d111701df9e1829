"""Results of a cursor: ranges of records, counts, and the blocks that it left out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from memq.client.consumer.batch import Slice
from memq.errors import IdentityConflictError, MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import BlockHeader
from memq.format.pointer import Pointer
from memq.topic import Committed, Position, Totals


@dataclass(slots=True)
class Counts:
    """Delivered and skipped records, blocks, sequences or pointers, as the names say."""

    records: int = 0
    filtered_records: int = 0
    duplicate_records: int = 0
    overlapping_blocks: int = 0
    conflicting_blocks: int = 0
    damaged_blocks: int = 0
    damaged_records: int = 0
    gap_sequences: int = 0
    expired_records: int = 0
    expired_offsets: int = 0

    def add(self, other: Counts) -> None:
        """Add another partition's counts to these."""
        for item in fields(Counts):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(frozen=True, slots=True)
class ReadyRange:
    """A delivery of `deliver`: records, or an error before which the cursor stays.

    `first` and `behind` are the positions before and after it; `totals` counts the records before the pointer of
    `first`. `damaged` has the pieces that were passed over, or the one that `failure` names.
    """

    first: Position
    behind: Committed
    totals: Totals = field(default_factory=Totals)
    pointer: Pointer | None = None
    slices: tuple[Slice, ...] = ()
    damaged: tuple[BlockPiece, ...] = ()
    failure: MemqError | None = None


class LeftOut(NamedTuple):
    """Sequences that the filter leaves out, with the least timestamp (Unix ms) of their block."""

    writer: int
    producer: int
    first: int
    next: int
    base_ms: int


class Conflict(NamedTuple):
    """A block that was delivered although its sequences are known: the known block has other records."""

    position: Position
    pointer: Pointer
    error: IdentityConflictError


Copy = tuple[int, BlockHeader]  # the write partition of a block that was left out, and its header


class Seen(NamedTuple):
    """Blocks whose sequences were seen, and blocks that the filter leaves out."""

    copies: list[Copy]
    conflicts: list[Conflict]
    left_out: list[LeftOut]
