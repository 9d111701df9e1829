"""The progress of a stream: what remains between a micro-batch and the end of its topics. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from memq.spark.streaming.offsets import TopicPlaces


@dataclass(frozen=True, slots=True)
class StreamLag:
    """Stored records and bytes that lay behind the end of a micro-batch when it was reported."""

    records: int
    bytes: int


def lag(progress: Mapping[str, Any]) -> StreamLag:
    """Return the lag of a micro-batch, from `query.lastProgress` or one of `query.recentProgress`.

    Sources that are not memq's count as nothing. Rates are Spark's: `inputRowsPerSecond`, `processedRowsPerSecond`.
    """
    records = size = 0
    for source in progress["sources"]:
        here, end = (_totals(source[name]) for name in ("endOffset", "latestOffset"))
        records += max(0, end[0] - here[0])
        size += max(0, end[1] - here[1])
    return StreamLag(records, size)


def _totals(offset: object) -> tuple[int, int]:
    """Return the records and bytes before an offset; PySpark hands it out as text within text."""
    while isinstance(offset, str):
        offset = json.loads(offset)
    try:
        topics = msgspec.convert(offset, dict[str, TopicPlaces], strict=False)
    except msgspec.ValidationError:
        return 0, 0
    places = [place for topic in topics.values() for place in topic.partitions.values()]
    return sum(place.records for place in places), sum(place.bytes for place in places)
