"""Transactions as programs use them, blocking and not: prepared ones, columns, staged parts, wrong arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.bulk.staged_object import StagedBlocks
from memq.client.transactions.staging import StagedTransaction
from memq.client.transactions.transaction import AsyncTransaction, Transaction
from memq.errors import OutcomeUnknownError
from memq.protocol.hold_messages import WireHoldId
from memq.protocol.transaction_messages import HoldStagedParts, PrepareTransaction, WireStagedPart
from memq.runtime.clock import SystemClock
from tests.unit.transactional_cluster import TOPIC, Cluster, Reader, Way, on_cluster, set_bound


async def route(topic: str) -> Any:
    return Way()


async def in_thread(cluster: Cluster, program: Callable[[Transaction], None]) -> None:
    """Run a blocking program with a transaction that has not begun."""
    loop = asyncio.get_running_loop()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    await asyncio.to_thread(program, Transaction(cluster.core, run, lambda topic: cast(Any, Way())))


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_after_prepare_leaves_the_decision_to_the_checker(*, blocking: bool) -> None:
    """The commit of the database may have counted."""

    def program(transaction: Transaction) -> None:
        with suppress(KeyError), transaction as t:
            t.send("clicks", b"x")
            t.prepare()
            raise KeyError
        with pytest.raises(OutcomeUnknownError):
            transaction.settle()

    async def work() -> None:
        cluster = Cluster(SystemClock(), producer_group="shop")
        if blocking:
            await in_thread(cluster, program)
        else:
            transaction = AsyncTransaction(cluster.core, route)
            with suppress(KeyError):
                async with transaction as t:
                    await t.send("clicks", b"x")
                    await t.prepare()
                    raise KeyError
            with pytest.raises(OutcomeUnknownError):
                await transaction.settle()
        assert sum(isinstance(each, PrepareTransaction) for each in cluster.asked) == 1
        assert cluster.ends() == []
        await cluster.core.begin()  # the producer may go on

    asyncio.run(work())


@pytest.mark.parametrize("blocking", [True, False])
def test_columns_are_sent_when_they_fill_a_request_and_wait_else(
    *, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 200)
    set_bound(monkeypatch, "REQUEST_BYTES_MAX", 10)

    async def work() -> None:
        cluster, sent = Cluster(SystemClock()), list[int]()

        def program(transaction: Transaction) -> None:
            with transaction as t:
                t.send_many("clicks", [b"x", b"y"])
                sent.append(len(cluster.held()))
                t.send_many("clicks", [b"x" * 300, b"y" * 300])
                sent.append(len(cluster.held()))

        if blocking:
            await in_thread(cluster, program)
        else:
            async with AsyncTransaction(cluster.core, route) as t:
                await t.send_many("clicks", [b"x", b"y"])
                sent.append(len(cluster.held()))
                await t.send_many("clicks", [b"x" * 300, b"y" * 300])
                sent.append(len(cluster.held()))
        assert sent == [0, 3]
        assert len(cluster.ends()) == 1

    asyncio.run(work())


@pytest.mark.parametrize("wrong", [object(), SimpleNamespace(_core=None), SimpleNamespace(_core=object())])
def test_positions_of_something_else_than_a_consumer_are_refused(wrong: object) -> None:
    async def work(cluster: Cluster) -> None:
        async with AsyncTransaction(cluster.core, route) as t:
            with pytest.raises(TypeError, match=r"must be a memq\.Consumer"):
                await t.commit_positions(cast(Any, wrong))
            await t.commit_positions(cast(Any, SimpleNamespace(_core=Reader())))

    on_cluster(work)


class Stager:
    """Notes the parts that it puts: the sequence after the last record of each."""

    def __init__(self) -> None:
        self.put: list[list[int]] = []

    async def check(self) -> None:
        """See `memq.client.transactions.staging.Stager`."""

    async def stage(self, blocks: Sequence[StagedBlocks], timeout_s: float) -> StagedTransaction:
        """See `memq.client.transactions.staging.Stager`."""
        firsts = [each.blocks[0].header.first_sequence for each in blocks]
        nexts = [each.blocks[-1].header.next_sequence for each in blocks]
        self.put.append([next_ - first for first, next_ in zip(firsts, nexts, strict=True)])
        parts = [
            WireStagedPart(
                topic=TOPIC.name,
                topic_id=TOPIC.id,
                partition=each.partition,
                hold=WireHoldId(producer="1" * 16, first=0),
                records=1,
            )
            for each in blocks
        ]
        return StagedTransaction("w", 1, parts)


def test_a_large_part_is_put_whole_and_again_only_if_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 10)
    set_bound(monkeypatch, "TRANSACTION_TARGET_BYTES_MAX", 150)

    async def work(cluster: Cluster) -> None:
        stager = cluster.core.stager = Stager()
        async with AsyncTransaction(cluster.core, route) as t:
            for _ in range(4):
                await t.send("clicks", b"x" * 20, partition=1)
            await t.flush()
            assert stager.put == [[4]]
            await t.flush()
            assert stager.put == [[4]]
            await t.send("clicks", b"x", partition=1)
            await t.send("clicks", b"x", partition=2)
            await t.flush()
            assert stager.put == [[4], [5]]
        assert stager.put == [[4], [5]]
        assert sum(isinstance(each, HoldStagedParts) for each in cluster.asked) == 2
        assert cluster.ends() == [(1, True, 2)], "a staged part counts as one block"

    on_cluster(work)
