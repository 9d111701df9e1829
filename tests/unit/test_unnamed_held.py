"""The sweep of held objects and runs: what a state log names stays, also when only a snapshot has that; others go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from awscrt.checksums import crc32c

from memq.broker.sweep.sweep import Sweep
from memq.broker.sweep.unnamed_held import UNHELD
from memq.broker.sweep.unnamed_snapshots import RUN_UNNAMED
from memq.errors import NotFoundError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import delayed_sequence
from memq.format.key import held_object_key, run_key, state_snapshot_key
from memq.format.state_log.entry import OpenedState, StateDecision, StateDecisions, StateEntry, encode_state_entry
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunWriter
from memq.format.state_log.snapshot import SavedState
from memq.governor import Coordinator
from memq.holds.decisions import (
    HOLDS_MACHINE,
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import BringDecision, MarkDecision, MergeDecision, ReplacedRun, RunDecision
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

    async def stored_run(self, number: int, *keys: str) -> NamedRun:
        """Store a run with a hold in each of these objects; their producers are 1, 2, 3, …."""
        writer = RunWriter(HELD_ROWS)
        writer.add([RunEntry(block(each), TARGET, key) for each, key in enumerate(keys, 1)])
        run, buffers = writer.finish(run_key(CLUSTER, STATE_TOPIC, self.state.id, 0, number), 0, number)
        data = b"".join(buffers)
        await self.store.put(run.key, [data], crc32c(data))
        return run

    async def snapshot(self, offset: int, *, named: bool) -> str:
        """Store a snapshot of the state below an offset; return the key of its part."""
        key = state_snapshot_key(CLUSTER, STATE_TOPIC, self.state.id, 0, 1, offset)
        saved = SavedState(offset, 1, self.number, {HOLDS_MACHINE: self.machine.snapshot()})
        snapshot = await SnapshotStore(self.store).put(saved, key)
        if named:
            await self.publish(StateEntry(1, self.number, snapshot))
            self.number += 1
        return f"{key}/0000"

    async def gone(self) -> list[str]:
        """Run two passes a day apart; return the keys that went."""
        found: list[str] = []
        for _ in range(2):
            self.clock.advance(DAY_MS)
            topics = cast("Coordinator", self.topics)
            sweep = Sweep(CLUSTER, self.store, self.queue, topics, self.clock, self.notes.append, DAY_MS)
            whys = (UNHELD, RUN_UNNAMED)
            found += [each.key async for each in sweep.run(HOUR_MS, 7 * DAY_MS) if each.goes and each.why in whys]
        return found


def id_of(number: int) -> HoldId:
    return HoldId(number, delayed_sequence(5))


def block(number: int) -> HeldBlock:
    return HeldBlock(id_of(number), delayed_sequence(5) + 1, 5, 0, 5)


def hold(key: str, number: int) -> HoldDecision:
    return HoldDecision(key, 0, (HeldLane(TARGET, "", (block(number),)),))


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
            DropDecision(1, (id_of(2),)),
            ReleaseDecision((Unit(TARGET, 1, (id_of(3),)), Unit(TARGET, 2, (id_of(4),)))),
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
        await yard.snapshot(offset, named=True)
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


def test_a_held_object_stays_while_a_run_names_it() -> None:
    async def work(yard: HeldYard) -> None:
        keys = [await yard.stored(number) for number in range(3)]
        run = await yard.stored_run(1, *keys[:2])
        await yard.decide(hold(keys[0], 1), hold(keys[1], 2), MarkDecision(0), RunDecision(1, (run,), 0))
        assert yard.machine.objects == {}
        assert await yard.gone() == [keys[2]]
        bring = BringDecision(run.key, (0, 0, 0), (5, 1, delayed_sequence(5)), ())  # the first hold was dropped
        await yard.decide(bring)
        assert await yard.gone() == [keys[0]]

    in_yard(work)


def test_no_held_object_goes_while_a_run_is_missing() -> None:
    async def work(yard: HeldYard) -> None:
        key = await yard.stored(1)
        run = await yard.stored_run(1, key)
        await yard.decide(hold(key, 1), MarkDecision(0), RunDecision(1, (run,), 0))
        await yard.stored(2)
        yard.store.objects.pop(run.key)
        assert await yard.gone() == []
        assert f"a state log names the run '{run.key}'" in yard.notes[-1]

    in_yard(work)


def test_a_run_goes_when_neither_its_log_nor_a_stored_snapshot_names_it() -> None:
    async def work(yard: HeldYard) -> None:
        key = await yard.stored(1)
        run, merged, left = [await yard.stored_run(number, key) for number in (1, 2, 3)]
        offset = await yard.decide(hold(key, 1), MarkDecision(0), RunDecision(1, (run,), 0)) + 1
        part = await yard.snapshot(offset, named=False)  # `memq restore` may take it
        await yard.decide(MergeDecision((ReplacedRun(run.key, (0, 0, 0), 0),), (merged,)))
        assert await yard.gone() == [left.key]
        await yard.store.delete(part)
        assert await yard.gone() == [run.key]
        assert merged.key in yard.store.objects

    in_yard(work)


def test_a_run_stays_that_only_the_last_snapshot_names() -> None:
    async def work(yard: HeldYard) -> None:
        key = await yard.stored(1)
        run, merged = [await yard.stored_run(number, key) for number in (1, 2)]
        offset = await yard.decide(hold(key, 1), MarkDecision(0), RunDecision(1, (run,), 0)) + 1
        await yard.snapshot(offset, named=True)
        await yard.queue.trim(yard.log, offset)
        await yard.decide(MergeDecision((ReplacedRun(run.key, (0, 0, 0), 0),), (merged,)))
        assert await yard.gone() == []

    in_yard(work)


@pytest.mark.parametrize("lie", ["missing", "damaged"])
def test_no_run_goes_while_a_stored_snapshot_can_not_be_read(lie: str) -> None:
    async def work(yard: HeldYard) -> None:
        run, left = [await yard.stored_run(number, "key") for number in (1, 2)]
        offset = await yard.decide(hold("key", 1), MarkDecision(0), RunDecision(1, (run,), 0)) + 1
        part = await yard.snapshot(offset, named=False)
        await yard.decide(BringDecision(run.key, (0, 0, 0), run.last, ()))
        get = yard.store.get

        async def wrong(key: str, *, checked: bool = True) -> bytes:
            if key != part:
                return await get(key, checked=checked)
            if lie == "missing":
                raise NotFoundError(f"no object '{key}'")
            return (await get(key, checked=checked))[:-1]

        yard.store.get = wrong  # type: ignore[method-assign]
        assert await yard.gone() == []
        yard.store.get = get  # type: ignore[method-assign]
        assert await yard.gone() == [left.key], "the snapshot names the other one"

    in_yard(work)


def test_no_run_goes_while_its_state_log_is_lost() -> None:
    async def work(yard: HeldYard) -> None:
        run = await yard.stored_run(1, "key")
        assert await yard.gone() == []
        assert run.key in yard.store.objects

    in_yard(work, opened=False)
