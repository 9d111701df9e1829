"""`memq restore` of groups on state logs: from the bucket alone, with the positions of the last snapshot (S9)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from awscrt.checksums import crc32c

from memq.broker.broker import Broker
from memq.broker.restore.restore import Restored, Restorer
from memq.broker.service_partitions.hosts import STATE_PARTITIONS
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import GenerationFencedError, QueueError, RetryableError
from memq.format.key import state_prefix
from memq.format.state_log.entry import StateDecisions, StateSnapshot, decode_state_entry
from memq.governor.memory import MemoryCoordinator
from memq.groups.remote import RemoteGroups
from memq.notification import NotificationQueue, Publication
from memq.notification.memory import MemoryQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.protocol.link import connect_link
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.state_log import state_log
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, ReadPartition, Topic, read_partitions
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig

SESSION_MS = 6_000
FIRST, ALL = 24, 40


@pytest.fixture(autouse=True)
def young_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot follows soon on each decision, and what does not read is read again at once."""
    monkeypatch.setattr(state_log, "SNAPSHOT_S", 0.05)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class FailingQueue(MemoryQueue):
    """Fails after so many publications; -1: never."""

    left = -1

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        if not self.left:
            raise QueueError("the queue is gone")
        self.left -= 1
        return await super().publish(publication)


class Cluster:
    """A cluster of one broker at a time, with a topic of two partitions and a group that has read a part."""

    def __init__(self, made: Rig) -> None:
        self.rig = made
        self.topic: Topic
        self.broker: Broker

    async def fill(self) -> None:
        """Send all records; the group `report` reads the first ones and commits, and `late` reads nothing."""
        await self.start("a")
        async with AsyncAdmin(self.broker.address) as admin:
            self.topic = await admin.create_topic("clicks", partitions=2)
        await self.send(range(FIRST))
        assert await self.read("report") == list(range(FIRST))
        await self.send(range(FIRST, ALL))

    async def start(self, name: str) -> None:
        self.broker = await self.rig.start(name)
        await self.broker.partitions.refresh()

    async def send(self, numbers: Sequence[int]) -> None:
        async with AsyncProducer(self.broker.address) as producer:
            for number in numbers:
                await producer.send("clicks", b"%d" % number, partition=number % 2)
                await producer.flush()  # each is a batch

    async def read(self, group: str) -> list[int]:
        async with AsyncConsumer(self.broker.address, ["clicks"], group=group, end="end") as consumer:
            return sorted([int(value or b"") async for batch in consumer for value in batch.values()])

    async def snapshot(self) -> None:
        """Wait until snapshots have all decisions."""
        while True:
            if all([await self._is_saved(log) for log in read_partitions(self.state_topic)]):
                return
            await asyncio.sleep(0)

    async def _is_saved(self, log: ReadPartition) -> bool:
        span = await self.rig.queue.span(log)
        entries = await self.rig.queue.read(log, span.begin, 1 << 30)
        contents = [(entry.offset, decode_state_entry(entry.body).content) for entry in entries]
        decided = max((at for at, each in contents if isinstance(each, StateDecisions) and each.decisions), default=-1)
        saved = max((each.offset for _, each in contents if isinstance(each, StateSnapshot)), default=-2)
        return decided < saved

    async def lose(self, *logs: ReadPartition) -> None:
        """Stop the broker; the queue loses these logs, or everything."""
        await self.snapshot()
        await self.broker.close()
        if logs:
            await self.rig.queue.drop(list(logs))
        else:
            self.rig.queue = MemoryQueue(self.rig.runtime.clock)

    async def restore(self, queue: NotificationQueue | None = None, *, dry_run: bool = False) -> dict[str, Restored]:
        parts = ("memq", "main", self.rig.store, queue or self.rig.queue, self.rig.runtime.clock)
        found = await Restorer(*parts, dry_run=dry_run).restore_all(MemoryCoordinator(self.rig.shared))
        return {each.topic: each for each in found}

    @property
    def state_topic(self) -> Topic:
        (found,) = (topic for topic in self.rig.shared.registry.topics() if topic.name == STATE_TOPIC)
        return found

    def snapshots(self) -> list[str]:
        """Return the keys of the snapshots with the group `report`."""
        partition = zlib.crc32(b"report") % STATE_PARTITIONS
        prefix = state_prefix("memq", STATE_TOPIC, self.state_topic.id, partition)
        return sorted(key for key in self.rig.store.objects if key.startswith(prefix))


def test_a_group_continues_at_its_last_snapshot_after_the_queue_was_lost() -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            member = await member_at(cluster.broker)
            known = await member.join("report", "m", read_partitions(cluster.topic), SESSION_MS)
            await cluster.lose()
            found = await cluster.restore()
            assert (found["clicks"].pointers, found[STATE_TOPIC].pointers) == (ALL, STATE_PARTITIONS)
            assert (found[STATE_TOPIC].groups, found[STATE_TOPIC].findings) == (["report"], [])
            await cluster.start("b")
            member = await member_at(cluster.broker)
            with pytest.raises(GenerationFencedError):
                await until_open(member, known.generation)
            assert (await member.describe("report")).generation > known.generation
            assert await cluster.read("report") == list(range(FIRST, ALL))
            assert await cluster.read("report") == []
            assert await cluster.read("late") == list(range(ALL))

    run(work())


