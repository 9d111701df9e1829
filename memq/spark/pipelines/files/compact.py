"""`compact`: small objects into Parquet files by date and hour, under an atomic manifest.

Only what is settled is written: below the watermark nothing can come any more. Each run continues where the manifest
ends. A run that is killed leaves files that no manifest names; they are not there, and the next run writes them again
under the same names. Or, with `--into objects`, small objects into large ones, which all readers of the topic read.
"""

from __future__ import annotations

import click

from memq.compaction.plan import OBJECT_BYTES_MAX, ColdRule
from memq.settings import parse_size, parse_time_ms
from memq.spark.options import ReadOptions
from memq.spark.pipelines.files.file_store import place_of_text
from memq.spark.pipelines.inputs import options_of, spark_session, tasks_option, tell, topic_options


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
        return _into_objects(topic, read, _rule(age, object_bytes, rest=rest), tasks)
    if to is None:
        raise click.UsageError("files need --to PLACE")
    from memq.spark.pipelines.files.to_files import write_files

    place = place_of_text(to, read.config, read.profile)
    with spark_session(f"compact {topic}", read) as spark:
        manifest = write_files(spark, read, place, settled=not unsettled, tasks=tasks)
    click.echo(f"manifest {manifest.number}: {manifest.records} records in {len(manifest.files)} files at {place.url}")
    return 0


def _rule(age: str, object_bytes: str, *, rest: bool) -> ColdRule:
    age_ms, size = parse_time_ms(age), parse_size(object_bytes)
    if age_ms is None or age_ms < 0:
        raise click.UsageError(f"--age '{age}' is no time such as 7d or 12h")
    if size is None or not 0 < size <= OBJECT_BYTES_MAX:
        raise click.UsageError(f"--object-bytes '{object_bytes}' is no size up to {OBJECT_BYTES_MAX >> 20}MiB")
    return ColdRule(age_ms, size, rest)


def _into_objects(topic: str, read: ReadOptions, rule: ColdRule, tasks: int) -> int:
    from memq.spark.pipelines.large_objects import compact_objects

    with spark_session(f"compact {topic}", read) as spark:
        done = compact_objects(spark, read, rule, tasks=tasks)
    click.echo(f"{done.pointers} pointers to {done.bytes} bytes now go to {done.objects} large objects")
    if done.findings:
        tell(f"{done.findings} batches are damaged or missing, and stay as they are: see above")
    return 1 if done.findings else 0
