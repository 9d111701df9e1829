"""The check-back in a cluster of three brokers: the databases of programs decide, whoever dies."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.client.transactions.admin import ShownTransaction
from memq.client.transactions.undecided import CheckAnswer, TransactionChecker, UndecidedTransaction
from memq.errors import InvalidRequestError
from tests.brokers import run
from tests.component.order_program import TOPICS
from tests.component.test_transactions import ProgramError, cluster_of, producer_of, stored, until_stored
from tests.soak import repetitions, report

ASKS_SOON = {"transaction_check_interval_ms": 300}


def says(answer: CheckAnswer, seen: list[UndecidedTransaction] | None = None) -> TransactionChecker:
    """Return a checker with one answer; it notes what it is asked in `seen`."""

    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        if seen is not None:
            seen.append(found)
        return answer

    return checker


async def leave(producer: AsyncProducer, value: str, note: str = "") -> None:
    """Leave a prepared transaction undecided."""
    with suppress(ProgramError):
        async with producer.transaction(note) as transaction:
            await transaction.send("other", value)
            await transaction.send("out", value, partition=1)
            await transaction.prepare()
            raise ProgramError


async def until_all_decided(broker: Broker) -> None:
    """Wait until no transaction is undecided."""
    async with AsyncAdmin(broker.address) as admin, asyncio.timeout(20):
        while await admin.transactions():
            pass


async def until_shown(brokers: list[Broker], state: str) -> ShownTransaction:
    """Return the only undecided transaction when it has this state."""
    async with AsyncAdmin([each.address for each in brokers]) as admin, asyncio.timeout(20):
        while True:
            found = await admin.transactions()
            if [each.state for each in found] == [state]:
                return found[0]


@pytest.mark.soak
def test_consumers_have_what_the_database_has_after_each_kill_between_the_two_commits(tmp_path: Path) -> None:
    """A tenth of 1,000 orders kill their program; here two of seven: after `prepare`, and after the database."""
    count, every = repetitions(7, 1_001), repetitions(3, 10)
    file = tmp_path / "orders.sqlite"

    async def work() -> None:
        async with cluster_of(timeout_s=repetitions(60, 1_200), **ASKS_SOON) as (_, brokers):
            brokers_text = ",".join(each.address for each in brokers)
            command = [sys.executable, "-m", "tests.component.order_program", brokers_text, str(file)]
            lives = 0
            while True:
                lives += 1
                program = await asyncio.create_subprocess_exec(
                    *command, str(count), str(every), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
                )
                assert program.stdin is not None
                assert program.stdout is not None
                if await program.stdout.readline() == b"done\n":
                    break
                assert await program.wait() == 9, "it dies at the chosen moments alone"
            assert lives == count // every + 1
            with closing(sqlite3.connect(file)) as database:
                orders = [number for (number,) in database.execute("SELECT id FROM orders")]
            assert len(orders) < count, "some died before their database committed"
            expected = [f"{number}.{part}" for number in orders for part in range(len(TOPICS))]
            await until_stored(brokers, expected, "out", "other")
            await until_all_decided(brokers[0])
            assert await stored(brokers, "out", "other") == sorted(expected)
            program.stdin.close()
            assert await program.wait() == 0
            report(f"{count} orders, {lives - 1} kills: consumers have the {len(orders)} orders of the database")

    asyncio.run(work())


def test_a_live_producer_of_the_group_decides_about_what_another_one_left() -> None:
    async def work() -> None:
        async with cluster_of(**ASKS_SOON) as (_, brokers):
            shop = {"producer_group": "shop", "transaction_timeout_ms": 1_000}
            asked, strange = list[UndecidedTransaction](), list[UndecidedTransaction]()
            left = producer_of(brokers, **shop)
            other = producer_of(
                brokers, transactional_id="pay-2", transaction_checker=says(CheckAnswer.COMMIT, asked), **shop
            )
            stranger = producer_of(brokers, transactional_id="x", transaction_checker=says(CheckAnswer.ABORT, strange))
            async with left, other, stranger:
                await leave(left, "a", note="order 7")
                assert await stored(brokers, "other") == []
                async with left.transaction() as transaction:
                    await transaction.send("other", "b")
                    await transaction.prepare()
                await until_stored(brokers, ["a", "a", "b"], "out", "other")
            (found,) = asked
            assert (found.transactional_id, found.producer_group, found.note) == ("pay", "shop", b"order 7")
            assert (sorted(found.topics), found.tries) == (["other", "out"], 1)
            assert strange == []

    run(work())


@pytest.mark.parametrize("answer", [CheckAnswer.COMMIT, CheckAnswer.ABORT])
def test_a_prepared_transaction_survives_its_producer_and_its_coordinator(answer: CheckAnswer) -> None:
    async def work() -> None:
        async with cluster_of(**ASKS_SOON) as (_, brokers):
            dead = producer_of(brokers, producer_group="shop")
            await leave(dead, "a")
            for broker in brokers[:2]:
                await broker.close()
            arguments = {"producer_group": "shop", "transaction_checker": says(answer)}
            async with producer_of(brokers, **arguments) as producer:
                async with producer.transaction() as transaction:  # the former instance is gone: no time-out first
                    await transaction.send("other", "b")
                    await transaction.prepare()
                left = ["a", "a"] if answer is CheckAnswer.COMMIT else []
                await until_all_decided(brokers[2])
                await until_stored(brokers[2:], [*left, "b"], "out", "other")
            await dead.close()

    run(work())


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_no_checker_knows_is_parked_and_an_operator_decides(commit: bool) -> None:
    async def work() -> None:
        settings = {"transaction_check_interval_ms": 100, "transaction_check_tries": 2}
        async with cluster_of(1, **settings) as (_, brokers), AsyncAdmin(brokers[0].address) as admin:
            asked = list[UndecidedTransaction]()
            arguments = {"transaction_checker": says(CheckAnswer.UNKNOWN, asked), "transaction_timeout_ms": 1_000}
            async with producer_of(brokers, **arguments) as producer:
                await leave(producer, "a")
                assert (await until_shown(brokers, "prepared")).tries == 0
                shown = await until_shown(brokers, "parked")
                assert (shown.producer_group, shown.tries, shown.blocks) == ("pay", 2, {"other": 1, "out": 1})
                assert [each.tries for each in asked] == [1, 2]
                assert {each.id for each in asked} == {shown.id}
                assert await stored(brokers, "out", "other") == []
                decide = admin.commit_transaction if commit else admin.abort_transaction
                await decide("pay", transaction=shown.id)
                await until_stored(brokers, ["a", "a"] if commit else [], "out", "other")
                assert await admin.transactions() == []

    run(work())


def test_a_wrong_use_of_the_check_back_is_a_typed_error() -> None:
    async def work() -> None:
        async with cluster_of(1) as (_, brokers):
            async with producer_of(brokers, producer_group="shop") as producer:
                with pytest.raises(InvalidRequestError, match="is not prepared"):
                    async with producer.transaction() as transaction:
                        await transaction.send("other", "never")
                async with producer.transaction() as transaction:
                    await transaction.send("other", "a")
                    await transaction.prepare()
                    with pytest.raises(InvalidRequestError, match="is prepared"):
                        await transaction.send("other", "late")
            assert await stored(brokers, "other") == ["a"]

    run(work())
