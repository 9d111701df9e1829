"""`compact`: small objects into Parquet files by date and hour, under an atomic manifest.

Only settled records are written: below the watermark no record can arrive any more. Each run continues at the end of
the manifest. A killed run leaves files that no manifest names. Readers ignore them, and the next run writes them again
under the same names. With `--into objects`, the batches of small objects are copied into large ones instead, which all
readers of the topic read.

The driver plans by pointers. Each task copies the batches of one large object, and writes the part of the manifest that
names them. A round ends with the manifests of all read partitions; then the brokers trim the pointers. A run that is
killed at any moment leaves a complete log (`memq.compaction.compaction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec
import pyarrow

from memq.client.io_thread import io_thread
from memq.compaction.compaction import BatchCopier, Copied, manifest_of, publish_parts
from memq.compaction.plan import CompactionRule, spans_to_compact
from memq.compaction.reader import ManifestFiles
from memq.errors import InvalidSettingError
from memq.format.compaction_manifest import CompactionManifest
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, CompactionAccess, open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.inputs import options_of, print_progress, spark_session, tasks_option, topic_options
from memq.spark.pipelines.spread import Batches, PointerSpan, spread
from memq.spark.pipelines.topic_files import location_of_text
from memq.spark.stores import TaskStores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COPIED = pyarrow.schema({"partition": pyarrow.int32(), "copied": pyarrow.binary()})
_DECODE = msgspec.json.Decoder(Copied).decode


@click.command("compact")
@topic_options
@click.option("--into", type=click.Choice(["files", "objects"]), default="files", show_default=True, help="Output.")
@click.option("--to", metavar="PLACE", help="Files: folder, or s3://BUCKET/PREFIX?endpoint=…")
@click.option("--unsettled", is_flag=True, help="Files: write up to the end, younger records too.")
@click.option("--age", metavar="TIME", default="1d", show_default=True, help="Objects: copy batches older than this.")
@click.option("--object-bytes", metavar="SIZE", default="128MiB", show_default=True, help="Size of the large objects.")
@click.option("--rest", is_flag=True, help="Objects: copy a rest that does not fill one, too.")
@tasks_option("; each round has a manifest")
def command(
    topic: str,
    brokers: str | None,
    given: tuple[str, ...],
    into: str,
    to: str | None,
    unsettled: bool,
    age: str,
    object_bytes: str,
    rest: bool,
    tasks: int,
) -> int:
    """Write TOPIC as Parquet files by date and hour of its records; the next run continues there.

    With --into objects, copy its old batches into large objects. Readers see no difference, but need fewer requests.
    """
    _, read = options_of(topic, brokers, given)
    if into == "objects":
        return _into_objects(topic, read, CompactionRule.of(age, object_bytes, rest=rest), tasks)
    if to is None:
        raise click.UsageError("files need --to PLACE")
    from memq.spark.pipelines.to_files import write_files

    location = location_of_text(to, read.config, read.profile)
    with spark_session(f"compact {topic}", read) as spark:
        manifest = write_files(spark, read, location, settled=not unsettled, tasks=tasks)
    click.echo(
        f"manifest {manifest.number}: {manifest.records} records in {len(manifest.files)} files at {location.url}"
    )
    return 0


def _into_objects(topic: str, read: ReadOptions, rule: CompactionRule, tasks: int) -> int:
    with spark_session(f"compact {topic}", read) as spark:
        done = compact_objects(spark, read, rule, tasks=tasks)
    click.echo(f"{done.pointers} pointers to {done.bytes} bytes now go to {done.objects} large objects")
    if done.findings:
        print_progress(f"{done.findings} batches are damaged or missing, and stay as they are: see above")
    return 1 if done.findings else 0


@dataclass(frozen=True, slots=True)
class CopyRound:
    """The spans for tasks, the manifests, and the time in ms within which a manifest must name the copies."""

    planned: Sequence[PointerSpan]
    manifests: Mapping[int, CompactionManifest]
    named_within_ms: int


@dataclass(slots=True)
class Compacted:
    """Results: objects, batches' stored bytes and pointers; `findings` are keys with their faults."""

    objects: int = 0
    bytes: int = 0
    pointers: int = 0
    findings: int = 0


