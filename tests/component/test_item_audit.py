"""The audit of queue items on the logs and objects of a broker: clean after work, and each planted fault named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import memq
from memq.audit.finding import Outcome
from memq.audit.items.auditor import ItemAuditor
from memq.audit.items.report import ItemFault, ItemVerdict
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import OwnerRequests
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import InvalidRequestError
from memq.format.key import held_prefix, state_snapshot_key
from memq.format.state_log.entry import (
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decode_state_entry,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.notification import Entry
from memq.notification.memory import Log
from memq.queues.decisions import (
    FORMAT,
    QUEUES_MACHINE,
    AckDecision,
    EnqueueDecision,
    GrantDecision,
    LeasedItems,
    QueueDecision,
    ranges_of,
)
from memq.queues.machine import QueueMachine
from memq.queues.pop.groups import ReadPopDecision
from memq.state_log import state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, ReadPartition, is_state_topic, read_partitions
from tests.brokers import run, until
from tests.component.cluster_rig import Rig, rig


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "MISSING_LIST_PAUSE_S"):
        monkeypatch.setattr(confirmed_reads, name, 0.0)


async def audit(cluster: Rig, queue: str = "", after_ms: int = 0) -> ItemVerdict:
    logs = sorted((each for each in cluster.queue.logs if is_state_topic(each.topic)), key=lambda each: each.partition)
    now_ms = cluster.runtime.clock.wall_ms() + after_ms
    return await ItemAuditor("memq", cluster.store, cluster.queue, now_ms).audit(logs, queue)


def entries_of(log: Log) -> list[StateEntry]:
    return [decode_state_entry(each.body) for each in log.entries]


def decisions_of(entry: StateEntry) -> list[QueueDecision]:
    content = entry.content
    if not isinstance(content, StateDecisions):
        return []
    return [FORMAT.decode_decision(body) for machine, body in content.decisions if machine == QUEUES_MACHINE]


def log_of_items(cluster: Rig) -> tuple[ReadPartition, Log]:
    """Return the log of the shard that has items."""
    logs = {each: log for each, log in cluster.queue.logs.items() if is_state_topic(each.topic)}
    ((partition, log),) = ((each, log) for each, log in logs.items() if any(map(decisions_of, entries_of(log))))
    return partition, log


def plant(log: Log, *contents: StateDecisions | StateSnapshot) -> None:
    """Add entries to a log that the owner never published."""
    for content in contents:
        last = entries_of(log)[-1]
        body = encode_state_entry(StateEntry(last.epoch, last.number + 1, content))
        log.entries.append(dataclasses.replace(log.entries[-1], offset=log.end, body=body))


def entry_of(*decisions: QueueDecision) -> StateDecisions:
    return StateDecisions(tuple(StateDecision(QUEUES_MACHINE, FORMAT.encode_decision(each)) for each in decisions))


def last_ack(log: Log) -> AckDecision:
    return [each for entry in entries_of(log) for each in decisions_of(entry) if isinstance(each, AckDecision)][-1]


def without_enqueues(log: Log) -> list[Entry]:
    """Return the entries of a log without those that have an enqueue, at the next offsets."""
    kept = [
        each
        for each, entry in zip(log.entries, entries_of(log), strict=True)
        if not any(isinstance(decision, EnqueueDecision) for decision in decisions_of(entry))
    ]
    return [dataclasses.replace(each, offset=number) for number, each in enumerate(kept)]


async def name_snapshot(cluster: Rig, queues: bytes) -> None:
    """Store a snapshot with this state of queues at the end of the log, and name it in the log."""
    partition, log = log_of_items(cluster)
    last = entries_of(log)[-1]
    saved = SavedState(log.end, last.epoch, last.number + 1, {QUEUES_MACHINE: queues})
    key = state_snapshot_key("memq", partition.topic, partition.topic_id, partition.partition, last.epoch, log.end)
    plant(log, await SnapshotStore(cluster.store).put(saved, key))


def state_after(*decisions: QueueDecision) -> bytes:
    machine = QueueMachine()
    for each in decisions:
        machine.apply(FORMAT.encode_decision(each))
    return machine.snapshot()


async def work(queue: AsyncQueue) -> None:
    """Two items are acked, one is leased, one waits, one is delayed, one dead and one cancelled."""
    ids = await queue.enqueue_many("jobs", [b"%d" % number for number in range(6)], attempts_max=3)
    items = await queue.dequeue({"jobs": 4})
    await queue.ack_many(items[:2])
    await queue.nack(items[2], kind="dead")
    await queue.cancel(ids[5])
    await queue.enqueue("jobs", b"later", deliver_after=60)


@asynccontextmanager
async def worked() -> AsyncIterator[Rig]:
    """Yield a cluster whose broker has ended after some work."""
    async with rig() as cluster:
        broker = await cluster.start("a")
        async with AsyncQueue(broker.address) as queue:
            await work(queue)
        await broker.close()
        yield cluster


def named(verdict: ItemVerdict) -> list[tuple[ItemFault, int]]:
    return [(fault, verdict.counts[fault]) for fault in ItemFault if verdict.counts[fault]]


def on_a_cluster(check: Callable[[Rig], Awaitable[None]]) -> None:
    async def checked() -> None:
        async with worked() as cluster:
            assert (await audit(cluster)).outcome is Outcome.CLEAN
            await check(cluster)

    run(checked())


def test_the_account_of_a_queue_has_each_item_once() -> None:
    async def check(cluster: Rig) -> None:
        verdict = await audit(cluster, "jobs")
        assert verdict.states == {"waiting": 2, "leased": 1, "acked": 2, "dead": 1, "cancelled": 1}
        assert (verdict.findings, verdict.objects, verdict.former) == ([], 2, 0)
        assert json.loads(json.dumps(verdict.to_json()))["verdict"] == "clean"
        assert sum((await audit(cluster, "others")).states.values()) == 0

    on_a_cluster(check)


def test_an_acked_item_that_is_granted_again_is_named() -> None:
    async def check(cluster: Rig) -> None:
        _, log = log_of_items(cluster)
        acked = last_ack(log)
        items = acked.leases[0]
        plant(log, entry_of(GrantDecision(items.grant + 9, acked.now_ms + 1, (items.items,))))
        verdict = await audit(cluster)
        assert named(verdict) == [(ItemFault.AGAIN, 2)]
        assert verdict.outcome is Outcome.DOUBLED
        assert f"jobs:{items.items.block:016x}:0" in str(verdict.findings[0])

    on_a_cluster(check)


def test_a_lost_enqueue_is_named_by_the_log_and_by_its_object() -> None:
    async def check(cluster: Rig) -> None:
        _, log = log_of_items(cluster)
        log.entries = without_enqueues(log)
        verdict = await audit(cluster)
        assert verdict.outcome is Outcome.LOST
        causes = " ".join(each.cause for each in verdict.findings)
        assert "the state log lacks an entry before offset" in causes
        assert "which no enqueue in the log has" in causes
        assert "has it, and no enqueue in the log" in causes
        assert (await audit(cluster, "others")).counts[ItemFault.FAULT], "a gap of the log is a fault of all its queues"

    on_a_cluster(check)


def test_a_missing_and_a_damaged_object_are_named() -> None:
    async def check(cluster: Rig) -> None:
        first, second = (key for key in cluster.store.objects if key.startswith(held_prefix("memq")))
        body = bytearray(cluster.store.objects[first])
        body[90] ^= 1
        cluster.store.objects[first] = bytes(body)
        assert [fault for fault, _ in named(await audit(cluster))] == [ItemFault.CORRUPT]
        del cluster.store.objects[second]
        verdict = await audit(cluster)
        assert [fault for fault, _ in named(verdict)] == [ItemFault.MISSING, ItemFault.CORRUPT]
        assert verdict.outcome is Outcome.LOST
        assert any(f"the store has no object '{second}'" in each.cause for each in verdict.findings)

    on_a_cluster(check)


def test_an_object_that_no_decision_names_is_an_enqueue_without_an_answer() -> None:
    async def check(cluster: Rig) -> None:
        _, log = log_of_items(cluster)
        log.entries = log.entries[:1]  # the begin of its epoch
        verdict = await audit(cluster, after_ms=120_000)
        assert named(verdict) == [(ItemFault.UNNAMED, 7)]
        assert verdict.passed
        assert (await audit(cluster)).outcome is Outcome.CLEAN, "the decision may be on its way"

    on_a_cluster(check)


def test_a_snapshot_without_the_last_acks_is_named() -> None:
    async def check(cluster: Rig) -> None:
        _, log = log_of_items(cluster)
        decisions = [each for entry in entries_of(log) for each in decisions_of(entry)]
        await name_snapshot(cluster, state_after(*decisions))
        verdict = await audit(cluster)
        assert (verdict.outcome, verdict.snapshots) == (Outcome.CLEAN, 1)
        await name_snapshot(cluster, state_after(*(each for each in decisions if not isinstance(each, AckDecision))))
        verdict = await audit(cluster)
        assert named(verdict) == [(ItemFault.AGAIN, 2)]
        assert "the log as acked" in verdict.findings[0].cause

    on_a_cluster(check)


def test_an_ack_for_a_former_lease_that_counted_is_named() -> None:
    async def check(cluster: Rig) -> None:
        _, log = log_of_items(cluster)
        acked = last_ack(log)
        grant, item = acked.leases[0].grant, ranges_of(acked.leases[0].items.block, [3])
        again = GrantDecision(grant + 9, acked.now_ms, (item,))
        plant(log, entry_of(again, AckDecision(acked.now_ms, (LeasedItems(item, grant),))))
        assert (await audit(cluster)).outcome is Outcome.CLEAN, "the ack did not count"
        decisions = [each for entry in entries_of(log) for each in decisions_of(entry)]
        counted = AckDecision(acked.now_ms, (LeasedItems(item, grant + 9),))
        await name_snapshot(cluster, state_after(*decisions, counted))
        verdict = await audit(cluster)
        assert named(verdict) == [(ItemFault.FORMER, 1)]
        assert verdict.outcome is Outcome.DAMAGED
        assert f"an ack named grant {grant}" in verdict.findings[0].cause

    on_a_cluster(check)


def test_a_log_that_begins_with_a_snapshot_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05)

    async def checked() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                await work(queue)
                await until(lambda: longest_log(cluster).begin > 0)
                item = (await queue.dequeue("jobs"))[0]
                await queue.ack(item)
            await broker.close()
            verdict = await audit(cluster)
            assert (verdict.outcome, verdict.findings) == (Outcome.CLEAN, [])
            assert verdict.states == {"waiting": 1, "leased": 1, "acked": 3, "dead": 1, "cancelled": 1}
            names = [key for key in cluster.store.objects if "/state/" in key]
            for key in names:
                del cluster.store.objects[key]
            verdict = await audit(cluster)
            assert (verdict.outcome, verdict.states) == (Outcome.INCOMPLETE, {}), verdict.findings
            assert "no snapshot has the state before it" in " ".join(map(str, verdict.findings))

    run(checked())


def longest_log(cluster: Rig) -> Log:
    """Return the state log with the most entries, also before its begin: that of the items."""
    logs = [log for each, log in cluster.queue.logs.items() if is_state_topic(each.topic)]
    return max(logs, key=lambda log: log.end)


def test_records_of_a_pop_group_are_items_of_the_audit() -> None:
    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with memq.aio.Producer(broker.address, audit=False) as producer:
                for number in range(6):
                    await (await producer.send("orders", b"%d" % number))
            async with AsyncQueue(broker.address) as queue:
                name = await queue.begin_pop("orders", "billing", lease=60)
                items: list[QueueItem] = []
                while len(items) < 3:
                    items += await queue.dequeue({name: 3 - len(items)}, wait=10)
                await queue.ack(items[0])
                await queue.nack(items[1], kind="dead")
                await until(lambda: len(queued(cluster)) == 6)
            await broker.close()
            found = await audit(cluster, name)
            assert (found.outcome, found.findings) == (Outcome.CLEAN, [])
            assert (found.states["acked"], found.states["leased"], found.states["dead"]) == (1, 1, 1)

    run(work())


def queued(cluster: Rig) -> list[int]:
    """Return the sequences of the records that a pop group has read."""
    _, log = log_of_items(cluster)
    reads = [each for entry in entries_of(log) for each in decisions_of(entry) if isinstance(each, ReadPopDecision)]
    blocks = [block for each in reads for lane in each.lanes for block in lane.blocks]
    return [number for block in blocks for number in range(block.id.first, block.next)]


def test_the_owner_of_a_state_log_opens_no_partition_of_records_there() -> None:
    """Its pointers would be damaged entries of the state log."""

    async def checked() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                await work(queue)
            pool = LinkPool(cluster.runtime, bootstrap_addresses(broker.address))
            metadata = ClusterMetadata(cluster.runtime, pool)
            try:
                topic = (await metadata.topic(STATE_TOPIC, timeout_s=10)).topic
                owners = OwnerRequests(cluster.runtime, pool, metadata, 10)
                with pytest.raises(InvalidRequestError, match="has state logs, which take no records"):
                    await owners.spans(read_partitions(topic)[0], [0])
            finally:
                await metadata.close()
                await pool.close()
            assert (await audit(cluster)).findings == []

    run(checked())
