"""How much of a truncated object can be read: every length between two bounds, with few reads."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import StoreError
from memq.runtime.clock import SystemClock
from memq.storage_handlers.confirmed_reads import reaches, readable_bytes
from memq.storage_handlers.memory import MemoryHandler


@given(st.integers(1, 5_000), st.data())
def test_any_length_is_found_in_few_reads(size: int, data: st.DataObject) -> None:
    low, high = data.draw(st.integers(0, size)), data.draw(st.integers(size + 1, 10_000))
    store = MemoryHandler(SystemClock())
    store.objects["cut"] = bytes(size)
    asked: list[int] = []

    async def read(offset: int, length: int) -> bytes:
        asked.append(offset)
        assert length == 1
        return await store.get_range("cut", offset, length)

    async def scenario() -> None:
        assert await readable_bytes(read, low, high) == size
        assert len(asked) <= (high - low).bit_length()
        assert await reaches(read, size)
        assert not await reaches(read, size + 1)

    asyncio.run(scenario())


def test_a_store_that_does_not_answer_says_nothing_of_the_length() -> None:
    async def read(_offset: int, _length: int) -> bytes:
        raise StoreError("not now")

    with pytest.raises(StoreError):
        asyncio.run(readable_bytes(read, 0, 100))
