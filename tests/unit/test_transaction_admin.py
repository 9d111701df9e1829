"""Operators of transactions, blocking: what they ask brokers, and what they get."""

from __future__ import annotations

from typing import Any

import pytest

from memq.client.admin import Admin
from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool
from memq.client.transactions.admin import ShownTransaction
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import ListTransactions, SettleTransaction, WireOpenTransaction

OPEN = WireOpenTransaction(
    name="pay", group="g", instance=7, number=3, open_ms=100, timeout_ms=5_000, blocks={"clicks": 2}
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of admins; brokers answer with an open transaction."""
    requests: list[Any] = []

    async def reach(pool: LinkPool, timeout_s: float) -> None: ...

    async def once(router: BrokerRouter, api: Api, request: AdminRequest, answer: type[Any], **_: float) -> AdminAnswer:
        assert (api, answer) == (Api.ADMIN, AdminAnswer)
        requests.append(request.ask)
        return AdminAnswer(transactions=[OPEN])

    monkeypatch.setattr(LinkPool, "reach", reach)
    monkeypatch.setattr(BrokerRouter, "once", once)
    return requests


def test_an_operator_asks_for_open_transactions_with_or_without_a_proof(asked: list[Any]) -> None:
    shown = [ShownTransaction("pay", "g", 100, 5_000, {"clicks": 2}, "7.3")]
    with Admin("127.0.0.1:1") as admin:
        assert admin.transactions() == shown
        assert admin.transactions(proven=True) == shown
        assert admin.transactions(proven=False) == shown
    assert asked == [ListTransactions(proven=True), ListTransactions(proven=True), ListTransactions(proven=False)]


def test_an_operator_settles_the_transaction_of_a_producer_with_its_group(asked: list[Any]) -> None:
    with Admin("127.0.0.1:1") as admin:
        admin.commit_transaction("pay")
        admin.commit_transaction("pay", "g")
        admin.abort_transaction("pay", "g")
        admin.abort_transaction("pay")
        admin.commit_transaction("pay", transaction="7.3")
    assert asked == [
        *(
            SettleTransaction(name="pay", group=group, commit=commit)
            for group, commit in (("", True), ("g", True), ("g", False), ("", False))
        ),
        SettleTransaction(name="pay", group="", commit=True, transaction="7.3"),
    ]
