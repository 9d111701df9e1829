"""Cuts a topic's queue into pieces of similar stored bytes, by pointers: one per task."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from memq.format.pointer import Pointer, read_pointer
from memq.notification import Span
from memq.spark.access import Access
from memq.topic import ReadPartition

POINTERS_MAX = 16_384  # of one piece


@dataclass(frozen=True, slots=True)
class PointerSpan:
    """The pointers of a span of a read partition."""

    partition: ReadPartition
    span: Span


async def pieces_of(access: Access, partition: ReadPartition, span: Span, bytes_max: int) -> list[PointerSpan]:
    """Return the pieces of a span, all of it in order. Raises: as `PointerReader.read`."""
    cuts = [span.begin]
    size = count = 0
    async for entries in access.places.pages(partition, span.begin, span.end):
        for entry in entries:
            size, count = size + _stored_bytes(entry.body), count + 1
            if size >= bytes_max or count == POINTERS_MAX:
                cuts.append(entry.offset + 1)
                size = count = 0
    if cuts[-1] < span.end:
        cuts.append(span.end)
    return [PointerSpan(partition, Span(begin, end)) for begin, end in pairwise(cuts)]


def _stored_bytes(body: bytes) -> int:
    pointer = read_pointer(body, newer="return")
    return sum(location.length for location in pointer.locations) if isinstance(pointer, Pointer) else 0
