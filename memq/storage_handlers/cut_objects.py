"""Finds the readable length of an object that is too short, by reads alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from memq.errors import CorruptDataError

ReadPart = Callable[[int, int], Awaitable[object]]  # `length` bytes from `offset`; raises as `ObjectReader.get_range`


async def reaches(read: ReadPart, size: int) -> bool:
    """Whether at least `size` bytes exist, found by reading the last of them.

    Raises: as `read`, but no CorruptDataError.
    """
    try:
        await read(size - 1, 1)
    except CorruptDataError:
        return False
    return True


async def readable_bytes(read: ReadPart, low: int, high: int) -> int:
    """Return how many bytes are there, by halving: `low` are, `high` are not. Raises: as `reaches`."""
    while high - low > 1:
        middle = (low + high) // 2
        if await reaches(read, middle):
            low = middle
        else:
            high = middle
    return low
