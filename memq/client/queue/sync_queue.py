"""`Queue`: leased queues for threads."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from memq.client.arguments import public_name
from memq.client.consumer.settings import BEGINNING, Point
from memq.client.lifecycle import Background
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.producer.fields import BytesLike, HeadersLike
from memq.client.queue.items import (
    QueueItem,
)
from memq.client.queue.queue import LEASE_S, PRIORITY, TIMEOUT_MS, AsyncQueue
from memq.client.queue.views import ItemViews
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls


class Queue(ItemViews):
    """A client of leased queues, which deliver each item until a worker acks it. Thread-safe.

    The first call must reach a broker in `connect_timeout_ms`, later changes in `timeout_ms`: brokers may restart.
    Later questions must in `connect_timeout_ms`, and leases in that and their `wait`. Else each raises
    UnreachableError, and nothing was done. A call that changes an item raises OutcomeUnknownError if a broker was
    asked, and none has answered in `timeout_ms`: it may have counted.
    """

    _core: AsyncQueue

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
        dedupe_window: float | None = None,
        metadata: HeadersLike | None = None,
    ) -> str:
        """Put an item into a queue; return its id when it is stored. Times in seconds.

        Workers get items of priority 0 first, those of 9 last. No worker gets the item before `deliver_after`. After
        `ttl` the item ends, unless a worker has it. A worker has the item for `lease`. Without an ack, the item is
        delivered again, and is dead after `attempts_max` leases (0: no limit). With `at_most_once` the item is
        delivered at most once, and needs no ack.

        Keys take turns: one with many items does not delay those of others. With `ordered`, one item of the key is
        leased at a time, in the order of arrival. If the queue took an item under `dedupe_key` in the last
        `dedupe_window` seconds (300), this call adds nothing and returns the id of that item.

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
        keys: Sequence[str | None] | None = None,
        dedupe_keys: Sequence[str | None] | None = None,
        dedupe_window: float | None = None,
        metadata: Sequence[HeadersLike | None] | None = None,
    ) -> list[str]:
        """Put items into a queue; return their ids. See `enqueue`.

        `keys` and `dedupe_keys` have one for each item, or None; `key` is for all items. The other terms are the same
        for all. After an error some of them may be in the queue.
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
                keys=keys,
                dedupe_keys=dedupe_keys,
                dedupe_window=dedupe_window,
                metadata=metadata,
            )
        )

    def dequeue(
        self,
        queues: str | Mapping[str, int],
        *,
        wait: float = 0.0,
        max_items: int | None = None,
        max_at_most_once: int | None = None,
    ) -> list[QueueItem]:
        """Lease items: one of the named queue, or of each queue at most the number in the mapping.

        All queues together give at most `max_items`, and share them; one named queue gives so many. At most
        `max_at_most_once` of the items are delivered at most once: these have no second try, so a worker takes only
        those that it begins now.

        If no item is ready, wait up to `wait` seconds for the first one. The leases begin when this call is made; if a
        broker waits for an item, they begin later by that wait.
        """
        work = self._core.dequeue(queues, wait=wait, max_items=max_items, max_at_most_once=max_at_most_once)
        return self._background.run(work)

    def ack_and_dequeue(
        self,
        items: Sequence[QueueItem],
        queues: str | Mapping[str, int],
        *,
        wait: float = 0.0,
        max_items: int | None = None,
        max_at_most_once: int | None = None,
    ) -> tuple[list[ItemOutcome], list[QueueItem]]:
        """Ack items as `ack_many`, and lease the next ones as `dequeue`, with one request in place of two.

        Return the outcome of each item, and the leased items. After an error of the lease alone, these are none.
        Raises: as `ack_many`.
        """
        bounds = {"max_items": max_items, "max_at_most_once": max_at_most_once}
        return self._background.run(self._core.ack_and_dequeue(items, queues, wait=wait, **bounds))

    def begin_pop(
        self, topic: str, group: str, *, start: Point = BEGINNING, lease: float = LEASE_S, attempts_max: int = 0
    ) -> str:
        """Begin a pop group if it does not exist; return its queue, `topic@group`.

        The items of the queue are the records of the topic. `start` is as for a consumer, and has an effect on a new
        group only. Each lease lasts `lease` seconds at first. A record is dead after `attempts_max` leases (0: no
        limit). Both have an effect on records that the group reads after this call.

        Raises: NotFoundError without the topic.
        """
        work = self._core.begin_pop(topic, group, start=start, lease=lease, attempts_max=attempts_max)
        return self._background.run(work)

    def ack(self, item: QueueItem) -> None:
        """End an item permanently; return when the end is durable.

        Raises: LeaseLostError; AlreadyAckedError; ItemEndedError; NotFoundError for an item that no queue knows.
        """
        self._background.run(self._core.ack(item))

    def ack_many(self, items: Sequence[QueueItem]) -> list[ItemOutcome]:
        """End items permanently; return the outcome of each: ACKED, or why not."""
        return self._background.run(self._core.ack_many(items))

    def nack(
        self, item: QueueItem, *, after: float = 0.0, metadata: BytesLike = b"", kind: NackKind | str = NackKind.FAILED
    ) -> ItemOutcome:
        """Give an item back: the queue delivers it again after `after` seconds, with `metadata` as its note.

        With the kind "unused" the lease does not count as an attempt; with "dead" the item is dead now.
        Return RETURNED, or DEAD if the item has used all its attempts. Raises: as `ack`; TooLargeError.
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
        """Extend the lease of an item to at least `lease` seconds from now on. A lease never gets shorter.

        Raises: as `ack`.
        """
        self._background.run(self._core.extend(item, lease))

    def extend_many(self, items: Sequence[QueueItem], lease: float) -> list[ItemOutcome]:
        """Extend the leases of items as `extend`; return the outcome of each: EXTENDED, or why not."""
        return self._background.run(self._core.extend_many(items, lease))

    def cancel(self, item_id: str) -> ItemOutcome:
        """End an item that no worker has, also a dead one; return CANCELLED, or the outcome that prevents it."""
        return self._background.run(self._core.cancel(item_id))

    def cancel_many(self, item_ids: Sequence[str]) -> list[ItemOutcome]:
        """End items as `cancel`; return the outcome of each."""
        return self._background.run(self._core.cancel_many(item_ids))

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()
