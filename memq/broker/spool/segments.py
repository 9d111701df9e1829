"""The segments of the spool: how much of each is needed, and which may be removed or copied.

Pure.
A segment is removed when none of its blocks is needed. One partition that can't publish, among thousands that can,
would thus keep nearly all segments. So when the spool is a quarter full, it searches for a segment that is needed by
half or less. It copies the needed blocks to the end, and removes the segment. A copy frees at least as many bytes as it
writes, so in total no more is copied than was written. The spool stays below that quarter plus a segment, or below
twice the needed bytes plus a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memq.limits import MIB

SEGMENTS_PER_SPOOL = 16
SEGMENT_BYTES_MAX = 16 * MIB
COPY_SHARE = 4  # copying begins when the spool is a quarter full
SPARSE_SHARE = 2  # a segment that is needed by half or less is copied

Span = tuple[int, int]  # bytes of a segment: from, up to, whole entries


class Segment:
    """One file of the spool. It stays while it has tickets.

    A `kept` segment is set aside after its last ticket, not removed. `wanted_bytes` are the bytes of its tickets. A
    `fixed` segment can't be copied.
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
        """Whether half of the segment or less is needed, and it may be copied."""
        return bool(self.tickets) and self.wanted_bytes * SPARSE_SHARE <= self.bytes and not (self.kept or self.fixed)


class Ticket:
    """Some blocks that are, or will be, in a segment.

    The holder calls `release` when the queue holds all of them, never before.
    """

    __slots__ = ("_freed", "_segment", "released", "spans")

    def __init__(self, freed: Callable[[], None]) -> None:
        self.released = False
        self.spans: tuple[Span, ...] = ()
        self._segment: Segment | None = None
        self._freed = freed

    def bind(self, segment: Segment, spans: tuple[Span, ...]) -> None:
        """Note that the blocks are in `segment`, and survive a power loss."""
        assert self._segment is None, "blocks were written twice"
        if not self.released:
            self._segment, self.spans = segment, spans
            segment.tickets[self] = None
            segment.wanted_bytes += _size(spans)

    def move(self, segment: Segment, spans: tuple[Span, ...]) -> None:
        """Note that the blocks were copied to `segment`; the old segment no longer needs them."""
        if self._segment is not None and not self.released:
            self._unbind(self._segment)
            self._segment = None
            self.bind(segment, spans)

    def release(self) -> None:
        """Note that the blocks are not needed on disk; a second call has no effect."""
        if self.released:
            return
        self.released = True
        if self._segment is not None:
            self._unbind(self._segment)
            if self._segment.sparse or not self._segment.tickets:
                self._freed()

    def _unbind(self, segment: Segment) -> None:
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
        """Note an existing segment."""
        assert name not in self._all, f"segment {name} is known"
        segment = self._all[name] = Segment(name, seed, size)
        self.bytes += size
        return segment

    def grow(self, segment: Segment, size: int) -> None:
        """Note that a segment has become longer; close it if it is full."""
        segment.bytes += size
        self.bytes += size
        if segment is self.open and segment.bytes >= self._segment_bytes_max:
            self.open = None

    def unwanted(self) -> list[Segment]:
        """Return the closed segments without tickets."""
        return [segment for segment in self if not segment.tickets and segment is not self.open]

    def to_copy(self) -> Segment | None:
        """Return the oldest closed segment that is `sparse`, if the spool is over a quarter full."""
        if self.bytes <= self._copy_from_bytes:
            return None
        return next((each for each in self if each.sparse and each is not self.open), None)

    def forget(self, segment: Segment) -> None:
        """Note that a segment is no longer in the folder."""
        del self._all[segment.name]
        self.bytes -= segment.bytes
