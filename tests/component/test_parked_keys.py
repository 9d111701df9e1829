"""Parked keys: those of letters that wait, also if a letter was stored at a position that nobody knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from memq.client.admin import AsyncAdmin
from memq.client.listener.dead_letter_queue import AsyncDeadLetterQueue
from memq.client.listener.open_records import OrderKey
from memq.client.listener.parked_keys import ParkedKeys
from memq.client.listener.retry_records import LetterNote, LetterState, OriginalRecord
from memq.client.listener.retry_topics import RetryTopics
from memq.errors import NotReadyError
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Position
from tests.brokers import run, running_broker

A, B = ("orders", b"a"), ("orders", b"b")


class Group:
    """A group of listeners: its letters, and the parked keys that one of them knows."""

    def __init__(self, address: str, admin: AsyncAdmin) -> None:
        runtime = Runtime()
        self.admin = admin
        self.keys: dict[OrderKey, Position | None] = {}
        self.parked = ParkedKeys("billing", admin, [address], runtime, self.keys)
        self.side = RetryTopics("billing", runtime, [parse_address(address)], admin, audit=False)
        self.queue = AsyncDeadLetterQueue(address, "billing", runtime=runtime)

    async def letter(self, key: OrderKey, state: LetterState = "parked") -> Position:
        note = LetterNote(OriginalRecord(key[0], Position(0, 1), 0), state, 3, 0, "broken")
        at = await self.side.send_letter(note, b"value", key[1], (), None)
        assert at is not None
        return at

    async def known(self) -> dict[OrderKey, Position | None]:
        """Return the parked keys after a refresh."""
        await self.parked.refresh()
        return dict(self.keys)


@asynccontextmanager
async def group() -> AsyncIterator[Group]:
    async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
        made = Group(broker.address, admin)
        await made.side.make()
        try:
            yield made
        finally:
            await made.side.close()
            await made.queue.close()


def test_a_member_learns_parked_keys_and_frees_those_whose_letters_are_handled() -> None:
    async def work() -> None:
        async with group() as billing:
            assert await billing.known() == {}
            await billing.letter(A)
            first_of_b = await billing.letter(B)
            await billing.letter(("orders", b"c"), "dead")
            last = await billing.letter(A)
            assert await billing.known() == {A: last, B: first_of_b}
            await billing.queue.purge(2)
            assert await billing.known() == {A: last}, "another letter of this key waits"
            await billing.queue.purge()
            assert await billing.known() == {}

    run(work())


@pytest.mark.parametrize("read_before", [False, True])
def test_a_key_whose_letter_has_an_unknown_position_is_free_when_it_is_handled(*, read_before: bool) -> None:
    """The ack of the letter was lost; that of its second try does not name a position."""

    async def work() -> None:
        async with group() as billing:
            at = await billing.letter(A)
            if read_before:
                assert await billing.known() == {A: at}
            billing.parked.add(A, None)
            if not read_before:
                assert await billing.known() == {A: at}
                billing.parked.add(A, None)
            await billing.queue.purge()
            assert await billing.known() == {}

    run(work())


def test_a_key_with_an_unknown_position_stays_parked_while_its_letter_waits() -> None:
    async def work() -> None:
        async with group() as billing:
            at = await billing.letter(A)
            assert await billing.known() == {A: at}
            billing.parked.add(A, None)
            assert await billing.known() == {A: at}
            billing.parked.add(B, None)
            with pytest.MonkeyPatch.context() as broken:

                async def fails(_: object) -> object:
                    raise NotReadyError("not yet")

                broken.setattr(billing.admin, "group", fails)
                with pytest.raises(NotReadyError):
                    await billing.known()
            assert billing.keys == {A: at, B: None}
            assert await billing.known() == {A: at}, "no letter of it waits"

    run(work())


def test_a_key_that_is_parked_during_a_refresh_stays_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with group() as billing:
            ask = billing.admin.group

            async def slow(name: str) -> object:
                found = await ask(name)
                billing.parked.add(A, None)
                return found

            await billing.letter(B)
            await billing.queue.purge()
            billing.parked.add(A, None)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(billing.admin, "group", slow)
                assert await billing.known() == {A: None}
            assert await billing.known() == {}

    run(work())
