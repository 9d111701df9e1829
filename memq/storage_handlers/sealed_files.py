"""Reads a file of sealed JSON: what is in doubt is believed only when two fetches agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memq.format.sealed_json import is_sealed
from memq.storage_handlers import ObjectReader
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way

T = TypeVar("T")


async def read_sealed(
    store: ObjectReader, key: str, decode: Callable[[bytes, str], T], reads: ConfirmedReads | None = None
) -> tuple[T, bytes]:
    """Return the content of the file under a key, and its bytes.

    `decode` gets the bytes and the key, and raises CorruptDataError also for the content of another key.
    Raises: as `ConfirmedReads.read`.
    """

    async def once() -> bytes:
        data = await store.get(key)
        decode(data, key)
        return data

    data = await (reads or ConfirmedReads()).read([Way(f"object '{key}'", once)], is_sealed)
    return decode(data, key), data
