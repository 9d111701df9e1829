"""The mark of a cluster's store: a small object in it, and the same text at the coordinator.

A broker whose setting `store` names another bucket, prefix or folder than the cluster's would put batches where no
reader finds them. So both sides carry a random mark, written once at a first start and compared at each start (ADR 18).
The object is written first: a coordinator never knows a mark that no store has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, InvalidRequestError, InvalidSettingError, NotFoundError, ObjectExistsError
from memq.format.key import store_mark_key
from memq.governor import MarkedCoordinator
from memq.storage_handlers import StorageHandler

_MARK = re.compile(r"[0-9a-f]{32}\Z")
MISSING_READS = 3  # reads before a mark that the coordinator has counts as missing: one answer proves little


@dataclass(frozen=True, slots=True)
class StoreMarks:
    """Both marks; "" for a missing one."""

    known: str  # to the coordinator
    found: str  # in the store

    @property
    def differ(self) -> bool:
        """Whether the store is not the cluster's."""
        return bool(self.known) and self.found != self.known


class StoreMark:
    """Compares and writes the marks of one store."""

    def __init__(self, cluster: str, store: StorageHandler, coordinator: MarkedCoordinator) -> None:
        self._cluster = cluster
        self._key = store_mark_key(cluster)
        self._store = store
        self._coordinator = coordinator

    async def read(self) -> StoreMarks:
        """Return both marks and change nothing. Raises: as store and coordinator; CorruptDataError."""
        known = await self._coordinator.store_mark()
        found = await self._found()
        for _ in range(MISSING_READS - 1 if known and not found else 0):
            found = found or await self._found()
        return StoreMarks(known, found)

    async def compare(self) -> None:
        """Raise InvalidSettingError when this is another store than the cluster's; as `read`."""
        marks = await self.read()
        if marks.differ:
            there = f"has the mark {marks.found}" if marks.found else "has no mark"
            raise InvalidSettingError(
                f"store '{self._store.url}' {there}, and the store of cluster '{self._cluster}' has {marks.known}",
                hint="correct the setting store; if all objects were moved there, stop all brokers and run "
                "memq accept-store --dry-run",
            )

    async def settle(self, random: Random) -> None:
        """Compare the marks and write missing ones: of a new cluster, or of one older than the marks."""
        await self.compare()
        marks = await self.read()
        if not marks.known:
            await self._coordinator.store_mark(marks.found or await self._make(random))
            await self.compare()  # another broker may have been faster, with another store

    async def accept(self, random: Random) -> StoreMarks:
        """Make this store the cluster's; return the old marks. Raises: InvalidRequestError; as `read`."""
        marks = await self.read()
        live = [broker.id for broker in await self._coordinator.brokers()]
        if live:
            raise InvalidRequestError(
                f"brokers {', '.join(live)} are running with the cluster's present store",
                hint="stop all brokers first, then copy the objects that they wrote last",
            )
        await self._coordinator.store_mark(marks.found or await self._make(random), before=marks.known)
        await self.compare()
        return marks

    async def _make(self, random: Random) -> str:
        """Write a mark into the store, unless another broker was faster; return the mark in the store."""
        data = f"{random.getrandbits(128):032x}".encode()
        try:
            await self._store.put(self._key, [data], crc32c(data))
        except ObjectExistsError:
            return await self._found()
        return data.decode()

    async def _found(self) -> str:
        try:
            text = (await self._store.get(self._key)).decode(errors="replace")
        except NotFoundError:
            return ""
        if not _MARK.match(text):
            raise CorruptDataError(f"object '{self._key}' in '{self._store.url}' is no mark of a store: {text[:40]!a}")
        return text
