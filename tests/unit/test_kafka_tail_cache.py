"""The cache of the newest entries: no gap, no entry that is gone, and never more bytes than its budget."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from memq.notification import Entry
from memq.notification.kafka.reading.tail_cache import ENTRY_BYTES, TailCache
from memq.topic import ReadPartition

A, B = ReadPartition("clicks", "0a" * 16, 0), ReadPartition("clicks", "0a" * 16, 1)
ALL = 1 << 30


def filled(bytes_max: int = ALL, first: int = 10, count: int = 4) -> TailCache:
    """Return a cache with entries of two bytes in partition A."""
    cache = TailCache(bytes_max)
    for offset in range(first, first + count):
        cache.add(A, entry(offset))
    return cache


def entry(offset: int, mark: bytes = b"") -> Entry:
    return Entry(offset, 0, b"%d" % offset + mark)


def offsets(cache: TailCache, offset: int, bytes_max: int = ALL, partition: ReadPartition = A) -> list[int]:
    return [found.offset for found in cache.read(partition, offset, bytes_max)]


def test_entries_that_are_not_cached_are_not_answered() -> None:
    cache = filled()
    assert [offsets(cache, offset) for offset in (10, 12, 13)] == [[10, 11, 12, 13], [12, 13], [13]]
    assert [offsets(cache, offset) for offset in (9, 14, 99)] == [[], [], []]
    assert offsets(cache, 10, partition=B) == []
    assert cache.bytes == 4 * (ENTRY_BYTES + 2)


def test_a_read_is_as_large_as_asked_for_and_has_an_entry() -> None:
    cache = filled()
    assert [offsets(cache, 10, size) for size in (0, 1, 2, 3, 4, 5)] == [[10]] * 4 + [[10, 11]] * 2
    cache.add(B, Entry(0, 0, b""))
    cache.add(B, Entry(1, 0, b""))
    assert offsets(cache, 0, 0, B) == [0, 1], "they have no bytes"


def test_a_gap_begins_a_new_run() -> None:
    cache = filled()
    cache.add(A, entry(15))
    assert [offsets(cache, offset) for offset in (10, 13, 14, 15)] == [[], [], [], [15]]
    assert cache.bytes == ENTRY_BYTES + 2


def test_an_entry_that_comes_again_changes_nothing() -> None:
    cache = filled()
    for offset in (10, 13, 9):
        cache.add(A, entry(offset))
        assert (offsets(cache, 10), cache.bytes) == ([10, 11, 12, 13], 4 * (ENTRY_BYTES + 2))


def test_another_entry_at_a_known_offset_ends_the_run_before_it() -> None:
    for offset in (10, 12, 13):
        cache = filled()
        cache.add(A, entry(offset, b"+"))
        assert {each: offsets(cache, each) for each in range(9, 15) if offsets(cache, each)} == {offset: [offset]}
        assert [found.body for found in cache.read(A, offset, ALL)] == [b"%d+" % offset]
        assert cache.bytes == ENTRY_BYTES + 3


def test_a_trim_takes_the_front_and_no_more() -> None:
    cache = filled()
    cache.trim(B, 12)
    cache.trim(A, 10)
    assert offsets(cache, 10) == [10, 11, 12, 13]
    cache.trim(A, 12)
    assert [offsets(cache, offset) for offset in (10, 11, 12)] == [[], [], [12, 13]]
    assert cache.bytes == 2 * (ENTRY_BYTES + 2)
    cache.add(A, entry(14))
    assert offsets(cache, 12) == [12, 13, 14]
    cache.trim(A, 20)
    assert ([offsets(cache, offset) for offset in (14, 15, 20)], cache.bytes) == ([[], [], []], 0)
    cache.add(A, entry(17))
    assert ([offsets(cache, 17), offsets(cache, 20)], cache.bytes) == ([[], []], 0), "it is below the begin"
    cache.add(A, entry(20))
    assert offsets(cache, 20) == [20]


def test_a_dropped_partition_takes_no_bytes_and_nothing_from_others() -> None:
    cache = filled()
    cache.add(B, entry(10))
    cache.drop(A)
    cache.drop(A)
    assert ([offsets(cache, offset) for offset in (10, 13)], cache.bytes) == ([[], []], ENTRY_BYTES + 2)
    assert offsets(cache, 10, partition=B) == [10]


def test_a_full_cache_forgets_the_entries_that_were_added_first() -> None:
    size = ENTRY_BYTES + 2
    cache = filled(4 * size)
    assert (offsets(cache, 10), cache.bytes) == ([10, 11, 12, 13], 4 * size), "all of the budget is used"
    cache.add(B, entry(10))
    assert ([offsets(cache, offset) for offset in (10, 11)], cache.bytes) == ([[], [11, 12, 13]], 4 * size)
    cache.trim(A, 12)
    cache.add(B, entry(11))
    cache.add(B, entry(12))
    assert (offsets(cache, 12), offsets(cache, 13), offsets(cache, 10, partition=B)) == ([], [13], [10, 11, 12])
    cache.drop(A)
    for offset in (13, 14, 15):
        cache.add(B, entry(offset))
    assert offsets(cache, 12, partition=B) == [12, 13, 14, 15]
    cache.add(A, Entry(0, 0, bytes(5 * size)))
    assert (offsets(cache, 0), offsets(cache, 15, partition=B), cache.bytes) == ([], [], 0), "it is too large"
    cache.add(A, entry(1))
    assert offsets(cache, 1) == [1]


def test_a_cache_whose_entries_are_trimmed_as_they_come_stays_small() -> None:
    """The order of additions also has entries that are gone: an owner that trims would use more and more memory."""
    cache = filled(count=2_000)
    tracemalloc.start()
    begin_bytes = tracemalloc.get_traced_memory()[0]
    cache.drop(A)
    for offset in range(5_000):
        cache.add(B, Entry(offset, 0, b""))
        cache.trim(B, offset + 1)
    taken_bytes = tracemalloc.get_traced_memory()[0] - begin_bytes
    tracemalloc.stop()
    assert taken_bytes < 250_000, "5,000 places in the order take 500 KB"


def test_entries_that_are_gone_do_not_change_the_order_in_which_others_are_forgotten() -> None:
    cache = filled(4 * (ENTRY_BYTES + 2))
    for offset in range(2_000):
        cache.add(B, Entry(offset, 0, b""))
        cache.trim(B, offset + 1)
    for offset in (2_000, 2_001):
        cache.add(B, Entry(offset, 0, b"20"))
    assert (offsets(cache, 11), offsets(cache, 12)) == ([], [12, 13])
    assert offsets(cache, 2_000, partition=B) == [2_000, 2_001]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([A, B]), st.integers(0, 12)),
        st.tuples(st.just("trim"), st.sampled_from([A, B]), st.integers(0, 12)),
        st.tuples(st.just("drop"), st.sampled_from([A, B]), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 8))
def test_tail_cache_has_no_gap_and_stays_within_its_bytes(
    steps: list[tuple[str, ReadPartition, int]], room: int
) -> None:
    size = ENTRY_BYTES + 10
    cache = TailCache(room * size)
    added: Mapping[ReadPartition, set[int]] = {A: set(), B: set()}
    for what, partition, offset in steps:
        if what == "add":
            cache.add(partition, Entry(offset, 0, b"%010d" % offset))
            added[partition].add(offset)
        elif what == "trim":
            cache.trim(partition, offset)
        else:
            cache.drop(partition)
            added[partition].clear()
        assert 0 <= cache.bytes <= room * size
        for each in (A, B):
            for start in range(13):
                found = cache.read(each, start, ALL)
                assert [entry.offset for entry in found] == list(range(start, start + len(found)))
                assert all(entry.offset in added[each] and entry.body == b"%010d" % entry.offset for entry in found)


def test_the_cache_forgets_what_is_oldest() -> None:
    cache = TailCache(3 * (ENTRY_BYTES + 1))
    for offset, partition in enumerate((A, B, A, B)):
        cache.add(partition, Entry(offset // 2, 0, b"x"))
    assert [len(cache.read(partition, 0, ALL)) for partition in (A, B)] == [0, 2]
    assert [entry.offset for entry in cache.read(A, 1, ALL)] == [1]
    assert len(cache.read(B, 0, 0)) == 1
    cache.trim(B, 2)
    assert cache.read(B, 1, ALL) == ()


def test_the_cache_forgets_the_lost_end_of_a_log_that_grows_again() -> None:
    """Else a reader would get the lost entries, and skip the new ones at their offsets."""
    cache = TailCache(ALL)
    for offset in range(4):
        cache.add(A, Entry(offset, 0, b"lost %d" % offset))
    cache.add(A, Entry(2, 0, b"lost 2"))
    assert len(cache.read(A, 0, ALL)) == 4
    for offset in (2, 3):
        cache.add(A, Entry(offset, 0, b"new %d" % offset))
    assert cache.read(A, 0, ALL) == ()
    assert [entry.body for entry in cache.read(A, 2, ALL)] == [b"new 2", b"new 3"]


def test_the_cache_forgets_a_lost_end_that_begins_before_what_it_has() -> None:
    """A reader that has read the new entries up to there would get the lost ones next."""
    cache = TailCache(ALL)
    for offset in (4, 5):
        cache.add(A, Entry(offset, 1_000, b"lost"))
    cache.add(A, Entry(3, 900, b"late"))
    assert len(cache.read(A, 4, ALL)) == 2, "the answer to an earlier publish came later"
    cache.add(A, Entry(3, 1_001, b"new"))
    assert cache.read(A, 4, ALL) == ()
    assert [entry.body for entry in cache.read(A, 3, ALL)] == [b"new"]
