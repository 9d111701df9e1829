"""Compactions: a topic to Parquet, compared with Spark's own write, and a topic of small objects into large ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import memq
from benchmarks.children.samples import lines
from benchmarks.results import Figure, Options
from benchmarks.spark.interleaved_timing import beside, rate
from benchmarks.spark.shared_setup import PARTITIONS, VALUE_BYTES, Scene, send
from tests.compaction import DAY_MS, make_old

COMPACTED = "zstd"
SMALL_BYTES = 256 << 10  # stored, of a batch that has an object of its own
WARM_UPS = 1


def compaction_figures(scene: Scene, options: Options) -> list[Figure]:
    """Compact a topic, with all columns, to files beside Spark's own write by date and hour, and into objects."""
    folder, numbers = scene.folder / "compacted", itertools.count()
    small = iter(_small_topics(scene, WARM_UPS + options.rounds))
    ways: dict[str, Callable[[], object]] = {
        "files": lambda: _compact(scene, str(folder / f"memq-{next(numbers)}")),
        "spark": lambda: _partition(scene, str(folder / f"spark-{next(numbers)}")),
        "objects": partial(_enlarge, scene, small),
    }
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=WARM_UPS)
    return [
        rate(f"{COMPACTED}, compacted to Parquet", costs["files"], scene.size),
        beside(f"{COMPACTED}, compacted over Spark's own", costs["files"], costs["spark"]),
        rate(f"{COMPACTED}, compacted into objects", costs["objects"], scene.size),
        beside(f"{COMPACTED}, into objects over to Parquet", costs["objects"], costs["files"]),
    ]


def _compact(scene: Scene, folder: str) -> None:
    from memq.spark.options import read_options
    from memq.spark.pipelines.to_files import write_files
    from memq.spark.pipelines.topic_files import location_of_text

    options = read_options({"brokers": scene.address, "topics": COMPACTED})
    manifest = write_files(scene.spark, options, location_of_text(folder), settled=False)
    assert manifest.records == scene.records, f"{manifest.records} records of {scene.records}"


def _partition(scene: Scene, folder: str) -> None:
    params = {"brokers": scene.address, "topics": COMPACTED}
    frame = scene.spark.read.format("memq").options(**params).load()
    hours = frame.selectExpr("*", "cast(timestamp AS DATE) AS date", "hour(timestamp) AS hour")
    hours.write.partitionBy("date", "hour").parquet(folder, compression="zstd")


def _small_topics(scene: Scene, count: int) -> list[str]:
    """Make topics of small objects, all but the last record of each partition two days old; each is compacted once."""
    values, topics = lines(VALUE_BYTES, scene.records), [f"small-{number}" for number in range(count)]
    for topic in topics:
        send(scene.address, topic, COMPACTED, values, batch_bytes_max=SMALL_BYTES)
    for topic in topics:
        make_old(scene.folder / "data", topic, 1 << 39)
        with memq.Producer(scene.address) as producer:
            for partition in range(PARTITIONS):
                producer.send(topic, b"young", partition=partition)
    return topics


def _enlarge(scene: Scene, topics: Iterator[str]) -> None:
    from memq.compaction.plan import CompactionRule
    from memq.spark.options import read_options
    from memq.spark.pipelines.compact import compact_objects

    topic = next(topics)
    stored = sum(path.stat().st_size for path in scene.objects(topic).rglob("*") if path.is_file())
    options = read_options({"brokers": scene.address, "topics": topic})
    done = compact_objects(scene.spark, options, CompactionRule(age_ms=DAY_MS, rest=True), tasks=64)
    assert 0.9 * stored < done.bytes <= stored, f"{done.bytes} of {stored} bytes"
    assert not done.findings
