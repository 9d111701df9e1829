"""Batch reads: a topic, compared with binary files, lines of text, Parquet, and a source that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks.results import Figure, Options
from benchmarks.spark.interleaved_timing import beside, rate
from benchmarks.spark.shared_setup import CODECS, VALUE_BYTES, Scene

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OVER_BINARY_FILES_MIN = 2.0
OVER_TEXT_MIN = 1.0
WARM_UPS = 2
_BATCH_RECORDS = 1_000  # of the bare source: about as many as a block of memq has
_TASKS = 2


def read_figures(scene: Scene, options: Options) -> list[Figure]:
    """Sum the lengths of all values by each way, so that every value reaches the JVM."""
    spark, folder = scene.spark, scene.folder
    spark.dataSource.register(BareSource)
    bare = {"records": str(scene.records)}
    frames: dict[str, Callable[[], DataFrame]] = {
        "text": lambda: spark.read.text(str(folder / "text")),
        "parquet": lambda: spark.read.parquet(str(folder / "parquet")),
        "bare": lambda: spark.read.format("bare").options(**bare).load(),
    }
    for codec in CODECS:
        frames[f"memq {codec}"] = partial(read_topic, scene, codec)
        frames[f"binary {codec}"] = partial(decoded, spark, scene.objects(codec))
    ways = {name: partial(_sum, frame, scene.size) for name, frame in frames.items()}
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=WARM_UPS)
    figures: list[Figure] = []
    for codec in CODECS:
        own = costs[f"memq {codec}"]
        figures += [
            rate(f"{codec}, read of {VALUE_BYTES} B values", own, scene.size),
            beside(f"{codec}, over binary files", own, costs[f"binary {codec}"], OVER_BINARY_FILES_MIN),
            beside(f"{codec}, over lines of text", own, costs["text"], OVER_TEXT_MIN),
            beside(f"{codec}, over Parquet", own, costs["parquet"]),
            beside(f"{codec}, over ready Arrow", own, costs["bare"]),
        ]
    return figures


def read_topic(scene: Scene, codec: str) -> DataFrame:
    """Read a topic by `format("memq")`."""
    return scene.spark.read.format("memq").options(**scene.reading(codec)).load()


def _sum(frame: Callable[[], DataFrame], size: int) -> None:
    row = frame().selectExpr("sum(length(value))").first()
    assert row is not None
    assert row[0] == size, f"{row[0]} bytes of {size}"


def decoded(spark: SparkSession, objects: Path) -> DataFrame:
    """Read whole objects as Spark's binary files, and decode them in Python, batch by batch of Arrow."""
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(str(objects))
    return files.select("content").mapInArrow(_values, "value BINARY")


def _values(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    from memq.format.batch import cut_blocks
    from memq.format.blocks.arrow import block_rows

    for batch in batches:
        for content in batch.column(0):
            data = memoryview(content.as_buffer()).cast("B")
            for piece in cut_blocks(data):
                rows = block_rows(piece.reader())
                yield pyarrow.RecordBatch.from_arrays([rows.values], ["value"])


class BareSource(DataSource):
    """A source that has nothing to do: two tasks give the same Arrow batch again and again."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "bare"

    def schema(self) -> str:
        """Return the DDL."""
        return "value BINARY"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader."""
        return _BareReader(int(self.options["records"]))


class _BareReader(DataSourceReader):
    def __init__(self, records: int) -> None:
        self._records = records

    def partitions(self) -> list[InputPartition]:
        shares = [self._records * number // _TASKS for number in range(_TASKS + 1)]
        return [InputPartition(high - low) for low, high in pairwise(shares)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        values = pyarrow.array([b"x" * VALUE_BYTES] * _BATCH_RECORDS, pyarrow.binary())
        batch = pyarrow.RecordBatch.from_arrays([values], ["value"])
        for at in range(0, partition.value, _BATCH_RECORDS):
            yield batch.slice(0, min(_BATCH_RECORDS, partition.value - at))
