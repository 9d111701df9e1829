"""`memq compact`: copies the old batches of a topic from small objects into large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import click

from memq.audit.opened_topic import OpenedTopic, opened_topic
from memq.cli.options import broker_options, brokers_of, json_option, s3_values, settings_of
from memq.cli.output import count_text, print_json, print_message, size_text
from memq.cli.run import FAILED, OK
from memq.compaction.compaction import BatchCopier, Copied, compact
from memq.compaction.plan import CompactionRule
from memq.compaction.reader import ManifestFiles
from memq.errors import CorruptDataError, DeniedError
from memq.format.compaction_manifest import CompactionManifest
from memq.notification import Span
from memq.runtime.runtime import Runtime
from memq.settings import Value
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, read_partitions


@dataclass(slots=True)
class CompactedCount:
    """The copied objects; pointers and stored bytes of their batches; batches that could not be read."""

    objects: int = 0
    pointers: int = 0
    bytes: int = 0
    damaged: int = 0


class _ShownCopier(BatchCopier):
    """A copier that prints each large object."""

    async def copy(self, partition: ReadPartition, span: Span) -> Copied:
        """See `BatchCopier.copy`."""
        copied = await super().copy(partition, span)
        batches, size = count_text(copied.part.entries, "batch"), size_text(copied.part.bytes)
        print_message(f"partition {partition.partition}: a large object for {batches} of {size}")
        return copied


@click.command("compact")
@click.argument("topic")
@click.option("--age", metavar="TIME", default="1d", show_default=True, help="Copy batches that are older than this.")
@click.option("--object-bytes", metavar="SIZE", default="128MiB", show_default=True, help="Size of the large objects.")
@click.option("--rest", is_flag=True, help="Also copy a rest that does not fill a large object.")
@broker_options
@json_option
def compact_topic(
    topic: str,
    age: str,
    object_bytes: str,
    rest: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Copy the old batches of TOPIC from small objects into large ones.

    Records, positions and groups do not change, but readers need fewer requests. The command reads and writes the
    store itself. It can be stopped at any time, and the next run continues. Damaged batches stay where they are; then
    the exit code is 1. Spark does the same with many tasks: python -m memq.spark.pipelines compact.
    """
    rule = CompactionRule.of(age, object_bytes, rest=rest)
    settings = settings_of(config, profile)
    total = CompactedCount()
    asyncio.run(_compact(brokers_of(config, profile, flags), topic, s3_values(settings), rule, total))
    if as_json:
        counts = {"objects": total.objects, "pointers": total.pointers, "bytes": total.bytes, "damaged": total.damaged}
        print_json(counts)
    else:
        click.echo(
            f"{count_text(total.pointers, 'batch')} of {size_text(total.bytes)}"
            f" are now in {count_text(total.objects, 'large object')}"
        )
    return FAILED if total.damaged else OK


async def _compact(
    brokers: str, name: str, s3: Mapping[str, object], rule: CompactionRule, total: CompactedCount
) -> None:
    try:
        async with opened_topic(brokers, name, direct=True, s3=s3) as opened:
            for partition in read_partitions(opened.topic):
                await _compact_partition(opened, partition, rule, total)
    except DeniedError as error:
        hint = "memq compact reads and writes the store itself: give it keys and a way there"
        raise DeniedError(str(error), hint=hint) from error


async def _compact_partition(
    opened: OpenedTopic, partition: ReadPartition, rule: CompactionRule, total: CompactedCount
) -> None:
    topic, queue, runtime = opened.topic, opened.queue, Runtime()
    store_name, store = next(iter(opened.stores.items()))

    async def leave(manifest: CompactionManifest) -> int:
        return await queue.trim_compacted(topic.name, topic.id)

    def open_store(name: str) -> StorageHandler:
        if name not in opened.stores:
            raise CorruptDataError(f"the cluster has no store '{name}'")
        return opened.stores[name]

    copier = _ShownCopier(opened.cluster, queue, open_store, (store_name, store), runtime)
    files = ManifestFiles(opened.cluster, store)
    sweep_age_ms = await queue.trim_compacted(topic.name, topic.id)
    rounds = compact(
        queue,
        files,
        copier,
        partition,
        topic.settings,
        rule,
        runtime.clock,
        leave,
        named_within_ms=sweep_age_ms // 2,
    )
    async for copied in rounds:
        _count(total, copied)


def _count(total: CompactedCount, copied: list[Copied]) -> None:
    """Add the parts of a manifest, and print their damaged batches."""
    for each in copied:
        total.objects += 1
        total.pointers += each.part.entries
        total.bytes += each.part.bytes
        total.damaged += len(each.findings)
        for key, text in each.findings:
            print_message(f"{key}: {text}")
