"""The worker on one event loop: the core that `Worker` and `AsyncWorker` share.

Each item that it has leased is in `_held` until its end is known: while it waits, while its handler runs, and while its
ack is on its way. For so long the worker extends its lease, first when half of it is over. An item whose lease is over
is marked, and leaves `_held`: nothing is acked for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from memq.client.listener.answers import answer_of_call
from memq.client.listener.calls import CallsCore
from memq.client.queue.items import ItemLease, QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker_settings import Return, WorkerSettings, WorkerStats, note_of, outcome_of
from memq.errors import MemqError, OutcomeUnknownError, RetryableError
from memq.limits import QUEUE_ITEMS_PER_REQUEST_MAX
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner

Call = Callable[[QueueItem], Awaitable[object]]
WAIT_S = 2.0  # of one request; a worker that stops takes the answer, whose items would else be leased in vain
ACKS_MAX = 10_000  # items whose handler has ended, and whose ack is on its way
RENEW_PART = 0.5  # of a lease is left when it is extended
RENEW_CHECK_S = 1.0
MEAN_WEIGHT = 0.2  # of the last handler in the mean time of handlers
_RETRY_S_BASE, _RETRY_S_MAX = 0.05, 2.0
_UNSURE = (RetryableError, OutcomeUnknownError)
_ACKED = (ItemOutcome.ACKED, ItemOutcome.ALREADY_ACKED)  # the latter by an earlier request under the same lease


class WorkerCore(CallsCore[WorkerStats]):
    """One worker. `call` runs the handler; `end_calls` leaves those behind that still run after the drain."""

    def __init__(
        self,
        settings: WorkerSettings,
        queue: AsyncQueue,
        runtime: Runtime,
        call: Call,
        *,
        end_calls: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__("worker")
        self.settings = settings.check()
        self.counts = WorkerStats()
        self._queue = queue
        self._runtime = runtime
        self._call = call
        self._end_calls = end_calls
        self._events = EventLog(runtime.clock)
        self._tasks = TaskOwner(self._fail, self._events)
        self._held: dict[ItemLease, QueueItem] = {}
        self._renewing: set[ItemLease] = set()
        self._waiting: deque[QueueItem] = deque()
        self._acks: dict[ItemLease, QueueItem] = {}  # also those on their way
        self._calls: dict[asyncio.Task[None], QueueItem] = {}
        self._running = 0
        self._leaves_calls = False
        self._mean_s: float | None = None
        self._is_dry = False  # the last request for items found none
        self._has_room = asyncio.Event()
        self._acking: set[str] = set()  # queues whose items are acked now, each by a request of its own
        self._carried: dict[ItemLease, QueueItem] = {}  # of the acks, those in a request for items
        self._wait_s = WAIT_S  # of the next request: 0 while a queue has as many items as are wanted
        self._is_waiting = False  # for items, or after an error: no request for items comes soon
        self._has_leases = asyncio.Event()
        self._idle_now = asyncio.Event()
        self._fetching: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Lease the first items, and begin; a second call does nothing.

        Raises: UnreachableError, DeniedError, ClosedError; the error that has stopped the worker meanwhile.
        """
        self._check_open()
        async with self._starting:
            if self._fetching is None:
                await self._lease(wait_s=0)
                self._fetching = self._tasks.start(self._fetch(), "worker leases")
                self._tasks.start(self._renew(), "worker extends leases")

    def stop(self) -> None:
        """Let `run` return, and lease no more."""
        super().stop()
        self._has_room.set()

    async def _close(self) -> None:
        """Give back what is not begun; let handlers finish, for at most `drain_s`."""
        self.stop()
        try:
            await self._drain()
            left = list(self._calls.values())
            if self._end_calls is not None:
                self._leaves_calls = True
                await self._end_calls()
            for task in list(self._calls):
                task.cancel()
            if self._calls:
                await asyncio.wait(self._calls)
            if self._end_calls is None:  # else a thread that was left behind may still work on it
                await self._return(left, Return(0, note_of("the worker was stopped"), NackKind.FAILED))
        finally:
            await self._tasks.stop()
            await self._queue.close()

    async def _drain(self) -> None:
        """Return when nothing runs and all is acked; after `drain_s` in any case."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                if self._fetching is not None:
                    await asyncio.wait([self._fetching])  # it may bring items
                await self._return_waiting()
                while self._calls or self._acks:
                    self._idle_now.clear()
                    await self._idle_now.wait()
        await self._return_waiting()  # nothing, but after a time-out

    async def _return_waiting(self) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        await self._return(waiting, Return(0, b"", NackKind.UNUSED))

    def _report_failure(self, error: BaseException) -> None:
        text = f"queues {', '.join(self.settings.queues)[:200]} are worked on here no more: {error}"
        self._events.error("worker.ended", text)

    # ---- leases ----------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        failures = 0
        while not self._ended.is_set():
            if self._room <= 0 or (self._is_dry and not self._free):
                self._flush_all()
                self._has_room.clear()
                await self._has_room.wait()
                continue
            try:
                await self._lease(self._wait_s if self._free else 0.0)
            except _UNSURE as error:
                failures += 1
                self._is_waiting = True
                self._events.warning("worker.lease-retry", f"{type(error).__name__}: {error}; asking again")
                with suppress(TimeoutError):
                    async with asyncio.timeout(
                        backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX)
                    ):
                        await self._ended.wait()
            else:
                failures = 0
        self._flush_all()

    @property
    def _room(self) -> int:
        """How many items may be leased now."""
        if len(self._acks) >= ACKS_MAX:
            return 0
        return self.settings.leased_max(self._mean_s) - self._running - len(self._waiting)

    @property
    def _free(self) -> int:
        """How many handlers have no item."""
        return max(0, self.settings.concurrency - self._running - len(self._waiting))

    async def _lease(self, wait_s: float) -> None:
        """Lease items; the same request acks items that are done.

        At-most-once items come for free handlers only: those that wait here are lost if the worker ends. So the worker
        waits for items only while a handler is free.
        After an error, acks are repeated by requests of their own. A request that may wait has no acks.
        """
        most = min(self._room, QUEUE_ITEMS_PER_REQUEST_MAX)
        queues = dict.fromkeys(self.settings.queues, most)
        bounds = {"max_items": most, "max_at_most_once": min(self._free, most)}
        done = list(islice(self._own_acks(), QUEUE_ITEMS_PER_REQUEST_MAX)) if self._has_one_queue else []
        self._carried = {item.lease: item for item in done}
        try:
            if done:
                self._is_waiting = False
                outcomes, items = await self._queue.ack_and_dequeue(done, queues, **bounds)
                self._acked(done, outcomes)
            else:
                self._is_waiting = wait_s > 0
                items = await self._queue.dequeue(queues, wait=wait_s, **bounds)
        except _UNSURE:
            self._carried = {}
            self._flush_all()
            raise
        finally:
            self._carried, self._is_waiting = {}, False
        self._wait_s = WAIT_S if len(items) < most else 0.0
        self._is_dry = not items
        self._add(items)

    @property
    def _has_one_queue(self) -> bool:
        """Whether acks go with requests for items. Of several queues, one may have no broker that answers."""
        return len(self.settings.queues) == 1

    def _own_acks(self) -> Iterator[QueueItem]:
        """Yield the acks that no request has."""
        acks = self._acks.values()
        return (each for each in acks if each.lease not in self._carried and each.queue not in self._acking)

    def _add(self, items: Sequence[QueueItem]) -> None:
        self._held.update((item.lease, item) for item in items if item.lease_s)
        self._waiting.extendleft(item for item in reversed(items) if not item.lease_s)  # a handler is free for each
        self._waiting.extend(item for item in items if item.lease_s)
        self._has_leases.set()
        self._start_calls()

    async def _renew(self) -> None:
        """Extend leases when half of them is over, and mark items whose lease has ended."""
        while True:
            now_s, due = self._now_s(), dict[tuple[str, float], list[QueueItem]]()
            for item in list(self._held.values()):
                if item.until_s <= now_s:
                    self._lose(item)
                elif item.lease not in self._renewing and item.until_s - now_s <= item.lease_s * RENEW_PART:
                    due.setdefault((item.queue, item.lease_s), []).append(item)
            for (_, lease_s), items in due.items():
                self._renewing.update(item.lease for item in items)
                self._tasks.start(self._extend(items, lease_s), "worker extends some leases")
            self._has_leases.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._next_change_s()):
                    await self._has_leases.wait()

    def _next_change_s(self) -> float:
        """Return in how many seconds a lease is to be extended, or ends."""
        moments = [
            item.until_s - (0 if item.lease in self._renewing else item.lease_s * RENEW_PART)
            for item in self._held.values()
        ]
        return max(0.0, min(moments) - self._now_s()) if moments else RENEW_CHECK_S

    async def _extend(self, items: Sequence[QueueItem], lease_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, max(item.until_s for item in items) - self._now_s())):
                outcomes = await self._queue.extend_many(items, lease_s)
        except (*_UNSURE, TimeoutError) as error:  # items are extended again, or lost
            self._events.warning("worker.extend-failed", f"leases are not extended: {type(error).__name__}: {error}")
            await asyncio.sleep(backoff_s(self._runtime.random, 1, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))
            outcomes = []
        finally:
            self._renewing.difference_update(item.lease for item in items)
            self._has_leases.set()
        for item, outcome in zip(items, outcomes, strict=False):
            if outcome is not ItemOutcome.EXTENDED and outcome not in _ACKED:  # an ack may have been faster
                self._lose(item)

    def _lose(self, item: QueueItem) -> None:
        """Mark an item whose lease is over. An ack that is on its way says itself what it has done."""
        if self._held.pop(item.lease, None) is None or item.lease in self._acks:
            return
        item.lost = True
        self.counts.lost += 1
        self._events.warning("worker.lease-lost", f"the lease of item '{item.id}' is over, attempt {item.attempt}")
        if item in self._waiting:
            self._waiting.remove(item)
            self._has_room.set()

    # ---- handlers --------------------------------------------------------------------------------

    def _start_calls(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._running < self.settings.concurrency:
            if self._ended.is_set() and self._waiting[0].lease_s:
                break  # they are given back; an at-most-once item can't be
            item = self._waiting.popleft()
            if item.lease_s and item.until_s <= self._now_s():
                self._lose(item)
                continue
            self._running += 1
            task = loop.create_task(self._work(item), name="worker handles an item")
            self._calls[task] = item
            task.add_done_callback(self._call_ended)
        self._has_room.set()

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        self._idle_now.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _work(self, item: QueueItem) -> None:
        """Handle one item. Raises: errors that stop the worker."""
        began_s = self._now_s()
        try:
            answer = await answer_of_call(self._call, item)
        finally:
            took_s = self._now_s() - began_s
            self.counts.handler_s += took_s
            self._mean_s = took_s if self._mean_s is None else self._mean_s + MEAN_WEIGHT * (took_s - self._mean_s)
            self._running -= 1
            self._start_calls()
        if item.lost or self._leaves_calls:
            return
        outcome = outcome_of(answer, item.attempt, self.settings.retry_delays_s)
        if outcome is not None:
            self._events.warning("worker.failed", f"item '{item.id}', attempt {item.attempt}: {outcome.note.decode()}")
        if not item.lease_s:  # it does not come again in any case
            self.counts.done += outcome is None
            self.counts.dead += outcome is not None
        elif outcome is None:
            self._acks[item.lease] = item
            if not self._has_one_queue or self._is_waiting or self._ended.is_set():
                self._flush_all()
            self._has_room.set()
        else:
            await self._return([item], outcome)

    # ---- ends ------------------------------------------------------------------------------------

    def _flush_all(self) -> None:
        """Ack items with requests of their own, one for each queue."""
        for queue in dict.fromkeys(item.queue for item in self._own_acks()):
            self._acking.add(queue)
            self._tasks.start(self._flush(queue), "worker acks")

    def _acks_of(self, queue: str) -> Iterator[QueueItem]:
        acks = self._acks.values()
        return (item for item in acks if item.queue == queue and item.lease not in self._carried)

    async def _flush(self, queue: str) -> None:
        """Ack the items of a queue whose handler has returned: all in one request, while the next ones gather."""
        failures = 0
        while items := [
            each for each in self._acks.values() if each.queue == queue and each.lease not in self._carried
        ]:
            try:
                outcomes = await self._queue.ack_many(items)
            except _UNSURE as error:
                failures += 1
                self._events.warning("worker.ack-retry", f"{type(error).__name__}: {error}; asking again")
                outcomes = await self._pause_acks(items, failures)
            else:
                failures = 0
            self._acked(items, outcomes)
        self._acking.remove(queue)
        self._idle_now.set()

    def _acked(self, items: Sequence[QueueItem], outcomes: Sequence[ItemOutcome]) -> None:
        for item, outcome in zip(items, outcomes, strict=False):
            del self._acks[item.lease]
            self._settled(item, outcome)
        self._has_room.set()
        self._idle_now.set()

    async def _pause_acks(self, items: Sequence[QueueItem], failures: int) -> list[ItemOutcome]:
        """Wait before the next request. When no lease is left, the outcome stays unknown."""
        if all(item.lease not in self._held for item in items):
            return [ItemOutcome.UNKNOWN] * len(items)
        await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))
        return []

    async def _return(self, items: Sequence[QueueItem], outcome: Return) -> None:
        """Give items back. Without an answer, they come again when their leases end."""
        queues: dict[str, list[QueueItem]] = {}
        for item in items:
            if item.lease in self._held and item.lease not in self._acks:
                queues.setdefault(item.queue, []).append(item)
        await asyncio.gather(*(self._return_held(held, outcome) for held in queues.values()))

    async def _return_held(self, held: Sequence[QueueItem], outcome: Return) -> None:
        try:
            answers = await self._queue.nack_many(held, after=outcome.after_s, metadata=outcome.note, kind=outcome.kind)
        except MemqError as error:
            self._events.warning("worker.nack-failed", f"{len(held)} items come again after their leases: {error}")
            answers = [ItemOutcome.UNKNOWN] * len(held)
        for item, answer in zip(held, answers, strict=True):
            if outcome.kind is NackKind.UNUSED and answer is ItemOutcome.RETURNED:
                self._held.pop(item.lease, None)
                self.counts.returned += 1
            else:
                self._settled(item, answer)

    def _settled(self, item: QueueItem, outcome: ItemOutcome) -> None:
        """Count the end of an item."""
        self._held.pop(item.lease, None)
        if outcome in _ACKED:
            self.counts.done += 1
        elif outcome is ItemOutcome.RETURNED:
            self.counts.retried += 1
        elif outcome is ItemOutcome.DEAD:
            self.counts.dead += 1
        else:
            self.counts.lost += not item.lost
            item.lost = True
            self._events.warning("worker.item-lost", f"the end of item '{item.id}' does not count: {outcome}")

    def stats(self) -> WorkerStats:
        """Return the counters."""
        return replace(self.counts, working=self._running)

    def _now_s(self) -> float:
        return self._runtime.clock.monotonic()
