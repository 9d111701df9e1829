"""The data source as PySpark drives it, without a JVM: rows of reads by pointers and by objects."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, LessThan
from pyspark.sql.types import (
    BinaryType,
    StringType,
    StructField,
    StructType,
)

from memq.compaction.compaction import leave_queue, manifest_of
from memq.compaction.plan import CompactionRule
from memq.compaction.reader import ManifestFiles
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    UnsupportedFormatError,
)
from memq.format.pointer import Pointer
from memq.limits import BLOCK_HEADER_BYTES, KIB
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.spark.source import MemqSource
from memq.spark.write import MemqStreamWriter, MemqWriter
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import Position, Topic, TopicSettings, equal_slots
from tests.compaction import DAY_MS, parts_on
from tests.unit.blocks import NOW_MS, Record, repair
from tests.unit.spark_rows import TYPES, Row, batches_of, rows_of, schema_of, spoiled, three_batches, time_of, values_of
from tests.unit.stored_topic import StoredTopic, block

WINDOW_MS = 350_000  # of a topic with default settings: the dedup window, and how late pointers may be
VERSION_AT = 8  # of a block's header


# ---- columns ---------------------------------------------------------------------------------


def test_each_record_has_all_of_its_columns(tmp_path: Path) -> None:
    full: list[Record] = [
        (b"v0", b"k0", (("a", b"x"), ("b", None)), NOW_MS + 5, "web"),
        (None, None, (), NOW_MS - 1, None),
        (b"", b"", (("a", b""),), NOW_MS, "app"),
    ]
    topic = StoredTopic(tmp_path, partitions=2)
    blocks = block(full, producer=7, first=100, partition=1), block([b"p0", b"p1"], producer=8, first=5, partition=1)
    key = topic.write(*blocks, partition=1)
    every = ",".join(TYPES)
    found = rows_of(topic.options, columns=every)

    def row(index: int, value: bytes | None, **fields: object) -> Row:
        offset = Position(1, 0, index).offset
        known = {"topic": "clicks", "partition": 1, "offset": offset, "record_index": index, "object": key}
        known |= {"damage": None, "orphan": False, "key": None, "headers": [], "tag": None, "value": value}
        return {**known, **fields}

    headers = [{"name": "a", "value": b"x"}, {"name": "b", "value": None}]
    expected = [
        row(
            0, b"v0", key=b"k0", headers=headers, tag="web", timestamp=time_of(NOW_MS + 5), producer_id=7, sequence=100
        ),
        row(1, None, timestamp=time_of(NOW_MS - 1), producer_id=7, sequence=101),
        row(2, b"", key=b"", headers=[{"name": "a", "value": b""}], tag="app", timestamp=time_of(NOW_MS))
        | {"producer_id": 7, "sequence": 102},
        row(3, b"p0", timestamp=time_of(NOW_MS), producer_id=8, sequence=5),
        row(4, b"p1", timestamp=time_of(NOW_MS), producer_id=8, sequence=6),
    ]
    assert found == expected
    within = rows_of(topic.options, columns=every, start="1:0:1", end="1:0:4")
    assert within == expected[1:4], "a read that begins and ends within blocks"


def test_the_columns_are_those_of_the_ddl_in_its_order(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"v"]))
    options = {**topic.options, "columns": "sequence,value"}
    assert MemqSource(options).schema() == "sequence BIGINT, value BINARY"
    ((batch,),) = batches_of(options)
    assert batch.schema.names == ["sequence", "value"]
    with pytest.raises(InvalidSettingError, match="Spark was given a schema of its own"):
        MemqSource(options).reader(StructType([StructField("other", StringType())]))
    with pytest.raises(InvalidSettingError, match="Spark was given a schema of its own"):
        MemqSource(options).streamReader(StructType([StructField("other", StringType())]))


# ---- positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        ("beginning", "end", b"012345"),
        ("0:0:0", "0:3:0", b"012345"),
        ("0:1:0", "end", b"2345"),
        ("0:1:1", "0:2:1", b"34"),
        ("0:1:1", "0:1:2", b"3"),
        ("beginning", "0:1:0", b"01"),
        ("beginning", "0:9:0", b"012345"),
        ("0:1:0", "0:1:0", b""),
        ("0:2:0", "0:1:0", b""),
        ("end", "end", b""),
        (str(NOW_MS + 1_000), "end", b"2345"),
        (str(NOW_MS + 1), "end", b"2345"),
        ("beginning", str(NOW_MS + 1_000), b"01"),
        ("beginning", str(NOW_MS + 1_001), b"0123"),
        (str(NOW_MS + 9_000), "end", b""),
    ],
)
def test_a_read_goes_from_its_start_up_to_its_end(tmp_path: Path, start: str, end: str, found: bytes) -> None:
    values = values_of(three_batches(tmp_path).options, start=start, end=end)
    assert b"".join(value or b"" for value in values) == found


def test_positions_leave_partitions_that_they_do_not_name_as_they_are(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path, partitions=2)
    for partition in (0, 1):
        for number in (0, 1):
            topic.write(block([b"%d%d" % (partition, number)], partition=partition, first=number), partition=partition)
    assert values_of(topic.options, start="0:1:0") == [b"01", b"10", b"11"]
    assert values_of(topic.options, end="1:1:0") == [b"00", b"01", b"10"]
    assert values_of(topic.options, start="0:1:0,7:1:0") == [b"01", b"10", b"11"], "a queue may not know 7 yet"


def test_expired_batches_are_not_read(tmp_path: Path) -> None:
    topic = three_batches(tmp_path)
    topic.trim(1)
    assert values_of(topic.options) == [b"2", b"3", b"4", b"5"]


def test_several_topics_are_read_in_one_table(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"c"]))
    views = Topic(name="views", id="0b" * 16, created_ms=NOW_MS, partitions=equal_slots(1))
    other = StoredTopic(tmp_path, topic=views)
    other.write(block([b"v"], topic=views))
    both = {**topic.options, "topics": "clicks,views"}
    columns = "topic,value"
    assert [tuple(row.values()) for row in rows_of(both, columns=columns)] == [("clicks", b"c"), ("views", b"v")]
    assert rows_of(both, [EqualTo(("topic",), "views")], columns=columns) == [{"topic": "views", "value": b"v"}]
    assert values_of(both, start="views=0:1:0") == [b"c"]


def test_a_topic_without_records_has_one_task_that_reads_nothing(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    assert batches_of(topic.options) == [[]]


# ---- tasks -----------------------------------------------------------------------------------


def test_tasks_read_about_as_many_bytes_as_they_are_given(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    values = [bytes([number]) * (40 * KIB) for number in range(5)]
    for number, value in enumerate(values):
        topic.write(block([value], first=number))
    small = {**topic.options, "columns": "value", "partitionBytes": "64KiB"}
    assert [[batch.num_rows for batch in batches] for batches in batches_of(small)] == [[1]] * 5
    larger = {**small, "partitionBytes": "128KiB", "prefetchBytes": "64KiB"}
    assert [len(batches) for batches in batches_of(larger)] == [3, 2]
    assert [len(batches) for batches in batches_of({**small, "partitionBytes": "128MiB"})] == [5]
    assert values_of(larger) == values


# ---- filters ---------------------------------------------------------------------------------


def pushed(filters: list[Filter], topic: StoredTopic) -> list[Filter]:
    reader = MemqSource(topic.options).reader(schema_of(topic.options))
    return list(reader.pushFilters(filters))


def test_filters_leave_out_what_can_not_match_before_it_is_fetched(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path, partitions=2)
    early: list[Record] = [(b"early", None, (), NOW_MS, "web")]
    late: list[Record] = [(b"late", None, (), NOW_MS + 10_000, "app")]
    topic.write(block(early), block(late, producer=2), harm=lambda body: spoiled(body, 80))
    topic.write(block(early, first=1), time_ms=NOW_MS + 1)
    (topic.objects / topic.write(block(early, first=2))).unlink()
    topic.write(block([b"other"], partition=1), partition=1)
    columns = {"columns": "timestamp,tag,partition,value"}
    since = GreaterThanOrEqual(("timestamp",), time_of(NOW_MS + 5_000))
    first = EqualTo(("partition",), 0)
    assert values_of(topic.options, [since, first], **columns) == [b"late"], "damage that can't match is not met"
    assert values_of(topic.options, [EqualTo(("tag",), "app"), first], **columns) == [b"late"]
    assert values_of(topic.options, [EqualTo(("partition",), 1)], **columns) == [b"other"]
    assert values_of(topic.options, [GreaterThan(("partition",), 0)], **columns) == [b"other"]
    assert pushed([since, first, LessThan(("sequence",), 5)], topic) == [since, LessThan(("sequence",), 5)]


def test_readers_without_filters_are_those_that_pyspark_inherits(tmp_path: Path) -> None:
    reader = MemqSource(StoredTopic(tmp_path).options).reader(schema_of({"topics": "clicks", "brokers": "a:1"}))
    from pyspark.sql.datasource import DataSourceReader

    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters  # type: ignore[attr-defined]


# ---- what was sent again -----------------------------------------------------------------------


def copies(folder: Path, later_ms: int) -> StoredTopic:
    """Store a block, another one, and the first one again `later_ms` behind both."""
    topic = StoredTopic(folder)
    again = block([b"a", b"b"])
    topic.write(again)
    topic.write(block([b"c"], first=2))
    topic.write(again, time_ms=NOW_MS + later_ms)
    return topic


@pytest.mark.parametrize("start", ["beginning", "0:1:0", "0:2:0", "0:2:1"])
def test_a_copy_is_left_out_wherever_the_read_begins(tmp_path: Path, start: str) -> None:
    topic = copies(tmp_path, 10)
    whole = {"beginning": [b"a", b"b", b"c"], "0:1:0": [b"c"], "0:2:0": [], "0:2:1": []}[start]
    assert values_of(topic.options, start=start) == whole
    raw = {"beginning": [b"a", b"b", b"c", b"a", b"b"], "0:1:0": [b"c", b"a", b"b"], "0:2:0": [b"a", b"b"]}
    assert values_of(topic.options, start=start, dedup="raw") == raw.get(start, [b"b"])


@pytest.mark.parametrize(
    ("start", "later_ms", "is_copy"),
    [
        ("0:2:0", WINDOW_MS, True),
        ("0:2:0", WINDOW_MS + 1, False),
        ("beginning", WINDOW_MS, True),
    ],
)
def test_the_window_counts_back_from_the_copy(tmp_path: Path, start: str, later_ms: int, is_copy: bool) -> None:
    before = [b"a", b"b", b"c"] if start == "beginning" else []
    topic = copies(tmp_path, later_ms)
    assert values_of(topic.options, start=start) == [*before, *([] if is_copy else [b"a", b"b"])]


def no_producers(pointer: Pointer) -> Pointer:
    return replace(pointer, producers=(), producers_complete=False)


@pytest.mark.parametrize("start", ["beginning", "0:1:0"])
@pytest.mark.parametrize("unnamed", [0, 1])
def test_pointers_that_name_no_producers_are_completed_from_the_index(tmp_path: Path, start: str, unnamed: int) -> None:
    topic = StoredTopic(tmp_path)
    for number in (0, 1):
        topic.write(block([b"a"]), change=no_producers if number == unnamed else lambda pointer: pointer)
    assert values_of(topic.options, start=start) == ([b"a"] if start == "beginning" else [])
    topic.write(block([b"b"], first=1))
    assert values_of(topic.options, start=start)[-1:] == [b"b"]


def test_blocks_that_a_pointer_says_to_skip_are_not_read(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a"]), block([b"b"], first=1), change=lambda pointer: replace(pointer, skip=(0,)))
    assert values_of(topic.options) == [b"b"]
    assert values_of(topic.options, dedup="raw") == [b"a", b"b"], "all that is stored"


def test_of_a_copy_with_more_the_new_records_are_read(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a", b"b"]))
    topic.write(block([b"a", b"b"]), block([b"c"], first=2), block([b"x"], producer=2))
    assert values_of(topic.options) == [b"a", b"b", b"c", b"x"]


def test_where_the_index_can_not_be_read_sequences_alone_decide_about_a_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a"]))
    key = topic.write(block([b"x"]), harm=lambda body: spoiled(body, len(body) - 12))
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of(topic.options) == [b"a"]
    (line,) = events_of(caplog, "index-unread")
    assert line.startswith(f"index-unread: topic 'clicks' partition 0 object {key}: ")


# ---- damage ----------------------------------------------------------------------------------


def test_damage_ends_the_read_and_is_named(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    first = block([b"a", b"b"])
    key = topic.write(first, block([b"c"], first=2), harm=lambda body: spoiled(body, len(first) + 75))
    with pytest.raises(CorruptDataError, match=rf"block 1 of object '{key}' at 0:0:2 of topic 'clicks': .*") as caught:
        rows_of(topic.options)
    assert caught.value.hint == "run memq verify; with onDamaged = skip all others are read"


def events_of(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == event]


def test_damage_that_is_skipped_is_a_row_of_its_own_where_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = StoredTopic(tmp_path)
    first = block([b"a", b"b"])
    key = topic.write(first, block([b"c"], first=2), block([b"d"], first=3), harm=lambda body: spoiled(body, 75))
    options = {**topic.options, "onDamaged": "skip"}
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of(options) == [b"c", b"d"]
    (line,) = events_of(caplog, "spark.damage-skipped")
    assert f"topic 'clicks' at 0:0:0, object '{key}', block 0: " in line
    lost, *others = rows_of(options, columns="value,topic,partition,offset,record_index,object,damage,orphan,sequence")
    assert [row["value"] for row in others] == [b"c", b"d"]
    cell = json.loads(lost.pop("damage"))
    cause = cell.pop("cause")
    assert "checksum" in cause
    assert cell == {"object": key, "block": 0, "records": 2, "position": "0:0:0"}
    offset = Position(0, 0).offset
    origin = {"topic": "clicks", "partition": 0, "offset": offset, "record_index": 0, "object": key, "orphan": False}
    assert lost == {**origin, "value": None, "sequence": None}


def test_a_block_that_its_producer_made_unreadable_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The block has the right checksum over bytes that make no sense."""
    topic = StoredTopic(tmp_path)
    poisoned = bytearray(block([b"a", b"b"]))
    poisoned[BLOCK_HEADER_BYTES] ^= 0x40
    key = topic.write(repair(poisoned), block([b"c"], first=2))
    with caplog.at_level(logging.ERROR, "memq"):
        assert values_of(topic.options) == [b"c"]
    (line,) = events_of(caplog, "spark.damage-skipped")
    assert f"topic 'clicks' at 0:0:0, object '{key}', block 0: " in line
    lost, sound = rows_of(topic.options, onDamaged="skip", columns="damage,value")
    assert (json.loads(lost["damage"])["records"], sound["value"]) == (2, b"c")


