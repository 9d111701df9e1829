"""The verdict of an audit: its findings, their certainty, and their basis.

Pure values, with their JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from memq.audit.account import Balance, TailKnowledge
from memq.audit.finding import Finding, Kind, Outcome
from memq.errors import InvalidRequestError
from memq.format.ranges import Range

FINDINGS_MAX = 10  # named findings of one kind; its count is exact
BALANCES_MAX = 1_000  # producers that a verdict lists, those with findings first
RANGES_MAX = 10
THROUGH_STORE = "the store"
# What an auditor adds when it has read all, by write partition; the others come as it reads.
_BY_WRITE_PARTITION = (Kind.LOST, Kind.HELD, Kind.HOLE, Kind.IN_FLIGHT, Kind.UNKNOWN, Kind.BATCH_HOLE)


@dataclass(slots=True)
class FindingCount:
    """The findings of one kind: the count of their units, and the first of them."""

    kind: Kind
    count: int = 0
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return kind, count, unit and the first findings, as `places`."""
        found = [finding.where_json() for finding in self.findings]
        return {"kind": self.kind.value, "count": self.count, "unit": self.kind.unit, "places": found}


class FindingCounts:
    """Counts findings by kind, in addition to `counts`."""

    def __init__(self, counts: Iterable[FindingCount] = ()) -> None:
        self._counts = {each.kind: FindingCount(each.kind, each.count, list(each.findings)) for each in counts}

    def add(self, units: int, finding: Finding) -> None:
        """Add the units of a finding to the count of its kind."""
        known = self._counts.setdefault(finding.kind, FindingCount(finding.kind))
        known.count += units
        if len(known.findings) < FINDINGS_MAX:
            known.findings.append(finding)

    def __iter__(self) -> Iterator[FindingCount]:
        """Yield the counts, in the order of the kinds."""
        return (self._counts[kind] for kind in Kind if kind in self._counts)


@dataclass(frozen=True, slots=True)
class PartitionCoverage:
    """The read part of a read partition: pointers `begin` to `end` (exclusive), or the error."""

    partition: int
    begin: int
    end: int
    pointers: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The basis of the verdict. `through` says how objects were read."""

    partitions: tuple[PartitionCoverage, ...] = ()
    objects: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    copies_dropped: int = 0  # records in blocks that readers pass over: `skip`, or seen within the window
    producers: int = 0
    producers_proven: int = 0
    producers_in_flight: int = 0
    held: int = 0  # delayed records, and those of transactions: proven by their units
    waiting: int = 0  # delayed records that are not due
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
            (self.held, f"{_count(self.held, 'record')} delayed or of transactions"),
            (self.waiting, f"{_count(self.waiting, 'delayed record')} not due"),
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
    findings: tuple[FindingCount, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    balances: tuple[Balance, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The gravest outcome of the findings."""
        outcomes = {found.kind.outcome for found in self.findings}
        return next((outcome for outcome in Outcome if outcome in outcomes), Outcome.CLEAN)

    @property
    def passed(self) -> bool:
        """Whether there is no fault: the verdict is clean or incomplete."""
        return self.outcome in (Outcome.CLEAN, Outcome.INCOMPLETE)

    def finding(self, kind: Kind) -> FindingCount:
        """Return the count of a kind, which may be empty."""
        return next((found for found in self.findings if found.kind is kind), FindingCount(kind))

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


def merge_verdicts(parts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a topic; `parts` are those of its read partitions, in their order.

    All pointers of a write partition are in one read partition, and no evidence crosses read partitions. So one auditor
    for each read partition has the same findings as one auditor for all.
    Raises: InvalidRequestError without parts, or for parts of several topics.
    """
    topics = {(part.topic, part.topic_id) for part in parts}
    if len(topics) != 1:
        raise InvalidRequestError(f"verdicts of {len(topics)} topics can't become one (give those of one topic)")
    name, topic_id = topics.pop()
    balances = sorted(
        (balance for part in parts for balance in part.balances),
        key=lambda balance: (balance.clean, balance.partition, balance.producer),
    )
    return Verdict(
        topic=name,
        topic_id=topic_id,
        findings=tuple(_merge_findings(parts)),
        coverage=_merge_coverage([part.coverage for part in parts]),
        balances=tuple(balances[:BALANCES_MAX]),
    )


def _merge_findings(parts: Sequence[Verdict]) -> Iterator[FindingCount]:
    for kind in Kind:
        found = [part.finding(kind) for part in parts]
        count = sum(each.count for each in found)
        findings = [finding for each in found for finding in each.findings]
        if kind in _BY_WRITE_PARTITION:
            findings.sort(key=lambda finding: finding.partition)
        if count:
            yield FindingCount(kind, count, findings[:FINDINGS_MAX])


def _merge_coverage(parts: Sequence[Coverage]) -> Coverage:
    apart = ("partitions", "through")
    counts = {
        each.name: sum(getattr(part, each.name) for part in parts)
        for each in fields(Coverage)
        if each.name not in apart
    }
    partitions = tuple(partition for part in parts for partition in part.partitions)
    return Coverage(partitions=partitions, through=parts[0].through, **counts)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _balance_json(balance: Balance) -> dict[str, Any]:
    kinds = ("lost", "doubled", "corrupt", "unread", "unproven", "held")
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
