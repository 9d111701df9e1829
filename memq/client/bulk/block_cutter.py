"""Cuts records into blocks: for writers with a given identity, imports and staged objects. Pure.

A block ends by the records alone: where the next one does not follow on, or does not fit. So a writer that gets the
same records again, single or many at once, cuts the same blocks, which owners and readers recognise.

The plan of a copy of a foreign log rests on that. A copied record has its source's offset as its sequence, under a
producer id that only the pair of source partition and target topic has. So it is the same record whoever copies it, and
when. memq drops what comes twice by whole blocks, so a copy that continues where another one was killed has to cut as
that one did: what was on its way then may still arrive. Three things make the cut:

1. It begins where a block ended: after the greatest sequence that the target's queue shows, or the plan's start.
2. It follows from the records alone.
3. It ends at the plan's end, not at the end that the source has by chance. So that is stored before the first record is
   sent, and a copy that finds a plan fulfills it before it makes the next one.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import cast

from memq.client.producer.fields import RecordColumns, RecordFields
from memq.client.producer.partitioner import PartitionMap
from memq.errors import TooLargeError
from memq.format.blocks.builder import BlockBuilder

# Imports and direct writers that were killed rely on these numbers: with others, `RULE`, which
# names them, and `DirectIdentity.producer_id` need another name.
BLOCK_BYTES_MAX = 256 << 10
BLOCK_RECORDS_MAX = 10_000
RULE = "memq-import1"
_PLAN = re.compile(rf"{RULE} (\d{{1,19}})\Z")


def producer_of(cluster: str, topic_id: str, partition: int, target_id: str) -> int:
    """Return the producer id of all copies of one source partition into one topic."""
    named = f"{RULE}\n{cluster}\n{topic_id}\n{partition}\n{target_id}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1 or 1


def encode_plan(end: int) -> str:
    """Return the metadata stored with the position: the offset at which the copy ends."""
    return f"{RULE} {end}"


def decode_plan(metadata: str) -> int | None:
    """Return the end of a plan; None for other text."""
    found = _PLAN.match(metadata)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Cut:
    """Records of one block: sequences from `first` on. `size` is the sum of their bytes.

    `chosen`: a record is in this partition by the caller's choice, not by its key.
    """

    topic: str
    partition: int
    first: int
    builder: BlockBuilder
    size: int
    chosen: bool

    @property
    def next(self) -> int:
        """The sequence after the last record."""
        return self.first + self.builder.count


class Cutter:
    """Cuts the records of one partition, in order, into blocks; the same for single and many."""

    def __init__(self, topic: str, partition: int, bytes_max: int = BLOCK_BYTES_MAX) -> None:
        self._topic = topic
        self._partition = partition
        self._bytes_max = bytes_max
        self._builder = BlockBuilder()
        self._first = 0
        self._size = 0
        self._chosen = False

    @property
    def count(self) -> int:
        """The number of records that wait for the end of their block."""
        return self._builder.count

    @property
    def next(self) -> int:
        """The sequence after the last record."""
        return self._first + self._builder.count

    def add(self, sequence: int, fields: RecordFields, size: int, *, chosen: bool = False) -> Cut | None:
        """Take a record of `size` bytes; return the block that ended before it.

        Raises: as `BlockBuilder.append`.
        """
        fits = self._size + size <= self._bytes_max and self.count < BLOCK_RECORDS_MAX
        ends = not (fits and sequence == self.next)
        builder = BlockBuilder() if ends else self._builder
        try:
            builder.append(*fields)  # before the block ends: a refused record must not take it along
        except TooLargeError:
            ends, builder = True, BlockBuilder()  # names of tags and headers, which `size` leaves out, filled the block
            builder.append(*fields)
        done = self.end() if ends else None
        self._builder = builder
        if ends:
            self._first = sequence
        self._size += size
        self._chosen = self._chosen or chosen
        return done

    def extend(self, many: RecordColumns, start: int, end: int, totals: Sequence[int]) -> int:
        """Take records of `many` from number `start` up to `end` as long as they fit.

        Return the number of the next. They follow on what came before. `totals` are the bytes of all records before
        each, and of all. Where nothing fits, end the block. Raises: as `BlockBuilder.append_many`.
        """
        if start == end:
            return end
        count, room = self._builder.count, self._bytes_max - self._size
        fits = bisect_right(totals, totals[start] + room, start + 1, end + 1) - 1
        next_ = min(fits, start + BLOCK_RECORDS_MAX - count)
        if not count:
            next_ = max(next_, start + 1)
        next_ = self._append(many, start, next_, totals)
        self._size += totals[next_] - totals[start]
        return next_

    def _append(self, many: RecordColumns, start: int, end: int, totals: Sequence[int]) -> int:
        """Add the records from `start` up to `end`; return the number of the first for which there is no room.

        Names of tags, which `totals` leaves out, may fill the block. Raises: TooLargeError, if no block has room for
        one.
        """
        done, step = start, end - start
        while step and done < end:
            stop = min(done + step, end)
            try:
                self._builder.append_many(*many.part(done, stop), totals[stop] - totals[done])
                done = stop
            except TooLargeError:
                if step == 1 and not self._builder.count:
                    raise
            step = (step + 1) // 2 if step > 1 else 0
        return done

    def end(self) -> Cut | None:
        """Return the remaining records as a block; None without any."""
        if not self._builder.count:
            return None
        done = Cut(self._topic, self._partition, self._first, self._builder, self._size, self._chosen)
        self._first, self._builder, self._size, self._chosen = done.next, BlockBuilder(), 0, False
        return done


class RecordCutter:
    """Finds the partition of each record, and cuts the records of each partition from sequence 0 on.

    Records without a key fill the block of the partition whose turn it is. The first record after a full block is
    still of the same partition: then the turn moves on.
    """

    def __init__(self, bytes_max: int = BLOCK_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._cutters: dict[tuple[str, int], Cutter] = {}
        self._turns: dict[str, int] = {}  # by topic the index of the partition whose turn it is

    def add(
        self, topic: str, partition_map: PartitionMap, fields: RecordFields, size: int, partition: int | None
    ) -> Cut | None:
        """Take a record; return a block that is full. Raises: as `Cutter.add`; NotFoundError for a partition."""
        free = fields.key is None and partition is None
        if partition is not None:
            index = partition_map.index_of(partition)
        else:
            index = self._turn(topic, partition_map) if fields.key is None else partition_map.index_of_key(fields.key)
        cutter = self._cutter(topic, partition_map, index)
        cut = cutter.add(cutter.next, fields, size, chosen=partition is not None)
        if cut is not None and free:
            self._next_turn(topic, partition_map)
        return cut

    def add_many(
        self, topic: str, partition_map: PartitionMap, many: RecordColumns, sizes: Sequence[int]
    ) -> Iterator[Cut]:
        """Take many records of these sizes, by key or in turn; yield the blocks that become full.

        Blocks are the same as with `add`. Raises: as `Cutter.extend`.
        """
        if many.keys is None:
            yield from self._add_in_turn(topic, partition_map, many, _totals(sizes))
        elif len(partition_map.partitions) == 1:
            yield from _extended(self._cutter(topic, partition_map, 0), many, _totals(sizes))
        elif None in many.keys:  # the turn follows from all records before
            times = many.timestamps_ms or repeat(None)
            for value, key, time_ms, size in zip(many.values, many.keys, times, sizes, strict=False):
                cut = self.add(topic, partition_map, RecordFields(value, key, None, time_ms, many.tag), size, None)
                if cut is not None:
                    yield cut
        else:
            rows: dict[int, list[int]] = {}
            for row, index in enumerate(map(partition_map.index_of_key, cast(Sequence[bytes], many.keys))):
                rows.setdefault(index, []).append(row)
            for index, chosen in rows.items():
                totals = _totals(map(sizes.__getitem__, chosen))
                yield from _extended(self._cutter(topic, partition_map, index), many.pick(chosen), totals)

    @property
    def empty(self) -> bool:
        """Whether no record waits for the end of its block."""
        return not any(cutter.count for cutter in self._cutters.values())

    def end(self) -> Iterator[Cut]:
        """Yield the remaining records as blocks."""
        for cutter in self._cutters.values():
            cut = cutter.end()
            if cut is not None:
                yield cut

    def _add_in_turn(
        self, topic: str, partition_map: PartitionMap, many: RecordColumns, totals: Sequence[int]
    ) -> Iterator[Cut]:
        done, count = 0, len(many.values)
        while True:
            cutter = self._cutter(topic, partition_map, self._turn(topic, partition_map))
            done = cutter.extend(many, done, count, totals)
            if done == count:
                return
            cut = cutter.end()
            assert cut is not None, "a block that takes no record holds some"
            yield cut
            done = cutter.extend(many, done, done + 1, totals)
            self._next_turn(topic, partition_map)

    def _cutter(self, topic: str, partition_map: PartitionMap, index: int) -> Cutter:
        partition = partition_map.partitions[index]
        cutter = self._cutters.get((topic, partition))
        if cutter is None:
            cutter = self._cutters[topic, partition] = Cutter(topic, partition, self._bytes_max)
        return cutter

    def _turn(self, topic: str, partition_map: PartitionMap) -> int:
        return self._turns.setdefault(topic, 0) % len(partition_map.partitions)

    def _next_turn(self, topic: str, partition_map: PartitionMap) -> None:
        self._turns[topic] = partition_map.next_index(self._turn(topic, partition_map), lambda _: False)


def _totals(sizes: Iterable[int]) -> list[int]:
    """Return the bytes of all records before each, and of all."""
    return list(accumulate(sizes, initial=0))


def _extended(cutter: Cutter, many: RecordColumns, totals: Sequence[int]) -> Iterator[Cut]:
    """Add records of one partition."""
    done, count = 0, len(many.values)
    while (done := cutter.extend(many, done, count, totals)) < count:
        cut = cutter.end()
        assert cut is not None, "a block that takes no record holds some"
        yield cut
