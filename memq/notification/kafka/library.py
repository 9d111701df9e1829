"""Makes librdkafka clients from plain settings: logs go to Python, bad settings raise memq errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from memq.errors import InvalidSettingError
from memq.runtime.logs import RateLimit
from memq.runtime.threads import ThreadPool

Client = TypeVar("Client", AdminClient, Consumer, Producer)
Complain = Callable[[KafkaError], None]
CLOSE_S = 10.0  # how long a call of the library may take that ends a client
LOGGER = logging.getLogger("memq.kafka")


class _Seldom(logging.Filter):
    """Bounds a client's log lines of one kind: librdkafka reports a dead Kafka ten times a second.

    Lines of librdkafka begin with their kind and the client: `FAIL [rdkafka#consumer-3] ...`. Threads may meet here;
    what that costs is a count that is off by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a line through, with the number of those that were left out before it."""
        suppressed = self._limit.admit(record.getMessage().partition("]")[0], record.created)
        if suppressed:
            record.msg, record.args = f"{record.getMessage()} ({suppressed} more like it were not logged)", ()
        return suppressed is not None


LOGGER.addFilter(_Seldom())


def admin_of(settings: Mapping[str, Any], complain: Complain) -> AdminClient:
    """Return an admin client. Raises: InvalidSettingError."""
    return _client(AdminClient, settings, complain)


def consumer_of(settings: Mapping[str, Any], complain: Complain) -> Consumer:
    """Return a consumer. Raises: InvalidSettingError."""
    return _client(Consumer, settings, complain)


def producer_of(settings: Mapping[str, Any], complain: Complain) -> Producer:
    """Return a producer. Raises: InvalidSettingError."""
    return _client(Producer, settings, complain)


async def answered(answer: Any) -> Any:
    """Return what Kafka answers to a request of an admin client. Raises: KafkaException.

    An answer that lacks what was asked for, or names something else, is a RuntimeError of the library.
    """
    try:
        return await asyncio.wrap_future(answer)
    except RuntimeError as error:
        raise KafkaException(KafkaError(KafkaError._BAD_MSG, f"Kafka's answer is not whole: {error}")) from error


async def end_threads(pool: ThreadPool, last: Callable[[], object] | None = None) -> None:
    """End the threads of a pool; `last` is its last call.

    What librdkafka does not return from is left behind.
    """
    if not await pool.close(last, CLOSE_S):
        LOGGER.warning("librdkafka does not return: a thread of '%s' is left behind", pool.name)


def _client(kind: type[Client], settings: Mapping[str, Any], complain: Complain) -> Client:
    try:
        known: dict[str, Any] = {**settings, "error_cb": complain}
        return kind(known, logger=LOGGER)
    except (KafkaException, TypeError, ValueError) as error:
        detail = error.args[0] if error.args else error
        text = detail.str() if isinstance(detail, KafkaError) else str(detail)
        raise InvalidSettingError(f"Kafka's library refuses its settings: {text}", hint="correct [kafka]") from error
