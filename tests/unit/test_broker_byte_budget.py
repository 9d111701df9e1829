"""The bound on bytes in flight: never exceeded, first come first served, no wake-up lost or doubled."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.runtime.tasks import ByteBudget


async def settle() -> None:
    """Let every task come as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Borrowers:
    """Tasks that hold bytes until they are asked to give them back."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.order: list[int] = []
        self.holding: dict[int, int] = {}
        self._gates: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, number: int, count: int) -> None:
        self._gates[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._borrow(number, count))

    async def _borrow(self, number: int, count: int) -> None:
        async with self.budget.lend(count):
            self.order.append(number)
            self.holding[number] = min(count, self.budget.bytes_max)
            try:
                await self._gates[number].wait()
            finally:
                del self.holding[number]

    def give_back(self, number: int) -> None:
        self._gates[number].set()


def test_borrowers_are_served_in_order_even_if_a_later_one_would_fit() -> None:
    async def work() -> None:
        borrowers = Borrowers(ByteBudget(10))
        for number, count in enumerate((8, 5, 1, 4)):
            borrowers.start(number, count)
        await settle()
        assert borrowers.order == [0]
        borrowers.give_back(0)
        await settle()
        assert borrowers.order == [0, 1, 2, 3]
        for number in (1, 2, 3):
            borrowers.give_back(number)
        await settle()
        assert borrowers.budget.lent_bytes == 0

    asyncio.run(work())


def test_a_wish_above_the_bound_gets_all_of_it() -> None:
    async def work() -> None:
        budget = ByteBudget(10)
        async with budget.lend(1_000):
            assert budget.lent_bytes == 10
        assert budget.lent_bytes == 0

    asyncio.run(work())


def test_cancelled_borrower_lets_the_next_one_pass() -> None:
    """A large wish that was cancelled once kept small ones waiting until somebody else gave something back."""

    async def work() -> None:
        borrowers = Borrowers(ByteBudget(10))
        for number, count in enumerate((6, 10, 1)):
            borrowers.start(number, count)
        await settle()
        borrowers.tasks[1].cancel()
        await settle()
        assert borrowers.order == [0, 2]
        for number in (0, 2):
            borrowers.give_back(number)
        await settle()
        assert borrowers.budget.lent_bytes == 0

    asyncio.run(work())


def test_borrower_cancelled_at_its_wake_up_returns_the_bytes() -> None:
    async def work() -> None:
        borrowers = Borrowers(ByteBudget(10))
        for number in range(3):
            borrowers.start(number, 10)
        await settle()
        borrowers.give_back(0)
        await asyncio.sleep(0)  # the first gives back and wakes the second, which has not run yet
        borrowers.tasks[1].cancel()
        await settle()
        assert borrowers.order[-1] == 2
        borrowers.give_back(2)
        await settle()
        assert borrowers.budget.lent_bytes == 0

    asyncio.run(work())


def test_error_inside_the_loan_returns_the_bytes() -> None:
    async def work() -> None:
        budget = ByteBudget(10)
        with pytest.raises(ValueError, match="inside"):
            async with budget.lend(7):
                raise ValueError("inside")
        assert budget.lent_bytes == 0

    asyncio.run(work())


@given(seed=st.integers(0, 1 << 32))
def test_any_coming_and_going_stays_within_the_bound_and_ends(seed: int) -> None:
    async def work() -> None:
        dice = random.Random(seed)
        borrowers = Borrowers(ByteBudget(100))
        for number in range(30):
            borrowers.start(number, dice.choice((0, 1, 30, 60, 100, 200)))
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            if borrowers.holding and dice.random() < 0.5:
                borrowers.give_back(dice.choice(list(borrowers.holding)))
            if dice.random() < 0.2:
                borrowers.tasks[dice.randrange(number + 1)].cancel()
            assert sum(borrowers.holding.values()) <= borrowers.budget.lent_bytes <= 100
        for number in range(30):
            borrowers.give_back(number)
        await asyncio.gather(*borrowers.tasks.values(), return_exceptions=True)
        assert borrowers.budget.lent_bytes == 0

    asyncio.run(work())


def test_spare_bytes_are_what_is_free_and_never_waited_for() -> None:
    async def work() -> None:
        budget = ByteBudget(10)
        borrowers = Borrowers(budget)
        borrowers.start(0, 6)
        await settle()
        with budget.lend_spare(3) as some, budget.lend_spare(3) as rest, budget.lend_spare(3) as none:
            assert (some, rest, none) == (3, 1, 0)
            borrowers.start(1, 3)
            await settle()
            assert borrowers.order == [0]
        await settle()
        assert borrowers.order == [0, 1], "spare bytes that come back wake who waits"
        borrowers.start(2, 4)
        await settle()
        with budget.lend_spare(1) as spare:
            assert spare == 0, "the next borrower waits for all that is free"
        for number in (0, 2, 1):
            borrowers.give_back(number)
            await settle()
        assert budget.lent_bytes == 0

    asyncio.run(work())
