"""The events of a run: one rolling hash over all of them, and the last ones in words."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_FLUSH_STEPS = 1 << 13


class Trace:
    """Folds events into a hash. Two runs are the same when their hashes are: same seed, same trace.

    Of callbacks, only the times are folded, after the number of their node; their effects show in later events. The
    loop of the world appends the times to `steps` itself, because a call for each took a tenth of a run.
    Words must not have addresses or other parts that differ between processes.
    """

    def __init__(self, echo: Callable[[str], None] | None = None, *, recent_max: int = 200) -> None:
        self.events = 0
        self.steps = array("d")
        self.recent: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=recent_max)
        self._hash = hashlib.sha256()
        self._waiting = bytearray()
        self._echo = echo

    def turn(self, node: int) -> None:
        """Fold the number of the node whose callbacks follow."""
        if len(self.steps) >= _FLUSH_STEPS:
            self._flush()
        self.steps.append(-1.0 - node)

    def event(self, now: float, what: str, *details: object) -> None:
        """Fold one event in words; `details` are written by `str`."""
        self.events += 1
        entry = (now, what, details)
        self.recent.append(entry)
        _ENCODER.encode_into(entry, self._waiting, -1)
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
        self._hash.update(self.steps)
        self._hash.update(self._waiting)
        self.steps = array("d")
        self._waiting.clear()


def _line(now: float, what: str, details: tuple[object, ...]) -> str:
    return f"{now:12.6f} {what} {' '.join(map(str, details))}".rstrip()
