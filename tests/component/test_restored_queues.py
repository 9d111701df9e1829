"""`memq restore` of queues: from the bucket alone, as of the last snapshot and the objects after it (S9)."""

from __future__ import annotations

import pytest

from memq.broker.restore.restore import Restorer
from memq.broker.service_partitions import pop_partition
from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import LeaseLostError, NotFoundError
from memq.format.key import is_run_key
from memq.governor.memory import MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.queues.decisions import ItemOutcome
from memq.queues.runs import keeper as runs
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from tests.brokers import run, until
from tests.component.cluster_rig import Rig, rig
from tests.component.test_item_audit import longest_log


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


@pytest.mark.parametrize("saved", [False, True])
def test_items_in_runs_come_back_once(monkeypatch: pytest.MonkeyPatch, *, saved: bool) -> None:
    """With a snapshot, the restored state names the runs. Without one, the objects have all items."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05 if saved else 60.0)
    for name in ("PAUSE_S", "MISSING_LIST_PAUSE_S"):
        monkeypatch.setattr(confirmed_reads, name, 0.0)
    for name, value in {"KEEP_ITEMS": 4, "RUN_BLOCKS": 5, "AHEAD_ITEMS": 3, "BRING_ITEMS": 5}.items():
        monkeypatch.setattr(runs, name, value)

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                ids = [await queue.enqueue("jobs", b"%d" % number) for number in range(40)]
                await until(lambda: sum(map(is_run_key, cluster.store.objects)) >= 6)
                acked = 0
                while saved and acked < 7:
                    items = await queue.dequeue({"jobs": 7 - acked})
                    assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                    acked += len(items)
                if saved:
                    assert await queue.dequeue("nothing", wait=0.5) == [], "a snapshot is due meanwhile"
                    assert longest_log(cluster).begin > 0
                young = await queue.enqueue("jobs", b"40")
            former = {key for key in cluster.store.objects if is_run_key(key)}
            get, read = cluster.store.get_range, set[str]()

            async def noted(key: str, offset: int, length: int) -> bytes:
                read.add(key)
                return bytes(await get(key, offset, length))

            address = await lose_and_restore(cluster)
            monkeypatch.setattr(cluster.store, "get_range", noted)
            async with AsyncQueue(address) as queue:
                assert (await queue.queues("jobs"))["jobs"].ready == 41 - acked
                for id_, payload in ((ids[30], b"30"), (young, b"40")):
                    assert (await queue.get(id_)).payload == payload
                assert await queue.cancel(ids[31])
                found: list[int] = []
                while items := await queue.dequeue({"jobs": 7}, wait=1):
                    found += [int(each.payload) for each in items]
                    assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                if not saved:  # the order of items of the same millisecond is in the snapshot alone
                    found.sort()
                assert found == [number for number in range(acked, 41) if number != 31]
                assert bool(read & former) == saved

    run(work())


@pytest.mark.parametrize("saved", [False, True])
def test_a_pop_group_loses_no_record_in_a_restore(monkeypatch: pytest.MonkeyPatch, *, saved: bool) -> None:
    """The restored log has other offsets: the group finds its items in it, or begins again with the snapshot lost."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05 if saved else 60.0)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)
    monkeypatch.setattr(pop_partition, "LOST_PAUSE_S", 0.1)

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncAdmin(broker.address) as admin:
                await admin.create_topic("orders")
            async with AsyncProducer(broker.address, linger_ms=0) as producer:
                for number in range(10):
                    await producer.send("orders", b"%d" % number)
                    await producer.flush()
            async with AsyncQueue(broker.address) as queue:
                name = await queue.begin_pop("orders", "billing", lease=1)
                acked: list[QueueItem] = []
                while len(acked) < 4:
                    items = await queue.dequeue({name: 4 - len(acked)}, wait=10)
                    assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                    acked += items
                assert await queue.dequeue("nothing", wait=0.7) == [], "a snapshot is due meanwhile"
            async with AsyncQueue(await lose_and_restore(cluster)) as queue:
                if not saved:
                    with pytest.raises(NotFoundError):
                        await queue.dequeue(name)
                    await queue.begin_pop("orders", "billing", lease=1)
                values: set[int] = set()
                while items := await queue.dequeue({name: 20}, wait=3):
                    assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                    values |= {int(item.payload) for item in items}
                left = set(range(10)) - {int(item.payload) for item in acked}
                assert values == (left if saved else set(range(10)))

    run(work())
