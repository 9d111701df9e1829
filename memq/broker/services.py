"""Shared parts of one broker: identity, ports, memory, counters, reported suspicions and log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memq.broker.identity.logins import Logins
from memq.broker.identity.tokens import Tokens
from memq.broker.ingest.connection_limits import ConnectionLimits
from memq.broker.ingest.quota_book import QuotaBook
from memq.broker.ingest.quotas import Quotas
from memq.broker.ingest.slabs import SlabPool
from memq.broker.metrics import Counters
from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.broker.partition.recent_pointer_cache import RecentPointerCache
from memq.broker.permissions.checks import PermissionChecks
from memq.broker.spool.writer import Spool
from memq.broker.upkeep.lost_logs import LostLogs
from memq.broker.upkeep.own_groups import OwnGroups
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.governor import Coordinator
from memq.governor.balance import STRATEGIES
from memq.governor.governor import Planner
from memq.notification import NotificationQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.steady_clock import SteadyClock
from memq.runtime.tasks import TimedSemaphore
from memq.runtime.waits import Waits
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.topic import PartitionKey

if TYPE_CHECKING:
    from memq.broker.broker_traces import BrokerTraces

BROKER_PROGRAM = "memq-broker"  # in the HELLO of a broker: its requests are not forwarded again
OPENINGS_AT_ONCE_MAX = 64  # so that the first of thousands of partitions are open before the last ones begin
OPENING_TURN_S = 5.0  # a partition whose log or coordinator hangs delays the openings of others no longer than this
CLOSINGS_AT_ONCE_MAX = 64  # if thousands published `closed` at once, the last pointers would be too old for the queue
CLOSING_TURN_S = 5.0  # a partition whose part of the queue is unreachable delays the others no longer than this
SUSPICIONS_MAX = 1_000  # addresses that wait for a check; further reports are dropped, and their senders repeat them


class Suspicions:
    """The reported addresses that wait for a check, oldest first, each once.

    Clients and this broker report the brokers whose ports refused them a connection.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._reported = asyncio.Event()

    def report(self, address: str) -> None:
        """Note that a connection to a broker was refused."""
        if len(self._waiting) < SUSPICIONS_MAX:
            self._waiting[address] = None
            self._reported.set()

    async def next(self) -> str:
        """Wait for a report, and take the oldest one."""
        while not self._waiting:
            self._reported.clear()
            await self._reported.wait()
        address = next(iter(self._waiting))
        del self._waiting[address]
        return address


@dataclass(slots=True)
class SweptNow:
    """Counts of the last sweep pass here: objects that wait for a later one, and objects that are kept."""

    pending_objects: int = 0
    pending_bytes: int = 0
    unproven_objects: int = 0

    def forget(self) -> None:
        """Forget the last pass: another broker sweeps now."""
        self.pending_objects = self.pending_bytes = self.unproven_objects = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of a broker. `session` identifies one run of the broker `settings.broker_id`.

    Owners and retention read `queue`. Readers read `pointers`, which includes the compacted pointers.
    """

    settings: BrokerSettings
    session: str
    runtime: Runtime
    stores: dict[str, StorageHandler]
    store_name: str
    queue: NotificationQueue
    coordinator: Coordinator
    pool: SlabPool
    recent_batches: RecentBatchCache
    limits: Quotas
    spool: Spool
    counters: Counters
    traces: BrokerTraces | None = None
    tokens: Tokens | None = None  # without it, tokens of clients are ignored
    openings: TimedSemaphore = field(default_factory=lambda: TimedSemaphore(OPENINGS_AT_ONCE_MAX, OPENING_TURN_S))
    closings: TimedSemaphore = field(default_factory=lambda: TimedSemaphore(CLOSINGS_AT_ONCE_MAX, CLOSING_TURN_S))
    lost_logs: dict[PartitionKey, str] = field(default_factory=dict)  # write partitions not opened, and why
    swept: SweptNow = field(default_factory=SweptNow)
    recent_pointers: RecentPointerCache = field(default_factory=RecentPointerCache)
    deleted_since: dict[str, int] = field(
        default_factory=dict
    )  # deleted topics with logs, by id: first report, Unix ms
    suspicions: Suspicions = field(default_factory=Suspicions)
    waits: Waits = field(init=False)  # the broker's own waits, which METADATA reports to clients
    events: EventLog = field(init=False)  # one for all parts: the rate limit of an event is per broker
    deletion_clock: SteadyClock = field(init=False)  # of all that deletes or forgets by age
    manifests: ManifestFiles = field(init=False)
    pointers: CompactedLogReader = field(init=False)
    planner: Planner = field(init=False)
    groups: OwnGroups = field(init=False)
    connection_limits: ConnectionLimits = field(init=False)
    permissions: PermissionChecks = field(init=False)
    quotas: QuotaBook = field(init=False)
    logins: Logins = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "waits", Waits(self.runtime.clock))
        object.__setattr__(self, "events", EventLog(self.runtime.clock))
        limits = ConnectionLimits(self.settings.connections_max, self.settings.connections_per_address_max)
        object.__setattr__(self, "connection_limits", limits)
        steady = SteadyClock(self.runtime.clock, self.events, self.settings.sweep_confirm_ms)
        object.__setattr__(self, "deletion_clock", steady)
        object.__setattr__(self, "manifests", ManifestFiles(self.settings.cluster, self.store))
        object.__setattr__(self, "pointers", CompactedLogReader(self.queue, self.manifests, self.runtime.clock))
        checks = PermissionChecks(self.settings, self.coordinator.rules, self.events)
        object.__setattr__(self, "permissions", checks)
        object.__setattr__(self, "quotas", QuotaBook(self.runtime.clock))
        encrypted = self.runtime.network.encrypted
        object.__setattr__(
            self, "logins", Logins(checks.known, checks.peers, self.runtime.random, self.events, encrypted=encrypted)
        )
        object.__setattr__(self, "groups", OwnGroups(self.runtime))
        object.__setattr__(self, "planner", Planner(STRATEGIES[self.settings.governor_strategy]))

    @property
    def lost_queue(self) -> LostLogs:
        """Compares the queue with the store."""
        return LostLogs(self.settings.cluster, self.store, self.queue, self.coordinator)

    @property
    def store_location(self) -> str:
        """Name and URL of the store for new objects, for messages."""
        return f"store '{self.store_name}' at {self.store.url}"

    @property
    def store(self) -> StorageHandler:
        """The store for new objects."""
        return self.stores[self.store_name]
