"""The notification queue on Kafka: the port in Kafka's terms, over the parts of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from memq.errors import ClosedError, DeniedError, NotFoundError, QueueError
from memq.notification import (
    FROM_THE_LOG,
    Entries,
    Entry,
    Publication,
    Span,
    check_publication,
    checked_span,
)
from memq.notification.kafka.admin import KafkaAdmin, KafkaPartition
from memq.notification.kafka.groups.former_groups import FormerKafkaGroups
from memq.notification.kafka.groups.requests import KafkaGroupRequests
from memq.notification.kafka.librdkafka import LastErrors, admin_of
from memq.notification.kafka.reading.fetcher import EntryFetcher
from memq.notification.kafka.reading.follower import Follower
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.reading.tail_cache import TailCache
from memq.notification.kafka.rights import Rights
from memq.notification.kafka.sender import Sender
from memq.notification.kafka.settings import KafkaSettings, Names
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.notification.kafka.topics import KafkaTopics
from memq.notification.waiters import Waiters, until_reached
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import ReadPartition

CHECK_S = 60.0  # between two checks of the rights; each readiness probe checks only that Kafka answers
LEADERLESS_S_MAX = 3.0  # a new partition has no answering leader for a moment
LEADERLESS_PAUSE_S = 0.1
SHOWN_S_MAX = 3.0  # time-out until a published pointer can be read; a node that lags needs about 0.1 s
SHOWN_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)  # between the reads of such a pointer; each creates a consumer


class KafkaQueue:
    """Logs in Kafka. It belongs to one event loop.

    Kafka refuses pointers by age, on its own clock: on a machine with a wrong clock, the first publish fails.
    Threads: one polls the producer, one follows ends, one lists topics, and `fetchers_max` read older pointers.
    Reads of positions have one per group, and librdkafka has its own.
    Raises at construction: InvalidSettingError.
    """

    def __init__(self, settings: KafkaSettings, runtime: Runtime) -> None:
        self._names = Names(settings.prefix)
        self._tasks = TaskOwner(self._fail, EventLog(runtime.clock))
        errors = LastErrors()
        self._admin = KafkaAdmin(settings, errors)
        self._metadata = TopicMetadataCache(self._admin, runtime.clock, self._tasks)
        self._offsets = Offsets(self._admin, self._metadata, self._tasks)
        self._topics = KafkaTopics(self._admin, settings, self._metadata, self._offsets, self._tasks)
        self._requests = KafkaGroupRequests(lambda: admin_of(settings.client(), errors.note), self._admin)
        self._rights = Rights(self._admin, settings, self._topics, self._requests)
        self._checked_s: float | None = None
        self._clock = runtime.clock
        self._sender = Sender(settings, self._admin, self._tasks)
        self._fetcher = EntryFetcher(settings, runtime.clock, errors, self._tasks)
        self._follower = Follower(settings, runtime.clock, errors, self._tasks, self._arrived, self._on_unlisted)
        self.former = FormerKafkaGroups(self._admin, settings, self._names, self._requests)
        self._cache = TailCache(settings.cache_bytes_max)
        self._waiters = Waiters()
        self._closed: BaseException | None = None

    # ---- pointers ----------------------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        """See `PointerWriter.refuses_by_age`."""
        return True

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`. One publish is in flight per write partition; others wait.

        Kafka's answer may be the known end while the pointer is at a later offset. So the pointer gets into the cache
        only where Kafka shows it.
        """
        check_publication(publication)
        topic, number = self._kafka_partition(publication.partition)
        await self._metadata.need(topic, number)
        try:
            offset = await self._sender.send(topic, publication)
        except QueueError:
            self._metadata.forget(topic)  # it may have been deleted: librdkafka reports that late
            raise
        except NotFoundError as error:
            if number >= await self._metadata.count(topic):
                raise
            await self._sender.refresh_metadata(topic)
            raise QueueError(f"the producer knew Kafka topic '{topic}' as it was before it was widened") from error
        if offset != self._offsets.proven(topic, number):
            await self._check_shown(topic, publication, offset)
        self._offsets.prove(topic, number, offset + 1)
        self._waiters.advance(publication.partition, offset + 1)
        return offset

    async def _check_shown(self, topic: str, publication: Publication, offset: int) -> None:
        """Read the pointer at the offset that Kafka answered, if the offset is not the known end.

        The offset may be wrong. Then too high an offset would make all later ends look too low, and the owner would
        wait to reach it. Too low an offset would give another record's position in an ack. The owner must read the
        entries of the gap anyway, so this check costs one more read.
        Raises: QueueError; the pointer may be at another offset.
        """
        partition, body = publication.partition, bytes(publication.body)
        error: Exception | None = None
        try:
            async with asyncio.timeout(SHOWN_S_MAX):
                for pause_s in (*SHOWN_PAUSES_S, 0.0):
                    if [entry.body for entry in self._cache.read(partition, offset, 1)] == [body]:
                        return  # the follower received the pointer before the delivery report
                    try:
                        found = await self._fetcher.fetch(topic, partition.partition, offset, offset + 1, 1)
                        if [(entry.offset, entry.body) for entry in found] == [(offset, body)]:
                            return
                    except (QueueError, NotFoundError, DeniedError) as failed:
                        error = failed
                    await asyncio.sleep(pause_s)
        except TimeoutError as late:
            error = late
        raise QueueError(
            f"partition {partition.partition} of topic '{partition.topic}': the pointer is not at offset {offset},"
            " which Kafka answered",
            hint="the broker searches for it, and publishes it again if it is not found; check Kafka's brokers",
        ) from error

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`.

        The end of a read without entries was requested after the call began. An entry that is read from
        the log replaces another one in the cache.
        """
        topic, number = self._kafka_partition(partition)
        found = self._cache.read(partition, offset, bytes_max)
        if found and bytes_max != FROM_THE_LOG:
            return Entries(found, found[-1].offset + 1)
        end = await self._offsets.end(topic, number)
        if offset >= end:
            return Entries((), offset)
        if bytes_max == FROM_THE_LOG:
            end = offset + 1
        try:
            entries = await self._fetcher.fetch(topic, number, max(offset, 0), end, bytes_max)
        except NotFoundError as error:
            if number >= await self._metadata.count(topic):
                raise
            raise QueueError(f"{error}, but Kafka shows it to others", hint=error.hint) from error
        self._offsets.prove(topic, number, entries.next)
        if found and entries:
            self._cache.add(partition, entries[0])
        return entries

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        topic, number = self._kafka_partition(partition)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LEADERLESS_S_MAX
        while True:
            try:
                begin, end = await asyncio.gather(self._offsets.begin(topic, number), self._offsets.end(topic, number))
                return checked_span(partition, begin, end)
            except QueueError:  # a starting broker may request a partition that another broker is just creating
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(LEADERLESS_PAUSE_S)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        topic, number = self._kafka_partition(partition)
        end = await self._offsets.end(topic, number)  # read first: later entries are at or above this end
        found = await self._offsets.at_time(topic, number, time_ms)
        return end if found is None else found

    async def partitions(self, topic: str) -> list[ReadPartition]:
        """See `TopicFinder.partitions`."""
        found: list[ReadPartition] = []
        for name, count in (await self._admin.partition_counts()).items():
            first = self._names.read_partition(name, 0)
            if first is not None and first.topic == topic:
                found += [ReadPartition(topic, first.topic_id, number) for number in range(count)]
        return found

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`.

        A publish of this process wakes waiters at once, one of another process within 10 ms.
        """
        kafka_partitions = {partition: self._kafka_partition(partition) for partition in ends}
        number, waiter = self._waiters.add(ends)
        try:
            new = [
                partition
                for partition, kafka_partition in kafka_partitions.items()
                if self._follower.end(kafka_partition) is None
            ]
            found = await asyncio.gather(*(self._offsets.end(*kafka_partitions[partition]) for partition in new))
            self._check_open()  # it may have been closed meanwhile
            self._follower.follow({kafka_partitions[partition]: end for partition, end in zip(new, found, strict=True)})
            for partition, end in zip(new, found, strict=True):
                waiter.advance(partition, end)
            for partition, kafka_partition in kafka_partitions.items():
                waiter.advance(partition, self._follower.end(kafka_partition) or 0)
            await until_reached(waiter, timeout_s)
        finally:
            self._waiters.remove(number)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError("the queue is closed") from self._closed

    def _kafka_partition(self, partition: ReadPartition) -> KafkaPartition:
        self._check_open()
        return self._names.kafka_topic(partition), partition.partition

    def _arrived(self, kafka_partition: KafkaPartition, entry: Entry) -> None:
        """Cache an entry of the log, from any publisher, and wake its waiters."""
        partition = self._names.read_partition(*kafka_partition)
        if partition is not None:
            self._offsets.prove(*kafka_partition, entry.offset + 1)
            self._cache.add(partition, entry)
            self._waiters.advance(partition, entry.offset + 1)

    def _on_unlisted(self, kafka_partition: KafkaPartition) -> None:
        """Wake the waiters of a partition that Kafka does not list: their next read checks a deletion."""
        self._metadata.forget(kafka_partition[0])
        partition = self._names.read_partition(*kafka_partition)
        if partition is not None:
            self._cache.drop(partition)
            self._waiters.wake(partition)

    def _fail(self, error: BaseException) -> None:
        """Fail all waiting and all later calls, because a thread died."""
        self._closed = error
        self._waiters.fail(QueueError(f"the Kafka queue died: {error}"))

    # ---- partitions --------------------------------------------------------------------------

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """See `PartitionAdmin.create`."""
        counts: dict[str, int] = {}
        for partition in partitions:
            topic, number = self._kafka_partition(partition)
            counts[topic] = max(counts.get(topic, 0), number + 1)
        for topic, count in counts.items():
            await self._topics.create(topic, count, stale_publish_ms)

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        topic, number = self._kafka_partition(partition)
        before = min(before, await self._offsets.end(topic, number))
        if before > 0:
            await self._topics.trim(topic, number, before)
            self._cache.trim(partition, before)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """See `PartitionAdmin.drop`. Kafka deletes whole topics, with the groups' positions in them."""
        await self._topics.drop(list(dict.fromkeys(self._kafka_partition(partition)[0] for partition in partitions)))
        self._follower.unfollow([self._kafka_partition(partition) for partition in partitions])
        for partition in partitions:
            self._offsets.forget(*self._kafka_partition(partition))
            self._cache.drop(partition)
            self._waiters.wake(partition)

    async def check(self) -> None:
        """See `NotificationQueue.check`. The error names every missing right.

        Proven rights are not checked again for `CHECK_S`.
        """
        self._check_open()
        await self._admin.check()
        now_s = self._clock.monotonic()
        if self._checked_s is None or now_s - self._checked_s >= CHECK_S:
            await self._rights.check()
            self._checked_s = now_s

    async def close(self) -> None:
        """See `NotificationQueue.close`. Pointers that wait for Kafka fail; their outcome is unknown.

        Calls of `wait` raise ClosedError.
        """
        if self._closed is None:
            self._closed = ClosedError("closed by its owner")
        self._waiters.fail(ClosedError("the queue is closed"))
        await self.former.close()
        await self._admin.close()
        await self._sender.close()
        await self._follower.close()
        await self._fetcher.close()
        await self._tasks.stop()
        self._requests.close()
