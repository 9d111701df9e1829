"""Spark reads, follows, writes and compacts a topic, compared with files of its own, in one run."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.results import Figure, Options
from benchmarks.spark.compactions import compaction_figures
from benchmarks.spark.micro_batches import micro_batch_figures
from benchmarks.spark.reads import read_figures
from benchmarks.spark.shared_setup import prepared
from benchmarks.spark.streams import stream_figures
from benchmarks.spark.writes import write_figures

_PARTS = (read_figures, stream_figures, write_figures, micro_batch_figures, compaction_figures)


def run(options: Options) -> list[Figure]:
    """Measure all of it: ways take turns, the first rounds don't count, medians do."""
    folder = Path(tempfile.mkdtemp(prefix="memq-bench-spark-"))
    figures: list[Figure] = []
    try:
        with prepared(folder, 600_000 if options.quick else 2_000_000) as made:
            for part in _PARTS:
                found = part(made, options)
                for figure in found:
                    options.say(figure.line())
                figures += found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures
