"""The client of transactions: a refusal of one try says nothing about the try before."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from memq.client.broker_router import BrokerRouter
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions.core import TransactionalCore
from memq.errors import (
    InvalidRequestError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    ProducerFencedError,
    TransactionAbortedError,
    UnreachableError,
)
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.transaction_messages import EndTransaction
from memq.runtime.runtime import Runtime

COMMITTED, ROLLED_BACK = AdminAnswer(committed=True), AdminAnswer()


class Brokers:
    """Answers each request to end a transaction with the next of `answers`, and all others with success."""

    def __init__(self, *answers: AdminAnswer | MemqError) -> None:
        self._answers = list(answers)
        self.ends: list[bool] = []  # whether each was a commit

    async def __call__(self, _api: object, message: AdminRequest, _answer: object, *, timeout_s: float) -> AdminAnswer:
        if not isinstance(message.ask, EndTransaction):
            return AdminAnswer(transactional=7)
        self.ends.append(message.ask.commit)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, MemqError):
            raise answer
        return answer


def core_of(brokers: Brokers) -> TransactionalCore:
    settings = ProducerSettings(transactional_id="pay", delivery_timeout_s=1.0)
    return TransactionalCore(settings, Runtime(), cast(BrokerRouter, brokers))


def commit(brokers: Brokers) -> str:
    """Commit a transaction without records; return how it ended for the program."""

    async def work() -> str:
        core = core_of(brokers)
        transaction = await core.begin()
        try:
            await core.commit(transaction)
        finally:
            assert transaction.ended, "the next one can begin"
        return transaction.ended

    return asyncio.run(work())


def test_a_producer_believes_no_refusal_of_a_second_try() -> None:
    """The first commit landed, and its answer was lost; the second broker did not know a topic of it."""
    brokers = Brokers(UnreachableError("lost"), NotFoundError("topic 'in' is unknown"), COMMITTED)
    assert commit(brokers) == "is committed"
    assert brokers.ends == [True, True, False]


def test_a_producer_gets_a_refusal_when_the_transaction_is_rolled_back() -> None:
    with pytest.raises(NotFoundError, match="unknown"):
        commit(Brokers(NotFoundError("topic 'in' is unknown"), ROLLED_BACK))


def test_a_producer_asks_no_more_after_a_proven_roll_back() -> None:
    brokers = Brokers(TransactionAbortedError("was open for too long"))
    with pytest.raises(TransactionAbortedError):
        commit(brokers)
    assert brokers.ends == [True]


def test_a_producer_asks_no_more_after_it_is_fenced() -> None:
    brokers = Brokers(ProducerFencedError("another instance has begun"))
    with pytest.raises(ProducerFencedError):
        commit(brokers)
    assert brokers.ends == [True]


def test_the_roll_back_after_a_refusal_is_repeated_until_a_broker_answers() -> None:
    brokers = Brokers(NotFoundError("topic 'in' is unknown"), UnreachableError("lost"), COMMITTED)
    assert commit(brokers) == "is committed"
    assert brokers.ends == [True, False, False]


def test_a_refused_commit_that_no_broker_rolls_back_has_an_unknown_end() -> None:
    brokers = Brokers(InvalidRequestError("no"), InvalidRequestError("no"))
    with pytest.raises(OutcomeUnknownError, match="none rolls it back"):
        commit(brokers)


def test_the_next_transaction_settles_the_one_before_and_no_refusal_passes_for_that() -> None:
    async def work() -> None:
        brokers = Brokers(
            InvalidRequestError("no"), InvalidRequestError("no"), InvalidRequestError("still no"), ROLLED_BACK
        )
        core = core_of(brokers)
        with pytest.raises(OutcomeUnknownError):
            await core.commit(await core.begin())
        with pytest.raises(InvalidRequestError, match="still no"):
            await core.begin()
        await core.begin()
        assert brokers.ends == [True, False, False, False]

    asyncio.run(work())
