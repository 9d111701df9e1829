"""Spark reads the same values four ways in one run: memq, its objects as binary files, lines of text, Parquet."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import memq
from benchmarks.children.samples import lines
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options, median
from localstack.spark import spark_environment

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

NAME = "spark"
SIZE = 300
CODECS = ("zstd", "none")
PARTITION_BYTES = "8MiB"  # a task for each core, also of what is compressed to a fifth
OVER_BINARY_FILES_MIN = 2.0
OVER_TEXT_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one pass, and CPU seconds of the JVM and of its Python processes."""

    wall_s: float
    jvm_s: float
    python_s: float


def run(options: Options) -> list[Figure]:
    """Measure each way in turn, `rounds` times; the median counts."""
    values = lines(SIZE, 400_000 if options.quick else 2_000_000)
    folder = Path(tempfile.mkdtemp(prefix="memq-bench-spark-"))
    try:
        spark = session(folder)
        try:
            write_files(values, folder)
            return [figure for codec in CODECS for figure in run_codec(spark, codec, values, folder, options)]
        finally:
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_codec(spark: SparkSession, codec: str, values: list[bytes], folder: Path, options: Options) -> list[Figure]:
    """Send the values with a codec, and measure."""
    with dev_broker(folder / codec) as broker:
        with memq.Admin(broker.address) as admin:
            admin.create_topic(NAME, partitions=2, settings={"seal_when_idle": False})
        with memq.Producer(broker.address, codec=codec) as producer:
            for at in range(0, len(values), 10_000):
                producer.send_many(NAME, values[at : at + 10_000])
            producer.flush(timeout=120)
        return measure(spark, broker.address, folder, codec, values, options)


def write_files(values: list[bytes], folder: Path) -> None:
    """Write the values as lines of text and as Parquet, in eight files each."""
    import pyarrow
    import pyarrow.parquet

    (folder / "text").mkdir()
    (folder / "parquet").mkdir()
    step = max(1, len(values) // 8)
    for number, at in enumerate(range(0, len(values), step)):
        part = values[at : at + step]
        (folder / "text" / f"{number}.txt").write_bytes(b"\n".join(part) + b"\n")
        table = pyarrow.table({"value": pyarrow.array(part, pyarrow.binary())})
        pyarrow.parquet.write_table(table, folder / "parquet" / f"{number}.parquet", compression="zstd")


def session(folder: Path) -> SparkSession:
    """Start Spark on two cores of this machine."""
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment(folder))
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    return builder.config("spark.log.level", "ERROR").config("spark.driver.memory", "2g").getOrCreate()


