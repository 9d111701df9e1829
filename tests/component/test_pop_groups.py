"""Pop groups in a cluster of brokers: records of a plain topic are leased one by one, and acked ones never return."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from memq.broker.broker import Broker
from memq.broker.service_partitions import hosts, pop_partition, pop_readers
from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker import AsyncWorker
from memq.errors import (
    AlreadyAckedError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
)
from memq.format.pointer import decode_pointer
from memq.notification import Entry, Publication
from memq.notification.log_reader import valid_span
from memq.queues import keeper
from memq.queues.decisions import ItemOutcome
from memq.queues.pop import keeper as pop_keeper
from memq.runtime.clock import SystemClock
from memq.state_log import state_log
from memq.topic import ReadPartition, read_partitions
from tests.brokers import run
from tests.component.cluster_rig import Rig
from tests.component.queue_rig import owner_of, payloads, queueing

CLOCK = SystemClock()
QUEUE = "orders@billing"


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask until something holds; the test's time limit ends it otherwise."""
    while not await holds():  # noqa: ASYNC110 - brokers have no event for this
        await asyncio.sleep(0)


@asynccontextmanager
async def popping(
    partitions: int = 2, brokers: int = 3, **settings: Any
) -> AsyncIterator[tuple[Rig, list[Broker], AsyncQueue, AsyncAdmin]]:
    """Yield a cluster with a topic, a client of its queues, and an admin."""
    async with queueing(brokers) as (cluster, made, queue), AsyncAdmin([each.address for each in made]) as admin:
        await admin.create_topic("orders", partitions=partitions, settings=settings)
        yield cluster, made, queue, admin


async def send(brokers: Sequence[Broker], values: Sequence[bytes], *, apart: bool = False) -> None:
    """Send records; `apart`, each one is a batch."""
    async with AsyncProducer([each.address for each in brokers], linger_ms=0 if apart else 20) as producer:
        for value in values:
            await producer.send("orders", value, key=value, headers={"kind": b"order"})
            if apart:
                await producer.flush()
        await producer.flush()


async def items_are(admin: AsyncAdmin, count: int) -> bool:
    """Whether the group has so many items."""
    return (await admin.pop_groups())[0].items == count


async def all_are_read(admin: AsyncAdmin) -> bool:
    """Whether the group has no lag."""
    return (await admin.pop_groups())[0].records == 0


async def taken(queue: AsyncQueue, count: int) -> bool:
    """Whether retention took so many records."""
    return (await queue.ends()).get("taken-by-retention") == count


async def none_are(queue: AsyncQueue) -> bool:
    """Whether no queue has items."""
    return not await queue.queues()


async def drained(queue: AsyncQueue, count: int, size: int = 7) -> list[QueueItem]:
    """Lease and ack so many records, and show that no others come."""
    found: list[QueueItem] = []
    while len(found) < count:
        items = await queue.dequeue({QUEUE: size}, wait=10)
        assert items, f"{len(found)} of {count} records came"
        assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
        found += items
    assert await queue.dequeue(QUEUE, wait=0.5) == []
    return found


def test_records_of_a_topic_are_leased_one_by_one() -> None:
    async def work() -> None:
        async with popping() as (_, brokers, queue, admin), AsyncQueue(brokers[1].address) as other:
            await send(brokers, [b"one", b"two"])
            assert await queue.begin_pop("orders", "billing", lease=2) == QUEUE
            assert await other.begin_pop("orders", "billing", lease=2) == QUEUE
            first, second = [(await each.dequeue(QUEUE, wait=10))[0] for each in (queue, other)]
            assert {first.payload, second.payload} == {b"one", b"two"}
            assert first.queue == QUEUE
            assert (first.topic, first.key, first.attempt) == ("orders", first.payload, 1)
            assert first.metadata == (("kind", b"order"),)
            assert first.position is not None
            assert abs(first.timestamp_ms - CLOCK.wall_ms()) < 60_000
            assert await queue.dequeue(QUEUE) == [], "a record has one worker at a time"
            await queue.ack(first)
            with pytest.raises(AlreadyAckedError):
                await other.ack(first)
            assert await other.nack(second, after=0.2, metadata=b"half") is ItemOutcome.RETURNED
            (again,) = await queue.dequeue(QUEUE, wait=10)
            assert (again.payload, again.attempt, again.note, again.position) == (
                second.payload,
                2,
                b"half",
                second.position,
            )
            await queue.extend(again, 5)
            await queue.ack(again)
            (group,) = await admin.pop_groups()
            assert (group.queue, group.items, group.records, len(group.partitions)) == (QUEUE, 0, 0, 2)

    run(work())


