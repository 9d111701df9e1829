"""A stream as PySpark drives it, without a JVM: offsets, micro-batches, restarts, retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from memq.client.consumer.offset_resolver import OffsetResolver
from memq.errors import InvalidRequestError, NotFoundError, PositionExpiredError, UnreachableError
from memq.format.pointer import encode_pointer
from memq.notification import Entry, Span
from memq.runtime.network import ProtocolFactory
from memq.runtime.runtime import Runtime
from memq.spark.options import read_options
from memq.spark.pipelines.rounds import plan_round
from memq.spark.source import MemqSource
from memq.spark.stream_offsets import StreamLag, lag
from memq.spark.stream_reader import RETRY_S_MAX, MemqStreamReader, MicroBatchLimit, TopicStream
from memq.topic import Position, ReadPartition, Topic, Totals, equal_slots
from tests.skipping_loop import run_skipping, skipping_runtime
from tests.unit.audited import pointer
from tests.unit.blocks import NOW_MS
from tests.unit.spark_rows import schema_of, three_batches, values_of
from tests.unit.stored_topic import StoredTopic, block

Offsets = dict[str, Any]
ALL = ReadAllAvailable()


class Query:
    """A streaming query of the values of a topic: its reader and its checkpoint."""

    def __init__(self, topic: StoredTopic, **options: str) -> None:
        self.options = {**topic.options, "columns": "value", **options}
        self.reader = self.restarted()
        self.at = self.reader.initialOffset()

    def restarted(self) -> MemqStreamReader:
        """Return the reader of another driver."""
        reader = MemqSource(self.options).streamReader(schema_of(self.options))
        assert isinstance(reader, MemqStreamReader)
        return reader

    def restart(self) -> None:
        self.reader.stop()
        self.reader = self.restarted()

    def rows(self, start: Offsets, end: Offsets) -> list[bytes]:
        return [
            value
            for split in self.reader.partitions(start, end)
            for batch in self.reader.read(split)
            for value in batch.column(0).to_pylist()
        ]

    def step(self, limit: ReadLimit = ALL) -> list[bytes]:
        """Run one micro-batch."""
        end = self.reader.latestOffset(self.at, limit)
        rows = self.rows(self.at, end)
        self.at = end
        return rows


Follow = Callable[..., Query]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Make queries; they are stopped with the test."""
    queries: list[Query] = []

    def make(topic: StoredTopic, **options: str) -> Query:
        queries.append(Query(topic, **options))
        return queries[-1]

    yield make
    for query in queries:
        query.reader.stop()


def topic_of(folder: Path, *counts: int, partitions: int = 1) -> StoredTopic:
    """Store batches with so many records each."""
    topic, first = StoredTopic(folder, partitions=partitions), 0
    for number, count in enumerate(counts):
        rows = [b"%d" % each for each in range(first, first + count)]
        topic.write(block(rows, first=first), time_ms=NOW_MS + number, totals=Totals(first, number))
        first += count
    return topic


def numbers(*each: int) -> list[bytes]:
    return [b"%d" % number for number in each]


# ---- micro-batches -----------------------------------------------------------------------------


