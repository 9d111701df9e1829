"""Answers requests about queue items; any broker takes them, and asks the owners of their shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec

from memq.broker.api import Answer, Call, WithBlocks
from memq.broker.api.service_lookup import ask_all_services, find_service, forward, forward_with_blocks
from memq.broker.api.stream_requests import producer_id_of, producer_ids_of
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import Services
from memq.errors import InvalidRequestError, MemqError, ProtocolError, TooLargeError
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
from memq.queues.grants.repeats import Delivered
from memq.queues.keeper import ANSWER_BYTES_MAX, QueueKeeper
from memq.queues.pop.groups import check_queue, is_place, is_pop_queue, place_of
from memq.queues.scheduler import Bounds
from memq.queues.views import SeenItems

Home = QueueKeeper | Link
Change = AckItems | NackItems | ExtendItems | CancelItems | RedriveItems | PurgeItems
Grant = tuple[WireGrant, Buffer]  # with the bytes of its block, empty if the client has them
Ends = dict[str, list[tuple[str, int]]]  # runs of outcomes, by queue


class Share(NamedTuple):
    """The part of a request to dequeue that is for one home."""

    wanted: dict[str, int]
    acks: dict[str, list[WireLeasedItems]]


Homes = Mapping[Home, Share]


class _Found:
    """The parts of an answer so far, and the rest of the bounds."""

    def __init__(self, ask: DequeueItems) -> None:
        self.ask = ask
        self.grants: list[Grant] = []
        self.outcomes = Ends()
        self.error: MemqError | None = None
        self.room = ask.bytes_max or ANSWER_BYTES_MAX
        self.items = ask.items_max or sum(ask.queues.values())
        self.once = ask.once_max

    @property
    def is_full(self) -> bool:
        """Whether a further block may not fit."""
        return bool(self.grants) and self.room < HOLD_BYTES_MAX

    def add(self, grants: Sequence[Grant]) -> int:
        """Add leased items; return how many."""
        self.grants += grants
        self.room -= sum(len(block) for _, block in grants)
        counts = [(sum(run.end - run.begin for run in each.items), each.lease_ms) for each, _ in grants]
        self.once -= sum(count for count, lease_ms in counts if not lease_ms)
        taken = sum(count for count, _ in counts)
        self.items -= taken
        return taken


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
        """Lease items of queues, and ack others. A request that waits grants nothing before an item is ready.

        A request with acks has its answer when they count: a worker that has no items waits with the next request.
        """
        ask = call.ask
        _check_dequeue(ask)
        began_s = self._now_s()
        until_s = began_s + ask.wait_ms / 1_000
        while True:
            homes = await self._homes(call, ask.queues, ask.acks)
            grants, outcomes = await self._ask_homes(homes, ask, began_s)
            if (
                grants
                or ask.acks
                or ask.again
                or not await self._until_ready(homes, until_s - self._now_s(), once=ask.once_max > 0)
            ):
                runs = [run for queue in ask.acks for run in outcomes[queue]]
                answer = AdminAnswer(queue=QueueAnswer(grants=[grant for grant, _ in grants], outcomes=runs))
                return WithBlocks(answer, [block for _, block in grants])

    async def _ask_homes(self, homes: Homes, ask: DequeueItems, began_s: float) -> tuple[list[Grant], Ends]:
        """Return the items that homes lease now, and the outcomes of acks by queue.

        Homes share the bound of items by the number of their queues. Those that have more get the rest.
        Raises: MemqError if an ack has no outcome, or if no home could lease items.
        """
        found = _Found(ask)
        waiting = self._in_turn(homes)
        queues = sum(len(share.wanted) for _, share in waiting)
        rest: list[tuple[Home, Share]] = []
        for home, share in waiting:
            most = -(-found.items * len(share.wanted) // max(1, queues)) if ask.items_max else found.items
            queues -= len(share.wanted)
            if await self._ask_part(home, share, most, found, began_s) >= most:
                rest.append((home, Share(share.wanted, {})))
        for home, share in rest if ask.items_max and not ask.again else ():
            await self._ask_part(home, share, found.items, found, began_s)
        if found.error is not None and not found.grants and not found.outcomes:
            raise found.error
        return found.grants, found.outcomes

    async def _ask_part(self, home: Home, share: Share, most: int, found: _Found, began_s: float) -> int:
        """Ask one home for at most `most` items; return how many it has leased. Raises: as `_ask_homes`."""
        ask = found.ask
        wanted = share.wanted if ask.again or (most > 0 and not found.is_full) else {}
        if not wanted and not share.acks:
            return 0
        part = msgspec.structs.replace(
            ask,
            queues=wanted,
            wait_ms=0,
            bytes_max=max(0, found.room),
            items_max=max(0, most),
            once_max=max(0, found.once),
            acks=share.acks,
        )
        try:
            grants, ends = await self._ask_home(home, part, int((self._now_s() - began_s) * 1_000))
        except MemqError as failed:
            if share.acks or ask.again:
                raise
            found.error = failed  # what others have granted is not lost
            return 0
        found.outcomes |= ends
        return found.add(grants)

    def _in_turn(self, homes: Homes) -> list[tuple[Home, Share]]:
        """Return homes in an order that changes each time: large items of the first ones may fill the answer."""
        self._turn += 1
        order, first = list(homes.items()), self._turn % len(homes)
        return order[first:] + order[:first]

    async def _ask_home(self, home: Home, ask: DequeueItems, waited_ms: int) -> tuple[list[Grant], Ends]:
        """Return the items that one broker leases now, and its outcomes of acks.

        The items have waited since the request came here.
        """
        if isinstance(home, Link):
            answer, data = await forward_with_blocks(home, ask)
            grants = answer.about_queues.grants
            blocks = _split(data, [each.length for each in grants])
            waited = (msgspec.structs.replace(each, waited_ms=each.waited_ms + waited_ms) for each in grants)
            ends = _by_queue(ask.acks, answer.about_queues.outcomes)
            return list(zip(waited, blocks, strict=True)), ends
        found, ends = await _ack_and_dequeue(home, ask)
        return [(_wire(each, waited_ms), each.data) for each in found], ends

    async def _until_ready(self, homes: Homes, within_s: float, *, once: bool) -> bool:
        """Wait until some home may have a ready item; return whether that is so in this time."""
        if within_s <= 0:
            return False
        begin = asyncio.get_running_loop().create_task
        waits = [begin(self._wait_at(home, list(share.wanted), within_s, once=once)) for home, share in homes.items()]
        try:
            for done in asyncio.as_completed(waits):
                if await done:
                    return True
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return False

    async def _wait_at(self, home: Home, queues: list[str], within_s: float, *, once: bool) -> bool:
        if isinstance(home, Link):
            ask = AwaitItems(queues=queues, wait_ms=round(within_s * 1_000), once=once)
            return (await forward(home, ask, timeout_s=within_s + REQUEST_TIMEOUT_S)).about_queues.ready
        return await home.until_ready(queues, within_s, once=once)

    async def wait(self, call: Call[AwaitItems]) -> Answer:
        """Wait for another broker until a queue has a ready item."""
        ask = call.ask
        _check_span("wait", ask.wait_ms, 0, QUEUE_WAIT_MS_MAX)
        homes = await self._homes(call, dict.fromkeys(ask.queues, 1))
        ready = await self._until_ready(homes, ask.wait_ms / 1_000, once=ask.once)
        return AdminAnswer(queue=QueueAnswer(ready=ready))

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
            rates = keeper.meter.rates
            return [
                WireQueue(queue=name, **counts._asdict(), rates=rates(name)._asdict()) for name, counts in found.items()
            ]

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

    async def _homes(
        self, call: Call[Any], wanted: Mapping[str, int], acks: Mapping[str, list[WireLeasedItems]] = {}
    ) -> dict[Home, Share]:
        """Return the queues of each home, and the acks."""
        homes: dict[Home, Share] = {}
        for queue in dict.fromkeys([*wanted, *acks]):
            share = homes.setdefault(await self._home(call, queue), Share({}, {}))
            if queue in wanted:
                share.wanted[queue] = wanted[queue]
            if queue in acks:
                share.acks[queue] = acks[queue]
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


async def _ack_and_dequeue(home: QueueKeeper, ask: DequeueItems) -> tuple[list[Delivered], Ends]:
    """Ack items of queues, and lease items, with two decisions that share an entry of the log."""
    if not ask.acks:
        return await _dequeue(home, ask), {}
    acks = [lease for queue, items in ask.acks.items() for lease in home.of_queue(queue, _leases(queue, items))]
    acked, found = await asyncio.gather(home.ack(acks), _dequeue(home, ask), return_exceptions=True)
    if isinstance(acked, BaseException):
        raise acked
    if isinstance(found, BaseException) and not isinstance(found, MemqError):
        raise found
    if isinstance(found, MemqError) and ask.again:
        raise found
    if isinstance(found, MemqError) or not found:  # an ack may have made the next item of an ordered key ready
        found = []
        with suppress(MemqError):  # the outcomes are not lost
            found = await _dequeue(home, ask)
    return found, _by_queue(ask.acks, acked)


async def _dequeue(home: QueueKeeper, ask: DequeueItems) -> list[Delivered]:
    known = set(producer_ids_of(ask.known))
    if ask.again:
        return await home.dequeue_again(ask.request, known)
    items_max = ask.items_max or sum(ask.queues.values())
    bounds = Bounds(ask.bytes_max, items_max, ask.once_max)
    # Outcomes of acks do not wait for a run: a worker without items asks again, without acks.
    return await home.dequeue(ask.queues, known, bounds, ask.request, reads_runs=not ask.acks)


def _by_queue(acks: Mapping[str, Sequence[WireLeasedItems]], outcomes: Iterable[tuple[str, int]]) -> Ends:
    """Return the outcomes of each queue. Raises: ProtocolError."""
    found, runs, word, left = Ends(), iter(outcomes), "", 0
    for queue, items in acks.items():
        ends, missing = found.setdefault(queue, []), _count(items)
        while missing:
            if not left:
                word, left = next(runs, ("", 0))
                if left < 1:
                    raise ProtocolError(f"a broker answered acks of queue '{queue}' without their outcomes")
            taken = min(left, missing)
            ends.append((str(word), taken))
            left, missing = left - taken, missing - taken
    return found


def _leases(queue: str, items: Sequence[WireLeasedItems]) -> list[LeasedItems]:
    """Return items as a decision names them, in the order of the request. Raises: InvalidRequestError."""
    found: list[LeasedItems] = []
    most = BLOCK_RECORDS_MAX if is_pop_queue(queue) else QUEUE_ITEMS_PER_REQUEST_MAX  # items of a block
    for each in items:
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
    return home.of_queue(ask.queue, _leases(ask.queue, ask.items))


def _wire(found: Delivered, waited_ms: int) -> WireGrant:
    return WireGrant(
        queue=found.found.topic,
        block_id=f"{found.found.block.id.producer:016x}",
        grant=found.grant,
        lease_ms=found.found.lease_ms,
        waited_ms=waited_ms - found.past_ms,
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


def _check_dequeue(ask: DequeueItems) -> None:
    """Raises: InvalidRequestError, TooLargeError."""
    queues = max(len(ask.queues), len(ask.acks))
    if not 0 < queues <= QUEUES_PER_REQUEST_MAX:
        raise TooLargeError(f"{queues} queues in one request, 1 to {QUEUES_PER_REQUEST_MAX} are allowed")
    if min(ask.queues.values(), default=1) < 1:
        raise InvalidRequestError("a request for less than one item of a queue")
    _check_count(max(ask.items_max or sum(ask.queues.values()), *ask.queues.values(), 0), "items")
    _check_span("items_max", ask.items_max, 0, QUEUE_ITEMS_PER_REQUEST_MAX, "")
    _check_span("once_max", ask.once_max, 0, QUEUE_ITEMS_PER_REQUEST_MAX, "")
    _check_count(sum(_count(items) for items in ask.acks.values()), "items with acks")
    _check_span("wait", ask.wait_ms, 0, QUEUE_WAIT_MS_MAX)
    if ask.request < 0 or (ask.again and not ask.request):
        raise InvalidRequestError(f"request {ask.request} has no identity that is possible")
    _check_span("bytes_max", ask.bytes_max, 0, ANSWER_BYTES_MAX, "")
    if len(ask.known) > QUEUE_KNOWN_BLOCKS_MAX:
        raise TooLargeError(f"{len(ask.known)} known blocks, {QUEUE_KNOWN_BLOCKS_MAX} are allowed")


def _check_count(count: int, what: str) -> None:
    if count > QUEUE_ITEMS_PER_REQUEST_MAX:
        raise TooLargeError(f"{count} {what} in one request, {QUEUE_ITEMS_PER_REQUEST_MAX} are allowed")


def _check_span(what: str, value: int, least: int, most: int, unit: str = " ms") -> None:
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}{unit}, {least} to {most}{unit} are allowed")
