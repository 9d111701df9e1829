"""Passes of a broker's sweep on parts in memory: deletions, counts and log lines."""

from __future__ import annotations

import pytest

from memq.broker.sweep.broker_sweep import NAMED_MAX, sweep
from memq.errors import QueueError
from memq.format.key import object_key
from memq.topic import read_partitions
from tests.unit.bare_cluster import CLUSTER, indexed
from tests.unit.test_retention_rounds import HOUR_MS, Keeper, keep

ORPHANS = NAMED_MAX + 5


async def with_orphans(keeper: Keeper) -> None:
    """Store uploads that were repeated under another key: the log accounts for their batch."""
    await keeper.write(0)
    for number in range(ORPHANS):
        key = object_key(CLUSTER, "clicks", keeper.clicks.id, 0, 1, 0, keeper.now_ms - (1 + number) * HOUR_MS)
        await keeper.put(key, b"12345")
    keeper.clock.advance(2 * HOUR_MS)


def test_a_pass_says_what_waits_and_a_later_one_what_went() -> None:
    async def work(keeper: Keeper) -> None:
        await with_orphans(keeper)
        found = await sweep(keeper.services, HOUR_MS)
        assert found == (0, 0, ORPHANS, 5 * ORPHANS, 0)
        swept, counters = keeper.services.swept, keeper.counters
        assert (swept.pending_objects, swept.pending_bytes) == (ORPHANS, 5 * ORPHANS)
        assert (counters.unnamed_objects, counters.swept_objects) == (ORPHANS, 0)
        [(event, text)] = keeper.events.take()
        assert event == "sweep-pending"
        assert text.startswith(f"{ORPHANS} objects of {5 * ORPHANS} bytes wait")
        assert text.count("(no pointer names it)") == NAMED_MAX
        confirm_ms = keeper.services.settings.sweep_confirm_ms
        keeper.clock.advance(confirm_ms - 1)
        assert await sweep(keeper.services, HOUR_MS) == (0, 0, ORPHANS, 5 * ORPHANS, 0)
        assert (keeper.events.take(), counters.unnamed_objects) == ([], ORPHANS), "they are not new any more"
        keeper.clock.advance(1)
        assert await sweep(keeper.services, HOUR_MS) == (ORPHANS, 5 * ORPHANS, 0, 0, 0)
        assert keeper.events.take() == [("swept", f"{ORPHANS} unnamed objects, {5 * ORPHANS} bytes")]
        assert (counters.swept_objects, counters.swept_bytes) == (ORPHANS, 5 * ORPHANS)
        assert (swept.pending_objects, swept.pending_bytes) == (0, 0)
        assert await sweep(keeper.services, HOUR_MS) == (0, 0, 0, 0, 0)
        assert keeper.events.take() == []

    keep(work)


async def deleted_without_its_logs(keeper: Keeper) -> None:
    """As when a broker died between the coordinator's deletion and the queue's."""
    await keeper.write(0)
    keeper.topics.known.remove(keeper.clicks)
    keeper.topics.gone.add(keeper.clicks.id)
    keeper.clock.advance(2 * HOUR_MS)
    for key in list(keeper.store.objects):
        await keeper.store.delete(key)
    await keeper.put(object_key(CLUSTER, "clicks", keeper.clicks.id, 0, 1, 0, 1), indexed(keeper.clicks, 0))
    keeper.clock.advance(2 * HOUR_MS)


def test_the_logs_of_a_deleted_topic_go_with_a_pass_that_is_late_enough() -> None:
    async def work(keeper: Keeper) -> None:
        await deleted_without_its_logs(keeper)
        confirm_ms = keeper.services.settings.sweep_confirm_ms
        for later_ms, left in ((0, 2), (confirm_ms - 1, 2), (1, 0)):
            keeper.clock.advance(later_ms)
            await sweep(keeper.services, HOUR_MS)
            assert len(keeper.queue.logs) == left
        assert ("logs-dropped", f"topic 'clicks' with id {keeper.clicks.id} was deleted") in keeper.events.take()

    keep(work, lambda: Keeper(partitions=2))


def test_no_log_is_dropped_while_one_of_them_does_not_answer() -> None:
    async def work(keeper: Keeper) -> None:
        await deleted_without_its_logs(keeper)
        await sweep(keeper.services, HOUR_MS)
        keeper.clock.advance(keeper.services.settings.sweep_confirm_ms)
        keeper.queue.sick = frozenset(read_partitions(keeper.clicks)[1:])
        with pytest.raises(QueueError):
            await sweep(keeper.services, HOUR_MS)
        assert len(keeper.queue.logs) == 2
        keeper.queue.sick = frozenset()
        await sweep(keeper.services, HOUR_MS)
        assert keeper.queue.logs == {}

    keep(work, lambda: Keeper(partitions=2))
