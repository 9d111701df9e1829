"""Published batches in memory: results of READ, order of eviction, and release of every slab."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition.recent_batch_cache import UNREAD_BOUNDS, UNREAD_SHARE, RecentBatch, RecentBatchCache
from memq.limits import KIB

SLAB = 4 * KIB


@dataclass
class Memory:
    """A pool, and batches cut out of its slabs."""

    pool: SlabPool = field(default_factory=lambda: SlabPool(64 * SLAB, SLAB))
    bytes: dict[str, bytes] = field(default_factory=dict)

    def batch(self, key: str, slabs: int, dice: random.Random) -> RecentBatch:
        """A batch of a few blocks in each of some slabs, which it holds one reference of each."""
        leased: list[Slab] = []
        views: list[memoryview] = []
        for _ in range(slabs):
            slab = self.pool.lease(SLAB)
            assert slab is not None
            leased.append(slab)
            slab.view[:] = dice.randbytes(SLAB)
            cuts = sorted(dice.sample(range(SLAB), 4))
            views += [slab.view[cuts[0] : cuts[1]], slab.view[cuts[2] : cuts[3]]]
        self.bytes[key] = b"".join(views)
        return RecentBatch(key, 0, views, leased, len(self.bytes[key]))


@given(seed=st.integers(0, 1 << 32))
def test_any_range_is_the_bytes_of_the_object(seed: int) -> None:
    dice, memory = random.Random(seed), Memory()
    cache = RecentBatchCache(64 * SLAB, memory.pool.release)
    cache.add(memory.batch("a", dice.randrange(1, 5), dice))
    whole = memory.bytes["a"]
    for _ in range(20):
        first, end = sorted(dice.choices(range(len(whole) + 1), k=2))
        assert cache.read("a", first, end - first) == whole[first:end]
    assert cache.read("a", 0, len(whole)) == whole
    assert cache.read("a", 1, len(whole)) is None, "the index is not here: the store has it"
    assert cache.read("b", 0, 1) is None


def test_the_oldest_go_first_and_each_slab_comes_back() -> None:
    dice, memory = random.Random(1), Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    for number in range(6):
        cache.add(memory.batch(f"{number}", 2, dice))
        assert cache.pinned_bytes <= cache.bytes_max
        assert memory.pool.leased_bytes == cache.pinned_bytes
    assert [cache.read(f"{number}", 0, 1) is not None for number in range(6)] == [False, False, True, True, True, True]
    cache.reclaim(1)
    assert cache.read("2", 0, 1) is None
    assert cache.read("3", 0, 1) is not None
    cache.clear()
    assert (cache.pinned_bytes, memory.pool.leased_bytes) == (0, 0)


def test_a_batch_above_the_bound_is_not_kept() -> None:
    memory = Memory()
    cache = RecentBatchCache(2 * SLAB, memory.pool.release)
    cache.add(memory.batch("a", 3, random.Random(1)))
    assert cache.read("a", 0, 1) is None
    assert memory.pool.leased_bytes == 0


def test_a_key_that_comes_again_replaces_what_was_there() -> None:
    dice, memory = random.Random(1), Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    cache.add(memory.batch("a", 2, dice))
    cache.add(memory.batch("a", 1, dice))
    assert cache.pinned_bytes == memory.pool.leased_bytes == SLAB
    assert cache.read("a", 0, len(memory.bytes["a"])) == memory.bytes["a"]


def test_read_of_the_cache_is_a_copy() -> None:
    memory = Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    batch = memory.batch("a", 1, random.Random(1))
    cache.add(batch)
    read = cache.read("a", 0, 9)
    batch.slabs[0].view[:] = bytes(SLAB)
    assert read == memory.bytes["a"][:9]


def test_while_nobody_reads_little_is_kept_and_the_next_read_ends_that() -> None:
    dice, memory = random.Random(2), Memory()
    cache = RecentBatchCache(2 * UNREAD_SHARE * SLAB, memory.pool.release)
    while sum(map(len, memory.bytes.values())) <= UNREAD_BOUNDS * cache.bytes_max:
        cache.add(memory.batch(f"{len(memory.bytes)}", 1, dice))
    assert (cache.pinned_bytes, memory.pool.leased_bytes) == (2 * SLAB, 2 * SLAB)
    assert cache.read("long gone", 0, 1) is None
    for number in range(3 * UNREAD_SHARE):
        cache.add(memory.batch(f"later {number}", 1, dice))
    assert cache.pinned_bytes == cache.bytes_max


def whole_slab(memory: Memory, key: str, offset: int = 0) -> RecentBatch:
    """A batch that is one slab."""
    slab = memory.pool.lease(SLAB)
    assert slab is not None
    slab.view[:] = random.Random(f"{key} {offset}").randbytes(SLAB)
    return RecentBatch(key, offset, [slab.view], [slab], SLAB)


def test_batches_of_one_object_are_read_each_and_go_alone() -> None:
    memory = Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    for offset in (0, SLAB):
        cache.add(whole_slab(memory, "a", offset))
    second = random.Random(f"a {SLAB}").randbytes(SLAB)
    assert cache.read("a", SLAB + 3, 5) == second[3:8]
    assert cache.read("a", SLAB - 1, 2) is None, "it lies in two"
    cache.reclaim(1)
    assert cache.read("a", 0, 1) is None
    assert cache.read("a", SLAB, SLAB) == second
    cache.clear()
    assert cache.read("a", SLAB, 1) is None


def test_no_more_goes_than_was_asked_for() -> None:
    memory = Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    for number in range(8):
        cache.add(whole_slab(memory, f"{number}"))
    cache.reclaim(SLAB)
    assert cache.pinned_bytes == 7 * SLAB


def test_unread_cache_shrinks_and_a_read_lets_it_grow_again() -> None:
    memory = Memory()
    cache = RecentBatchCache(8 * SLAB, memory.pool.release)
    for _ in range(2):
        for number in range(UNREAD_BOUNDS * 8):
            cache.add(whole_slab(memory, f"{number}"))
        assert cache.pinned_bytes == cache.bytes_max
        cache.add(whole_slab(memory, "one more"))
        assert cache.pinned_bytes <= cache.bytes_max // UNREAD_SHARE
        cache.read("none", 0, 1)
