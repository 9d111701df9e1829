"""The rules of listeners: what retention took excuses them, unless a retry is stored."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

import memq
from memq.client.listener.open_records import NO_ANSWER
from memq.format.pointer import Pointer
from memq.topic import Position, ReadPartition, Topic, equal_slots
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Delivered, LogEntry
from tests.simulation.retry_rules import DEATHS_MAX, LETTERS, RETRIES, TRIES, ProcessEnd, RetryRules, kind_of

TOPIC = Topic(name="listened", id="ab" * 16, created_ms=0, partitions=equal_slots(1))
PARTITION = ReadPartition(TOPIC.name, TOPIC.id, 0)
FAILING = next(value for value in (b"s 1 %d " % number for number in range(99)) if kind_of(value) == "once")
DEADLY = next(value for value in (b"s 1 %d " % number for number in range(999)) if kind_of(value) == "deadly")
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


def test_a_record_that_ends_processes_without_end_is_found(rules: RetryRules, log: ReadLog, found: list[str]) -> None:
    log.stream[0] = Delivered(0, 0, (7, 0), 0, DEADLY)
    for _ in range(DEATHS_MAX):
        with pytest.raises(ProcessEnd):
            rules.answer(message(0, DEADLY), 0)
    assert found == []
    with pytest.raises(ProcessEnd):
        rules.answer(message(0, DEADLY), 0)
    assert found == [f"record {DEADLY!r} has ended {DEATHS_MAX + 1} processes"]


def test_a_record_is_given_up_after_its_last_try_without_an_answer(
    rules: RetryRules, log: ReadLog, entry: LogEntry, found: list[str]
) -> None:
    letters = ReadPartition("g" + LETTERS, "cd" * 16, 0)
    headers = (
        ("memq-topic", TOPIC.name.encode()),
        ("memq-cause", NO_ANSWER.encode()),
        ("memq-attempts", str(TRIES).encode()),
        ("memq-state", b"dead"),
    )
    rules.published(letters, entry, [(0, SOUND, headers)])
    assert found == [f"the dead letter of record {SOUND!r} is of one that was tried 0 times"]
    log.leave_queue(1)
    found.clear()
    rules.begin(msgspec.structs.replace(message(1, SOUND), attempt=TRIES + 1, error=NO_ANSWER), 0)
    assert found == [f"attempt {TRIES + 1} of record {SOUND!r} comes after its last try"]
    found.clear()
    rules.published(letters, entry, [(0, SOUND, headers)])
    assert found == []
