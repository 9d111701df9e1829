"""The live audit at work: reads reports, then pointers up to later ends, judges, stores. A shell.

Rounds run one after the other, so each judgement rests on a queue that was read after all known reports. A failed
round is repeated with everything that was read. Results are stored before anything else is read. So a crash costs only
time: the next auditor continues from the stored state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from memq.audit.held import AskHeld
from memq.audit.holders import Holders
from memq.audit.live.audited_topics import AuditedTopics, find_topic
from memq.audit.live.group_reports import GroupReports, Page
from memq.audit.live.log_follower import LogFollower
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.questions.damage_names import DamageNames
from memq.audit.live.questions.end_follower import AskEnd, EndFollower, OwnerEnds, ProvedEnd
from memq.audit.live.questions.holder_follower import HolderFollower
from memq.audit.live.report_partition import SILENT_MINUTES_MAX, ReportPartitionAudit
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore, PartitionChanges, Step
from memq.audit.minutes import MINUTE_MS
from memq.client.admin import AsyncAdmin
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.errors import FencedError, MemqError, NotFoundError, RetryableError
from memq.format.report import AUDIT_TOPIC, Report, ReportedDamage, ReportPart, decode_report, home_of
from memq.notification.remote import RemoteQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.waits import utc_text
from memq.topic import AUDIT_GROUP, CLOCK_ERROR_MS, PartitionKey, Position, ReadPartition

INTERVAL_S = 1.0  # a round at least so often
PAGES_MAX = 200  # of reports in one round
IDLE_ROUNDS = 5  # a write partition without reports is read once in so many rounds
TOPICS_EVERY_ROUNDS = 10
PRUNE_EVERY_ROUNDS = 600
SICK_HOME_ROUNDS = 30  # between two questions for the end of a home whose log does not answer
NOTE_S = 10.0  # between two notes of up to when reports were read
RETRY_S = 5.0  # until an auditor begins again, of which `_memq_audit` is gone
ASK_AGAIN_ROUNDS = 10  # between two questions to brokers about records that one of them holds, or may hold


@dataclass(slots=True)
class _AuditedReports:
    audit: ReportPartitionAudit
    position: str
    partitions: dict[PartitionKey, PartitionAudit] = field(default_factory=dict)
    taken: Position | None = None  # of the last report that was taken, perhaps in the middle of a page
    saved: str = ""
    unsaved: Step | None = None
    asked_from_round: int = 0  # from which round to ask whether all its reports were read
    heard_ms: int = 0  # Unix ms up to which all of its reports were read
    asked: tuple[int, int] | None = None  # an end that is not read yet: its offset, and when it was asked for (Unix ms)


class LiveAudit:
    """One auditor. `run` works until it is cancelled; one `LiveAudit` runs once."""

    def __init__(
        self,
        reports: GroupReports,
        topics: AuditedTopics,
        queue: RemoteQueue,
        read: ReadRange,
        ask_held: AskHeld,
        ask_end: AskEnd,
        store: AuditStore,
        runtime: Runtime,
        keep_ms: int,
    ) -> None:
        self._reports = reports
        self._topics = topics
        self._store = store
        self._names = DamageNames(queue, read)
        self._clock = runtime.clock
        self._keep_ms = keep_ms
        self._owner = f"{runtime.random.getrandbits(64):016x}"
        self._events = EventLog(runtime.clock)
        self._logs = LogFollower(queue, read, self._events, runtime.clock)
        self._holders = HolderFollower(ask_held, self._events)
        self._ends = EndFollower(ask_end, self._events)
        self._outage = self._events.outage("audit.stopped", "audit.goes-on")
        self._next_note_s = 0.0
        self._homes: dict[int, _AuditedReports] = {}
        self._page: Page | None = None  # the last page, until it is processed; after a failure it is processed again
        self._touched: dict[PartitionKey, None] = {}  # partitions with new reports that are not judged yet
        self._round = 0
        self._steps = 0

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Audit until cancelled; `ready` is called when the first round is done.

        Raises: what does not pass by itself, as a database that is damaged; NotFoundError when `_memq_audit` is gone,
        or was created again: another `LiveAudit` continues with it.
        """
        logged = False
        while True:
            try:
                await self.step()
                self._outage.passed()
                if not logged:
                    logged = True
                    ready()
            except FencedError as error:  # this member was away: it begins again with what is stored
                self._homes.clear()
                self._outage.failed(str(error))
            except RetryableError as error:
                self._outage.failed(str(error))
                await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """End running requests."""
        await self._holders.close()
        await self._ends.close()
        await self._logs.close()

    async def step(self) -> None:
        """Do one round."""
        for home in self._homes.values():
            await self._save(home)
        if self._round % TOPICS_EVERY_ROUNDS == 0:
            await self._refresh_topics()
        await self._read_reports()
        audits = {key: audit for home in self._homes.values() for key, audit in home.partitions.items()}
        answered = self._holders.take_answers(audits, self._clock.wall_ms())
        ends = self._ends.take_answers()
        await self._follow(self._touched, answered, ends)
        now_ms = self._clock.wall_ms()
        for number, home in self._homes.items():
            if await self._has_caught_up(number, home):
                home.audit.settle(home.heard_ms)
            self._judge(home, ends, now_ms)
            step = self._step_of(number, home)
            if step.changes or home.position != home.saved:
                home.unsaved = step
                await self._save(home)
        await self._note_heard()
        self._holders.ask(audits, again=self._round % ASK_AGAIN_ROUNDS == 0)
        self._ends.ask(audits)
        if self._touched:
            await self._reports.commit()
        self._touched = {}
        if self._round % PRUNE_EVERY_ROUNDS == 0 and self._homes:
            await self._store.prune(now_ms - self._keep_ms)
        self._round += 1

    def _judge(self, home: _AuditedReports, ends: Mapping[ReadPartition, ProvedEnd], now_ms: int) -> None:
        for key, audit in home.partitions.items():
            log = _log_of(audit)
            if self._logs.lacks(log):
                audit.hold(now_ms)
                continue
            if log in ends:
                audit.ends.confirm(ends[log].missing.get(key, {}))
            audit.settle(now_ms)

    # ---- reports -------------------------------------------------------------------------------------

    async def _read_reports(self) -> None:
        """Process the available reports, and note their partitions."""
        for number in range(PAGES_MAX):
            page = self._page = self._page or await self._reports.poll(INTERVAL_S if number == 0 else 0.01)
            await self._take_homes()
            if page is None:
                return
            home = self._homes.get(page.home)
            if home is not None and self._page is not None:
                await self._take_page(home, page)
            self._page = None
            self._names.forget()

    async def _has_caught_up(self, number: int, home: _AuditedReports) -> bool:
        """Note the time up to which all reports of a home were read; return whether it has grown.

        A moment without a report proves nothing, because the next one may be on its way. The end of a busy log grows
        while it is read, so a requested end is kept until reading reaches it. A log that does not answer is asked again
        some rounds later.
        """
        if self._round < home.asked_from_round:
            return False
        now_ms = self._clock.wall_ms()
        try:
            end = await self._reports.end(number)
            kept = home.asked if home.asked is not None and home.asked[0] <= end else (end, now_ms)
            for asked in dict.fromkeys(((end, now_ms), kept)):
                if await self._reports.has_returned(number, asked[0]):
                    home.heard_ms = asked[1]
                    home.asked = None if asked[0] == end else (end, now_ms)
                    return True
        except RetryableError:
            home.asked_from_round = self._round + SICK_HOME_ROUNDS
            return False
        home.asked = kept
        return False

    async def _take_homes(self) -> None:
        """Drop homes that another auditor has now, and continue new ones at their stored positions."""
        assigned = self._reports.assigned()
        for number in [each for each in self._homes if each not in assigned]:
            del self._homes[number]
        new = [number for number in assigned if number not in self._homes]
        begun: dict[int, int] = {}
        for number in new:
            since_ms = await self._take_home(number)
            if since_ms is not None:
                begun[number] = since_ms
        if new:
            await self._load_partitions()
        if begun:
            self._begin_again(begun)

    async def _take_home(self, number: int) -> int | None:
        """Continue a home at its stored position, or at its beginning if its log has no such position.

        In the second case, return the time up to which its reports were read (Unix ms).
        """
        position, clients = await self._store.take_home(number, self._owner)
        topic_id, heard_ms = await self._store.heard(number)
        remade = topic_id not in ("", self._reports.topic_id)
        again = not await self._reports.seek(number, "" if remade else position) or remade
        if self._page is not None and self._page.home == number:
            self._page = None  # reading continues at the stored position, not with this page
        since_ms = heard_ms or max((client.heard_ms for client in clients.values()), default=0)
        partitions: dict[PartitionKey, PartitionAudit] = {}
        taken_ms = since_ms + CLOCK_ERROR_MS if again and not remade else -1  # a new topic has only new reports
        audit = ReportPartitionAudit(partitions.get, clients, taken_ms)
        self._homes[number] = _AuditedReports(audit, "" if again else position, partitions, saved=position)
        return since_ms if again else None

    def _begin_again(self, begun: Mapping[int, int]) -> None:
        """Mark the minutes since the last reading as unknown: reports that no auditor has read may be lost."""
        now_ms = self._clock.wall_ms()
        for number, since_ms in begun.items():
            first, last = since_ms // MINUTE_MS, now_ms // MINUTE_MS
            for audit in self._homes[number].partitions.values():
                audit.silence(None, range(max(first, last - SILENT_MINUTES_MAX), last + 1), 1)
                audit.held.distrust(last)
        self._events.warning(
            "audit.began-again",
            f"partitions {', '.join(map(str, begun))} of {AUDIT_TOPIC} are read from the beginning: the topic was "
            "created again, or its log was cut; "
            f"the work of clients since {utc_text(min(begun.values()) / 1000)} is unknown",
        )

    async def _note_heard(self) -> None:
        """Store every NOTE_S the time up to which reports were read: it shows readers that an auditor works."""
        now_s = self._clock.monotonic()
        heard = {number: home.heard_ms for number, home in self._homes.items() if home.heard_ms}
        if heard and now_s >= self._next_note_s:
            self._next_note_s = now_s + NOTE_S
            await self._store.note_heard(self._owner, self._reports.topic_id, heard)

    async def _take_page(self, home: _AuditedReports, page: Page) -> None:
        now_ms = self._clock.wall_ms()
        reached = home.position and Position.parse(home.position)
        for position, body in page.reports:
            at = Position.parse(position)
            if reached and at < reached:
                continue  # the home was lost for a moment: the group began again where it had committed
            if home.taken is not None and at <= home.taken:
                continue  # a report after it in the page failed: this page comes again
            try:
                report = decode_report(body)
            except MemqError as error:  # its number is missing then, and what it said is unknown
                self._events.warning("audit.report-unreadable", f"report at {position} of _memq_audit: {error}")
                continue
            if any((part.topic_id, part.partition) not in home.partitions for part in report.parts):
                await self._learn_topics(report)
            if wrong := self._wrongly_named(report):
                self._events.warning("audit.report-unreadable", f"report at {position} of _memq_audit: {wrong}")
                continue
            home.audit.take(await self._named(report), now_ms)
            home.taken = at
            for part in report.parts:
                if (part.topic_id, part.partition) in home.partitions:
                    self._touched[part.topic_id, part.partition] = None
        if not reached or Position.parse(page.next) > reached:
            home.position = page.next

    def _wrongly_named(self, report: Report) -> str:
        """Return which topic a report gives a false name: brokers check permissions by the name."""
        for part in report.parts:
            topic = self._topics.by_id.get(part.topic_id)
            if topic is not None and topic.name != part.topic:
                return f"it gives topic '{topic.name}' the name '{part.topic[:60]}'"
        return ""

    async def _named(self, report: Report) -> Report:
        """Return the report with the sequences of its damages, as far as indexes have them."""
        if all(damage.producer for part in report.parts for damage in part.damages):
            return report
        parts = tuple([await self._named_part(part) for part in report.parts])
        return msgspec.structs.replace(report, parts=parts)

    async def _named_part(self, part: ReportPart) -> ReportPart:
        topic = self._topics.by_id.get(part.topic_id)
        found: list[ReportedDamage] = []
        for damage in part.damages:
            found += (
                [damage]
                if damage.producer or topic is None
                else await self._names.find(topic.read_partition_of(part.partition), damage)
            )
        return msgspec.structs.replace(part, damages=tuple(found))

    # ---- topics --------------------------------------------------------------------------------------

    async def _refresh_topics(self) -> None:
        await self._reports.check()
        await self._topics.refresh()
        await self._load_partitions()

    async def _learn_topics(self, report: Report) -> None:
        """Request the topics of a report: they may be new, or have new partitions."""
        await self._topics.refresh()
        for part in report.parts:
            await self._topics.learn(part.topic, part.topic_id)
        await self._load_partitions()

    async def _load_partitions(self) -> None:
        """Open an audit for each write partition whose home is here; drop those of deleted topics."""
        homes = self._reports.homes()
        for home in self._homes.values():
            for key in [key for key in home.partitions if key[0] not in self._topics.by_id]:
                del home.partitions[key]
        for topic in self._topics.by_id.values() if homes else ():
            for part in topic.partitions:
                mine = self._homes.get(home_of(topic.id, part.partition, homes))
                key = (topic.id, part.partition)
                if mine is not None and key not in mine.partitions:
                    mine.partitions[key] = PartitionAudit(topic, part.partition, await self._store.partition_state(key))

    # ---- pointers ------------------------------------------------------------------------------------

    async def _follow(
        self,
        touched: dict[PartitionKey, None],
        answered: dict[PartitionKey, None],
        ends: Mapping[ReadPartition, ProvedEnd],
    ) -> None:
        """Read pointers up to the present ends, and up to the ends that owners proved.

        Partitions without reports are read every IDLE_ROUNDS rounds only.
        """
        idle = self._round % IDLE_ROUNDS == 0
        audits: dict[ReadPartition, list[PartitionAudit]] = {}
        due: dict[ReadPartition, None] = {}
        least = {log: proved.end for log, proved in ends.items()}
        for home in self._homes.values():
            for key, audit in home.partitions.items():
                audits.setdefault(_log_of(audit), []).append(audit)
                if idle or key in touched or key in answered or audit.waits or _log_of(audit) in ends:
                    due[_log_of(audit)] = None
        judged = [log for log, found in audits.items() if any(_key_of(each) in answered for each in found)]
        await self._logs.follow(audits, due, least, [*ends, *judged])

    # ---- the state -----------------------------------------------------------------------------------

    def _step_of(self, number: int, home: _AuditedReports) -> Step:
        self._steps += 1
        step = Step(number, self._owner, self._steps, home.position, home.audit.clients)
        for key, audit in home.partitions.items():
            rows, findings = audit.take_rows(), audit.take_findings()
            if rows or findings or audit.changed():
                step.changes[key] = PartitionChanges(audit.topic.name, audit.state, rows, findings)
        return step

    async def _save(self, home: _AuditedReports) -> None:
        if home.unsaved is not None:
            await self._store.save(home.unsaved)
            home.saved, home.unsaved = home.unsaved.position, None


