"""Objects: the index finds every block, any damage is named, a scan replaces a lost index."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, MemqError, UnsupportedFormatError
from memq.format.batch import cut_blocks
from memq.format.blocks.columns import open_block
from memq.format.object import (
    BATCH_ENTRY,
    BLOCK_ENTRY,
    INDEX_HEAD,
    TRAILER,
    BatchEntry,
    BlockEntry,
    ObjectIndex,
    ObjectMeta,
    ObjectTopic,
    encode_index,
    open_object,
    parse_index,
    parse_trailer,
)
from memq.limits import FORMAT_VERSION, KIB, OBJECT_BATCHES_MAX, OBJECT_BLOCKS_MAX, OBJECT_META_BYTES_MAX
from tests.unit.blocks import build, damaged, seal

DAMAGE = (CorruptDataError, UnsupportedFormatError)
META = ObjectMeta(
    cluster="c", broker="b-1", topics=(ObjectTopic("t", "ab" * 16), ObjectTopic("u", "cd" * 16)), created_ms=5
)


def make_object(shape: list[list[int]]) -> tuple[bytes, ObjectIndex]:
    """Make an object of batches of blocks of so many records each."""
    body = b""
    batches: list[BatchEntry] = []
    blocks: list[BlockEntry] = []
    for number, sizes in enumerate(shape):
        first_block, start = len(blocks), len(body)
        for size in sizes:
            sequence = sum(entry.count for entry in blocks)
            sealed = seal(build([(b"v" * n, b"k", (), n, "t") for n in range(size)]), "zstd", first_sequence=sequence)
            blocks.append(BlockEntry.from_header(sealed.header, len(body)))
            body += sealed.data
        batches.append(
            BatchEntry(start, len(body) - start, -9, number, sum(sizes), first_block, len(sizes), 3, 1, number % 2)
        )
    index = ObjectIndex(META, tuple(batches), tuple(blocks))
    return body + encode_index(META, batches, blocks, len(body)), index


def rebuilt(index: ObjectIndex, body_length: int, **head: int) -> bytes:
    """Write an index as it is given, right or wrong, under a right checksum, behind an empty body."""
    encoded = msgspec.json.encode(index.meta)
    fields: dict[str, Any] = {"magic": b"mqI1", "version": FORMAT_VERSION, "codec": 0, "zero": 0, "meta": len(encoded)}
    fields |= {"batches": len(index.batches), "blocks": len(index.blocks), "batch_size": 64, "block_size": 64}
    entries = [BATCH_ENTRY.pack(*batch) for batch in index.batches] + [BLOCK_ENTRY.pack(*b) for b in index.blocks]
    return finished(b"".join((INDEX_HEAD.pack(*{**fields, **head}.values()), encoded, *entries)), body_length)


def finished(index: bytes, body_length: int, version: int = FORMAT_VERSION) -> bytes:
    """Put a body of zeros before an index, and a right trailer behind it."""
    length = body_length + len(index) + 32
    trailer = TRAILER.pack(body_length, length, len(index), version, 0, b"mqT1")
    checksum: int = crc32c(index + trailer[:24])
    return bytes(body_length) + index + trailer[:24] + checksum.to_bytes(4, "little") + trailer[28:]


shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)
SEEDS = st.integers(0, 1 << 32).map(random.Random)
OBJECT, INDEX = make_object([[2, 3], [1], [4, 1, 1]])
BODY = OBJECT.index(b"mqI1")


# ---- what goes in comes out ------------------------------------------------------------------


@given(shapes)
def test_an_object_is_found_by_its_trailer(shape: list[list[int]]) -> None:
    data, index = make_object(shape)
    assert open_object(data) == open_object(memoryview(bytearray(data))) == index
    trailer = parse_trailer(data[-32:], len(data))
    end = trailer.index_offset + trailer.index_length
    assert parse_index(data[trailer.index_offset : end], trailer) == index
    for entry in index.blocks:
        header = open_block(data[entry.offset : entry.offset + entry.length]).header
        assert BlockEntry.from_header(header, entry.offset) == entry
        assert (entry.least_ms, entry.greatest_ms) == (header.least_ms, header.greatest_ms)
    assert [index.blocks_of(batch) for batch in index.batches] == [
        index.blocks[batch.first_block : batch.first_block + batch.blocks] for batch in index.batches
    ]


@given(shapes)
def test_a_scan_finds_the_blocks_without_the_index(shape: list[list[int]]) -> None:
    data, index = make_object(shape)
    for lost in (data, data[: index.blocks[-1].offset + index.blocks[-1].length]):
        assert [piece.entry() for piece in cut_blocks(lost)] == list(index.blocks)


def test_a_scan_passes_over_damage_when_its_length_still_leads_on() -> None:
    data = bytearray(OBJECT)
    second = INDEX.blocks[1]
    data[second.offset + 40] ^= 1  # in the header, behind the length
    assert [piece.cause is None for piece in cut_blocks(data)] == [True, False, True, True, True, True]
    data[second.offset + 12] ^= 1  # the length itself
    assert [piece.cause is None for piece in cut_blocks(data)] == [True, False]
    assert list(cut_blocks(b"")) == []
    assert [type(piece.cause) for piece in cut_blocks(b"no object at all")] == [CorruptDataError]


def test_fields_that_a_newer_writer_added_are_passed_over() -> None:
    meta = msgspec.json.encode({**msgspec.to_builtins(INDEX.meta), "colour": {"a": [1]}})
    head = INDEX_HEAD.pack(b"mqI1", FORMAT_VERSION, 0, 0, len(meta), len(INDEX.batches), len(INDEX.blocks), 70, 96)
    entries = [BATCH_ENTRY.pack(*batch) + b"!" * 6 for batch in INDEX.batches]
    entries += [BLOCK_ENTRY.pack(*entry) + b"?" * 32 for entry in INDEX.blocks]
    assert open_object(finished(b"".join((head, meta, *entries)), BODY)) == INDEX


# ---- damage ----------------------------------------------------------------------------------


@given(SEEDS)
def test_any_damage_of_index_or_trailer_is_found(dice: random.Random) -> None:
    tail = damaged(OBJECT[BODY:], dice)
    with pytest.raises(DAMAGE):
        open_object(OBJECT[:BODY] + tail)


@given(SEEDS, st.integers(1, 4))
def test_damage_under_a_right_checksum_is_named_or_read(dice: random.Random, times: int) -> None:
    index = damaged(OBJECT[BODY:-32], dice, times)
    try:
        found = open_object(finished(index, BODY))
    except DAMAGE:
        return
    at = 0
    for batch in found.batches:
        assert at <= batch.offset <= batch.offset + batch.length <= BODY
        at = batch.offset + batch.length
        blocks = found.blocks_of(batch)
        assert len(blocks) == batch.blocks
        assert sum(entry.count for entry in blocks) == batch.records
        assert all(batch.offset <= entry.offset <= entry.offset + entry.length <= at for entry in blocks)
        assert all(one.offset + one.length <= two.offset for one, two in pairwise(blocks))


@given(st.binary(max_size=120))
def test_any_bytes_are_no_object(garbage: bytes) -> None:
    for data in (garbage, b"mqI1" + garbage + b"mqT1", finished(garbage, 0), finished(b"mqI1\0\0\0\0" + garbage, 9)):
        with pytest.raises(DAMAGE):
            open_object(data)
        for piece in cut_blocks(data):
            assert isinstance(piece.cause, DAMAGE)


def changed(place: str, number: int, **fields: Any) -> ObjectIndex:
    """Return INDEX with fields of one batch or block changed."""
    entries = list(getattr(INDEX, place))
    entries[number] = entries[number]._replace(**fields)
    both = {"batches": INDEX.batches, "blocks": INDEX.blocks, place: tuple(entries)}
    return ObjectIndex(INDEX.meta, both["batches"], both["blocks"])


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (changed("batches", 1, topic=2), "batch 1 has topic 2 of 2"),
        (changed("batches", 1, offset=INDEX.batches[1].offset - 1), "batch 1 at .* does not follow"),
        (changed("batches", 2, length=BODY), "batch 2 at .* does not follow"),
        (changed("batches", 1, length=(1 << 64) - 1), "batch 1 at .* does not follow"),
        (changed("batches", 1, first_block=0), "batch 1 at .* does not follow"),
        (changed("batches", 1, records=9), "blocks of batch 1 do not fit"),
        (changed("batches", 2, blocks=4), "blocks of batch 2 do not fit"),
        (changed("batches", 2, blocks=0xFFFF_FFFF), "blocks of batch 2 do not fit"),
        (changed("batches", 2, blocks=2, records=5), "batches have 5 blocks, the index has 6"),
        (changed("blocks", 1, offset=0), "block at 0 of batch 0 does not follow"),
        (changed("blocks", 1, length=BODY), "blocks of batch 0 do not fit"),
        (changed("blocks", 0, count=0), "block at 0 of batch 0"),
    ],
)
def test_entries_that_contradict_each_other_are_damage(index: ObjectIndex, text: str) -> None:
    with pytest.raises(CorruptDataError, match=text):
        open_object(rebuilt(index, BODY))


@pytest.mark.parametrize(
    ("head", "error", "text"),
    [
        ({"magic": b"mqB1"}, CorruptDataError, "starts with"),
        ({"version": 2}, UnsupportedFormatError, "version 2"),
        ({"codec": 1}, UnsupportedFormatError, "codec 1"),
        ({"meta": OBJECT_META_BYTES_MAX + 1}, CorruptDataError, "1048577 bytes of meta"),
        ({"batches": OBJECT_BATCHES_MAX + 1}, CorruptDataError, "65537 batches"),
        ({"blocks": OBJECT_BLOCKS_MAX + 1}, CorruptDataError, "1048577 blocks"),
        ({"blocks": OBJECT_BLOCKS_MAX}, CorruptDataError, "its head says"),
        ({"batch_size": 63}, CorruptDataError, "entries of 63"),
        ({"block_size": 0}, CorruptDataError, "and 0 bytes"),
    ],
)
def test_an_index_head_beyond_its_bounds_is_refused(head: dict[str, Any], error: type[MemqError], text: str) -> None:
    assert open_object(rebuilt(INDEX, BODY)) == INDEX
    with pytest.raises(error, match=text):
        open_object(rebuilt(INDEX, BODY, **head))


@pytest.mark.parametrize(
    ("meta", "error"),
    [
        (b"{}", CorruptDataError),
        (b"", CorruptDataError),
        (b"[" * 100_000, CorruptDataError),
        (b'{"format":1,"cluster":"\xff","broker":"b","topics":[],"created_ms":1}', CorruptDataError),
        (b'{"format":1,"cluster":"c","broker":"b","topics":[],"created_ms":"x"}', CorruptDataError),
        (b'{"format":2,"cluster":{}}', UnsupportedFormatError),
        (b'{"format":1,"requires":["colours"]}', UnsupportedFormatError),
        (b'{"format":1,"cluster":"c","broker":"b","topics":[],"created_ms":1%s}' % (b"0" * 350), CorruptDataError),
        (b'{"format":1,"cluster":"c","broker":"b","topics":[],"created_ms":-9007199254740992}', CorruptDataError),
    ],
)
def test_meta_that_can_t_be_read_is_named(meta: bytes, error: type[MemqError]) -> None:
    with pytest.raises(error):
        open_object(finished(INDEX_HEAD.pack(b"mqI1", FORMAT_VERSION, 0, 0, len(meta), 0, 0, 64, 64) + meta, 0))


def test_a_trailer_says_where_it_stands() -> None:
    trailer = OBJECT[-32:]
    for data, length, text in (
        (trailer[:-1], len(OBJECT), "is cut"),
        (trailer, 40, "is cut"),
        (trailer, len(OBJECT) + 1, "its trailer says"),
        (trailer[:-4] + b"mqT2", len(OBJECT), "ends with"),
        ((0xFFFF).to_bytes(8, "little") + trailer[8:], len(OBJECT), "its trailer says"),
    ):
        with pytest.raises(CorruptDataError, match=text):
            parse_trailer(data, length)
    with pytest.raises(UnsupportedFormatError, match="version 3"):
        open_object(finished(OBJECT[BODY:-32], BODY, version=3))
    with pytest.raises(CorruptDataError, match="the trailer says"):
        parse_index(OBJECT[BODY:-33], parse_trailer(trailer, len(OBJECT)))


@given(SEEDS)
def test_damage_costs_little_memory(dice: random.Random) -> None:
    data = finished(damaged(OBJECT[BODY:-32], dice), BODY)
    tracemalloc.start()
    try:
        open_object(data)
    except DAMAGE:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * len(data) + 64 * KIB
