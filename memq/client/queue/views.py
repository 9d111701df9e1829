"""The calls of queues that show items without a lease, and that redrive or purge dead items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memq.client.arguments import check_number
from memq.client.lifecycle import AsyncClosing, BlockingClient
from memq.client.queue.items import ItemLease, listed, outcomes_of, parsed_id, wire_leases
from memq.errors import InvalidRequestError, NotFoundError
from memq.format.blocks.columns import RecordHeaders, open_block
from memq.limits import QUEUE_ITEMS_PER_REQUEST_MAX, QUEUE_PEEK_MAX
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.queue_messages import (
    CountEnds,
    GetItems,
    ListDeadItems,
    ListQueues,
    PeekItems,
    PurgeItems,
    QueueAnswer,
    RedriveItems,
    WireQueue,
)
from memq.queues.decisions import ItemOutcome
from memq.queues.pop.groups import check_queue
from memq.runtime.runtime import Runtime

DEAD_LIMIT = 100


@dataclass(frozen=True, slots=True)
class ItemView:
    """The state of an item now, without a lease.

    `state` is `ready`, `delayed`, `leased` or `dead`, or `acked`, `expired` or `cancelled` for ten minutes after the
    end. `attempts` counts its leases, and `note` is the metadata of the last nack. `due_ms` and `expires_ms` are Unix
    times; `expires_ms` is 0 without a ttl. The present lease ends at `until_s` of `time.monotonic()`. `payload` is None
    in a list of dead items, for an item that has ended, and for one whose object is lost.
    """

    id: str
    queue: str
    state: str
    attempts: int
    note: bytes
    due_ms: int
    expires_ms: int
    priority: int
    key: str
    until_s: float
    payload: bytes | None
    metadata: RecordHeaders


class AsyncItemViews(AsyncClosing):
    """Shows the items of queues, and redrives or purges dead items, on an event loop."""

    _runtime: Runtime

    @abstractmethod
    async def _surely(self, ask: Any) -> tuple[AdminAnswer, bool]:
        """Repeat a request until a broker answers.

        Return the answer, and whether an earlier request may have counted.
        """

    async def queues(self, prefix: str = "") -> dict[str, WireQueue]:
        """Return the queues that have items, with their counts. See `Queue.queues`."""
        self._check_loop()
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be str, not {type(prefix).__name__}")
        answer, _ = await self._surely(ListQueues(prefix=prefix))
        return {each.queue: each for each in answer.about_queues.queues}

    async def ends(self) -> dict[str, int]:
        """Return how many items have ended, by outcome. See `Queue.ends`."""
        self._check_loop()
        return dict((await self._surely(CountEnds()))[0].about_queues.totals)

    async def get(self, item_id: str) -> ItemView:
        """Return an item with its present state. See `Queue.get`."""
        self._check_loop()
        queue, place = parsed_id(item_id)
        asked_s = self._runtime.clock.monotonic()
        answer, _ = await self._surely(GetItems(queue=check_queue(queue), items=wire_leases([place])))
        for view in _views(queue, answer.about_queues, asked_s):
            return view
        raise NotFoundError(f"no queue knows item '{item_id}'", hint="it may have ended more than 10 minutes ago")

    async def peek(self, queue: str, count: int = 1) -> list[ItemView]:
        """Return items that are ready. See `Queue.peek`."""
        self._check_loop()
        check_number("count", count, 1, QUEUE_PEEK_MAX, int)
        asked_s = self._runtime.clock.monotonic()
        answer, _ = await self._surely(PeekItems(queue=check_queue(queue), count=count))
        return _views(queue, answer.about_queues, asked_s)

    async def dead(self, queue: str, *, limit: int = DEAD_LIMIT, after: str | None = None) -> list[ItemView]:
        """Return dead items of a queue. See `Queue.dead`."""
        self._check_loop()
        check_number("limit", limit, 1, QUEUE_ITEMS_PER_REQUEST_MAX, int)
        place = _places(queue, [after])[0][:2] if after is not None else None
        asked_s = self._runtime.clock.monotonic()
        answer, _ = await self._surely(ListDeadItems(queue=check_queue(queue), count=limit, after=place))
        return _views(queue, answer.about_queues, asked_s)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> dict[str, ItemOutcome]:
        """Make dead items ready again. See `Queue.redrive`."""
        return await self._settle(RedriveItems, queue, ids)

    async def purge(self, queue: str, ids: Sequence[str] | None = None) -> dict[str, ItemOutcome]:
        """End dead items. See `Queue.purge`."""
        return await self._settle(PurgeItems, queue, ids)

    async def _settle(
        self, ask: type[RedriveItems | PurgeItems], queue: str, ids: Sequence[str] | None
    ) -> dict[str, ItemOutcome]:
        self._check_loop()
        check_queue(queue)
        outcomes: dict[str, ItemOutcome] = {}
        if ids is not None:
            places = _places(queue, ids)
            for at in range(0, len(ids), QUEUE_ITEMS_PER_REQUEST_MAX):
                some = slice(at, at + QUEUE_ITEMS_PER_REQUEST_MAX)
                answer, _ = await self._surely(ask(queue=queue, items=wire_leases(places[some])))
                outcomes |= dict(zip(ids[some], outcomes_of(answer.about_queues), strict=True))
            return outcomes
        after: str | None = None
        while dead := await self.dead(queue, limit=QUEUE_ITEMS_PER_REQUEST_MAX, after=after):
            outcomes |= await self._settle(ask, queue, [each.id for each in dead])
            after = dead[-1].id
        return outcomes


class ItemViews(BlockingClient):
    """The calls of `AsyncItemViews` for threads."""

    _core: AsyncItemViews

    def queues(self, prefix: str = "") -> dict[str, WireQueue]:
        """Return the queues that have items, and whose names begin with `prefix`, with their counts."""
        return self._background.run(self._core.queues(prefix))

    def ends(self) -> dict[str, int]:
        """Return how many items of all queues have ended since the cluster exists, by outcome.

        `acked`, `expired` (by their ttl), `cancelled`, `dead` (each time), and `redriven`.
        """
        return self._background.run(self._core.ends())

    def get(self, item_id: str) -> ItemView:
        """Return an item with its payload and present state, without a lease.

        Raises: InvalidRequestError if the id is malformed; NotFoundError for an item that no queue knows.
        """
        return self._background.run(self._core.get(item_id))

    def peek(self, queue: str, count: int = 1) -> list[ItemView]:
        """Return at most `count` ready items, in the order of `dequeue`, without a lease.

        The answer has at most about 2 MiB, so there may be fewer items.
        """
        return self._background.run(self._core.peek(queue, count))

    def dead(self, queue: str, *, limit: int = DEAD_LIMIT, after: str | None = None) -> list[ItemView]:
        """Return at most `limit` dead items of a queue, after the item with the id `after`, without payloads."""
        return self._background.run(self._core.dead(queue, limit=limit, after=after))

    def redrive(self, queue: str, ids: Sequence[str] | None = None) -> dict[str, ItemOutcome]:
        """Make dead items of a queue ready again, all or those with the ids; return the outcome of each.

        Their attempts begin again. RETURNED: the item waits for a worker. EXPIRED: its `ttl` is over, so it stays dead.
        """
        return self._background.run(self._core.redrive(queue, ids))

    def purge(self, queue: str, ids: Sequence[str] | None = None) -> dict[str, ItemOutcome]:
        """End dead items of a queue, all or those with the ids; return the outcome of each.

        CANCELLED: the item has ended. RETURNED or LEASED: the item is not dead, and is not changed.
        """
        return self._background.run(self._core.purge(queue, ids))


def _places(queue: str, ids: Sequence[str]) -> list[ItemLease]:
    """Return block and number of each id; all are of one queue. Raises: InvalidRequestError, TypeError."""
    found = [parsed_id(each) for each in listed("ids", ids, "ids")]
    for name, place in found:
        if name != queue:
            raise InvalidRequestError(f"item {place.block_id}:{place.number} is of queue '{name}', not of '{queue}'")
    return [place for _, place in found]


def _views(queue: str, answer: QueueAnswer, asked_s: float) -> list[ItemView]:
    records = {id_: list(open_block(data).records()) for id_, data in answer.blocks.items()}
    views: list[ItemView] = []
    for each in answer.items:
        block = records.get(each.block_id)
        payload, metadata = (block[each.number][0] or b"", block[each.number][2]) if block is not None else (None, ())
        views.append(
            ItemView(
                id=f"{queue}:{each.block_id}:{each.number}",
                queue=queue,
                state=each.state,
                attempts=each.attempts,
                note=each.note,
                due_ms=each.due_ms,
                expires_ms=each.expires_ms,
                priority=each.priority,
                key=each.key,
                until_s=asked_s + each.left_ms / 1_000,
                payload=payload,
                metadata=metadata,
            )
        )
    return views
