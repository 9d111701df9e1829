"""Input and output of a governor's plan, and the number of write partitions for the traffic. Pure.

`balance.py` has the strategies that choose owners. This module splits large write partitions, and joins small ones.
A split gives the upper half of a write partition's slots to another write partition; a join gives them back. The
pointers of both go to the same read partition. Readers do not notice it, and the order of a key holds. A producer
sends the first block of a moved slot only after its earlier blocks are acked (`memq.client.producer.send_buffer`). So
the read partition has the pointers in order.

A joined partition keeps its number, its epoch and its totals, but has no slots, so it gets no new records. Retried
blocks still find its owner, and the next split uses it again instead of a new number. The partitions with which a
topic was created, one for each read partition, always take records.

Two distant bounds, and a rest after each change, prevent oscillation. Each half of a split partition weighs twice as
much as both halves of a join together. A wrong join, caused by missing reports, costs two moves, but no record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from memq.governor import Assignment, BrokerEntry, Load
from memq.limits import PARTITIONS_MAX
from memq.topic import PartitionKey, PartitionSlots, Topic

JOIN_SHARE = 4  # two neighbours are joined when both together take less than a quarter of one partition's limit
SPLIT_REST_MS = 60_000  # from a change of a topic's map to the next split: loads are means of 10 s
JOIN_REST_MS = 600_000  # from a change of a topic's map to the next join


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The cluster as read from the coordinator, in several reads: compare-and-set refuses stale changes."""

    topics: Sequence[Topic]
    brokers: Sequence[BrokerEntry]
    assignments: Sequence[Assignment]
    loads: Sequence[Load] = ()
    now_ms: int = 0  # wall clock of the process that read it


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """One assignment to set, with the version that it replaces, and the reason."""

    assignment: Assignment
    before: str  # the present owner, "" for none
    reason: str


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """Changes in order, and notes for an operator: overloaded brokers, no broker at all."""

    changes: tuple[AssignmentChange, ...] = ()
    notes: tuple[str, ...] = ()


Strategy = Callable[[ClusterView], AssignmentPlan]


@dataclass(frozen=True, slots=True)
class Reshape:
    """A topic with a new partition map, to replace the stored one of the same version; and the reason."""

    topic: Topic
    reason: str


def reshapes(view: ClusterView) -> list[Reshape]:
    """Return at most one change for each topic: after it, the reported loads fit no longer."""
    traffic: dict[PartitionKey, int] = {}
    for load in view.loads:
        traffic[load.topic_id, load.partition] = max(load.bytes_s, 0)
    found = []
    for topic in sorted(view.topics, key=lambda topic: topic.name):
        weights = {part.partition: traffic.get((topic.id, part.partition), 0) for part in topic.partitions}
        change = _reshape(topic, weights, view.now_ms)
        if change is not None:
            found.append(change)
    return found


def split(topic: Topic, partition: int, now_ms: int) -> Topic:
    """Return the topic after a split: `partition`, with two slots or more, gives half to another one."""
    part = topic.partitions[partition]
    assert part.slot_first < part.slot_last, f"partition {partition} can't be split"
    middle = (part.slot_first + part.slot_last) // 2
    idle = [each for each in topic.partitions if not each.takes_records and each.read_partition == part.read_partition]
    number = idle[0].partition if idle else len(topic.partitions)
    lower = msgspec.structs.replace(part, slot_last=middle)
    upper = msgspec.structs.replace(part, partition=number, slot_first=middle + 1)
    return _with(topic, (lower, upper), now_ms)


def join(topic: Topic, one: int, other: int, now_ms: int) -> Topic:
    """Return the topic after a join: of two neighbours, the higher number gives its slots to the lower."""
    older, younger = topic.partitions[min(one, other)], topic.partitions[max(one, other)]
    assert older.read_partition == younger.read_partition, f"{one} and {other} are of two read partitions"
    slots = {"slot_first": min(older.slot_first, younger.slot_first)}
    slots["slot_last"] = max(older.slot_last, younger.slot_last)
    emptied = msgspec.structs.replace(younger, slot_first=0, slot_last=-1)
    return _with(topic, (msgspec.structs.replace(older, **slots), emptied), now_ms)


def neighbours(topic: Topic) -> Iterator[tuple[int, int]]:
    """Yield the pairs of write partitions that can be joined: next to each other, of one read partition."""
    for lower, upper in pairwise(topic.taking):
        if lower.read_partition == upper.read_partition:
            yield lower.partition, upper.partition


def _reshape(topic: Topic, weights: Mapping[int, int], now_ms: int) -> Reshape | None:
    if topic.sealed_ms:
        return None
    count, bound = len(topic.taking), max(topic.settings.write_partitions_max, topic.read_partitions)
    rested_ms, most = now_ms - topic.map_changed_ms, topic.settings.partition_bytes_s_max
    if count < bound and rested_ms >= SPLIT_REST_MS:
        wide = [part for part in topic.taking if part.slot_first < part.slot_last]
        busiest = max(wide, key=lambda part: (weights[part.partition], -part.partition), default=None)
        if busiest is not None and weights[busiest.partition] > most and len(topic.partitions) < PARTITIONS_MAX:
            number = busiest.partition
            text = f"partition {number} takes {weights[number]} bytes/s, over partition_bytes_s_max = {most}"
            return Reshape(split(topic, number, now_ms), text)
    if count > bound or rested_ms >= JOIN_REST_MS:
        pairs = [(weights[one] + weights[other], -max(one, other), one, other) for one, other in neighbours(topic)]
        weight, _, *pair = min(pairs, default=(0, 0))
        if pair and (count > bound or weight < most / JOIN_SHARE):
            both = f"partitions {pair[0]} and {pair[1]} take {weight} bytes/s"
            why = f"write_partitions_max is {bound}" if count > bound else "they need not be two"
            return Reshape(join(topic, pair[0], pair[1], now_ms), f"{both}, {why}")
    return None


def _with(topic: Topic, changed: tuple[PartitionSlots, ...], now_ms: int) -> Topic:
    parts = {part.partition: part for part in (*topic.partitions, *changed)}
    return msgspec.structs.replace(
        topic,
        partitions=tuple(parts[number] for number in sorted(parts)),
        map_version=topic.map_version + 1,
        map_changed_ms=now_ms,
    )
