"""The two polls of a consumer: the partitions of each, the answers that count, and its pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.fetch.pointer_slot import PointerSlot
from memq.client.consumer.fetch.polling import LOG_BYTES, POLL_WAIT_MS, SHORT_S, Polling, Retries
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import DeniedError, MemqError, PositionLostError, QueueError, UnreachableError
from memq.format.blocks.header import tag_bit
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entries, Span
from memq.notification.remote import Polled, RemoteQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Position, ReadPartition, TopicSettings, Totals
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.consumer_world import NoBroker, log_of, partition_of
from tests.unit.queue_model import WINDOW_MS, Log

Offsets = dict[int, int]


@dataclass(frozen=True)
class Call:
    """One poll: what it asks for, and the answer that the test gives."""

    asked: dict[ReadPartition, int]
    wait_ms: int
    bytes_max: int
    answer: asyncio.Future[list[Polled]]
    tag_bits: int

    @property
    def offsets(self) -> Offsets:
        return {partition.partition: offset for partition, offset in self.asked.items()}


class NoBlocks:
    """Takes pointers alone."""

    def blocks_bytes_max(self) -> int:
        return 0

    def take_blocks(self, assigned: Assigned, blocks: Mapping[int, memoryview]) -> None:
        raise AssertionError("none came")


class Script(RemoteQueue):
    """Logs whose polls are answered by the test; reads and spans come when `free` is set."""

    def __init__(self, logs: Sequence[Log]) -> None:
        super().__init__(NoBroker())
        self.logs = logs
        self.calls: list[Call] = []
        self.begins: Offsets = {}  # where retention left a partition
        self.reads = 0
        self.read_error: MemqError | None = None
        self.free = asyncio.Event()
        self.free.set()

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = 0,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        call = Call(dict(offsets), wait_ms, bytes_max, asyncio.get_running_loop().create_future(), tag_bits)
        self.calls.append(call)
        return await call.answer

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads += 1
        await self.free.wait()
        if self.read_error is not None:
            raise self.read_error
        return self.entries(partition.partition, offset)

    async def span(self, partition: ReadPartition) -> Span:
        await self.free.wait()
        return Span(self.begins.get(partition.partition, 0), self.logs[partition.partition].next_offset)

    def entries(self, number: int, offset: int) -> Entries:
        first = max(offset, self.begins.get(number, 0))
        found = [entry for entry in self.logs[number].entries if entry.offset >= first]
        return Entries(found, found[-1].offset + 1 if found else offset)


def next_of(cursor: PartitionCursor) -> PointerSlot | None:
    """Start the next fetch, and return it."""
    slot = cursor.next_fetch()
    if slot is not None:
        cursor.start_fetch(slot)
    return slot


class CountedRetries(Retries):
    """Each pause takes a second and is noted."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, EventLog(runtime.clock), lambda: None)
        self.pauses: list[int] = []

    async def pause(self, failures: int) -> None:
        self.pauses.append(failures)
        await skip(1.0)


