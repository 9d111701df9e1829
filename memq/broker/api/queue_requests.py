"""Answers requests about queue items; any broker takes them, and asks the owners of their shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from memq.broker.api import Answer, Call, WithBlocks
from memq.broker.api.service_lookup import ask_all_services, find_service, forward, forward_with_blocks
from memq.broker.api.stream_requests import producer_id_of, producer_ids_of
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import Services
from memq.errors import InvalidRequestError, MemqError, TooLargeError
from memq.format.blocks.header import Buffer, check_block
from memq.format.held_object import HoldId, Target
from memq.holds.storing import NewHold
from memq.limits import (
    BLOCK_RECORDS_MAX,
    HOLD_BYTES_MAX,
    QUEUE_ATTEMPTS_MAX,
    QUEUE_DEDUPE_MS_MAX,
    QUEUE_DEDUPE_MS_MIN,
    QUEUE_DELAY_MS_MAX,
    QUEUE_ITEMS_PER_REQUEST_MAX,
    QUEUE_KEY_CHARS_MAX,
    QUEUE_KNOWN_BLOCKS_MAX,
    QUEUE_LEASE_MS_MAX,
    QUEUE_LEASE_MS_MIN,
    QUEUE_NOTE_BYTES_MAX,
    QUEUE_PEEK_MAX,
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
    CountEnds,
    DequeueItems,
    EnqueueItems,
    ExtendItems,
    GetItems,
    ListDeadItems,
    ListQueues,
    NackItems,
    PeekItems,
    PurgeItems,
    QueueAnswer,
    RedriveItems,
    WireGrant,
    WireGrantedItems,
    WireItem,
    WireLeasedItems,
    WireQueue,
    WireQueueBlock,
)
from memq.queues.decisions import (
    Dedupe,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    NackKind,
    Outcomes,
    dedupe_digest,
    queue_scope,
)
from memq.queues.keeper import ANSWER_BYTES_MAX, Delivered, QueueKeeper
from memq.queues.pop.groups import check_queue, is_place, is_pop_queue, place_of
from memq.queues.views import SeenItems

Home = QueueKeeper | Link
Change = AckItems | NackItems | ExtendItems | CancelItems | RedriveItems | PurgeItems
Grant = tuple[WireGrant, Buffer]  # with the bytes of its block, empty if the client has them


class QueueRequests:
    """Answers requests of producers and workers of queues."""

    def __init__(self, services: Services, hosts: ServiceHosts) -> None:
        self._services = services
        self._hosts = hosts
        self._turn = 0  # of the home that is asked first

    async def enqueue(self, call: Call[EnqueueItems]) -> Answer:
        """Put blocks of items into a queue; answer when that is in the state log."""
        ask = call.ask
        if is_pop_queue(ask.queue):
            raise InvalidRequestError(f"'{ask.queue}' is a pop group", hint="send records to its topic")
        _check_count(len(ask.blocks), "blocks")
        now_ms = self._services.runtime.clock.wall_ms()
        data = [bytes(each) for each in _split(call.blocks, [each.length for each in ask.blocks])]
        blocks = [_new_block(ask.queue, each, block, now_ms) for each, block in zip(ask.blocks, data, strict=True)]
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return (await forward_with_blocks(home, ask, bytes(call.blocks)))[0]
        firsts = await home.enqueue(blocks)
        if not any(each.dedupe_key for each in ask.blocks):
            return AdminAnswer()
        return AdminAnswer(queue=QueueAnswer(firsts=[f"{each:016x}" for each in firsts]))

    async def dequeue(self, call: Call[DequeueItems]) -> Answer:
        """Lease items of queues. A request that waits grants nothing before an item is ready."""
        ask = call.ask
        if not 0 < len(ask.queues) <= QUEUES_PER_REQUEST_MAX:
            raise TooLargeError(f"{len(ask.queues)} queues in one request, 1 to {QUEUES_PER_REQUEST_MAX} are allowed")
        _check_count(sum(max(count, 0) for count in ask.queues.values()), "items")
        if min(ask.queues.values()) < 1:
            raise InvalidRequestError("a request for less than one item of a queue")
        _check_span("wait", ask.wait_ms, 0, QUEUE_WAIT_MS_MAX)
        _check_span("bytes_max", ask.bytes_max, 0, ANSWER_BYTES_MAX, "")
        if len(ask.known) > QUEUE_KNOWN_BLOCKS_MAX:
            raise TooLargeError(f"{len(ask.known)} known blocks, {QUEUE_KNOWN_BLOCKS_MAX} are allowed")
        began_s = self._now_s()
        until_s = began_s + ask.wait_ms / 1_000
        while True:
            homes = await self._homes(call, ask.queues)
            grants: list[Grant] = []
            error: MemqError | None = None
            room = ask.bytes_max or ANSWER_BYTES_MAX
            for home, wanted in self._in_turn(homes):
                if grants and room < HOLD_BYTES_MAX:
                    break
                part = DequeueItems(queues=wanted, wait_ms=0, known=ask.known, bytes_max=room)
                try:
                    found = await self._grants(home, part, int((self._now_s() - began_s) * 1_000))
                    grants += found
                    room -= sum(len(block) for _, block in found)
                except MemqError as failed:  # what others have granted is not lost
                    error = failed
            if error is not None and not grants:
                raise error
            if grants or not await self._until_ready(homes, until_s - self._now_s()):
                answer = AdminAnswer(queue=QueueAnswer(grants=[grant for grant, _ in grants]))
                return WithBlocks(answer, [block for _, block in grants])

    def _in_turn(self, homes: Mapping[Home, dict[str, int]]) -> list[tuple[Home, dict[str, int]]]:
        """Return homes in an order that changes each time: large items of the first ones may fill the answer."""
        self._turn += 1
        order, first = list(homes.items()), self._turn % len(homes)
        return order[first:] + order[:first]

    async def _grants(self, home: Home, ask: DequeueItems, waited_ms: int) -> list[Grant]:
        """Return the items that one broker leases now. They have waited since the request came here."""
        if isinstance(home, Link):
            answer, data = await forward_with_blocks(home, ask)
            grants = answer.about_queues.grants
            blocks = _split(data, [each.length for each in grants])
            waited = (msgspec.structs.replace(each, waited_ms=waited_ms) for each in grants)
            return list(zip(waited, blocks, strict=True))
        found = await home.dequeue(ask.queues, set(producer_ids_of(ask.known)), ask.bytes_max)
        return [(_wire(each, waited_ms), each.data) for each in found]

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
        return await self._change(call, lambda home: home.ack(_leases_at(home, call.ask)))

    async def nack(self, call: Call[NackItems]) -> Answer:
        """Give items back; answer what became of each."""
        ask = call.ask
        _check_span("delay", ask.after_ms, 0, QUEUE_DELAY_MS_MAX)
        if len(ask.note) > QUEUE_NOTE_BYTES_MAX:
            raise TooLargeError(f"metadata of {len(ask.note)} bytes, {QUEUE_NOTE_BYTES_MAX} are allowed")
        if ask.kind not in set(NackKind):
            raise InvalidRequestError(f"{ask.kind[:60]!a} is no reason to give items back: {', '.join(NackKind)}")
        kind = NackKind(ask.kind)
        return await self._change(call, lambda home: home.nack(_leases_at(home, ask), ask.after_ms, ask.note, kind))

    async def extend(self, call: Call[ExtendItems]) -> Answer:
        """Let leases last longer; answer what became of each."""
        ask = call.ask
        _check_span("lease", ask.lease_ms, QUEUE_LEASE_MS_MIN, QUEUE_LEASE_MS_MAX)
        return await self._change(call, lambda home: home.extend(_leases_at(home, ask), ask.lease_ms))

    async def cancel(self, call: Call[CancelItems]) -> Answer:
        """End items that no worker has; answer what became of each."""
        return await self._change(call, lambda home: home.cancel([each.items for each in _leases_at(home, call.ask)]))

    async def redrive(self, call: Call[RedriveItems]) -> Answer:
        """Let dead items be ready again; answer what became of each."""
        return await self._change(call, lambda home: home.redrive([each.items for each in _leases_at(home, call.ask)]))

    async def purge(self, call: Call[PurgeItems]) -> Answer:
        """End dead items; answer what became of each."""
        return await self._change(call, lambda home: home.purge([each.items for each in _leases_at(home, call.ask)]))

    async def get(self, call: Call[GetItems]) -> Answer:
        """Show items with their payloads."""
        ask = call.ask
        _check_count(_count(ask.items), "items")
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        items = [each.items for each in _leases_at(home, ask)]
        return _shown(await home.get([(each.block, number) for each in items for number in each]))

    async def peek(self, call: Call[PeekItems]) -> Answer:
        """Show the items that a dequeue would lease now, with their payloads."""
        ask = call.ask
        _check_span("count", ask.count, 1, QUEUE_PEEK_MAX, "")
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        return _shown(await home.peek(ask.queue, ask.count))

    async def list_dead(self, call: Call[ListDeadItems]) -> Answer:
        """Show dead items."""
        ask = call.ask
        _check_span("count", ask.count, 1, QUEUE_ITEMS_PER_REQUEST_MAX, "")
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        after = (producer_id_of(ask.after[0]), ask.after[1]) if ask.after is not None else (0, -1)
        return _shown(SeenItems(await home.dead(ask.queue, ask.count, after), {}))

    async def _change(self, call: Call[Any], act: Callable[[QueueKeeper], Awaitable[Outcomes]]) -> Answer:
        ask: Change = call.ask
        _check_count(_count(ask.items), "items")
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        outcomes = [(str(outcome), count) for outcome, count in await act(home)]
        return AdminAnswer(queue=QueueAnswer(outcomes=outcomes))

    async def list_queues(self, call: Call[ListQueues]) -> Answer:
        """Return the counts of all queues that have items; for another broker, of those that are here."""

        async def queues_at(keeper: QueueKeeper) -> list[WireQueue]:
            found = await keeper.counts(call.ask.prefix, proven=call.ask.proven)
            return [WireQueue(queue=name, **counts._asdict()) for name, counts in found.items()]

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.queues, call, queues_at, _queues_of)
        ordered = sorted(found, key=lambda each: each.queue)
        return AdminAnswer(queue=QueueAnswer(queues=ordered), covered=covered)

    async def count_ends(self, call: Call[CountEnds]) -> Answer:
        """Return how many items have ended, by outcome; for another broker, of those that are here."""

        async def totals_at(keeper: QueueKeeper) -> list[tuple[str, int]]:
            return list((await keeper.totals()).items())

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.queues, call, totals_at, _totals_of)
        totals: dict[str, int] = {}
        for name, count in found:
            totals[name] = totals.get(name, 0) + count
        return AdminAnswer(queue=QueueAnswer(totals=totals), covered=covered)

    async def _home(self, call: Call[Any], queue: str) -> Home:
        """Return the keeper of a queue, or a link to its broker. Raises: as `find_service`; InvalidNameError."""
        return await find_service(self._hosts, self._hosts.queues, check_queue(queue), call)

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


def _totals_of(answer: AdminAnswer) -> list[tuple[str, int]]:
    return list(answer.about_queues.totals.items())


def _split(data: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """Return the blocks behind a message. Raises: InvalidRequestError."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(data):
        raise InvalidRequestError(f"{len(data)} bytes of blocks follow a message that names {sum(lengths)}")
    ends = list(accumulate(lengths, initial=0))
    return [data[begin:end] for begin, end in pairwise(ends)]


