"""The options `tags` and `where` of Spark's reads: exactly the wanted records, in batches and in streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pyspark.sql.datasource import EqualTo, Filter
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.record_filter import filter_of
from memq.errors import CorruptDataError, InvalidFilterError, InvalidRequestError
from memq.format.blocks.header import Buffer, tag_bit
from memq.format.pointer import decode_pointer
from memq.spark.options import read_options
from memq.spark.read.arrow_rows import RowMaker
from memq.spark.read.planner import BatchPart, PartitionPlan
from memq.spark.read.pruning import ReadFilter, option_filter, take_filters
from memq.spark.read.task import TaskReport, _Ahead, _Fetched, _rows_of, settings_of
from memq.spark.source import MemqSource
from memq.spark.stores import StoreUrls
from memq.spark.stream_reader import MemqStreamReader
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position
from tests.skipping_loop import run_skipping
from tests.unit.blocks import Record
from tests.unit.spark_rows import rows_of, schema_of, values_of
from tests.unit.stored_topic import StoredTopic, block

SAME_BIT = "other"  # as T


def record(number: int, tag: str | None = None, **headers: str) -> Record:
    return b"%d" % number, None, tuple((name, text.encode()) for name, text in headers.items()), None, tag


def write(topic: StoredTopic, first: int, *blocks: Sequence[tuple[str | None, dict[str, str]]]) -> None:
    """Store a batch of blocks; records are numbered from `first`, and have these tags and headers."""
    datas = list[bytes]()
    for rows in blocks:
        records = [record(first + at, tag, **headers) for at, (tag, headers) in enumerate(rows)]
        datas.append(block(records, first=first))
        first += len(rows)
    topic.write(*datas)


def mixed(folder: Path) -> StoredTopic:
    """Return a topic of 17 records: blocks and batches with and without the tags, and without any tag."""
    topic = StoredTopic(folder)
    write(topic, 0, [("T", {"n": "0"}), ("x", {"n": "1"}), (None, {}), ("T", {})], [("x", {"n": "4"})])
    write(topic, 5, [(None, {"n": "5"}), (None, {})])
    write(topic, 7, [("x", {"n": "7"})] * 2, [(SAME_BIT, {"n": "9"}), ("T", {"n": "10"})], [("x", {"n": "11"})])
    write(topic, 12, [(SAME_BIT, {"n": "12"})], [(SAME_BIT, {"n": "13"})])
    write(topic, 14, [("T", {"n": "14"}), ("U", {"n": "15"})], [("U", {"n": "7"})])
    return topic


CASES: list[tuple[dict[str, str], list[int]]] = [
    ({"tags": "T"}, [0, 3, 10, 14]),
    ({"tags": "T || U"}, [0, 3, 10, 14, 15, 16]),
    ({"tags": "*"}, list(range(17))),
    ({"tags": "no such tag"}, []),
    ({"where": "n >= 7 AND n < 12"}, [7, 8, 9, 10, 11, 16]),
    ({"where": "n IS NULL"}, [2, 3, 6]),
    ({"where": "NOT n > 1"}, [0, 1]),
    ({"tags": "T", "where": "n IS NOT NULL"}, [0, 10, 14]),
    ({"tags": "U", "where": "n = 7"}, [16]),
]


def test_the_tags_share_a_bit_where_they_should() -> None:
    assert tag_bit("T") == tag_bit(SAME_BIT)
    assert len({tag_bit(tag) for tag in ("T", "U", "x")}) == 3


def values_by(options: Mapping[str, str]) -> list[int]:
    """Return the values of a batch read as numbers."""
    return [int(value or 0) for value in values_of(dict(options))]


@pytest.mark.parametrize(("options", "found"), CASES)
def test_a_batch_read_has_exactly_the_wanted_records(options: dict[str, str], found: list[int], tmp_path: Path) -> None:
    topic = mixed(tmp_path)
    assert values_by(topic.options | options) == found
    assert sorted(values_by({"path": str(topic.objects), **options})) == found
    columns = {**topic.options, "columns": "value,sequence,record_index,offset,tag"}
    of_all = {row["sequence"]: row for row in rows_of(columns)}
    assert rows_of(columns | options) == [of_all[number] for number in found], "rows are those of a read of all"


@pytest.mark.parametrize(("options", "found"), CASES)
def test_a_stream_has_exactly_the_wanted_records(options: dict[str, str], found: list[int], tmp_path: Path) -> None:
    given = {**mixed(tmp_path).options, "columns": "value", **options}
    reader = MemqSource(given).streamReader(schema_of(given))
    assert isinstance(reader, MemqStreamReader)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    batches = [batch for split in reader.partitions(start, end) for batch in reader.read(split)]
    assert [int(value) for batch in batches for value in batch.column(0).to_pylist()] == found
    assert reader.latestOffset(end, ReadAllAvailable()) == end, "the stream is behind all records"
    reader.stop()


@pytest.mark.parametrize(("start", "end"), [("0:0:1", "0:2:3"), ("0:0:4", "0:4:1"), ("0:2:3", "0:2:4")])
def test_a_filter_applies_between_start_and_end(start: str, end: str, tmp_path: Path) -> None:
    topic = mixed(tmp_path)
    limits = {**topic.options, "start": start, "end": end}
    between = values_by(limits)
    for options, found in CASES:
        assert values_by(limits | options) == [number for number in found if number in between]


def test_a_query_on_tag_and_the_option_must_both_match(tmp_path: Path) -> None:
    topic = mixed(tmp_path)
    query: list[Filter] = [EqualTo(("tag",), "U")]
    assert values_of(topic.options, query, columns="value,tag", tags="T") == [b"14"], (
        "Spark drops the record of T itself"
    )
    assert values_of(topic.options, query, columns="value,tag", tags="T || U") == [b"14", b"15", b"16"]
    wanted, _ = take_filters(query, ("tag",), option_filter(read_options({"topics": "a", "tags": "T"})))
    assert (wanted.tag_bits, wanted.option_bits) == (tag_bit("U"), tag_bit("T"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tags": "A |"}, "single '|' at character 3"),
        ({"tags": ""}, "lacks a tag"),
        ({"where": "n >"}, "at its end"),
        ({"where": ""}, "at its end"),
        ({"where": "n = NULL"}, "IS NULL"),
    ],
)
@pytest.mark.parametrize("kind", ["batch", "streaming"])
def test_a_malformed_filter_is_refused_with_the_options(kind: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidFilterError, match=said.replace("|", r"\|")):
        read_options({"topics": "a", **options}, kind)  # type: ignore[arg-type]


def test_only_wanted_values_are_decoded(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    rows: list[Record] = [
        (text, None, (), None, tag)
        for text, tag in [(b"x", "x"), (b'{"a": 1}', "T"), (b"x", None), (b'{"a": 2}', "T"), (b"no", "T")]
    ]
    topic.write(block(rows))
    options = {**topic.options, "columns": "sequence,value", "schema": "a INT", "tags": "T"}
    fields = [StructField("a", IntegerType())]
    found = rows_of({**options, "onMalformed": "null"}, fields=fields)
    assert [(row["sequence"], row["a"]) for row in found] == [(1, 1), (3, 2), (4, None)]
    with pytest.raises(InvalidRequestError, match="value at 0:0:4 of topic"):
        rows_of(options, fields=fields)
    assert len(rows_of({**options, "end": "0:0:4"}, fields=fields)) == 2


# ---- what is fetched, and what the audit knows ------------------------------------------------------


def parts_of(topic: StoredTopic, start: Position, end: Position, *, audited: bool) -> list[BatchPart]:
    """Return what a driver plans for the tag T."""
    wanted = ReadFilter(option_bits=tag_bit("T"))
    plan = PartitionPlan(start, end, 60_000, wanted, dedup=True, names_unwanted=audited)
    entries = topic.ask(lambda queue: queue.read(topic.logs[0], start.pointer_offset, 1 << 20))
    parts = [
        plan.take(entry, decode_pointer(entry.body))
        for entry in entries
        if entry.offset < end.pointer_offset + (end.record_index > 0)
    ]
    return [part for part in parts if part is not None]


def test_a_driver_leaves_out_batches_unless_the_audit_is_to_know_them(tmp_path: Path) -> None:
    topic, begin, end = mixed(tmp_path), Position(0, 0), Position(0, 9)
    plain, audited = (parts_of(topic, begin, end, audited=each) for each in (False, True))
    assert [(part.offset, part.by_index) for part in plain] == [(0, True), (2, True), (3, False), (4, True)]
    assert [(part.offset, part.unwanted) for part in audited] == [
        (0, False),
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]
    assert [part for part in audited if not part.unwanted] == plain
    left_out = audited[1].left_out
    assert left_out is not None
    assert [(each.first, each.next) for each in left_out] == [(5, 7)]
    assert audited[1].bytes == 0
    (cut,) = parts_of(topic, Position(0, 1, 1), Position(0, 2), audited=True)
    assert (cut.unwanted, cut.left_out, cut.low) == (True, None, 1), "the index says which records are before the start"


class Notes(TaskReport):
    """A report that is not sent."""

    def __init__(self) -> None:
        self._notes = []
        self._damages = []

    @property
    def damages(self) -> int:
        return len(self._damages)

    def sequences(self, stage: str) -> list[int]:
        return sorted(each for note in self._notes if note.stage == stage for each in range(note.first, note.next))


@pytest.mark.parametrize(
    ("options", "begin", "end", "found"),
    [
        ({"tags": "T"}, Position(0, 0), Position(0, 9), {0, 3, 10, 14}),
        ({"tags": "T", "where": "n > 0"}, Position(0, 0), Position(0, 9), {10, 14}),
        ({"tags": "T"}, Position(0, 0, 2), Position(0, 2, 4), {3, 10}),
        ({"tags": "T"}, Position(0, 1, 1), Position(0, 1, 2), set[int]()),
    ],
)
@pytest.mark.parametrize("harm", ["none", "index"])
def test_a_task_reports_each_record_as_fetched_or_passed(
    options: dict[str, str], begin: Position, end: Position, found: set[int], harm: str, tmp_path: Path
) -> None:
    topic = mixed(tmp_path)
    between = set(values_by({**topic.options, "start": str(begin), "end": str(end)}))
    given = read_options({"topics": "clicks", "brokers": "a:1", "auditName": "s", **options}, "streaming")
    settings, report = settings_of(given, StoreUrls({}), option_filter(given)), Notes()
    parts = parts_of(topic, begin, end, audited=True)
    values = list[int]()

    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        body = (topic.objects / key).read_bytes()
        if harm == "index" and offset:
            raise CorruptDataError("the index is damaged")
        return body[offset : offset + length]

    async def work() -> list[_Fetched]:
        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads())
        ahead = _Ahead(fetcher, parts, settings, audited=True)
        fetched = list[_Fetched]()
        while (one := await ahead.next()) is not None:
            fetched.append(one)
        return fetched

    maker = RowMaker(StructType([StructField("value", BinaryType())]), range(0))
    for one in run_skipping(work()):
        report.leave_out(one)
        for batch in _rows_of(one, settings, maker, report, filter_of(given.tags, given.where)):
            values += [int(value) for value in batch.column(0).to_pylist()]
    assert set(values) == found
    assert report.sequences("fetched") == sorted(found)
    assert report.sequences("passed") == sorted(between - found)
    assert report.damages == 0
