"""Storing sealed batches: each as an object of its own, or several small ones in a shared object.

A failed put is retried without limit, while its result is wanted.

Shared objects. A PUT costs the same for 100 bytes as for 8 MiB. A topic with one record a second needs a PUT for each
record. So the batches of all topics that opted in share an object, if they are sealed within `shared_age_ms_max` of
each other. Each batch has its own pointer to its own bytes, so a reader fetches no other batch. A batch whose owner was
fenced stays in the object without a pointer, as a whole object would have stayed. Each put draws a new key. Therefore a
batch that was not published in the time of its own key is stored in a shared object, too.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.batch import ObjectBody, SealedBatch, object_of
from memq.broker.services import Services
from memq.errors import MemqError, ObjectExistsError
from memq.format.key import shared_object_key
from memq.limits import MIB, OBJECT_BLOCKS_MAX
from memq.runtime.clock import backoff_s
from memq.runtime.logs import OUTAGE_INTERVAL_S
from memq.runtime.tasks import TaskOwner
from memq.settings import BrokerSettings

BACKOFF_S_MAX = 0.5  # the store's circuit breaker limits the requests to a failing store
STORE_TIMEOUT_S = 60.0
LOGGED_TRIES = 5  # of a put that fails; later ones are logged once a minute
SHARED_BYTES_MAX = 8 * MIB
SHARED_BATCHES_MAX = 2_048  # with as many topics of the longest names, the object's meta takes 0.7 of its 1 MiB
UPLOADS_IN_FLIGHT_MAX = 4


async def store_object(
    services: Services, body: ObjectBody, name: str, wanted: Callable[[], bool] = lambda: True
) -> float | None:
    """Put an object; return when its first put began (monotonic s): no store dates it earlier.

    Returns None when the object is not stored, because it is no longer `wanted` or the time of its key is over
    (`key_valid_s`). `name` identifies the object in the log. Raises: ObjectExistsError when its key has other bytes.
    """
    clock, counters = services.runtime.clock, services.counters
    started_s, tries, logged_s = clock.monotonic(), 0, -math.inf
    with services.waits.on(services.store_location, name) as wait:
        while wanted() and clock.monotonic() < started_s + key_valid_s(services.settings):
            try:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    await services.store.put(body.key, body.buffers, body.checksum)
            except ObjectExistsError:
                raise
            except Exception as error:  # noqa: BLE001 - the ring holds the only copy: no error may drop it
                tries += 1
                counters.store_retries += 1
                wait.cause = _cause(error)
                if tries <= LOGGED_TRIES or clock.monotonic() >= logged_s + OUTAGE_INTERVAL_S:
                    logged_s = clock.monotonic()
                    services.events.warning("store-retry", f"{name}, try {tries}: {wait.cause}")
                await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))
                continue
            counters.stored_objects += 1
            counters.stored_bytes += body.bytes
            counters.store_seconds.observe(clock.monotonic() - started_s)
            return started_s
    return None


def _cause(error: Exception) -> str:
    """Return the text of an error, with its own hint: the folder is gone, the disk is full."""
    if isinstance(error, MemqError) and error.hint not in ("", error.default_hint):
        return f"{error}; {error.hint}"
    return str(error) or repr(error)


def key_valid_s(settings: BrokerSettings) -> float:
    """Return how long a key is used after its first put, in s: half the age of the sweep.

    A pointer that is handed to the queue later must name another object: see `memq.broker.sweep.sweep`.
    """
    return settings.sweep_age_ms / 2000


class GatheringObject:
    """Batches that go into one object, the slabs that hold them, and the number of waiters."""

    def __init__(self) -> None:
        self.batches: list[SealedBatch] = []
        self.slabs: list[Slab] = []
        self.bytes = 0
        self.blocks = 0
        self.waiting = 0
        self.stored: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    @property
    def full(self) -> bool:
        """Whether the object is uploaded without waiting for more batches."""
        return self.bytes >= SHARED_BYTES_MAX or len(self.batches) == SHARED_BATCHES_MAX

    def takes(self, batch: SealedBatch) -> bool:
        """Whether a batch fits into the same object."""
        return self.blocks + batch.entry.blocks <= OBJECT_BLOCKS_MAX

    def add(self, batch: SealedBatch, slabs: list[Slab]) -> None:
        """Take a batch, with a reference of its own on each of its slabs."""
        for slab in slabs:
            slab.references += 1
        self.batches.append(batch)
        self.slabs += slabs
        self.bytes += batch.entry.length
        self.blocks += batch.entry.blocks


class SharedObjects:
    """Gathers and stores the shared objects of one broker.

    `_start_epoch` in the keys distinguishes this run of the broker from all earlier runs.
    """

    def __init__(self, services: Services, failed: Callable[[BaseException], None]) -> None:
        self._services = services
        self._tasks = TaskOwner(failed, services.events)
        self._start_epoch = 0
        self._sequence = 0
        self._open: GatheringObject | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: deque[GatheringObject] = deque()
        self._in_flight: dict[GatheringObject, None] = {}

    async def store(self, batch: SealedBatch, slabs: list[Slab]) -> float:
        """Store a batch and set its location; return when the put of its object began (monotonic s).

        A caller that cancels `store` may release its slabs: the object has its own references.
        """
        shipment = self._gathering(batch)
        shipment.add(batch, slabs)
        shipment.waiting += 1
        if shipment.full:
            self._close()
        try:
            return await asyncio.shield(shipment.stored)
        finally:
            shipment.waiting -= 1

    def _gathering(self, batch: SealedBatch) -> GatheringObject:
        if self._open is not None and not self._open.takes(batch):
            self._close()
        if self._open is None:
            self._open = GatheringObject()
            age_s = self._services.settings.shared_age_ms_max / 1000
            self._timer = asyncio.get_running_loop().call_later(age_s, self._close)
        return self._open

    def _close(self) -> None:
        """Close the open object; it is uploaded when fewer than UPLOADS_IN_FLIGHT_MAX uploads run."""
        if self._timer is not None:
            self._timer.cancel()
        assert self._open is not None, "no shipment is open"
        self._leaving.append(self._open)
        self._open = self._timer = None
        self._depart()

    def _depart(self) -> None:
        while self._leaving and len(self._in_flight) < UPLOADS_IN_FLIGHT_MAX and not self._tasks.stopped:
            shipment = self._leaving.popleft()
            self._in_flight[shipment] = None
            self._tasks.start(self._ship(shipment), "shared object")

    async def _ship(self, shipment: GatheringObject) -> None:
        started_s = await self._put(shipment)
        if started_s is not None:
            shipment.stored.set_result(started_s)
        del self._in_flight[shipment]
        self._release(shipment)
        self._depart()

    def _release(self, shipment: GatheringObject) -> None:
        """Cancel the waiters of an object that will not be stored, and release its slabs."""
        shipment.stored.cancel()  # no effect on an object that was stored
        for slab in shipment.slabs:
            self._services.pool.release(slab)

    async def _put(self, shipment: GatheringObject) -> float | None:
        while shipment.waiting:
            body = object_of(shipment.batches, *self._next_key())
            name = f"shared object of {len(shipment.batches)} batches"
            try:
                started_s = await store_object(self._services, body, name, lambda: shipment.waiting > 0)
            except ObjectExistsError as error:  # an earlier run began in the same second, or the clock was set back
                self._services.events.warning("start-epoch-taken", str(error))
                self._start_epoch += 1
                continue
            if started_s is not None:
                return started_s
        return None

    def _next_key(self) -> tuple[str, int]:
        """Return a key that was never used, and the wall clock in it (Unix ms)."""
        settings, now_ms = self._services.settings, self._services.runtime.clock.wall_ms()
        self._start_epoch = self._start_epoch or max(now_ms // 1000, 1)
        self._sequence += 1
        key = shared_object_key(settings.cluster, settings.broker_id, self._start_epoch, self._sequence - 1, now_ms)
        return key, now_ms

    async def stop(self) -> None:
        """Stop at once, after all partitions have stopped; unstored objects are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        for shipment in [*self._in_flight, *self._leaving, *filter(None, [self._open])]:
            self._release(shipment)
