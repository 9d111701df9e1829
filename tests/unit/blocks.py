"""Shared parts of the format tests: random records, blocks of them, damage, and repaired checksums."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from awscrt.checksums import crc32c
from hypothesis import strategies as st

from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.blocks.columns import RecordTuple
from memq.format.blocks.header import CHECKED_FROM, Buffer

NOW_MS = 1_700_000_000_000
Record = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int | None, str | None]

_cells = st.none() | st.binary(max_size=40) | st.just(b"same bytes again and again " * 4)
_names = st.text(max_size=12)
_headers = st.lists(st.tuples(_names, st.none() | st.binary(max_size=12)), max_size=4).map(tuple)
_times = st.none() | st.integers(-(1 << 53) + 1, (1 << 53) - 1) | st.integers(NOW_MS, NOW_MS + 9)


def records(columns: Sequence[bool] = (True, True, True, True)) -> st.SearchStrategy[list[Record]]:
    """Any records, with or without keys, headers, timestamps and tags."""
    key, headers, time, tag = columns
    row = st.tuples(
        _cells,
        st.none() | st.binary(max_size=12) if key else st.none(),
        _headers if headers else st.just(()),
        _times if time else st.none(),
        st.none() | _names if tag else st.none(),
    )
    return st.lists(row, min_size=1, max_size=40)


any_records = st.tuples(*[st.booleans()] * 4).flatmap(records)
codecs = st.sampled_from(["none", "zstd", "lz4"])


def build(rows: Sequence[Record]) -> BlockBuilder:
    """Append records to a builder."""
    builder = BlockBuilder()
    for value, key, headers, time, tag in rows:
        builder.append(value, key, headers, time, tag)
    return builder


def seal(builder: BlockBuilder, codec: str = "none", **fields: Any) -> SealedBlock:
    """Seal a builder as producer 7 does."""
    return builder.seal(
        **{"producer_id": 7, "first_sequence": 100, "scope": 3, "now_ms": NOW_MS, **fields}, codec=codec
    )


def expected(rows: Sequence[Record]) -> list[RecordTuple]:
    """What a reader returns for `rows`: the time of the seal where there was none."""
    return [(value, key, headers, NOW_MS if time is None else time, tag) for value, key, headers, time, tag in rows]


def repair(data: bytes | bytearray) -> bytes:
    """Make the checksum of a block right again after damage."""
    checksum: int = crc32c(bytes(data[CHECKED_FROM:]))
    return bytes(data[:4]) + checksum.to_bytes(4, "little") + bytes(data[CHECKED_FROM:])


def _flip(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def _add(data: bytearray, dice: random.Random) -> None:
    data += dice.randbytes(dice.randrange(1, 40))


def _drop(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data))
    del data[at : at + dice.randrange(1, 9)]


def _overwrite(data: bytearray, dice: random.Random) -> None:
    """Write a number that parsers trip over, where a number may lie."""
    number = dice.choice([0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, len(data), 1 << 20])
    at = dice.randrange(0, len(data), 2)
    piece = number.to_bytes(4, "little")[: len(data) - at]
    data[at : at + len(piece)] = piece


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _cut, _add, _drop, _overwrite)


def damaged(data: Buffer, dice: random.Random, times: int = 1) -> bytes:
    """Return `data` after some damage; it differs from what it was."""
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(times):
            if changed:
                dice.choice(DAMAGES)(changed, dice)
    return bytes(changed)
