"""A direct writer alone: the blocks that it sends, and the order number of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from memq.client.bulk import direct_writer
from memq.client.bulk.block_cutter import BLOCK_BYTES_MAX, Cut
from memq.client.bulk.direct_writer import ORDERS_MAX, DirectIdentity, DirectWriter
from memq.client.producer.open_block import Route
from memq.errors import IdentityConflictError, OutcomeUnknownError
from memq.format.blocks.columns import open_block
from tests.unit.blocks import seal
from tests.unit.producer_parts import Hands

TASK = DirectIdentity("nightly", "checkpoint-1", 7, 3)
LARGE = bytes(BLOCK_BYTES_MAX - 100)  # a block holds one of them


class Owner:
    """Takes the blocks of all orders, and refuses blocks and ends as a test says."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self.refused_puts: set[int] = set()  # by their number
        self.refused_ends = 0
        self.refused_firsts: dict[int, list[int]] = {}  # by order the blocks, by first sequence, that are refused later
        self.puts = 0
        self.failure: Exception | None = None
        self.end_failure: Exception | None = None

    def taken(self, order: int) -> list[tuple[int, list[bytes | None]]]:
        """Return first sequence and values of each block of an order."""
        found = []
        for cut in self.writers[order].cuts:
            reader = open_block(seal(cut.builder, first_sequence=cut.first).data)
            found.append((cut.first, list(reader.values())))
        return found


class Writer:
    """Replaces the sender of one order."""

    def __init__(self, owner: Owner, producer_id: int) -> None:
        self.owner, self.producer_id = owner, producer_id
        self.cuts: list[Cut] = []
        self.refused: list[Cut] = []
        self.ends: list[str] = []
        self.number = len(owner.writers)
        owner.writers.append(self)

    async def route(self, topic: str) -> Route:
        return Hands().route

    async def put(self, cut: Cut) -> None:
        number, self.owner.puts = self.owner.puts, self.owner.puts + 1
        if self.owner.failure is not None:
            raise self.owner.failure
        if number in self.owner.refused_puts:
            raise IdentityConflictError(f"block {number} has other records")
        self.cuts.append(cut)

    async def drain(self) -> None:
        if self.owner.end_failure is not None:
            raise self.owner.end_failure
        if self.number < self.owner.refused_ends:
            raise IdentityConflictError("a block has other records")

    async def take_refused(self) -> list[Cut]:
        firsts = self.owner.refused_firsts.get(self.number, [])
        refused = [cut for cut in self.cuts if cut.first in firsts]
        self.cuts = [cut for cut in self.cuts if cut.first not in firsts]
        return refused

    async def close(self) -> None:
        self.ends.append("closed")

    async def abandon(self) -> None:
        self.ends.append("abandoned")


def run(monkeypatch: pytest.MonkeyPatch, work: Callable[[Owner, DirectWriter], Coroutine[Any, Any, None]]) -> Owner:
    owner = Owner()

    def made(bootstrap: Any, runtime: Any, producer_id: int, **settings: Any) -> Writer:
        return Writer(owner, producer_id)

    monkeypatch.setattr(direct_writer, "FixedIdentityWriter", made)

    async def whole() -> None:
        await work(owner, DirectWriter("localhost:1", TASK))

    asyncio.run(whole())
    return owner


@pytest.mark.parametrize("many", [True, False])
def test_every_record_is_sent_once_in_blocks_that_follow_on(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    values = [bytes([number]) + LARGE for number in range(3)] + [b"last"]

    async def work(owner: Owner, writer: DirectWriter) -> None:
        await writer.add_many("clicks", [])
        if many:
            await writer.add_many("clicks", values)
        else:
            for value in values:
                await writer.add("clicks", value)
        assert owner.puts, "full blocks do not wait for the end"
        await writer.finish()

    owner = run(monkeypatch, work)
    blocks = owner.taken(0)
    assert [value for _, taken in blocks for value in taken] == values
    assert [first for first, _ in blocks] == [0, 1, 2, 3][: len(blocks)]
    assert [writer.ends for writer in owner.writers] == [["closed"]]


def test_a_refused_block_and_all_that_follows_go_under_the_next_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [bytes([number]) + LARGE for number in range(4)]

    async def work(owner: Owner, writer: DirectWriter) -> None:
        owner.refused_puts, owner.refused_firsts = {2}, {0: [1]}
        await writer.add_many("clicks", values)
        await writer.finish()

    owner = run(monkeypatch, work)
    assert [writer.producer_id for writer in owner.writers] == [TASK.producer_id(0), TASK.producer_id(1)]
    assert owner.taken(0) == [(0, values[:1])]
    assert owner.taken(1) == [(number, values[number : number + 1]) for number in (1, 2, 3)]
    assert [writer.ends for writer in owner.writers] == [["closed"]] * 2


def test_each_order_takes_what_the_one_before_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third order sends again what the second one was refused, not what the first one was."""
    values = [bytes([number]) + LARGE for number in range(3)]

    async def work(owner: Owner, writer: DirectWriter) -> None:
        owner.refused_ends, owner.refused_firsts = 2, {0: [1, 2], 1: [2]}
        await writer.add_many("clicks", values)
        await writer.finish()

    owner = run(monkeypatch, work)
    assert [[first for first, _ in owner.taken(order)] for order in range(3)] == [[0], [1], [2]]


def test_there_are_so_many_orders_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(owner: Owner, writer: DirectWriter) -> None:
        owner.refused_ends = ORDERS_MAX
        await writer.add("clicks", b"a")
        with pytest.raises(IdentityConflictError):
            await writer.finish()
        await writer.abandon()

    owner = run(monkeypatch, work)
    assert [writer.producer_id for writer in owner.writers] == [TASK.producer_id(order) for order in range(ORDERS_MAX)]
    assert [writer.ends for writer in owner.writers] == [["abandoned"]] * ORDERS_MAX


@pytest.mark.parametrize("at_end", [False, True])
def test_a_block_whose_end_is_unknown_changes_no_order(monkeypatch: pytest.MonkeyPatch, at_end: bool) -> None:
    async def work(owner: Owner, writer: DirectWriter) -> None:
        await writer.add("clicks", b"a")
        if at_end:
            owner.end_failure = OutcomeUnknownError("no answer")
        else:
            owner.failure = OutcomeUnknownError("no answer")
        with pytest.raises(OutcomeUnknownError):
            await writer.finish()
        await writer.abandon()

    assert len(run(monkeypatch, work).writers) == 1


def test_the_identity_of_a_task_is_the_same_in_every_version() -> None:
    """A batch that an earlier version of memq began is ended by this one, without copies."""
    assert DirectIdentity("w", "s", 0, 0).producer_id() == 1273145759193334825
    assert DirectIdentity("w", "s", 0, 2).producer_id() == 7101020384642021542
    assert DirectIdentity("w", "s", 0, 2).producer_id(order=1) != 7101020384642021542
