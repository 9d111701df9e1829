"""The only user of librdkafka: creates its clients, receives its logs, translates its errors.

This file alone judges librdkafka's codes and explains timeouts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from memq.errors import (
    DeniedError,
    GenerationFencedError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    QueueError,
    QueueRefusedError,
    TooLargeError,
)
from memq.runtime.logs import RateLimit
from memq.runtime.threads import ThreadPool

Client = TypeVar("Client", AdminClient, Consumer, Producer)
ErrorCallback = Callable[[KafkaError], None]
CLOSE_S = 10.0  # time-out of calls of librdkafka when a client is closed
LOGGER = logging.getLogger("memq.kafka")
_NOT_THERE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_DENIED = {  # codes in the answer to a request; the missing right
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the right to use the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the right to use the group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "a right on the cluster (Create, Alter, Describe, or IdempotentWrite)",
}
_UNTRUSTED = (
    "its certificate has expired, is not of an authority in ssl.ca.location of [kafka], or does not name the host that "
    "is connected to: replace it (memq certs issue NAME --host HOST --replace), name the authority's file, or name the "
    "host in queue = kafka://HOST:PORT as the certificate does"
)
_REFUSED = (
    "Kafka refuses the certificate of this broker: name a valid one in ssl.certificate.location and ssl.key.location "
    "of [kafka], of an authority in Kafka's trust store; memq certs show FILE prints authority and validity"
)
# With TLS 1.3 a refused certificate of a client is an error of the connection, which the client has opened by then.
_ALERT = re.compile("ssl/tls alert [a-z ]*(certificate|unknown ca|access denied)")
# Codes of a refused connection. They also occur while Kafka stops or starts, so they never make a DeniedError of a
# request that failed.
_NOT_LET_IN = {
    KafkaError._SSL: _UNTRUSTED,
    KafkaError._AUTHENTICATION: "Kafka denies to log in: check sasl.* in [kafka]",
    KafkaError.SASL_AUTHENTICATION_FAILED: "Kafka denies to log in: check sasl.* in [kafka]",
    KafkaError.UNSUPPORTED_SASL_MECHANISM: "Kafka denies this login: choose another sasl.mechanism in [kafka]",
}
# Parts of librdkafka's texts for these codes when the connection ended before Kafka checked certificate or login.
_BROKEN_OFF = ("disconnected", "transport failure", "connection reset", "timed out", "end of file")
SILENT = (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT)
_FENCED = {
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_INVALID = {  # the hint for each code
    KafkaError.POLICY_VIOLATION: "Kafka has a policy of its own: let it allow what the message names",
    KafkaError.INVALID_REPLICATION_FACTOR: "set replication_factor in [kafka] to at most as many as Kafka has brokers",
    KafkaError.INVALID_CONFIG: "correct [kafka]",
    KafkaError.INVALID_SESSION_TIMEOUT: "set session_timeout_ms_min in [kafka] to what Kafka allows",
    KafkaError.UNSUPPORTED_VERSION: "use a newer Kafka",
}


def _failure(error: KafkaError | KafkaException, doing: str, cause: KafkaError | None) -> MemqError:
    """Return memq's error for an error of Kafka; `doing` describes the request.

    `cause` is the last error of a connection. It explains the error, and never changes its kind.
    """
    found = error.args[0] if isinstance(error, KafkaException) else error
    code, text = found.code(), found.str()
    message = f"{doing}: {text.lower() if text else found.name()}" + (f" ({cause.str().lower()})" if cause else "")
    if code in _NOT_THERE:
        return NotFoundError(message)
    if code in (KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD):
        return QueueRefusedError(message)
    if code in _DENIED:
        return DeniedError(message, hint=f"Kafka denies {_DENIED[code]}")
    if code in _TOO_LARGE:
        return TooLargeError(message)
    if code in _INVALID:
        return InvalidRequestError(message, hint=_INVALID[code])
    return QueueError(message, hint=_refusal(found) or (_refusal(cause) if cause else ""))


def _refusal(error: KafkaError) -> str:
    """Return the remedy for a refused connection, "" for any other error."""
    if error.code() == KafkaError._TRANSPORT and _ALERT.search(error.str().lower()):
        return _REFUSED
    return _NOT_LET_IN.get(error.code(), "")


def is_not_there(error: KafkaError) -> bool:
    """Whether an error means that a topic or a partition does not exist."""
    return error.code() in _NOT_THERE


def code_of(error: MemqError) -> int | None:
    """Return the code of the Kafka error that caused an error of memq; None for another cause."""
    cause = error.__cause__
    code: int | None = cause.args[0].code() if isinstance(cause, KafkaException) else None
    return code


class LastErrors:
    """The last connection error of all clients of one queue.

    librdkafka reports a refused certificate or login only in this way.
    The error explains a request that was not answered, but never changes the kind of the request's error. The reason:
    Kafka also aborts handshakes while it stops and starts, and an outage is no denial. Clients call `note` on their own
    threads; it only sets attributes.
    """

    def __init__(self) -> None:
        self._last: KafkaError | None = None
        self._answered = False

    def note(self, error: KafkaError) -> None:
        """Note a connection error; the `error_cb` of each client."""
        last, code = self._last, error.code()
        if last is not None:
            if code == KafkaError._ALL_BROKERS_DOWN:  # this error has no reason, the last one may have
                return
            if code == KafkaError._TRANSPORT and _refusal(last) and not _refusal(error):
                return  # a consequence of the last error
        self._last = error

    def clear(self) -> None:
        """Forget the last error, because Kafka has answered."""
        self._last = None
        self._answered = True

    def denial(self, doing: str) -> DeniedError | None:
        """Return the error for a refused login or certificate, None for any other connection error.

        After Kafka has once answered, the result is None: a running Kafka may refuse a connection only temporarily.
        """
        last = self._last
        if last is None or self._answered or not _refusal(last):
            return None
        text = last.str().lower()
        if any(words in text for words in _BROKEN_OFF):
            return None
        return DeniedError(f"{doing}: {text}", hint=_refusal(last))

    def failure(self, error: KafkaError | KafkaException, doing: str) -> MemqError:
        """Return memq's error for a request that failed, with the connection error that explains it."""
        return _failure(error, doing, self._last if _code(error) in SILENT else None)

    def group_failure(self, error: KafkaError | KafkaException, doing: str, *, member: bool = False) -> MemqError:
        """Return memq's error for a request about a group that failed.

        Only a member can be fenced. "No such topic" becomes a QueueError (retry), because Kafka also answers so while
        it loads the topic's metadata.
        """
        found = self.failure(error, doing)
        if member and _code(error) in _FENCED:
            return GenerationFencedError(str(found))
        return QueueError(str(found)) if isinstance(found, NotFoundError) else found


