"""The open block of each partition, and the blocks that were cut from it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from memq.client.producer.delivery import AsyncDelivery, Delivery
from memq.client.producer.partitioner import PartitionMap
from memq.client.producer.settings import ProducerSettings
from memq.client.producer.window_events import UnackedBlock
from memq.errors import MemqError
from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.blocks.header import scope_of
from memq.kernel import compiled_module, rows
from memq.limits import SLOTS
from memq.topic import Topic

native: Any = compiled_module("producer")
kernel: Any = native or rows  # creates rows and lanes


class OpenBlock(BlockBuilder):
    """The builder of a partition's next block, with the partition's buffer and the block's delivery.

    `limit` is the raw size that the block may reach before it needs more of the producer's memory. It starts small and
    doubles, so thousands of open blocks of a few records claim little memory. `claimed` are the claimed bytes.
    """

    __slots__ = ("buffer", "claimed", "delivery", "opened_s", "slots_hold")

    rows_of_all_shapes = native is not None

    def __init__(
        self, buffer: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float
    ) -> None:
        super().__init__(limit)
        self.claimed = limit + buffer.front_bytes(limit)
        self.buffer = buffer
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
            self.buffer.column_bytes = self.rows.column_bytes

    def _new_rows(self, shape: int) -> rows.Rows:
        return kernel.Rows(shape, self.limit, self.delivery, self.buffer.front_bytes(self.limit))  # type: ignore[no-any-return]


class PendingBlock(UnackedBlock):
    """A block from its cut until it is settled. It is `ready` when its seal has succeeded or failed.

    The keys of its records are in the range `slots`: the range of its partition at the cut.
    """

    __slots__ = ("buffer", "builder", "claimed", "delivery", "error", "ready", "slots")

    def __init__(
        self,
        builder: BlockBuilder,
        buffer: PartitionBuffer,
        delivery: Delivery | AsyncDelivery,
        deadline_s: float,
        claimed: int,
    ) -> None:
        super().__init__(buffer.next_sequence, builder.count, deadline_s)
        self.builder: BlockBuilder | None = builder
        self.buffer = buffer
        self.delivery = delivery
        self.claimed = claimed
        self.error: MemqError | None = None
        self.ready = False
        self.slots = (0, SLOTS - 1)

    def seal(self, settings: ProducerSettings, producer_id: int, now_ms: int) -> SealedBlock:
        """Return the sealed block, encrypted if the producer has keys. A block is sealed once.

        Raises: as `BlockBuilder.seal` and `Encryption.seal_block`.
        """
        builder, self.builder = self.builder, None
        assert builder is not None, "a block is sealed once"
        sealed = builder.seal(
            producer_id=producer_id,
            first_sequence=self.first,
            scope=self.buffer.scope,
            now_ms=now_ms,
            codec=settings.codec,
            slot_range=self.slots,
            producer_epoch=self.buffer.producer_epoch,
        )
        if settings.encryption is None:
            return sealed
        return settings.encryption.seal_block(sealed, self.buffer.topic.id, self.buffer.partition)


class Gate(NamedTuple):
    """Holds blocks back after slots moved here from the partition `before`, to keep the order of each key.

    Blocks from sequence `first` on wait until `before` has settled its blocks below sequence `below`.
    """

    first: int
    before: PartitionBuffer
    below: int


class PartitionBuffer:
    """The records of one topic partition that its window does not have yet.

    `unsettled` has the first sequence of each block that is not settled, oldest first. `gates` hold blocks back.
    `followers` are the buffers whose gates wait for blocks of this one. `cut` keeps the order of the sequences while
    several threads seal. The I/O side sets `backlog`, the number of sealed blocks that wait for the socket. While it is
    above 0, sealing small blocks gains nothing. `start` describes the instance of a named producer: its epoch, and its
    first sequence. `open_rows` has the rows of the open block, for the lock-free paths.
    """

    __slots__ = (
        "backlog",
        "column_bytes",
        "cut",
        "dirty",
        "first_limit",
        "first_sequence",
        "followers",
        "gates",
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
        self.first_limit = 0  # raw bytes of the next block, from the size of the last one: each growth costs a claim
        self.column_bytes = 0  # of the last block, without its values, if its rows were compiled
        self.dirty = False  # the I/O side was woken for this buffer
        self.unsettled: dict[int, None] = {}
        self.gates: list[Gate] = []
        self.followers: list[PartitionBuffer] = []

    def holds_back(self, sequence: int) -> bool:
        """Whether a block waits at a gate; open gates are removed."""
        for gate in list(self.gates):
            if next(iter(gate.before.unsettled), gate.below) >= gate.below:
                self.gates.remove(gate)
                gate.before.followers.remove(self)
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
