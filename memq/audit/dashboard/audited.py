"""The state of the live audit for the dashboard: last hours, minutes, findings, acknowledgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memq.audit.finding import Finding, Kind
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore
from memq.audit.live.view import AuditView
from memq.audit.minutes import MINUTE_MS, QUEUE, MinuteRow, gravest, quantile_ms
from memq.runtime.clock import Clock

HOUR_MINUTES = 60  # of minutes that an `AuditedHour` sums; findings count as long as they hold
TOPICS_MAX = 100  # whose minutes are read for one answer; the others come with the next ones
_Held = tuple[Kind, int]  # of a finding that holds and is grave, with its records
_COUNTED = (Kind.LOST, Kind.CORRUPT, Kind.DOUBLED)


@dataclass(frozen=True, slots=True)
class AuditedHour:
    """The last hour of a topic in the live audit: the gravest word, and counts.

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
class AuditNews:
    """Changes of the audit since a version: last hours by topic, findings that are new, changed or closed."""

    version: int
    topics: dict[str, AuditedHour]
    findings: Sequence[Finding]


class LiveSource(AuditView):
    """Reads what auditors stored, in whichever process they run.

    News are complete from one version to the next; version 0 is before everything. Raises: MemqError.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self._store = AuditStore(database)
        self._clock = clock
        self._stale: dict[str, None] = {}  # topics whose last hour is to be summed again, the longest waiting first
        self._holding: dict[str, dict[str, _Held]] = {}  # by topic and id, as many as the state keeps

    async def news(self, since: int) -> AuditNews:
        """Return what changed since a version; after an error, the next call has all of it.

        One call at a time.
        """
        changed = await self.changes(since)
        for finding in changed.findings:
            self._hold(finding)
            self._stale[finding.topic] = None
        self._stale.update(dict.fromkeys(name for name, _ in changed.topics))
        hours = {topic: await self._last_hour(topic) for topic in list(self._stale)[:TOPICS_MAX]}
        for topic in hours:
            del self._stale[topic]
        return AuditNews(changed.version, hours, changed.findings)

    async def acknowledge(self, finding: str, who: str) -> None:
        """Note the name of the operator that acknowledged a finding. Raises: NotFoundError."""
        await self._store.acknowledge(finding, who, self._clock.wall_ms())

    def _hold(self, finding: Finding) -> None:
        holding = self._holding.setdefault(finding.topic, {})
        holding.pop(finding.id, None)
        if finding.grave and not finding.resolved_ms:
            holding[finding.id] = (finding.kind, finding.records)
        if not holding:
            del self._holding[finding.topic]

    async def _last_hour(self, topic: str) -> AuditedHour:
        now = self._clock.wall_ms() // MINUTE_MS
        total, committed = MinuteRow(), dict[int, int]()
        async for minute in self.minutes(topic, now - HOUR_MINUTES, now + 1):
            total.add(minute.row)
            committed[minute.minute] = committed.get(minute.minute, 0) + minute.row.side(QUEUE)["committed"]
        holding = list(self._holding.get(topic, {}).values())
        words = [total.word(name) for name in (QUEUE, *total.sides)]
        words += [kind.value for kind, _ in holding if kind in _COUNTED]
        lost, corrupt, doubled = (sum(each for kind, each in holding if kind is counted) for counted in _COUNTED)
        times = total.side(QUEUE).latency
        until = times.get("acked") or times.get("committed", {})  # without acks there are no further stages
        return AuditedHour(
            word=gravest(words),
            lost=lost,
            doubled=doubled,
            corrupt=corrupt,
            p99_ms=round(quantile_ms(until, 0.99), 1) if until else None,
            committed=committed,
        )
