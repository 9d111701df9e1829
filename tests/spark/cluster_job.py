"""A job as a user submits it: `cluster_job.py MASTER BROKERS TOPIC`; prints the records that it read, as JSON.

It also copies the topic to TOPIC-copy, twice as the same batch, by tasks of which one is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator

import pyarrow
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from memq_localstack.java import small, spark_class_path

JAVA_OPTIONS = " ".join(small(spark_class_path()))


def killed_once(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Pass rows on; the first try of the first task ends with SIGKILL when some of them have gone."""
    context = TaskContext.get()
    for batch in batches:
        yield batch
        if context is not None and context.partitionId() == 0 and context.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(master: str, brokers: str, topic: str) -> None:
    """Read a topic with executors of a cluster, and sum up what each of its read partitions holds."""
    builder = SparkSession.builder.master(master).appName("sums")
    settings = {
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.memory": "512m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        records = spark.read.format("memq").options(brokers=brokers, topics=topic, partitionBytes="64KiB").load()
        sums = records.groupBy("partition").agg(f.count("*"), f.sum(f.crc32("value"))).orderBy("partition")
        report = [list(row) for row in sums.collect()]
        for _ in range(2):
            copied = records.select("value").mapInArrow(killed_once, "value BINARY")
            target = {"brokers": brokers, "topic": f"{topic}-copy", "writer": f"{topic}-copies", "batchId": "1"}
            copied.write.format("memq").mode("append").options(**target).save()
        print(json.dumps(report))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
