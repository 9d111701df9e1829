"""The disk of each host for the spool. It outlives processes; bytes without an fsync may be lost.

Names may be lost, too: a removed segment may reappear, until the folder is synced for a new one. For minutes,
a disk may be full, read-only, or fail to sync.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memq.errors import SpoolError
from memq.storage_handlers import Buffer

SICKNESSES = ("full", "read-only", "no-sync")
BACK_RATE = 0.3  # share of segments with an unsynced removal that reappear


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """Faults of a disk: durations of calls, and rates of writes that fail before or after their effect."""

    latency_s_max: float = 0.005
    sync_s_max: float = 0.02
    before_rate: float = 0.0
    after_rate: float = 0.0


@dataclass(slots=True)
class DiskFile:
    """One file: the written bytes, and how many of them are durable."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0


@dataclass(slots=True)
class HostDisk:
    """The files of one host."""

    files: dict[str, DiskFile] = field(default_factory=dict)
    removed: dict[str, DiskFile] = field(default_factory=dict)  # since the last sync of the folder
    aside: dict[str, bytes] = field(default_factory=dict)
    sickness: str = ""  # until `sick_until_s` (virtual)
    sick_until_s: float = 0.0

    def fail_until(self, kind: str, until_s: float) -> None:
        """Let calls fail in the way `kind` until `until_s` (virtual)."""
        self.sickness, self.sick_until_s = kind, until_s

    def lose_power(self, draw: random.Random) -> None:
        """Lose a part of the bytes that were not fsynced; sometimes zeros replace lost bytes."""
        for name, file in list(self.files.items()):
            kept = draw.randint(file.synced, len(file.data))
            lost = len(file.data) - kept
            del file.data[kept:]
            if lost and draw.random() < 0.3:
                file.data += bytes(draw.randint(0, lost))
            if not file.synced and draw.random() < 0.5:
                del self.files[name]
            file.synced = len(file.data)
        for name, file in self.removed.items():
            if draw.random() < BACK_RATE:
                self.files[name] = file
        self.removed.clear()


class SimDisk:
    """See `memq.broker.spool.SpoolDisk`: one process's door to the disk of its host."""

    def __init__(self, host: HostDisk, faults: DiskFaults, draw: random.Random, now: Callable[[], float]) -> None:
        host.lose_power(draw)
        self._now = now
        self._host = host
        self._faults = faults
        self._draw = draw

    async def sizes(self) -> dict[str, int]:
        """See `SpoolDisk.sizes`."""
        await self._wait(self._faults.latency_s_max)
        return {name: len(file.data) for name, file in sorted(self._host.files.items())}

    async def read(self, name: str) -> bytes:
        """See `SpoolDisk.read`."""
        await self._wait(self._faults.latency_s_max)
        return bytes(self._host.files[name].data)

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """See `SpoolDisk.append`: the buffers are read during the call."""
        fate = self._draw.random()
        self._check_writable()
        new = name not in self._host.files
        file = self._host.files.setdefault(name, DiskFile())
        for buffer in buffers:
            if self._draw.random() < 0.1:
                await self._wait(self._faults.latency_s_max)
            file.data += buffer
        if fate < self._faults.before_rate or self._is("full"):
            del file.data[self._draw.randint(file.synced, len(file.data)) :]
            raise SpoolError("the disk is full")
        await self._wait(self._faults.sync_s_max)
        if fate < self._faults.before_rate + self._faults.after_rate or self._is("no-sync"):
            raise SpoolError("the disk failed to sync")
        file.synced = len(file.data)
        if new:
            self._host.removed.clear()

    async def remove(self, name: str) -> None:
        """See `SpoolDisk.remove`."""
        await self._wait(self._faults.latency_s_max)
        self._check_writable()
        file = self._host.files.pop(name, None)
        if file is not None and file.synced:
            self._host.removed[name] = file

    async def set_aside(self, name: str) -> str:
        """See `SpoolDisk.set_aside`."""
        await self._wait(self._faults.latency_s_max)
        self._check_writable()
        self._host.aside[name] = bytes(self._host.files.pop(name).data)
        return name

    async def close(self) -> None:
        """See `SpoolDisk.close`."""

    def _is(self, sickness: str) -> bool:
        return self._host.sickness == sickness and self._now() < self._host.sick_until_s

    def _check_writable(self) -> None:
        if self._is("read-only"):
            raise SpoolError("the disk is read-only")

    async def _wait(self, seconds_max: float) -> None:
        await asyncio.sleep(self._draw.uniform(0, seconds_max))
