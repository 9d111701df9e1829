"""Answers requests about queue items; any broker takes them, and asks the owners of their shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from memq.broker.api import Answer, Call
from memq.broker.api.service_lookup import ask_all_services, find_service, forward
from memq.broker.api.stream_requests import producer_id_of
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import Services
from memq.errors import InvalidRequestError, MemqError, TooLargeError
from memq.format.blocks.header import check_block
from memq.format.held_object import HoldId, Target
from memq.holds.storing import NewHold
from memq.limits import (
    HOLD_BYTES_MAX,
    QUEUE_ATTEMPTS_MAX,
    QUEUE_DELAY_MS_MAX,
    QUEUE_ITEMS_PER_REQUEST_MAX,
    QUEUE_LEASE_MS_MAX,
    QUEUE_LEASE_MS_MIN,
    QUEUE_NOTE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
    QUEUE_WAIT_MS_MAX,
    QUEUES_PER_REQUEST_MAX,
)
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.link import REQUEST_TIMEOUT_S, Link
from memq.protocol.queue_messages import (
    AckItems,
    AwaitItems,
    CancelItems,
    DequeueItems,
    EnqueueItems,
    ExtendItems,
    ListQueues,
    NackItems,
    QueueAnswer,
    WireGrant,
    WireGrantedItem,
    WireLeasedItem,
    WireQueue,
    WireQueueBlock,
)
from memq.queues.decisions import ItemOutcome, ItemRanges, ItemTerms, LeasedItems, NackKind, queue_scope, ranges_of
from memq.queues.keeper import Delivered, QueueKeeper
from memq.topic import check_name

Home = QueueKeeper | Link
Change = AckItems | NackItems | ExtendItems | CancelItems


class QueueRequests:
    """Answers requests of producers and workers of queues."""

    def __init__(self, services: Services, hosts: ServiceHosts) -> None:
        self._services = services
        self._hosts = hosts

    async def enqueue(self, call: Call[EnqueueItems]) -> Answer:
        """Put blocks of items into a queue; answer when that is in the state log."""
        ask = call.ask
        _check_count(len(ask.blocks), "blocks")
        now_ms = self._services.runtime.clock.wall_ms()
        blocks = [_new_block(ask.queue, each, now_ms) for each in ask.blocks]
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        await home.enqueue(blocks)
        return AdminAnswer()

    async def dequeue(self, call: Call[DequeueItems]) -> Answer:
        """Lease items of queues. A request that waits grants nothing before an item is ready."""
        ask = call.ask
        if not 0 < len(ask.queues) <= QUEUES_PER_REQUEST_MAX:
            raise TooLargeError(f"{len(ask.queues)} queues in one request, 1 to {QUEUES_PER_REQUEST_MAX} are allowed")
        _check_count(sum(max(count, 0) for count in ask.queues.values()), "items")
        if min(ask.queues.values()) < 1:
            raise InvalidRequestError("a request for less than one item of a queue")
        _check_span("wait", ask.wait_ms, 0, QUEUE_WAIT_MS_MAX)
        began_s = self._now_s()
        until_s = began_s + ask.wait_ms / 1_000
        while True:
            homes = await self._homes(call, ask.queues)
            grants: list[WireGrant] = []
            error: MemqError | None = None
            for home, wanted in homes.items():
                try:
                    grants += await self._grants(home, wanted, round((self._now_s() - began_s) * 1_000))
                except MemqError as found:  # what others have granted is not lost
                    error = found
            if error is not None and not grants:
                raise error
            if grants or not await self._until_ready(homes, until_s - self._now_s()):
                return AdminAnswer(queue=QueueAnswer(grants=grants))

    async def _grants(self, home: Home, wanted: dict[str, int], waited_ms: int) -> list[WireGrant]:
        """Return the items that one broker leases now. They have waited since the request came here."""
        if isinstance(home, Link):
            answer = await forward(home, DequeueItems(queues=wanted, wait_ms=0))
            return [msgspec.structs.replace(each, waited_ms=waited_ms) for each in answer.about_queues.grants]
        return [_wire(each, waited_ms) for each in await home.dequeue(wanted)]

    async def _until_ready(self, homes: Mapping[Home, dict[str, int]], within_s: float) -> bool:
        """Wait until some home may have a ready item; return whether that is so in this time."""
        if within_s <= 0:
            return False
        begin = asyncio.get_running_loop().create_task
        waits = [begin(self._wait_at(home, list(wanted), within_s)) for home, wanted in homes.items()]
        try:
            for done in asyncio.as_completed(waits):
                if await done:
                    return True
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return False

    async def _wait_at(self, home: Home, queues: list[str], within_s: float) -> bool:
        if isinstance(home, Link):
            ask = AwaitItems(queues=queues, wait_ms=round(within_s * 1_000))
            return (await forward(home, ask, timeout_s=within_s + REQUEST_TIMEOUT_S)).about_queues.ready
        return await home.until_ready(queues, within_s)

    async def wait(self, call: Call[AwaitItems]) -> Answer:
        """Wait for another broker until a queue has a ready item."""
        ask = call.ask
        _check_span("wait", ask.wait_ms, 0, QUEUE_WAIT_MS_MAX)
        homes = await self._homes(call, dict.fromkeys(ask.queues, 1))
        return AdminAnswer(queue=QueueAnswer(ready=await self._until_ready(homes, ask.wait_ms / 1_000)))

    async def ack(self, call: Call[AckItems]) -> Answer:
        """End items that are done; answer what became of each."""
        return await self._change(call, lambda home: home.ack(_leases(call.ask.items)))

    async def nack(self, call: Call[NackItems]) -> Answer:
        """Give items back; answer what became of each."""
        ask = call.ask
        _check_span("delay", ask.after_ms, 0, QUEUE_DELAY_MS_MAX)
        if len(ask.note) > QUEUE_NOTE_BYTES_MAX:
            raise TooLargeError(f"metadata of {len(ask.note)} bytes, {QUEUE_NOTE_BYTES_MAX} are allowed")
        if ask.kind not in set(NackKind):
            raise InvalidRequestError(f"{ask.kind[:60]!a} is no reason to give items back: {', '.join(NackKind)}")
        kind = NackKind(ask.kind)
        return await self._change(call, lambda home: home.nack(_leases(ask.items), ask.after_ms, ask.note, kind))

    async def extend(self, call: Call[ExtendItems]) -> Answer:
        """Let leases last longer; answer what became of each."""
        ask = call.ask
        _check_span("lease", ask.lease_ms, QUEUE_LEASE_MS_MIN, QUEUE_LEASE_MS_MAX)
        return await self._change(call, lambda home: home.extend(_leases(ask.items), ask.lease_ms))

    async def cancel(self, call: Call[CancelItems]) -> Answer:
        """End items that no worker has; answer what became of each."""
        return await self._change(call, lambda home: home.cancel([each.items for each in _leases(call.ask.items)]))

    async def _change(self, call: Call[Any], act: Callable[[QueueKeeper], Awaitable[Sequence[ItemOutcome]]]) -> Answer:
        ask: Change = call.ask
        _check_count(len(ask.items), "items")
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        return AdminAnswer(queue=QueueAnswer(outcomes=[str(each) for each in await act(home)]))

    async def list_queues(self, call: Call[ListQueues]) -> Answer:
        """Return the counts of all queues that have items; for another broker, of those that are here."""

        async def queues_at(keeper: QueueKeeper) -> list[WireQueue]:
            found = await keeper.counts(proven=call.ask.proven)
            return [WireQueue(queue=name, **counts._asdict()) for name, counts in found.items()]

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.queues, call, queues_at, _queues_of)
        ordered = sorted(found, key=lambda each: each.queue)
        return AdminAnswer(queue=QueueAnswer(queues=ordered), covered=covered)

    async def _home(self, call: Call[Any], queue: str) -> Home:
        """Return the keeper of a queue, or a link to its broker. Raises: as `find_service`; InvalidNameError."""
        return await find_service(self._hosts, self._hosts.queues, check_name(queue, "queue"), call)

    async def _homes(self, call: Call[Any], wanted: Mapping[str, int]) -> dict[Home, dict[str, int]]:
        """Return the queues of each home."""
        homes: dict[Home, dict[str, int]] = {}
        for queue, count in wanted.items():
            homes.setdefault(await self._home(call, queue), {})[queue] = count
        return homes

    def _now_s(self) -> float:
        return self._services.runtime.clock.monotonic()


def _queues_of(answer: AdminAnswer) -> list[WireQueue]:
    return answer.about_queues.queues


def _new_block(queue: str, each: WireQueueBlock, now_ms: int) -> NewHold:
    """Return a block that is to be stored. Raises: InvalidRequestError, TooLargeError, CorruptDataError."""
    _check_span("priority", each.priority, 0, QUEUE_PRIORITY_MAX, "")
    _check_span("delay", each.after_ms, 0, QUEUE_DELAY_MS_MAX)
    _check_span("ttl", each.life_ms, 0, QUEUE_DELAY_MS_MAX)
    _check_span("attempts_max", each.attempts_max, 0, QUEUE_ATTEMPTS_MAX, "")
    if each.lease_ms:
        _check_span("lease", each.lease_ms, QUEUE_LEASE_MS_MIN, QUEUE_LEASE_MS_MAX)
    if len(each.block) > HOLD_BYTES_MAX:
        raise TooLargeError(f"block of {len(each.block)} bytes of items, {HOLD_BYTES_MAX} are allowed")
    header = check_block(each.block, queue_scope(queue))
    if header.first_sequence or header.count > QUEUE_ITEMS_PER_REQUEST_MAX:
        raise InvalidRequestError(f"{header.describe()} is no block of queue items")
    terms = ItemTerms(each.priority, each.lease_ms, each.attempts_max, now_ms + each.life_ms if each.life_ms else 0)
    hold = HoldId(header.producer_id, 0)
    return NewHold(hold, header.count, Target(queue, "", 0), terms.lane(), now_ms + each.after_ms, each.block)


def _leases(items: Sequence[WireLeasedItem]) -> list[LeasedItems]:
    """Return items as a decision names them, each on its own: outcomes are in the order of the request."""
    found: list[LeasedItems] = []
    for each in items:
        if not 0 <= each.number < QUEUE_ITEMS_PER_REQUEST_MAX or each.grant < 0:
            raise InvalidRequestError(f"item {each.number} with lease {each.grant} is not possible")
        block = producer_id_of(each.block_id)
        last = found[-1] if found else LeasedItems(ItemRanges(0, (0, 0)), 0)
        if (last.items.block, last.items.ranges[-1], last.grant) == (block, each.number, each.grant):
            found[-1] = LeasedItems(ItemRanges(block, (last.items.ranges[0], each.number + 1)), each.grant)
        else:
            found.append(LeasedItems(ranges_of(block, (each.number,)), each.grant))
    return found


def _wire(found: Delivered, waited_ms: int) -> WireGrant:
    items = [WireGrantedItem(number=each.number, attempt=each.attempt, note=each.note) for each in found.found.items]
    return WireGrant(
        queue=found.found.topic,
        block_id=f"{found.found.block.id.producer:016x}",
        grant=found.grant,
        lease_ms=found.found.lease_ms,
        waited_ms=waited_ms,
        items=items,
        block=found.data,
    )


def _check_count(count: int, what: str) -> None:
    if count > QUEUE_ITEMS_PER_REQUEST_MAX:
        raise TooLargeError(f"{count} {what} in one request, {QUEUE_ITEMS_PER_REQUEST_MAX} are allowed")


def _check_span(what: str, value: int, least: int, most: int, unit: str = " ms") -> None:
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}{unit}, {least} to {most}{unit} are allowed")
