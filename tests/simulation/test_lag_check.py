"""The check of lag finds wrong answers, and nothing else."""

from __future__ import annotations

import random

import msgspec
import pytest

from memq.format.pointer import Adopted, Location, Pointer
from memq.topic import ReadPartition, TopicSettings, Totals
from tests.simulation.lag_check import LagCheck
from tests.simulation.reader import FindingError, LogEntry

PARTITION = ReadPartition("t", "0" * 32, 0)
Step = tuple[int, int, int]  # epoch, batch, records stated before it; each batch holds 5


def log_of(*steps: Step) -> list[LogEntry]:
    entries = [
        LogEntry(0, 0, Pointer(kind="opened", cluster="c", topic="t", topic_id="0" * 32, partition=0, epoch=1), ())
    ]
    for offset, (epoch, batch, before) in enumerate(steps, 1):
        pointer = msgspec.structs.replace(
            entries[0].pointer,
            kind="data",
            epoch=epoch,
            batch_sequence=batch,
            locations=(Location(store="main", key=f"k{batch}", offset=0, length=50),),
            records=5,
            stored_bytes=50,
            totals=Totals(before, 10 * before),
        )
        entries.append(LogEntry(offset, offset, pointer, ()))
    return entries


def check(log: list[LogEntry]) -> None:
    LagCheck(PARTITION, log, TopicSettings()).check(random.Random(7).randrange, 200)


def adopting(log: list[LogEntry], offset: int, late: int) -> list[LogEntry]:
    entry = log[offset]
    adopted = (Adopted(offset=late, epoch=1, batch_sequence=0, records=5, bytes=50),)
    log[offset] = LogEntry(offset, entry.time_ms, msgspec.structs.replace(entry.pointer, adopted=adopted), ())
    return log


def test_exact_totals_pass() -> None:
    check(log_of((1, 0, 0), (1, 1, 5), (1, 2, 10), (1, 3, 15)))


def test_a_copy_that_is_counted_later_passes() -> None:
    check(adopting(log_of((1, 0, 0), (1, 0, 0), (1, 1, 5), (1, 2, 15)), 4, late=2))


def test_a_pointer_with_blocks_that_readers_skip_passes() -> None:
    log = log_of((1, 0, 0), (1, 1, 5), (1, 2, 10))
    log[2] = LogEntry(2, 2, msgspec.structs.replace(log[2].pointer, skip=(0,)), ())
    check(log)


def test_a_pointer_that_states_too_much_is_found() -> None:
    with pytest.raises(FindingError, match="states"):
        check(log_of((1, 0, 0), (1, 1, 5), (1, 2, 15)))


def test_a_batch_that_nobody_ever_counts_is_found() -> None:
    steps = (
        [(1, batch, 5 * batch) for batch in range(3)] + [(1, 0, 0)] + [(1, batch, 5 * batch) for batch in range(3, 9)]
    )
    with pytest.raises(FindingError, match="stored are"):
        check(log_of(*steps))
