"""The writing part of a Spark task: Arrow batches in, staged objects or acked blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memq.client.bulk.direct_writer import DirectIdentity, DirectWriter
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.io_thread import io_thread
from memq.client.observers.report_carrier import ReportCarrier
from memq.errors import InvalidRequestError
from memq.format.manifest import StagedObject
from memq.runtime.network import Runtime
from memq.spark.stores import ANY, StoreUrls, TaskStores
from memq.spark.worker import begin_tasks
from memq.spark.write.options import WriteOptions
from memq.storage_handlers import StorageHandler
from memq.topic import Topic

if TYPE_CHECKING:
    import pyarrow

_PLAIN = frozenset({"value", "key", "timestamp"})  # columns that go in many at once


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
    """Return the stores of a task, by what the options and the brokers say."""
    urls = {ANY: options.store} if options.store else known
    return TaskStores(StoreUrls(urls, options.config, options.profile), Runtime())


class StagedTask:
    """One task that stages; it lives on the I/O thread."""

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
        """Ask the cluster what it is. Raises: UnreachableError, DeniedError."""
        commits = StagedCommits(options.brokers, writer, carrier=ReportCarrier)
        try:
            await commits.connect()
            return cls(commits, open_stores(options, {commits.store.name: commits.store.url}), options, writer)
        except BaseException:
            await commits.close()
            raise

    @property
    def store(self) -> StorageHandler:
        """The store that objects and manifests go to."""
        return self._stores.open(self._commits.store.name)

    async def add(self, batch: pyarrow.RecordBatch) -> None:
        """Stage the rows of an Arrow batch."""
        columns = columns_of(batch)
        await self._learn(columns.get("topic") or [self._options.topic])
        await add_rows(self._writer, columns, self._options.topic)

    async def finish(self) -> list[StagedObject]:
        """Return what was staged."""
        return await self._writer.finish()

    async def commit(self, batch_id: int, objects: Sequence[StagedObject], source: str, *, remember: bool) -> None:
        """Commit a batch, as the driver does.

        Of a job with a name first what a killed run left half published.
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
        await self._commits.commit(batch_id, objects, self.store, source=source, remember=remember)

    async def close(self) -> None:
        """Disconnect."""
        await self._stores.close()
        await self._commits.close()

    async def _learn(self, names: Sequence[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._topics]
        if new:
            self._topics.update(await self._commits.topics(new))


def stage(batches: Iterator[pyarrow.RecordBatch], options: WriteOptions, writer: str) -> list[StagedObject]:
    """Stage the records of a task as objects. Raises: MemqError; then nothing of it will ever be seen."""
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
    """Make a batch of a stream `source`, or of none, visible, once. Raises: MemqError: commit it again."""
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
    """Send the records of a task; return how many are acked. Raises: MemqError.

    Some of them may be there then.
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
    """Add rows: all at once where they have nothing but plain columns, else one by one."""
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

    Raises: InvalidRequestError for a null that is where none may.
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
