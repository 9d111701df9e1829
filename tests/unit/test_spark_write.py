"""Writes of Spark without a JVM: options, columns and types, and rows that are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from memq.client.bulk.staged_writer import StagedCommits
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError, MemqError, UnknownSettingError
from memq.format.staged_manifest import StagedObject
from memq.limits import BATCH_ID_END
from memq.spark import write
from memq.spark.stores import TaskStores
from memq.spark.write import (
    MODES,
    WRITE_COLUMNS,
    MemqStreamWriter,
    MemqWriter,
    StagedTask,
    TaskOutcome,
    WriteOptions,
    add_rows,
    check_columns,
    columns_of,
    open_stores,
    write_options,
)

VALUE = {"value": "binary"}


# ---- options -------------------------------------------------------------------------------------


def test_a_write_without_options_stages_under_no_name() -> None:
    assert write_options({}, streams=False) == WriteOptions(
        brokers=None, store="", config=None, profile=None, topic="", staged=True, writer="", batch_id=-1, codec="zstd"
    )


def test_every_option_is_read() -> None:
    given = {
        "brokers": "a:1",
        "store": "file:/x",
        "config": "c",
        "profile": "p",
        "topic": "clicks",
        "mode": "low-latency",
        "writer": "nightly",
        "batchId": "7",
        "codec": "lz4",
    }
    assert write_options(given, streams=False) == WriteOptions(
        brokers="a:1",
        store="file:/x",
        config="c",
        profile="p",
        topic="clicks",
        staged=False,
        writer="nightly",
        batch_id=7,
        codec="lz4",
    )


@pytest.mark.parametrize("batch", ["0", str(BATCH_ID_END - 1)])
def test_numbers_of_batches_are_below_their_end(batch: str) -> None:
    assert write_options({"writer": "nightly", "batchId": batch}, streams=False).batch_id == int(batch)


@pytest.mark.parametrize("batch", [str(BATCH_ID_END), "-1", "1.5", "seven", "²", "9" * 5_000])
def test_other_numbers_of_batches_are_refused(batch: str) -> None:
    with pytest.raises(InvalidSettingError, match="is no number below"):
        write_options({"writer": "nightly", "batchId": batch}, streams=False)


@pytest.mark.parametrize(
    ("given", "streams", "wrong"),
    [
        ({}, True, "a stream needs the option 'writer'"),
        ({"writer": "w", "batchId": "1"}, True, "and no 'batchId'"),
        ({"batchId": "1"}, True, "a stream needs"),
        ({"writer": "w"}, False, "require each other"),
        ({"batchId": "1"}, False, "require each other"),
        ({"mode": "fast"}, False, "mode"),
        ({"codec": "gzip"}, False, "codec"),
        ({"topic": "no topic"}, False, "no topic"),
        ({"writer": "no writer", "batchId": "1"}, False, "no writer"),
        ({"tropic": "clicks"}, False, "tropic"),
    ],
)
def test_contradictory_write_options_are_refused(given: Mapping[str, str], streams: bool, wrong: str) -> None:
    with pytest.raises((InvalidSettingError, InvalidNameError, UnknownSettingError), match=wrong):
        write_options(given, streams=streams)


def test_a_stream_has_a_writer_and_numbers_its_batches_itself() -> None:
    found = write_options({"writer": "w", "mode": MODES[0]}, streams=True)
    assert (found.writer, found.batch_id, found.staged) == ("w", -1, True)


@pytest.mark.parametrize(
    ("given", "atomic"),
    [
        ({"writer": "w"}, True),
        ({"writer": "w", "atomic": "false"}, False),
        ({"writer": "w", "mode": "low-latency"}, False),
        ({"writer": "w", "mode": "low-latency", "atomic": "false"}, False),
    ],
)
def test_batches_of_a_writer_are_atomic_by_default(given: Mapping[str, str], *, atomic: bool) -> None:
    assert write_options(given, streams=True).atomic is atomic
    assert not write_options({}, streams=False).atomic


@pytest.mark.parametrize(("given", "streams"), [({}, False), ({"writer": "w", "mode": "low-latency"}, True)])
def test_an_atomic_write_without_a_writer_is_refused(given: Mapping[str, str], streams: bool) -> None:
    with pytest.raises(InvalidSettingError, match="needs the mode exactly-once and a writer") as caught:
        write_options({**given, "atomic": "true"}, streams=streams)
    assert "batchId" in caught.value.hint


# ---- columns -------------------------------------------------------------------------------------


def test_all_columns_of_a_record_are_taken_in_any_case_and_type_that_is_listed() -> None:
    check_columns([(name.upper(), kinds[-1]) for name, kinds in WRITE_COLUMNS.items()], WriteOptions())
    check_columns([("value", "binary")], WriteOptions(topic="clicks"))


@pytest.mark.parametrize(
    ("columns", "topic", "wrong"),
    [
        (VALUE | {"vlue": "binary"}, "clicks", "'vlue' is none that a record has"),
        ({"value": "int"}, "clicks", "'value' is int, not binary or string"),
        (VALUE | {"partition": "bigint"}, "clicks", "'partition' is bigint, not int"),
        ({"key": "binary"}, "clicks", "there is no column value"),
        (VALUE, "", "one of the option 'topic' and the column topic"),
        (VALUE | {"topic": "string"}, "clicks", "one of the option 'topic' and the column topic"),
    ],
)
def test_columns_that_no_record_has_are_named(columns: Mapping[str, str], topic: str, wrong: str) -> None:
    with pytest.raises(InvalidSettingError, match=wrong):
        check_columns(list(columns.items()), WriteOptions(topic=topic))


@pytest.mark.parametrize("again", ["value", "VALUE", "Value"])
def test_a_column_that_is_there_twice_is_refused(again: str) -> None:
    """The last one was written, and the other one silently left out."""
    with pytest.raises(InvalidSettingError, match="2 columns are called value"):
        check_columns([("value", "binary"), ("key", "binary"), (again, "string")], WriteOptions(topic="clicks"))
    fields = [StructField("value", BinaryType()), StructField(again, StringType())]
    with pytest.raises(InvalidSettingError, match="2 columns are called value"):
        MemqWriter(WriteOptions(topic="clicks"), StructType(fields), overwrite=False)


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def test_values_become_bytes_times_milliseconds_and_headers_pairs() -> None:
    at = datetime(2026, 11, 23, 12, 0, 0, 1_999, UTC)
    header = pa.struct([("name", pa.string()), ("value", pa.binary())])
    found = columns_of(
        batch_of(
            VALUE=pa.array(["a", None], pa.string()),
            key=pa.array(["k", None], pa.large_string()),
            timestamp=pa.array([at, None], pa.timestamp("us", "UTC")),
            headers=pa.array([[{"name": "h", "value": b"v"}], None], pa.list_(header)),
            topic=pa.array(["clicks", "views"]),
        )
    )
    assert found == {
        "value": [b"a", None],
        "key": [b"k", None],
        "timestamp": [int(at.timestamp()) * 1_000 + 1, None],
        "headers": [[("h", b"v")], None],
        "topic": ["clicks", "views"],
    }


def test_large_values_stay_as_they_are() -> None:
    assert columns_of(batch_of(value=pa.array([b"\xff"], pa.binary()))) == {"value": [b"\xff"]}
    assert columns_of(batch_of(value=pa.array(["ä"], pa.large_string()))) == {"value": ["ä".encode()]}


def test_a_row_without_a_topic_and_a_header_without_a_name_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the column topic is null"):
        columns_of(batch_of(value=pa.array([b"a", b"b"]), topic=pa.array(["clicks", None])))
    header = pa.struct([("name", pa.string()), ("value", pa.binary())])
    rows: list[Any] = [None, [], [{"name": "h", "value": None}, {"name": None, "value": b"v"}]]
    with pytest.raises(InvalidRequestError, match="a header has no name"):
        columns_of(batch_of(value=pa.array([b"a"] * 3), headers=pa.array(rows, pa.list_(header))))


# ---- rows ----------------------------------------------------------------------------------------


class Records:
    """Notes what is added, and how."""

    def __init__(self) -> None:
        self.many: list[Any] = []
        self.one: list[Any] = []

    async def add(self, topic: str, *row: Any) -> None:
        self.one.append((topic, *row))

    async def add_many(self, topic: str, *columns: Any) -> None:
        self.many.append((topic, *columns))


def added(columns: dict[str, list[Any]]) -> Records:
    records = Records()
    asyncio.run(add_rows(records, columns, "clicks"))
    return records


def test_plain_rows_go_in_many_at_once() -> None:
    assert added({"value": [b"a"], "key": [b"k"], "timestamp": [5]}).many == [("clicks", [b"a"], [b"k"], [5])]
    assert added({"value": [b"a"]}).many == [("clicks", [b"a"], None, None)]


def test_rows_with_more_or_without_a_time_go_one_by_one() -> None:
    found = added({"value": [b"a", b"b"], "timestamp": [5, None]})
    assert found.many == []
    assert found.one == [("clicks", b"a", None, None, 5, None, None), ("clicks", b"b", None, None, None, None, None)]
    found = added(
        {
            "value": [b"a"],
            "key": [b"k"],
            "headers": [[("h", b"v")]],
            "timestamp": [5],
            "tag": ["t"],
            "partition": [3],
            "topic": ["views"],
        }
    )
    assert found.one == [("views", b"a", b"k", [("h", b"v")], 5, "t", 3)]


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        added({"value": [b"a", b"b"], "tag": ["t"]})


# ---- commits of jobs -----------------------------------------------------------------------------


class Last:
    """The last batch of a writer."""

    def __init__(self, batch_id: int) -> None:
        self.writer, self.batch_id = "nightly", batch_id


class Commits:
    """Notes what is committed; `last` is what an earlier run left, `decided` the batches that were written."""

    cluster = "memq"

    def __init__(self, last: int | None = None, decided: frozenset[int] = frozenset()) -> None:
        self.last = None if last is None else Last(last)
        self.decided, self.done, self.asked = decided, list[tuple[int, str, bool]](), list[list[str]]()
        self.finished = 0

    async def finish_last(self, store: Any) -> Last | None:
        self.finished += 1
        return self.last

    async def is_decided(self, batch_id: int, store: Any) -> bool:
        return batch_id in self.decided

    async def commit(
        self, batch_id: int, objects: Sequence[Any], store: Any, *, source: str, remember: bool, atomic: bool
    ) -> None:
        self.done.append((batch_id, source, remember))

    async def topics(self, names: list[str]) -> dict[str, Any]:
        self.asked.append(names)
        return dict.fromkeys(names)


class BareTask(StagedTask):
    """A task whose store is not opened."""

    store = cast("Any", None)


def committing(commits: Commits, batch_id: int, *, source: str = "", remember: bool = True) -> Commits:
    options = WriteOptions(topic="clicks")
    task = BareTask(cast("StagedCommits", commits), open_stores(options, {}), options, "nightly")
    asyncio.run(task.commit(batch_id, [], source, remember=remember))
    return commits


@pytest.mark.parametrize(("last", "batch_id"), [(None, 3), (3, 3), (2, 3)])
def test_a_job_with_a_name_ends_what_a_killed_run_left_and_then_commits(last: int | None, batch_id: int) -> None:
    commits = committing(Commits(last), batch_id)
    assert (commits.finished, commits.done) == (1, [(batch_id, "", True)])


def test_an_older_batch_is_committed_again_where_it_was_written_and_refused_where_it_never_was() -> None:
    """Brokers would take it for written, and its rows would be lost without an error."""
    assert committing(Commits(4, frozenset({3})), 3).done == [(3, "", True)]
    commits = Commits(4)
    with pytest.raises(InvalidRequestError, match=r"batch 3 was never written, .* has written batch 4"):
        committing(commits, 3)
    assert commits.done == []


@pytest.mark.parametrize(("source", "remember"), [("stream-1", True), ("", False)])
def test_streams_and_jobs_without_a_name_ask_for_no_earlier_batch(source: str, *, remember: bool) -> None:
    commits = committing(Commits(9), 3, source=source, remember=remember)
    assert (commits.finished, commits.done) == (0, [(3, source, remember)])


def test_a_topic_is_asked_for_once() -> None:
    commits = Commits()
    options = WriteOptions(topic="clicks")
    task = BareTask(cast("StagedCommits", commits), open_stores(options, {}), options, "nightly")

    async def work() -> None:
        for names in (["a", "b", "a"], ["a", "b"], ["b", "c"]):
            pieces = [SimpleNamespace(topic=name) for name in names]
            await task.commit(1, [cast("StagedObject", SimpleNamespace(pieces=pieces))], "stream-1", remember=True)

    asyncio.run(work())
    assert commits.asked == [["a", "b"], ["c"]]


def test_a_store_that_was_named_is_used_instead_of_what_brokers_say(tmp_path: Any) -> None:
    for folder in ("own", "brokers"):
        (tmp_path / folder).mkdir()

    async def urls(options: WriteOptions) -> str:
        stores: TaskStores = open_stores(options, {"main": f"file:{tmp_path}/brokers"})
        try:
            return stores.open("main").url
        finally:
            await stores.close()

    named = asyncio.run(urls(WriteOptions(store=f"file:{tmp_path}/own")))
    assert named.endswith("/own")
    assert asyncio.run(urls(WriteOptions())).endswith("/brokers")
    with pytest.raises(MemqError):
        open_stores(WriteOptions(), {}).open("main")


# ---- the driver ----------------------------------------------------------------------------------

SCHEMA = StructType([StructField("value", StringType()), StructField("topic", StringType())])


def staged(batch_id: int) -> TaskOutcome:
    return TaskOutcome([cast("StagedObject", f"object {batch_id}")], stream="stream-1")


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver commits."""
    found: list[Any] = []

    def noted(options: WriteOptions, *said: Any, remember: bool) -> None:
        found.append((*said, remember))

    monkeypatch.setattr(write, "commit", noted)
    return found


