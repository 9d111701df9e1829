"""A broker that leaves, on virtual time: how long it waits for its heirs, and its log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.broker.broker import HAND_OVER_S, Broker
from memq.broker.spool.files import MemorySpool
from memq.errors import InvalidRequestError, UnreachableError
from memq.format.pointer import decode_pointer
from memq.governor.memory import MemoryCoordinator
from memq.limits import MIB
from memq.protocol.frames import AckLevel, Api
from memq.protocol.messages import Open
from memq.topic import Topic, TopicSettings, read_partitions
from tests.brokers import block_of, events_of, log_lines, write_frame
from tests.component.cluster_rig import Rig
from tests.component.served_brokers import Calls, away, on_memory_network, topic_named
from tests.memory_network import MemoryNetwork
from tests.skipping_loop import now_s, skip

PARTITIONS = 3


class Leaving:
    """A broker with three partitions whose batches are stored when the test says so, and one that takes them."""

    def __init__(self, one: Broker, topic: Topic, gates: list[asyncio.Event]) -> None:
        self.one = one
        self.topic = topic
        self.gates = gates

    @classmethod
    async def at(cls, cluster: Rig, network: MemoryNetwork, *, heir: bool = True) -> Leaving:
        one = await cluster.start("one", audit=False)
        topic = await one.partitions.create("clicks", PARTITIONS, TopicSettings(), exist_ok=False)
        gates = [asyncio.Event() for _ in range(PARTITIONS)]
        put = cluster.store.put

        async def gated(key: str, *arguments: object) -> None:
            for number, gate in enumerate(gates):
                if f"/{number:05d}-" in key:
                    await gate.wait()
            await put(key, *arguments)  # type: ignore[arg-type]  # whatever the broker says

        cluster.store.put = gated  # type: ignore[method-assign, assignment]  # a store that takes its time
        client = network.call(one.address).greet()
        for number in range(PARTITIONS):
            ask = Open(
                topic=topic.name,
                topic_id=topic.id,
                partition=number,
                producer=f"{number + 1:016x}",
                acks=AckLevel.ALL,
                sequence=0,
            )
            client.ask(Api.OPEN, ask, stream=number + 1)
            await skip(0.1)
            block = block_of(topic, 0, [b"v"], partition=number, producer=number + 1)
            client.say(write_frame(block, stream=number + 1))
        await skip(1)
        if heir:
            await cluster.start("two", audit=False)
        return cls(one, topic, gates)

    async def open_gates(self, *, every_s: float) -> None:
        """Let one partition after the other finish."""
        for gate in self.gates:
            await skip(every_s)
            gate.set()


async def changing(cluster: Rig, every_s: float, times: int) -> None:
    """Change something at the coordinator that moves no partition."""
    other = MemoryCoordinator(cluster.shared)
    for number in range(times):
        await skip(every_s)
        await other.create_topic(topic_named(f"other{number}", number + 100))


@pytest.mark.parametrize("leaves", [True, False])
def test_leaving_broker_waits_while_a_partition_goes_within_each_limit(leaves: bool) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network)
        begin_s = now_s()
        going = asyncio.create_task(leaving.open_gates(every_s=HAND_OVER_S - 5))
        if leaves:
            await leaving.one.hand_over(leaves=True)
            assert now_s() - begin_s == pytest.approx(PARTITIONS * (HAND_OVER_S - 5), abs=2)
            assert {cluster.owner(leaving.topic, number).broker for number in range(PARTITIONS)} == {"two"}
            assert leaving.one.partitions.held() == []
        else:
            with pytest.raises(TimeoutError):
                await leaving.one.hand_over()
            assert now_s() - begin_s == pytest.approx(HAND_OVER_S, abs=0.1)
        await going

    on_memory_network(work)


@pytest.mark.parametrize("gone", [0, 1])
def test_leaving_broker_waits_at_most_the_limit_for_the_next_partition(gone: int) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network)
        begin_s = now_s()
        changes = asyncio.create_task(changing(cluster, 7, 10))
        if gone:
            asyncio.get_running_loop().call_later(10, leaving.gates[0].set)
        with pytest.raises(TimeoutError):
            await leaving.one.hand_over(leaves=True)
        assert now_s() - begin_s == pytest.approx(10 * gone + HAND_OVER_S, abs=1)
        assert len(leaving.one.partitions.held()) == PARTITIONS - gone
        await changes
        for gate in leaving.gates:
            gate.set()

    on_memory_network(work)


def test_a_long_hand_over_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network)
        changes = asyncio.create_task(changing(cluster, 8, 1))
        going = asyncio.create_task(leaving.open_gates(every_s=15))
        await leaving.one.hand_over(leaves=True)
        await going
        await changes

    with caplog.at_level(logging.INFO, "memq"):
        on_memory_network(work)
    lines = dict.fromkeys(line for line in log_lines(caplog, logging.INFO) if line.startswith("draining-progress"))
    text = "draining-progress: {} of 3 partitions are closed for others to open"
    assert list(lines) == [text.format(done) for done in range(PARTITIONS)]


def test_a_broker_that_was_just_joined_by_another_hands_over_to_it_though_nobody_said_so() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        one = cluster.made("one", audit=False)
        one.services.coordinator.watch = lambda callback: lambda: None  # type: ignore[method-assign]  # calls are lost
        await one.start()
        topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        await cluster.start("two", audit=False)
        assert one.partitions.heirs == [], "it has not read of it"
        begin_s = now_s()
        done = asyncio.create_task(one.hand_over())
        await skip(1)
        assert cluster.owner(topic).broker == "two", "it governs: it moves them at once"
        await done
        assert now_s() - begin_s < 15, "it reads every 10 s"

    on_memory_network(work)


def test_a_broker_is_drained_though_the_hand_over_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network)
        await leaving.one.partitions.refresh()
        begin_s = now_s()
        draining = asyncio.create_task(leaving.one.drain())
        await skip(HAND_OVER_S + 1)
        assert list(network.listeners) == [("127.0.0.1", 4002)], "the other's: it takes nothing new"
        assert not draining.done()
        for gate in leaving.gates:
            gate.set()
        await draining
        assert now_s() - begin_s == pytest.approx(HAND_OVER_S + 1, abs=1)
        assert leaving.one.partitions.at_work() == []

    on_memory_network(work)
    assert [line for line in log_lines(caplog) if line.startswith("hand-over-failed")] == [
        "hand-over-failed: 3 partitions: TimeoutError()"
    ]


def test_a_broker_is_drained_though_the_coordinator_refuses_the_hand_over(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network)
        await leaving.one.partitions.refresh()
        calls = Calls(leaving.one.services.coordinator, "register")
        calls.fails["register"] = away(1)
        for gate in leaving.gates:
            gate.set()
        await leaving.one.drain()
        assert leaving.one.partitions.at_work() == []

    on_memory_network(work)
    assert "hand-over-failed" in events_of(caplog)


def test_a_broker_that_nobody_succeeds_drains_at_once_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network, heir=False)
        for gate in leaving.gates:
            gate.set()
        begin_s = now_s()
        await leaving.one.drain()
        assert now_s() - begin_s < 1

    on_memory_network(work)
    assert log_lines(caplog) == []


def test_a_request_to_hand_over_that_nobody_meets_leaves_the_broker_as_it_was() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network, heir=False)
        with pytest.raises(
            InvalidRequestError, match="no other broker has taken the 3 partitions of broker 'one'"
        ) as caught:
            await leaving.one.hand_over()
        assert caught.value.hint == "start another broker first"
        assert not (await leaving.one.services.coordinator.brokers())[0].draining
        calls = Calls(leaving.one.services.coordinator, "register")
        calls.fails["register"] = away(1)
        with pytest.raises(UnreachableError):
            await leaving.one.hand_over()
        for gate in leaving.gates:
            gate.set()

    on_memory_network(work)


def test_held_blocks_are_described_by_partition() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        leaving = await Leaving.at(cluster, network, heir=False)
        held = leaving.one.held_blocks()
        assert len(held) == PARTITIONS
        assert all(f"partition {number}" in line for number, line in enumerate(held))
        for gate in leaving.gates:
            gate.set()

    on_memory_network(work)


# ---- blocks that were acked with 1 on disk -----------------------------------------------------------


ON_DISK = TopicSettings(ack1="disk", seal_when_idle=False, batch_age_ms_max=5_000)


async def acked_on_disk(cluster: Rig, network: MemoryNetwork, disk: MemorySpool) -> tuple[Broker, Topic]:
    """Let a broker ack a block with 1 that is in its spool and not in the queue."""
    one = await cluster.start("one", audit=False, spool=disk)
    topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
    client = network.call(one.address).greet()
    ask = Open(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{7:016x}", acks=AckLevel.ONE, sequence=0)
    client.ask(Api.OPEN, ask, stream=1)
    await skip(0.1)
    client.say(write_frame(block_of(topic, 0, [b"v"], producer=7)))
    await skip(0.1)
    assert [frame.api for frame in client.heard()] == [Api.OPEN, Api.ACK]
    assert disk.segments
    return one, topic


async def records_of(cluster: Rig, topic: Topic) -> int:
    entries = await cluster.queue.read(read_partitions(topic)[0], 0, MIB)
    return sum(decode_pointer(entry.body).records for entry in entries)


def test_a_drain_leaves_nothing_in_the_spool() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        disk = MemorySpool()
        one, topic = await acked_on_disk(cluster, network, disk)
        await one.drain()
        assert await records_of(cluster, topic) == 1
        assert disk.segments == {}

    on_memory_network(work)


def test_a_drain_brings_what_an_earlier_run_left_to_the_queue_and_closes_its_partitions() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        disk = MemorySpool()
        one, topic = await acked_on_disk(cluster, network, disk)
        calls = Calls(cluster.store, "put")
        calls.fails["put"] = away(1_000)
        await one.close()
        calls.fails["put"].clear()
        again = await cluster.start("one", audit=False, spool=disk)
        await again.drain()
        assert await records_of(cluster, topic) == 1
        assert disk.segments == {}
        assert again.partitions.at_work() == []
        assert cluster.owner(topic).session == "", "given back"

    on_memory_network(work)


def test_a_broker_whose_memory_is_used_up_seals_what_it_has_and_reads_on() -> None:
    """Nothing else seals these batches within ten minutes."""
    slow = TopicSettings(batch_bytes_max=64 * MIB, batch_age_ms_max=600_000, seal_when_idle=False)
    size = 200_000

    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, memory_bytes_max=4 * MIB)
        topic = await broker.partitions.create("clicks", 1, slow, exist_ok=False)
        client = network.call(broker.address).greet()
        ask = Open(
            topic=topic.name, topic_id=topic.id, partition=0, producer=f"{7:016x}", acks=AckLevel.ALL, sequence=0
        )
        client.ask(Api.OPEN, ask, stream=1)
        await skip(0.1)
        left = b"".join(write_frame(block_of(topic, number, [bytes(size)], producer=7)) for number in range(40))
        acked = 0
        for _ in range(200):
            left = client.say_some(left)
            await skip(0.1)
            acked = max([acked, *(frame.argument for frame in client.heard() if frame.api == Api.ACK)])
        assert not left
        assert acked >= 40 - 4 * MIB // size, "the rest waits for its age, or for more"

    on_memory_network(work)
