"""Transactions in a cluster of brokers: all or nothing, fenced instances, and positions with the decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.client.transactions.transaction import AsyncTransaction
from memq.errors import (
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    ProducerFencedError,
    TooLargeError,
    TransactionAbortedError,
)
from memq.groups.remote import wire_of
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import connect_link
from memq.protocol.transaction_messages import BeginTransactions, EndTransaction, WireTransaction
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, ReadPartition
from tests.brokers import run
from tests.component.cluster_rig import TIMEOUT_S, Rig, rig


class ProgramError(Exception):
    """An error of the program in a transaction."""


@asynccontextmanager
async def cluster_of(
    count: int = 3, timeout_s: float = TIMEOUT_S, **settings: Any
) -> AsyncIterator[tuple[Rig, list[Broker]]]:
    """Yield a cluster with the topics `in`, `out` and `other`."""
    async with rig(timeout_s=timeout_s) as cluster:
        brokers = [await cluster.start(name, **settings) for name in "abc"[:count]]
        for broker in brokers:
            await broker.partitions.refresh()
        async with AsyncAdmin(brokers[0].address) as admin:
            for topic, partitions in {"in": 1, "out": 3, "other": 1}.items():
                await admin.create_topic(topic, partitions=partitions)
        yield cluster, brokers


def producer_of(brokers: list[Broker], **arguments: Any) -> AsyncProducer:
    return AsyncProducer([each.address for each in brokers], **{"transactional_id": "pay", **arguments})


async def stored(brokers: list[Broker], *topics: str) -> list[str]:
    """Return the values of all records that are in the logs now, sorted."""
    addresses = [each.address for each in brokers]
    async with AsyncConsumer(addresses, list(topics), start="beginning", end="end") as consumer:
        return sorted([str(value, "utf-8") async for batch in consumer for value in batch.values() if value])


async def until_stored(brokers: list[Broker], expected: list[str], *topics: str) -> None:
    """Wait until the logs have these values and no others."""
    async with asyncio.timeout(20):
        while await stored(brokers, *topics) != sorted(expected):
            pass


async def failing(transaction: AsyncTransaction) -> None:
    async with transaction:
        await transaction.send("out", "never")
        raise ProgramError


async def slow(transaction: AsyncTransaction, brokers: list[Broker]) -> None:
    """Leave a transaction after its time-out."""
    async with transaction, AsyncAdmin(brokers[0].address) as admin, asyncio.timeout(20):
        await transaction.send("other", "late")
        await transaction.flush()
        assert await admin.transactions()
        while await admin.transactions():
            pass


async def too_large(transaction: AsyncTransaction) -> None:
    async with transaction:
        for _ in range(TRANSACTION_TARGET_BYTES_MAX // 100_000 + 2):
            await transaction.send("other", b"x" * 100_000)


def test_a_transaction_shows_all_of_its_records_or_none() -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers), producer_of(brokers) as producer:
            async with producer.transaction() as transaction:
                for number in range(30):
                    await transaction.send("out", f"a{number}", key=f"k{number}")
                await transaction.send("other", "a")
                await transaction.send_many("out", ["m0", "m1"], ["k0", None])
                with pytest.raises(InvalidRequestError, match="1 keys for 2 values"):
                    await transaction.send_many("out", ["never", "never"], ["k0"])
                assert await stored(brokers, "out", "other") == []
            expected = [f"a{number}" for number in range(30)] + ["a", "m0", "m1"]
            await until_stored(brokers, expected, "out", "other")
            with pytest.raises(ProgramError):
                await failing(producer.transaction())
            async with producer.transaction() as transaction:
                await transaction.send("out", "never")
                await transaction.abort()
            async with producer.transaction(visible=True) as transaction:
                await transaction.send("other", "b")
                await transaction.send("out", "c", partition=2)
            assert await stored(brokers, "out", "other") == sorted([*expected, "b", "c"])

    run(work())


def test_a_large_transaction_lies_in_one_batch_of_each_partition() -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers), producer_of(brokers, codec="none") as producer:
            async with producer.transaction() as transaction:
                for number in range(1_000):
                    await transaction.send("out", f"{number}".ljust(2_000, "x"), partition=number % 3)
            async with AsyncConsumer(brokers[0].address, ["out"], start="beginning") as consumer:
                sizes: dict[int, list[int]] = {}
                order: dict[int, list[int]] = {}
                while sum(map(sum, sizes.values())) < 1_000:
                    batch = await consumer.poll(20)
                    assert batch is not None
                    sizes.setdefault(batch.partition, []).append(len(batch))
                    order.setdefault(batch.partition, []).extend(
                        int(str(v, "utf-8").rstrip("x")) for v in batch.values() if v
                    )
            assert {part: len(each) for part, each in sizes.items()} == {0: 1, 1: 1, 2: 1}
            assert order == {part: list(range(part, 1_000, 3)) for part in range(3)}

    run(work())


def test_a_new_instance_fences_a_killed_producer_and_rolls_back_what_it_had_open() -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers):
            first, second = producer_of(brokers), producer_of(brokers)
            async with second:
                open_one = first.transaction()
                await open_one.__aenter__()
                await open_one.send("other", "lost")
                await open_one.flush()
                async with AsyncAdmin(brokers[1].address) as admin:
                    (shown,) = await admin.transactions()
                    assert (shown.transactional_id, shown.blocks) == ("pay", {"other": 1})
                async with second.transaction() as transaction:
                    await transaction.send("other", "kept")
                await until_stored(brokers, ["kept"], "other")
                with pytest.raises(ProducerFencedError):
                    await open_one.__aexit__(None, None, None)
                with pytest.raises(ProducerFencedError):
                    async with first.transaction():
                        pass
                assert await stored(brokers, "other") == ["kept"]
            await first.close()

    run(work())


def test_a_transaction_that_is_open_for_too_long_is_rolled_back() -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers), producer_of(brokers, transaction_timeout_ms=1_000) as producer:
            with pytest.raises(TransactionAbortedError, match="was open for over 1000 ms"):
                await slow(producer.transaction(), brokers)
            async with producer.transaction() as transaction:
                await transaction.send("other", "next")
            await until_stored(brokers, ["next"], "other")

    run(work())


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_transaction_survives_the_kill_of_its_coordinator(moment: str) -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers), producer_of(brokers) as producer:
            async with producer.transaction() as transaction:
                await transaction.send("other", "a")
                await transaction.send("out", "a", partition=1)
                await transaction.flush()
                if moment == "before":
                    for broker in brokers[:2]:
                        await broker.close()
            if moment == "after":
                for broker in brokers[:2]:
                    await broker.close()
            left = brokers[2:]
            await until_stored(left, ["a", "a"], "other", "out")
            async with producer.transaction() as transaction:
                await transaction.send("other", "b")
            await until_stored(left, ["a", "a", "b"], "other", "out")

    run(work())


def test_an_operator_settles_an_open_transaction() -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers), AsyncAdmin(brokers[0].address) as admin:
            for commit in (True, False):
                async with producer_of(brokers) as producer:
                    transaction = producer.transaction()
                    await transaction.__aenter__()
                    await transaction.send("other", f"{commit}")
                    await transaction.flush()
                    if commit:
                        await admin.commit_transaction("pay")
                        await transaction.__aexit__(None, None, None)  # the same answer
                    else:
                        await admin.abort_transaction("pay")
                        with pytest.raises(TransactionAbortedError, match="by an operator"):
                            await transaction.__aexit__(None, None, None)
            await until_stored(brokers, ["True"], "other")
            assert await admin.transactions() == []
            with pytest.raises(NotFoundError, match="no open transaction"):
                await admin.abort_transaction("pay")

    run(work())


def test_positions_move_with_the_records_or_not_at_all() -> None:
    async def work() -> None:
        async with cluster_of() as (_, brokers):
            addresses = [each.address for each in brokers]
            async with AsyncProducer(addresses) as plain:
                for number in range(6):
                    await (await plain.send("in", f"{number}"))
            done = list[str]()
            crash_at = 2
            while len(done) < 6:
                arguments: dict[str, Any] = {"group": "g", "auto_commit": False, "start": "beginning"}
                async with (
                    AsyncConsumer(addresses, ["in"], session_timeout_ms=2_000, **arguments) as consumer,
                    producer_of(brokers, transaction_group="g") as producer,
                ):
                    try:
                        async for batch in consumer:
                            async with producer.transaction() as transaction:
                                for value in batch.values():
                                    await transaction.send("out", value)
                                await transaction.commit_positions(consumer, batch)
                                if len(done) == crash_at:
                                    crash_at = -1
                                    raise ProgramError
                            done += [str(value, "utf-8") for value in batch.values() if value]
                            if len(done) == 6:
                                break
                    except ProgramError:
                        pass
            await until_stored(brokers, [str(number) for number in range(6)], "out")

    run(work())


def test_positions_in_a_topic_that_is_gone_roll_a_transaction_back() -> None:
    """The refusal named no end: the transaction was open until its time-out, and the next one was refused."""

    async def work() -> None:
        async with cluster_of(1) as (_, brokers), AsyncAdmin(brokers[0].address) as admin:
            async with AsyncProducer(brokers[0].address) as plain:
                await (await plain.send("in", "x"))
            consumer = AsyncConsumer(brokers[0].address, ["in"], group="g", auto_commit=False, start="beginning")
            async with consumer, producer_of(brokers, transaction_group="g") as producer:
                batch = await consumer.poll(20)
                transaction = producer.transaction()
                await transaction.__aenter__()
                await transaction.send("out", "never")
                await transaction.commit_positions(consumer, batch)
                await admin.delete_topic("in")
                with pytest.raises(TransactionAbortedError, match="topic 'in'"):
                    await transaction.__aexit__(None, None, None)
                async with producer.transaction() as transaction:
                    await transaction.send("out", "b")
            await until_stored(brokers, ["b"], "out")

    run(work())


def test_a_repeated_end_of_a_committed_transaction_is_answered_like_the_first() -> None:
    """Also when a topic of its positions was deleted after the first commit, and also if it is a roll-back."""

    async def work() -> None:
        async with cluster_of(1) as (_, brokers), AsyncAdmin(brokers[0].address) as admin:
            link = await connect_link(Runtime(), None, parse_address(brokers[0].address), client="test")

            async def ask(request: BeginTransactions | EndTransaction) -> AdminAnswer:
                return await link.request(Api.ADMIN, AdminRequest(ask=request), AdminAnswer)

            begun = await ask(BeginTransactions(name="pay", group="g", token=f"{7:016x}", timeout_ms=60_000))
            named = WireTransaction(name="pay", group="g", instance=begun.transactional, number=1)
            topic = (await admin.topic("in")).topic
            partition = ReadPartition(topic.name, topic.id, 0)
            after = [wire_of(partition, Committed(Position(0, 0)))]
            end = EndTransaction(transaction=named, commit=True, blocks=0, member="", generation=-1, after=after)
            assert (await ask(end)).committed
            await admin.delete_topic("in")
            assert (await ask(end)).committed
            assert (await ask(EndTransaction(transaction=named, commit=False))).committed
            end.transaction = WireTransaction(name="pay", group="g", instance=begun.transactional, number=2)
            with pytest.raises(TransactionAbortedError, match="topic 'in'"):
                await ask(end)
            link.close()

    run(work())


def test_a_wrong_use_of_transactions_is_a_typed_error() -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers), producer_of(brokers, codec="none") as producer:
            with pytest.raises(InvalidRequestError, match="in transactions only"):
                await producer.send("out", "x")
            with pytest.raises(InvalidRequestError, match="in transactions only"):
                await producer.send_many("out", ["x"])
            async with producer.transaction() as transaction:
                with pytest.raises(InvalidRequestError, match="is open"):
                    async with producer.transaction():
                        pass
                with pytest.raises(NotFoundError):
                    await transaction.send("out", "x", partition=9)
                await transaction.send("out", "x")
            with pytest.raises(InvalidRequestError, match="the transaction is committed"):
                await transaction.send("out", "late")
            with pytest.raises(InvalidRequestError, match="is used once"):
                await transaction.__aenter__()
            with pytest.raises(InvalidRequestError, match="has not begun"):
                await producer.transaction().send("out", "early")
            with pytest.raises(TooLargeError, match="a transaction has"):
                await too_large(producer.transaction())
            consumer = AsyncConsumer(brokers[0].address, ["out"], group="g")
            async with consumer, producer.transaction() as transaction:
                with pytest.raises(InvalidRequestError, match="the producer has no transaction_group"):
                    await transaction.commit_positions(consumer)
                with pytest.raises(TypeError, match="consumer must be a memq"):
                    await transaction.commit_positions(None)  # type: ignore[arg-type]
            assert await stored(brokers, "out", "other") == ["x"]
            async with AsyncProducer(brokers[0].address) as plain:
                with pytest.raises(InvalidRequestError, match="has no transactions"):
                    async with plain.transaction():
                        pass
            for wrong in ({"name": "n"}, {"acks": 1}, {"transaction_timeout_ms": 1}):
                with pytest.raises(InvalidSettingError):
                    producer_of(brokers, **wrong)
            with pytest.raises(InvalidSettingError, match="without transactional_id"):
                AsyncProducer(brokers[0].address, transaction_group="g")

    run(work())
