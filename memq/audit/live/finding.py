"""A finding of the live audit: records of one producer and minute, the fault, place and time. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from hashlib import blake2b
from io import StringIO
from typing import Any

import msgspec

from memq.audit.verdict import Kind
from memq.format.ranges import Range

RANGES_MAX = 256  # that a finding names; its count is exact
IN_QUEUE = "queue"
IN_OBJECT = "object"
IN_GROUP = "consumer"
EVIDENCE_MAX = 100_000  # findings of one export
_COLUMNS = (
    *("id", "kind", "stage", "group", "topic", "topic_id", "partition", "minute", "producer", "records", "ranges"),
    *("object", "block", "offset", "cause", "first_seen_ms", "resolved_ms", "acknowledged_by", "acknowledged_ms"),
)


class LiveFinding(msgspec.Struct, kw_only=True):
    """The fault of some records of one producer in one minute.

    Times are Unix ms, `minute` Unix minutes.
    `kind` is a title of `verdict.Kind`. `stage` says where they were lost or doubled: `queue` (acked, and in no
    pointer), `object` (damaged), `consumer` (of `group`). `resolved_ms` is 0 while it holds: a finding is taken back
    when what was missing comes late. `acknowledged_by` says who has looked at it.
    """

    id: str
    kind: str
    stage: str
    topic: str
    topic_id: str
    partition: int
    minute: int
    producer: int
    group: str = ""
    records: int = 0
    ranges: tuple[Range, ...] = ()
    cause: str = ""
    object: str = ""
    block: int = 0
    offset: int = -1
    first_seen_ms: int = 0
    resolved_ms: int = 0
    acknowledged_by: str = ""
    acknowledged_ms: int = 0

    @property
    def grave(self) -> bool:
        """Whether something is wrong, and not merely unproven."""
        return self.kind != Kind.HOLE.title

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; the producer as 16 hex digits, ranges as half-open pairs."""
        return {**msgspec.to_builtins(self), "producer": f"{self.producer:016x}", "ranges": [*map(list, self.ranges)]}

    def __str__(self) -> str:
        shown = ", ".join(f"{first} to {next_ - 1}" for first, next_ in self.ranges[:3])
        more = " …" if len(self.ranges) > 3 else ""
        who = f"producer {self.producer:016x} sequences {shown}{more}" if self.ranges else f"{self.records} records"
        group = f" for group '{self.group}'" if self.group else ""
        block = f" block {self.block}" if self.stage == IN_OBJECT else ""
        place = f" object {self.object}{block} pointer {self.offset}" if self.object else ""
        return f"{self.kind}{group}: topic '{self.topic}' partition {self.partition} {who}{place}: {self.cause}"


def finding_id(*key: object) -> str:
    """Return the id of a finding: the same key has the same one, after every restart and at every auditor.

    Two findings with one id would hide each other: of 100,000, with 64 bits, one time in 3.7 billion.
    """
    return blake2b("\n".join(map(str, key)).encode(), digest_size=8).hexdigest()


def csv_of(found: Sequence[LiveFinding]) -> str:
    """Return findings as CSV with a line of names.

    Ranges as first-last, both included, with spaces between.
    """
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for finding in found:
        values = finding.to_json() | {"ranges": " ".join(f"{first}-{next_ - 1}" for first, next_ in finding.ranges)}
        writer.writerow([values[column] for column in _COLUMNS])
    return text.getvalue()
