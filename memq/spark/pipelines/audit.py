"""`audit`: the verdict of `memq audit` on executors, and a table by producer and minute.

The functions are those of `memq audit`.

Tasks check pieces of the queue and emit their results, sorted by read partition and offset. Then one auditor for each
read partition takes its results in order. Its memory depends on the number of producers, not of records. Only verdicts
return to the driver.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click
import pyarrow
from pyspark import StorageLevel
from pyspark.sql import functions

from memq.audit.auditor import Auditor
from memq.audit.checks.batch_check import decode_checked, encode_checked
from memq.audit.checks.checker import Checker
from memq.audit.checks.object_reads import store_reader
from memq.audit.held import HeldAnswer, Sought
from memq.audit.holders import Holders
from memq.audit.minutes import COUNTS, MINUTE_MS, OK, QUEUE, WORDS, MinuteRow, Minutes, Stream, watermark_ms
from memq.audit.released import NOT_ASKED, ReleaseAnswer
from memq.audit.verdict import Verdict, merge_verdicts
from memq.client.broker_router import BrokerRouter
from memq.client.io_thread import io_thread
from memq.errors import NotFoundError
from memq.notification import Span
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.inputs import options_of, print_progress, spark_session, stored_positions, topic_options
from memq.spark.pipelines.spread import Batches, PointerSpan, Row, batches_of, iterate, mapped, pieces_of, spread
from memq.spark.stores import TaskStores
from memq.topic import Position, ReadPartition, Topic, equal_slots, name_of_run

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_KEYS = {"partition": pyarrow.int32(), "producer_id": pyarrow.int64(), "minute": pyarrow.timestamp("us", "UTC")}
CHECKED = pyarrow.schema({"partition": pyarrow.int32(), "offset": pyarrow.int64(), "checked": pyarrow.binary()})
JUDGED = pyarrow.schema(
    {"verdict": pyarrow.binary()}
    | _KEYS
    | dict.fromkeys(COUNTS, pyarrow.int64())
    | {"committed": pyarrow.list_(pyarrow.int64())}
)
BATCH_ROWS_MAX = 256
MINUTE_ROWS_MAX = 4_096  # held by a task before they continue


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Spans by read partition, their pieces, and positions of `groups` by read partition.

    `now_ms` (Unix ms) is the moment of the verdict. `answer` has the brokers' answers on the `sought` records,
    before the spans ended; None when they were not asked. `released` has the counts of held records, by read
    partition, before the spans ended.
    """

    topic: Topic
    spans: Mapping[int, Span]
    pieces: Sequence[PointerSpan]
    groups: Sequence[str]
    committed: Mapping[int, Mapping[str, Position | None]]
    now_ms: int
    released: Mapping[int, ReleaseAnswer]
    sought: Sequence[Sought] = ()
    answer: HeldAnswer | None = None


async def plan_audit(options: ReadOptions) -> AuditPlan:
    """Plan an audit of the present topic. Raises: UnreachableError, NotFoundError, QueueError."""
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        named = access.topics[options.topics[0]]
        topic = Topic(name=named.name, id=named.id, created_ms=0, partitions=equal_slots(1), settings=named.settings)
        answer = NOT_ASKED
        if access.pool is not None:
            answer = await Holders(access.pool, BrokerRouter(access.pool)).ask_released(topic)
        spans = {partition: await access.resolver.span(partition) for partition in sorted(named.partitions)}
        pieces = [
            piece
            for partition, span in spans.items()
            for piece in await pieces_of(access, partition, span, options.partition_bytes)
        ]
        groups = await _committed(access, list(spans))
        return AuditPlan(
            topic=topic,
            spans={partition.partition: span for partition, span in spans.items()},
            pieces=pieces,
            groups=list(groups),
            committed={each.partition: {group: groups[group].get(each) for group in groups} for each in spans},
            now_ms=runtime.clock.wall_ms(),
            released={
                each.partition: answer.of(named.partitions[each], first=at == 0) for at, each in enumerate(spans)
            },
        )


async def plan_again(options: ReadOptions, plan: AuditPlan, sought: Sequence[Sought]) -> AuditPlan:
    """Ask brokers whether they hold the missing records, and then extend the plan to the present ends.

    Without brokers the plan does not change. A topic never gets another read partition. Raises: NotFoundError if
    another topic has its name now; as `plan_audit`.
    """
    async with open_access(options, Runtime()) as access:
        if access.pool is None:
            return plan
        topic = access.topics[options.topics[0]]
        if topic.id != plan.topic.id:
            raise NotFoundError(
                f"topic '{topic.name}' was deleted during the audit, and created again", hint="start the audit again"
            )
        answer = await Holders(access.pool, BrokerRouter(access.pool)).ask(plan.topic, sought)
        spans, pieces = dict(plan.spans), list(plan.pieces)
        for partition in sorted(topic.partitions):
            before = spans[partition.partition]
            behind = Span(before.end, max(before.end, (await access.resolver.span(partition)).end))
            spans[partition.partition] = Span(before.begin, behind.end)
            pieces += await pieces_of(access, partition, behind, options.partition_bytes)
        return replace(plan, spans=spans, pieces=pieces, sought=sought, answer=answer)


