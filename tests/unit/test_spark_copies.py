"""Blocks with known sequences: a copy is read once, other records under them are read, too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from memq.spark.options import read_options
from memq.spark.read.batch_reader import MemqReader
from tests.unit.audited import Run
from tests.unit.blocks import NOW_MS
from tests.unit.stored_topic import StoredTopic, block

Batch = Sequence[tuple[Run, str]]


def block_of(run: Run, word: str, sealed_ms: int) -> bytes:
    producer, first, next_ = run
    values = [b"%s %d" % (word.encode(), sequence) for sequence in range(first, next_)]
    return block(values, producer=producer, first=first, now_ms=sealed_ms)


def topic_of(folder: Path, batches: Sequence[Batch]) -> dict[str, str]:
    """Store these batches, and return the options that read them."""
    topic = StoredTopic(folder)
    for number, batch in enumerate(batches):
        topic.write(*(block_of(run, word, NOW_MS + number) for run, word in batch), time_ms=NOW_MS + number)
    return topic.options


def values_of(options: dict[str, str]) -> list[bytes]:
    given = read_options({**options, "columns": "value"}, "batch")
    reader = MemqReader(given, StructType([StructField("value", BinaryType())]))
    return [
        value
        for split in reader.partitions()
        for batch in reader.read(split)
        for value in batch.column("value").to_pylist()
    ]


A, B = (1, 0, 3), (2, 0, 2)
FIRST = [b"one 0", b"one 1", b"one 2", b"one 0", b"one 1"]


def conflicts(caplog: pytest.LogCaptureFixture) -> int:
    return sum(getattr(record, "event", "") == "spark.identity-conflict" for record in caplog.records)


@pytest.mark.parametrize("skip", ["fail", "skip"])
def test_other_records_under_known_sequences_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, skip: str
) -> None:
    options = topic_of(tmp_path, [[(A, "one"), (B, "one")], [(A, "one"), (B, "two")]])
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of({**options, "onDamaged": skip}) == [*FIRST, b"two 0", b"two 1"]
    assert conflicts(caplog) == 1


def test_a_copy_that_was_sealed_again_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = topic_of(tmp_path, [[(A, "one"), (B, "one")]] * 3)
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of(options) == FIRST
    assert conflicts(caplog) == 0


def test_other_records_within_one_batch_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = topic_of(tmp_path, [[(B, "one"), (B, "one"), (B, "two")]])
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of(options) == [b"one 0", b"one 1", b"two 0", b"two 1"]
    assert conflicts(caplog) == 1


def test_a_read_by_listing_compares_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    topic_of(tmp_path, [[(A, "one"), (B, "one")], [(A, "one"), (B, "two")]])
    with caplog.at_level(logging.ERROR, "memq"):
        found = values_of({"path": str(tmp_path / "objects")})
    assert sorted(found) == sorted([*FIRST, b"two 0", b"two 1"]), "objects are listed in an order of their own"
    assert conflicts(caplog) == 1