def test_groups_have_their_own_positions_and_starts() -> None:
    async def work() -> None:
        async with popping() as (_, brokers, queue, admin):
            await send(brokers, [b"old"])
            assert await queue.begin_pop("orders", "late", start="end") == "orders@late"
            await queue.begin_pop("orders", "billing")
            await send(brokers, [b"new"])
            late = await queue.dequeue({"orders@late": 5}, wait=10)
            assert payloads(late) == [b"new"]
            assert sorted(payloads(await drained(queue, 2))) == [b"new", b"old"]
            lags = {each.queue: each.records for each in await admin.pop_groups()}
            assert lags == {"orders@late": 1, QUEUE: 0}

    run(work())


@pytest.mark.parametrize("everything", [False, True])
def test_acks_and_leases_survive_their_owner_and_the_whole_cluster(
    monkeypatch: pytest.MonkeyPatch, *, everything: bool
) -> None:
    """No acked record comes again, none is lost, and none is held by two."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.5)  # so that some state comes from a snapshot

    async def work() -> None:
        async with popping() as (cluster, brokers, queue, _):
            sent = [b"%d" % number for number in range(90)]
            await queue.begin_pop("orders", "billing", lease=2)
            sending = asyncio.get_running_loop().create_task(send(brokers, sent[:60], apart=True))
            acked: list[QueueItem] = []
            while len(acked) < 30:
                items = await queue.dequeue({QUEUE: 5}, wait=10)
                assert await queue.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                acked += items
            await sending
            held = await queue.dequeue({QUEUE: 10}, wait=10)
            owner = owner_of(cluster, QUEUE)
            gone = brokers if everything else [each for each in brokers if each.services.settings.broker_id == owner]
            for broker in gone:
                await broker.close()
            left = [broker for broker in brokers if broker not in gone]
            left += [await cluster.start(f"new-{number}") for number in range(len(gone))]
            async with AsyncQueue([broker.address for broker in left]) as again:
                assert await again.ack_many(acked[:2]) == [ItemOutcome.ALREADY_ACKED] * 2
                await again.ack(held[0])
                await send(left, sent[60:])
                seen: dict[bytes, float] = {}
                while len(seen) + len(acked) + 1 < 90:
                    items = await again.dequeue({QUEUE: 7}, wait=10)
                    assert items
                    seen |= {item.payload: CLOCK.monotonic() for item in items}
                    assert await again.ack_many(items) == [ItemOutcome.ACKED] * len(items)
                assert await again.dequeue({QUEUE: 7}, wait=3) == []
            assert sorted([*payloads(acked), held[0].payload, *seen], key=int) == sent
            assert all(seen[item.payload] >= item.until_s for item in held[1:]), "a record was held by two workers"

    run(work())


def test_a_group_reads_ahead_as_far_as_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_keeper, "AHEAD_ITEMS", 20)

    async def work() -> None:
        async with popping(1, 1) as (_, brokers, queue, admin):
            sent = [b"%d" % number for number in range(60)]
            await send(brokers, sent, apart=True)
            await queue.begin_pop("orders", "billing")
            await until(lambda: items_are(admin, 20))
            assert await queue.dequeue("nothing", wait=0.7) == [], "it may read further meanwhile"
            (group,) = await admin.pop_groups()
            assert (group.items, group.records) == (20, 60)
            assert sorted(payloads(await drained(queue, 60)), key=int) == sent

    run(work())


def test_dead_records_stay_and_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_keeper, "AHEAD_ITEMS", 2)

    async def work() -> None:
        async with popping(1, 1) as (_, brokers, queue, _admin):
            await send(brokers, [b"bad", b"worse"], apart=True)
            await queue.begin_pop("orders", "billing", attempts_max=1)
            items = [*await queue.dequeue(QUEUE, wait=10), *await queue.dequeue(QUEUE, wait=10)]
            assert await queue.nack_many(items, metadata=b"why") == [ItemOutcome.DEAD] * 2
            await send(brokers, [b"good"])
            assert payloads(await drained(queue, 1)) == [b"good"]
            dead = {(await queue.get(each.id)).payload: each for each in await queue.dead(QUEUE)}
            assert {value: each.note for value, each in dead.items()} == {b"bad": b"why", b"worse": b"why"}
            assert set((await queue.redrive(QUEUE, [dead[b"bad"].id])).values()) == {ItemOutcome.RETURNED}
            assert payloads(await drained(queue, 1)) == [b"bad"]
            assert set((await queue.purge(QUEUE)).values()) == {ItemOutcome.CANCELLED}
            assert await queue.queues() == {}

    run(work())


def test_retention_takes_records_with_a_count_and_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some were items, and others were not read yet; one is with a worker, which may ack it."""
    monkeypatch.setattr(pop_readers, "CHECK_S", 0.1)
    monkeypatch.setattr(pop_keeper, "AHEAD_ITEMS", 10)

    async def work() -> None:
        async with popping(1, 1) as (cluster, brokers, queue, admin):
            await send(brokers, [b"%d" % number for number in range(40)], apart=True)
            await queue.begin_pop("orders", "billing")
            (held,) = await queue.dequeue(QUEUE, wait=10)
            (log,) = read_partitions((await admin.topic("orders")).topic)
            await until(lambda: items_are(admin, 10))
            end = (await valid_span(cluster.queue, log)).end
            await cluster.queue.trim(log, end - 6)  # five batches stay, and the end of the producer
            await until(lambda: taken(queue, 34))
            assert payloads(await drained(queue, 5)) == [b"%d" % number for number in range(35, 40)]
            await queue.ack(held)
            assert (await queue.ends())["acked"] == 6
            assert (await admin.pop_groups())[0].records == 0

    run(work())


