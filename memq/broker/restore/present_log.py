"""The present log of a read partition that may be lost: empty, part of a restore, or complete.

Owners begin with `opened`, above all epochs before. So a log that begins with it, and has no object of a lower epoch,
was never lost; one that was restored has all objects of lower epochs before it; and one that retention has cut was in
use for long. A log that only has data is what a restore has made so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from memq.broker.restore.rebuild import BatchPlace
from memq.format.pointer import Pointer, read_pointer
from memq.notification import Entry, NotificationQueue
from memq.notification.log_reader import entries_between, valid_span
from memq.topic import ReadPartition

Identity = tuple[int, int, int]  # write partition, epoch, batch sequence


@dataclass(slots=True)
class PresentLog:
    """The beginning of a log. `trimmed`: retention has cut it.

    `opened`: the first epoch of each write partition.
    """

    trimmed: bool = False
    batches: set[Identity] = field(default_factory=set)
    opened: dict[int, int] = field(default_factory=dict)

    @property
    def in_use(self) -> bool:
        """Whether owners have opened it: then nothing can be put before that any more."""
        return self.trimmed or bool(self.opened)

    def should_have(self, places: Iterable[BatchPlace]) -> list[BatchPlace]:
        """Return the batches that belong before the first opening.

        A staged one has no epoch that would say it.
        """
        return [
            place
            for place in places
            if not self.trimmed and place.writer is None and place.epoch < self.opened.get(place.partition, math.inf)
        ]

    def has(self, place: BatchPlace) -> bool:
        """Whether a batch has its pointer."""
        return (place.partition, place.epoch, place.batch_sequence) in self.batches

    def has_pointer(self, pointer: Pointer) -> bool:
        """Whether a batch's pointer is there."""
        return (pointer.partition, pointer.epoch, pointer.batch_sequence) in self.batches

    def note(self, entry: Entry) -> None:
        """Take the next entry of the log; a damaged one counts for nothing.

        Raises: UnsupportedFormatError for one of a newer version: it may be of a batch, which would get another.
        """
        pointer = read_pointer(entry.body, newer="raise")
        if not isinstance(pointer, Pointer):
            return
        if pointer.kind == "data":
            self.batches.add((pointer.partition, pointer.epoch, pointer.batch_sequence))
        elif pointer.kind == "opened":
            self.opened.setdefault(pointer.partition, pointer.epoch)


async def held_in(queue: NotificationQueue, partition: ReadPartition, writers: Iterable[int]) -> PresentLog:
    """Read a log until each of its write partitions was opened, or to its end.

    Raises: as the queue and `PresentLog.note`.
    """
    span = await valid_span(queue, partition)
    held = PresentLog(trimmed=0 < span.begin < span.end)  # retention leaves the last pointers
    unopened = set(writers)
    if held.trimmed or not unopened:
        return held
    async for entries in entries_between(queue, partition, span.begin, span.end):
        for entry in entries:
            held.note(entry)
        unopened -= held.opened.keys()
        if not unopened:
            break
    return held
