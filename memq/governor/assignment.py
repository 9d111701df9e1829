"""Which broker shall own which partition: pure, sticky, with the fewest moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from memq.governor import Assignment, BrokerEntry
from memq.topic import Topic


def plan(
    topics: Iterable[Topic], brokers: Iterable[BrokerEntry], assignments: Iterable[Assignment]
) -> Sequence[Assignment]:
    """Return the assignments to set, each with the version that it replaces, so that every partition has a live broker.

    What a live broker has, it keeps, also under a new session: it opens again by itself. The partitions of dead
    brokers and those of nobody go to the live broker with the fewest, ties by id; without a live broker the
    partitions of the dead are released. Epochs stay: the owner raises them when it opens. Applying a plan leaves
    nothing to plan.
    """
    known = {(topic.id, part.partition) for topic in topics for part in topic.partitions}
    loads = {broker.id: 0 for broker in sorted(brokers, key=lambda broker: broker.id)}
    current = sorted(
        (entry for entry in assignments if (entry.topic_id, entry.partition) in known),
        key=lambda entry: (entry.topic_id, entry.partition),
    )
    for entry in current:
        if entry.broker in loads:
            loads[entry.broker] += 1
    changes: list[Assignment] = []
    for entry in current:
        if entry.broker in loads:
            continue
        broker = min(loads, key=lambda broker: (loads[broker], broker), default="")
        if broker:
            loads[broker] += 1
        if broker != entry.broker:
            changes.append(msgspec.structs.replace(entry, broker=broker, session=""))
    return changes
