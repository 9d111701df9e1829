"""The public queues: `Queue` for threads, `AsyncQueue` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memq.client.admin import AsyncAdmin
from memq.client.arguments import check_connect_timeout, check_number, public_name, runtime_of
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.settings import BEGINNING, Point
from memq.client.lifecycle import Background
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.producer.fields import BytesLike, HeadersLike, as_bytes, check_fields
from memq.client.queue.items import (
    EnqueueTerms,
    ItemLease,
    QueueItem,
    RecentBlocks,
    UnreadableItems,
    blocks_of,
    checked_lease_ms,
    checked_terms,
    error_of,
    items_of,
    listed,
    outcomes_of,
    parsed_id,
    wire_leases,
    with_keys,
)
from memq.client.queue.views import AsyncItemViews, ItemViews
from memq.errors import (
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    OutcomeUnknownError,
    OverLimitError,
    QueueFullError,
    RetryableError,
    ThrottledError,
    TooLargeError,
    UnreachableError,
)
from memq.limits import (
    KIB,
    QUEUE_DELAY_MS_MAX,
    QUEUE_ITEMS_PER_REQUEST_MAX,
    QUEUE_NOTE_BYTES_MAX,
    QUEUE_WAIT_MS_MAX,
    QUEUES_PER_REQUEST_MAX,
)
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.queue_messages import (
    AckItems,
    CancelItems,
    CountEnds,
    DequeueItems,
    EnqueueItems,
    ExtendItems,
    GetItems,
    ListDeadItems,
    ListQueues,
    NackItems,
    PeekItems,
    WireLeasedItems,
)
from memq.queues.decisions import ItemOutcome, NackKind
from memq.queues.pop.groups import check_queue
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls

PRIORITY = 5
LEASE_S = 60.0
DEDUPE_WINDOW_S = 300.0
REQUEST_BYTES_MAX = 900 * KIB  # of the blocks in one request
WAIT_S_MAX = 86_400.0
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0
REFUSALS = (QueueFullError, ThrottledError, OverLimitError)  # nothing was done
QUESTIONS = (GetItems, PeekItems, ListDeadItems, CountEnds, ListQueues)  # they change nothing
Change = AckItems | NackItems | ExtendItems


class AsyncQueue(AsyncItemViews):
    """Queues of items, on the caller's event loop. Errors as of `memq.Queue`."""

    @public_name("Queue")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        timeout_ms: int = 30_000,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        check_number("timeout_ms", timeout_ms, 1, 86_400_000, int)
        self._timeout_s = timeout_ms / 1_000
        self._connect_timeout_s = check_connect_timeout(connect_timeout_ms) / 1_000
        self._runtime = runtime_of(runtime, tls)
        self._brokers = brokers
        self._pool = LinkPool(self._runtime, bootstrap_addresses(brokers), owner="queue")
        self._router = BrokerRouter(self._pool)
        self._recent = RecentBlocks()
        self._events = EventLog(self._runtime.clock)

    async def close(self) -> None:
        """Disconnect. Items that are leased stay so until their leases end."""
        await self._pool.close()

    async def enqueue(
        self,
        queue: str,
        payload: BytesLike,
        *,
        priority: int = PRIORITY,
        deliver_after: float = 0.0,
        ttl: float | None = None,
        lease: float = LEASE_S,
        attempts_max: int = 0,
        at_most_once: bool = False,
        key: str | None = None,
        ordered: bool = False,
        dedupe_key: str | None = None,
        dedupe_window: float = DEDUPE_WINDOW_S,
        metadata: HeadersLike | None = None,
    ) -> str:
        """Put an item into a queue; return its id. See `Queue.enqueue`."""
        terms = checked_terms(priority, deliver_after, ttl, lease, attempts_max, at_most_once)
        terms = with_keys(terms, key, ordered=ordered, dedupe_key=dedupe_key, dedupe_window=dedupe_window)
        return (await self._enqueue(queue, [payload], [metadata], terms))[0]

    async def enqueue_many(
        self,
        queue: str,
        payloads: Sequence[BytesLike],
        *,
        priority: int = PRIORITY,
        deliver_after: float = 0.0,
        ttl: float | None = None,
        lease: float = LEASE_S,
        attempts_max: int = 0,
        at_most_once: bool = False,
        key: str | None = None,
        ordered: bool = False,
        metadata: Sequence[HeadersLike | None] | None = None,
    ) -> list[str]:
        """Put items with the same terms into a queue; return their ids. See `Queue.enqueue_many`."""
        terms = checked_terms(priority, deliver_after, ttl, lease, attempts_max, at_most_once)
        terms = with_keys(terms, key, ordered=ordered)
        payloads = listed("payloads", payloads, "payloads")
        if metadata is not None and len(metadata) != len(payloads):
            raise InvalidRequestError(f"{len(payloads)} payloads and {len(metadata)} metadata")
        return await self._enqueue(queue, payloads, metadata or [None] * len(payloads), terms)

    async def _enqueue(
        self, queue: str, payloads: Sequence[BytesLike], metadata: Sequence[HeadersLike | None], terms: EnqueueTerms
    ) -> list[str]:
        self._check_loop()
        check_queue(queue)
        items = [
            check_fields(as_bytes(payload, "payload"), None, headers)
            for payload, headers in zip(payloads, metadata, strict=True)
        ]
        ids: list[str] = []
        waiting: list[bytes] = []
        size = 0
        for block, names in list(blocks_of(queue, items, self._runtime)):
            if waiting and size + len(block) > REQUEST_BYTES_MAX:
                await self._send(queue, waiting, terms)
                waiting, size = [], 0
            waiting.append(block)
            size += len(block)
            ids += names
        if waiting:
            answer = await self._send(queue, waiting, terms)
            if answer.about_queues.firsts:  # of one item with a dedupe key
                ids = [f"{queue}:{first}:0" for first in answer.about_queues.firsts]
        return ids

    async def _send(self, queue: str, blocks: Sequence[bytes], terms: EnqueueTerms) -> AdminAnswer:
        named = [terms.wire(block) for block in blocks]
        return (await self._surely(EnqueueItems(queue=queue, blocks=named), b"".join(blocks)))[0]

    async def dequeue(self, queues: str | Mapping[str, int], *, wait: float = 0.0) -> list[QueueItem]:
        """Lease items of queues. See `Queue.dequeue`."""
        self._check_loop()
        if not isinstance(queues, str | Mapping):
            raise TypeError(f"queues must be the name of one, or {{name: items}}, not {type(queues).__name__}")
        wanted = {queues: 1} if isinstance(queues, str) else dict(queues)
        if not 0 < len(wanted) <= QUEUES_PER_REQUEST_MAX:
            raise InvalidRequestError(f"{len(wanted)} queues, 1 to {QUEUES_PER_REQUEST_MAX} are allowed in one call")
        for queue, count in wanted.items():
            check_queue(queue)
            check_number(f"items of queue '{queue}'", count, 1, QUEUE_ITEMS_PER_REQUEST_MAX, int)
        check_number("wait", wait, 0, WAIT_S_MAX)
        clock = self._runtime.clock
        until_s, tries = clock.monotonic() + wait, 0
        give_up_s = until_s + self._timeout_s
        while True:
            asked_s = clock.monotonic()
            wait_ms = round(max(0.0, min(until_s - asked_s, QUEUE_WAIT_MS_MAX / 1_000)) * 1_000)
            known = self._recent.known()
            ask = DequeueItems(queues=wanted, wait_ms=wait_ms, known=list(known))
            try:
                await self._pool.reach(self._connect_timeout_s)
                answer, blocks = await self._ask(ask, wait_ms / 1_000)
            except RetryableError as error:
                tries += 1
                if clock.monotonic() > give_up_s or _is_foreign(error):
                    raise
                await self._pause(error, tries)
                continue
            items, unreadable = items_of(answer.about_queues.grants, blocks, known, self._recent, asked_s)
            for each in unreadable:
                await self._give_back(each)
            if items or clock.monotonic() >= until_s:
                return items

    async def _give_back(self, unreadable: UnreadableItems) -> None:
        """Give back items that no worker can read. Without an answer, their lease ends."""
        self._events.warning("queue.unreadable", f"items of queue '{unreadable.queue}' in {unreadable.cause}")
        with suppress(MemqError):
            await self._surely(_nack(unreadable.queue, unreadable.leases, 0, b"unreadable", unreadable.kind))

    async def begin_pop(
        self, topic: str, group: str, *, start: Point = BEGINNING, lease: float = LEASE_S, attempts_max: int = 0
    ) -> str:
        """Begin a pop group if it does not exist; return its queue. See `Queue.begin_pop`."""
        self._check_loop()
        connect_timeout_ms = round(self._connect_timeout_s * 1_000)
        async with AsyncAdmin(self._brokers, connect_timeout_ms=connect_timeout_ms, runtime=self._runtime) as admin:
            ask = await admin.pop_request(topic, group, start=start, lease=lease, attempts_max=attempts_max)
        await self._surely(ask)
        return ask.queue

    async def ack(self, item: QueueItem) -> None:
        """End an item. See `Queue.ack`."""
        await self._one(item, AckItems(queue=_checked(item).queue, items=wire_leases([item.lease])))

    async def ack_many(self, items: Sequence[QueueItem]) -> list[ItemOutcome]:
        """End items; return the outcome of each. See `Queue.ack_many`."""
        return await self._many(items, lambda queue, leases: AckItems(queue=queue, items=leases))

    async def nack(
        self, item: QueueItem, *, after: float = 0.0, metadata: BytesLike = b"", kind: NackKind | str = NackKind.FAILED
    ) -> ItemOutcome:
        """Give an item back. See `Queue.nack`."""
        return await self._one(item, _nack(_checked(item).queue, wire_leases([item.lease]), after, metadata, kind))

    async def nack_many(
        self,
        items: Sequence[QueueItem],
        *,
        after: float = 0.0,
        metadata: BytesLike = b"",
        kind: NackKind | str = NackKind.FAILED,
    ) -> list[ItemOutcome]:
        """Give items back; return the outcome of each. See `Queue.nack_many`."""
        return await self._many(items, lambda queue, leases: _nack(queue, leases, after, metadata, kind))

    async def extend(self, item: QueueItem, lease: float) -> None:
        """Let the lease of an item last `lease` seconds from now on. See `Queue.extend`."""
        lease_ms = checked_lease_ms(lease)
        began_s = self._runtime.clock.monotonic()
        leases = wire_leases([item.lease])
        await self._one(item, ExtendItems(queue=_checked(item).queue, items=leases, lease_ms=lease_ms))
        item.until_s = max(item.until_s, began_s + lease)

    async def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
        """Let the leases of items last `lease` seconds from now on. See `Queue.extend_many`."""
        lease_ms = checked_lease_ms(lease)
        began_s = self._runtime.clock.monotonic()
        outcomes = await self._many(
            items, lambda queue, leases: ExtendItems(queue=queue, items=leases, lease_ms=lease_ms)
        )
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is ItemOutcome.EXTENDED:
                item.until_s = max(item.until_s, began_s + lease)
        return outcomes

    async def cancel(self, item_id: str) -> ItemOutcome:
        """End an item that no worker has; return what became of it. See `Queue.cancel`."""
        self._check_loop()
        queue, place = parsed_id(item_id)
        answer, _ = await self._surely(CancelItems(queue=check_queue(queue), items=wire_leases([place])))
        return outcomes_of(answer.about_queues)[0]

    async def cancel_many(self, item_ids: Sequence[str]) -> list[ItemOutcome]:
        """End items that no worker has; return the outcome of each. See `Queue.cancel_many`."""
        self._check_loop()
        places = [parsed_id(each) for each in listed("ids", item_ids, "ids")]
        return await self._of_queues(
            [(check_queue(queue), place) for queue, place in places],
            lambda queue, items: CancelItems(queue=queue, items=items),
        )

    # ---- inside ----------------------------------------------------------------------------------

    async def _many(
        self, items: Sequence[QueueItem], ask: Callable[[str, list[WireLeasedItems]], Change]
    ) -> list[ItemOutcome]:
        """Ask about items; return the outcome of each."""
        self._check_loop()
        leases = [(_checked(item).queue, item.lease) for item in listed("items", items, "memq.QueueItem")]
        return await self._of_queues(leases, ask)

    async def _of_queues(
        self,
        items: Sequence[tuple[str, ItemLease]],
        ask: Callable[[str, list[WireLeasedItems]], Change | CancelItems],
    ) -> list[ItemOutcome]:
        """Ask about items, in one request for each queue and 1,024 items; return the outcome of each."""
        places: dict[str, list[int]] = {}
        for index, (name, _) in enumerate(items):
            places.setdefault(name, []).append(index)
        found: dict[int, ItemOutcome] = {}
        for queue, indexes in places.items():
            for at in range(0, len(indexes), QUEUE_ITEMS_PER_REQUEST_MAX):
                some = indexes[at : at + QUEUE_ITEMS_PER_REQUEST_MAX]
                request = ask(queue, wire_leases(items[index][1] for index in some))
                answer, repeated = await self._surely(request)
                for index, outcome in zip(some, outcomes_of(answer.about_queues), strict=True):
                    own = repeated and isinstance(request, AckItems) and outcome is ItemOutcome.ALREADY_ACKED
                    found[index] = ItemOutcome.ACKED if own else outcome
        return [found[index] for index in range(len(items))]

    async def _one(self, item: QueueItem, ask: Change) -> ItemOutcome:
        """Ask about one item; return the outcome. Raises: the error of another one than was asked for."""
        self._check_loop()
        answer, repeated = await self._surely(ask)
        outcome = outcomes_of(answer.about_queues)[0]
        if isinstance(ask, AckItems) and repeated and outcome is ItemOutcome.ALREADY_ACKED:
            return ItemOutcome.ACKED  # by a request of this call whose answer was lost
        if isinstance(ask, NackItems) and outcome is ItemOutcome.DEAD:
            return outcome
        error = error_of(item.id, outcome)
        if error is not None:
            raise error
        return outcome

    async def _surely(self, ask: Any, blocks: bytes = b"") -> tuple[AdminAnswer, bool]:
        """Ask until a broker answers; return the answer, and whether an earlier request may have counted.

        Raises: after `timeout_ms` OutcomeUnknownError, or the last refusal; what does not pass.
        """
        clock = self._runtime.clock
        until_s, tries, unsure = clock.monotonic() + self._timeout_s, 0, False
        while True:
            is_sent = False
            try:
                await self._pool.reach(self._connect_timeout_s)
                is_sent = True
                return (await self._ask(ask, 0.0, blocks))[0], unsure
            except RetryableError as error:
                tries += 1
                unsure |= is_sent and not isinstance(error, REFUSALS) and not isinstance(ask, QUESTIONS)
                if not unsure and (clock.monotonic() > until_s or _is_foreign(error)):
                    raise
                if clock.monotonic() > until_s:
                    text = f"no broker has answered in {self._timeout_s:g} s: {error}"
                    raise OutcomeUnknownError(text) from error
                await self._pause(error, tries)

    async def _ask(self, ask: Any, wait_s: float, blocks: bytes = b"") -> tuple[AdminAnswer, memoryview]:
        request, timeout_s = AdminRequest(ask=ask), self._timeout_s + wait_s
        return await self._router.with_blocks(Api.ADMIN, request, AdminAnswer, blocks=blocks, timeout_s=timeout_s)

    async def _pause(self, error: RetryableError, tries: int) -> None:
        delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
        await asyncio.sleep(error.retry_after_ms / 1_000 + delay_s)