def test_a_group_is_removed_with_its_items_and_may_begin_again() -> None:
    async def work() -> None:
        async with popping(1) as (_, brokers, queue, admin):
            await send(brokers, [b"one", b"two", b"three"], apart=True)
            await queue.begin_pop("orders", "billing", lease=1)
            (first,) = await queue.dequeue(QUEUE, wait=10)
            await admin.delete_pop(QUEUE)
            with pytest.raises(NotFoundError, match="does not exist"):
                await queue.dequeue(QUEUE, wait=5)
            with pytest.raises(NotFoundError):
                await admin.delete_pop(QUEUE)
            assert await admin.pop_groups() == []
            await queue.begin_pop("orders", "billing")
            assert sorted(payloads(await drained(queue, 3))) == [b"one", b"three", b"two"]
            assert first.payload in (b"one", b"two", b"three")
            assert await queue.dequeue(QUEUE, wait=2) == [], "an item of the former group comes when its lease is over"
            await until(lambda: none_are(queue))

    run(work())


def test_a_topic_that_is_made_again_takes_the_place_of_the_former_one() -> None:
    async def work() -> None:
        async with popping(1) as (_, brokers, queue, admin):
            await send(brokers, [b"old"])
            await queue.begin_pop("orders", "billing")
            assert payloads(await queue.dequeue(QUEUE, wait=10)) == [b"old"]
            await admin.delete_topic("orders")
            await admin.create_topic("orders", partitions=3)
            await send(brokers, [b"new"])
            await queue.begin_pop("orders", "billing")
            assert payloads(await drained(queue, 1)) == [b"new"]

    run(work())


def test_a_group_of_a_deleted_topic_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_readers, "FORGET_S", 0.5)
    monkeypatch.setattr(pop_readers, "WAIT_S", 0.1)

    async def work() -> None:
        async with popping(1) as (_, brokers, queue, admin):
            await send(brokers, [b"old"])
            await queue.begin_pop("orders", "billing")
            await until(lambda: items_are(admin, 1))
            await admin.delete_topic("orders")
            await until(lambda: none_are(queue))
            assert await admin.pop_groups() == []

    run(work())


