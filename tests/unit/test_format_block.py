"""Blocks: any records round-trip, any damage is a CorruptDataError, and memory is bounded."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import lz4.block
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, InvalidRequestError, MemqError, TooLargeError, UnsupportedFormatError
from memq.format.blocks import header as block
from memq.format.blocks.arrow import block_rows, table
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import BlockReader, open_block, verify_block
from memq.format.blocks.header import HEADER, BlockHeader, Buffer, check_block, parse_header, scope_of, tag_bit
from memq.kernel.rows import KEYED, PLAIN, TIMED
from memq.limits import BLOCK_RAW_BYTES_MAX, BLOCK_RECORDS_MAX, FORMAT_VERSION, KIB, MIB, TIME_MS_END
from memq.topic import slot_of_key
from tests.unit.blocks import NOW_MS, Record, any_records, build, codecs, damaged, expected, records, repair, seal

DAMAGE = (CorruptDataError, UnsupportedFormatError)
SEEDS = st.integers(0, 1 << 32).map(random.Random)
ONE = seal(build([(b"value", b"key", (("name", b"1"), ("null", None)), 5, "web"), (None, None, (), 9, None)]))


def arrow_of(reader: BlockReader) -> pa.Table:
    """A block as an Arrow table."""
    return table([block_rows(reader)])


def rows_of(batch: pa.Table) -> list[tuple[Any, ...]]:
    """An Arrow table as the tuples of `BlockReader.records`."""
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    headers = [tuple((h["name"], h["value"]) for h in pairs) for pairs in batch.column("headers").to_pylist()]
    values, keys, tags = (batch.column(name).to_pylist() for name in ("value", "key", "tag"))
    return list(zip(values, keys, headers, times, tags, strict=True))


def with_header(data: Buffer, **fields: int) -> bytes:
    """Change fields of a block's header, `version` and `magic` too, and repair its checksum."""
    names = ("magic", "checksum", "version", *BlockHeader._fields[1:])
    values: dict[str, Any] = dict(zip(names, HEADER.unpack_from(data), strict=True))
    assert fields.keys() <= values.keys()
    return repair(b"".join((HEADER.pack(*{**values, **fields}.values()), data[72:])))


def with_raw(raw: bytes, count: int, flags: int) -> bytes:
    """Make a block of codec none from raw columns."""
    sizes = {"payload_length": len(raw), "raw_length": len(raw), "count": count, "flags": flags}
    return repair(with_header(ONE.data[:72], **sizes) + raw)


# ---- what goes in comes out ------------------------------------------------------------------


@given(any_records, codecs)
def test_any_records_come_back(rows: list[Record], codec: str) -> None:
    builder = build(rows)
    sealed = seal(builder, codec)
    reader = open_block(sealed.data)
    assert list(reader.records()) == expected(rows)
    columns = (reader.values(), reader.keys(), reader.headers(), reader.timestamps(), reader.tags())
    assert list(zip(*columns, strict=True)) == expected(rows)
    assert [view if view is None else bytes(view) for view in reader.memoryviews()] == reader.values()
    assert sealed.header.raw_length <= builder.raw_bytes
    assert (reader.count, sealed.header.next_sequence) == (len(rows), 100 + len(rows))
    assert check_block(memoryview(bytearray(sealed.data))) == sealed.header == parse_header(b"??" + sealed.data, 2)
    verify_block(reader)


@given(any_records, codecs)
def test_arrow_has_the_same_records(rows: list[Record], codec: str) -> None:
    batch = arrow_of(open_block(seal(build(rows), codec).data))
    batch.validate(full=True)
    assert rows_of(batch) == expected(rows)


@given(records((True, False, True, False)), st.booleans(), st.booleans(), st.none() | st.text(max_size=5))
def test_extend_is_append_repeated(rows: list[Record], keys: bool, times: bool, tag: str | None) -> None:
    one, many = BlockBuilder(), BlockBuilder()
    stamps = [row[3] or 0 for row in rows]
    for builder in (one, many):
        builder.append(b"first")
    for row, stamp in zip(rows, stamps, strict=True):
        one.append(row[0], row[1] if keys else None, None, stamp if times else None, tag)
    many.append_many(
        [row[0] for row in rows], [row[1] for row in rows] if keys else None, stamps if times else None, tag
    )
    for builder in (one, many):
        builder.append(b"last", headers=[("h", b"")])
    read = [list(open_block(seal(builder).data).records()) for builder in (one, many)]
    assert read[0] == read[1]
    assert one.count == many.count == len(rows) + 2


