"""The entries that retention may remove: old ones, and those beyond the size; never the last pointer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memq.simulation.world.node import EPOCH_MS
from memq.topic import TopicSettings
from tests.simulation.reader import LogEntry


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The settings of the topic, and how far the wall clocks of two machines may be apart."""

    settings: TopicSettings
    clock_error_ms: int

    def findings(self, taken: Sequence[LogEntry], left: Sequence[LogEntry], now_s: float) -> Iterator[str]:
        """Yield each rule that retention broke: it took `taken` at `now_s` (virtual time), and left `left`."""
        settings = self.settings
        now_ms = EPOCH_MS + now_s * 1000 + self.clock_error_ms
        bytes_left = sum(entry.pointer.stored_bytes for entry in left)
        by_size = 0 < settings.retention_bytes <= bytes_left
        least_ms = min(
            settings.retention_ms or 1 << 52, settings.dedup_window_ms if by_size else 1 << 52
        )  # an opening reads the dedup window, whatever the bound in bytes
        for entry in taken:
            if entry.time_ms > now_ms - least_ms:
                yield f"pointer {entry.offset} is taken {now_ms - entry.time_ms:.0f} ms old, {least_ms} ms must stay"
        for partition in dict.fromkeys(entry.pointer.partition for entry in taken):
            if all(entry.pointer.partition != partition for entry in left):
                yield f"the last pointer of write partition {partition} is taken"
