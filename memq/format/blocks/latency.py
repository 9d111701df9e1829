"""Latencies of blocks, by bucket.

Bucket b has the records that passed a stage from 2^(b-1) ms to below 2^b ms after the least timestamp of their block.
Bucket 0 has those below 1 ms, also negative ones from clocks that differ.
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
    """Return the number of records by bucket, for blocks that pass a stage at `now_ms`."""
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
