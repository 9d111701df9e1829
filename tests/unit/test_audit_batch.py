"""One object against its pointer: any damage is found, and every named sequence is accounted for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memq.audit.checks.batch_check import BatchCheck, check_batch, merge_copies, missing_batch
from memq.audit.checks.object_reads import read_by_ranges
from memq.errors import CorruptDataError, NotFoundError, StoreError
from memq.format.blocks.header import Buffer
from memq.format.object import open_object
from memq.format.pointer import Location, Pointer, ProducerRanges
from memq.format.ranges import RangeSet
from tests.unit.audited import Run, block, packed, stored
from tests.unit.blocks import damaged

RUNS: list[Run] = [(5, 0, 3), (6, 10, 12), (5, 3, 7)]


def checked(pointer: Pointer, data: Buffer) -> BatchCheck:
    return check_batch(pointer, pointer.locations[0], data)


def sequences(check: BatchCheck) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, RangeSet] = {}
    for part in check.blocks:
        new = found.setdefault(part.producer, RangeSet()).add(part.first, part.next)
        assert new == part.next - part.first, "a sequence is in two blocks"
    return {producer: list(ranges) for producer, ranges in found.items()}


def test_a_sound_object_has_no_fault() -> None:
    pointer, data = stored(RUNS)
    check = checked(pointer, data)
    assert [(block.producer, block.first, block.next) for block in check.blocks] == RUNS
    assert (check.faults, check.damaged, check.complete) == ((), 0, True)


@given(st.integers(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_any_damage_is_found_and_hides_no_sequence(seed: int, times: int) -> None:
    pointer, data = stored(RUNS)
    check = checked(pointer, damaged(data, random.Random(seed), times))
    assert check.faults or check.damaged
    assert sequences(check) == {5: [(0, 7)], 6: [(10, 12)]}
    for part in check.blocks:
        assert (part.header is None) == (part.cause is not None)


def test_a_damaged_block_is_placed_by_the_index_and_the_rest_stays_sound() -> None:
    pointer, data = stored(RUNS)
    entry = open_object(data).blocks[1]
    for at in range(entry.offset, entry.offset + entry.length):
        hurt = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        check = checked(pointer, hurt)
        assert [block.cause is None for block in check.blocks] == [True, False, True], f"byte {at}"
        assert (check.blocks[1].producer, check.blocks[1].first, check.blocks[1].next) == RUNS[1]


def test_without_an_index_the_lengths_lead_and_the_pointer_places_the_rest() -> None:
    pointer, data = stored(RUNS)
    entry = open_object(data).blocks[1]
    cut = bytearray(data[:-1])
    cut[entry.offset] ^= 1
    check = checked(pointer, cut)
    assert "index" in check.faults[0]
    assert [(block.producer, block.first, block.next) for block in check.blocks if block.cause is None] == RUNS[:1]
    assert sequences(check) == {5: [(0, 7)], 6: [(10, 12)]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 2),
        ("batch_sequence", 9),
        ("records", 8),
        ("raw_bytes", 1),
        ("stored_bytes", 1),
        ("least_ms", 0),
        ("greatest_ms", 1 << 50),
        ("slots", (0, 1)),
        ("tag_bits", 0),
        ("checksum", 1),
        ("topic_id", "f" * 32),
        ("partition", 3),
        ("producers", (ProducerRanges(5, ((0, 7),)),)),
        ("producers", (ProducerRanges(5, ((0, 8),)), ProducerRanges(6, ((10, 12),)))),
    ],
)
def test_wrong_statements_of_a_pointer_are_found(field: str, value: object) -> None:
    pointer, data = stored(RUNS)
    check = checked(msgspec.structs.replace(pointer, **{field: value}), data)
    assert check.faults or check.damaged


def test_a_block_of_another_partition_is_refused_as_readers_refuse_it() -> None:
    pointer, data = packed([(5, 0, 3)], [block(5, 0, 3, partition=1)])
    (found,) = checked(pointer, data).blocks
    assert "scope" in str(found.cause)


def test_an_index_that_describes_another_block_is_at_fault() -> None:
    pointer, data = packed([(5, 0, 3)], [block(5, 0, 3)], lambda entry: entry._replace(tag_bits=0))
    (fault,) = checked(pointer, data).faults
    assert "is not what the index says" in fault


def test_a_pointer_that_names_too_many_producers_leaves_the_rest_to_the_index() -> None:
    pointer, data = stored(RUNS)
    cut = msgspec.structs.replace(pointer, producers=pointer.producers[:1], producers_complete=False)
    assert checked(cut, data).complete
    assert not checked(cut, data[:-1]).faults[1:], "the index alone is at fault"
    lost = missing_batch(cut, cut.locations[0], CorruptDataError("its object is missing"))
    assert not lost.complete
    assert sequences(lost) == {5: [(0, 7)]}


def test_an_object_that_ends_between_two_blocks_hides_what_the_pointer_does_not_name() -> None:
    pointer, data = stored(RUNS)
    cut = msgspec.structs.replace(pointer, producers=pointer.producers[1:], producers_complete=False)
    check = checked(cut, data[: open_object(data).blocks[2].offset])
    assert not check.complete
    assert [(block.number, str(block.cause)) for block in check.blocks if block.cause is not None] == [
        (2, "batch ends after 5 of 9 records")
    ]


def test_readers_take_the_soundest_copy_and_the_other_is_at_fault() -> None:
    pointer, data = stored(RUNS)
    gone = missing_batch(pointer, pointer.locations[0], CorruptDataError("its object is missing"))
    merged = merge_copies([gone, checked(pointer, data)])
    assert merged.damaged == 0
    assert any("its object is missing" in fault for fault in merged.faults)


# ---- reading by ranges -----------------------------------------------------------------------------


class OneObject:
    """A store with one object; it counts what is asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    async def __call__(self, store: str, key: str, offset: int, length: int) -> Buffer:
        assert length > 0
        self.asked.append((offset, length))
        if offset + length > len(self.data):
            raise CorruptDataError(f"object '{key}' has {len(self.data)} bytes")
        return self.data[offset : offset + length]


def read(data: bytes, pointer: Pointer) -> tuple[Buffer, Sequence[tuple[int, int]]]:
    store = OneObject(data)
    return asyncio.run(read_by_ranges(store, pointer.locations[0])), store.asked


def test_a_sound_object_takes_two_reads() -> None:
    pointer, data = stored(RUNS)
    found, asked = read(data, pointer)
    assert found == data
    assert len(asked) == 2


@pytest.mark.parametrize("kept", [0, 1, 100, -1, -40])
def test_a_cut_object_is_read_to_its_end(kept: int) -> None:
    pointer, data = stored(RUNS)
    assert read(data[:kept], pointer)[0] == data[:kept]


def test_bytes_behind_an_object_are_a_fault_only_in_a_whole_read() -> None:
    pointer, data = stored(RUNS)
    assert checked(pointer, data + b"more").faults
    assert read(data + b"more", pointer)[0] == data


@pytest.mark.parametrize("error", [NotFoundError("gone"), StoreError("away")])
def test_errors_of_the_store_are_reported(error: Exception) -> None:
    async def fail(store: str, key: str, offset: int, length: int) -> Buffer:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(read_by_ranges(fail, Location(store="main", key="k", offset=0, length=9)))
