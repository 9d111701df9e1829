"""Rules of a consumer group, checked at each delivered record and each stored position. Pure.

A group skips only records that retention took, and is notified of them. It stores only positions that it has reached,
as a contiguous prefix. A member that takes a partition over continues at a position that it read from the queue after
the assignment: so it reads again at most the records after the stored position. No former member delivers then. A
paused partition delivers nothing.
After a seek, a partition continues at the new position.

A group with a filter gets each wanted record by the same rules, and no other one. It moves its position over the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from memq.topic import Position, ReadPartition
from tests.simulation.read_log import ReadLog, RecordPosition
from tests.simulation.reader import Source
from tests.simulation.wishes import WantedPlaces, Wish

Group = tuple[str, ReadPartition]
Reader = tuple[str, ReadPartition]  # consumer, one life of it
NOTHING = -1  # the place of a group that has stored nothing: the beginning


class GroupRules:
    """All groups of one run. `logs` are what lies in the queue; `fail` gets each finding."""

    def __init__(
        self,
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        now: Callable[[], float],
        first_place: Callable[[Source, bytes], tuple[ReadPartition, int] | None],
    ) -> None:
        self.consumed = 0
        self.commits = 0
        self.expired_seeks = 0
        self.wishes: Mapping[str, Wish] = {}  # the filters of groups
        self._wanted: dict[Group, WantedPlaces] = {}
        self._stored: dict[Group, int] = {}  # the place that was stored last
        self._logs = logs
        self._fail = fail
        self._now = now
        self._first_place = first_place
        self._reached: dict[Group, int] = {}  # all below it was iterated, or taken by retention
        self._delivered: dict[Group, set[int]] = {}  # records, since a member sought the last time
        self._news: Counter[Group] = Counter()
        self._fetched: dict[Group, list[tuple[float, int]]] = {}  # stored places that were read, and when
        self._born_s: dict[str, float] = {}
        self._since_s: dict[Reader, float] = {}  # when it was assigned the last time
        self._cursors: dict[Reader, int] = {}
        self._starts: dict[Reader, list[int]] = {}  # where it may begin after it was assigned
        self._sought: dict[Reader, int] = {}  # and has delivered nothing since
        self._paused: dict[Reader, None] = {}
        self._takers: dict[Group, tuple[str, float]] = {}  # of the last batch, and since when it has it
        self._lost: dict[Reader, None] = {}  # the queue has lost records that they delivered
        self._lost_ends: dict[ReadPartition, int] = {}  # the greatest end of a log before the queue lost it

    # ---- what consumers do -----------------------------------------------------------------------

    def begin(self, consumer: str) -> None:
        """A consumer starts: it reads the positions of its groups from now on."""
        self._born_s[consumer] = self._now()

    def assign(self, consumer: str, group: str, partition: ReadPartition) -> None:
        """A consumer gets a partition: it continues where its group was, as it was read since the last time.

        Or where it sought before it was notified: that it had lost the partition and got it back it did not know then.
        """
        reader = (consumer, partition)
        since_s = self._since_s.get(reader, self._born_s.get(consumer, 0.0))
        self._since_s[reader] = self._now()
        self._starts[reader] = [at for when, at in self._fetched.get((group, partition), []) if when >= since_s]
        if reader in self._sought:
            self._starts[reader].append(self._sought[reader])
        self._cursors.pop(reader, None)
        self._paused.pop(reader, None)
        self._lost.pop(reader, None)

    def take(self, consumer: str, group: str, partition: ReadPartition, paused_until_s: float) -> None:
        """A consumer gets a batch; its process was paused until `paused_until_s` the last time.

        A member delivers nothing after one session without an answer: then another one may have its partitions (G4).
        """
        since_s = self._since_s.get((consumer, partition), 0.0)
        taker, taker_since_s = self._takers.get((group, partition), (consumer, since_s))
        if since_s >= taker_since_s:
            self._takers[group, partition] = consumer, since_s
        elif taker != consumer and paused_until_s < taker_since_s:
            self._fail(f"{consumer} takes a batch of {partition}, which {taker} has since {taker_since_s:.3f} s")

    def seek(self, consumer: str, partition: ReadPartition, place: RecordPosition) -> None:
        """A consumer continues elsewhere, at what its group has iterated or behind that."""
        reader = (consumer, partition)
        self._cursors[reader] = self._sought[reader] = self._log(partition).index_of(*place)
        self._starts.pop(reader, None)
        self._lost.pop(reader, None)

    def cut(self, partition: ReadPartition, lost_end: int) -> None:
        """The queue has cut a log, whose end was `lost_end`: no group has read the new records there."""
        end = len(self._log(partition).stream)
        self._lost_ends[partition] = max(lost_end, self._lost_ends.get(partition, 0))
        for places in (self._reached, self._stored):
            places.update({key: min(at, end) for key, at in places.items() if key[1] == partition})
        for wanted in [wanted for key, wanted in self._wanted.items() if key[1] == partition]:
            wanted.cut(end)
        for key, delivered in self._delivered.items():
            if key[1] == partition:
                delivered.intersection_update(range(end))
        for key, fetched in self._fetched.items():
            if key[1] == partition:
                fetched[:] = [(when, at) for when, at in fetched if at <= end]
        for reader, starts in self._starts.items():
            if reader[1] == partition:
                starts[:] = [at for at in starts if at <= end]
        for places in (self._cursors, self._sought):
            for reader in [reader for reader, at in places.items() if reader[1] == partition and at > end]:
                del places[reader]
                self._lost[reader] = None

    def expired(self, consumer: str, partition: ReadPartition, first: Position) -> None:
        """A consumer was notified that retention was faster, and continues at the first that is left."""
        self.expired_seeks += 1
        log = self._log(partition)
        if first.pointer_offset > log.begin_max:
            words = f"retention left all from {log.begin_max} on"
            self._fail(f"{consumer} is told to go on at {first} of {partition}, {words}")
        self.seek(consumer, partition, (first.pointer_offset, first.record_index))

    def pause(self, consumer: str, partition: ReadPartition, *, paused: bool) -> None:
        """A consumer wants nothing of a partition, or wants it again."""
        self._paused.pop((consumer, partition), None)
        if paused:
            self._paused[consumer, partition] = None

    def iterated(self, group: str, partition: ReadPartition) -> range:
        """Return the places that the group has iterated and retention has left."""
        return range(self._log(partition).begin_index, self._reached.get((group, partition), 0))

    def consume(self, consumer: str, group: str, partition: ReadPartition, place: RecordPosition, value: bytes) -> None:
        """A consumer delivers the record at (pointer offset, record index)."""
        self.consumed += 1
        log, reader = self._log(partition), (consumer, partition)
        at = log.index_of(*place)
        if group in self.wishes and not self.wishes[group].wants_value(value):
            self._fail(f"{consumer} delivers record {at} of {partition}, which group {group} does not want")
        if reader in self._paused:
            self._fail(f"{consumer} delivers record {at} of {partition}, which it has paused")
        there = at < len(log.stream) and log.stream[at].value == value and _place(log, at) == place
        if value in log.lost.get(place, ()) and (reader in self._lost or not there):
            self._deliver_lost(reader)
            return
        if reader in self._lost:
            self._fail(f"{consumer} delivers record {at} of {partition}, whose log was cut before its position")
        if not there:
            if not self.is_late_copy(log, place, value):
                words = f"{value[:40]!r} at {place} of {partition}"
                self._fail(f"{consumer} delivers {words}, which is not what lies there")
            return
        self._check_next(log, reader, group, at)
        self._count_news((group, partition), at, after_seek=self._sought.pop(reader, None) is not None)
        reached = self._reached.get((group, partition), 0)
        if at > self._next_wanted(group, partition, max(reached, log.gone_index)):
            self._fail(f"group {group} skips records {reached} to {at} of {partition}")
        self._reached[group, partition] = max(reached, at + 1)
        self._cursors[reader] = at + 1

    def _count_news(self, key: Group, at: int, *, after_seek: bool) -> None:
        delivered = self._delivered.setdefault(key, set())
        if after_seek:
            delivered.clear()
        self._news[key] += at not in delivered
        delivered.add(at)

    def _deliver_lost(self, reader: Reader) -> None:
        """Accept a record that was fetched before its loss: its reader has no place in the log from now on."""
        self._lost[reader] = None
        self._cursors.pop(reader, None)
        self._sought.pop(reader, None)
        self._starts.pop(reader, None)

    def _check_next(self, log: ReadLog, reader: Reader, group: str, at: int) -> None:
        """Check that a reader continues where it was, or where its group was."""
        consumer, partition = reader
        cursor = self._cursors.get(reader)
        cursor = None if cursor is None else self._next_wanted(group, partition, cursor)
        if cursor is not None and at != cursor:
            self._fail(f"{consumer} delivers record {at} of {partition}, the next one is {cursor}")
        starts = self._starts.pop(reader, None)
        if (
            cursor is None
            and starts is not None
            and not any(self._may_start(log, group, partition, start, at) for start in starts)
        ):
            self._fail(f"{consumer} begins with record {at} of {partition}, stored were {sorted(set(starts))}")

    def _may_start(self, log: ReadLog, group: str, partition: ReadPartition, start: int, at: int) -> bool:
        """Whether a start at a stored position may begin with record `at`; `NOTHING`: at any that retention left."""
        if start == NOTHING and at <= self._next_wanted(group, partition, log.gone_index):
            return True
        return at == self._next_wanted(group, partition, max(start, 0))

    def is_late_copy(self, log: ReadLog, place: RecordPosition, value: bytes) -> bool:
        """Whether it is a copy of a record that retention took: a reader that looks back can't see the first one."""
        source = log.source_of(*place, value)
        first = None if source is None else self._first_place(source, value)
        return first is not None and log.was_expired(first[1])

    # ---- what the queue stores ---------------------------------------------------------------------

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """A position of the group is stored."""
        self.commits += 1
        log = self._log(partition)
        at = log.index_of(position.pointer_offset, position.record_index)
        self._stored[group, partition] = min(at, len(log.stream))
        reached = max(self._reached.get((group, partition), 0), log.gone_index)
        reached = self._next_wanted(group, partition, reached)
        if at > reached and position.pointer_offset > self._lost_ends.get(partition, -1):
            self._fail(f"group {group} stores {position} of {partition}: record {at}, it has iterated {reached}")

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        """Somebody asks where the group is; None when it has stored nothing."""
        log = self._log(partition)
        at = NOTHING if position is None else log.index_of(position.pointer_offset, position.record_index)
        self._fetched.setdefault((group, partition), []).append((self._now(), at))

    # ---- how far groups are --------------------------------------------------------------------------

    def news(self, group: str, partition: ReadPartition) -> int:
        """Return how many records a group has got, without those that came again because a member restarted.

        When a member has sought and reads there, each record counts once more: the group wants it again.
        """
        return self._news[group, partition]

    def reached(self, group: str, partition: ReadPartition) -> int:
        """Return the place up to which a group has everything that is left."""
        reached = max(self._reached.get((group, partition), 0), self._log(partition).begin_index)
        return self._next_wanted(group, partition, reached)

    def is_drained(self, group: str) -> bool:
        """Say whether a group has delivered all there is; with a filter it has also stored that it passed the rest."""
        return all(
            self.reached(group, partition) == len(log.stream) and self._is_stored(group, partition, log)
            for partition, log in self._logs.items()
        )

    def _is_stored(self, group: str, partition: ReadPartition, log: ReadLog) -> bool:
        stored = max(self._stored.get((group, partition), 0), log.begin_index)
        return group not in self.wishes or stored >= len(log.stream)

    def _next_wanted(self, group: str, partition: ReadPartition, at: int) -> int:
        """Return the place of the first record from `at` on that a group wants; without one the end of the log."""
        if group not in self.wishes:
            return at
        wanted = self._wanted.setdefault((group, partition), WantedPlaces(self.wishes[group]))
        return wanted.next(self._log(partition).stream, at)

    def _log(self, partition: ReadPartition) -> ReadLog:
        return self._logs.get(partition) or ReadLog()


def _place(log: ReadLog, at: int) -> RecordPosition:
    return log.stream[at].offset, log.stream[at].record_index
