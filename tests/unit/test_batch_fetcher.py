"""Cutting a stored batch into checked blocks: with and without its index, whole, damaged and cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.client.consumer.fetch.fetcher import BatchFetcher, FetchedPart
from memq.errors import CorruptDataError, NotFoundError, StoreError, UnsupportedFormatError
from memq.format.batch import BlockPiece, cut_batch, is_whole
from memq.format.blocks.header import Buffer
from memq.format.object import BatchEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer
from memq.limits import BLOCK_HEADER_BYTES
from memq.runtime.logs import EventLog
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from tests.skipping_loop import LoopClock, run_skipping
from tests.unit.fetched_batch import BODY, ENTRIES, POINTER, Shelf, batch, stored_object
from tests.unit.queue_model import TOPIC_ID, Block


def test_a_whole_batch_is_its_blocks() -> None:
    for index in (None, ENTRIES):
        pieces = cut_batch(POINTER, BODY, index)
        assert is_whole(pieces)
        assert [(piece.number, piece.first, piece.records) for piece in pieces] == [(0, 0, 2), (1, 2, 3), (2, 5, 4)]


@given(st.integers(0, len(BODY) - 1), st.integers(0, 7))
def test_with_the_index_a_flipped_bit_hides_its_own_block_only(at: int, bit: int) -> None:
    body = bytearray(BODY)
    body[at] ^= 1 << bit
    pieces = cut_batch(POINTER, body, ENTRIES)
    hit = [n for n, entry in enumerate(ENTRIES) if entry.offset <= at < entry.offset + entry.length]
    assert [piece.number for piece in pieces if piece.cause is not None] == hit
    assert sum(piece.records for piece in pieces) == POINTER.records


@given(st.integers(0, len(BODY) - 1), st.integers(0, 7))
def test_without_the_index_no_damage_goes_unseen_and_no_record_is_uncounted(at: int, bit: int) -> None:
    body = bytearray(BODY)
    body[at] ^= 1 << bit
    _check_pieces(cut_batch(POINTER, body), at)


@given(st.integers(0, len(BODY) - 1))
def test_a_batch_that_was_cut_keeps_what_is_there(length: int) -> None:
    _check_pieces(cut_batch(POINTER, BODY[:length]), length)
    _check_pieces(cut_batch(POINTER, BODY[:length], ENTRIES), length)


@pytest.mark.parametrize("there", [0, 1, 2])
def test_an_index_with_other_records_than_the_pointer_hides_none(there: int) -> None:
    assert is_whole(cut_batch(POINTER, BODY, ENTRIES[:there]))
    damaged = bytearray(BODY)
    damaged[ENTRIES[1].offset + BLOCK_HEADER_BYTES] ^= 1
    for index in (ENTRIES[:there], [*ENTRIES, ENTRIES[0]]):
        pieces = cut_batch(POINTER, damaged, index)
        assert [(piece.records, piece.cause is None) for piece in pieces] == [(2, True), (3, False), (4, True)]


def _check_pieces(pieces: list[BlockPiece], damaged_from: int) -> None:
    """All before the damage is whole, something is damaged, and no record is uncounted."""
    for entry, piece in zip(ENTRIES, pieces, strict=False):
        if entry.offset + entry.length <= damaged_from:
            assert (piece.cause, piece.records) == (None, entry.count)
    assert not is_whole(pieces)
    assert sum(piece.records for piece in pieces) == POINTER.records
    assert [piece.first for piece in pieces] == [sum(p.records for p in pieces[:n]) for n in range(len(pieces))]


@given(st.binary(max_size=300))
def test_garbage_is_damage(garbage: bytes) -> None:
    pieces = cut_batch(POINTER, garbage)
    assert not is_whole(pieces)
    assert all(isinstance(piece.cause, CorruptDataError | UnsupportedFormatError) for piece in pieces if piece.cause)


def test_a_block_of_another_partition_is_damage() -> None:
    pointer, body, _ = batch([Block(1, 0)])
    (piece,) = cut_batch(pointer, Block(1, 0).data(partition=1))
    assert "scope" in str(piece.cause)
    assert is_whole(cut_batch(pointer, body))


def fetch(direct: Shelf | None, broker: Shelf, pointer: Pointer = POINTER, *, times: int = 1) -> list[list[BlockPiece]]:
    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        return await broker.get_range(key, offset, length)

    async def main() -> list[list[BlockPiece]]:
        fetcher = BatchFetcher("auto", read, lambda store: direct, ConfirmedReads(EventLog(LoopClock())))
        return [list(await fetcher.fetch(pointer)) for _ in range(times)]

    return run_skipping(main())


def test_the_store_is_read_directly_where_it_opens() -> None:
    direct, broker = Shelf(stored_object()), Shelf(stored_object())
    assert is_whole(fetch(direct, broker)[0])
    assert (direct.reads, broker.reads) == (1, 0)


def test_an_index_that_lacks_blocks_of_the_batch_is_not_believed() -> None:
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    entry = BatchEntry(0, ENTRIES[2].offset, 1, 0, 5, 0, 2, 0, 1)
    body = bytearray(BODY + encode_index(meta, [entry], ENTRIES[:2], len(BODY)))
    body[ENTRIES[1].offset + BLOCK_HEADER_BYTES] ^= 1
    [pieces] = fetch(None, Shelf(bytes(body)))
    assert [(piece.records, piece.cause is None) for piece in pieces] == [(2, True), (3, False), (4, True)]

    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        return await Shelf(bytes(body)).get_range(key, offset, length)

    async def main() -> None:
        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads(EventLog(LoopClock())))
        part = await fetcher.fetch_records(POINTER, 5, 9)
        assert (sum(piece.records for piece in part.pieces), part.before) == (POINTER.records, [])
        with pytest.raises(CorruptDataError, match="its index has 5 of the 9 records of a batch"):
            await fetcher.index_of(POINTER)

    run_skipping(main())


def test_a_folder_of_the_same_name_on_another_machine_is_asked_once() -> None:
    direct, broker = Shelf(None), Shelf(stored_object())
    assert all(is_whole(pieces) for pieces in fetch(direct, broker, times=3))
    assert (direct.reads, broker.reads) == (1, 3)


def test_transient_error_precedes_a_missing_object() -> None:
    with pytest.raises(StoreError):
        fetch(Shelf(None), Shelf(None, StoreError("down")))
    with pytest.raises(NotFoundError):
        fetch(Shelf(None), Shelf(None))


def test_a_damaged_copy_is_replaced_by_a_whole_one() -> None:
    damaged = bytearray(stored_object())
    damaged[100] ^= 1
    assert is_whole(fetch(Shelf(bytes(damaged)), Shelf(stored_object()))[0])


def test_a_part_that_is_damaged_otherwise_each_time_is_asked_for_again() -> None:
    """A bit that flips on the way flips elsewhere the next time: only two equal answers show that it lies so."""

    class Noisy(Shelf):
        """Spoils another byte of its first answers that hold blocks."""

        def __init__(self) -> None:
            super().__init__(stored_object())
            self.spoiled = 0

        async def get_range(self, key: str, offset: int, length: int) -> Buffer:
            data = bytearray(await super().get_range(key, offset, length))
            if offset < len(BODY) and self.spoiled < 2:
                self.spoiled += 1
                data[BLOCK_HEADER_BYTES + self.spoiled] ^= 1
            return bytes(data)

    shelf = Noisy()

    async def main() -> FetchedPart:
        async def read(store: str, key: str, offset: int, length: int) -> Buffer:
            return await shelf.get_range(key, offset, length)

        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads(EventLog(LoopClock())))
        return await fetcher.fetch_records(POINTER, 0, 1)

    part = run_skipping(main())
    assert shelf.spoiled == 2
    assert is_whole(part.pieces)


@pytest.mark.parametrize(
    ("failure", "reads"),
    [
        (StoreError("down"), 1),  # it may pass: the caller tries again
        (None, 3),  # what is missing was asked for three times
    ],
)
def test_blocks_that_can_not_be_fetched_are_not_asked_for_as_a_whole_batch(
    failure: Exception | None, reads: int
) -> None:
    shelf = Shelf(None, failure)

    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        return await shelf.get_range(key, offset, length)

    async def main() -> None:
        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads(EventLog(LoopClock())))
        await fetcher.fetch_blocks(POINTER, lambda entry: True)

    with pytest.raises(StoreError if failure else NotFoundError):
        run_skipping(main())
    assert shelf.reads == reads


def test_a_damaged_length_is_got_over_by_the_index() -> None:
    damaged = bytearray(stored_object())
    damaged[12] ^= 0xFF
    (pieces,) = fetch(None, Shelf(bytes(damaged)))
    assert [piece.cause is None for piece in pieces] == [False, True, True]


@given(st.integers(1, len(BODY) - 1))
def test_of_an_object_that_was_cut_the_whole_blocks_come(length: int) -> None:
    (pieces,) = fetch(None, Shelf(stored_object()[:length]))
    _check_pieces(pieces, length)


def test_the_second_location_is_used_when_the_first_is_gone() -> None:
    class Shelves(Shelf):
        async def get_range(self, key: str, offset: int, length: int) -> Buffer:
            if key == "gone":
                raise NotFoundError("gone")
            return await super().get_range(key, offset, length)

    gone = Location(store="main", key="gone", offset=0, length=len(BODY))
    fields = {name: getattr(POINTER, name) for name in POINTER.__struct_fields__}
    pointer = Pointer(**fields | {"locations": (gone, *POINTER.locations)})
    assert is_whole(fetch(None, Shelves(stored_object()), pointer)[0])
