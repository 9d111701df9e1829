"""A streaming read as a process that tests kill: prints one line per micro-batch, until all is read.

`python -m tests.spark.streaming_job BROKER TOPIC FOLDER`; the master is PYSPARK_SUBMIT_ARGS'.
"""

from __future__ import annotations

import sys

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.spark.conftest import CONFIG
from tests.spark.streams import NOT_STARTED, STARTS

POLL_S = 1


def main(address: str, topic: str, folder: str) -> None:
    """Follow the topic into files, and into another topic, until what is there at the start was read."""
    builder = SparkSession.builder.config("spark.sql.warehouse.dir", f"{folder}/warehouse")
    for name, value in CONFIG.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    options = {"brokers": address, "topics": topic, "maxRecordsPerTrigger": "200", "columns": "value,partition,offset"}
    frame = spark.readStream.format("memq").options(**options).load()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    files = writer.option("path", f"{folder}/out")
    larger = spark.readStream.format("memq").options(**options | {"maxRecordsPerTrigger": "700"}).load()
    copies = larger.select("value").writeStream.format("memq").option("checkpointLocation", f"{folder}/copied")
    copies = copies.options(brokers=address, topic=f"{topic}-copy", writer=f"{topic}-copies")
    for start in range(STARTS):
        try:
            run(spark, files, copies)
            return
        except StreamingQueryException as error:
            if NOT_STARTED not in str(error) or start + 1 == STARTS:
                raise


def run(spark: SparkSession, files: DataStreamWriter, copies: DataStreamWriter) -> None:
    """Run both queries to their end, or to the error of one."""
    try:
        query, copy = (writer.trigger(availableNow=True).start() for writer in (files, copies))
        watch(query, copy)
    finally:
        for active in spark.streams.active:
            active.stop()


def watch(query: StreamingQuery, copy: StreamingQuery) -> None:
    """Tell of each micro-batch of the first query until both have ended."""
    seen = -1
    while True:
        ended = query.awaitTermination(POLL_S)
        for progress in query.recentProgress:
            if progress["batchId"] > seen:
                seen = progress["batchId"]
                print(f"batch {seen}", flush=True)
        if ended and copy.awaitTermination(POLL_S):
            print("all read", flush=True)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