class Polls:
    """A `Polling` over logs, each a partition of the same number."""

    def __init__(self, *logs: Log) -> None:
        runtime = skipping_runtime()
        self.queue = Script(logs)
        self.assigned: dict[ReadPartition, Assigned] = {}
        self.retries = CountedRetries(runtime)
        self.polling = Polling(self.queue, self.assigned, self.retries, NoBlocks(), self._advanced)
        self.tasks = TaskOwner(self._broke, EventLog(runtime.clock))
        self.died: list[BaseException] = []
        self.advanced = 0
        self.polling.start(self.tasks)

    def _broke(self, error: BaseException) -> None:
        self.died.append(error)

    def _advanced(self) -> None:
        self.advanced += 1
        self.polling.advance()

    def add(self, number: int, offset: int = 0) -> PartitionCursor:
        """Read a partition, in place of what was read of it before."""
        self.remove(number)
        partition = partition_of(number)
        start = Position(number, offset)
        cursor = PartitionCursor(partition, start, window_ms=WINDOW_MS, pass_expired=True, known=Totals())
        cursor.begin()
        self.assigned[partition] = Assigned(cursor, TopicSettings(), [0])
        self.polling.advance()
        return cursor

    def remove(self, number: int) -> None:
        assigned = self.assigned.pop(partition_of(number), None)
        if assigned is not None:
            assigned.removed = True
            self.polling.forget(partition_of(number))
            self.polling.advance()

    def common(self) -> Call:
        """Return the last long poll."""
        return [call for call in self.queue.calls if call.wait_ms][-1]

    def apart(self) -> Call:
        """Return the last poll of partitions that are apart."""
        return [call for call in self.queue.calls if not call.wait_ms][-1]

    def sound(self, number: int, offset: int) -> Polled:
        log = self.queue.logs[number]
        return Polled(partition_of(number), log.span(), self.queue.entries(number, offset))

    def failed(self, number: int, error: MemqError | None = None) -> Polled:
        return Polled(partition_of(number), Span(0, 0), Entries((), 0), error or QueueError("no leader"))

    def empty(self, number: int, next_: int, end: int) -> Polled:
        return Polled(partition_of(number), Span(0, end), Entries((), next_))

    def late(self, number: int, first: int, begin: int = 0) -> Polled:
        """Return an answer whose entries start at `first`, from a log that begins at `begin`."""
        log = self.queue.logs[number]
        return Polled(partition_of(number), Span(begin, log.next_offset), self.queue.entries(number, first))

    async def answer(self, call: Call, *answers: Polled) -> None:
        call.answer.set_result(list(answers))
        await skip(0.1)

    async def end(self) -> None:
        assert not self.died
        await self.tasks.stop()

    async def send_apart(self, *numbers: int) -> Call:
        """Have the logs of all partitions fail that are polled together; return the poll apart that follows."""
        await self.answer(self.common(), *(self.failed(number) for number in numbers))
        return self.apart()


