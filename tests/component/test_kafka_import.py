"""A copy of another log's topics, from a source in memory: each record once, however often it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from memq.broker.broker import Broker
from memq.cli.records.import_topics import STEP_S, StepLines
from memq.client.admin import AsyncAdmin
from memq.client.bulk.block_cutter import decode_plan, producer_of
from memq.client.bulk.kafka_import import Held, ImportedPartition, KafkaImport
from memq.client.consumer.consumer import AsyncConsumer
from memq.errors import DeniedError, InvalidRequestError, MemqError, NotFoundError, QueueError, TooLargeError
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import Entry
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.reading.import_source import KafkaSource
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.topic import Position, TopicSettings
from tests.brokers import run, running_broker
from tests.component.kafka_source import (
    LaterClock,
    MemorySource,
    Value,
    copy,
    imported_of,
    numbered,
    source_of,
)
from tests.skipping_loop import run_skipping, skip
from tests.stepped_time import SteppedLoop, step, stepped_runtime
from tests.unit.queue_model import Block, Log


async def rows_of(broker: Broker) -> dict[int, list[tuple[Value, Value, int]]]:
    """Return value, key and timestamp of what a reader of the copy gets, by partition."""
    found: dict[int, list[tuple[Value, Value, int]]] = {}
    async with AsyncConsumer(broker.address, "copied", end="end", audit=False) as consumer:
        async for batch in consumer:
            rows = [(record.value, record.key, record.timestamp_ms) for record in batch]
            found.setdefault(batch.partition, []).extend(rows)
        assert consumer.stats().counts.duplicate_records == 0
    return found


def expected(source: MemorySource) -> dict[int, list[tuple[Value, Value, int]]]:
    return {
        number: [(value, b"k", 1_000 + offset) for offset, value in sorted(rows.items())]
        for (_, number), rows in source.rows.items()
        if rows
    }


def test_a_source_that_begins_again_is_copied_once() -> None:
    """Kafka's client does so when Kafka calls the requested offset out of range; the copy hung then."""

    async def work() -> None:
        source, takes = source_of(numbered(range(40))), 0

        def rewind() -> None:
            nonlocal takes
            takes += 1
            if takes == 5:
                source.start_again()

        source.on_take = rewind
        async with running_broker() as broker:
            async with asyncio.timeout(60):
                done, _ = await copy(source, broker)
            assert await rows_of(broker) == expected(source)
        assert [each.records for each in done] == [40]

    run(work())


