"""Planted bugs: the rules of docs/ownership.md, each left out in one place of the product."""

from __future__ import annotations

from tests.simulation.bug import Planted

OWNERSHIP_BUGS = (
    Planted(
        "a slow opening counts",
        "memq.broker.partition.opening",
        "_publish_opened",
        "async with asyncio.timeout(own.stale_publish_s):\n"
        "        offset = await services.queue.publish(publication)\n"
        "    if clock.monotonic() - handed_over_s > own.stale_publish_s:",
        "async with asyncio.timeout(None):\n        offset = await services.queue.publish(publication)\n    if False:",
    ),
    Planted(
        "any answered publish is a proof",
        "memq.broker.partition.ownership",
        "Ownership.follows",
        "return offset == self.read_to",
        "return offset >= self.read_to",
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "a proof never grows old",
        "memq.broker.partition.ownership",
        "Ownership.needs_proof",
        "return now_s - self.proof_s > self.stale_publish_s / 3",
        "return False",
        level="breezy",
    ),
    Planted(
        "two publishes in flight",
        "memq.broker.partition.topic_processor",
        "TopicProcessor.pump",
        "may_publish = self._publishing is None and not self._restate",
        "self._publishing, may_publish = None, not self._restate",
        level="calm",
    ),
    Planted(
        "age not refused by the queue",
        "memq.notification.memory",
        "MemoryQueue._check_age",
        "if not -AHEAD_MS_MAX <= age_ms <= stale_publish_ms:",
        "if False:",
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "closed before the ring is empty",
        "memq.broker.partition.topic_processor",
        "TopicProcessor.drain",
        "while self.failure is None and (len(self.ring) or self._ends or self._publishing):\n"
        "            self.changed.clear()\n"
        "            await self.changed.wait()\n"
        "        if self.own is not None and self.failure is None:\n"
        "            self._released = True",
        "if self.own is not None and self.failure is None:",
        level="breezy",
    ),
    Planted(
        "blocks of a lost epoch forwarded at once",
        "memq.broker.spool.unpublished_blocks",
        "UnpublishedBlocks.of_epoch",
        "own.handed_over_s + own.stale_publish_s",
        "own.handed_over_s",
        level="breezy",
        aspects=("seize",),
    ),
    Planted(
        "late batches thrown away by the owner",
        "memq.broker.partition.ownership",
        "Ownership.meet",
        'if pointer.kind == "data":\n        self.join',
        'if pointer.kind == "data" and pointer.epoch >= self.epoch:\n        self.join',
        level="sleepy",
        quick_failover=True,
    ),
    Planted(
        "a key used beyond half of the safety age",
        "memq.broker.partition.topic_processor",
        "TopicProcessor._publish_batch",
        "slot.put_s + key_s(self.services.settings)",
        "slot.put_s + 1e9",
        level="calm",
        aspects=("house",),
    ),
    Planted(
        "assignments are set whatever their version",
        "memq.governor.registry",
        "Registry.set_assignment",
        "if assignment.version != before.version:",
        "if False:",
    ),
)
