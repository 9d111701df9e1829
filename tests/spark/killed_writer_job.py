"""A low-latency write whose first attempt is killed with rows in the topic, and whose second one has them shuffled.

Arguments: the broker's address, the topic, and `same` for a second attempt in the same order.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator

import pyarrow
from pyspark import TaskContext
from pyspark.sql import SparkSession

import memq

ROWS = [b"row %02d " % number + bytes(64 << 10) for number in range(32)]  # eight blocks
SENT = 24  # rows that the first attempt hands on before it is killed
SEEN = 4  # of them are in the topic by then, at least


def rows_of(address: str, topic: str, order: str, _: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of the attempt that this process runs; the first one ends as `kill -9` does."""
    context = TaskContext.get()
    assert context is not None
    first = context.attemptNumber() == 0
    rows = ROWS if first or order == "same" else random.Random(1).sample(ROWS, len(ROWS))
    for number, row in enumerate(rows):
        if first and number == SENT:
            with memq.Consumer(address, topic, start="beginning") as consumer:
                seen = 0
                while seen < SEEN:
                    seen += len(consumer.poll() or ())
            os.kill(os.getpid(), signal.SIGKILL)
        yield pyarrow.RecordBatch.from_pydict({"value": [row]})


def main(address: str, topic: str, order: str) -> None:
    """Write the rows in one task."""
    spark = SparkSession.builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "1").getOrCreate()
    frame = spark.range(0, 1, numPartitions=1).select("id")
    rows = frame.mapInArrow(lambda batches: rows_of(address, topic, order, batches), "value binary")
    rows.write.format("memq").mode("append").options(brokers=address, topic=topic, mode="low-latency").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