def test_a_group_that_was_reset_continues_there_after_the_queue_was_lost() -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            async with AsyncAdmin(cluster.broker.address) as admin:
                await admin.reset_group("report", "clicks", "end")
            await cluster.lose()
            await cluster.restore()
            await cluster.start("b")
            assert await cluster.read("report") == []
            await cluster.send([ALL])
            assert await cluster.read("report") == [ALL]

    run(work())


@pytest.mark.parametrize("published", [0, 1, ALL - 1, ALL])
def test_an_interrupted_restore_of_groups_is_repeated_with_the_same_result(published: int) -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            await cluster.lose()
            made.queue = queue = FailingQueue(made.runtime.clock)
            queue.left = published
            with pytest.raises(QueueError, match="the queue is gone"):
                await cluster.restore()
            queue.left = -1
            first = await cluster.restore()
            assert first[STATE_TOPIC].groups == ["report"]
            again = await cluster.restore()
            assert (again[STATE_TOPIC].pointers, again[STATE_TOPIC].intact) == (0, STATE_PARTITIONS)
            assert again[STATE_TOPIC].groups == []
            await cluster.start("b")
            assert await cluster.read("report") == list(range(FIRST, ALL))

    run(work())


class ShiftedQueue(MemoryQueue):
    """Answers to publications in state logs with other offsets."""

    shift = 0

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        offset = await super().publish(publication)
        return offset + self.shift * (publication.partition.topic == STATE_TOPIC)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_restore_ends_if_a_state_log_begins_at_another_offset(shift: int) -> None:
    """The snapshot has the offset that the entry should have had."""

    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            await cluster.lose()
            made.queue = queue = ShiftedQueue(made.runtime.clock)
            queue.shift = shift
            with pytest.raises(QueueError, match=f"its first entry has offset {shift}, not 0"):
                await cluster.restore()

    run(work())


def test_a_group_whose_state_log_is_whole_follows_the_logs_that_were_restored() -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            member = await member_at(cluster.broker)
            known = await member.join("report", "m", read_partitions(cluster.topic), SESSION_MS)
            lost, _kept = read_partitions(cluster.topic)
            await cluster.lose(lost)
            before = len(cluster.snapshots())
            found = await cluster.restore()
            assert (found[STATE_TOPIC].pointers, found[STATE_TOPIC].groups) == (0, ["report"])
            assert found[STATE_TOPIC].intact == STATE_PARTITIONS
            assert len(cluster.snapshots()) == before
            await cluster.start("b")
            with pytest.raises(GenerationFencedError):
                await until_open(await member_at(cluster.broker), known.generation)
            assert await cluster.read("report") == list(range(FIRST, ALL))

    run(work())


def test_a_lost_state_log_comes_back_while_the_other_logs_are_in_use() -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            await cluster.lose(*read_partitions(cluster.state_topic))
            found = await cluster.restore(dry_run=True)
            assert (found[STATE_TOPIC].pointers, found[STATE_TOPIC].groups) == (STATE_PARTITIONS, ["report"])
            assert all(log.topic != STATE_TOPIC for log in made.queue.logs)
            assert (await cluster.restore())["clicks"].pointers == 0
            await cluster.start("b")
            assert await cluster.read("report") == list(range(FIRST, ALL))

    run(work())


def test_a_restore_takes_the_snapshot_before_a_damaged_one_and_reports_it() -> None:
    async def work() -> None:
        async with rig() as made:
            cluster = Cluster(made)
            await cluster.fill()
            await cluster.snapshot()
            (good,) = cluster.snapshots()
            body = made.store.objects[good]
            assert await cluster.read("report") == list(range(FIRST, ALL))
            await cluster.lose()
            (last,) = cluster.snapshots()
            assert last > good
            await made.store.put(good, [body], crc32c(body))
            made.store.objects[last] = made.store.objects[last][:-1]
            found = await cluster.restore()
            assert [key for key, _ in found[STATE_TOPIC].findings] == [last.rpartition("/")[0]]
            await cluster.start("b")
            assert await cluster.read("report") == list(range(FIRST, ALL))

    run(work())


def test_a_group_continues_at_its_last_snapshot_in_a_new_file_of_sqlite(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as made:
            lost = SqliteQueue(tmp_path / "lost.sqlite", made.runtime.clock)
            made.queue = cast(Any, lost)
            cluster = Cluster(made)
            await cluster.fill()
            await cluster.lose()
            await lost.close()
            new = SqliteQueue(tmp_path / "new.sqlite", made.runtime.clock)
            made.queue = cast(Any, new)
            assert (await cluster.restore())[STATE_TOPIC].groups == ["report"]
            await cluster.start("b")
            assert await cluster.read("report") == list(range(FIRST, ALL))
            await cluster.broker.close()
            await new.close()

    run(work())


# ---- inside ----------------------------------------------------------------------------------------


async def member_at(broker: Broker) -> RemoteGroups:
    """Return the queue as a client of one broker sees it."""
    link = await connect_link(Runtime(), None, parse_address(broker.address), client="test")
    return RemoteGroups(link.request)


async def until_open(member: RemoteGroups, generation: int) -> None:
    """Send a heartbeat until the group's log is open. Raises: as `Groups.heartbeat`, but no RetryableError."""
    async with asyncio.timeout(20):
        while True:
            try:
                await member.heartbeat("report", "m", generation)
            except RetryableError:
                await asyncio.sleep(0)
            else:
                return
