"""The segments of the spool: how much of each is needed, and which may be removed or copied.

Pure.
A segment goes once nothing in it is wanted. One partition that can't publish, among thousands that can, would so keep
nearly all that is ever written. So as soon as the spool is a quarter full, the blocks that are wanted of a segment that
is wanted by half or less are copied to the end, and it goes. A copy frees at least as much as it writes: over all no
more is copied than was written, and what lies there stays below that quarter, or twice what is wanted, and a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memq.limits import MIB

SEGMENTS_PER_SPOOL = 16
SEGMENT_BYTES_MAX = 16 * MIB
COPY_SHARE = 4  # copying begins when a quarter of what may lie there does
SPARSE_SHARE = 2  # what is wanted by half or less is copied

Span = tuple[int, int]  # bytes of a segment: from, up to, whole entries


class Segment:
    """One file of the spool. It stays while there are tickets for it.

    `kept` says that it is not removed even then.
    `wanted_bytes`: what the tickets are for. `fixed`: it can't be copied.
    """

    __slots__ = ("bytes", "fixed", "kept", "name", "seed", "tickets", "wanted_bytes")

    def __init__(self, name: str, seed: int, size: int) -> None:
        self.name = name
        self.seed = seed
        self.bytes = size
        self.wanted_bytes = 0
        self.tickets: dict[Ticket, None] = {}
        self.kept = False
        self.fixed = False

    @property
    def sparse(self) -> bool:
        """Whether it is kept for little."""
        return bool(self.tickets) and self.wanted_bytes * SPARSE_SHARE <= self.bytes and not (self.kept or self.fixed)


class Ticket:
    """Some blocks that lie, or will lie, in a segment.

    `release` once the queue holds all of them, and never before.
    """

    __slots__ = ("_freed", "_segment", "released", "spans")

    def __init__(self, freed: Callable[[], None]) -> None:
        self.released = False
        self.spans: tuple[Span, ...] = ()
        self._segment: Segment | None = None
        self._freed = freed

    def bind(self, segment: Segment, spans: tuple[Span, ...]) -> None:
        """The blocks lie there now, for certain."""
        assert self._segment is None, "blocks were written twice"
        if not self.released:
            self._segment, self.spans = segment, spans
            segment.tickets[self] = None
            segment.wanted_bytes += _size(spans)

    def move(self, segment: Segment, spans: tuple[Span, ...]) -> None:
        """The blocks lie there, too, and need not where they were."""
        if self._segment is not None and not self.released:
            self._leave(self._segment)
            self._segment = None
            self.bind(segment, spans)

    def release(self) -> None:
        """The blocks need not lie on disk any more; releasing twice is fine."""
        if self.released:
            return
        self.released = True
        if self._segment is not None:
            self._leave(self._segment)
            if self._segment.sparse or not self._segment.tickets:
                self._freed()

    def _leave(self, segment: Segment) -> None:
        del segment.tickets[self]
        segment.wanted_bytes -= _size(self.spans)


def _size(spans: tuple[Span, ...]) -> int:
    return sum(end - start for start, end in spans)


class Segments:
    """All segments of a spool that may hold `bytes_max`, oldest first.

    `open` is the one that is appended to.
    """

    def __init__(self, bytes_max: int) -> None:
        self.open: Segment | None = None
        self.bytes = 0
        self._segment_bytes_max = min(SEGMENT_BYTES_MAX, bytes_max // SEGMENTS_PER_SPOOL)
        self._copy_from_bytes = bytes_max // COPY_SHARE
        self._all: dict[str, Segment] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all.values())

    def begin(self, name: str, seed: int) -> Segment:
        """Note a new segment, which is appended to from now on."""
        self.open = self.find(name, seed, 0)
        return self.open

    def find(self, name: str, seed: int, size: int) -> Segment:
        """Note a segment that is there already."""
        assert name not in self._all, f"segment {name} is known"
        segment = self._all[name] = Segment(name, seed, size)
        self.bytes += size
        return segment

    def grow(self, segment: Segment, size: int) -> None:
        """Note that a segment has become longer; one that is full is closed."""
        segment.bytes += size
        self.bytes += size
        if segment is self.open and segment.bytes >= self._segment_bytes_max:
            self.open = None

    def unwanted(self) -> list[Segment]:
        """Return the closed segments without tickets."""
        return [segment for segment in self if not segment.tickets and segment is not self.open]

    def to_copy(self) -> Segment | None:
        """Return the oldest closed segment that is kept for little, when too much lies there."""
        if self.bytes <= self._copy_from_bytes:
            return None
        return next((each for each in self if each.sparse and each is not self.open), None)

    def forget(self, segment: Segment) -> None:
        """A segment is gone from the folder."""
        del self._all[segment.name]
        self.bytes -= segment.bytes
