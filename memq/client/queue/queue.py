"""`AsyncQueue`: leased queues on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from types import MappingProxyType
from typing import Any

from memq.client.admin import AsyncAdmin
from memq.client.arguments import check_connect_timeout, check_number, check_seconds, public_name, runtime_of
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.settings import BEGINNING, Point
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.producer.fields import BytesLike, HeadersLike, RecordFields, as_bytes
from memq.client.queue.items import (
    EnqueueTerms,
    ItemLease,
    QueueItem,
    RecentBlocks,
    UnreadableItems,
    WantedItems,
    blocks_of,
    checked_fields,
    checked_item,
    checked_lease_ms,
    checked_terms,
    error_of,
    items_of,
    listed,
    nack_request,
    outcomes_of,
    parsed_id,
    terms_of_items,
    wanted_items,
    wire_leases,
    with_keys,
)
from memq.client.queue.joint_calls import JointCalls
from memq.client.queue.views import AsyncItemViews
from memq.errors import (
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    OverLimitError,
    QueueFullError,
    RetryableError,
    ThrottledError,
    UnreachableError,
)
from memq.limits import (
    KIB,
    QUEUE_ITEMS_PER_REQUEST_MAX,
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
TIMEOUT_MS = 30_000
REQUEST_BYTES_MAX = 900 * KIB  # of the blocks in one request
WAIT_S_MAX = 86_400.0
REQUEST_BITS = 62  # of the first identity: those of two clients do not meet
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0
REFUSALS = (QueueFullError, ThrottledError, OverLimitError)  # nothing was done
QUESTIONS = (GetItems, PeekItems, ListDeadItems, CountEnds, ListQueues)  # they change nothing
Change = NackItems | ExtendItems
Outcomes = list[ItemOutcome]
NO_ACKS: Mapping[str, list[WireLeasedItems]] = MappingProxyType({})


class AsyncQueue(AsyncItemViews):
    """A client of leased queues on the caller's event loop. Raises the same errors as `memq.Queue`."""

    @public_name("Queue")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        timeout_ms: int = TIMEOUT_MS,
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
        self._requests = count(1 + self._runtime.random.getrandbits(REQUEST_BITS))  # identities of requests for items
        self._is_met = False
        self._events = EventLog(self._runtime.clock)
        now_s, events = self._runtime.clock.monotonic, self._events
        self._enqueues = JointCalls(self._enqueue_joint, REQUEST_BYTES_MAX, now_s, events)
        self._acks = JointCalls(self._ack_joint, QUEUE_ITEMS_PER_REQUEST_MAX, now_s, events)

    async def close(self) -> None:
        """Disconnect. Items that are leased stay so until their leases end."""
        await self._enqueues.close()
        await self._acks.close()
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
        dedupe_window: float | None = None,
        metadata: HeadersLike | None = None,
    ) -> str:
        """Put an item into a queue; return its id. See `Queue.enqueue`."""
        terms = checked_terms(priority, deliver_after, ttl, lease, attempts_max, at_most_once)
        terms = with_keys(terms, key, ordered=ordered, dedupe_key=dedupe_key, dedupe_window=dedupe_window)
        self._check_loop()
        item = checked_fields(as_bytes(payload, "payload"), metadata)
        line = check_queue(queue), terms
        if dedupe_key is not None:  # its block has one item
            return (await self._enqueue_joint(line, [item], self._runtime.clock.monotonic()))[0]
        return (await self._enqueues.call(line, [item], item.size))[0]

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
        keys: Sequence[str | None] | None = None,
        dedupe_keys: Sequence[str | None] | None = None,
        dedupe_window: float | None = None,
        metadata: Sequence[HeadersLike | None] | None = None,
    ) -> list[str]:
        """Put items into a queue; return their ids. See `Queue.enqueue_many`."""
        terms = checked_terms(priority, deliver_after, ttl, lease, attempts_max, at_most_once)
        payloads = listed("payloads", payloads, "payloads")
        each_terms = terms_of_items(
            terms,
            len(payloads),
            key,
            ordered=ordered,
            keys=keys,
            dedupe_keys=dedupe_keys,
            dedupe_window=dedupe_window,
        )
        if metadata is not None and len(metadata) != len(payloads):
            raise InvalidRequestError(f"{len(payloads)} payloads and {len(metadata)} metadata")
        self._check_loop()
        items = [
            checked_fields(as_bytes(payload, "payload"), headers)
            for payload, headers in zip(payloads, metadata or [None] * len(payloads), strict=True)
        ]
        groups = dict[tuple[EnqueueTerms, int], list[int]]()
        for at, its_terms in enumerate(each_terms):  # a block with a dedupe key has one item
            groups.setdefault((its_terms, at if its_terms.dedupe_key else -1), []).append(at)
        blocks = [(terms, [items[at] for at in places]) for (terms, _), places in groups.items()]
        ids = await self._enqueue_groups(check_queue(queue), blocks, self._runtime.clock.monotonic())
        found = dict(zip(chain.from_iterable(groups.values()), ids, strict=True))
        return [found[at] for at in range(len(items))]

    async def _enqueue_joint(
        self, line: tuple[str, EnqueueTerms], items: Sequence[RecordFields], began_s: float
    ) -> list[str]:
        """Put items of any calls with the same terms into a queue; return their ids."""
        return await self._enqueue_groups(line[0], [(line[1], items)], began_s)

    async def _enqueue_groups(
        self, queue: str, groups: Sequence[tuple[EnqueueTerms, Sequence[RecordFields]]], began_s: float
    ) -> list[str]:
        """Put groups of items, each with its terms, into a queue; return their ids in this order."""
        ids: list[str] = []
        waiting: list[tuple[EnqueueTerms, bytes, list[str]]] = []
        size = 0
        for terms, items in groups:
            for block, names in list(blocks_of(queue, items, self._runtime)):
                is_full = len(waiting) == QUEUE_ITEMS_PER_REQUEST_MAX or size + len(block) > REQUEST_BYTES_MAX
                if waiting and is_full:
                    ids += await self._send(queue, waiting, began_s)
                    waiting, size = [], 0
                waiting.append((terms, block, names))
                size += len(block)
        return ids + (await self._send(queue, waiting, began_s) if waiting else [])

    async def _send(
        self, queue: str, blocks: Sequence[tuple[EnqueueTerms, bytes, list[str]]], began_s: float
    ) -> list[str]:
        """Put blocks into a queue; return the ids of their items, or of those with the same dedupe keys."""
        ask = EnqueueItems(queue=queue, blocks=[terms.wire(block) for terms, block, _ in blocks])
        answer, _ = await self._surely(ask, b"".join(block for _, block, _ in blocks), began_s=began_s)
        firsts = answer.about_queues.firsts
        if not firsts:
            return [name for *_, names in blocks for name in names]
        return [
            f"{queue}:{first}:{number}"
            for (*_, names), first in zip(blocks, firsts, strict=True)
            for number in range(len(names))
        ]

    async def dequeue(
        self,
        queues: str | Mapping[str, int],
        *,
        wait: float = 0.0,
        max_items: int | None = None,
        max_at_most_once: int | None = None,
    ) -> list[QueueItem]:
        """Lease items of queues. See `Queue.dequeue`."""
        self._check_loop()
        return (await self._next(wanted_items(queues, max_items, max_at_most_once), wait))[1]

    async def ack_and_dequeue(
        self,
        items: Sequence[QueueItem],
        queues: str | Mapping[str, int],
        *,
        wait: float = 0.0,
        max_items: int | None = None,
        max_at_most_once: int | None = None,
    ) -> tuple[list[ItemOutcome], list[QueueItem]]:
        """End items, and lease the next ones with the same request. See `Queue.ack_and_dequeue`."""
        leases, wanted = self._leases(items), wanted_items(queues, max_items, max_at_most_once)
        names = dict.fromkeys(queue for queue, _ in leases)
        if not leases or len(leases) > QUEUE_ITEMS_PER_REQUEST_MAX or len(names) > QUEUES_PER_REQUEST_MAX:
            return await self._of_queues(leases, self._ack), (await self._next(wanted, wait))[1]
        places = {name: [at for at, (queue, _) in enumerate(leases) if queue == name] for name in names}
        acks = {name: wire_leases(leases[at][1] for at in indexes) for name, indexes in places.items()}
        outcomes, found = await self._next(wanted, wait, acks)
        ends = dict(zip(chain.from_iterable(places.values()), outcomes, strict=True))
        return [ends[at] for at in range(len(leases))], found

    async def _next(
        self, wanted: WantedItems, wait: float, acks: Mapping[str, list[WireLeasedItems]] = NO_ACKS
    ) -> tuple[Outcomes, list[QueueItem]]:
        """Return the outcomes of acks, and the next items.

        A request whose answer was lost comes again, with its identity: so no items that it has leased are hidden.
        The broker answers acks at once. So their outcomes are known before this waits for items, and are not lost.
        Raises: OutcomeUnknownError without an answer about acks; the last error.
        """
        check_seconds("wait", wait, 0, WAIT_S_MAX)
        clock = self._runtime.clock
        until_s, tries, again, outcomes = clock.monotonic() + wait, 0, False, Outcomes()
        give_up_s, request = until_s + self._timeout_s, next(self._requests)
        while True:
            asked_s, is_sent = clock.monotonic(), False
            wait_ms = round(max(0.0, min(until_s - asked_s, QUEUE_WAIT_MS_MAX / 1_000)) * 1_000)
            known = self._recent.known()
            ask = DequeueItems(
                queues=wanted.queues,
                items_max=wanted.items_max,
                once_max=wanted.once_max,
                wait_ms=0 if acks or again else wait_ms,
                known=list(known),
                acks=dict(acks),
                request=request,
                again=again,
            )
            try:
                await self._reach()
                is_sent = True
                answer, blocks = await self._ask(ask, ask.wait_ms / 1_000)
            except RetryableError as error:
                tries += 1
                again |= is_sent and not isinstance(error, REFUSALS)
                end_s = give_up_s if is_sent or (again and acks) else until_s
                if clock.monotonic() > end_s or (self._is_final(error) and not again):
                    if outcomes:
                        return outcomes, []
                    if acks and again:
                        raise OutcomeUnknownError(f"no broker has answered an ack: {error}") from error
                    raise
                await self._pause(error, tries)
                continue
            if acks:
                outcomes, acks = _sure(outcomes_of(answer.about_queues), repeated=again), NO_ACKS
            items, unreadable = items_of(answer.about_queues.grants, blocks, known, self._recent, asked_s)
            for each in unreadable:
                await self._give_back(each)
            if items or (not again and clock.monotonic() >= until_s):
                return outcomes, items
            again, request = False, next(self._requests)

    async def _give_back(self, unreadable: UnreadableItems) -> None:
        """Give back items that no worker can read. Without an answer, their lease ends."""
        self._events.warning("queue.unreadable", f"items of queue '{unreadable.queue}' in {unreadable.cause}")
        with suppress(MemqError):
            await self._surely(nack_request(unreadable.queue, unreadable.leases, 0, b"unreadable", unreadable.kind))

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
        self._check_loop()
        lease = checked_item(item).lease
        error = error_of(item.id, (await self._ack(item.queue, [lease]))[0])
        if error is not None:
            raise error

    async def ack_many(self, items: Sequence[QueueItem]) -> list[ItemOutcome]:
        """End items; return the outcome of each. See `Queue.ack_many`."""
        return await self._of_queues(self._leases(items), self._ack)

    async def nack(
        self, item: QueueItem, *, after: float = 0.0, metadata: BytesLike = b"", kind: NackKind | str = NackKind.FAILED
    ) -> ItemOutcome:
        """Give an item back. See `Queue.nack`."""
        leases = wire_leases([checked_item(item).lease])
        return await self._one(item, nack_request(item.queue, leases, after, metadata, kind))

    async def nack_many(
        self,
        items: Sequence[QueueItem],
        *,
        after: float = 0.0,
        metadata: BytesLike = b"",
        kind: NackKind | str = NackKind.FAILED,
    ) -> list[ItemOutcome]:
        """Give items back; return the outcome of each. See `Queue.nack_many`."""
        return await self._many(items, lambda queue, leases: nack_request(queue, leases, after, metadata, kind))

    async def extend(self, item: QueueItem, lease: float) -> None:
        """Extend the lease of an item to `lease` seconds from now on. See `Queue.extend`."""
        lease_ms = checked_lease_ms(lease)
        began_s = self._runtime.clock.monotonic()
        leases = wire_leases([item.lease])
        await self._one(item, ExtendItems(queue=checked_item(item).queue, items=leases, lease_ms=lease_ms))
        item.until_s = max(item.until_s, began_s + lease)

    async def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
        """Extend the leases of items to `lease` seconds from now on. See `Queue.extend_many`."""
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
        """End an item that no worker has; return the outcome. See `Queue.cancel`."""
        self._check_loop()
        queue, place = parsed_id(item_id)
        answer, _ = await self._surely(CancelItems(queue=check_queue(queue), items=wire_leases([place])))
        return outcomes_of(answer.about_queues)[0]

    async def cancel_many(self, item_ids: Sequence[str]) -> list[ItemOutcome]:
        """End items that no worker has; return the outcome of each. See `Queue.cancel_many`."""
        self._check_loop()
        places = [parsed_id(each) for each in listed("ids", item_ids, "ids")]

        async def outcomes(queue: str, leases: list[ItemLease]) -> Outcomes:
            return outcomes_of(
                (await self._surely(CancelItems(queue=queue, items=wire_leases(leases))))[0].about_queues
            )

        return await self._of_queues([(check_queue(queue), place) for queue, place in places], outcomes)

    # ---- inside ----------------------------------------------------------------------------------

    async def _many(self, items: Sequence[QueueItem], ask: Callable[[str, list[WireLeasedItems]], Change]) -> Outcomes:
        """Ask about items; return the outcome of each."""

        async def outcomes(queue: str, leases: list[ItemLease]) -> Outcomes:
            return outcomes_of((await self._surely(ask(queue, wire_leases(leases))))[0].about_queues)

        return await self._of_queues(self._leases(items), outcomes)

    def _leases(self, items: Sequence[QueueItem]) -> list[tuple[str, ItemLease]]:
        self._check_loop()
        return [(checked_item(item).queue, item.lease) for item in listed("items", items, "memq.QueueItem")]

    async def _of_queues(
        self, items: Sequence[tuple[str, ItemLease]], ask: Callable[[str, list[ItemLease]], Awaitable[Outcomes]]
    ) -> Outcomes:
        """Ask about items, at most 1,024 of a queue at once; return the outcome of each."""
        places: dict[str, list[int]] = {}
        for index, (name, _) in enumerate(items):
            places.setdefault(name, []).append(index)
        found: dict[int, ItemOutcome] = {}
        for queue, indexes in places.items():
            for at in range(0, len(indexes), QUEUE_ITEMS_PER_REQUEST_MAX):
                some = indexes[at : at + QUEUE_ITEMS_PER_REQUEST_MAX]
                found.update(zip(some, await ask(queue, [items[index][1] for index in some]), strict=True))
        return [found[index] for index in range(len(items))]

    async def _ack(self, queue: str, leases: list[ItemLease]) -> Outcomes:
        return list(await self._acks.call(queue, leases, len(leases)))

    async def _ack_joint(self, queue: str, leases: list[ItemLease], began_s: float) -> Outcomes:
        """End items of any calls; return the outcome of each."""
        answer, repeated = await self._surely(AckItems(queue=queue, items=wire_leases(leases)), began_s=began_s)
        return _sure(outcomes_of(answer.about_queues), repeated=repeated)

    async def _one(self, item: QueueItem, ask: NackItems | ExtendItems) -> ItemOutcome:
        """Ask about one item; return the outcome. Raises: the error of another one than was asked for."""
        self._check_loop()
        answer, _ = await self._surely(ask)
        outcome = outcomes_of(answer.about_queues)[0]
        error = error_of(item.id, outcome)
        if error is not None and not (isinstance(ask, NackItems) and outcome is ItemOutcome.DEAD):
            raise error
        return outcome

    async def _surely(self, ask: Any, blocks: bytes = b"", *, began_s: float | None = None) -> tuple[AdminAnswer, bool]:
        """Ask until a broker answers; return the answer, and whether an earlier request may have counted.

        The time of the call counts from `began_s`, or from now. A question ends when no broker can be reached within
        `connect_timeout_ms`; a change of items waits for a broker, as a send of a producer does.
        Raises: after `timeout_ms` OutcomeUnknownError, or the last refusal; what does not pass.
        """
        clock = self._runtime.clock
        until_s, tries, unsure = (clock.monotonic() if began_s is None else began_s) + self._timeout_s, 0, False
        while True:
            is_sent = False
            try:
                await self._reach()
                is_sent = True
                return (await self._ask(ask, 0.0, blocks))[0], unsure
            except RetryableError as error:
                tries += 1
                unsure |= is_sent and not isinstance(error, REFUSALS) and not isinstance(ask, QUESTIONS)
                is_over = clock.monotonic() > until_s or (isinstance(ask, QUESTIONS) and not is_sent)
                if not unsure and (is_over or self._is_final(error)):
                    raise
                if clock.monotonic() > until_s:
                    text = f"no broker has answered in {self._timeout_s:g} s: {error}"
                    raise OutcomeUnknownError(text) from error
                await self._pause(error, tries)

    async def _reach(self) -> None:
        await self._pool.reach(self._connect_timeout_s)
        self._is_met = True

    def _is_final(self, error: RetryableError) -> bool:
        """Say whether a retry is useless: no broker was ever met, or all addresses are those of other servers."""
        return isinstance(error, UnreachableError) and (error.foreign or not self._is_met)

    async def _ask(self, ask: Any, wait_s: float, blocks: bytes = b"") -> tuple[AdminAnswer, memoryview]:
        request, timeout_s = AdminRequest(ask=ask), self._timeout_s + wait_s
        # One try: a second one would hide that the first request may have counted.
        work = self._router.with_blocks(Api.ADMIN, request, AdminAnswer, blocks=blocks, timeout_s=timeout_s, tries=1)
        return await work

    async def _pause(self, error: RetryableError, tries: int) -> None:
        delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
        await asyncio.sleep(error.retry_after_ms / 1_000 + delay_s)


def _sure(outcomes: Outcomes, *, repeated: bool) -> Outcomes:
    """Return outcomes of acks. An earlier request, whose answer was lost, may have acked the items."""
    if repeated:
        return [ItemOutcome.ACKED if each is ItemOutcome.ALREADY_ACKED else each for each in outcomes]
    return outcomes
