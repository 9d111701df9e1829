"""Follows the ends of awaited partitions: one consumer and one thread for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from confluent_kafka import Consumer, Message, TopicPartition

from memq.limits import MIB
from memq.notification import Entry
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.librdkafka import LastErrors, consumer_of, end_threads, is_not_there
from memq.notification.kafka.reading.fetcher import entry_of
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

FETCH_WAIT_MS = 5_000  # so 2,000 idle partitions take 0.3 % of a core, and still deliver within 10 ms
QUEUED_BYTES_MAX = 8 * MIB
MESSAGES_MAX = 1_000
BATCHES_MAX = 4  # batches that the loop has not taken yet; then the thread waits, and librdkafka stops to fetch
POLL_S = 0.05  # longest time until the thread takes an order


@dataclass(frozen=True, slots=True)
class FollowOrder:
    """An order to the thread: follow these partitions from these offsets, stop following those."""

    follow: tuple[TopicPartition, ...] = ()
    unfollow: tuple[TopicPartition, ...] = ()


@dataclass(slots=True)
class Followed:
    """One partition: the offset after all entries received, and the last wait (monotonic s)."""

    next: int
    wanted_s: float


class Follower:
    """Calls `arrived` for each new entry, `unlisted` for partitions that Kafka does not list; on the loop."""

    def __init__(
        self,
        settings: KafkaSettings,
        clock: Clock,
        errors: LastErrors,
        tasks: TaskOwner,
        arrived: Callable[[KafkaPartition, Entry], None],
        unlisted: Callable[[KafkaPartition], None],
    ) -> None:
        self._settings = settings.reader(FETCH_WAIT_MS, QUEUED_BYTES_MAX) | {"enable.partition.eof": False}
        self._idle_s = settings.followed_idle_ms / 1000
        self._clock = clock
        self._errors = errors
        self._tasks = tasks
        self._arrived = arrived
        self._unlisted = unlisted
        self._followed: dict[KafkaPartition, Followed] = {}
        self._changes: SimpleQueue[FollowOrder] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # an item for each batch that the loop may still be given
        for _ in range(BATCHES_MAX):
            self._room.put(None)
        self._pool = ThreadPool("kafka-follower", 1)
        self._started = False
        self._stopping = False

    def end(self, partition: KafkaPartition) -> int | None:
        """Return the offset after all received entries; None for a partition that is not followed.

        The call counts as use of the partition: it is followed for the idle time from now.
        """
        followed = self._followed.get(partition)
        if followed is None:
            return None
        followed.wanted_s = self._clock.monotonic()
        return followed.next

    def follow(self, ends: Mapping[KafkaPartition, int]) -> None:
        """Follow partitions from their current ends.

        Partitions that are followed already are not changed.
        """
        now_s = self._clock.monotonic()
        new = {partition: end for partition, end in ends.items() if partition not in self._followed}
        for partition, end in new.items():
            self._followed[partition] = Followed(end, now_s)
        if new:
            self._changes.put(
                FollowOrder(follow=tuple(TopicPartition(*partition, end) for partition, end in new.items()))
            )
        if not self._started:
            self._started = True
            self._tasks.start(self._pool.run(self._serve, asyncio.get_running_loop()), "kafka follower")
            self._tasks.start(self._unfollow_idle(), "kafka follower's idle partitions")

    def unfollow(self, partitions: Sequence[KafkaPartition]) -> None:
        """Stop following partitions."""
        known = [partition for partition in partitions if self._followed.pop(partition, None) is not None]
        if known:
            self._changes.put(FollowOrder(unfollow=tuple(TopicPartition(*partition) for partition in known)))

    async def close(self) -> None:
        """End the thread and its consumer."""
        self._stopping = True
        await end_threads(self._pool)

    async def _unfollow_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s)
            bound_s = self._clock.monotonic() - self._idle_s
            self.unfollow([partition for partition, followed in self._followed.items() if followed.wanted_s < bound_s])

    def _take(self, messages: Sequence[Message]) -> None:
        """Pass received entries to `arrived`, on the loop."""
        self._room.put(None)
        for message in messages:
            partition = (message.topic() or "", message.partition() or 0)
            followed, error = self._followed.get(partition), message.error()
            if followed is None:
                continue
            if error is None:
                entry = entry_of(message)
                followed.next = max(followed.next, entry.offset + 1)
                self._arrived(partition, entry)  # again from the first one on if an offset was out of range
            elif is_not_there(error):
                self.unfollow([partition])
                self._unlisted(partition)

    # ---- in the thread -----------------------------------------------------------------------

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        consumer = consumer_of(self._settings, self._errors.note)
        try:
            while not self._stopping:
                self._change(consumer)
                first = consumer.poll(POLL_S)
                if first is not None:
                    messages = [first, *consumer.consume(MESSAGES_MAX, 0)]
                    self._room.get()
                    loop.call_soon_threadsafe(self._take, messages)
        finally:
            consumer.close()

    def _change(self, consumer: Consumer) -> None:
        """Apply the orders.

        Only this thread may do so: during a poll, `incremental_assign` never returns in another thread.
        """
        while not self._changes.empty():
            change = self._changes.get()
            if change.follow:
                consumer.incremental_assign(list(change.follow))
            if change.unfollow:
                consumer.incremental_unassign(list(change.unfollow))
