"""Reads a whole log: moved pointers from the manifest, the others from the queue.

Theory. A manifest is stored before its pointers leave the queue. So who finds the queue's first offset beyond what he
knows of the cold part finds the manifest that has the rest, and what lies below a manifest's end is the same in both
as long as it is in both. A manifest that is not the highest any more is still true but for what retention took, and
what it names stays for the sweep's safety age: it is checked again now and then.

Where the queue begins behind a manifest's end, retention was faster than the compaction: it has taken what lies
between, and with it all that is older, though a manifest that it has not met still names that. No reader begins there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

from memq.compaction.files import ColdFiles
from memq.format.cold import ColdManifest, PartRef
from memq.notification import Entries, Entry, PointerReader, Span
from memq.runtime.clock import Clock
from memq.topic import ReadPartition

REFRESH_S = 30.0
PARTITIONS_MAX = 4_096  # whose manifests are kept


@dataclass(frozen=True, slots=True)
class _Known:
    """The known state of a partition: manifest, queue offset it suffices for, time (monotonic s)."""

    manifest: ColdManifest | None
    reach: int
    seen_s: float


class ColdReader:
    """A `PointerReader` over a queue and the manifests of its cold parts. Raises: as both."""

    def __init__(self, queue: PointerReader, files: ColdFiles, clock: Clock) -> None:
        self._queue = queue
        self._files = files
        self._clock = clock
        self._known: OrderedDict[ReadPartition, _Known] = OrderedDict()

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        known = self._known.get(partition)
        if known is not None and known.manifest is not None and offset < known.manifest.next == known.reach:
            if self._clock.monotonic() >= known.seen_s + REFRESH_S:
                known = await self._look(partition, known.reach)
            found = await self._read_cold(known.manifest, offset, bytes_max)
            if found is not None:
                return found
        entries = await self._queue.read(partition, offset, bytes_max)
        if (entries[0].offset if entries else entries.next) <= max(offset, 0):
            return entries
        begin = (await self._queue.span(partition)).begin
        found = await self._read_cold(await self._joined(partition, begin), offset, bytes_max)
        return entries if found is None else found

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        span = await self._queue.span(partition)
        manifest = await self._joined(partition, span.begin)
        return Span(manifest.begin, span.end) if manifest is not None else span

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        begin = (await self._queue.span(partition)).begin
        manifest = await self._joined(partition, begin)
        for part in manifest.parts if manifest is not None else ():
            if part.greatest_ms >= time_ms:
                content = await self._files.part(part)
                return next((entry.offset for entry in content.entries if entry.time_ms >= time_ms), part.next)
        found = await self._queue.seek_time(partition, time_ms)
        return found if manifest is None else max(found, manifest.next)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        await self._queue.wait(ends, timeout_s)

    # ---- manifests -------------------------------------------------------------------------------

    async def manifest(self, partition: ReadPartition, begin: int, age_s: float) -> ColdManifest | None:
        """Return the manifest as it was at most `age_s` ago; `begin` is the queue's first offset."""
        known = self._known.get(partition)
        if known is None or self._clock.monotonic() >= known.seen_s + age_s:
            known = await self._look(partition, begin)
        return known.manifest

    def forget(self, partition: ReadPartition) -> None:
        """Read again, since a newer manifest exists."""
        self._known.pop(partition, None)

    async def _joined(self, partition: ReadPartition, begin: int) -> ColdManifest | None:
        """Return a manifest that reaches `begin`, where the queue continues."""
        manifest = await self._manifest(partition, begin)
        return manifest if manifest is not None and manifest.parts and manifest.next >= begin else None

    async def _manifest(self, partition: ReadPartition, begin: int) -> ColdManifest | None:
        """Return a manifest that reaches the queue's first offset.

        The result is None when retention alone can have moved that.
        """
        known = self._known.get(partition)
        if begin == 0 and known is None:
            return None  # nothing has left the queue so far
        if known is None or begin > known.reach:
            known = await self._look(partition, begin)
        return known.manifest

    async def _look(self, partition: ReadPartition, begin: int) -> _Known:
        known = self._known.get(partition)
        now_s = self._clock.monotonic()
        manifest = await self._files.seen(partition, known.manifest if known is not None else None)
        found = _Known(manifest, max(begin, manifest.next if manifest is not None else 0), now_s)
        self._known[partition] = found
        self._known.move_to_end(partition)
        if len(self._known) > PARTITIONS_MAX:
            self._known.popitem(last=False)
        return found

    async def _read_cold(self, manifest: ColdManifest | None, offset: int, bytes_max: int) -> Entries | None:
        """Return entries of the part that has `offset` or what comes next; None when that is the queue's."""
        part = part_at(manifest, offset) if manifest is not None else None
        if part is None:
            return None
        entries = (await self._files.part(part)).entries
        found: list[Entry] = []
        size = 0
        for entry in entries[bisect_left(entries, offset, key=lambda each: each.offset) :]:
            size += len(entry.body)
            if found and size > bytes_max:
                break
            found.append(Entry(*entry))
        return Entries(found, found[-1].offset + 1) if found else None


def part_at(manifest: ColdManifest, offset: int) -> PartRef | None:
    """Return the part that has an offset, or the next one behind it."""
    at = bisect_left(manifest.parts, offset, key=lambda part: part.next - 1)
    return manifest.parts[at] if at < len(manifest.parts) else None
