"""Whose records a damage is about: by the index, by the headers that are left, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from memq.audit.checks.object_reads import named, read_entries, read_headers
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import CorruptDataError
from memq.format.ranges import RangeSet
from memq.format.report import ReportedDamage
from tests.unit.audited import Run, stored

RUNS: list[Run] = [(5, 0, 10), (6, 0, 4), (5, 10, 20), (7, 0, 1)]


def damage(block: int, records: int) -> ReportedDamage:
    return ReportedDamage(object="o", block=block, offset=3, records=records, cause="cut")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("block", "records", "wanted"),
    [(0, 25, [0, 1, 2, 3]), (1, 15, [1, 2, 3]), (2, 11, [2, 3]), (3, 1, [3])],
    ids=["all", "from the second on", "two", "the last"],
)
def test_what_an_object_has_lost_at_its_end_is_named(cut: bool, block: int, records: int, wanted: list[int]) -> None:
    """By the index, where a broker still has it; else by the headers of what is left."""
    pointer, body = stored(RUNS)
    (location,) = pointer.locations
    entries = asyncio.run(read_entries(reader(body), location))
    if cut:
        entries = asyncio.run(read_headers(reader(body[: entries[block].offset + 10]), location, block))
        assert len(entries) == block
    found: dict[int, RangeSet] = {}
    for each in named(damage(block, records), pointer, entries):
        assert each.records == each.next - each.first
        found.setdefault(each.producer, RangeSet()).add(each.first, each.next)
    expected: dict[int, RangeSet] = {}
    for producer, first, next_ in (RUNS[at] for at in wanted):
        expected.setdefault(producer, RangeSet()).add(first, next_)
    assert found == expected


def test_one_block_is_named_by_the_index() -> None:
    pointer, body = stored(RUNS)
    entries = asyncio.run(read_entries(reader(body), pointer.locations[0]))
    (found,) = named(damage(1, 4), pointer, entries)
    assert (found.producer, found.first, found.next, found.records) == (6, 0, 4, 4)


def test_what_does_not_add_up_stays_unnamed() -> None:
    pointer, body = stored(RUNS)
    entries = asyncio.run(read_entries(reader(body), pointer.locations[0]))
    for unsure, known in ((damage(1, 14), entries[:1]), (damage(2, 11), entries[:1]), (damage(3, 1), ())):
        assert named(unsure, pointer, known) == [unsure]


def reader(body: bytes) -> ReadRange:
    """Return what reads ranges of one object."""

    async def read(store: str, key: str, offset: int, length: int) -> bytes:
        if offset + length > len(body):
            raise CorruptDataError(f"object '{key}' ends before {offset}+{length}")
        return body[offset : offset + length]

    return read
