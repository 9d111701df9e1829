"""The log of what was committed: the ports of the notification queue, one file per queue.

An entry of the queue is one pointer (its bytes are opaque here). A read partition is an ordered log of
entries with growing offsets. Every entry has a queue time: the moment, in Unix ms, of its owner's last
proof of ownership, and the queue refuses what is stale by its own rule (see `PointerWriter`).

The checks at the end refuse, in the same words for every queue, what no queue may hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.errors import EpochFencedError, InvalidRequestError, NotFoundError, QueueError, TooLargeError
from memq.limits import POINTER_BYTES_MAX
from memq.topic import Committed, ReadPartition

OFFSET_END = 1 << 39  # pointer offset << 24 | record index fits an int64
RECORD_INDEX_END = 1 << 24
TIME_MS_END = 1 << 53  # JSON's exact integers
EPOCH_END = 1 << 32
TOTAL_END = 1 << 63


def missing_partition(partition: ReadPartition) -> NotFoundError:
    """Return the error for a read partition that the queue does not hold."""
    return NotFoundError(f"read partition {partition.partition} of topic '{partition.topic}' is not in the queue")


def checked_span(partition: ReadPartition, begin: int, end: int) -> Span:
    """Return the span, when it can be one. Raises: QueueError."""
    if not 0 <= begin <= end:
        raise QueueError(
            f"read partition {partition.partition} of topic '{partition.topic}' begins at {begin} and ends at {end}, "
            "which can't be",
            hint="the request is tried again; if that stays, check the notification queue",
        )
    return Span(begin, end)


def check_publication(publication: Publication) -> None:
    """Refuse a pointer that is empty, as a lost one is, or too large, and numbers that no queue can hold."""
    if not publication.body:
        raise InvalidRequestError("a pointer of 0 bytes", hint="publish what encode_pointer returns")
    if len(publication.body) > POINTER_BYTES_MAX:
        raise TooLargeError(f"pointer of {len(publication.body)} bytes, {POINTER_BYTES_MAX} are allowed")
    if not (0 <= publication.epoch < EPOCH_END and 0 <= publication.time_ms < TIME_MS_END):
        raise InvalidRequestError(f"epoch {publication.epoch} or queue time {publication.time_ms} is out of bounds")


def check_epoch(publication: Publication, highest: int) -> None:
    """Refuse a publication of an epoch below the highest that the queue holds of its write partition."""
    if publication.epoch < highest:
        raise EpochFencedError(
            f"epoch {publication.epoch} of partition {publication.write_partition} of topic "
            f"'{publication.partition.topic}' is over: the queue holds epoch {highest}"
        )


def check_position(partition: ReadPartition, committed: Committed) -> None:
    """Refuse a position of another partition, or numbers that no position has."""
    position, totals = committed.position, committed.totals
    if position.read_partition != partition.partition:
        raise InvalidRequestError(f"position {position} is not one of read partition {partition.partition}")
    if not (0 <= position.pointer_offset < OFFSET_END and 0 <= position.record_index < RECORD_INDEX_END):
        raise InvalidRequestError(f"position {position} is out of bounds")
    if not (0 <= totals.records < TOTAL_END and 0 <= totals.bytes < TOTAL_END):
        raise InvalidRequestError(f"totals {totals.records} and {totals.bytes} at {position} are out of bounds")


@dataclass(frozen=True, slots=True)
class Entry:
    """One pointer in the queue: offset, queue time in Unix ms, its bytes.

    Without bytes it is a pointer that the queue has lost: its row is missing or damaged. Its time is then the one of
    an entry behind it.
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

    Nothing but these entries lies between the offset that was asked for and `next`. The queue may use offsets itself,
    so `next` may be greater than the last entry's offset + 1.
    """

    __slots__ = ("next",)

    def __init__(self, entries: Iterable[Entry], next_: int) -> None:
        """`next_` is at least the offset that was asked for, and lies behind all of the entries."""
        super().__init__(entries)
        self.next = next_


@dataclass(frozen=True, slots=True)
class Span:
    """The content of a read partition: offsets `begin` up to `end` (exclusive)."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Publication:
    """A publish request: the pointer, and the facts by which the queue refuses a stale one.

    `write_partition` and `epoch` fence in queues that can compare them; `time_ms` is the queue time.
    """

    partition: ReadPartition
    write_partition: int
    epoch: int
    time_ms: int
    body: bytes


class PointerWriter(Protocol):
    """Publishes pointers.

    Promises: when `publish` returns, the entry is durable and every reader sees it; offsets in a read
    partition only grow, and when nobody else wrote, the next offset follows on the last. A queue refuses
    either a lower epoch than the highest that it holds of that write partition (sqlite, memory), or a
    queue time older than `stale_publish_ms` (kafka; memory when asked to).
    Non-promises: after QueueError, a timeout or a cancelled call the entry may be there or appear later; the next call
    may raise QueueError for that, and has published nothing then.
    QueueRefusedError does not mean absent either: an earlier try may be in the log.
    Raises: EpochFencedError (sqlite, memory: a higher epoch is there), QueueRefusedError (too old),
    QueueError (may pass), NotFoundError (no such partition), TooLargeError.
    """

    @property
    def refuses_by_age(self) -> bool:
        """Whether what is too old is refused, and not a lower epoch: that may land behind a higher one, for S."""
        ...

    async def publish(self, publication: Publication) -> int:
        """Append one entry and return its offset."""
        ...