@given(st.lists(st.binary(max_size=30), min_size=1), st.sampled_from([PLAIN, KEYED, TIMED]))
def test_a_fast_caller_may_append_to_the_rows(values: list[bytes], shape: int) -> None:
    rows = [(value, b"k", 7 + number) for number, value in enumerate(values)]
    slow, fast = BlockBuilder(), BlockBuilder()
    for builder, some in ((slow, rows), (fast, rows[:1])):
        for value, key, time in some:
            builder.append(value, key if shape > PLAIN else None, None, time if shape == TIMED else None)
    assert fast.rows is not None
    assert fast.shape == shape
    for row in rows[1:]:
        fast.rows.cells.extend(row[:shape])
        fast.rows.room -= len(row[0]) + (shape > PLAIN) + fast.rows.row_cost
    assert (fast.raw_bytes, fast.count) == (slow.raw_bytes, slow.count)
    assert seal(fast).data == seal(slow).data


@given(records((True, True, True, True)), st.data())
def test_a_block_says_the_same_however_its_records_came(rows: list[Record], data: st.DataObject) -> None:
    """The bytes follow from the records alone, whether they lay in rows, in columns, or in both."""
    one = build(rows)
    mixed, at = BlockBuilder(), 0
    while at < len(rows):
        value, key, headers, time, tag = rows[at]
        end = at + data.draw(st.integers(1, 4), label="end")
        alike = [row for row in rows[at:end] if not row[2] and row[4] == tag and (row[1] is None) == (key is None)]
        alike = [row for row in alike if (row[3] is None) == (time is None)]
        if headers or len(alike) < len(rows[at:end]):
            mixed.append(value, key, headers, time, tag)
            at += 1
            continue
        keys = None if key is None else [row[1] for row in alike]
        times = None if time is None else [row[3] or 0 for row in alike]
        mixed.append_many([row[0] for row in alike], keys, times, tag)
        at = end
    assert seal(mixed).data == seal(one).data
    assert seal(mixed).data == seal(mixed).data, "a block may be sealed again, under another identity"
    assert list(open_block(seal(mixed).data).records()) == list(open_block(seal(one).data).records())


def test_a_column_that_says_nothing_is_not_written() -> None:
    header = seal(build([(b"a", None, (), 5, None), (b"b", None, (), 5, None)])).header
    assert (header.flags, header.base_ms, header.max_delta_ms) == (0, 5, 0)
    assert seal(build([(b"a", None, (), None, None)])).header.base_ms == NOW_MS


def test_block_that_does_not_shrink_is_stored_uncompressed() -> None:
    noise = [(random.Random(1).randbytes(500), None, (), None, None)]
    for codec in ("zstd", "lz4"):
        assert seal(build(noise), codec).header.codec == block.CODEC_NONE
        assert seal(build([(b"x" * 500, None, (), None, None)]), codec).header.codec == block.CODECS[codec]


def test_times_slots_and_tags_are_in_the_header() -> None:
    rows: list[Record] = [(b"", b"key", (), 10, "web"), (b"", b"other", (), 7, "mob"), (b"", b"", (), 30, None)]
    header = seal(build(rows), slot_range=(0, 60_000)).header
    assert (header.least_ms, header.greatest_ms) == (7, 30)
    assert header.tag_bits == tag_bit("web") | tag_bit("mob")
    assert (header.slot_first, header.slot_last) == (0, 60_000)
    for missing in ([*rows, (b"", None, (), None, None)], [(b"", None, (), None, None)]):
        header = seal(build(missing), slot_range=(5, 10)).header
        assert (header.slot_first, header.slot_last) == (0, 65_535), "a record without key may be anywhere"


