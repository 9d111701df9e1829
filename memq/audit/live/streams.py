"""Responsibility of Spark streams: checkpoint positions compared with tasks' fetches. Pure.

The driver of a stream reports only the position of its checkpoint: all records before it are processed. Tasks report
the records that they fetched and the range that they read. They do not know whether Spark used the result: other tasks
repeat a failed micro-batch, possibly with other ranges. So fetched records count as processed when the checkpoint
reaches the end of the task's range. They count twice only if two tasks read different ranges. Tasks are many and
short-lived, and the report of one may be missing. So records are lost only if the ranges of tasks cover all of the
way; if a gap is left after some time, missing records are unproven. The next driver continues with the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memq.audit.live.group_readers import begin_reading, first_judged, hold, take_processed
from memq.audit.live.partition_state import AuditedGroup, PartitionState, StreamRead, TaskRead
from memq.format.ranges import RangeSet
from memq.format.report import ReportPart
from memq.topic import Position

TASKS_MAX = 4_096  # of a stream in a write partition that wait for its checkpoint; the oldest are forgotten
WAIT_MS = 60_000  # for the report of a task, once the checkpoint is after it


class StreamAudit:
    """One stream, as a group, in one write partition.

    `count` receives the processed records, by minute.
    All methods yield the producers whose verdict may change.
    """

    def __init__(self, state: PartitionState, group: AuditedGroup, count: Callable[[int, int], None]) -> None:
        self._state = state
        self._group = group
        self._count = count
        self._read = group.stream = group.stream or StreamRead()

    def take_task(self, client: int, part: ReportPart, now_ms: int) -> Iterator[int]:
        """Take the report of a task."""
        tasks = self._read.tasks
        task = tasks.setdefault(client, TaskRead())
        for span in part.spans:
            if span.stage == "fetched":
                ranges = task.fetched.setdefault(span.minute, {}).setdefault(span.producer, RangeSet())
                for piece in span.ranges:
                    ranges.add(*piece)
        if part.read is not None:
            task.begin, task.end = part.read
        while len(tasks) > TASKS_MAX:
            del tasks[next(iter(tasks))]
        yield from self.settle(now_ms)

    def take_driver(self, part: ReportPart, now_ms: int) -> Iterator[int]:
        """Take the report of the driver: its first position, then the position of its checkpoint."""
        for begin in part.begins:
            if begin.reason == "stored" and begin.at and not self._is_behind(begin.at):
                self._advance(begin.at)  # the checkpoint reached this position, under any driver
                yield from self.settle(now_ms)
            elif begin.at:
                self._begin(begin.at)
        if part.committed and not self._is_behind(part.committed):
            self._advance(part.committed)
            yield from self.settle(now_ms)

    def distrust(self, client: int) -> None:
        """Note that a report of a task is missing."""
        self._read.tasks.setdefault(client, TaskRead()).sure = False

    def settle(self, now_ms: int) -> Iterator[int]:
        """Count the processed records, and judge the stream up to its checkpoint."""
        read = self._read
        if read.to and (read.tasks or read.covered != read.to):
            to = Position.parse(read.to)
            yield from self._process(to)
            yield from self._hold(to, now_ms)

    # ---- inside --------------------------------------------------------------------------------------

    def _is_behind(self, at: str) -> bool:
        """Whether `at` is before the known checkpoint, or no checkpoint is known."""
        return not self._read.to or Position.parse(at) < Position.parse(self._read.to)

    def _begin(self, at: str) -> None:
        read = self._read
        read.to = read.counted = read.covered = self._group.committed = at
        begin_reading(read.reading, at)

    def _advance(self, to: str) -> None:
        self._read.to = self._group.committed = to

    def _process(self, to: Position) -> Iterator[int]:
        """Count the records of tasks that ended at or before the checkpoint."""
        read = self._read
        counted = Position.parse(read.counted)
        for begin, end, client in sorted(self._ended()):
            task = read.tasks[client]
            if end > to or task.counted:
                continue
            for minute, producers in task.fetched.items():
                for producer, ranges in producers.items():
                    repeats = begin < counted  # only the first task that reads a record can double it
                    new = take_processed(self._state, self._group, read.reading, producer, ranges, repeats=repeats)
                    self._count(minute, new)
                    yield producer
            task.fetched, task.counted = {}, True
            counted = max(counted, end)
        read.counted = str(counted)

    def _hold(self, to: Position, now_ms: int) -> Iterator[int]:
        """Judge the ranges of the tasks in order, as far as they follow each other without a gap.

        A gap is waited for; then its missing records are unproven.
        """
        read, reading = self._read, self._read.reading
        covered = Position.parse(read.covered)
        sure = [(begin, end) for begin, end, client in self._ended() if end <= to and read.tasks[client].sure]
        while covered < to:
            ends = [end for begin, end in sure if begin <= covered < end]
            if not ends:
                read.due_ms = read.due_ms or now_ms + WAIT_MS
                if now_ms < read.due_ms:
                    break
            read.due_ms = 0
            reading.sure = bool(ends)
            covered = max(ends) if ends else min([to, *(begin for begin, _ in sure if begin > covered)])
            yield from hold(self._state, self._group, reading, covered.pointer_offset)
            if not ends:
                reading.at = max(reading.at, first_judged(covered))
        read.covered = str(covered)
        for _, end, client in self._ended():
            if end <= covered and read.tasks[client].counted:
                del read.tasks[client]

    def _ended(self) -> list[tuple[Position, Position, int]]:
        """Return begin, end and client of the completed tasks of the current read partition."""
        partition = Position.parse(self._read.to).read_partition
        found = [(task.begin, task.end, client) for client, task in self._read.tasks.items() if task.end]
        parsed = [(Position.parse(begin), Position.parse(end), client) for begin, end, client in found]
        return [each for each in parsed if each[0].read_partition == partition]
