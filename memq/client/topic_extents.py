"""The extent of a topic: records, bytes, oldest and newest batch, and its batches of the last hour.

It is read from a few pointers of each log, without objects.
"""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.log_answers import ask_logs
from memq.errors import MemqError
from memq.topic import ReadPartition, Topic, read_partitions

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class TopicExtent:
    """Records and stored bytes of a topic, with copies; seals of its oldest and newest batch in Unix ms.

    The times are None without a batch. `hour_batches` counts the batches of the last hour: each is one PUT, or a part
    of a shared one. `written` counts all records ever, with those that retention removed. `unknown` has the error of
    each read partition whose log did not answer: the rest leaves it out.
    """

    records: int = 0
    bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    hour_batches: int = 0
    written: int = 0
    unknown: tuple[tuple[int, MemqError], ...] = ()

    def plus(self, other: TopicExtent) -> TopicExtent:
        """Return the extent of both."""
        oldest = [each for each in (self.oldest_ms, other.oldest_ms) if each is not None]
        newest = [each for each in (self.newest_ms, other.newest_ms) if each is not None]
        return TopicExtent(
            self.records + other.records,
            self.bytes + other.bytes,
            min(oldest, default=None),
            max(newest, default=None),
            self.hour_batches + other.hour_batches,
            self.written + other.written,
            self.unknown + other.unknown,
        )


async def extents_of(resolver: OffsetResolver, topics: list[Topic], now_ms: int) -> dict[str, TopicExtent]:
    """Return the extents by topic name."""
    of = {partition: topic for topic in topics for partition in read_partitions(topic)}
    answers = await ask_logs(of, lambda each: _extent(resolver, of[each], each, now_ms))
    found = {topic.name: TopicExtent() for topic in topics}
    for partition, answer in answers.items():
        part = answer if isinstance(answer, TopicExtent) else TopicExtent(unknown=((partition.partition, answer),))
        found[partition.topic] = found[partition.topic].plus(part)
    return found


async def _extent(resolver: OffsetResolver, topic: Topic, partition: ReadPartition, now_ms: int) -> TopicExtent:
    span, writers = await resolver.span(partition), topic.writers_of(partition)
    begin = await resolver.totals_before(partition, span.begin, topic.settings, writers)
    end = await resolver.totals_before(partition, span.end, topic.settings, writers)
    return TopicExtent(
        max(0, end.records - begin.records),
        max(0, end.bytes - begin.bytes),
        await resolver.first_seal(partition, span),
        await resolver.last_seal(partition, span),
        await resolver.batches_since(partition, now_ms - HOUR_MS, span),
        end.records,
    )
