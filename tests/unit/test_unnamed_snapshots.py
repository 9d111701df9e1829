"""The sweep of snapshots of state logs: an object goes when the log names a later one, and the store has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.sweep.sweep import Sweep, Unnamed
from memq.broker.sweep.unnamed_snapshots import SUPERSEDED, partition_prefix
from memq.format.key import StateKey, parse_state_key, state_prefix, state_snapshot_key
from memq.format.state_log.entry import OpenedState, StateDecisions, StateEntry, StateSnapshot, encode_state_entry
from memq.format.state_log.snapshot import SavedState
from memq.governor import Coordinator
from memq.notification import Publication
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import confirmed_reads
from memq.topic import STATE_TOPIC, ReadPartition, read_partitions
from tests.unit.bare_cluster import CLUSTER, Cluster, topic_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is repeated at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class Yard(Cluster):
    """A state log of two partitions, written by hand, and passes of the sweep over the store."""

    def __init__(self) -> None:
        super().__init__()
        self.state = topic_of(STATE_TOPIC, 2)
        self.notes: list[str] = []
        self.kept = 0
        self.numbers: dict[int, int] = {}

    @property
    def log(self) -> ReadPartition:
        return read_partitions(self.state)[0]

    async def open(self, epoch: int) -> int:
        self.numbers[epoch] = 0
        return await self.publish(StateEntry(epoch, 0, OpenedState(epoch, "b")))

    async def decide(self, epoch: int) -> int:
        return await self.publish(StateEntry(epoch, self.numbers[epoch], StateDecisions(())))

    async def publish(self, entry: StateEntry) -> int:
        if not isinstance(entry.content, OpenedState):
            self.numbers[entry.epoch] += 1
        highest = max(self.numbers)  # Kafka takes late entries; the queue in memory compares this number alone
        return await self.queue.publish(
            Publication(self.log, 0, highest, self.clock.wall_ms(), encode_state_entry(entry))
        )

    async def store_snapshot(self, epoch: int, offset: int) -> StateSnapshot:
        """Store a snapshot as the owner of an epoch does, and do not name it."""
        key = state_snapshot_key(CLUSTER, STATE_TOPIC, self.state.id, 0, epoch, offset)
        return await SnapshotStore(self.store).put(SavedState(offset, epoch, self.numbers.get(epoch, 0), {}), key)

    async def name(self, epoch: int, snapshot: StateSnapshot) -> int:
        return await self.publish(StateEntry(epoch, self.numbers[epoch], snapshot))

    async def run(self, *, later_ms: int = DAY_MS) -> list[Unnamed]:
        """Run a pass, `later_ms` after the one before."""
        self.clock.advance(later_ms)
        topics = cast("Coordinator", self.topics)
        sweep = Sweep(CLUSTER, self.store, self.queue, topics, self.clock, self.notes.append, DAY_MS)
        found = [each async for each in sweep.run(HOUR_MS, 7 * DAY_MS)]
        self.kept = sweep.kept
        return found

    async def twice(self) -> list[str]:
        """Run two passes a day apart; return the keys that went, without their last part."""
        await self.run()
        return [each.key.rpartition("/")[0] for each in await self.run() if each.goes]


def in_yard(work: Callable[[Yard], Awaitable[None]]) -> None:
    async def made() -> None:
        yard = Yard()
        await yard.topic(yard.state)
        await work(yard)

    asyncio.run(made())


def test_a_snapshot_that_its_owner_did_not_name_goes_in_the_second_pass_after_the_next_one() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        left = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.open(2)
        assert await yard.run() == []  # no later snapshot has its state
        last = await yard.store_snapshot(2, await yard.decide(2) + 1)
        await yard.name(2, last)
        (found,) = await yard.run()
        assert (found.key, found.why, found.goes, found.new) == (f"{left.key}/0000", SUPERSEDED, False, True)
        assert [each.goes for each in await yard.run(later_ms=DAY_MS - 1)] == [False]
        assert [each.goes for each in await yard.run(later_ms=1)] == [True]
        assert f"{left.key}/0000" not in yard.store.objects
        assert f"{last.key}/0000" in yard.store.objects
        assert (yard.notes, yard.kept) == ([], 0)

    in_yard(work)


def test_a_snapshot_that_an_owner_replaced_and_did_not_delete_goes_with_all_its_parts() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        first = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.store.put(f"{first.key}/0001", [b"further"], crc32c(b"further"))
        await yard.name(1, first)
        second = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, second)
        assert await yard.twice() == []  # the log still names the first one
        await yard.queue.trim(yard.log, second.offset)
        assert await yard.twice() == [first.key, first.key]
        assert await yard.twice() == []

    in_yard(work)


def test_a_named_snapshot_stays_however_old_it_is_and_whoever_named_it() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        void = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.open(2)
        last = await yard.store_snapshot(2, await yard.decide(2) + 1)
        await yard.name(2, last)
        await yard.name(1, void)  # late: it does not count
        assert await yard.twice() == []
        assert {f"{void.key}/0000", f"{last.key}/0000"} <= yard.store.objects.keys()

    in_yard(work)


def test_a_named_snapshot_keeps_no_later_one_that_is_superseded() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        named = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, named)
        left = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.open(2)
        last = await yard.store_snapshot(2, await yard.decide(2) + 1)
        await yard.name(2, last)
        assert await yard.twice() == [left.key]

    in_yard(work)


def test_a_snapshot_stays_while_the_store_lacks_the_later_one() -> None:
    """It may be the last state that is left."""

    async def work(yard: Yard) -> None:
        await yard.open(1)
        await yard.store_snapshot(1, await yard.decide(1) + 1)
        last = await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, last)
        await yard.run()
        await yard.store.delete(f"{last.key}/0000")
        assert await yard.run() == []

    in_yard(work)


@pytest.mark.parametrize("damage", ["damaged", "newer"])
def test_no_snapshot_goes_while_an_entry_of_the_log_can_not_be_read(damage: str) -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, await yard.store_snapshot(1, await yard.decide(1) + 1))
        await yard.run()
        body = bytearray(encode_state_entry(StateEntry(1, 3, StateDecisions(()))))
        body[9 if damage == "newer" else 12] ^= 0x40
        body[4:8] = crc32c(bytes(body[8:])).to_bytes(4, "little") if damage == "newer" else body[4:8]
        await yard.queue.publish(Publication(yard.log, 0, 1, yard.clock.wall_ms(), bytes(body)))
        assert await yard.run() == []
        assert "are not swept" in yard.notes[-1]

    in_yard(work)


@pytest.mark.parametrize("loss", ["emptied", "dropped"])
def test_the_snapshots_of_a_lost_log_are_kept_and_reported(loss: str) -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, await yard.store_snapshot(1, await yard.decide(1) + 1))
        assert len(await yard.run()) == 1
        await yard.queue.drop([yard.log])
        if loss == "emptied":
            await yard.queue.create([yard.log], 30_000)
        assert await yard.run() == []
        assert yard.kept == 2
        assert "the queue has lost the state log of 2 objects" in yard.notes[-1]
        assert "memq restore makes it again from the last snapshot" in yard.notes[-1]

    in_yard(work)


def test_the_snapshots_of_a_topic_that_the_coordinator_forgot_are_kept_and_reported() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        await yard.store_snapshot(1, await yard.decide(1) + 1)
        await yard.name(1, await yard.store_snapshot(1, await yard.decide(1) + 1))
        yard.topics.known = [msgspec.structs.replace(yard.state, id="f" * 32)]  # it was made again
        assert await yard.twice() == []
        assert yard.kept == 2
        assert "the coordinator does not know the topic of 2 objects" in yard.notes[-1]

    in_yard(work)


def test_a_later_snapshot_of_a_log_that_was_cut_stays_until_the_log_has_passed_it() -> None:
    async def work(yard: Yard) -> None:
        await yard.open(1)
        forked = await yard.store_snapshot(1, 4)  # its log was cut at offset 1
        await yard.open(2)
        await yard.decide(2)
        await yard.name(2, await yard.store_snapshot(2, 3))
        assert await yard.twice() == []
        last = await yard.store_snapshot(2, await yard.decide(2) + 1)
        await yard.name(2, last)
        await yard.queue.trim(yard.log, last.offset)
        assert await yard.twice() == [forked.key, state_snapshot_key(CLUSTER, STATE_TOPIC, yard.state.id, 0, 2, 3)]

    in_yard(work)


def test_the_key_of_a_snapshot_names_its_log_epoch_and_offset() -> None:
    topic = topic_of(STATE_TOPIC)
    prefix = state_prefix(CLUSTER, topic.name, topic.id, 7)
    key = f"{state_snapshot_key(CLUSTER, topic.name, topic.id, 7, 12, 345)}/0002"
    assert parse_state_key(key) == StateKey(CLUSTER, topic.name, topic.id[:8], 7, 12, 345, 2)
    assert partition_prefix(key, CLUSTER) == prefix
    assert partition_prefix(key, "other") == ""
    for foreign in (f"{prefix}12-345/0002", f"{prefix}readme", f"{key}/1", key.replace("/state/", "/topics/"), "memq"):
        assert parse_state_key(foreign) is None
        assert partition_prefix(foreign, CLUSTER) == ""
