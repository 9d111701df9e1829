"""The verdict of an audit: what was found, how sure that is, and what it rests on.

Pure values, with their JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from memq.audit.account import Balance, TailKnowledge
from memq.format.ranges import Range

PLACES_MAX = 10  # places that a finding names; its counts are exact
BALANCES_MAX = 1_000  # producers that a verdict lists, those with findings first
RANGES_MAX = 10
THROUGH_STORE = "the store"


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
    HOLE = ("unproven hole", "record", Outcome.INCOMPLETE)
    IN_FLIGHT = ("in flight", "producer", Outcome.INCOMPLETE)
    UNKNOWN = ("unknown tail", "producer", Outcome.INCOMPLETE)

    def __init__(self, title: str, unit: str, outcome: Outcome) -> None:
        self.title = title
        self.unit = unit
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class FindingPlace:
    """Where something was found; what is not known is None.

    Sequences are half-open, `offset` is a pointer's.
    """

    partition: int
    producer: int | None = None
    first: int | None = None
    next: int | None = None
    offset: int | None = None
    object: str | None = None
    block: int | None = None
    cause: str = ""

    def __str__(self) -> str:
        parts = [f"partition {self.partition}"]
        if self.producer is not None:
            parts.append(f"producer {self.producer:016x}")
        if self.first is not None:
            parts.append(f"sequences {self.first} to {self.next - 1}" if self.next else f"from sequence {self.first}")
        if self.offset is not None:
            parts.append(f"pointer {self.offset}")
        if self.object is not None:
            parts.append(f"object {self.object}")
        if self.block is not None:
            parts.append(f"block {self.block}")
        return " ".join(parts) + (f": {self.cause}" if self.cause else "")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known; the producer as 16 hex digits."""
        named = asdict(self)
        if self.producer is not None:
            named["producer"] = f"{self.producer:016x}"
        return {name: value for name, value in named.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One class of findings: how many units of its kind, and the first places."""

    kind: Kind
    count: int
    places: tuple[FindingPlace, ...]

    def to_json(self) -> dict[str, Any]:
        """Return kind, count, unit and places."""
        places = [place.to_json() for place in self.places]
        return {"kind": self.kind.title, "count": self.count, "unit": self.kind.unit, "places": places}


@dataclass(frozen=True, slots=True)
class PartitionCoverage:
    """The read part of a read partition: pointers `begin` to `end` (exclusive), or why there are none."""

    partition: int
    begin: int
    end: int
    pointers: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The basis of the verdict.

    `through` says how objects were read.
    """

    partitions: tuple[PartitionCoverage, ...] = ()
    objects: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    copies_dropped: int = 0  # records in blocks that readers pass over: `skip`, or seen within the window
    producers: int = 0
    producers_proven: int = 0
    producers_in_flight: int = 0
    burned: int = 0  # sequences that their producers gave up
    expired: int = 0  # sequences that retention took
    unread: int = 0  # pointers, objects and blocks that could not be read, or not by this version
    through: str = THROUGH_STORE

    def __str__(self) -> str:
        spans = ", ".join(
            f"{part.partition}: {part.error or f'pointers {part.begin} to {part.end}'}" for part in self.partitions[:8]
        )
        more = f" and {len(self.partitions) - 8} more" if len(self.partitions) > 8 else ""
        return "; ".join((f"partition {spans}{more}", *self._counts()))

    def _counts(self) -> Iterator[str]:
        """Give what was counted; of what should not be there, only what is."""
        objects, blocks = _count(self.objects, "object"), _count(self.blocks, "sound block")
        yield f"{objects} of {self.bytes:,} bytes with {blocks}, from {self.through}"
        yield f"{self.producers_proven:,} of {self.producers:,} producers proved their end"
        rare = (
            (self.copies_dropped, f"{_count(self.copies_dropped, 'record')} in copies that readers drop"),
            (self.burned, f"{self.burned:,} given up by producers"),
            (self.expired, f"{self.expired:,} taken by retention"),
            (self.unread, f"{_count(self.unread, 'place')} not read"),
        )
        yield from (text for count, text in rare if count)

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The audit's verdict on one topic.

    `balances`: at most BALANCES_MAX producers, with findings first.
    """

    topic: str
    topic_id: str
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    balances: tuple[Balance, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: clean, or merely incomplete."""
        return self.outcome in (Outcome.CLEAN, Outcome.INCOMPLETE)

    def finding(self, kind: Kind) -> Finding:
        """Return the finding of a kind; an empty one when there is none."""
        return next((found for found in self.findings if found.kind is kind), Finding(kind, 0, ()))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values; producers are 16 hex digits, ranges are half-open pairs."""
        return {
            "topic": self.topic,
            "topic_id": self.topic_id,
            "verdict": self.outcome.value,
            "findings": [found.to_json() for found in self.findings],
            "coverage": self.coverage.to_json(),
            "producers": [_balance_json(balance) for balance in self.balances],
        }

    def __str__(self) -> str:
        records = f"{_count(self.coverage.records, 'record')} of {_count(self.coverage.producers, 'producer')}"
        return f"{self.outcome.value}: topic '{self.topic}', {records}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _balance_json(balance: Balance) -> dict[str, Any]:
    kinds = ("lost", "doubled", "corrupt", "unread", "unproven")
    ranges: dict[str, tuple[Range, ...]] = {name: getattr(balance, name) for name in kinds}
    plain = ("partition", "delivered", "next_sequence", "burned", "expired", "copies")
    return {
        "producer": f"{balance.producer:016x}",
        **{name: getattr(balance, name) for name in plain},
        "tail": balance.tail.value,
        "proven": balance.tail is TailKnowledge.PROVEN,
        **{
            name: {"records": sum(next_ - first for first, next_ in found), "ranges": [*map(list, found[:RANGES_MAX])]}
            for name, found in ranges.items()
            if found
        },
    }
