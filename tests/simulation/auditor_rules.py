"""The auditor that ran next to the cluster against what landed: it says what the played history demands, in the end.

It read through faults and lies, and died now and then. A healed world gives it time to read all; then its clock is set
an hour on, so that nothing waits for anything any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memq.audit.account import apart
from memq.audit.finding import Kind
from memq.audit.minutes import MinuteRow
from memq.format.ranges import RangeSet
from memq.topic import ReadPartition, Topic
from tests.simulation.auditor import StoredAudit
from tests.simulation.live_play import IDS, Named
from tests.simulation.live_rules import LiveRules
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Source

# Not those that are unknown: the play ends, and hears nothing of clients that live; the auditor does.
COUNTED = ("sent", "acked", "gave-up", "committed", "copies", "late", "fetched", "dropped", "processed")


class AuditorRules:
    """`logs` are those of the topic; `fail` gets what the auditor says wrongly.

    Where the `store_lies` it may say that an object does not exist. Of a batch without an index nobody counts copies.
    """

    def __init__(
        self,
        topic: Topic,
        stored: StoredAudit,
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        *,
        store_lies: bool,
    ) -> None:
        self._counted = [count for count in COUNTED if count != "copies" or not store_lies]
        self._topic = topic
        self._stored = stored
        self._logs = logs
        self._fail = fail

    def has_read_all(self) -> bool:
        """Whether all pointers of the topic were read."""
        read = {
            number: facts.next_offset
            for each in self._stored.topics()
            if each.topic_id == self._topic.id
            for number, facts in each.partitions.items()
        }
        ends = {number: self._end(number) for number in (part.partition for part in self._topic.partitions)}
        return all(read.get(number, 0) >= end for number, end in ends.items())

    def _end(self, partition: int) -> int:
        log = self._logs.get(self._topic.read_partition_of(partition))
        return log.entries[-1].offset + 1 if log is not None and log.entries else 0

    def named(self, *, withdrawn: bool = False) -> Named:
        """Return the records that findings name, of those that hold; or of those that were taken back."""
        found = Named()
        for each in self._stored.findings(self._topic.name):
            if each.topic_id == self._topic.id and each.kind in IDS and bool(each.resolved_ms) == withdrawn:
                key = (each.kind, each.stage, each.group, each.partition, each.producer)
                for piece in each.ranges:
                    found.setdefault(key, RangeSet()).add(*piece)
        return found

    def check(self, live: LiveRules) -> None:
        """Compare what the auditor says with what is demanded."""
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
            if missing:
                self._fail(f"the auditor does not say {missing} of {key}")
        self._check_counts(live)

    def _check_counts(self, live: LiveRules) -> None:
        rows = self._stored.rows(self._topic.name)
        for place, row in live.sound.rows.items():
            for name, side in row.sides.items():
                found = rows.get(place, MinuteRow()).side(name)
                for count in self._counted:
                    if found[count] != side[count]:
                        text = f"{found[count]} records {count}, not {side[count]}"
                        self._fail(f"the auditor counts {text}, in partition and minute {place}, group '{name}'")

    def _unnamed(self) -> dict[Source, RangeSet]:
        """Return the records of batches that were damaged for a reader, and whose index did not answer the auditor."""
        found: dict[Source, RangeSet] = {}
        for each in self._stored.findings(self._topic.name):
            if each.topic_id == self._topic.id and each.kind is Kind.CORRUPT and not each.ranges:
                log = self._logs[self._topic.read_partition_of(each.partition)]
                for block in log.entries[each.offset].blocks:
                    found.setdefault(block.source, RangeSet()).add(block.first, block.following)
        return found
