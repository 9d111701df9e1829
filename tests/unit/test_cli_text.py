"""The command line's pure parts: records as JSON and by format, starts, delimiters, cutting input into records."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.cli.options import LastRecords, parse_place, parse_start
from memq.cli.records.produce import split_keys, split_records
from memq.cli.records.record_text import decode_record, encode_record, parse_delimiter, parse_format
from memq.errors import InvalidRequestError, InvalidSettingError, TooLargeError
from memq.topic import Position

content = st.none() | st.binary(max_size=20)
names = st.text(max_size=8).filter(lambda name: not any("\ud800" <= letter <= "\udfff" for letter in name))


@dataclass(frozen=True)
class Shown:
    """A record as a format sees it."""

    value: bytes | None = b"v"
    key: bytes | None = b"k"
    headers: tuple[tuple[str, bytes | None], ...] = (("a", b"1"), ("b", None))
    timestamp_ms: int = 12
    offset: int = 34


@given(
    content, content, st.lists(st.tuples(names, content), max_size=3), st.integers(-(2**52), 2**52), st.none() | names
)
def test_json_comes_back_as_it_was(
    value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]], timestamp_ms: int, tag: str | None
) -> None:
    line = encode_record({"topic": "t", "offset": 1}, value, key, headers, timestamp_ms, tag)
    assert "\n" not in line
    record = decode_record(line.encode())
    assert (record.value, record.key, list(record.headers)) == (value, key, headers)
    assert (record.timestamp_ms, record.tag) == (timestamp_ms, tag)


def test_json_shows_text_as_text() -> None:
    line = encode_record({"topic": "t"}, "ü".encode(), b"\xff", [], 5, None)
    assert line == '{"topic":"t","timestamp_ms":5,"key_base64":"/w==","value":"ü"}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "list"),
        (b"{}", "neither"),
        (b'{"value":1}', "'value' is 1"),
        (b'{"valeu":"x"}', "valeu"),
        (b'{"value":"x","value_base64":"eA=="}', "both"),
        (b'{"value_base64":"?"}', "base64"),
        (b'{"value":"x","headers":{"a":"b"}}', "headers"),
        (b'{"value":"x","headers":[["a"]]}', "headers"),
        (b'{"value":"x","timestamp_ms":"1"}', "timestamp_ms"),
        (b'{"value":"x","timestamp_ms":true}', "timestamp_ms"),
        (b'{"value":"x","tag":1}', "tag"),
        (b'{"value":"\\ud800"}', "surrogates"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
    ],
)
def test_bad_json_names_the_field(line: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        decode_record(line)


@given(st.binary(max_size=60))
def test_any_line_is_a_record_or_refused(line: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        decode_record(line)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"%s\n", b"v\n"),
        (r"%t/%p@%o %k=%s [%h] %T\t", b"clicks/3@34 k=v [a=1,b=] 12\t"),
        (r"%K:%S%%\x1e\0\\\q", b"1:1%\x1e\x00\\\\q"),
        ("", b""),
        ("ü", "ü".encode()),
        ("\\", b"\\"),
    ],
)
def test_formats(text: str, shown: bytes) -> None:
    assert parse_format(text)(Shown(), "clicks", 3) == shown


def test_null_has_its_own_text() -> None:
    assert parse_format("%k:%s:%h:%S", b"NULL")(Shown(value=None, key=None), "t", 0) == b"NULL:NULL:a=1,b=NULL:-1"


@pytest.mark.parametrize("text", ["%", "%x", "%s%"])
def test_an_unknown_letter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown letter|lone"):
        parse_format(text)


def test_delimiters() -> None:
    assert parse_delimiter(r"\n") == b"\n"
    assert parse_delimiter(r"a\x00b") == b"a\0b"
    with pytest.raises(InvalidRequestError):
        parse_delimiter("")


NOW_MS = 1_738_310_400_000


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", "beginning"),
        ("end", "end"),
        ("stored", "stored"),
        ("-10", LastRecords(10)),
        ("0:17:3", Position(0, 17, 3)),
        ("@1738310400123", datetime.datetime(2025, 1, 31, 8, 0, 0, 123_000, tzinfo=datetime.UTC)),
        ("@-1h", datetime.datetime(2025, 1, 31, 7, tzinfo=datetime.UTC)),
        ("@2025-01-31T08:00:00Z", datetime.datetime(2025, 1, 31, 8, tzinfo=datetime.UTC)),
        ("@2025-01-31T08:00:00+01:00", datetime.datetime(2025, 1, 31, 7, tzinfo=datetime.UTC)),
        ("@2025-01-31", datetime.datetime(2025, 1, 31, tzinfo=datetime.UTC)),
    ],
)
def test_starts(text: str, start: object) -> None:
    assert parse_start(text, NOW_MS) == start


@pytest.mark.parametrize(
    "text", ["", "middle", "17", "@", "@x", "@-1", "@-1y", "1:2", "1:2:3:4", "@9999999999999999", "-"]
)
def test_bad_starts(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_start(text, NOW_MS)


@pytest.mark.parametrize("text", ["stored", "-100", "middle", "@x"])
def test_what_is_no_place_for_a_group_is_not_offered_either(text: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_place(text, NOW_MS)
    assert "beginning, end, @" in caught.value.hint
    assert "stored" not in caught.value.hint
    assert parse_place("0:17:3", NOW_MS) == Position(0, 17, 3)


@given(st.lists(st.binary(max_size=6)), st.sampled_from([b"\n", b"ab", b"\0\0\0", b"aab"]), st.data())
def test_cutting_does_not_depend_on_chunks(parts: list[bytes], delimiter: bytes, data: st.DataObject) -> None:
    whole = delimiter.join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    wanted = whole.split(delimiter)
    if not wanted[-1]:
        wanted.pop()
    assert [record for batch in split_records(chunks, delimiter) for record in batch] == wanted


def test_a_record_without_end_is_refused_before_memory_is_full() -> None:
    with pytest.raises(TooLargeError, match="record 2 "):
        list(split_records([b"a\n", *[b"x" * (1 << 20)] * 17], b"\n"))


def test_keys() -> None:
    assert split_keys([b"k:v:w", b"v", b":v"], b":") == ([b"k", None, b""], [b"v:w", b"v", b"v"])
