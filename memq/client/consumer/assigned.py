"""One assigned partition of a consumer: its cursor, its ledger of commits, and its tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from memq.client.consumer.fetch.partition_cursor import PartitionCursor, PointerSlot
from memq.client.consumer.group.ledger import CommitLedger
from memq.client.consumer.record import TopicPartition, place_of
from memq.client.observers.read_recorder import ReadRecorder
from memq.topic import TopicSettings


@dataclass(slots=True)
class Assigned:
    """The partition, from the moment it is read until it is `removed`."""

    flow: PartitionCursor
    settings: TopicSettings
    writers: list[int]  # the write partitions whose pointers go here
    grant: int = 0  # of the partition to this member: all that is read under an older one is void
    ledger: CommitLedger = field(default_factory=CommitLedger)
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    removed: bool = False
    stalled: bool = False  # its next batch is asked for alone, apart from all other fetches
    fetches: int = 0  # under way
    fetched_s: float = 0.0  # when the last of them ended, or the first began (monotonic)
    compared: PointerSlot | None = None  # the batch whose blocks are being compared
    tally: ReadRecorder | None = None  # what the audit is to be told of it, where it wants to know

    @property
    def place(self) -> TopicPartition:
        """The partition as users name it."""
        return place_of(self.flow.partition)