def _log_of(audit: PartitionAudit) -> ReadPartition:
    return audit.topic.read_partition_of(audit.partition)


def _key_of(audit: PartitionAudit) -> PartitionKey:
    return audit.topic.id, audit.partition


@asynccontextmanager
async def live_audit(brokers: str, state: Database, keep_ms: int, runtime: Runtime) -> AsyncIterator[LiveAudit]:
    """Open what an auditor of the cluster at `brokers` needs; `run` or `step` it inside.

    Raises: UnreachableError; NotFoundError when the cluster does not audit.
    """
    pool = LinkPool(runtime, bootstrap_addresses(brokers))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        admin = await stack.enter_async_context(AsyncAdmin(brokers, runtime=runtime))
        find = partial(find_topic, ClusterMetadata(runtime, pool).ask)
        try:
            topic = await find(AUDIT_TOPIC)
        except NotFoundError as error:
            raise _no_reports(pool) from error
        store = AuditStore(state)
        group = await store.group(f"{AUDIT_GROUP}-{runtime.random.getrandbits(64):016x}")
        consumer = await stack.enter_async_context(
            AsyncConsumer(
                *(brokers, [AUDIT_TOPIC]),
                group=group,
                auto_commit=False,
                on_damaged="skip",
                on_expired="skip",
                audit=False,
                runtime=runtime,
            )
        )
        any_broker = BrokerRouter(pool)
        queue = RemoteQueue(any_broker)
        reports, holders = GroupReports(consumer, queue, topic, find), Holders(pool, any_broker)
        owners = OwnerEnds(runtime, pool)
        stack.push_async_callback(owners.close)
        asks = holders.ask, owners.ask
        topics = AuditedTopics(admin.topics, find)
        audit = LiveAudit(reports, topics, queue, any_broker.read, *asks, store, runtime, keep_ms)
        stack.push_async_callback(audit.close)
        yield audit


