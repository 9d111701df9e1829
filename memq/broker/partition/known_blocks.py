"""Compares repeated blocks with stored ones: the same sequences must have the same bytes.

An owner that acked known sequences without a comparison would lose the records of a different block with the same
sequences. Such a block comes from a job that runs again with its rows in another order, or from a clone. The owner
compares a block in place with the ring and with the headers of the last published batches. For older batches, it
searches the queue in the background (`memq.notification.stored_blocks`), and throttles the producer meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from memq.broker.partition.append import ProducerState
from memq.broker.partition.batch import SealedBatch
from memq.broker.partition.ownership import Ownership, known_ms
from memq.broker.partition.pointer_resolver import search_of
from memq.broker.partition.ring import BatchSlot, Ring
from memq.broker.services import Services
from memq.errors import IdentityConflictError, MemqError, RetryableError, ThrottledError
from memq.format.blocks.header import BlockHeader, StoredBlock, parse_header
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification.log_reader import valid_seek
from memq.notification.stored_blocks import Claim, Copies, claim_of, conflict_of, stored_block
from memq.protocol.frames import AckPosition
from memq.runtime.tasks import TaskOwner
from memq.topic import CLOCK_ERROR_MS, ReadPartition

RECENT_BATCHES = 4  # batches whose headers are kept: most repeated blocks were just published, and their ack was lost
RECENT_BLOCKS_MAX = 4_096  # blocks of such a batch, 72 bytes each; the queue is searched for larger batches
CLAIMS_MAX = 1_024  # claims that wait for a search; one beyond that waits for the producer's retry
ANSWERS_MAX = 16_384  # kept answers; beyond that, all are dropped
SEARCH_RETRY_MS = 100  # time until the producer sends the block again; a search usually takes less
# A block header as words: producer id and first sequence as 64-bit words, number of records as a 32-bit word.
_WORDS_64, _PRODUCER_WORD, _FIRST_WORD = BLOCK_HEADER_BYTES // 8, 4, 5
_WORDS_32, _COUNT_WORD = BLOCK_HEADER_BYTES // 4, 5


class EpochHolder(Protocol):
    """The owner of a partition, over all its epochs. `ring` and `own` belong to the current epoch."""

    services: Services
    partition: int
    read_partition: ReadPartition
    ring: Ring
    own: Ownership | None

    @property
    def name(self) -> str:
        """Name of the partition in logs and errors."""
        ...


class KnownBlocks:
    """One partition's knowledge of the content of its blocks in this epoch."""

    def __init__(self, processor: EpochHolder, tasks: TaskOwner) -> None:
        self._processor = processor
        self._tasks = tasks
        self._recent: deque[tuple[bytes, int | None]] = deque(maxlen=RECENT_BATCHES)
        self._claims: dict[Claim, None] = {}
        self._answers: dict[Claim, Copies] = {}
        self._searching = False

    def forget(self) -> None:
        """Drop headers and answers at the end of an epoch."""
        self._recent.clear()
        self._answers.clear()

    def remember(self, headers: bytes, pointer_offset: int | None) -> None:
        """Keep the headers of a published batch; its offset is None if readers may take an earlier copy."""
        if len(headers) <= RECENT_BLOCKS_MAX * BLOCK_HEADER_BYTES:
            self._recent.append((headers, pointer_offset))

    def positions_of(self, producer_id: int, first: int, next_: int) -> list[AckPosition]:
        """Return the position of a block in the last published batches; empty for older blocks."""
        found = self._find_recent((producer_id, first, next_))
        if found is None:
            return []
        headers, pointer_offset, number = found
        counts = memoryview(headers).cast("I")[_COUNT_WORD::_WORDS_32].tolist()
        return [] if pointer_offset is None else [AckPosition(first, next_, pointer_offset, sum(counts[:number]))]

    # ---- a block comes in ------------------------------------------------------------------------

    def holds(self, producer: ProducerState, header: BlockHeader) -> tuple[bool, BatchSlot | None]:
        """Whether the ring or the queue holds a block, and its slot; the slot is None if the queue holds it.

        Raises: IdentityConflictError when another block has its sequences; ThrottledError while the queue is searched.
        """
        claim = claim_of(header)
        ring = self._processor.ring
        slot = ring.find(*claim)
        if slot is not None:
            copy = slot.block(producer.id, header.first_sequence)
            stored = stored_block(parse_header(copy)) if copy is not None else None
            if stored is None or not stored.is_copied_by(header):
                raise self.conflict(header, () if stored is None else (stored,))
            return True, slot
        if producer.queued.overlaps(*claim[1:]):
            return self._queued(producer, header), None
        if ring.overlaps(*claim):
            raise self.conflict(header, ())
        return False, None

    def _queued(self, producer: ProducerState, header: BlockHeader) -> bool:
        """Whether the queue holds a block, after it has shown some sequences of the block.

        False when the copy in the queue can't be read. Raises: as `holds`.
        """
        claim = claim_of(header)
        if not producer.queued.covers(*claim[1:]):
            raise self.conflict(header, ())
        copies = self._known(claim)
        if copies is None:
            self._add_claim(claim)
            text = f"{header.describe()} is compared with the one that is stored"
            raise ThrottledError(text, retry_after_ms=SEARCH_RETRY_MS)
        if not copies.blocks:
            del self._answers[claim]  # the copy may be readable when the producer retries
        if copies.differ_from(header) or not (copies.blocks or copies.unread):
            raise self.conflict(header, copies.blocks)
        return bool(copies.blocks)

    def conflict(self, header: BlockHeader, stored: Iterable[StoredBlock]) -> IdentityConflictError:
        """Count and log a block whose sequences other blocks have; return the error."""
        services = self._processor.services
        services.counters.conflicting_blocks += 1
        error = conflict_of(header, stored)
        services.events.error("identity-conflict", f"{self._processor.name}: {error}")
        return error

    # ---- a batch goes out ------------------------------------------------------------------------

    async def look_up(self, own: Ownership, claims: Iterable[Claim]) -> None:
        """Search the queue for the blocks with some sequences. Raises: RetryableError."""
        wanted = [claim for claim in claims if self._known(claim) is None]
        if not wanted:
            return
        processor = self._processor
        queue, read = processor.services.queue, processor.read_partition
        since_ms = known_ms(own, processor.ring) - own.dedup_window_ms - CLOCK_ERROR_MS
        begin = await valid_seek(queue, read, since_ms)
        search = search_of(processor.services, read, processor.partition, processor.name)
        # The search must reach all own pointers: the owner counts them even before it has read the pointers between.
        found = await search.find(wanted, begin, own.known_end())
        if processor.own is not own:
            return
        own.unread = own.unread or search.shown_beyond  # perhaps a higher epoch: read it before the next publish
        if len(self._answers) > ANSWERS_MAX:
            self._answers.clear()
        self._answers.update({claim: Copies() for claim in wanted} | found)

    async def compare(self, own: Ownership, sealed: SealedBatch) -> None:
        """Search the queue for those sequences of a batch that it shows. Raises: RetryableError."""
        if any_shown(own, sealed):
            await self.look_up(own, _shown(own, sealed).values())

    def copies_in(self, own: Ownership, sealed: SealedBatch) -> tuple[int, ...]:
        """Return the numbers of a batch's blocks that the queue already holds: readers skip them.

        The owner publishes a block that it can't prove to be a copy: readers compare it, so no record is lost.
        """
        if not any_shown(own, sealed):
            return ()
        return tuple(number for number in _shown(own, sealed) if self._is_copy(sealed, number))

    def _is_copy(self, sealed: SealedBatch, number: int) -> bool:
        header = sealed.headers[number]
        copies = self._known(claim_of(header))
        if copies is None or not copies.blocks:
            return False
        if copies.differ_from(header):
            self.conflict(header, copies.blocks)
            return False
        return True

    # ---- inside ------------------------------------------------------------------------------------

    def _known(self, claim: Claim) -> Copies | None:
        answer = self._answers.get(claim)
        return answer if answer is not None else self._recent_copies(claim)

    def _recent_copies(self, claim: Claim) -> Copies | None:
        found = self._find_recent(claim)
        return None if found is None else Copies((stored_block(parse_header(found[0], found[2] * BLOCK_HEADER_BYTES)),))

    def _find_recent(self, claim: Claim) -> tuple[bytes, int | None, int] | None:
        """Return the headers of the batch that has a block, the offset of its pointer, and the block's number."""
        for headers, pointer_offset in reversed(self._recent):
            words = memoryview(headers).cast("Q")
            producers, firsts = words[_PRODUCER_WORD::_WORDS_64].tolist(), words[_FIRST_WORD::_WORDS_64].tolist()
            for number, first in enumerate(firsts):
                if first == claim[1] and producers[number] == claim[0]:
                    return headers, pointer_offset, number
        return None

    def _add_claim(self, claim: Claim) -> None:
        if len(self._claims) < CLAIMS_MAX:
            self._claims[claim] = None
        if not self._searching:
            self._searching = True
            self._tasks.start(self._search(), f"compare blocks of {self._processor.name}")

    async def _search(self) -> None:
        """Answer all waiting claims; after an error they are dropped, and the producers' retries repeat them."""
        processor = self._processor
        try:
            while self._claims and processor.own is not None:
                claims = list(self._claims)
                await self.look_up(processor.own, claims)
                for claim in claims:
                    self._claims.pop(claim, None)
        except (RetryableError, TimeoutError) as error:
            processor.services.events.warning("compare-retry", f"{processor.name}: {error}")
        except MemqError as error:
            processor.services.events.error("compare-failed", f"{processor.name}: {error}")
        finally:
            self._claims.clear()
            self._searching = False


def any_shown(own: Ownership, sealed: SealedBatch) -> bool:
    """Whether the queue shows any sequences of a batch; checks runs of blocks, which are few."""
    return any(own.producer(producer).queued.overlaps(first, next_) for producer, first, next_ in sealed.spans)


def _shown(own: Ownership, sealed: SealedBatch) -> dict[int, Claim]:
    """Return number and claim of each block of which the queue shows some sequences."""
    return {
        number: claim
        for number, claim in enumerate(sealed.headers.sequences())
        if own.producer(claim[0]).queued.overlaps(*claim[1:])
    }
