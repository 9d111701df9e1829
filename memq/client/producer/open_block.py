"""Where records wait: the open block of each partition, and the blocks that were cut from it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from memq.client.producer.delivery import AsyncDelivery, Delivery
from memq.client.producer.fields import RecordColumns, RecordFields
from memq.client.producer.partitioner import PartitionMap
from memq.client.producer.window_events import UnackedBlock
from memq.errors import MemqError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.limits import SLOTS
from memq.topic import Topic

# Shapes of records: only a value; value and key; value, key and timestamp; anything.
MIXED, PLAIN, KEYED, TIMED = range(4)
ROW_COSTS = {PLAIN: 5, KEYED: 9, TIMED: 17}  # what the columns of a row take beside the bytes of its cells
_WIDTHS = {PLAIN: 1, KEYED: 2, TIMED: 3}  # cells of a row
_ONCE_COST = 16


class OpenBlock:
    """Attributes of all open blocks: a place in the producer, a promise, a size.

    `limit` is the raw size up to which the block may grow before anybody must be asked: it starts small and
    doubles, so that thousands of open blocks of a few records claim little of the producer's memory.
    """

    __slots__ = ("delivery", "home", "limit", "opened_s", "shape", "slots_hold")

    def __init__(self, home: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float) -> None:
        self.home = home
        self.delivery = delivery
        self.limit = limit
        self.opened_s = opened_s
        self.shape = MIXED
        self.slots_hold = True  # all keys lie in the partition's slot range: nobody chose the partition himself

    def grow(self, limit: int) -> None:
        """Raise the limit."""
        self.limit = limit


class RowBlock(OpenBlock):
    """An open block of records with the same shape: cells in one list, so a record is one step.

    That makes a way in without the lock, which would cost half of a `send`. The rule, which rests on the GIL (each
    step is atomic, and seen by all threads in its order):

    - who adds: `cells.extend(row)`, a tuple of value, key and timestamp as far as the shape has them, or just
      `cells.append(value)`; then looks at `closed`, and when it is true calls `SendBuffer.place_late`;
    - who ends the block (with the lock): sets `closed`, then reads how many cells there are. These it takes.

    A row that is not among them was added after `closed` was set, so whoever added it sees that, and takes
    it out of `cells` again by its identity. Two threads may add the very same objects: then each may take the
    other's, which is the same record. `room`, what is left of the limit, may lose an update between threads; it only
    decides when to seal.
    Cells and not tuples: the columns are slices, a sixth of what picking them out of tuples costs, and the garbage
    collector is not called for every 700 records.
    """

    __slots__ = ("cells", "closed", "count_closed", "room", "row_cost", "width")

    def __init__(
        self, home: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float, shape: int
    ) -> None:
        super().__init__(home, delivery, limit, opened_s)
        self.shape = shape
        self.row_cost = ROW_COSTS[shape]
        self.width = _WIDTHS[shape]
        self.room = limit - _ONCE_COST
        self.cells: list[Any] = []
        self.closed = False
        self.count_closed = 0

    @property
    def count(self) -> int:
        """How many records wait."""
        return len(self.cells) // self.width

    @property
    def raw_bytes(self) -> int:
        """Upper bound of the raw length."""
        return self.limit - self.room

    def grow(self, limit: int) -> None:
        """Raise the limit."""
        self.room += limit - self.limit
        self.limit = limit

    def append(self, fields: RecordFields) -> None:
        """Add a record of this shape."""
        self.room -= fields.size + self.row_cost
        self.cells.extend(fields.timed[: self.width])

    def extend(self, many: RecordColumns, start: int, end: int, size: int) -> None:
        """Add records of this shape, which is PLAIN; `size` is the sum of their bytes."""
        self.room -= size + self.row_cost * (end - start)
        self.cells.extend(many.values[start:end])

    def close(self) -> None:
        """End the way in without the lock; what came before are `count_closed` rows."""
        self.closed = True
        self.count_closed = len(self.cells) // self.width

    def take_late(self, row: tuple[object, ...]) -> bool:
        """Take a row back that came after the end; false when it came in time."""
        cells, width = self.cells, self.width
        for at in range(self.count_closed * width, len(cells), width):
            if all(cell is own for cell, own in zip(cells[at : at + width], row, strict=True)):
                del cells[at : at + width]
                return True
        return False

    def build(self) -> BlockBuilder:
        """Return the rows as columns, after `close`."""
        builder = BlockBuilder()
        width, end = self.width, self.count_closed * self.width
        keys = self.cells[1:end:width] if width > 1 else None
        times = self.cells[2:end:width] if width > 2 else None
        builder.fill(self.cells[0:end:width], keys, times, self.raw_bytes)
        return builder


class MixedBlock(OpenBlock):
    """An open block for records of all shapes, in columns. It is only touched with the lock."""

    __slots__ = ("builder",)

    def __init__(self, home: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float) -> None:
        super().__init__(home, delivery, limit, opened_s)
        self.builder = BlockBuilder()

    @classmethod
    def instead_of(cls, block: RowBlock) -> MixedBlock:
        """Return a block that continues a closed `block` and keeps its promise."""
        mixed = cls(block.home, block.delivery, block.limit, block.opened_s)
        mixed.slots_hold = block.slots_hold
        if block.count_closed:
            mixed.builder = block.build()
        return mixed

    @property
    def count(self) -> int:
        """How many records wait."""
        return self.builder.count

    @property
    def raw_bytes(self) -> int:
        """Upper bound of the raw length."""
        return self.builder.raw_bytes

    @property
    def row_cost(self) -> int:
        """The bytes of a row's columns in addition to its cells."""
        return self.builder.row_cost

    def append(self, fields: RecordFields) -> None:
        """Add a record. Raises: TooLargeError, InvalidRequestError."""
        self.builder.append(*fields)

    def extend(self, many: RecordColumns, start: int, end: int, size: int) -> None:
        """Add records; `size` is the sum of their bytes. Raises: TooLargeError, InvalidRequestError."""
        self.builder.extend(*many.part(start, end))

    def close(self) -> None:
        """Nothing: the lock is the only way in."""

    def build(self) -> BlockBuilder:
        """Return the columns."""
        return self.builder


