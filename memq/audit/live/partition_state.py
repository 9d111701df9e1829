"""The live audit's state of one write partition: plain data, stored as it is. Pure.

All sequences are in ranges, and ranges merge. Complete records take a few numbers, however many they are; only missing
records, and records of another minute, take memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.audit.account import Account
from memq.audit.finding import Finding
from memq.audit.live.questions.held_minutes import HeldState
from memq.audit.live.sequence_marks import Marks
from memq.audit.pointer_facts import PointerFacts
from memq.format.ranges import RangeSet
from memq.format.report import ReportPart

NO_END_MS = 1 << 62


@dataclass(slots=True)
class AuditedProducer:
    """One producer in the write partition: its account with the queue, and what it reported itself.

    - `acked`: sequences acked with `all`; `weak`: those acked with 1 or sent with 0.
    - `read`: sequences that any reader has reported, so that their minute is final.
    - `waiting`: sent sequences with the time (ms) when their producer must have given up; then they are `overdue`.
    - `corrupt`: sequences that a reader or a verification found damaged.
    - `minutes`: the sequences of each event-time minute.
    - `unplaced`: sequences in the queue whose minute no report has named. Each has the time (ms) up to which to wait
      for a report, first, next, the minute of the pointer, and whether it was late.
    - `guessed`: sequences counted in a minute that no reader has named: first, next, minute, and whether late.
    """

    account: Account
    marks: Marks = field(default_factory=Marks)
    sent: RangeSet = field(default_factory=RangeSet)
    acked: RangeSet = field(default_factory=RangeSet)
    read: RangeSet = field(default_factory=RangeSet)
    weak: RangeSet = field(default_factory=RangeSet)
    gave_up: RangeSet = field(default_factory=RangeSet)
    overdue: RangeSet = field(default_factory=RangeSet)
    corrupt: RangeSet = field(default_factory=RangeSet)
    minutes: dict[int, RangeSet] = field(default_factory=dict)
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    unplaced: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    guessed: list[tuple[int, int, int, bool]] = field(default_factory=list)
    doubled_at: int = -1  # the last pointer with records that readers deliver twice


@dataclass(slots=True)
class GroupProgress:
    """A group's work on one producer: `ever` has all records that it processed, `passed` those left out.

    `lost` are those that a member skipped: it started before them, committed a position after them, and reported
    all its work between. If a report is missing, they are unproven.
    """

    ever: RangeSet = field(default_factory=RangeSet)
    doubled: RangeSet = field(default_factory=RangeSet)
    lost: RangeSet = field(default_factory=RangeSet)
    unproven: RangeSet = field(default_factory=RangeSet)
    passed: RangeSet = field(default_factory=RangeSet)


@dataclass(slots=True)
class MemberReading:
    """One member of a group.

    It is responsible for all pointers from offset `at` on, once it commits a position after them; -1 if unknown. After
    a missing report it is responsible for nothing (`sure` is False) up to its next commit. `reached` has by producer
    the sequence up to which it was judged. Where marks are far apart, some records before a commit are judged with a
    later commit. It may process each record of the pointers from offset `begin` on once; -1 if unknown. `now` has by
    producer the sequences that it has processed since.
    """

    at: int = -1
    sure: bool = True
    reached: dict[int, int] = field(default_factory=dict)
    begin: int = -1
    now: dict[int, RangeSet] = field(default_factory=dict)


@dataclass(slots=True)
class TaskRead:
    """Records that one task of a Spark stream fetched, by minute and producer, and its range.

    `end` is "" until the task has ended. `sure` is False if a report of it is missing. Once it is `counted`, its
    records count as processed, and `fetched` is empty.
    """

    fetched: dict[int, dict[int, RangeSet]] = field(default_factory=dict)
    begin: str = ""
    end: str = ""
    sure: bool = True
    counted: bool = False


@dataclass(slots=True)
class StreamRead:
    """A Spark stream: the position `to` of its checkpoint, and its tasks by client.

    Fetched records count as processed up to `counted`; a task that fetches them again is a retry, and doubles nothing.
    Up to `covered` missing records were judged. The report of the task after `covered` is awaited until `due_ms`.
    """

    to: str = ""
    counted: str = ""
    covered: str = ""
    due_ms: int = 0
    reading: MemberReading = field(default_factory=MemberReading)
    tasks: dict[int, TaskRead] = field(default_factory=dict)


@dataclass(slots=True)
class AuditedGroup:
    """A consumer group in the write partition: its work by producer, its members by client.

    A Spark stream is a group, too, with `stream` in place of members; each driver continues with its checkpoint.
    """

    progress: dict[int, GroupProgress] = field(default_factory=dict)
    members: dict[int, MemberReading] = field(default_factory=dict)
    committed: str = ""  # the last position that a member reported
    stream: StreamRead | None = None

    def readings(self) -> list[MemberReading]:
        """Return the readings of all members, or of the stream."""
        return [*self.members.values(), *([] if self.stream is None else [self.stream.reading])]


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A client's report on the write partition, received at `time_ms`.

    Reports keep their order.
    `group` is None for a producer and for a reader without a group; `kind` is as in `Report`.
    """

    client: int
    group: str | None
    part: ReportPart
    time_ms: int
    kind: str = ""


@dataclass(slots=True)
class PartitionState(PointerFacts):
    """The audit's knowledge of one write partition.

    `next_offset` is the next pointer to read of its read partition. `mark` is the mark of the last pointer before it
    that was read (`Position`); 0 if it is unknown.
    `copies_ms` is NO_END_MS from a gap (unreadable pointers) up to the first pointer after it.
    `damaged` are offsets of pointers with a damaged block of an unknown producer.
    `findings` are the open ones, by id. `objects` are the keys of the newest pointers' objects, by offset.
    `told` are reports that count after the next read of the queue; until then the minutes in `unread` are unknown.
    """

    next_offset: int = 0
    mark: int = 0
    queue_ms: int = 0
    streams: dict[int, AuditedProducer] = field(default_factory=dict)
    groups: dict[str, AuditedGroup] = field(default_factory=dict)
    damaged: dict[int, bool] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    objects: dict[int, str] = field(default_factory=dict)
    told: list[ReceivedReport] = field(default_factory=list)
    unread: dict[int, bool] = field(default_factory=dict)
    held: HeldState = field(default_factory=HeldState)

    def miss(self, copies_ms: int) -> None:
        """Note that some pointers were not read.

        Their records, and copies of these up to the queue time `copies_ms`, can't be called lost.
        """
        self.expired = True
        self.copies_ms = copies_ms
        self.forget_totals()
        for stream in self.streams.values():
            stream.account.begin_again(copies_ms)