def _new_block(queue: str, each: WireQueueBlock, data: bytes, now_ms: int) -> NewHold:
    """Return a block that is to be stored. Raises: InvalidRequestError, TooLargeError, CorruptDataError."""
    _check_span("priority", each.priority, 0, QUEUE_PRIORITY_MAX, "")
    _check_span("delay", each.after_ms, 0, QUEUE_DELAY_MS_MAX)
    _check_span("ttl", each.life_ms, 0, QUEUE_DELAY_MS_MAX)
    _check_span("attempts_max", each.attempts_max, 0, QUEUE_ATTEMPTS_MAX, "")
    if each.lease_ms:
        _check_span("lease", each.lease_ms, QUEUE_LEASE_MS_MIN, QUEUE_LEASE_MS_MAX)
    if len(data) > HOLD_BYTES_MAX:
        raise TooLargeError(f"block of {len(data)} bytes of items, {HOLD_BYTES_MAX} are allowed")
    header = check_block(data, queue_scope(queue))
    if header.first_sequence or header.count > QUEUE_ITEMS_PER_REQUEST_MAX:
        raise InvalidRequestError(f"{header.describe()} is no block of queue items")
    numbers = each.priority, each.lease_ms, each.attempts_max, now_ms + each.life_ms if each.life_ms else 0
    terms = ItemTerms(*numbers, each.key, each.ordered, _dedupe(queue, each, header.count, now_ms))
    hold = HoldId(header.producer_id, 0)
    return NewHold(hold, header.count, Target(queue, "", 0), terms.lane(), now_ms + each.after_ms, data)


