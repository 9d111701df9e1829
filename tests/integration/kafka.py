"""A real Kafka for the tests of one session, and queues on it with separate prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer

from memq.notification.kafka import open_from_settings
from memq.notification.kafka.queue import KafkaQueue
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings
from memq_localstack.servers import Server, start_kafka

_numbers = itertools.count()


@contextmanager
def running_kafka(folder: Path, **settings: str) -> Iterator[Server]:
    """Run a Kafka on a folder; it fails when there is none."""
    server = start_kafka(folder, settings=settings)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def joined_in_kafka(kafka: Server, group: str, topic: str) -> Iterator[None]:
    """Let a member be in the group, as one that a broker of an earlier release hosts."""
    settings = {"bootstrap.servers": kafka.address, "group.id": group, "client.id": "m", "session.timeout.ms": 6_000}
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        yield
    finally:
        consumer.close()


def kafka_queue(address: str, **section: Any) -> KafkaQueue:
    """Return a queue of a prefix of its own, unless one is given."""
    named = {"prefix": f"t{next(_numbers)}.", **section}
    parts = PartSettings(
        queue=f"kafka://{address}", sections={"kafka": {name: (value, "test") for name, value in named.items()}}
    )
    return open_from_settings(parts, Runtime())
