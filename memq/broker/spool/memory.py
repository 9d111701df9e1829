"""The spool's disk in memory, for tests: it survives its broker, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from memq.storage_handlers import Buffer


class MemorySpool:
    """See `memq.broker.spool.SpoolDisk`."""

    def __init__(self) -> None:
        self.segments: dict[str, bytearray] = {}
        self.aside: dict[str, bytearray] = {}

    async def sizes(self) -> dict[str, int]:
        """See `SpoolDisk.sizes`."""
        return {name: len(data) for name, data in sorted(self.segments.items())}

    async def read(self, name: str) -> bytes:
        """See `SpoolDisk.read`."""
        return bytes(self.segments[name])

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """See `SpoolDisk.append`."""
        data = self.segments.setdefault(name, bytearray())
        for buffer in buffers:
            data += buffer

    async def remove(self, name: str) -> None:
        """See `SpoolDisk.remove`."""
        self.segments.pop(name, None)

    async def set_aside(self, name: str) -> str:
        """See `SpoolDisk.set_aside`."""
        self.aside[name] = self.segments.pop(name)
        return name

    async def close(self) -> None:
        """See `SpoolDisk.close`."""
