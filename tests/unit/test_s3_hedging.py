"""When a slow request is worth a second one: against a budget that other requests earn."""

from __future__ import annotations

import asyncio

from memq.storage_handlers.s3.attempts import Attempts, S3Counters
from memq.storage_handlers.s3.settings import read_bucket
from tests.skipping_loop import run_skipping, skip, skipping_runtime

SECTION = {"hedge_permille": (50, "the test"), "request_timeout_ms": (10_000, "the test")}


def test_a_hedge_that_the_budget_refused_is_sent_when_it_is_earned() -> None:
    async def work() -> None:
        counters = S3Counters()
        bucket = read_bucket("s3://memq?endpoint=http://h", SECTION)
        attempts = Attempts(bucket, skipping_runtime(), counters)
        warm_s = [0.01] * 20 + [0.02] * 3  # the last ones first: no request is above the p95 while that is learned
        slow_s = [9.0, 9.0]  # of the first tries of two requests; their hedges are quick

        async def request() -> float:
            pause_s = warm_s.pop() if warm_s else slow_s.pop() if slow_s else 0.01
            await skip(pause_s)
            return pause_s

        async def ask() -> float:
            return await attempts.run("get", 1_000, request, "not read", hedge=True)

        while warm_s:  # so many that the p95 is known, and one hedge is earned
            await ask()
        stalled = [asyncio.create_task(ask()) for _ in range(2)]
        await skip(1)
        assert (counters.hedges, [task.done() for task in stalled]) == (1, [True, False]), "one hedge was earned"
        for _ in range(22):
            await ask()
        await skip(0.1)
        assert (counters.hedges, stalled[1].done()) == (2, True)

    run_skipping(work())
