"""The blocks of queue items that lie in runs, as the state of a shard has them. Pure.

A *lane* is a queue, a key and a priority. Its items are delivered in the order of due time and arrival. The blocks
behind the first ones of a long lane leave the memory: their owner stores them as a run, an object of the store. Then a
*spill* names it, and the ids of its blocks. A block that a decision has changed meanwhile stays in memory, and its copy
in the run is dead. Before the items are due, decisions *bring* the blocks back. They have the whole blocks, so no fold
reads a run.

For each run the state has a place: no block up to it is in the run any more. It has the ids of the blocks that are
still there, so a block that comes again is known. A block may be brought out of order, because a request names it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from memq.errors import CorruptDataError
from memq.format.held_object import HeldBlock
from memq.format.state_log.run import BEFORE_ALL, NamedRun, RunPlace

ID_BYTES = 8


class QueueLane(NamedTuple):
    """Queue, key and priority of items that are delivered in the order of due time and arrival."""

    queue: str
    key: str
    priority: int


class SpillBlocksDecision(msgspec.Struct, frozen=True, tag="spill"):
    """Blocks of one lane are in the object `run`. `ids` has 8 bytes for each of them, in their order."""

    run: NamedRun
    lane: QueueLane
    ids: bytes


class BroughtBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block of a run: its arrival, the object that has it, its terms as a lane, and its place there."""

    arrival: int
    key: str
    lane: str
    block: HeldBlock


class BringBlocksDecision(msgspec.Struct, frozen=True, tag="bring"):
    """Blocks of a run come back into memory.

    The run was brought up to `before`, and is brought up to `to` now. `head` is the place of its next block.
    """

    run: str
    before: RunPlace
    to: RunPlace
    head: RunPlace
    blocks: tuple[BroughtBlock, ...]


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run in a snapshot, with the number of its items. `ids` is as in `SpillBlocksDecision`."""

    run: NamedRun
    lane: QueueLane
    at: RunPlace
    head: RunPlace
    items: int
    ids: bytes


class SpilledRun:
    """A run in the state: no block up to `at` is there any more, and the next one is at `head`."""

    __slots__ = ("_encoded", "at", "head", "ids", "items", "lane", "run")

    def __init__(self, saved: SavedRun) -> None:
        self.run, self.lane, self.items = saved.run, saved.lane, saved.items
        self.at, self.head = saved.at, saved.head
        self.ids = set(ids_in(saved.ids))
        self._encoded: bytes | None = saved.ids

    def take(self, id_: int, items: int) -> bool:
        """Note that a block of `items` items leaves the run; whether it was there."""
        if id_ not in self.ids:
            return False
        self.ids.discard(id_)
        self.items -= items
        self._encoded = None
        return True

    def saved(self) -> SavedRun:
        """Return the run for a snapshot."""
        if self._encoded is None:
            self._encoded = bytes_of(sorted(self.ids))
        return SavedRun(self.run, self.lane, self.at, self.head, self.items, self._encoded)


class RunHead(NamedTuple):
    """The first place of a lane in runs, and the key of the run that has it."""

    lane: QueueLane
    place: RunPlace
    run: str

    @property
    def due_ms(self) -> int:
        """When the first block is due (Unix ms)."""
        return self.place[0]


class SpilledBlocks:
    """The runs of one shard."""

    def __init__(self) -> None:
        self.runs: dict[str, SpilledRun] = {}  # by key
        self._of_queue: dict[str, dict[str, SpilledRun]] = {}

    def __len__(self) -> int:
        return sum(len(each.ids) for each in self.runs.values())

    def run_of(self, id_: int) -> SpilledRun | None:
        """Return the run that has a block; None if the block is in no run."""
        return next((each for each in self.runs.values() if id_ in each.ids), None)

    def of_queue(self, queue: str) -> Iterable[SpilledRun]:
        """Return the runs of a queue."""
        return self._of_queue.get(queue, {}).values()

    def heads(self, queue: str) -> Iterator[RunHead]:
        """Yield the head of each run of a queue."""
        for each in self.of_queue(queue):
            yield RunHead(each.lane, each.head, each.run.key)

    def add(self, saved: SavedRun) -> None:
        """Add a run."""
        self.runs[saved.run.key] = self._of_queue.setdefault(saved.lane.queue, {})[saved.run.key] = SpilledRun(saved)

    def spill(self, decision: SpillBlocksDecision, moved: Mapping[int, RunPlace], items: int) -> None:
        """Add a run with the blocks `moved`, which have left the memory, and their places."""
        head = min(moved.values())
        self.add(SavedRun(decision.run, decision.lane, BEFORE_ALL, head, items, bytes_of(moved)))

    def find(self, decision: BringBlocksDecision) -> SpilledRun | None:
        """Return the run of a decision; None if it was brought to another place meanwhile."""
        found = self.runs.get(decision.run)
        return found if found is not None and found.at == decision.before else None

    def brought(self, run: SpilledRun, decision: BringBlocksDecision) -> None:
        """Note that blocks have left a run; an empty run goes."""
        run.at, run.head = decision.to, decision.head
        if run.ids:
            return
        del self.runs[run.run.key]
        known = self._of_queue[run.lane.queue]
        del known[run.run.key]
        if not known:
            del self._of_queue[run.lane.queue]


def ids_in(data: bytes) -> Iterator[int]:
    """Return ids of blocks from their bytes. Raises: CorruptDataError for a wrong number of bytes."""
    if len(data) % ID_BYTES:
        raise CorruptDataError(f"{len(data)} bytes are no ids of blocks of queue items")
    numbers = array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return iter(numbers)


def bytes_of(ids: Iterable[int]) -> bytes:
    """Return ids of blocks as bytes, 8 for each, little endian."""
    numbers = array("Q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
