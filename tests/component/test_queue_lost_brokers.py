"""Calls of the queue client while no broker answers: what waits, what ends, and with which error."""

from __future__ import annotations

import pytest

from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker import AsyncWorker
from memq.errors import (
    UnreachableError,
)
from memq.runtime.clock import SystemClock
from tests.brokers import run
from tests.component.queue_rig import queueing

CLOCK = SystemClock()


def test_a_change_that_no_broker_was_asked_for_is_not_unknown() -> None:
    async def work() -> None:
        async with queueing(1) as (_, brokers, _):
            short = AsyncQueue(brokers[0].address, timeout_ms=600, connect_timeout_ms=100)
            async with short:
                assert await short.dequeue("jobs") == []
                await brokers[0].close()
                began_s = CLOCK.monotonic()
                with pytest.raises(UnreachableError, match="Connection refused"):
                    await short.enqueue("jobs", b"x")
                assert 0.5 < CLOCK.monotonic() - began_s < 5, "brokers that were met may restart"

    run(work())


def test_a_lease_and_a_question_do_not_wait_for_brokers_that_are_gone() -> None:
    async def work() -> None:
        async with queueing(1) as (_, brokers, _):
            queue = AsyncQueue(brokers[0].address, connect_timeout_ms=200)
            async with queue:
                id_ = await queue.enqueue("jobs", b"x")
                await brokers[0].close()
                for wait_s, call in (
                    (0.0, queue.dequeue("jobs")),
                    (1.0, queue.dequeue("jobs", wait=1.0)),
                    (0.0, queue.get(id_)),
                    (0.0, queue.queues()),
                ):
                    began_s = CLOCK.monotonic()
                    with pytest.raises(UnreachableError, match="Connection refused"):
                        await call
                    assert wait_s <= CLOCK.monotonic() - began_s < wait_s + 3

    run(work())


def test_a_worker_without_brokers_is_closed_soon() -> None:
    async def handle(item: QueueItem) -> None:
        raise AssertionError("no item")

    async def work() -> None:
        async with queueing(1) as (_, brokers, _):
            worker = AsyncWorker(handle, "jobs", brokers=brokers[0].address)
            await worker.start()
            await brokers[0].close()
            began_s = CLOCK.monotonic()
            await worker.close()
            assert CLOCK.monotonic() - began_s < 8

    run(work())
