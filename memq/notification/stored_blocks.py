"""Finds stored blocks by sequences: pointers name ranges, objects' indexes have checksums.

Theory. Owners and readers keep sequences, not checksums: 300 s of 4 KiB blocks would have millions of checksums, and
nearly none is ever needed. A block with known sequences is nearly always a retry after a lost ack, so its batch is
among the last ones. The search therefore reads the pointers backwards, in growing steps. It reads the index of a batch
only if its pointer names the sequences. A retried block costs one page of pointers and two ranged GETs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from memq.errors import DeniedError, IdentityConflictError, MemqError, RetryableError, StoreError
from memq.format.blocks.header import BlockHeader, StoredBlock
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, read_pointer
from memq.notification import Entry, PointerReader
from memq.notification.log_reader import page_before
from memq.runtime.logs import EventLog
from memq.topic import ReadPartition

Claim = tuple[int, int, int]  # of a block that seems to be stored: producer id, first sequence, last sequence + 1
STEP_OFFSETS = 64  # length of the first step backwards
STEP_GROWS = 4  # factor from one step to the next
READ_BYTES = 1 << 20


def claim_of(header: BlockHeader) -> Claim:
    """Return the claim of a block."""
    return header.producer_id, header.first_sequence, header.next_sequence


def stored_block(header: BlockHeader) -> StoredBlock:
    """Return the `StoredBlock` of a block with this header."""
    return StoredBlock(*claim_of(header), header.checksum, header.base_ms)


def conflict_of(header: BlockHeader, stored: Iterable[StoredBlock]) -> IdentityConflictError:
    """Return the error for a block whose sequences are stored with other content.

    `stored` may be empty: then the other blocks have other bounds, or were not compared.
    """
    known = [f"{each.checksum:08x} of {each.first_sequence} to {each.next_sequence - 1}" for each in stored]
    return IdentityConflictError(
        f"block of sequences {header.first_sequence} to {header.next_sequence - 1} of producer"
        f" {header.producer_id:016x} has checksum {header.checksum:08x} and differs from what is known under the"
        f" same sequences: {', '.join(known) or 'blocks that begin or end elsewhere, or lie too far back to compare'}"
    )


@dataclass(frozen=True, slots=True)
class Copies:
    """The stored blocks that have some of a claim's sequences.

    `unread`: an object that may contain more of them can't be read. `lost`: a pointer names some that are damaged.
    """

    blocks: tuple[StoredBlock, ...] = ()
    unread: bool = False
    lost: bool = False

    def differ_from(self, header: BlockHeader) -> bool:
        """Whether one of them differs from an undamaged block with this header."""
        return any(not stored.is_copied_by(header) for stored in self.blocks)


class BlockSearch:
    """Searches the blocks of one write partition in its read partition.

    `index_of` returns the index entries of a batch. `name` is the partition's name in log lines. `shown_beyond` says
    whether the queue returned entries after the end of a search: an owner must read those before it publishes.
    """

    def __init__(
        self,
        queue: PointerReader,
        read: ReadPartition,
        partition: int,
        index_of: Callable[[Pointer], Awaitable[Sequence[BlockEntry]]],
        events: EventLog,
        name: str,
    ) -> None:
        self._queue = queue
        self._read = read
        self._partition = partition
        self._index_of = index_of
        self._events = events
        self._name = name
        self.shown_beyond = False

    async def find(
        self,
        claims: Collection[Claim],
        begin: int,
        end: int,
        is_enough: Callable[[Claim, Copies], bool] = lambda claim, copies: True,
    ) -> dict[Claim, Copies]:
        """Return the copies of each claim between two offsets, without claims that no pointer names.

        The result also has other blocks of the same producers in the same batches, because retries come in rows. The
        search continues backwards until all claims have copies that are enough. Blocks in a pointer's `skip` are left
        out. Raises: RetryableError.
        """
        found: dict[Claim, Copies] = {}
        step = STEP_OFFSETS
        while begin < end and not all(claim in found and is_enough(claim, found[claim]) for claim in claims):
            first = max(begin, end - step)
            for entry in await self._entries(first, end):
                pointer = self._pointer(entry)
                if pointer is not None:
                    wanted = _named(pointer, claims)
                    if wanted:
                        await self.add(found, entry.offset, pointer, wanted)
            end, step = first, step * STEP_GROWS
        return found

    async def _entries(self, first: int, end: int) -> list[Entry]:
        found: list[Entry] = []
        while first < end:
            page = await page_before(self._queue, self._read, first, end, READ_BYTES)
            found += [entry for entry in page if entry.offset < end]
            self.shown_beyond = self.shown_beyond or page.next > end
            first = page.next
        return found

    def _pointer(self, entry: Entry) -> Pointer | None:
        pointer = read_pointer(entry.body, newer="return")
        if not isinstance(pointer, Pointer):
            return None  # the owner, too, could not read it, and does not know its sequences
        return pointer if pointer.kind == "data" and pointer.partition == self._partition else None

    async def add(self, found: dict[Claim, Copies], offset: int, pointer: Pointer, claims: Sequence[Claim]) -> None:
        """Add the blocks of the pointer at an offset, which names these claims. Raises: RetryableError."""
        blocks = await self._blocks(pointer)
        for claim in claims:
            known = found.get(claim, Copies())
            if blocks is None:
                found[claim] = Copies(known.blocks, unread=True, lost=known.lost)
                continue
            producer, first, next_ = claim
            here = tuple(
                block
                for block in blocks
                if block.producer_id == producer and block.first_sequence < next_ and first < block.next_sequence
            )
            if here:
                found[claim] = Copies(tuple(dict.fromkeys(known.blocks + here)), known.unread, known.lost)
                for block in blocks:
                    if block.producer_id == producer:
                        found.setdefault(block[:3], Copies((block,)))

    async def _blocks(self, pointer: Pointer) -> list[StoredBlock] | None:
        """Return the blocks of a batch without skipped ones; None when its index can't be read."""
        skip = frozenset(pointer.skip)
        try:
            entries = await self._index_of(pointer)
        except RetryableError:
            raise
        except DeniedError as error:  # a store whose keys are being rotated denies access for a while
            raise StoreError(f"{self._name}: {error}") from error
        except MemqError as error:
            key = pointer.locations[0].key if pointer.locations else ""
            self._events.error("index-unread", f"{self._name} object {key}: {error}")
            return None
        return [
            StoredBlock(each.producer_id, each.first_sequence, each.next_sequence, each.checksum, each.least_ms)
            for number, each in enumerate(entries)
            if number not in skip
        ]


def _named(pointer: Pointer, claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims whose sequences a pointer names, or all claims if its list of producers is cut."""
    if not pointer.producers_complete:
        return list(claims)
    ranges = {entry.producer: entry.ranges for entry in pointer.producers}
    return [
        (producer, first, next_)
        for producer, first, next_ in claims
        if any(low < next_ and first < high for low, high in ranges.get(producer, ()))
    ]
