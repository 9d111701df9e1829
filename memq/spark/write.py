"""Writes with `format("memq")`: options, tasks that stage or send, and PySpark's writers.

A `write()` gets no batch id, and may run twice; only `commit` gets the batch. So staged objects belong to no batch
before their commit. Records that are sent directly use the id of the micro-batch from Spark's properties of the task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from memq.client.bulk.direct_writer import DirectIdentity, DirectWriter
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.io_thread import io_thread
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.format.blocks.header import CODECS
from memq.format.staged_manifest import StagedObject
from memq.limits import BATCH_ID_END
from memq.runtime.runtime import Runtime
from memq.settings import did_you_mean
from memq.spark.options import read_choice, read_given
from memq.spark.stores import ANY, StoreUrls, TaskStores, begin_tasks
from memq.storage_handlers import StorageHandler
from memq.topic import Topic, check_name, check_resource_name

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

WRITE_DESCRIPTIONS = {
    "brokers": "HOST:PORT of a broker, several with commas; else MEMQ_BROKERS",
    "store": "file:FOLDER or s3://BUCKET/PREFIX?endpoint=…: where tasks stage, instead of what brokers say",
    "config": "settings file on every machine, for the section [s3]; else as `memq` finds it",
    "profile": "profile of the settings file",
    "topic": "where records go that have no column topic",
    "mode": "exactly-once: tasks stage, a commit makes a batch visible; or low-latency: straight to the brokers",
    "writer": "name of the writer; a stream needs one, and a new one for each new checkpoint",
    "batchid": "number of a batch job, which grows; with writer: the job that runs again is there once",
    "codec": "zstd, lz4 or none",
    "atomic": "true: one transaction makes all partitions of a batch visible; default for exactly-once with a writer",
}
WRITE_SPELLING = {name: name for name in WRITE_DESCRIPTIONS} | {"batchid": "batchId"}
MODES = ("exactly-once", "low-latency")
_CODECS = ("zstd", *(name for name in CODECS if name != "zstd"))  # the first is the default
_SPARKS_OWN = ("path", "checkpointlocation")
_TEXT = ("binary", "string")
WRITE_COLUMNS: dict[str, tuple[str, ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "headers": ("array<struct<name:string,value:binary>>",),
    "tag": ("string",),
    "timestamp": ("timestamp",),
    "topic": ("string",),
    "partition": ("int",),
}
_PLAIN = frozenset({"value", "key", "timestamp"})  # columns that go in many at once
_BATCH_PROPERTY = "streaming.sql.batchId"
_STREAM_PROPERTY = "sql.streaming.queryId"  # it stays with the checkpoint
Messages = list[WriterCommitMessage | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write.

    `batch_id` is -1 if none is given.
    """

    brokers: str | None = None
    store: str = ""
    config: str | None = None
    profile: str | None = None
    topic: str = ""
    staged: bool = True
    writer: str = ""
    batch_id: int = -1
    codec: str = "zstd"
    atomic: bool = False


def write_options(given: Mapping[str, str], *, streams: bool) -> WriteOptions:
    """Read the options of a write. Raises: UnknownSettingError, InvalidSettingError, InvalidNameError."""
    normalized = read_given(given, WRITE_SPELLING, _SPARKS_OWN)
    writer, batch = normalized.get("writer", ""), normalized.get("batchid", "")
    if streams and (not writer or batch):
        raise InvalidSettingError(
            "a stream needs the option 'writer', and no 'batchId'", hint="writer = a name that its checkpoint keeps"
        )
    if not streams and bool(writer) != bool(batch):
        raise InvalidSettingError("options 'writer' and 'batchId' require each other", hint="give both, or none")
    if batch and not (re.fullmatch("[0-9]{1,16}", batch) and int(batch) < BATCH_ID_END):
        raise InvalidSettingError(f"option 'batchId' = '{batch[:60]}' is no number below {BATCH_ID_END}")
    staged = read_choice(normalized, "mode", "mode", MODES) == MODES[0]
    named = staged and bool(writer)
    atomic = read_choice(normalized, "atomic", "atomic", ("true", "false") if named else ("false", "true")) == "true"
    if atomic and not named:
        raise InvalidSettingError(
            "option 'atomic' needs the mode exactly-once and a writer: it names the transaction of each batch",
            hint="give writer = a name, and batchId for a job that is no stream; or leave out 'atomic'",
        )
    return WriteOptions(
        brokers=normalized.get("brokers") or None,
        store=normalized.get("store", ""),
        config=normalized.get("config") or None,
        profile=normalized.get("profile") or None,
        topic=check_resource_name(normalized["topic"]) if normalized.get("topic") else "",
        staged=staged,
        writer=check_name(writer, "writer") if writer else "",
        batch_id=int(batch) if batch else -1,
        codec=read_choice(normalized, "codec", "codec", _CODECS),
        atomic=atomic,
    )


