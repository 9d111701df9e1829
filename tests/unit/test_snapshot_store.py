"""Snapshots that no entry names: the last whole one of a listing that may lack keys. On virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from memq.errors import CorruptDataError
from memq.format.key import state_part_key, state_prefix, state_snapshot_key
from memq.format.state_log.snapshot import SavedState
from memq.state_log.snapshot_store import FoundSnapshot, SnapshotStore
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from tests.skipping_loop import LoopClock, run_skipping

PLACE = ("memq", "_memq_state", "ab" * 16, 3)


class Listing(MemoryHandler):
    """A store whose listings leave out keys: for each listing those that end so."""

    def __init__(self, *left_out: str) -> None:
        super().__init__(LoopClock())
        self.left_out = list(left_out)
        self.listings = 0

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        self.listings += 1
        left_out = self.left_out.pop(0) if self.left_out else ""
        async for entry in super().list(prefix):
            if not left_out or left_out not in entry.key:
                yield entry


def key(epoch: int, offset: int) -> str:
    return state_snapshot_key(*PLACE, epoch, offset)


def saved(epoch: int, offset: int) -> SavedState:
    return SavedState(offset, epoch, 2, {"slots": b"state %d" % offset})


async def last(store: Listing, *places: tuple[int, int], gone: str = "", damaged: str = "") -> FoundSnapshot:
    """Store snapshots, change some, and return the last whole one."""
    snapshots = SnapshotStore(store)
    for epoch, offset in places:
        await snapshots.put(saved(epoch, offset), key(epoch, offset))
    if damaged:
        data = store.objects[state_part_key(damaged, 0)]
        store.objects[state_part_key(damaged, 0)] = data[:-1] + bytes((data[-1] ^ 1,))
    get = store.get

    async def found(name: str, *, checked: bool = True) -> bytes:
        if gone and name.startswith(gone):
            store.objects.pop(name, None)  # a sweep was faster
        return await get(name, checked=checked)

    store.get = found  # type: ignore[method-assign, assignment]
    return await snapshots.last(state_prefix(*PLACE))


def test_a_store_without_snapshots_has_none() -> None:
    store = Listing()
    assert run_skipping(last(store)) == FoundSnapshot(None, 0, [])
    assert store.listings == 2


@pytest.mark.parametrize("left_out", [("000009",), ("", "000009"), ("000009", "000007")])
def test_a_key_that_one_of_two_listings_shows_is_found(left_out: tuple[str, ...]) -> None:
    store = Listing(*left_out)
    found = run_skipping(last(store, (2, 7), (2, 9)))
    assert found.stored_ms, "the time of its object"
    assert found == FoundSnapshot(saved(2, 9), 2, [], found.stored_ms)


def test_a_snapshot_that_is_gone_or_damaged_is_a_fault_and_the_one_before_it_counts() -> None:
    for changed in ({"gone": key(3, 9)}, {"damaged": key(3, 9)}):
        found = run_skipping(last(Listing(), (2, 8), (1, 20), (3, 9), **changed))
        assert (found.saved, found.highest_epoch) == (saved(2, 8), 3)
        assert [name for name, _ in found.faults] == [key(3, 9)]
    found = run_skipping(last(Listing(), (3, 9), damaged=key(3, 9)))
    assert (found.saved, found.highest_epoch, len(found.faults)) == (None, 3, 1)


def test_a_snapshot_that_is_read_back_with_another_content_is_not_named() -> None:
    async def work() -> None:
        store = Listing()
        get = store.get

        async def other(name: str, *, checked: bool = True) -> bytes:
            return await get(name.replace("000008", "000007"), checked=checked)

        store.get = other  # type: ignore[method-assign, assignment]
        snapshots = SnapshotStore(store)
        await snapshots.put(saved(1, 7), key(1, 7))
        with pytest.raises(CorruptDataError):
            await snapshots.put(saved(1, 8), key(1, 8))

    run_skipping(work())


def test_a_snapshot_that_a_store_answers_with_in_place_of_another_is_not_believed() -> None:
    store = Listing()
    get = store.get
    wanted, other = state_part_key(key(2, 9), 0), state_part_key(key(2, 7), 0)

    async def foreign(name: str, *, checked: bool = True) -> bytes:
        return await get(other if name == wanted else name, checked=checked)

    async def work() -> FoundSnapshot:
        snapshots = SnapshotStore(store)
        for offset in (7, 9):
            await snapshots.put(saved(2, offset), key(2, offset))
        store.get = foreign  # type: ignore[method-assign, assignment]
        return await snapshots.last(state_prefix(*PLACE))

    found = run_skipping(work())
    assert (found.saved, found.faults) == (
        saved(2, 7),
        [(key(2, 9), f"snapshot '{key(2, 9)}' is of epoch 2 and offset 7")],
    )
