"""POLL over several logs, through a broker's handlers: a failing log affects no other answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from memq.broker.api.reader_requests import LOG_S_MAX, LOGS_S_MAX
from memq.errors import DeniedError, MemqError, NotFoundError, QueueError
from memq.limits import POLL_BYTES_MAX
from memq.notification import Span
from memq.notification.remote import Polled
from tests.contract.loopback_queue import LoopbackQueue
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, part, publication
from tests.skipping_loop import run_skipping
from tests.unit.lying_queue import FailingQueue

LOGS = 6


class Polls:
    """Logs with one entry each, and what a POLL of all of them brings, by number."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sick = FailingQueue(self.clock)
        self.queue = LoopbackQueue(self.sick, self.clock)

    async def fill(self) -> None:
        await self.queue.create([part(number) for number in range(LOGS)], STALE_MS)
        for number in range(LOGS):
            await self.queue.publish(publication(self.clock, b"%d" % number, partition=part(number)))

    async def poll(self, offset: int = 0, bytes_max: int = POLL_BYTES_MAX) -> dict[int, Polled]:
        offsets = {part(number): offset for number in range(LOGS)}
        return {polled.partition.partition: polled for polled in await self.queue.poll(offsets, 0, bytes_max)}


def over_logs(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


@pytest.mark.parametrize("error", [QueueError("no leader"), DeniedError("not you"), NotFoundError("no such log")])
def test_a_log_that_fails_has_its_error_and_the_others_their_entries(error: MemqError) -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        polls.sick.failing = {0: error, 3: error}
        # The topic exists: a queue that does not find its log may do so later.
        wanted = QueueError if isinstance(error, NotFoundError) else type(error)
        found = await polls.poll()
        assert list(found) == list(range(LOGS))
        for number, polled in found.items():
            if number in polls.sick.failing:
                assert type(polled.error) is wanted
                assert str(polled.error).endswith(str(error))
                assert list(polled.entries) == []
            else:
                assert polled.error is None
                assert [entry.body for entry in polled.entries] == [b"%d" % number]
        with pytest.raises(wanted):
            await polls.queue.read(part(0), 0, 100)
        with pytest.raises(wanted):
            await polls.queue.span(part(3))
        with pytest.raises(wanted):
            await polls.queue.wait({part(0): 1, part(1): 1}, 0.0)

    over_logs(work())


def test_a_poll_fails_when_all_logs_fail() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        polls.sick.failing = {number: QueueError(f"log {number}") for number in range(LOGS)}
        with pytest.raises(QueueError, match="log 0"):
            await polls.poll()

    over_logs(work())


def test_spans_are_asked_for_at_once_and_late_ones_are_errors() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        polls.sick.silent = {1, 2, 4}
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        found = await polls.poll()
        assert loop.time() - begin_s < 1.5 * LOG_S_MAX, "one time limit, not three"
        assert sorted(number for number, polled in found.items() if polled.error is not None) == [1, 2, 4]
        assert "did not answer within 5 s" in str(found[1].error)
        assert [entry.body for entry in found[5].entries] == [b"5"]

    over_logs(work())


def test_logs_behind_the_time_limit_of_a_poll_are_left_to_the_next() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        polls.sick.slow = {1, 2, 3}
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        found = await polls.poll()
        assert loop.time() - begin_s < LOGS_S_MAX + 1.5 * LOG_S_MAX
        assert [number for number, polled in found.items() if polled.error is not None] == [1, 2]
        assert polls.sick.reads == [0, 1, 2]
        assert all(list(found[number].entries) == [] for number in (3, 4, 5))
        assert {(found[number].entries.next, found[number].span.end) for number in (3, 4, 5)} == {(0, 1)}

    over_logs(work())


def test_a_log_without_news_is_not_read() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        found = await polls.poll(offset=1)
        assert polls.sick.reads == []
        assert all((list(polled.entries), polled.entries.next) == ([], 1) for polled in found.values())
        polls.sick.spans = 0
        found = await polls.poll(bytes_max=2)
        assert polls.sick.spans == LOGS, "those without room are not asked again"
        assert [len(found[number].entries) for number in range(LOGS)] == [1, 1, 0, 0, 0, 0]

    over_logs(work())


def test_a_poll_that_is_cancelled_as_it_begins_leaves_no_coroutine() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        poll = asyncio.create_task(polls.poll())
        await asyncio.sleep(0)  # the logs are about to be asked
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll

    over_logs(work())


def test_spans_and_times_of_logs_that_hang_or_fail_are_errors_within_one_time_limit() -> None:
    async def work() -> None:
        polls = Polls()
        await polls.fill()
        polls.sick.silent = {1, 2}
        polls.sick.failing = {3: DeniedError("not you")}
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        found = await polls.queue.spans([part(number) for number in range(LOGS)])
        assert loop.time() - begin_s < 1.5 * LOG_S_MAX, "one time limit, not two"
        assert [type(found[part(number)]) for number in range(LOGS)] == [
            Span, QueueError, QueueError, DeniedError, Span, Span,
        ]  # fmt: skip
        assert "did not answer within 5 s" in str(found[part(1)])
        with pytest.raises(DeniedError, match="not you"):
            await polls.queue.spans([part(3)])
        with pytest.raises(DeniedError, match="not you"):
            await polls.queue.span(part(3))
        begin_s = loop.time()
        with pytest.raises(QueueError, match="did not answer within 5 s"):
            await polls.queue.seek_time(part(2), 5)
        assert loop.time() - begin_s < 1.5 * LOG_S_MAX
        assert await polls.queue.spans([part(0), part(4)]) == {part(0): Span(0, 1), part(4): Span(0, 1)}

    over_logs(work())
