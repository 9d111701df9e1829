"""Brokers and topics as a governor sees them."""

from __future__ import annotations

from memq.governor import BrokerEntry
from memq.topic import Topic, equal_slots


def topic(name: str, number: int, partitions: int) -> Topic:
    return Topic(name=name, id=f"{number:032x}", created_ms=0, partitions=equal_slots(partitions))


def broker(name: str, *, zone: str = "", capacity: int = 0, draining: bool = False) -> BrokerEntry:
    return BrokerEntry(
        id=name,
        session=f"session-{name}",
        address="127.0.0.1:1",
        zone=zone,
        capacity_bytes_s=capacity,
        draining=draining,
    )
