"""Chooses the partition of a record: its key determines a slot, and the slot a partition.

Records without a key go to one partition for each block, in turn.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable

from memq.client.arguments import check_kind
from memq.errors import NotFoundError
from memq.topic import Topic

NAMED_MAX = 20  # partitions that the error about a missing one names


class PartitionMap:
    """A topic's partition map for lookups.

    The index of a partition is its number in the order of the slots, from 0.
    """

    def __init__(self, topic: Topic) -> None:
        parts = topic.taking
        self.partitions = [part.partition for part in parts]
        self.slots = [(part.slot_first, part.slot_last) for part in parts]
        self.firsts = [part.slot_first for part in parts]
        self._indexes = {partition: index for index, partition in enumerate(self.partitions)}
        self._name = topic.name

    def index_of_key(self, key: bytes) -> int:
        """Return the index of the partition that takes the key's slot, `crc32(key) >> 16`."""
        if len(self.firsts) == 1:
            return 0  # without computing the checksum
        return bisect_right(self.firsts, zlib.crc32(key) >> 16) - 1

    def index_of(self, partition: int) -> int:
        """Return the index of a partition that the caller chose. Raises: TypeError, NotFoundError."""
        check_kind("partition", partition, int)
        index = self._indexes.get(partition)
        if index is None:
            numbers = sorted(self.partitions)
            there = ", ".join(map(str, numbers[:NAMED_MAX])) + (", …" if len(numbers) > NAMED_MAX else "")
            raise NotFoundError(
                f"topic '{self._name}' has no partition {partition} that accepts records", hint=f"these do: {there}"
            )
        return index

    def next_index(self, index: int, stalled: Callable[[int], bool]) -> int:
        """Return the next index after `index` that is not stalled; the next one if all are."""
        count = len(self.partitions)
        for step in range(1, count + 1):
            if not stalled((index + step) % count):
                return (index + step) % count
        return (index + 1) % count
