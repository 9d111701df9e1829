"""Bytes of a store cut into the blocks of a batch: the pieces always add up to its records."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError
from memq.format.batch import (
    BlockPiece,
    cut_batch,
    cut_blocks,
    entries_of_batch,
    missing_batch,
    numbered_entries,
    pointer_scope,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.object import INDEX_MAGIC
from memq.format.pointer import Location, Pointer, ProducerRanges

POINTER = Pointer(
    kind="data",
    cluster="c",
    topic="t",
    topic_id="ab" * 16,
    partition=0,
    epoch=1,
    records=4,
    locations=(Location(store="s", key="k", offset=0, length=1),),
    producers=(ProducerRanges(7, ((0, 4),)),),
)


PAYLOAD_LENGTH_AT = 12


def block(producer: int, first: int, count: int, codec: str = "none") -> bytes:
    builder = BlockBuilder()
    builder.append_many([b"value"] * count)
    sealed = builder.seal(
        producer_id=producer, first_sequence=first, scope=pointer_scope(POINTER), now_ms=5, codec=codec
    )
    return bytes(sealed.data)


def test_another_batch_of_more_records_loses_those_of_the_pointer_and_no_more() -> None:
    foreign = block(9, 0, 3) + block(9, 3, 3) + block(9, 6, 3)
    for data in (foreign, foreign[:-1]):
        pieces = cut_batch(POINTER, data)
        assert [(piece.number, piece.first, piece.records) for piece in pieces] == [(0, 0, 3), (1, 3, 1), (2, 4, 0)]
        assert all(piece.header is None for piece in pieces)


def test_a_sound_batch_is_cut_whole() -> None:
    pieces = cut_batch(POINTER, block(7, 0, 3) + block(7, 3, 1))
    assert [(piece.first, piece.records, piece.cause) for piece in pieces] == [(0, 3, None), (3, 1, None)]


ONE, OTHER = block(7, 0, 3), block(7, 3, 1)


def flipped_at(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def places(pieces: Iterable[BlockPiece]) -> list[tuple[int, int, int, int, bool]]:
    """Return number, first record, records, offset of each piece, and whether it is sound."""
    return [(each.number, each.first, each.records, each.at, each.header is not None) for each in pieces]


def test_the_blocks_of_an_object_end_at_its_index_or_at_damage_that_hides_the_next_one() -> None:
    data = ONE + OTHER + INDEX_MAGIC + bytes(40)
    second = len(ONE)
    assert places(cut_blocks(data)) == [(0, 0, 3, 0, True), (1, 3, 1, second, True)]
    assert places(cut_blocks(flipped_at(data, second - 1))) == [(0, 0, 0, 0, False), (1, 0, 1, second, True)]
    assert places(cut_blocks(flipped_at(data, second + len(OTHER) - 1))) == [
        (0, 0, 3, 0, True),
        (1, 3, 0, second, False),
    ]
    rest = list(cut_blocks(flipped_at(data, second)))
    assert places(rest) == [(0, 0, 3, 0, True), (1, 3, 0, second, False)]
    assert len(rest[1].data) == len(data) - second
    assert list(cut_blocks(INDEX_MAGIC)) == []


def test_a_damaged_block_of_a_batch_costs_its_own_records() -> None:
    data, second = ONE + OTHER, len(ONE)
    whole = [(0, 0, 3, 0, True), (1, 3, 1, second, True)]
    assert places(cut_blocks(data, records=4)) == whole
    assert places(cut_blocks(flipped_at(data, second - 1), records=4)) == [(0, 0, 3, 0, False), whole[1]]
    for broken in (flipped_at(data, len(data) - 1), data[:-1], data[: second + 10], flipped_at(data, second)):
        assert places(cut_blocks(broken, records=4)) == [whole[0], (1, 3, 1, second, False)]
    assert places(cut_blocks(flipped_at(data, 0), records=4)) == [(0, 0, 4, 0, False)]
    assert places(cut_blocks(data[:second], records=4)) == [whole[0], (1, 3, 1, second, False)]
    (missing,) = [each for each in cut_blocks(data[:second], records=4) if each.header is None]
    assert str(missing.cause) == "batch ends after 3 of 4 records"
    with pytest.raises(CorruptDataError, match="batch ends after 3"):
        missing.sound()


def test_a_damaged_length_hides_all_blocks_after_it() -> None:
    """The bytes at the wrong length are no block: the reader can't know where the next one begins."""
    first = block(7, 0, 60, codec="zstd")
    (length,) = struct.unpack_from("<I", first, PAYLOAD_LENGTH_AT)
    shorter = first[:PAYLOAD_LENGTH_AT] + struct.pack("<I", length - 1) + first[PAYLOAD_LENGTH_AT + 4 :]
    (lost,) = cut_blocks(shorter + OTHER, records=61)
    assert (lost.records, lost.header, len(lost.data)) == (61, None, len(first + OTHER))