def _dedupe(queue: str, each: WireQueueBlock, items: int, now_ms: int) -> Dedupe | None:
    """Return the dedupe key of a block; check its other key, too. Raises: InvalidRequestError."""
    for what, key in (("key", each.key), ("dedupe_key", each.dedupe_key)):
        _check_span(f"length of {what}", len(key), 0, QUEUE_KEY_CHARS_MAX, "")
    if each.ordered and (not each.key or not each.lease_ms or each.after_ms):
        raise InvalidRequestError("ordered items need a key and a lease, and have no delay")
    if not each.dedupe_key:
        return None
    _check_span("dedupe_window", each.dedupe_ms, QUEUE_DEDUPE_MS_MIN, QUEUE_DEDUPE_MS_MAX)
    if items != 1:
        raise InvalidRequestError(f"{items} items have one dedupe key")
    return Dedupe(dedupe_digest(queue, each.dedupe_key), now_ms, now_ms + each.dedupe_ms)


def _shown(found: SeenItems) -> AdminAnswer:
    items: list[WireItem] = []
    for each in found.items:
        (block, number), *_ = each
        view = each._asdict()
        del view["item"]
        items.append(WireItem(block_id=f"{block:016x}", number=number, **view))
    blocks = {f"{id_:016x}": data for id_, data in found.blocks.items()}
    return AdminAnswer(queue=QueueAnswer(items=items, blocks=blocks))