def test_a_span_of_times_beyond_32_bits_has_no_known_end() -> None:
    header = seal(build([(b"", None, (), 0, None), (b"", None, (), 1 << 40, None)])).header
    assert header.max_delta_ms == block.DELTA_SATURATED
    assert header.greatest_ms == (1 << 53) - 1


def test_functions_that_other_languages_must_match() -> None:
    assert scope_of(bytes(range(16)), 3) == 0x8952C9E2
    assert tag_bit("web") == 1 << 17
    assert (slot_of_key(b"key"), slot_of_key(b"")) == (35_472, 0)


# ---- bounds of the builder -------------------------------------------------------------------


def test_a_full_block_takes_no_more_and_stays_whole() -> None:
    builder = BlockBuilder()
    builder.append(bytes(BLOCK_RAW_BYTES_MAX - 64), b"k")
    attempts: tuple[Callable[[], None], ...] = (
        lambda: builder.append(bytes(64)),
        lambda: builder.append(b"", headers=[("h", bytes(64))]),
        lambda: builder.append(b"", headers=[("h" * 64, b"")]),
        lambda: builder.append_many([b""] * 64),
    )
    for extra in attempts:
        with pytest.raises(TooLargeError, match="16777216 are allowed"):
            extra()
    assert builder.count == 1
    assert seal(builder).header.raw_length <= BLOCK_RAW_BYTES_MAX
    with pytest.raises(TooLargeError, match="1048576 are allowed"):
        BlockBuilder().append_many([None] * (BLOCK_RECORDS_MAX + 1))


def test_a_new_column_counts_for_all_records_before_it() -> None:
    builder = BlockBuilder()
    builder.append_many([None] * (BLOCK_RECORDS_MAX - 1))
    with pytest.raises(TooLargeError):
        builder.append(b"", b"k", (), 1, None)
    assert builder.count == BLOCK_RECORDS_MAX - 1


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        ({"headers": [("h", b"")] * 65_536}, TooLargeError, "65536 headers"),
        ({"headers": [("h" * 65_536, b"")]}, TooLargeError, "65536 bytes"),
        ({"headers": [("\ud800", b"")]}, InvalidRequestError, "not valid Unicode"),
        ({"tag": "\udfff"}, InvalidRequestError, "not valid Unicode"),
        ({"timestamp_ms": 1 << 53}, InvalidRequestError, "outside"),
        ({"timestamp_ms": -(1 << 53)}, InvalidRequestError, "outside"),
    ],
)
def test_a_record_that_no_block_can_hold_is_refused_alone(
    record: dict[str, Any], error: type[MemqError], text: str
) -> None:
    builder = BlockBuilder()
    builder.append(b"before")
    with pytest.raises(error, match=text):
        builder.append(b"refused", **record)
    builder.append(b"after", headers=[("n", b"")])
    assert open_block(seal(builder).data).values() == [b"before", b"after"]


def test_a_block_has_a_bounded_dictionary() -> None:
    builder = BlockBuilder()
    for number in range(65_535):
        builder.append(b"", tag=str(number))
    with pytest.raises(TooLargeError, match="65535 names"):
        builder.append(b"", tag="one more")
    assert open_block(seal(builder).data).tags() == [str(number) for number in range(65_535)]


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1 keys for 2 values"):
        BlockBuilder().append_many([b"", b""], keys=[b""])
    with pytest.raises(InvalidRequestError, match="3 timestamps for 2 values"):
        BlockBuilder().append_many([b"", b""], timestamps_ms=[1, 2, 3])
    with pytest.raises(InvalidRequestError, match="outside"):
        BlockBuilder().append_many([b"", b""], timestamps_ms=[1, 1 << 53])


# ---- damage ----------------------------------------------------------------------------------


def read_all(data: bytes) -> list[Any]:
    """Read a block in every way there is; the ways agree."""
    outcomes: list[Any] = []
    ways: tuple[Callable[[BlockReader], Any], ...] = (
        lambda reader: list(reader.records()),
        lambda reader: rows_of(arrow_of(reader)),
    )
    for way in ways:
        try:
            outcomes.append(way(open_block(data)))
        except DAMAGE as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    return outcomes


