"""The rule that no record and no group waits for another partition that fails: late ones, and allowed waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memq.client.bulk import staged_writer
from memq.simulation.ports.failing_partition import FailingPartition
from tests.simulation.checked_log import PARTITION, Log, block
from tests.simulation.failing_partition_rules import ACK_S, POLL_S, READ_S, START_S, OthersGoOn
from tests.simulation.owner_rules import MISREAD_MIN
from tests.simulation.staged_rules import StagedRules

FAILING, HEALTHY = 1, 0


class Staged:
    """A writer that staged rows for some partitions, in a world in which one of these fails."""

    def __init__(self, *partitions: int) -> None:
        self.log, failing = Log(), FailingPartition()
        self.log.open(1)
        failing.fail_until(FAILING, START_S + 60.0, service="queue", hangs=True)
        self.others = OthersGoOn(failing, self.log.checker, (), self.log.now, self.log.findings.append)
        self.rules = StagedRules(self.log.checker, self.log.findings.append)
        self.values = self.stage("first", partitions)

    def stage(self, key: str, partitions: Sequence[int]) -> list[bytes]:
        """Stage one row for each partition as one object."""
        values = [self.rules.made("w", 0, partition, b"") for partition in partitions]
        self.rules.staged(key, values)
        return values

    def findings(self) -> list[str]:
        """Return what is found when the longest wait is over."""
        self.log.world.now = START_S
        self.others.look()
        assert self.log.findings == []
        self.log.world.now = START_S + ACK_S + 0.1
        self.others.look()
        return self.log.findings

    def land_healthy(self) -> None:
        """Let the row of the healthy partition land."""
        self.log.batch([block(0, self.values[:1])], 0)


class Group:
    """A group with one member, in a world in which another partition fails. It has read 90 of 100 records."""

    def __init__(self) -> None:
        self.log, failing = Log(), FailingPartition()
        self.log.open(1)
        values = self.log.send(*range(100))
        self.log.batch([block(0, values)], 0)
        self.log.ack(values)
        failing.fail_until(FAILING, START_S + 60.0, service="queue", hangs=True)
        self.others = OthersGoOn(failing, self.log.checker, ["g"], self.log.now, self.log.findings.append)
        self.groups = self.log.checker.groups
        self.log.world.now = START_S
        self.read(*range(90))

    def read(self, *records: int) -> None:
        """Deliver records to the member."""
        stream = self.log.checker.logs[PARTITION].stream
        for record in (stream[at] for at in records):
            self.groups.consume("c", "g", PARTITION, (record.offset, record.record_index), record.value)

    def seek(self, at: int) -> None:
        """Let the member seek to a record."""
        record = self.log.checker.logs[PARTITION].stream[at]
        self.groups.seek("c", PARTITION, (record.offset, record.record_index))

    def restart(self) -> None:
        """Let the member begin again at the stored position: the beginning."""
        self.log.checker.fetched("g", PARTITION, None)
        self.groups.assign("c", "g", PARTITION)

    def findings_after(self, seconds: float) -> list[str]:
        """Return what is found until `seconds` have passed."""
        until_s = self.log.world.now + seconds
        while self.log.world.now < until_s:
            self.log.world.now += POLL_S
            self.others.look()
        return self.log.findings


def test_rows_of_a_batch_without_the_sick_partition_are_late() -> None:
    staged = Staged(HEALTHY, 2)
    staged.rules.offered("w", 0, ["first"])
    assert len(staged.findings()) == 2


def test_rows_that_landed_are_late_when_no_row_of_their_batch_is_sick() -> None:
    staged = Staged(HEALTHY)
    staged.rules.offered("w", 0, ["first"])
    staged.land_healthy()
    assert len(staged.findings()) == 1


def test_a_batch_with_rows_in_the_sick_partition_must_land_elsewhere() -> None:
    staged = Staged(HEALTHY, FAILING)
    staged.rules.offered("w", 0, ["first"])
    (finding,) = staged.findings()
    assert staged.values[0].decode() in finding


def test_rows_that_landed_wait_for_the_sick_part_of_their_batch() -> None:
    staged = Staged(HEALTHY, FAILING)
    staged.rules.offered("w", 0, ["first"])
    staged.land_healthy()
    assert staged.findings() == []


def test_a_commit_of_one_partition_at_a_time_may_wait_for_the_sick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_writer, "PARTITIONS_AT_ONCE_MAX", 1)
    staged = Staged(HEALTHY, FAILING)
    staged.rules.offered("w", 0, ["first"])
    assert staged.findings() == []


def test_rows_staged_again_for_a_decided_batch_are_not_awaited() -> None:
    staged = Staged(HEALTHY)
    staged.rules.offered("w", 0, ["first"])
    again = staged.stage("again", [HEALTHY])
    staged.rules.offered("w", 0, ["again"])
    (finding,) = staged.findings()
    assert again[0].decode() not in finding


def test_a_group_that_gets_nothing_waits_too_long() -> None:
    group = Group()
    assert group.findings_after(READ_S) == []
    assert "gets none of 10 records" in group.findings_after(2 * POLL_S)[0]


def test_records_after_a_seek_back_are_progress_of_a_group() -> None:
    group = Group()
    for first in (0, 20, 40):
        group.seek(first)
        for at in range(first, first + 10):
            group.read(at)
            assert group.findings_after(READ_S / 5) == []
    assert group.findings_after(READ_S + POLL_S) != []


def test_a_group_that_restarts_after_a_seek_back_may_read_everything_again() -> None:
    group = Group()
    group.seek(60)
    group.read(60)
    group.restart()
    for at in range(20):
        group.read(at)
        assert group.findings_after(READ_S / 5) == []


def test_a_seek_is_no_progress_of_a_group() -> None:
    group = Group()
    for at in (60, 30, 0):
        group.seek(at)
        group.findings_after(READ_S / 2)
    assert group.log.findings != []


def test_a_group_that_starts_again_and_again_at_its_stored_position_waits_too_long() -> None:
    group = Group()
    for _ in range(3):
        group.restart()
        group.read(*range(90))
        group.findings_after(READ_S / 2)
    assert group.log.findings != []


def test_an_owner_publishes_a_copy_of_what_it_could_not_read() -> None:
    log = Log()
    log.open(1)
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.node.misread["1-0"] += MISREAD_MIN
    log.batch([block(0, values)], 1)
    assert log.finish() == []
