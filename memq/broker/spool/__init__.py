"""The spool: ack=1 blocks of `ack1 = "disk"` topics on local disk, until they are published.

This is the port to the disk. What is on it outlives the process; the first thing after a start is to bring it to the
queue (`replay`). A topic that does not ask for it costs the spool nothing, and nothing of the spool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memq.storage_handlers import Buffer


class SpoolDisk(Protocol):
    """Segments by name, in one folder that is this process's alone.

    Promises: what `append` has returned from survives the loss of power, in order and unchanged but for damage of the
    disk; a segment that is removed does not come back, or comes back whole.
    Non-promises: after an error of `append` the segment's end may hold any part of what was to be written: nothing
    more is appended to it.
    Raises: SpoolError, which says what to do.
    """

    async def sizes(self) -> dict[str, int]:
        """Return the names of all segments, oldest first, and how many bytes each has."""
        ...

    async def read(self, name: str) -> bytes:
        """Return a whole segment."""
        ...

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Append to a segment, creating it if needed; return when the bytes survive a power loss."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a segment; one that is gone is no error."""
        ...

    async def set_aside(self, name: str) -> str:
        """Keep a segment where `sizes` does not show it, and return where, for people."""
        ...

    async def close(self) -> None:
        """Let the folder go."""
        ...
