"""Planted bugs: the rules of docs/ownership.md, each left out in one place of the product."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, each, instead, swap

OWNERSHIP_BUGS = (
    Planted(
        "an early takeover that does not ask the port",
        "memq.broker.failure_detector",
        "FailureDetector._is_dead",
        body("return True"),
        level="breezy",
        aspects=("refuse",),
    ),
    Planted(
        "early takeovers without a bound",
        "memq.governor.registry",
        "may_take_over",
        body("return bool(suspect.host) and not suspect.draining"),
        level="breezy",
        aspects=("refuse",),
    ),
    Planted(
        "a slow opening counts",
        "memq.broker.partition.opening",
        "_publish_opened",
        each(
            swap("asyncio.timeout(own.stale_publish_s)", "asyncio.timeout(None)"),
            swap("clock.monotonic() - handed_over_s > own.stale_publish_s", "False"),
        ),
    ),
    Planted(
        "any answered publish is a proof",
        "memq.broker.partition.ownership",
        "Ownership.follows",
        body("return offset >= self.read_to"),
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "a proof never grows old",
        "memq.broker.partition.ownership",
        "Ownership.needs_proof",
        body("return False"),
        level="breezy",
    ),
    Planted(
        "two publishes in flight",
        "memq.broker.partition.topic_processor",
        "TopicProcessor.pump",
        swap(
            "may_publish = self._publishing is None and not self._opened_is_due",
            "self._publishing, may_publish = None, not self._opened_is_due",
        ),
        level="calm",
    ),
    Planted(
        "age not refused by the queue",
        "memq.notification.memory",
        "MemoryQueue._check_age",
        body("pass"),
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "closed before the ring is empty",
        "memq.broker.partition.topic_processor",
        "TopicProcessor.drain",
        each(
            swap("self.failure is None and (len(self.ring) or self._ends or self._publishing)", "False"),
            swap("self._released = True", "pass"),
        ),
        level="breezy",
    ),
    Planted(
        "blocks of a lost epoch forwarded at once",
        "memq.broker.spool.unpublished_blocks",
        "UnpublishedBlocks.of_epoch",
        swap("own.handed_over_s + own.stale_publish_s", "own.handed_over_s"),
        level="breezy",
        aspects=("seize",),
    ),
    Planted(
        "late batches thrown away by the owner",
        "memq.broker.partition.ownership",
        "Ownership.meet",
        instead("self.join", "if pointer.epoch >= self.epoch: self.join(pointer.producers, time_ms)"),
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "a key used beyond half of the safety age",
        "memq.broker.partition.topic_processor",
        "TopicProcessor._publish_batch",
        swap("slot.put_s + key_valid_s(self.services.settings)", "slot.put_s + 1e9"),
        level="calm",
        aspects=("house",),
    ),
    Planted(
        "assignments are set whatever their version",
        "memq.governor.registry",
        "Registry.set_assignment",
        swap("assignment.version != before.version", "False"),
    ),
)
