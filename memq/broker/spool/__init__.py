"""The spool: ack=1 blocks of `ack1 = "disk"` topics on local disk, until they are published.

This is the port to the disk. The segments outlive the process; after a start, the broker first brings their blocks to
the queue (`replay`). Topics without `ack1 = "disk"` do not use the spool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memq.storage_handlers import Buffer


class SpoolDisk(Protocol):
    """Segments by name, in one folder that only this process uses.

    Promises: after `append` has returned, its bytes survive a power loss, in order and unchanged, except for damage of
    the disk. A removed segment does not come back, or comes back whole.
    Non-promises: after an error of `append`, the segment may end with any part of the bytes. The caller appends nothing
    more to it.
    Raises: SpoolError, whose hint says how to repair the spool.
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
        """Move a segment to a path that `sizes` does not list; return the path, for the operator."""
        ...

    async def close(self) -> None:
        """Release the folder."""
        ...
