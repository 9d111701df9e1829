"""The coordinator of transactions: requests become decisions, refusals become errors, old ones end. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import pytest

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import (
    InvalidRequestError,
    MovedError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    ProducerFencedError,
    ThrottledError,
    TooLargeError,
    TransactionAbortedError,
)
from memq.format.held_object import Target
from memq.runtime.logs import EventLog
from memq.state_log.state_log import StateLog
from memq.transactions.coordinator import (
    TIMEOUT_CHECK_S,
    UNUSED_ID_KEPT_MS,
    VISIBLE_S,
    CheckSettings,
    TransactionCoordinator,
    TransactionState,
)
from memq.transactions.machine import (
    ANY_BLOCKS,
    TRANSACTIONS_MACHINE,
    AbortDecision,
    BeginDecision,
    CommitTransactionDecision,
    TransactionalId,
    TransactionDecision,
    decode_decision,
)
from tests.skipping_loop import now_s, run_skipping, skip
from tests.unit.hold_shard import A, B, Shard
from tests.unit.instant_log import InstantLog

ID, OTHER = TransactionalId("pay", ""), TransactionalId("bill", "")
TIMEOUT_MS = 10_000
TRIES, INTERVAL_MS = 3, 4_000
Kind = TypeVar("Kind", bound=TransactionDecision)


class MachineLog(InstantLog):
    """Notes the machine of each decision."""

    def __init__(self, machines: ServiceMachines) -> None:
        super().__init__(machines.by_name())
        self.names: list[str] = []

    async def propose(self, machine: str, body: bytes) -> object:
        self.names.append(machine)
        return await super().propose(machine, body)


class Coordinated:
    """A coordinator with the keeper of its service partition."""

    def __init__(self) -> None:
        self.machines = ServiceMachines()
        self.log = MachineLog(self.machines)
        self.shard = Shard(self.machines.holds, self.log)
        self.coordinator = TransactionCoordinator(
            cast(StateLog, self.log),
            self.machines.transactions,
            self.machines.holds,
            self.shard.keeper,
            self.shard.runtime.clock,
            self.shard.counters,
            cast(EventLog, self.shard),
            CheckSettings(TRIES, INTERVAL_MS),
        )
        self.sent = 0

    async def begin(self, id_: TransactionalId = ID, token: int = 1) -> int:
        return await self.coordinator.begin(id_, token, TIMEOUT_MS)

    async def hold(self, instance: int, number: int, *targets: Target, id_: TransactionalId = ID) -> None:
        blocks = []
        for target in targets or (A,):
            self.sent += 1
            blocks.append(self.shard.new(self.sent, target, lane=f"{instance}.{number}"))
        await self.coordinator.hold(id_, instance, number, blocks)

    def decisions(self, kind: type[Kind]) -> list[Kind]:
        named = [
            body
            for name, (_, body) in zip(self.log.names, self.log.applied, strict=True)
            if name == TRANSACTIONS_MACHINE
        ]
        return [each for each in map(decode_decision, named) if isinstance(each, kind)]

    def open(self) -> list[str]:
        return [each.name for each, known in self.machines.transactions.ids.items() if known.open]


def coordinated(work: Callable[[Coordinated], Awaitable[None]]) -> None:
    """Run a test."""

    async def run() -> None:
        made = Coordinated()
        try:
            await work(made)
        finally:
            await made.shard.tasks.stop()

    run_skipping(run())


def test_a_coordinator_begins_an_instance_at_its_time() -> None:
    async def work(made: Coordinated) -> None:
        await skip(3)
        now_ms = made.shard.now_ms()
        first = await made.begin()
        assert made.decisions(BeginDecision) == [BeginDecision(ID, 1, TIMEOUT_MS, now_ms, now_ms - UNUSED_ID_KEPT_MS)]
        second = await made.begin(token=2)
        assert second > first
        with pytest.raises(ProducerFencedError):
            await made.begin(token=1)

    coordinated(work)


def test_a_commit_brings_the_records_to_their_targets_and_is_answered_again() -> None:
    async def work(made: Coordinated) -> None:
        made.shard.run()
        instance = await made.begin()
        await made.hold(instance, 1, A, B, A)
        await skip(1)
        assert made.shard.appended == []
        for _ in range(2):
            await made.coordinator.commit(ID, instance, 1, 3, None)
            await skip(1)
            assert made.shard.appended == [(1, A, 1, [1, 3]), (1, B, 1, [2])]
        block = made.shard.new(1, lane=f"{instance}.1")
        await made.coordinator.hold(ID, instance, 1, [block])  # comes again: it is there
        assert await made.coordinator.abort(ID, instance, 1, "was left") is False, "it is committed"
        counters = made.shard.counters
        assert (counters.committed_transactions, counters.aborted_transactions) == (1, 0), "once"
        with pytest.raises(InvalidRequestError, match="has ended"):
            await made.hold(instance, 1)

    coordinated(work)


def test_a_coordinator_waits_until_all_records_of_a_transaction_are_in_their_logs() -> None:
    async def work(made: Coordinated) -> None:
        made.shard.append_s = 2.0
        made.shard.run()
        instance = await made.begin()
        await made.hold(instance, 1, A, B)
        assert await made.coordinator.until_visible(instance, 1), "nothing is on its way before the commit"
        await made.coordinator.commit(ID, instance, 1, 2, None)
        await made.hold(instance, 2, A)
        began_s = now_s()
        assert await made.coordinator.until_visible(instance, 1)
        assert now_s() - began_s == 2.0
        assert await made.coordinator.until_visible(instance, 1)
        made.shard.append_s = 1.5 * VISIBLE_S
        await made.coordinator.commit(ID, instance, 2, 1, None)
        began_s = now_s()
        assert not await made.coordinator.until_visible(instance, 2)
        assert now_s() - began_s == VISIBLE_S
        assert await made.coordinator.until_visible(instance, 1), "the other one is"
        assert await made.coordinator.until_visible(instance, 2)
        made.log.errors = [OutcomeUnknownError("no proof")]
        with pytest.raises(NotReadyError):
            await made.coordinator.until_visible(instance, 2)

    coordinated(work)


def test_a_transaction_without_all_its_blocks_is_rolled_back_with_the_cause() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        with pytest.raises(TransactionAbortedError, match="has 1 of its 2 blocks"):
            await made.coordinator.commit(ID, instance, 1, 2, None)
        with pytest.raises(TransactionAbortedError, match="has 1 of its 2 blocks"):
            await made.coordinator.hold(ID, instance, 1, [made.shard.new(made.sent, lane=f"{instance}.1")])
        await made.hold(instance, 2)
        assert await made.coordinator.abort(ID, instance, 2, "was left") is True
        assert made.machines.holds.open == {}
        with pytest.raises(TransactionAbortedError, match="transaction 2 of producer 'pay' was left"):
            await made.hold(instance, 2)

    coordinated(work)


def test_a_commit_that_no_entry_takes_rolls_back() -> None:
    """The producer was told of a roll-back, the transaction was open, and an operator could commit it."""

    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        made.log.errors = [TooLargeError("decision of machine 'transactions' has 112860 bytes")]
        with pytest.raises(TransactionAbortedError, match="was rolled back: decision of machine"):
            await made.coordinator.commit(ID, instance, 1, 1, None)
        assert made.open() == []

    coordinated(work)


def test_a_repeated_commit_that_is_too_large_now_gets_the_answer_of_the_first_one() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        await made.coordinator.commit(ID, instance, 1, 1, None)
        made.log.errors = [TooLargeError("decision of machine 'transactions' has 112860 bytes")]
        await made.coordinator.commit(ID, instance, 1, 1, None)
        counters = made.shard.counters
        assert (made.log.errors, counters.committed_transactions, counters.aborted_transactions) == ([], 1, 0)

    coordinated(work)


def test_a_commit_that_is_repeated_meanwhile_or_after_a_refusal_counts_once() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        for number, errors in ((1, []), (2, [ThrottledError("many wait")])):
            await made.hold(instance, number)
            made.log.errors = list(errors)
            for _ in errors:
                with pytest.raises(ThrottledError):
                    await made.coordinator.commit(ID, instance, number, 1, None)
            commits = (made.coordinator.commit(ID, instance, number, 1, None) for _ in range(2))
            await asyncio.gather(*commits)
            assert made.shard.counters.committed_transactions == number
        assert await made.coordinator.abort(ID, instance, 2, "late") is False
        assert made.shard.counters.aborted_transactions == 0

    coordinated(work)


def test_a_begin_that_is_repeated_meanwhile_counts_one_roll_back() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin(token=1)
        await made.hold(instance, 1)
        first, second = await asyncio.gather(made.begin(token=2), made.begin(token=2))
        assert first == second
        assert made.shard.counters.aborted_transactions == 1
        await made.begin(token=3)
        assert made.shard.counters.aborted_transactions == 1, "nothing was open"

    coordinated(work)


def test_an_unknown_outcome_lets_the_producer_ask_again() -> None:
    async def work(made: Coordinated) -> None:
        for call in (
            made.begin,
            lambda: made.coordinator.commit(ID, 1, 1, 0, None),
            lambda: made.coordinator.abort(ID, 1, 1, "was left"),
            made.coordinator.transactions,
            lambda: made.coordinator.settle(ID, commit=True),
        ):
            made.log.errors = [OutcomeUnknownError("it may count")]
            with pytest.raises(NotReadyError, match="the outcome is unknown: it may count"):
                await cast(Awaitable[object], call())
            assert made.log.errors == []

    coordinated(work)


# ---- operators -----------------------------------------------------------------------------------


def test_an_operator_sees_the_open_transactions_with_their_age_and_blocks() -> None:
    async def work(made: Coordinated) -> None:
        first, second = await made.begin(), await made.begin(OTHER)
        await made.begin(TransactionalId("idle", ""))
        await made.hold(first, 1, A, B, Target(A.topic, A.topic_id, 7))
        expected = TransactionState(ID, first, 1, 0, TIMEOUT_MS, {"clicks": 2, "orders": 1})
        assert await made.coordinator.transactions() == [expected]
        made.shard.tasks.start(made.coordinator.run(), "coordinator")
        await skip(4.1)
        await made.hold(second, 1, B, id_=OTHER)
        await skip(1.4)
        assert [(each.id, each.open_ms) for each in await made.coordinator.transactions()] == [
            (ID, 5_500),
            (OTHER, 1_250),
        ]
        made.log.on_fresh = lambda: made.machines.transactions.ids.pop(ID, None)
        assert [each.id for each in await made.coordinator.transactions()] == [OTHER], "a proof comes first"

    coordinated(work)


def test_an_operator_settles_an_open_transaction() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        for id_ in (ID, OTHER):
            with pytest.raises(NotFoundError, match=f"producer '{id_.name}' has no open transaction"):
                await made.coordinator.settle(id_, commit=True)
        await made.hold(instance, 3, A, B)
        await skip(2)
        await made.coordinator.settle(ID, commit=True)
        assert made.decisions(CommitTransactionDecision) == [
            CommitTransactionDecision(ID, instance, 3, made.shard.now_ms(), ANY_BLOCKS)
        ]
        assert list(made.machines.holds.units) == [A, B]
        await made.hold(instance, 4)
        await made.coordinator.settle(ID, commit=False)
        with pytest.raises(TransactionAbortedError, match="4 of producer 'pay' was rolled back by an operator"):
            await made.hold(instance, 4)
        made.log.on_fresh = lambda: made.machines.transactions.ids.pop(ID, None)
        with pytest.raises(NotFoundError):
            await made.coordinator.settle(ID, commit=True)

    coordinated(work)


# ---- time-outs -----------------------------------------------------------------------------------


def test_a_transaction_that_is_open_for_longer_than_its_time_is_rolled_back() -> None:
    async def work(made: Coordinated) -> None:
        await made.begin(TransactionalId("idle", ""))
        instance = await made.begin()
        made.shard.tasks.start(made.coordinator.run(), "coordinator")
        await skip(1)
        await made.hold(instance, 1)
        met_s = now_s() + TIMEOUT_CHECK_S  # the next check
        await skip(met_s + TIMEOUT_MS / 1_000 + 0.01 - now_s())
        assert made.open() == ["pay"], "for exactly its time"
        await skip(TIMEOUT_CHECK_S)
        assert made.open() == []
        with pytest.raises(TransactionAbortedError, match="was open for over 10000 ms"):
            await made.hold(instance, 1)
        await made.hold(instance, 2)
        await skip(TIMEOUT_MS / 1_000)
        assert made.open() == ["pay"], "the time of each transaction begins with it"
        await skip(1)
        assert made.open() == []
        assert [each.id for each in made.decisions(AbortDecision)] == [ID] * 2
        counters = made.shard.counters
        assert (counters.expired_transactions, counters.aborted_transactions) == (2, 2)

    coordinated(work)


def test_a_new_owner_gives_open_transactions_their_whole_time() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        await skip(100)
        made.shard.tasks.start(made.coordinator.run(), "coordinator")
        await skip(TIMEOUT_MS / 1_000)
        assert made.open() == ["pay"]
        await skip(1)
        assert made.open() == []

    coordinated(work)


def test_a_throttled_roll_back_is_tried_again_and_the_others_are_rolled_back() -> None:
    async def work(made: Coordinated) -> None:
        for id_ in (ID, OTHER):
            await made.hold(await made.begin(id_), 1, id_=id_)
        made.shard.tasks.start(made.coordinator.run(), "coordinator")
        await skip(TIMEOUT_MS / 1_000 + 0.1)
        made.log.errors = [ThrottledError("full")]
        await skip(TIMEOUT_CHECK_S)
        assert made.open() == ["pay"]
        await skip(TIMEOUT_CHECK_S)
        assert made.open() == []

    coordinated(work)


def test_a_coordinator_ends_with_its_log() -> None:
    async def work(made: Coordinated) -> None:
        await made.hold(await made.begin(), 1)
        running = asyncio.create_task(made.coordinator.run())
        await skip(TIMEOUT_MS / 1_000)
        made.log.errors = [MovedError("another owner")]
        with pytest.raises(MovedError):
            await running

    coordinated(work)
