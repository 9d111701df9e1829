"""Items as their owner sees them at each moment."""

from __future__ import annotations

from memq.queues.decisions import AckDecision, ItemTerms, NackDecision
from memq.queues.views import SeenItem, dead_after, view_of
from tests.unit.queue_shard import Shard


def view(shard: Shard, number: int = 0) -> SeenItem:
    found = view_of(shard.machine, shard.scheduler, (1, number), shard.now)
    assert found is not None
    return found


def test_an_item_is_shown_in_each_of_its_states() -> None:
    shard = Shard()
    shard.enqueue(1, count=2, terms=ItemTerms(3, 4_000, 3, 90_000, "k"), after_ms=1_000)
    assert view(shard) == SeenItem((1, 0), "delayed", 0, b"", 11_000, 0, 3, 90_000, "k")
    shard.wait(1)
    assert view(shard).state == "ready"
    shard.dequeue(1)
    shard.wait(3.5)
    assert (view(shard).state, view(shard).attempts, view(shard).left_ms) == ("leased", 1, 500)
    assert view(shard, 1).state == "ready"
    shard.wait(0.5)
    assert (view(shard).state, view(shard).left_ms) == ("ready", 0), "its lease is over"
    shard.dequeue(2)
    shard.change(NackDecision(shard.now.wall_ms, b"note", shard.lease(1)))
    shard.dequeue(1)
    shard.change(NackDecision(shard.now.wall_ms, b"", shard.lease(1)))
    assert (view(shard).state, view(shard).attempts, view(shard).note) == ("dead", 3, b"note")
    assert list(dead_after(shard.machine, "jobs", (0, -1))) == [(1, 0)]
    assert list(dead_after(shard.machine, "jobs", (1, 0))) == []
    shard.change(AckDecision(0, shard.lease(1, 1)))
    assert view(shard, 1).state == "acked"
    assert view_of(shard.machine, shard.scheduler, (1, 2), shard.now) is None
    assert view_of(shard.machine, shard.scheduler, (2, 0), shard.now) is None


def test_of_an_item_that_has_ended_with_its_block_the_state_is_known() -> None:
    shard = Shard()
    shard.enqueue(1)
    shard.dequeue()
    shard.change(AckDecision(0, shard.lease(1)))
    assert view(shard) == SeenItem((1, 0), "acked")