def test_a_missing_batch_is_one_damaged_piece_with_all_its_records() -> None:
    cause = CorruptDataError("its object is missing")
    (lost,) = missing_batch(POINTER, cause)
    assert (lost, places([lost])) == (BlockPiece(0, 0, 4, None, memoryview(b""), cause), [(0, 0, 4, 0, False)])


def test_entries_are_those_of_the_blocks_that_lie_within_the_batch() -> None:
    blocks = [ONE, OTHER, block(7, 4, 2)]
    starts = [sum(map(len, blocks[:at])) for at in range(4)]
    entries = [each.entry() for each in cut_blocks(b"".join(blocks), records=6)]
    assert [entry.offset for entry in entries] == starts[:3]

    def within(offset: int, length: int) -> list[tuple[int, int]]:
        return [(entry.offset, entry.count) for entry in entries_of_batch(entries, offset, length)]

    both = starts[3] - starts[1]
    assert within(0, starts[3]) == [(0, 3), (starts[1], 1), (starts[2], 2)]
    assert within(starts[1], both) == [(0, 1), (len(OTHER), 2)]
    assert within(starts[1], both - 1) == [(0, 1)]
    assert within(starts[1] + 1, both - 1) == [(len(OTHER) - 1, 2)]
    assert within(starts[1], 0) == within(starts[3], 9) == []


def test_blocks_are_found_by_their_entries_also_behind_damage() -> None:
    data, second = ONE + OTHER, len(ONE)
    run = numbered_entries([each.entry() for each in cut_blocks(data, records=4)])
    assert places(cut_blocks(data, run=run)) == [(0, 0, 3, 0, True), (1, 3, 1, second, True)]
    assert places(cut_blocks(flipped_at(data, 0), run=run)) == [(0, 0, 3, 0, False), (1, 3, 1, second, True)]
    assert places(cut_blocks(OTHER, run=run[1:], start=second)) == [(1, 3, 1, second, True)]
    more = [each._replace(entry=each.entry._replace(count=each.entry.count + 1)) for each in run]
    (lost, _) = cut_blocks(data, run=more)
    assert (lost.header, str(lost.cause)) == (None, "block has 3 records, the index says 4")


@given(
    counts=st.lists(st.integers(1, 6), max_size=5),
    producer=st.sampled_from([7, 9]),
    cut=st.integers(0, 200),
    flipped=st.none() | st.integers(0, 1_000),
)
def test_the_pieces_of_any_bytes_add_up_to_the_records(
    counts: list[int], producer: int, cut: int, flipped: int | None
) -> None:
    data = bytearray(b"".join(block(producer, sum(counts[:at]), count) for at, count in enumerate(counts)))
    if flipped is not None and data:
        data[flipped % len(data)] ^= 1
    pieces = cut_batch(POINTER, bytes(data[: max(0, len(data) - cut)]))
    assert sum(piece.records for piece in pieces) == POINTER.records
    assert all(piece.records >= 0 for piece in pieces)
