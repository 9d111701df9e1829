"""Copies where damage is passed over: what a task takes as read is what an earlier batch has in a sound block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.errors import CorruptDataError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import parse_header
from memq.format.pointer import Pointer
from memq.spark.read import planner
from memq.spark.read.planner import EarlierBatches, sound_copies
from tests.unit.audited import block, data_pointer

WINDOW_MS = 1_000
Block = tuple[int, int, bool]  # producer, number, whether it is sound


def pieces_of(blocks: list[Block]) -> list[BlockPiece]:
    """Return blocks of ten records, number 3 having 30 to 40."""
    found = []
    for number, (producer, at, sound) in enumerate(blocks):
        data = block(producer, at * 10, at * 10 + 10)
        header, cause = (parse_header(data), None) if sound else (None, CorruptDataError("damaged", hint="none"))
        found.append(BlockPiece(number, number * 10, 10, header, memoryview(data), cause))
    return found


def pointer_of(blocks: list[Block]) -> Pointer:
    return data_pointer([(producer, at * 10, at * 10 + 10) for producer, at, _ in blocks])


blocks = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=6, unique=True)


@given(st.lists(blocks, max_size=6), st.integers(1, 3), st.integers(0, 5))
def test_what_is_sound_somewhere_is_seen(batches: list[list[Block]], producer: int, at: int) -> None:
    passed = EarlierBatches(WINDOW_MS)
    for batch in batches:
        passed.note(0, pointer_of(batch))
    seen = [(producer, (at * 10, at * 10 + 10))]
    holders = passed.holders(0, pointer_of([(producer, at, True)]), seen)
    holding = [batch for batch in batches if any(each[:2] == (producer, at) for each in batch)]
    assert list(holders) == [pointer_of(batch) for batch in holding]
    found = sound_copies(seen, [(pointer_of(batch), pieces_of(batch)) for batch in holding])
    sound = any((producer, at, True) in batch for batch in batches)
    assert list(found) == (seen if sound else [])


def test_a_block_that_its_pointer_says_to_pass_over_is_no_copy() -> None:
    batch = [(1, 0, True), (1, 1, True)]
    pointer = replace(pointer_of(batch), skip=(0,))
    assert sound_copies([(1, (0, 20))], [(pointer, pieces_of(batch))]) == ((1, (10, 20)),)


def test_batches_are_forgotten_after_the_window_and_of_too_many_the_pointers_decide() -> None:
    passed, batch = EarlierBatches(WINDOW_MS), pointer_of([(1, 0, True)])
    passed.note(0, batch)
    passed.note(3 * WINDOW_MS, batch)
    assert passed.holders(3 * WINDOW_MS, batch, [(1, (0, 10))]) == (batch,)
    for _ in range(planner.BATCHES_MAX):
        passed.note(3 * WINDOW_MS, batch)
    assert passed.holders(3 * WINDOW_MS, batch, [(1, (0, 10))]) == ()


def test_batches_of_another_write_partition_hold_other_records() -> None:
    passed, batch = EarlierBatches(WINDOW_MS), pointer_of([(1, 0, True)])
    passed.note(0, replace(batch, partition=batch.partition + 1))
    assert passed.holders(0, batch, [(1, (0, 10))]) == ()
