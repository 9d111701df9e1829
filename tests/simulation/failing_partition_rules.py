"""The rule that no other partition waits for the one whose log or objects fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

from memq.broker.service_partitions import hosts
from memq.client.bulk import staged_writer
from memq.simulation.ports.failing_partition import FailingPartition
from memq.topic import ReadPartition
from tests.simulation.checker import Checker, SentRecord

ACK_S = 6.0  # of a record in another partition: its opening, and a back-off of up to 2 s
READ_S = 20.0  # without progress of a group in another partition: two POLLs in a row may wait for a log that hangs
START_S = 12.0  # of the world: brokers that start wait for a log that hangs
POLL_S = 0.5


class OthersGoOn:
    """In a world in which one part fails and nothing else: all other partitions take records, and are read."""

    def __init__(
        self,
        failing: FailingPartition,
        checker: Checker,
        groups: Iterable[str],
        now: Callable[[], float],
        fail: Callable[[str], None],
    ) -> None:
        self._failing = failing
        self._checker = checker
        self._groups = tuple(groups)
        self._now = now
        self._fail = fail
        self._waiting: dict[bytes, None] = {}
        self._known = 0
        self._moved: dict[tuple[str, ReadPartition], tuple[int, float]] = {}  # what a group has got, and since when

    def look(self) -> None:
        """Check that nobody waits too long for what has nothing to do with the failing partition."""
        self._look_at_records()
        for partition, log in self._checker.logs.items():
            for group in self._groups:
                self._look_at_group(group, partition, len(log.stream))

    def _look_at_records(self) -> None:
        records = self._checker.records
        new = list(records)[self._known :]
        self._known = len(records)
        self._waiting |= dict.fromkeys(new)
        for value in list(self._waiting):
            record, now_s = records[value], self._now()
            if record.settled or record.repeats or record.keyed:
                del self._waiting[value]
                continue
            if record.staged and not record.batch:
                continue
            healthy_s = max(self._failing.healthy_s.get(partition, 0.0) for partition in _waits_for(record))
            since_s = max(record.sent_s, START_S, healthy_s)
            if now_s > since_s + ACK_S:
                self._fail(f"record {value[:40]!r} waits {now_s - since_s:.1f} s while another partition fails")

    def _look_at_group(self, group: str, partition: ReadPartition, end: int) -> None:
        now_s, groups = self._now(), self._checker.groups
        reached, news = groups.reached(group, partition), groups.news(group, partition)
        before, since_s = self._moved.get((group, partition), (-1, now_s))
        parts = partition.partition, crc32(group.encode()) % hosts.STATE_PARTITIONS  # its log, and that of the group
        healthy_s = max(self._failing.healthy_s.get(part, 0.0) for part in parts)
        if reached >= end or news != before or now_s < max(healthy_s, START_S):
            since_s = now_s
        self._moved[group, partition] = (news, since_s)
        if now_s > since_s + READ_S:
            words = f"{READ_S:g} s while another partition fails"
            self._fail(f"group {group} gets none of {end - reached} records of {partition} for {words}")


def _waits_for(record: SentRecord) -> frozenset[int]:
    """Return the partitions without which a record can't continue: its own to land, all of a staged batch for the ack.

    A commit that asks fewer owners at once than its batch has partitions may wait for the failing one first.
    """
    if record.place is None and len(record.batch) <= staged_writer.PARTITIONS_AT_ONCE_MAX:
        return frozenset((record.stream[1],))
    return record.batch or frozenset((record.stream[1],))
