"""The rule that no record waits for another partition that fails: late records, and allowed waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memq.client.bulk import staged_writer
from memq.simulation.ports.failing_partition import FailingPartition
from tests.simulation.checked_log import Log, block
from tests.simulation.failing_partition_rules import ACK_S, START_S, OthersGoOn
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


def test_an_owner_publishes_a_copy_of_what_it_could_not_read() -> None:
    log = Log()
    log.open(1)
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.node.misread["1-0"] += MISREAD_MIN
    log.batch([block(0, values)], 1)
    assert log.finish() == []
