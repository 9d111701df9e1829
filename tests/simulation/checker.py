"""The invariants: from each record's life and all that lands in store and queue it finds broken promises.

It knows records by their values, which the simulation makes unique, so it believes neither the producer's sequences
nor the consumer's positions. The checks, and when they run:

- as a pointer lands: its object is there with the bytes that producers sent; its owner kept the rules (see
  `owner_rules`); no record is delivered twice, none that nobody sent; blocks of one identity have the same bytes;
- as a record is acked with `all`: its pointer and object are there;
- as a record is consumed, or a position is stored: see `group_rules`; as a report lands: see `report_rules`;
- as retention takes pointers: they are old enough; as an object is deleted: no pointer names it; as a manifest of
  a compacted part lands: see `compaction_rules`;
- at the end: ack=1 records are in the log, unless an owner was killed that had them in memory; acked records are in
  each producer's order; a reader that resumes anywhere reads the same stream; no object is left that no pointer names;
  and lag is exact (see `lag_check`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from memq.broker.upkeep.sealing import AWAY_S
from memq.client.producer.delivery import Ack
from memq.errors import MemqError
from memq.format.pointer import decode_pointer
from memq.format.ranges import RangeSet
from memq.format.report import AUDIT_TOPIC
from memq.notification import Publication
from memq.simulation.world.node import FOREVER, SimNode
from memq.topic import Position, ReadPartition, TopicSettings
from tests.simulation.commit_rules import CommitRules
from tests.simulation.compaction_rules import CompactionRules
from tests.simulation.copy_rules import CopyRules
from tests.simulation.group_rules import GroupRules
from tests.simulation.lag_check import LagCheck
from tests.simulation.owner_rules import OwnerRules, Refusal
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import (
    Delivered,
    FindingError,
    LogEntry,
    RetryTopicRecord,
    Source,
    object_bytes,
    read_entry,
    read_retry_topic,
    resume,
)
from tests.simulation.report_rules import ReportRules, reports_landed
from tests.simulation.retention_rules import RetentionRules
from tests.simulation.retry_rules import is_retry_topic

Objects = dict[str, bytes]
ReferencePosition = tuple[ReadPartition, int]  # index in the reference stream


@dataclass(slots=True)
class SentRecord:
    """One sent record: its producer's stream, its number there, and its outcome."""

    stream: tuple[str, int]  # producer; write partition, or the number of a key
    number: int
    sent_s: float
    acked: bool = False
    keyed: bool = False
    held_s: float = FOREVER  # when it was acked with 1
    given_up: bool = False
    lost: bool = False  # the queue has lost its pointer: nothing is promised of it any more,
    lost_epoch: int = 0  # but the owners of later epochs never had it,
    ack_left: bool = False  # and none of them has sent an ack of it
    written: bool = False  # with acks=0: nothing else is heard of it
    repeats: bool = False  # its writer may send it again in another order, under another identity
    staged: bool = False  # nobody waits for it before its batch is decided, or ever, where the batch is another one
    batch: frozenset[int] = frozenset()  # the partitions of the staged batch that is acked as a whole
    places: dict[Source, ReferencePosition] = field(default_factory=dict)  # of each identity in the reference

    @property
    def settled(self) -> bool:
        """Whether its producer has heard, or will hear, nothing more of it."""
        return self.acked or self.given_up or self.written or self.held_s < FOREVER

    def staged_ack_leaves(self, epoch: int, *, named: bool) -> None:
        """The owner of an epoch answers a commit; `named`: a pointer in the queue has the record's progress."""
        self.ack_left = self.ack_left or named or not self.is_unknown_to(epoch)

    def is_unknown_to(self, epoch: int) -> bool:
        """Whether the queue lost its pointer before an epoch, whose owner never had it."""
        return self.lost and self.place is None and epoch > self.lost_epoch

    @property
    def place(self) -> ReferencePosition | None:
        """Where the reference stream has the record first."""
        return next(iter(self.places.values()), None)


