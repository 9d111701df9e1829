"""Stores, reads and deletes the snapshots of state logs, in parts (S7)."""

from __future__ import annotations

from typing import NamedTuple

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, NotFoundError
from memq.format.key import parse_state_key, state_part_key
from memq.format.state_log.entry import StateSnapshot
from memq.format.state_log.snapshot import SavedState, decode_part, decode_snapshot, encode_snapshot, snapshot_of
from memq.runtime.logs import EventLog
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way


class FoundSnapshot(NamedTuple):
    """The last whole snapshot of a log, if any; the highest epoch; the faults of later ones, by key.

    It was stored at `stored_ms` of the store's clock (Unix ms).
    """

    saved: SavedState | None
    highest_epoch: int
    faults: list[tuple[str, str]]
    stored_ms: int = 0


class SnapshotStore:
    """The snapshots in one store. Raises: as `ObjectWriter`, and `ConfirmedReads.read`."""

    def __init__(self, store: StorageHandler, events: EventLog | None = None) -> None:
        self._store = store
        self._events = events

    async def put(self, saved: SavedState, key: str) -> StateSnapshot:
        """Store a snapshot, read it back, and return the content of the entry that may name it.

        The log is trimmed because of this snapshot: a store that lost it, or changed it, would lose the state.
        Raises: CorruptDataError if the stored bytes have another content.
        """
        snapshot, parts = encode_snapshot(saved, key)
        for number, part in enumerate(parts):
            await self._store.put(state_part_key(key, number), [part], crc32c(part))
        if await self.get(snapshot) != saved:
            raise CorruptDataError(f"snapshot '{key}' was stored with another content")
        return snapshot

    async def get(self, snapshot: StateSnapshot) -> SavedState:
        """Return the content of a snapshot. Raises: NotFoundError when several reads do not find it."""

        async def once() -> SavedState:
            keys = [state_part_key(snapshot.key, number) for number in range(snapshot.parts)]
            return decode_snapshot(snapshot, [decode_part(await self._store.get(key)) for key in keys])

        return await ConfirmedReads(self._events).read([Way(f"snapshot '{snapshot.key}'", once)])

    async def last(self, prefix: str) -> FoundSnapshot:
        """Return the last whole snapshot below the prefix of a state log, also if no entry names it.

        Raises: as the store; UnsupportedFormatError.
        """
        parts = await self._listed(prefix)
        found = FoundSnapshot(None, max((epoch for epoch, _, _ in parts), default=0), [])
        for (_, _, key), numbers in sorted(parts.items(), reverse=True):
            try:
                saved = await self._get_unnamed(key, len(numbers))
                return found._replace(saved=saved, stored_ms=min(numbers.values()))
            except (CorruptDataError, NotFoundError) as error:
                found.faults.append((key, str(error)))
        return found

    async def all(self, prefix: str) -> list[SavedState]:
        """Return all snapshots below the prefix of a state log.

        Raises: CorruptDataError or NotFoundError if one can't be read now; as `last`.
        """
        listed = await self._listed(prefix)
        return [await self._get_unnamed(key, len(numbers)) for (_, _, key), numbers in listed.items()]

    async def _listed(self, prefix: str) -> dict[tuple[int, int, str], dict[int, int]]:
        """Return the parts of all snapshots, with their times.

        They are listed twice, because a store may leave out keys.
        """
        parts: dict[tuple[int, int, str], dict[int, int]] = {}
        for _ in range(2):
            async for entry in self._store.list(prefix):
                place = parse_state_key(entry.key)
                if place is not None:
                    key = entry.key.rpartition("/")[0]
                    parts.setdefault((place.epoch, place.offset, key), {})[place.part] = entry.modified_ms
        return parts

    async def _get_unnamed(self, key: str, parts: int) -> SavedState:
        async def once() -> SavedState:
            keys = [state_part_key(key, number) for number in range(parts)]
            first, second = [[await self._store.get(each) for each in keys] for _ in range(2)]
            if first != second:  # the snapshot of another log is sound, too, and may have the same place
                raise CorruptDataError(f"snapshot '{key}' had two contents")
            pieces = [decode_part(each) for each in first]
            saved, place = decode_snapshot(snapshot_of(key, pieces), pieces), parse_state_key(f"{key}/0000")
            if place is None or (saved.epoch, saved.offset) != (place.epoch, place.offset):
                raise CorruptDataError(f"snapshot '{key}' is of epoch {saved.epoch} and offset {saved.offset}")
            return saved

        return await ConfirmedReads(self._events).read([Way(f"snapshot '{key}'", once)])

    async def delete(self, snapshot: StateSnapshot) -> None:
        """Delete a snapshot, part by part."""
        for number in range(snapshot.parts):
            await self._store.delete(state_part_key(snapshot.key, number))