async def keep_auditing(
    brokers: str, state: Database, keep_ms: int, runtime: Runtime, ready: Callable[[], None] = lambda: None
) -> None:
    """Audit until cancelled, also when `_memq_audit` is deleted and created again; `ready` is called once.

    Raises: as `live_audit` for the first time; afterwards as `LiveAudit.run`, except NotFoundError.
    """
    outage = EventLog(runtime.clock).outage("audit.stopped", "audit.goes-on")
    begun = opened = False

    def note_begun() -> None:
        nonlocal begun
        outage.passed()
        if not begun:
            begun = True
            ready()

    while True:
        try:
            async with live_audit(brokers, state, keep_ms, runtime) as audit:
                opened = True
                await audit.run(note_begun)
        except (NotFoundError, RetryableError) as error:
            if not opened:
                raise
            outage.failed(str(error))
            await asyncio.sleep(RETRY_S)


def _no_reports(pool: LinkPool) -> NotFoundError:
    """Return the reason why there is no `_memq_audit`, by what the last broker asks of its clients."""
    if pool.audit_ms > 0:
        return NotFoundError(
            f"topic {AUDIT_TOPIC} does not exist, though the cluster audits: it was deleted, or is not yet created",
            hint="restart one broker: a broker creates it at its start; audit-topic-failed in the log says why not",
        )
    return NotFoundError(
        f"the cluster does not audit: it has no topic {AUDIT_TOPIC}", hint="set audit = on in its brokers"
    )
