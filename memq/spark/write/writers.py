"""Batch and streaming writes as PySpark runs them: tasks stage or send, and the driver commits.

A `write()` gets no batch id, and may run twice; only `commit` knows the batch. So what is staged belongs to no batch
before its commit, and what is sent straight takes the id of the micro-batch from Spark's own properties of the task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from memq.client.bulk.direct_writer import DirectIdentity
from memq.errors import InvalidRequestError
from memq.format.manifest import StagedObject
from memq.runtime.network import Runtime
from memq.spark.write.options import WriteOptions, check_columns

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

_BATCH_PROPERTY = "streaming.sql.batchId"
_STREAM_PROPERTY = "sql.streaming.queryId"  # it stays with the checkpoint
Messages = list[WriterCommitMessage | None]


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
        check_columns({field.name: field.dataType.simpleString() for field in schema.fields}, options)
        self._options = options
        # a job without a name is there once by the dedup window: nobody can run it again as the same job
        self._writer = options.writer or f"spark-{Runtime().random.getrandbits(64):016x}"
        self._batch_id = max(0, options.batch_id)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Stage or send the rows of a task."""
        return written(iterator, self._options, self._writer, self._batch_id)

    def commit(self, messages: Messages) -> None:
        """Make all of it visible."""
        commit_staged(messages, self._options, self._writer, self._batch_id, remember=bool(self._options.writer))

    def abort(self, messages: Messages) -> None:
        """Leave what was staged to the sweep: a commit that seemed to fail may have decided for it."""


class MemqStreamWriter(DataSourceStreamArrowWriter):
    """Appends micro-batches."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequestError("a topic can't be overwritten", hint="use outputMode('append') or 'update'")
        check_columns({field.name: field.dataType.simpleString() for field in schema.fields}, options)
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Stage or send the rows of a task."""
        batch_id = 0 if self._options.staged else _micro_batch()
        return written(iterator, self._options, self._options.writer, batch_id)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Make all of the micro-batch visible, once, however often it is committed."""
        commit_staged(messages, self._options, self._options.writer, batchId, remember=True)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - PySpark's name
        """See `MemqWriter.abort`."""


def written(
    batches: Iterator[pyarrow.RecordBatch], options: WriteOptions, writer: str, batch_id: int
) -> WriterCommitMessage:
    """Stage or send the rows of a task, and return what it did."""
    from memq.spark.write.tasks import send, stage

    context = TaskContext.get()
    assert context is not None, "a task without a context"
    stream = context.getLocalProperty(_STREAM_PROPERTY) or ""
    if options.staged:
        return TaskOutcome(stage(batches, options, writer), stream=stream)
    return TaskOutcome([], send(batches, options, DirectIdentity(writer, stream, batch_id, context.partitionId())))


def commit_staged(messages: Messages, options: WriteOptions, writer: str, batch_id: int, *, remember: bool) -> None:
    """Commit what tasks have staged; what was sent straight is there already."""
    from memq.spark.write.tasks import commit

    if options.staged:
        outcomes = [message for message in messages if isinstance(message, TaskOutcome)]
        objects = [staged for message in outcomes for staged in message.objects]
        stream = next((message.stream for message in outcomes), "")
        commit(options, writer, batch_id, objects, stream, remember=remember)


def _micro_batch() -> int:
    """Return the id of the micro-batch that this task is of."""
    context = TaskContext.get()
    found = context.getLocalProperty(_BATCH_PROPERTY) if context is not None else None
    if found is None:
        raise InvalidRequestError("Spark does not say of which micro-batch this task is", hint="use mode exactly-once")
    return int(found)