@pytest.mark.parametrize(("writer", "number", "remember"), [("nightly", 7, True), ("", -1, False)])
def test_a_job_commits_what_all_its_tasks_have_staged_under_its_number_or_0(
    committed: list[Any], writer: str, number: int, *, remember: bool
) -> None:
    options = WriteOptions(writer=writer, batch_id=number)
    job = MemqWriter(options, SCHEMA, overwrite=False)
    job.commit([staged(1), None, staged(2)])
    ((name, batch_id, objects, stream, remembered),) = committed
    assert (batch_id, objects, stream) == (max(0, number), ["object 1", "object 2"], "stream-1")
    assert remembered is remember
    assert name == writer or name.startswith("spark-")


def test_a_stream_commits_each_micro_batch_under_its_own_name(committed: list[Any]) -> None:
    stream = MemqStreamWriter(WriteOptions(writer="copy"), SCHEMA, overwrite=False)
    stream.commit([staged(1)], 5)
    stream.commit([], 6)
    assert committed == [("copy", 5, ["object 1"], "stream-1", True), ("copy", 6, [], "", True)]


def test_directly_sent_rows_are_not_committed(committed: list[Any]) -> None:
    MemqWriter(WriteOptions(staged=False), SCHEMA, overwrite=False).commit([TaskOutcome([], 5)])
    assert committed == []


@pytest.mark.parametrize("kind", [MemqWriter, MemqStreamWriter])
def test_a_topic_is_appended_to_and_its_columns_are_checked_first(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match="can't be overwritten"):
        kind(WriteOptions(), SCHEMA, overwrite=True)
    with pytest.raises(InvalidSettingError, match="one of the option 'topic'"):
        kind(WriteOptions(topic="clicks"), SCHEMA, overwrite=False)
