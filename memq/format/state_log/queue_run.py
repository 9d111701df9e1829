"""Entries of a run of queue items: blocks of one lane in the order of delivery. Bytes <-> values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from memq.format.blocks.header import Buffer
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.packed_file import KIND_QUEUE_RUN_BLOCK
from memq.format.state_log.run import RunPlace, RunTarget


class QueueRunEntry(NamedTuple):
    """One block of items: its place in its object, its queue, this object, its terms, its arrival."""

    block: HeldBlock
    target: Target
    key: str
    lane: str
    arrival: int

    @property
    def place(self) -> RunPlace:
        """Its place in the order of delivery."""
        return self.block.due_ms, self.arrival, self.block.id.producer


class _ItemRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    due_ms: int
    arrival: int
    producer: int
    first: int
    next: int
    target: int
    key: int
    lane: int
    offset: int
    length: int


class _ItemRows(msgspec.Struct, frozen=True, array_like=True):
    keys: tuple[str, ...]
    lanes: tuple[str, ...]
    rows: tuple[_ItemRow, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ItemRows).decode


class QueueRows:
    """See `memq.format.state_log.run.RunRows`."""

    kind = KIND_QUEUE_RUN_BLOCK

    def encode(self, entries: Sequence[QueueRunEntry], number_of: Callable[[Target], int]) -> bytes:
        """Return the bytes of blocks of items."""
        keys: dict[str, int] = {}
        lanes: dict[str, int] = {}
        rows = tuple(
            _ItemRow(
                *(*each.place, each.block.id.first, each.block.next, number_of(each.target)),
                *(keys.setdefault(each.key, len(keys)), lanes.setdefault(each.lane, len(lanes))),
                *(each.block.offset, each.block.length),
            )
            for each in entries
        )
        return _encode(_ItemRows(tuple(keys), tuple(lanes), rows))

    def decode(self, data: Buffer, targets: Sequence[RunTarget]) -> list[QueueRunEntry]:
        """Return the blocks of items. Raises: MsgspecError, UnicodeDecodeError, IndexError."""
        found = _decode(data)
        return [
            QueueRunEntry(
                HeldBlock(HoldId(row.producer, row.first), row.next, row.due_ms, row.offset, row.length),
                targets[row.target].target,
                found.keys[row.key],
                found.lanes[row.lane],
                row.arrival,
            )
            for row in found.rows
        ]


QUEUE_ROWS = QueueRows()
