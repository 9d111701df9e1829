"""Lets a consumer without an `end` end after the last record of sealed topics that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.settings import END
from memq.errors import MemqError
from memq.notification import Entries
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Position, ReadPartition, Topic

_RETRY_S = 0.5


class StreamEnds:
    """Sets the ends of partitions that are read when their topic ends. `changed` is called after that.

    An answer to POLL may say that a topic has ended which is not known to have: `refresh` asks for the metadata, which
    alone decides.
    """

    def __init__(
        self,
        reading: FetchScheduler,
        resolver: OffsetResolver,
        topics: Mapping[str, Topic],
        changed: Callable[[], None],
        tasks: TaskOwner,
        events: EventLog,
        refresh: Callable[[], None],
    ) -> None:
        self._refresh = refresh
        self._reading = reading
        self._resolver = resolver
        self._topics = topics
        self._changed = changed
        self._tasks = tasks
        self._events = events
        self._asking: dict[ReadPartition, Assigned] = {}

    def follow(self) -> None:
        """Ask for the ends of partitions whose topics have ended."""
        for partition, assigned in self._reading.assigned.items():
            topic = self._topics.get(partition.topic)
            if topic is None or topic.id != partition.topic_id:
                continue
            if not topic.ended:
                if assigned.ended:
                    assigned.ended = False  # until the next answer
                    self._refresh()
                continue
            if assigned.cursor.end is not None:
                _end_if_read(assigned)
            elif self._asking.get(partition) is not assigned:
                self._asking[partition] = assigned
                self._tasks.start(self._ask(partition, assigned), "consumer asks for the end of a sealed topic")

    async def _ask(self, partition: ReadPartition, assigned: Assigned) -> None:
        while not assigned.removed:
            try:
                end = await self._resolver.position_of(END, partition, assigned.settings)
            except MemqError as error:
                self._events.warning("consumer.retry", f"{type(error).__name__}: {error}; trying again")
                await asyncio.sleep(_RETRY_S)
                continue
            assigned.cursor.end = end
            _end_if_read(assigned)
            break
        self._changed()


def _end_if_read(assigned: Assigned) -> None:
    """End a partition whose pointers were all read: no further pointer comes that would end it."""
    cursor = assigned.cursor
    offset = cursor.poll_offset
    if offset is not None and cursor.end is not None and Position(cursor.partition.partition, offset) >= cursor.end:
        cursor.take_entries(Entries((), offset))