def shape_of(fields: RecordFields) -> int:
    """Return the shape of a record."""
    if fields.headers or fields.tag is not None:
        return MIXED
    if fields.key is None:
        return PLAIN if fields.timestamp_ms is None else MIXED
    return KEYED if fields.timestamp_ms is None else TIMED


class PendingBlock(UnackedBlock):
    """A block that was cut, until it is settled. `ready` once it is sealed or the seal has failed.

    `slots` hold the keys of its records: those of its partition at the moment of the cut.
    """

    __slots__ = ("block", "claimed", "delivery", "error", "home", "ready", "slots")

    def __init__(self, block: RowBlock | MixedBlock, first: int, records: int, deadline_s: float) -> None:
        super().__init__(first, records, deadline_s)
        self.block: RowBlock | MixedBlock | None = block
        self.home = block.home
        self.delivery = block.delivery
        self.claimed = block.limit
        self.error: MemqError | None = None
        self.ready = False
        self.slots = block.home.slots if block.slots_hold else (0, SLOTS - 1)


class Gate(NamedTuple):
    """Slots moved from `before`: blocks from `first` on wait for those of `before` below `below`."""

    first: int
    before: PartitionBuffer
    below: int


class PartitionBuffer:
    """The records of one topic partition that are on this side of the window.

    `unsettled` are the first sequences of its blocks, oldest first, until they are settled. `gates` hold blocks back,
    `heirs` are those that wait for blocks of this one. `cut` keeps the order of the sequences while several threads
    seal. `backlog` is what the I/O side says: how many sealed blocks wait for the socket; while there are some, sealing
    small blocks gains nothing. `start` is the instance of a named producer: its epoch, and where it goes on.
    """

    __slots__ = (
        "backlog",
        "cut",
        "dirty",
        "first_limit",
        "first_sequence",
        "gates",
        "heirs",
        "next_sequence",
        "open",
        "partition",
        "producer_epoch",
        "scope",
        "slots",
        "topic",
        "unsettled",
    )

    def __init__(self, topic: Topic, partition: int, slots: tuple[int, int], start: tuple[int, int] = (0, 0)) -> None:
        self.topic = topic
        self.partition = partition
        self.slots = slots
        self.scope = scope_of(topic.id_bytes, partition)
        self.producer_epoch, self.first_sequence = start
        self.next_sequence = self.first_sequence
        self.open: RowBlock | MixedBlock | None = None
        self.cut: deque[PendingBlock] = deque()
        self.backlog = 0
        self.first_limit = 0  # of the next block: as large as the last one became, since asking often costs
        self.dirty = False  # the I/O side has been told to look here
        self.unsettled: dict[int, None] = {}
        self.gates: list[Gate] = []
        self.heirs: list[PartitionBuffer] = []

    def holds_back(self, sequence: int) -> bool:
        """Whether a block waits at a gate; open gates are removed."""
        for gate in list(self.gates):
            if next(iter(gate.before.unsettled), gate.below) >= gate.below:
                self.gates.remove(gate)
                gate.before.heirs.remove(self)
        return any(gate.first <= sequence for gate in self.gates)

    def stalled(self) -> bool:
        """Whether blocks wait for the socket or the owner."""
        return self.backlog > 0


class Route:
    """How the records of a topic find their partition: the map, and a buffer for each of its places.

    `current` until another map takes its place: who finds a record in a block by this one then looks again.
    """

    __slots__ = (
        "buffers",
        "current",
        "delivery_timeout_s",
        "lockless",
        "map",
        "record_bytes_max",
        "sticky",
        "topic",
        "turn",
    )

    def __init__(
        self, topic: Topic, buffers: list[PartitionBuffer], delivery_timeout_s: float, turn: int, *, lockless: bool
    ) -> None:
        self.topic = topic
        self.map = PartitionMap(topic)
        self.buffers = buffers
        self.current = True
        self.record_bytes_max = topic.settings.record_bytes_max
        self.delivery_timeout_s = min(delivery_timeout_s, topic.settings.delivery_timeout_ms / 1000)
        self.lockless = lockless  # the way without the lock is open
        self.sticky: RowBlock | MixedBlock | None = None  # the block that keyless records go to
        self.turn = turn  # the place of the last one

    def resume_points(self) -> dict[int, int]:
        """Return, by partition, the sequence that its producer began with."""
        return {buffer.partition: buffer.first_sequence for buffer in self.buffers}

    def next_turn(self) -> PartitionBuffer:
        """Return the partition whose turn it is to get records without a key."""
        self.turn = self.map.next_place(self.turn, lambda place: self.buffers[place].stalled())
        return self.buffers[self.turn]
