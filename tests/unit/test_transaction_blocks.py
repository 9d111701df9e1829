"""The `with` blocks of transactions, blocking and not: their end ends the transaction."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.transactions.transaction import AsyncTransaction, Transaction
from memq.errors import (
    InvalidRequestError,
)
from memq.groups.remote import wire_of
from memq.protocol.transaction_messages import EndTransaction
from memq.runtime.clock import SystemClock
from memq.topic import Committed, Position
from tests.unit.transactional_cluster import INPUT, Cluster, Reader, Way, on_cluster, set_bound


@pytest.mark.parametrize("blocking", [True, False])
def test_a_with_block_moves_positions_sends_full_requests_and_ends_once(
    *, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 10)
    set_bound(monkeypatch, "REQUEST_BYTES_MAX", 10)

    async def route(topic: str) -> Any:
        return Way()

    async def work() -> None:
        cluster, reader = Cluster(SystemClock()), SimpleNamespace(_core=Reader())
        loop = asyncio.get_running_loop()

        def program() -> None:
            def run(work: Any) -> Any:
                return asyncio.run_coroutine_threadsafe(work, loop).result(20)

            with Transaction(cluster.core, run, lambda topic: cast(Any, Way())) as t:
                t.send("clicks", b"x" * 20)
                assert len(cluster.held()) == 1, "a full request is sent at once"
                t.commit_positions(cast(Any, reader))
            with Transaction(cluster.core, run, lambda topic: cast(Any, Way())) as t:
                t.abort()
                with pytest.raises(InvalidRequestError, match="the transaction was rolled back"):
                    t.abort()

        if blocking:
            await asyncio.to_thread(program)
        else:
            async with AsyncTransaction(cluster.core, route) as t:
                await t.send("clicks", b"x" * 20)
                assert len(cluster.held()) == 1
                await t.commit_positions(cast(Any, reader))
            async with AsyncTransaction(cluster.core, route) as t:
                await t.abort()
                with pytest.raises(InvalidRequestError, match="the transaction was rolled back"):
                    await t.abort()
        assert cluster.ends() == [(1, True, 1), (2, False, 0)]
        (end, _) = (each for each in cluster.asked if isinstance(each, EndTransaction))
        assert end.after == [wire_of(INPUT, Committed(Position(0, 5)))]

    asyncio.run(work())


@pytest.mark.parametrize("end", ["commit", "error", "abort"])
def test_the_end_of_a_with_block_ends_its_transaction(end: str) -> None:
    async def work(cluster: Cluster) -> None:
        async def route(topic: str) -> Any:
            return Way()

        transaction = AsyncTransaction(cluster.core, route)
        with pytest.raises(InvalidRequestError, match="has not begun"):
            await transaction.flush()
        try:
            async with transaction as t:
                await t.send("clicks", b"x")
                await t.flush()
                assert cluster.held() == [[(0, cluster.held()[0][0][1])]]
                if end == "abort":
                    await t.abort()
                if end == "error":
                    raise KeyError
        except KeyError:
            assert end == "error"
        assert cluster.ends() == [(1, end == "commit", 1 if end == "commit" else 0)]
        with pytest.raises(InvalidRequestError, match="a transaction is used once"):
            await transaction.__aenter__()

    on_cluster(work)


@pytest.mark.parametrize("end", ["commit", "error", "abort"])
def test_the_end_of_a_blocking_with_block_ends_its_transaction(end: str) -> None:
    async def work(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()

        def begin(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(20)

        def program() -> None:
            transaction = Transaction(cluster.core, begin, lambda topic: cast(Any, Way()))
            try:
                with transaction as t:
                    t.send("clicks", b"x")
                    t.flush()
                    assert len(cluster.held()) == 1
                    if end == "abort":
                        t.abort()
                    if end == "error":
                        raise KeyError
            except KeyError:
                assert end == "error"
            with pytest.raises(InvalidRequestError, match="a transaction is used once"):
                transaction.__enter__()

        await asyncio.to_thread(program)
        assert cluster.ends() == [(1, end == "commit", 1 if end == "commit" else 0)]

    async def run() -> None:
        await work(Cluster(SystemClock()))

    asyncio.run(run())
