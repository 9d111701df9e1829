"""Reads that report damage, short or missing objects only if independent fetches agree.

Theory. Bytes change between a store and its reader: in memory, in a proxy, in a cache. A store answers 404 for an
object that it has, cuts a body short, or sends another object. The stored object is not damaged then, and a reader
that skips it loses sound records. A second fetch distinguishes the two cases. Stored damage comes again, byte for
byte; an error on the way does not come again, or comes with other bytes.

=================================  =======================================================================
an answer                          what follows
=================================  =======================================================================
whole                              it is returned; doubtful answers before it were changed on the way
damaged, or short                  fetched again; two equal answers of one source are the stored bytes
missing                            fetched again; missing when all ways reported it `MISSING_ROUNDS` times, and for
                                   `missing_s`. A consumer that would skip the object asks for 30 s
an error of another kind           the way is ignored in this round
different each time                after `ROUNDS_MAX` rounds StoreError: the state is unknown, and may pass
=================================  =======================================================================

One fetch never proves damage or absence: `read_index` and `read_batch_entries` fetch again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import Generic, TypeVar

from memq.errors import (
    CorruptDataError,
    DeniedError,
    MemqError,
    NotFoundError,
    RetryableError,
    StoreError,
    UnsupportedFormatError,
)
from memq.format.batch import counts_all
from memq.format.blocks.header import Buffer
from memq.format.object import BlockEntry, ObjectIndex, Trailer, index_bytes, parse_index, parse_trailer
from memq.format.pointer import Location, Pointer
from memq.format.sealed_json import is_sealed
from memq.limits import INDEX_HEAD_BYTES, TRAILER_BYTES
from memq.runtime.logs import EventLog
from memq.storage_handlers import ObjectEntry, ObjectReader

T = TypeVar("T")

ROUNDS_MAX = 6
MISSING_ROUNDS = 3
PAUSE_S = 0.05  # before the second round, three times as much before each further one: 6 s in all
_PAUSE_GROWTH = 3.0
MISSING_CONFIRMED_S = 10.0  # for so long an object must be missing until records of it are passed over for ever,
MISSING_LISTS, MISSING_LIST_PAUSE_S = 3, 1.0  # and so many listings must omit it
ReadPart = Callable[[int, int], Awaitable[object]]  # `length` bytes from `offset`; raises as `ObjectReader.get_range`
TAIL_BYTES = 16 << 10  # an index of 100 batches: one request reads most indexes


async def reaches(read: ReadPart, size: int) -> bool:
    """Whether at least `size` bytes exist; reads the last of them.

    Raises: as `read`, except CorruptDataError.
    """
    try:
        await read(size - 1, 1)
    except CorruptDataError:
        return False
    return True


async def readable_bytes(read: ReadPart, low: int, high: int) -> int:
    """Return the number of readable bytes, at least `low` and below `high`. Raises: as `reaches`."""
    while high - low > 1:
        middle = (low + high) // 2
        if await reaches(read, middle):
            low = middle
        else:
            high = middle
    return low


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


async def check_missing(store: ObjectReader, key: str) -> None:
    """Return if the store does not list an object either: its records are passed over for ever.

    One listing may omit it. Raises: StoreError if one lists the object; as `ObjectReader.list`.
    """
    for number in range(MISSING_LISTS):
        if number:
            await asyncio.sleep(MISSING_LIST_PAUSE_S)
        async for entry in store.list(key):
            if entry.key == key:
                raise StoreError(f"object '{key}' was not found for {MISSING_CONFIRMED_S:g} s, and the store lists it")


@dataclass(frozen=True, slots=True)
class Way(Generic[T]):
    """One way to read; ways with the same `source` must bring the same bytes.

    Each call of `read` makes a new request. It raises CorruptDataError, UnsupportedFormatError or NotFoundError for
    possible damage, and other errors.
    """

    source: str
    read: Callable[[], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class _Doubt(Generic[T]):
    """An answer that may be wrong: a value that is not whole, or an error."""

    way: Way[T]
    value: T | None
    error: MemqError | None

    @property
    def missing(self) -> bool:
        return isinstance(self.error, NotFoundError)


class ConfirmedReads:
    """Fetches again what seems to be damaged or missing.

    `transit_errors` counts answers that another fetch has contradicted; `events` logs them.
    A missing object is requested again until the pauses between requests add up to `missing_s`.
    """

    def __init__(self, events: EventLog | None = None, *, missing_s: float = 0.0) -> None:
        self.transit_errors = 0
        self._events = events
        self._missing_s = missing_s

    @classmethod
    def patient(cls, events: EventLog) -> ConfirmedReads:
        """Return reads before records are passed over for ever: missing objects are requested for 10 s."""
        return cls(events, missing_s=MISSING_CONFIRMED_S)

    async def read(
        self,
        ways: Sequence[Way[T]],
        is_whole: Callable[[T], bool] = lambda value: True,
        same: Callable[[T, T], bool] = eq,
    ) -> T:
        """Return the first whole answer, else the damaged one on which two fetches of one source agree.

        Raises: CorruptDataError or UnsupportedFormatError on which two fetches agree; NotFoundError when all sources
        lack it; StoreError when answers differ each time; the worst error of the ways when there is no other answer.
        """
        doubts: list[_Doubt[T]] = []
        number, waited_s, left_s = 0, 0.0, 0.0
        while number < ROUNDS_MAX or left_s > 0:
            if number:
                pause_s = PAUSE_S * _PAUSE_GROWTH ** (min(number, ROUNDS_MAX - 1) - 1)
                pause_s = min(pause_s, left_s) if left_s > 0 else pause_s
                await asyncio.sleep(pause_s)
                waited_s += pause_s
            failures: list[MemqError] = []
            for way in ways:
                try:
                    value = await way.read()
                except (CorruptDataError, UnsupportedFormatError, NotFoundError) as error:
                    doubts.append(_Doubt(way, None, error))
                except MemqError as error:
                    failures.append(error)
                else:
                    if is_whole(value):
                        self._note([doubt for doubt in doubts if _is_contradicted(doubt, way)])
                        return value
                    doubts.append(_Doubt(way, value, None))
            if not doubts:
                raise worst(failures)
            found = _settled(doubts, number, same)
            awaited = found is not None and found.missing and not failures
            if awaited and left_s == 0 and waited_s < self._missing_s:
                self._note_missing(found)
            left_s = max(0.0, self._missing_s - waited_s) if awaited else 0.0
            if found is not None and not left_s:
                return self._result(found, doubts, failures, same)
            number += 1
        text = "; ".join(dict.fromkeys(_text_of(doubt) for doubt in doubts))
        raise StoreError(
            f"{doubts[0].way.source} was fetched {len(doubts)} times, and no two fetches agree: {text[:300]}",
            hint="bytes change on the way from the store: check the network and proxies between",
        )

    def _result(
        self,
        found: _Doubt[T],
        doubts: Sequence[_Doubt[T]],
        failures: Sequence[MemqError],
        same: Callable[[T, T], bool],
    ) -> T:
        """Return or raise the agreed answer; the failure of a way comes before `missing` of the others."""
        if found.missing and failures:
            raise worst(failures)
        self._note([each for each in doubts if each.way.source == found.way.source and not _agree(each, found, same)])
        if found.error is not None:
            raise found.error
        assert found.value is not None
        return found.value

    def _note_missing(self, found: _Doubt[T] | None) -> None:
        if found is not None and self._events is not None:
            self._events.warning("object-missing", f"{found.error}; asking again for {self._missing_s:g} s")

    def _note(self, contradicted: Sequence[_Doubt[T]]) -> None:
        if contradicted:
            self.note(contradicted[0].way.source, _text_of(contradicted[0]), len(contradicted))

    def note(self, source: str, text: str, count: int = 1) -> None:
        """Count answers that a second fetch contradicted; `text` describes the first fault."""
        self.transit_errors += count
        if self._events is not None:
            self._events.warning("bytes-differed", f"{source} had other bytes when it was fetched again: {text}")


def worst(failures: Sequence[MemqError]) -> MemqError:
    """Return the error for the caller: retryable ones first, then denied, then missing."""
    for kind in (RetryableError, DeniedError, NotFoundError):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    return failures[0]


def _is_contradicted(doubt: _Doubt[T], whole: Way[T]) -> bool:
    """Whether a whole answer shows that a doubtful one was wrong.

    A way that reports an object missing may lead to another machine's folder: only the same way contradicts it.
    """
    return doubt.way is whole if doubt.missing else doubt.way.source == whole.source


def _settled(doubts: Sequence[_Doubt[T]], number: int, same: Callable[[T, T], bool]) -> _Doubt[T] | None:
    """Return the result after round `number`: damage of a source, or that all are missing.

    None means that another round is necessary.
    """
    missing: _Doubt[T] | None = None
    agreed: _Doubt[T] | None = None
    for source in dict.fromkeys(doubt.way.source for doubt in doubts):
        answers = [doubt for doubt in doubts if doubt.way.source == source]
        found = next(
            (
                one
                for at, one in enumerate(answers)
                if not one.missing and any(_agree(one, other, same) for other in answers[at + 1 :])
            ),
            None,
        )
        if found is not None:
            agreed = agreed or found
        elif all(answer.missing for answer in answers) and number + 1 >= MISSING_ROUNDS:
            missing = missing or answers[0]
        else:
            return None
    return agreed or missing


def _agree(one: _Doubt[T], other: _Doubt[T], same: Callable[[T, T], bool]) -> bool:
    if one.error is not None or other.error is not None:
        return type(one.error) is type(other.error) and str(one.error) == str(other.error)
    assert one.value is not None
    assert other.value is not None
    return same(one.value, other.value)


def _text_of(doubt: _Doubt[T]) -> str:
    return str(doubt.error) if doubt.error is not None else "damaged"


async def read_index(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    """Return an object's index and its trailer; read them again when they seem to be damaged.

    Raises: as the store, CorruptDataError, UnsupportedFormatError.
    """
    return await ConfirmedReads().read([Way(f"object '{entry.key}'", partial(_read_once, store, entry))])


async def _read_once(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    at = max(0, entry.size - TAIL_BYTES)
    tail = memoryview(await store.get_range(entry.key, at, entry.size - at) if entry.size else b"")
    trailer = parse_trailer(tail[-TRAILER_BYTES:], entry.size)
    if trailer.index_offset >= at:
        return parse_index(tail[trailer.index_offset - at : -TRAILER_BYTES], trailer), trailer
    return parse_index(await store.get_range(entry.key, trailer.index_offset, trailer.index_length), trailer), trailer


async def read_batch_entries(
    stores: Mapping[str, ObjectReader], pointer: Pointer, events: EventLog | None = None
) -> tuple[BlockEntry, ...]:
    """Return the entries of the blocks of a batch, by two ranged reads of one copy.

    `events` logs answers that another fetch contradicted. Raises: as `read_index`; NotFoundError when no store has it.
    """
    ways = [
        Way(f"object '{location.key}'", partial(_entries_once, stores[location.store], location, pointer))
        for location in pointer.locations
        if location.store in stores
    ]
    if not ways:
        raise NotFoundError(f"batch {pointer.batch_sequence} is in no store of this broker")
    return await ConfirmedReads(events).read(ways)


async def _entries_once(store: ObjectReader, location: Location, pointer: Pointer) -> tuple[BlockEntry, ...]:
    entries = (await index_at(store.get_range, location)).blocks_in(location.offset, location.length)
    if not counts_all(pointer, entries):
        raise CorruptDataError(f"object '{location.key}': its index has not the {pointer.records} records of a batch")
    return entries


async def index_at(read: Callable[[str, int, int], Awaitable[Buffer]], location: Location) -> ObjectIndex:
    """Return the index of the object that a pointer names, by two ranged reads.

    `read` takes key, offset and length. The caller confirms an error by another fetch.
    Raises: as `read`, CorruptDataError, UnsupportedFormatError.
    """
    at = location.index_offset
    length = index_bytes(await read(location.key, at, INDEX_HEAD_BYTES))
    tail = memoryview(await read(location.key, at, length + TRAILER_BYTES))
    return parse_index(tail[:length], parse_trailer(tail[length:], at + length + TRAILER_BYTES))
