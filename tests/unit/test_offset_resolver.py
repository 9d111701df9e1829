"""Positions and lag from pointers alone: totals at the end, times, and late pointers."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.partition.ownership import ADOPTED_MAX, Ownership
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import ReadProgress
from memq.errors import InvalidRequestError, QueueError
from memq.format.pointer import Adopted, decode_pointer, encode_pointer
from memq.format.totals import contended_ms
from memq.notification import Entries, Entry, Span
from memq.runtime.clock import SystemClock
from memq.topic import CLOCK_ERROR_MS, Position, ReadPartition, Topic, TopicSettings, Totals, equal_slots
from tests.skipping_loop import run_skipping
from tests.unit.queue_model import PARTITION, Block, Log

SETTINGS = TopicSettings()
Result = TypeVar("Result")


class LogReader:
    """A `PointerReader` over a log made by hand; one entry at a time, so that every reader must page."""

    def __init__(self, log: Log) -> None:
        self.log = log

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        found = [entry for entry in self.log.entries if entry.offset >= offset][:1]
        return Entries(found, found[-1].offset + 1 if found else max(offset, self.log.next_offset))

    async def span(self, partition: ReadPartition) -> Span:
        return self.log.span()

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return next((entry.offset for entry in self.log.entries if entry.time_ms >= time_ms), self.log.next_offset)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        raise AssertionError("places are found without waiting")


def ask(work: Coroutine[Any, Any, Result]) -> Result:
    return run_skipping(work)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """A log with changes of owner: late pointers of the owner before, adopted one pointer after they are met."""
    log = Log()
    epoch = 1
    met: list[Adopted] = []
    log.control(epoch=1)
    for number in range(draw(st.integers(0, 14))):
        step = draw(st.sampled_from(["batch", "batch", "late", "open"]))
        block = Block(1, 10 * number, draw(st.integers(1, 3)))
        if step == "batch":
            log.batch(block, epoch=epoch, adopted=tuple(met))
            met = []
        elif step == "late" and epoch > 1:
            offset = log.batch(block, epoch=draw(st.integers(1, epoch - 1)), late=True)
            size = len(block.data())
            met.append(Adopted(offset=offset, epoch=1, batch_sequence=offset, records=block.count, bytes=size))
        elif step == "open":
            epoch += 1
            seen = draw(st.integers(0, len(met)))  # what comes just before the opening is met after it
            log.control(epoch=epoch, adopted=tuple(met[:seen]))
            met = met[seen:]
    return log


def folded(log: Log, before: int) -> Totals:
    progress = ReadProgress()
    for entry in log.entries:
        if entry.offset < before:
            progress.pass_over(decode_pointer(entry.body))
    return progress.totals


def stored_before(log: Log, before: int) -> int:
    return sum(decode_pointer(entry.body).records for entry in log.entries if entry.offset < before)


@given(logs(), st.integers(1, 20))
def test_the_end_is_found_from_the_tail_alone(log: Log, tail: int) -> None:
    end = ask(OffsetResolver(LogReader(log), tail).end_totals(PARTITION, SETTINGS, [0]))
    assert end.records == stored_before(log, log.next_offset)


@given(logs(), st.data())
def test_lag_counts_each_stored_record_once(log: Log, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, log.next_offset))
    here = folded(log, offset)
    end = ask(OffsetResolver(LogReader(log)).end_totals(PARTITION, SETTINGS, [0]))
    left = stored_before(log, log.next_offset) - stored_before(log, offset)
    assert end.records - here.records == left


@given(logs(), st.integers(1, 20), st.data())
def test_totals_before_a_position_are_found_from_the_pointers_around_it(
    log: Log, tail: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, log.next_offset))
    here = ask(OffsetResolver(LogReader(log), tail).totals_before(PARTITION, offset, SETTINGS, [0]))
    assert here.records == stored_before(log, offset)


CONTENDED_MS = contended_ms(SETTINGS.stale_publish_ms)


def test_a_quiet_partition_is_read_back_to_what_came_shortly_before_its_last_pointer() -> None:
    log = Log()
    log.batch(Block(1, 0), time_ms=0)
    last_ms = 10 * CONTENDED_MS
    log.batch(Block(2, 0), late=True, time_ms=last_ms - CONTENDED_MS // 2)  # the last one's owner had not met it
    log.batch(Block(1, 3), time_ms=last_ms)
    found = ask(OffsetResolver(LogReader(log), 1).end_totals(PARTITION, SETTINGS, [0]))
    assert found.records == 9


def test_a_reader_counts_two_late_pointers_in_a_row_whose_followers_were_published_late() -> None:
    """Each owner read, met no late pointer, and published a third of S later."""
    late_ms = SETTINGS.stale_publish_ms + SETTINGS.stale_publish_ms // 3 + CLOCK_ERROR_MS
    log, last_ms = Log(), 10 * late_ms
    log.batch(Block(1, 0), time_ms=0)
    log.batch(Block(2, 0), late=True, time_ms=last_ms - 2 * late_ms)
    log.batch(Block(2, 3), late=True, time_ms=last_ms - late_ms)
    log.batch(Block(1, 3), time_ms=last_ms)
    found = ask(OffsetResolver(LogReader(log), 1).end_totals(PARTITION, SETTINGS, [0]))
    assert found.records == 12


def test_a_reader_of_a_quiet_partition_knows_its_totals_after_very_many_late_pointers() -> None:
    log, own = Log(), Ownership(0, 2, 0.0, 0, stale_publish_s=30.0, dedup_window_ms=120_000)
    own.state()
    own.published(log.control(epoch=2), decode_pointer(log.entries[-1].body), 0)
    for number in range(ADOPTED_MAX + 10):
        offset = log.batch(Block(1, 3 * number), epoch=1, late=True)
        own.meet(offset, offset, decode_pointer(log.entries[-1].body))
    last_ms = 10 * CONTENDED_MS
    log.batch(Block(2, 0), epoch=2, adopted=own.next_adopted(), time_ms=last_ms)
    found = ask(OffsetResolver(LogReader(log), 1).end_totals(PARTITION, SETTINGS, [0]))
    assert found.records == stored_before(log, log.next_offset)


def two_writers() -> Log:
    """A log of two write partitions: the pointers of the second one are far apart."""
    logs = [Log(), Log()]
    shared = Log()
    for number in range(24):
        writer = int(number % 12 == 5)
        one = logs[writer]
        one.next_offset = shared.next_offset
        offset = one.batch(Block(1 + writer, 3 * number))
        pointer = msgspec.structs.replace(decode_pointer(one.entries[-1].body), partition=writer)
        shared.add(pointer, one.bodies[offset], time_ms=number * CONTENDED_MS)
    return shared


def test_a_look_back_that_failed_half_way_counts_nothing_twice() -> None:
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))

    class FailingOnce(LogReader):
        failed = False

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            if offset == 1 and not self.failed:
                self.failed = True
                raise QueueError("half-way")
            return await super().read(partition, offset, bytes_max)

    resolver = OffsetResolver(FailingOnce(log), 4)
    cursor = PartitionCursor(PARTITION, Position(0, 3), window_ms=SETTINGS.reader_window_ms)
    with pytest.raises(QueueError):
        ask(resolver.look_back(cursor, SETTINGS, [0], no_index))
    ask(resolver.look_back(cursor, SETTINGS, [0], no_index))
    assert cursor.progress.totals.records == 9


@pytest.mark.parametrize("begin", [0, 3, 8])
@pytest.mark.parametrize("tail", [1, 4])
def test_totals_are_those_of_all_writers_wherever_their_pointers_are(begin: int, tail: int) -> None:
    log = two_writers()
    stored = [stored_before(log, offset) for offset in range(25)]
    del log.entries[:begin]  # retention took them
    resolver = OffsetResolver(LogReader(log), tail)
    found = [ask(resolver.totals_before(PARTITION, offset, SETTINGS, [0, 1])).records for offset in range(begin, 25)]
    assert found == stored[begin:]
    for offset in range(begin, 25):
        cursor = PartitionCursor(PARTITION, Position(0, offset), window_ms=SETTINGS.reader_window_ms)
        ask(resolver.look_back(cursor, SETTINGS, [0, 1], no_index))
        assert cursor.behind.totals.records == stored[offset]


async def no_index(pointer: object) -> list[Any]:
    raise AssertionError("every pointer names its producers")


def test_a_time_is_the_first_batch_sealed_at_or_after_it() -> None:
    log = Log()
    for number, sealed_ms in enumerate((100_000, 200_000, 300_000)):
        pointer = decode_pointer(_entry_of(Block(1, 3 * number)).body)
        fields = {name: getattr(pointer, name) for name in pointer.__struct_fields__} | {"sealed_ms": sealed_ms}
        log.add(type(pointer)(**fields), time_ms=sealed_ms - SETTINGS.stale_publish_ms)  # an old proof
    resolver = OffsetResolver(LogReader(log))
    for time_ms, offset in ((0, 0), (100_000, 0), (100_001, 1), (200_000, 1), (250_000, 2), (300_001, 3)):
        assert ask(resolver.position_of(time_ms, PARTITION, SETTINGS)) == Position(0, offset)


def _entry_of(block: Block) -> Entry:
    log = Log()
    log.batch(block)
    return log.entries[0]


def test_a_position_of_another_partition_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1:0:0"):
        ask(OffsetResolver(LogReader(Log())).position_of(Position(1, 0), PARTITION, SETTINGS))


@pytest.mark.parametrize("start", [3, 9])  # in the middle, and at the end, where no entry lies yet
def test_a_reader_looks_back_over_the_window_and_no_further(start: int) -> None:
    log = Log()
    window = SETTINGS.reader_window_ms
    for number in range(9):
        log.batch(Block(number + 1, 0), time_ms=number * window // 3)
    cursor = PartitionCursor(PARTITION, Position(0, start), window_ms=window)
    ask(OffsetResolver(LogReader(log)).look_back(cursor, SETTINGS, [0], no_index))
    remembered = [number for number in range(9) if cursor.dedup_window.seen(0, number + 1, 0, 1)]
    assert remembered == list(range(max(0, start - (3 if start < 9 else 4)), start))


def test_a_start_after_the_end_is_refused_whoever_named_it() -> None:
    log = Log()
    log.batch(Block(1, 0), time_ms=0)
    resolver = OffsetResolver(LogReader(log))
    end = Position(0, log.next_offset)
    assert ask(resolver.start_at(end, PARTITION, SETTINGS)) == end
    behind = Position(0, log.next_offset + 1)  # where a group is whose partition lost its log
    cursor = PartitionCursor(PARTITION, behind, window_ms=SETTINGS.reader_window_ms)
    for work in (resolver.start_at(behind, PARTITION, SETTINGS), resolver.look_back(cursor, SETTINGS, [0], no_index)):
        with pytest.raises(InvalidRequestError, match="its end") as caught:
            ask(work)
        assert "memq group reset" in caught.value.hint


def test_the_margins_cover_a_late_pointer() -> None:
    assert SETTINGS.late_ms >= SETTINGS.stale_publish_ms
    assert SETTINGS.reader_window_ms >= SETTINGS.dedup_window_ms + SETTINGS.late_ms
    assert equal_slots(1)[0].read_partition == 0


class CountingReader(LogReader):
    """Counts the pointers that are read."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.reads = 0

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads += 1
        return await super().read(partition, offset, bytes_max)


