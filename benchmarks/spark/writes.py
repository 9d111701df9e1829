"""Writes: the same frame to a topic in both modes, as text and as Parquet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.results import Figure, Options
from benchmarks.spark.interleaved_timing import beside, rate
from benchmarks.spark.shared_setup import Scene

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODES = ("exactly-once", "low-latency")


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
        params = {"brokers": scene.address, "topics": mode, "columns": "partition"}
        found = scene.spark.read.format("memq").options(**params).load().count()
        assert found == passes * scene.records, f"{found} records of {passes} times {scene.records}"
        figures += [
            rate(f"zstd, write {mode}", costs[mode], scene.size),
            beside(f"zstd, write {mode} over text", costs[mode], costs["text"]),
            beside(f"zstd, write {mode} over Parquet", costs[mode], costs["parquet"]),
        ]
    return figures


def _write(scene: Scene, frame: DataFrame, mode: str) -> None:
    params = {"brokers": scene.address, "topic": mode, "mode": mode}
    frame.write.format("memq").mode("append").options(**params).save()
