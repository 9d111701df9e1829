"""The door to librdkafka: kinds of errors, causes of outages, log lines, settings that the library refuses."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

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
from memq.notification.kafka.librdkafka import (
    LastErrors,
    admin_of,
    answered,
    code_of,
    consumer_of,
    end_threads,
    is_not_there,
    producer_of,
)
from memq.runtime.logs import INTERVAL_S, LINES_MAX
from memq.runtime.threads import ThreadPool
from tests.librdkafka import finished

CLIENTS = itertools.count()
LOGGER = logging.getLogger("memq.kafka")
UNTRUSTED = KafkaError(KafkaError._SSL, "certificate verify failed")
LOGIN = KafkaError(KafkaError._AUTHENTICATION, "invalid password")
MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
FENCED = (
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
)


# ---- kinds of errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        *((code, NotFoundError, "") for code in MISSING),
        (KafkaError.INVALID_TIMESTAMP, QueueRefusedError, ""),
        (KafkaError.INVALID_RECORD, QueueRefusedError, ""),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, DeniedError, "the right to use the topic"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, DeniedError, "the right to use the group"),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, DeniedError, "a right on the cluster"),
        (KafkaError.MSG_SIZE_TOO_LARGE, TooLargeError, ""),
        (KafkaError.RECORD_LIST_TOO_LARGE, TooLargeError, ""),
        (KafkaError.POLICY_VIOLATION, InvalidRequestError, "policy"),
        (KafkaError.INVALID_REPLICATION_FACTOR, InvalidRequestError, "replication_factor in [kafka]"),
        (KafkaError.INVALID_CONFIG, InvalidRequestError, "[kafka]"),
        (KafkaError.INVALID_SESSION_TIMEOUT, InvalidRequestError, "session_timeout_ms_min in [kafka]"),
        (KafkaError.UNSUPPORTED_VERSION, InvalidRequestError, "newer Kafka"),
        (KafkaError.UNSUPPORTED_SASL_MECHANISM, QueueError, "sasl.mechanism"),
        (KafkaError.NOT_ENOUGH_REPLICAS, QueueError, ""),
        (KafkaError._TIMED_OUT, QueueError, ""),
    ],
)
def test_an_error_of_kafka_says_what_the_caller_can_do(code: int, kind: type[MemqError], hint: str) -> None:
    error = KafkaError(code, "It FAILED")
    for each in (error, KafkaException(error)):
        found = LastErrors().failure(each, "publishing")
        assert type(found) is kind
        assert str(found).startswith("publishing: it failed")
        assert hint in found.hint


def test_an_error_without_a_text_is_named_by_its_code() -> None:
    assert "publishing: REQUEST_TIMED_OUT" in str(LastErrors().failure(KafkaError(7, ""), "publishing"))


@pytest.mark.parametrize("code", MISSING)
def test_a_topic_that_does_not_exist_is_told_from_one_that_is_denied(code: int) -> None:
    assert is_not_there(KafkaError(code))
    assert not is_not_there(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.mark.parametrize("code", FENCED)
def test_a_member_alone_is_fenced(code: int) -> None:
    error = KafkaError(code)
    assert type(LastErrors().group_failure(error, "committing", member=True)) is GenerationFencedError
    assert type(LastErrors().group_failure(KafkaException(error), "committing")) is QueueError


def test_a_group_request_that_finds_no_topic_may_pass_later_and_a_denied_one_stays_denied() -> None:
    """Kafka answers so while it loads the metadata of its topics."""
    for code in MISSING:
        assert type(LastErrors().group_failure(KafkaError(code), "committing", member=True)) is QueueError
    denied = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    assert type(LastErrors().group_failure(denied, "committing", member=True)) is DeniedError


def test_a_code_is_of_the_error_of_kafka_that_caused_another() -> None:
    error = QueueError("no answer")
    assert code_of(error) is None
    error.__cause__ = OSError(7)
    assert code_of(error) is None
    error.__cause__ = KafkaException(KafkaError(7))
    assert code_of(error) == 7


# ---- the last error of a connection -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noted", "cause"),
    [
        ([UNTRUSTED, KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 down")], "certificate verify failed"),
        ([UNTRUSTED, KafkaError(KafkaError._TRANSPORT, "refused")], "certificate verify failed"),
        ([UNTRUSTED, LOGIN], "invalid password"),
        ([KafkaError(KafkaError._TRANSPORT, "refused"), KafkaError(KafkaError._TRANSPORT, "reset")], "reset"),
        ([KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 down")], "1/1 down"),
    ],
)
def test_an_outage_is_explained_by_the_last_error_that_has_a_reason(noted: list[KafkaError], cause: str) -> None:
    errors = LastErrors()
    for error in noted:
        errors.note(error)
    assert str(errors.failure(KafkaError(KafkaError._TIMED_OUT, "timed out"), "reading")).startswith(
        f"reading: timed out ({cause})"
    )
    assert cause not in str(errors.failure(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), "reading")), "Kafka has answered"
    errors.clear()
    assert cause not in str(errors.failure(KafkaError(KafkaError._TIMED_OUT), "reading"))


# ---- answers and threads ------------------------------------------------------------------------------


def test_an_answer_that_is_not_whole_is_an_error_of_kafka() -> None:
    async def work() -> None:
        assert await answered(finished(5)) == 5
        with pytest.raises(KafkaException) as caught:
            await answered(finished(RuntimeError("Results length 0")))
        assert type(LastErrors().failure(caught.value, "reading")) is QueueError
        assert "answer is not whole: Results length 0" in caught.value.args[0].str()

    asyncio.run(work())


def test_threads_that_end_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        pool, ended = ThreadPool("kafka-test", 1), list[str]()
        await pool.run(lambda: None)
        await end_threads(pool, lambda: ended.append("last"))
        assert ended == ["last"]

    asyncio.run(work())
    assert caplog.text == ""


# ---- clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("create", [admin_of, consumer_of, producer_of])
@pytest.mark.parametrize("setting", [{"no.such": "1"}, {"security.protocol": "telepathy"}])
def test_settings_that_the_library_refuses_are_named(
    create: Callable[[Mapping[str, Any], Callable[[KafkaError], None]], object], setting: dict[str, str]
) -> None:
    with pytest.raises(InvalidSettingError, match=f"Kafka's library refuses its settings: .*{next(iter(setting))}"):
        create({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", **setting}, lambda error: None)


def test_the_library_logs_and_complains_to_memq(caplog: pytest.LogCaptureFixture) -> None:
    complaints: list[KafkaError] = []
    producer = producer_of({"bootstrap.servers": "127.0.0.1:1"}, complaints.append)
    while not (complaints and any(record.name == "memq.kafka" for record in caplog.records)):
        producer.poll(0.1)
    assert complaints[0].code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
    assert "Connection refused" in caplog.text


def line(text: str, second: float) -> logging.LogRecord:
    return logging.makeLogRecord({"name": LOGGER.name, "msg": text, "created": second, "levelno": logging.ERROR})


def test_lines_of_one_kind_and_client_are_bounded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    busy, quiet = (f"FAIL [rdkafka#test-{next(CLIENTS)}] [thrd:" for _ in range(2))  # a second run has other clients
    for number in range(LINES_MAX + 3):
        LOGGER.handle(line(f"{busy}{number}]: refused", 1.0))
    LOGGER.handle(line(f"{quiet}0]: refused", 1.0))
    LOGGER.handle(line(f"{busy}99]: refused", 1.0 + INTERVAL_S))
    assert caplog.messages == [
        *(f"{busy}{number}]: refused" for number in range(LINES_MAX)),
        f"{quiet}0]: refused",
        f"{busy}99]: refused (3 more like it were not logged)",
    ]