def polling(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


# ---- which partitions are polled -----------------------------------------------------------------


def test_one_long_poll_asks_for_all_until_it_is_answered() -> None:
    async def work() -> None:
        polls = Polls(log_of(2, 1), log_of(2, 2))
        polls.add(0)
        await skip(0.1)
        assert [(call.offsets, call.wait_ms) for call in polls.queue.calls] == [({0: 0}, POLL_WAIT_MS)]
        assert polls.common().bytes_max == LOG_BYTES
        polls.polling.advance()
        await skip(0.1)
        assert len(polls.queue.calls) == 1, "the poll under way asks for it"
        first = polls.common()
        polls.add(1, 1)
        await skip(0.1)
        assert first.answer.cancelled(), "the broker need not hold it any longer"
        assert polls.common().offsets == {0: 0, 1: 1}
        before = polls.advanced
        await polls.answer(polls.common(), polls.sound(0, 0), polls.empty(1, 1, 1))
        assert polls.advanced == before + 1
        assert polls.common().offsets == {0: 2, 1: 1}
        await polls.end()

    polling(work())


@pytest.mark.parametrize(
    ("filters", "bits"),
    [
        ([None, None], 0),
        ([RecordFilter("A"), None], 0),
        ([None, RecordFilter("A")], 0),
        ([RecordFilter("A"), RecordFilter(where="n = 1")], 0),
        ([RecordFilter("A"), RecordFilter("B", "n = 1")], tag_bit("A") | tag_bit("B")),
    ],
)
def test_a_poll_names_the_tag_bits_that_any_of_its_readers_wants(filters: list[RecordFilter | None], bits: int) -> None:
    async def work() -> None:
        polls = Polls(log_of(2, 1), log_of(2, 2))
        for number, wanted in enumerate(filters):
            polls.add(number).wanted = wanted
        await skip(0.1)
        assert (polls.common().offsets, polls.common().tag_bits) == ({0: 0, 1: 0}, bits)
        await polls.end()

    polling(work())


@pytest.mark.parametrize("between", ["nothing", "a whole log", "an error", "no answer"])
def test_a_log_is_lost_only_if_it_stays_shorter_in_all_answers_of_a_minute(between: str) -> None:
    """A short answer was remembered: another one, hours later, was taken for a minute of them."""

    async def work() -> None:
        polls = Polls(log_of(4, 1))
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(polls.common(), polls.sound(0, 0))
        assert cursor.continuity.reached.pointer_offset == 4
        short = polls.empty(0, 4, 2)

        async def answer_short() -> None:
            await polls.answer(polls.common(), short)
            await polls.answer(polls.apart(), short)
            await skip(1)

        await answer_short()
        if between == "a whole log":
            await polls.answer(polls.common(), polls.empty(0, 4, 4))
        elif between == "an error":
            await polls.answer(polls.common(), polls.failed(0))
        elif between == "no answer":
            polls.common().answer.set_exception(UnreachableError("the link was cut"))
        await skip(SHORT_S)
        if between == "an error":
            await polls.answer(polls.apart(), short)
        else:
            await answer_short()
        assert isinstance(polls.retries.failure, PositionLostError) == (between == "nothing")
        await polls.end()

    polling(work())


def test_polls_leave_no_tasks_behind() -> None:
    async def work() -> None:
        polls = Polls(log_of(2, 1), log_of(2, 2))
        polls.add(0)
        polls.add(1)
        await skip(0.1)
        await polls.send_apart(0)
        count = len(asyncio.all_tasks())
        for _ in range(5):
            await polls.answer(polls.common(), polls.empty(1, 0, 0))
            polls.add(1)
            await polls.answer(polls.apart(), polls.failed(0))
            await skip(1)
        assert len(asyncio.all_tasks()) == count
        await polls.end()

    polling(work())


def test_a_partition_that_is_read_from_elsewhere_is_polled_there_at_once() -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1))
        polls.add(0)
        await skip(0.1)
        first = polls.common()
        polls.add(0, 3)
        await skip(0.1)
        assert (first.answer.cancelled(), polls.common().offsets) == (True, {0: 3})
        await polls.end()

    polling(work())


def test_partitions_that_fail_are_polled_apart_the_least_recent_failure_first() -> None:
    async def work() -> None:
        polls = Polls(*(log_of(2, number + 1) for number in range(3)))
        for number in range(3):
            polls.add(number)
        await skip(0.1)
        call = await polls.send_apart(0, 1, 2)
        assert polls.retries.count == 3
        assert (list(call.offsets), call.wait_ms, call.bytes_max) == ([0, 1, 2], 0, 3 * LOG_BYTES)
        await polls.answer(call, polls.failed(0), polls.sound(1, 0), polls.empty(2, 0, 2))
        assert polls.common().offsets == {1: 2}, "it is back"
        await skip(1.0)
        assert list(polls.apart().offsets) == [2, 0], "an answer without room for a partition keeps its place"
        await polls.answer(polls.apart(), polls.empty(2, 0, 0), polls.sound(0, 0))
        assert polls.common().offsets == {0: 2, 1: 2, 2: 0}, "a sound answer at the end of a log suffices"
        await polls.end()

    polling(work())


def test_polls_of_many_partitions_have_the_bytes_of_one_answer() -> None:
    async def work() -> None:
        count = POLL_BYTES_MAX // LOG_BYTES + 5
        polls = Polls(*(Log() for _ in range(count)))
        for number in range(count):
            polls.add(number)
        await skip(0.1)
        assert polls.common().bytes_max == POLL_BYTES_MAX
        await polls.end()

    polling(work())


