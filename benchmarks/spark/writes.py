"""Writes: the same frame to a topic in both modes, as text and as Parquet; and a topic compacted to Parquet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.results import Figure, Options
from benchmarks.spark.scene import Scene
from benchmarks.spark.turns import beside, rate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODES = ("exactly-once", "low-latency")
COMPACTED = "zstd"


def write_figures(scene: Scene, options: Options) -> list[Figure]:
    """Write what a Parquet file has; reading it is in all of them."""
    frame = scene.spark.read.parquet(str(scene.folder / "parquet"))
    text = frame.selectExpr("cast(value AS STRING) AS value")
    folder, numbers = scene.folder / "written", itertools.count()
    ways: dict[str, Callable[[], object]] = {
        "text": lambda: text.write.text(str(folder / f"text-{next(numbers)}")),
        "parquet": lambda: frame.write.parquet(str(folder / f"parquet-{next(numbers)}"), compression="zstd"),
        MODES[0]: lambda: _write(scene, frame, MODES[0]),
        MODES[1]: lambda: _write(scene, frame, MODES[1]),
    }
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=1)
    figures: list[Figure] = []
    for mode in MODES:
        passes = options.rounds + 1
        told = {"brokers": scene.address, "topics": mode, "columns": "partition"}
        found = scene.spark.read.format("memq").options(**told).load().count()
        assert found == passes * scene.records, f"{found} records of {passes} times {scene.records}"
        figures += [
            rate(f"zstd, write {mode}", costs[mode], scene.size),
            beside(f"zstd, write {mode} over text", costs[mode], costs["text"]),
            beside(f"zstd, write {mode} over Parquet", costs[mode], costs["parquet"]),
        ]
    return figures


def _write(scene: Scene, frame: DataFrame, mode: str) -> None:
    told = {"brokers": scene.address, "topic": mode, "mode": mode}
    frame.write.format("memq").mode("append").options(**told).save()


def compaction_figures(scene: Scene, options: Options) -> list[Figure]:
    """Compact a topic, with all columns, beside Spark's own write of the same columns by date and hour."""
    folder, numbers = scene.folder / "compacted", itertools.count()
    ways: dict[str, Callable[[], object]] = {
        "memq": lambda: _compact(scene, str(folder / f"memq-{next(numbers)}")),
        "spark": lambda: _partition(scene, str(folder / f"spark-{next(numbers)}")),
    }
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=1)
    return [
        rate(f"{COMPACTED}, compacted to Parquet", costs["memq"], scene.size),
        beside(f"{COMPACTED}, compacted over Spark's own", costs["memq"], costs["spark"]),
    ]


def _compact(scene: Scene, place: str) -> None:
    from memq.spark.options import read_options
    from memq.spark.pipelines.file_store import place_of_text
    from memq.spark.pipelines.to_files import write_files

    options = read_options({"brokers": scene.address, "topics": COMPACTED})
    manifest = write_files(scene.spark, options, place_of_text(place), settled=False)
    assert manifest.records == scene.records, f"{manifest.records} records of {scene.records}"


def _partition(scene: Scene, place: str) -> None:
    told = {"brokers": scene.address, "topics": COMPACTED}
    frame = scene.spark.read.format("memq").options(**told).load()
    hours = frame.selectExpr("*", "cast(timestamp AS DATE) AS date", "hour(timestamp) AS hour")
    hours.write.partitionBy("date", "hour").parquet(place, compression="zstd")
