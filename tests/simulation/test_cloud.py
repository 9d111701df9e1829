"""The services behind faulty calls: effects of each fault, of dead processes, and of changed buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.errors import QueueError, StoreError
from memq.format.pointer import Pointer, decode_pointer, encode_pointer
from memq.governor import BrokerEntry
from memq.notification import Publication
from memq.simulation.ports.cloud import Cloud, Doors, Observer
from memq.simulation.ports.faults import CallFaults, WorldFaults
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import SimulationError, World
from memq.storage_handlers import Buffer
from memq.topic import Position, ReadPartition

PARTITION = ReadPartition("t", "0" * 32, 0)
BODY: list[Buffer] = [b"abc" * 1000, bytearray(b"def" * 5000)]
CHECKSUM = crc32c(BODY[1], crc32c(BODY[0]))
QUICK = CallFaults(latency_s_min=0.01, latency_s_max=0.02)


OPENED = encode_pointer(Pointer(kind="opened", cluster="c", topic="t", topic_id="0" * 32, partition=0, epoch=1))


class Seen(Observer):
    """Writes down what landed, and when."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[tuple[str, float]] = []

    def stored(self, key: str) -> None:
        self.log.append((key, self.world.now))

    def deleted(self, key: str) -> None:
        self.log.append((f"-{key}", self.world.now))

    def trimmed(self, partition: ReadPartition, before: int) -> None:
        self.log.append((f"-{before}", self.world.now))

    def dropped(self, partitions: Sequence[ReadPartition]) -> None:
        self.log.append((f"-{len(partitions)} logs", self.world.now))

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        self.log.append((f"{group} {position}", self.world.now))

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        self.log.append((f"{group}? {position}", self.world.now))

    def published(
        self, publication: Publication, offset: int, node: SimNode, read_to: int, handed_over_s: float
    ) -> None:
        self.log.append((f"{offset} {decode_pointer(publication.body).kind}", self.world.now))


def run(
    call: CallFaults, main: Callable[[Doors], Coroutine[Any, Any, None]], *, seed: int = 1, kill_at: float = 0
) -> tuple[Seen, Cloud]:
    """Run `main` on one node with these faults in the store, the queue and the coordinator."""

    async def start(node: SimNode) -> None:
        await cloud.queue.create([PARTITION], 1_000)
        await main(cloud.doors(node))

    with World(seed) as world:
        seen = Seen(world)
        cloud = Cloud(world, WorldFaults(store=call, queue=call, coordinator=call))
        cloud.observer = seen
        node = world.spawn("a", start)
        cloud.monitor.claimed(PARTITION.topic_id, 0, 1, node.index)
        if kill_at:
            world.run(kill_at)
            node.kill()
        world.run(100)
    return seen, cloud


async def put(doors: Doors) -> None:
    await doors.store.put("k", BODY, CHECKSUM)


def test_calls_take_time_and_answer() -> None:
    async def main(doors: Doors) -> None:
        begin = doors.store.node.clock.monotonic()
        await doors.store.put("k", BODY, CHECKSUM)
        assert doors.store.node.clock.monotonic() - begin >= 0.02
        assert await doors.store.get("k") == b"".join(BODY)
        assert await doors.store.get_range("k", 1, 3) == b"bca"
        assert await doors.store.size("k") == 18_000
        assert [entry.key async for entry in doors.store.list()] == ["k"]
        await doors.store.delete("k")
        publication = Publication(PARTITION, 0, 1, doors.store.node.clock.wall_ms(), OPENED)
        assert await doors.queue.publish(publication) == 0
        assert [entry.body for entry in await doors.queue.read(PARTITION, 0, 100)] == [OPENED]
        assert (await doors.queue.span(PARTITION)).end == 1

    seen, _cloud = run(QUICK, main)
    assert [what for what, _when in seen.log] == ["k", "-k", "0 opened"]