def test_a_stream_reads_all_and_then_what_comes(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 2, 1)
    query = follow(topic)
    assert query.step() == numbers(0, 1, 2)
    assert query.reader.latestOffset(query.at, ALL) == query.at, "nothing is new: the offset is the same"
    assert query.rows(query.at, query.at) == []
    topic.write(block([b"3"], first=3))
    assert query.step() == numbers(3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_micro_batches_have_as_many_records_as_they_may(follow: Follow, tmp_path: Path, count: int) -> None:
    query = follow(topic_of(tmp_path, 3, 1, 4))
    found: list[bytes] = []
    while len(found) < 8:
        before = len(found)
        found += query.step(ReadMaxRows(count))
        assert len(found) == min(8, before + count)
    assert found == numbers(*range(8))


def test_the_lower_limit_of_options_and_engine_holds(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 2, 2, 2)
    query = follow(topic, maxRecordsPerTrigger="3")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(3)
    assert query.step(ReadMaxRows(100)) == numbers(0, 1, 2)
    assert query.step(ReadMaxRows(1)) == numbers(3)
    assert query.step(ReadMaxBytes(1 << 30)) == numbers(4, 5)
    everything = follow(topic, maxRecordsPerTrigger="3")
    assert len(everything.step(ALL)) == 6, "the engine asks for all"
    by_bytes = follow(topic, maxBytesPerTrigger="1B")
    assert by_bytes.reader.getDefaultReadLimit() == ReadMaxBytes(1)
    assert by_bytes.step(ReadMaxBytes(100_000)) == numbers(0, 1), "at least one batch"
    assert by_bytes.step(ReadMaxRows(100)) == numbers(2, 3)
    free = follow(topic)
    assert isinstance(free.reader.getDefaultReadLimit(), ReadAllAvailable)
    assert free.step(ReadMaxBytes(1)) == numbers(0, 1)
    assert free.step(ReadMaxRows(3)) == numbers(2, 3, 4)
    both = follow(topic, maxRecordsPerTrigger="3", maxBytesPerTrigger="1B")
    assert both.reader.getDefaultReadLimit() == ReadMaxRows(3)
    assert both.step(ReadMaxRows(3)) == numbers(0, 1), "the bytes hold, too"


def test_partitions_are_taken_by_the_time_of_their_batches(follow: Follow, tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path, partitions=2)
    for number, partition in enumerate([1, 1, 0, 1, 0]):
        data = block([b"%d" % number], partition=partition, first=number)
        topic.write(data, partition=partition, time_ms=NOW_MS + number)
    query = follow(topic)
    assert [sorted(query.step(ReadMaxRows(2))) for _ in range(4)] == [numbers(0, 1), numbers(2, 3), numbers(4), []]


def test_available_now_ends_at_the_end_of_now(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 2)
    query = follow(topic)
    query.reader.prepareForTriggerAvailableNow()
    topic.write(block([b"2"], first=2))
    assert query.step(ReadMaxRows(1)) == numbers(0)
    assert query.step() == numbers(1)
    assert query.step() == []
    assert query.step(ReadMaxRows(5)) == []
    query.restart()
    assert query.step() == numbers(2)


def test_an_end_that_lags_behind_the_checkpoint_moves_no_stream_back(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, span = topic_of(tmp_path, 2, 1), OffsetResolver.span
    query = follow(topic)
    assert query.step() == numbers(0, 1, 2)

    async def lagging(self: OffsetResolver, partition: ReadPartition) -> Span:
        return replace(await span(self, partition), end=1)

    with monkeypatch.context() as behind:
        behind.setattr(OffsetResolver, "span", lagging)
        query.reader.prepareForTriggerAvailableNow()
    assert query.reader.latestOffset(query.at, ALL) == query.at
    assert query.step() == []


def test_the_lag_is_what_is_stored_behind_a_micro_batch(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 2, 3)
    query = follow(topic)
    query.step(ReadMaxRows(1))
    ends = query.reader.reportLatestOffset()
    found = lag({"sources": [{"endOffset": query.at, "latestOffset": ends}]})
    assert found.records == 4
    query.step()
    assert lag({"sources": [{"endOffset": query.at, "latestOffset": ends}]}) == StreamLag(0, 0)
    assert query.reader.reportLatestOffset() == query.at


# ---- positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("beginning", range(5)),
        ("0:1:0", range(2, 5)),
        ("0:0:1", range(1, 5)),
        (str(NOW_MS + 1), range(2, 5)),
        ("end", range(0)),
    ],
)
def test_a_stream_begins_at_its_start(follow: Follow, tmp_path: Path, start: str, found: range) -> None:
    query = follow(topic_of(tmp_path, 2, 3), start=start)
    assert lag({"sources": [{"endOffset": query.at, "latestOffset": query.reader.reportLatestOffset()}]}).records == (
        len(found)
    )
    assert query.step() == numbers(*found)


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(1)])
def test_expired_batches_end_the_stream_or_are_skipped(follow: Follow, tmp_path: Path, limit: ReadLimit) -> None:
    topic = topic_of(tmp_path, 2, 3)
    query, skipping = follow(topic), follow(topic, onExpired="skip")
    end = query.reader.latestOffset(query.at, ALL)
    topic.trim(1)
    with pytest.raises(PositionExpiredError):
        query.reader.latestOffset(query.at, limit)
    with pytest.raises(PositionExpiredError):
        query.rows(query.at, end)
    assert skipping.step(limit) == (numbers(2, 3, 4) if limit is ALL else numbers(2))
    assert query.rows(end, end) == []
    here = follow(topic, start="0:1:0")
    assert here.step() == numbers(2, 3, 4), "nothing of it is expired"