# ---- which answers count -------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("change", ["removed", "elsewhere"])
def test_an_answer_of_a_partition_that_changed_meanwhile_is_dropped(change: str, *, apart: bool) -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1), log_of(4, 2))
        cursor = polls.add(0)
        await skip(0.1)
        call = await polls.send_apart(0) if apart else polls.common()
        call.answer.set_result([polls.sound(0, 0)])  # in the same step
        if change == "removed":
            polls.remove(0)
        else:
            cursor = polls.add(0, 3)
        await skip(0.1)
        assert cursor.poll_offset == (0 if change == "removed" else 3)
        assert polls.retries.count == int(apart)
        await polls.end()

    polling(work())


@pytest.mark.parametrize("apart", [False, True])
def test_an_answer_that_nobody_asked_for_is_dropped(*, apart: bool) -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1), log_of(4, 2))
        cursor = polls.add(0)
        await skip(0.1)
        call = await polls.send_apart(0) if apart else polls.common()
        await polls.answer(call, polls.sound(1, 0), polls.sound(0, 0))
        assert (cursor.poll_offset, polls.retries.count) == (4, int(apart))
        await polls.end()

    polling(work())


def test_an_answer_that_continues_needs_no_other() -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1))
        cursor = polls.add(0)
        await skip(0.1)
        await polls.answer(await polls.send_apart(0), polls.sound(0, 0))
        assert (cursor.poll_offset, polls.queue.reads) == (4, 0)
        await polls.end()

    polling(work())


@pytest.mark.parametrize("there", [True, False])
def test_entries_that_an_answer_passes_over_are_read_once_more(*, there: bool) -> None:
    async def work() -> None:
        log = log_of(4, 1)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        late = polls.late(0, 2)
        if not there:
            del log.entries[:2]  # offsets need not be dense
        await polls.answer(polls.common(), late)
        assert cursor.poll_offset == 0, "one answer alone does not pass over them"
        await polls.answer(polls.apart(), late)
        assert (cursor.poll_offset, polls.queue.reads, polls.retries.count) == (4, 1, 0)
        fetched = [slot.offset for slot in iter(lambda: next_of(cursor), None)]
        assert fetched == ([0, 1, 2, 3] if there else [2, 3])
        assert polls.common().offsets == {0: 4}
        await polls.end()

    polling(work())


def test_expired_entries_are_skipped_when_two_answers_agree() -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1))
        cursor = polls.add(0)
        await skip(0.1)
        polls.queue.begins[0] = 2
        await polls.answer(polls.common(), polls.late(0, 2, begin=2))
        await polls.answer(polls.apart(), polls.late(0, 2, begin=2))
        assert (cursor.poll_offset, polls.retries.count) == (4, 0)
        cursor.deliver()
        assert (cursor.counts.expired_offsets, cursor.counts.expired_records) == (2, 6)
        await polls.end()

    polling(work())


def test_a_begin_that_the_log_takes_back_is_a_failure() -> None:
    async def work() -> None:
        log = log_of(4, 1)
        polls = Polls(log)
        cursor = polls.add(0)
        await skip(0.1)
        hidden, log.entries = log.entries, log.entries[2:]
        await polls.answer(polls.common(), polls.late(0, 2, begin=2))
        await polls.answer(polls.apart(), polls.late(0, 2, begin=2))
        assert (cursor.poll_offset, polls.retries.count, polls.retries.pauses) == (0, 1, [1])
        log.entries = hidden
        await skip(1)
        await polls.answer(polls.apart(), polls.sound(0, 0))
        assert (cursor.poll_offset, cursor.counts.expired_offsets) == (4, 0)
        await polls.end()

    polling(work())


@pytest.mark.parametrize("fails", [True, False])
def test_a_partition_that_goes_while_an_answer_is_confirmed_is_left_alone(*, fails: bool) -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1))
        cursor = polls.add(0)
        await skip(0.1)
        polls.queue.free.clear()
        polls.queue.read_error = QueueError("away") if fails else None
        await polls.answer(polls.common(), polls.late(0, 2))
        await polls.answer(polls.apart(), polls.late(0, 2))
        polls.remove(0)
        polls.queue.free.set()
        await skip(3)
        assert cursor.poll_offset == 0
        asked = len(polls.queue.calls)
        polls.add(0, 1)
        await skip(0.1)
        assert [call.offsets for call in polls.queue.calls[asked:]] == [{0: 1}], "the long poll alone asks for it"
        await polls.end()

    polling(work())


