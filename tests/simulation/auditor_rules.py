"""The auditor of a run against the published history: its results are those that the history demands.

The auditor read under faults and wrong answers, and died now and then. It need not count pointers that retention took
before it read them, since it can't read a log that does not answer. In the healed world it has time to read all. Then
its clock is set forward by an hour, so that no judgement waits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memq.audit.account import apart
from memq.audit.finding import Kind
from memq.audit.minutes import MinuteRow
from memq.format.ranges import RangeSet
from memq.topic import Position, ReadPartition, Topic
from tests.simulation.auditor import StoredAudit
from tests.simulation.live_replay import HELD, IDS, Named
from tests.simulation.live_rules import LiveRules
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Source

# Not those that are unknown: the play ends, and hears nothing of clients that live; the auditor does.
FROM_QUEUE = ("committed", "copies", "late")
COUNTED = ("sent", "acked", "gave-up", *FROM_QUEUE, "fetched", "dropped", "processed")


class AuditorRules:
    """`topic` returns the topic as it is now, and `logs` are its logs; `fail` gets what the auditor says wrongly.

    `reports` are the positions of the last report on the topic, by partition of the audit topic.

    Where the `store_lies` it may say that an object does not exist. Of a batch without an index nobody counts copies.
    After 30 s without the object of a report, the auditor skips the report: its client is silent for those minutes.
    """

    def __init__(
        self,
        topic: Callable[[], Topic],
        stored: StoredAudit,
        logs: Mapping[ReadPartition, ReadLog],
        reports: Mapping[int, Position],
        fail: Callable[[str], None],
        *,
        store_lies: bool,
    ) -> None:
        self._store_lies = store_lies
        self._counted = [count for count in COUNTED if count != "copies" or not store_lies]
        self._topic = topic
        self._topic_id = topic().id
        self._stored = stored
        self._logs = logs
        self._reports = reports
        self._fail = fail
        self._trimmed: dict[int, int] = {}  # by write partition, up to where retention came
        self._missed: dict[int, int] = {}  # by write partition, records that it took before the auditor had read them

    def trimmed(self, log: ReadPartition, before: int) -> None:
        """Note that retention took the entries below `before`, and how far the auditor has surely read."""
        read = self._read()
        for number in (part.partition for part in self._topic().partitions):
            if self._topic().read_partition_of(number) == log:
                begin = max(read.get(number, 0), self._trimmed.get(number, 0))
                taken = [each for each in self._logs[log].entries[begin:before] if each.pointer.partition == number]
                records = sum(block.following - block.first for each in taken for block in each.blocks)
                self._missed[number] = self._missed.get(number, 0) + records
                self._trimmed[number] = before

    def has_read_all(self) -> bool:
        """Whether all reports on the topic, and all of its pointers, were read."""
        homes = self._stored.homes()
        if any(home not in homes or homes[home] <= last for home, last in self._reports.items()):
            return False
        read = self._read()
        ends = {number: self._end(number) for number in (part.partition for part in self._topic().partitions)}
        return all(read.get(number, 0) >= end for number, end in ends.items())

    def _read(self) -> dict[int, int]:
        """Return by write partition the next pointer to read, as it is stored."""
        return {
            number: facts.next_offset
            for each in self._stored.topics()
            if each.topic_id == self._topic_id
            for number, facts in each.partitions.items()
        }

    def _end(self, partition: int) -> int:
        log = self._logs.get(self._topic().read_partition_of(partition))
        return log.entries[-1].offset + 1 if log is not None and log.entries else 0

    def named(self, *, withdrawn: bool = False) -> Named:
        """Return the records that findings name, of those that hold; or of those that were taken back."""
        found = Named()
        for each in self._stored.findings(self._topic().name):
            if each.topic_id == self._topic_id and each.kind in IDS and bool(each.resolved_ms) == withdrawn:
                key = (each.kind, each.stage, each.group, each.partition, each.producer)
                for piece in each.ranges:
                    found.setdefault(key, RangeSet()).add(*piece)
        return found

    def check(self, live: LiveRules) -> None:
        """Compare the results of the auditor with those that the history demands."""
        named = self.named()
        live.check_sound(named)
        for key, ranges in self.named(withdrawn=True).items():
            wrong = apart(ranges, named.get(key, RangeSet()))  # a late report may tell a better cause
            if wrong:
                self._fail(f"the auditor took back that {wrong} of {key} are so")
        unnamed = self._unnamed()
        for key, ranges in live.sound.named.items():
            missing = apart(ranges, named.get(key, RangeSet()))
            if key[0] is Kind.CORRUPT:
                missing = apart(missing, unnamed.get((key[3], key[4]), RangeSet()))
            if missing and (key[0] is Kind.CORRUPT or not self._missed.get(key[3])):
                self._fail(f"the auditor does not say {missing} of {key}")
        live.check_held(self._held())
        self._check_counts(live)

    def _held(self) -> dict[tuple[Kind, str], int]:
        """Return the held records of findings about them that hold."""
        return {
            (each.kind, each.id): each.records
            for each in self._stored.findings(self._topic().name)
            if each.topic_id == self._topic_id and each.kind in HELD and not each.producer and not each.resolved_ms
        }

    def _check_counts(self, live: LiveRules) -> None:
        rows = self._stored.rows(self._topic().name)
        for place, row in live.sound.rows.items():
            missed = self._missed.get(place[0], 0)
            for name, side in row.sides.items():
                found = rows.get(place, MinuteRow()).side(name)
                skipped = self._store_lies and found["silent"] > side["silent"]
                for count in FROM_QUEUE if skipped else self._counted:
                    if count in self._counted and abs(found[count] - side[count]) > (
                        missed if count in FROM_QUEUE else 0
                    ):
                        text = f"{found[count]} records {count}, not {side[count]}, though it missed {missed} at most"
                        self._fail(f"the auditor counts {text}, in partition and minute {place}, group '{name}'")

    def _unnamed(self) -> dict[Source, RangeSet]:
        """Return the records of batches that were damaged for a reader, and whose index did not answer the auditor."""
        found: dict[Source, RangeSet] = {}
        for each in self._stored.findings(self._topic().name):
            if each.topic_id != self._topic_id or each.resolved_ms:
                continue
            if each.kind is Kind.CORRUPT and not each.ranges:
                log = self._logs[self._topic().read_partition_of(each.partition)]
                for block in log.entries[each.offset].blocks:
                    found.setdefault(block.source, RangeSet()).add(block.first, block.following)
        return found