def test_the_end_of_a_long_log_is_found_from_few_pointers() -> None:
    log = Log()
    for number in range(500):
        log.batch(Block(1, 3 * number), time_ms=number * CONTENDED_MS)
    reader = CountingReader(log)
    assert ask(OffsetResolver(reader, 16).end_totals(PARTITION, SETTINGS, [0])) == Totals(log.records, log.stored)
    assert reader.reads == 16
    far = msgspec.structs.replace(decode_pointer(log.entries[400].body), partition=1, totals=Totals(7, 70))
    log.entries[400] = Entry(400, 400 * CONTENDED_MS, encode_pointer(far))
    reader = CountingReader(log)
    found = ask(OffsetResolver(reader, 16).end_totals(PARTITION, SETTINGS, [0, 1]))
    assert found.records == log.records + 7 + 3
    assert reader.reads == 16 + 64 + 256, "each time four times as many"
    reader = CountingReader(log)
    nobody = ask(OffsetResolver(reader, 16).end_totals(PARTITION, SETTINGS, [0, 1, 2]))
    assert nobody.records == found.records
    assert reader.reads == 16 + 64 + 256 + 500, "all of it, for a writer that was never there"


def test_a_look_back_after_a_stretch_without_entries_reads_little_of_it() -> None:
    log = Log()
    window = SETTINGS.reader_window_ms
    for number in range(9):
        log.batch(Block(number + 1, 0), time_ms=number * window // 3)
    log.next_offset = 300  # control records of the queue itself lie there
    reader = CountingReader(log)
    cursor = PartitionCursor(PARTITION, Position(0, 300), window_ms=window)
    ask(OffsetResolver(reader).look_back(cursor, SETTINGS, [0], no_index))
    assert cursor.progress.totals.records == 27
    assert reader.reads < 60


def test_the_time_at_an_end_without_entries_is_found_from_the_last_ones_before_it() -> None:
    log = Log()
    for number in range(500):
        log.batch(Block(1, 3 * number), time_ms=number * SETTINGS.reader_window_ms)
    log.next_offset = 510
    reader = CountingReader(log)
    cursor = PartitionCursor(PARTITION, Position(0, 510), window_ms=SETTINGS.reader_window_ms)
    ask(OffsetResolver(reader, 16).look_back(cursor, SETTINGS, [0], no_index))
    assert cursor.progress.totals.records == 1_500
    assert reader.reads < 100


def test_totals_before_a_position_of_a_whole_log_need_no_reads_behind_it() -> None:
    log = Log()
    for number in range(200):
        log.batch(Block(1, 3 * number), time_ms=number * CONTENDED_MS)
    reader = CountingReader(log)
    assert ask(OffsetResolver(reader, 16).totals_before(PARTITION, 20, SETTINGS, [0, 1])).records == 60
    assert reader.reads == 16 + 20, "nothing was taken, so a writer that is not there before has nothing there"


def test_totals_pass_over_a_pointer_that_can_not_be_read() -> None:
    log = Log()
    for number in range(6):
        log.batch(Block(1, 3 * number))
    log.entries[2] = Entry(2, log.entries[2].time_ms, b"garbage")
    assert ask(OffsetResolver(LogReader(log)).end_totals(PARTITION, SETTINGS, [0])) == Totals(log.records, log.stored)


def test_a_lag_leaves_out_the_records_of_a_batch_before_the_position() -> None:
    log = Log()
    for number in range(5):
        log.batch(Block(1, 3 * number))
    topic = Topic(name=PARTITION.topic, id=PARTITION.topic_id, created_ms=0, partitions=equal_slots(1))
    resolver = OffsetResolver(LogReader(log))
    for index, left in ((0, 9), (1, 8), (2, 7)):
        lag = ask(resolver.lag(topic, PARTITION, Position(0, 2, index), folded(log, 2), SystemClock()))
        assert lag.records == left


@pytest.mark.parametrize("silent", [2, 4])
def test_a_lag_of_which_nothing_can_be_read_is_an_error(silent: int) -> None:
    class Lagging(LogReader):
        """A replica that has the end, and not what comes before it."""

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            return Entries([], offset) if offset == silent else await super().read(partition, offset, bytes_max)

    log = Log()
    for number in range(5):
        log.batch(Block(1, 3 * number))
    here = folded(log, silent)
    topic = Topic(name=PARTITION.topic, id=PARTITION.topic_id, created_ms=0, partitions=equal_slots(1))
    resolver = OffsetResolver(Lagging(log), 1)
    with pytest.raises(QueueError, match=f"shows nothing at offset {silent}, and its end was 5 before"):
        ask(resolver.lag(topic, PARTITION, Position(0, silent), here, SystemClock()))


def test_totals_before_a_reader_that_looks_back_are_asked_of_the_queue() -> None:
    log = Log()
    for number in range(5):
        log.batch(Block(1, 3 * number))
    resolver = OffsetResolver(LogReader(log))
    cursor = PartitionCursor(PARTITION, Position(0, 3), window_ms=SETTINGS.reader_window_ms)
    assert ask(resolver.totals_of(cursor, SETTINGS, [0])).records == 9
    ask(resolver.look_back(cursor, SETTINGS, [0], no_index))
    cursor.begin()
    assert ask(resolver.totals_of(cursor, SETTINGS, [0])).records == 9
    assert cursor.behind.totals.records == 9


@pytest.mark.parametrize(
    ("begins", "offset", "first", "asked"),
    [
        ([5], 5, None, 0),
        ([5], 4, 5, 1),
        ([5, 3], 4, None, 1),
        ([5, 3], 2, 3, 1),
        ([3, 5], 2, 3, 1),
        ([5, 9], 5, None, 0),
    ],
)
def test_two_answers_must_say_that_retention_has_passed_a_place(
    begins: list[int], offset: int, first: int | None, asked: int
) -> None:
    spans = [Span(begin, 9) for begin in begins]

    class Begins(LogReader):
        async def span(self, partition: ReadPartition) -> Span:
            later.append(partition)
            return spans[-1]

    later: list[ReadPartition] = []
    assert ask(OffsetResolver(Begins(Log())).first_left(PARTITION, offset, spans[0])) == first
    assert len(later) == asked


class LateTimes(LogReader):
    """Answers as often as `late` says that nothing is as young as the time that is asked for."""

    late = 1

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        if self.late:
            self.late -= 1
            return self.log.next_offset
        return await super().seek_time(partition, time_ms)


def test_a_time_behind_which_the_queue_shows_nothing_for_a_moment_passes_over_nothing() -> None:
    log = Log()
    for number in range(6):
        log.batch(Block(1, 10 * number), time_ms=1_000_000 * (number + 1))
    resolver = OffsetResolver(LateTimes(log))
    with pytest.raises(QueueError, match=r"shows offset 6 for time .*, and the entry before it is of 6000000"):
        ask(resolver.position_of(0, PARTITION, SETTINGS))
    assert ask(resolver.position_of(0, PARTITION, SETTINGS)) == Position(0, 0)


def test_a_look_back_whose_begin_is_too_late_is_made_again() -> None:
    log = Log()
    for number in range(6):
        log.batch(Block(1, 10 * number), time_ms=1_000 * (number + 1))
    resolver, cursor = OffsetResolver(LateTimes(log)), PartitionCursor(PARTITION, Position(0, 6), window_ms=1_000_000)
    with pytest.raises(QueueError, match="shows offset 6"):
        ask(resolver.look_back(cursor, SETTINGS, [0], no_index))
    ask(resolver.look_back(cursor, SETTINGS, [0], no_index))