def test_a_read_that_begins_within_a_damaged_block_leaves_its_row_to_who_read_its_first_record(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a", b"b"]), block([b"c"], first=2), harm=lambda body: spoiled(body, 75))
    options = {**topic.options, "onDamaged": "skip", "columns": "damage,value"}
    assert [row["value"] for row in rows_of(options, start="0:0:1")] == [b"c"]
    assert [row["value"] for row in rows_of(options, start="0:0:2")] == [b"c"]
    assert [row["value"] for row in rows_of(options, end="0:0:1")] == [None]
    with pytest.raises(CorruptDataError):
        rows_of({**topic.options, "start": "0:0:1"})


def test_damage_hides_no_copy_that_is_sound(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a", b"b"]), block([b"c"], first=2), harm=lambda body: spoiled(body, 75))
    topic.write(block([b"a", b"b"]), block([b"c"], first=2))
    assert values_of(topic.options, onDamaged="skip") == [b"c", b"a", b"b"]


def test_an_object_that_is_missing_is_damage(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    (topic.objects / topic.write(block([b"a"]))).unlink()
    topic.write(block([b"b"], first=1))
    with pytest.raises(CorruptDataError, match="its object is missing: "):
        rows_of(topic.options, missingSeconds="0")
    found = rows_of(topic.options, missingSeconds="0", onDamaged="skip", columns="damage,value")
    assert [row["value"] for row in found] == [None, b"b"]
    assert json.loads(found[0]["damage"])["records"] == 1


def test_a_pointer_that_can_not_be_read_is_damage(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.publish(b"{]")
    topic.write(block([b"b"]))
    with pytest.raises(CorruptDataError, match="block 0 of object '' at 0:0:0 of topic '': "):
        rows_of(topic.options)
    lost, sound = rows_of(topic.options, onDamaged="skip", columns="damage,value,topic,partition")
    assert (sound["value"], lost["topic"], lost["partition"]) == (b"b", "", 0)
    assert values_of(topic.options, start="0:1:0") == [b"b"], "in the window before the start it names nothing"


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_newer_block_ends_the_read_under_any_policy(tmp_path: Path, policy: str) -> None:
    topic = StoredTopic(tmp_path)
    newer = bytearray(block([b"a"]))
    newer[VERSION_AT] = 250
    topic.write(block([b"a"]), harm=lambda body: repair(newer) + body[len(newer) :])
    with pytest.raises(UnsupportedFormatError):
        rows_of(topic.options, onDamaged=policy, columns="damage,value")
    (tmp_path / "later").mkdir()
    later = StoredTopic(tmp_path / "later")
    later.write(block([b"a"]))
    later.publish(b'{"version":250,"kind":"data"}')
    later.write(block([b"b"], first=1))
    with pytest.raises(UnsupportedFormatError):
        rows_of(later.options, onDamaged=policy)
    assert values_of(later.options, onDamaged=policy, start="0:2:0") == [b"b"], "what lies before the start is passed"


# ---- writers ---------------------------------------------------------------------------------


def test_writers_are_checked_by_what_they_are_for() -> None:
    schema = StructType([StructField("value", BinaryType())])
    assert isinstance(MemqSource({"topic": "clicks"}).writer(schema, overwrite=False), MemqWriter)
    stream = MemqSource({"topic": "clicks", "writer": "w"}).streamWriter(schema, overwrite=False)
    assert isinstance(stream, MemqStreamWriter)
    with pytest.raises(InvalidSettingError, match="require each other"):
        MemqSource({"topic": "clicks", "writer": "w"}).writer(schema, overwrite=False)
    with pytest.raises(InvalidSettingError, match="a stream needs"):
        MemqSource({"topic": "clicks"}).streamWriter(schema, overwrite=False)
    for make in (MemqSource({"topic": "c"}).writer, MemqSource({"topic": "c", "writer": "w"}).streamWriter):
        with pytest.raises(InvalidRequestError):
            make(schema, overwrite=True)


# ---- ways to the data ----------------------------------------------------------------------------


def test_a_queue_or_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"a"]))
    with pytest.raises(NotFoundError, match=r"no queue file '/nowhere/queue\.sqlite'"):
        values_of(topic.options, queue="sqlite:/nowhere/queue.sqlite")
    with pytest.raises(NotFoundError, match="no queue file"):
        values_of(topic.options, queue=f"sqlite:{tmp_path}")
    with pytest.raises(InvalidSettingError, match="option 'queue' = 'redis:x' names no queue"):
        values_of(topic.options, queue="redis:x")
    with pytest.raises(NotFoundError, match="topic 'views' is not in the queue"):
        values_of(topic.options, topics="views")
    with pytest.raises(DeniedError, match="the folder '/nowhere' is not on this machine"):
        values_of(topic.options, store="file:/nowhere")
    with pytest.raises(InvalidSettingError, match="can't be opened by tasks"):
        values_of(topic.options, store="ftp://host/x")


def test_two_topics_of_one_name_are_read_through_a_broker(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    again = Topic(name="clicks", id="ff" * 16, created_ms=NOW_MS, partitions=equal_slots(1))
    StoredTopic(tmp_path, topic=again)
    with pytest.raises(InvalidSettingError, match=f"the queue has 2 topics 'clicks' with ids {topic.topic.id}, ffff"):
        values_of(topic.options)


def test_compacted_batches_are_read_from_their_new_objects(tmp_path: Path) -> None:
    topic = three_batches(tmp_path)
    small = [path for path in topic.objects.rglob("*") if path.is_file()]
    topic.write(block([b"6"], first=6), time_ms=NOW_MS + DAY_MS)

    async def compact() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        store = FilesystemHandler(topic.objects, topic.objects)
        rule = CompactionRule(age_ms=DAY_MS, rest=True)
        (done,) = await parts_on(queue, store, Runtime()).compact(topic.logs[0], TopicSettings(), rule)
        assert done.part.entries == len(small)
        files = ManifestFiles("memq", store)
        await leave_queue(queue, files, topic.logs[0], await manifest_of(files, topic.logs[0]))
        await queue.close()
        await store.close()

    asyncio.run(compact())
    for path in small:
        path.unlink()
    assert values_of(topic.options) == [b"%d" % number for number in range(7)]
    assert values_of(topic.options, start="0:1:1", end="0:2:1") == [b"3", b"4"]
