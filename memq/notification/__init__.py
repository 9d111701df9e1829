"""The log of what was committed: the ports of the notification queue, one file per queue.

An entry of the queue is one pointer (its bytes are opaque here). A read partition is an ordered log of
entries with growing offsets. Every entry has a queue time: the moment, in Unix ms, of its owner's last
proof of ownership. Each queue refuses stale publications by its own rule (see `PointerWriter`).

The `check_` functions refuse values that no queue may hold, with the same messages for every queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.errors import EpochFencedError, InvalidRequestError, NotFoundError, QueueError, TooLargeError
from memq.limits import COVERED_MAX, POINTER_BYTES_MAX, TRIED_MAX, TRIES_MAX
from memq.topic import Committed, Covered, ReadPartition

OFFSET_END = 1 << 39  # pointer offset << 24 | record index fits an int64
RECORD_INDEX_END = 1 << 24
TIME_MS_END = 1 << 53  # JSON's exact integers
EPOCH_END = 1 << 32
TOTAL_END = 1 << 63
MARK_END = 1 << 32
FROM_THE_LOG = 0  # `bytes_max` of a read that shows what the log has at an offset now


def missing_partition(partition: ReadPartition) -> NotFoundError:
    """Return the error for a read partition that the queue does not hold."""
    return NotFoundError(f"read partition {partition.partition} of topic '{partition.topic}' is not in the queue")


def checked_span(partition: ReadPartition, begin: int, end: int) -> Span:
    """Return the span. Raises: QueueError when `begin` is negative or above `end`."""
    if not 0 <= begin <= end:
        raise QueueError(
            f"read partition {partition.partition} of topic '{partition.topic}' begins at {begin} and ends at {end}, "
            "which can't be",
            hint="the request is tried again; if it repeats, check the notification queue",
        )
    return Span(begin, end)


def check_publication(publication: Publication) -> None:
    """Refuse a pointer that is empty, as lost ones are, or too large, and numbers out of bounds.

    Raises: InvalidRequestError; TooLargeError over POINTER_BYTES_MAX.
    """
    if not publication.body:
        raise InvalidRequestError("a pointer of 0 bytes", hint="publish what encode_pointer returns")
    if len(publication.body) > POINTER_BYTES_MAX:
        raise TooLargeError(f"pointer of {len(publication.body)} bytes, {POINTER_BYTES_MAX} are allowed")
    if not (0 <= publication.epoch < EPOCH_END and 0 <= publication.time_ms < TIME_MS_END):
        raise InvalidRequestError(f"epoch {publication.epoch} or queue time {publication.time_ms} is out of bounds")


def check_epoch(publication: Publication, highest: int) -> None:
    """Refuse a publication of an epoch below the highest one of its write partition in the queue.

    Raises: EpochFencedError.
    """
    if publication.epoch < highest:
        raise EpochFencedError(
            f"epoch {publication.epoch} of partition {publication.write_partition} of topic "
            f"'{publication.partition.topic}' is over: the queue holds epoch {highest}"
        )


def check_position(partition: ReadPartition, committed: Committed) -> None:
    """Refuse a position of another partition, and numbers out of bounds. Raises: InvalidRequestError."""
    position, totals = committed.position, committed.totals
    if position.read_partition != partition.partition:
        raise InvalidRequestError(f"position {position} is not one of read partition {partition.partition}")
    if not (0 <= position.pointer_offset < OFFSET_END and 0 <= position.record_index < RECORD_INDEX_END):
        raise InvalidRequestError(f"position {position} is out of bounds")
    if not (0 <= totals.records < TOTAL_END and 0 <= totals.bytes < TOTAL_END):
        raise InvalidRequestError(f"totals {totals.records} and {totals.bytes} at {position} are out of bounds")
    if not 0 <= committed.mark < MARK_END:
        raise InvalidRequestError(f"mark {committed.mark} at {position} is out of bounds")
    sound = all(0 <= offset < TOTAL_END and 0 < tries <= TRIES_MAX for offset, tries in committed.tried)
    if not sound or len(committed.tried) > TRIED_MAX:
        raise InvalidRequestError(f"the tried records at {position} are out of bounds")
    if not _is_valid(committed.covered):
        raise InvalidRequestError(f"the covered batches at {position} are out of bounds")


def active_members(refusal: str, count: int) -> InvalidRequestError:
    """Return the error for a request that is refused because its group has active members."""
    return InvalidRequestError(
        f"{refusal}: the group has {count} active members", hint="stop the group's consumers first"
    )


def _is_valid(covered: Covered) -> bool:
    """Whether covered batches and their numbers are within bounds, and each epoch has a number."""
    numbers = [number for writer, floor, pairs in covered for number in (writer, floor, *pairs)]
    counts = [len(covered), *(len(pairs) // 2 for _, _, pairs in covered)]
    even = all(len(pairs) % 2 == 0 for _, _, pairs in covered)
    return even and max(counts) <= COVERED_MAX and all(0 <= number < TOTAL_END for number in numbers)


@dataclass(frozen=True, slots=True)
class Entry:
    """One pointer in the queue: offset, queue time in Unix ms, its bytes.

    An entry without bytes is a pointer that the queue has lost: its row is missing or damaged. Its time is the queue
    time of a later entry, or one that no entry exceeds.
    """

    offset: int
    time_ms: int
    body: bytes

    @property
    def lost(self) -> bool:
        """Whether the queue has lost the pointer."""
        return not self.body


class Entries(list[Entry]):
    """Entries that a read has found, in order, and `next`: the offset from which reading continues.

    The log has no other entries from the requested offset up to `next`. `next` may be greater than the last entry's
    offset + 1, because a queue may use offsets for records of its own.
    """

    __slots__ = ("next",)

    def __init__(self, entries: Iterable[Entry], next_: int) -> None:
        """`next_` is at least the requested offset, and greater than the offsets of all entries."""
        super().__init__(entries)
        self.next = next_


@dataclass(frozen=True, slots=True)
class Span:
    """The content of a read partition: offsets `begin` up to `end` (exclusive)."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Publication:
    """A publish request: the pointer, and the values by which the queue refuses a stale one.

    Queues that can compare epochs fence by `write_partition` and `epoch`; `time_ms` is the queue time in Unix ms.
    """

    partition: ReadPartition
    write_partition: int
    epoch: int
    time_ms: int
    body: bytes


