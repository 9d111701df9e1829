"""Latencies as a histogram: records by bucket, each bucket twice as wide as the one before. Pure.

Bucket b has the records that passed a stage 2^(b-1) up to 2^b ms after the least timestamp of their block, bucket 0
those before 1 ms, also by clocks that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

Bucket = Annotated[int, Meta(ge=0, le=64)]
Latency = tuple[tuple[int, int], ...]  # bucket, records


def bucket_of(latency_ms: int) -> int:
    """Return the bucket of a latency in ms."""
    return latency_ms.bit_length() if latency_ms > 0 else 0


def latency_of(least_ms: Sequence[int], records: Sequence[int], now_ms: int) -> Latency:
    """Return the records by bucket, of blocks with these least timestamps that pass a stage at `now_ms`."""
    if not least_ms:
        return ()
    first, last = bucket_of(now_ms - max(least_ms)), bucket_of(now_ms - min(least_ms))
    if first == last:
        return ((first, sum(records)),)
    found: dict[int, int] = {}
    for least, count in zip(least_ms, records, strict=True):
        bucket = bucket_of(now_ms - least)
        found[bucket] = found.get(bucket, 0) + count
    return tuple(sorted(found.items()))