async def _committed(access: Access, partitions: list[ReadPartition]) -> dict[str, dict[ReadPartition, Position]]:
    """Return the positions of each group that has read the topic."""
    groups = access.groups
    found = {group: await stored_positions(groups, group, partitions) for group in await groups.groups()}
    return {group: positions for group, positions in found.items() if positions}


def judge(spark: SparkSession, options: ReadOptions, plan: AuditPlan) -> DataFrame:
    """Return the verdict of each read partition and the rows by minute, cached on executors' disks."""
    checked = spread(spark, plan.pieces, partial(_check, options), CHECKED)
    ordered = checked.repartition(max(1, len(plan.spans)), "partition").sortWithinPartitions("partition", "offset")
    return mapped(ordered, partial(_judge, plan), JUDGED).persist(StorageLevel.DISK_ONLY)


def verdicts_of(judged: DataFrame, plan: AuditPlan) -> tuple[list[Verdict], list[Sought]]:
    """Return one verdict for each read partition, in order, and the records that brokers are asked for.

    These are the records that are lost unless a broker holds them.
    """
    rows = judged.where("verdict IS NOT NULL").select("verdict").toArrow()
    found: dict[int, Verdict] = {}
    sought: list[Sought] = []
    for data in rows.column(0).to_pylist():
        verdict, missing = pickle.loads(data)  # noqa: S301 - our own task made it
        found[verdict.coverage.partitions[0].partition] = verdict
        sought += missing
    verdicts = [found.get(partition) or _open(plan, partition).verdict(plan.now_ms) for partition in sorted(plan.spans)]
    return verdicts, sought


def table_of(judged: DataFrame, plan: AuditPlan) -> DataFrame:
    """Return the table by producer and minute. See `memq.spark.pipelines.audit.audit`."""
    count = len(plan.groups)
    here = [functions.get("committed", functions.lit(at)) for at in range(count)]
    committed = [functions.sum(each).alias(f"group {at}") for at, each in enumerate(here)]
    summed = (
        judged.where("verdict IS NULL")
        .groupBy("partition", "producer_id", "minute")
        .agg(*(functions.sum(name).alias(name) for name in COUNTS), *committed)
    )
    names = functions.array(*(functions.lit(group) for group in plan.groups)).cast("array<string>")
    counts = functions.array(*(functions.coalesce(f"`group {at}`", functions.lit(0)) for at in range(count)))
    final_s = (watermark_ms(plan.topic.settings, plan.now_ms) - MINUTE_MS) / 1000
    return summed.select(
        functions.lit(plan.topic.name).alias("topic"),
        "partition",
        "producer_id",
        "minute",
        *COUNTS,
        functions.map_from_arrays(names, counts.cast("array<bigint>")).alias("committed"),
        _word().alias("verdict"),
        (functions.col("minute").cast("double") <= final_s).alias("final"),
    )


def _word() -> Column:
    word = functions.lit(OK)
    for count, text in reversed(WORDS.items()):
        word = functions.when(functions.col(count) > 0, functions.lit(text)).otherwise(word)
    return word


# ---- checking --------------------------------------------------------------------------------------


def _check(options: ReadOptions, piece: PointerSpan) -> Batches:
    return batches_of(iterate(_checked(options, piece)), CHECKED, BATCH_ROWS_MAX)


async def _checked(options: ReadOptions, piece: PointerSpan) -> AsyncGenerator[Row, None]:
    async with open_access(options, Runtime()) as access, TaskStores(access.urls, Runtime()) as stores:
        async for checked in Checker(access.queue, store_reader(stores.open)).check(piece.partition, piece.span):
            pointer = {"partition": piece.partition.partition, "offset": checked.entry.offset}
            yield {**pointer, "checked": encode_checked(checked)}


# ---- judging ---------------------------------------------------------------------------------------


def _open(plan: AuditPlan, partition: int, minutes: Minutes | None = None) -> Auditor:
    auditor = Auditor(plan.topic, minutes=minutes)
    auditor.open_partition(partition, plan.spans[partition])
    auditor.take_shards(plan.released[partition])
    if plan.answer is not None:
        auditor.take_answer(plan.sought, plan.answer)
    return auditor


def _judge(plan: AuditPlan, batches: Batches) -> Batches:
    return batches_of(_judged(plan, batches), JUDGED, MINUTE_ROWS_MAX)


