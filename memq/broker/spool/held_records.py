"""The records that this broker holds: in its rings, in forwarded blocks, and on its disk.

Theory: from its ack with ack=1 until the queue shows its pointer, a record is in one of these three. In memory, a
record moves from one to the next within one step of the event loop. So `find` reads the disk first, and then all of
memory in one step. A record in none of the three is in the queue, or this broker does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memq.broker.partition.batch import sequences_of
from memq.broker.partitions import Partitions
from memq.broker.spool.replay import Replay
from memq.format.ranges import Range, RangeSet

Source = tuple[int, int]  # write partition, producer


class HeldRecords:
    """Finds records by topic, write partition, producer and sequence."""

    def __init__(self, partitions: Partitions, replay: Replay) -> None:
        self._partitions = partitions
        self._replay = replay

    async def find(
        self, topic_id: str, sought: Mapping[Source, RangeSet]
    ) -> tuple[dict[Source, RangeSet], tuple[str, ...]]:
        """Return the sought records that are held, and the reasons why others may be held, too."""
        unread = await self._replay.index_segments()
        found: dict[Source, RangeSet] = {}
        for source, (first, next_) in self._all_of(topic_id):
            wanted = sought.get(source)
            if wanted is not None and wanted.overlaps(first, next_):
                found.setdefault(source, RangeSet()).add(first, next_)
        return found, unread

    async def any_of(self, topic_id: str) -> str:
        """Return why this broker holds, or may hold, records of a topic; "" if it holds none."""
        unread = await self._replay.index_segments()
        for (partition, _), (first, next_) in self._all_of(topic_id):
            return f"partition {partition}: sequences {first} to {next_ - 1} are not in the queue yet"
        return unread[0] if unread else ""

    def _all_of(self, topic_id: str) -> Iterator[tuple[Source, Range]]:
        for processor in self._partitions.at_work():
            if processor.topic.id == topic_id:
                for slot in processor.ring:
                    for producer, first, next_ in sequences_of(slot):
                        yield (processor.partition, producer), (first, next_)
        yield from self._partitions.forwarder.held_records(topic_id)
        yield from self._replay.held_records(topic_id)
