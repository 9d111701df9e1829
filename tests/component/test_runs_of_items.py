"""Queue items in runs at brokers: they come once and in order after a change of the owner, and the audit reads them."""

from __future__ import annotations

import pytest

from memq.audit.finding import Outcome
from memq.audit.items.report import ItemFault
from memq.client.queue.queue import AsyncQueue
from memq.format.key import is_run_key
from memq.queues.runs import keeper
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from tests.brokers import run, until
from tests.component.cluster_rig import Rig, rig
from tests.component.test_item_audit import audit, longest_log

ITEMS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs of few blocks, and read them again without a pause."""
    for name, value in {"KEEP_ITEMS": 4, "RUN_BLOCKS": 5, "AHEAD_ITEMS": 3, "BRING_ITEMS": 5}.items():
        monkeypatch.setattr(keeper, name, value)
    for name in ("PAUSE_S", "MISSING_LIST_PAUSE_S"):
        monkeypatch.setattr(confirmed_reads, name, 0.0)


def runs_of(cluster: Rig) -> list[str]:
    return [key for key in cluster.store.objects if is_run_key(key)]


async def fill(cluster: Rig, queue: AsyncQueue) -> list[str]:
    """Enqueue items one by one, until most of them are in runs."""
    ids = [await queue.enqueue("jobs", b"%d" % number) for number in range(ITEMS)]
    await until(lambda: len(runs_of(cluster)) >= ITEMS // 5 - 2)
    return ids


async def drain(queue: AsyncQueue) -> list[int]:
    """Take and ack all items."""
    found: list[int] = []
    while items := await queue.dequeue({"jobs": 7}):
        found += [int(each.payload) for each in items]
        await queue.ack_many(items)
    return found


def test_items_in_runs_come_once_and_in_order_from_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05)

    async def check() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                ids = await fill(cluster, queue)
                assert [each.ready for each in (await queue.queues("jobs")).values()] == [ITEMS]
                await queue.cancel(ids[30])
                assert (await queue.get(ids[31])).payload == b"31"
                found = [int(item.payload) for item in await queue.dequeue({"jobs": 6})]
                assert (await audit(cluster)).outcome is Outcome.CLEAN
                await until(lambda: longest_log(cluster).begin > 0)
            await broker.close()
            verdict = await audit(cluster)
            assert (verdict.outcome, verdict.states["waiting"]) == (Outcome.CLEAN, ITEMS - len(found) - 1)
            other = await cluster.start("b")
            async with AsyncQueue(other.address) as queue:
                expected = [number for number in range(ITEMS) if number != 30]
                assert found + await drain(queue) == expected
                assert (await audit(cluster)).outcome is Outcome.CLEAN
            await other.close()

    run(check())


def test_a_lost_run_is_named_by_the_audit() -> None:
    async def check() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                await fill(cluster, queue)
            await broker.close()
            last = runs_of(cluster)[-1]
            del cluster.store.objects[last]
            verdict = await audit(cluster)
            assert verdict.outcome is Outcome.LOST
            assert verdict.counts[ItemFault.MISSING] == 1
            assert last in verdict.findings[0].cause

    run(check())
