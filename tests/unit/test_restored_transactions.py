"""A restore from the bucket alone: a transaction with blocks in some target's log was committed, for all (S9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from memq.broker.restore.state_logs import RestoredStates, StateLogRestorer
from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import ProducerFencedError, TransactionCommittedError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target, held_object_end
from memq.format.held_sequences import transactional_sequence
from memq.format.key import held_object_key, state_snapshot_key
from memq.format.state_log.snapshot import SavedState
from memq.holds.decisions import HoldDecision, HoldState, encode_decision
from memq.state_log.log_reading import read_state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, read_partitions, shard_id
from memq.transactions import machine as transactions
from memq.transactions.machine import (
    BeginDecision,
    CommitTransactionDecision,
    PrepareDecision,
    SettledTransaction,
    TransactionalId,
    lane_of,
    moves_of,
)
from tests.unit.bare_cluster import CLUSTER
from tests.unit.test_restored_holds import CLICKS, ELSEWHERE, HERE, OTHER, TARGET, Bucket

PAY = TransactionalId("pay", "")
MOVING = TransactionalId("pay", "g")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class Coordinator(Bucket):
    """The first state log has transactions; the producers of their blocks are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.machines = ServiceMachines()
        self.machine = self.machines.holds
        self.shard = shard_id(self.state.id, 0)

    def begin(self, token: int = 1, id_: TransactionalId = PAY) -> int:
        now_ms = self.clock.wall_ms()
        found = self.machines.transactions.apply(
            transactions.encode_decision(BeginDecision(id_, token, 60_000, now_ms, 0))
        )
        assert isinstance(found, int)
        return found

    async def put_block(
        self, lane: str, producer: int, target: Target, shard: int | None = None, before: tuple[HeldLane, ...] = ()
    ) -> HoldDecision:
        """Store an object with a block, after these other lanes; return the decision about it."""
        self.numbers += 1
        first = transactional_sequence(self.clock.wall_ms())
        self.ids[producer] = HoldId(producer, first)
        lanes = (HeldLane(target, lane, (HeldBlock(self.ids[producer], first + 1, 0, 0, 5),)),)
        key = held_object_key(CLUSTER, self.numbers, self.clock.wall_ms())
        await self.put_bytes(key, b"block" + held_object_end((*before, *lanes), self.shard if shard is None else shard))
        return HoldDecision(key, 0, lanes)

    def prepare(self, instance: int, number: int, blocks: int) -> None:
        decision = PrepareDecision(PAY, instance, number, 0, blocks, "shop", b"", 0)
        self.machines.transactions.apply(transactions.encode_decision(decision))

    async def save(self) -> None:
        for partition, machines in enumerate((self.machines, ServiceMachines())):
            states = {name: each.snapshot() for name, each in machines.by_name().items()}
            key = state_snapshot_key(CLUSTER, STATE_TOPIC, self.state.id, partition, 3, 5)
            await SnapshotStore(self.store).put(SavedState(5, 3, 2, states), key)

    async def restored(self) -> tuple[ServiceMachines, RestoredStates]:
        """Restore; return the state of the first log."""
        restorer = StateLogRestorer(CLUSTER, self.store, self.queue, self.clock)
        report = await restorer.restore(self.state, {}, {}, (CLICKS,))
        machines, reading = ServiceMachines(), await read_state_log(self.queue, read_partitions(self.state)[0])
        assert reading.scan.snapshot is not None
        reading.scan.fold(machines.by_name, await SnapshotStore(self.store).get(reading.scan.snapshot))
        return machines, report

    def releases(self, machines: ServiceMachines) -> dict[Target, list[int]]:
        """Return the producers of the units that are to come, by target; each target has one unit of a transaction."""
        found: dict[Target, list[int]] = {}
        for target, units in machines.holds.units.items():
            (unit,) = units.values()
            found[target] = [hold.block.id.producer for hold in unit.holds]
        return found


