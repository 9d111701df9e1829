"""`audit`: the verdict of `memq audit` by the same functions, on executors.

And as a table by producer and minute.
Tasks check pieces of the queue and emit what they found, sorted by read partition and offset. Then one auditor for
each read partition takes its stream: memory is bounded by producers, not by data, and nothing but verdicts comes back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from memq.audit.verdict import Verdict, merge_verdicts
from memq.client.io_thread import io_thread
from memq.spark.options import ReadOptions
from memq.spark.pipelines.audit_plan import AuditPlan, plan_audit
from memq.spark.pipelines.inputs import options_of, spark_session, tell, topic_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@click.command("audit")
@topic_options
@click.option("--parquet", metavar="PATH", help="Write the table to this path, replacing its content.")
@click.option("--report", metavar="TOPIC", help="Send the table to this topic, a JSON record for each row.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def command(
    topic: str, brokers: str | None, given: tuple[str, ...], parquet: str | None, report: str | None, as_json: bool
) -> int:
    """Read all that TOPIC's queue names, and say what was lost, doubled or damaged, and how sure that is."""
    _, read = options_of(topic, brokers, given)
    with spark_session(f"audit {topic}", read) as spark:
        plan = io_thread().run(plan_audit(read))
        verdict, table = audit(spark, read, plan)
        if parquet:
            table.write.mode("overwrite").parquet(parquet)
            tell(f"audit: table written to {parquet}")
        if report:
            send_table(table, report, read, now_ms=plan.now_ms)
            tell(f"audit: table sent to topic '{report}'")
        print_verdict(verdict, as_json=as_json)
    return 0 if verdict.passed else 1


def audit(spark: SparkSession, options: ReadOptions, plan: AuditPlan) -> tuple[Verdict, DataFrame]:
    """Audit what `plan` has of the topic of `options`.

    Return the verdict and the table by producer and minute.
    The table: `topic`, write `partition`, `producer_id`, `minute` (of queue time), the counts of
    `memq.audit.minutes`, `committed` by group, `verdict` in a word, and `final`: whether the minute lies below the
    watermark, so that nothing of it can change any more.
    Raises: what tasks raise, as Spark tells it.
    """
    from memq.spark.pipelines.audit_tasks import judge, table_of, verdicts_of

    tell(f"audit: topic '{plan.topic.name}', {len(plan.pieces)} pieces of {len(plan.spans)} partitions")
    judged = judge(spark, options, plan)
    return merge_verdicts(verdicts_of(judged, plan)), table_of(judged, plan)


def send_table(table: DataFrame, topic: str, read: ReadOptions, *, now_ms: int) -> None:
    """Write a table to a topic of the same cluster, once, as the batch of this moment (Unix ms).

    Raises: as a batch write.
    """
    from pyspark.sql import functions

    keyed = table.select(
        functions.concat_ws("/", "topic", "partition", "producer_id", "minute").alias("key"),
        functions.to_json(functions.struct("*")).alias("value"),
    )
    options = {"topic": topic, "writer": f"audit.{topic}", "batchId": str(now_ms)}
    where = {"brokers": read.brokers, "store": read.store, "config": read.config, "profile": read.profile}
    options |= {name: value for name, value in where.items() if value}
    keyed.write.format("memq").mode("append").options(**options).save()


def print_verdict(verdict: Verdict, *, as_json: bool) -> None:
    """Print a verdict on stdout."""
    if as_json:
        click.echo(json.dumps(verdict.to_json()))
        return
    for found in verdict.findings:
        places = "; ".join(place.where for place in found.places[:3])
        click.echo(f"{found.kind.value}: {found.count} {found.kind.unit}(s); {places}")
    click.echo(f"verdict: {verdict}")
    click.echo(f"coverage: {verdict.coverage}")
