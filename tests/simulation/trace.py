"""What happened in a run: one rolling hash over every event, and the last events in words for people."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable

_STEP = struct.Struct("<id")
_FLUSH_BYTES = 1 << 16


class Trace:
    """Folds events into a hash. Two runs are the same when their hashes are: same seed, same trace.

    Callbacks are folded as (node, time) only, 12 bytes each: what they do shows in the events that follow.
    Words must not hold addresses or anything else that differs between processes.
    """

    def __init__(self, echo: Callable[[str], None] | None = None, *, recent_max: int = 200) -> None:
        self.events = 0
        self.recent: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=recent_max)
        self._hash = hashlib.sha256()
        self._waiting = bytearray()
        self._echo = echo

    def step(self, node: int, now: float) -> None:
        """Fold one callback of a node."""
        self.events += 1
        waiting = self._waiting
        waiting += _STEP.pack(node, now)
        if len(waiting) >= _FLUSH_BYTES:
            self._flush()

    def event(self, now: float, what: str, *details: object) -> None:
        """Fold one event in words; `details` are written by `str`."""
        self.events += 1
        self.recent.append((now, what, details))
        self._waiting += f"{now!r} {what} {details}\n".encode()
        if self._echo is not None:
            self._echo(_line(now, what, details))

    def hash(self) -> str:
        """Return the hash of everything so far, in hex."""
        self._flush()
        return self._hash.copy().hexdigest()

    def words(self) -> list[str]:
        """Return the last events, a line each, oldest first."""
        return [_line(*entry) for entry in self.recent]

    def _flush(self) -> None:
        self._hash.update(self._waiting)
        self._waiting.clear()


def _line(now: float, what: str, details: tuple[object, ...]) -> str:
    return f"{now:12.6f} {what} {' '.join(map(str, details))}".rstrip()
