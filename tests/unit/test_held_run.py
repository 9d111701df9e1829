"""Runs of held blocks: they are read back by due time, and damage, short bytes and other runs are found."""

from __future__ import annotations

import pytest

from memq.audit.checks.object_check import check_file
from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.key import is_run_key, kind_without_batches, run_key, state_part_key, state_snapshot_key
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunTarget, RunWriter, decode_run_block, decode_run_index, open_run

A, B = Target("clicks", "ab" * 16, 0), Target("orders", "cd" * 16, 1)
KEY = run_key("memq", "_memq_state", "ab" * 16, 3, 77)


def hold(producer: int, due_ms: int, target: Target = A) -> RunEntry:
    return RunEntry(HeldBlock(HoldId(producer, 0), 1, due_ms, producer * 10, 10), target, f"object {producer % 2}")


def written(*blocks: list[RunEntry]) -> tuple[NamedRun, bytes]:
    writer = RunWriter(HELD_ROWS)
    for holds in blocks:
        writer.add(holds)
    run, buffers = writer.finish(KEY, 2, 9)
    return run, b"".join(buffers)


BLOCKS = ([hold(9, 100), hold(1, 200, B)], [hold(2, 200), hold(8, 300, B), hold(3, 400)])
RUN, DATA = written(*BLOCKS)


def test_a_reader_finds_the_blocks_of_a_run_by_its_index() -> None:
    assert (RUN.key, RUN.level, RUN.group, RUN.count, RUN.size) == (KEY, 2, 9, 5, len(DATA))
    assert (RUN.first, RUN.last) == ((100, 9, 0), (400, 3, 0))
    begin = RUN.size - 8 - RUN.index_bytes
    index = decode_run_index(RUN, DATA[begin : begin + RUN.index_bytes])
    assert index.targets == (RunTarget(A, 3, (100, 9, 0)), RunTarget(B, 2, (200, 1, 0)))
    assert [(each.count, each.last) for each in index.blocks] == [(2, (200, 1, 0)), (3, (400, 3, 0))]
    pieces = [DATA[each.offset : each.offset + each.length] for each in index.blocks]
    found = [decode_run_block(HELD_ROWS, index, *each) for each in zip(index.blocks, pieces, strict=True)]
    assert found == list(BLOCKS)
    with pytest.raises(CorruptDataError, match="not the bytes that the index names"):
        decode_run_block(HELD_ROWS, index, index.blocks[0], pieces[1])
    assert open_run(HELD_ROWS, DATA) == [each for holds in BLOCKS for each in holds]


def test_a_reader_refuses_a_sound_block_of_another_run_with_the_same_length() -> None:
    run, data = written([hold(5, 100)])
    other, lies = written([hold(6, 100)])
    assert (other.size, other.index_bytes) == (run.size, run.index_bytes)
    begin = run.size - 8 - run.index_bytes
    index = decode_run_index(run, data[begin : begin + run.index_bytes])
    (entry,) = index.blocks
    with pytest.raises(CorruptDataError, match="not the bytes that the index names"):
        decode_run_block(HELD_ROWS, index, entry, lies[: entry.length])


def test_a_reader_refuses_the_index_of_another_run() -> None:
    other, data = written([hold(5, 100)])
    begin = other.size - 8 - other.index_bytes
    with pytest.raises(CorruptDataError, match="not the bytes that the state names"):
        decode_run_index(RUN, data[begin : begin + other.index_bytes])


def test_each_changed_byte_of_a_run_is_found() -> None:
    assert check_file(KEY, memoryview(DATA)).findings == []
    for at in range(len(DATA)):
        changed = bytearray(DATA)
        changed[at] ^= 1
        assert check_file(KEY, memoryview(changed)).findings, f"byte {at}"
    for length in range(len(DATA)):
        with pytest.raises((CorruptDataError, UnsupportedFormatError)):
            open_run(HELD_ROWS, DATA[:length])


def test_the_key_of_a_run_is_below_that_of_its_state_log() -> None:
    part = state_part_key(state_snapshot_key("memq", "_memq_state", "ab" * 16, 3, 1, 2), 0)
    assert KEY.rpartition("/runs/")[0] == part.rpartition("/")[0].rpartition("/")[0]
    assert (is_run_key(KEY), is_run_key(part), is_run_key(f"{KEY}0")) == (True, False, False)
    assert kind_without_batches(KEY) == "run of held blocks"
