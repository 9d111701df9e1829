"""First copies of what was sent again: who passes over damage must know whether they were sound. Pure.

Pointers show that a batch holds copies, not that what they are copies of can be read. Where damage ends the read that
is enough. Where it is passed over, the driver names the batches that had the first copies, and the task reads them. So
it does where there is no queue: then only those batches show whether a copy has the same content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from memq.format.batch import BlockPiece
from memq.format.blocks.header import StoredBlock
from memq.format.pointer import Pointer
from memq.format.ranges import Range, RangeSet
from memq.notification.stored_blocks import stored_block

Seen = tuple[int, Range]  # producer, sequences
BATCHES_MAX = 1 << 16


class EarlierBatches:
    """The batches of one read partition that passed in the last `window_ms` of queue time, at least."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._batches: deque[tuple[int, Pointer]] = deque()
        self._forgotten_ms: int | None = None  # batches up to this time may be missing

    def note(self, time_ms: int, pointer: Pointer) -> None:
        """Remember a batch, all of whose producers are in its pointer."""
        self._batches.append((time_ms, pointer))
        while self._batches[0][0] < time_ms - 2 * self._window_ms:  # a lookback forgets in slices, later than this one
            self._batches.popleft()
        if len(self._batches) > BATCHES_MAX:
            self._forgotten_ms, _ = self._batches.popleft()

    def holders(self, time_ms: int, pointer: Pointer, seen: Sequence[Seen]) -> tuple[Pointer, ...]:
        """Return the batches that hold some of these sequences.

        The result is None when one may be missing: then they are seen.
        """
        if self._forgotten_ms is not None and self._forgotten_ms >= time_ms - 2 * self._window_ms:
            return ()
        return tuple(
            earlier for _, earlier in self._batches if earlier.partition == pointer.partition and _holds(earlier, seen)
        )


def is_seen(seen: Iterable[Seen], producer: int, first: int, next_: int) -> bool:
    """Whether all of these sequences were seen."""
    found = RangeSet()
    for each, (low, high) in seen:
        if each == producer:
            found.add(low, high)
    return not found.holes(first, next_)


def _holds(pointer: Pointer, seen: Sequence[Seen]) -> bool:
    return any(
        low < next_ and first < high
        for producer, (first, next_) in seen
        for each in pointer.producers
        if each.producer == producer
        for low, high in each.ranges
    )


def sound_copies(seen: Iterable[Seen], batches: Iterable[tuple[Pointer, Sequence[BlockPiece]]]) -> tuple[Seen, ...]:
    """Return the part of `seen` in sound blocks of these batches that their pointers do not skip."""
    sound: dict[int, RangeSet] = {}
    for block in sound_blocks(batches):
        sound.setdefault(block.producer_id, RangeSet()).add(block.first_sequence, block.next_sequence)
    return tuple(
        (producer, whole)
        for producer, (first, next_) in seen
        if producer in sound
        for whole in RangeSet(sound[producer].holes(first, next_)).holes(first, next_)
    )


def sound_blocks(batches: Iterable[tuple[Pointer, Sequence[BlockPiece]]]) -> Iterator[StoredBlock]:
    """Yield the sound blocks of these batches, but for those that their pointers say to pass over."""
    for pointer, pieces in batches:
        for piece in pieces:
            if piece.header is not None and piece.number not in pointer.skip:
                yield stored_block(piece.header)
