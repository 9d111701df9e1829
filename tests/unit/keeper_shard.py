"""A keeper of queue items with a log and a store in memory, on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from memq.broker.metrics import Counters
from memq.format.blocks.builder import BlockBuilder
from memq.format.held_object import HoldId, Target
from memq.holds.storing import NewHold
from memq.queues.decisions import QUEUES_MACHINE, ItemTerms, queue_scope
from memq.queues.grants.repeats import Delivered
from memq.queues.keeper import QueueKeeper, QueueParts
from memq.queues.machine import QueueMachine
from memq.queues.payloads import RecentPayloads
from memq.queues.scheduler import ItemScheduler, Moment
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog
from tests.skipping_loop import run_skipping, skipping_runtime
from tests.unit.hold_shard import Store
from tests.unit.instant_log import InstantLog

LEASE_S = 4
PAYLOAD_BYTES = 10_000
KEY_S = 30


class Log(InstantLog):
    """Stays open."""

    is_owner = True


class Shard:
    """One keeper; `begun` counts how often it began its work on time."""

    def __init__(self) -> None:
        self.machine, self.store = QueueMachine(), Store(skipping_runtime().clock)
        self.log = Log({QUEUES_MACHINE: self.machine})
        self.events: list[str] = []
        self.counters = Counters()
        self.tasks = TaskOwner(self.died, cast(Any, self))
        self.begun = 0
        self.keeper = self.made(epoch=1)

    def died(self, error: BaseException) -> None:
        raise AssertionError(f"a task died: {error!r}") from error

    def warning(self, event: str, *_: object) -> None:
        """See `EventLog.warning`."""
        self.events.append(event)

    error = warning

    def made(self, epoch: int) -> QueueKeeper:
        self.recent = RecentPayloads(PAYLOAD_BYTES)
        parts = QueueParts(
            cluster="memq",
            store=self.store,
            runtime=skipping_runtime(),
            events=cast(Any, self),
            key_valid_s=KEY_S,
            recent=self.recent,
            begin=self.begin,
            counters=self.counters,
            number=0,
            run_key="runs/{:016x}".format,
        )
        clock = parts.runtime.clock
        scheduler = ItemScheduler(self.machine, Moment(clock.wall_ms(), clock.monotonic()))
        return QueueKeeper(cast(StateLog, self.log), scheduler, parts, self.tasks, epoch)

    def begin(self) -> None:
        self.begun += 1

    def new(self, block: int, *, count: int = 1, terms: ItemTerms = ItemTerms(5, LEASE_S * 1_000, 0, 0)) -> NewHold:  # noqa: B008
        builder = BlockBuilder()
        builder.append_many([b"%d" % number for number in range(count)])
        data = bytes(builder.seal(producer_id=block, first_sequence=0, scope=queue_scope("jobs"), now_ms=1).data)
        return NewHold(HoldId(block, 0), count, Target("jobs", "", 0), terms.lane(), 1, data)

    async def dequeue(self, count: int = 10) -> list[Delivered]:
        return await self.keeper.dequeue({"jobs": count})


def on_shard(work: Callable[[Shard], Awaitable[None]]) -> None:
    async def run() -> None:
        shard = Shard()
        try:
            await work(shard)
        finally:
            await shard.tasks.stop()

    run_skipping(run())
