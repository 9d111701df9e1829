"""A streaming read in a process of its own, for tests that kill it: one line for each micro-batch, until all is read.

`python -m tests.spark.streaming_job BROKER TOPIC FOLDER`; a task whose Python is killed is run again.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from tests.spark.conftest import CONFIG

LOOK_S = 1


def main(address: str, topic: str, folder: str) -> None:
    """Follow the topic into files, and into another topic, until what is there at the start was read."""
    builder = SparkSession.builder.master("local[2,8]").config("spark.sql.warehouse.dir", f"{folder}/warehouse")
    for name, value in CONFIG.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    options = {"brokers": address, "topics": topic, "maxRecordsPerTrigger": "200", "columns": "value,partition,offset"}
    frame = spark.readStream.format("memq").options(**options).load()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{folder}/out")
    larger = spark.readStream.format("memq").options(**options | {"maxRecordsPerTrigger": "700"}).load()
    copies = larger.select("value").writeStream.format("memq").option("checkpointLocation", f"{folder}/copied")
    copies = copies.options(brokers=address, topic=f"{topic}-copy", writer="copies")
    copy = copies.trigger(availableNow=True).start()
    seen = -1
    while True:
        ended = query.awaitTermination(LOOK_S)
        for progress in query.recentProgress:
            if progress["batchId"] > seen:
                seen = progress["batchId"]
                print(f"batch {seen}", flush=True)
        if ended and copy.awaitTermination(LOOK_S):
            print("all read", flush=True)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
