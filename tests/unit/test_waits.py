"""Waits of a client: each is logged once after a time, with its begin, and ends with the answer."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

import pytest

from memq.errors import NotFoundError, QueueError
from memq.runtime.logs import EventLog
from memq.runtime.waits import ANSWER_S, KEPT_S, LATE_AFTER_S, OWING_MAX, TEXT_CHARS_MAX, Waits
from tests.brokers import log_lines
from tests.skipping_loop import run_skipping, skip, skipping_runtime

START = "2025-10-09T08:53:20Z"
STORE = "store 'main'"


def waits_that_log() -> Waits:
    runtime = skipping_runtime()
    return Waits(runtime.clock, EventLog(runtime.clock))


async def hang(
    waits: Waits,
    what: str,
    seconds: float,
    error: Exception | None = None,
    who: str = STORE,
    *,
    answered: bool = False,
) -> None:
    with waits.on(who, what) as wait:
        await skip(seconds)
        wait.answered = answered
        if error is not None:
            raise error


def test_one_line_for_each_that_owes_and_one_when_it_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        waits = waits_that_log()
        asked = [asyncio.create_task(hang(waits, f"object {number}", 10)) for number in range(5)]
        await skip(LATE_AFTER_S - 0.1)
        assert waits.describe() == ""
        await skip(0.2)
        assert log_lines(caplog, logging.INFO) == [f"client.waits: {STORE} has not answered since {START} (object 0)"]
        await hang(waits, "another", 0.1)
        assert STORE in waits.describe(), "what it owes for long is not answered by something else"
        await asyncio.gather(*asked)
        assert log_lines(caplog, logging.INFO)[1:] == [f"client.answered: {STORE} answers again"]
        assert waits.describe() == ""
        for _ in range(20):
            await hang(waits, "quick", 1)
        assert len(log_lines(caplog, logging.INFO)) == 2, "a store that is busy answers"

    with caplog.at_level(logging.INFO, "memq"):
        run_skipping(work())


def test_a_failure_is_no_answer_and_is_named_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        waits = waits_that_log()
        for _ in range(5):
            with pytest.raises(QueueError):
                await hang(waits, "object 0", 1, QueueError("no space left"))
        said = f"{STORE} fails since {START}"
        assert waits.describe() == waits.describe(failing=True) == f"{said}: no space left"
        again = asyncio.create_task(hang(waits, "object 0", 1))
        await skip(0.1)
        assert waits.describe() == f"{said} (object 0): no space left", "since the first of the tries"
        await again
        assert waits.describe() == ""
        with pytest.raises(QueueError):
            await hang(waits, "object 1", LATE_AFTER_S, QueueError("gone"))
        await skip(KEPT_S)
        assert waits.describe() == "", "nobody tries it again"

    run_skipping(work())


def test_errors_that_are_answers_and_what_is_cancelled_leave_nothing() -> None:
    async def work() -> None:
        waits = waits_that_log()
        with pytest.raises(NotFoundError):
            await hang(waits, "object 0", 10, NotFoundError("no such object"))
        with pytest.raises(QueueError):
            await hang(waits, "POLL", 10, QueueError("the broker says so"), answered=True)
        given_up = asyncio.create_task(hang(waits, "object 0", 100))
        await skip(50)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert waits.describe() == ""
        one, other = (asyncio.create_task(hang(waits, "object 0", 100)) for _ in range(2))
        await skip(2)
        newer = asyncio.create_task(hang(waits, "object 1", 100))
        await skip(2)
        one.cancel()
        other.cancel()
        await asyncio.gather(one, other, return_exceptions=True)
        assert waits.describe() == "", "what is left is owed for 2 s"
        newer.cancel()

    run_skipping(work())


def test_a_failure_of_long_ago_makes_no_later_wait_late() -> None:
    async def work() -> None:
        waits = waits_that_log()
        with pytest.raises(QueueError):
            await hang(waits, "POLL", 1, QueueError("gone"))
        await skip(KEPT_S)
        asked = asyncio.create_task(hang(waits, "POLL", LATE_AFTER_S + 1))
        await skip(LATE_AFTER_S - 0.1)
        assert waits.describe() == ""
        await skip(0.2)
        assert STORE in waits.describe()
        assert "fails" not in waits.describe()
        await asked

    run_skipping(work())


def test_no_answer_in_time_is_none() -> None:
    async def work() -> None:
        waits = Waits(skipping_runtime().clock)
        with pytest.raises(TimeoutError):
            await hang(waits, "a pointer", 30, TimeoutError())
        assert waits.describe(failing=True) == f"{STORE} fails since {START}: no answer in 30 s"
        await hang(waits, "a pointer", 1)
        assert waits.describe() == ""

    run_skipping(work())


def test_waits_can_be_described_while_the_loop_notes_more() -> None:
    async def work() -> None:
        waits = Waits(skipping_runtime().clock)
        with ExitStack() as more:

            class Meanwhile(str):
                """No cause; while one thread asks for it, that of the loop notes another wait."""

                __slots__ = ()

                def __bool__(self) -> bool:
                    more.enter_context(waits.on(STORE, "object 1"))
                    return False

            more.enter_context(waits.on(STORE, "object 0")).cause = Meanwhile()
            await skip(LATE_AFTER_S)
            assert waits.describe() == f"{STORE} has not answered since {START} (object 0)"

    run_skipping(work())


def test_a_wait_since_an_earlier_time_is_logged_after_time_for_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        waits = waits_that_log()
        await skip(LATE_AFTER_S)
        with waits.on(STORE, "acks", 0.0):
            assert log_lines(caplog) == []
            await skip(ANSWER_S)
            assert log_lines(caplog) == [f"client.waits: {STORE} has not answered since {START} (acks)"]

    run_skipping(work())


def test_names_and_text_of_waits_are_bounded() -> None:
    async def work() -> None:
        waits = Waits(skipping_runtime().clock)
        asked = [asyncio.create_task(hang(waits, "a", 100, who=f"store {number}")) for number in range(OWING_MAX + 5)]
        await skip(LATE_AFTER_S)
        assert len(waits.describe()) == TEXT_CHARS_MAX
        assert waits.describe().startswith("store 5 has not answered"), "the oldest ones made room"
        await asyncio.gather(*asked)
        assert waits.describe() == ""

    run_skipping(work())
