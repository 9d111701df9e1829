"""Numbered records of six hours in several objects, and the records that a pipeline's files must have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

import memq
from memq.spark.pipelines.topic_files import location_of_text, read_files
from tests.servers import DevServer

START_MS = 1_767_225_600_000
HOUR_MS = 3_600_000
NOISE = random.Random(7)


def produce(broker: DevServer, topic: str, numbers: Sequence[int]) -> None:
    """Send numbered records of six hours, which do not shrink, in several objects."""
    with memq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=2, exist_ok=True)
    with memq.Producer(broker.address, block_bytes=8192) as producer:
        for number in numbers:
            value = b"%d " % number + NOISE.randbytes(400)
            producer.send(topic, value, key=b"%d" % (number % 9), timestamp_ms=START_MS + number % 6 * HOUR_MS)
            if number % 100 == 99:
                producer.flush(timeout=60)  # objects end here


def numbers_in(spark: SparkSession, folder: Path) -> list[int]:
    rows = read_files(spark, location_of_text(str(folder))).select("value").collect()
    return sorted(int(bytes(row.value).split()[0]) for row in rows)
