"""Readers without a group, with and without a filter, that read a part of one partition from a start to an end.

Each gets exactly the wanted records of the part, in order, and counts all others of it as left out.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from memq.client.consumer.batch import topic_partition_of
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.errors import CorruptDataError, MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import PORT
from memq.simulation.world.node import SimNode
from memq.topic import Position, ReadPartition
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.consumers import is_explained
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Delivered
from tests.simulation.wishes import WISHES, Wish, facets_of

BOUNDED_READER = "bounded-reader"
EVERY_S_MAX = 4.0
READ_S_MAX = 60.0
NO_FILTER_RATE = 0.1
FROM_THE_BEGINNING_RATE = 0.4
TO_THE_END_RATE = 0.3


class BoundedReads:
    """All bounded reads of one run; `done` counts those that came to their end, and `left_out` their records."""

    def __init__(self, cluster: CheckedCluster) -> None:
        self.done = self.left_out = 0
        self._cluster = cluster

    async def run(self, node: SimNode, runtime: Runtime) -> None:
        """Read until the process dies; a read that fails is compared with nothing."""
        while True:
            await asyncio.sleep(node.random.uniform(0, EVERY_S_MAX))
            logs = self._cluster.checker.logs
            left = [partition for partition, log in logs.items() if log.begin < len(log.entries)]
            if left:
                partition = node.random.choice(left)
                with suppress(MemqError, TimeoutError):
                    await self._read(node.random, runtime, partition, logs[partition])

    async def _read(self, draw: random.Random, runtime: Runtime, partition: ReadPartition, log: ReadLog) -> None:
        world, checker = self._cluster.world, self._cluster.checker
        wish = None if draw.random() < NO_FILTER_RATE else draw.choice(WISHES)
        start, end = self._bounds(draw, partition, log)
        part = BoundedPart(partition, start, end, wish, log)
        cuts, place = checker.cuts, topic_partition_of(partition)
        consumer = AsyncConsumer(
            [f"{host}:{PORT}" for host, _port in self._cluster.addresses()],
            partition.topic,
            start={place: start},
            end={place: end},
            tags=None if wish is None else wish.tags,
            where=None if wish is None else wish.where,
            audit=False,
            prefetch_bytes_max=min(self._cluster.shape.prefetch_bytes_max, draw.choice([8 << 10, 64 << 10, 1 << 20])),
            runtime=runtime,
        )
        found: list[Found] = []
        try:
            async with asyncio.timeout(READ_S_MAX), consumer:
                async for batch in consumer:
                    for record in batch:
                        at, value = record.position, record.value or b""
                        found.append((at.pointer_offset, at.record_index, value))
                        if (record.tag, tuple(record.headers)) != facets_of(value):
                            world.fail(f"record {value[:60]!r} has tag {record.tag} and headers {record.headers}")
                position, counts = consumer.position().get(place), consumer.stats().counts
        except CorruptDataError as error:
            if not is_explained(error, world.misreads):
                world.fail("a bounded read reports damage, but all answers to reads of the object were right", error)
            return
        if checker.cuts == cuts:
            late = [one for one in found if checker.groups.is_late_copy(log, one[:2], one[2])]
            for words in part.findings(found, late, position, counts):
                world.fail(f"read of {partition} from {start} to {end} with {wish}: {words}")
            self.done += 1
            self.left_out += counts.filtered_records

    def _bounds(self, draw: random.Random, partition: ReadPartition, log: ReadLog) -> tuple[Position, Position]:
        """Draw a start and an end within what retention has left."""
        places = sorted(self._place(draw, log) for _ in range(2))
        if draw.random() < FROM_THE_BEGINNING_RATE:
            places[0] = (log.begin, 0)
        if draw.random() < TO_THE_END_RATE:
            places[1] = (len(log.entries), 0)
        start, end = (Position(partition.partition, *place) for place in places)
        return start, end

    def _place(self, draw: random.Random, log: ReadLog) -> tuple[int, int]:
        offset = draw.randrange(log.begin, len(log.entries))
        return offset, draw.randrange(max(1, log.entries[offset].pointer.records))


Found = tuple[int, int, bytes]  # pointer offset, record index, value


class BoundedPart:
    """The expected result of one read: the part of a log from `start` up to `end` as it is now."""

    def __init__(
        self, partition: ReadPartition, start: Position, end: Position, wish: Wish | None, log: ReadLog
    ) -> None:
        self._end = end
        low, high = (start.pointer_offset, start.record_index), (end.pointer_offset, end.record_index)
        part = log.stream[log.index_of(*low) : log.index_of(*high)]
        self._wanted = [_found(one) for one in part if wish is None or wish.wants_value(one.value)]
        self._others = len(part) - len(self._wanted)
        self._stored = 0  # with copies
        for entry in log.entries[low[0] : high[0] + 1]:
            for block in entry.blocks:
                first = max(block.record_index, low[1] if entry.offset == low[0] else 0)
                next_ = block.record_index + len(block.values)
                self._stored += max(0, min(next_, high[1] if entry.offset == high[0] else next_) - first)

    def findings(self, found: list[Found], late: list[Found], position: Position | None, counts: Counts) -> list[str]:
        """Return what is wrong with a read; `late` are copies of records that retention took."""
        sound = [one for one in found if one not in late or one in self._wanted]
        if sound != self._wanted:
            pairs = zip(sound, self._wanted, strict=False)
            wrong = next((number for number, (one, other) in enumerate(pairs) if one != other), -1)
            return [f"{len(sound)} records instead of {len(self._wanted)}, the first difference at {wrong}"]
        words: list[str] = []
        behind = position is not None and position > self._end and counts.expired_offsets  # retention took the end, too
        if position != self._end and not behind:
            words.append(f"it ends at {position}")
        if counts.records != len(found):
            words.append(f"it counts {counts.records} records, and gave out {len(found)}")
        most = self._stored - len(found)
        least = most if self._stored == self._others + len(self._wanted) else self._others
        if not least <= counts.filtered_records <= most:
            words.append(f"it counts {counts.filtered_records} records as left out, they are {least} to {most}")
        return words


def _found(one: Delivered) -> Found:
    return one.offset, one.record_index, one.value
