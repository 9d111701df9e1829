"""Combines reads of neighbouring ranges of one object within a loop turn into one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.errors import MemqError
from memq.format.blocks.header import Buffer
from memq.format.key import is_cold_object
from memq.limits import READ_BYTES_MAX


class RangeReader(Protocol):
    """Reads ranges of objects; a store handler is one. Raises: as `memq.storage_handlers.ObjectReader`."""

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One range, and who waits for it: for its bytes, or for None when he must read it alone."""

    offset: int
    length: int
    found: asyncio.Future[Buffer | None]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.length


class RangeCoalescer:
    """A `RangeReader` over another one. Of those who ask at once the first one reads for all.

    Batches of other objects are read each by itself: what lies next to them is another partition's.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._waiting: dict[str, list[_Wanted]] = {}

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `RangeReader.get_range`."""
        if not is_cold_object(key):
            return await self._reader.get_range(key, offset, length)
        wanted = _Wanted(offset, length, asyncio.get_running_loop().create_future())
        group = self._waiting.setdefault(key, [])
        group.append(wanted)
        if len(group) == 1:
            try:
                await asyncio.sleep(0)  # those who were started with this one ask before it continues
                del self._waiting[key]
                await asyncio.gather(*(self._read_run(key, run) for run in runs_of(group)))
            finally:
                if self._waiting.get(key) is group:
                    del self._waiting[key]
                for each in group:
                    if not each.found.done():
                        each.found.set_result(None)
        found = await wanted.found
        return await self._reader.get_range(key, offset, length) if found is None else found

    async def _read_run(self, key: str, run: Sequence[_Wanted]) -> None:
        """Read a run for all.

        When that fails each of them reads his own range, and learns what is wrong with it.
        """
        if len(run) == 1:
            return
        start = run[0].offset
        try:
            data = memoryview(await self._reader.get_range(key, start, run[-1].end - start))
        except MemqError:
            return
        for each in run:
            if not each.found.done():
                each.found.set_result(data[each.offset - start : each.end - start])


def runs_of(group: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Put ranges together that follow on each other, to at most READ_BYTES_MAX bytes."""
    runs: list[list[_Wanted]] = []
    for each in sorted(group, key=lambda wanted: wanted.offset):
        run = runs[-1] if runs else []
        if run and run[-1].end == each.offset and each.end - run[0].offset <= READ_BYTES_MAX:
            run.append(each)
        else:
            runs.append([each])
    return runs