class PointerWriter(Protocol):
    """Publishes pointers.

    Promises: when `publish` returns, the entry is durable and every reader sees it. Offsets in a read
    partition only grow; without another writer, each offset is the last one + 1. A queue has one of two rules.
    It refuses an epoch below the highest one of that write partition (sqlite, memory), or a queue time older
    than `stale_publish_ms` (kafka; memory on request).
    Non-promises: after QueueError, a time-out or a cancelled call, the entry may be in the log or appear later. The
    next call may then raise QueueError for that reason, without having published its own entry.
    QueueRefusedError does not prove that the pointer is absent: an earlier try may be in the log.
    Raises: EpochFencedError (sqlite, memory: the queue has a higher epoch), QueueRefusedError (too old),
    QueueError (retry), NotFoundError (no such partition), TooLargeError.
    """

    @property
    def refuses_by_age(self) -> bool:
        """Whether this queue refuses old pointers, not lower epochs, which may follow a higher one for S."""
        ...

    async def publish(self, publication: Publication) -> int:
        """Append one entry and return its offset."""
        ...


class PointerReader(Protocol):
    """Reads pointers.

    Promises: a read returns all entries in order of offset. An entry that one read returned, every later read returns,
    until retention removes it or the queue is damaged. The queue returns an entry that it knows to be lost without its
    bytes (sqlite). A read without entries has reached the end: `next` is at or above an end that was valid after the
    call began. A wrong end or offset (negative, below `begin`, or below an end that was proven before) raises
    QueueError, and is never returned.
    Non-promises: offsets need not be dense (retention, or the queue's own records).
    Raises: QueueError (retry), NotFoundError (no such partition).
    """

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """Return entries from `offset` on: about `bytes_max` bytes at most, but at least one entry if any.

        The call never waits for entries: it returns none only at the end. An offset below `begin` starts at `begin`.
        With `FROM_THE_LOG` it returns one entry, and never one of a cache: it is another one than before if the log was
        cut and has grown again.
        To read a whole partition, use `memq.notification.log_reader`, which does not trust the first empty answer.
        """
        ...

    async def span(self, partition: ReadPartition) -> Span:
        """Return the first offset, and the offset of the next entry or a bound above all entries."""
        ...

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """Return the least offset whose queue time is at least `time_ms`; the end if no entry has one.

        Every entry with a queue time of at least `time_ms` has this offset or a greater one.
        """
        ...

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """Return when one of the partitions has an entry at its offset or above, or after `timeout_s`."""
        ...


class TopicFinder(Protocol):
    """Finds topics in the queue, for callers without a broker. Raises: QueueError."""

    async def partitions(self, topic: str) -> list[ReadPartition]:
        """Return all read partitions of topics with this name, also of deleted and recreated ones.

        The order is undefined. The list is empty if no such topic exists.
        """
        ...


@dataclass(frozen=True, slots=True)
class FormerGroup:
    """A consumer group that an earlier release kept in the queue: its active members and its positions.

    The generation is 0 when the queue does not report it.
    """

    group: str
    generation: int
    members: tuple[str, ...]
    committed: dict[ReadPartition, Committed]


class FormerGroups(Protocol):
    """The groups that earlier releases kept in the queue. They are moved to state logs, and removed here.

    Raises: QueueError, DeniedError, CorruptDataError; NotFoundError (group), InvalidNameError.
    """

    async def names(self) -> Sequence[str]:
        """Return their names, sorted."""
        ...

    async def read(self, group: str) -> FormerGroup:
        """Return the active members and the positions of one."""
        ...

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """Set positions of one without members, all or none; after QueueError, store all again.

        Raises: InvalidRequestError when it has members.
        """
        ...

    async def remove(self, group: str) -> None:
        """Remove one with its positions.

        A queue that knows of active members refuses (kafka), or ignores them (sqlite).
        """
        ...


class PartitionAdmin(Protocol):
    """Creates, trims and deletes read partitions.

    Raises: QueueError, NotFoundError.
    """

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """Create missing partitions; existing ones get the new `stale_publish_ms`."""
        ...

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """Delete the entries below offset `before`; offsets are never used again."""
        ...

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """Delete partitions with their entries and the groups' positions in them.

        Name all partitions of a topic: a queue may delete the others, too.
        """
        ...


class NotificationQueue(PointerWriter, PointerReader, PartitionAdmin, Protocol):
    """All operations of a queue that a broker uses."""

    @property
    def former(self) -> FormerGroups:
        """The groups that earlier releases kept in this queue."""
        ...

    async def check(self) -> None:
        """Prove that the queue answers. Raises: the MemqError of its failure."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...