def test_a_stream_continues_where_retention_took_no_record(follow: Follow, tmp_path: Path) -> None:
    """Owners that open an idle topic leave pointers without records, which go as all others."""
    topic = topic_of(tmp_path, 2, 3)
    query = follow(topic)
    assert query.step() == numbers(0, 1, 2, 3, 4)
    for _ in range(3):
        topic.publish(encode_pointer(pointer(kind="opened", totals=Totals(5, 5))))
    topic.trim(4)
    query.restart()
    assert query.step() == []
    topic.write(block(numbers(5), first=5), totals=Totals(5, 5))
    assert query.step() == numbers(5)
    topic.write(block(numbers(6), first=6), totals=Totals(6, 6))
    topic.write(block(numbers(7), first=7), totals=Totals(7, 7))
    topic.trim(7)
    with pytest.raises(PositionExpiredError, match=r"0:6:0 .* is before 0:7:0, the first remaining one: 1 records"):
        query.step()


def test_retention_that_is_at_work_while_a_micro_batch_is_planned_ends_the_stream(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pointers were looked for before they were read: what went between the two was passed over in silence."""
    topic, pages = topic_of(tmp_path, 2, 3), OffsetResolver.pages
    query = follow(topic)
    end = query.reader.latestOffset(query.at, ALL)

    async def trimmed(self: OffsetResolver, *stretch: Any) -> AsyncIterator[list[Entry]]:
        retention = Thread(target=topic.trim, args=(1,))
        retention.start()
        retention.join()
        async for page in pages(self, *stretch):
            yield page

    monkeypatch.setattr(OffsetResolver, "pages", trimmed)
    with pytest.raises(PositionExpiredError, match=r"0:0:0 .* is before 0:1:0"):
        query.rows(query.at, end)


def test_a_checkpoint_of_other_topics_is_refused(follow: Follow, tmp_path: Path) -> None:
    query = follow(topic_of(tmp_path, 1))
    (tmp_path / "other").mkdir()
    again = Topic(name="clicks", id="ff" * 16, created_ms=NOW_MS, partitions=equal_slots(1))
    other = follow(StoredTopic(tmp_path / "other", topic=again))
    for start in (query.at, {}):
        with pytest.raises(InvalidRequestError, match="the checkpoint is of topics"):
            other.reader.latestOffset(start, ALL)


# ---- restarts --------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_a_copy_in_a_later_micro_batch_is_left_out(follow: Follow, tmp_path: Path, restarts: bool, count: int) -> None:
    topic = topic_of(tmp_path, 2)
    query = follow(topic)
    topic.write(block([b"2"], first=2))
    assert query.step(ReadMaxRows(count)) == numbers(*range(count))
    topic.write(block(numbers(0, 1)))
    topic.write(block(numbers(0, 1), first=0), block([b"3"], first=3))
    if restarts:
        query.restart()
    assert query.step() == numbers(*range(count, 4))
    topic.write(block(numbers(3), first=3))
    assert query.step() == []


def test_a_micro_batch_that_is_planned_again_has_the_same_records(follow: Follow, tmp_path: Path) -> None:
    topic = topic_of(tmp_path, 2, 2)
    topic.write(block(numbers(0, 1)))
    query = follow(topic)
    middle = query.reader.latestOffset(query.at, ReadMaxRows(3))
    end = query.reader.latestOffset(middle, ALL)
    for _ in range(2):
        assert query.rows(query.at, middle) == numbers(0, 1, 2)
        assert query.rows(middle, end) == numbers(3)
    query.restart()
    assert query.rows(middle, end) == numbers(3)
    assert query.rows(query.at, end) == numbers(0, 1, 2, 3)


def test_a_stopped_reader_opens_again(follow: Follow, tmp_path: Path) -> None:
    query = follow(topic_of(tmp_path, 1))
    query.reader.stop()
    assert query.step() == numbers(0)
    query.reader.stop()


# ---- failures --------------------------------------------------------------------------------


class NoNetwork:
    """A network on which nobody answers; it notes when it was tried."""

    def __init__(self) -> None:
        self.tried_s: list[float] = []

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> Any:
        self.tried_s.append(asyncio.get_running_loop().time())
        raise UnreachableError(f"nobody at {host}")


def test_a_stream_asks_again_for_a_minute() -> None:
    async def main() -> None:
        network = NoNetwork()
        idle = skipping_runtime()
        stream = TopicStream(
            read_options({"topics": "clicks", "brokers": "h:1"}),
            Runtime(idle.clock, idle.random, network),  # type: ignore[arg-type]
        )
        with pytest.raises(UnreachableError, match="nobody at h"):
            await stream.latest({}, MicroBatchLimit())
        assert network.tried_s[-1] >= RETRY_S_MAX
        assert len(network.tried_s) > 3, "within that time it asks again and again"
        await stream.close()

    run_skipping(main())


def test_permanent_error_ends_the_query_at_once(tmp_path: Path) -> None:
    options = read_options({"topics": "clicks", "queue": f"sqlite:{tmp_path}/none", "store": "file:/x"}, "streaming")

    async def main() -> None:
        stream = TopicStream(options, Runtime())
        with pytest.raises(NotFoundError, match="no queue file"):
            await stream.initial()
        await stream.close()

    asyncio.run(main())


# ---- batch reads and pipelines ----------------------------------------------------------------


def test_a_start_that_retention_took_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read began at what was left, without a word; also when retention was at work while it was planned."""
    topic, pages = three_batches(tmp_path), OffsetResolver.pages

    async def trimmed(self: OffsetResolver, *stretch: Any) -> AsyncIterator[list[Entry]]:
        retention = Thread(target=topic.trim, args=(1,))
        retention.start()
        retention.join()
        async for page in pages(self, *stretch):
            yield page

    assert len(values_of(topic.options, start="0:0:0")) == 6
    monkeypatch.setattr(OffsetResolver, "pages", trimmed)
    for _ in range(2):  # the second one begins when it is gone
        with pytest.raises(PositionExpiredError, match=r"0:0:0 .* is before 0:1:0"):
            values_of(topic.options, start="0:0:0")
    assert values_of(topic.options, start="0:1:0") == [b"2", b"3", b"4", b"5"]


def test_a_pipeline_names_what_retention_took_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A group that is caught up was set behind records that nobody had read, and nothing said so."""
    topic = topic_of(tmp_path, 2, 3, 1)
    options = read_options(topic.options)
    for covered, said in ({}, False), ({0: Position(0, 1)}, True), ({0: Position(0, 2)}, False):
        caplog.clear()
        topic.trim(2)
        found = asyncio.run(plan_round(options, covered, settled=False))
        assert (found.starts[0], len(found.splits)) == (Position(0, 2), 1)
        assert ("spark.expired: position 0:1:0 of topic 'clicks' is before 0:2:0" in caplog.text) == said
