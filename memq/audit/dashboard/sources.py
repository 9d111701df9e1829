"""The port behind which the auditor stands: what the dashboard asks it. Without an auditor all of it is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memq.audit.dashboard.view import FindingRow


@dataclass(frozen=True, slots=True)
class TopicVerdict:
    """What the audit says of a topic over all that it remembers. Counts are of records that findings name."""

    word: str
    lost: int
    doubled: int
    corrupt: int
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class MinuteRow:
    """One minute (Unix minutes of event time) of a write partition; `side` is "" for the queue's, else a group's name.

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
    """What changed since a version of the audit: verdicts by topic, findings that are new, other or over."""

    version: int
    topics: dict[str, TopicVerdict]
    findings: Sequence[FindingRow]


class AuditSource(Protocol):
    """What the dashboard asks the auditor.

    Promises: news are complete from one version to the next; version 0 is before everything. Raises: MemqError.
    """

    async def news(self, since: int) -> AuditNews:
        """Return what changed since a version."""
        ...

    async def minutes(self, topic: str, first: int, end: int) -> list[MinuteRow]:
        """Return the rows of a topic from minute `first` up to, not with, `end`."""
        ...

    async def acknowledge(self, finding: str, who: str) -> None:
        """Note who has looked at a finding. Raises: NotFoundError."""
        ...
