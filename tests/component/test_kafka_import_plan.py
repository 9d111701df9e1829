"""A copy of another log's topics: its plan, the positions that it stores, its identities, and its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import pytest

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.broker_router import BrokerRouter
from memq.client.bulk.block_cutter import Cut, decode_plan, producer_of
from memq.client.bulk.direct_writer import FixedIdentityWriter
from memq.client.bulk.kafka_import import ImportedPartition, ImportProgress, KafkaImport, PartitionImport
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.errors import InvalidRequestError, NotFoundError, QueueError
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.reading.import_source import KafkaSource, SourceRecord, SourceTopic
from memq.notification.remote import RemoteQueue
from memq.protocol.link import Link
from memq.runtime.network import ProtocolFactory, SocketNetwork
from memq.runtime.runtime import Runtime
from memq.topic import Position, TopicSettings
from tests.brokers import run, running_broker, until
from tests.component.kafka_source import LaterClock, MemorySource, copy, imported_of, numbered, source_of
from tests.unit.queue_model import Block, Log

PLACE = ("orders", 0)
BYTES_MAX = 1_000


def with_broker(test: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_broker() as broker:
            await test(broker)

    run(main())


class MemoryWriter:
    """Keeps the blocks that it gets; each counts as acked."""

    def __init__(self, acked: int = 0) -> None:
        self.acked = acked
        self.cuts: list[tuple[int, int]] = []

    async def put(self, cut: Cut) -> None:
        self.cuts.append((cut.first, cut.next))
        self.acked = cut.next

    async def drain(self) -> None:
        """All blocks are acked."""


def lane_of(writer: MemoryWriter, end: int, last_end: int) -> PartitionImport:
    imported = cast(ImportProgress, None)
    return PartitionImport(PLACE, imported, cast(FixedIdentityWriter, writer), "copied", end, last_end)


def record(offset: int) -> SourceRecord:
    return SourceRecord(PLACE, offset, b"x", None, (), 1_000)


def test_a_plan_ends_before_its_end_and_the_next_one_begins_there() -> None:
    async def work() -> None:
        writer = MemoryWriter()
        lane = lane_of(writer, 3, 5)
        for offset in range(4):
            await lane.take(record(offset), BYTES_MAX)
        assert (lane.reached, lane.done, lane.records) == (True, False, 3)
        await lane.finish()
        assert writer.cuts == [(0, 3)]
        lane.renew()
        for offset in (3, 4, 5):
            await lane.take(record(offset), BYTES_MAX)
        await lane.finish()
        assert (writer.cuts, lane.done, lane.records) == ([(0, 3), (3, 5)], True, 5)

    asyncio.run(work())


def test_a_plan_whose_last_offsets_have_no_records_is_stored_as_complete() -> None:
    async def work() -> None:
        lane = lane_of(MemoryWriter(), 9, 9)
        for offset in range(4):
            await lane.take(record(offset), BYTES_MAX)
        lane.meet_end(8)
        assert not lane.reached
        lane.meet_end(9)
        await lane.finish()
        offset, plan = lane.position
        assert (lane.done, offset, decode_plan(plan)) == (True, 9, 9)

    asyncio.run(work())


def test_the_next_plan_is_stored_before_its_first_record_is_sent() -> None:
    source = source_of(numbered(range(10)))
    source.broken_after = 4

    async def test(broker: Broker) -> None:
        with pytest.raises(QueueError):
            await copy(source, broker)
        source.rows["orders", 0] |= numbered(range(10, 17))
        source.broken_after = 12
        with pytest.raises(QueueError):
            await copy(source, broker)
        offset, plan = source.positions["orders", 0]
        assert (offset, decode_plan(plan)) == (10, 17)

    with_broker(test)


async def no_index(pointer: Pointer) -> list[BlockEntry]:
    raise AssertionError("the pointer names all producers")


def test_each_partition_has_the_identity_that_earlier_versions_gave_it() -> None:
    source = source_of(numbered(range(4)), numbered(range(7)))

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        async with AsyncAdmin(broker.address) as admin:
            target = (await admin.topic("copied")).topic
        pool = LinkPool(Runtime(), bootstrap_addresses(broker.address))
        queue = RemoteQueue(BrokerRouter(pool))
        ends: list[int] = []
        for number in range(2):
            producer = producer_of("kafka-1", "id of orders", number, target.id)
            held = await ImportProgress(queue, no_index, target.read_partition_of(number), number, producer).held()
            assert held is not None
            ends.append(held.next)
        await pool.close()
        assert ends == [4, 7]

    with_broker(test)


class WatchedNetwork(SocketNetwork):
    """Keeps the connections that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        made = await super().connect(host, port, factory, timeout_s=timeout_s)
        self.links.append(cast(Link, made))
        return made


@pytest.mark.parametrize("broken", [False, True])
def test_a_copy_that_is_over_has_no_connection(broken: bool) -> None:
    source = source_of(numbered(range(2), range(5, 9)), numbered(range(4)), portion=1)
    source.broken_after = 8 if broken else None  # a gap ends a block: one is sent by then

    async def test(broker: Broker) -> None:
        network = WatchedNetwork()
        job = KafkaImport(cast(KafkaSource, source), broker.address, "copied", runtime=Runtime(network=network))

        def connected() -> int:
            return sum(link.open for link in network.links)

        if broken:
            with pytest.raises(QueueError):
                await job.run(["orders"])
            assert connected() == 3
        else:
            await job.run(["orders"])
            await until(lambda: connected() == 2)  # for topics and positions: the writers are closed
        await job.close()
        await until(lambda: connected() == 0)

    with_broker(test)


