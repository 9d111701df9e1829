"""Which segments there are, how much they hold, and when one is wanted no more. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Segment:
    """One file of the spool. It stays while there are tickets for it; `kept` says that it is not removed even then."""

    __slots__ = ("bytes", "kept", "name", "seed", "tickets")

    def __init__(self, name: str, seed: int, size: int) -> None:
        self.name = name
        self.seed = seed
        self.bytes = size
        self.tickets = 0
        self.kept = False


class Ticket:
    """Some blocks that lie, or will lie, in a segment. `release` once the queue holds all of them, and never before."""

    __slots__ = ("_freed", "_segment", "released")

    def __init__(self, freed: Callable[[], None]) -> None:
        self.released = False
        self._segment: Segment | None = None
        self._freed = freed

    def bind(self, segment: Segment) -> None:
        """The blocks lie in this segment now."""
        assert self._segment is None, "blocks were written twice"
        if not self.released:
            self._segment = segment
            segment.tickets += 1

    def release(self) -> None:
        """The blocks need not lie on disk any more; releasing twice is fine."""
        if self.released:
            return
        self.released = True
        if self._segment is not None:
            self._segment.tickets -= 1
            if not self._segment.tickets:
                self._freed()


class Segments:
    """All segments, oldest first; `open` is the one that is appended to."""

    def __init__(self, segment_bytes_max: int) -> None:
        self.open: Segment | None = None
        self.bytes = 0
        self._segment_bytes_max = segment_bytes_max
        self._all: dict[str, Segment] = {}

    def __len__(self) -> int:
        return len(self._all)

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
        return [segment for segment in self._all.values() if not segment.tickets and segment is not self.open]

    def forget(self, segment: Segment) -> None:
        """A segment is gone from the folder."""
        del self._all[segment.name]
        self.bytes -= segment.bytes
