"""`compact`: a topic's small objects as Parquet files by date and hour, under a manifest that is swapped at once.

Only what is settled is written: below the watermark nothing can come any more. Each run goes on where the manifest
ends. A run that is killed leaves files that no manifest names; they are not there, and the next run writes them again
under the same names.
"""

from __future__ import annotations

import click

from memq.spark.pipelines.file_store import place_of_text
from memq.spark.pipelines.inputs import options_of, spark_session, topic_options
from memq.spark.pipelines.rounds import ROUND_TASKS
from memq.spark.pipelines.to_files import write_files


@click.command("compact")
@topic_options
@click.option("--to", required=True, metavar="PLACE", help="Folder, or s3://BUCKET/PREFIX?endpoint=…")
@click.option("--unsettled", is_flag=True, help="Write up to the end, also what is younger than the watermark.")
@click.option("--tasks", default=ROUND_TASKS, show_default=True, help="Tasks of one round; each round has a manifest.")
def command(topic: str, brokers: str | None, given: tuple[str, ...], to: str, unsettled: bool, tasks: int) -> int:
    """Write TOPIC as Parquet files by date and hour of its records, and go on there at the next run."""
    _, read = options_of(topic, brokers, given)
    place = place_of_text(to, read.config, read.profile)
    with spark_session(f"compact {topic}") as spark:
        manifest = write_files(spark, read, place, settled=not unsettled, tasks=tasks)
    click.echo(f"manifest {manifest.number}: {manifest.records} records in {len(manifest.files)} files at {place.url}")
    return 0
