"""The rules of listeners: what retention took excuses them, unless a retry is stored."""

from __future__ import annotations

from typing import cast

import pytest

import memq
from memq.format.pointer import Pointer
from memq.topic import Position, ReadPartition, Topic, equal_slots
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Delivered, LogEntry
from tests.simulation.retry_rules import RETRIES, RetryRules, kind_of

TOPIC = Topic(name="listened", id="ab" * 16, created_ms=0, partitions=equal_slots(1))
PARTITION = ReadPartition(TOPIC.name, TOPIC.id, 0)
FAILING = next(value for value in (b"s 1 %d " % number for number in range(99)) if kind_of(value) == "once")
SOUND = next(value for value in (b"s 1 %d " % number for number in range(99)) if kind_of(value) == "done")


@pytest.fixture
def found() -> list[str]:
    return []


@pytest.fixture
def log() -> ReadLog:
    """Two records of one key, in an entry each; the first one fails."""
    return ReadLog(stream=[Delivered(at, 0, (7, 0), at, value) for at, value in enumerate((FAILING, SOUND))])


@pytest.fixture
def rules(log: ReadLog, found: list[str]) -> RetryRules:
    return RetryRules(TOPIC, "g", {PARTITION: log}, found.append, ordered=True, blocks=False)


@pytest.fixture
def entry() -> LogEntry:
    """An entry of a topic of the group, whose records the tests give."""
    return LogEntry(0, 0, cast(Pointer, None), ())


def message(offset: int, value: bytes) -> memq.Message:
    at = Position(0, offset, 0)
    return memq.Message(topic=TOPIC.name, position=at, value=value, key=b"1", headers=(), timestamp_ms=0, tag=None)


def test_a_listener_that_skips_what_retention_took_has_no_open_record(
    rules: RetryRules, log: ReadLog, found: list[str]
) -> None:
    log.leave_queue(1)
    assert rules.open_records == 1
    rules.begin(message(1, SOUND), 0)
    rules.answer(message(1, SOUND), 0)
    rules.committed("g", PARTITION, Position(0, 2, 0))
    assert (rules.open_records, found) == (0, [])


def test_a_listener_that_skips_a_record_that_is_left_is_found(
    rules: RetryRules, log: ReadLog, found: list[str]
) -> None:
    rules.begin(message(1, SOUND), 0)
    rules.committed("g", PARTITION, Position(0, 1, 0))
    assert [words.partition(" before ")[0] for words in found] == [
        f"attempt 1 of record {SOUND!r} comes",
        f"0:1:0 of g is stored, and record {FAILING!r}",
    ]


def test_a_stored_retry_of_a_record_that_retention_took_is_open(
    rules: RetryRules, log: ReadLog, entry: LogEntry, found: list[str]
) -> None:
    rules.begin(message(0, FAILING), 0)
    rules.answer(message(0, FAILING), 0)
    retries = ReadPartition("g" + RETRIES, "cd" * 16, 0)
    headers = (("memq-topic", TOPIC.name.encode()), ("memq-attempt", b"2"))
    log.leave_queue(1)
    assert rules.open_records == 1
    rules.published(retries, entry, [(0, FAILING, headers)])
    assert (rules.open_records, found) == (2, [])
    rules.committed("g" + RETRIES, retries, Position(0, 1, 0))
    assert len(found) == 1


def test_a_late_retry_of_the_group_before_is_no_finding(rules: RetryRules, entry: LogEntry, found: list[str]) -> None:
    headers = (("memq-topic", TOPIC.name.encode()), ("memq-attempt", b"2"))
    rules.published(ReadPartition("before" + RETRIES, "ef" * 16, 0), entry, [(0, FAILING, headers)])
    assert found == []