def _is_foreign(error: RetryableError) -> bool:
    """Say whether all addresses are those of other servers, so that waiting changes nothing."""
    return isinstance(error, UnreachableError) and error.foreign


class Queue(ItemViews):
    """Queues of items: each is held by one worker at a time, until it is acked. Thread-safe.

    Every method raises UnreachableError if no broker can be reached in `timeout_ms`, in tries of `connect_timeout_ms`:
    nothing was done. One that changes an item raises OutcomeUnknownError if a broker was asked, and none has answered
    in that time: it may have counted.
    """

    _core: AsyncQueue

    @public_name("Queue")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        timeout_ms: int = 30_000,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._core = AsyncQueue(
            brokers, timeout_ms=timeout_ms, connect_timeout_ms=connect_timeout_ms, tls=tls, runtime=runtime
        )
        self._background = Background("queue", self._core)
        self._closed = False

    def enqueue(
        self,
        queue: str,
        payload: BytesLike,
        *,
        priority: int = PRIORITY,
        deliver_after: float = 0.0,
        ttl: float | None = None,
        lease: float = LEASE_S,
        attempts_max: int = 0,
        at_most_once: bool = False,
        key: str | None = None,
        ordered: bool = False,
        dedupe_key: str | None = None,
        dedupe_window: float = DEDUPE_WINDOW_S,
        metadata: HeadersLike | None = None,
    ) -> str:
        """Put an item into a queue; return its id when it is stored. Times in seconds.

        Items of priority 0 come first, those of 9 last. It does not come before `deliver_after`, and ends after `ttl`
        if no worker has it. A worker has it for `lease`; then it comes again, at most `attempts_max` times in all (0:
        no limit), and is dead after that. With `at_most_once` it comes once, and needs no ack.

        Keys take turns: one with many items does not delay those of others. With `ordered`, one item of the key is
        leased at a time, in the order of arrival. If the queue took an item under `dedupe_key` in the last
        `dedupe_window` seconds, this call adds nothing and returns the id of that item.

        Raises: InvalidSettingError, InvalidNameError, TooLargeError, QueueFullError.
        """
        return self._background.run(
            self._core.enqueue(
                queue,
                payload,
                priority=priority,
                deliver_after=deliver_after,
                ttl=ttl,
                lease=lease,
                attempts_max=attempts_max,
                at_most_once=at_most_once,
                key=key,
                ordered=ordered,
                dedupe_key=dedupe_key,
                dedupe_window=dedupe_window,
                metadata=metadata,
            )
        )

    def enqueue_many(
        self,
        queue: str,
        payloads: Sequence[BytesLike],
        *,
        priority: int = PRIORITY,
        deliver_after: float = 0.0,
        ttl: float | None = None,
        lease: float = LEASE_S,
        attempts_max: int = 0,
        at_most_once: bool = False,
        key: str | None = None,
        ordered: bool = False,
        metadata: Sequence[HeadersLike | None] | None = None,
    ) -> list[str]:
        """Put items with the same terms into a queue; return their ids. See `enqueue`.

        After an error some of them may be in the queue.
        """
        return self._background.run(
            self._core.enqueue_many(
                queue,
                payloads,
                priority=priority,
                deliver_after=deliver_after,
                ttl=ttl,
                lease=lease,
                attempts_max=attempts_max,
                at_most_once=at_most_once,
                key=key,
                ordered=ordered,
                metadata=metadata,
            )
        )

    def dequeue(self, queues: str | Mapping[str, int], *, wait: float = 0.0) -> list[QueueItem]:
        """Lease items: one of a queue, or of each queue at most as many as the mapping says.

        If no item is ready, wait up to `wait` seconds for the first one. The leases count from the request on.
        """
        return self._background.run(self._core.dequeue(queues, wait=wait))

    def begin_pop(
        self, topic: str, group: str, *, start: Point = BEGINNING, lease: float = LEASE_S, attempts_max: int = 0
    ) -> str:
        """Begin a pop group if it does not exist; return its queue, `topic@group`.

        The queue has the records of the topic as items. `start` is that of a consumer, and counts for a new group only.
        Each lease lasts `lease` seconds at first. A record is dead after `attempts_max` leases (0: no limit). Both
        count for records that are read from now on. Raises: NotFoundError without the topic.
        """
        work = self._core.begin_pop(topic, group, start=start, lease=lease, attempts_max=attempts_max)
        return self._background.run(work)

    def ack(self, item: QueueItem) -> None:
        """End an item permanently; return when that is kept.

        Raises: LeaseLostError; AlreadyAckedError; ItemEndedError; NotFoundError for an item that no queue knows.
        """
        self._background.run(self._core.ack(item))

    def ack_many(self, items: Sequence[QueueItem]) -> list[ItemOutcome]:
        """End items permanently; return the outcome of each: ACKED, or why not."""
        return self._background.run(self._core.ack_many(items))

    def nack(
        self, item: QueueItem, *, after: float = 0.0, metadata: BytesLike = b"", kind: NackKind | str = NackKind.FAILED
    ) -> ItemOutcome:
        """Give an item back: it comes again after `after` seconds, with `metadata` as its note.

        With the kind "unused" the lease does not count as an attempt; with "dead" no further one follows.
        Return RETURNED, or DEAD if it has had all its attempts. Raises: as `ack`; TooLargeError.
        """
        return self._background.run(self._core.nack(item, after=after, metadata=metadata, kind=kind))

    def nack_many(
        self,
        items: Sequence[QueueItem],
        *,
        after: float = 0.0,
        metadata: BytesLike = b"",
        kind: NackKind | str = NackKind.FAILED,
    ) -> list[ItemOutcome]:
        """Give items back as `nack`; return the outcome of each: RETURNED or DEAD, or why not."""
        return self._background.run(self._core.nack_many(items, after=after, metadata=metadata, kind=kind))

    def extend(self, item: QueueItem, lease: float) -> None:
        """Let the lease of an item last at least `lease` seconds from now on. It gets no shorter.

        Raises: as `ack`.
        """
        self._background.run(self._core.extend(item, lease))

    def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
        """Extend the leases of items as `extend`; return the outcome of each: EXTENDED, or why not."""
        return self._background.run(self._core.extend_many(items, lease))

    def cancel(self, item_id: str) -> ItemOutcome:
        """End an item that no worker has; return CANCELLED, or what it is. Dead items are ended, too."""
        return self._background.run(self._core.cancel(item_id))

    def cancel_many(self, item_ids: Sequence[str]) -> list[ItemOutcome]:
        """End items as `cancel`; return the outcome of each."""
        return self._background.run(self._core.cancel_many(item_ids))

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()


def _nack(
    queue: str, leases: list[WireLeasedItems], after: float, metadata: BytesLike, kind: NackKind | str
) -> NackItems:
    """Return a request that gives items back. Raises: InvalidSettingError, TooLargeError, TypeError."""
    note = as_bytes(metadata, "metadata") or b""
    check_number("after", after, 0, QUEUE_DELAY_MS_MAX / 1_000)
    if len(note) > QUEUE_NOTE_BYTES_MAX:
        raise TooLargeError(f"metadata of {len(note)} bytes, {QUEUE_NOTE_BYTES_MAX} are allowed")
    if kind not in set(NackKind):
        raise InvalidSettingError(f"kind = {kind!r} is not one of {', '.join(NackKind)}")
    return NackItems(queue=queue, items=leases, after_ms=round(after * 1_000), note=note, kind=str(kind))


def _checked(item: QueueItem) -> QueueItem:
    """Return an item. Raises: TypeError."""
    if not isinstance(item, QueueItem):
        raise TypeError(f"item must be a memq.QueueItem, not {type(item).__name__}")
    return item