def _code(error: KafkaError | KafkaException) -> int:
    found = error.args[0] if isinstance(error, KafkaException) else error
    code: int = found.code()
    return code


_lines = RateLimit()


def _admits(record: logging.LogRecord) -> bool:
    """Return whether to log a line; add the number of lines that were dropped before it.

    This bounds a client's lines of one kind: librdkafka reports a dead Kafka ten times a second. Its lines begin with
    their kind and the client: `FAIL [rdkafka#consumer-3] ...`. Several threads may call this at once, without a lock;
    then a count may be off by one.
    """
    suppressed = _lines.admit(record.getMessage().partition("]")[0], record.created)
    if suppressed:
        record.msg, record.args = f"{record.getMessage()} ({suppressed} more like it were not logged)", ()
    return suppressed is not None


LOGGER.addFilter(_admits)


def admin_of(settings: Mapping[str, Any], on_error: ErrorCallback) -> AdminClient:
    """Return an admin client. Raises: InvalidSettingError."""
    return create_client(AdminClient, settings, on_error)


def consumer_of(settings: Mapping[str, Any], on_error: ErrorCallback) -> Consumer:
    """Return a consumer. Raises: InvalidSettingError."""
    return create_client(Consumer, settings, on_error)


def producer_of(settings: Mapping[str, Any], on_error: ErrorCallback) -> Producer:
    """Return a producer. Raises: InvalidSettingError."""
    return create_client(Producer, settings, on_error)


async def answered(answer: Any) -> Any:
    """Return Kafka's answer to a request of an admin client. Raises: KafkaException.

    For an incomplete or wrong answer librdkafka raises RuntimeError, which becomes a KafkaException.
    """
    try:
        return await asyncio.wrap_future(answer)
    except RuntimeError as error:
        raise KafkaException(KafkaError(KafkaError._BAD_MSG, f"Kafka's answer is not whole: {error}")) from error


async def end_threads(pool: ThreadPool, last: Callable[[], object] | None = None) -> None:
    """End the threads of a pool; `last` is its last call.

    Threads that librdkafka blocks for longer than `CLOSE_S` are left behind.
    """
    if not await pool.close(last, CLOSE_S):
        LOGGER.warning("librdkafka does not return: a thread of '%s' is left behind", pool.name)


def create_client(kind: type[Client], settings: Mapping[str, Any], on_error: ErrorCallback) -> Client:
    """Return a client of librdkafka; tests replace this function. Raises: InvalidSettingError."""
    try:
        known: dict[str, Any] = {**settings, "error_cb": on_error}
        return kind(known, logger=LOGGER)
    except KafkaException as error:
        text = error.args[0].str()
        raise InvalidSettingError(f"Kafka's library refuses its settings: {text}", hint="correct [kafka]") from error
