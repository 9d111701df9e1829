"""Ports of the dashboard, which the auditor implements.

Without an auditor all of it is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memq.audit.dashboard.view import ClientRow, FindingRow
from memq.audit.finding import Finding


@dataclass(frozen=True, slots=True)
class TopicVerdict:
    """The verdict of the audit on a topic's last hour.

    Counts are of records in open findings.
    `committed` has the records that came into the queue by Unix minute, of the minutes in which there were any.
    """

    word: str
    lost: int
    doubled: int
    corrupt: int
    p99_ms: float | None = None
    committed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionMinute:
    """One minute (Unix minutes of event time) of a write partition.

    `side` is "" for the queue's, else a group's name.
    `counts` are records by stage or verdict, `latency` has for each stage records by bucket, as reports have them.
    """

    partition: int
    minute: int
    side: str
    word: str
    counts: dict[str, int]
    latency: dict[str, dict[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditNews:
    """Changes of the audit since a version: verdicts by topic, findings that are new, changed or closed."""

    version: int
    topics: dict[str, TopicVerdict]
    findings: Sequence[FindingRow]


class AuditSource(Protocol):
    """The questions of the dashboard to the auditor.

    Promises: news are complete from one version to the next; version 0 is before everything. Raises: MemqError.
    """

    async def news(self, since: int) -> AuditNews:
        """Return what changed since a version."""
        ...

    async def minutes(self, topic: str, first: int, end: int) -> list[PartitionMinute]:
        """Return the rows of a topic from minute `first` up to, not with, `end`."""
        ...

    async def finding(self, id_: str) -> Finding:
        """Return a finding with all that is known of it. Raises: NotFoundError."""
        ...

    async def findings(self) -> Sequence[Finding]:
        """Return open and closed findings, the latest change first, at most EVIDENCE_MAX."""
        ...

    async def clients(self) -> list[ClientRow]:
        """Return the clients whose reports are awaited."""
        ...

    async def acknowledge(self, finding: str, who: str) -> None:
        """Note the name of the operator that acknowledged a finding. Raises: NotFoundError."""
        ...