class Checker:
    """`fail` gets each finding; `objects` is the store itself, `now` the virtual time in seconds."""

    def __init__(
        self,
        objects: Objects,
        window_ms: int,
        fail: Callable[[str], None],
        now: Callable[[], float],
        *,
        refuse: Refusal = "epoch",
    ) -> None:
        self.cut_live = False  # logs are cut under running owners
        self.on_disk = False  # what is acked with 1 outlives its owner, too
        self.ack_s_max: float | None = None  # in a calm world nobody waits for longer: else a wake-up was lost
        self.throttles: Callable[[], int] = lambda: (
            0
        )  # how many blocks brokers had no room for, or had to compare first
        self._throttled = (0, 0.0)  # that number, and when it last rose
        self.records: dict[bytes, SentRecord] = {}
        self.logs: dict[ReadPartition, ReadLog] = {}
        self.acked = 0
        self.positions = 0  # how many acks said where their record lies
        self.given_up = 0
        self.retention: RetentionRules | None = None  # without: nothing may be taken
        self.trims: Callable[[ReadPartition, int], None] = lambda partition, before: None  # learns what retention takes
        self.groups = GroupRules(self.logs, fail, now, self._first_place)
        self.commits = CommitRules(fail)
        self.reports = ReportRules(fail)
        self.on_committed: Callable[[str, ReadPartition, Position], None] | None = None
        self.on_delivered: Callable[[Delivered], None] = lambda found: None  # learns of each record of a log
        self.is_held: Callable[[str], bool] = lambda key: False  # whether a state log names an object
        self.on_retry_topic: Callable[[ReadPartition, LogEntry, list[RetryTopicRecord]], None] = (
            lambda partition, entry, records: None
        )
        self.retry_logs: dict[ReadPartition, ReadLog] = {}  # of listeners, whose records have rules of their own
        self.copies = CopyRules((self.logs, self.reports.logs, self.retry_logs), objects)
        self._objects = objects
        self._window_ms = window_ms
        self._fail = fail
        self._refuse = refuse
        self._now = now
        self.parts: dict[tuple[str, int], OwnerRules] = {}
        self._named: dict[str, int] = {}  # key: how many pointers name it
        self._freed_s: dict[str, float] = {}  # key: when its last pointer was taken, or it was stored
        self._contents: dict[
            tuple[str, int, int, int], tuple[int, int]
        ] = {}  # by identity: where it ends, its checksum
        self._sequences: dict[tuple[str, int, int], RangeSet] = {}  # by the first three of an identity
        self._unacked: dict[Source, list[tuple[int, bytes]]] = {}  # sequences and records that no owner has acked yet
        self.cuts = 0  # how often the queue has cut a log
        self._begins: dict[ReadPartition, int] = {}  # as it was when it was checked the last time
        self._fetch = partial(object_bytes, objects)
        self.compaction = CompactionRules(self.logs, objects, self._fetch, now)

    # ---- producers ---------------------------------------------------------------------------

    def sent(
        self,
        producer: str,
        partition: int,
        number: int,
        value: bytes,
        *,
        keyed: bool = False,
        repeats: bool = False,
        staged: bool = False,
    ) -> None:
        """A producer is about to send a record; `number` grows within producer and partition, or key if `keyed`.

        One that `repeats` is a task that may run again: once for each identity of its rows.
        """
        assert value not in self.records, f"value {value!r} was used before"
        self.records[value] = SentRecord(
            (producer, partition), number, self._now(), keyed=keyed, repeats=repeats, staged=staged
        )

    def ack(self, value: bytes, ack: Ack | None = None) -> None:
        """A producer was notified that the record is acked with `all`; of a task that repeats each try may be.

        `ack` is what the product's producer says; a position in it is where readers find the record.
        """
        record = self.records[value]
        if record.acked and record.repeats:
            return
        if record.acked:
            self._fail(f"record {value[:40]!r} is acked twice")
        record.acked = True
        waited_s = self._waited_s(record)
        if self.ack_s_max is not None and waited_s > self.ack_s_max and not record.repeats:
            self._fail(f"record {value[:40]!r} waited {waited_s:.1f} s for its ack in a calm world")
        self.acked += 1
        if record.place is None:
            if not record.lost:
                self._fail(f"record {value[:40]!r} is acked, but no pointer in the queue holds it")
            elif not record.ack_left:
                self._fail(f"record {value[:40]!r} is acked after its pointer was lost, by an owner that never had it")
        elif not record.lost and ack is not None and ack.position is not None:
            self._check_position(value, record, ack, ack.position)

    def acked_by_owner(self, source: Source, next_sequence: int, epoch: int) -> None:
        """The owner of an epoch sends an ack of all blocks of a producer below a sequence."""
        waiting = self._unacked.get(source, [])
        for sequence, value in waiting:
            record = self.records[value]
            if sequence < next_sequence and not record.is_unknown_to(epoch):
                record.ack_left = True
        waiting[:] = [each for each in waiting if not self.records[each[1]].ack_left]

    def _check_position(self, value: bytes, record: SentRecord, ack: Ack, position: Position) -> None:
        self.positions += 1
        place = record.places.get((ack.partition, ack.producer_id))
        if place is None:
            self._fail(f"record {value[:40]!r} is acked at {position}, but not stored under the identity of {ack}")
            return
        partition, index = place
        found = self.logs[partition].stream[index]
        acked = (position.pointer_offset, position.record_index + found.sequence - ack.first_sequence)
        if (partition.partition, found.offset, found.record_index) != (position.read_partition, *acked):
            text = f"record {value[:40]!r} is acked at {acked[0]}:{acked[1]} of {partition}"
            self._fail(f"{text}, and readers find it at {found.offset}:{found.record_index}")

    def _waited_s(self, record: SentRecord) -> float:
        """Return how long a record waited since a broker last sent blocks back: a full ring makes all wait."""
        throttles = self.throttles()
        if throttles != self._throttled[0]:
            self._throttled = throttles, self._now()
        return self._now() - max(record.sent_s, self._throttled[1])

    def ack_held(self, value: bytes) -> None:
        """A producer was notified that the record is acked with 1: checked, and held by its broker."""
        self.records[value].held_s = self._now()
        self.acked += 1

    def left(self, value: bytes) -> None:
        """A producer with acks=0 has written the record: it may be there once, or not."""
        record = self.records[value]
        record.written = True
        waited_s = self._waited_s(record)
        if self.ack_s_max is not None and waited_s > self.ack_s_max:
            self._fail(f"record {value[:40]!r} waited {waited_s:.1f} s to be written in a calm world")

    def give_up(self, value: bytes) -> None:
        """A producer was notified that the record's outcome is unknown: it may be there once, or not."""
        self.given_up += 1
        self.records[value].given_up = True
        if self.records[value].acked:
            self._fail(f"record {value[:40]!r} is given up after it was acked")

    # ---- store and queue -----------------------------------------------------------------------

    def stored(self, key: str) -> None:
        """See `cloud.Observer`. A put that hung may end long after its owner lost the epoch."""
        self._freed_s[key] = self._now()
        try:
            partition = self.compaction.stored(key)
        except (FindingError, MemqError) as error:
            self._fail(f"manifest '{key}': {error}")
        else:
            if partition is not None:
                self._check_taken(partition, self._begins.get(partition, 0))

    def deleted(self, key: str) -> None:
        """See `cloud.Observer`."""
        if self._named.get(key):
            self._fail(f"object '{key}' is deleted while {self._named[key]} pointers name it")
        if self.copies.are_missed(key):
            self._fail(f"object '{key}' is deleted, and only pointers that the log lost had all its records")
        if self.compaction.names(key):
            self._fail(f"object '{key}' is deleted while a compacted part names it")
        if self.is_held(key):
            self._fail(f"object '{key}' is deleted while a state log names it")

    def published(
        self, publication: Publication, offset: int, node: SimNode, read_to: int, handed_over_s: float
    ) -> None:
        """See `cloud.Observer`."""
        try:
            pointer = decode_pointer(publication.body)
            entry = read_entry(offset, publication.time_ms, pointer, self._fetch)
            rules = self.parts.setdefault((pointer.topic_id, pointer.partition), OwnerRules(self._refuse))
            rules.take(entry, publication, node, read_to, handed_over_s)
            if publication.partition.topic == AUDIT_TOPIC:
                self._name(entry)
                self.reports.reported(publication.partition, entry)
            elif is_retry_topic(publication.partition.topic):
                self._name(entry)
                self.retry_logs.setdefault(publication.partition, ReadLog()).entries.append(entry)
                self.on_retry_topic(publication.partition, entry, read_retry_topic(pointer, self._fetch))
            else:
                self._append(self.logs.setdefault(publication.partition, ReadLog()), entry, publication.partition)
        except (FindingError, MemqError) as error:
            self._fail(f"pointer at {offset} of {publication.partition}: {error}")

    def trimmed(self, partition: ReadPartition, before: int) -> None:
        """See `cloud.Observer`: from now on the objects of what was taken may go."""
        self.trims(partition, before)
        self._free(self.logs[partition], before)
        self._check_taken(partition, self._begins.get(partition, 0))

    def cut(self, partition: ReadPartition, end: int) -> None:
        """See `cloud.Observer`. The lost records are excused; all others are promised as before.

        Their objects stay, so that a restore can bring their pointers back, until retention has trimmed the log after
        their epoch. If the producers sent all records again, the objects may go.
        """
        log = self.logs.get(partition)
        if log is None or end >= len(log.entries):
            return
        lost_end, (entries, records) = len(log.entries), log.cut(end)
        for one in records:
            record = self.records[one.value]
            record.places.pop(one.source, None)
            record.lost, record.lost_epoch = True, self.parts[partition.topic_id, one.source[0]].highest
        for entry in entries:
            self.copies.lose(partition, entry)
            for location in entry.pointer.locations:
                self._named[location.key] -= 1
                self._freed_s[location.key] = self._now()
        self._forget_identities()
        self.cuts += 1
        for number in dict.fromkeys(entry.pointer.partition for entry in entries):
            self.parts[partition.topic_id, number].forget(end)
        self.commits.goes_back = True
        self.groups.cut(partition, lost_end)

    def lost_numbers(self, producer: str, partition: int) -> set[int]:
        """Return the numbers of a producer's records whose pointers the queue has lost."""
        stream = (producer, partition)
        return {record.number for record in self.records.values() if record.lost and record.stream == stream}

    def _forget_identities(self) -> None:
        """Keep the identities that are in a log: a name whose records were lost sends others under their sequences."""
        self._contents, self._sequences = {}, {}
        for entry in [entry for log in self.logs.values() for entry in log.entries]:
            self._check_identity(entry)

    def dropped(self, partition: ReadPartition) -> None:
        """See `cloud.Observer`: all that the log named may go."""
        log = self.logs.get(partition)
        if log is not None:
            self._free(log, len(log.entries))

    def _free(self, log: ReadLog, before: int) -> None:
        for entry in log.entries[log.queue_begin : before]:
            for location in entry.pointer.locations:
                self._named[location.key] -= 1
                self._freed_s[location.key] = self._now()
        log.leave_queue(before)

    def _check_taken(self, partition: ReadPartition, begin: int) -> None:
        """Check what is gone of a read partition, from its last beginning on: neither in the queue nor compacted.

        A compaction that was slower than retention may bring something back, for a while.
        """
        log = self.logs[partition]
        self._begins[partition] = log.begin
        taken, left = log.entries[begin : log.begin], log.entries[log.begin :]
        if taken and self.retention is not None:
            for words in self.retention.findings(partition, taken, left, self._now()):
                self._fail(f"retention of {partition}: {words}")

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """See `cloud.Observer`."""
        self.groups.committed(group, partition, position)
        self.reports.committed(group, partition, position)
        if self.on_committed is not None:
            self.on_committed(group, partition, position)

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        """See `cloud.Observer`."""
        self.groups.fetched(group, partition, position)

    def _name(self, entry: LogEntry) -> None:
        for location in entry.pointer.locations:
            self._named[location.key] = self._named.get(location.key, 0) + 1

    def _append(self, log: ReadLog, entry: LogEntry, partition: ReadPartition) -> None:
        self._name(entry)
        self._check_ranges(entry)
        self._check_identity(entry)
        self.reports.landed(entry, partition)
        log.entries.append(entry)
        for delivered in log.reader.take(entry):
            record = self.records.get(delivered.value)
            if record is None:
                raise FindingError(f"record {delivered.value[:40]!r} was never sent")
            if not record.keyed and record.stream[1] != entry.pointer.partition:
                raise FindingError(f"record {delivered.value[:40]!r} lies in partition {entry.pointer.partition}")
            if record.place is not None and not record.repeats:
                raise FindingError(f"record {delivered.value[:40]!r} is delivered twice, first at {record.place[1]}")
            record.places.setdefault(delivered.source, (partition, len(log.stream)))
            log.stream.append(delivered)
            self.on_delivered(delivered)
            if not record.ack_left:
                self._unacked.setdefault(delivered.source, []).append((delivered.sequence, delivered.value))

    def _check_ranges(self, entry: LogEntry) -> None:
        """Check that the pointer's ranges name its blocks: a reader that looks back reads only the ranges."""
        named: dict[int, RangeSet] = {}
        for producer in entry.pointer.producers:
            named[producer.producer] = RangeSet(producer.ranges)
        for block in entry.blocks:
            ranges = named.get(block.source[1])
            if ranges is None or not ranges.covers(block.first, block.following):
                raise FindingError(f"block {block.first} to {block.following} of {block.source} is not in its ranges")

    def _check_identity(self, entry: LogEntry) -> None:
        """Check that blocks of one identity have the same bytes: producers send the same again, and owners compare.

        None is cut otherwise, so that it was seen in part. Two tries of a task that run at the same time may land
        both, through two owners: its rows are there at least once, and readers deliver each content.
        """
        for block in entry.blocks:
            if any(record.repeats for record in map(self.records.get, block.values) if record is not None):
                continue
            identity = (entry.pointer.topic_id, *block.source, block.first)
            known = self._contents.get(identity)
            ranges = self._sequences.setdefault(identity[:3], RangeSet())
            if known is None and ranges.overlaps(block.first, block.following):
                raise FindingError(
                    f"block {block.first} to {block.following} of {block.source} at {entry.offset} was seen in part"
                )
            ranges.add(block.first, block.following)
            known = self._contents.setdefault(identity, (block.following, block.checksum))
            if known != (block.following, block.checksum):
                raise FindingError(
                    f"block {block.first} to {block.following} of {block.source} has checksum {block.checksum:08x},"
                    f" another one there, up to {known[0]}, {known[1]:08x}"
                )

    # ---- what others check ---------------------------------------------------------------------

    def _first_place(self, source: Source, value: bytes) -> ReferencePosition | None:
        """Return where the stream has a record of this identity: under another one it is no copy of it."""
        record = self.records.get(value)
        return None if record is None else record.places.get(source)

    def counts(self) -> dict[str, int]:
        """Return what the log went through: epochs, copies of pointers, blocks that were left out or dropped."""
        entries = [entry for log in self.logs.values() for entry in log.entries]
        data = [entry for entry in entries if entry.pointer.kind == "data"]
        stored = sum(entry.pointer.records for entry in data)
        skipped = sum(len(entry.pointer.skip) for entry in data)
        return {
            "epochs": sum(len(part.brokers) for part in self.parts.values()),
            "reports": reports_landed(self.reports.reports),
            "skipped": skipped,
            "doubles": stored - sum(len(log.stream) for log in self.logs.values()),
            "retired": sum(log.begin for log in self.logs.values()),
            "cold": sum(len(log.moved) for log in self.logs.values()),
            "commits": self.groups.commits,
            "expired_seeks": self.groups.expired_seeks,
        }

    # ---- the end -------------------------------------------------------------------------------

    def finish(self, draw_below: Callable[[int], int], *, resumes_max: int = 20) -> None:
        """Check what can only be seen whole; `draw_below` picks the positions to resume at."""
        self._check_order()
        self.reports.finish()
        for value in self.missing():
            self._fail(f"record {value[:40]!r} is acked with 1, and lost while its owner lived or left in order")
        for partition, log in self.logs.items():
            places = [(one.offset, one.record_index) for one in log.stream[log.begin_index :]]
            places += [(entry.offset, 0) for entry in log.entries[log.begin :]]  # where a batch ended before
            for _ in range(min(resumes_max, len(places))):
                self._check_resume(partition, log, *places.pop(draw_below(len(places))))

    def missing(self) -> list[bytes]:
        """Return the records that are acked with 1 and not in the log, though their owners kept what they held.

        In memory they lose it when they are killed; on disk they keep it all the same.
        """
        audit = {partition.topic_id for partition in self.reports.logs}
        topic = {partition: rules for (topic_id, partition), rules in self.parts.items() if topic_id not in audit}
        return [
            value
            for value, record in self.records.items()
            if record.held_s < FOREVER
            and not record.lost
            and record.place is None
            and (self.on_disk or not topic[record.stream[1]].may_lose(record.sent_s, record.held_s))
        ]

    def left_objects(self, since_s: float) -> list[str]:
        """Return what a sweep should have deleted: objects older than `since_s` that no pointer named since then.

        A sweep keeps objects whose records the queue does not have.
        """
        unnamed = [key for key in self._objects if not self._named.get(key) and not self.compaction.names(key)]
        freed_s = self._freed_s | self.compaction.freed_s
        left = [key for key in unnamed if freed_s.get(key, since_s) <= since_s]
        left = [key for key in left if "/staged/" not in key]  # it has an age of its own, longer than any run
        left = [key for key in left if "/sweep/" not in key]  # what sweeps say to each other
        left = [key for key in left if "/state/" not in key]  # owners of state logs delete old snapshots themselves
        left = [key for key in left if not self.is_held(key)]
        return [key for key in left if not self.copies.is_only_copy(key)]

    def check_lag(self, settings: TopicSettings, draw_below: Callable[[int], int], *, moments_max: int = 8) -> None:
        """Check lag at some moments and places that `draw_below` picks.

        Not of a log that was cut under its owner: the pointer by which the owner learned of it counts the lost records.
        """
        logs = {name: log for name, log in self.logs.items() if log.cut_at is None or not self.cut_live}
        for partition, log in logs.items():
            try:
                LagCheck(partition, log.entries, settings).check(draw_below, moments_max)
            except FindingError as error:
                self._fail(f"lag of {partition}: {error}")

    def _check_order(self) -> None:
        """Check the order of the acked records of each stream.

        An owner publishes on until it learns of a cut. If its pointer lands after a record was lost, and the producer
        has no ack of that record yet, the record lands again behind later ones. All other records keep their order.
        """
        last: dict[tuple[str, int], dict[tuple[int, int], int]] = {}  # by stream; by write partition and epoch
        for log in self.logs.values():
            for delivered in log.stream:
                record = self.records[delivered.value]
                if not record.acked:
                    continue
                numbers = last.setdefault(record.stream, {})
                partition, epoch = delivered.source[0], log.entries[delivered.offset].pointer.epoch
                before = [numbers[one] for one in numbers if one[0] != partition or one[1] > record.lost_epoch]
                if record.number < max(before, default=-1):
                    self._fail(f"record {delivered.value[:40]!r} comes after number {max(before)}")
                numbers[partition, epoch] = max(record.number, numbers.get((partition, epoch), -1))

    def _check_resume(self, partition: ReadPartition, log: ReadLog, offset: int, record_index: int) -> None:
        try:
            resumed = resume(log.entries[log.begin :], offset, record_index, self._window_ms)
        except FindingError as error:
            self._fail(f"resumed at {offset}:{record_index} of {partition}: {error}")
            return
        expected = log.stream[log.index_of(offset, record_index) :]
        resumed = [one for one in resumed if not self._is_late_copy(log, one)]
        if resumed != expected:
            wrong = next((n for n, pair in enumerate(zip(resumed, expected, strict=False)) if pair[0] != pair[1]), -1)
            self._fail(
                f"resumed at {offset}:{record_index} of {partition}: {len(resumed)} records instead of "
                f"{len(expected)}, the first difference at {wrong}"
            )

    def _is_late_copy(self, log: ReadLog, one: Delivered) -> bool:
        """Whether it is a copy whose first one was taken by retention, so that nobody can know."""
        place = self._first_place(one.source, one.value)
        return place is not None and log.is_expired(place[1]) and one.offset >= log.begin


def may_lack(checker: Checker, place: tuple[str, int], value: bytes, acked_s: float, waited_s: float) -> bool:
    """Whether a sealed topic may end without a record that was acked with 1, so long after its seal.

    An owner of `place`, topic id and partition, may hold it: one that was away for longer than the end waits. One that
    was killed has lost it, or has it on its disk.
    """
    rules = checker.parts.get(place)
    if rules is None:
        return False
    if waited_s >= AWAY_S and rules.may_hold(acked_s):
        return True
    return not checker.on_disk and rules.may_lose(checker.records[value].sent_s, acked_s)
