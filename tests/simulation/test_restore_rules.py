"""The trial of a restore has each record that the log had at its begin, and the cluster runs meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from memq.broker.restore.rebuild import BatchLocation, Rebuilder, find_batch
from memq.format.key import object_key
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition
from tests.brokers import run
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import object_bytes, read_entry
from tests.simulation.restore_rules import STORE, RestoreRules
from tests.unit.sealed_batches import TOPIC, batch, block, joined

BATCHES = 3
PARTITION = ReadPartition(TOPIC.name, TOPIC.id, 0)


class LiveCluster:
    """A store with one object for each batch, and the log that names them: a cluster changes both at any moment."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.log = ReadLog()
        self.findings: list[str] = []
        for number in range(BATCHES):
            self.land(number)

    def land(self, number: int) -> None:
        """Store one more batch of one record, and let its pointer land."""
        key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 4, number, 1)
        self.objects[key] = joined((batch(number), [block(number, [b"%d" % number])]))
        found = find_batch(BatchLocation(key, 0, 4, number), self.objects[key], TOPIC)
        pointer = Rebuilder(TOPIC, "c-1", STORE).pointer(found)
        assert pointer is not None
        entry = read_entry(number, 0, pointer, partial(object_bytes, self.objects))
        self.log.entries.append(entry)
        self.log.stream += self.log.reader.take(entry)

    def store(self, number: int, *blocks: bytes) -> None:
        """Store one more batch without a pointer."""
        key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 4, number, 1)
        self.objects[key] = joined((batch(number), list(blocks)))

    def lose(self, number: int) -> None:
        """Take the object of a batch from the store, though the log names it."""
        del self.objects[self.log.entries[number].pointer.locations[0].key]

    def expire(self, number: int) -> None:
        """Let retention take the pointers up to a batch, then the object of this batch."""
        self.log.leave_queue(number + 1)
        self.objects.pop(self.log.entries[number].pointer.locations[0].key, None)

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

        rules = RestoreRules("c-1", TOPIC, self.objects, {PARTITION: self.log}, self.findings.append, repeats)
        run(rules.check(SystemClock(), Draw()))
        return self.findings


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