def with_broker(test: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_broker() as broker:
            await test(broker)

    run(main())


def run_stepped(work: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop whose time it steps; the test's own limit ends it."""
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(work)


def job_of(source: MemorySource, broker: Broker, clock: Clock) -> KafkaImport:
    return KafkaImport(cast(KafkaSource, source), broker.address, "copied", runtime=Runtime(clock=clock))


def test_all_comes_over_as_it_was_and_later_what_came_since() -> None:
    source = source_of(numbered(range(10), range(15, 20)), numbered(range(100, 103)), {})
    source.begins = {("orders", 1): 100}
    moved: list[int] = []

    async def test(broker: Broker) -> None:
        done, groups = await copy(source, broker, moved=moved.append)
        assert done == [
            ImportedPartition("orders", 0, 15, 0, 20),
            ImportedPartition("orders", 1, 3, 100, 103),
            ImportedPartition("orders", 2, 0, 0, 0),
        ]
        assert (groups, sum(moved), source.closed) == ({}, 18, 1)
        assert await rows_of(broker) == expected(source)
        plans_of = {partition: (offset, decode_plan(plan)) for partition, (offset, plan) in source.positions.items()}
        assert plans_of == {("orders", 0): (20, 20), ("orders", 1): (103, 103), ("orders", 2): (0, 0)}
        assert [each.records for each in (await copy(source, broker))[0]] == [0, 0, 0]
        source.rows["orders", 0] |= numbered(range(22, 30))
        source.rows["orders", 2] |= numbered(range(2))
        done, _ = await copy(source, broker)
        assert [(each.records, each.begin, each.end) for each in done] == [(8, 20, 30), (0, 103, 103), (2, 0, 2)]
        assert await rows_of(broker) == expected(source)

    with_broker(test)
    assert source.group.startswith("memq-import.")


@pytest.mark.parametrize("broken_after", [0, 1, 4, 9, 14])
def test_a_copy_that_was_given_up_continues_and_fulfills_its_plan_first(broken_after: int) -> None:
    source = source_of(numbered(range(10)), numbered(range(5)))
    source.broken_after = broken_after

    async def test(broker: Broker) -> None:
        with pytest.raises(QueueError, match="the source is gone"):
            await copy(source, broker)
        assert [decode_plan(plan) for _, plan in source.positions.values()] == [10, 5]
        source.rows["orders", 0] |= numbered(range(10, 17))
        source.broken_after = None
        before = len(source.stores)
        done, _ = await copy(source, broker)
        assert [each.end for each in done] == [17, 5]
        assert await rows_of(broker) == expected(source)
        plans = [decode_plan(each["orders", 0][1]) for each in source.stores[before:] if ("orders", 0) in each]
        assert plans == sorted(plans, key=lambda end: end or 0)
        assert set(plans) == {10, 17}, "the plan of the run before comes first"

    with_broker(test)


def test_a_plan_is_stored_before_its_first_record_is_read() -> None:
    """A run that is killed behind that record leaves blocks that only the same plan cuts again."""
    source, plans = source_of(numbered(range(10))), list[int | None]()
    source.broken_after = 4
    seek = source.seek

    async def noted(partition: KafkaPartition, offset: int) -> None:
        plans.append(decode_plan(source.positions[partition][1]))
        await seek(partition, offset)

    source.seek = noted  # type: ignore[method-assign]

    async def test(broker: Broker) -> None:
        with pytest.raises(QueueError, match="the source is gone"):
            await copy(source, broker)
        source.rows["orders", 0] |= numbered(range(10, 17))
        source.broken_after = None
        await copy(source, broker)
        assert plans == [17]

    with_broker(test)


def test_a_copy_stores_now_and_then_how_far_it_is() -> None:
    source = source_of(numbered(range(20)), portion=1)

    async def test() -> None:
        source.on_take = lambda: step(0.3)
        async with running_broker() as broker:
            job = job_of(source, broker, stepped_runtime().clock)
            await job.run(["orders"])
            await job.close()

    run_stepped(test())
    plain = 3  # at the begin, and at the end
    assert 20 * 0.3 / 1.0 - 2 <= len(source.stores) - plain <= 20 * 0.3 / 1.0


def test_import_skips_records_that_another_run_copied() -> None:
    """The positions that the source has are older than what the target holds: the target decides."""
    source = source_of(numbered(range(10)))

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        source.positions["orders", 0] = (4, source.positions["orders", 0][1])
        source.rows["orders", 0] |= numbered(range(10, 12))
        done, _ = await copy(source, broker)
        assert [(each.records, each.begin, each.end) for each in done] == [(2, 10, 12)]
        assert await rows_of(broker) == expected(source)

    with_broker(test)


def test_a_lost_plan_is_waited_out() -> None:
    """Without it nobody knows where the last block on its way ends: it can't arrive any more after the window."""
    source = source_of(numbered(range(10)))

    window = TopicSettings().reader_window_ms

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        source.positions.clear()
        source.rows["orders", 0] |= numbered(range(10, 12))
        for later_ms in (0, window - 60_000):
            early = job_of(source, broker, LaterClock(later_ms))
            running = asyncio.create_task(early.run(["orders"]))
            assert not (await asyncio.wait((running,), timeout=0.1))[0]
            running.cancel()
            await early.close()
        late = job_of(source, broker, LaterClock(window))
        done = await late.run(["orders"])
        await late.close()
        assert [(each.records, each.begin, each.end) for each in done] == [(2, 10, 12)]
        assert await rows_of(broker) == expected(source)

    with_broker(test)


def test_a_topic_that_is_too_narrow_and_a_record_that_is_too_large_are_refused() -> None:
    source = source_of(numbered(range(2)), {5: bytes(2_001)})

    async def test(broker: Broker) -> None:
        async with AsyncAdmin(broker.address) as admin:
            await admin.create_topic("copied", partitions=1)
            with pytest.raises(InvalidRequestError, match="topic 'copied' has 1 partitions, the source has 2"):
                await copy(source, broker)
            await admin.delete_topic("copied")
            await admin.create_topic("copied", partitions=3, settings={"record_bytes_max": 2_003})
            with pytest.raises(TooLargeError, match="record 5 of partition 1 of Kafka topic 'orders' has 2004 bytes"):
                await copy(source, broker)
            source.rows["orders", 1][5] = bytes(2_000)  # with its key and header it is as large as the topic allows
            source.rows["orders", 0][0] = None
            done, _ = await copy(source, broker)
            assert [each.records for each in done] == [2, 1]
            assert await rows_of(broker) == expected(source)
        with pytest.raises(NotFoundError, match="no topic nothing"):
            await copy(source, broker, ["nothing"])

    with_broker(test)


def test_groups_get_the_positions_that_they_had() -> None:
    source = source_of(numbered(range(10), range(15, 20)), numbered(range(5)))
    source.others = {
        "billing": {("orders", 0): 7, ("orders", 1): 5},
        "audit": {("orders", 0): 12},
        "bad name": {("orders", 0): 3},
    }

    async def test(broker: Broker) -> None:
        _, placed = await copy(source, broker, groups=True)
        assert placed == {"billing": 2, "audit": 1, "bad name": 0}
        for group, wanted in (("billing", [b"7", b"8", b"9"]), ("audit", [b"15", b"16", b"17"])):
            async with AsyncConsumer(broker.address, "copied", group=group, audit=False) as consumer:
                found: list[Value] = []
                while len(found) < 3:
                    batch = await consumer.poll(10)
                    assert batch is not None
                    if batch.partition == 0:
                        found += batch.values()
                assert found[:3] == wanted

    with_broker(test)


def test_groups_of_several_topics_have_no_position_in_one() -> None:
    source = source_of(numbered(range(2)))
    source.rows["others", 0] = {0: b"x"}

    async def test(broker: Broker) -> None:
        done, _ = await copy(source, broker, ["orders", "others"])
        assert [(each.topic, each.records) for each in done] == [("orders", 2), ("others", 1)]
        with pytest.raises(InvalidRequestError, match="from several topics into one"):
            await copy(source, broker, ["orders", "others"], groups=True)

    with_broker(test)


# ---- what the target holds -----------------------------------------------------------------------


def test_each_step_before_the_first_record_is_named() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            source, said = MemorySource({("orders", 0): {0: b"a"}}), list[str]()
            moved: list[int] = []
            await copy(source, broker, moved=moved.append, step=lambda text: said.append(f"{len(moved)} {text}"))
            assert said[:2] == ["0 asking Kafka for orders", "0 asking for topic copied"]
            assert said[2].startswith(f"0 joining group {source.group} of Kafka")
            assert said[-2:] == ["0 reading the first records", f"{len(moved)} closing"]

    run(work())


def test_a_step_that_lasts_is_a_line_and_a_quick_one_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        steps = StepLines("import")
        steps.begin("asking Kafka for orders")
        await skip(STEP_S - 0.1)
        steps.begin("joining a group")
        await skip(STEP_S - 0.1)
        assert capsys.readouterr().err == ""
        await skip(0.2)
        assert capsys.readouterr().err == "import: joining a group …\n"
        steps.begin("closing")
        steps.end()
        steps.end()
        await skip(2 * STEP_S)
        assert capsys.readouterr().err == ""

    run_skipping(work())


@pytest.mark.parametrize("named", [True, False])
def test_how_far_a_producer_came_is_read_from_the_end(named: bool) -> None:
    log = Log()
    log.control()
    log.batch(Block(1, 0, 5), Block(2, 0, 3), named=named)
    log.batch(Block(2, 3, 3), Block(1, 5, 5), Block(1, 10, 2), named=named)
    log.batch(Block(1, 0, 5), late=True, named=named)  # a copy that came late
    log.control("closed")
    log.batch(Block(2, 6, 3), named=named)
    imported, _ = imported_of(log)

    async def ask() -> None:
        held = await imported.held()
        assert isinstance(held, Held)
        assert held.next == 12
        assert await imported_of(log, producer=3)[0].held() is None
        assert await imported_of(Log())[0].held() is None
        found = await imported.positions([11, 0, 4, 5, 12, 40])
        assert found == {
            0: Position(0, 1, 0),
            4: Position(0, 1, 4),
            5: Position(0, 2, 3),
            11: Position(0, 2, 9),
            12: Position(0, 6, 0),
            40: Position(0, 6, 0),
        }

    asyncio.run(ask())


def test_a_pointer_that_can_not_be_read_hides_its_own_batch_alone() -> None:
    log = Log()
    log.batch(Block(1, 0, 4))
    log.batch(Block(1, 4, 4))
    log.batch(Block(1, 8, 4))
    log.entries[1] = Entry(1, 1, b"{torn")

    async def ask() -> None:
        found = await imported_of(log)[0].positions([2, 9])
        assert found == {2: Position(0, 0, 2), 9: Position(0, 2, 1)}
        log.entries[2] = Entry(2, 2, b"{torn")
        held = await imported_of(log)[0].held()
        assert held is not None
        assert held.next == 4

    asyncio.run(ask())


@pytest.mark.parametrize("error", [DeniedError("not you"), QueueError("away")])
def test_a_target_that_can_not_be_looked_up_is_not_made(error: MemqError, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(numbered(range(2)))

    async def refused(admin: AsyncAdmin, name: str) -> None:
        raise error

    async def test(broker: Broker) -> None:
        async with AsyncAdmin(broker.address) as admin:
            monkeypatch.setattr(AsyncAdmin, "topic", refused)
            with pytest.raises(type(error)):
                await copy(source, broker)
            assert [topic.name for topic in await admin.topics()] == []

    with_broker(test)


def test_a_gap_of_the_source_leads_to_the_next_record() -> None:
    log = Log()
    log.batch(Block(2, 0, 4), Block(1, 10, 2), Block(1, 20, 2))
    log.batch(Block(1, 30, 2))

    async def ask() -> None:
        found = await imported_of(log)[0].positions([3, 12, 15, 21, 25])
        assert found == {
            3: Position(0, 0, 4),
            12: Position(0, 0, 6),
            15: Position(0, 0, 6),
            21: Position(0, 0, 7),
            25: Position(0, 1, 0),
        }

    asyncio.run(ask())


def test_a_producer_that_came_long_ago_is_found_too() -> None:
    log = Log()
    log.batch(Block(1, 0, 5))
    for number in range(600):
        log.batch(Block(2, number, 1))

    async def ask() -> None:
        imported, queue = imported_of(log)
        held = await imported.held()
        assert held is not None
        assert held.next == 5
        assert queue.reads * 7 < 700, "no pointer is read twice"
        other, queue = imported_of(log, producer=2)
        await other.held()
        assert queue.reads * 7 < 300, "not all is read for one that is near the end"

    asyncio.run(ask())


def test_a_pointer_of_another_write_partition_is_not_the_producers() -> None:
    log = Log()
    log.batch(Block(1, 0, 5))
    pointer = decode_pointer(log.entries[0].body)
    fields = {name: getattr(pointer, name) for name in pointer.__struct_fields__}
    log.add(Pointer(**(fields | {"partition": 1})), log.bodies[0])
    log.batch(Block(1, 5, 4))
    later = decode_pointer(log.entries.pop().body)
    fields = {name: getattr(later, name) for name in later.__struct_fields__}
    log.add(Pointer(**(fields | {"partition": 1})), log.bodies[2])

    async def ask() -> None:
        held = await imported_of(log)[0].held()
        assert held == Held(5, pointer.sealed_ms)
        assert await imported_of(log)[0].positions([5]) == {5: Position(0, 4, 0)}

    asyncio.run(ask())


def test_a_copy_has_an_identity_that_only_its_source_and_target_have() -> None:
    ids = {
        producer_of(*each)
        for each in (("k", "t", 0, "m"), ("k", "t", 1, "m"), ("k", "u", 0, "m"), ("l", "t", 0, "m"), ("k", "t", 0, "n"))
    }
    assert len(ids) == 5
    assert all(0 < each < 1 << 63 for each in ids)
