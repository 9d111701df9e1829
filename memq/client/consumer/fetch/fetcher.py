"""Fetches stored batches from the store or through a broker, checks them, cuts them into blocks.

`RangeCoalescer` combines reads of neighbouring ranges of one object within a loop turn into one request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import groupby, pairwise
from typing import Literal, Protocol, TypeVar

from memq.errors import CorruptDataError, DeniedError, MemqError, NotFoundError, StoreError
from memq.format.batch import (
    BlockPiece,
    NumberedEntry,
    counts_all,
    cut_batch,
    cut_run,
    entries_of_batch,
    is_whole,
    missing_batch,
    numbered_entries,
)
from memq.format.blocks.header import Buffer
from memq.format.key import is_large_object
from memq.format.object import BlockEntry, ObjectIndex
from memq.format.pointer import Location, Pointer, is_named, named_ranges
from memq.limits import READ_BYTES_MAX
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, index_at, reaches, readable_bytes

T = TypeVar("T")

INDEXES_MAX = 4  # of large objects, at most 65,536 blocks each
GAP_BYTES_MIN = 16 << 10  # of unwanted blocks between wanted ones: fewer are read with these, by one request
REQUESTS_MAX = 16  # requests for one batch
ReadMode = Literal["auto", "direct", "broker"]


class RangeReader(Protocol):
    """Reads ranges of objects; a store handler is one. Raises: as `memq.storage_handlers.ObjectReader`."""

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One range and its waiter: gets the bytes, or None if it must read the range alone."""

    offset: int
    length: int
    found: asyncio.Future[Buffer | None]

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.length


class RangeCoalescer:
    """A `RangeReader` that joins simultaneous requests for neighbouring ranges of a large object.

    Batches of other objects are read one by one: their neighbours belong to other partitions.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._waiting: dict[str, list[_Wanted]] = {}

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `RangeReader.get_range`."""
        if not is_large_object(key):
            return await self._reader.get_range(key, offset, length)
        wanted = _Wanted(offset, length, asyncio.get_running_loop().create_future())
        group = self._waiting.setdefault(key, [])
        group.append(wanted)
        if len(group) == 1:
            try:
                await asyncio.sleep(0)  # tasks that were started with this one add their requests first
                del self._waiting[key]
                await asyncio.gather(*(self._read_run(key, run) for run in runs_of(group)))
            finally:
                if self._waiting.get(key) is group:
                    del self._waiting[key]
                for each in group:
                    if not each.found.done():
                        each.found.set_result(None)
        found = await wanted.found
        return await self._reader.get_range(key, offset, length) if found is None else found

    async def _read_run(self, key: str, run: Sequence[_Wanted]) -> None:
        """Read a run of ranges with one request.

        If it fails, each caller reads its own range, and gets the error of that range.
        """
        if len(run) == 1:
            return
        start = run[0].offset
        try:
            data = memoryview(await self._reader.get_range(key, start, run[-1].end - start))
        except MemqError:
            return
        for each in run:
            if not each.found.done():
                each.found.set_result(data[each.offset - start : each.end - start])


