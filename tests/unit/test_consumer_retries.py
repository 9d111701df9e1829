"""Failures of polls and fetches: counters, log lines, errors for the user, and the next retry."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.client.consumer.fetch.polling import Retries
from memq.errors import CorruptDataError, DeniedError, InvalidRequestError, MemqError, QueueError, StoreError
from memq.runtime.logs import EventLog
from tests.skipping_loop import run_skipping, skip, skipping_runtime


def test_each_failure_is_logged_before_the_wait_that_follows(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        runtime = skipping_runtime()
        retries = Retries(runtime, EventLog(runtime.clock), lambda: None)
        tries = asyncio.create_task(retries.back_off(QueueError("no leader"), 9))
        await skip(0)
        assert retries.count == 1
        assert [record.getMessage() for record in caplog.records if "consumer.retry" in record.getMessage()]
        assert "no leader" in caplog.text
        assert not tries.done()
        await tries

    with caplog.at_level(logging.WARNING):
        run_skipping(work())


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (QueueError("away"), False),
        (StoreError("away"), False),
        (DeniedError("not you"), True),
        (CorruptDataError("no pointer"), True),
        (InvalidRequestError("no such offset"), True),
    ],
)
def test_the_user_sees_what_does_not_pass_by_itself(error: MemqError, *, seen: bool) -> None:
    async def work() -> None:
        runtime = skipping_runtime()
        changes: list[int] = []
        retries = Retries(runtime, EventLog(runtime.clock), lambda: changes.append(retries.count))
        retries.note(error)
        assert retries.failure is (error if seen else None)
        assert changes == ([1] if seen else []), "the user's thread is notified of it"

    run_skipping(work())


@pytest.mark.parametrize(("failures", "most_s"), [(1, 0.1), (2, 0.2), (3, 0.4), (6, 2.0), (1_000, 2.0)])
def test_pauses_double_up_to_two_seconds(failures: int, most_s: float) -> None:
    async def work() -> None:
        runtime = skipping_runtime()
        retries = Retries(runtime, EventLog(runtime.clock), lambda: None)
        loop = asyncio.get_running_loop()
        pauses = []
        for _ in range(50):
            begin_s = loop.time()
            await retries.pause(failures)
            pauses.append(loop.time() - begin_s)
        assert 0.75 * most_s < max(pauses) <= most_s + 1e-6
        assert min(pauses) < 0.25 * most_s, "consumers that fail together come back one by one"

    run_skipping(work())