@pytest.mark.parametrize(
    ("faults", "lands"),
    [
        (replace(QUICK, before_rate=1.0), "never"),
        (replace(QUICK, after_rate=1.0), "before the error"),
        (replace(QUICK, late_rate=1.0), "after the error"),
    ],
)
def test_an_error_says_nothing_about_what_happened(faults: CallFaults, lands: str) -> None:
    errors: list[float] = []

    async def main(doors: Doors) -> None:
        with pytest.raises(StoreError):
            await doors.store.put("k", BODY, CHECKSUM)
        errors.append(doors.store.node.world.now)
        with pytest.raises(QueueError):
            await doors.queue.span(PARTITION)

    seen, cloud = run(faults, main)
    assert ("k" in cloud.handler.objects) == (lands != "never")
    if lands != "never":
        assert (seen.log[0][1] > errors[0]) == (lands == "after the error")


def test_a_hanging_call_ends_late() -> None:
    async def main(doors: Doors) -> None:
        begin = doors.store.node.clock.monotonic()
        with pytest.raises(StoreError):
            await doors.store.size("k")
        assert doors.store.node.clock.monotonic() - begin > 39

    run(replace(QUICK, hang_rate=1.0), main)


@pytest.mark.parametrize("when", ["at once", "soon", "after cancel"])
def test_a_buffer_that_changes_before_the_put_ends_is_found(when: str) -> None:
    async def main(doors: Doors) -> None:
        buffer = bytearray(50_000)
        task = asyncio.create_task(doors.store.put("k", [buffer], crc32c(buffer)))
        await asyncio.sleep(0.005 if when == "soon" else 0)
        if when == "after cancel":
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        buffer[:] = b"x" * len(buffer)
        await asyncio.wait([task])

    with pytest.raises(SimulationError, match="a changed the bytes of 'k' while they were put"):
        run(QUICK, main)


def test_a_cancelled_put_waits_for_its_readers_and_may_land() -> None:
    async def main(doors: Doors) -> None:
        buffer = bytearray(50_000)
        task = asyncio.create_task(doors.store.put("k", [buffer], crc32c(buffer)))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        buffer[:] = b"x" * len(buffer)
        await asyncio.sleep(1)

    _seen, cloud = run(QUICK, main)
    assert cloud.handler.objects["k"] == bytes(50_000)


def test_the_dead_put_nothing_new_but_what_was_handed_over_may_land() -> None:
    long = CallFaults(latency_s_min=5, latency_s_max=5)
    assert not run(long, put, kill_at=1)[0].log
    assert [what for what, _ in run(long, put, kill_at=5.5)[0].log] == ["k"]

    async def publish(doors: Doors) -> None:
        await doors.queue.publish(Publication(PARTITION, 0, 1, 0, OPENED))

    landed = [len(run(long, publish, kill_at=1, seed=seed)[0].log) for seed in range(20)]
    assert 0 < sum(landed) < 20


def test_a_wait_returns_when_the_entry_lands() -> None:
    woken: list[float] = []

    async def main(doors: Doors) -> None:
        node = doors.store.node
        waiting = asyncio.create_task(doors.queue.wait({PARTITION: 0}, 30))
        await asyncio.sleep(2)
        await doors.queue.publish(Publication(PARTITION, 0, 1, 0, OPENED))
        await waiting
        woken.append(node.world.now)
        task = asyncio.create_task(doors.queue.wait({PARTITION: 1}, 30))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(QUICK, main)
    assert 2 < woken[0] < 2.2


def test_watchers_run_on_their_node_and_end_with_it() -> None:
    calls: list[float] = []

    async def main(doors: Doors) -> None:
        world = doors.store.node.world

        async def changed() -> None:
            assert asyncio.get_running_loop() is doors.store.node.loop
            calls.append(world.now)

        stop = doors.coordinator.watch(changed)
        await asyncio.sleep(1)
        await doors.coordinator.register(BrokerEntry(id="b", session="s", address="a:1"))
        await asyncio.sleep(1)
        stop()
        await doors.coordinator.unregister(BrokerEntry(id="b", session="s", address="a:1"))
        await asyncio.sleep(1)
        await doors.coordinator.close()

    _seen, cloud = run(QUICK, main)
    assert len(calls) == 1
    assert cloud.cluster.handles == []


def test_a_blocked_node_waits() -> None:
    ended: list[float] = []

    async def main(doors: Doors) -> None:
        doors.block(7)
        await doors.store.put("k", BODY, CHECKSUM)
        ended.append(doors.store.node.world.now)

    run(QUICK, main)
    assert ended[0] > 7
