"""One partition at its owner: runs the ring, uploads batches, publishes pointers, sends acks.

The shell of `Ring` (states of the batches) and `Ownership` (contents of the queue). It executes their instructions on
store, queue and connections, and decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from memq.broker.partition.appender import Appender
from memq.broker.partition.batch import (
    Origin,
    SealedBatch,
    control_pointer,
    data_pointer,
    ended_pointer,
    ends_that_fit,
    own_object,
    producer_ranges,
    seal_batch,
    sequences_of,
    staged_pointer,
)
from memq.broker.partition.known_blocks import KnownBlocks, any_shown
from memq.broker.partition.opening import current_topic, moved_error, open_partition, origin_of, release_partition
from memq.broker.partition.ownership import Ownership, Phase, check_instance, next_instance, uses_up_numbers
from memq.broker.partition.publishing import Publisher
from memq.broker.partition.recent_batch_cache import RecentBatch
from memq.broker.partition.ring import BatchSlot, Ring, RingLimits
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.partition.storing import SharedObjects, key_valid_s, store_object
from memq.broker.services import Services
from memq.broker.spool.unpublished_blocks import UnpublishedBlocks
from memq.errors import (
    DrainingError,
    FencedError,
    LogCutError,
    LogLostError,
    MemqError,
    MovedError,
    NotReadyError,
    ObjectExistsError,
    TooOldError,
)
from memq.format.blocks.header import scope_of
from memq.format.pointer import NamedProducer, Pointer, ProducerEnd
from memq.limits import POINTER_RANGES_MAX
from memq.protocol.frames import AckLevel
from memq.runtime.tasks import TaskOwner
from memq.topic import CLOCK_ERROR_MS, Topic

CONFIRM_S = 2.0  # time-out for the coordinator to confirm the epoch; after it, the owner publishes instead


def _settle(futures: Iterable[asyncio.Future[None]], error: MemqError | None = None) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)


def _limits(topic: Topic) -> RingLimits:
    settings = topic.settings
    return RingLimits(
        slots=settings.ring_slots,
        batch_bytes_max=settings.batch_bytes_max,
        batch_blocks_max=settings.batch_blocks_max,
        batch_age_s_max=settings.batch_age_ms_max / 1000,
        seal_when_idle=settings.seal_when_idle,
        uploads_in_flight_max=settings.uploads_in_flight_max,
    )


class TopicProcessor:
    """Owns one write partition from its opening to its end; `run` opens it again after it was fenced.

    `keep_unpublished` gets the blocks of each lost epoch that were acked with ack=1.
    """

    def __init__(
        self,
        services: Services,
        sharing: SharedObjects,
        keep_unpublished: Callable[[UnpublishedBlocks], None],
        topic: Topic,
        partition: int,
    ) -> None:
        self.services = services
        self._sharing = sharing
        self._keep_unpublished = keep_unpublished
        self.topic = topic
        self.partition = partition
        self.scope = scope_of(topic.id_bytes, partition)
        self.delivery_timeout_ms = topic.settings.delivery_timeout_ms
        self._opened_window_ms = topic.settings.dedup_window_ms
        self.read_partition = topic.read_partition_of(partition)
        self.ring = Ring(_limits(topic))
        self.own: Ownership | None = None
        self.failure: MemqError | None = None
        self.moved_to = ""  # address of the next owner, "" while unknown
        self.draining = False
        self._sealed: dict[int, SealedBatch] = {}
        self._uploads: dict[int, asyncio.Task[None]] = {}
        self._publishing: asyncio.Task[None] | None = None
        self._ends: list[tuple[ProducerEnd, asyncio.Future[None]]] = []
        self._opened_is_due = False
        self._opened_waiters: list[asyncio.Future[None]] = []  # waiters until the queue has the remembered names
        self._tasks = TaskOwner(self._failed, services.events)
        self.known = KnownBlocks(self, self._tasks)
        self.appender = Appender(self)
        self._pump_scheduled = False
        self._grew = False  # blocks arrived since the last round
        self._timer: asyncio.TimerHandle | None = None
        self._ready = asyncio.Event()
        self._fenced = asyncio.Event()
        self.changed = asyncio.Event()  # a batch was published, or the epoch given up; a waiter clears it first
        self._drain_once = asyncio.Lock()
        self.staging = asyncio.Lock()  # held by one request of a writer at a time
        self._released = False  # `closed`, the last pointer of the epoch, is being published

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open the partition in the background."""
        spool = self.appender.spool
        if spool is not None and spool.disk is None and spool.refusal is not None:
            self.services.events.error("no-spool", f"{self.name}: {spool.refusal}: {spool.refusal.hint}")
        self._tasks.start(self._run(), f"open {self.topic.name}/{self.partition}")

    async def ready(self) -> None:
        """Wait until blocks are accepted. Raises: the failure that is final for this broker."""
        await self._ready.wait()
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise DrainingError(f"partition {self.partition} of topic '{self.topic.name}' is being drained")

    def start_draining(self) -> None:
        """Refuse new blocks from now on."""
        self.draining = True
        self.ring.flushing = True
        self.pump()

    async def drain(self) -> None:
        """Refuse new blocks; return when everything is acked and the partition is released.

        Raises: the failure of the partition, if its ring still held batches.
        """
        self.start_draining()
        async with self._drain_once:  # a planned move may drain it while the whole broker drains
            while self.failure is None and (len(self.ring) or self._ends or self._publishing):
                self.changed.clear()
                await self.changed.wait()
            if self.own is not None and self.failure is None and self.own.phase is Phase.OWNING:
                self._released = True
                await release_partition(self.services, self._publisher(patient=False), self.topic)
            error, left = self.failure, len(self.ring)
            await self.stop()
            if error is not None and left:
                raise error

    def fail(self, error: MemqError) -> None:
        """Refuse everything from now on because of `error`: streams are closed, waiters get the error."""
        if self.failure is None:
            self.failure = error
        self._ready.set()
        self.changed.set()
        self.appender.redirect_streams()
        self._fail_ends(error)
        _settle(self._opened_waiters, error)

    async def stop(self) -> None:
        """Stop at once; unpublished blocks stay unacked, or go to the next owner."""
        self.fail(MovedError(f"{self.name} is closed"))
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        self._empty_ring()

    def held_blocks(self) -> list[str]:
        """Describe unpublished batches, for an operator who ends the drain."""
        return [
            f"{self.name} batch {slot.number} ({slot.state.name.lower()}): producer {run.stream.producer_id:016x}"
            f" sequences {run.first} to {run.next - 1}, acks={AckLevel(run.stream.acks).name.lower()}"
            for slot in self.ring
            for run in slot.runs
        ]

    async def _run(self) -> None:
        """Open the partition and serve until fenced; repeat while it is assigned to this broker."""
        while True:
            topic = self.topic
            try:
                opened = open_partition(self.services, topic, self.partition, self.read_partition, self._fail_ends)
                self.own = await opened
            except MovedError as error:
                self.fail(error)
                return
            self.delivery_timeout_ms = topic.settings.delivery_timeout_ms
            self._opened_window_ms = self.own.dedup_window_ms
            self.ring = Ring(_limits(self.topic))
            self.ring.flushing = self.draining
            self.follow(await current_topic(self.services, self.topic))  # it may have been altered meanwhile
            self._fenced.clear()
            self._ready.set()
            self.pump()
            await self._fenced.wait()
            self._ready.clear()
            await self._give_up_epoch()

    def _failed(self, error: BaseException) -> None:
        """A task died of an unexpected error: log it and stop the partition; clients are redirected."""
        self.services.events.error("processor-failed", f"{self.name}: {error!r}", error)
        self.fail(error if isinstance(error, MemqError) else MovedError(f"{self.name} failed: {error!r}"))

    def follow(self, topic: Topic) -> None:
        """Apply changed settings, each as soon as it is safe: see `memq.topic.HOLDS`.

        Until the next epoch, the greater of the old and new values applies for the dedup window and S. The queue may
        still accept pointers of the old age. The owner knows only the dedup window that it read at the opening. So the
        delivery time-out grows no further than that window allows. A version that is older than the known one is
        ignored: it may lack the seal.
        """
        if topic.version < self.topic.version:
            return
        self.topic = topic
        self.appender.follow(topic)
        if self.own is None:
            return
        settings, own = topic.settings, self.own
        own.stale_publish_s = max(own.stale_publish_s, settings.stale_publish_ms / 1000)
        own.dedup_window_ms = max(own.dedup_window_ms, settings.dedup_window_ms)
        known_ms = self._opened_window_ms - 2 * (int(own.stale_publish_s * 1000) + CLOCK_ERROR_MS)
        self.delivery_timeout_ms = min(settings.delivery_timeout_ms, max(known_ms, self.delivery_timeout_ms))
        if self.ring.limits != _limits(topic):
            self.ring.alter(_limits(topic))
            self.pump()

    # ---- from connections ----------------------------------------------------------------------

    async def begin_producer(self, producer_id: int, epoch: int = 0) -> NamedProducer:
        """Begin an instance of a named producer, after `ready`, and fence the older ones.

        `epoch` 0 means the next one. Returns the epoch and the end of the committed sequences; the queue holds both by
        then. Raises: ProducerFencedError, NotReadyError, TooLargeError, MovedError.
        """
        own, clock = self.owned(), self.services.runtime.clock
        by_age = self.services.queue.refuses_by_age
        producer = own.producer(producer_id)
        if not epoch and own.phase is Phase.OWNING and uses_up_numbers(own, producer):
            error = NotReadyError(f"{self.name} opens again: this epoch has no more numbers of instances")
            self.fence(error)
            raise error
        producer.epoch = begun = next_instance(own, producer, epoch, clock.monotonic(), by_age=by_age)
        self.appender.redirect_streams(of=producer)
        while self.own is own and any(run.stream.producer is producer for slot in self.ring for run in slot.runs):
            self.changed.clear()
            await self.changed.wait()
        if self.own is not own or self.failure is not None:
            raise MovedError(f"{self.name} lost its epoch while a producer began")
        own.learn([NamedProducer(producer=producer_id, epoch=begun, last_sequence=producer.next)], clock.wall_ms())
        await self._await_opened()
        check_instance(producer, begun)
        return NamedProducer(producer=producer_id, epoch=begun, last_sequence=producer.next)

    async def admit_producer(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Admit an instance of a named producer, which continues from `sequence`, after `ready`.

        The queue may hold more of its blocks than this owner has read. Blocks of an older instance with the same
        sequences may still be in the ring. Raises: as `begin_producer`; OutOfSequenceError if `sequence` leaves a gap.
        """
        producer = self.owned().producer(producer_id)
        runs = (run.stream for slot in self.ring for run in slot.runs if run.stream.producer is producer)
        if epoch > producer.epoch or any(stream.producer_epoch < epoch == producer.epoch for stream in runs):
            await self.begin_producer(producer_id, epoch)
        elif sequence > producer.next:
            await self._await_opened()
        check_instance(producer, epoch, sequence)

    async def proven_end(self) -> int:
        """Return an end after all pointers that this owner and those before it acked before this call.

        A Kafka node that lags shows an earlier end and no higher epoch. So the result is the end of what this owner has
        read or published. An own pointer that is handed over after the call proves this end: the `opened` of the
        opening, or a repeated one. A fresh read of the assignment is enough if no pointer of an earlier owner can lie
        after the own ones. Then the call does not make the log grow. Raises: MovedError, DrainingError.
        """
        asked_s = self._now()
        if self.own is None or self.failure is not None:  # an owner that drains still has an end
            await self.ready()
        own = self.owned()
        # Where the queue refuses by age, a pointer of an earlier owner may land until this owner is alone.
        behind_all = not self.services.queue.refuses_by_age or own.is_alone(own.published_s)
        if own.published_s <= asked_s and not (behind_all and await self._confirm(own)):
            await self._await_opened()
        return own.known_end()

    async def _confirm(self, own: Ownership) -> bool:
        """Whether the coordinator confirms this epoch as the last one; False without an answer.

        Raises: MovedError when the coordinator has another epoch or session.
        """
        try:
            async with asyncio.timeout(CONFIRM_S):
                found = await self.services.coordinator.assignment(self.topic.id, self.partition)
        except (MemqError, TimeoutError):
            return False
        if (found.epoch, found.session) != (own.epoch, self.services.session):
            raise moved_error(self.topic, self.partition, found)
        return own.phase is Phase.OWNING  # a coordinator that was set back does not know the higher epoch

    def forget_silent(self, now_ms: int) -> None:
        """Forget producers that were silent for the dedup window and have no blocks in the ring."""
        if self.own is not None:
            busy = {run.stream.producer_id for slot in self.ring for run in slot.runs}
            self.own.forget(now_ms, busy, self.topic.settings.kept_ms_max)

    async def end_producer(self, end: ProducerEnd) -> None:
        """Record in the queue where a producer ended. Raises: the failure of the partition."""
        if self.failure is not None:
            raise self.failure
        lost = self.services.lost_logs.get((self.topic.id, self.partition))
        if lost is not None:  # a drain would wait for the log
            raise LogLostError(lost)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.append((end, future))
        self.pump()
        await future

    async def republish_opened(self, *, waits: bool = False) -> None:
        """Publish `opened` again, so that retention may delete the pointers before it.

        With `waits`, return after reading the queue up to it. Raises: MovedError, then.
        """
        if waits:
            await self._await_opened()
            return
        if self.own is not None and self.failure is None:
            self._opened_is_due = True
            self.pump()

    async def _await_opened(self) -> None:
        """Publish `opened` again, with all names; return after reading the queue up to it. Raises: MovedError."""
        if self.own is None or self.failure is not None:
            raise MovedError(f"{self.name} is not open any more")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened_waiters.append(future)
        await self.republish_opened()
        await future

    def pump_soon(self) -> None:
        """Pump after this round of the event loop, and after each further round until one brings no blocks."""
        self._grew = True
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._pump_scheduled, self._grew = self._grew, False
        if self._pump_scheduled:
            asyncio.get_running_loop().call_soon(self._round)
        self.pump()

    def hurry(self) -> None:
        """Store the open batch without waiting for more: memory is short, or another broker waits."""
        self.ring.hurry()
        self.pump_soon()

    # ---- the ring's work -------------------------------------------------------------------------

    def pump(self) -> None:
        """Execute the next steps of the ring."""
        if self.own is None or self.failure is not None or self._released or self.own.phase is not Phase.OWNING:
            return
        self._opened_is_due = self._opened_is_due or self.own.must_republish_opened()
        may_publish = self._publishing is None and not self._opened_is_due
        plan = self.ring.plan(self._now(), may_publish=may_publish, growing=self._pump_scheduled)
        for slot in plan.uploads:
            self._uploads[slot.number] = self._tasks.start(self._upload(slot), f"upload {slot.number}")
        if self._publishing is None and (plan.publish is not None or self._ends or self._opened_is_due):
            work = f"publish {self.topic.name}/{self.partition} {self.own.epoch}"
            self._publishing = self._tasks.start(self._publish(plan.publish), work)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if plan.wake_s is not None:
            delay = max(plan.wake_s - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self.pump)

    async def _upload(self, slot: BatchSlot) -> None:
        """Store a batch; retry a failed put without limit, because the ring never skips a batch."""
        if not slot.sealed_ms:
            slot.sealed_ms = self.services.runtime.clock.wall_ms()
            self.services.counters.sealed_batches += 1
        sealed = self._sealed.get(slot.number)
        if sealed is None:
            sealed = self._sealed[slot.number] = seal_batch(slot, self._origin())
        put_s = None
        try:
            if not self.topic.settings.shared_objects and not slot.late:
                put_s = await store_object(self.services, own_object(sealed), f"{self.name} batch {slot.number}")
            if put_s is None:
                put_s = await self._sharing.store(sealed, slot.slabs)
        except ObjectExistsError as error:  # a key is used once: another process writes with our epoch
            self.fence(error)
            return
        if self.services.traces is not None:
            self.services.traces.uploaded(sealed, slot.sealed_ms)
        self._uploads.pop(slot.number, None)
        self.ring.stored(slot, put_s)
        self.pump()

    def fence(self, error: MemqError) -> None:
        """Give up the epoch because of `error`; a running publish ends first, and then finds it FENCED."""
        self.services.events.error("fenced", f"{self.name}: {error}")
        own = self.owned()
        if own.phase is Phase.OWNING:
            own.become(Phase.FENCED)
        if self._publishing is None:
            self._fenced.set()

    async def _publish(self, head: BatchSlot | None) -> None:
        """Publish the head or a control pointer that is due, ack it, and continue with the next."""
        try:
            if head is not None:
                await self._publish_batch(head)
            elif self._opened_is_due:
                await self._publish_opened()
            else:
                await self._publish_ends()
        except (FencedError, LogCutError) as error:
            self.services.events.warning("fenced", f"{self.name}: {error}")
            if isinstance(error, LogCutError):
                self._fail_ends(error)
            self._fenced.set()
            return
        finally:
            self._publishing = None
            self.changed.set()
        if self.owned().phase is Phase.FENCED:
            self._fenced.set()
        else:
            self.pump()

    async def _publish_batch(self, slot: BatchSlot) -> None:
        """Publish the head's pointer and ack; store it again when the time of its key is over."""
        if slot.staged is not None:
            await self._publish_staged(slot, slot.staged)
            return
        own, origin, sealed = self.owned(), self._origin(), self._sealed[slot.number]
        clock, shown, skip = self.services.runtime.clock, False, tuple[int, ...]()

        def build() -> Pointer:
            nonlocal shown, skip
            adopted, shown = own.next_adopted(), any_shown(own, sealed)
            skip = self.known.copies_in(own, sealed)
            totals = own.totals_with(adopted)
            named_ms = own.named_ms if slot.units else own.named_since_ms()  # the pointer may have the first name
            return data_pointer(slot, sealed, origin, totals, adopted, skip, clock.wall_ms(), named_ms)

        key_until_s, began_ms = slot.put_s + key_valid_s(self.services.settings), clock.wall_ms()
        publisher = self._publisher()
        if not await publisher.publish(build, slot.number, key_until_s, partial(self.known.compare, own, sealed)):
            self.ring.store_again(slot)
            return
        self.services.counters.skipped_blocks += len(skip)
        if self.services.traces is not None:
            self.services.traces.published(sealed, began_ms)
        if len(slot.runs) > POINTER_RANGES_MAX:  # the pointer may not name them all
            own.join(producer_ranges(sequences_of(slot)), own.queue_time_ms())
        slot.pointer_offset = None if shown else publisher.pointer_offset  # readers take earlier copies
        self._ack(self.ring.published(self._now()), own.epoch)
        self.known.remember(sealed.headers.headers, slot.pointer_offset)
        slot.release_tickets()
        del self._sealed[slot.number]
        batch = RecentBatch(sealed.key, sealed.offset, sealed.blocks, slot.drop_blocks(), slot.bytes)
        self.services.recent_batches.add(batch)

    async def _publish_staged(self, slot: BatchSlot, staged: StagedBatch) -> None:
        """Publish the pointer of a batch that a writer put into the store.

        Each staged object has a random producer id of its own. So blocks whose sequences the queue shows are copies of
        this object, and their contents are not compared.
        The owner can't store the batch again. When the time of its key is over, the owner gives up the epoch, and the
        next opening finds out whether a try has landed. The writer repeats its request, which is refused if none has.
        """
        own, origin, clock = self.owned(), self._origin(), self.services.runtime.clock

        def build() -> Pointer:
            adopted, held = own.next_adopted(), enumerate(staged.sequences)
            skip = tuple(n for n, (number, *block) in held if own.producer(number).queued.covers(*block))
            totals = own.totals_with(adopted)
            named_ms = own.named_ms if staged.writers else own.named_since_ms()  # the pointer may have the first name
            return staged_pointer(slot, origin, totals, adopted, skip, clock.wall_ms(), named_ms)

        if not await self._publisher().publish(build, slot.number, staged.until_s):
            key = staged.location.key
            self.fence(TooOldError(f"batch {slot.number} was not published before the sweep may delete object '{key}'"))
            return
        self.ring.published(self._now())
        staged.settle(None)

    def _ack(self, slot: BatchSlot, epoch: int) -> None:
        """Ack the published batch to the streams with ack=all."""
        positions = slot.positions()
        for stream, sequence in slot.acks().items():
            stream.sink.send_ack(stream, AckLevel.ALL, sequence, epoch, positions.get(stream, ()))
        self.services.counters.ack_seconds.observe(self._now() - slot.opened_s)

    async def _publish_ends(self) -> None:
        ends = self._ends[: ends_that_fit([end for end, _ in self._ends])]
        own, origin, now_ms = self.owned(), self._origin(), self.services.runtime.clock.wall_ms()
        ended = tuple(end for end, _ in ends)

        def build() -> Pointer:
            adopted = own.next_adopted()
            return ended_pointer(origin, own.totals_with(adopted), adopted, ended, now_ms, own.named_since_ms())

        await self._publisher().publish(build, None)
        del self._ends[: len(ends)]
        _settle([future for _, future in ends])

    async def _publish_opened(self) -> None:
        """Publish `opened` again; waiters also need the queue read up to it."""
        own, origin, now_ms = self.owned(), self._origin(), self.services.runtime.clock.wall_ms()
        waiting = list(self._opened_waiters)

        def build() -> Pointer:
            adopted = own.next_adopted()
            totals = own.totals_with(adopted)
            return control_pointer("opened", origin, totals, adopted, now_ms, named=own.named.entries())

        publisher = self._publisher()
        await publisher.publish(build, None)
        if waiting and own.unread:
            await publisher.read_to_end()
        del self._opened_waiters[: len(waiting)]
        self._opened_is_due = bool(self._opened_waiters)
        _settle(waiting)

    # ---- the end of an epoch -----------------------------------------------------------------------

    async def _give_up_epoch(self) -> None:
        """Give up the ring from its head: ack=all producers send again, ack=1 blocks go to the next owner."""
        self.services.counters.fenced += 1
        self.appender.redirect_streams()
        for task in list(self._uploads.values()):
            task.cancel()
            await asyncio.wait([task])  # the store reads the buffers until its put ends
        self._uploads.clear()
        self._empty_ring()
        self.changed.set()

    def _empty_ring(self) -> None:
        """End the epoch, if any; keep blocks acked with ack=1, and release the others."""
        own, self.own = self.own, None
        self.services.recent_pointers.forget(self.read_partition)
        _settle(self._opened_waiters, MovedError(f"{self.name} lost its epoch"))
        self._opened_waiters = []
        if own is None:
            return
        self._sealed.clear()
        self.known.forget()
        slots = self.ring.give_up()
        held = UnpublishedBlocks.of_epoch(self.topic, self.partition, own, slots, self.services.pool.release)
        for slot in slots:
            if slot.staged is not None:
                slot.staged.settle(MovedError(f"{self.name} lost its epoch"))
            for slab in slot.drop_blocks():
                self.services.pool.release(slab)
        if held.blocks:
            self._keep_unpublished(held)

    def _fail_ends(self, error: MemqError) -> None:
        _settle([future for _, future in self._ends], error)
        self._ends = []
        self.changed.set()  # a drain waits for them

    # ---- inside ------------------------------------------------------------------------------------

    def _publisher(self, *, patient: bool = True) -> Publisher:
        return Publisher(self.services, self.owned(), self.read_partition, patient=patient)

    def owned(self) -> Ownership:
        """Return the present epoch; only while there is one."""
        assert self.own is not None, f"{self.name} is not open"
        return self.own

    def _origin(self) -> Origin:
        return origin_of(self.services, self.topic, self.owned())

    def _now(self) -> float:
        return self.services.runtime.clock.monotonic()

    @property
    def name(self) -> str:
        """Its name in logs and errors."""
        return f"topic '{self.topic.name}' partition {self.partition}"
