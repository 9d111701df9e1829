"""A finding of either audit: its kind, its records by producer and sequences, and where it is. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from io import StringIO
from typing import Any, Self

import msgspec

from memq.format.ranges import Range
from memq.limits import SEQUENCE_END

IN_QUEUE = "queue"
IN_OBJECT = "object"
IN_GROUP = "consumer"
EVIDENCE_MAX = 100_000  # findings of one export
_COLUMNS = (
    *("id", "kind", "stage", "group", "topic", "topic_id", "partition", "minute", "producer", "records", "ranges"),
    *("object", "block", "offset", "cause", "first_seen_ms", "resolved_ms", "acknowledged_by", "acknowledged_ms"),
)


class Outcome(Enum):
    """The verdict in one word, the gravest that holds."""

    LOST = "lost"
    DAMAGED = "damaged"
    DOUBLED = "doubled"
    INCOMPLETE = "incomplete"
    CLEAN = "clean"


class Kind(Enum):
    """The classes of findings, with the unit of their counts and the outcome that they lead to."""

    LOST = ("lost", "record", Outcome.LOST)
    CORRUPT = ("corrupt", "block", Outcome.DAMAGED)
    POINTER = ("unreadable pointer", "pointer", Outcome.DAMAGED)
    BATCH_HOLE = ("missing batch", "batch", Outcome.DAMAGED)
    TOTALS = ("counted, not shown", "record", Outcome.DAMAGED)
    FAULT = ("contradiction", "batch", Outcome.DAMAGED)
    DOUBLED = ("doubled", "record", Outcome.DOUBLED)
    UNREAD = ("not read", "place", Outcome.INCOMPLETE)
    HELD = ("held", "record", Outcome.INCOMPLETE)
    HOLE = ("unproven hole", "record", Outcome.INCOMPLETE)
    IN_FLIGHT = ("in flight", "producer", Outcome.INCOMPLETE)
    UNKNOWN = ("unknown tail", "producer", Outcome.INCOMPLETE)

    def __new__(cls, title: str, unit: str, outcome: Outcome) -> Self:
        """Make a kind whose value is its title, as it is stored."""
        kind = object.__new__(cls)
        kind._value_, kind.unit, kind.outcome = title, unit, outcome
        return kind

    unit: str
    outcome: Outcome


class Finding(msgspec.Struct, kw_only=True):
    """A fault at one place; of the live audit the fault of some records of one producer in one minute.

    Times are Unix ms, `minute` Unix minutes. What is not known is empty, or -1 for `offset`, that of a pointer. Ranges
    are half-open, up to SEQUENCE_END where nobody knows their end. `stage` says where records were lost or doubled:
    `queue` (acked, and in no pointer), `object` (damaged, in `block`), `consumer` (of `group`). A verdict's findings
    leave out what the verdict says: id, topic, records and times.
    `resolved_ms` is 0 while it holds: a finding is taken back when what was missing comes late. `acknowledged_by` says
    who has looked at it.
    """

    kind: Kind
    partition: int
    id: str = ""
    stage: str = IN_QUEUE
    topic: str = ""
    topic_id: str = ""
    minute: int = 0
    producer: int = 0
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
        return self.kind.outcome is not Outcome.INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; the producer as 16 hex digits, ranges as half-open pairs."""
        return {**msgspec.to_builtins(self), "producer": f"{self.producer:016x}", "ranges": [*map(list, self.ranges)]}

    def place_json(self) -> dict[str, Any]:
        """Return what is known of its place, as JSON values."""
        first, next_ = self.ranges[0] if self.ranges else (None, None)
        known = {
            "partition": self.partition,
            "producer": f"{self.producer:016x}" if self.producer else None,
            "first": first,
            "next": None if next_ == SEQUENCE_END else next_,
            "offset": self.offset if self.offset >= 0 else None,
            "object": self.object or None,
            "block": self.block if self.stage == IN_OBJECT else None,
            "cause": self.cause or None,
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def where(self) -> str:
        """Its place, its records there, and the cause."""
        parts = [f"partition {self.partition}"]
        if self.producer:
            parts.append(f"producer {self.producer:016x}")
        if self.ranges and self.ranges[0][1] == SEQUENCE_END:
            parts.append(f"from sequence {self.ranges[0][0]}")
        elif self.ranges:
            shown = ", ".join(f"{first} to {next_ - 1}" for first, next_ in self.ranges[:3])
            parts.append(f"sequences {shown}" + (" …" if len(self.ranges) > 3 else ""))
        elif self.records:
            parts.append(f"{self.records} records")
        parts += [f"pointer {self.offset}"] if self.offset >= 0 else []
        parts += [f"object {self.object}"] if self.object else []
        parts += [f"block {self.block}"] if self.stage == IN_OBJECT else []
        return " ".join(parts) + (f": {self.cause}" if self.cause else "")

    def __str__(self) -> str:
        group = f" for group '{self.group}'" if self.group else ""
        return f"{self.kind.value}{group}: topic '{self.topic}' {self.where}"


def finding_id(*key: object) -> str:
    """Return the id of a finding: the same key has the same one, after every restart and at every auditor.

    Two findings with one id would hide each other: of 100,000, with 64 bits, one time in 3.7 billion.
    """
    return blake2b("\n".join(map(str, key)).encode(), digest_size=8).hexdigest()


def csv_of(found: Sequence[Finding]) -> str:
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
