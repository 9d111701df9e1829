"""Metrics of delayed records, transactions, listeners and dead letters, as Prometheus gets them."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import memq
from memq.broker.broker import Broker
from memq.broker.holds.releasing import UnitReleaser
from memq.broker.process import metrics_of
from memq.cli.exporter import lag_metrics
from memq.client.admin import AsyncAdmin
from memq.client.listener.dead_letter_queue import waiting_letters
from memq.client.producer.delayed import CancelOutcome
from memq.client.producer.producer import AsyncProducer
from memq.client.queue.queue import AsyncQueue
from memq.errors import NotReadyError, ProducerFencedError, TransactionAbortedError
from memq.holds.decisions import ReleasedUnit
from memq.queues.meter import QueueEvents
from memq.testing import Cluster
from memq.topic import STATE_TOPIC
from tests.brokers import run, until
from tests.component.cluster_rig import rig

WAIT_S = 20.0


@asynccontextmanager
async def one_broker() -> AsyncIterator[tuple[Broker, Callable[[str], float]]]:
    """Yield a broker with the topic `clicks`, and a function that returns the value of one of its metrics."""
    async with rig() as cluster:
        broker = await cluster.start("a")
        registry = metrics_of(broker)
        async with AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks")

        def value(name: str) -> float:
            found = registry.get_sample_value(f"memq_broker_{name}")
            assert found is not None, name
            return found

        yield broker, value


def test_a_broker_counts_delayed_records_that_wait_come_and_are_cancelled() -> None:
    async def work() -> None:
        async with one_broker() as (broker, value), AsyncProducer(broker.address) as producer:
            for delay_s in (0.5, 0.5, 3_600):
                await (await producer.send("clicks", b"x", deliver_after=delay_s))
            dropped = await producer.send("clicks", b"x", deliver_after=3_600)
            await dropped
            assert (value("delayed_records_total"), value("delayed_waiting_records")) == (4, 4)
            outcomes = await asyncio.gather(producer.cancel(dropped), producer.cancel(dropped))
            assert list(outcomes) == [CancelOutcome.CANCELLED] * 2
            assert await producer.cancel(dropped) is CancelOutcome.CANCELLED
            assert value("delayed_cancelled_records_total") == 1, "repeated requests cancel no further record"
            await until(lambda: value("delayed_delivered_records_total") == 2)
            assert (value("delayed_waiting_records"), value("delayed_overdue_seconds")) == (1, 0)
            assert value("delayed_late_seconds_count") == 2
            assert 0 <= value("delayed_late_seconds_sum") < WAIT_S
            assert value("delayed_records_total") == 4

    run(work())


def test_a_broker_counts_the_items_of_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def labelled(broker: Broker, name: str) -> dict[tuple[str, ...], float]:
        (found,) = (each for each in metrics_of(broker).collect() if each.name == f"memq_broker_{name}")
        return {tuple(sample.labels.values()): sample.value for sample in found.samples}

    async def work() -> None:
        async with one_broker() as (broker, value), AsyncQueue(broker.address) as queue:
            assert labelled(broker, "queue_items") == {}
            await queue.enqueue_many("jobs", [b"1", b"2", b"3"], attempts_max=2)
            await queue.enqueue("jobs", b"late", deliver_after=3_600)
            short = await queue.enqueue("jobs", b"short", ttl=0.01, priority=9)
            await queue.enqueue("jobs", b"once", at_most_once=True, priority=0)
            items = await queue.dequeue({"jobs": 4})
            await until(lambda: value("queue_expired_items_total") == 1)
            await queue.ack(items[1])
            await queue.nack(items[2])
            (again,) = await queue.dequeue("jobs", wait=5)
            await queue.nack(again)
            await queue.cancel(await queue.enqueue("jobs", b"cancelled", deliver_after=60))
            assert await queue.cancel(short) is not None
            counted = {
                name: value(f"queue_{name}_items_total")
                for name in ("enqueued", "leased", "redelivered", "acked", "nacked", "expired", "dead", "cancelled")
            }
            assert counted == {
                "enqueued": 7,
                "leased": 5,
                "redelivered": 1,
                "acked": 2,
                "nacked": 1,
                "expired": 1,
                "dead": 1,
                "cancelled": 1,
            }
            assert value("queue_processing_seconds_count") == 2
            assert 0 <= value("queue_processing_seconds_sum") < WAIT_S
            assert labelled(broker, "queue_item_events") == {
                ("jobs", name): counted[name] for name in QueueEvents._fields
            }
            shard = str(zlib.crc32(b"jobs") % 8)
            states = {(shard, "ready"): 0, (shard, "leased"): 1, (shard, "delayed"): 1, (shard, "dead"): 1}
            await until(lambda: labelled(broker, "queue_items") == states)
            assert labelled(broker, "queue_oldest_ready_seconds") == {(shard,): 0}
            await queue.enqueue("jobs", b"waits")
            await until(lambda: labelled(broker, "queue_oldest_ready_seconds")[shard,] > 0)

    run(work())


def test_a_broker_shows_for_how_long_a_record_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(self: UnitReleaser, released: ReleasedUnit) -> None:
        raise NotReadyError("the target does not answer")

    async def work() -> None:
        async with one_broker() as (broker, value), AsyncProducer(broker.address) as producer:
            with monkeypatch.context() as patch:
                patch.setattr(UnitReleaser, "release", away)
                await (await producer.send("clicks", b"x", deliver_after=0.1))
                await until(lambda: value("delayed_overdue_seconds") > 0.3)
                assert (value("delayed_waiting_records"), value("delayed_delivered_records_total")) == (0, 0)

    run(work())


def test_a_broker_counts_how_each_transaction_ended() -> None:
    async def work() -> None:
        async with one_broker() as (broker, value):
            arguments: dict[str, Any] = {"transactional_id": "pay", "transaction_timeout_ms": 1_000}

            def ends() -> list[float]:
                return [value(f"{end}_transactions_total") for end in ("committed", "aborted", "expired")]

            async with AsyncProducer(broker.address, **arguments) as producer:
                async with producer.transaction() as transaction:
                    await transaction.send("clicks", b"x")
                    await transaction.flush()
                    await until(lambda: value("oldest_transaction_seconds") > 0)
                    assert (value("open_transactions"), value("open_transaction_blocks")) == (1, 1)
                assert (ends(), value("open_transactions")) == ([1, 0, 0], 0)
                async with producer.transaction() as transaction:
                    await transaction.send("clicks", b"x")
                    await transaction.flush()
                    await transaction.abort()
                assert ends() == [1, 1, 0]
                late = producer.transaction()
                await late.__aenter__()
                await late.send("clicks", b"x")
                await late.flush()
                await until(lambda: ends() == [1, 2, 1])
                with pytest.raises(TransactionAbortedError):
                    await late.__aexit__(None, None, None)
                assert ends() == [1, 2, 1], "a settled transaction is counted once"
                fenced = producer.transaction()
                await fenced.__aenter__()
                await fenced.send("clicks", b"x")
                await fenced.flush()
                async with AsyncProducer(broker.address, **arguments) as newer, newer.transaction():
                    assert ends() == [1, 3, 1], "the open transaction of the older instance is rolled back"
                with pytest.raises(ProducerFencedError):
                    await fenced.__aexit__(None, None, None)
            assert ends()[1:] == [3, 1]
            assert (value("open_transactions"), value("open_transaction_blocks")) == (0, 0)
            assert value("oldest_transaction_seconds") == 0

    run(work())


def test_the_counts_for_pages_write_nothing_into_the_state_logs() -> None:
    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            async with AsyncAdmin(broker.address) as admin:
                await admin.create_topic("clicks")
                async with AsyncProducer(broker.address, transactional_id="pay") as producer:
                    async with AsyncProducer(broker.address) as plain:
                        await (await plain.send("clicks", b"x", deliver_after=3_600))
                    async with producer.transaction() as transaction:
                        await transaction.send("clicks", b"x")
                        await transaction.flush()
                        (topic,) = [each for each in await admin.topics(internal=True) if each.name == STATE_TOPIC]
                        before = await admin.ends([topic])
                        for _ in range(3):
                            assert (await admin.delayed_topics(proven=False))["clicks"].records == 1
                            (shown,) = await admin.transactions(proven=False)
                            assert shown.blocks == {"clicks": 1}
                        assert await admin.ends([topic]) == before
                        assert len(await admin.transactions()) == 1
                        assert await admin.ends([topic]) != before, "a proof is an entry"

    run(work())


def test_a_listener_counts_what_its_handlers_answered() -> None:
    def handle(message: memq.Message) -> object:
        if message.value == b"late" and message.attempt == 1:
            raise ValueError("not yet")
        return {b"bad": memq.DeadLetter("bad"), b"parked": memq.Park("later")}.get(message.value or b"")

    registry, ended = CollectorRegistry(), threading.Event()
    with Cluster() as cluster:
        with memq.Producer(cluster.address, audit=False) as producer:
            for value in (b"good", b"late", b"bad", b"parked"):
                producer.send("orders", value)

        def count(name: str) -> float | None:
            return registry.get_sample_value(f"memq_listener_{name}", {"client": "billing"})

        with memq.Listener(cluster.address, "orders", "billing", handle, retry_delays_s=[0.05], audit=False) as running:
            registry.register(memq.ClientCollector({"billing": running}))
            running.start()
            names = ("done_records_total", "retried_records_total", "dead_letters_total", "parked_records_total")
            tries = int(WAIT_S / 0.02)
            assert any([count(name) for name in names] == [2, 1, 1, 1] or ended.wait(0.02) for _ in range(tries))
        assert [count(name) for name in names] == [2, 1, 1, 1]
        assert count("working_records") == 0
        assert 0 < (count("handler_seconds_total") or 0) < WAIT_S

        async def letters() -> dict[str, int]:
            async with AsyncAdmin(cluster.address) as admin:
                return await waiting_letters(admin)

        (metric,) = (each for each in lag_metrics([], asyncio.run(letters())) if each.name == "memq_group_dead_letters")
        assert [(sample.labels, sample.value) for sample in metric.samples] == [({"group": "billing"}, 2)]
