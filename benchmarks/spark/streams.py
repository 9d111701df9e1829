"""Streaming reads: a topic followed to its end in micro-batches, compared with a folder of text files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.results import Figure, Options
from benchmarks.spark.interleaved_timing import beside, rate
from benchmarks.spark.shared_setup import FILES, Scene

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MICRO_BATCHES = 4
CODEC = "zstd"


def stream_figures(scene: Scene, options: Options) -> list[Figure]:
    """Follow both from their beginning, each pass with a checkpoint of its own."""
    params = scene.reading(CODEC, maxRecordsPerTrigger=str(-(-scene.records // MICRO_BATCHES)))
    spark, numbers = scene.spark, itertools.count()
    files = FILES // MICRO_BATCHES
    frames: dict[str, Callable[[], DataFrame]] = {
        "memq": lambda: spark.readStream.format("memq").options(**params).load(),
        "text": lambda: spark.readStream.option("maxFilesPerTrigger", files).text(str(scene.folder / "text")),
    }
    ways = {name: partial(_follow, scene, frame, numbers) for name, frame in frames.items()}
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=1)
    case = f"{CODEC}, stream, {MICRO_BATCHES} micro-batches"
    return [
        rate(case, costs["memq"], scene.size, records=scene.records),
        beside(f"{CODEC}, stream over text files", costs["memq"], costs["text"]),
    ]


def _follow(scene: Scene, frame: Callable[[], DataFrame], numbers: itertools.count[int]) -> None:
    checkpoint = str(scene.folder / f"checkpoint-{next(numbers)}")
    writer = frame().writeStream.format("noop").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    rows = sum(progress["numInputRows"] for progress in query.recentProgress)
    assert rows == scene.records, f"{rows} rows of {scene.records}"
