"""The log of compacted partitions: files of moved pointers, read with the queue as one log.

Theory. A manifest is stored before its pointers leave the queue. So when the queue begins after the end of the
manifest that a reader knows, a higher manifest has the entries between. Entries that are both in a manifest and in the
queue are equal. An earlier manifest stays valid, except for entries that retention removed. Its objects remain only for
the sweep's safety age, so readers ask for a higher manifest periodically.

If Kafka has cut a log below the end of its manifest, entries of both differ. Then the queue is right from its first
offset on (`is_overwritten`).

When the queue begins after the end of the highest manifest, retention was faster than the compaction. Retention has
removed the entries between, and so all older ones, though that manifest still names them. No reader begins there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.errors import CorruptDataError, DeniedError, NotFoundError, ObjectExistsError
from memq.format.compaction_manifest import (
    CompactionManifest,
    ManifestPart,
    PartRef,
    decode_compaction_manifest,
    decode_manifest_part,
    encode_compaction_manifest,
)
from memq.format.key import (
    compaction_manifest_key,
    compaction_manifest_number,
    compaction_manifest_prefix,
    compaction_manifests_prefix,
)
from memq.format.pointer import Pointer, pointer_mark, read_pointer
from memq.limits import MIB
from memq.notification import Entries, Entry, PointerReader, Span
from memq.runtime.clock import Clock
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import ReadPartition

T = TypeVar("T")

PARTS_BYTES_MAX = 32 * MIB  # cached pointers of parts
REFRESH_S = 30.0
REPEAT_S_MAX = 3_600.0
FIRST_NUMBER = 1  # of a manifest
PARTITIONS_MAX = 4_096  # with a cached manifest


class ManifestFiles:
    """Reads and writes the manifests of one cluster in one store. Raises: as the store; CorruptDataError."""

    def __init__(self, cluster: str, store: StorageHandler) -> None:
        self.cluster = cluster
        self._reads = ConfirmedReads()
        self.store = store
        self._parts: OrderedDict[str, tuple[ManifestPart, int]] = OrderedDict()
        self._parts_bytes = 0

    def manifest_key(self, partition: ReadPartition, number: int) -> str:
        """Return the key of a manifest."""
        return compaction_manifest_key(self.cluster, partition.topic, partition.topic_id, partition.partition, number)

    async def highest_number(self, partition: ReadPartition) -> int:
        """Return the number of the highest manifest, 0 when there is none."""
        prefix = compaction_manifest_prefix(self.cluster, partition.topic, partition.topic_id, partition.partition)
        numbers = [compaction_manifest_number(entry.key)[1] async for entry in self.store.list(prefix)]
        return max(numbers, default=0)

    async def partitions(self, topic: str, topic_id: str) -> list[int]:
        """Return the read partitions of a topic that have a manifest, in order."""
        keys = [
            entry.key async for entry in self.store.list(compaction_manifests_prefix(self.cluster, topic, topic_id))
        ]
        return sorted({compaction_manifest_number(key)[0] for key in keys})

    async def highest(
        self, partition: ReadPartition, known: CompactionManifest | None = None
    ) -> CompactionManifest | None:
        """Return the highest manifest, which may be `known`; None when nothing was ever compacted.

        A listing may omit manifests. So the next number is read by its key, and if it exists, the manifests are listed
        again. Number 1 is never deleted: a listing that omits all manifests is noticed.
        """
        while True:
            number = await self.highest_number(partition)
            if known is None or number > known.number:
                try:
                    known = await self._numbered(partition, number) if number else None
                except NotFoundError:
                    continue  # a sweep deleted it after a successor was stored
            following = self.manifest_key(partition, known.number + 1 if known is not None else FIRST_NUMBER)
            try:
                with suppress(CorruptDataError):  # one answer proves no damage
                    await self.store.get(following)
            except NotFoundError:
                return known
            with suppress(NotFoundError):
                known = await self._decoded(following, decode_compaction_manifest)

    async def _numbered(self, partition: ReadPartition, number: int) -> CompactionManifest:
        return await self._decoded(self.manifest_key(partition, number), decode_compaction_manifest)

    async def seen(
        self, partition: ReadPartition, known: CompactionManifest | None = None
    ) -> CompactionManifest | None:
        """Return the highest manifest; `known` when the store denies the listing.

        Only readers may continue so. A compaction must list the manifests first.
        """
        try:
            return await self.highest(partition, known)
        except DeniedError:
            return known

    async def publish(self, manifest: CompactionManifest) -> bool:
        """Store a manifest; return whether it is the highest. False means that another one came first.

        The sweep deletes old manifests, so a writer that paused could find its number free again. Therefore the
        manifests are listed after the put. Raises: TooLargeError.
        """
        partition = ReadPartition(manifest.topic, manifest.topic_id, manifest.partition)
        data = encode_compaction_manifest(manifest)
        try:
            await self.store.put(self.manifest_key(partition, manifest.number), [data], crc32c(data))
        except ObjectExistsError:
            return False
        return await self.highest_number(partition) == manifest.number

    async def _decoded(self, key: str, decode: Callable[[bytes], T]) -> T:
        """Return the decoded object; read it again when it seems to be damaged or missing."""

        async def read() -> T:
            return decode(await self.store.get(key))

        return await self._reads.read([Way(f"object '{key}'", read)])

    async def part(self, ref: PartRef) -> ManifestPart:
        """Return the content of a part; the last ones are cached. Raises: CorruptDataError if it is missing."""
        kept = self._parts.get(ref.key)
        if kept is not None:
            self._parts.move_to_end(ref.key)
            return kept[0]
        try:
            part = await self._decoded(ref.key, decode_manifest_part)
        except NotFoundError as error:  # not a deleted partition: no process may delete what a manifest names
            raise CorruptDataError(f"part '{ref.key}' of a manifest is missing") from error
        size = sum(len(entry.body) for entry in part.entries)
        if ref.key not in self._parts:  # a concurrent reader may have cached it
            self._parts[ref.key] = (part, size)
            self._parts_bytes += size
        while self._parts_bytes > PARTS_BYTES_MAX and len(self._parts) > 1:
            _, (_, gone) = self._parts.popitem(last=False)
            self._parts_bytes -= gone
        return part


async def is_overwritten(
    queue: PointerReader, files: ManifestFiles, partition: ReadPartition, manifest: CompactionManifest
) -> bool:
    """Whether the queue has, or will have, other pointers at offsets of a manifest.

    Kafka may cut a log below the pointers that a compaction has copied; new pointers then get their offsets. Only the
    last pointer is compared: a log that has it has all before it. Raises: as the queue and the store.
    """
    span = await queue.span(partition)
    if not manifest.parts or span.begin >= manifest.next:
        return False
    if span.end < manifest.next:
        return True
    try:
        last = (await files.part(manifest.parts[-1])).entries[-1]
    except CorruptDataError:
        return False  # its readers report it
    found = await queue.read(partition, last.offset, 1)
    stored, moved = (read_pointer(body, newer="return") for body in (found[0].body if found else b"", last.body))
    if not (found and found[0].offset == last.offset and isinstance(stored, Pointer) and isinstance(moved, Pointer)):
        return False
    return pointer_mark(stored) != pointer_mark(moved)


@dataclass(frozen=True, slots=True)
class _KnownManifest:
    """The known state of a partition: manifest, the part of it that is right, reach, time (monotonic s).

    It suffices for queues that begin at `reach` or before. While the manifest ends before there, since `apart_s`,
    listings may have omitted a higher one: they are repeated, at last once an hour.
    """

    manifest: CompactionManifest | None
    valid: CompactionManifest | None
    reach: int
    seen_s: float
    apart_s: float | None = None

    def suffices(self, begin: int, now_s: float) -> bool:
        """Whether it is known what lies before the queue's first offset `begin`."""
        if self.apart_s is None or begin > self.reach:
            return begin <= self.reach
        return now_s < self.seen_s + min(max(REFRESH_S, self.seen_s - self.apart_s), REPEAT_S_MAX)


