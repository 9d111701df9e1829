"""The open block of each partition, and the blocks that were cut from it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from memq.client.producer.delivery import AsyncDelivery, Delivery
from memq.client.producer.partitioner import PartitionMap
from memq.client.producer.window_events import UnackedBlock
from memq.errors import MemqError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.kernel import compiled_module, rows
from memq.limits import SLOTS
from memq.topic import Topic

native: Any = compiled_module("producer")
kernel: Any = native or rows  # what makes rows, slots and lanes


class OpenBlock(BlockBuilder):
    """The builder of a partition's next block, with its buffer in the producer and its delivery.

    `limit` is the raw size that the block may reach before it needs more of the producer's memory. It starts small and
    doubles, so thousands of open blocks of a few records claim little memory. `claimed` are the claimed bytes.
    """

    __slots__ = ("claimed", "delivery", "home", "opened_s", "slots_hold")

    rows_of_all_shapes = native is not None

    def __init__(self, home: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float) -> None:
        super().__init__(limit)
        self.claimed = limit + home.front_bytes(limit)
        self.home = home
        self.delivery = delivery
        self.opened_s = opened_s
        self.slots_hold = True  # all keys are in the partition's slot range: no caller chose the partition

    def grow(self, limit: int) -> None:
        """See `BlockBuilder.grow`."""
        self.claimed += limit - self.limit
        super().grow(limit)

    def close(self) -> None:
        """See `BlockBuilder.close`. The next block of the partition has room for as many bytes of columns."""
        super().close()
        if self.rows is not None:
            self.home.column_bytes = self.rows.column_bytes

    def _new_rows(self, shape: int) -> rows.Rows:
        return kernel.Rows(shape, self.limit, self.delivery, self.home.front_bytes(self.limit))  # type: ignore[no-any-return]


class PendingBlock(UnackedBlock):
    """A block that was cut, until it is settled. `ready` once it is sealed or the seal has failed.

    `slots` hold the keys of its records: those of its partition at the moment of the cut.
    """

    __slots__ = ("builder", "claimed", "delivery", "error", "home", "ready", "slots")

    def __init__(
        self,
        builder: BlockBuilder,
        home: PartitionBuffer,
        delivery: Delivery | AsyncDelivery,
        deadline_s: float,
        claimed: int,
    ) -> None:
        super().__init__(home.next_sequence, builder.count, deadline_s)
        self.builder: BlockBuilder | None = builder
        self.home = home
        self.delivery = delivery
        self.claimed = claimed
        self.error: MemqError | None = None
        self.ready = False
        self.slots = (0, SLOTS - 1)


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
    small blocks gains nothing. `start` is the instance of a named producer: its epoch, and where it continues. `slot`
    has the rows of the open block, for the lock-free paths.
    """

    __slots__ = (
        "backlog",
        "column_bytes",
        "cut",
        "dirty",
        "first_limit",
        "first_sequence",
        "gates",
        "heirs",
        "next_sequence",
        "open",
        "open_rows",
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
        self.open: OpenBlock | None = None
        self.open_rows: rows.OpenRows = kernel.OpenRows()
        self.cut: deque[PendingBlock] = deque()
        self.backlog = 0
        self.first_limit = 0  # of the next block: as large as the last one became, since asking often costs
        self.column_bytes = 0  # of the last block, without its values, if its rows were compiled
        self.dirty = False  # the I/O side has been asked to look here
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

    def front_bytes(self, limit: int) -> int:
        """Return the memory in front of the values of compiled rows, for a block of `limit` bytes."""
        return min(self.column_bytes, limit // 4)

    def stalled(self) -> bool:
        """Whether blocks wait for the socket or the owner."""
        return self.backlog > 0


class Route:
    """The way of a topic's records to their partitions: the map, and a buffer for each partition in it.

    It is `current` until another route replaces it; a caller that holds a replaced route takes the new one.
    """

    __slots__ = (
        "buffers",
        "current",
        "delivery_timeout_s",
        "lane",
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
        # the lock-free path, if it is open for this topic
        self.lane: rows.Lane | None = (
            kernel.Lane(self.map.firsts, [each.open_rows for each in buffers]) if lockless else None
        )
        self.sticky: OpenBlock | None = None  # the block that keyless records go to
        self.turn = turn  # the index of the last one

    def resume_points(self) -> dict[int, int]:
        """Return, by partition, the sequence that its producer began with."""
        return {buffer.partition: buffer.first_sequence for buffer in self.buffers}

    def next_turn(self) -> PartitionBuffer:
        """Return the partition whose turn it is to get records without a key."""
        self.turn = self.map.next_index(self.turn, lambda index: self.buffers[index].stalled())
        return self.buffers[self.turn]
