"""The comparison with the logs finds answers that are wrong, old, or unknown without a reason."""

from __future__ import annotations

from memq.audit.dashboard.view import GroupRow, PartitionRow
from memq.simulation.ports.failing_partition import FailingPartition
from memq.topic import Position, ReadPartition
from tests.simulation.checked_log import Log, block
from tests.simulation.failing_partition_rules import START_S
from tests.simulation.log_truth import PAGE_S, LogTruth

FAILING, HEALTHY = 1, 0


class Compared:
    """A log of partition 0 with batches of one record each; the log of partition 1 fails for 10 s."""

    def __init__(self) -> None:
        self.log, self.failing = Log(), FailingPartition()
        self.log.open(1)
        self.log.world.now = START_S
        self.failing.fail_until(FAILING, START_S + 10.0, service="queue", hangs=True)
        partitions = [ReadPartition("t", "5eed" * 8, number) for number in (HEALTHY, FAILING)]
        (where,) = self.log.checker.logs
        partitions[HEALTHY] = where
        self.truth = LogTruth(partitions, self.log.checker.logs, self.failing, self.log.now, self.log.findings.append)
        self.sent = 0

    def land(self) -> None:
        """Let one more record land."""
        value = b"%d" % self.sent
        self.log.checker.sent("p", 0, self.sent, value)
        self.log.batch([block(self.sent, [value])], self.sent)
        self.sent += 1

    @property
    def end(self) -> int:
        """Where the healthy log ends."""
        return self.truth.asks().ends[HEALTHY]

    def page(self, records: int | None, error: str = "") -> None:
        """Show the page with a total of the healthy partition."""
        self.truth.check_page([PartitionRow(partition=HEALTHY, owner="", records=records, error=error)])


def test_an_end_is_one_between_question_and_answer() -> None:
    world = Compared()
    asked, first = world.truth.asks(), world.end
    world.land()
    for end in (first, first + 1):
        world.truth.check_ends(asked, {HEALTHY: end})
    assert world.log.findings == []
    for end in (first - 1, first + 2):
        world.truth.check_ends(asked, {HEALTHY: end})
    assert len(world.log.findings) == 2


def test_only_a_sick_log_may_be_unknown() -> None:
    world = Compared()
    world.truth.check_ends(world.truth.asks(), {HEALTHY: world.end})
    assert world.log.findings == []
    world.truth.check_ends(world.truth.asks(), {FAILING: 0})
    assert len(world.log.findings) == 1
    world.log.world.now = START_S + 11.0
    world.truth.check_totals(world.truth.asks(), {HEALTHY: 0})
    assert len(world.log.findings) == 2


def test_a_sick_log_may_be_known_but_not_wrong() -> None:
    world = Compared()
    world.truth.check_totals(world.truth.asks(), {HEALTHY: 0, FAILING: 0})
    assert world.log.findings == []
    world.truth.check_totals(world.truth.asks(), {HEALTHY: 0, FAILING: 1})
    assert len(world.log.findings) == 1


def test_lag_lies_between_the_places_of_its_reader() -> None:
    world = Compared()
    start = world.end
    for _ in range(3):
        world.land()
    asked = world.truth.asks()
    behind, ahead = Position(HEALTHY, start), Position(HEALTHY, start + 1)
    for records in (2, 3):
        world.truth.check_lag(asked, HEALTHY, records, behind, ahead)
    assert world.log.findings == []
    for wrong in (1, 4, None):
        world.truth.check_lag(asked, HEALTHY, wrong, behind, ahead)
    assert len(world.log.findings) == 3


def test_a_page_is_not_older_than_its_rounds_take() -> None:
    world = Compared()
    world.page(None)
    world.land()
    world.log.world.now += PAGE_S
    world.page(0)
    assert world.log.findings == [], "it was so at the begin of the first round"
    world.log.world.now += PAGE_S
    world.page(0)
    assert len(world.log.findings) == 1
    world.page(1)
    assert len(world.log.findings) == 1


def test_a_page_names_the_error_of_each_total_that_is_unknown_and_of_no_other() -> None:
    world = Compared()
    world.page(None)
    world.log.world.now += PAGE_S
    world.page(0, "no leader")
    assert len(world.log.findings) == 1
    world.page(None, "no leader")
    assert len(world.log.findings) == 2, "the log never failed"


def test_a_groups_lag_on_the_page_is_one_of_the_time_that_the_rounds_take() -> None:
    world = Compared()
    for _ in range(4):
        world.land()
    first = world.end - 4
    places = [partition for partition in world.log.checker.logs if partition.partition == HEALTHY]
    world.truth.committed("g", places[0], Position(HEALTHY, first + 1))
    rows = [PartitionRow(partition=number, owner="", records=None, error="no leader") for number in (HEALTHY, FAILING)]
    world.truth.check_page(rows)
    world.log.world.now += PAGE_S
    world.truth.committed("g", places[0], Position(HEALTHY, first + 3))
    findings = len(world.log.findings)

    def shown(lag: int | None, error: str = "") -> int:
        row = GroupRow(
            group="g", topic="t", members=1, lag_records=lag, lag_bytes=lag, lag_seconds=lag and 1.0, error=error
        )
        world.truth.check_groups([row])
        return len(world.log.findings) - findings

    assert [shown(lag) for lag in (1, 3)] == [0, 0], "both were so at some moment"
    assert shown(None, "partition 1: no leader") == 0
    assert [shown(0), shown(4), shown(None)] == [1, 2, 3]
