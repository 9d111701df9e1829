"""Shared setup of the row's parts: Spark on two cores, and the same values as topics, lines of text, and Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import memq
from benchmarks.children.samples import lines
from benchmarks.dev import dev_broker
from benchmarks.spark.interleaved_timing import Meter
from memq_localstack.java import spark_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUE_BYTES = 300
CODECS = ("zstd", "none")
FILES = 8
PARTITIONS = 2


@dataclass(frozen=True, slots=True)
class Scene:
    """A session, a broker with a topic for each codec, and `records` values of `size` bytes in each and in files."""

    spark: SparkSession
    meter: Meter
    address: str
    folder: Path
    records: int
    size: int

    def reading(self, codec: str, **more: str) -> dict[str, str]:
        """Return the options that read the values of a topic."""
        return {"brokers": self.address, "topics": codec, "columns": "value", **more}

    def objects(self, topic: str) -> Path:
        """Return the folder with all objects of a topic."""
        return next((self.folder / "data" / "objects").glob(f"*/topics/{topic}"))


@contextmanager
def prepared(folder: Path, records: int) -> Iterator[Scene]:
    """Make everything, and end it."""
    values = lines(VALUE_BYTES, records)
    write_files(values, folder)
    with dev_broker(folder / "data") as broker:
        for codec in CODECS:
            send(broker.address, codec, codec, values)
        size = sum(map(len, values))
        del values  # some hundred MB, which the garbage collection of this process would go through
        spark = session(folder)
        try:
            jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
            yield Scene(spark, Meter(jvm), broker.address, folder, records, size)
        finally:
            spark.stop()


def send(address: str, topic: str, codec: str, values: list[bytes], **settings: int) -> None:
    """Make a topic of batches as large as its settings allow, and fill it."""
    with memq.Admin(address) as admin:
        admin.create_topic(topic, partitions=PARTITIONS, settings={"seal_when_idle": False, **settings})
    with memq.Producer(address, codec=codec) as producer:
        for at in range(0, len(values), 10_000):
            producer.send_many(topic, values[at : at + 10_000])
        producer.flush(timeout=120)


def write_files(values: list[bytes], folder: Path) -> None:
    """Write the values as lines of text and as Parquet."""
    import pyarrow
    import pyarrow.parquet

    (folder / "text").mkdir()
    (folder / "parquet").mkdir()
    step = -(-len(values) // FILES)
    for number, at in enumerate(range(0, len(values), step)):
        part = values[at : at + step]
        (folder / "text" / f"{number}.txt").write_bytes(b"\n".join(part) + b"\n")
        table = pyarrow.table({"value": pyarrow.array(part, pyarrow.binary())})
        pyarrow.parquet.write_table(table, folder / "parquet" / f"{number}.parquet", compression="zstd")


def session(folder: Path) -> SparkSession:
    """Start Spark on two cores of this machine, with its own settings: only what it shows is turned off."""
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment(folder))
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    return builder.config("spark.driver.memory", "2g").getOrCreate()
