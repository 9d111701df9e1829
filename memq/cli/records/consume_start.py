"""Where `memq consume` starts and ends when that is for one partition only, or the last N records.

A consumer of its own looks the places up; it reads pointers, never an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from memq.cli.records.start_position import LastRecords, Start
from memq.client.consumer.consumer import Consumer
from memq.client.consumer.record import TopicPartition
from memq.errors import NotFoundError
from memq.topic import Position

Positions = Mapping[tuple[str, int], Position]


def look_up(brokers: str, topic: str, start: Start, partition: int | None) -> tuple[Positions, Positions]:
    """Return where to start and where the end is now, for every partition.

    All but `partition` start at their end.

    Raises: NotFoundError for a partition that is not there; as the consumer.
    """
    with Consumer(brokers, [topic], start="end", end="end") as consumer:
        consumer.poll()  # returns at the end, where every partition is
        ends: dict[tuple[str, int], Position] = {(topic, at.read_partition): at for at in consumer.position().values()}
        if partition is not None and (topic, partition) not in ends:
            raise NotFoundError(f"topic '{topic}' has no partition {partition}", hint=f"it has {len(ends)}, from 0 on")
        starts = dict(ends)
        for place, end in sorted(ends.items()):
            if partition is None or place == (topic, partition):
                starts[place] = _start_of(consumer, TopicPartition(*place), start, end)
        return starts, ends


def _start_of(consumer: Consumer, place: TopicPartition, start: Start, end: Position) -> Position:
    if isinstance(start, LastRecords):
        consumer.seek(place.topic, place.partition, "beginning")
        ends = consumer.position()[place].pointer_offset, end.pointer_offset
        offset, before = last_offset(*ends, start.records, partial(_lag_at, consumer, place))
        return Position(place.partition, offset, before)
    consumer.seek(place.topic, place.partition, start)
    return consumer.position()[place]


def _lag_at(consumer: Consumer, place: TopicPartition, offset: int) -> int:
    consumer.seek(place.topic, place.partition, Position(place.partition, offset))
    return consumer.lag()[place].records


def last_offset(begin: int, end: int, records: int, lag_at: Callable[[int], int]) -> tuple[int, int]:
    """Return the greatest offset behind which at least `records` records lie, and how many more there are.

    `lag_at(offset)` counts the records from `offset` on; it never grows with the offset, and is 0 at `end`. Where
    there are fewer than `records` in all, the answer is the start: (`begin`, 0).
    """
    low, high = begin, end
    if records == 0:
        return end, 0
    at_low = lag_at(low)
    if at_low <= records:
        return begin, 0
    while high - low > 1:
        middle = (low + high) // 2
        lag = lag_at(middle)
        if lag >= records:
            low, at_low = middle, lag
        else:
            high = middle
    return low, at_low - records
