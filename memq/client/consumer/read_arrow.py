"""A range of a topic as one Arrow table, which pandas, Polars and DuckDB can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memq.client.consumer.consumer import Consumer
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.client.consumer.settings import Point
from memq.runtime.network import Runtime

if TYPE_CHECKING:
    import pyarrow


def read_arrow(
    brokers: str | Sequence[str] | None,
    topic: str,
    *,
    start: Point = "beginning",
    end: Point = "end",
    read: ReadMode = "auto",
    runtime: Runtime | None = None,
) -> pyarrow.Table:
    """Return the records of a topic in a range: value, key, headers, timestamp and tag.

    Times mean when a batch was sealed, so ranges that follow on each other share nothing and leave nothing out. One
    partition follows on the other in no promised order; within each, records are in order. It must fit in memory.
    Raises: as `memq.Consumer.poll`; ImportError when the extra [arrow] is not installed.
    """
    from memq.format.blocks.arrow import SCHEMA  # says what to install when there is no pyarrow

    import pyarrow  # isort: skip

    with Consumer(brokers, topic, start=start, end=end, read=read, runtime=runtime) as consumer:
        tables = [batch.arrow() for batch in consumer]
    return pyarrow.concat_tables(tables) if tables else SCHEMA.empty_table()