def test_a_log_that_was_lost_is_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that wait are found at their new offsets."""
    monkeypatch.setattr(hosts, "PAYLOADS_SHARE", 1 << 60)  # none is kept
    monkeypatch.setattr(pop_partition, "LOST_PAUSE_S", 0.1)
    monkeypatch.setattr(pop_readers, "FAILED_PAUSE_S", 0.1)

    async def work() -> None:
        async with popping(1, 1) as (cluster, brokers, queue, admin):
            await send(brokers, [b"%d" % number for number in range(8)], apart=True)
            await queue.begin_pop("orders", "billing")
            acked = await queue.dequeue({QUEUE: 6}, wait=10)
            await until(lambda: items_are(admin, 8))
            acked += await queue.dequeue({QUEUE: 6 - len(acked)}) if len(acked) < 6 else []
            assert await queue.ack_many(acked) == [ItemOutcome.ACKED] * 6
            (log,) = read_partitions((await admin.topic("orders")).topic)
            kept = (await cluster.queue.read(log, 0, 1 << 20))[-3:]
            await cluster.queue.drop([log])
            await cluster.queue.create([log], 30_000)
            await copy_into(cluster, log, kept)
            assert payloads(await drained(queue, 2)) == [b"6", b"7"], "acked ones are known for ten minutes"

    run(work())


def test_a_worker_takes_records() -> None:
    async def work() -> None:
        async with popping() as (_, brokers, queue, admin):
            sent = [b"%d" % number for number in range(50)]
            await send(brokers, sent)
            await queue.begin_pop("orders", "billing")
            seen: Counter[bytes] = Counter()

            async def handle(item: QueueItem) -> None:
                seen[item.payload] += 1

            async with AsyncWorker(handle, [QUEUE], brokers=brokers[0].address, concurrency=8) as worker:
                await worker.start()
                await until(lambda: all_are_read(admin))
            assert seen == Counter(sent)

    run(work())


def test_bad_input_gets_an_error_that_says_what_to_do() -> None:
    async def work() -> None:
        async with popping(1, 1) as (_, _brokers, queue, admin):
            wrong: list[tuple[Any, type[Exception], str]] = [
                (queue.begin_pop("nothing", "billing"), NotFoundError, "does not exist"),
                (queue.begin_pop("orders", "a@b"), InvalidNameError, "group name"),
                (queue.begin_pop("orders", "billing", lease=0.1), InvalidSettingError, "lease = 0.1 s is outside 1 s"),
                (queue.begin_pop("orders", "billing", attempts_max=-1), InvalidSettingError, "attempts_max = -1"),
                (queue.dequeue("orders@none"), NotFoundError, "pop group 'orders@none' does not exist"),
                (queue.enqueue(QUEUE, b"x"), InvalidRequestError, "send records to its topic"),
                (admin.delete_pop("orders"), InvalidRequestError, "is no pop group"),
            ]
            for call, error, text in wrong:
                with pytest.raises(error, match=text):
                    await call

    run(work())


def test_copies_are_dropped_also_by_a_new_owner_that_has_forgotten_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "ENDED_KNOWN_MS", -60_000)

    async def work() -> None:
        async with popping(1) as (cluster, brokers, queue, admin):
            await send(brokers, [b"%d" % number for number in range(6)], apart=True)
            await queue.begin_pop("orders", "billing")
            await drained(queue, 6)
            (log,) = read_partitions((await admin.topic("orders")).topic)
            sent = [entry for entry in await cluster.queue.read(log, 0, 1 << 20) if b'"data"' in entry.body]
            await copy_into(cluster, log, sent[:2])
            assert await queue.dequeue(QUEUE, wait=1) == []
            owner = owner_of(cluster, QUEUE)
            for broker in brokers:
                if broker.services.settings.broker_id == owner:
                    await broker.close()
            left = [broker for broker in brokers if broker.services.settings.broker_id != owner]
            async with AsyncQueue([broker.address for broker in left]) as again:
                await copy_into(cluster, log, sent[2:])
                assert await again.dequeue(QUEUE, wait=1) == []
                await send(left, [b"new"])
                assert payloads(await drained(again, 1)) == [b"new"]

    run(work())


async def copy_into(cluster: Rig, log: ReadPartition, entries: Sequence[Entry]) -> None:
    """Publish pointers once more, as an owner does whose answer was lost."""
    for entry in entries:
        epoch = decode_pointer(entry.body).epoch
        await cluster.queue.publish(Publication(log, 0, epoch, CLOCK.wall_ms(), entry.body))


def test_large_batches_are_read_by_their_index_and_in_several_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PAYLOADS_SHARE", 1 << 60)  # none is kept
    monkeypatch.setattr(pop_partition, "WHOLE_BYTES", 0)
    monkeypatch.setattr(pop_keeper, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(pop_keeper, "AHEAD_BLOCKS", 4)

    async def work() -> None:
        async with popping(1, 1, seal_when_idle=False, batch_age_ms_max=2_000) as (_, brokers, queue, _admin):
            noise = random.Random(7)
            sent = [b"%d " % number + noise.randbytes(3_000) for number in range(40)]
            async with AsyncProducer(brokers[0].address, block_bytes=8_192, linger_ms=0) as producer:
                await producer.send_many("orders", sent)
                await producer.flush()
            await queue.begin_pop("orders", "billing")
            found = await drained(queue, 40, size=3)
            assert Counter(payloads(found)) == Counter(sent)
            offsets = {item.position.pointer_offset for item in found if item.position is not None}
            indexes = sorted(item.position.record_index for item in found if item.position is not None)
            assert len(offsets) < 10
            assert indexes[-1] > 4

    run(work())


async def failing(producer: AsyncProducer) -> None:
    async with producer.transaction() as transaction:
        await transaction.send("orders", b"never")
        raise ZeroDivisionError


def test_a_batch_of_many_blocks_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_keeper, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(pop_keeper, "AHEAD_ITEMS", 10)

    async def work() -> None:
        async with popping(1, 1, seal_when_idle=False, batch_age_ms_max=2_000) as (_, brokers, queue, admin):
            noise = random.Random(7)
            sent = [b"%d " % number + noise.randbytes(3_000) for number in range(60)]
            async with AsyncProducer(brokers[0].address, block_bytes=8_192, linger_ms=0) as producer:
                await producer.send_many("orders", sent)
                await producer.flush()
            await queue.begin_pop("orders", "billing")
            (first,) = await queue.dequeue(QUEUE, wait=10)
            assert await queue.dequeue("nothing", wait=0.7) == [], "it may read further meanwhile"
            (group,) = await admin.pop_groups()
            assert group.items <= 16, "a decision takes at most two blocks beyond the budget"
            assert group.records == 60
            await queue.ack(first)
            found = [first, *await drained(queue, 59, size=4)]
            assert Counter(payloads(found)) == Counter(sent)
            assert len({item.position for item in found}) == 60

    run(work())


def test_large_records_come_and_larger_ones_are_refused_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with popping(1, 1, record_bytes_max=2 << 20) as (_, brokers, queue, admin):
            large = random.Random(7).randbytes((2 << 20) - 4_096)
            async with AsyncProducer(brokers[0].address, linger_ms=0) as producer:
                await producer.send("orders", large)
                await producer.flush()
                await queue.begin_pop("orders", "billing")
                (item,) = await queue.dequeue(QUEUE, wait=10)
                assert item.payload == large
                assert (await queue.get(item.id)).payload == large
                await queue.ack(item)
                monkeypatch.setattr(pop_partition, "POP_BLOCK_BYTES_MAX", 1 << 20)
                await producer.send("orders", large)
                await producer.send("orders", b"small")
                await producer.flush()
            assert payloads(await drained(queue, 1)) == [b"small"]
            await admin.create_topic("wide", settings={"record_bytes_max": 3 << 20})
            with pytest.raises(InvalidRequestError, match="a pop group at most 2097152"):
                await queue.begin_pop("wide", "billing")

    run(work())


def test_only_committed_and_due_records_come() -> None:
    async def work() -> None:
        async with popping(1, 1) as (_, brokers, queue, _admin):
            await queue.begin_pop("orders", "billing")
            async with AsyncProducer(brokers[0].address, transactional_id="pay") as producer:
                with pytest.raises(ZeroDivisionError):
                    await failing(producer)
                async with producer.transaction() as transaction:
                    await transaction.send("orders", b"committed")
                    assert await queue.dequeue(QUEUE, wait=0.5) == []
            assert payloads(await drained(queue, 1)) == [b"committed"]
            async with AsyncProducer(brokers[0].address) as producer:
                began_s = CLOCK.monotonic()
                await producer.send("orders", b"late", deliver_after=1.5)
                (item,) = await queue.dequeue(QUEUE, wait=10)
                assert item.payload == b"late"
                assert CLOCK.monotonic() - began_s >= 1.5

    run(work())


def test_records_of_a_sealed_topic_are_taken_to_their_end() -> None:
    async def work() -> None:
        async with popping(1, 1) as (_, brokers, queue, admin):
            await send(brokers, [b"one", b"two"], apart=True)
            await admin.seal_topic("orders")
            await queue.begin_pop("orders", "billing")
            assert sorted(payloads(await drained(queue, 2))) == [b"one", b"two"]

    run(work())
