"""The parts of an audit that run on executors, and the data frames between them."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow
from pyspark import StorageLevel
from pyspark.sql import functions

from memq.audit.auditor import Auditor
from memq.audit.checks.checked_entry import decode_checked, encode_checked
from memq.audit.checks.checker import Checker
from memq.audit.checks.whole_object import store_reader
from memq.audit.minutes import COUNTS, MINUTE_MS, OK, QUEUE, WORDS, MinuteRow, Minutes, Stream, watermark_ms
from memq.audit.verdict import Verdict
from memq.runtime.network import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.audit_plan import AuditPlan
from memq.spark.pipelines.pieces import PointerSpan
from memq.spark.pipelines.spread import Batches, Row, batches_of, iterate, mapped, spread
from memq.spark.stores import TaskStores

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


def judge(spark: SparkSession, options: ReadOptions, plan: AuditPlan) -> DataFrame:
    """Return the verdict of each read partition and the rows by minute, cached on executors' disks."""
    checked = spread(spark, plan.pieces, partial(_check, options), CHECKED)
    ordered = checked.repartition(max(1, len(plan.spans)), "partition").sortWithinPartitions("partition", "offset")
    return mapped(ordered, partial(_judge, plan), JUDGED).persist(StorageLevel.DISK_ONLY)


def verdicts_of(judged: DataFrame, plan: AuditPlan) -> list[Verdict]:
    """Return the verdicts of all read partitions, in their order: one for each, whatever it holds."""
    rows = judged.where("verdict IS NOT NULL").select("verdict").toArrow()
    found: dict[int, Verdict] = {}
    for data in rows.column(0).to_pylist():
        verdict: Verdict = pickle.loads(data)  # noqa: S301 - our own task made it
        found[verdict.coverage.partitions[0].partition] = verdict
    return [found.get(partition) or _open(plan, partition).verdict(plan.now_ms) for partition in sorted(plan.spans)]


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
            place = {"partition": piece.partition.partition, "offset": checked.entry.offset}
            yield {**place, "checked": encode_checked(checked)}


# ---- judging ---------------------------------------------------------------------------------------


def _open(plan: AuditPlan, partition: int, minutes: Minutes | None = None) -> Auditor:
    auditor = Auditor(plan.topic, minutes=minutes)
    auditor.open_partition(partition, plan.spans[partition])
    return auditor


def _judge(plan: AuditPlan, batches: Batches) -> Batches:
    return batches_of(_judged(plan, batches), JUDGED, MINUTE_ROWS_MAX)


def _judged(plan: AuditPlan, batches: Batches) -> Iterator[Row]:
    """Yield what one auditor for each read partition says; rows come by read partition and offset."""
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
    yield from _rows_of(plan, minutes.settle(auditor.balances(plan.now_ms)))
    yield {"verdict": pickle.dumps(auditor.verdict(plan.now_ms))}


def _rows_of(plan: AuditPlan, rows: Mapping[tuple[Stream, int], MinuteRow]) -> Iterator[Row]:
    for ((partition, producer), minute_ms), row in rows.items():
        keys = {"partition": partition, "producer_id": producer, "minute": minute_ms * 1_000}
        counts = {name: row.side(QUEUE)[name] for name in COUNTS}
        yield {**keys, **counts, "committed": [row.side(group)["processed"] for group in plan.groups]}