def _count(items: Sequence[WireLeasedItems]) -> int:
    return sum(sum(each.ranges[1::2]) - sum(each.ranges[::2]) for each in items)


def _leases(ask: Change | GetItems) -> list[LeasedItems]:
    """Return items as a decision names them, in the order of the request. Raises: InvalidRequestError."""
    found: list[LeasedItems] = []
    most = BLOCK_RECORDS_MAX if is_pop_queue(ask.queue) else QUEUE_ITEMS_PER_REQUEST_MAX  # items of a block
    for each in ask.items:
        ends = each.ranges
        is_ordered = all(begin < end for begin, end in zip(ends[::2], ends[1::2], strict=False))
        is_ordered = is_ordered and all(end <= begin for end, begin in zip(ends[1::2], ends[2::2], strict=False))
        if not ends or len(ends) % 2 or not is_ordered or ends[0] < 0 or ends[-1] > most:
            raise InvalidRequestError(f"items {str(ends)[:60]} of a block are not possible")
        if each.grant < 0:
            raise InvalidRequestError(f"lease {each.grant} is not possible")
        found.append(LeasedItems(ItemRanges(producer_id_of(each.block_id), tuple(ends)), each.grant))
    return found


def _leases_at(home: QueueKeeper, ask: Change | GetItems) -> list[LeasedItems]:
    """Return the items of a request that are of its queue, the only one that its permission is for."""
    return home.of_queue(ask.queue, _leases(ask))


def _wire(found: Delivered, waited_ms: int) -> WireGrant:
    return WireGrant(
        queue=found.found.topic,
        block_id=f"{found.found.block.id.producer:016x}",
        grant=found.grant,
        lease_ms=found.found.lease_ms,
        waited_ms=waited_ms,
        items=[WireGrantedItems(*each) for each in found.found.items],
        length=len(found.data),
        at=_at(found.found.key, found.found.block.id.first),
    )


def _at(key: str, first: int) -> tuple[int, int, int] | None:
    """Return where a block of a pop group was read; None for one of a queue."""
    if not is_place(key):
        return None
    place = place_of(key)
    return place.partition, place.offset, first


def _check_count(count: int, what: str) -> None:
    if count > QUEUE_ITEMS_PER_REQUEST_MAX:
        raise TooLargeError(f"{count} {what} in one request, {QUEUE_ITEMS_PER_REQUEST_MAX} are allowed")


def _check_span(what: str, value: int, least: int, most: int, unit: str = " ms") -> None:
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}{unit}, {least} to {most}{unit} are allowed")