def test_a_gap_is_not_taken_behind_which_the_long_poll_has_read_meanwhile() -> None:
    async def work() -> None:
        polls = Polls(log_of(4, 1), log_of(2, 2))
        cursor = polls.add(0)
        polls.add(1)
        await skip(0.1)
        await polls.answer(polls.common(), polls.late(0, 2, begin=2), polls.empty(1, 0, 0))
        polls.queue.free.clear()
        polls.queue.begins[0] = 2
        await polls.answer(polls.apart(), polls.late(0, 2, begin=2))
        await polls.answer(polls.common(), polls.empty(1, 0, 0))
        del polls.queue.begins[0]
        await polls.answer(polls.common(), polls.sound(0, 0))
        assert cursor.poll_offset == 4
        polls.queue.begins[0] = 2
        polls.queue.free.set()
        await skip(0.1)
        assert cursor.poll_offset == 4, "no entry is read twice"
        assert [slot.offset for slot in iter(lambda: next_of(cursor), None)] == [0, 1, 2, 3]
        await polls.end()

    polling(work())


# ---- failures ------------------------------------------------------------------------------------


def test_failures_in_a_row_are_counted_until_an_answer_comes() -> None:
    async def work() -> None:
        polls = Polls(log_of(1, 1))
        polls.add(0)
        for failed in (True, True, True, False, True):
            await skip(1.5)
            if failed:
                polls.common().answer.set_exception(QueueError("away"))
            else:
                await polls.answer(polls.common(), polls.sound(0, 0))
        asked = len(polls.queue.calls)
        await skip(0.5)
        assert len(polls.queue.calls) == asked, "it waits"
        await skip(1)
        assert len(polls.queue.calls) == asked + 1
        assert (polls.retries.pauses, polls.retries.count) == ([1, 2, 3, 1], 4)
        await polls.end()

    polling(work())


def test_the_error_of_a_log_is_shown_though_others_are_back() -> None:
    async def work() -> None:
        polls = Polls(log_of(1, 1), log_of(1, 2))
        polls.add(0)
        polls.add(1)
        await skip(0.1)
        call = await polls.send_apart(0, 1)
        error = DeniedError("not you")
        await polls.answer(call, polls.failed(0, error), polls.sound(1, 0))
        assert polls.retries.failure is error
        assert polls.retries.pauses == [1]
        await polls.end()

    polling(work())


def test_an_answer_with_room_for_one_partition_of_two_is_no_failure() -> None:
    """Else each pointer of logs that need a comparison would cost a pause."""

    async def work() -> None:
        polls = Polls(log_of(1, 1), log_of(1, 2))
        polls.add(0)
        polls.add(1)
        await skip(0.1)
        call = await polls.send_apart(0, 1)
        await polls.answer(call, polls.sound(0, 0))
        assert (polls.apart().offsets, polls.retries.pauses) == ({1: 0}, [])
        await polls.end()

    polling(work())


def test_an_answer_that_lacks_a_partition_is_a_failure_of_the_poll_apart_alone() -> None:
    async def work() -> None:
        polls = Polls(log_of(1, 1), log_of(1, 2))
        polls.add(0)
        polls.add(1)
        await skip(0.1)
        await polls.answer(polls.common(), polls.failed(0), polls.empty(1, 0, 0))
        await polls.answer(polls.common())
        assert (polls.common().offsets, polls.retries.pauses) == ({1: 0}, []), "its broker waited"
        await polls.answer(polls.apart())
        assert polls.retries.pauses == [1]
        await skip(1)
        await polls.answer(polls.apart(), polls.sound(0, 0))
        assert polls.retries.pauses == [1]
        await polls.end()

    polling(work())