@given(any_records, codecs, SEEDS)
def test_any_damage_is_found(rows: list[Record], codec: str, dice: random.Random) -> None:
    data = seal(build(rows), codec).data
    with pytest.raises(DAMAGE):
        check_block(damaged(data, dice))


@given(any_records, codecs, SEEDS, st.integers(1, 4))
def test_damage_under_a_right_checksum_is_named_or_read(
    rows: list[Record], codec: str, dice: random.Random, times: int
) -> None:
    read_all(repair(damaged(seal(build(rows), codec).data, dice, times)))


@given(any_records, SEEDS, st.integers(1, 4))
def test_damage_inside_the_columns_is_named_or_read(rows: list[Record], dice: random.Random, times: int) -> None:
    sealed = seal(build(rows))
    raw = bytearray(sealed.data[72:])
    for _ in range(times):
        raw = bytearray(damaged(bytes(raw), dice)) or raw
    count = min(sealed.header.count, len(raw) // 4)
    if count:
        read_all(with_raw(bytes(raw), count, sealed.header.flags))


@given(st.binary(max_size=200), st.integers(0, 127), st.integers(1, 20))
def test_any_columns_are_named_or_read(raw: bytes, flags: int, count: int) -> None:
    if 4 * count <= len(raw) and flags & 17 != 16:
        read_all(with_raw(raw, count, flags))


@given(st.binary(max_size=300))
def test_any_bytes_are_no_block(garbage: bytes) -> None:
    for data in (garbage, block.MAGIC + garbage, repair(block.MAGIC + bytes(4) + garbage)):
        with pytest.raises(DAMAGE):
            check_block(data)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"magic": b"mqB2"}, "starts with"),
        ({"raw_length": 1 << 24 | 1, "codec": 1}, "raw length 16777217 is over"),
        ({"raw_length": ONE.header.raw_length - 1, "codec": 1}, "does not fit raw length"),
        ({"raw_length": ONE.header.raw_length + 1}, "does not fit raw length"),
        ({"count": 0}, "record count 0"),
        ({"count": BLOCK_RECORDS_MAX + 1}, "record count 1048577"),
        ({"count": ONE.header.raw_length // 4 + 1}, "can't lie in"),
        ({"flags": block.NULL_KEYS}, "null keys without keys"),
        ({"producer_id": 0}, "producer id"),
        ({"producer_id": 1 << 63}, "producer id"),
        ({"first_sequence": (1 << 63) - 1}, "over 2\\^63"),
        ({"base_ms": 1 << 53}, "timestamp"),
        ({"base_ms": -(1 << 53)}, "timestamp"),
        ({"slot_first": 9, "slot_last": 8}, "no range"),
        ({"payload_length": 0, "raw_length": 8, "codec": 1}, "has .* bytes, its header says 72"),
    ],
)
def test_a_header_beyond_its_bounds_is_damage(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CorruptDataError, match=text):
        check_block(with_header(ONE.data, **fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"version": 2}, "version 2"),
        ({"codec": 3}, "codec 3"),
        ({"codec": 17}, "codec 17"),
        ({"flags": 128}, "flags 0x80"),
    ],
)
def test_newer_format_is_never_damage(fields: dict[str, int], text: str) -> None:
    newer = with_header(ONE.data, **fields)
    for read in (check_block, parse_header):
        with pytest.raises(UnsupportedFormatError, match=text):
            read(newer)
    with pytest.raises(CorruptDataError, match="checksum"):
        check_block(newer[:-1] + b"!")  # damage is never called newer either


def test_version_is_the_one_of_the_format() -> None:
    assert ONE.data[8] == FORMAT_VERSION


def extended(*extensions: tuple[int, bytes], more: bytes = b"") -> bytes:
    """A block of one value with extensions."""
    coded = b"".join(struct.pack("<HI", number, len(data)) + data for number, data in extensions) + more
    return with_raw(struct.pack("<II", 5, len(coded)) + coded + b"value", 1, block.EXTENSIONS)


