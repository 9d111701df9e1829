"""The command line: its texts, its output, and its options in the docs."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.cli.commands import COMMANDS, INTERRUPTED, PIPE_CLOSED
from memq.cli.options import LastRecords, RecordOffset, parse_reset_target, parse_start
from memq.cli.output import JsonLines, TextLines, WaitLines
from memq.cli.records.consume import last_offset, record_printer
from memq.cli.records.produce import split_keys, split_records
from memq.cli.records.record_text import decode_record, encode_record, parse_delimiter, parse_format
from memq.cli.run import EXIT_CODES, program
from memq.client.consumer.batch import Batch, Slice, TopicPartition
from memq.errors import InvalidRequestError, InvalidSettingError, TooLargeError
from memq.format.batch import BlockPiece
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header
from memq.topic import Position

content = st.none() | st.binary(max_size=20)
names = st.text(max_size=8).filter(lambda name: not any("\ud800" <= letter <= "\udfff" for letter in name))
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


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
        ("285212675", RecordOffset(Position(0, 17, 3).offset)),
        ("earliest", "beginning"),
        ("latest", "end"),
        ("@1738310400123", datetime.datetime(2025, 1, 31, 8, 0, 0, 123_000, tzinfo=datetime.UTC)),
        ("@-1h", datetime.datetime(2025, 1, 31, 7, tzinfo=datetime.UTC)),
        ("@2025-01-31T08:00:00Z", datetime.datetime(2025, 1, 31, 8, tzinfo=datetime.UTC)),
        ("@2025-01-31T08:00:00+01:00", datetime.datetime(2025, 1, 31, 7, tzinfo=datetime.UTC)),
        ("@2025-01-31", datetime.datetime(2025, 1, 31, tzinfo=datetime.UTC)),
    ],
)
def test_starts(text: str, start: object) -> None:
    assert parse_start(text, NOW_MS) == start


def test_unix_seconds_are_not_taken_for_milliseconds() -> None:
    with pytest.raises(InvalidSettingError, match="time 1738310400 is in ms, and in 1970") as refused:
        parse_start("@1738310400", NOW_MS)
    assert refused.value.hint == "a time in Unix seconds is written 1738310400000"
    assert parse_start("@0", NOW_MS) == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    "text", ["", "middle", "-", "9" * 19, "@", "@x", "@-1", "@-1y", "1:2", "1:2:3:4", "@9999999999999999"]
)
def test_bad_starts(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_start(text, NOW_MS)


@pytest.mark.parametrize("text", ["stored", "-100", "middle", "@x"])
def test_hint_of_a_reset_names_only_targets_for_groups(text: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_reset_target(text, NOW_MS)
    assert "beginning, end, @" in caught.value.hint
    assert "stored" not in caught.value.hint
    assert parse_reset_target("0:17:3", NOW_MS) == Position(0, 17, 3)


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


@pytest.fixture
def batch() -> Batch:
    """Return a batch of three records: plain, without key, null."""
    builder = BlockBuilder()
    builder.append(b"v", key=b"k", timestamp_ms=7, headers=[("a", b"1")], tag="web")
    builder.append(b"", timestamp_ms=8)
    builder.append(None, timestamp_ms=9)
    data = builder.seal(producer_id=1, first_sequence=0, scope=0, now_ms=0, codec="none").data
    piece = BlockPiece(0, 0, 3, parse_header(data), memoryview(data))
    return Batch(TopicPartition("clicks", 2), (Position(2, 5), Position(2, 6)), [Slice(piece, 0, 3)], [], "key")


def test_values_and_keys(batch: Batch) -> None:
    assert record_printer(None)(batch, None) == (b"v\n\n\n", 3)
    assert record_printer(None, null=True)(batch, 3) == (b"v\n\nNULL\n", 3)
    assert record_printer(None)(batch, 1) == (b"v\n", 1)
    assert record_printer(None, delimiter=r"\0")(batch, 2) == (b"v\0\0", 2)
    assert record_printer(None, separator=":", null=True)(batch, None) == (b"k:v\nNULL:\nNULL:NULL\n", 3)


def test_printers_of_formats(batch: Batch) -> None:
    offset = 5 << 24
    assert record_printer(r"%t %p %o %s\n")(batch, 2) == (f"clicks 2 {offset} v\nclicks 2 {offset + 1} \n".encode(), 2)


def test_json_lines(batch: Batch) -> None:
    content, count = record_printer(None, as_json=True)(batch, None)
    records = [json.loads(line) for line in content.splitlines()]
    assert count == 3
    assert records[0] == {
        "topic": "clicks",
        "partition": 2,
        "offset": 5 << 24,
        "position": "2:5:0",
        "timestamp_ms": 7,
        "key": "k",
        "headers": [["a", "1"]],
        "tag": "web",
        "value": "v",
    }
    assert [record["value"] for record in records] == ["v", "", None]


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 60))
def test_the_last_records(sizes: list[int], wanted: int) -> None:
    """`sizes` are the records of each pointer; what is found must be exactly the last ones."""
    before = [0, *accumulate(sizes)]
    total = before[-1]
    offset, skip = last_offset(0, len(sizes), wanted, lambda at: total - before[at])
    assert before[offset] + skip == max(0, total - wanted)


def _record(event: str, text: str, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    record = logging.LogRecord("memq", logging.WARNING, "", 0, "%s: %s", (event, text), exc_info)
    record.event = event
    record.created = 1_738_310_400.5
    return record


def test_a_command_prints_the_log_lines_of_its_waits_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    lines = WaitLines()
    for event in ("consumer.object-missing", "consumer.retry", "client.waits"):
        record = _record(event, "object 'a' is missing;\nasking again for 30 s")
        lines.handle(record)
    said = capsys.readouterr().err.splitlines()
    assert said == [r"memq: object 'a' is missing;\nasking again for 30 s"] * 2


def test_log_lines() -> None:
    assert TextLines().format(_record("swept", "3\nfiles")) == r"2025-01-31T08:00:00.500Z warning swept: 3\nfiles"
    assert TextLines().format(_record("x", "y", ValueError("no"))).splitlines()[1:] == ["  ValueError: no"]
    assert json.loads(JsonLines().format(_record("swept", "3 files: x", ValueError("no")))) == {
        "time": "2025-01-31T08:00:00.500Z",
        "level": "warning",
        "logger": "memq",
        "event": "swept",
        "text": "3 files: x",
        "traceback": "ValueError: no",
    }


def rows(head: str) -> list[list[str]]:
    """Return the cells of the table whose head starts with `head`."""
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(f"| {head} |"):
            break
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in iter(lambda: next(lines, ""), "")]
    return [[cell.strip() for cell in row] for row in found[1:]]


def letters_of(name: str) -> set[str]:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    return {letter for part in command.params for letter in part.opts if not letter.startswith("--")}


def test_commands() -> None:
    assert [row[0].split()[1].strip("`") for row in rows("command")] == list(COMMANDS)


def test_exit_codes() -> None:
    assert {int(row[0]) for row in rows("exit code")} == {0, 1, INTERRUPTED, PIPE_CLOSED} | {
        code for _, code in EXIT_CODES
    }


@pytest.mark.parametrize(
    ("letter", "commands"),
    [
        *[(letter, ("produce", "consume")) for letter in ("-b", "-p", "-K", "-D", "-Z")],
        *[(letter, ("produce",)) for letter in ("-k", "-H", "-z")],
        *[(letter, ("consume",)) for letter in ("-o", "-c", "-e", "-f", "-G")],
    ],
)
def test_letters_are_kcats(letter: str, commands: tuple[str, ...]) -> None:
    ours = [row[1] for row in rows("kcat") if re.search(rf"(^|`|\s){letter}\b", row[0])]
    assert any(letter in cell or cell == "the same" for cell in ours), f"{letter} is not in the table"
    for name in commands:
        assert letter in letters_of(name), f"memq {name} has no {letter}"
