"""One assigned partition of a consumer: its cursor, its progress, and its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memq.client.consumer.batch import Damage, TopicPartition, topic_partition_of
from memq.client.consumer.fetch.cursor_outcomes import Copy, LeftOut, ReadyRange
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.fetch.pointer_slot import PointerSlot
from memq.client.consumer.progress import CommitLedger
from memq.format.report import BeginReason
from memq.topic import Committed, Position, Topic, TopicSettings


class ReadObserver(Protocol):
    """Observes the reading of one read partition, for the audit. The consumer does not depend on it."""

    def begin(self, at: Position, reason: BeginReason, before: Any = None) -> None:
        """Reading begins at a position, in place of the observer `before`."""
        ...

    def deliver(self, delivery: ReadyRange, now_ms: int) -> None:
        """A range is delivered to the user; `now_ms` is the wall clock (Unix ms)."""
        ...

    def leave_out(self, left_out: Iterable[LeftOut], now_ms: int) -> None:
        """Blocks without a wanted record are passed over."""
        ...

    def set_aside(self, position: Position) -> None:
        """A delivered record becomes a dead letter, or is parked: its commit says that it was passed over."""
        ...

    def drop_copies(self, copies: Iterable[Copy], now_ms: int) -> None:
        """Copies of delivered blocks are dropped."""
        ...

    def note_damage(self, writer: int, damage: Damage) -> None:
        """Delivered records turn out to be damaged."""
        ...

    def begin_storing(self) -> None:
        """A commit begins."""
        ...

    def store(self, committed: Committed, now_ms: int) -> None:
        """A position was committed."""
        ...

    def end_storing(self) -> None:
        """The commit has ended, or failed."""
        ...


class ConsumerObserver(Protocol):
    """Observes a consumer."""

    def reading(self, topic: Topic, writers: Sequence[int], *, commits: bool) -> ReadObserver | None:
        """Return the observer of a read partition that `writers` write to; None without one."""
        ...

    async def close(self, timeout_s: float | None) -> None:
        """Finish within `timeout_s`, or its own bound."""
        ...


@dataclass(slots=True)
class Assigned:
    """A partition from its opening until it is `removed`."""

    cursor: PartitionCursor
    settings: TopicSettings
    writers: list[int]  # the write partitions whose pointers go here
    grant: int = 0  # number of the assignment; batches that were read under an older one are dropped
    first_read: int = 0  # the first offset of which this reader reads all blocks
    ledger: CommitLedger = field(default_factory=CommitLedger)
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    removed: bool = False
    ended: bool = False  # a broker has answered that the topic has ended
    stalled: bool = False  # its next batch is asked for alone, apart from all other fetches
    fetches: int = 0  # number of current fetches
    fetched_s: float = 0.0  # when the last fetch ended, or the first began (monotonic)
    compared: PointerSlot | None = None  # the batch whose blocks are being compared
    observer: ReadObserver | None = None  # of the audit; None without one

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition in the type of the public API."""
        return topic_partition_of(self.cursor.partition)
