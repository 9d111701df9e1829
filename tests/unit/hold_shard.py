"""A keeper of held records with a log, a store and targets in memory, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from memq.broker.metrics import Counters
from memq.format.blocks.header import Buffer
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.holds.decisions import (
    HOLDS_MACHINE,
    HoldDecision,
    HoldsDecision,
    ReleaseDecision,
    ReleasedUnit,
    decode_decision,
    encode_decision,
)
from memq.holds.keeper import (
    HoldKeeper,
    KeeperParts,
)
from memq.holds.machine import HoldMachine
from memq.holds.storing import NewHold
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog
from memq.storage_handlers.memory import MemoryHandler
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime
from tests.unit.instant_log import InstantLog

A, B = Target("clicks", "ab" * 16, 0), Target("orders", "cd" * 16, 1)
KEY_S, WINDOW_MS = 30.0, 5_000


class Store(MemoryHandler):
    """Notes each put; puts wait `delay_s`, and the next ones fail with `errors`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.delay_s = 0.0
        self.puts: list[tuple[str, bytes]] = []
        self.errors: list[Exception] = []

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.puts.append((key, b"".join(buffers)))
        await skip(self.delay_s)
        if self.errors:
            raise self.errors.pop(0)
        await super().put(key, buffers, checksum)


class Shard:
    """A keeper with a log and a store in memory, and targets that take each unit after `append_s`."""

    def __init__(self, machine: HoldMachine | None = None, log: InstantLog | None = None) -> None:
        self.runtime = skipping_runtime()
        self.machine = machine or HoldMachine()
        self.log = log or InstantLog({HOLDS_MACHINE: self.machine})
        self.store = Store(self.runtime.clock)
        self.append_s = 0.0
        self.refusals: list[Exception] = []
        self.appended: list[tuple[float, Target, int, list[int]]] = []  # time, target, number, producers
        self.events: list[tuple[str, str]] = []
        self.failures: list[BaseException] = []
        self.counters = Counters()
        self.merging = asyncio.Semaphore(1)
        self.tasks = TaskOwner(self.failures.append, cast(Any, self))
        parts = KeeperParts(
            cluster="memq",
            store=self.store,
            runtime=self.runtime,
            events=cast(Any, self),
            key_valid_s=KEY_S,
            window_ms=lambda: WINDOW_MS,
            append=self.append,
            counters=self.counters,
            run_key="runs/{:016x}".format,
            merging=self.merging,
        )
        self.keeper = HoldKeeper(cast(StateLog, self.log), self.machine, parts, self.tasks)

    def now_ms(self) -> int:
        return self.runtime.clock.wall_ms()

    def warning(self, event: str, text: str) -> None:
        """See `EventLog.warning`."""
        self.events.append((event, text))

    def error(self, event: str, text: str) -> None:
        """See `EventLog.error`."""
        self.events.append((event, text))

    async def append(self, released: ReleasedUnit) -> None:
        producers = [hold.block.id.producer for hold in released.holds]
        self.appended.append((now_s(), released.unit.target, released.unit.r, producers))
        if self.refusals:
            raise self.refusals.pop(0)
        await skip(self.append_s)

    def run(self) -> None:
        """Begin to release."""
        self.tasks.start(self.keeper.run(), "keeper")

    def new(
        self, producer: int, target: Target = A, due_s: float = 100, data: bytes = b"data", lane: str = ""
    ) -> NewHold:
        due_ms = 0 if lane else self.now_ms() + int(due_s * 1_000)
        return NewHold(HoldId(producer, 0), 1, target, lane, due_ms, data)

    def decisions(self, kind: type[HoldsDecision]) -> list[tuple[float, Any]]:
        found = [(at_s, decode_decision(body)) for at_s, body in self.log.applied]
        return [(at_s, decision) for at_s, decision in found if isinstance(decision, kind)]

    def units(self) -> list[tuple[Target, int, list[int]]]:
        """Return target, number and producers of all units that were released."""
        units = [unit for _, decision in self.decisions(ReleaseDecision) for unit in decision.units]
        return [(unit.target, unit.r, [hold.producer for hold in unit.holds]) for unit in units]


def on_shard(work: Callable[[Shard], Awaitable[None]]) -> None:
    """Run a test, and end the tasks of the keeper."""

    async def run() -> None:
        shard = Shard()
        try:
            await work(shard)
        finally:
            await shard.tasks.stop()
        assert shard.failures == []

    run_skipping(run())


def held(machine: HoldMachine, *holds: tuple[int, Target, int], lane: str = "", length: int = 4) -> None:
    """Let blocks be held, by producer, target and due time."""
    for producer, target, due_ms in holds:
        block = HeldBlock(HoldId(producer, 0), 1, due_ms, 0, length)
        decision = HoldDecision(f"object {producer}", 0, (HeldLane(target, lane, (block,)),))
        machine.apply(encode_decision(decision))
