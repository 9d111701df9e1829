"""Leased queues in a cluster of brokers: each item has one worker at a time, and an answered ack is final."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

import memq
from memq.broker.broker import Broker
from memq.broker.service_partitions import hosts
from memq.client.queue.items import ItemLease, QueueItem, wire_leases
from memq.client.queue.queue import AsyncQueue
from memq.errors import (
    AlreadyAckedError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    ItemEndedError,
    LeaseLostError,
    MovedError,
    NotFoundError,
    QueueFullError,
    TooLargeError,
    UnreachableError,
)
from memq.format.key import held_prefix
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import connect_link
from memq.protocol.queue_messages import (
    AckItems,
    DequeueItems,
    EnqueueItems,
    NackItems,
    WireLeasedItems,
    WireQueueBlock,
)
from memq.queues import keeper, scheduler, snapshots
from memq.queues.decisions import ItemOutcome
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import ItemScheduler, Moment
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig

CLOCK = SystemClock()


@asynccontextmanager
async def queueing(count: int = 3, **settings: Any) -> AsyncIterator[tuple[Rig, list[Broker], AsyncQueue]]:
    """Yield a cluster, and a client of all its brokers."""
    async with rig() as cluster:
        brokers = [await cluster.start(name, **settings) for name in "abc"[:count]]
        for broker in brokers:
            await broker.partitions.refresh()
        async with AsyncQueue([broker.address for broker in brokers]) as queue:
            yield cluster, brokers, queue


def owner_of(cluster: Rig, queue: str) -> str:
    """Return the id of the broker that has the shard of a queue."""
    (topic,) = (each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
    return cluster.owner(topic, zlib.crc32(queue.encode()) % len(topic.partitions)).broker


def payloads(items: list[QueueItem]) -> list[bytes]:
    return [item.payload for item in items]


def test_an_item_is_held_by_one_worker_and_an_ack_is_final() -> None:
    async def work() -> None:
        async with queueing() as (_, brokers, queue), AsyncQueue(brokers[1].address) as other:
            id_ = await queue.enqueue("jobs", b"one", metadata={"kind": b"email"})
            (item,) = await other.dequeue("jobs")
            assert (item.id, item.queue, item.payload, item.attempt, item.note) == (id_, "jobs", b"one", 1, b"")
            assert item.metadata == (("kind", b"email"),)
            assert 50 < item.until_s - CLOCK.monotonic() <= 60
            assert await queue.dequeue("jobs") == []
            counts = (await queue.queues())["jobs"]
            assert (counts.ready, counts.leased, counts.delayed, counts.dead) == (0, 1, 0, 0)
            await other.ack(item)
            with pytest.raises(AlreadyAckedError):
                await queue.ack(item)
            assert await other.dequeue("jobs") == []
            assert await queue.queues() == {}, "a queue goes with its last item"

    run(work())


def test_items_of_many_queues_come_by_priority_and_in_batches() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            names = [f"queue-{number}" for number in range(12)]
            for name in names:
                await queue.enqueue_many(name, [b"%d" % number for number in range(3)])
                await queue.enqueue(name, b"first", priority=0)
            items = await queue.dequeue(dict.fromkeys(names, 3))
            by_queue = {name: [each.payload for each in items if each.queue == name] for name in names}
            assert by_queue == {name: [b"first", b"0", b"1"] for name in names}
            assert set((await queue.queues()).keys()) == set(names)
            assert await queue.ack_many(items) == [ItemOutcome.ACKED] * 36
            assert await queue.ack_many(items[:2]) == [ItemOutcome.ALREADY_ACKED] * 2
            rest = await queue.dequeue(dict.fromkeys(names, 1_024 // 12))
            assert payloads(rest) == [b"2"] * 12

    run(work())


def test_many_items_go_into_few_blocks_and_one_object() -> None:
    async def work() -> None:
        async with queueing(1) as (cluster, _brokers, queue):
            sent = [b"%04d" % number * 25 for number in range(2_000)]
            ids = await queue.enqueue_many("jobs", sent)
            assert len(set(ids)) == 2_000
            assert len({each.rpartition(":")[0] for each in ids}) < 10
            objects = [each async for each in cluster.store.list(held_prefix("memq"))]
            assert len(objects) == 1
            found: list[bytes] = []
            while items := await queue.dequeue({"jobs": 500}):
                found += payloads(items)
                await queue.ack_many(items)
            assert found == sent

    run(work())


def test_single_calls_at_the_same_time_share_blocks_and_each_gets_its_own_answer() -> None:
    async def work() -> None:
        async with queueing(1) as (_, _, queue):
            names = [b"%d" % number for number in range(200)]
            ids = await asyncio.gather(
                *(queue.enqueue("mails", name, priority=number % 2) for number, name in enumerate(names))
            )
            assert len(set(ids)) == len(ids)
            assert len({each.split(":")[1] for each in ids}) <= 8, "items with the same terms share a block"
            items = await queue.dequeue({"mails": 200}, wait=5)
            assert {item.id: item.payload for item in items} == dict(zip(ids, names, strict=True))
            await queue.nack(items[0])
            results = await asyncio.gather(*(queue.ack(item) for item in items), return_exceptions=True)
            assert isinstance(results[0], LeaseLostError), "the other acks of its request count"
            assert results[1:] == [None] * 199
            assert [each.id for each in await queue.dequeue("mails", wait=5)] == [items[0].id]

    asyncio.run(work())


def test_a_worker_that_has_a_block_gets_no_bytes_of_it_from_any_broker() -> None:
    async def work() -> None:
        async with queueing() as (_, brokers, queue):
            sent = [b"item %d" % number for number in range(9)]
            ids = await queue.enqueue_many("jobs", sent)
            assert payloads(await queue.dequeue("jobs")) == sent[:1]
            (block_id,) = {each.split(":")[1] for each in ids}
            for broker in brokers:  # two of them forward the request
                link = await connect_link(Runtime(), None, parse_address(broker.address))
                ask = DequeueItems(queues={"jobs": 1}, wait_ms=0, known=[block_id])
                for known in (True, False):
                    asked = ask if known else replace(ask, known=[])
                    answer, blocks = await link.request_with_blocks(Api.ADMIN, AdminRequest(ask=asked), AdminAnswer)
                    (grant,) = answer.about_queues.grants
                    assert (grant.block_id, grant.length, len(blocks) > 0) == (block_id, len(blocks), not known)
                link.close()
            assert payloads(await queue.dequeue({"jobs": 5})) == sent[7:]

    run(work())


def test_large_items_of_many_shards_come_in_several_answers_and_each_queue_has_a_turn() -> None:
    async def work() -> None:
        async with queueing() as (_, _, queue):
            names, large = [f"jobs-{number}" for number in range(6)], random.Random(1).randbytes(480 * 1024)
            for name in names:
                for _ in range(4):
                    await queue.enqueue(name, large, lease=60)
            seen = list[list[str]]()
            while items := await queue.dequeue(dict.fromkeys(names, 4)):
                seen.append([item.queue for item in items])
                assert all(item.attempt == 1 and item.payload == large for item in items)
            assert sorted(name for some in seen for name in some) == sorted(names * 4)
            assert len(set(seen[0] + seen[1])) > len(set(seen[0]))

    run(work())


def test_an_item_comes_again_after_a_nack_or_the_end_of_its_lease() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            await queue.enqueue("jobs", b"one", lease=2)
            (first,) = await queue.dequeue("jobs")
            began_s = CLOCK.monotonic()
            assert await queue.nack(first, after=0.3, metadata=b"half") is ItemOutcome.RETURNED
            (second,) = await queue.dequeue("jobs", wait=10)
            assert CLOCK.monotonic() - began_s >= 0.29
            assert (second.attempt, second.note) == (2, b"half")
            with pytest.raises(LeaseLostError):
                await queue.ack(first)
            await queue.extend(second, 5)
            assert await queue.dequeue("jobs", wait=2.5) == []
            (third,) = await queue.dequeue("jobs", wait=10)
            assert CLOCK.monotonic() >= second.until_s, "no item is held by two"
            assert third.attempt == 3
            for late in (queue.ack(second), queue.nack(second), queue.extend(second, 5)):
                with pytest.raises(LeaseLostError):
                    await late
            await queue.ack(third)

    run(work())


def test_a_dequeue_waits_at_all_brokers_and_the_lease_counts_from_the_grant() -> None:
    async def work() -> None:
        async with queueing() as (cluster, brokers, queue), AsyncQueue(brokers[0].address) as one:
            await queue.ack((await _one_item(queue, "warm"))[0])
            names = [f"queue-{number}" for number in range(20)]
            assert len({owner_of(cluster, name) for name in names}) > 1
            for name in (
                names[0],
                next(each for each in names if owner_of(cluster, each) != owner_of(cluster, names[0])),
            ):
                waiting = asyncio.get_running_loop().create_task(one.dequeue(dict.fromkeys(names, 1), wait=20))
                assert await queue.dequeue("nothing", wait=2.5) == []
                assert not waiting.done()
                await queue.enqueue(name, b"x", lease=2)
                (item,) = await waiting
                assert 0.3 < item.until_s - CLOCK.monotonic() <= 2.0, "the time of the wait is no part of the lease"
                await one.ack(item)

    run(work())


async def _one_item(queue: AsyncQueue, name: str) -> list[QueueItem]:
    await queue.enqueue(name, b"x")
    return await queue.dequeue(name, wait=5)


def test_lives_attempts_delays_and_at_most_once() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            await queue.enqueue("short", b"x", ttl=0.2)
            await queue.enqueue("once", b"x", at_most_once=True)
            dead = await queue.enqueue("dead", b"x", attempts_max=1)
            later = await queue.enqueue("later", b"x", deliver_after=30)
            (item,) = await queue.dequeue("once")
            with pytest.raises(AlreadyAckedError):
                await queue.ack(item)
            (item,) = await queue.dequeue("dead")
            assert await queue.nack(item) is ItemOutcome.DEAD
            with pytest.raises(ItemEndedError):
                await queue.ack(item)
            assert await queue.dequeue("nothing", wait=0.5) == []
            assert await queue.dequeue({"short": 1, "once": 1, "dead": 1, "later": 1}) == []
            found = await queue.queues()
            assert {name: (each.delayed, each.dead) for name, each in found.items()} == {
                "dead": (0, 1),
                "later": (1, 0),
            }
            assert await queue.cancel(later) is ItemOutcome.CANCELLED
            assert await queue.cancel(later) is ItemOutcome.CANCELLED
            assert await queue.cancel(dead) is ItemOutcome.CANCELLED
            assert await queue.cancel(f"{later[:-2]}:7") is ItemOutcome.UNKNOWN
            assert await queue.queues() == {}

    run(work())


@pytest.mark.parametrize("everything", [False, True])
def test_acks_and_leases_survive_their_owner_and_the_whole_cluster(
    monkeypatch: pytest.MonkeyPatch, *, everything: bool
) -> None:
    """No acked item comes again, and none is held by two; the rest comes within one lease."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.5)  # so that some state comes from a snapshot
    monkeypatch.setattr(snapshots, "SLICE_BLOCKS", 1)  # other work runs after each block
    monkeypatch.setattr(scheduler, "SLICE_BLOCKS", 1)

    async def work() -> None:
        async with queueing() as (cluster, brokers, queue):
            sent = [b"%d" % number for number in range(60)]
            for number in range(0, 60, 10):
                await queue.enqueue_many("jobs", sent[number : number + 10], lease=2)
            acked = await queue.dequeue({"jobs": 20})
            assert await queue.ack_many(acked) == [ItemOutcome.ACKED] * 20
            assert await queue.dequeue("nothing", wait=0.7) == [], "a snapshot is due meanwhile"
            more = await queue.dequeue({"jobs": 10})
            assert await queue.ack_many(more) == [ItemOutcome.ACKED] * 10
            held = await queue.dequeue({"jobs": 10})
            owner = owner_of(cluster, "jobs")
            gone = brokers if everything else [each for each in brokers if each.services.settings.broker_id == owner]
            for broker in gone:
                await broker.close()
            left = [broker for broker in brokers if broker not in gone]
            left += [await cluster.start(f"new-{number}") for number in range(len(gone))]
            async with AsyncQueue([broker.address for broker in left]) as again:
                assert await again.ack_many(acked[:2]) == [ItemOutcome.ALREADY_ACKED] * 2
                await again.ack(held[0])
                seen: dict[bytes, float] = {}
                while len(seen) < 29:
                    items = await again.dequeue({"jobs": 7}, wait=10)
                    seen |= {item.payload: CLOCK.monotonic() for item in items}
                    assert await again.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                assert await again.dequeue({"jobs": 7}, wait=3) == []
            assert sorted([*payloads(acked), *payloads(more), held[0].payload, *seen], key=int) == sent
            assert all(seen[item.payload] >= item.until_s for item in held[1:]), "an item was held by two workers"

    run(work())


