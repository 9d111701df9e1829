"""Transactions with staged parts: what is too large for held blocks comes all at once, or not at all."""

from __future__ import annotations

from typing import Any, cast

import pytest

from memq.broker.broker import Broker
from memq.client.producer.producer import AsyncProducer
from memq.client.transactions import staging
from memq.client.transactions.transaction import AsyncTransaction
from memq.errors import DeniedError, TooLargeError
from memq.format.key import is_staged_object
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import run
from tests.component.test_transactions import cluster_of, producer_of, stored, until_stored
from tests.partition_owners import pointers

LARGE = TRANSACTION_TARGET_BYTES_MAX // 100_000 + 2  # records of 100,000 bytes that are more than a part of blocks


class Stores:
    """The way of a client to the brokers' store, which is in memory."""

    def __init__(self, broker: Broker) -> None:
        self.store = broker.services.store

    def __call__(self, name: str) -> object:
        return self.store

    async def close(self) -> None:
        """The brokers use it."""


def staging_producer(
    monkeypatch: pytest.MonkeyPatch, brokers: list[Broker], *, group: str | None = None
) -> AsyncProducer:
    """Return a producer that can open the brokers' store."""
    monkeypatch.setattr(staging, "OpenStores", lambda *parts, patient: Stores(brokers[0]))
    return producer_of(brokers, codec="none", producer_group=group)


def large(number: int) -> str:
    return f"{number}".ljust(100_000, "x")


async def sent_large(transaction: AsyncTransaction) -> None:
    async with transaction:
        for number in range(LARGE):
            await transaction.send("other", large(number))


def staged_keys(brokers: list[Broker]) -> list[str]:
    return [key for key in cast(MemoryHandler, brokers[0].services.store).objects if "/staged/" in key]


def test_a_staged_part_lies_in_one_batch_and_comes_with_the_held_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers), staging_producer(monkeypatch, brokers) as producer:
            async with producer.transaction(visible=True) as transaction:
                await transaction.send("other", "small")
                for number in range(LARGE):
                    await transaction.send("out", large(number), partition=1)
                    if number in (10, LARGE - 1):
                        await transaction.flush()  # what is held then is replaced by the staged part
                assert await stored(brokers, "out", "other") == []
                await transaction.send("out", "last", partition=1)
            expected = [large(number) for number in range(LARGE)] + ["last", "small"]
            assert await stored(brokers, "out", "other") == sorted(expected)
            topic = await brokers[0].partitions.current_topic("out", "")
            assert [each.records for each in await pointers(brokers[0], topic, 1) if each.records] == [LARGE + 1]
            assert len([key for key in staged_keys(brokers) if is_staged_object(key)]) == 2

    run(work())


@pytest.mark.parametrize("commit", [True, False])
def test_a_prepared_staged_part_comes_by_its_decision(monkeypatch: pytest.MonkeyPatch, commit: bool) -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers), staging_producer(monkeypatch, brokers, group="shop") as producer:
            async with producer.transaction(visible=commit) as transaction:
                for number in range(LARGE):
                    await transaction.send("other", large(number))
                await transaction.prepare()
                assert await stored(brokers, "other") == []
                if not commit:
                    await transaction.abort()
            async with producer.transaction(visible=True) as transaction:
                await transaction.send("other", "next")
                await transaction.prepare()
            expected = [large(number) for number in range(LARGE)] if commit else []
            await until_stored(brokers, [*expected, "next"], "other")
            assert len(staged_keys(brokers)) == 2 + commit, "object, manifest, and the mark of a commit alone"

    run(work())


def test_a_producer_without_a_way_to_the_store_is_refused() -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers), producer_of(brokers, codec="none") as producer:
            with pytest.raises(TooLargeError, match="can't be opened here"):
                await sent_large(producer.transaction())
            assert await stored(brokers, "other") == []

    run(work())


def test_a_store_that_refuses_a_part_rolls_the_transaction_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers), staging_producer(monkeypatch, brokers) as producer:
            put = MemoryHandler.put

            async def refused(store: MemoryHandler, key: str, *rest: Any) -> None:
                if "/staged/" in key:
                    raise DeniedError("this process may only read")
                await put(store, key, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(MemoryHandler, "put", refused)
                with pytest.raises(DeniedError):
                    await sent_large(producer.transaction())
            async with producer.transaction(visible=True) as transaction:
                await transaction.send("other", "next")
            assert await stored(brokers, "other") == ["next"]

    run(work())
