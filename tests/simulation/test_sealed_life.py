"""The rule about the end of a sealed topic finds records that a reader missed, and no others."""

from __future__ import annotations

from memq.broker.upkeep.sealing import AWAY_S
from memq.topic import Topic, equal_slots
from tests.simulation.checked_log import PARTITION, TOPIC_ID, Log, block
from tests.simulation.checker import may_lack
from tests.simulation.sealed_life import sealed_read

TOPIC = Topic(name="t", id=TOPIC_ID, created_ms=0, partitions=equal_slots(1))


def two_batches() -> tuple[Log, list[bytes], list[bytes]]:
    """Write a log with an opening and two batches of acked records."""
    log = Log()
    log.open(1)
    first, second = log.send(0, 1), log.send(2)
    log.batch([block(0, first)], 0)
    log.batch([block(2, second)], 1)
    log.ack(first + second)
    return log, first, second


def test_a_reader_that_ends_before_an_acked_record_is_found() -> None:
    log, first, second = two_batches()
    read = sealed_read(log.checker, TOPIC, {second[0], first[0]})
    assert read.missed(log.checker, {*first, *second}) == first[1:]


def test_a_reader_that_found_all_acked_records_is_right() -> None:
    log, first, second = two_batches()
    read = sealed_read(log.checker, TOPIC, {*first, *second})
    assert read.missed(log.checker, {*first, *second}) == []


def test_a_record_that_a_killed_owner_has_acked_with_1_may_be_lost() -> None:
    log, (value, _), _ = two_batches()
    sent_s = log.checker.records[value].sent_s
    assert not may_lack(log.checker, (TOPIC_ID, 0), value, sent_s, 0)
    assert not may_lack(log.checker, (TOPIC_ID, 7), value, sent_s, AWAY_S), "no owner of this partition is known"
    log.node.killed_s = sent_s + 1
    assert may_lack(log.checker, (TOPIC_ID, 0), value, sent_s, 0)
    assert not may_lack(log.checker, (TOPIC_ID, 0), value, -1e9, 0), "it was opened after the ack"
    log.checker.on_disk = True
    assert not may_lack(log.checker, (TOPIC_ID, 0), value, sent_s, 0), "the end waits until its owner is back"


def test_a_record_of_an_owner_that_is_away_may_be_missed_after_the_longest_wait() -> None:
    log, (value, _), _ = two_batches()
    sent_s = log.checker.records[value].sent_s
    rules = log.checker.parts[TOPIC_ID, 0]
    rules.highest += 1
    assert not may_lack(log.checker, (TOPIC_ID, 0), value, sent_s, AWAY_S - 1)
    assert may_lack(log.checker, (TOPIC_ID, 0), value, sent_s, AWAY_S)


def test_a_reader_need_not_find_what_retention_took_before_its_end() -> None:
    log, first, second = two_batches()
    log.checker.trimmed(PARTITION, 2)
    read = sealed_read(log.checker, TOPIC, set())
    assert read.missed(log.checker, {*first, *second}) == second


def test_a_reader_had_to_find_what_retention_took_after_its_end() -> None:
    log, first, second = two_batches()
    read = sealed_read(log.checker, TOPIC, set(second))
    log.checker.trimmed(PARTITION, 2)
    assert read.missed(log.checker, {*first, *second}) == first


def test_a_reader_need_not_find_what_a_cut_took() -> None:
    log, first, second = two_batches()
    log.checker.cut(PARTITION, 2)
    read = sealed_read(log.checker, TOPIC, set())
    assert read.missed(log.checker, {*first, *second}) == first
