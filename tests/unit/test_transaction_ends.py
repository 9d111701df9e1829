"""A producer learns how its transaction has ended, also if an operator or a lost answer decided it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from memq.client.transactions.transaction import AsyncTransaction, Transaction
from memq.errors import (
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    TimedOutError,
    TransactionCommittedError,
    UnreachableError,
)
from memq.protocol.transaction_messages import EndTransaction, HoldTransaction
from memq.topic import Committed, Position
from tests.unit.transactional_cluster import INPUT, Cluster, Reader, Way, fields, on_cluster

AWAY = [UnreachableError("away")] * 100
MOVED = [{INPUT: Committed(Position(0, 5))}]


def transaction_of(cluster: Cluster) -> AsyncTransaction:
    async def route(topic: str) -> Any:
        return Way()

    return AsyncTransaction(cluster.core, route)


async def end(
    transaction: AsyncTransaction, cluster: Cluster, *, reader: Reader | None = None, error: BaseException | None = None
) -> None:
    """Run the block of a transaction; an operator commits it then, if it fails with an error."""
    async with transaction as open_:
        if reader is not None:
            await open_.commit_positions(cast(Any, type("Consumer", (), {"_core": reader})))
            cluster.errors[EndTransaction] = list(AWAY)
        if error is not None:
            cluster.committed |= {1, 2}
            raise error


async def commit_without_answer(cluster: Cluster) -> tuple[AsyncTransaction, Reader]:
    """End a transaction with positions by a commit whose answer is lost."""
    transaction, reader = transaction_of(cluster), Reader()
    with pytest.raises(OutcomeUnknownError, match="transaction 1 is committed") as caught:
        await end(transaction, cluster, reader=reader)
    assert "settle()" in caught.value.hint
    cluster.errors.clear()
    cluster.asked.clear()
    assert reader.stored == []
    return transaction, reader


# ---- lost answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_producer_asks_how_a_commit_without_an_answer_has_ended(*, committed: bool) -> None:
    async def work(cluster: Cluster) -> None:
        transaction, reader = await commit_without_answer(cluster)
        cluster.committed = {1} if committed else set()
        cluster.errors[EndTransaction] = list(AWAY)
        with pytest.raises(TimedOutError):
            await transaction.settle()
        cluster.errors.clear()
        cluster.asked.clear()
        for _ in range(2):
            assert await transaction.settle() is committed
        assert cluster.ends() == [(1, False, 0)], "it is decided, and not asked again"
        assert reader.stored == (MOVED if committed else [])
        await cluster.core.begin()
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work)


@pytest.mark.parametrize("committed", [True, False])
def test_the_next_transaction_settles_a_commit_without_an_answer_for_its_program_and_consumer(
    *, committed: bool
) -> None:
    """If the consumer did not learn it, each later transaction would move its positions from where they are no more."""

    async def work(cluster: Cluster) -> None:
        transaction, reader = await commit_without_answer(cluster)
        cluster.committed = {1} if committed else set()
        async with transaction_of(cluster) as second:
            assert reader.stored == (MOVED if committed else [])
            assert await transaction.settle() is committed
            with pytest.raises(InvalidRequestError, match="transaction 2 is open"):
                await second.settle()
        assert cluster.ends() == [(1, False, 0), (2, True, 0)]
        assert await second.settle()

    on_cluster(work)


def test_a_transaction_that_did_not_begin_has_no_end() -> None:
    async def work(cluster: Cluster) -> None:
        with pytest.raises(InvalidRequestError, match="has not begun"):
            await transaction_of(cluster).settle()
        blocking = Transaction(cluster.core, lambda work: work, cast(Any, None))
        with pytest.raises(InvalidRequestError, match="has not begun"):
            blocking.settle()

    on_cluster(work)


def test_a_program_without_an_event_loop_asks_how_its_transaction_has_ended() -> None:
    async def work(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()

        def run(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        def program() -> list[bool]:
            ends = []
            for error in (None, ValueError()):
                transaction = Transaction(cluster.core, run, cast(Any, None))
                transaction.__enter__()
                cluster.errors[EndTransaction] = [InvalidRequestError("no")] if error else []
                transaction.__exit__(type(error) if error else None, error, None)
                ends.append(transaction.settle())
            return ends

        assert await asyncio.to_thread(program) == [True, False]

    asyncio.run(_on_loop(work))


async def _on_loop(work: Any) -> None:
    await work(Cluster())


# ---- operators -------------------------------------------------------------------------------------


def test_a_roll_back_of_a_transaction_that_an_operator_committed_is_an_error() -> None:
    async def work(cluster: Cluster) -> None:
        transaction, reader = transaction_of(cluster), Reader()
        async with transaction as open_:
            await open_.commit_positions(cast(Any, type("Consumer", (), {"_core": reader})))
            cluster.committed = {1}
            with pytest.raises(TransactionCommittedError, match="transaction 1 can't be rolled back"):
                await open_.abort()
            await asyncio.sleep(0)
        assert await transaction.settle()
        assert cluster.ends() == [(1, False, 0)]
        assert reader.stored == [], "an operator moves no positions"
        assert (await cluster.core.begin()).number == 2
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work)


def test_an_error_of_the_program_after_a_commit_of_an_operator_is_the_cause_of_another() -> None:
    async def work(cluster: Cluster) -> None:
        error, transaction = ValueError("of the program"), transaction_of(cluster)
        with pytest.raises(TransactionCommittedError) as caught:
            await end(transaction, cluster, error=error)
        assert caught.value.__cause__ is error
        transaction = transaction_of(cluster)
        with pytest.raises(asyncio.CancelledError):  # the caller waits for this one
            await end(transaction, cluster, error=asyncio.CancelledError())
        assert await transaction.settle()

    on_cluster(work)


def test_records_that_an_operator_did_not_wait_for_are_no_quiet_loss() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"late"), 0)
        cluster.committed = {1}
        refusal = InvalidRequestError("transaction 1 has ended")
        cluster.errors[HoldTransaction] = [refusal]
        with pytest.raises(TransactionCommittedError, match="the records that were held") as caught:
            await cluster.core.commit(transaction)
        assert caught.value.__cause__ is refusal
        assert transaction.ended == "is committed"

    on_cluster(work)


def test_a_producer_learns_that_an_operator_committed_without_its_positions() -> None:
    async def work(cluster: Cluster) -> None:
        transaction, reader = await cluster.core.begin(), Reader()
        await cluster.core.take_positions(transaction, cast(Any, reader), None)
        cluster.committed = {1}
        cluster.errors[EndTransaction] = [TransactionCommittedError("no position has moved")]
        with pytest.raises(TransactionCommittedError, match="no position has moved"):
            await cluster.core.commit(transaction)
        assert (reader.stored, await cluster.core.settle(transaction)) == ([], True)
        assert cluster.ends() == [(1, True, 0)]

    on_cluster(work)


# ---- records ---------------------------------------------------------------------------------------


def test_a_record_that_comes_while_the_others_are_held_is_committed_with_them() -> None:
    async def work(cluster: Cluster) -> None:
        transaction, begins = await cluster.core.begin(), list[asyncio.Task[Any]]()

        def meanwhile(ask: Any) -> None:
            if isinstance(ask, EndTransaction):
                begins.append(asyncio.create_task(cluster.core.begin()))
                with pytest.raises(InvalidRequestError, match="the transaction is being committed"):
                    transaction.add(cast(Any, Way()), fields(b"third"), 1)
            elif len(cluster.held()) == 1:
                transaction.add(cast(Any, Way()), fields(b"second"), 1)

        transaction.add(cast(Any, Way()), fields(b"first"), 0)
        cluster.on_asked = meanwhile
        await cluster.core.commit(transaction)
        with pytest.raises(InvalidRequestError, match="a transaction of this producer is open"):
            await begins[0]
        assert [[partition for partition, _ in blocks] for blocks in cluster.held()] == [[0], [1]]
        assert cluster.ends() == [(1, True, 2)]

    on_cluster(work)


@pytest.mark.parametrize("error", [UnreachableError("away"), InvalidRequestError("no")])
def test_an_error_of_the_program_hides_that_no_broker_rolls_back(error: MemqError) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = transaction_of(cluster)
        cluster.errors[EndTransaction] = [error] * 100
        with pytest.raises(ValueError, match="of the program"):
            await end(transaction, cluster, error=ValueError("of the program"))
        cluster.committed.clear()
        cluster.errors.clear()
        assert not await transaction.settle()

    on_cluster(work)
