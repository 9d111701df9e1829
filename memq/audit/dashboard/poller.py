"""Keeps the board current: asks brokers and auditor in rounds and stores their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memq.audit.dashboard.history import SPANS, first_minute, fold, sampled
from memq.audit.dashboard.lag_history import LagHistory
from memq.audit.dashboard.rates import TopicRates
from memq.audit.dashboard.sources import AuditSource, TopicVerdict
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import (
    SPARK_MINUTES,
    About,
    BrokerRow,
    Clients,
    GroupRow,
    PartitionRow,
    PlanRow,
    PlanView,
    TopicPage,
    TopicRow,
)
from memq.audit.live.finding import LiveFinding
from memq.audit.minutes import MINUTE_MS
from memq.client.admin.aio_admin import AsyncAdmin
from memq.errors import DeniedError, MemqError, NotFoundError
from memq.protocol.messages import TopicMetadata
from memq.runtime.logs import EventLog
from memq.runtime.network import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic

TOPICS_S = 2.0  # between rounds
CLUSTER_S = 2.0
AUDIT_S = 0.5
CLIENTS_S = 5.0
CLIENTS_SHOWN_MAX = 200
ENDS_MAX = 2_000  # partitions that a round asks for their ends, all at once; the next one goes on from there
TOTALS_MAX = 100  # partitions that have grown and are asked for their totals, by a few requests each, in a round
FINDINGS_MAX = 5_000  # on the board: those that hold, and the last ones that are over


@dataclass(slots=True)
class _Known:
    """Results of the last rounds, by topic."""

    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, list[GroupRow]] | None = None
    verdicts: dict[str, TopicVerdict] = field(default_factory=dict)


class Poller:
    """Asks `admin` and, where there is one, `audit`. `start` begins the rounds, `stop` ends them."""

    def __init__(
        self, admin: AsyncAdmin, audit: AuditSource | None, feed: Feed, runtime: Runtime, about: About
    ) -> None:
        self._admin = admin
        self._audit = audit
        self._feed = feed
        self._clock = runtime.clock
        self._about = about
        self._events = EventLog(runtime.clock)
        self._tasks = TaskOwner(lambda error: self._events.error("dashboard.died", repr(error), error), self._events)
        self._known = _Known()
        self._rates = TopicRates()
        self._lags = LagHistory()  # in records
        self._delays = LagHistory()  # in ms
        self._next_topic = ""
        self._ends: dict[str, tuple[str, tuple[int, ...]]] = {}  # id and ends of a topic when it was asked for totals
        self._audit_version = 0
        self._findings: dict[str, None] = {}
        self._troubles: dict[str, str] = {}

    def start(self) -> None:
        """Begin the rounds."""
        self._feed.board.put("about", "", self._about)
        rounds: list[tuple[str, float, Callable[[], Awaitable[None]]]] = [
            ("topics", TOPICS_S, self._look_at_topics),
            ("totals", TOPICS_S, self._look_at_totals),
            ("groups", TOPICS_S, self._look_at_groups),
            ("cluster", CLUSTER_S, self._look_at_cluster),
        ]
        if self._audit is not None:
            rounds += [("audit", AUDIT_S, self._look_at_audit), ("clients", CLIENTS_S, self._look_at_clients)]
        for name, pause_s, look in rounds:
            self._tasks.start(self._rounds(name, pause_s, look), f"dashboard-{name}")

    async def stop(self) -> None:
        """End the rounds."""
        await self._tasks.stop()

    # ---- for the pages -------------------------------------------------------------------------------

    async def topic(self, name: str) -> TopicMetadata:
        """Return a topic. Raises: NotFoundError, UnreachableError."""
        return await self._admin.topic(name)

    async def topic_page(self, name: str, span: int, group: str | None) -> TopicPage:
        """Return all of a topic over the last `span` minutes, and how `group` reads it; None: the first one.

        Raises: NotFoundError, UnreachableError.
        """
        found = await self.topic(name)
        topic = found.topic
        owners = {owner.partition: owner.broker for owner in found.owners}
        groups = tuple(self._known.groups.get(name, ())) if self._known.groups is not None else None
        if group is None:
            group = groups[0].group if groups else ""
        now_minute = self._clock.wall_ms() // MINUTE_MS
        first = first_minute(now_minute, span)
        partitions = [part.partition for part in topic.partitions]
        if self._audit is not None:
            rows = await self._audit.minutes(name, first, first + span)
            history = fold(rows, first, span, group, partitions)
        else:
            history = sampled(self._rates.minutes(name, first, span), first, span)
        return TopicPage(
            name=name,
            id=topic.id,
            settings=msgspec.to_builtins(topic.settings),
            partitions=tuple(
                PartitionRow(
                    partition=part.partition,
                    owner=owners.get(part.partition, ""),
                    records=self._records_of(name, part.read_partition),
                )
                for part in topic.partitions
            ),
            groups=groups,
            group=group,
            history=msgspec.structs.replace(
                history,
                lag=self._lags.columns(name, group, first, span, SPANS[span]),
                lag_ms=self._delays.columns(name, group, first, span, SPANS[span]),
            ),
        )

    async def finding(self, id_: str) -> LiveFinding:
        """Return a finding. Raises: NotFoundError."""
        if self._audit is None:
            raise _nobody_audits(id_)
        return await self._audit.finding(id_)

    async def findings(self) -> Sequence[LiveFinding]:
        """Return all findings that are kept; none where nobody audits."""
        return await self._audit.findings() if self._audit is not None else ()

    async def acknowledge(self, finding: str, who: str) -> None:
        """Note that a person has acknowledged a finding. Raises: DeniedError, NotFoundError."""
        if not self._about.acknowledge:
            raise DeniedError("findings can't be acknowledged here", hint="set dashboard_acknowledge")
        if self._audit is None:
            raise _nobody_audits(finding)
        await self._audit.acknowledge(finding, who)
        await self._look_at_audit()
        self._feed.announce()

    # ---- rounds --------------------------------------------------------------------------------------

    async def _rounds(self, name: str, pause_s: float, look: Callable[[], Awaitable[None]]) -> None:
        """Look again and again; what fails is shown and logged, and tried again."""
        outage = self._events.outage("dashboard.round-failed", "dashboard.round-back")
        while True:
            try:
                await look()
                self._troubles.pop(name, None)
                outage.passed()
            except MemqError as error:
                self._troubles[name] = f"{name}: {error}"
                outage.failed(f"{name}: {error}")
            trouble = "; ".join(self._troubles.values())
            about = msgspec.structs.replace(self._about, cluster=self._admin.cluster, trouble=trouble)
            self._feed.board.put("about", "", about)
            self._feed.announce()
            await asyncio.sleep(pause_s)

    async def _look_at_topics(self) -> None:
        """Ask for all topics, and show each with what the other rounds know of it."""
        topics = {topic.name: topic for topic in await self._admin.topics()}
        self._known.topics = topics
        self._rates.keep(dict.fromkeys(topics))
        self._ends = {name: known for name, known in self._ends.items() if name in topics}
        self._put_topics()

    async def _look_at_groups(self) -> None:
        self._known.groups = found = await self._groups()
        minute = self._clock.wall_ms() // MINUTE_MS
        rows = [row for each in found.values() for row in each]
        for lags in (self._lags, self._delays):
            lags.keep({(row.topic, row.group): None for row in rows})
        for row in rows:
            self._lags.take(row.topic, row.group, minute, row.lag_records)
            self._delays.take(row.topic, row.group, minute, round(row.lag_seconds * 1000))
        self._feed.board.put_all("group", {f"{row.topic}\n{row.group}": row for row in rows})

    async def _look_at_totals(self) -> None:
        """Ask where topics end, and those that have grown for their totals, as many of both as one round may."""
        topics, following = self._turn()
        try:
            ends = await self._admin.ends(topics)
        except NotFoundError:
            return  # one was deleted, which the next look at all topics shows
        asked = 0
        for topic in topics:
            now = (topic.id, ends[topic.name])
            if self._ends.get(topic.name) == now:
                self._rates.stand(topic.name, int(self._clock.monotonic() * 1000), self._clock.wall_ms())
                continue
            self._next_topic = topic.name
            if asked and asked + topic.read_partitions > TOTALS_MAX:
                return
            asked += topic.read_partitions
            try:
                totals = await self._admin.end_totals(topic)
            except NotFoundError:
                continue  # deleted meanwhile
            self._rates.take(topic.name, totals, int(self._clock.monotonic() * 1000), self._clock.wall_ms())
            self._ends[topic.name] = now
        self._next_topic = following

    def _turn(self) -> tuple[list[Topic], str]:
        """Return the topics of the next round and the name that follows them."""
        topics = list(self._known.topics.values())
        first = sum(topic.name < self._next_topic for topic in topics)
        found: list[Topic] = []
        partitions = 0
        for topic in (*topics[first:], *topics[:first]):
            partitions += topic.read_partitions
            if found and partitions > ENDS_MAX:
                return found, topic.name
            found.append(topic)
        return found, ""

    async def _groups(self) -> dict[str, list[GroupRow]]:
        """Return how far groups are, by topic; the one that is furthest behind first."""
        found: dict[str, list[GroupRow]] = {}
        for name in await self._admin.groups():
            try:
                group = await self._admin.group(name)
            except NotFoundError:
                continue
            lags: dict[str, tuple[int, int, float]] = {}
            for part in group.partitions:
                records, size, seconds = lags.get(part.place.topic, (0, 0, 0.0))
                lag = part.lag
                lags[part.place.topic] = (records + lag.records, size + lag.bytes, max(seconds, round(lag.seconds, 1)))
            for topic, (records, size, seconds) in lags.items():
                row = GroupRow(
                    group=name,
                    topic=topic,
                    members=len(group.members),
                    lag_records=records,
                    lag_bytes=size,
                    lag_seconds=seconds,
                )
                found.setdefault(topic, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: (-row.lag_records, row.group))
        return found

    def _put_topics(self) -> None:
        minute = self._clock.wall_ms() // MINUTE_MS
        rows = {name: self._topic_row(topic, minute) for name, topic in self._known.topics.items()}
        self._feed.board.put_all("topic", rows)

    def _topic_row(self, topic: Topic, minute: int) -> TopicRow:
        name = topic.name
        groups = self._known.groups.get(name) if self._known.groups is not None else None
        verdict = self._known.verdicts.get(name)
        rate, size = self._rates.records_s(name), self._rates.bytes_s(name)
        return TopicRow(
            name=name,
            partitions=len(topic.partitions),
            records_s=round(rate, 1) if rate is not None else None,
            bytes_s=round(size) if size is not None else None,
            lag_records=max(row.lag_records for row in groups) if groups else None,
            lag_seconds=max(row.lag_seconds for row in groups) if groups else None,
            lost=verdict.lost if verdict else None,
            doubled=verdict.doubled if verdict else None,
            corrupt=verdict.corrupt if verdict else None,
            word=verdict.word if verdict else None,
            p99_ms=verdict.p99_ms if verdict else None,
            spark=self._spark(name, minute),
        )

    def _spark(self, name: str, minute: int) -> tuple[int | None, ...]:
        """Return a topic's last hour: the poller's own samples, and before them the minutes of the audit."""
        seen = self._rates.spark(name, minute)
        verdict = self._known.verdicts.get(name)
        if verdict is None or not verdict.committed or (seen and None not in seen):
            return seen
        first, begun = minute - SPARK_MINUTES + 1, min(verdict.committed)
        audited = [verdict.committed.get(each, 0) if each >= begun else None for each in range(first, minute + 1)]
        pairs = zip(seen or [None] * SPARK_MINUTES, audited, strict=True)
        return tuple(looked if looked is not None else said for looked, said in pairs)

    async def _look_at_cluster(self) -> None:
        brokers = {each.broker: each for each in await self._admin.brokers()}
        loads = {name: await self._load(name) for name in brokers}
        rows = {
            name: BrokerRow(
                broker=name,
                address=each.address,
                zone=each.zone,
                governs=each.governs,
                draining=each.draining,
                partitions=each.partitions,
                bytes_s=each.bytes_s,
                capacity_bytes_s=each.capacity_bytes_s or None,
                **loads[name],
            )
            for name, each in brokers.items()
        }
        self._feed.board.put_all("broker", rows)
        plan = await self._admin.plan()
        changes = tuple(
            PlanRow(
                topic=each.topic, partition=each.partition, before=each.before, after=each.after, reason=each.reason
            )
            for each in plan.changes
        )
        self._feed.board.put("plan", "", PlanView(changes=changes, notes=plan.notes))

    async def _load(self, broker: str) -> dict[str, Any]:
        """Return how full a broker is; nothing of one that does not say, as an older one."""
        try:
            load = await self._admin.load(broker)
        except MemqError:
            return {}
        return {
            "memory_bytes": load.memory_bytes,
            "memory_bytes_max": load.memory_bytes_max,
            "ring_batches": load.ring_batches,
            "uploads": load.uploads,
            "breakers": tuple(load.open_breakers),
        }

    async def _look_at_audit(self) -> None:
        assert self._audit is not None, "rounds of the audit are started only where there is one"
        news = await self._audit.news(self._audit_version)
        self._audit_version = news.version
        self._known.verdicts.update(news.topics)
        for row in news.findings:
            self._findings.pop(row.id, None)
            self._findings[row.id] = None
            self._feed.board.put("finding", row.id, row)
        while len(self._findings) > FINDINGS_MAX:
            gone = next(iter(self._findings))
            del self._findings[gone]
            self._feed.board.put("finding", gone, None)
        minute = self._clock.wall_ms() // MINUTE_MS
        for gone in [name for name in self._known.verdicts if self._known.topics and name not in self._known.topics]:
            del self._known.verdicts[gone]
        for name in news.topics:
            if name in self._known.topics:
                self._feed.board.put("topic", name, self._topic_row(self._known.topics[name], minute))

    async def _look_at_clients(self) -> None:
        assert self._audit is not None, "rounds of the audit are started only where there is one"
        found = sorted(await self._audit.clients(), key=lambda row: (not row.silent, row.kind, row.name, row.client))
        silent = sum(row.silent for row in found)
        shown = tuple(found[:CLIENTS_SHOWN_MAX])
        self._feed.board.put("clients", "", Clients(total=len(found), silent=silent, shown=shown))

    def _records_of(self, topic: str, read_partition: int) -> int | None:
        return self._rates.total(topic, read_partition)


def _nobody_audits(finding: str) -> NotFoundError:
    return NotFoundError(f"there is no finding '{finding[:60]}': nobody audits here")
