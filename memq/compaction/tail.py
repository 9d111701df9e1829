"""The end of a read partition that the next opening needs: retention and compaction keep it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from memq.format.pointer import Pointer, named_since_ms
from memq.format.totals import contended_ms
from memq.notification import Entry
from memq.topic import CLOCK_ERROR_MS, TopicSettings


class TailNeeds:
    """Takes the pointers of a read partition, in any number and in order.

    The last pointer of each write partition stays, with what settles its totals (`memq.format.totals`), and so does
    its last `opened` that names producers.
    """

    def __init__(self) -> None:
        self._last_ms: dict[int, int] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # epoch, and what its last pointer says of named producers

    def take(self, entry: Entry, pointer: Pointer) -> None:
        """Take the next pointer."""
        writer = pointer.partition
        self._last_ms[writer] = max(entry.time_ms, self._last_ms.get(writer, entry.time_ms))
        if pointer.epoch >= self._newest.get(writer, (0, 0))[0]:
            self._newest[writer] = (pointer.epoch, named_since_ms(pointer, entry.time_ms))

    def since_ms(self, settings: TopicSettings) -> Mapping[int, int]:
        """Return, by write partition, from which queue time on entries are needed."""
        settled_ms = contended_ms(settings.stale_publish_ms)
        return {
            writer: min(time_ms, self._newest[writer][1] or time_ms) - settled_ms
            for writer, time_ms in self._last_ms.items()
        }


def window_since_ms(settings: TopicSettings, now_ms: int) -> int:
    """Return from which queue time on the dedup window is rebuilt by an opening at `now_ms`."""
    return now_ms - settings.dedup_window_ms - CLOCK_ERROR_MS
