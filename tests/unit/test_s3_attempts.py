"""Requests to a bucket on virtual time: pauses, deadlines, the breaker, hedges."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from memq.errors import StoreError, TooLargeError
from memq.limits import MIB
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.attempts import Attempts, S3Counters
from memq.storage_handlers.s3.request_policy import BreakerState
from memq.storage_handlers.s3.settings import read_bucket
from tests.skipping_loop import LongestWait, LoopClock, now_s, run_skipping, skip

SLOW_DOWN = StoreAnswer(503, "SlowDown")
BROKEN = StoreAnswer(500, "InternalError")


def attempts_with(counters: S3Counters | None = None, **settings: int) -> Attempts:
    section: dict[str, tuple[object, str]] = {name: (value, "the test") for name, value in settings.items()}
    bucket = read_bucket("s3://memq?endpoint=http://h", section)
    return Attempts(bucket, Runtime(clock=LoopClock(), random=LongestWait()), counters or S3Counters())


@pytest.mark.parametrize(
    ("answer", "pauses"),
    [(StoreAnswer(400, "BadDigest"), [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]), (SLOW_DOWN, [0.4, 0.8, 1.0, 1.0])],
)
def test_pauses_double_to_their_bound_and_end_before_the_deadline(answer: StoreAnswer, pauses: list[float]) -> None:
    begun: list[float] = []
    counters = S3Counters()

    async def work() -> None:
        attempts = attempts_with(counters, deadline_ms=6_000, request_timeout_ms=2_000)

        async def request() -> None:
            begun.append(now_s())
            raise answer

        with pytest.raises(StoreError, match=r"^object not stored") as caught:
            await attempts.run("put", 1, request, "object not stored")
        assert caught.value.__notes__[-1] == f"given up after {len(begun)} tries"
        assert 5.0 <= now_s() < 6.0

    run_skipping(work())
    assert [round(later - earlier, 3) for earlier, later in pairwise(begun)][: len(pauses)] == pauses
    assert counters.retries == len(begun) - 1
    expected = (0, len(begun), 1) if answer is SLOW_DOWN else (len(begun), 0, 0)
    assert (counters.damaged, counters.slow_downs, counters.breaker_openings) == expected


@pytest.mark.parametrize(("size", "limit_s"), [(0, 2.0), (4 * MIB, 4.0)])
def test_a_request_has_time_by_its_size(size: int, limit_s: float) -> None:
    async def work() -> None:
        counters = S3Counters()
        attempts = attempts_with(counters, deadline_ms=2_100, request_timeout_ms=2_000)
        with pytest.raises(StoreError, match=f"nothing in {limit_s} s"):
            await attempts.run("get", size, lambda: skip(100), "not read")
        assert round(now_s(), 3) == limit_s
        for _ in range(4):
            attempts.breaker.failed(now_s())
        assert not attempts.breaker.is_closed, "it counts as one that failed"
        assert (counters.timeouts, counters.requests, counters.get_requests, counters.put_requests) == (1, 1, 1, 0)

    run_skipping(work())


def test_a_call_that_is_cancelled_while_it_tries_lets_the_next_one_try() -> None:
    async def work() -> None:
        attempts = attempts_with()
        for _ in range(5):
            attempts.breaker.failed(now_s())
        await skip(2)
        task = asyncio.create_task(attempts.run("get", 0, lambda: skip(9), "not read"))
        await skip(0.5)
        task.cancel()
        await asyncio.wait([task])
        begin_s = now_s()
        await attempts.run("get", 0, lambda: skip(0.25), "not read")
        assert now_s() - begin_s == 0.25

    run_skipping(work())


def test_the_second_of_two_hedged_requests_that_comes_first_counts_as_won() -> None:
    async def work() -> None:
        counters = S3Counters()
        attempts = attempts_with(counters, hedge_permille=500, request_timeout_ms=9_000)
        times: list[float | StoreAnswer] = [*[0.02] * 3, *[0.01] * 37]  # so that none of them is above the p95

        async def request() -> float | StoreAnswer:
            time = times.pop(0)
            if isinstance(time, StoreAnswer):
                await skip(0.5)
                raise time
            await skip(time)
            return time

        async def ask() -> float | StoreAnswer:
            return await attempts.run("get", 0, request, "not read", hedge=True)

        for _ in range(40):
            await ask()
        times[:] = [BROKEN, BROKEN, 0.01]
        assert await ask() == 0.01
        assert (counters.hedges, counters.hedges_won, counters.retries) == (1, 1, 1), "the last to fail is judged"
        times[:] = [5.0, 0.02]
        assert await ask() == 0.02
        assert (counters.hedges, counters.hedges_won) == (2, 2)
        times[:] = [1.0, 5.0]
        assert await ask() == 1.0
        assert (counters.hedges, counters.hedges_won) == (3, 2)
        times[:] = [1.0, BROKEN]
        assert await ask() == 1.0
        times[:] = [BROKEN, 1.0]
        assert await ask() == 1.0
        assert (counters.hedges, counters.hedges_won, counters.retries) == (5, 3, 1)
        times[:] = [5.0, StoreAnswer(416, "InvalidRange")]
        with pytest.raises(StoreAnswer):
            await ask()

    run_skipping(work())


def test_behind_an_open_breaker_nobody_waits_longer_than_for_the_one_that_tries_or_the_deadline() -> None:
    async def work() -> None:
        attempts = attempts_with()
        for _ in range(5):
            attempts.breaker.failed(now_s())
        asked: list[float] = []

        async def request() -> None:
            asked.append(now_s())

        with pytest.raises(StoreError, match="gives no answer") as caught:
            await attempts.run("get", 0, request, "not read", until_s=now_s() + 0.05)
        assert (now_s(), asked) == (0.0, []), "it can't be asked in time"
        assert caught.value.__notes__[-1] == "not asked again so soon: it has failed too often"
        await skip(2)
        trying = asyncio.create_task(attempts.run("get", 0, lambda: skip(0.5), "not read"))
        await skip(0)
        await attempts.run("get", 0, request, "not read")
        assert 2.5 <= asked[0] <= 2.7
        await trying

    run_skipping(work())


@pytest.mark.parametrize("error", [TooLargeError("an answer of 2 GiB"), OSError("a bug"), asyncio.CancelledError()])
def test_a_request_that_tries_and_ends_without_a_verdict_lets_the_next_one_try(error: BaseException) -> None:
    async def work() -> None:
        attempts = attempts_with()
        for _ in range(5):
            attempts.breaker.failed(now_s())
        await skip(2)

        async def request() -> None:
            raise error

        with pytest.raises(type(error)):
            await attempts.run("get", 0, request, "not read")
        assert (attempts.breaker.state, attempts.breaker.ask(now_s(), 1.0)) == (BreakerState.TRYING, 0.0)

    run_skipping(work())