class PointerReader(Protocol):
    """Reads pointers.

    Promises: entries come in order of offset, none left out between `begin` and `end`; what one read has
    shown, every later read shows, until retention takes it or the queue is damaged: an entry of which the queue knows
    that it has lost it is shown without its bytes (sqlite). A read without entries has reached the end: `next` is at
    or behind an end that is valid and was read after the call. What the queue can't prove to be an end or an offset
    (it is negative, lies before `begin`, or below an end that was proven before) is a QueueError, never an answer.
    Non-promises: offsets need not be dense (retention, or the queue's own records).
    Raises: QueueError (may pass), NotFoundError (no such partition).
    """

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """Return entries from `offset` on, at most about `bytes_max` but at least one when there is one.

        Returns at once, without entries at the end alone. An offset below `begin` starts at `begin`. To read all that
        a partition holds, use `memq.notification.log_reader`: it does not take the first empty answer for the end.
        """
        ...

    async def span(self, partition: ReadPartition) -> Span:
        """Return the first offset that is there, and the next entry's or a bound above all there are."""
        ...

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """Return the least offset whose queue time is at least `time_ms`; the end when there is none.

        Every entry with a queue time at or after `time_ms` lies at or behind it.
        """
        ...

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """Return when one of the partitions holds an entry at or behind its offset, or after `timeout_s`."""
        ...


class TopicFinder(Protocol):
    """Finds topics in the queue, for callers without a broker. Raises: QueueError."""

    async def partitions(self, topic: str) -> list[ReadPartition]:
        """Return all read partitions of topics with this name, also of deleted and recreated ones.

        In no promised order; none when there is no such topic.
        """
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """A group member's state: generation, partitions it may read, partitions it must return.

    A member delivers only `assigned`. `revoking` is what it still holds and must release (finish, commit,
    then name it in the next heartbeat's `released`); only then does another member get it.
    """

    generation: int
    assigned: tuple[ReadPartition, ...]
    revoking: tuple[ReadPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupState:
    """One consumer group for people: members with what they hold, and what is committed."""

    group: str
    generation: int
    members: dict[str, tuple[ReadPartition, ...]]
    committed: dict[ReadPartition, Committed]


class Groups(Protocol):
    """Consumer groups: membership with generations, and committed positions with totals.

    Promises: at any time a partition is assigned to at most one member of a group; a member that is
    silent for its session timeout loses everything at once; a commit by a member that does not hold the
    partition in its generation is refused whole. Positions of partitions outlive members, where the queue bounds that
    by a time, for that time (kafka: offsets.retention.minutes after the last member left).
    Raises: GenerationFencedError, QueueError, NotFoundError (group), InvalidNameError,
    InvalidRequestError (reset or delete while members are active).
    """

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """Enter the group, or change the partitions that the member wants to share in.

        Name all partitions of a topic: a queue may know topics only, and share out those that are not named too. What
        is assigned may come later, with a heartbeat.
        """
        ...

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """Say that the member lives, give back `released`, and learn the current membership."""
        ...

    async def leave(self, group: str, member: str) -> None:
        """Give everything back at once; leaving twice is fine."""
        ...

    async def commit(self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed]) -> None:
        """Store positions, all or none; after QueueError some may be stored, and storing all again is right.

        A position may be lower than the stored one: its holder has sought back.

        A member "" with generation -1 commits from outside the membership: allowed only while the group has
        no members.
        """
        ...

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """Return what is stored for those of `partitions` that have something.

        An error says nothing about positions: a member that took one for "nothing stored" would pass over records.
        """
        ...

    async def groups(self) -> Sequence[str]:
        """Return the names of all groups, sorted."""
        ...

    async def describe(self, group: str) -> GroupState:
        """Return members and positions. The generation is 0 when the queue does not report it."""
        ...

    async def delete_group(self, group: str) -> None:
        """Delete a group without members, with its positions."""
        ...


class PartitionAdmin(Protocol):
    """Makes, trims and removes read partitions.

    Raises: QueueError, NotFoundError.
    """

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """Make partitions that are not there yet; those that are there get the new `stale_publish_ms`."""
        ...

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """Delete the entries below offset `before`; offsets are never used again."""
        ...

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """Delete partitions with their entries and the groups' positions in them.

        A topic goes as a whole: name all of its partitions. A queue may delete those that are not named with them.
        """
        ...


class NotificationQueue(PointerWriter, PointerReader, Groups, PartitionAdmin, Protocol):
    """Everything that a broker needs of a queue."""

    async def check(self) -> None:
        """Prove that the queue answers. Raises: the MemqError that it fails with."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...
