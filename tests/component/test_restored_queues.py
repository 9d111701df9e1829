"""`memq restore` of queues: from the bucket alone, as of the last snapshot and the objects after it (S9)."""

from __future__ import annotations

import pytest

from memq.broker.restore.restore import Restorer
from memq.client.queue.queue import AsyncQueue
from memq.errors import LeaseLostError
from memq.governor.memory import MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.queues.decisions import ItemOutcome
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig


async def lose_and_restore(cluster: Rig) -> str:
    """Stop the broker, lose the queue, restore, and start a new broker; return its address."""
    await cluster.brokers[0].close()
    cluster.queue = MemoryQueue(cluster.runtime.clock)
    parts = ("memq", "main", cluster.store, cluster.queue, cluster.runtime.clock)
    found = await Restorer(*parts).restore_all(MemoryCoordinator(cluster.shared))
    assert not any(each.findings for each in found)
    return (await cluster.start("b")).address


@pytest.mark.parametrize("saved", [False, True])
def test_items_come_back_from_the_bucket_alone(monkeypatch: pytest.MonkeyPatch, *, saved: bool) -> None:
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05 if saved else 60.0)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                await queue.enqueue_many("jobs", [b"%d" % number for number in range(10)], priority=3, lease=1)
                await queue.enqueue("jobs", b"later", deliver_after=60)
                acked = await queue.dequeue({"jobs": 4})
                assert await queue.ack_many(acked) == [ItemOutcome.ACKED] * 4
                (held,) = await queue.dequeue("jobs")
                assert await queue.dequeue("nothing", wait=0.5) == [], "a snapshot is due meanwhile"
            async with AsyncQueue(await lose_and_restore(cluster)) as queue:
                items = await queue.dequeue({"jobs": 20}, wait=5)
                while more := await queue.dequeue({"jobs": 20}, wait=1.5):
                    assert all(item.attempt == 2 for item in more) or not saved
                    items += more
                    await queue.ack_many(more)
                values = sorted({int(item.payload) for item in items})
                assert values == list(range(4 if saved else 0, 10)), "acks younger than the snapshot are lost"
                with pytest.raises(LeaseLostError):  # its number was not given again
                    await queue.ack(held)
                counts = (await queue.queues())["jobs"]
                assert counts.delayed == 1

    run(work())