def _judged(plan: AuditPlan, batches: Batches) -> Iterator[Row]:
    """Yield the results of one auditor for each read partition; rows come by read partition and offset."""
    now: int | None = None
    minutes = Minutes(plan.committed)
    auditor = Auditor(plan.topic)
    for batch in batches:
        partitions, checked = batch.column("partition").to_pylist(), batch.column("checked")
        for partition, data in zip(partitions, checked, strict=True):
            if partition != now:
                yield from _ended(plan, auditor, minutes) if now is not None else ()
                now, auditor = partition, _open(plan, partition, minutes)
            auditor.take(partition, decode_checked(data.as_py()))
            if len(minutes) >= MINUTE_ROWS_MAX:
                yield from _rows_of(plan, minutes.take_rows())
    yield from _ended(plan, auditor, minutes) if now is not None else ()


def _ended(plan: AuditPlan, auditor: Auditor, minutes: Minutes) -> Iterator[Row]:
    for partition, short in auditor.shortfalls():
        minutes.lose(partition, short.time_ms, short.records)
    yield from _rows_of(plan, minutes.settle(auditor.balances(plan.now_ms)))
    yield {"verdict": pickle.dumps((auditor.verdict(plan.now_ms), auditor.sought(plan.now_ms)))}


def _rows_of(plan: AuditPlan, rows: Mapping[tuple[Stream, int], MinuteRow]) -> Iterator[Row]:
    for ((partition, producer), minute_ms), row in rows.items():
        keys = {"partition": partition, "producer_id": producer, "minute": minute_ms * 1_000}
        counts = {name: row.side(QUEUE)[name] for name in COUNTS}
        yield {**keys, **counts, "committed": [row.side(group)["processed"] for group in plan.groups]}


@click.command("audit")
@topic_options
@click.option("--parquet", metavar="PATH", help="Write the table to this path, replacing its content.")
@click.option("--report", metavar="TOPIC", help="Send the table to this topic, a JSON record for each row.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def command(
    topic: str, brokers: str | None, given: tuple[str, ...], parquet: str | None, report: str | None, as_json: bool
) -> int:
    """Read all pointers and objects of TOPIC, and report lost, doubled and damaged records."""
    _, read = options_of(topic, brokers, given)
    with spark_session(f"audit {topic}", read) as spark:
        plan = io_thread().run(plan_audit(read))
        verdict, table = audit(spark, read, plan)
        if parquet:
            table.write.mode("overwrite").parquet(parquet)
            print_progress(f"audit: table written to {parquet}")
        if report:
            send_table(table, report, read, now_ms=plan.now_ms)
            print_progress(f"audit: table sent to topic '{report}'")
        print_verdict(verdict, as_json=as_json)
    return 0 if verdict.passed else 1


def audit(spark: SparkSession, options: ReadOptions, plan: AuditPlan) -> tuple[Verdict, DataFrame]:
    """Audit the spans of `plan`; return the verdict and the table by producer and minute.

    The table: `topic`, write `partition`, `producer_id`, `minute` (of queue time), the counts of
    `memq.audit.minutes`, `committed` by group, `verdict` in a word, and `final`: whether the minute is below the
    watermark, so that its row can't change any more.
    Raises: errors of tasks, as Spark reports them.
    """
    print_progress(f"audit: topic '{plan.topic.name}', {len(plan.pieces)} pieces of {len(plan.spans)} partitions")
    judged = judge(spark, options, plan)
    verdicts, sought = verdicts_of(judged, plan)
    if sought:
        print_progress(f"audit: brokers are asked what they hold of {len(sought)} producers, and all is read again")
        plan = io_thread().run(plan_again(options, plan, sought))
        if plan.answer is not None:
            judged.unpersist()
            judged = judge(spark, options, plan)
            verdicts, _ = verdicts_of(judged, plan)
    return merge_verdicts(verdicts), table_of(judged, plan)


def send_table(table: DataFrame, topic: str, read: ReadOptions, *, now_ms: int) -> None:
    """Write a table to a topic of the same cluster, once, as the batch of this moment (Unix ms).

    Raises: as a batch write.
    """
    from pyspark.sql import functions

    keyed = table.select(
        functions.concat_ws("/", "topic", "partition", "producer_id", "minute").alias("key"),
        functions.to_json(functions.struct("*")).alias("value"),
    )
    options = {"topic": topic, "writer": name_of_run("audit", topic), "batchId": str(now_ms)}
    where = {"brokers": read.brokers, "store": read.store, "config": read.config, "profile": read.profile}
    options |= {name: value for name, value in where.items() if value}
    keyed.write.format("memq").mode("append").options(**options).save()


def print_verdict(verdict: Verdict, *, as_json: bool) -> None:
    """Print a verdict on stdout."""
    if as_json:
        click.echo(json.dumps(verdict.to_json()))
        return
    for found in verdict.findings:
        shown = "; ".join(finding.where for finding in found.findings[:3])
        click.echo(f"{found.kind.value}: {found.count} {found.kind.unit}(s); {shown}")
    click.echo(f"verdict: {verdict}")
    click.echo(f"coverage: {verdict.coverage}")
