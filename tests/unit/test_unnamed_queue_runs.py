"""The sweep and runs of queue items: it takes neither a run that is named, nor an object that a run names."""

from __future__ import annotations

import pytest
from awscrt.checksums import crc32c

from memq.broker.sweep.unnamed_held import UnnamedHeld
from memq.errors import CorruptDataError, LogLostError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import run_key, state_snapshot_key
from memq.format.state_log.entry import StateDecision, StateDecisions, StateEntry
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import BEFORE_ALL, NamedRun, RunWriter
from memq.format.state_log.snapshot import SavedState
from memq.queues.decisions import QUEUES_MACHINE, EnqueueDecision, ItemTerms, QueueDecision, encode_decision
from memq.queues.machine import QueueMachine
from memq.queues.runs.spilled import BringBlocksDecision, BroughtBlock, QueueLane, SpillBlocksDecision, bytes_of
from memq.state_log.snapshot_store import SnapshotStore
from memq.topic import STATE_TOPIC
from tests.unit.bare_cluster import CLUSTER
from tests.unit.test_unnamed_held import HeldYard, in_yard, no_pause

__all__ = ["no_pause"]
JOBS, LANE = Target("jobs", "", 0), QueueLane("jobs", "", 5)
TERMS = ItemTerms(5, 4_000, 0, 0).lane()


def block(number: int) -> HeldBlock:
    return HeldBlock(HoldId(number, 0), 1, 5, 0, 5)


class Items:
    """The queue items of the log of a yard."""

    def __init__(self, yard: HeldYard) -> None:
        self.yard = yard
        self.queues = QueueMachine()
        self.entries: dict[str, list[QueueRunEntry]] = {}

    async def decide(self, decision: QueueDecision) -> int:
        body = encode_decision(decision)
        self.queues.apply(body)
        content = StateDecisions((StateDecision(QUEUES_MACHINE, body),))
        offset = await self.yard.publish(StateEntry(1, self.yard.number, content))
        self.yard.number += 1
        return offset

    async def enqueue(self, number: int) -> str:
        key = await self.yard.stored(number)
        await self.decide(EnqueueDecision(key, 0, (HeldLane(JOBS, TERMS, (block(number),)),)))
        return key

    async def run(self, number: int, *blocks: int) -> NamedRun:
        """Store a run of blocks."""
        known = [self.queues.blocks[each] for each in blocks]
        entries = [QueueRunEntry(each.block, JOBS, each.key, each.lane, each.arrival) for each in known]
        writer = RunWriter(QUEUE_ROWS)
        writer.add(entries)
        run, buffers = writer.finish(run_key(CLUSTER, STATE_TOPIC, self.yard.state.id, 0, number), 0, 0)
        data = b"".join(buffers)
        await self.yard.store.put(run.key, [data], crc32c(data))
        self.entries[run.key] = entries
        return run

    async def spill(self, run: NamedRun) -> int:
        ids = [each.block.id.producer for each in self.entries[run.key]]
        return await self.decide(SpillBlocksDecision(run, LANE, bytes_of(ids)))

    async def bring(self, run: NamedRun) -> int:
        blocks = tuple(BroughtBlock(each.arrival, each.key, each.lane, each.block) for each in self.entries[run.key])
        return await self.decide(BringBlocksDecision(run.key, BEFORE_ALL, run.last, run.last, blocks))

    async def snapshot(self, offset: int) -> None:
        """Store a snapshot of the state below an offset, which no entry names."""
        key = state_snapshot_key(CLUSTER, STATE_TOPIC, self.yard.state.id, 0, 1, offset)
        saved = SavedState(offset, 1, self.yard.number, {QUEUES_MACHINE: self.queues.snapshot()})
        await SnapshotStore(self.yard.store).put(saved, key)


def test_a_run_stays_while_a_stored_snapshot_names_it() -> None:
    async def work(yard: HeldYard) -> None:
        items = Items(yard)
        await items.enqueue(1)
        run = await items.run(1, 1)
        await items.snapshot(await items.spill(run) + 1)
        await items.bring(run)
        assert await yard.gone() == []
        assert run.key in yard.store.objects

    in_yard(work)


def test_an_object_that_only_a_run_names_stays() -> None:
    async def work(yard: HeldYard) -> None:
        items = Items(yard)
        keys = [await items.enqueue(number) for number in (1, 2, 3)]
        other = await yard.stored(9)
        run, unnamed = await items.run(1, 1, 2), await items.run(2, 3)
        await items.spill(run)
        assert not {keys[0], keys[1]} & items.queues.objects.keys()
        assert sorted(await yard.gone()) == sorted([other, unnamed.key])
        assert {*keys, run.key} <= yard.store.objects.keys()

    in_yard(work)


def test_a_run_that_was_brought_goes_and_its_objects_stay() -> None:
    async def work(yard: HeldYard) -> None:
        items = Items(yard)
        keys = [await items.enqueue(number) for number in (1, 2)]
        run = await items.run(1, 1, 2)
        await items.spill(run)
        await items.bring(run)
        assert await yard.gone() == [run.key]
        assert set(keys) <= yard.store.objects.keys()

    in_yard(work)


@pytest.mark.parametrize("loss", ["missing", "another"])
def test_no_object_goes_while_a_run_can_not_be_read(loss: str) -> None:
    async def work(yard: HeldYard) -> None:
        items = Items(yard)
        key = await items.enqueue(1)
        await items.enqueue(2)
        run = await items.run(1, 1, 2)
        await items.spill(run)
        body = yard.store.objects.pop(run.key)
        if loss == "another":
            yard.store.objects[run.key] = bytes(len(body))
        with pytest.raises(LogLostError if loss == "missing" else CorruptDataError):
            await UnnamedHeld(yard.store, yard.queue).named([yard.state], [key])
        assert await yard.gone() == []
        assert key in yard.store.objects

    in_yard(work)
