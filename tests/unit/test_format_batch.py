"""Bytes of a store cut into the blocks of a batch: the pieces always add up to its records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.format.batch import cut_batch, pointer_scope
from memq.format.blocks.builder import BlockBuilder
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


def block(producer: int, first: int, count: int) -> bytes:
    builder = BlockBuilder()
    builder.append_many([b"value"] * count)
    sealed = builder.seal(
        producer_id=producer, first_sequence=first, scope=pointer_scope(POINTER), now_ms=5, codec="none"
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
