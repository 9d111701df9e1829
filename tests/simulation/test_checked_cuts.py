"""The checker when a log is cut: the lost records are excused, and nothing else."""

from __future__ import annotations

import pytest

from memq.topic import Position
from tests.simulation.checked_log import PARTITION, Log, block
from tests.simulation.checker import Checker

LOST_AT = 2  # `opened` and the first batch are left
READER = "c"


def cut_log() -> tuple[Log, list[bytes]]:
    """Return a log that had three batches of a record each, read by a group, and has lost two of them."""
    log = Log()
    log.open(1)
    values = [log.send(number)[0] for number in range(3)]
    for number, value in enumerate(values):
        log.batch([block(number, [value])], number)
        log.ack([value])
        consume(log, value, number + 1)
    log.checker.cut(PARTITION, LOST_AT)
    log.end = LOST_AT
    return log, values


def grown(log: Log, count: int) -> list[bytes]:
    """Let the next owner publish `count` batches of a record, after its `opened`."""
    log.open(2)
    values = log.send(*range(10, 10 + count))
    for number, value in enumerate(values):
        log.batch([block(10 + number, [value])], number, epoch=2)
        log.ack([value])
    return values


def consume(log: Log, value: bytes, offset: int) -> None:
    log.checker.groups.consume(READER, "g", PARTITION, (offset, 0), value)


def seek(checker: Checker, offset: int) -> None:
    checker.groups.seek(READER, PARTITION, (offset, 0))


def test_records_that_the_queue_lost_are_excused_and_the_group_reads_what_is_new() -> None:
    log, lost = cut_log()
    consume(log, lost[2], 3)  # it was fetched before
    new = grown(log, 3)
    assert not log.checker.groups.is_drained("g")
    seek(log.checker, LOST_AT)
    for number, value in enumerate(new):
        consume(log, value, LOST_AT + 1 + number)
    assert log.checker.groups.is_drained("g")
    assert log.finish() == []


def test_a_lost_record_may_be_acked_late_or_land_again() -> None:
    log = Log()
    log.open(1)
    first, second = log.send(0, 1)
    log.batch([block(0, [first]), block(1, [second])], 0)
    log.checker.cut(PARTITION, 1)
    log.end = 1
    log.checker.acked_by_owner((0, 7), 1, 1)
    log.ack([first])  # its ack was on its way
    log.open(2)
    log.batch([block(1, [second])], 0, epoch=2, read_to=2)
    log.ack([second])
    assert log.finish() == []


def log_that_lost(*lost: int) -> tuple[Log, list[bytes]]:
    """Return a log that lost these records, before its owner put record 3 behind them and another owner came."""
    log = Log()
    log.open(1)
    values = log.send(0, 1, 2, 3, 4)
    for batch, number in enumerate((0, *lost)):
        log.batch([block(number, [values[number]])], batch)
    log.checker.cut(PARTITION, LOST_AT)
    log.end = LOST_AT
    log.batch([block(3, values[3:4])], 1 + len(lost))
    log.open(2)
    return log, values


def land(log: Log, values: list[bytes], numbers: tuple[int, ...]) -> list[str]:
    """Let the next owner publish these records, ack all records, and return the findings."""
    for batch, number in enumerate(numbers):
        log.batch([block(number, [values[number]])], batch, epoch=2, read_to=LOST_AT + 2)
    log.ack([values[number] for number in (0, 3, *numbers)])
    return log.finish()


def test_lost_records_may_land_again_behind_those_of_an_owner_that_did_not_know_of_the_cut() -> None:
    log, values = log_that_lost(1, 2)
    assert land(log, values, (1, 2, 4)) == []


@pytest.mark.parametrize(
    ("lost", "landed", "late", "last"),
    [
        ((1, 2), (2, 1, 4), 1, 2),
        ((1, 2), (1, 4, 2), 2, 4),
        ((1,), (1, 2, 4), 2, 3),
    ],
    ids=["two lost records", "a lost record behind those of the next owner", "a record that the log did not lose"],
)
def test_other_records_keep_their_order_after_a_cut(
    lost: tuple[int, ...], landed: tuple[int, ...], late: int, last: int
) -> None:
    log, values = log_that_lost(*lost)
    assert land(log, values, landed) == [f"record {values[late]!r} comes after number {last}"]


def test_a_reader_that_continues_in_the_new_log_without_a_seek_is_found() -> None:
    log, _ = cut_log()
    new = grown(log, 3)
    consume(log, new[-1], LOST_AT + 3)
    assert log.findings == [
        f"{READER} delivers record 3 of {PARTITION}, whose log was cut before its position",
        f"group g skips records 1 to 3 of {PARTITION}",
    ]


def test_a_group_that_starts_after_new_records_is_found() -> None:
    log, _ = cut_log()
    new = grown(log, 3)
    groups = log.checker.groups
    groups.committed("g", PARTITION, Position(0, 4))  # of a member that had read the lost records
    groups.begin("d")
    groups.fetched("g", PARTITION, Position(0, 4))
    groups.assign("d", "g", PARTITION)
    groups.consume("d", "g", PARTITION, (5, 0), new[-1])
    assert log.findings[-1] == f"group g skips records 1 to 3 of {PARTITION}"


def test_a_record_before_the_loss_is_promised_as_ever() -> None:
    log, values = cut_log()
    (never,) = log.send(7)
    log.ack([never])
    assert log.findings == [f"record {never!r} is acked, but no pointer in the queue holds it"]
    assert log.checker.records[values[0]].place == (PARTITION, 0)


def test_a_commit_of_lost_records_is_a_finding_if_their_owner_never_had_them() -> None:
    log = Log()
    log.open(1)
    first, second, third = log.send(0, 1, 2)
    log.batch([block(0, [first, second, third])], 0)
    log.checker.cut(PARTITION, 1)
    log.end = 1
    log.open(2)
    log.checker.records[first].staged_ack_leaves(1, named=False)  # the owner before the cut answered late
    log.checker.records[second].staged_ack_leaves(2, named=True)
    log.checker.records[third].staged_ack_leaves(2, named=False)
    log.ack([first, second])
    assert log.findings == []
    log.ack([third])
    assert log.findings == [f"record {third!r} is acked after its pointer was lost, by an owner that never had it"]


def test_records_at_places_that_the_queue_lost_are_news_of_a_group() -> None:
    log, _ = cut_log()
    groups = log.checker.groups
    before = groups.news("g", PARTITION)
    (value,) = grown(log, 1)
    groups.consume("another", "g", PARTITION, (LOST_AT + 1, 0), value)
    assert groups.news("g", PARTITION) == before + 1
