"""Keeps the board current: asks brokers and auditor in rounds and stores their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from memq.audit.dashboard.audited import AuditedHour, LiveSource
from memq.audit.dashboard.history import SPANS, LagHistory, MinuteColumns, TopicRates, first_minute, sampled
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import (
    SPARK_MINUTES,
    About,
    BrokerRow,
    Clients,
    DeadLetterRow,
    GroupRow,
    PartitionRow,
    TopicPage,
    TopicRow,
)
from memq.audit.dashboard.waiting import delayed_topics, open_transactions, queues
from memq.audit.finding import EVIDENCE_MAX, Finding
from memq.audit.live.view import doubted
from memq.audit.minutes import MINUTE_MS
from memq.client.admin import AsyncAdmin
from memq.client.group_admin import GroupDescription, PartitionProgress
from memq.client.listener.retry_records import LETTERS_SUFFIX
from memq.client.log_answers import LogAnswers
from memq.errors import DeniedError, MemqError, NotFoundError
from memq.protocol.messages import TopicMetadata
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic, Totals

TOPICS_S = 2.0  # between rounds
CLUSTER_S = 2.0
QUEUES_S = 5.0  # there may be 100,000
AUDIT_S = 0.5
CLIENTS_S = 5.0
CLIENTS_SHOWN_MAX = 200
ENDS_MAX = 2_000  # partitions that a round asks for their ends, all at once; the next one continues there
TOTALS_MAX = 100  # partitions that have grown and are asked for their totals, by a few requests each, in a round
GROUPS_AT_ONCE_MAX = 8  # that are asked for their lag at the same time
TEXTS_MAX = 3  # reasons in one line
Number = TypeVar("Number", int, float)
RANGES_MAX = 100  # of a finding on the board
FINDINGS_MAX = 5_000  # on the board: those that hold, and the last ones that are over


@dataclass(slots=True)
class _LastResults:
    """Results of the last rounds, by topic."""

    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, list[GroupRow]] | None = None
    hours: dict[str, AuditedHour] = field(default_factory=dict)
    behind: str = ""  # why the results of the audit are old


class Poller:
    """Asks `admin` and, where there is one, `audit`. `start` begins the rounds, `stop` ends them."""

    def __init__(self, admin: AsyncAdmin, audit: LiveSource | None, feed: Feed, runtime: Runtime, about: About) -> None:
        self._admin = admin
        self._audit = audit
        self._feed = feed
        self._clock = runtime.clock
        self._about = about
        self._events = EventLog(runtime.clock)
        self._tasks = TaskOwner(lambda error: self._events.error("dashboard.died", repr(error), error), self._events)
        self._known = _LastResults()
        self._rates = TopicRates()
        self._lags = LagHistory()  # in records
        self._delays = LagHistory()  # in ms
        self._next_topic = ""
        self._ends: dict[str, tuple[str, dict[int, int]]] = {}  # id and ends of a topic when it was asked for totals
        self._failed: dict[str, dict[int, str]] = {}  # why logs of a topic did not answer the last time, by number
        self._audit_version = 0
        self._one_audit_round = asyncio.Lock()  # an acknowledgement asks for news, too
        self._findings: dict[str, None] = {}  # on the board, that hold; the longest unchanged first
        self._over: dict[str, None] = {}  # and those that are over
        self._troubles: dict[str, str] = {}

    def start(self) -> None:
        """Begin the rounds."""
        self._feed.board.put("about", "", self._about)
        rounds: list[tuple[str, float, Callable[[], Awaitable[str | None]]]] = [
            ("topics", TOPICS_S, self.poll_topics),
            ("totals", TOPICS_S, self.poll_totals),
            ("groups", TOPICS_S, self.poll_groups),
            ("cluster", CLUSTER_S, self.poll_cluster),
            ("delayed", CLUSTER_S, self.poll_delayed),
            ("transactions", CLUSTER_S, self.poll_transactions),
            ("queues", QUEUES_S, self.poll_queues),
        ]
        if self._audit is not None:
            rounds += [("audit", AUDIT_S, self.poll_audit), ("clients", CLIENTS_S, self.poll_clients)]
            rounds.append(("progress", CLIENTS_S, self.poll_progress))
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
            columns = MinuteColumns(first, span, group)
            async for minute in self._audit.minutes(name, first, first + span):
                columns.take(minute)
            history = columns.history(partitions)
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
                    records=self._rates.total(name, part.read_partition),
                    error=self._failed.get(name, {}).get(part.read_partition, ""),
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

    async def finding(self, id_: str) -> Finding:
        """Return a finding. Raises: NotFoundError."""
        if self._audit is None:
            raise _nobody_audits(id_)
        return await self._audit.finding(id_)

    async def findings(self) -> Sequence[Finding]:
        """Return all stored findings; none without an auditor."""
        return await self._audit.findings(all_=True, limit=EVIDENCE_MAX) if self._audit is not None else ()

    async def acknowledge(self, finding: str, who: str) -> None:
        """Note that a person has acknowledged a finding. Raises: DeniedError, NotFoundError."""
        if not self._about.acknowledge:
            raise DeniedError("findings can't be acknowledged here", hint="set dashboard_acknowledge")
        if self._audit is None:
            raise _nobody_audits(finding)
        await self._audit.acknowledge(finding, who)
        await self.poll_audit()
        self._feed.announce()

    # ---- rounds --------------------------------------------------------------------------------------

    async def _rounds(self, name: str, pause_s: float, look: Callable[[], Awaitable[str | None]]) -> None:
        """Look again and again. The board and the log show what a round could not learn, or why it failed."""
        outage = self._events.outage("dashboard.round-failed", "dashboard.round-back")
        while True:
            try:
                trouble = await look()
            except MemqError as error:
                trouble = str(error)
            if trouble:
                self._troubles[name] = f"{name}: {trouble}"
                outage.failed(self._troubles[name])
            else:
                self._troubles.pop(name, None)
                outage.passed()
            troubles = "; ".join(self._troubles.values())
            about = msgspec.structs.replace(self._about, cluster=self._admin.cluster, trouble=troubles)
            self._feed.board.put("about", "", about)
            self._feed.announce()
            await asyncio.sleep(pause_s)

    async def poll_topics(self) -> None:
        """Ask for all topics, and show each with the results of the other rounds."""
        topics = {topic.name: topic for topic in await self._admin.topics()}
        self._known.topics = topics
        self._rates.keep(dict.fromkeys(topics))
        self._ends = {name: known for name, known in self._ends.items() if name in topics}
        self._failed = {name: known for name, known in self._failed.items() if name in topics}
        self._put_topics()
        self._put_letters()

    async def poll_groups(self) -> str:
        """Ask for the progress of all groups. Return the unknown parts."""
        self._known.groups = found = await self._groups()
        minute = self._clock.wall_ms() // MINUTE_MS
        rows = [row for each in found.values() for row in each]
        for lags in (self._lags, self._delays):
            lags.keep({(row.topic, row.group): None for row in rows})
        for row in rows:
            if row.lag_records is not None and row.lag_seconds is not None:
                self._lags.take(row.topic, row.group, minute, row.lag_records)
                self._delays.take(row.topic, row.group, minute, round(row.lag_seconds * 1000))
        self._feed.board.put_all("group", {f"{row.topic}\n{row.group}": row for row in rows})
        self._put_letters()
        return _counted([f"lag of group '{row.group}' in '{row.topic}': {row.error}" for row in rows if row.error])

    async def poll_totals(self) -> str:
        """Ask for the ends of topics, and for the totals of those that have grown, both bounded in one round.

        Return the logs that did not answer.
        """
        topics, following = self._turn()
        try:
            ends = await self._admin.ends(topics)
        except NotFoundError:
            return ""  # one was deleted, which the next read of all topics shows
        except MemqError as error:  # of all logs: what was known of them is old now
            ends = {each.name: LogAnswers(dict.fromkeys(range(each.read_partitions), error)) for each in topics}
        asked = 0
        for topic in topics:
            known = ends[topic.name]
            now = (topic.id, dict(known))
            if self._ends.get(topic.name) == now and not known.unknown:
                self._rates.repeat_last(topic.name, int(self._clock.monotonic() * 1000), self._clock.wall_ms())
                continue
            self._next_topic = topic.name
            if asked and asked + len(known) > TOTALS_MAX:
                return self._failing_logs()
            asked += len(known)
            self._ends.pop(topic.name, None)  # a log that answers again is asked, also when nothing was added
            if await self._take_totals(topic, known):
                self._ends[topic.name] = now
        self._next_topic = following
        return self._failing_logs()

    async def _take_totals(self, topic: Topic, ends: LogAnswers[int, int]) -> bool:
        """Ask the logs of a topic that have an end for their totals; return whether all logs answered."""
        failed: dict[int, MemqError] = dict(ends.unknown)
        totals: Mapping[int, Totals] = {}
        if ends:
            try:
                totals = found = await self._admin.end_totals(topic, ends)
                failed |= found.unknown
            except NotFoundError:
                return False  # deleted meanwhile
            except MemqError as error:
                failed |= dict.fromkeys(ends, error)
        now_ms = int(self._clock.monotonic() * 1000)
        self._rates.take(topic.name, topic.id, totals, now_ms, self._clock.wall_ms(), frozenset(failed))
        self._failed[topic.name] = {number: str(error) for number, error in failed.items()}
        return not failed

    def _failing_logs(self) -> str:
        logs = [f"'{name}'/{number}: {why}" for name, each in self._failed.items() for number, why in each.items()]
        return _counted(logs)

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
        """Return how far groups are, by topic: unknown lags first, then the one that is furthest behind."""
        found: dict[str, list[GroupRow]] = {}
        turns = asyncio.Semaphore(GROUPS_AT_ONCE_MAX)
        try:
            names = await self._admin.groups(proven=False)
        except MemqError as error:
            if not self._known.groups:
                raise
            last = {row.group: None for rows in self._known.groups.values() for row in rows}
            answers = [self._silent_rows(name, error) for name in last]
        else:
            answers = await asyncio.gather(*(self._group_rows(turns, name) for name in names))
        for rows in answers:
            for row in rows:
                found.setdefault(row.topic, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: (row.lag_records is not None, -(row.lag_records or 0), row.group))
        return found

    async def _group_rows(self, turns: asyncio.Semaphore, name: str) -> list[GroupRow]:
        """Return a group by topic. When it does not answer, its last rows without lag, and the reason."""
        async with turns:
            try:
                return _rows_of(await self._admin.group(name, proven=False))
            except NotFoundError:
                return []
            except MemqError as error:
                return self._silent_rows(name, error)

    def _silent_rows(self, name: str, error: MemqError) -> list[GroupRow]:
        """Return the last rows of a group, without lag, and with the reason."""
        return [
            msgspec.structs.replace(row, lag_records=None, lag_bytes=None, lag_seconds=None, error=str(error))
            for rows in (self._known.groups or {}).values()
            for row in rows
            if row.group == name
        ]

    def _put_letters(self) -> None:
        """Show the waiting dead letters, by the rule of `waiting_letters`.

        It costs no requests, because the rounds of topics, groups and totals have all answers.
        """
        rows: dict[str, DeadLetterRow] = {}
        for name, topic in self._known.topics.items() if self._known.groups is not None else ():
            if not name.endswith(LETTERS_SUFFIX):
                continue
            group = name.removesuffix(LETTERS_SUFFIX)
            reader = next((row for row in (self._known.groups or {}).get(name, ()) if row.group == name), None)
            if reader is not None:
                rows[group] = DeadLetterRow(group=group, waiting=reader.lag_records, error=reader.error)
                continue
            stored = [self._rates.total(name, number) for number in range(topic.read_partitions)]
            known = [each for each in stored if each is not None]
            failed = [f"partition {number}: {why}" for number, why in self._failed.get(name, {}).items()]
            waiting = sum(known) if len(known) == len(stored) and not failed else None
            rows[group] = DeadLetterRow(group=group, waiting=waiting, error=_counted(failed))
        self._feed.board.put_all("letters", rows)

    def _put_topics(self) -> None:
        minute = self._clock.wall_ms() // MINUTE_MS
        rows = {name: self._topic_row(topic, minute) for name, topic in self._known.topics.items()}
        self._feed.board.put_all("topic", rows)

    def _topic_row(self, topic: Topic, minute: int) -> TopicRow:
        name = topic.name
        groups = self._known.groups.get(name) if self._known.groups is not None else None
        hour = self._known.hours.get(name)
        rate, size = self._rates.records_s(name), self._rates.bytes_s(name)
        return TopicRow(
            name=name,
            partitions=len(topic.partitions),
            records_s=round(rate, 1) if rate is not None else None,
            bytes_s=round(size) if size is not None else None,
            lag_records=_most([row.lag_records for row in groups or ()]),
            lag_seconds=_most([row.lag_seconds for row in groups or ()]),
            lost=hour.lost if hour else None,
            doubled=hour.doubled if hour else None,
            corrupt=hour.corrupt if hour else None,
            word=doubted(hour.word, self._known.behind) if hour else None,
            p99_ms=hour.p99_ms if hour else None,
            spark=self._spark(name, minute),
        )

    def _spark(self, name: str, minute: int) -> tuple[int | None, ...]:
        """Return a topic's last hour: the poller's own samples, and before them the minutes of the audit."""
        seen = self._rates.spark(name, minute)
        hour = self._known.hours.get(name)
        if hour is None or not hour.committed or (seen and None not in seen):
            return seen
        first, begun = minute - SPARK_MINUTES + 1, min(hour.committed)
        audited = [hour.committed.get(each, 0) if each >= begun else None for each in range(first, minute + 1)]
        pairs = zip(seen or [None] * SPARK_MINUTES, audited, strict=True)
        return tuple(own if own is not None else minute for own, minute in pairs)

    async def poll_cluster(self) -> None:
        """Ask for the brokers and their load, and show each."""
        brokers = {each.broker: each for each in await self._admin.brokers()}
        loads = {name: await self._load(name) for name in brokers}
        rows = {
            name: BrokerRow(
                **msgspec.structs.asdict(each) | loads[name] | {"capacity_bytes_s": each.capacity_bytes_s or None}
            )
            for name, each in brokers.items()
        }
        self._feed.board.put_all("broker", rows)
        self._feed.board.put("plan", "", await self._admin.plan())

    async def poll_delayed(self) -> None:
        """Ask how many delayed records wait, and show them by topic."""
        self._feed.board.put("delayed", "", delayed_topics(await self._admin.delayed_topics(proven=False)))

    async def poll_transactions(self) -> None:
        """Ask for the open transactions, and show them."""
        self._feed.board.put("transactions", "", open_transactions(await self._admin.transactions(proven=False)))

    async def poll_queues(self) -> None:
        """Ask for the queues and their items, and show them."""
        self._feed.board.put("queues", "", queues(await self._admin.queues(proven=False)))

    async def _load(self, broker: str) -> dict[str, Any]:
        """Return how full a broker is; nothing of one that does not say, as an older one."""
        try:
            load = await self._admin.load(broker)
        except MemqError:
            return {}
        known = msgspec.structs.asdict(load)
        return known | {"breakers": tuple(known.pop("open_breakers"))}

    async def poll_audit(self) -> None:
        """Ask the audit for changes since the last round, and show them."""
        async with self._one_audit_round:
            await self._take_news()

    async def _take_news(self) -> None:
        assert self._audit is not None, "rounds of the audit are started only where there is one"
        news = await self._audit.news(self._audit_version)
        self._audit_version = news.version
        self._known.hours.update(news.topics)
        for finding in news.findings:
            self._findings.pop(finding.id, None)
            self._over.pop(finding.id, None)
            (self._over if finding.resolved_ms else self._findings)[finding.id] = None
            self._feed.board.put("finding", finding.id, shown(finding))
        while len(self._findings) + len(self._over) > FINDINGS_MAX:
            kept = self._over or self._findings
            gone = next(iter(kept))
            del kept[gone]
            self._feed.board.put("finding", gone, None)
        minute = self._clock.wall_ms() // MINUTE_MS
        for gone in [name for name in self._known.hours if self._known.topics and name not in self._known.topics]:
            del self._known.hours[gone]
        for name in news.topics:
            if name in self._known.topics:
                self._feed.board.put("topic", name, self._topic_row(self._known.topics[name], minute))

    async def poll_progress(self) -> str:
        """Ask whether auditors keep up, and return why not. Verdicts that were ok are then shown as unknown."""
        assert self._audit is not None, "rounds of the audit are started only where there is one"
        self._known.behind = await self._audit.behind(self._clock.wall_ms())
        return self._known.behind

    async def poll_clients(self) -> None:
        """Ask the audit for the clients that report, and show each."""
        assert self._audit is not None, "rounds of the audit are started only where there is one"
        reporting = [each.to_json() for each in await self._audit.clients()]
        reporting.sort(key=lambda row: (not row["silent"], row["kind"], row["name"], row["client"]))
        silent = sum(row["silent"] for row in reporting)
        clients = Clients(total=len(reporting), silent=silent, shown=tuple(reporting[:CLIENTS_SHOWN_MAX]))
        self._feed.board.put("clients", "", clients)


def shown(finding: Finding) -> dict[str, Any]:
    """Return a finding as the pages have it: with `grave`, and a producer only where one is known."""
    known = finding.to_json()
    producer = known["producer"] if finding.producer else ""
    return known | {"producer": producer, "ranges": known["ranges"][:RANGES_MAX], "grave": finding.grave}


def _rows_of(group: GroupDescription) -> list[GroupRow]:
    """Return a group's lag by topic; None where the log of a partition did not answer."""
    parts: dict[str, list[PartitionProgress]] = {}
    for part in group.partitions:
        parts.setdefault(part.topic_partition.topic, []).append(part)
    return [_row_of(group, topic, each) for topic, each in parts.items()]


def _row_of(group: GroupDescription, topic: str, parts: Sequence[PartitionProgress]) -> GroupRow:
    errors = [f"partition {part.topic_partition.partition}: {part.error}" for part in parts if part.error is not None]
    lags = [part.lag for part in parts] if not errors else None
    return GroupRow(
        group=group.group,
        topic=topic,
        members=len(group.members),
        lag_records=sum(lag.records for lag in lags) if lags is not None else None,
        lag_bytes=sum(lag.bytes for lag in lags) if lags is not None else None,
        lag_seconds=round(max(lag.seconds for lag in lags), 1) if lags is not None else None,
        error=_counted(errors),
    )


def _most(values: Sequence[Number | None]) -> Number | None:
    """Return the greatest value, None when there is none or one is unknown."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _counted(texts: Sequence[str]) -> str:
    """Return the first texts and the number of the others."""
    more = f"; and {len(texts) - TEXTS_MAX} more" if len(texts) > TEXTS_MAX else ""
    return "; ".join(texts[:TEXTS_MAX]) + more


def _nobody_audits(finding: str) -> NotFoundError:
    return NotFoundError(f"finding '{finding[:60]}' does not exist: no auditor runs here")