def restoring(work: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def made() -> None:
        bucket = Coordinator()
        bucket.clock.advance(1_000_000)
        await work(bucket)

    asyncio.run(made())


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("landed", [False, True])
def test_a_transaction_with_blocks_in_one_target_is_released_for_the_others(*, prepared: bool, landed: bool) -> None:
    async def work(bucket: Coordinator) -> None:
        instance = bucket.begin()
        lane = lane_of(instance, 1)
        bucket.decide(await bucket.put_block(lane, 1, TARGET), await bucket.put_block(lane, 2, ELSEWHERE))
        if prepared:
            bucket.prepare(instance, 1, 2)
        await bucket.save()
        if landed:
            await bucket.landed(1, partition=HERE)
        machines, report = await bucket.restored()
        assert not report.findings
        assert bucket.releases(machines) == ({ELSEWHERE: [2]} if landed else {})
        assert len(machines.holds.open) == (0 if landed else 2)
        assert bool(machines.transactions.prepared) is (prepared and not landed)
        end = CommitTransactionDecision(PAY, instance, 1, 0, 2)
        answer = machines.transactions.apply(transactions.encode_decision(end))
        assert isinstance(answer, SettledTransaction)
        assert answer.committed, "the same answer for a producer that asks again"
        assert set(bucket.releases(machines)) == ({ELSEWHERE} if landed else {TARGET, ELSEWHERE})

    restoring(work)


def test_blocks_that_are_younger_than_the_snapshot_belong_to_their_transaction() -> None:
    """Also if its producer began after the snapshot; each partition gets its blocks in one unit."""

    async def work(bucket: Coordinator) -> None:
        instance = bucket.begin()
        lane, younger = lane_of(instance, 1), lane_of(instance + 5, 1)
        bucket.decide(await bucket.put_block(lane, 1, TARGET), await bucket.put_block(lane, 2, ELSEWHERE))
        await bucket.save()
        bucket.clock.advance(10_000)
        third = Target("clicks", CLICKS.id, HERE + OTHER + 1)
        for each, producer, target in ((lane, 3, ELSEWHERE), (younger, 4, TARGET), (younger, 5, third)):
            await bucket.put_block(each, producer, target)
        await bucket.landed(1, 4, partition=HERE)
        machines, _ = await bucket.restored()
        assert bucket.releases(machines) == {ELSEWHERE: [2, 3], third: [5]}
        assert not machines.holds.open
        end = CommitTransactionDecision(PAY, instance + 5, 1, 0, 2)
        assert isinstance(machines.transactions.apply(transactions.encode_decision(end)), ProducerFencedError)

    restoring(work)


def test_a_transaction_of_another_shard_with_the_same_name_is_not_committed() -> None:
    async def work(bucket: Coordinator) -> None:
        lane = lane_of(bucket.begin(), 1)
        bucket.decide(await bucket.put_block(lane, 1, TARGET))
        await bucket.save()
        await bucket.put_block(lane, 2, ELSEWHERE, shard_id(bucket.state.id, 1))
        await bucket.put_block(lane, 3, ELSEWHERE, 0)  # of an earlier release
        await bucket.landed(1, partition=HERE)
        machines, _ = await bucket.restored()
        assert (bucket.releases(machines), dict(machines.holds.open)) == ({}, {})

    restoring(work)


def test_units_of_a_snapshot_that_have_landed_do_not_come_again() -> None:
    async def work(bucket: Coordinator) -> None:
        instance = bucket.begin()
        lane = lane_of(instance, 1)
        bucket.decide(await bucket.put_block(lane, 1, TARGET), await bucket.put_block(lane, 2, ELSEWHERE))
        end = CommitTransactionDecision(PAY, instance, 1, 0, 2)
        bucket.machines.transactions.apply(transactions.encode_decision(end))
        await bucket.save()
        await bucket.landed(1, partition=HERE)
        machines, _ = await bucket.restored()
        assert bucket.releases(machines) == {TARGET: [], ELSEWHERE: [2]}
        assert machines.holds.state_of(bucket.ids[1]) is HoldState.RELEASED

    restoring(work)


def test_a_transaction_that_followed_one_in_the_snapshot_ends_that_one() -> None:
    async def work(bucket: Coordinator) -> None:
        instance = bucket.begin()
        bucket.decide(await bucket.put_block(lane_of(instance, 1), 1, TARGET))
        await bucket.save()
        await bucket.put_block(lane_of(instance, 2), 2, TARGET)
        await bucket.put_block(lane_of(instance, 2), 3, ELSEWHERE)
        await bucket.landed(2, partition=HERE)
        machines, _ = await bucket.restored()
        assert bucket.releases(machines) == {ELSEWHERE: [3]}
        assert not machines.holds.open, "no decision would end the first one any more"
        assert machines.holds.state_of(bucket.ids[1]) is HoldState.DROPPED
        third = HeldLane(TARGET, lane_of(instance, 3), (HeldBlock(HoldId(9, 0), 1, 0, 0, 5),))
        assert machines.holds.apply(encode_decision(HoldDecision("key", 0, (third,)))) == (HoldState.HELD,)

    restoring(work)


def test_a_producer_learns_that_its_positions_did_not_move() -> None:
    async def work(bucket: Coordinator) -> None:
        instance = bucket.begin(id_=MOVING)
        bucket.decide(await bucket.put_block(lane_of(instance, 1), 1, TARGET))
        await bucket.save()
        await bucket.landed(1, partition=HERE)
        machines, _ = await bucket.restored()
        end = CommitTransactionDecision(MOVING, instance, 1, 0, 1, moves_of("m", 1, {}, {}))
        answer = machines.transactions.apply(transactions.encode_decision(end))
        assert isinstance(answer, TransactionCommittedError)
        assert "before a restore" in str(answer)

    restoring(work)


@pytest.mark.parametrize("landed", [False, True])
def test_transactions_of_a_log_without_a_snapshot_are_released_if_a_target_has_a_block(*, landed: bool) -> None:
    async def work(bucket: Coordinator) -> None:
        lane = lane_of(bucket.begin(), 1)
        await bucket.put_block(lane, 1, TARGET)
        await bucket.put_block(lane, 2, ELSEWHERE)
        if landed:
            await bucket.landed(1, partition=HERE)
        machines, _ = await bucket.restored()
        assert bucket.releases(machines) == ({ELSEWHERE: [2]} if landed else {})

    restoring(work)


def test_blocks_of_a_deleted_topic_hide_no_others_of_their_object() -> None:
    async def work(bucket: Coordinator) -> None:
        lane = lane_of(bucket.begin(), 1)
        await bucket.put_block(lane, 1, TARGET)
        deleted = HeldLane(Target("gone", "ee" * 16, 0), lane, (HeldBlock(HoldId(9, 0), 1, 0, 0, 5),))
        await bucket.put_block(lane, 2, ELSEWHERE, before=(deleted,))
        await bucket.landed(1, partition=HERE)
        machines, _ = await bucket.restored()
        assert bucket.releases(machines) == {ELSEWHERE: [2]}

    restoring(work)