class NotingSource(MemorySource):
    """Notes its calls among the steps of the copy."""

    said: list[str]

    async def describe(self, topics: Sequence[str]) -> tuple[str, dict[str, SourceTopic]]:
        self.said.append("describe")
        return await super().describe(topics)

    async def join(self, group: str, topics: Sequence[str], partitions: Sequence[KafkaPartition]) -> None:
        self.said.append("join")
        await super().join(group, topics, partitions)

    async def ends(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, int]]:
        self.said.append("ends")
        return await super().ends(partitions)

    async def start(self, offsets: Mapping[KafkaPartition, int]) -> None:
        self.said.append("start")
        await super().start(offsets)

    async def committed_of_others(
        self, partitions: Sequence[KafkaPartition], own: str
    ) -> dict[str, dict[KafkaPartition, int]]:
        self.said.append("committed_of_others")
        return await super().committed_of_others(partitions, own)


def test_each_step_is_named_before_it_is_done() -> None:
    source = NotingSource({PLACE: numbered(range(4))})
    source.said = []

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        source.positions.clear()
        source.said.clear()
        clock = LaterClock(TopicSettings().reader_window_ms)
        job = KafkaImport(
            cast(KafkaSource, source), broker.address, "copied", step=source.said.append, runtime=Runtime(clock=clock)
        )
        await job.run(["orders"])
        await job.copy_groups()
        await job.close()
        assert [said.partition(" ")[0] for said in source.said if not said.startswith("asking for")] == [
            *("asking", "describe", "joining", "join", "asking", "ends", "looking", "waiting"),
            *("start", "reading", "closing", "copying", "committed_of_others"),
        ]

    with_broker(test)


def test_a_wait_is_named_before_it_begins() -> None:
    source = source_of(numbered(range(4)))

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        source.positions.clear()
        waits = asyncio.Event()

        def note(step: str) -> None:
            if step.startswith("waiting "):
                waits.set()

        job = KafkaImport(cast(KafkaSource, source), broker.address, "copied", step=note)
        running = asyncio.create_task(job.run(["orders"]))
        await waits.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await job.close()

    with_broker(test)


def test_a_copy_continues_behind_records_that_retention_has_removed() -> None:
    source = source_of(numbered(range(10)))

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        source.rows[PLACE] = numbered(range(15, 20))
        source.begins = {PLACE: 15}
        done, _ = await copy(source, broker)
        assert done == [ImportedPartition("orders", 0, 5, 15, 20)]

    with_broker(test)


def test_a_sequence_is_found_in_the_second_range_of_a_batch() -> None:
    log = Log()
    log.batch(Block(2, 0, 4), Block(1, 10, 2), Block(1, 20, 2))
    imported, _ = imported_of(log)
    assert asyncio.run(imported.positions([21])) == {21: Position(0, 0, 7)}


def test_the_positions_of_early_sequences_need_no_later_batches() -> None:
    log = Log()
    log.batch(Block(1, 0, 5))
    log.batch(Block(1, 5, 5))
    imported, _ = imported_of(log)
    assert asyncio.run(imported.positions([2])) == {2: Position(0, 0, 2)}


def test_a_plan_without_records_is_complete_at_once() -> None:
    lane = lane_of(MemoryWriter(acked=9), 9, 9)
    assert (lane.reached, lane.done) == (True, True)
    assert not lane_of(MemoryWriter(acked=8), 9, 9).reached


def test_a_topic_is_made_as_wide_as_the_widest_of_several() -> None:
    source = source_of(numbered(range(2)), numbered(range(3)))
    source.rows["others", 0] = {0: b"x"}

    async def test(broker: Broker) -> None:
        done, _ = await copy(source, broker, ["orders", "others"])
        assert [(each.topic, each.partition, each.records) for each in done] == [
            ("orders", 0, 2),
            ("orders", 1, 3),
            ("others", 0, 1),
        ]

    with_broker(test)


def test_a_topic_that_another_client_makes_meanwhile_is_copied_into(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(numbered(range(2)))

    async def made_meanwhile(admin: AsyncAdmin, name: str) -> None:
        await admin.create_topic(name, partitions=2)
        raise NotFoundError(f"topic '{name}' does not exist")

    async def test(broker: Broker) -> None:
        monkeypatch.setattr(AsyncAdmin, "topic", made_meanwhile)
        done, _ = await copy(source, broker)
        assert [each.records for each in done] == [2]

    with_broker(test)


def test_a_group_with_members_at_the_target_is_refused() -> None:
    source = source_of(numbered(range(5)))
    source.others = {"billing": {PLACE: 3}}

    async def test(broker: Broker) -> None:
        await copy(source, broker)
        async with AsyncConsumer(broker.address, "copied", group="billing", audit=False) as consumer:
            assert await consumer.poll(10) is not None
            with pytest.raises(InvalidRequestError):
                await copy(source, broker, groups=True)

    with_broker(test)
