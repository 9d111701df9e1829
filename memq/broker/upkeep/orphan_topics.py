"""Topics in the queue but missing from the coordinator: lost there, or of another cluster."""

from __future__ import annotations

from collections.abc import Iterable

from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError
from memq.format.key import ObjectKey, parse_object_key
from memq.format.object import ObjectTopic
from memq.notification import PointerReader
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import read_index
from memq.topic import ReadPartition


class OrphanTopics:
    """Finds them out by the queue, once each. A topic whose deletion has come to its end is in neither."""

    def __init__(self, store: ObjectReader, queue: PointerReader) -> None:
        self._store = store
        self._queue = queue
        self.held: dict[str, ObjectTopic] = {}  # those that were found, by id
        self._found: dict[str, bool] = {}

    async def holds(self, topic: ObjectTopic) -> bool:
        """Whether the queue has a topic. Raises: QueueError."""
        if topic.id not in self._found:
            try:
                await self._queue.span(ReadPartition(topic.name, topic.id, 0))
            except NotFoundError:
                self._found[topic.id] = False
            else:
                self._found[topic.id] = True
                self.held[topic.id] = topic
        return self._found[topic.id]

    async def owner_of(self, entries: Iterable[ObjectEntry]) -> ObjectTopic | None:
        """Return the topic whose objects these are, all of one prefix, when the queue has it.

        A key has a part of its id only: the index of the first object that has one tells it. Raises: as the store;
        UnsupportedFormatError for an object of a newer version.
        """
        for entry in entries:
            try:
                if not isinstance(parse_object_key(entry.key), ObjectKey):
                    continue
                index, _ = await read_index(self._store, entry)
            except (CorruptDataError, InvalidRequestError, NotFoundError):
                continue  # no object of ours, or gone meanwhile
            for topic in index.meta.topics:
                return topic if await self.holds(topic) else None
        return None
