"""A topic as Arrow data: one table, or a reader of batches that takes the memory of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from memq.client.consumer.consumer import Consumer
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.client.consumer.settings import Point, check_point, topics_of
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls

if TYPE_CHECKING:
    import pyarrow

    from memq.encryption.encryption import Encryption

OnProgress = Callable[[int, int], object]


def read_arrow(
    brokers: str | Sequence[str] | None,
    topic: str,
    *,
    start: Point = "beginning",
    end: Point = "end",
    tags: str | Sequence[str] | None = None,
    where: str | None = None,
    read: ReadMode = "auto",
    encryption: Encryption | str | None = None,
    tls: Tls | None = None,
    on_progress: OnProgress | None = None,
    runtime: Runtime | None = None,
) -> pyarrow.Table:
    """Return the records of a topic in a range: value, key, headers, timestamp, tag, partition and offset.

    Times are those at which batches were sealed, so adjacent ranges neither share nor omit records. The order of
    partitions is not defined; within each, records are in order. The table must fit in memory. `end` can't be None:
    a table of records without an end would never be complete. `tags` and `where` choose records as in `Consumer`.
    `on_progress(done, total)` is called after each batch. `total` counts from `start` to the end of the topic at the
    first batch, with copies.
    `Position.at_offset(partition, offset)` is the position of a record.
    Raises: as `memq.Consumer` and its `poll`; ImportError if the extra [arrow] is not installed.
    """
    reader = read_arrow_batches(
        *(brokers, topic),
        start=start,
        end=end,
        tags=tags,
        where=where,
        read=read,
        encryption=encryption,
        tls=tls,
        on_progress=on_progress,
        runtime=runtime,
    )
    return reader.read_all()


def read_arrow_batches(
    brokers: str | Sequence[str] | None,
    topic: str,
    *,
    start: Point = "beginning",
    end: Point = "end",
    tags: str | Sequence[str] | None = None,
    where: str | None = None,
    read: ReadMode = "auto",
    encryption: Encryption | str | None = None,
    tls: Tls | None = None,
    on_progress: OnProgress | None = None,
    runtime: Runtime | None = None,
) -> pyarrow.RecordBatchReader:
    """Return the same records as a reader of Arrow batches, for topics that do not fit in memory.

    DuckDB, Polars and pyarrow.dataset take such a reader. It reads from the cluster while it is iterated, and
    disconnects at the end, or when it is closed or garbage-collected. Raises: as `read_arrow`, at the first batch.
    """
    check_point(end, "end", topics_of(topic))  # of a consumer it may be None
    from memq.format.blocks.arrow import PLACED_SCHEMA  # says what to install when there is no pyarrow

    import pyarrow  # isort: skip

    consumer = Consumer(
        *(brokers, topic),
        start=start,
        end=end,
        tags=tags,
        where=where,
        read=read,
        encryption=encryption,
        tls=tls,
        runtime=runtime,
    )

    def batches() -> Iterator[pyarrow.RecordBatch]:
        done = total = 0
        with consumer:
            for batch in consumer:
                table = batch.arrow(places=True)
                done += table.num_rows
                if on_progress is not None:
                    total = total or len(batch) + sum(lag.records for lag in consumer.lag().values())
                    on_progress(done, max(done, total))
                yield from table.to_batches()

    return pyarrow.RecordBatchReader.from_batches(PLACED_SCHEMA, batches())
