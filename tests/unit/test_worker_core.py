"""The core of a worker with queues in memory, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from memq.client.queue.items import ItemLease, QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker_core import WAIT_S, WorkerCore
from memq.client.queue.worker_settings import WorkerSettings
from memq.errors import OutcomeUnknownError
from memq.queues.decisions import ItemOutcome
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime

LEASE_S = 4.0
TIMEOUT_S = 30.0
DRAIN_S = 10.0


class Queues:
    """Has one item of each queue. A request about an item of the queue "gone" gets no answer."""

    def __init__(self, *queues: str) -> None:
        self.ready = list(queues)
        self.ended: list[tuple[str, str]] = []  # queue and what became of its item
        self.joint = 0  # requests that acked items, and asked for the next ones
        self.calls = 0  # requests for items
        self.is_lost = False  # the answer to the next joint request
        self.batch = 1_000
        self.is_once = False  # all items are delivered at most once

    async def dequeue(
        self, wanted: Mapping[str, int], *, wait: float = 0.0, max_items: int, max_at_most_once: int
    ) -> list[QueueItem]:
        """See `AsyncQueue.dequeue`."""
        if not self.ready or (self.is_once and not max_at_most_once):
            await skip(wait)
        count = min(self.batch, max_items, max_at_most_once if self.is_once else max_items)
        leased, self.ready = self.ready[:count], self.ready[count:]
        self.calls += 1
        lease_s = 0.0 if self.is_once else LEASE_S
        until_s = now_s() + LEASE_S
        return [
            QueueItem(
                f"{queue}:{at:016x}:0", queue, b"", (), 1, b"", until_s, ItemLease(f"{at:016x}", 0, self.calls), lease_s
            )
            for at, queue in enumerate(leased)
        ]

    async def _answer(self, items: Sequence[QueueItem], outcome: ItemOutcome) -> list[ItemOutcome]:
        for item in items:
            if item.queue == "gone":
                await skip(TIMEOUT_S)
                raise OutcomeUnknownError("no broker has answered")
            self.ended.append((item.queue, outcome))
        return [outcome] * len(items)

    async def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
        """See `AsyncQueue.extend_many`."""
        began_s = now_s()
        found = await self._answer(items, ItemOutcome.EXTENDED)
        for item in items:
            item.until_s = began_s + lease
        return found

    async def ack_and_dequeue(
        self, items: Sequence[QueueItem], wanted: Mapping[str, int], **bounds: int
    ) -> tuple[list[ItemOutcome], list[QueueItem]]:
        """See `AsyncQueue.ack_and_dequeue`."""
        self.joint += 1
        if self.is_lost:
            self.is_lost = False
            raise OutcomeUnknownError("the answer was lost")
        return await self._answer(items, ItemOutcome.ACKED), await self.dequeue(wanted, **bounds)

    async def ack_many(self, items: Sequence[QueueItem]) -> list[ItemOutcome]:
        """See `AsyncQueue.ack_many`."""
        return await self._answer(items, ItemOutcome.ACKED)

    async def nack_many(self, items: Sequence[QueueItem], **_: object) -> list[ItemOutcome]:
        """See `AsyncQueue.nack_many`."""
        return await self._answer(items, ItemOutcome.RETURNED)

    async def close(self) -> None:
        """See `AsyncQueue.close`."""


def worker(
    queues: Queues,
    handler: Callable[[QueueItem], Any],
    *,
    concurrency: int = 2,
    prefetch: int = 0,
    names: tuple[str, ...] = ("gone", "here"),
) -> WorkerCore:
    made = WorkerSettings(
        queues=names, concurrency=concurrency, prefetch=prefetch, retry_delays_s=(1.0,), drain_s=DRAIN_S
    )
    return WorkerCore(made, cast(AsyncQueue, queues), skipping_runtime(), handler)


@pytest.mark.parametrize("order", [("gone", "here"), ("here", "gone")])
def test_a_queue_without_an_answer_delays_nothing_of_another_one(order: tuple[str, str]) -> None:
    async def work() -> None:
        begun_s, marks, queues = now_s(), dict[str, bool](), Queues(*order)

        async def handler(item: QueueItem) -> None:
            await skip(2 * LEASE_S)
            marks[item.queue] = item.lost

        core = worker(queues, handler)
        await core.start()
        await skip(2 * LEASE_S + 1)
        assert marks == {"here": False, "gone": True}
        assert ("here", ItemOutcome.ACKED) in queues.ended
        assert (core.counts.done, core.counts.lost) == (1, 1)
        await core.close()
        assert now_s() - begun_s < TIMEOUT_S

    run_skipping(work())


@pytest.mark.parametrize("order", [("gone", "here"), ("here", "gone")])
def test_acks_of_a_queue_without_an_answer_delay_no_others(order: tuple[str, str]) -> None:
    async def work() -> None:
        queues = Queues(*order)

        async def handler(item: QueueItem) -> None: ...

        core = worker(queues, handler)
        await core.start()
        await skip(1)
        assert queues.ended == [("here", ItemOutcome.ACKED)]
        assert core.counts.done == 1
        await core.close()

    run_skipping(work())


@pytest.mark.parametrize("order", [("gone", "here"), ("here", "gone")])
def test_a_worker_that_stops_gives_back_the_items_of_queues_that_answer(order: tuple[str, str]) -> None:
    async def work() -> None:
        queues, leave = Queues("here", *order), asyncio.Event()

        async def handler(item: QueueItem) -> None:
            await leave.wait()

        core = worker(queues, handler, concurrency=1, prefetch=2)
        await core.start()
        closing = asyncio.get_running_loop().create_task(core.close())
        await skip(WAIT_S + 0.5)
        assert ("here", ItemOutcome.RETURNED) in queues.ended
        assert core.counts.returned == 1
        leave.set()
        await closing

    run_skipping(work())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_of_one_queue_acks_with_its_request_for_the_next_item(*, is_lost: bool) -> None:
    async def work() -> None:
        queues = Queues(*["here"] * 10)
        queues.batch, queues.is_lost = 1, is_lost

        async def handler(item: QueueItem) -> None:
            await skip(0.1)

        core = worker(queues, handler, concurrency=1, names=("here",))
        await core.start()
        await skip(20)
        assert queues.ended.count(("here", ItemOutcome.ACKED)) == 10
        assert (queues.joint, core.counts.done) == (10, 10), "a lost answer is followed by an ack of its own"
        await core.close()

    run_skipping(work())


def test_an_ack_does_not_wait_for_the_next_item() -> None:
    async def work() -> None:
        queues = Queues("here")

        async def handler(item: QueueItem) -> None:
            await skip(0.1)

        core = worker(queues, handler, concurrency=2, names=("here",))
        await core.start()
        await skip(0.2)
        assert core.counts.done == 1, "the worker waits for items with another request"
        await core.close()

    run_skipping(work())


def test_an_item_whose_lease_is_not_extended_is_lost_at_once() -> None:
    """Another worker may have it; its handler learns that before the lease would have ended."""

    class Refusing(Queues):
        async def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
            if [item.queue for item in items] == ["gone"]:
                return [ItemOutcome.LEASE_LOST]
            return await super().extend_many(items, lease)

    async def work() -> None:
        lost, queues = dict[str, bool](), Refusing("gone", "here")

        async def handler(item: QueueItem) -> None:
            await skip(0.9 * LEASE_S)
            lost[item.queue] = item.lost

        core = worker(queues, handler)
        await core.start()
        await skip(0.95 * LEASE_S)
        assert lost == {"gone": True, "here": False}
        assert [queue for queue, outcome in queues.ended if outcome is ItemOutcome.ACKED] == ["here"]
        assert core.counts.lost == 1
        await core.close()

    run_skipping(work())


def test_a_worker_that_stops_has_begun_all_its_at_most_once_items() -> None:
    async def work() -> None:
        queues, begun = Queues(*["here"] * 20), list[float]()
        queues.is_once = True

        async def handler(item: QueueItem) -> None:
            begun.append(now_s())
            await skip(0.5)

        core = worker(queues, handler, concurrency=3, prefetch=5, names=("here",))
        await core.start()
        await skip(0.7)
        await core.close()
        assert len(begun) + len(queues.ready) == 20, "none was leased for a handler that was not free"
        assert len(begun) in (6, 9)

    run_skipping(work())


def test_an_at_most_once_item_does_not_wait_behind_others_for_a_handler() -> None:
    async def work() -> None:
        queues, order = Queues(*["here"] * 4), list[bool]()

        async def handler(item: QueueItem) -> None:
            order.append(bool(item.lease_s))
            await skip(0.1)

        class Mixed(Queues):
            async def dequeue(self, *args: Any, **terms: Any) -> list[QueueItem]:
                """Return others first."""
                found = await Queues.dequeue(self, *args, **terms)
                for item in found[2:]:
                    item.lease_s = 0.0
                return found

        queues.__class__ = Mixed
        core = worker(queues, handler, concurrency=2, prefetch=5, names=("here",))
        await core.start()
        await skip(1)
        assert order[:4] == [False, False, True, True]
        await core.close()

    run_skipping(work())
