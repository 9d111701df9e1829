"""Covered batches of a position, and where reading begins in a restored log (G5)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memq.broker.restore.position_search import PositionSearch
from memq.client.consumer.progress import ReadProgress
from memq.format.pointer import Location, NamedProducer, Pointer, ProducerRanges, pointer_mark
from memq.limits import COVERED_MAX
from memq.topic import Committed, Covered, Position, TopicSettings, Totals

SETTINGS = TopicSettings()
KEEP_MS = 350_000
COPIES_MS = 2 * SETTINGS.dedup_window_ms + 2 * (SETTINGS.stale_publish_ms + 20_000)


def batch(epoch: int, number: int, *, writer: int = 0, sealed_ms: int = 0, kind: str = "data") -> Pointer:
    data = kind == "data"
    where = (Location(store="main", key=f"{writer}-{epoch}-{number}", offset=0, length=10),) if data else ()
    return Pointer(
        kind=kind,
        cluster="memq",
        topic="clicks",
        topic_id="0" * 32,
        partition=writer,
        epoch=epoch,
        batch_sequence=number,
        locations=where,
        records=5 if data else 0,
        stored_bytes=10 if data else 0,
        sealed_ms=sealed_ms,
    )


def covered(*pointers: tuple[int, Pointer], start: Covered = ()) -> Covered:
    progress = ReadProgress(KEEP_MS)
    progress.cover(start)
    for time_ms, pointer in pointers:
        progress.pass_over(pointer, time_ms)
    return progress.covered


def found(committed: Committed, *pointers: Pointer) -> Committed:
    """Return the position in a log of these pointers, from offset 0 on."""
    search = PositionSearch(SETTINGS, Position(0, 0))
    search.want([committed])
    for take in (search.look, search.place):
        for offset, pointer in enumerate(pointers):
            take(offset, pointer)
    return search.result(committed)


def at(covers: Covered, offset: int = 900, index: int = 0, mark: int = 0) -> Committed:
    return Committed(Position(0, offset, index), Totals(77, 770), mark, covers)


def test_a_position_covers_the_batches_of_each_writer_up_to_the_last_one() -> None:
    assert covered((1, batch(3, 7)), (2, batch(1, 0, writer=4)), (3, batch(3, 8))) == ((0, 0, (3, 9)), (4, 0, (1, 1)))


def test_a_lower_epoch_is_covered_when_a_batch_of_a_higher_one_is_old() -> None:
    opened = (10, batch(4, 0, kind="opened"))
    first = (1, batch(3, 7))
    assert covered(first, opened) == ((0, 0, (3, 8, 4, 0)),)
    assert covered(first, opened, (10 + KEEP_MS, batch(4, 0))) == ((0, 3, (3, 8, 4, 1)),)
    assert covered(first, opened, (11 + KEEP_MS, batch(4, 0))) == ((0, 4, (4, 1)),)
    assert covered(first, opened, (11 + KEEP_MS, batch(4, 0, kind="ended"))) == ((0, 3, (3, 8, 4, 0)),)
    late = (12 + KEEP_MS, batch(3, 8))
    assert covered(first, opened, (11 + KEEP_MS, batch(4, 0)), late) == ((0, 4, (4, 1)),)


def test_a_reader_continues_what_its_stored_position_covers() -> None:
    start = ((0, 2, (2, 5, 3, 1)),)
    assert covered(start=start) == start
    assert covered((50, batch(3, 1)), start=start) == ((0, 2, (2, 5, 3, 2)),)
    assert covered((50, batch(3, 1)), (51 + KEEP_MS, batch(3, 2)), start=start) == ((0, 3, (3, 3)),)
    progress = ReadProgress(KEEP_MS)
    progress.cover(start)
    progress.pass_over(batch(3, 1), 50)
    assert progress.again().covered == start
    assert ReadProgress().covered == ()


@pytest.mark.parametrize("what", ["writers", "epochs"])
def test_a_position_with_too_many_numbers_covers_nothing(what: str) -> None:
    numbers = range(1, COVERED_MAX + 2)
    pointers = [(1, batch(1, 0, writer=number) if what == "writers" else batch(number, 0)) for number in numbers]
    assert covered(*pointers[:-1]) != ()
    assert covered(*pointers) == ()


def test_reading_begins_at_the_first_batch_that_is_not_covered() -> None:
    log = (batch(3, 6), batch(3, 7), batch(3, 8), batch(4, 0))
    assert found(at(((0, 3, (3, 7)),)), *log) == Committed(
        Position(0, 1), Totals(5, 10), pointer_mark(log[0]), ((0, 3, (3, 7)),)
    )
    assert found(at(((0, 3, (3, 9, 4, 1)),)), *log).position == Position(0, 4)
    assert found(at(((0, 3, (3, 9, 4, 1)),)), *log).totals == Totals(20, 40)
    assert found(at(((0, 3, (3, 7, 4, 1)),)), *log).position == Position(0, 1)  # (3, 7) may have come late
    assert found(at(((9, 3, (3, 7)),)), *log).position == Position(0, 0)  # another writer
    assert found(at(()), *log) == Committed(Position(0, 0))


def test_a_position_within_a_batch_stays_there_if_its_mark_is_that_of_the_batch() -> None:
    log = (batch(3, 6), batch(3, 7), batch(3, 8))
    covers = ((0, 3, (3, 7)),)
    mark = pointer_mark(replace(log[1], totals=Totals(77, 770)))  # as it was in the lost log
    within = found(at(covers, index=3, mark=mark), *log)
    assert (within.position, within.totals) == (Position(0, 1, 3), Totals(5, 10))
    assert within.mark == pointer_mark(log[1])
    assert found(at(covers, index=3, mark=mark ^ 1), *log).position == Position(0, 1, 0)
    assert found(within, *log).position.pointer_offset == 1


def test_reading_begins_at_the_first_copy_of_a_block_that_comes_again_behind_the_position() -> None:
    """A block acked with 1 was forwarded after a minute: a reader behind its first batch dropped it as a copy."""

    def with_blocks(pointer: Pointer, *ranges: tuple[int, int], producer: int = 5) -> Pointer:
        return replace(pointer, producers=(ProducerRanges(producer, ranges),))

    last_ms = 10 * COPIES_MS
    never_named = with_blocks(batch(2, 4, sealed_ms=1), (0, 3), (9, 12))
    read = [with_blocks(batch(3, number, sealed_ms=last_ms), (20 + number, 21 + number)) for number in range(2)]
    covers = ((0, 3, (3, 2)),)
    for ranges, offset in (
        (((2, 3),), 1),
        (((11, 14),), 1),
        (((3, 9),), 4),
        (((12, 20), (22, 23)), 4),
        (((0, 40),), 1),
        (((21, 22),), 3),
    ):
        again = with_blocks(batch(3, 2, sealed_ms=last_ms), *ranges)
        log = (with_blocks(batch(2, 0, sealed_ms=1), (50, 51)), never_named, *read, again)
        assert found(at(covers), *log).position == Position(0, offset), ranges
    other = with_blocks(batch(3, 2, sealed_ms=last_ms), (2, 3), producer=6)
    assert found(at(covers), never_named, *read, other).position == Position(0, 3)
    copied = with_blocks(batch(3, 2, sealed_ms=last_ms), (2, 3))
    assert found(at(covers), batch(2, 0, sealed_ms=1), never_named, *read, copied).totals == Totals(5, 10)
    assert found(at(((0, 3, (3, 3)),)), never_named, *read, copied).position == Position(0, 4)  # it was read, too


def test_a_staged_batch_is_read_again_whatever_its_number() -> None:
    """A restore numbered a staged batch below the next one of the position: the group skipped its records."""
    job = NamedProducer(producer=5, epoch=0, batch_id="1", pieces=1, last_sequence=1)
    staged = replace(batch(1, 31, sealed_ms=1), named=(job,))
    log = (batch(1, 30), staged, batch(1, 97))
    assert found(at(((0, 1, (1, 97)),)), *log).position == Position(0, 1)
    last = replace(batch(3, 0, sealed_ms=10 * COPIES_MS), named=(job,))  # says nothing about the batch 3, 0 of before
    assert found(at(((0, 3, (3, 1)),)), batch(2, 9, sealed_ms=1), last).position == Position(0, 0)
    opened = replace(batch(1, 40, kind="opened"), named=(job,))
    assert found(at(((0, 1, (1, 97)),)), batch(1, 30), opened).position == Position(0, 2)


def test_a_lower_batch_that_may_hide_later_copies_is_read_again() -> None:
    last_ms = 10 * COPIES_MS
    covers = ((0, 3, (3, 1)),)
    for sealed_ms, offset in ((last_ms - COPIES_MS, 0), (last_ms - COPIES_MS - 1, 2)):
        log = (batch(2, 9, sealed_ms=sealed_ms), batch(3, 0, sealed_ms=last_ms), batch(3, 1, sealed_ms=last_ms))
        assert found(at(covers), *log).position == Position(0, offset)
    gone = (batch(2, 9, sealed_ms=1), batch(3, 1, sealed_ms=last_ms))  # the last covered batch is not there
    assert found(at(covers), *gone).position == Position(0, 0)
