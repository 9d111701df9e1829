"""Kafka's errors as memq's: the one place that judges librdkafka's codes."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from memq.errors import (
    DeniedError,
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    QueueError,
    QueueRefusedError,
    TooLargeError,
)

_NOT_THERE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_DENIED = {  # by the answer to a request
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the right to use the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the right to use the group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "a right on the cluster (Create, Alter, Describe, or IdempotentWrite)",
}
_UNTRUSTED = (
    "its certificate is not of an authority in ssl.ca.location of [kafka], or does not name the host that is connected "
    "to: name the authority's file, and the host in queue = kafka://HOST:PORT as the certificate does"
)
# A connection that was not let in. The same codes come while Kafka goes down or up, so no request is denied by them.
_NOT_LET_IN = {
    KafkaError._SSL: _UNTRUSTED,
    KafkaError._AUTHENTICATION: "Kafka denies to log in: check sasl.* in [kafka]",
    KafkaError.SASL_AUTHENTICATION_FAILED: "Kafka denies to log in: check sasl.* in [kafka]",
    KafkaError.UNSUPPORTED_SASL_MECHANISM: "Kafka denies this login: choose another sasl.mechanism in [kafka]",
}
# Of librdkafka's texts for these codes: the connection ended before Kafka had judged the certificate or the login.
_BROKEN_OFF = ("disconnected", "transport failure", "connection reset", "timed out", "end of file")
_FENCED = {
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_INVALID = {  # and what to do
    KafkaError.POLICY_VIOLATION: "Kafka has a policy of its own: let it allow what the message names",
    KafkaError.INVALID_REPLICATION_FACTOR: "set replication_factor in [kafka] to at most as many as Kafka has brokers",
    KafkaError.INVALID_CONFIG: "correct [kafka]",
    KafkaError.INVALID_SESSION_TIMEOUT: "set session_timeout_ms_min in [kafka] to what Kafka allows",
    KafkaError.UNSUPPORTED_VERSION: "use a newer Kafka",
}


def failure(error: KafkaError | KafkaException, doing: str, behind: KafkaError | None = None) -> MemqError:
    """Return memq's error for one of Kafka's that was met while `doing` something.

    `behind` is what a connection complained of. It explains the error, and never changes its kind.
    """
    found = error.args[0] if isinstance(error, KafkaException) else error
    code, text = found.code(), found.str()
    said = f"{doing}: {text.lower() if text else found.name()}" + (f" ({behind.str().lower()})" if behind else "")
    if code in _NOT_THERE:
        return NotFoundError(said)
    if code in (KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD):
        return QueueRefusedError(said)
    if code in _DENIED:
        return DeniedError(said, hint=f"Kafka denies {_DENIED[code]}")
    if code in _FENCED:
        return GenerationFencedError(said)
    if code in _TOO_LARGE:
        return TooLargeError(said)
    if code in _INVALID:
        return InvalidRequestError(said, hint=_INVALID[code])
    return QueueError(said, hint=_NOT_LET_IN.get(code) or (_NOT_LET_IN.get(behind.code(), "") if behind else ""))


def denial(error: KafkaError, doing: str) -> DeniedError | None:
    """Return the error for a refused login or certificate, None for any other message.

    Only for a Kafka that has never answered: a running one refuses for a moment what it takes a moment later.
    """
    hint = _NOT_LET_IN.get(error.code())
    if hint is None or any(words in error.str().lower() for words in _BROKEN_OFF):
        return None
    return DeniedError(f"{doing}: {error.str().lower()}", hint=hint)


def is_not_let_in(error: KafkaError) -> bool:
    """Whether a connection complains of a login or a certificate."""
    return error.code() in _NOT_LET_IN


def is_not_there(error: KafkaError) -> bool:
    """Whether a topic or a partition is not there."""
    return error.code() in _NOT_THERE
