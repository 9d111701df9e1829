"""A reader notices a log that was cut and has grown again, by pointers that do not follow on those that it took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import LogContinuity
from memq.errors import InvalidRequestError, PositionLostError, QueueError
from memq.format.object import BlockEntry
from memq.format.pointer import Location, Pointer, decode_pointer, encode_pointer, pointer_mark
from memq.notification import Entries
from memq.topic import Position, ReadPartition, TopicSettings
from tests.skipping_loop import run_skipping, skip
from tests.unit.queue_model import PARTITION, TOPIC_ID, WINDOW_MS, Block, Log
from tests.unit.test_consumer_polling import Polls
from tests.unit.test_offset_resolver import LogReader, ask


def pointer(batch: int, *, epoch: int = 1, partition: int = 0, kind: str = "data") -> Pointer:
    place = (Location(store="main", key="o", offset=0, length=9),) if kind == "data" else ()
    return Pointer(
        kind=kind,
        cluster="c",
        topic="clicks",
        topic_id=TOPIC_ID,
        partition=partition,
        epoch=epoch,
        batch_sequence=batch,
        locations=place,
        records=int(kind == "data"),
    )


def log_of(batches: int, epoch: int = 1) -> Log:
    """Return a log of as many batches after an `opened`."""
    log = Log()
    log.control(epoch=epoch)
    for number in range(batches):
        log.batch(Block(1, 3 * number), epoch=epoch)
    return log


def mark_at(log: Log, offset: int) -> int:
    return pointer_mark(decode_pointer(log.entries[offset].body))


# ---- which pointers follow ---------------------------------------------------------------------

TAKEN = [pointer(0, kind="opened"), pointer(0), pointer(1)]


@pytest.mark.parametrize(
    ("following", "broken"),
    [
        ([pointer(2)], False),
        ([pointer(1)], True),  # a pointer that was published twice, or was shown at a wrong offset before
        ([pointer(2), pointer(2)], True),
        ([], False),
        ([None, pointer(2)], False),  # a pointer that can't be read
        ([pointer(3)], True),
        ([pointer(2), pointer(4)], True),
        ([pointer(0)], True),
        ([pointer(2, epoch=2)], True),
        ([pointer(2, partition=1)], True),
        ([pointer(2), pointer(0, epoch=2, kind="opened")], True),
        ([pointer(0, kind="ended")], True),
    ],
)
def test_only_the_next_batch_of_an_epoch_needs_no_comparison_with_the_log(
    following: list[Pointer | None], broken: bool
) -> None:
    continuity = LogContinuity(Position(0, 0), 0)
    for offset, each in enumerate(TAKEN):
        continuity.take(offset, each)
    assert continuity.is_broken_by(following) == broken


@pytest.mark.parametrize(
    ("control", "following", "broken"),
    [
        (pointer(0, epoch=2, kind="opened"), pointer(0, epoch=2), False),
        (pointer(0, epoch=2, kind="opened"), pointer(1, epoch=2), True),
        (pointer(0, partition=1, kind="opened"), pointer(0, partition=1), False),
        (pointer(0, kind="opened"), pointer(3), False),  # once more, before retention took it
        (pointer(0, kind="ended"), pointer(4), True),
    ],
)
def test_a_pointer_without_a_batch_is_compared_alone(control: Pointer, following: Pointer, broken: bool) -> None:
    """A new epoch begins with its first batch; else the numbers continue."""
    continuity = LogContinuity(Position(0, 0), 0)
    for offset, each in enumerate([*TAKEN, pointer(2), control]):
        continuity.take(offset, each)
    assert continuity.is_broken_by([following]) == broken


@pytest.mark.parametrize("unknown", ["unreadable", "retention"])
def test_there_is_nothing_to_compare_after_a_pointer_that_is_not_known(unknown: str) -> None:
    continuity = LogContinuity(Position(0, 0), 0)
    for offset, each in enumerate(TAKEN):
        continuity.take(offset, each)
    if unknown == "unreadable":
        continuity.take(3, None)
    else:
        continuity.pass_gap(4)
    assert (continuity.reached, continuity.mark) == (Position(0, 4), 0)
    assert not continuity.is_broken_by([pointer(7)])


def test_a_mark_tells_pointers_apart_that_say_the_same_of_their_batches() -> None:
    one = pointer(1)
    assert pointer_mark(one) == pointer_mark(decode_pointer(encode_pointer(one)))
    moved = replace_location(one)
    assert pointer_mark(one) == pointer_mark(moved), "compaction has copied its batch"
    others = [pointer(2), pointer(1, epoch=2), pointer(1, partition=1), pointer(1, kind="ended")]
    assert len({pointer_mark(each) for each in (one, *others)}) == 5


def replace_location(one: Pointer) -> Pointer:
    entry = decode_pointer(encode_pointer(one).replace(b'"key":"o"', b'"key":"cold"'))
    assert entry.locations != one.locations
    return entry


# ---- the comparison ----------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "last"), [(Position(0, 3), 2), (Position(0, 2, 1), 2), (Position(0, 1), 0)])
def test_a_position_is_compared_with_the_last_pointer_before_it(position: Position, last: int) -> None:
    """That of its own batch if it is inside one."""
    log, other = log_of(4), log_of(4, epoch=2)
    resolver = OffsetResolver(LogReader(log))
    known = LogContinuity(position, mark_at(log, last))
    ask(resolver.check_continuity(PARTITION, known))
    new = LogContinuity(position, 0)
    ask(resolver.check_continuity(PARTITION, new))
    assert new.mark == known.mark, "a start without a mark is compared from now on"
    with pytest.raises(PositionLostError, match="was cut before position") as lost:
        ask(resolver.check_continuity(PARTITION, LogContinuity(position, mark_at(other, last))))
    assert lost.value.topic == "clicks"
    assert lost.value.hint.startswith("check that the position is one of this topic"), "the log may be whole"


def test_a_start_is_compared_before_anything_comes() -> None:
    """The log has grown up to the start and no further: no poll brings a pointer that could show it."""
    log, other = log_of(4), log_of(4, epoch=2)

    async def no_index(_pointer: Pointer) -> list[BlockEntry]:
        raise AssertionError("all pointers name their producers")

    def look_back(on: Log, mark: int) -> PartitionCursor:
        cursor = PartitionCursor(PARTITION, Position(0, 5), window_ms=WINDOW_MS, mark=mark)
        ask(OffsetResolver(LogReader(on)).look_back(cursor, TopicSettings(), [0], no_index))
        return cursor

    assert look_back(log, mark_at(log, 4)).continuity.mark == mark_at(log, 4)
    continuity = look_back(log, 0).continuity
    assert continuity.mark == mark_at(log, 4)
    log.batch(Block(1, 12))
    assert not continuity.is_broken_by([decode_pointer(log.entries[5].body)]), (
        "it follows on the last one before the start"
    )
    with pytest.raises(PositionLostError):
        look_back(other, mark_at(log, 4))


@pytest.mark.parametrize("missing", ["retention", "lost"])
def test_a_pointer_that_is_not_there_any_more_refuses_no_position(missing: str) -> None:
    log = log_of(4)
    if missing == "retention":
        del log.entries[:3]
    else:
        log.entries[2] = replace(log.entries[2], body=b"")
    continuity = LogContinuity(Position(0, 3), 5)
    ask(OffsetResolver(LogReader(log)).check_continuity(PARTITION, continuity))
    assert continuity.mark == 5


@pytest.mark.parametrize("known", [True, False])
def test_a_reader_that_takes_more_pointers_during_the_comparison_is_not_refused(known: bool) -> None:
    """A sound log was called cut: the mark of a later pointer was compared with the one that was read again."""
    log = log_of(4)
    continuity = LogContinuity(Position(0, 3), mark_at(log, 2) if known else 0)

    class Slow(LogReader):
        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            found = await super().read(partition, offset, bytes_max)
            continuity.take(3, decode_pointer(log.entries[3].body))
            return found

    ask(OffsetResolver(Slow(log)).check_continuity(PARTITION, continuity))
    assert (continuity.reached, continuity.mark) == (Position(0, 4), mark_at(log, 3))


def test_nothing_is_asked_before_the_first_pointer() -> None:
    class NotAsked(LogReader):
        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            raise AssertionError(f"offset {offset} is read")

    ask(OffsetResolver(NotAsked(Log())).check_continuity(PARTITION, LogContinuity(Position(0, 0), 0)))


def test_a_position_inside_a_batch_that_is_not_there_is_after_the_end() -> None:
    resolver = OffsetResolver(LogReader(log_of(4)))
    with pytest.raises(InvalidRequestError, match="position 0:5:1 of topic 'clicks' is after its end, 0:5:0"):
        ask(resolver.start_at(Position(0, 5, 1), PARTITION, TopicSettings()))


# ---- a reader that runs ------------------------------------------------------------------------


def test_a_change_of_the_owner_costs_one_read() -> None:
    async def work() -> None:
        log = log_of(3)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(polls.common(), polls.sound(0, 0))
        assert (cursor.poll_offset, polls.queue.reads) == (4, 0)
        log.control(epoch=2)
        log.batch(Block(1, 9), epoch=2)
        await polls.answer(polls.common(), polls.sound(0, 4))
        assert (cursor.poll_offset, polls.queue.reads) == (4, 0)
        await polls.answer(polls.apart(), polls.sound(0, 4))
        assert (cursor.poll_offset, polls.queue.reads, polls.retries.count) == (6, 1, 0)
        log.batch(Block(1, 12), epoch=2)
        assert polls.common().offsets == {0: 6}
        await polls.end()

    run_skipping(work())


def test_pointers_of_a_log_that_was_cut_are_not_taken() -> None:
    async def work() -> None:
        log = log_of(3)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(polls.common(), polls.sound(0, 0))
        log.entries[3:], log.next_offset = [], 3
        for number in range(3):
            log.batch(Block(2, 3 * number), epoch=2)
        await polls.answer(polls.common(), polls.sound(0, 4))
        await polls.answer(polls.apart(), polls.sound(0, 4))
        assert cursor.poll_offset == 4
        assert isinstance(polls.retries.failure, PositionLostError)
        await polls.end()

    run_skipping(work())


def test_a_log_that_ends_before_the_reader_is_asked_again_until_it_is_as_long() -> None:
    """A replica that lags shows such an end for a moment."""

    async def work() -> None:
        log = log_of(3)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(polls.common(), polls.sound(0, 0))
        kept = log.entries[3:]
        log.entries[3:] = []
        await polls.answer(polls.common(), polls.empty(0, 4, 3))
        await polls.answer(polls.apart(), polls.empty(0, 4, 3))
        assert (polls.retries.count, polls.retries.failure) == (1, None)
        log.entries += kept
        log.batch(Block(1, 9))
        await skip(1.0)
        await polls.answer(polls.apart(), polls.sound(0, 4))
        assert (cursor.poll_offset, polls.retries.count) == (5, 1)
        await polls.end()

    run_skipping(work())


def test_an_error_of_the_comparison_is_waited_out() -> None:
    async def work() -> None:
        log = log_of(3)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(polls.common(), polls.sound(0, 0))
        log.control(epoch=2)
        polls.queue.read_error = QueueError("no leader")
        await polls.answer(polls.common(), polls.sound(0, 4))
        await polls.answer(polls.apart(), polls.sound(0, 4))
        assert (cursor.poll_offset, polls.retries.count) == (4, 1)
        polls.queue.read_error = None
        await skip(1.0)
        await polls.answer(polls.apart(), polls.sound(0, 4))
        assert cursor.poll_offset == 5
        await polls.end()

    run_skipping(work())
