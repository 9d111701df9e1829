"""Which unnamed objects have records that no pointer in the queue names: a sweep keeps them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memq.errors import CorruptDataError, InvalidRequestError
from memq.format.key import LargeObjectKey, is_staged_object, parse_object_key
from memq.format.object import open_object
from memq.format.ranges import Range, RangeSet
from memq.topic import ReadPartition
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import LogBlock, LogEntry


class CopyRules:
    """Compares objects with the entries that are in the queue. Give it each pointer that a log lost."""

    def __init__(self, logs: Sequence[Mapping[ReadPartition, ReadLog]], objects: Mapping[str, bytes]) -> None:
        self._logs = logs
        self._objects = objects
        self._lost: dict[str, list[tuple[ReadPartition, LogEntry]]] = {}  # by key
        self._kept: dict[str, bool] = {}
        self._cut: dict[tuple[str, int], None] = {}  # write partitions that have lost pointers: topic id, number

    def lose(self, partition: ReadPartition, entry: LogEntry) -> None:
        """Note that a log lost a pointer."""
        self._cut[partition.topic_id, entry.pointer.partition] = None
        for location in entry.pointer.locations:
            self._lost.setdefault(location.key, []).append((partition, entry))

    def are_missed(self, key: str) -> bool:
        """Whether only lost pointers had all records of a deleted object, in a log that was not trimmed since."""
        return any(
            not self._is_past(partition.topic_id, batch.partition, batch.epoch, batch.batch_sequence, entry.time_ms)
            and self._lacks(partition.topic_id, entry.blocks)
            for partition, entry in self._lost.pop(key, ())
            for batch in [entry.pointer]
        )

    def is_only_copy(self, key: str) -> bool:
        """Whether an object of an owner has records that the queue lacks; false if no log here is of its topics.

        Of a log that was cut, a sweep may also keep objects whose records were sent again: batch numbers are missing.
        Retention may end the keeping at any time, so an answer stays true.
        """
        self._kept[key] = self._kept.get(key, False) or self._is_kept(key)
        return self._kept[key]

    def _is_kept(self, key: str) -> bool:
        try:
            if is_staged_object(key) or isinstance(parse_object_key(key), LargeObjectKey):
                return False
            index = open_object(self._objects[key])
        except (InvalidRequestError, CorruptDataError):
            return False  # no batch of an owner
        for batch in index.batches:
            blocks = [
                LogBlock((batch.partition, block.producer_id), block.first_sequence, block.next_sequence, 0, ())
                for block in index.blocks_of(batch)
            ]
            topic_id = index.meta.topics[batch.topic].id
            if self._is_past(topic_id, batch.partition, batch.epoch, batch.batch_sequence):
                continue
            if (topic_id, batch.partition) in self._cut or self._lacks(topic_id, blocks):
                return True
        return False

    def _entries(self, topic_id: str, partition: int) -> list[LogEntry]:
        """Return the entries of a write partition that are in the queue."""
        return [
            entry
            for logs in self._logs
            for read, log in logs.items()
            if read.topic_id == topic_id
            for entry in log.entries[log.queue_begin :]
            if entry.pointer.partition == partition
        ]

    def _is_past(self, topic_id: str, partition: int, epoch: int, number: int, time_ms: int | None = None) -> bool:
        """Whether retention has trimmed the log of a write partition after a batch.

        `time_ms`: the queue time of its pointer (Unix ms), None if not known.
        """
        entries = self._entries(topic_id, partition)
        if not entries or not self._is_trimmed(topic_id, entries[0]):
            return False
        if time_ms is not None and time_ms < entries[0].time_ms:
            return True
        if entries[0].pointer.epoch > epoch:
            return True
        left = (each.pointer for each in entries if each.pointer.epoch == epoch and each.pointer.kind == "data")
        return number < min((each.batch_sequence for each in left), default=0)

    def _is_trimmed(self, topic_id: str, entry: LogEntry) -> bool:
        """Whether retention has removed pointers of the read partition that has an entry."""
        return any(
            read.topic_id == topic_id and log.queue_begin and entry in log.entries[entry.offset : entry.offset + 1]
            for logs in self._logs
            for read, log in logs.items()
        )

    def _lacks(self, topic_id: str, blocks: Iterable[LogBlock]) -> bool:
        """Whether no pointer in the queue names some records of these blocks, and no producer gave them up."""
        for block in blocks:
            partition, producer = block.source
            entries = self._entries(topic_id, partition)
            if entries and not _sequences(entries, producer).covers(block.first, block.following):
                return True
        return False


def _sequences(entries: Iterable[LogEntry], producer: int) -> RangeSet:
    """Return the sequences of a producer that are in a log, or that it gave up."""
    known = RangeSet()
    for entry in entries:
        ranges: list[Range] = []
        for end in entry.pointer.ended:
            ranges += end.burned if end.producer == producer else ()
        for named in entry.pointer.producers:
            ranges += named.ranges if named.producer == producer else ()
        for first, next_ in ranges:
            known.add(first, next_)
    return known
