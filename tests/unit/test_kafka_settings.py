"""Settings of the Kafka queue: what librdkafka takes, what is refused, and how they depend on each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from memq.errors import InvalidSettingError
from memq.limits import KIB, MIB
from memq.notification.kafka.librdkafka import admin_of, consumer_of, producer_of
from memq.notification.kafka.settings import (
    SETUP_MS_MIN,
    SOURCE_SESSION_MS,
    KafkaSettings,
    kafka_settings,
)
from memq.settings import rules_of

NUMBERS = [name for name, rule in rules_of(KafkaSettings).items() if type(getattr(KafkaSettings(), name)) is int]


def settings_of(**section: object) -> KafkaSettings:
    return kafka_settings("kafka://127.0.0.1:1", {name: (value, "test") for name, value in section.items()})


def ignore(error: KafkaError) -> None:
    """No Kafka runs: the clients can't connect."""


# ---- librdkafka takes what memq gives it --------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bound", ["low", "high"])
def test_librdkafka_takes_each_setting_at_its_bounds(name: str, bound: str) -> None:
    settings = replace(settings_of(), **{name: getattr(rules_of(KafkaSettings)[name], bound)})
    create: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (admin_of, settings.client()),
        (producer_of, settings.producer()),
        (consumer_of, settings.reader(100, 2 * MIB)),
        (consumer_of, settings.source("copies")),
        (consumer_of, settings.positions("g")),
    ]
    for client, known in create:
        client(known, ignore)


def test_each_pointer_is_a_batch_of_its_own() -> None:
    """Kafka refuses a whole batch for one stale pointer. librdkafka has a Kafka of its own for tests."""
    counts: list[int] = []

    def note(statistics: str) -> None:
        topics = json.loads(statistics)["topics"]
        counts.extend(topic["batchcnt"]["max"] for topic in topics.values())

    settings = settings_of(**{"test.mock.num.brokers": 1, "statistics.interval.ms": 20}).producer()
    producer, offsets = producer_of({**settings, "stats_cb": note}, ignore), list[int | None]()
    for _ in range(5):
        producer.produce("clicks", b"pointer", partition=0, on_delivery=lambda _, found: offsets.append(found.offset()))
    while len(offsets) < 5 or not any(counts):
        producer.poll(0.1)
    assert (offsets, max(counts)) == ([0, 1, 2, 3, 4], 1)


@pytest.mark.parametrize("name", ["debug", "log_level", "statistics.interval.ms", "statistics_interval_ms"])
def test_names_of_librdkafka_reach_it_in_its_own_spelling(name: str) -> None:
    value = "all" if name == "debug" else "6"
    settings = settings_of(**{name: value})
    assert list(settings.library.values()) == [value]
    producer_of(settings.producer(), ignore)


def test_a_switch_of_librdkafka_may_be_a_boolean_in_toml() -> None:
    settings = settings_of(**{"socket.keepalive.enable": True})
    assert settings.library == {"socket.keepalive.enable": "true"}
    producer_of(settings.producer(), ignore)


@pytest.mark.parametrize("name", ["default.topic.config", "delivery.report.only.error", "delivery_report_only_error"])
@pytest.mark.parametrize("value", [True, "x"])
def test_settings_that_end_the_client_or_its_reports_are_refused(name: str, value: object) -> None:
    """The first one raised an AttributeError of the library."""
    with pytest.raises(InvalidSettingError, match=f"setting '{name}' in .* can't be set"):
        settings_of(**{name: value})


@pytest.mark.parametrize("value", ["rack\udc80", "ra\0ck"])
def test_a_value_that_is_no_text_is_refused_by_the_name_of_its_setting(value: str) -> None:
    """A variable of the environment may have any bytes. librdkafka cut the text, or raised a SystemError."""
    with pytest.raises(InvalidSettingError, match=r"setting 'client.rack' in \[kafka\] from test is no text"):
        settings_of(**{"client.rack": value})
    settings_of(**{"client.rack": "räck\n\U0001f600"})


@pytest.mark.parametrize(("port", "allowed"), [(0, False), (1, True), (65_535, True), (65_536, False)])
def test_a_server_has_a_port_of_tcp(port: int, *, allowed: bool) -> None:
    """Librdkafka takes the lower 16 bits of the number."""
    if allowed:
        assert kafka_settings(f"kafka://k:{port}", {}).servers == f"k:{port}"
    else:
        with pytest.raises(InvalidSettingError, match="does not name a Kafka"):
            kafka_settings(f"kafka://k:{port}", {})


# ---- copies and times ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "in_sync", "allowed"),
    [(-1, 2, True), (0, 0, True), (0, 1, False), (1, 1, True), (2, 2, True), (2, 3, False), (3, 2, True)],
)
def test_more_copies_are_not_required_than_there_are(copies: int, in_sync: int, *, allowed: bool) -> None:
    section = {"replication_factor": copies, "min_insync_replicas": in_sync}
    if allowed:
        settings_of(**section)
    else:
        with pytest.raises(InvalidSettingError, match="no pointer would ever count"):
            settings_of(**section)


def test_a_request_may_time_out_earlier_than_a_connection() -> None:
    """Librdkafka refuses shorter times for connections."""
    for given_ms, timeout_ms in ((100, SETUP_MS_MIN), (SETUP_MS_MIN + 1, SETUP_MS_MIN + 1)):
        found = settings_of(request_timeout_ms=given_ms).client()
        assert (found["socket.timeout.ms"], found["socket.connection.setup.timeout.ms"]) == (timeout_ms, timeout_ms)


def test_the_bound_on_pending_pointers_is_that_of_the_producer() -> None:
    assert settings_of(pending_bytes_max=3 * MIB).producer()["queue.buffering.max.kbytes"] == 3 * KIB
    assert settings_of().reader(5, 3 * MIB)["queued.max.messages.kbytes"] == 3 * KIB


def test_a_copy_has_a_session_timeout_that_kafka_allows() -> None:
    for least_ms, timeout_ms in ((100, SOURCE_SESSION_MS), (SOURCE_SESSION_MS + 1, SOURCE_SESSION_MS + 1)):
        assert settings_of(session_timeout_ms_min=least_ms).source("g")["session.timeout.ms"] == timeout_ms
