"""The lists of a cluster's sweeps in its store: waiting objects, and objects that are kept.

Theory. One pass can be wrong: the queue has lost rows, the topic list or the listing is old. So a pass deletes no
object that it finds first. It writes a list, put if absent, and a pass `confirm_ms` later deletes the objects that it
finds again. In the time between these two readings, a loss shows and an operator can act. A list counts from the later
of its own time and the store's. An unreadable list of waiting objects confirms nothing; an unreadable list of kept
objects keeps everything below its prefix.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError, UnsupportedFormatError
from memq.format.key import (
    parse_sweep_list_key,
    sweep_digest,
    sweep_list_key,
    sweep_lists_prefix,
    sweep_prefix,
)
from memq.format.packed_file import LISTED_MAX, ListedObject, SweepList, decode_sweep_list, encode_sweep_list
from memq.storage_handlers import ObjectEntry, StorageHandler
from memq.topic import CLOCK_ERROR_MS

ALL = "all"


@dataclass(frozen=True, slots=True)
class PendingObject:
    """One object of a list: it waits since `since_ms` (Unix ms), or is `kept`."""

    found: ListedObject
    since_ms: int
    kept: bool


class SweepLists:
    """Reads and writes lists. `note` gets the fault of a list. Raises: as the store."""

    def __init__(self, cluster: str, store: StorageHandler, note: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._store = store
        self._note = note

    # ---- for a sweep ---------------------------------------------------------------------------

    async def pending(self) -> dict[str, list[ObjectEntry]]:
        """Return the lists of waiting objects by the digest of their prefix, before a pass adds its own."""
        lists: dict[str, list[ObjectEntry]] = {}
        async for entry in self._store.list(f"{sweep_prefix(self._cluster)}pending/"):
            named = parse_sweep_list_key(entry.key)
            if named is not None:
                lists.setdefault(named.digest, []).append(entry)
        return lists

    async def waiting(
        self, prefix: str, lists: Sequence[ObjectEntry], entries: dict[str, ObjectEntry], now_ms: int
    ) -> dict[str, int]:
        """Return since when (Unix ms) the objects of `entries` wait that are in `lists`.

        An object that was written after its list, or has another size, is another object. A list from the future does
        not count, because a clock was wrong.
        """
        since: dict[str, int] = {}
        for each in lists:
            found = await self._read(each.key, prefix)
            since_ms = _since_ms(each)
            if found is None or since_ms > now_ms + CLOCK_ERROR_MS:
                continue
            for listed in found.objects:
                entry = entries.get(listed.key)
                if entry is not None and entry.size == listed.size and entry.modified_ms <= since_ms:
                    since[listed.key] = min(since_ms, since.get(listed.key, since_ms))
        return since

    async def kept(self, prefix: str) -> Container[str] | None:
        """Return the keys below `prefix` that an operator keeps; None when a list of them can't be read.

        The store lists them twice: a pass deletes a kept object if its list is missing from the only listing.
        """
        keys: dict[str, None] = {}
        lists: dict[str, None] = {}
        for _ in range(2):
            async for entry in self._store.list(sweep_lists_prefix(self._cluster, prefix, kept=True)):
                lists[entry.key] = None
        for key in lists:
            found = await self._read(key, prefix)
            if found is None:
                return None
            keys |= dict.fromkeys(listed.key for listed in found.objects)
        return keys

    async def add(self, prefix: str, objects: Sequence[ListedObject], since_ms: int, *, kept: bool = False) -> None:
        """Store lists of objects below `prefix`, with LISTED_MAX objects each."""
        for first in range(0, len(objects), LISTED_MAX):
            found = SweepList(
                cluster=self._cluster,
                prefix=prefix,
                since_ms=since_ms,
                kept=kept,
                objects=tuple(objects[first : first + LISTED_MAX]),
            )
            data = encode_sweep_list(found)
            await self._store.put(
                sweep_list_key(self._cluster, prefix, since_ms, data, kept=kept), [data], crc32c(data)
            )

    async def drop(self, lists: dict[str, list[ObjectEntry]], before_ms: int) -> None:
        """Delete the lists that are due: their objects are deleted by now, or have a pointer again."""
        for each in lists.values():
            for entry in each:
                if _since_ms(entry) <= before_ms:
                    await self._store.delete(entry.key)

    async def _read(self, key: str, prefix: str) -> SweepList | None:
        """Return a list of objects below `prefix` ("": of any), None when it can't be read."""
        named = parse_sweep_list_key(key)
        try:
            found = decode_sweep_list(await self._store.get(key))
            content = (found.cluster, found.kept, sweep_digest(found.prefix), found.since_ms)
            if named is None or content != (self._cluster, named.kept, named.digest, named.since_ms):
                raise CorruptDataError(f"list of a sweep says cluster '{found.cluster}' and prefix '{found.prefix}'")
            if prefix not in ("", found.prefix):
                raise CorruptDataError(f"list of a sweep is of '{found.prefix}', not of '{prefix}'")
        except (CorruptDataError, NotFoundError, UnsupportedFormatError) as error:
            if named is not None and not named.kept and isinstance(error, NotFoundError):
                return None  # another sweep was faster
            self._note(f"'{key}' can't be read, so nothing goes by it: {error}")
            return None
        return found

    # ---- for an operator -----------------------------------------------------------------------

    async def all(self) -> AsyncIterator[PendingObject]:
        """Yield all objects that wait or are kept, by list; an object in two lists comes twice."""
        async for entry in self._store.list(sweep_prefix(self._cluster)):
            found = await self._read(entry.key, "") if parse_sweep_list_key(entry.key) else None
            for listed in found.objects if found is not None else ():
                yield PendingObject(listed, _since_ms(entry), found is not None and found.kept)

    async def keep(self, key: str, now_ms: int) -> list[ListedObject]:
        """Keep one waiting object, or ALL of them; return the kept ones.

        Raises: InvalidRequestError when no object with this key waits.
        """
        taken: list[ListedObject] = []
        for lists in (await self.pending()).values():
            for entry in lists:
                found = await self._read(entry.key, "")
                objects = [each for each in found.objects if key in (ALL, each.key)] if found is not None else []
                if found is not None and objects:
                    await self.add(found.prefix, objects, now_ms, kept=True)
                    taken += objects
        if not taken and key != ALL:
            raise InvalidRequestError(
                f"no sweep has found '{key[:300]}' without a pointer",
                hint="memq sweep --pending lists the waiting objects",
            )
        return taken

    async def release(self, key: str, now_ms: int) -> list[ListedObject]:
        """Let sweeps find one kept object again, or ALL of them; return the released ones.

        Raises: InvalidRequestError when no object with this key is kept.
        """
        released: list[ListedObject] = []
        async for entry in self._store.list(f"{sweep_prefix(self._cluster)}kept/"):
            found = await self._read(entry.key, "")
            objects = [each for each in found.objects if key in (ALL, each.key)] if found is not None else []
            if found is not None and objects:
                left = [each for each in found.objects if each not in objects]
                await self.add(found.prefix, left, now_ms, kept=True)
                await self._store.delete(entry.key)
                released += objects
        if not released and key != ALL:
            raise InvalidRequestError(f"'{key[:300]}' is not kept", hint="memq sweep --pending lists the kept objects")
        return released


def _since_ms(entry: ObjectEntry) -> int:
    """Return the time from which a list counts (Unix ms): a wrong clock makes it later, never earlier."""
    named = parse_sweep_list_key(entry.key)
    assert named is not None, f"'{entry.key}' is no list"
    return max(named.since_ms, entry.modified_ms)