def check_columns(columns: Sequence[tuple[str, str]], options: WriteOptions) -> None:
    """Check the names and types (as Spark's simple strings) of the written columns.

    The case of names does not matter. Raises: InvalidSettingError.
    """
    for name, kind in columns:
        allowed = WRITE_COLUMNS.get(name.lower())
        if allowed is None:
            raise InvalidSettingError(
                f"column '{name[:60]}' is none that a record has",
                hint=did_you_mean(name, tuple(WRITE_COLUMNS), known=False) or f"select {', '.join(WRITE_COLUMNS)}",
            )
        if kind not in allowed:
            raise InvalidSettingError(f"column '{name}' is {kind}, not {' or '.join(allowed)}", hint="cast it")
    names = [name.lower() for name, _ in columns]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            raise InvalidSettingError(f"{names.count(name)} columns are called {name}", hint="select one of them")
    if "value" not in names:
        raise InvalidSettingError("there is no column value", hint="select to_json(struct(*)) as value, for example")
    if ("topic" in names) == bool(options.topic):
        raise InvalidSettingError("one of the option 'topic' and the column topic is needed", hint="topic = clicks")


class _Records(Protocol):
    """Where records go."""

    async def add(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Take a record."""
        ...

    async def add_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
    ) -> None:
        """Take many records, which have neither headers nor tags, nor a partition of their own."""
        ...


def open_stores(options: WriteOptions, known: dict[str, str]) -> TaskStores:
    """Return the stores of a task, from the options and the brokers."""
    urls = {ANY: options.store} if options.store else known
    return TaskStores(StoreUrls(urls, options.config, options.profile), Runtime())


class StagedTask:
    """One task that stages records; it runs on the I/O thread."""

    def __init__(self, commits: StagedCommits, stores: TaskStores, options: WriteOptions, writer: str) -> None:
        self._commits = commits
        self._stores = stores
        self._options = options
        self._topics: dict[str, Topic] = {}
        self._writer = StagedWriter(
            commits.cluster, self._topics, self.store, writer, codec=options.codec, runtime=Runtime()
        )

    @classmethod
    async def opened(cls, options: WriteOptions, writer: str) -> StagedTask:
        """Ask the cluster for its name and stores. Raises: UnreachableError, DeniedError."""
        commits = StagedCommits(options.brokers, writer, audit=True)
        try:
            await commits.connect()
            return cls(commits, open_stores(options, {commits.store.name: commits.store.url}), options, writer)
        except BaseException:
            await commits.close()
            raise

    @property
    def store(self) -> StorageHandler:
        """The store for objects and manifests."""
        return self._stores.open(self._commits.store.name)

    async def add(self, batch: pyarrow.RecordBatch) -> None:
        """Stage the rows of an Arrow batch."""
        columns = columns_of(batch)
        await self._learn(columns.get("topic") or [self._options.topic])
        await add_rows(self._writer, columns, self._options.topic)

    async def finish(self) -> list[StagedObject]:
        """Return the staged objects."""
        return await self._writer.finish()

    async def commit(self, batch_id: int, objects: Sequence[StagedObject], source: str, *, remember: bool) -> None:
        """Commit a batch, as the driver does.

        A named job first completes a batch of which a killed run published only a part.
        """
        if remember and not source:  # a stream commits its last batch again by itself
            last = await self._commits.finish_last(self.store)
            if (
                last is not None
                and batch_id < last.batch_id
                and not await self._commits.is_decided(batch_id, self.store)
            ):
                # brokers go by clocks, which may differ: within that they would take it for written
                raise InvalidRequestError(
                    f"batch {batch_id} was never written, and writer '{last.writer}' has written batch {last.batch_id}",
                    hint="batchId grows from job to job: give it a greater one, or another writer",
                )
        await self._learn([piece.topic for staged in objects for piece in staged.pieces])
        await self._commits.commit(
            batch_id, objects, self.store, source=source, remember=remember, atomic=self._options.atomic
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._stores.close()
        await self._commits.close()

    async def _learn(self, names: Sequence[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._topics]
        if new:
            self._topics.update(await self._commits.topics(new))


def stage(batches: Iterator[pyarrow.RecordBatch], options: WriteOptions, writer: str) -> list[StagedObject]:
    """Stage the records of a task as objects. Raises: MemqError; then no reader will see any of them."""
    begin_tasks()
    thread = io_thread()
    task = thread.run(StagedTask.opened(options, writer))
    try:
        for batch in batches:
            thread.run(task.add(batch))
        return thread.run(task.finish())
    finally:
        thread.run(task.close())


def commit(
    options: WriteOptions, writer: str, batch_id: int, objects: Sequence[StagedObject], source: str, *, remember: bool
) -> None:
    """Make a batch visible, once; `source` names its stream, if any. Raises: MemqError: commit it again."""
    io_thread().run(_commit(options, writer, batch_id, objects, source, remember=remember))


async def _commit(
    options: WriteOptions, writer: str, batch_id: int, objects: Sequence[StagedObject], source: str, *, remember: bool
) -> None:
    task = await StagedTask.opened(options, writer)
    try:
        await task.commit(batch_id, objects, source, remember=remember)
    finally:
        await task.close()


def send(batches: Iterator[pyarrow.RecordBatch], options: WriteOptions, identity: DirectIdentity) -> int:
    """Send the records of a task; return how many are acked.

    Raises: MemqError; then some of them may be in the topic.
    """
    begin_tasks()
    thread, records = io_thread(), 0
    writer = DirectWriter(options.brokers, identity, codec=options.codec)
    try:
        for batch in batches:
            thread.run(add_rows(writer, columns_of(batch), options.topic))
            records += batch.num_rows
        thread.run(writer.finish())
    except BaseException:
        thread.run(writer.abandon())
        raise
    return records


async def add_rows(records: _Records, columns: dict[str, list[Any]], topic: str) -> None:
    """Add rows: all at once if they have plain columns only, else one by one."""
    values = columns["value"]
    if columns.keys() <= _PLAIN and None not in (times := columns.get("timestamp") or ()):
        await records.add_many(topic, values, columns.get("key"), times or None)
        return
    nothing: list[Any] = [None] * len(values)
    rest = [columns.get(name, nothing) for name in ("key", "headers", "timestamp", "tag", "partition")]
    topics = columns.get("topic") or [topic] * len(values)
    for to, value, key, headers, time, tag, partition in zip(topics, values, *rest, strict=True):
        await records.add(to, value, key, headers, time, tag, partition)


def columns_of(batch: pyarrow.RecordBatch) -> dict[str, list[Any]]:
    """Return the columns as lists: bytes, times in ms, headers as pairs.

    Raises: InvalidRequestError for a null in a column without nulls.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = name.lower()
        if kind in ("value", "key"):
            column = pc.cast(column, pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
        elif kind == "timestamp":
            column = pc.cast(pc.cast(column, pa.timestamp("ms", "UTC"), safe=False), pa.int64())
        elif kind == "topic" and column.null_count:
            raise InvalidRequestError("the column topic is null in a row", hint="name the topic of each row")
        cells = column.to_pylist()
        if kind == "headers":
            cells = [row and [(header["name"], header["value"]) for header in row] for row in cells]
            if any(header[0] is None for row in cells for header in row or ()):
                raise InvalidRequestError("a header has no name", hint="give each header a name")
        found[kind] = cells
    return found


@dataclass
class TaskOutcome(WriterCommitMessage):
    """The result of a task: its staged objects, or the number of records it sent."""

    objects: list[StagedObject]
    records: int = 0
    stream: str = ""


class MemqWriter(DataSourceArrowWriter):
    """Appends a data frame."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequestError("a topic can't be overwritten", hint="write with mode('append')")
        check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options)
        self._options = options
        # a job without a name can't run again as the same job: the dedup window suffices
        self._writer = options.writer or f"spark-{Runtime().random.getrandbits(64):016x}"
        self._batch_id = max(0, options.batch_id)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Stage or send the rows of a task."""
        return written(iterator, self._options, self._writer, self._batch_id)

    def commit(self, messages: Messages) -> None:
        """Make all records visible."""
        commit_staged(messages, self._options, self._writer, self._batch_id, remember=bool(self._options.writer))

    def abort(self, messages: Messages) -> None:
        """Leave staged objects to the sweep: a commit that seemed to fail may have named them."""


class MemqStreamWriter(DataSourceStreamArrowWriter):
    """Appends micro-batches."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequestError("a topic can't be overwritten", hint="use outputMode('append') or 'update'")
        check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options)
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Stage or send the rows of a task."""
        batch_id = 0 if self._options.staged else _micro_batch()
        return written(iterator, self._options, self._options.writer, batch_id)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Make the whole micro-batch visible, once, even after repeated commits."""
        commit_staged(messages, self._options, self._options.writer, batchId, remember=True)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """See `MemqWriter.abort`."""


def written(
    batches: Iterator[pyarrow.RecordBatch], options: WriteOptions, writer: str, batch_id: int
) -> WriterCommitMessage:
    """Stage or send the rows of a task, and return its outcome."""
    context = TaskContext.get()
    assert context is not None, "a task without a context"
    stream = context.getLocalProperty(_STREAM_PROPERTY) or ""
    if options.staged:
        return TaskOutcome(stage(batches, options, writer), stream=stream)
    return TaskOutcome([], send(batches, options, DirectIdentity(writer, stream, batch_id, context.partitionId())))


def commit_staged(messages: Messages, options: WriteOptions, writer: str, batch_id: int, *, remember: bool) -> None:
    """Commit the objects that tasks have staged; records sent directly are in the topic already."""
    if options.staged:
        outcomes = [message for message in messages if isinstance(message, TaskOutcome)]
        objects = [staged for message in outcomes for staged in message.objects]
        stream = next((message.stream for message in outcomes), "")
        commit(options, writer, batch_id, objects, stream, remember=remember)


def _micro_batch() -> int:
    """Return the id of this task's micro-batch."""
    context = TaskContext.get()
    found = context.getLocalProperty(_BATCH_PROPERTY) if context is not None else None
    if found is None:
        raise InvalidRequestError("Spark does not say of which micro-batch this task is", hint="use mode exactly-once")
    return int(found)