def measure(
    spark: SparkSession, address: str, folder: Path, codec: str, values: list[bytes], options: Options
) -> list[Figure]:
    """Sum the lengths of all values by each way, so that every value reaches the JVM."""
    size = sum(map(len, values))
    told = {"brokers": address, "topics": NAME, "columns": "value", "partitionBytes": PARTITION_BYTES}
    ways: dict[str, Callable[[], DataFrame]] = {
        "memq": lambda: spark.read.format("memq").options(**told).load(),
        "binary files": lambda: decoded(spark, folder / codec / "objects"),
        "text": lambda: spark.read.text(str(folder / "text")),
        "parquet": lambda: spark.read.parquet(str(folder / "parquet")),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            cost = timed(spark, way, size)
            if number:  # the first round warms up
                costs[name].append(cost)
    rates = {name: size / 1e6 / median([cost.wall_s for cost in found]) for name, found in costs.items()}
    detail: dict[str, float | str] = {f"{name} MB/s": rate for name, rate in rates.items() if name != "memq"}
    detail |= {
        "JVM CPU-s/GB": median([cost.jvm_s for cost in costs["memq"]]) / size * 1e9,
        "Python CPU-s/GB": median([cost.python_s for cost in costs["memq"]]) / size * 1e9,
    }

    def over(other: str, bound: float) -> Figure:
        return Figure(NAME, f"{codec}, over {other}", rates["memq"] / rates[other], "x", bound, "higher")

    figures = [
        Figure(NAME, f"{codec}, {SIZE} B values", rates["memq"], "MB/s", detail=detail),
        over("binary files", OVER_BINARY_FILES_MIN),
        over("text", OVER_TEXT_MIN),
        stream_figure(spark, address, folder / f"stream-{codec}", codec, len(values)),
        compact_figure(spark, address, folder / f"compact-{codec}", codec, size),
    ]
    for figure in figures:
        options.say(figure.line())
    return figures


def stream_figure(spark: SparkSession, address: str, folder: Path, codec: str, records: int) -> Figure:
    """Follow the topic to its end in micro-batches of a tenth."""
    options = {"brokers": address, "topics": NAME, "columns": "value", "maxRecordsPerTrigger": str(records // 10)}
    frame = spark.readStream.format("memq").options(**options).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    started_s = time.monotonic()
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return Figure(NAME, f"{codec}, stream, ten micro-batches", records / (time.monotonic() - started_s), "rows/s")


def compact_figure(spark: SparkSession, address: str, place: Path, codec: str, size: int) -> Figure:
    """Write the topic, with all columns, as Parquet files."""
    from memq.spark.options import read_options
    from memq.spark.pipelines.file_store import place_of_text
    from memq.spark.pipelines.to_files import write_files as write_topic

    options = read_options({"brokers": address, "topics": NAME, "partitionBytes": PARTITION_BYTES})
    started_s = time.monotonic()
    manifest = write_topic(spark, options, place_of_text(str(place)), settled=False)
    rate = size / 1e6 / (time.monotonic() - started_s)
    written = sum(file.bytes for file in manifest.files)
    return Figure(NAME, f"{codec}, compacted to Parquet", rate, "MB/s", detail={"bytes written": written})


def decoded(spark: SparkSession, objects: Path) -> DataFrame:
    """Read whole objects as Spark's binary files, and decode them in Python, batch by batch of Arrow."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(str(objects))
    return files.select("content").mapInArrow(_values, "value BINARY")


def _values(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    from memq.format.arrow import block_rows
    from memq.format.block import BlockHeader
    from memq.format.columns import BlockReader
    from memq.format.object import scan_object

    for batch in batches:
        for content in batch.column(0):
            data = memoryview(content.as_buffer()).cast("B")
            for at, header in scan_object(data):
                assert isinstance(header, BlockHeader)
                rows = block_rows(BlockReader(data[at : at + header.length], header))
                yield pyarrow.RecordBatch.from_arrays([rows.values], ["value"])


def timed(spark: SparkSession, way: Callable[[], DataFrame], size: int) -> Cost:
    """Take what one pass costs, planning included."""
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    before, started_s = cpu_of(jvm), time.monotonic()
    row = way().selectExpr("sum(length(value))").first()
    wall_s = time.monotonic() - started_s
    after = cpu_of(jvm)
    assert row is not None
    assert row[0] == size, f"{row[0]} bytes of {size}"
    return Cost(wall_s, after[0] - before[0], after[1] - before[1])


def cpu_of(jvm: int) -> tuple[float, float]:
    """Return the CPU seconds so far of the JVM, and of its Python processes that live or were waited for."""
    stats = [_stat_of(path) for path in Path("/proc").iterdir() if path.name.isdigit()]
    below = {jvm}
    for _ in range(3):  # the daemon, its workers
        below |= {pid for pid, parent, _, _ in stats if parent in below}
    own = sum(cpu for pid, _, cpu, _ in stats if pid == jvm)
    python = sum(cpu + ended for pid, _, cpu, ended in stats if pid in below and pid != jvm)
    return own, python


def _stat_of(path: Path) -> tuple[int, int, float, float]:
    """Return a process: its id, its parent's, its own CPU seconds, and those of its children that have ended."""
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return int(path.name), -1, 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    own, ended = (sum(map(int, fields[at : at + 2])) / tick for at in (11, 13))
    return int(path.name), int(fields[1]), own, ended