def test_extensions_are_passed_over_or_refused() -> None:
    assert open_block(extended()).values() == [b"value"]
    assert open_block(extended((1, b"abc"), (0x7FFF, b""))).values() == [b"value"]
    with pytest.raises(UnsupportedFormatError, match="extension 0x8000"):
        open_block(extended((1, b"abc"), (0x8000, b""))).values()
    with pytest.raises(CorruptDataError, match="extension"):
        open_block(extended((1, b"abc"), more=b"\1\0\xff\0\0\0")).values()


NAMES_TWICE = struct.pack("<IHH1sH1s", 0, 2, 1, b"a", 1, b"a")
RAW_FAULTS = {
    "lengths": (struct.pack("<I", 5) + b"four", 1, 0, "do not fill"),
    "huge length": (struct.pack("<II", 0xFFFF_FFFF, 1), 2, 0, "(do not fill|2\\^32)"),
    "null with bytes": (struct.pack("<IB", 1, 0) + b"x", 1, block.NULL_VALUES, "null among the values has bytes"),
    "unused bit": (struct.pack("<IB", 0, 3), 1, block.NULL_VALUES, "unused bits"),
    "name twice": (struct.pack("<IH", 0, 0xFFFF) + NAMES_TWICE[4:], 1, block.TAG, "twice"),
    "name not utf-8": (struct.pack("<IHHH1s", 0, 0xFFFF, 1, 1, b"\xff"), 1, block.TAG, "not UTF-8"),
    "tag without name": (struct.pack("<IHH", 0, 0, 0), 1, block.TAG, "tag has name 0 of 0"),
    "header without name": (struct.pack("<IIIHHH", 0, 1, 0, 0, 1, 0), 1, block.HEADERS, "header has name 0 of 0"),
    "headers of no record": (struct.pack("<IIIHHHH1s", 0, 1, 0, 0, 0, 1, 1, b"a"), 1, block.HEADERS, "have 0 headers"),
    "many headers": (struct.pack("<II", 0, 0xFFFF_FFFF), 1, block.HEADERS, "header lengths need"),
    "time too early": (struct.pack("<IIqq", 0, 0, 5, -TIME_MS_END), 2, block.TIMESTAMP, "outside"),
    "time too late": (struct.pack("<IIqq", 0, 0, TIME_MS_END, 5), 2, block.TIMESTAMP, "outside"),
    "latest of all times": (struct.pack("<Iq", 0, (1 << 63) - 1), 1, block.TIMESTAMP, "outside"),
    "many names": (struct.pack("<IHH", 0, 0xFFFF, 0xFFFF), 1, block.TAG, "name length need"),
}


@pytest.mark.parametrize("name", RAW_FAULTS)
def test_columns_that_contradict_each_other_are_damage(name: str) -> None:
    raw, count, flags, text = RAW_FAULTS[name]
    data = with_raw(raw, count, flags)
    for read in (lambda: list(open_block(data).records()), lambda: arrow_of(open_block(data))):
        with pytest.raises(CorruptDataError, match=f"block 0000000000000007:100.*{text}"):
            read()


def test_a_time_at_its_bounds_is_read() -> None:
    times = (TIME_MS_END - 1, 1 - TIME_MS_END, -1, 0)
    reader = open_block(with_raw(struct.pack("<4I4q", 0, 0, 0, 0, *times), 4, block.TIMESTAMP))
    assert tuple(reader.timestamps()) == times
    assert arrow_of(reader).column("timestamp").cast(pa.timestamp("us", "UTC"))[0].value == times[0] * 1_000


def lie(**fields: int) -> BlockReader:
    """A block whose header says something else than its records."""
    rows: list[Record] = [(b"", b"key", (), 5, "web"), (b"", b"key", (), 9, None)]
    return open_block(with_header(seal(build(rows), slot_range=(35_000, 36_000)).data, **fields))


def test_verify_finds_a_header_that_hides_records() -> None:
    verify_block(lie())
    for fields, text in (
        ({"base_ms": 6}, "timestamps are 5 to 9"),
        ({"max_delta_ms": 3}, "timestamps are 5 to 9"),
        ({"max_delta_ms": 0xFFFF_FFFF}, "timestamps are 5 to 9"),
        ({"slot_first": 35_900}, "keys have slots 35472 to 35472"),
        ({"slot_last": 35_100}, "keys have slots 35472 to 35472"),
        ({"tag_bits": 0}, "tag 'web'"),
    ):
        with pytest.raises(CorruptDataError, match=text):
            verify_block(lie(**fields))


