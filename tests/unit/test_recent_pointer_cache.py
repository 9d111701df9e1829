"""Pointers that a broker has just published: what POLL gets from memory, and what is forgotten."""

from __future__ import annotations

from memq.broker.partition.recent_pointer_cache import RecentPointer, RecentPointerCache
from memq.format.pointer import Location
from memq.notification import Entry, Span
from tests.contract.queues import part

PLACE = Location(store="main", key="a", offset=0, length=9)


def pointer(offset: int, size: int = 10, text: bytes = b"p") -> RecentPointer:
    return RecentPointer(Entry(offset, offset, text * size), PLACE)


def offsets(cache: RecentPointerCache, offset: int, bytes_max: int = 1_000) -> list[int]:
    return [each.entry.offset for each in cache.run(part(0), offset, bytes_max)]


def filled(*numbers: int, bytes_max: int = 1_000) -> RecentPointerCache:
    cache = RecentPointerCache(bytes_max)
    for number in numbers:
        cache.add(part(0), pointer(number))
    return cache


def test_a_run_ends_at_an_offset_that_another_broker_may_have_used() -> None:
    cache = filled(3, 4, 6)
    assert offsets(cache, 3) == [3, 4]
    assert offsets(cache, 6) == [6]
    assert offsets(cache, 2) == offsets(cache, 5) == offsets(cache, 7) == []
    assert cache.span(part(0), 3) == Span(3, 7)
    assert cache.span(part(0), 5) is None
    assert cache.span(part(1), 3) is None


def test_a_run_has_as_many_bytes_as_are_wanted_and_at_least_one_pointer() -> None:
    cache = filled(0, 1, 2)
    assert [offsets(cache, 0, wanted) for wanted in (1, 10, 19, 20, 30)] == [[0], [0], [0], [0, 1], [0, 1, 2]]


def test_the_oldest_pointers_leave_when_the_bytes_are_used_up() -> None:
    cache = filled(0, 1, bytes_max=30)
    cache.add(part(1), pointer(7))
    cache.add(part(1), pointer(8))
    assert offsets(cache, 0) == []
    assert offsets(cache, 1) == [1]
    for offset in range(9, 12):
        cache.add(part(1), pointer(offset))
    assert cache.span(part(0), 1) is None
    assert [each.entry.offset for each in cache.run(part(1), 9, 1_000)] == [9, 10, 11]


def test_a_log_that_was_cut_is_forgotten() -> None:
    cache = filled(4, 5, 6)
    cache.add(part(0), pointer(5, text=b"other"))
    assert offsets(cache, 4) == offsets(cache, 6) == []
    assert [each.entry.body[:5] for each in cache.run(part(0), 5, 1_000)] == [b"other"]
    assert cache.span(part(0), 5) == Span(5, 6)


def test_pointers_at_whose_offsets_the_log_has_others_are_forgotten() -> None:
    """Kafka answered a wrong offset: also the later ones may be wrong."""
    cache = filled(4, 5, 6)
    cache.add(part(1), pointer(5))
    cache.compare(part(0), [Entry(3, 3, b"other"), pointer(4).entry, pointer(6).entry, Entry(7, 7, b"other")])
    cache.compare(part(2), [Entry(5, 5, b"other")])
    assert offsets(cache, 4) == [4, 5, 6]
    cache.compare(part(0), [pointer(4).entry, Entry(5, 5, b"other")])
    assert [cache.find(part(0), offset) for offset in (4, 5, 6)] == [None] * 3
    assert cache.find(part(1), 5) is not None


def test_a_partition_is_forgotten_alone() -> None:
    cache = filled(4)
    cache.add(part(1), pointer(4))
    cache.forget(part(0))
    cache.forget(part(2))
    assert cache.find(part(0), 4) is None
    assert cache.find(part(1), 4) is not None
    cache.add(part(0), pointer(1))
    assert offsets(cache, 1) == [1], "a lower offset follows"


def test_a_log_that_loses_its_last_pointer_again_and_again_takes_no_memory() -> None:
    cache = filled(*[5] * 10, bytes_max=20)
    cache.add(part(0), pointer(6))
    assert offsets(cache, 5) == [5, 6]
