"""Questions to Kafka that share requests: what a request may answer, and how questions end without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification.kafka.request_coalescer import REQUESTS_MAX, RequestCoalescer
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.skipping_loop import LoopClock, run_skipping, skip

ASKED_MAX = 3
LONG_S = 1_000.0
Answer = int | MemqError


class Kafka:
    """Answers a question `subject.number` with the number of the request, after a time."""

    def __init__(self, takes_s: float = 1.0, error: Exception | None = None) -> None:
        self.takes_s, self.error = takes_s, error
        self.requests: list[list[str]] = []
        self.failed: list[BaseException] = []

    async def request(self, asked: Sequence[str]) -> dict[str, Answer]:
        self.requests.append(list(asked))
        number = len(self.requests)
        await skip(self.takes_s)
        if self.error is not None:
            raise self.error
        return {question: QueueError(question) if "bad" in question else number for question in asked}


def over(kafka: Kafka, work: Callable[[RequestCoalescer[str, int], TaskOwner], Awaitable[None]]) -> None:
    async def run() -> None:
        tasks = TaskOwner(kafka.failed.append, EventLog(LoopClock()))
        coalescer: RequestCoalescer[str, int] = RequestCoalescer(
            kafka.request, lambda question: question.partition(".")[0], ASKED_MAX, tasks, "test"
        )
        try:
            await work(coalescer, tasks)
        finally:
            await tasks.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_skipping(run())


def ask(coalescer: RequestCoalescer[str, int], *questions: str) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(coalescer.ask(question)) for question in questions]


# ---- shared requests ----------------------------------------------------------------------------------


def test_one_request_answers_equal_questions_and_one_question_of_each_subject() -> None:
    kafka = Kafka()

    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        asked = ask(coalescer, "a.1", "a.1", "a.2", "b.1", "c.1", "d.1")
        assert await asyncio.gather(*asked) == [1, 1, 2, 1, 1, 2]
        assert kafka.requests == [["a.1", "b.1", "c.1"], ["a.2", "d.1"]]

    over(kafka, work)


def test_a_question_is_answered_by_a_request_that_begins_after_it() -> None:
    kafka = Kafka()

    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        first = ask(coalescer, "a.1")
        await skip(0.5)
        second = ask(coalescer, "a.1")
        assert await asyncio.gather(*first, *second) == [1, 2]
        assert await coalescer.ask("a.1") == 3

    over(kafka, work)


def test_so_many_requests_are_under_way_and_later_questions_share_the_next() -> None:
    kafka = Kafka()

    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        asked = []
        for number in range(REQUESTS_MAX + 2):
            asked += ask(coalescer, f"s{number}")
            await skip(0.01)
        assert len(kafka.requests) == REQUESTS_MAX
        assert await asyncio.gather(*asked) == [1, 2, 3, 4, 5, 5]

    over(kafka, work)


def test_an_error_is_the_answer_to_its_question_alone() -> None:
    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        bad, good = ask(coalescer, "bad", "good")
        with pytest.raises(QueueError, match="bad"):
            await bad
        assert await good == 1

    over(Kafka(), work)


# ---- questions without an answer ----------------------------------------------------------------------


def test_a_caller_that_gives_up_takes_no_answer_from_others() -> None:
    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        impatient, patient = ask(coalescer, "a.1", "a.1")
        await skip(0.5)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert await patient == 1

    over(Kafka(), work)


def test_the_stop_ends_all_questions_as_closed_those_too_whose_request_has_not_begun() -> None:
    kafka = Kafka(takes_s=LONG_S)

    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        asked = []
        for number in range(REQUESTS_MAX + 1):
            asked += ask(coalescer, f"s{number}")
            await skip(0.01)
        await tasks.stop()
        for each in asked:
            with pytest.raises(ClosedError):
                await each
        assert len(kafka.requests) == REQUESTS_MAX
        with pytest.raises(ClosedError):
            await coalescer.ask("late")

    over(kafka, work)


@pytest.mark.parametrize("steps", range(8))
def test_a_caller_that_is_cancelled_while_its_request_is_stopped_stays_cancelled(steps: int) -> None:
    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        (asked,) = ask(coalescer, "a")
        await skip(0.5)
        stopping = asyncio.create_task(tasks.stop())
        for _ in range(steps):
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError if asked.cancel() else ClosedError):
            await asked
        await stopping

    over(Kafka(takes_s=LONG_S), work)


def test_a_request_that_dies_ends_its_questions_and_is_reported_to_the_owner() -> None:
    kafka = Kafka(error=ValueError("a fault of the library"))

    async def work(coalescer: RequestCoalescer[str, int], tasks: TaskOwner) -> None:
        for each in ask(coalescer, "a", "b"):
            with pytest.raises(ClosedError):
                await each
        assert kafka.failed == [kafka.error]

    over(kafka, work)
