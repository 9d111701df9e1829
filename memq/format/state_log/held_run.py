"""Entries of a run of delayed records: held blocks, in the order of due times. Bytes <-> values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from memq.format.blocks.header import Buffer
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.packed_file import KIND_RUN_BLOCK
from memq.format.state_log.run import RunPlace, RunTarget


class RunEntry(NamedTuple):
    """One hold of a run: its block, its target, and the object that has the block."""

    block: HeldBlock
    target: Target
    key: str

    @property
    def place(self) -> RunPlace:
        """Its place in the order of a run."""
        return place_of(self.block)


def place_of(block: HeldBlock) -> RunPlace:
    """Return the place of a held block in the order of a run: due time, producer and first sequence."""
    return block.due_ms, block.id.producer, block.id.first


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    due_ms: int
    producer: int
    first: int
    next: int
    target: int
    key: int
    offset: int
    length: int


class _Block(msgspec.Struct, frozen=True, array_like=True):
    keys: tuple[str, ...]
    rows: tuple[_Row, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Block).decode


class HeldRows:
    """See `memq.format.state_log.run.RunRows`."""

    kind = KIND_RUN_BLOCK

    def encode(self, entries: Sequence[RunEntry], number_of: Callable[[Target], int]) -> bytes:
        """Return the bytes of holds."""
        keys: dict[str, int] = {}
        rows = tuple(
            _Row(
                *(*place_of(block), block.next, number_of(target), keys.setdefault(key, len(keys))),
                *(block.offset, block.length),
            )
            for block, target, key in entries
        )
        return _encode(_Block(tuple(keys), rows))

    def decode(self, data: Buffer, targets: Sequence[RunTarget]) -> list[RunEntry]:
        """Return the holds. Raises: MsgspecError, UnicodeDecodeError, IndexError."""
        found = _decode(data)
        return [
            RunEntry(
                HeldBlock(HoldId(row.producer, row.first), row.next, row.due_ms, row.offset, row.length),
                targets[row.target].target,
                found.keys[row.key],
            )
            for row in found.rows
        ]


HELD_ROWS = HeldRows()
