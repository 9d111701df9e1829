"""Assigns partitions to brokers: strategies that give each a live owner with few moves. Pure.

A live broker keeps its partitions, also under a new session: it opens them again by itself. Partitions without a live
owner are given to brokers with room. Partitions of a draining broker are moved to others. Then, with `balanced`, the
busiest broker gives partitions to the least busy one, as long as the gain is worth the moves. Brokers that are nearly
idle gain nothing. So a broker that joins or returns gets new and heavy partitions, and no others.

If no broker has room, a broker gets partitions beyond its capacity, with a note for the operator, because every
partition needs an owner. While all brokers drain, they keep their partitions.

A move of an open partition keeps the session of its old owner in the assignment. The old owner drains, publishes
`closed`, and removes its session; only then the new owner opens. A plan never changes epochs: owners raise them.
After a plan is applied, the next plan is empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from memq.governor import Assignment, BrokerEntry
from memq.governor.planning import AssignmentChange, AssignmentPlan, ClusterView, Strategy
from memq.topic import PartitionKey

IDLE_BYTES_S = 1_000  # added to each partition's traffic, so that idle partitions are spread by number
GAIN_MIN = 0.1  # all moves off a broker together must relieve it by a tenth: less is not worth drains and openings
BUSY_MIN = 0.05  # a broker below this share of its capacity gives nothing away: it would gain nothing
WORTH_MIN = 0.5  # a move must lower the busier one of both brokers by half of the moved weight
ROUNDS_MAX = 10
CAPACITY_BYTES_S = 100_000_000  # default for all brokers when none of the cluster has a configured capacity


def balanced(view: ClusterView) -> AssignmentPlan:
    """Assign partitions without an owner, empty draining brokers, and balance traffic against capacity."""
    if _is_settled(view):
        return AssignmentPlan()
    draft = _DraftPlan(view)
    draft.assign_unowned()
    draft.empty_draining()
    draft.even_out()
    return draft.plan()


def _is_settled(view: ClusterView) -> bool:
    """Whether a plan would be empty: each partition has an owner, and no broker is busier than others.

    This shortcut serves most rounds: for 10,000 partitions the draft takes ten times as long.
    """
    weights = {broker.id: 0 for broker in view.brokers if not broker.draining}
    owners: dict[PartitionKey, str] = {}
    for entry in view.assignments:
        if entry.broker not in weights:
            return False
        weights[entry.broker] += IDLE_BYTES_S
        owners[entry.topic_id, entry.partition] = entry.broker
    for load in view.loads:
        owner = owners.get((load.topic_id, load.partition))
        if owner is not None:
            weights[owner] += max(load.bytes_s, 0)
    capacities = _capacities(view)
    used = [weight / capacities[broker] for broker, weight in weights.items()] or [0.0]
    return max(used) <= 1 and (max(used) < BUSY_MIN or max(used) - min(used) <= GAIN_MIN * max(used))


def _capacities(view: ClusterView) -> dict[str, float]:
    """Return the capacity of each broker in bytes/s; without a configured one, the median of the others."""
    configured = sorted(broker.capacity_bytes_s for broker in view.brokers if broker.capacity_bytes_s > 0)
    usual = configured[len(configured) // 2] if configured else CAPACITY_BYTES_S
    return {
        broker.id: float(broker.capacity_bytes_s if broker.capacity_bytes_s > 0 else usual) for broker in view.brokers
    }


def sticky(view: ClusterView) -> AssignmentPlan:
    """Assign partitions without an owner and empty draining brokers; never move any for balance."""
    draft = _DraftPlan(view)
    draft.assign_unowned()
    draft.empty_draining()
    return draft.plan()


STRATEGIES: dict[str, Strategy] = {"balanced": balanced, "sticky": sticky}


@dataclass(slots=True)
class _PlannedPartition:
    """One partition of the draft: its stored assignment, its planned broker, and its weight in bytes/s."""

    key: PartitionKey
    before: Assignment
    broker: str
    weight: int
    reason: str = ""


@dataclass(slots=True)
class _PlannedBroker:
    """A broker that may get partitions."""

    entry: BrokerEntry
    capacity: float
    weight: int = 0
    partitions: list[tuple[int, PartitionKey]] = field(default_factory=list)  # its partitions, lightest first

    @property
    def used(self) -> float:
        """The used share of its capacity; above 1 the broker is overloaded."""
        return self.weight / self.capacity


class _DraftPlan:
    """A plan that is being made: the partitions with their planned brokers."""

    def __init__(self, view: ClusterView) -> None:
        known = {(topic.id, part.partition) for topic in view.topics for part in topic.partitions}
        traffic = {(load.topic_id, load.partition): max(load.bytes_s, 0) for load in view.loads}
        assigned = {(entry.topic_id, entry.partition): entry for entry in view.assignments}
        self.live = {broker.id: broker for broker in sorted(view.brokers, key=lambda broker: broker.id)}
        self.sessions = {broker.session: None for broker in self.live.values()}
        self.partitions = [
            _PlannedPartition(key, assigned[key], assigned[key].broker, IDLE_BYTES_S + traffic.get(key, 0))
            for key in sorted(assigned)
            if key in known
        ]
        capacities = _capacities(view)
        self.receivers = {
            broker.id: _PlannedBroker(broker, capacities[broker.id])
            for broker in self.live.values()
            if not broker.draining
        }
        self.zones: dict[tuple[str, str], int] = {}  # (topic id, zone): number of the topic's partitions in the zone
        self.by_key = {partition.key: partition for partition in self.partitions}
        for partition in self.partitions:
            self._add(partition)

    # ---- the three steps ---------------------------------------------------------------------------

    def assign_unowned(self) -> None:
        """Give partitions without a live owner to brokers with room; the heaviest first, which fit worst."""
        unowned = [partition for partition in self.partitions if partition.broker not in self.live]
        for partition in sorted(unowned, key=lambda partition: (-partition.weight, partition.key)):
            self._move(
                partition,
                self._best(partition),
                f"'{partition.broker}' is gone" if partition.broker else "it has no owner",
            )

    def empty_draining(self) -> None:
        """Move the partitions of draining brokers to other brokers, if any exist."""
        leaving = [
            partition
            for partition in self.partitions
            if partition.broker in self.live and partition.broker not in self.receivers
        ]
        for partition in sorted(
            leaving if self.receivers else [], key=lambda partition: (-partition.weight, partition.key)
        ):
            self._move(partition, self._best(partition), f"'{partition.broker}' is draining")

    def even_out(self) -> None:
        """Move partitions from the busiest brokers to the least busy one, until the gain is too small."""
        for _ in range(ROUNDS_MAX):
            if not self._even_round():
                return

    def _even_round(self) -> bool:
        """Move while a move helps; then undo the moves off a broker that they relieve by too little.

        Return whether any move remains.
        """
        before = {name: receiver.weight for name, receiver in self.receivers.items()}
        moved: dict[str, list[tuple[_PlannedPartition, str]]] = {}  # with the reason for its broker before
        for _ in range(len(self.partitions)):
            step = self._next_step()
            if step is None:
                break
            busy, idle, partition = step
            moved.setdefault(busy.entry.id, []).append((partition, partition.reason))
            text = f"'{busy.entry.id}' is at {busy.used:.2%}, '{idle.entry.id}' at {idle.used:.2%}"
            self._move(partition, idle.entry.id, text)
        kept = False
        for source, partitions in moved.items():
            if sum(partition.weight for partition, _ in partitions) >= GAIN_MIN * before[source]:
                kept = True
                continue
            for partition, reason in partitions:
                self._move(partition, source, reason)
        return kept

    def _next_step(self) -> tuple[_PlannedBroker, _PlannedBroker, _PlannedPartition] | None:
        """Return the busiest broker with a partition to give, the receiver, and the partition; or None."""
        order = sorted(self.receivers.values(), key=lambda receiver: (receiver.used, receiver.entry.id))
        for busy in reversed(order):
            if busy.used < BUSY_MIN or busy.used - order[0].used <= GAIN_MIN * busy.used:
                return None
            partition = self._best_partition(busy, order[0])
            if partition is not None:
                return busy, order[0], partition
        return None

    def plan(self) -> AssignmentPlan:
        """Return the changes, first those of partitions without a live owner, and the notes."""
        changes = [change for partition in self.partitions if (change := self._change(partition)) is not None]
        changes.sort(key=lambda change: change.before in self.live)
        return AssignmentPlan(tuple(changes), tuple(self._notes()))

    # ---- inside ------------------------------------------------------------------------------------

    def _best(self, partition: _PlannedPartition) -> str:
        """Return the broker that gets a partition; "" for none.

        The order: brokers that stay within their capacity; the zone with the fewest partitions of the topic; the
        least used broker.
        """

        def rank(receiver: _PlannedBroker) -> tuple[bool, int, float, str]:
            used = (receiver.weight + partition.weight) / receiver.capacity
            here = self.zones.get((partition.key[0], receiver.entry.zone), 0)
            return used > 1, here, used, receiver.entry.id

        return min(self.receivers.values(), key=rank).entry.id if self.receivers else ""

    def _best_partition(self, busy: _PlannedBroker, idle: _PlannedBroker) -> _PlannedPartition | None:
        """Return the partition whose move leaves the busier of both least busy; None if none is worth it.

        The best weight is the one that would make both brokers equally used. A lighter partition leaves `busy` busier,
        a heavier one `idle`, and the more so the farther its weight is. So the search runs outwards from there.
        """
        even = (busy.weight * idle.capacity - idle.weight * busy.capacity) / (busy.capacity + idle.capacity)
        middle = bisect_left(busy.partitions, (even, ("", 0)))
        found: list[tuple[float, PartitionKey]] = []
        for side in (range(middle - 1, -1, -1), range(middle, len(busy.partitions))):
            for number in side:
                weight, key = busy.partitions[number]
                after = max((busy.weight - weight) / busy.capacity, (idle.weight + weight) / idle.capacity)
                if busy.used - after < WORTH_MIN * weight / busy.capacity:
                    break
                partition = self.by_key[key]
                relieves = busy.used > 1 and (idle.weight + weight) / idle.capacity <= 1  # capacity before zones
                if not self._in_flight(partition) and (relieves or not self._crowds(partition, busy, idle)):
                    found.append((after, key))
                    break
        return self.by_key[min(found)[1]] if found else None

    def _in_flight(self, partition: _PlannedPartition) -> bool:
        """Whether a partition is in a planned move that its old owner has not finished: it can't move again."""
        holder = partition.before.session
        return holder in self.sessions and self.live.get(partition.broker, _NOBODY).session != holder

    def _crowds(self, partition: _PlannedPartition, busy: _PlannedBroker, idle: _PlannedBroker) -> bool:
        """Whether a move would spread the topic's partitions less evenly over the zones."""
        one, other = busy.entry.zone, idle.entry.zone
        topic = partition.key[0]
        return one != other and self.zones.get((topic, other), 0) >= self.zones.get((topic, one), 0)

    def _move(self, partition: _PlannedPartition, broker: str, reason: str) -> None:
        self._remove(partition)
        partition.broker, partition.reason = broker, reason
        self._add(partition)

    def _add(self, partition: _PlannedPartition) -> None:
        receiver = self.receivers.get(partition.broker)
        if receiver is not None:
            receiver.weight += partition.weight
            insort(receiver.partitions, (partition.weight, partition.key))
            key = (partition.key[0], receiver.entry.zone)
            self.zones[key] = self.zones.get(key, 0) + 1

    def _remove(self, partition: _PlannedPartition) -> None:
        receiver = self.receivers.get(partition.broker)
        if receiver is not None:
            receiver.weight -= partition.weight
            del receiver.partitions[bisect_left(receiver.partitions, (partition.weight, partition.key))]
            self.zones[partition.key[0], receiver.entry.zone] -= 1

    def _change(self, partition: _PlannedPartition) -> AssignmentChange | None:
        before = partition.before
        if partition.broker == before.broker:
            return None
        session = before.session if before.session in self.sessions else ""
        after = msgspec.structs.replace(before, broker=partition.broker, session=session)
        return AssignmentChange(after, before.broker, partition.reason)

    def _notes(self) -> Iterable[str]:
        unowned = sum(1 for partition in self.partitions if not partition.broker)
        if unowned:
            yield f"{unowned} partitions have no owner: no broker takes any; start one that does not drain"
        for receiver in self.receivers.values():
            if receiver.used > 1 and receiver.entry.capacity_bytes_s > 0:
                load = f"{receiver.weight} bytes/s of {receiver.entry.capacity_bytes_s} bytes/s"
                yield f"broker '{receiver.entry.id}' is over its capacity: {load}"


_NOBODY = BrokerEntry(id="", session="", address="")
