"""Calls of a client that share requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.client.queue.joint_calls import REQUESTS_AT_ONCE, JointCalls
from memq.errors import ClosedError, NotReadyError
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog

pytestmark = pytest.mark.timeout(10)


class Broker:
    """Takes requests; each one waits until `answer`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[int], float]] = []
        self._open: list[asyncio.Future[None]] = []
        self.now_s = 0.0
        self.calls = JointCalls(self._send, 4, lambda: self.now_s, EventLog(SystemClock()))

    async def _send(self, line: str, entries: list[int], began_s: float) -> Sequence[int]:
        self.requests.append((line, entries, began_s))
        self._open.append(asyncio.get_running_loop().create_future())
        await self._open[-1]
        return [entry * 10 for entry in entries]

    def begin(self, *entries: int, line: str = "q") -> asyncio.Task[Sequence[int]]:
        """Begin a call."""
        return asyncio.create_task(self.calls.call(line, entries, len(entries)))

    def answer(self, number: int, error: Exception | None = None) -> None:
        """Answer a request."""
        if error is None:
            self._open[number].set_result(None)
        else:
            self._open[number].set_exception(error)

    @property
    def sent(self) -> list[list[int]]:
        """The entries of each request."""
        return [entries for _, entries, _ in self.requests]


async def turns() -> None:
    """Let all other tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_calls_that_come_while_others_are_on_their_way_go_together() -> None:
    async def work() -> None:
        broker = Broker()
        first = broker.begin(1)
        await turns()
        second = broker.begin(2)
        await turns()
        later = [broker.begin(3), broker.begin(4, 5), broker.begin(6, 7)]
        await turns()
        assert len(broker.sent) == REQUESTS_AT_ONCE
        assert broker.sent == [[1], [2]]
        broker.answer(0)
        await turns()
        assert broker.sent == [[1], [2], [3, 4, 5]], "up to the weight of a request"
        broker.answer(1)
        await turns()
        assert broker.sent[3:] == [[6, 7]]
        for number in (2, 3):
            broker.answer(number)
        found = await asyncio.gather(first, second, *later)
        assert [list(each) for each in found] == [[10], [20], [30], [40, 50], [60, 70]]

    asyncio.run(work())


def test_a_request_has_the_time_of_its_first_call() -> None:
    async def work() -> None:
        broker = Broker()
        calls = [broker.begin(1)]
        await turns()
        calls.append(broker.begin(2))
        await turns()
        broker.now_s = 7.0
        calls.append(broker.begin(3))
        await turns()
        broker.now_s = 9.0
        calls.append(broker.begin(4))
        broker.answer(0)
        await turns()
        assert broker.sent[2] == [3, 4]
        assert broker.requests[2][2] == 7.0
        broker.answer(1)
        broker.answer(2)
        await asyncio.gather(*calls)

    asyncio.run(work())


def test_lines_do_not_wait_for_each_other() -> None:
    async def work() -> None:
        broker = Broker()
        calls = [broker.begin(number, line=str(number)) for number in range(5)]
        await turns()
        assert len(broker.requests) == 5
        for number in range(5):
            broker.answer(number)
        assert [list(each) for each in await asyncio.gather(*calls)] == [[number * 10] for number in range(5)]

    asyncio.run(work())


def test_an_error_is_that_of_the_calls_of_its_request_only() -> None:
    async def work() -> None:
        broker = Broker()
        calls = [broker.begin(1), broker.begin(2)]
        await turns()
        calls.append(broker.begin(3))
        broker.answer(0, NotReadyError("no"))
        await turns()
        broker.answer(1)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found[0], NotReadyError)
        assert isinstance(found[1], NotReadyError), "both were in the first request"
        assert found[2] == [30]

    asyncio.run(work())


def test_a_cancelled_call_is_not_sent_and_harms_no_other_one() -> None:
    async def work() -> None:
        broker = Broker()
        first, second = broker.begin(1), broker.begin(2, 3)
        await turns()
        blocked = broker.begin(4)
        await turns()
        waits, gone = broker.begin(5), broker.begin(6)
        await turns()
        gone.cancel()
        second.cancel()
        broker.answer(0)
        broker.answer(1)
        await turns()
        assert broker.sent == [[1, 2, 3], [4], [5]]
        broker.answer(2)
        assert [list(await each) for each in (first, blocked, waits)] == [[10], [40], [50]]
        assert gone.cancelled()
        assert second.cancelled()

    asyncio.run(work())


def test_the_end_of_the_client_ends_all_calls() -> None:
    async def work() -> None:
        broker = Broker()
        calls = [broker.begin(1)]
        await turns()
        calls.append(broker.begin(2))
        await turns()
        calls.append(broker.begin(3))
        unstarted = broker.begin(9, line="another")
        await asyncio.sleep(0)  # its call has begun, and its task not
        await broker.calls.close()
        for each in (*calls, unstarted):
            with pytest.raises(ClosedError):
                await each
        with pytest.raises(ClosedError):
            await broker.calls.call("q", [4], 1)

    asyncio.run(work())
