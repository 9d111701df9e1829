"""memq: a pub/sub log on object storage. This is the public face.

Its names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from memq.limits import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from memq import aio as aio
    from memq import errors as errors
    from memq.client.admin import Admin as Admin
    from memq.client.bulk.arrow_reader import read_arrow as read_arrow
    from memq.client.bulk.arrow_reader import read_arrow_batches as read_arrow_batches
    from memq.client.consumer.batch import Batch as Batch
    from memq.client.consumer.batch import Record as Record
    from memq.client.consumer.consumer import Consumer as Consumer
    from memq.client.consumer.consumer import read_record as read_record
    from memq.client.listener.answers import DeadLetter as DeadLetter
    from memq.client.listener.answers import Message as Message
    from memq.client.listener.answers import Park as Park
    from memq.client.listener.answers import Retry as Retry
    from memq.client.listener.dead_letter_queue import DeadLetterQueue as DeadLetterQueue
    from memq.client.listener.listener import Listener as Listener
    from memq.client.observers.collector import ClientCollector as ClientCollector
    from memq.client.producer.delayed import CancelOutcome as CancelOutcome
    from memq.client.producer.delivery import Ack as Ack
    from memq.client.producer.delivery import Delivery as Delivery
    from memq.client.producer.producer import Producer as Producer
    from memq.client.queue.items import QueueItem as QueueItem
    from memq.client.queue.sync_queue import Queue as Queue
    from memq.client.queue.views import ItemView as ItemView
    from memq.client.queue.worker import Worker as Worker
    from memq.client.queue.worker_settings import WorkerStats as WorkerStats
    from memq.client.transactions.undecided import CheckAnswer as CheckAnswer
    from memq.client.transactions.undecided import UndecidedTransaction as UndecidedTransaction
    from memq.encryption.encryption import Encryption as Encryption
    from memq.errors import MemqError as MemqError
    from memq.queues.decisions import ItemOutcome as ItemOutcome
    from memq.queues.decisions import NackKind as NackKind
    from memq.runtime.tls import Tls as Tls
    from memq.topic import Position as Position

# Where each public name lives. Importing all of it would cost a program that only sends 30 ms at its start.
_HOMES = {
    "Ack": "memq.client.producer.delivery",
    "Admin": "memq.client.admin",
    "Batch": "memq.client.consumer.batch",
    "CancelOutcome": "memq.client.producer.delayed",
    "CheckAnswer": "memq.client.transactions.undecided",
    "ClientCollector": "memq.client.observers.collector",
    "Consumer": "memq.client.consumer.consumer",
    "DeadLetter": "memq.client.listener.answers",
    "DeadLetterQueue": "memq.client.listener.dead_letter_queue",
    "Delivery": "memq.client.producer.delivery",
    "Encryption": "memq.encryption.encryption",
    "ItemOutcome": "memq.queues.decisions",
    "ItemView": "memq.client.queue.views",
    "Listener": "memq.client.listener.listener",
    "MemqError": "memq.errors",
    "Message": "memq.client.listener.answers",
    "NackKind": "memq.queues.decisions",
    "Park": "memq.client.listener.answers",
    "Position": "memq.topic",
    "Producer": "memq.client.producer.producer",
    "Queue": "memq.client.queue.sync_queue",
    "QueueItem": "memq.client.queue.items",
    "Record": "memq.client.consumer.batch",
    "Retry": "memq.client.listener.answers",
    "Tls": "memq.runtime.tls",
    "UndecidedTransaction": "memq.client.transactions.undecided",
    "Worker": "memq.client.queue.worker",
    "WorkerStats": "memq.client.queue.worker_settings",
    "aio": "memq.aio",
    "errors": "memq.errors",
    "read_arrow": "memq.client.bulk.arrow_reader",
    "read_arrow_batches": "memq.client.bulk.arrow_reader",
    "read_record": "memq.client.consumer.consumer",
}


__all__ = [*_HOMES]  # noqa: PLE0604  # names; ruff knows literal lists only


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memq' has no attribute '{name}'")
    module = import_module(home)
    value = module if home == f"memq.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