class CompactedLogReader:
    """A `PointerReader` over a queue and the manifests of its compacted partitions. Raises: as both."""

    def __init__(self, queue: PointerReader, files: ManifestFiles, clock: Clock) -> None:
        self._queue = queue
        self._files = files
        self._clock = clock
        self._known: OrderedDict[ReadPartition, _KnownManifest] = OrderedDict()

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        known = self._known.get(partition)
        if known is not None and known.valid is not None and offset < known.valid.next == known.reach:
            if self._clock.monotonic() >= known.seen_s + REFRESH_S:
                known = await self._find_manifest(partition, known.reach)
            found = await self._read_compacted(known.valid, offset, bytes_max)
            if found is not None:
                return found
        entries = await self._queue.read(partition, offset, bytes_max)
        if (entries[0].offset if entries else entries.next) <= max(offset, 0):
            return entries
        begin = (await self._queue.span(partition)).begin
        found = await self._read_compacted(await self._joined(partition, begin), offset, bytes_max)
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

    async def manifest(self, partition: ReadPartition, begin: int, age_s: float) -> CompactionManifest | None:
        """Return the manifest as it was at most `age_s` ago; `begin` is the queue's first offset."""
        known = self._known.get(partition)
        if known is None or self._clock.monotonic() >= known.seen_s + age_s:
            known = await self._find_manifest(partition, begin)
        return known.manifest

    def forget(self, partition: ReadPartition) -> None:
        """Drop the cached manifest, because a newer one exists."""
        self._known.pop(partition, None)

    async def _joined(self, partition: ReadPartition, begin: int) -> CompactionManifest | None:
        """Return a manifest that reaches `begin`, where the queue continues."""
        manifest = await self._manifest(partition, begin)
        return manifest if manifest is not None and manifest.parts and manifest.next >= begin else None

    async def _manifest(self, partition: ReadPartition, begin: int) -> CompactionManifest | None:
        """Return the known or highest manifest; None when there is none, or no entry has left the queue."""
        known = self._known.get(partition)
        if begin == 0 and known is None:
            return None  # nothing has left the queue so far
        if known is None or not known.suffices(begin, self._clock.monotonic()):
            known = await self._find_manifest(partition, begin)
        return known.valid

    async def _find_manifest(self, partition: ReadPartition, begin: int) -> _KnownManifest:
        known = self._known.get(partition)
        now_s = self._clock.monotonic()
        manifest = await self._files.seen(partition, known.manifest if known is not None else None)
        valid = manifest
        behind = known is None and manifest is not None and begin >= manifest.next
        if manifest and not behind and await is_overwritten(self._queue, self._files, partition, manifest):
            valid = _below(manifest, (await self._queue.span(partition)).begin)
        end, apart_s = valid.next if valid is not None else 0, None
        if begin > end:
            apart_s = now_s if known is None or known.apart_s is None else known.apart_s
        found = _KnownManifest(manifest, valid, max(begin, end), now_s, apart_s)
        self._known[partition] = found
        self._known.move_to_end(partition)
        if len(self._known) > PARTITIONS_MAX:
            self._known.popitem(last=False)
        return found

    async def _read_compacted(self, manifest: CompactionManifest | None, offset: int, bytes_max: int) -> Entries | None:
        """Return entries from `offset` on of the part that has the next one; None if the queue has it."""
        part = part_at(manifest, offset) if manifest is not None else None
        if part is None:
            return None
        entries = (await self._files.part(part)).entries
        found: list[Entry] = []
        size = 0
        for entry in entries[bisect_left(entries, offset, key=lambda each: each.offset) :]:
            if entry.offset >= part.next:
                break
            size += len(entry.body)
            if found and size > bytes_max:
                break
            found.append(Entry(*entry))
        return Entries(found, found[-1].offset + 1) if found else None


def part_at(manifest: CompactionManifest, offset: int) -> PartRef | None:
    """Return the part that has an offset, or the next one after it."""
    at = bisect_left(manifest.parts, offset, key=lambda part: part.next - 1)
    return manifest.parts[at] if at < len(manifest.parts) else None


def _below(manifest: CompactionManifest, end: int) -> CompactionManifest:
    """Return the manifest without its entries from offset `end` on."""
    parts = tuple(replace(part, next=min(part.next, end)) for part in manifest.parts if part.first < end)
    return replace(manifest, next=min(manifest.next, end), parts=parts)
