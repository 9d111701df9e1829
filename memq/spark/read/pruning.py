"""The effect of a query's filters: partitions, batches by pointers, blocks by index. Pure.

A pointer and an index entry bound times and have a bit for each tag's hash. They prove that records can't match, never
that they do. So Spark filters again by tag and time; only filters by topic and partition are complete here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from memq.client.consumer.record_filter import filter_of
from memq.format.blocks.header import tag_bit
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.limits import TIME_MS_END
from memq.spark.options import ReadOptions

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class ReadFilter:
    """Possible matches: topics and partitions (None: all), tag bits (0: all), times in Unix ms.

    `tag_bits` are those of the query, and `option_bits` those of the option `tags`: both must match.
    """

    topics: frozenset[str] | None = None
    partitions: tuple[range, ...] = ()  # each of them must hold the number
    numbers: frozenset[int] | None = None
    tag_bits: int = 0
    option_bits: int = 0
    least_ms: int = -TIME_MS_END
    greatest_ms: int = TIME_MS_END

    def has(self, topic: str, partition: int) -> bool:
        """Whether records of this read partition may match."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.numbers is None or partition in self.numbers)
            and all(partition in part for part in self.partitions)
        )

    def may_match(self, batch: Pointer | BlockEntry) -> bool:
        """Whether a batch, or a block, may have a record that matches."""
        return (
            (not self.tag_bits or bool(batch.tag_bits & self.tag_bits))
            and (not self.option_bits or bool(batch.tag_bits & self.option_bits))
            and batch.least_ms <= self.greatest_ms
            and batch.greatest_ms >= self.least_ms
        )

    def surely_matches(self, batch: Pointer) -> bool:
        """Whether the pointer proves that none of the batch's blocks can be left out."""
        return (
            (not self.tag_bits or batch.tag_bits & ~self.tag_bits == 0)
            and (not self.option_bits or batch.tag_bits & ~self.option_bits == 0)
            and self.least_ms <= batch.least_ms
            and batch.greatest_ms <= self.greatest_ms
        )


_ALL = ReadFilter()


def option_filter(options: ReadOptions) -> ReadFilter:
    """Return the batches and blocks that the option `tags` lets through."""
    records = filter_of(options.tags, options.where)
    return ReadFilter(option_bits=records.tag_bits if records is not None else 0)


def take_filters(
    filters: Sequence[Filter], columns: Sequence[str], wanted: ReadFilter = _ALL
) -> tuple[ReadFilter, list[Filter]]:
    """Return `wanted` with the filters of a query, and the filters that records must still pass.

    `columns` are memq's own columns: a decoded field may have the name `tag`, and is not the tag of the record.
    """
    left: list[Filter] = []
    for one in filters:
        ours = getattr(one, "attribute", ()) in [(name,) for name in columns]
        taken = _take(wanted, one) if ours else None
        if taken is not None:
            wanted = taken
        if taken is None or not _is_settled(one):
            left.append(one)
    return wanted, left


def _is_settled(one: Filter) -> bool:
    return getattr(one, "attribute", ()) in (("topic",), ("partition",))


def _take(wanted: ReadFilter, one: Filter) -> ReadFilter | None:
    """Return `wanted` with one more filter; None for a filter that can't be used."""
    column = getattr(one, "attribute", ())
    values = _values(one)
    if column == ("topic",) and values is not None:
        topics = frozenset(values)
        return replace(wanted, topics=topics if wanted.topics is None else topics & wanted.topics)
    if column == ("tag",) and values is not None and not wanted.tag_bits:
        bits = 0
        for value in values:
            bits |= tag_bit(value)
        return replace(wanted, tag_bits=bits)
    if column == ("partition",):
        return _take_partition(wanted, one, values)
    if column == ("timestamp",):
        return _take_time(wanted, one, values)
    return None


def _values(one: Filter) -> list[Any] | None:
    """Return the values one of which a column must have; None for another kind of filter."""
    if isinstance(one, In):
        return [value for value in one.value if value is not None] or None
    if isinstance(one, EqualTo | EqualNullSafe) and one.value is not None:
        return [one.value]
    return None


def _take_partition(wanted: ReadFilter, one: Filter, values: list[Any] | None) -> ReadFilter | None:
    if values is not None:
        numbers = frozenset(map(int, values))
        return replace(wanted, numbers=numbers if wanted.numbers is None else numbers & wanted.numbers)
    bound = getattr(one, "value", None)
    if not isinstance(bound, int):
        return None
    part = _range_of(one, bound)
    return None if part is None else replace(wanted, partitions=(*wanted.partitions, part))


def _range_of(one: Filter, bound: int) -> range | None:
    end = 1 << 31
    match one:
        case GreaterThan():
            return range(bound + 1, end)
        case GreaterThanOrEqual():
            return range(bound, end)
        case LessThan():
            return range(bound)
        case LessThanOrEqual():
            return range(bound + 1)
    return None


def _take_time(wanted: ReadFilter, one: Filter, values: list[Any] | None) -> ReadFilter | None:
    bounds = values if values is not None else [getattr(one, "value", None)]
    moments = [bound for bound in bounds if isinstance(bound, datetime) and bound.tzinfo is not None]
    if len(moments) < len(bounds):
        return None
    # Times are whole milliseconds: the first one at or after each bound, and the last one at or before it.
    first = [-((_EPOCH - moment) // _MILLISECOND) for moment in moments]
    last = [(moment - _EPOCH) // _MILLISECOND for moment in moments]
    if values is not None:
        return _earlier(_later(wanted, min(first)), max(last))
    match one:
        case GreaterThan():
            return _later(wanted, last[0] + 1)
        case GreaterThanOrEqual():
            return _later(wanted, first[0])
        case LessThan():
            return _earlier(wanted, first[0] - 1)
        case LessThanOrEqual():
            return _earlier(wanted, last[0])
    return None


def _later(wanted: ReadFilter, least_ms: int) -> ReadFilter:
    return replace(wanted, least_ms=max(wanted.least_ms, least_ms))


def _earlier(wanted: ReadFilter, greatest_ms: int) -> ReadFilter:
    return replace(wanted, greatest_ms=min(wanted.greatest_ms, greatest_ms))
