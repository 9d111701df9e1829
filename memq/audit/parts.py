"""An audit in parts: the verdicts of read partitions become one. Pure.

All pointers of a write partition lie in one read partition, and nothing is known across them: so one auditor for each
read partition finds what one auditor of all would find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from memq.audit.verdict import BALANCES_MAX, PLACES_MAX, Coverage, Finding, FindingPlace, Kind, Outcome, Verdict
from memq.errors import InvalidRequestError

# What an auditor adds when it has read all, by write partition; the others come as it reads.
_BY_WRITE_PARTITION = (Kind.LOST, Kind.HOLE, Kind.IN_FLIGHT, Kind.UNKNOWN, Kind.BATCH_HOLE)


def merge_verdicts(parts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a topic; `parts` are those of its read partitions, in their order.

    Raises: InvalidRequestError when there is none, or when they are of several topics.
    """
    topics = {(part.topic, part.topic_id) for part in parts}
    if len(topics) != 1:
        raise InvalidRequestError(f"verdicts of {len(topics)} topics can't become one (give those of one topic)")
    (name, topic_id), findings = topics.pop(), tuple(_merge_findings(parts))
    outcomes = [finding.kind.outcome for finding in findings]
    balances = sorted(
        (balance for part in parts for balance in part.balances),
        key=lambda balance: (balance.clean, balance.partition, balance.producer),
    )
    return Verdict(
        topic=name,
        topic_id=topic_id,
        outcome=next((outcome for outcome in Outcome if outcome in outcomes), Outcome.CLEAN),
        findings=findings,
        coverage=_merge_coverage([part.coverage for part in parts]),
        balances=tuple(balances[:BALANCES_MAX]),
    )


def _merge_findings(parts: Sequence[Verdict]) -> Iterable[Finding]:
    for kind in Kind:
        found = [part.finding(kind) for part in parts]
        count = sum(finding.count for finding in found)
        places: list[FindingPlace] = [place for finding in found for place in finding.places]
        if kind in _BY_WRITE_PARTITION:
            places.sort(key=lambda place: place.partition)
        if count:
            yield Finding(kind, count, tuple(places[:PLACES_MAX]))


def _merge_coverage(parts: Sequence[Coverage]) -> Coverage:
    apart = ("partitions", "through")
    counts = {
        each.name: sum(getattr(part, each.name) for part in parts)
        for each in fields(Coverage)
        if each.name not in apart
    }
    partitions = tuple(partition for part in parts for partition in part.partitions)
    return Coverage(partitions=partitions, through=parts[0].through, **counts)