def test_a_log_that_ends_while_its_items_are_taken_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slices, errors = ItemScheduler.in_slices, [MovedError("the log has another owner")]

    def ended(machine: QueueMachine, now: Moment) -> Iterator[ItemScheduler | None]:
        yield None
        if errors:
            raise errors.pop()
        yield from in_slices(machine, now)

    monkeypatch.setattr(ItemScheduler, "in_slices", ended)

    async def work() -> None:
        async with queueing(1) as (_, _, queue):
            await queue.enqueue("jobs", b"1")
            assert payloads(await queue.dequeue("jobs")) == [b"1"]
            assert not errors

    run(work())


def test_payloads_are_read_from_the_store_and_lost_ones_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_reads, "MISSING_CONFIRMED_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "MISSING_LIST_PAUSE_S", 0.0)
    monkeypatch.setattr(hosts, "PAYLOADS_SHARE", 1 << 60)  # none is kept

    async def work() -> None:
        async with queueing(1) as (cluster, _brokers, queue):
            await queue.enqueue("jobs", b"one")
            (item,) = await queue.dequeue("jobs")
            assert item.payload == b"one"
            await queue.enqueue("lost", b"two")
            for entry in [each async for each in cluster.store.list(held_prefix("memq"))]:
                await cluster.store.delete(entry.key)
            assert await queue.dequeue("lost", wait=2) == []
            assert (await queue.queues())["lost"].dead == 1

    run(work())


