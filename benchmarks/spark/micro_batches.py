"""Short micro-batches written exactly once: as one transaction each, and partition by partition."""

from __future__ import annotations

import itertools
from functools import partial

import memq
from benchmarks.results import Figure, Options, median, percentile
from benchmarks.spark.interleaved_timing import NAME, beside
from benchmarks.spark.shared_setup import Scene

BATCHES = 20
ROWS = 1_000  # of each
PARTITIONS = 8
TOPIC = "micro-batches"


def micro_batch_figures(scene: Scene, options: Options) -> list[Figure]:
    """Follow a folder of small files into a topic, file by file; each pass has a writer and checkpoint of its own."""
    import pyarrow
    import pyarrow.parquet

    source, numbers = scene.folder / "short", itertools.count()
    source.mkdir()
    for number in range(BATCHES):
        table = pyarrow.table({"value": pyarrow.array([b"v" * 100] * ROWS, pyarrow.binary())})
        pyarrow.parquet.write_table(table, source / f"{number}.parquet")
    with memq.Admin(scene.address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
    times_ms: dict[str, list[float]] = {"true": [], "false": []}
    ways = {atomic: partial(_follow, scene, atomic, numbers, taken) for atomic, taken in times_ms.items()}
    costs = scene.meter.take_turns(ways, rounds=options.rounds, warm_ups=1)
    warm = {atomic: taken[BATCHES:] for atomic, taken in times_ms.items()}
    detail: dict[str, float | str] = {"p99 ms": percentile(warm["true"], 0.99)}
    detail |= {"not atomic ms": median(warm["false"]), "its p99 ms": percentile(warm["false"], 0.99)}
    return [
        Figure(NAME, f"atomic micro-batch of {ROWS} rows", median(warm["true"]), "ms", detail=detail),
        beside("atomic micro-batches over others", costs["true"], costs["false"]),
    ]


def _follow(scene: Scene, atomic: str, numbers: itertools.count[int], times_ms: list[float]) -> None:
    """Copy all files; note how long Spark took to write and commit each batch."""
    number = next(numbers)
    frame = scene.spark.readStream.schema("value BINARY").option("maxFilesPerTrigger", 1)
    rows = frame.parquet(str(scene.folder / "short")).selectExpr("value", "cast(rand() AS STRING) AS key")
    writer = rows.writeStream.format("memq").option("checkpointLocation", str(scene.folder / f"short-{number}"))
    params = {"brokers": scene.address, "topic": TOPIC, "writer": f"short-{number}", "atomic": atomic}
    query = writer.options(**params).trigger(availableNow=True).start()
    query.awaitTermination()
    done = [each for each in query.recentProgress if each["numInputRows"]]
    assert len(done) == BATCHES, f"{len(done)} micro-batches of {BATCHES}"
    times_ms += [each["durationMs"]["addBatch"] for each in done]
