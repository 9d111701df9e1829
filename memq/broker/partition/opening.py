"""Opening and releasing a partition: assignment by compare-and-set, control pointer, queue tail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from memq.broker.partition.batch import Origin, control_pointer
from memq.broker.partition.ownership import Ownership, Phase
from memq.broker.partition.publishing import Publisher, reused_offset
from memq.broker.services import Services
from memq.errors import (
    DeniedError,
    EpochFencedError,
    LogCutError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    QueueError,
    RetryableError,
    VersionConflictError,
)
from memq.format.pointer import Pointer, encode_pointer
from memq.format.totals import contended_ms
from memq.governor import Assignment
from memq.notification import Publication
from memq.notification.log_reader import valid_span
from memq.runtime.clock import backoff_s
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic

BACKOFF_S_MAX = 2.0
HELD_RETRY_S = 0.1  # interval between checks of a partition that its previous owner still drains
LOST_RETRY_S = 30.0  # the same for a lost log: a restore needs all brokers stopped, so little changes while one runs


async def open_partition(
    services: Services,
    topic: Topic,
    partition: int,
    read: ReadPartition,
    lost: Callable[[MemqError], None] = lambda error: None,
) -> Ownership:
    """Open a partition of this broker; retry without limit while the partition is assigned to it.

    An opening whose answer is lost or late does not count. The next try has the next epoch, so no epoch is opened
    twice. While the queue has lost the log, `Services.lost_logs` contains the partition, and `lost` gets the error of
    each try. Raises: MovedError when the partition belongs to another broker, or was deleted.
    """
    tries, seen, epoch, claimed = 0, 0, 0, False
    while True:
        try:
            async with services.openings.turn():
                last, epoch = epoch, await claim_epoch(services, topic, partition, seen)
                claimed = claimed or epoch != last + 1  # by others; epochs that only failed here stored nothing
                own = await _open_epoch(services, topic, partition, read, epoch, claimed=claimed)
        except (LogLostError, LogCutError) as error:
            services.events.error("log-lost", f"{error}; {error.hint}")
            services.lost_logs[topic.id, partition] = str(error)
            lost(error)
            try:
                await asyncio.sleep(LOST_RETRY_S)
            finally:
                del services.lost_logs[topic.id, partition]
            continue
        except NotReadyError:
            await asyncio.sleep(HELD_RETRY_S)
            continue
        except (RetryableError, DeniedError, TimeoutError) as error:
            if isinstance(error, MovedError):
                raise
            services.counters.opening_retries += 1
            services.events.warning("opening-retry", f"topic '{topic.name}' partition {partition}: {error}")
        except NotFoundError as error:
            raise MovedError(f"topic '{topic.name}' partition {partition} was deleted: {error}") from error
        else:
            if own.phase is Phase.OPENING:
                own.become(Phase.OWNING)
                own.owned_s = services.runtime.clock.monotonic()
                services.counters.openings += 1
                return own
            seen = max(seen, own.highest_epoch)
        tries += 1
        await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.02, most_s=BACKOFF_S_MAX))


async def claim_epoch(services: Services, topic: Topic, partition: int, seen: int) -> int:
    """Set the next epoch above `seen` and this broker's session by compare-and-set; return the epoch.

    Raises: MovedError when the partition belongs to another broker; NotReadyError while its previous owner drains it.
    """
    while True:
        current = await services.coordinator.assignment(topic.id, partition)
        if current.broker != services.settings.broker_id:
            raise moved_error(topic, partition, current)
        if current.session not in ("", services.session):
            for broker in await services.coordinator.brokers():
                if broker.session == current.session and broker.id != services.settings.broker_id:
                    raise NotReadyError(f"partition {partition} of topic '{topic.name}' is drained by '{broker.id}'")
        claimed = msgspec.structs.replace(current, epoch=max(current.epoch, seen) + 1, session=services.session)
        with suppress(VersionConflictError):  # another process was faster: read again
            return (await services.coordinator.set_assignment(claimed)).epoch


async def current_topic(services: Services, topic: Topic) -> Topic:
    """Return a topic by a fresh read, made after its epoch was claimed; retry without limit.

    An owner that opens after a seal must know it. What it has read before may be older than the assignment. Returns
    `topic` itself when it was deleted, or made again: `Partitions` notices that.
    """
    tries = 0
    while True:
        try:
            found = await services.coordinator.current_topic(topic.name)
        except (RetryableError, DeniedError) as error:
            tries += 1
            services.events.warning("opening-retry", f"topic '{topic.name}': {error}")
            await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.02, most_s=BACKOFF_S_MAX))
        else:
            return topic if found is None or found.id != topic.id else found


def moved_error(topic: Topic, partition: int, current: Assignment) -> MovedError:
    """Return the error for a partition that `current` gives to another broker."""
    owner = f"broker '{current.broker}'" if current.broker else "nobody"
    return MovedError(f"partition {partition} of topic '{topic.name}' belongs to {owner}")


async def _open_epoch(
    services: Services, topic: Topic, partition: int, read: ReadPartition, epoch: int, *, claimed: bool
) -> Ownership:
    """Return the ownership of an epoch: OPENING on success, FENCED when the queue shows a higher epoch."""
    settings, clock = topic.settings, services.runtime.clock
    own = Ownership(
        partition=partition,
        epoch=epoch,
        opened_s=clock.monotonic(),
        opened_wall_ms=clock.wall_ms(),
        stale_publish_s=settings.stale_publish_ms / 1000,
        dedup_window_ms=settings.dedup_window_ms,
    )
    own.proof_s = own.opened_s
    try:
        publisher = Publisher(services, own, read, patient=False)
        await _read_tail(services, topic, own, publisher)
        if not own.highest_epoch:
            await services.lost_queue.check_opening(topic, partition, claimed=claimed)
        await _publish_opened(services, topic, own, publisher)
    except EpochFencedError as error:
        text = f"topic '{topic.name}' partition {partition} epoch {epoch}: {error}"
        services.events.info("opening-passed", text)
        if own.phase is Phase.OPENING:
            own.become(Phase.FENCED)
    return own


async def _publish_opened(services: Services, topic: Topic, own: Ownership, publisher: Publisher) -> None:
    """Publish `opened`, and read up to it.

    Raises: EpochFencedError, RetryableError, TimeoutError; LogCutError if the log was cut since it was read.
    """
    clock = services.runtime.clock
    if own.highest_epoch >= own.epoch:  # a coordinator that was set back: the epoch's keys are used
        raise EpochFencedError(f"the queue shows epoch {own.highest_epoch}")
    if own.needs_proof(clock.monotonic()):  # the process was paused: late pointers would be much older than this one
        await publisher.read_to_end()
    own.state()
    if topic.settings.kept_ms_max:
        own.named.forget(services.deletion_clock.wall_ms() - topic.settings.kept_ms_max)
    adopted = own.next_adopted()
    origin, named = origin_of(services, topic, own), own.named.entries()
    pointer = control_pointer("opened", origin, own.totals_with(adopted), adopted, clock.wall_ms(), named=named)
    handed_over_s = clock.monotonic()
    own.prove(handed_over_s)
    publication = Publication(
        publisher.partition, own.partition, own.epoch, own.queue_time_ms(), encode_pointer(pointer)
    )
    async with asyncio.timeout(own.stale_publish_s):
        offset = await services.queue.publish(publication)
    if offset < own.read_to:
        raise reused_offset(offset, own.read_to)
    if clock.monotonic() - handed_over_s > own.stale_publish_s:
        raise RetryableError(f"the answer to opening epoch {own.epoch} came after {own.stale_publish_s:g} s")
    own.published_s = handed_over_s
    own.published(offset, pointer, own.queue_time_ms())
    if own.unread:
        await publisher.read_to_end()


def origin_of(services: Services, topic: Topic, own: Ownership) -> Origin:
    """Return the writer that the objects and pointers of an epoch name."""
    settings = services.settings
    return Origin(settings.cluster, settings.broker_id, services.store_name, topic, own.partition, own.epoch)


async def _read_tail(services: Services, topic: Topic, own: Ownership, publisher: Publisher) -> None:
    """Read the queue from W ago to its end, and earlier parts until the partition's totals are known.

    The last pointer of the partition may be older than W. The totals also need the pointers shortly before the last
    one. The state of named producers needs all pointers since the last `opened`. The reading ends at the beginning of
    the log only if two answers agree on it. An owner that believed one wrong answer would forget the names for ever.
    """
    queue, read = services.queue, publisher.partition
    span = await valid_span(queue, read)
    begin = span.begin
    since = own.opened_wall_ms - own.dedup_window_ms - CLOCK_ERROR_MS
    found = await queue.seek_time(read, since)
    start, step = min(found, max(span.end - 1, span.begin)), 1
    while True:
        own.restart(start)
        await publisher.read_to_end(span.end)
        _check_time(own, since, found)
        if 0 < start <= begin:
            begin = min(begin, (await valid_span(queue, read)).begin)
        if start <= begin:
            return
        if own.highest_epoch:
            known_ms = min(own.tail.last_ms, own.tail.named_ms or own.tail.last_ms)
            since = known_ms - contended_ms(topic.settings.stale_publish_ms)
            found = await queue.seek_time(read, since)
            _check_time(own, since, found)
            if start <= found:
                return
            start = found
        else:
            step *= 16
            start = max(start - step, begin)


def _check_time(own: Ownership, since: int, found: int) -> None:
    """Raise QueueError when the tail has an offset for time `since` that is before `found`.

    `found` should be the first such offset. With a later one, the opening would read less than it needs.
    """
    tail = own.tail
    if tail.last_ms >= since and found > tail.last_at >= 0:
        text = f"offset {found} for time {since}, and offset {tail.last_at} is of {tail.last_ms}"
        raise QueueError(f"partition {own.partition}: the queue shows {text}", hint="the opening is tried again")


async def release_partition(services: Services, publisher: Publisher, topic: Topic) -> None:
    """Publish `closed` and clear the session of the assignment, so that the next owner can open.

    Partitions that are released together take turns. The time-out of each publish starts with its turn.
    """
    async with services.closings.turn():
        await _release(services, publisher, topic)


async def _release(services: Services, publisher: Publisher, topic: Topic) -> None:
    own = publisher.own
    origin = origin_of(services, topic, own)
    closed_ms = services.runtime.clock.wall_ms()

    def build() -> Pointer:
        adopted = own.next_adopted()  # at each try, after its read: no later pointer can count what that found
        totals, named_ms = own.totals_with(adopted), own.named_since_ms()
        return control_pointer("closed", origin, totals, adopted, closed_ms, named_ms=named_ms)

    try:
        await publisher.publish(build, None)
        current = await services.coordinator.assignment(topic.id, own.partition)
        if current.session == services.session and current.epoch == own.epoch:
            await services.coordinator.set_assignment(msgspec.structs.replace(current, session=""))
    except MemqError as error:
        services.events.warning("release-failed", f"topic '{topic.name}' partition {own.partition}: {error}")
