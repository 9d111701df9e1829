"""Retention may remove old entries, too many, and those that an operator truncates; never the last pointer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memq.simulation.world.node import EPOCH_MS
from memq.topic import ReadPartition, TopicSettings
from tests.simulation.reader import LogEntry


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The settings of topics, how far the wall clocks of two machines may be apart, and orders to truncate."""

    settings: TopicSettings
    clock_error_ms: int
    others: dict[str, TopicSettings] = field(default_factory=dict)  # of topics with settings of their own, by id
    orders: dict[ReadPartition, int] = field(default_factory=dict)  # the greatest offset before which all may go

    committed: dict[tuple[str, ReadPartition], int] = field(default_factory=dict)  # the greatest offset of each group

    def commit(self, group: str, partition: ReadPartition, offset: int) -> None:
        """Note that a group has committed all pointers below an offset."""
        self.committed[group, partition] = max(offset, self.committed.get((group, partition), 0))

    def _unread(self, partition: ReadPartition, groups: Sequence[str]) -> int:
        """Return the first offset that a group, for which retention waits, has not committed."""
        return min((self.committed.get((group, partition), 0) for group in groups), default=1 << 52)

    def order(self, partition: ReadPartition, before: int) -> None:
        """Note that an operator truncates a log; the request may land later."""
        self.orders[partition] = max(before, self.orders.get(partition, 0))

    def findings(
        self, partition: ReadPartition, taken: Sequence[LogEntry], left: Sequence[LogEntry], now_s: float
    ) -> Iterator[str]:
        """Yield each rule that retention broke: it took `taken` at `now_s` (virtual time), and left `left`."""
        settings = self.others.get(partition.topic_id, self.settings)
        now_ms = EPOCH_MS + now_s * 1000 + self.clock_error_ms
        bytes_left = sum(entry.pointer.stored_bytes for entry in left)
        by_size = 0 < settings.retention_bytes <= bytes_left
        least_ms = min(
            settings.retention_ms or 1 << 52, settings.dedup_window_ms if by_size else 1 << 52
        )  # an opening reads the dedup window, whatever the bound in bytes
        ordered_ms = min(least_ms, settings.dedup_window_ms)
        unread = self._unread(partition, settings.waits_for)
        for entry in taken:
            stays_ms = max(least_ms, settings.retention_groups_ms_max if entry.offset >= unread else 0)
            stays_ms = ordered_ms if entry.offset < self.orders.get(partition, 0) else stays_ms
            if entry.time_ms > now_ms - stays_ms:
                yield f"pointer {entry.offset} is taken {now_ms - entry.time_ms:.0f} ms old, {stays_ms} ms must stay"
        for writer in dict.fromkeys(entry.pointer.partition for entry in taken):
            if all(entry.pointer.partition != writer for entry in left):
                yield f"the last pointer of write partition {writer} is taken"
