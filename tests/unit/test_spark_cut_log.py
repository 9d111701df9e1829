"""Streams and positions of Spark when the log was cut and grew again: no new record is skipped silently."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from memq.errors import PositionLostError
from memq.spark.options import ReadOptions, read_options
from memq.spark.pipelines import inputs
from memq.spark.pipelines.rounds import plan_round
from memq.spark.pipelines.topic_files import FilesManifest, decode_manifest, encode_manifest
from memq.topic import Position, Totals
from tests.unit.blocks import NOW_MS
from tests.unit.spark_rows import values_of
from tests.unit.stored_topic import StoredTopic, block
from tests.unit.test_spark_stream import ALL, Follow, Offsets, follow, numbers, topic_of

__all__ = ["follow"]


def grow(topic: StoredTopic, count: int) -> None:
    """Cut the log after its first batch of one record, and append `count` others."""
    topic.cut(1)
    for number in range(count):
        before = Totals(1 + number, 1 + number)
        topic.write(block([b"%d" % (100 + number)], producer=2, first=number), time_ms=NOW_MS + 9_000, totals=before)


def without_marks(offsets: Offsets) -> Offsets:
    """Return the checkpoint that an earlier release would have written."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(offsets))
    for topic in plain.values():
        for position in topic["partitions"].values():
            position.pop("mark", None)
    return plain


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(100)])
@pytest.mark.parametrize("count", [2, 4])
def test_a_stream_whose_log_was_cut_and_has_grown_ends(
    follow: Follow, tmp_path: Path, count: int, limit: ReadLimit
) -> None:
    """Whether the log has reached the checkpoint's position again or is beyond it."""
    topic = topic_of(tmp_path, 1, 1, 1)
    query = follow(topic)
    assert query.step(limit) == numbers(0, 1, 2)
    grow(topic, count)
    query.restart()
    with pytest.raises(PositionLostError, match="was cut before position 0:3:0"):
        query.step(limit)
    with pytest.raises(PositionLostError):
        query.step(limit)


def test_a_micro_batch_that_is_read_again_is_the_same_or_fails(follow: Follow, tmp_path: Path) -> None:
    """Spark plans the last micro-batch of its checkpoint again, without a question for its end."""
    topic = topic_of(tmp_path, 1, 1, 1)
    query = follow(topic)
    start, end = query.at, query.reader.latestOffset(query.at, ALL)
    grow(topic, 4)
    query.restart()
    with pytest.raises(PositionLostError, match="was cut before position 0:3:0"):
        query.rows(start, end)


def test_a_stream_inside_of_a_batch_that_was_lost_ends(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 1, 4)
    query = follow(topic)
    assert query.step(ReadMaxRows(3)) == numbers(0, 1, 2)
    topic.cut(1)
    topic.write(block([b"%d" % number for number in range(100, 104)], producer=2), totals=Totals(1, 1))
    query.restart()
    with pytest.raises(PositionLostError, match="was cut before position 0:1:2"):
        query.step(ReadMaxRows(3))


def test_a_stream_before_the_cut_reads_what_is_left_and_what_is_new(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 1, 1, 1)
    query = follow(topic)
    assert query.step(ReadMaxRows(1)) == numbers(0)
    grow(topic, 3)
    query.restart()
    assert query.step() == numbers(100, 101, 102)


def test_a_checkpoint_of_an_earlier_release_is_read_as_before(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 1, 1)
    query = follow(topic)
    assert query.step() == numbers(0, 1)
    query.at = without_marks(query.at)
    query.restart()
    assert query.reader.latestOffset(query.at, ALL) == query.at, "nothing is new: the offset has the same text"
    topic.write(block([b"2"], first=2), totals=Totals(2, 2))
    assert query.step() == numbers(2)
    assert query.at != without_marks(query.at), "from here on the checkpoint has marks"


def test_a_batch_read_from_a_position_that_the_log_lost_fails(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 1, 1, 1)
    query = follow(topic)
    query.step()
    position = query.at["clicks"]["partitions"]["0"]
    start = Position(0, position["offset"], 0, position["mark"])
    grow(topic, 4)
    assert len(values_of({**topic.options, "start": str(start)})) == 2, "without a mark it is read as before"
    with pytest.raises(PositionLostError, match="was cut before position 0:3:0"):
        values_of({**topic.options, "start": start.marked_text})


def test_a_pipeline_continues_only_in_the_log_that_it_has_read(tmp_path: Path) -> None:
    """Its next run has the position from the manifest of its files."""
    topic = topic_of(tmp_path, 1, 1, 1)
    options = read_options(topic.options)

    async def covered() -> dict[int, Position]:
        found = await plan_round(options, {}, settled=False)
        manifest = FilesManifest(number=0, topic="clicks", topic_id=topic.topic.id).next(found.starts, found.ends, ())
        return decode_manifest(encode_manifest(manifest), manifest.key).positions

    position = asyncio.run(covered())
    assert not asyncio.run(plan_round(options, position, settled=False)).splits, "the log is whole"
    grow(topic, 4)
    with pytest.raises(PositionLostError, match="was cut before position 0:3:0"):
        asyncio.run(plan_round(options, position, settled=False))
    unmarked = {0: Position.parse(str(position[0]))}
    assert asyncio.run(plan_round(options, unmarked, settled=False)).splits, "of an earlier release: as before"


def test_a_round_keeps_the_marks_of_partitions_that_it_did_not_read() -> None:
    first, second = Position(0, 3, 0, mark=7), Position(1, 5, 0, mark=8)
    manifest = FilesManifest(number=0, topic="clicks", topic_id="0a" * 16).next({}, {0: first, 1: second}, ())
    later = manifest.next({}, {1: Position(1, 9, 0, mark=9)}, ()).positions
    assert {number: position.mark for number, position in later.items()} == {0: 7, 1: 9}


def test_a_group_is_not_set_to_the_end_of_a_round_that_the_log_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position is compared with the log before anything is asked of the group."""

    async def no_positions(options: ReadOptions, group: str) -> dict[int, Position]:
        return {}

    monkeypatch.setattr(inputs, "positions_of", no_positions)
    topic = topic_of(tmp_path, 1, 1, 1)
    options = read_options(topic.options)
    ends = asyncio.run(plan_round(options, {}, settled=False)).ends
    grow(topic, 4)
    with pytest.raises(PositionLostError):
        asyncio.run(inputs.commit_positions(options, "g", ends))
