"""The asyncio twins of the public face: clients for producers, consumers, listeners, queues, admin."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memq.client.admin import AsyncAdmin as Admin
    from memq.client.consumer.consumer import AsyncConsumer as Consumer
    from memq.client.listener.dead_letter_queue import AsyncDeadLetterQueue as DeadLetterQueue
    from memq.client.listener.listener import AsyncListener as Listener
    from memq.client.producer.delivery import Ack
    from memq.client.producer.delivery import AsyncDelivery as Delivery
    from memq.client.producer.producer import AsyncProducer as Producer
    from memq.client.queue.queue import AsyncQueue as Queue
    from memq.client.queue.worker import AsyncWorker as Worker

__all__ = ["Ack", "Admin", "Consumer", "DeadLetterQueue", "Delivery", "Listener", "Producer", "Queue", "Worker"]

_HOMES = {
    "Ack": ("memq.client.producer.delivery", "Ack"),
    "Admin": ("memq.client.admin", "AsyncAdmin"),
    "Consumer": ("memq.client.consumer.consumer", "AsyncConsumer"),
    "DeadLetterQueue": ("memq.client.listener.dead_letter_queue", "AsyncDeadLetterQueue"),
    "Delivery": ("memq.client.producer.delivery", "AsyncDelivery"),
    "Listener": ("memq.client.listener.listener", "AsyncListener"),
    "Producer": ("memq.client.producer.producer", "AsyncProducer"),
    "Queue": ("memq.client.queue.queue", "AsyncQueue"),
    "Worker": ("memq.client.queue.worker", "AsyncWorker"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'memq.aio' has no attribute '{name}'")
    home, real_name = _HOMES[name]
    value = globals()[name] = getattr(import_module(home), real_name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
