"""The trial of a restore has each record that the log had at its begin, and the cluster runs meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memq.runtime.clock import SystemClock
from tests.brokers import run
from tests.simulation.restore_rules import RestoreRules
from tests.simulation.stored_log import BATCHES, PARTITION, StoredLog
from tests.unit.sealed_batches import TOPIC, block


class LiveCluster(StoredLog):
    """A log that is restored."""

    def restore(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        killed_after: int = 0,
        repeats: Callable[[bytes], bool] = lambda value: False,
    ) -> list[str]:
        """Try a restore; return what it finds. `meanwhile` happens in the cluster when the trial has begun."""

        class Draw(random.Random):
            """Draws after how many pointers the restore is killed, when it has its copy of the store."""

            def randrange(self, *_bounds: int) -> int:  # type: ignore[override]
                meanwhile()
                return killed_after

        findings: list[str] = []
        rules = RestoreRules("c-1", TOPIC, self.objects, {PARTITION: self.log}, findings.append, repeats)
        run(rules.check(SystemClock(), Draw()))
        return findings


@pytest.mark.parametrize("killed_after", range(BATCHES + 1))
def test_a_restore_has_each_record_once_wherever_it_was_killed(killed_after: int) -> None:
    assert LiveCluster().restore(killed_after=killed_after) == []


def test_retention_may_take_pointers_and_objects_while_the_restore_is_tried() -> None:
    cluster = LiveCluster()
    assert cluster.restore(lambda: cluster.expire(0)) == []


def test_objects_of_expired_pointers_may_be_restored_though_a_sweep_takes_them_meanwhile() -> None:
    cluster = LiveCluster()
    cluster.log.leave_queue(2)
    assert cluster.restore(lambda: cluster.lose(1)) == []


def test_a_record_that_lands_while_the_restore_is_tried_is_not_missed() -> None:
    cluster = LiveCluster()
    assert cluster.restore(lambda: cluster.land(BATCHES)) == []


def test_a_record_without_its_object_is_missed_though_retention_takes_it_meanwhile() -> None:
    cluster = LiveCluster()
    cluster.lose(0)
    (finding,) = cluster.restore(lambda: cluster.expire(0))
    assert "1 records are not there" in finding


def test_a_record_in_two_blocks_is_a_finding_unless_its_task_may_run_again() -> None:
    cluster = LiveCluster()
    cluster.store(BATCHES, block(0, [b"0", b"in another block"]))
    assert cluster.restore(repeats=lambda value: True) == []
    (finding,) = cluster.restore()
    assert "is there twice" in finding
