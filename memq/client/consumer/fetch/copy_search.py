"""A reader's search for the originals of apparent copies.

Before its start a reader takes sequences from pointers, and reads no block. So the search reads these blocks now: an
earlier reader may have passed over a damaged one, and then its sound copy is the only one that anybody gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.errors import DeniedError, NotFoundError, StoreError
from memq.format.batch import BlockPiece, is_whole
from memq.format.pointer import Pointer, SequencedBlock
from memq.notification import PointerReader
from memq.notification.stored_blocks import BlockSearch, Claim, Copies, stored_block
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog

GONE_S = 300.0  # how long the object of an original is asked for: without it a copy is delivered, perhaps once more


class CopySearch(BlockSearch):
    """A `BlockSearch` of one reader. Before its start, damaged blocks are no originals."""

    def __init__(
        self, queue: PointerReader, assigned: Assigned, partition: int, fetcher: BatchFetcher, clock: Clock
    ) -> None:
        read = assigned.cursor.partition
        super().__init__(queue, read, partition, fetcher.index_of, EventLog(clock), str(read))
        self._first_read = assigned.first_read
        self._fetcher = fetcher
        self._clock = clock
        self._missing_since_s: dict[int, float] = {}  # by offset

    async def add(self, found: dict[Claim, Copies], offset: int, pointer: Pointer, claims: Sequence[Claim]) -> None:
        """See `BlockSearch.add`."""
        if offset >= self._first_read:
            await super().add(found, offset, pointer, claims)
            return
        pieces = await self._pieces(offset, pointer, claims)
        skip = frozenset(pointer.skip)
        sound = [piece.header for piece in pieces or () if piece.header is not None and piece.number not in skip]
        for claim in claims:
            here = tuple(stored_block(header) for header in sound if _overlap(header, claim))
            if here or pieces is None or not is_whole(pieces):
                known = found.get(claim, Copies())
                found[claim] = Copies(tuple(dict.fromkeys(known.blocks + here)), known.unread, known.lost or not here)

    async def _pieces(self, offset: int, pointer: Pointer, claims: Sequence[Claim]) -> Sequence[BlockPiece] | None:
        """Return the blocks of a batch that have sequences of claims; None if its object is gone.

        Raises: RetryableError.
        """
        try:
            return await self._fetcher.fetch_blocks(
                pointer, lambda entry: any(_overlap(entry, claim) for claim in claims)
            )
        except DeniedError as error:  # a store whose keys are being rotated denies access for a while
            raise StoreError(str(error)) from error
        except NotFoundError as error:
            now_s = self._clock.monotonic()
            if now_s < self._missing_since_s.setdefault(offset, now_s) + GONE_S:
                raise StoreError(f"an object that the queue names is missing: {error}") from error
            return None


def _overlap(block: SequencedBlock, claim: Claim) -> bool:
    producer, first, next_ = claim
    return block.producer_id == producer and block.first_sequence < next_ and first < block.next_sequence
