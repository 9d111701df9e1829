"""Where records wait: the open block of each partition, and the blocks that were cut from it."""

from __future__ import annotations

from collections import deque

from memq.client.delivery import AsyncDelivery, Delivery
from memq.client.partitioner import PartitionMap
from memq.client.window_events import UnackedBlock
from memq.errors import MemqError
from memq.format.block import scope_of
from memq.format.builder import BlockBuilder
from memq.topic import Topic


class OpenBlock(BlockBuilder):
    """A block builder with its place in the producer.

    `limit` is the raw size up to which the block may grow before anybody must be asked: it starts small and
    doubles, so that thousands of open blocks of a few records claim little of the producer's memory.
    """

    __slots__ = ("delivery", "home", "limit", "opened_s", "slots_hold")

    def __init__(self, home: PartitionBuffer, delivery: Delivery | AsyncDelivery, limit: int, opened_s: float) -> None:
        super().__init__()
        self.home = home
        self.delivery = delivery
        self.limit = limit
        self.opened_s = opened_s
        self.slots_hold = True  # all keys lie in the partition's slot range: nobody chose the partition himself


class PendingBlock(UnackedBlock):
    """A block that was cut, until it is settled. `ready` once it is sealed or the seal has failed."""

    __slots__ = ("builder", "claimed", "delivery", "error", "home", "ready")

    def __init__(self, block: OpenBlock, first: int, deadline_s: float) -> None:
        super().__init__(first, block.count, deadline_s)
        self.builder: OpenBlock | None = block
        self.home = block.home
        self.delivery = block.delivery
        self.claimed = block.limit
        self.error: MemqError | None = None
        self.ready = False


class PartitionBuffer:
    """The records of one topic partition that are on this side of the window.

    `cut` keeps the order of the sequences while several threads seal. `backlog` is what the I/O side says:
    how many sealed blocks wait for the socket; while there are some, sealing small blocks gains nothing.
    """

    __slots__ = ("backlog", "cut", "dirty", "next_sequence", "open", "partition", "scope", "slots", "topic")

    def __init__(self, topic: Topic, partition: int, slots: tuple[int, int]) -> None:
        self.topic = topic
        self.partition = partition
        self.slots = slots
        self.scope = scope_of(topic.id_bytes, partition)
        self.next_sequence = 0
        self.open: OpenBlock | None = None
        self.cut: deque[PendingBlock] = deque()
        self.backlog = 0
        self.dirty = False  # the I/O side has been told to look here

    def stalled(self) -> bool:
        """Whether blocks wait for the socket or the owner."""
        return self.backlog > 0


class Route:
    """How the records of a topic find their partition: the map, and a buffer for each of its places."""

    __slots__ = ("buffers", "delivery_timeout_s", "map", "record_bytes_max", "sticky", "topic", "turn")

    def __init__(self, topic: Topic, buffers: list[PartitionBuffer], delivery_timeout_s: float, turn: int) -> None:
        self.topic = topic
        self.map = PartitionMap(topic)
        self.buffers = buffers
        self.record_bytes_max = topic.settings.record_bytes_max
        self.delivery_timeout_s = min(delivery_timeout_s, topic.settings.delivery_timeout_ms / 1000)
        self.sticky: OpenBlock | None = None  # the block that keyless records go to
        self.turn = turn  # the place of the last one

    def next_turn(self) -> PartitionBuffer:
        """Return the partition whose turn it is to get records without a key."""
        self.turn = self.map.next_place(self.turn, lambda place: self.buffers[place].stalled())
        return self.buffers[self.turn]
