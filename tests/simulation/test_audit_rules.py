"""The audit of a log is compared with one moment of it, though records land while the audit reads."""

from __future__ import annotations

import random
from collections.abc import Callable

from memq.format.pointer import encode_pointer
from memq.notification import Entries, Entry, Span
from memq.topic import ReadPartition
from tests.brokers import run
from tests.simulation.audit_rules import AuditRules
from tests.simulation.shard_answers import NoShards
from tests.simulation.stored_log import BATCHES, PARTITION, StoredLog
from tests.unit.sealed_batches import TOPIC

OTHER_PRODUCER = 2


class LandedPointers:
    """A queue with the pointers of a log but the last `hidden` ones; `meanwhile` happens after its first read."""

    def __init__(self, stored: StoredLog, meanwhile: Callable[[], None], hidden: int) -> None:
        self._stored = stored
        self._hidden = hidden
        self._meanwhile = meanwhile

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """Return all entries from an offset on."""
        left = self._stored.log.entries[offset:]
        found = Entries([Entry(each.offset, 0, encode_pointer(each.pointer)) for each in left], offset + len(left))
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        return found

    async def span(self, partition: ReadPartition) -> Span:
        """Return the present span; other partitions are empty."""
        log = self._stored.log
        return Span(log.begin, len(log.entries) - self._hidden) if partition == PARTITION else Span(0, 0)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """Return the end: no entry is so late."""
        return len(self._stored.log.entries)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """Return at once."""


def findings(stored: StoredLog, meanwhile: Callable[[], None] = lambda: None, *, hidden: int = 0) -> list[str]:
    """Audit a log, and return what differs from the truth. `meanwhile` happens when the audit has read something."""
    found: list[str] = []
    queue = LandedPointers(stored, meanwhile, hidden)
    rules = AuditRules(TOPIC, queue, stored.objects, {PARTITION: stored.log}, found.append, NoShards())
    run(rules.check(0.0, random.Random(1)))
    return found


def test_an_audit_of_a_sound_log_agrees_with_the_truth() -> None:
    assert findings(StoredLog()) == []


def test_an_audit_may_leave_out_the_first_record_of_a_producer_that_lands_meanwhile() -> None:
    stored = StoredLog()
    assert findings(stored, lambda: stored.land(BATCHES, first=0, producer=OTHER_PRODUCER)) == []


def test_an_audit_may_leave_out_a_next_record_that_lands_meanwhile() -> None:
    stored = StoredLog()
    assert findings(stored, lambda: stored.land(BATCHES)) == []


def test_an_audit_that_leaves_out_a_producer_that_was_there_before_is_a_finding() -> None:
    stored = StoredLog()
    stored.land(BATCHES, first=0, producer=OTHER_PRODUCER)
    (finding,) = findings(stored, hidden=1)
    assert finding == f"the audit does not know the producers [(0, {OTHER_PRODUCER})]"


def test_an_audit_that_leaves_out_a_record_that_was_there_before_is_a_finding() -> None:
    (finding,) = findings(StoredLog(), hidden=1)
    assert finding.endswith(f"{BATCHES - 1} records of producer {1:016x} in partition 0, {BATCHES} are there")
