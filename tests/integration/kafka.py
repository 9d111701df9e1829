"""A real Kafka for the tests of one session, and queues on it with separate prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memq.notification.kafka import open_from_settings
from memq.notification.kafka.queue import KafkaQueue
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings
from memq_localstack.servers import Server, start_kafka

_SETTINGS = {  # members that are gone are noticed sooner
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "200",
}
_numbers = itertools.count()


@contextmanager
def running_kafka(folder: Path, **settings: str) -> Iterator[Server]:
    """Run a Kafka on a folder; it fails when there is none."""
    server = start_kafka(folder, settings={**_SETTINGS, **settings})
    try:
        yield server
    finally:
        server.stop()


def kafka_queue(address: str, **section: Any) -> KafkaQueue:
    """Return a queue of a prefix of its own, unless one is given."""
    named = {"prefix": f"t{next(_numbers)}.", "heartbeat_interval_ms": 100, **section}
    parts = PartSettings(
        queue=f"kafka://{address}", sections={"kafka": {name: (value, "test") for name, value in named.items()}}
    )
    return open_from_settings(parts, Runtime())
