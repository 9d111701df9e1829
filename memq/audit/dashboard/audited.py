"""The state of the live audit for the dashboard: verdicts, minutes, findings, acknowledgements."""

from __future__ import annotations

from memq.audit.dashboard.sources import AuditNews, PartitionMinute, TopicVerdict
from memq.audit.dashboard.view import ClientRow, FindingRow
from memq.audit.finding import EVIDENCE_MAX, Finding, Kind
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore
from memq.audit.live.view import AuditView, Heard
from memq.audit.minutes import MINUTE_MS, OK, QUEUE, WORDS, MinuteRow, quantile_ms
from memq.runtime.clock import Clock

VERDICT_MINUTES = 60  # that a topic's word is about; findings count as long as they hold
TOPICS_MAX = 100  # whose minutes are read for one answer; the others come with the next ones
RANGES_MAX = 100
_Held = tuple[str, int]  # kind and records of a finding that holds and is grave
_GRAVITY = {word: gravity for gravity, word in enumerate((*WORDS.values(), OK))}
_COUNTED = (Kind.LOST.value, Kind.CORRUPT.value, Kind.DOUBLED.value)


class LiveSource:
    """Reads what auditors stored, in whichever process they run. See `AuditSource`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._view = AuditView(database)
        self._store = AuditStore(database)
        self._clock = clock
        self._stale: dict[str, None] = {}  # topics whose verdict is to be made anew, the longest waiting first
        self._holding: dict[str, dict[str, _Held]] = {}  # by topic and id, as many as the state keeps

    async def news(self, since: int) -> AuditNews:
        """See `AuditSource.news`."""
        changed = await self._view.changes(since)
        for finding in changed.findings:
            self._hold(finding)
            self._stale[finding.topic] = None
        self._stale.update(dict.fromkeys(name for name, _ in changed.topics))
        verdicts = {}
        for topic in list(self._stale)[:TOPICS_MAX]:
            del self._stale[topic]
            verdicts[topic] = await self._verdict(topic)
        return AuditNews(changed.version, verdicts, [_row_of(finding) for finding in changed.findings])

    async def minutes(self, topic: str, first: int, end: int) -> list[PartitionMinute]:
        """See `AuditSource.minutes`."""
        return [
            PartitionMinute(minute.partition, minute.minute, name, minute.word(name), side.counts, side.latency)
            for minute in await self._view.minutes(topic, first, end)
            for name, side in minute.row.sides.items()
        ]

    async def finding(self, id_: str) -> Finding:
        """See `AuditSource.finding`."""
        return await self._view.finding(id_)

    async def findings(self) -> list[Finding]:
        """See `AuditSource.findings`."""
        return await self._view.findings(all_=True, limit=EVIDENCE_MAX)

    async def clients(self) -> list[ClientRow]:
        """See `AuditSource.clients`."""
        return [_client_of(heard) for heard in await self._view.clients()]

    async def acknowledge(self, finding: str, who: str) -> None:
        """See `AuditSource.acknowledge`."""
        await self._store.acknowledge(finding, who, self._clock.wall_ms())

    def _hold(self, finding: Finding) -> None:
        holding = self._holding.setdefault(finding.topic, {})
        holding.pop(finding.id, None)
        if finding.grave and not finding.resolved_ms:
            holding[finding.id] = (finding.kind.value, finding.records)
        if not holding:
            del self._holding[finding.topic]

    async def _verdict(self, topic: str) -> TopicVerdict:
        now = self._clock.wall_ms() // MINUTE_MS
        total, committed = MinuteRow(), dict[int, int]()
        for minute in await self._view.minutes(topic, now - VERDICT_MINUTES, now + 1):
            total.add(minute.row)
            committed[minute.minute] = committed.get(minute.minute, 0) + minute.row.side(QUEUE)["committed"]
        holding = list(self._holding.get(topic, {}).values())
        words = [total.word(name) for name in (QUEUE, *total.sides)]
        words += [kind for kind, _ in holding if kind in _COUNTED]
        counts = (sum(records for kind, records in holding if kind == counted) for counted in _COUNTED)
        lost, corrupt, doubled = counts
        times = total.side(QUEUE).latency
        until = times.get("acked") or times.get("committed", {})  # without acks nobody tells more
        return TopicVerdict(
            word=min(words, key=lambda word: _GRAVITY[word]),
            lost=lost,
            doubled=doubled,
            corrupt=corrupt,
            p99_ms=round(quantile_ms(until, 0.99), 1) if until else None,
            committed=committed,
        )


def _client_of(heard: Heard) -> ClientRow:
    client = heard.client
    return ClientRow(
        client=f"{heard.number:016x}",
        kind=client.kind,
        name=client.name,
        host=client.host,
        heard_ms=client.heard_ms,
        skew_ms=client.skew_ms,
        silent=client.silent,
        partitions=len(client.keys),
    )


def _row_of(finding: Finding) -> FindingRow:
    return FindingRow(
        id=finding.id,
        kind=finding.kind.value,
        stage=finding.stage,
        topic=finding.topic,
        partition=finding.partition,
        minute=finding.minute,
        producer=f"{finding.producer:016x}" if finding.producer else "",
        records=finding.records,
        cause=finding.cause,
        ranges=finding.ranges[:RANGES_MAX],
        group=finding.group,
        object=finding.object,
        block=finding.block,
        offset=finding.offset,
        grave=finding.grave,
        first_seen_ms=finding.first_seen_ms,
        resolved_ms=finding.resolved_ms,
        acknowledged_by=finding.acknowledged_by,
        acknowledged_ms=finding.acknowledged_ms,
    )
