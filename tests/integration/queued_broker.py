"""A broker in this process with its store in memory and its queue real: SQLite's file, or a Kafka."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification import NotificationQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq_localstack.servers import Server
from tests.integration.kafka import kafka_queue

QUEUES = pytest.mark.parametrize("kind", ["sqlite", "kafka"])


@asynccontextmanager
async def queued_broker(kind: str, folder: Path, kafka: Server) -> AsyncIterator[Broker]:
    """Run the broker for a test."""
    runtime = Runtime()
    queue: NotificationQueue = (
        kafka_queue(kafka.address) if kind == "kafka" else SqliteQueue(folder / "queue.sqlite", runtime.clock)
    )
    settings = dataclasses.replace(BrokerSettings(port=0), cluster="real-queue")
    store = MemoryHandler(runtime.clock)
    broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
    try:
        await broker.start()
        yield broker
    finally:
        await broker.close()
        await queue.close()


@asynccontextmanager
async def broker_on(queue: NotificationQueue, **settings: Any) -> AsyncIterator[Broker]:
    runtime = Runtime()
    # No reports: the first retry of a publish is waited for, and must be one of the test's records.
    made = dataclasses.replace(BrokerSettings(port=0), cluster="outage", audit=False, **settings)
    store = MemoryHandler(runtime.clock)
    broker = Broker(made, runtime, {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
