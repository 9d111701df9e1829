"""What a user submits to a cluster: `cluster_job.py MASTER BROKERS TOPIC`; prints what it read, as JSON."""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def main(master: str, brokers: str, topic: str) -> None:
    """Read a topic with executors of a cluster, and sum up what each of its read partitions holds."""
    builder = SparkSession.builder.master(master).appName("sums")
    settings = {
        "spark.cores.max": "2",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.executor.memory": "512m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
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
        told = [list(row) for row in sums.collect()]
        print(json.dumps(told))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
