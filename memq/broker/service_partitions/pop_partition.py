"""One read partition of a pop group: which blocks of it are new items, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from memq.broker.partition.pointer_resolver import PointerResolver, search_of
from memq.broker.services import Services
from memq.errors import CorruptDataError, MemqError, NotFoundError, NotReadyError, StoreError
from memq.format.batch import cut_batch, is_whole, numbered_entries, pointer_scope
from memq.format.blocks.header import check_block
from memq.format.held_object import Target
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, pointer_mark
from memq.limits import KIB, POP_BLOCK_BYTES_MAX
from memq.notification import Entry
from memq.notification.dedup_window import DedupWindow, Novelty
from memq.notification.log_reader import entries_between, first_of, page_before, valid_seek, valid_span
from memq.queues.pop.groups import PopGroup, PopPlace, PopPosition, block_id
from memq.queues.pop.keeper import PopBatch, PopBlock, PopKeeper
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, check_missing, read_batch_entries
from memq.topic import ReadPartition, Topic

PAGE_BYTES = 64 * KIB  # of pointers: about a hundred
WHOLE_BYTES = 512 * KIB  # a batch up to this size is read at once, and its blocks are kept for workers
LOST_PAUSE_S = 2.0  # between two reads of a log that seems to be another one
LOST_LOOKS = 3


class PopPartition:
    """Reads one read partition from the position of its group on.

    After an error, or when it `is_done`, another one takes its place: some blocks were judged that the state lacks.
    """

    def __init__(self, services: Services, topic: Topic, log: ReadPartition, pop: PopKeeper, group: PopGroup) -> None:
        self._services = services
        self._settings = topic.settings
        self._log = log
        self._pop = pop
        self._queue, self._life = group.queue, group.life
        position = group.position(log.partition)
        assert position is not None, "the caller gave it one"
        self._position = position
        self.next = position.offset  # the next pointer; those between the position and it have no records
        self._resolver = PointerResolver(services, log, str(log))
        self._window = DedupWindow(topic.settings.reader_window_ms)
        self._records = dict(position.records)  # before the next pointer, by write partition
        self.is_done = False  # it has read a part of a batch only: there was no room for the rest
        self._mark = position.mark  # of the last pointer that was read; 0: unknown
        self._gapped: dict[int, None] = {}  # write partitions of which retention may have taken records

    # ---- opening ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Prove that the log is the one of the position, and learn which sequences lie before it."""
        span = await valid_span(self._services.pointers, self._log)
        if await self._is_other():
            for _ in range(LOST_LOOKS - 1):
                await asyncio.sleep(LOST_PAUSE_S)
                if not await self._is_other():
                    raise NotReadyError(
                        f"{self._log}: the log did not show position {self._position.offset} for a while"
                    )
            await self._begin_again(span.begin)
            return
        if self.next <= span.begin:
            return
        last = await page_before(self._services.pointers, self._log, self.next - 1, self.next, PAGE_BYTES)
        if not last:
            return
        since_ms = last[0].time_ms - self._settings.reader_window_ms
        first = max(span.begin, min(await valid_seek(self._services.pointers, self._log, since_ms), self.next))
        async for page in entries_between(self._services.pointers, self._log, first, self.next):
            for entry in page:
                await self._look_back(entry)

    async def _look_back(self, entry: Entry) -> None:
        pointer = await self._resolver.pointer(entry)
        self._window.advance(entry.time_ms)
        for each in pointer.producers if pointer is not None else ():
            for first, next_ in each.ranges:
                self._window.note(pointer.partition, each.producer, first, next_)  # type: ignore[union-attr]

    async def _is_other(self) -> bool:
        """Whether the log was cut before the position, or is another one."""
        if self.next > (await valid_span(self._services.pointers, self._log)).end:
            return True
        return self.next > 0 and await self._resolver.has_changed(self.next - 1, self._position.mark)

    async def _begin_again(self, begin: int) -> None:
        """Begin at the first record: the log was lost or restored, and has other offsets."""
        text = f"pop group '{self._queue}': the log of {self._log} is another one than before position {self.next}"
        self._services.events.error(
            "pop-log-replaced", f"{text}; it is read from the beginning, and acked records may come again"
        )
        await self._move(PopPosition(self._log.partition, begin))

    async def _move(self, to: PopPosition) -> None:
        group = self._group()
        if not await self._pop.move(group, self._position, to):
            raise _moved(self._queue)
        self._position, self.next, self._records, self._mark = to, to.offset, dict(to.records), to.mark

    def _group(self) -> PopGroup:
        group = self._pop.group(self._queue, self._life)
        if group is None:
            raise _moved(self._queue)
        return group

    # ---- reading ---------------------------------------------------------------------------------

    async def read(self) -> bool:
        """Read some pointers; return whether there were some. Raises: MemqError."""
        end = (await valid_span(self._services.pointers, self._log)).end
        if self.next > end:
            raise NotReadyError(f"{self._log} ends at {end}, and was read up to {self.next}")
        if self.next == end:
            return False
        page = await page_before(self._services.pointers, self._log, self.next, end, PAGE_BYTES)
        if await self._resolver.has_changed(self.next - 1, self._mark):
            raise NotReadyError(f"{self._log} has another pointer at {self.next - 1} than before")
        first = first_of(page)
        if first > self.next:
            text = f"pop group '{self._queue}': retention took pointers {self.next} to {first - 1} of {self._log}"
            self._services.events.warning("pop-records-expired", text)
            self._gapped = dict.fromkeys(self._records)
            self.next, self._mark = first, 0
        for entry in page:
            if self.is_done or not self._pop.has_room(self._queue):
                break
            await self._take(entry)
        return True

    async def _take(self, entry: Entry) -> None:
        pointer = await self._resolver.pointer(entry)
        self._window.advance(entry.time_ms)
        mark = pointer_mark(pointer) if pointer is not None else 0
        if pointer is None or pointer.kind != "data" or not pointer.locations:
            self.next, self._mark = entry.offset + 1, mark
            return
        lost = self._lost_before(pointer)
        blocks = await self._blocks(entry, pointer)
        self._records[pointer.partition] = pointer.totals.records + pointer.records
        records = tuple(sorted(self._records.items()))
        end = PopPosition(self._log.partition, entry.offset + 1, 0, mark, records)
        place = PopPlace(self._life, self._log.partition, entry.offset, mark)
        if blocks or lost:
            batch = PopBatch(place, pointer.partition, entry.time_ms, blocks, end)
            found = await self._pop.read(self._group(), self._position, batch, lost)
            if found is None:
                raise _moved(self._queue)
            self._position, self.is_done = found, found.offset == entry.offset
        self.next, self._mark = entry.offset + 1, mark

    def _lost_before(self, pointer: Pointer) -> int:
        """Return how many records of a write partition retention took before this pointer."""
        if pointer.partition not in self._gapped:
            return 0
        del self._gapped[pointer.partition]
        return max(0, pointer.totals.records - self._records[pointer.partition])

    async def _blocks(self, entry: Entry, pointer: Pointer) -> list[PopBlock]:
        """Return the blocks of a batch that are new items."""
        try:
            entries, whole = await self._entries(pointer)
        except NotFoundError as error:
            await self._check_lost(entry, pointer)
            self._report_lost(pointer, error)
            return []
        except CorruptDataError as error:
            self._report_lost(pointer, error)
            return []
        start = self._position.index if self._position.offset == entry.offset else 0
        skip, found = frozenset(pointer.skip), list[PopBlock]()
        for number, first, block in numbered_entries(entries):
            if number in skip:
                continue
            sequences = block.producer_id, block.first_sequence, block.next_sequence
            if first < start:
                self._window.note(pointer.partition, *sequences)
                continue
            if block.length > POP_BLOCK_BYTES_MAX:
                at = f"offset {entry.offset}, index {first} of {self._log}"
                size = f"their block has {block.length} bytes, {POP_BLOCK_BYTES_MAX} are allowed"
                text = f"pop group '{self._queue}' passes over {block.count} records at {at}: {size}"
                self._services.events.error("pop-block-large", text)
                continue
            salt = 0
            if self._window.judge(pointer.partition, *sequences) is Novelty.SEEN:
                if await self._is_copy(entry, pointer, block):
                    continue
                salt = block.checksum
            target = Target(self._queue, self._log.topic_id, pointer.partition)
            data = bytes(whole[block.offset : block.offset + block.length]) if whole is not None else None
            id_ = block_id(self._life, target, *sequences, salt)
            found.append(PopBlock(id_, first, block.count, block.offset, block.length, data))
        return found

    async def _entries(self, pointer: Pointer) -> tuple[Sequence[BlockEntry], memoryview | None]:
        """Return the entries of a batch's blocks, offsets counted from its start, and a small batch.

        Raises: as `read_batch_entries`.
        """
        location = pointer.locations[0]
        if location.length <= WHOLE_BYTES and location.store in self._services.stores:
            with_data = await self._whole(pointer)
            if with_data is not None:
                return with_data
        entries = await read_batch_entries(self._services.stores, pointer, self._services.events)
        start = entries[0].offset if entries else 0  # of the batch in the object that was read
        return [each._replace(offset=each.offset - start) for each in entries], None

    async def _whole(self, pointer: Pointer) -> tuple[Sequence[BlockEntry], memoryview] | None:
        """Return a batch that is read at once; None if it seems to be damaged or missing: its index says more."""
        location = pointer.locations[0]
        try:
            store = self._services.stores[location.store]
            data = memoryview(await store.get_range(location.key, location.offset, location.length))
        except (NotFoundError, CorruptDataError):
            return None
        pieces = cut_batch(pointer, data)
        return ([each.entry() for each in pieces], data) if is_whole(pieces) else None

    async def _check_lost(self, entry: Entry, pointer: Pointer) -> None:
        """Return if an object that its pointer names does not exist. Raises: StoreError, if it may come later."""
        now = await page_before(self._services.pointers, self._log, entry.offset, entry.offset + 1, 1)
        if not now or now[0].offset != entry.offset or now[0].body != entry.body:
            raise StoreError(f"the batch at offset {entry.offset} of {self._log} has moved")
        for location in pointer.locations:
            store = self._services.stores.get(location.store)
            if store is None:
                raise StoreError(f"store '{location.store}' is not one of this broker")
            read = partial(store.get_range, location.key, location.offset, 1)
            try:
                await ConfirmedReads.patient(self._services.events).read([Way(f"object '{location.key}'", read)])
            except NotFoundError:
                await check_missing(store, location.key)
            else:
                raise StoreError(f"object '{location.key}' was missing for a while")

    def _report_lost(self, pointer: Pointer, error: MemqError) -> None:
        text = f"pop group '{self._queue}' passes over {pointer.records} records of {self._log}: {error}"
        self._services.events.error("pop-batch-lost", text)

    async def _is_copy(self, entry: Entry, pointer: Pointer, block: BlockEntry) -> bool:
        """Whether a block whose sequences were met before has the same records. Raises: MemqError."""
        claim = block.producer_id, block.first_sequence, block.next_sequence
        search = search_of(self._services, self._log, pointer.partition, str(self._log))
        begin = (await valid_span(self._services.queue, self._log)).begin
        copies = (await search.find([claim], begin, entry.offset)).get(claim)
        location = pointer.locations[0]
        store = self._services.stores[location.store]
        data = await store.get_range(location.key, location.offset + block.offset, block.length)
        header = check_block(data, pointer_scope(pointer))
        if copies is None or not copies.blocks or any(each.is_copied_by(header) for each in copies.blocks):
            return True
        text = f"pop group '{self._queue}': {header.describe()} has other content than one before it; both are items"
        self._services.events.error("pop-block-conflict", text)
        return False


def _moved(queue: str) -> NotReadyError:
    return NotReadyError(f"pop group '{queue}' has another position than its reader knows")