def runs_of(group: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Put ranges together that follow on each other, to at most READ_BYTES_MAX bytes."""
    runs: list[list[_Wanted]] = []
    for each in sorted(group, key=lambda wanted: wanted.offset):
        run = runs[-1] if runs else []
        if run and run[-1].end == each.offset and each.end - run[0].offset <= READ_BYTES_MAX:
            run.append(each)
        else:
            runs.append([each])
    return runs


class ReadRange(Protocol):
    """Reads a range of an object of a named store.

    Raises: NotFoundError; CorruptDataError when the object is shorter than the range; DeniedError; RetryableError.
    """

    async def __call__(self, store: str, key: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`."""
        ...


class OpenStore(Protocol):
    """Opens a named store in this process."""

    def __call__(self, store: str) -> RangeReader | None:
        """Return its reader; None when it can't be opened here."""
        ...


class _ThroughBroker:
    """A store as a broker reads it."""

    def __init__(self, read: ReadRange, store: str) -> None:
        self._read, self._store = read, store

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        return await self._read(self._store, key, offset, length)


class MakeFetcher(Protocol):
    """Makes the fetcher of a consumer."""

    def __call__(
        self, mode: ReadMode, read: ReadRange, open_store: OpenStore, confirmed: ConfirmedReads
    ) -> BatchFetcher:
        """Return one for these ways to a store."""
        ...


@dataclass(frozen=True, slots=True)
class _Cut:
    """A batch as it came: its bytes, and the pieces that were made of them."""

    data: Buffer
    pieces: Sequence[BlockPiece]


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """Some blocks of a batch, and the entries of those that were not fetched.

    These lie `before` the wanted records, or between them and are `passed` by the filter.
    """

    pieces: Sequence[BlockPiece]
    before: Sequence[NumberedEntry]
    passed: Sequence[NumberedEntry]


class BatchFetcher:
    """Fetches batches by their pointers, each from the first copy and by the first way that works.

    What seems to be damaged or missing is fetched again, see `ConfirmedReads`. In mode `auto` a store that opens here
    is tried first; when it has shown no object at all and the broker has one, it is another machine's folder of the
    same name, and is not tried again.
    """

    def __init__(self, mode: ReadMode, read: ReadRange, open_store: OpenStore, confirmed: ConfirmedReads) -> None:
        self._confirmed = confirmed
        self.near: Callable[[Pointer], ReadRange] | None = None  # reads through a broker that may hold a batch
        self._mode = mode
        self._read = read
        self._open_store = open_store
        self._direct: dict[str, RangeReader | None] = {}
        self._through: dict[str, RangeReader] = {}
        self._proven: dict[str, bool] = {}
        self._indexes: OrderedDict[tuple[str, int], ObjectIndex] = OrderedDict()  # of large objects, by key and offset
        self._index_turn = asyncio.Lock()

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks may come through a broker."""
        return self._mode != "direct"

    def cut_sent(self, pointer: Pointer, data: Buffer) -> Sequence[BlockPiece] | None:
        """Return the pieces of a batch that came with its pointer; None when they are not the whole batch."""
        pieces = cut_batch(pointer, data) if len(data) == pointer.locations[0].length else None
        return pieces if pieces is not None and is_whole(pieces) else None

    async def fetch(self, pointer: Pointer, sent: Buffer | None = None) -> Sequence[BlockPiece]:
        """Return the batch in pieces; a damaged piece is marked.

        `sent` are bytes that came with the pointer and are not the whole batch: they count as its first fetch.
        Raises: RetryableError when it may come later; NotFoundError when no copy is there; DeniedError.
        """
        ways = self._ways(pointer, lambda reader, location: self._fetch_by(reader, location, pointer), sent is not None)
        if sent is not None:
            ways = [Way(ways[0].source, partial(_cut_once, pointer, [sent])), *ways]
        cut = await self._confirmed.read(ways, lambda cut: is_whole(cut.pieces), _same_cut)
        return cut.pieces

    async def index_of(self, pointer: Pointer) -> Sequence[BlockEntry]:
        """Return the index entries of a batch's blocks, offsets counted from its start. Raises: as `fetch`."""
        return await self._confirmed.read(self._ways(pointer, partial(self._read_index, pointer)))

    async def fetch_blocks(self, pointer: Pointer, wanted: Callable[[BlockEntry], bool]) -> Sequence[BlockPiece]:
        """Read the index of a batch, and return the blocks whose entries are `wanted`.

        Neighbouring blocks take one request. Without a readable index, all blocks are returned. Raises: as `fetch`.
        """

        async def fetch_runs(reader: RangeReader, location: Location) -> Sequence[BlockPiece]:
            entries = numbered_entries(await self._read_index(pointer, reader, location))
            _check_tag_bits(pointer, entries)
            return await _fetch_runs(reader, location, pointer, entries, lambda item: wanted(item.entry))

        try:
            return await self._confirmed.read(self._ways(pointer, fetch_runs), is_whole, _same_pieces)
        except CorruptDataError:
            return await self.fetch(pointer)  # damage is reported by the reader of the whole batch

    async def fetch_records(
        self,
        pointer: Pointer,
        low: int,
        high: int,
        excludes: Callable[[int], bool] | None = None,
        planned: Callable[[int], None] = lambda size: None,
    ) -> FetchedPart:
        """Return the blocks that hold the records `low` up to, not with, `high` of a batch, by its index.

        Not those whose tag bits the filter `excludes`. Without an index to go by, all come. `planned` is called with
        the number of bytes before they are fetched. Raises: as `fetch`.
        """

        async def fetch_part(reader: RangeReader, location: Location) -> FetchedPart:
            entries = numbered_entries(await self._read_index(pointer, reader, location))
            if excludes is not None:
                _check_tag_bits(pointer, entries)
            before = [item for item in entries if item.first + item.entry.count <= low]
            needed, passed = list[NumberedEntry](), list[NumberedEntry]()
            for item in entries[len(before) :]:
                if item.first < high:
                    (passed if excludes is not None and excludes(item.entry.tag_bits) else needed).append(item)
            pieces: list[BlockPiece] = []
            runs = joined_runs(needed)
            planned(sum(map(_run_bytes, runs)))
            for run in runs:
                data = await reader.get_range(location.key, location.offset + run[0].entry.offset, _run_bytes(run))
                pieces += cut_run(pointer, data, run)
            return FetchedPart(pieces, before, passed)

        try:
            return await self._confirmed.read(
                self._ways(pointer, fetch_part),
                lambda part: is_whole(part.pieces),
                lambda one, other: (
                    _same_pieces(one.pieces, other.pieces) and (one.before, one.passed) == (other.before, other.passed)
                ),
            )
        except (CorruptDataError, NotFoundError):
            planned(pointer.locations[0].length)
            return FetchedPart(await self.fetch(pointer), [], [])

    def _ways(
        self, pointer: Pointer, read: Callable[[RangeReader, Location], Awaitable[T]], stored: bool = False
    ) -> list[Way[T]]:
        """Return the ways to each copy of a batch. `stored`: no way brings bytes from a broker's memory.

        Raises: DeniedError; NotFoundError when there is no copy.
        """
        if not pointer.locations:
            raise NotFoundError(f"batch {pointer.batch_sequence} has no location")
        return [
            Way(f"object '{location.key}'", _reads(read, readers[stored:] or readers, location))
            for location in pointer.locations
            for readers in self._readers(location, pointer)
        ]

    def _readers(self, location: Location, pointer: Pointer) -> list[list[RangeReader]]:
        """Return for each way the reader of its first fetch, and the one of later fetches if another.

        A broker's memory answers only the first fetch: it might bring the same wrong bytes again.
        """
        store = location.store
        readers: list[list[RangeReader]] = []
        if self._mode != "broker":
            if store not in self._direct:
                opened = self._open_store(store)
                self._direct[store] = RangeCoalescer(opened) if opened is not None else None
            direct = self._direct[store]
            if direct is not None:
                readers.append([direct])
        if self._mode != "direct":
            if store not in self._through:
                self._through[store] = RangeCoalescer(_ThroughBroker(self._read, store))
            readers.append([self._through[store]])
            if self.near is not None and not is_large_object(location.key):  # neighbours of those come in one request
                readers[-1].insert(0, _ThroughBroker(self.near(pointer), store))
        if not readers:
            raise DeniedError(
                f"store '{store}' can't be opened here", hint="use read='broker', or run where the store can be reached"
            )
        return readers

    def _learn(self, store: str, reader: RangeReader) -> None:
        """Note which way has worked."""
        if reader is self._direct.get(store):
            self._proven[store] = True
        elif not self._proven.get(store):
            self._direct[store] = None

    async def _fetch_by(self, reader: RangeReader, location: Location, pointer: Pointer) -> _Cut:
        try:
            data = await reader.get_range(location.key, location.offset, location.length)
        except CorruptDataError as error:  # the object is truncated: the rest may hold whole blocks
            data = await _readable_start(reader, location)
            if len(data) == location.length:  # the answer was incomplete, not the object
                self._confirmed.note(f"object '{location.key}'", str(error))
            return _Cut(data, cut_batch(pointer, data) if data else missing_batch(pointer, error))
        self._learn(location.store, reader)
        pieces = cut_batch(pointer, data)
        if is_whole(pieces):
            return _Cut(data, pieces)
        try:
            index = await self._read_index(pointer, reader, location)
        except (CorruptDataError, NotFoundError):
            return _Cut(data, pieces)
        return _Cut(data, cut_batch(pointer, data, index))

    async def _read_index(self, pointer: Pointer, reader: RangeReader, location: Location) -> list[BlockEntry]:
        """Return the entries of a batch's blocks. Raises: CorruptDataError if entries are missing."""
        index = await self._object_index(reader, location)
        entries = entries_of_batch(index.blocks, location.offset, location.length)
        if not counts_all(pointer, entries):
            self._indexes.pop((location.key, location.index_offset), None)
            text = f"{sum(entry.count for entry in entries)} of the {pointer.records} records of a batch"
            raise CorruptDataError(f"object '{location.key}': its index has {text}")
        return entries

    async def _object_index(self, reader: RangeReader, location: Location) -> ObjectIndex:
        """Return the index of an object; that of large objects, which hold thousands of blocks, is kept."""
        if not is_large_object(location.key):
            return await index_at(reader.get_range, location)
        index_key = (location.key, location.index_offset)
        async with self._index_turn:
            if index_key not in self._indexes:
                self._indexes[index_key] = await index_at(reader.get_range, location)
            self._indexes.move_to_end(index_key)
            if len(self._indexes) > INDEXES_MAX:
                self._indexes.popitem(last=False)
            return self._indexes[index_key]


def _reads(
    read: Callable[[RangeReader, Location], Awaitable[T]], readers: Sequence[RangeReader], location: Location
) -> Callable[[], Awaitable[T]]:
    """Return what reads a location by the first reader, and by the last one when it is called again."""
    left = list(readers)

    async def read_once() -> T:
        return await read(left.pop(0) if len(left) > 1 else left[0], location)

    return read_once


async def _fetch_runs(
    reader: RangeReader,
    location: Location,
    pointer: Pointer,
    entries: Sequence[NumberedEntry],
    wanted: Callable[[NumberedEntry], bool],
) -> list[BlockPiece]:
    """Fetch the wanted blocks, each run of neighbours at once.

    Numbers and record indexes are those in the batch.
    """
    pieces: list[BlockPiece] = []
    for is_wanted, run in groupby(entries, wanted):
        if not is_wanted:
            continue
        items = list(run)
        data = await reader.get_range(location.key, location.offset + items[0].entry.offset, _run_bytes(items))
        pieces += cut_run(pointer, data, items)
    return pieces


def _run_bytes(run: Sequence[NumberedEntry]) -> int:
    """Return the number of bytes from the first block of a run to the end of its last one."""
    return run[-1].entry.offset + run[-1].entry.length - run[0].entry.offset


def joined_runs(items: Sequence[NumberedEntry]) -> list[list[NumberedEntry]]:
    """Put blocks of a batch together that one request reads with the few bytes between them."""
    gaps = [
        (after.entry.offset - before.entry.offset - before.entry.length, number)
        for number, (before, after) in enumerate(pairwise(items), 1)
    ]
    widest = nlargest(REQUESTS_MAX - 1, (gap for gap in gaps if gap[0] >= GAP_BYTES_MIN))
    cuts = [0, *sorted(number for _, number in widest), len(items)]
    return [list(items[low:high]) for low, high in pairwise(cuts) if low < high]


def _check_tag_bits(pointer: Pointer, entries: Sequence[NumberedEntry]) -> None:
    """Check that an index is that of the batch.

    By the index of another object, wanted blocks would not be fetched.

    Raises: CorruptDataError.
    """
    names, skip, tag_bits = named_ranges(pointer), frozenset(pointer.skip), 0
    for item in entries:
        tag_bits |= item.entry.tag_bits
        if item.number not in skip and not is_named(names, item.entry):
            raise CorruptDataError(
                f"the index of batch {pointer.batch_sequence} has blocks that its pointer does not name"
            )
    if tag_bits != pointer.tag_bits:
        words = f"{tag_bits:#x}, not {pointer.tag_bits:#x}"
        raise CorruptDataError(f"the index of batch {pointer.batch_sequence} has the tag bits {words}")


async def _readable_start(reader: RangeReader, location: Location) -> Buffer:
    """Return the readable part of a batch in an object that seems to end within the batch.

    The last byte of the batch is requested first: an incomplete answer says nothing about the object. Before, two such
    answers, of any lengths, passed for an object that lacks its last byte.
    """

    async def read(offset: int, length: int) -> Buffer:
        return await reader.get_range(location.key, location.offset + offset, length)

    if await reaches(read, location.length):
        return await read(0, location.length)
    size = await readable_bytes(read, 0, location.length)
    return await read(0, size) if size else b""


async def _cut_once(pointer: Pointer, sent: list[Buffer]) -> _Cut:
    """Cut the bytes that came with a pointer. Raises: StoreError the second time: they came once."""
    if not sent:
        raise StoreError("a broker sends blocks with their pointer only once")
    data = sent.pop()
    return _Cut(data, cut_batch(pointer, data))


def _same_cut(one: _Cut, other: _Cut) -> bool:
    return one.data == other.data and [_identity_of(piece) for piece in one.pieces] == [
        _identity_of(piece) for piece in other.pieces
    ]


def _same_pieces(one: Sequence[BlockPiece], other: Sequence[BlockPiece]) -> bool:
    return [(_identity_of(piece), piece.data) for piece in one] == [
        (_identity_of(piece), piece.data) for piece in other
    ]


def _identity_of(piece: BlockPiece) -> tuple[int, int, int]:
    return piece.number, piece.first, piece.records
