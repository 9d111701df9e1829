"""The sweep of held objects: an object that a state log names stays, also when a snapshot has that; others go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from awscrt.checksums import crc32c

from memq.broker.sweep.sweep import Sweep
from memq.broker.sweep.unnamed_held import UNHELD
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import held_object_key, state_snapshot_key
from memq.format.state_log.entry import OpenedState, StateDecision, StateDecisions, StateEntry, encode_state_entry
from memq.format.state_log.snapshot import SavedState
from memq.governor import Coordinator
from memq.holds.machine import (
    HOLDS_MACHINE,
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldMachine,
    HoldsDecision,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.notification import Publication
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, read_partitions
from tests.unit.bare_cluster import CLUSTER, Cluster, topic_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TARGET = Target("clicks", "ab" * 16, 0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class HeldYard(Cluster):
    """A state log of one partition, written by hand, with held objects, and passes of the sweep."""

    def __init__(self) -> None:
        super().__init__()
        self.state = topic_of(STATE_TOPIC, 1)
        self.log = read_partitions(self.state)[0]
        self.notes: list[str] = []
        self.number = 0
        self.machine = HoldMachine()

    async def publish(self, entry: StateEntry) -> int:
        body = encode_state_entry(entry)
        return await self.queue.publish(Publication(self.log, 0, 1, self.clock.wall_ms(), body))

    async def decide(self, *decisions: HoldsDecision) -> int:
        bodies = [encode_decision(each) for each in decisions]
        for body in bodies:
            self.machine.apply(body)
        content = StateDecisions(tuple(StateDecision(HOLDS_MACHINE, body) for body in bodies))
        offset = await self.publish(StateEntry(1, self.number, content))
        self.number += 1
        return offset

    async def stored(self, number: int) -> str:
        key = held_object_key(CLUSTER, number, self.clock.wall_ms())
        await self.store.put(key, [b"block"], crc32c(b"block"))
        return key

    async def gone(self) -> list[str]:
        """Run two passes a day apart; return the keys that went."""
        found: list[str] = []
        for _ in range(2):
            self.clock.advance(DAY_MS)
            topics = cast("Coordinator", self.topics)
            sweep = Sweep(CLUSTER, self.store, self.queue, topics, self.clock, self.notes.append, DAY_MS)
            found += [each.key async for each in sweep.run(HOUR_MS, 7 * DAY_MS) if each.goes and each.why == UNHELD]
        return found


def hold(key: str, number: int) -> HoldDecision:
    block = HeldBlock(HoldId(number, 0), 1, 5, 0, 5)
    return HoldDecision(key, 0, (HeldLane(TARGET, "", (block,)),))


def in_yard(work: Callable[[HeldYard], Awaitable[None]], *, opened: bool = True) -> None:
    async def made() -> None:
        yard = HeldYard()
        await yard.topic(yard.state)
        if opened:
            await yard.publish(StateEntry(1, 0, OpenedState(1, "b")))
        await work(yard)

    asyncio.run(made())


def test_a_held_object_goes_when_no_state_names_it() -> None:
    async def work(yard: HeldYard) -> None:
        keys = [await yard.stored(number) for number in range(5)]
        await yard.decide(*(hold(key, number + 1) for number, key in enumerate(keys[:4])))
        await yard.decide(
            DropDecision(1, (HoldId(2, 0),)),
            ReleaseDecision((Unit(TARGET, 1, (HoldId(3, 0),)), Unit(TARGET, 2, (HoldId(4, 0),)))),
            DoneDecision(1, ((TARGET, 1),)),
        )
        # 0 is held, 1 was dropped, 2 is in its target, 3 is on its way, 4 was never named
        assert sorted(await yard.gone()) == sorted([keys[1], keys[2], keys[4]])
        assert sorted(set(keys) & set(yard.store.objects)) == sorted([keys[0], keys[3]])

    in_yard(work)


def test_a_held_object_stays_when_only_a_snapshot_has_its_hold() -> None:
    async def work(yard: HeldYard) -> None:
        keys = [await yard.stored(number) for number in range(2)]
        offset = await yard.decide(hold(keys[0], 1)) + 1
        key = state_snapshot_key(CLUSTER, STATE_TOPIC, yard.state.id, 0, 1, offset)
        saved = SavedState(offset, 1, yard.number, {HOLDS_MACHINE: yard.machine.snapshot()})
        snapshot = await SnapshotStore(yard.store).put(saved, key)
        await yard.publish(StateEntry(1, yard.number, snapshot))
        await yard.queue.trim(yard.log, offset)
        assert await yard.gone() == [keys[1]]

    in_yard(work)


def test_no_held_object_goes_while_a_state_log_is_lost_or_damaged() -> None:
    async def work(yard: HeldYard) -> None:
        await yard.stored(1)
        assert await yard.gone() == []
        assert "the queue has no entry of state log 0" in yard.notes[-1]

    in_yard(work, opened=False)

    async def damage(yard: HeldYard) -> None:
        key = await yard.stored(1)
        await yard.queue.publish(Publication(yard.log, 0, 1, yard.clock.wall_ms(), b"damaged"))
        assert await yard.gone() == []
        assert key in yard.store.objects

    in_yard(damage)
