"""First copies of what was sent again: who passes over damage must know whether they were sound. Pure.

Pointers show that a batch holds copies, not that what they are copies of can be read. Where damage ends the read that
is enough. Where it is passed over, the driver names the batches that had the first copies, and the task looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from memq.client.pieces import Piece
from memq.format.pointer import Pointer
from memq.format.ranges import Range, RangeSet

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
        """Return the batches that hold some of these sequences; none when one may be missing: then they are seen."""
        if self._forgotten_ms is not None and self._forgotten_ms >= time_ms - 2 * self._window_ms:
            return ()
        return tuple(
            earlier for _, earlier in self._batches if earlier.partition == pointer.partition and _holds(earlier, seen)
        )


def _holds(pointer: Pointer, seen: Sequence[Seen]) -> bool:
    return any(
        low < next_ and first < high
        for producer, (first, next_) in seen
        for each in pointer.producers
        if each.producer == producer
        for low, high in each.ranges
    )


def sound_copies(seen: Iterable[Seen], batches: Iterable[tuple[Pointer, Sequence[Piece]]]) -> tuple[Seen, ...]:
    """Return what of `seen` is in a sound block of these batches, that their pointers don't say to pass over."""
    sound: dict[int, RangeSet] = {}
    for pointer, pieces in batches:
        for piece in pieces:
            if piece.header is not None and piece.number not in pointer.skip:
                ranges = sound.setdefault(piece.header.producer_id, RangeSet())
                ranges.add(piece.header.first_sequence, piece.header.next_sequence)
    return tuple(
        (producer, whole)
        for producer, (first, next_) in seen
        if producer in sound
        for whole in RangeSet(sound[producer].holes(first, next_)).holes(first, next_)
    )
