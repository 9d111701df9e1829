"""A topic's content of one producer, from its queue: progress, and the place of a sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from memq.client.consumer.offset_resolver import IndexOf
from memq.errors import MemqError
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import PointerReader
from memq.notification.log_reader import entries_between, valid_span
from memq.topic import Position, ReadPartition

STEP = 256  # pointers that are checked first, from the end; then four times as many


@dataclass(frozen=True, slots=True)
class Held:
    """A producer's progress: the sequence after its highest, and the seal time of that batch (Unix ms)."""

    next: int
    sealed_ms: int


class ImportProgress:
    """Asks the pointers of one read partition for one producer in one write partition."""

    def __init__(
        self, queue: PointerReader, index_of: IndexOf, partition: ReadPartition, writer: int, producer_id: int
    ) -> None:
        self._queue = queue
        self._index_of = index_of
        self._partition = partition
        self._writer = writer
        self._producer_id = producer_id

    async def held(self) -> Held | None:
        """Return how far the producer came; None when no pointer that is left names it.

        An owner publishes a producer's blocks in their order, and a copy of an earlier block may come later: so it is
        the greatest of the last stretch that has any.
        """
        span = await valid_span(self._queue, self._partition)
        end, step = span.end, STEP
        while end > span.begin:
            first = max(span.begin, end - step)
            found = [
                Held(max(next_ for _, next_ in ranges), pointer.sealed_ms)
                async for _, pointer in self._pointers(first, end)
                if (ranges := await self._ranges(pointer))
            ]
            if found:
                return max(found, key=lambda held: held.next)
            end, step = first, step * 4
        return None

    async def positions(self, sequences: Sequence[int]) -> dict[int, Position]:
        """Return where each sequence lies first, or the next one after it.

        The end for what is behind all there is.
        """
        span = await valid_span(self._queue, self._partition)
        left, found = sorted(sequences), dict[int, Position]()
        number = self._partition.partition
        async for offset, pointer in self._pointers(span.begin, span.end):
            if not left:
                break
            ranges = await self._ranges(pointer)
            if ranges and left[0] < max(next_ for _, next_ in ranges):
                index = 0
                for block in await self._index_of(pointer):
                    while left and self._is_own(block.producer_id) and left[0] < block.first_sequence + block.count:
                        sequence = left.pop(0)
                        found[sequence] = Position(number, offset, index + max(0, sequence - block.first_sequence))
                    index += block.count
        return found | {sequence: Position(number, span.end, 0) for sequence in left}

    def _is_own(self, producer_id: int) -> bool:
        return producer_id == self._producer_id

    async def _ranges(self, pointer: Pointer) -> list[tuple[int, int]]:
        """Return the sequences of the producer in a batch."""
        found = [part for held in pointer.producers if self._is_own(held.producer) for part in held.ranges]
        if found or pointer.producers_complete:
            return [(first, next_) for first, next_ in found]
        return [
            (block.first_sequence, block.first_sequence + block.count)
            for block in await self._index_of(pointer)
            if self._is_own(block.producer_id)
        ]

    async def _pointers(self, first: int, end: int) -> AsyncIterator[tuple[int, Pointer]]:
        async for entries in entries_between(self._queue, self._partition, first, end):
            for entry in entries:
                try:
                    pointer = decode_pointer(entry.body)
                except MemqError:
                    continue  # unreadable: nothing can be said of its batch
                if pointer.kind == "data" and pointer.partition == self._writer:
                    yield entry.offset, pointer
