"""The leases of a connection of Celery: a thread extends them while the tasks of their items run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import loads

from memq.client.queue.items import QueueItem
from memq.client.queue.sync_queue import Queue
from memq.errors import MemqError, OutcomeUnknownError, RetryableError
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog

RENEWALS = 3  # of a lease in its time
CHECK_S = 0.25  # between two checks of all leases: the shortest lease has 1 s

# kombu's decoder of JSON makes numbers, times and ids of values, by names in the payload
_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)

_events = EventLog(SystemClock())


class Leases:
    """The unacked items of a connection, by delivery tag. A thread extends their leases.

    All methods are thread-safe: a worker acks in other threads than the one that consumes.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._items: dict[str, QueueItem] = {}
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, item: QueueItem) -> dict[str, Any] | None:
        """Extend the lease of an item until `settle`; return its message, with a delivery tag of its own.

        Return None for an item that is no message of kombu, and make it dead: it would stop each consumer that gets it.
        """
        tag = f"{item.id}/{item.lease.grant}"
        with self._lock:
            self._items[tag] = item
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="memq leases of celery", daemon=True)
                self._thread.start()
        try:
            raw: dict[str, Any] = loads(item.payload)
            if encoding := raw["properties"].get("body_encoding"):  # else the consumer would fail at the delivery
                virtual.Channel.codecs[encoding].decode(raw["body"])
            raw["properties"]["delivery_tag"] = tag
            if item.attempt > 1:
                raw["redelivered"] = True
                raw["properties"]["delivery_info"]["redelivered"] = True
        except _FOREIGN as error:
            _events.warning("celery.foreign-item", f"item {item.id} is dead now: {error!r}")
            self.settle(tag, lambda queue, held: queue.nack(held, kind=NackKind.DEAD))
            return None
        return raw

    def settle(self, tag: str, change: Callable[[Queue, QueueItem], object]) -> None:
        """Ack an item, or give it back. Log an item whose lease is over: another worker may have it.

        Raises: RetryableError, OutcomeUnknownError when no broker answered.
        """
        with self._lock:
            item = self._items.get(tag)
        if item is None:
            return
        try:
            change(self._queue, item)
        except (RetryableError, OutcomeUnknownError):
            raise
        except MemqError as error:
            _events.warning("celery.not-settled", f"message {item.id}: {error}")
        with self._lock:
            self._items.pop(tag, None)

    def give_back(self, tags: Iterable[str]) -> None:
        """Give back items of tasks that have not begun. Without an answer of a broker, their leases end later."""
        with self._lock:
            items = [item for tag in tags if (item := self._items.pop(tag, None)) is not None]
        try:
            if items:
                self._queue.nack_many(items, kind=NackKind.UNUSED)
        except MemqError as error:
            _events.warning("celery.not-returned", f"{len(items)} messages come again when their leases end: {error}")

    def close(self) -> None:
        """Stop extending leases."""
        self._end.set()

    def _renew(self) -> None:
        while not self._end.wait(CHECK_S):
            for lease_s, held in self._due().items():
                self._extend(held, lease_s)

    def _due(self) -> dict[float, dict[str, QueueItem]]:
        """Return the items whose leases must be extended now, by the lease (s) that their sender chose."""
        now_s, due = self._clock.monotonic(), dict[float, dict[str, QueueItem]]()
        with self._lock:
            for tag, item in self._items.items():
                if item.lease_s and item.until_s - now_s < item.lease_s * (1 - 1 / RENEWALS):
                    due.setdefault(item.lease_s, {})[tag] = item
        return due

    def _extend(self, held: dict[str, QueueItem], lease_s: float) -> None:
        try:
            outcomes = self._queue.extend_many(list(held.values()), lease_s)
        except MemqError as error:
            _events.warning("celery.not-renewed", f"leases of {len(held)} messages: {error}")
        else:
            lost = [tag for tag, outcome in zip(held, outcomes, strict=True) if outcome is not ItemOutcome.EXTENDED]
            with self._lock:
                for tag in lost:
                    if self._items.pop(tag, None) is not None:
                        _events.warning("celery.lease-lost", f"message {held[tag].id}: another worker may have it")
