"""The files of compacted parts in the store: the highest manifest, its parts, its successor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, DeniedError, NotFoundError, ObjectExistsError
from memq.format.cold import (
    ColdManifest,
    ColdPart,
    PartRef,
    decode_cold_manifest,
    decode_cold_part,
    encode_cold_manifest,
)
from memq.format.key import cold_manifest_key, cold_manifest_number, cold_manifest_prefix, cold_manifests_prefix
from memq.limits import MIB
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import ReadPartition

T = TypeVar("T")

PARTS_BYTES_MAX = 32 * MIB  # of pointers that are kept for the next reader


class ColdFiles:
    """Reads and writes the manifests of one cluster in one store. Raises: as the store; CorruptDataError."""

    def __init__(self, cluster: str, store: StorageHandler) -> None:
        self.cluster = cluster
        self._reads = ConfirmedReads()
        self.store = store
        self._parts: OrderedDict[str, tuple[ColdPart, int]] = OrderedDict()
        self._parts_bytes = 0

    def manifest_key(self, partition: ReadPartition, number: int) -> str:
        """Return the key of a manifest."""
        return cold_manifest_key(self.cluster, partition.topic, partition.topic_id, partition.partition, number)

    async def highest_number(self, partition: ReadPartition) -> int:
        """Return the number of the manifest that holds, 0 when there is none."""
        prefix = cold_manifest_prefix(self.cluster, partition.topic, partition.topic_id, partition.partition)
        numbers = [cold_manifest_number(entry.key)[1] async for entry in self.store.list(prefix)]
        return max(numbers, default=0)

    async def partitions(self, topic: str, topic_id: str) -> list[int]:
        """Return the read partitions of a topic that have a manifest, in order."""
        keys = [entry.key async for entry in self.store.list(cold_manifests_prefix(self.cluster, topic, topic_id))]
        return sorted({cold_manifest_number(key)[0] for key in keys})

    async def highest(self, partition: ReadPartition, known: ColdManifest | None = None) -> ColdManifest | None:
        """Return the manifest that holds, which may be `known`; None when nothing was ever compacted."""
        while True:
            number = await self.highest_number(partition)
            if known is not None and number == known.number:
                return known
            if not number:
                return None
            try:
                return await self._decoded(self.manifest_key(partition, number), decode_cold_manifest)
            except NotFoundError:
                continue  # a successor came, and a sweep after it

    async def seen(self, partition: ReadPartition, known: ColdManifest | None = None) -> ColdManifest | None:
        """Return the known manifest, for callers that continue where the store must not be listed.

        Compaction does not begin there: it lists first.
        """
        try:
            return await self.highest(partition, known)
        except DeniedError:
            return known

    async def publish(self, manifest: ColdManifest) -> bool:
        """Make a manifest the highest; say whether it is, or another one came first.

        Old numbers are swept, so a writer that slept could find its own free again: it looks once more. Raises:
        TooLargeError.
        """
        partition = ReadPartition(manifest.topic, manifest.topic_id, manifest.partition)
        data = encode_cold_manifest(manifest)
        try:
            await self.store.put(self.manifest_key(partition, manifest.number), [data], crc32c(data))
        except ObjectExistsError:
            return False
        return await self.highest_number(partition) == manifest.number

    async def _decoded(self, key: str, decode: Callable[[bytes], T]) -> T:
        """Return an object decoded, read again when it seems to be damaged or missing."""

        async def read() -> T:
            return decode(await self.store.get(key))

        return await self._reads.read([Way(f"object '{key}'", read)])

    async def part(self, ref: PartRef) -> ColdPart:
        """Return the content of a part; the last ones that were read are kept."""
        kept = self._parts.get(ref.key)
        if kept is not None:
            self._parts.move_to_end(ref.key)
            return kept[0]
        try:
            part = await self._decoded(ref.key, decode_cold_part)
        except NotFoundError as error:  # no partition is gone: a manifest names what nobody may delete
            raise CorruptDataError(f"part '{ref.key}' of a cold manifest is missing") from error
        size = sum(len(entry.body) for entry in part.entries)
        if ref.key not in self._parts:  # else another reader was faster
            self._parts[ref.key] = (part, size)
            self._parts_bytes += size
        while self._parts_bytes > PARTS_BYTES_MAX and len(self._parts) > 1:
            _, (_, gone) = self._parts.popitem(last=False)
            self._parts_bytes -= gone
        return part
