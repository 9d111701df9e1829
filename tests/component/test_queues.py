"""Leased queues in a cluster of brokers: each item has one worker at a time, and an answered ack is final."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import memq
from memq.broker.service_partitions import hosts
from memq.client.broker_router import BrokerRouter
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
from tests.brokers import run
from tests.component.queue_rig import owner_of, payloads, queueing

CLOCK = SystemClock()


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


def test_one_request_acks_items_and_leases_the_next_ones() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            names = [f"queue-{number}" for number in range(6)]
            for name in names:
                await queue.enqueue_many(name, [b"1", b"2", b"3"])
            first = sorted(await queue.dequeue(dict.fromkeys(names, 1)), key=lambda item: item.queue)
            second = (await queue.dequeue(names[0]))[0]
            second.lease = second.lease._replace(grant=second.lease.grant + 1)
            outcomes, items = await queue.ack_and_dequeue([second, *first[:4], first[0]], dict.fromkeys(names[3:], 1))
            lost, repeated = ItemOutcome.LEASE_LOST, ItemOutcome.ALREADY_ACKED
            assert outcomes == [lost, *[ItemOutcome.ACKED] * 4, repeated]
            assert sorted(item.queue for item in items) == names[3:]
            assert (await queue.queues())[names[0]].leased + (await queue.queues())[names[0]].ready == 2
            none, more = await queue.ack_and_dequeue([], names[5])
            assert (none, payloads(more)) == ([], [b"3"])

    run(work())


@pytest.mark.parametrize("place", [(BrokerRouter, "with_blocks")])
def test_a_lost_answer_hides_no_item_and_loses_no_outcome(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    lost = list[object]()
    ask = getattr(*place)

    async def losing(self: object, api: Api, request: Any, *args: Any, **terms: Any) -> Any:
        found = await ask(self, api, request, *args, **terms)
        if isinstance(request.ask, DequeueItems) and not request.ask.again and not lost:
            lost.append(request.ask)
            raise UnreachableError("the connection is cut")
        return found

    monkeypatch.setattr(*place, losing)

    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            names = [f"queue-{number}" for number in range(6)]
            for name in names:
                await queue.enqueue_many(name, [b"1", b"2"], lease=60)
            first = await queue.dequeue(dict.fromkeys(names, 1))
            assert {each.leased for each in (await queue.queues()).values()} == {1}, "no item is hidden"
            assert [item.attempt for item in first] == [1] * 6
            assert all(0 < item.until_s - CLOCK.monotonic() <= 60 for item in first)
            lost.clear()
            outcomes, second = await queue.ack_and_dequeue(first, dict.fromkeys(names, 1), wait=20)
            assert (outcomes, payloads(second)) == ([ItemOutcome.ACKED] * 6, [b"2"] * 6)
            lost.clear()
            assert await queue.ack_and_dequeue(second, names[0]) == ([ItemOutcome.ACKED] * 6, [])
            assert await queue.queues() == {}

    run(work())


def test_an_ack_is_answered_before_its_call_waits_for_items() -> None:
    async def work() -> None:
        async with queueing(2) as (_, brokers, queue), AsyncQueue(brokers[1].address) as other:
            await queue.enqueue_many("accounts", [b"1", b"2"], key="a", ordered=True)
            (item,) = await queue.dequeue("accounts")
            outcomes, (following,) = await queue.ack_and_dequeue([item], "accounts")
            assert (outcomes, following.payload) == ([ItemOutcome.ACKED], b"2"), "of an ordered key"
            waiting = asyncio.create_task(queue.ack_and_dequeue([following], "accounts", wait=20))
            async with asyncio.timeout(10):
                while await other.queues():  # noqa: ASYNC110 - a client has no event for an ack of another one
                    await asyncio.sleep(0)
            await other.enqueue("accounts", b"3")
            outcomes, (third,) = await waiting
            assert (outcomes, third.payload) == ([ItemOutcome.ACKED], b"3")
            assert await queue.ack_and_dequeue([third], "accounts", wait=0.1) == ([ItemOutcome.ACKED], [])

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


def test_each_item_of_a_call_may_have_its_own_key_and_dedupe_key() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            ids = await queue.enqueue_many(
                "jobs", [b"%d" % at for at in range(6)], keys=["a", "b", "a", None, "b", "a"]
            )
            assert len(set(ids)) == 6
            first = await queue.dequeue({"jobs": 6})
            assert [payloads(first).index(b"%d" % at) for at in (0, 2, 5)] == sorted(
                payloads(first).index(b"%d" % at) for at in (0, 2, 5)
            )
            assert {item.id: item.payload for item in first} == {id_: b"%d" % at for at, id_ in enumerate(ids)}
            await queue.ack_many(first)
            names: list[str | None] = ["x", "y", None, "x", None]
            ids = await queue.enqueue_many(
                "mails", [b"%d" % at for at in range(5)], dedupe_keys=names, dedupe_window=60
            )
            assert ids[0] == ids[3]
            assert await queue.enqueue("mails", b"again", dedupe_key="y") == ids[1]
            assert sorted(payloads(await queue.dequeue({"mails": 9}))) == [b"0", b"1", b"2", b"4"]
            await queue.enqueue_many("orders", [b"1", b"2", b"3"], keys=["k", "l", "k"], ordered=True)
            assert sorted(payloads(await queue.dequeue({"orders": 9}))) == [b"1", b"2"]
            many = await queue.enqueue_many("many", [b"x"] * 1_500, dedupe_keys=[f"d{at}" for at in range(1_500)])
            assert len(set(many)) == (await queue.queues())["many"].ready == 1_500
            for wrong, text in (
                (queue.enqueue_many("jobs", [b"x"], keys=[]), "1 payloads and 0 keys"),
                (queue.enqueue_many("jobs", [b"x"], dedupe_keys=["a", "b"]), "1 payloads and 2 dedupe_keys"),
                (queue.enqueue_many("jobs", [b"x"], key="a", keys=["a"]), "key is for all items"),
                (queue.enqueue_many("jobs", [b"x"], dedupe_window=9), "has no effect without a dedupe_key"),
                (queue.enqueue_many("jobs", [b"x"], keys=[None], ordered=True), "ordered items need a key"),
            ):
                with pytest.raises(InvalidRequestError, match=text):
                    await wrong

    run(work())


def test_queues_of_all_brokers_share_the_bound_of_a_dequeue() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            names = [f"jobs-{number}" for number in range(6)]
            for name in names[:5]:
                await queue.enqueue_many(name, [b"x"] * 8, lease=60)
            wanted = dict.fromkeys(names, 1_024)
            first = await queue.dequeue(wanted, max_items=20)
            shares = [sum(item.queue == name for item in first) for name in names]
            assert (sum(shares), shares[5]) == (20, 0)
            assert all(2 <= share <= 8 for share in shares[:5]), shares
            outcomes, second = await queue.ack_and_dequeue(first, wanted, max_items=1_000)
            assert (outcomes, len(second)) == ([ItemOutcome.ACKED] * 20, 20)
            await queue.enqueue_many(names[0], [b"y"] * 3)
            assert len(await queue.dequeue(names[0], max_items=2)) == 2

    run(work())


def test_a_dequeue_waits_for_items_that_it_may_take() -> None:
    async def work() -> None:
        async with queueing(2) as (_, brokers, queue):
            await queue.enqueue_many("jobs", [b"1", b"2"], at_most_once=True)
            for address in (broker.address for broker in brokers):
                async with AsyncQueue(address) as other:
                    assert await other.dequeue({"jobs": 5}, wait=0.1, max_at_most_once=0) == []
                    waiting = asyncio.create_task(other.dequeue({"jobs": 5}, wait=20, max_at_most_once=0))
                    await queue.enqueue("jobs", b"first", priority=0)
                    assert payloads(await waiting) == [b"first"]
                    (found,) = await other.dequeue({"jobs": 5}, max_at_most_once=1)
                    assert found.lease_s == 0
            for wrong, text in (
                ({"max_items": 0}, "max_items = 0"),
                ({"max_at_most_once": -1}, "max_at_most_once = -1"),
            ):
                with pytest.raises(InvalidSettingError, match=text):
                    await queue.dequeue("jobs", **wrong)

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
                (DequeueItems(queues={}, wait_ms=0), "0 queues in one request"),
                (DequeueItems(queues={"jobs": 1}, wait_ms=0, again=True), "request 0 has no identity"),
                (DequeueItems(queues={}, wait_ms=0, acks={"jobs": [WireLeasedItems("1" * 16, 1, [0])]}), "items .0."),
                (
                    DequeueItems(queues={}, wait_ms=0, acks={"jobs": [WireLeasedItems("1" * 16, 1, [0, 1_025])]}),
                    "1025 items with acks",
                ),
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