def compact_objects(spark: SparkSession, options: ReadOptions, rule: CompactionRule, *, tasks: int) -> Compacted:
    """Copy the old batches of a topic into large objects, in rounds of `tasks`, until none is left.

    Raises: InvalidSettingError without brokers; as a batch read; NotReadyError if retention was faster, or if a round
    took too long. Then the caller runs it again.
    """
    thread = io_thread()
    done = Compacted()
    now_ms = Runtime().clock.wall_ms()  # of all rounds: else each would find a little more
    while True:
        found = thread.run(_plan(options, rule, tasks, now_ms))
        if not found.planned:
            return done
        rows = spread(spark, found.planned, partial(_copy, options), _COPIED).toArrow().to_pylist()
        copied: dict[int, list[Copied]] = {}
        for row in rows:
            copied.setdefault(row["partition"], []).append(_DECODE(row["copied"]))
        for number, parts in copied.items():
            if thread.run(_publish(options, found, number, parts)):
                _count(done, parts)
            else:
                print_progress(f"{options.topics[0]}/{number}: another run was faster; continuing from it")
        print_progress(
            f"{options.topics[0]}: {done.objects:,} objects of {done.bytes:,} bytes for {done.pointers:,} pointers"
        )


def _count(done: Compacted, parts: Sequence[Copied]) -> None:
    done.objects += len(parts)
    done.bytes += sum(each.part.bytes for each in parts)
    done.pointers += sum(each.part.entries for each in parts)
    for each in parts:
        done.findings += len(each.findings)
        for key, text in each.findings:
            print_progress(f"{key}: {text}")


def _compactor(access: Access) -> CompactionAccess:
    if access.compactor is None:
        raise InvalidSettingError(
            "objects are compacted with brokers: only they know the topic's settings", hint="give --brokers"
        )
    return access.compactor


async def _plan(options: ReadOptions, rule: CompactionRule, tasks: int, now_ms: int) -> CopyRound:
    """Trim the pointers that an earlier run compacted, and plan the next runs."""
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        compactor, topic = _compactor(access), access.topics[options.topics[0]]
        sweep_age_ms = await compactor.queue.trim_compacted(topic.name, topic.id)
        planned: list[PointerSpan] = []
        manifests: dict[int, CompactionManifest] = {}
        async with TaskStores(access.urls, runtime) as stores:
            files = ManifestFiles(compactor.cluster, stores.open(compactor.store))
            for partition in sorted(topic.partitions):
                manifest = manifests[partition.partition] = await manifest_of(files, partition)
                async for span in spans_to_compact(
                    access.queue, partition, manifest.next, topic.settings, rule, now_ms
                ):
                    planned.append(PointerSpan(partition, span))
                    if len(planned) >= tasks:
                        return CopyRound(planned, manifests, sweep_age_ms // 2)
        return CopyRound(planned, manifests, sweep_age_ms // 2)


def _copy(options: ReadOptions, planned: PointerSpan) -> Batches:
    copied = io_thread().run(_copied(options, planned))
    row = {"partition": planned.partition.partition, "copied": msgspec.json.encode(copied)}
    yield pyarrow.RecordBatch.from_pylist([row], _COPIED)


async def _copied(options: ReadOptions, planned: PointerSpan) -> Copied:
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        compactor = _compactor(access)
        async with TaskStores(access.urls, runtime) as stores:
            store = (compactor.store, stores.open(compactor.store))
            copier = BatchCopier(compactor.cluster, access.queue, stores.open, store, runtime)
            return await copier.copy(planned.partition, planned.span)


async def _publish(options: ReadOptions, found: CopyRound, number: int, parts: Sequence[Copied]) -> bool:
    """Make a partition's parts visible, and trim the compacted pointers of the topic from the queue.

    Return whether this run did it; another run may have been faster.
    """
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        compactor, topic = _compactor(access), access.topics[options.topics[0]]
        async with TaskStores(access.urls, runtime) as stores:
            files = ManifestFiles(compactor.cluster, stores.open(compactor.store))
            manifest = found.manifests[number]
            made = await publish_parts(access.queue, files, manifest, parts, runtime.clock, found.named_within_ms)
        await compactor.queue.trim_compacted(topic.name, topic.id)
        return made is not None