# ---- what unpacks to more than it says -------------------------------------------------------


def packed(payload: bytes, raw_length: int, codec: int) -> bytes:
    """A block of one value around a compressed payload."""
    fields = {"payload_length": len(payload), "raw_length": raw_length, "count": 1, "codec": codec, "flags": 0}
    return repair(with_header(ONE.data[:72], **fields) + payload)


def frame(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(raw)


RAW = struct.pack("<I", 996) + b"v" * 996
ZSTD_FAULTS = {
    "two frames": frame(RAW[:500]) + frame(RAW[500:]),
    "two whole frames": frame(RAW) + frame(RAW),
    "bytes behind it": frame(RAW) + b"\0",
    "an empty frame behind it": frame(RAW) + frame(b""),
    "skippable frame": struct.pack("<II", 0x184D2A50, 1000) + bytes(20),
    "skippable frame before it": struct.pack("<II", 0x184D2A50, 4) + bytes(4) + frame(RAW),
    "no stated size": frame(RAW, write_content_size=False),
    "another size": frame(RAW + b"v"),
    "cut": frame(RAW)[:-3],
    "no frame": b"v" * 50,
    "empty": b"",
    "dictionary": frame(RAW, dict_data=zstandard.train_dictionary(1024, [b"%d" % n * 9 for n in range(2000)])),
}


@pytest.mark.parametrize("name", ZSTD_FAULTS)
def test_a_payload_that_is_not_one_plain_zstd_frame_is_refused(name: str) -> None:
    assert open_block(packed(frame(RAW), len(RAW), block.CODEC_ZSTD)).values() == [b"v" * 996]
    with pytest.raises(CorruptDataError, match="zstd"):
        open_block(packed(ZSTD_FAULTS[name], len(RAW), block.CODEC_ZSTD)).values()


def test_a_zstd_bomb_is_refused_before_it_unpacks() -> None:
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    bomb = b"".join([compressor.compress(bytes(MIB)) for _ in range(1024)] + [compressor.flush()])
    assert (1 << 30) / len(bomb) > 10_000
    for raw_length in (len(bomb), BLOCK_RAW_BYTES_MAX):
        reader = open_block(packed(bomb, raw_length, block.CODEC_ZSTD))
        tracemalloc.start()
        with pytest.raises(CorruptDataError, match="states 1073741824 bytes"):
            reader.values()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MIB
    with pytest.raises(CorruptDataError, match="raw length"):
        check_block(with_header(packed(bomb, len(bomb), block.CODEC_ZSTD), raw_length=1 << 30))


def test_an_lz4_payload_fills_exactly_what_the_header_says() -> None:
    payload = lz4.block.compress(RAW, store_size=False)
    assert open_block(packed(payload, len(RAW), block.CODEC_LZ4)).values() == [b"v" * 996]
    for wrong in (
        packed(payload, len(RAW) + 1, 2),
        packed(payload, len(RAW) - 1, 2),
        packed(payload[:-2], len(RAW), 2),
    ):
        with pytest.raises(CorruptDataError):
            open_block(wrong).values()
    sized = lz4.block.compress(RAW, store_size=True)
    with pytest.raises(CorruptDataError):
        open_block(packed(sized, len(RAW), block.CODEC_LZ4)).values()


# ---- memory ----------------------------------------------------------------------------------


@given(SEEDS)
def test_damage_costs_little_memory(dice: random.Random) -> None:
    rows: list[Record] = [(dice.randbytes(60), dice.randbytes(8), (("h", b"1"),), NOW_MS + n, "t") for n in range(400)]
    sealed = seal(build(rows))
    data = with_raw(damaged(sealed.data[72:], dice), sealed.header.count, sealed.header.flags)
    tracemalloc.start()
    try:
        list(open_block(data).records())
    except DAMAGE:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * len(data) + 64 * KIB
