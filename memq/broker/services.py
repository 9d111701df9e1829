"""Shared parts of one broker: identity, ports, memory, counters and log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memq.broker.ingest.quotas import Quotas
from memq.broker.ingest.slabs import SlabPool
from memq.broker.metrics import Counters
from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.broker.spool.writer import Spool
from memq.broker.upkeep.lost_logs import LostLogs
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.governor import Coordinator
from memq.governor.balance import STRATEGIES
from memq.governor.governor import Planner
from memq.notification import NotificationQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TimedSemaphore
from memq.runtime.waits import Waits
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler

if TYPE_CHECKING:
    from memq.broker.broker_traces import BrokerTraces

OPENINGS_AT_ONCE_MAX = 64  # of thousands of partitions the first shall be open before the last has begun
CLOSINGS_AT_ONCE_MAX = 64  # of thousands that publish at once the last are not in the queue before they are too old
CLOSING_TURN_S = 5.0  # those whose part of the queue is away do not hold up the others for longer


@dataclass(slots=True)
class SweptNow:
    """Objects that wait for a later sweep pass, as of the last pass that ran here."""

    pending_objects: int = 0
    pending_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts that a broker is made of. `session` names one life of the broker `settings.broker_id`.

    Owners and retention read the queue itself. Readers read `pointers`, which has the compacted pointers, too.
    """

    settings: BrokerSettings
    session: str
    runtime: Runtime
    stores: dict[str, StorageHandler]
    store_name: str
    queue: NotificationQueue
    coordinator: Coordinator
    pool: SlabPool
    hot: RecentBatchCache
    limits: Quotas
    spool: Spool
    counters: Counters
    traces: BrokerTraces | None = None
    openings: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(OPENINGS_AT_ONCE_MAX))
    closings: TimedSemaphore = field(default_factory=lambda: TimedSemaphore(CLOSINGS_AT_ONCE_MAX, CLOSING_TURN_S))
    lost_logs: dict[tuple[str, int], str] = field(default_factory=dict)  # write partitions not opened, and why
    swept: SweptNow = field(default_factory=SweptNow)
    deleted_since: dict[str, int] = field(default_factory=dict)  # topics whose logs are left, by id; Unix ms
    waits: Waits = field(init=False)  # what it waits for itself; producers that wait for acks learn it
    events: EventLog = field(init=False)  # one for all parts: the rate of an event is that of the broker
    manifests: ManifestFiles = field(init=False)
    pointers: CompactedLogReader = field(init=False)
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "waits", Waits(self.runtime.clock))
        object.__setattr__(self, "events", EventLog(self.runtime.clock))
        object.__setattr__(self, "manifests", ManifestFiles(self.settings.cluster, self.store))
        object.__setattr__(self, "pointers", CompactedLogReader(self.queue, self.manifests, self.runtime.clock))
        object.__setattr__(self, "planner", Planner(STRATEGIES[self.settings.governor_strategy]))

    @property
    def lost_queue(self) -> LostLogs:
        """Compares the queue with the store."""
        return LostLogs(self.settings.cluster, self.store, self.queue, self.coordinator)

    @property
    def store_place(self) -> str:
        """The store that new objects go to, for messages."""
        return f"store '{self.store_name}' at {self.store.url}"

    @property
    def store(self) -> StorageHandler:
        """The store that new objects go to."""
        return self.stores[self.store_name]
