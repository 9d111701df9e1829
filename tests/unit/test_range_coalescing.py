"""Reads of neighbours in a large object are merged; after a failure each is read alone."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.consumer.fetch.fetcher import RangeCoalescer
from memq.errors import CorruptDataError, StoreError
from memq.format.key import large_object_key, object_key
from memq.limits import READ_BYTES_MAX

ID = "00112233445566778899aabbccddeeff"
LARGE = large_object_key("c", "clicks", ID, 1, 1_700_000_000_000)
SMALL = object_key("c", "clicks", ID, 0, 1, 2, 1_700_000_000_000)
DATA = bytes(range(256)) * 40


class Reader:
    """Counts reads; one that reaches over `bad` fails; with a gate reads wait for it."""

    def __init__(self, bad: int = -1) -> None:
        self.reads: list[tuple[int, int]] = []
        self.bad = bad
        self.gate: asyncio.Event | None = None

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        if self.gate is not None:
            await self.gate.wait()
        if offset <= self.bad < offset + length:
            raise CorruptDataError("it is damaged")
        return DATA[offset : offset + length] if length < READ_BYTES_MAX else bytes(length)


async def read(reader: Reader, *ranges: tuple[int, int], key: str = LARGE) -> list[bytes | BaseException]:
    joined = RangeCoalescer(reader)
    found = await asyncio.gather(*(joined.get_range(key, *each) for each in ranges), return_exceptions=True)
    return [each if isinstance(each, BaseException) else bytes(each) for each in found]


def test_neighbours_are_read_together_in_any_order_and_others_apart() -> None:
    reader = Reader()
    ranges = ((100, 50), (0, 100), (150, 10), (200, 5), (900, 1))
    assert asyncio.run(read(reader, *ranges)) == [DATA[at : at + size] for at, size in ranges]
    assert sorted(reader.reads) == [(0, 160), (200, 5), (900, 1)]


def test_batches_of_other_objects_are_read_each_by_itself() -> None:
    reader = Reader()
    asyncio.run(read(reader, (0, 10), (10, 10), key=SMALL))
    assert reader.reads == [(0, 10), (10, 10)]


def test_a_run_is_bounded() -> None:
    reader = Reader()
    half = READ_BYTES_MAX // 2
    asyncio.run(read(reader, (0, half), (half, half), (2 * half, half)))
    assert sorted(reader.reads) == [(0, 2 * half), (2 * half, half)]
    reader, far = Reader(), 3 * READ_BYTES_MAX
    asyncio.run(read(reader, (far, half), (far + half, half)))
    assert reader.reads == [(far, 2 * half)], "its place in the object is not its size"


def test_ranges_of_a_failed_joint_read_are_read_apart() -> None:
    reader = Reader(bad=15)
    first, second, third = asyncio.run(read(reader, (0, 10), (10, 10), (20, 10)))
    assert (first, third) == (DATA[:10], DATA[20:30])
    assert isinstance(second, CorruptDataError)
    assert reader.reads[0] == (0, 30)


def test_cancelled_range_leaves_the_others_their_own_reads() -> None:
    async def work() -> None:
        reader = Reader()
        joined = RangeCoalescer(reader)
        for turns in (0, 1, 2):
            reader.gate = asyncio.Event()
            tasks = [asyncio.create_task(joined.get_range(LARGE, at, 10)) for at in (0, 10, 20)]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[0].cancel()
            reader.gate.set()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(done[0], asyncio.CancelledError)
            assert [bytes(each) for each in done[1:] if not isinstance(each, BaseException)] == [
                DATA[10:20],
                DATA[20:30],
            ]

    asyncio.run(work())


def test_an_error_that_may_pass_is_raised_to_each() -> None:
    class Sick(Reader):
        async def get_range(self, key: str, offset: int, length: int) -> bytes:
            raise StoreError("not now")

    with pytest.raises(StoreError):
        raise asyncio.run(read(Sick(), (0, 10), (10, 10)))[1]  # type: ignore[misc]
