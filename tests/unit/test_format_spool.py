"""Segments of the spool: entries round-trip, a cut end is torn, and damage affects only its entry."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.format.spool import (
    ENTRY,
    HEAD,
    SpoolContent,
    copied_entries,
    decode_segment,
    encode_entry,
    encode_head,
)

TOPIC_ID = bytes(range(16))
SEED = 0xDEADBEEF
NOW_MS = 1_700_000_000_000


def block(number: int, size: int) -> bytes:
    builder = BlockBuilder()
    builder.append(b"mqE1" * size)
    scope = scope_of(TOPIC_ID, 3)
    sealed = builder.seal(producer_id=7, first_sequence=number, scope=scope, now_ms=NOW_MS, codec="none")
    return bytes(sealed.data)


def segment(sizes: list[int], seed: int = SEED) -> tuple[bytes, list[int]]:
    """Return a segment with a block of each size, and where each entry ends."""
    data, ends = encode_head(seed, NOW_MS), []
    for number, size in enumerate(sizes):
        sealed = block(number, size)
        data += encode_entry(seed, TOPIC_ID, 3, 100 + number, NOW_MS + number, len(sealed)) + sealed
        ends.append(len(data))
    return data, ends


def numbers(content: SpoolContent) -> list[int]:
    return [entry.header.first_sequence for entry in content.entries]


sizes = st.lists(st.integers(0, 40), max_size=5)


@given(sizes)
def test_written_segment_is_read_back(found: list[int]) -> None:
    data, ends = segment(found)
    content = decode_segment(data)
    assert (content.damages, content.torn_bytes) == ([], 0)
    assert [entry.end for entry in content.entries] == ends
    for number, entry in enumerate(content.entries):
        assert (entry.topic_id, entry.partition) == (TOPIC_ID.hex(), 3)
        assert (entry.queue_offset, entry.appended_ms) == (100 + number, NOW_MS + number)
        assert data[entry.start : entry.end] == block(number, found[number])


@given(sizes, st.data())
def test_a_cut_segment_keeps_all_that_is_whole_and_calls_the_rest_torn(found: list[int], draw: st.DataObject) -> None:
    data, ends = segment(found)
    cut = draw.draw(st.integers(0, len(data)))
    filled = draw.draw(st.integers(0, 100))
    content = decode_segment(data[:cut] + bytes(filled if cut in (0, HEAD.size, *ends) else 0))
    whole = [end for end in ends if end <= cut]
    assert numbers(content) == list(range(len(whole)))
    assert content.damages == []
    begin = whole[-1] if whole else HEAD.size if cut >= HEAD.size else 0
    assert content.torn_bytes == cut - begin + (filled if cut in (0, HEAD.size, *ends) else 0)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_costs_the_entry_that_it_hits_and_is_reported(found: list[int], draw: st.DataObject) -> None:
    data, ends = segment(found)
    at = draw.draw(st.integers(HEAD.size, len(data) - 1))
    damaged = bytearray(data)
    damaged[at] ^= 1 << draw.draw(st.integers(0, 7))
    hit = sum(end <= at for end in ends)
    content = decode_segment(bytes(damaged))
    assert numbers(content) == [number for number in range(len(found)) if number != hit]
    assert len(content.damages) == 1
    assert content.damages[0].end == ends[hit]
    assert content.torn_bytes == 0


@given(st.binary(max_size=400))
@example(bytes(400))
def test_any_garbage_is_read_or_refused(garbage: bytes) -> None:
    for data in (garbage, encode_head(SEED, 0) + garbage, b"mqS1" + garbage):
        try:
            content = decode_segment(data)
        except (CorruptDataError, UnsupportedFormatError):
            continue
        assert content.entries == []
        assert content.torn_bytes + sum(one.end - one.start for one in content.damages) <= len(data)


@given(st.integers(0, HEAD.size - 1), st.integers(0, 7))
def test_a_damaged_head_is_damage(at: int, bit: int) -> None:
    data = bytearray(segment([3])[0])
    data[at] ^= 1 << bit
    try:
        decode_segment(bytes(data))
    except CorruptDataError:
        return
    raise AssertionError("a damaged head was read")


def test_bytes_of_an_older_segment_are_no_entries() -> None:
    data, ends = segment([1, 2])
    stale = segment([5, 6], seed=SEED + 1)[0][HEAD.size :]
    content = decode_segment(data + stale)
    assert numbers(content) == [0, 1]
    assert [(one.start, one.end) for one in content.damages] == [(ends[-1], len(data) + len(stale))]


def test_a_block_of_another_partition_is_damage() -> None:
    sealed = block(0, 1)
    data = encode_head(SEED, 0) + encode_entry(SEED, TOPIC_ID, 4, 0, 0, len(sealed)) + sealed
    content = decode_segment(data)
    assert content.entries == []
    assert "scope" in content.damages[0].cause


def test_headers_have_the_sizes_of_the_page() -> None:
    assert (HEAD.size, ENTRY.size) == (24, 48)


@given(sizes, st.data())
def test_entries_that_are_copied_are_those_of_another_segment(found: list[int], draw: st.DataObject) -> None:
    data, _ = segment(found)
    entries = decode_segment(data).entries
    chosen = [entry for entry in entries if draw.draw(st.booleans())]
    copy = encode_head(SEED + 1, NOW_MS)
    for entry in chosen:
        copy += b"".join(part for pair in copied_entries(data, *entry.span, SEED + 1) for part in pair)
    content = decode_segment(copy)
    assert (content.damages, content.torn_bytes) == ([], 0)
    assert [each.header for each in content.entries] == [each.header for each in chosen]
    places = [(each.topic_id, each.partition, each.queue_offset, each.appended_ms) for each in content.entries]
    assert places == [(each.topic_id, each.partition, each.queue_offset, each.appended_ms) for each in chosen]


@pytest.mark.parametrize("size", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + 1])
def test_entries_are_not_copied_of_a_segment_whose_read_is_cut_short(size: int) -> None:
    data, ends = segment([10, 10])
    with pytest.raises(CorruptDataError):
        list(copied_entries(data[:size], HEAD.size, ends[-1], SEED))


@pytest.mark.parametrize("at", [HEAD.size, HEAD.size + 20, 0, HEAD.size + ENTRY.size + 20, -1])
def test_damaged_entries_are_not_copied(at: int) -> None:
    data, ends = segment([10, 10])
    hurt = bytearray(data)
    hurt[at] ^= 1
    with pytest.raises(CorruptDataError):
        list(copied_entries(bytes(hurt), HEAD.size, ends[-1], SEED))
    with pytest.raises(CorruptDataError, match="begins no entry"):
        list(copied_entries(data, HEAD.size, ends[-1] - 1, SEED))