def test_a_change_that_no_broker_was_asked_for_is_not_unknown() -> None:
    async def work() -> None:
        async with queueing(1) as (_, brokers, _):
            short = AsyncQueue(brokers[0].address, timeout_ms=600, connect_timeout_ms=100)
            async with short:
                assert await short.dequeue("jobs") == []
                await brokers[0].close()
                began_s = CLOCK.monotonic()
                with pytest.raises(UnreachableError, match="Connection refused"):
                    await short.enqueue("jobs", b"x")
                assert 0.5 < CLOCK.monotonic() - began_s < 5, "brokers that were met may restart"

    run(work())


def test_bad_input_gets_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with queueing(1) as (_, brokers, queue):
            wrong: list[tuple[Any, type[Exception], str]] = [
                (queue.enqueue("jobs", b"x", priority=10), InvalidSettingError, "priority = 10 is outside 0 to 9"),
                (queue.enqueue("jobs", b"x", lease=0.5), InvalidSettingError, "lease = 0.5 s is outside 1 s"),
                (queue.enqueue("jobs", b"x", lease=50_000), InvalidSettingError, "lease = 50000 s is outside"),
                (queue.enqueue("a/b/c", b"x"), InvalidNameError, "queue name"),
                (queue.enqueue("jobs", b"x" * 600_000), TooLargeError, "item of 600000 bytes"),
                (queue.enqueue("jobs", b"x", metadata={"a": b"x" * 20_000}), TooLargeError, "metadata of 20001 bytes"),
                (queue.enqueue("jobs", 7), TypeError, "payload must be"),  # type: ignore[arg-type]
                (queue.enqueue_many("jobs", "abc"), TypeError, "payloads must be a list of payloads, not str"),
                (queue.enqueue_many("jobs", None), TypeError, "a list of payloads, not NoneType"),  # type: ignore[arg-type]
                (queue.dequeue(["jobs"]), TypeError, "queues must be the name of one, or {name"),  # type: ignore[arg-type]
                (queue.ack_many(7), TypeError, "items must be a list of memq.QueueItem"),  # type: ignore[arg-type]
                (queue.cancel_many("jobs:1:0"), TypeError, "ids must be a list of ids, not str"),
                (queue.cancel(f"jobs:{'0' * 16}:0"), InvalidRequestError, "no id of a queue item"),
                (queue.dequeue({}), InvalidRequestError, "0 queues"),
                (queue.dequeue({"jobs": 0}), InvalidSettingError, "items of queue 'jobs' = 0"),
                (queue.cancel("nonsense"), InvalidRequestError, "no id of a queue item"),
                (queue.ack(None), TypeError, "item must be a memq.QueueItem"),  # type: ignore[arg-type]
            ]
            for work_, kind, text in wrong:
                with pytest.raises(kind, match=text):
                    await work_
            (item,) = await _one_item(queue, "jobs")
            with pytest.raises(TooLargeError, match="metadata of 2000 bytes"):
                await queue.nack(item, metadata=b"x" * 2_000)
            with pytest.raises(InvalidSettingError, match="after = -1"):
                await queue.nack(item, after=-1)
            item.lease = item.lease._replace(grant=item.lease.grant + 1)
            with pytest.raises(LeaseLostError):
                await queue.ack(item)
            item.lease = ItemLease("0" * 15 + "1", 0, 1)
            with pytest.raises(NotFoundError, match="no queue knows item"):
                await queue.ack(item)
            leases = wire_leases([item.lease])
            link = await connect_link(Runtime(), None, parse_address(brokers[0].address))
            block = WireQueueBlock(length=0, priority=11, after_ms=0, life_ms=0, lease_ms=1_000, attempts_max=0)
            for ask, text in (
                (EnqueueItems(queue="jobs", blocks=[block]), "priority is 11"),
                (EnqueueItems(queue="jobs", blocks=[replace(block, length=1)]), "0 bytes of blocks follow"),
                (DequeueItems(queues={"jobs": 1}, wait_ms=0, known=["1" * 16] * 33), "33 known blocks"),
                (NackItems(queue="jobs", items=leases, after_ms=0, note=b"x" * 2_000), "metadata of 2000"),
                (NackItems(queue="jobs", items=leases, after_ms=-1, note=b""), "delay is -1 ms"),
                (AckItems(queue="jobs", items=[WireLeasedItems("1" * 16, 1, [0])]), "items .0. of a block"),
                (AckItems(queue="jobs", items=[WireLeasedItems("1" * 16, 1, [0, 2, 1, 3])]), "are not possible"),
                (AckItems(queue="jobs", items=[WireLeasedItems("1" * 16, 1, [0, 1_025])]), "1025 items in one"),
                (
                    AckItems(queue="jobs", items=[WireLeasedItems("1" * 16, 1, [1_048_576, 1_048_577])]),
                    "are not possible",
                ),
                (AckItems(queue="jobs", items=[WireLeasedItems("1" * 16, -1, [0, 1])]), "lease -1"),
            ):
                with pytest.raises(InvalidRequestError, match=text):
                    await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=5)
            link.close()
            monkeypatch.setattr(keeper, "BLOCKS_MAX", 1)
            async with AsyncQueue(brokers[0].address, timeout_ms=300) as short:
                with pytest.raises(QueueFullError):
                    await short.enqueue("jobs", b"x")

    run(work())


def test_the_names_are_public() -> None:
    assert memq.aio.Queue is AsyncQueue
    assert {"Queue", "QueueItem", "ItemOutcome"} <= set(dir(memq))
