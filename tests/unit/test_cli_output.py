"""What the command line prints: batches by format, log lines, and where the last N records start."""

from __future__ import annotations

import json
import logging
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.cli.output import JsonLines, TextLines
from memq.cli.records.consume import last_offset, record_printer
from memq.client.consumer.batch import Batch, Slice
from memq.client.consumer.record import TopicPartition
from memq.format.batch import BlockPiece
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header
from memq.topic import Position


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


def test_formats(batch: Batch) -> None:
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
