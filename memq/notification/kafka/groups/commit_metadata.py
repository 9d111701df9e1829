"""Commit metadata: record index and totals, which a position needs in addition to the offset. Pure.

The offset of the commit is the pointer's, the metadata is `memq1 <record index> <records> <bytes>` in ASCII; Kafka
takes 4,095 UTF-16 units. A commit by another hand (a reset with Kafka's tools) has none, and erases what was there: it
stands at the pointer's first record.
"""

from __future__ import annotations

import re

from memq.notification.refusals import OFFSET_END, RECORD_INDEX_END, TOTAL_END
from memq.topic import Committed, Position, ReadPartition, Totals

_METADATA = re.compile(r"memq1 (\d{1,20}) (\d{1,20}) (\d{1,20})\Z")


def encode_metadata(committed: Committed) -> str:
    """Return the metadata of a commit, at most 65 characters."""
    return f"memq1 {committed.position.record_index} {committed.totals.records} {committed.totals.bytes}"


def decode_commit(partition: ReadPartition, offset: int, metadata: str | None) -> Committed | None:
    """Return what a commit says of a read partition; None when there is none.

    Metadata of others are passed over.
    """
    if not 0 <= offset < OFFSET_END:
        return None
    found = _METADATA.match(metadata or "")
    index, records, size = (int(part) for part in found.groups()) if found else (0, 0, 0)
    if not (index < RECORD_INDEX_END and records < TOTAL_END and size < TOTAL_END):
        index, records, size = 0, 0, 0
    return Committed(Position(partition.partition, offset, index), Totals(records, size))
