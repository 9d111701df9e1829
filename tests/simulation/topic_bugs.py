"""Planted bugs in the life of topics: creation, truncation, deletion, and creation again; see `planted_bugs`."""

from __future__ import annotations

from tests.simulation.bug import Planted, instead, swap

TOPIC_BUGS = (
    Planted(
        "a broker that is behind answers for an older topic",
        "memq.broker.partitions",
        "Partitions.confirm",
        swap("name in self._topics and self._topics[name].id != known.get(name)", "False"),
        seed=1_005,
        aspects=("churn",),
    ),
    Planted(
        "logs go though the coordinator has refused the deletion",
        "memq.broker.partitions",
        "Partitions.delete",
        instead(
            "self._services.coordinator.delete_topic",
            "with suppress(MemqError): await self._services.coordinator.delete_topic(topic)",
        ),
        aspects=("churn",),
    ),
    Planted(
        "a truncation takes what lies behind its position",
        "memq.broker.upkeep.retention",
        "expired",
        swap("order.covers(entry.offset, entry.time_ms)", "True"),
        level="calm",
        aspects=("operator",),
    ),
    Planted(
        "a truncation takes what the dedup window needs",
        "memq.broker.upkeep.retention",
        "expired",
        swap(
            "order is not None and order.covers(entry.offset, entry.time_ms) and settled",
            "order is not None and order.covers(entry.offset, entry.time_ms)",
        ),
        level="calm",
        seed=1_145,
        aspects=("operator",),
    ),
    Planted(
        "an owner takes blocks of a sealed topic",
        "memq.broker.partition.appender",
        "Appender._closed",
        swap("not processor.topic.sealed_ms or stream.limiters is None", "True"),
        level="stormy",
        aspects=("seal",),
    ),
    Planted(
        "an idle topic is deleted though it had records since the last check",
        "memq.broker.upkeep.idle_topics",
        "IdleTopics._judge",
        swap("mark == IN_USE or mark != topic.idle_mark", "mark == IN_USE or not topic.idle_mark"),
        level="calm",
        seed=1_003,
        aspects=("idle",),
    ),
    Planted(
        "a reader that waits does not keep an idle topic",
        "memq.broker.upkeep.idle_topics",
        "IdleTopics._mark",
        swap("any(each.topic_id == topic.id for held in group.members.values() for each in held)", "False"),
        level="calm",
        seed=1_001,
        aspects=("idle",),
    ),
    Planted(
        "retention does not wait for a group",
        "memq.broker.upkeep.retention",
        "expired",
        swap("entry.offset >= unread", "False"),
        level="calm",
        aspects=("waiting",),
    ),
    Planted(
        "retention takes unknown positions for the end",
        "memq.broker.upkeep.own_groups",
        "_offset_in",
        swap(
            "0 if committed is None else committed.position.pointer_offset",
            "1 << 40 if committed is None else committed.position.pointer_offset",
        ),
        level="calm",
        aspects=("waiting",),
    ),
)
