"""Dead items, peek and get, keys and dedupe of queues, with three brokers in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import memq
from memq.broker.service_partitions import hosts
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError, NotFoundError, QueueFullError
from memq.format.blocks.builder import BlockBuilder
from memq.format.key import held_prefix
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import connect_link
from memq.protocol.queue_messages import EnqueueItems, ListDeadItems, PeekItems, WireQueueBlock
from memq.queues import keeper
from memq.queues.decisions import ItemOutcome, queue_scope
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.state_log import state_log
from tests.brokers import run
from tests.component.cluster_rig import rig
from tests.component.queue_rig import owner_of, queueing
from tests.component.test_restored_queues import lose_and_restore

CLOCK = SystemClock()


async def bury(queue: AsyncQueue, name: str, count: int) -> list[QueueItem]:
    """Let items be dead, by a nack of their only attempt."""
    await queue.enqueue_many(name, [b"%d" % number for number in range(count)], attempts_max=1)
    items = await queue.dequeue({name: count})
    for item in items:
        assert await queue.nack(item, metadata=b"bad " + item.payload) is ItemOutcome.DEAD
    return items


def test_dead_items_are_listed_read_sent_back_and_purged() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            items = await bury(queue, "jobs", 5)
            await bury(queue, "other", 1)
            dead = await queue.dead("jobs")
            assert [(each.state, each.attempts, each.payload) for each in dead] == [("dead", 1, None)] * 5
            assert {each.id: each.note for each in dead} == {each.id: b"bad " + each.payload for each in items}
            pages = [await queue.dead("jobs", limit=3), await queue.dead("jobs", limit=3, after=dead[2].id)]
            assert [each.id for page in pages for each in page] == [each.id for each in dead]
            assert (await queue.get(items[1].id)).payload == b"1"
            one, two = items[0].id, items[1].id
            assert await queue.redrive("jobs", [one, two]) == {one: ItemOutcome.RETURNED, two: ItemOutcome.RETURNED}
            assert await queue.redrive("jobs", [one]) == {one: ItemOutcome.RETURNED}, "it came again"
            again = await queue.dequeue({"jobs": 9})
            assert sorted(item.payload for item in again) == [b"0", b"1"]
            assert {(item.attempt, item.note[:3]) for item in again} == {(1, b"bad")}, "its attempts begin again"
            assert await queue.purge("jobs", [one]) == {one: ItemOutcome.LEASED}
            assert await queue.nack(again[0]) is ItemOutcome.DEAD
            assert await queue.purge("jobs", [again[0].id]) == {again[0].id: ItemOutcome.CANCELLED}
            assert set((await queue.purge("jobs")).values()) == {ItemOutcome.CANCELLED}
            assert await queue.dead("jobs") == []
            assert len(await queue.redrive("other")) == 1
            counts = await queue.queues()
            assert {name: (each.ready, each.leased, each.dead) for name, each in counts.items()} == {
                "jobs": (0, 1, 0),
                "other": (1, 0, 0),
            }
            assert await queue.ends() == {"dead": 7, "redriven": 3, "cancelled": 4}
            assert await queue.redrive("nothing") == {}

    run(work())


def test_an_end_by_ttl_is_counted() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            ids = [await queue.enqueue(f"queue-{number}", b"x", ttl=0.05) for number in range(12)]
            while await queue.queues():
                assert await queue.dequeue("nothing", wait=0.1) == []
            assert await queue.ends() == {"expired": 12}
            assert {(await queue.get(each)).state for each in ids} == {"expired"}

    run(work())


def test_items_are_shown_as_they_are_and_a_peek_leases_nothing() -> None:
    async def work() -> None:
        async with queueing() as (_, brokers, queue), AsyncQueue(brokers[1].address) as other:
            for number in range(4):
                value = b"%d" % number
                await queue.enqueue("jobs", value, priority=9 - number, metadata={"n": value}, key="k")
            later = await queue.enqueue("jobs", b"later", deliver_after=60, ttl=90)
            (held,) = await queue.dequeue("jobs")
            for client in (queue, other):
                peeked = await client.peek("jobs", 10)
                assert [(each.payload, each.priority, each.state, each.key) for each in peeked] == [
                    (b"2", 7, "ready", "k"),
                    (b"1", 8, "ready", "k"),
                    (b"0", 9, "ready", "k"),
                ]
                assert [each.payload for each in await client.peek("jobs")] == [b"2"]
                view = await client.get(held.id)
                assert (view.state, view.attempts, view.payload, view.metadata) == ("leased", 1, b"3", (("n", b"3"),))
                assert view.until_s == pytest.approx(held.until_s, abs=5)
                view = await client.get(later)
                assert (view.state, view.attempts, view.payload) == ("delayed", 0, b"later")
                assert view.expires_ms - view.due_ms == 30_000
            assert [item.payload for item in await other.dequeue({"jobs": 10})] == [b"2", b"1", b"0"]
            await queue.ack(held)
            view = await queue.get(held.id)
            assert (view.state, view.payload) == ("leased", b"3") if view.payload else ("acked", None)
            with pytest.raises(NotFoundError, match="no queue knows item"):
                await queue.get(f"jobs:{1:016x}:0")

    run(work())


def test_a_lost_payload_is_shown_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PAYLOADS_SHARE", 1 << 60)  # none is kept

    async def work() -> None:
        async with queueing(1) as (cluster, _brokers, queue):
            id_ = await queue.enqueue("jobs", b"one")
            assert (await queue.get(id_)).payload == b"one"
            for entry in [each async for each in cluster.store.list(held_prefix("memq"))]:
                await cluster.store.delete(entry.key)
            assert (await queue.get(id_)).payload is None
            assert (await queue.peek("jobs"))[0].state == "ready", "a question buries nothing"

    run(work())


def test_queues_are_listed_by_the_begin_of_their_names() -> None:
    async def work() -> None:
        async with queueing() as (_, _brokers, queue):
            for name in ("team.a", "team.b", "other", "tea"):
                await queue.enqueue(name, b"x")
            assert list(await queue.queues("team.")) == ["team.a", "team.b"]
            assert list(await queue.queues()) == ["other", "tea", "team.a", "team.b"]
            (item,) = await queue.dequeue("team.a")
            await queue.ack(item)
            assert list(await queue.queues("team.")) == ["team.b"]
            assert await queue.queues("none") == {}

    run(work())


def test_a_second_enqueue_under_a_dedupe_key_returns_the_first_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the owner is another one, which has the state of a snapshot."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.2)

    async def work() -> None:
        async with queueing() as (cluster, brokers, queue):
            first = await queue.enqueue("jobs", b"one", dedupe_key="order 1")
            assert await queue.enqueue("jobs", b"two", dedupe_key="order 1") == first
            short = await queue.enqueue("jobs", b"short", dedupe_key="s", dedupe_window=1)
            assert len({first, short, await queue.enqueue("jobs", b"one", dedupe_key="order 2")}) == 3
            other = await queue.enqueue("jobs2", b"one", dedupe_key="order 1")
            assert other.partition(":")[0] == "jobs2"
            items = await queue.dequeue({"jobs": 9})
            assert [item.payload for item in items] == [b"one", b"short", b"one"]
            assert await queue.ack_many(items) == [ItemOutcome.ACKED] * 3
            assert await queue.dequeue("nothing", wait=1.1) == [], "a snapshot is due meanwhile, and a window ends"
            owner = owner_of(cluster, "jobs")
            (gone,) = (each for each in brokers if each.services.settings.broker_id == owner)
            await gone.close()
            async with AsyncQueue([each.address for each in brokers if each is not gone]) as again:
                assert await again.enqueue("jobs", b"three", dedupe_key="order 1") == first, (
                    "it was acked, and is known"
                )
                assert await again.enqueue("jobs", b"new", dedupe_key="s") != short
                assert [item.payload for item in await again.dequeue({"jobs": 9})] == [b"new"]

    run(work())


def test_two_enqueues_at_once_under_a_dedupe_key_make_one_item() -> None:
    async def work() -> None:

        async with queueing() as (_, _brokers, queue):
            calls = [queue.enqueue("jobs", b"%d" % number, dedupe_key="k") for number in range(20)]
            assert len(set(await asyncio.gather(*calls))) == 1
            assert len(await queue.dequeue({"jobs": 99})) == 1

    run(work())


@pytest.mark.parametrize("saved", [False, True])
def test_dedupe_keys_and_order_come_back_from_the_bucket_alone(monkeypatch: pytest.MonkeyPatch, *, saved: bool) -> None:
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05 if saved else 60.0)

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncQueue(broker.address) as queue:
                for number in range(8):
                    await queue.enqueue("jobs", b"%d" % number, key="k", ordered=True, lease=1)
                first = await queue.enqueue("jobs", b"d", dedupe_key="d", priority=9)
                assert await queue.dequeue("nothing", wait=0.5) == [], "a snapshot is due meanwhile"
            async with AsyncQueue(await lose_and_restore(cluster)) as queue:
                assert await queue.enqueue("jobs", b"again", dedupe_key="d") == first
                found: list[bytes] = []
                while items := await queue.dequeue({"jobs": 3}, wait=1):
                    found += [item.payload for item in items]
                    await queue.ack_many(items)
                assert [each for each in found if each != b"d"] == [b"%d" % number for number in range(8)]
                assert found.count(b"d") == 1

    run(work())


def test_ordered_items_come_one_by_one_also_with_another_owner() -> None:
    async def work() -> None:
        async with queueing() as (cluster, brokers, queue):
            big = [b"%d" % number + b"x" * 40_000 for number in range(12)]  # some blocks, in more than one object
            await queue.enqueue_many("jobs", big, key="k", ordered=True, lease=1)
            await queue.enqueue("jobs", b"other", key="other", ordered=True)
            items = await queue.dequeue({"jobs": 20})
            assert sorted(item.payload[:5] for item in items) == [b"0xxxx", b"other"]
            assert await queue.dequeue({"jobs": 20}) == []
            first = next(item for item in items if item.payload != b"other")
            await queue.nack(first, after=0.2)
            owner = owner_of(cluster, "jobs")
            (gone,) = (each for each in brokers if each.services.settings.broker_id == owner)
            await gone.close()
            async with AsyncQueue([each.address for each in brokers if each is not gone]) as again:
                found: list[bytes] = []
                while len(found) < 12:
                    items = await again.dequeue({"jobs": 20}, wait=5)
                    assert len(items) == 1
                    found += [item.payload for item in items]
                    await again.ack_many(items)
                assert found == big

    run(work())


def test_bad_input_gets_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with queueing(1) as (_, brokers, queue):
            id_ = await queue.enqueue("jobs", b"x")
            ordered: dict[str, Any] = {"key": "k", "ordered": True}
            wrong: list[tuple[Any, type[Exception], str]] = [
                (queue.enqueue("jobs", b"x", key=""), InvalidSettingError, "key has 0 characters"),
                (queue.enqueue("jobs", b"x", key="k" * 129), InvalidSettingError, "key has 129 characters"),
                (queue.enqueue("jobs", b"x", key="\ud800"), InvalidSettingError, "UTF-8"),
                (queue.enqueue("jobs", b"x", key=7), TypeError, "key must be str"),  # type: ignore[arg-type]
                (queue.enqueue("jobs", b"x", ordered=True), InvalidSettingError, "ordered items need a key"),
                (queue.enqueue("jobs", b"x", deliver_after=1, **ordered), InvalidSettingError, "have no delay"),
                (queue.enqueue("jobs", b"x", at_most_once=True, **ordered), InvalidSettingError, "and a lease"),
                (queue.enqueue("jobs", b"x", dedupe_key=""), InvalidSettingError, "dedupe_key has 0"),
                (queue.enqueue("jobs", b"x", dedupe_key="k", dedupe_window=0.5), InvalidSettingError, "dedupe_window"),
                (queue.enqueue("jobs", b"x", dedupe_key="k", dedupe_window=1e6), InvalidSettingError, "dedupe_window"),
                (queue.enqueue("jobs", b"x", dedupe_window=60), InvalidSettingError, "no effect without a dedupe_key"),
                (queue.peek("jobs", 0), InvalidSettingError, "count = 0"),
                (queue.peek("a/b/c"), InvalidNameError, "queue name"),
                (queue.get("nonsense"), InvalidRequestError, "no id of a queue item"),
                (queue.dead("jobs", limit=2_000), InvalidSettingError, "limit = 2000"),
                (queue.dead("other", after=id_), InvalidRequestError, "is of queue 'jobs', not of 'other'"),
                (queue.redrive("other", [id_]), InvalidRequestError, "is of queue 'jobs', not of 'other'"),
                (queue.purge("jobs", id_), TypeError, "ids must be a list"),
                (queue.queues(7), TypeError, "prefix must be str"),  # type: ignore[arg-type]
            ]
            for work_, kind, text in wrong:
                with pytest.raises(kind, match=text):
                    await work_
            link = await connect_link(Runtime(), None, parse_address(brokers[0].address))

            sealed = _sealed("jobs")

            def block(**fields: Any) -> EnqueueItems:
                terms = {"priority": 5, "after_ms": 0, "life_ms": 0, "lease_ms": 1_000, "attempts_max": 0} | fields
                return EnqueueItems(queue="jobs", blocks=[WireQueueBlock(length=len(sealed), **terms)])

            for ask, text in (
                (block(key="k" * 200), "length of key is 200"),
                (block(ordered=True), "ordered items need a key"),
                (block(key="k", ordered=True, after_ms=5), "ordered items need a key"),
                (block(dedupe_key="k", dedupe_ms=1), "dedupe_window is 1 ms"),
                (block(dedupe_key="k", dedupe_ms=5_000), "2 items have one dedupe key"),
                (PeekItems(queue="jobs", count=101), "count is 101"),
                (ListDeadItems(queue="jobs", count=0), "count is 0"),
            ):
                blocks = sealed if isinstance(ask, EnqueueItems) else b""
                with pytest.raises(InvalidRequestError, match=text):
                    await link.request_with_blocks(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, blocks=blocks)
            link.close()
            monkeypatch.setattr(keeper, "DEDUPE_KEYS_MAX", 1)
            async with AsyncQueue(brokers[0].address, timeout_ms=600) as short:
                await short.enqueue("jobs", b"x", dedupe_key="one", dedupe_window=3)
                with pytest.raises(QueueFullError, match="knows 1 dedupe keys"):
                    await short.enqueue("jobs", b"x", dedupe_key="two")
                await short.enqueue("jobs", b"x", dedupe_key="one")  # a known key takes no room
                assert await short.dequeue("nothing", wait=3) == []
                await short.enqueue("jobs", b"x", dedupe_key="two")

    run(work())


def _sealed(queue: str) -> bytes:

    builder = BlockBuilder()
    builder.append_many([b"one", b"two"])
    return bytes(builder.seal(producer_id=7, first_sequence=0, scope=queue_scope(queue), now_ms=1).data)


def test_the_calls_of_threads_are_the_same() -> None:
    async def work() -> None:

        async with rig() as cluster:
            address = (await cluster.start("a")).address
            await asyncio.to_thread(_on_a_thread, address)

    run(work())


def _on_a_thread(address: str) -> None:
    with memq.Queue(address) as queue:
        id_ = queue.enqueue("jobs", b"x", key="k", ordered=True, dedupe_key="d", dedupe_window=60, attempts_max=1)
        assert queue.enqueue("jobs", b"y", dedupe_key="d") == id_
        queue.enqueue_many("jobs", [b"a", b"b"], key="k", ordered=True)
        view = queue.get(id_)
        assert (view.payload, view.key, [each.id for each in queue.peek("jobs", 5)]) == (b"x", "k", [id_])
        (item,) = queue.dequeue("jobs")
        queue.nack(item, metadata=b"bad")
        assert [each.note for each in queue.dead("jobs")] == [b"bad"]
        assert list(queue.queues("jo")) == ["jobs"]
        assert queue.redrive("jobs", [id_]) == {id_: ItemOutcome.RETURNED}
        queue.nack(queue.dequeue("jobs")[0])
        assert queue.purge("jobs") == {id_: ItemOutcome.CANCELLED}
        assert queue.ends() == {"dead": 2, "redriven": 1, "cancelled": 1}
        assert {"ItemView", "Queue"} <= set(dir(memq))
