"""A restore from the bucket alone brings back the delayed records of the last snapshot, and younger ones (S9)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from awscrt.checksums import crc32c

from memq.broker.restore.state_logs import RestoredStates, StateLogRestorer
from memq.broker.service_partitions.hosts import shard_name
from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import NotFoundError, StoreError
from memq.format.held_object import (
    MAGIC,
    TRAILER,
    HeldBlock,
    HeldLane,
    HoldId,
    Target,
    cancelled_object,
    held_object_end,
)
from memq.format.held_sequences import delayed_sequence
from memq.format.key import held_object_key, run_key, state_part_key, state_snapshot_key
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.format.state_log.entry import StateDecision, StateDecisions, StateEntry, encode_state_entry
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunWriter
from memq.format.state_log.snapshot import SavedState
from memq.holds.decisions import (
    HOLDS_MACHINE,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import MarkDecision, RunDecision
from memq.notification import Publication, Span
from memq.state_log.log_reading import read_state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import ObjectEntry, confirmed_reads
from memq.topic import CLOCK_ERROR_MS, STATE_TOPIC, ReadPartition, Topic, read_partitions, shard_id
from tests.unit.bare_cluster import CLUSTER, Cluster, topic_of

CLICKS = topic_of("clicks", 16)
MARGIN_MS = CLICKS.settings.dedup_window_ms - 2 * CLOCK_ERROR_MS
LOGS = 2


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


def log_of(partition: int) -> int:
    return zlib.crc32(shard_name(CLICKS.id, partition).encode()) % LOGS


HERE, OTHER = (next(each for each in range(16) if log_of(each) == number) for number in range(LOGS))
TARGET, ELSEWHERE = (Target("clicks", CLICKS.id, partition) for partition in (HERE, OTHER))


class Bucket(Cluster):
    """The objects of a cluster with two state logs, which the queue has lost, and a topic."""

    def __init__(self) -> None:
        super().__init__()
        self.state = topic_of(STATE_TOPIC, LOGS)
        self.machine = HoldMachine()  # of the first log
        self.numbers = 0
        self.ids: dict[int, HoldId] = {}

    def decide(self, *decisions: HoldsDecision) -> None:
        for each in decisions:
            self.machine.apply(encode_decision(each))

    def block(self, producer: int, due_s: int = 100, offset: int = 0) -> HeldBlock:
        due_ms = self.clock.wall_ms() + 1_000 * due_s
        first = delayed_sequence(due_ms)
        self.ids[producer] = HoldId(producer, first)
        return HeldBlock(self.ids[producer], first + 1, due_ms, offset, 5)

    async def held(self, *producers: int, target: Target = TARGET, lane: str = "", due_s: int = 100) -> HoldDecision:
        """Store an object with these blocks; return the decision about it."""
        self.numbers += 1
        blocks = tuple(self.block(producer, due_s, 5 * number) for number, producer in enumerate(producers))
        lanes = (HeldLane(target, lane, blocks),)
        key = held_object_key(CLUSTER, self.numbers, self.clock.wall_ms())
        await self.put_bytes(key, b"block" * len(producers) + held_object_end(lanes, 0))
        return HoldDecision(key, 0, lanes)

    async def put_bytes(self, key: str, data: bytes) -> None:
        await self.store.put(key, [data], crc32c(data))

    async def run(self, *producers: int, due_s: int = 100) -> NamedRun:
        writer = RunWriter(HELD_ROWS)
        writer.add([RunEntry(self.block(producer, due_s), TARGET, "object") for producer in producers])
        run, buffers = writer.finish(run_key(CLUSTER, STATE_TOPIC, self.state.id, 0, 1), 0, 1)
        await self.put_bytes(run.key, b"".join(buffers))
        return run

    async def save(self) -> None:
        """Store the last snapshots of both logs."""
        for partition, machine in enumerate((self.machine, HoldMachine())):
            states = {name: each.snapshot() for name, each in ServiceMachines().by_name().items()}
            saved = SavedState(5, 3, 2, {**states, HOLDS_MACHINE: machine.snapshot()})
            key = state_snapshot_key(CLUSTER, STATE_TOPIC, self.state.id, partition, 3, 5)
            await SnapshotStore(self.store).put(saved, key)

    async def cancelled(self, *producers: int, shard: int | None = None) -> None:
        """Store an object that says that the first log has dropped these holds."""
        self.numbers += 1
        here = shard_id(self.state.id, 0, 0) if shard is None else shard
        data = cancelled_object([self.ids[each] for each in producers], here)
        await self.put_bytes(held_object_key(CLUSTER, self.numbers, self.clock.wall_ms()), data)

    async def landed(self, *producers: int, partition: int = HERE) -> None:
        """Let a pointer with these producers be in the log of a partition."""
        log, ids = CLICKS.read_partition_of(partition), [self.ids[each] for each in producers]
        await self.queue.create([log], 0)
        pointer = Pointer(
            kind="data",
            cluster=CLUSTER,
            topic="clicks",
            topic_id=CLICKS.id,
            partition=partition,
            epoch=1,
            locations=(Location(store="main", key="key", offset=0, length=10),),
            records=len(producers),
            raw_bytes=10,
            stored_bytes=10,
            producers=tuple(ProducerRanges(each.producer, ((each.first, each.first + 1),)) for each in ids),
            checksum=1,
            broker="b",
            sealed_ms=self.clock.wall_ms(),
        )
        await self.queue.publish(Publication(log, partition, 1, self.clock.wall_ms(), encode_pointer(pointer)))

    async def restore(self, *topics: Topic) -> tuple[HoldMachine, HoldMachine, RestoredStates]:
        """Restore; return the held records of both logs."""
        restorer = StateLogRestorer(CLUSTER, self.store, self.queue, self.clock)
        report = await restorer.restore(self.state, {}, {}, topics or (CLICKS,))
        found: list[HoldMachine] = []
        for log in read_partitions(self.state):
            machines, reading = ServiceMachines(), await read_state_log(self.queue, log)
            assert reading.scan.snapshot is not None
            reading.scan.fold(machines.by_name, await SnapshotStore(self.store).get(reading.scan.snapshot))
            found.append(machines.holds)
        return found[0], found[1], report


def in_bucket(work: Callable[[Bucket], Awaitable[None]]) -> None:
    async def made() -> None:
        bucket = Bucket()
        bucket.clock.advance(10 * MARGIN_MS)
        await work(bucket)

    asyncio.run(made())


def producers(machine: HoldMachine) -> list[int]:
    return sorted(hold.producer for hold in machine.open)


def test_a_restore_finds_the_holds_that_are_younger_than_the_snapshot() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2))
        await bucket.save()
        bucket.clock.advance(50_000)
        young = await bucket.held(3, 4)
        await bucket.held(5, target=ELSEWHERE)
        await bucket.held(6, lane="1.1")
        await bucket.held(7, target=Target("gone", "ee" * 16, 0))
        first, second, report = await bucket.restore()
        assert (producers(first), producers(second), report.findings) == ([1, 2, 3, 4], [5], [])
        assert first.objects[young.key] == 2
        assert (first.waiting, second.waiting) == ({TARGET: 4}, {ELSEWHERE: 1})

    in_bucket(work)


def test_a_restore_names_the_cancelled_records_that_wait_again() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3))
        await bucket.save()
        await bucket.landed(3)
        log = read_partitions(bucket.state)[0]
        await bucket.queue.create([log], 0)
        drop = DropDecision(bucket.clock.wall_ms(), (bucket.ids[2], bucket.ids[3], HoldId(9, 1)))
        others = (StateDecision("other", b""), StateDecision(HOLDS_MACHINE, b"damaged"))
        decisions = (*others, StateDecision(HOLDS_MACHINE, encode_decision(drop)))
        entry = encode_state_entry(StateEntry(4, 7, StateDecisions(decisions)))  # the log lacks those before it
        await bucket.queue.publish(Publication(log, 0, 4, bucket.clock.wall_ms(), entry))
        first, _, report = await bucket.restore()
        assert producers(first) == [1, 2]
        ((place, text),) = report.findings
        assert place == f"topic '{STATE_TOPIC}' partition 0"
        assert text.startswith("delayed records wait again, though an entry of the log cancels them; blocks: 1, first ")
        assert text.endswith(f" 0000000000000002:{bucket.ids[2].first}")

    in_bucket(work)


def test_a_record_that_was_cancelled_after_the_snapshot_does_not_wait_again() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3))
        await bucket.save()
        await bucket.held(4, 5)
        await bucket.cancelled(2, 5)
        await bucket.cancelled(1, shard=shard_id(bucket.state.id, 1, 0))  # another log has dropped a hold of this name
        first, _, report = await bucket.restore()
        assert (producers(first), report.findings) == ([1, 3, 4], [])
        assert [first.state_of(bucket.ids[each]) for each in (2, 5)] == [HoldState.DROPPED] * 2
        assert (first.waiting, first.dropped) == ({TARGET: 3}, {TARGET: 2})

    in_bucket(work)


def test_a_cancelled_record_of_a_run_does_not_wait_again() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3), MarkDecision(0))
        run = await bucket.run(1, 2, 3)
        bucket.decide(RunDecision(1, (run,), bucket.clock.wall_ms()))
        await bucket.save()
        await bucket.cancelled(2)
        first, _, report = await bucket.restore()
        assert (first.waiting, first.open, report.findings) == ({TARGET: 2}, {}, [])
        assert list(first.spilled.runs[run.key].dropped) == [bucket.ids[2]]
        assert first.state_of(bucket.ids[2]) is HoldState.DROPPED

    in_bucket(work)


def test_cancelled_records_are_no_reason_to_restore_a_state_log() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.block(1)
        await bucket.cancelled(1)
        report = await StateLogRestorer(CLUSTER, bucket.store, bucket.queue, bucket.clock).restore(
            bucket.state, {}, {}, (CLICKS,)
        )
        assert (report.restored, report.intact, report.findings) == (0, 0, [])

    in_bucket(work)


def test_a_restore_finds_the_holds_of_a_state_log_without_a_snapshot() -> None:
    async def work(bucket: Bucket) -> None:
        await bucket.held(1, 2)
        await bucket.held(3)
        await bucket.landed(2)
        restorer = StateLogRestorer(CLUSTER, bucket.store, bucket.queue, bucket.clock)
        report = await restorer.restore(bucket.state, {}, {}, (CLICKS,))
        assert (report.restored, report.intact, report.findings) == (1, 0, []), "the other log has no holds"
        first, other = read_partitions(bucket.state)
        machines, reading = ServiceMachines(), await read_state_log(bucket.queue, first)
        assert reading.scan.snapshot is not None
        reading.scan.fold(machines.by_name, await SnapshotStore(bucket.store).get(reading.scan.snapshot))
        assert producers(machines.holds) == [1, 3]
        assert machines.holds.state_of(bucket.ids[2]) is HoldState.RELEASED
        assert (await read_state_log(bucket.queue, other)).empty

        damaged = held_object_key(CLUSTER, 77, bucket.clock.wall_ms())
        await bucket.put_bytes(damaged, b"damaged")
        again = await restorer.restore(bucket.state, {}, {}, (CLICKS,))
        assert (again.restored, again.intact) == (0, 1)
        assert [name for name, _ in again.findings] == [f"object '{damaged}'"]

    in_bucket(work)


def test_a_restore_takes_no_old_object_and_no_hold_with_a_known_end() -> None:
    async def work(bucket: Bucket) -> None:
        await bucket.held(1)  # cancelled long ago: the snapshot has forgotten it
        bucket.clock.advance(MARGIN_MS + 1_000)
        bucket.decide(await bucket.held(2, 3), DropDecision(bucket.clock.wall_ms(), (bucket.ids[2],)))
        await bucket.save()
        first, _, _ = await bucket.restore()
        assert producers(first) == [3]
        assert first.state_of(bucket.ids[2]) is HoldState.DROPPED

    in_bucket(work)


@pytest.mark.parametrize("slow_ms", [30_000, 2 * CLICKS.settings.stale_publish_ms])
def test_a_restore_finds_a_hold_whose_object_was_stored_long_before_a_slow_snapshot(slow_ms: int) -> None:
    """The producer waits as long as its delivery time-out, and the store takes the snapshot long after its moment."""

    async def work(bucket: Bucket) -> None:
        await bucket.held(1)  # its decision counts after the moment of the snapshot
        bucket.clock.advance(CLICKS.settings.delivery_timeout_ms + slow_ms)
        await bucket.save()
        first, _, report = await bucket.restore()
        assert (producers(first), report.findings) == ([1], [])

    in_bucket(work)


def test_a_restore_believes_no_single_not_found_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2))
        await bucket.save()
        await bucket.landed(1)
        span, lies = bucket.queue.span, [True]

        async def lying(partition: ReadPartition) -> Span:
            if lies and partition.topic == "clicks":
                lies.pop()
                raise NotFoundError("the queue does not show it")
            return await span(partition)

        monkeypatch.setattr(bucket.queue, "span", lying)
        with pytest.raises(NotFoundError, match="does not show it"):
            await bucket.restore()
        first, _, _ = await bucket.restore()
        assert producers(first) == [2]

    in_bucket(work)


def test_a_restore_tells_two_holds_of_one_producer_apart() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, due_s=100))
        one = bucket.ids[1]
        bucket.decide(await bucket.held(1, due_s=200))
        other = bucket.ids[1]
        await bucket.save()
        await bucket.landed(1)
        bucket.ids[1] = one
        await bucket.landed(1)
        first, _, _ = await bucket.restore()
        assert producers(first) == []
        assert [first.state_of(each) for each in (one, other)] == [HoldState.RELEASED] * 2

    in_bucket(work)


def test_a_restore_does_not_release_again_what_targets_have() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3, 4))
        bucket.decide(ReleaseDecision((Unit(TARGET, 1, (bucket.ids[3], bucket.ids[4])),)))
        await bucket.save()
        await bucket.held(5, 6)
        await bucket.landed(1, 3, 5)
        await bucket.landed(2, partition=OTHER)  # of another partition
        first, _, _ = await bucket.restore()
        assert producers(first) == [2, 6]
        assert [hold.block.id.producer for hold in first.units[TARGET][1].holds] == [4]
        assert [first.state_of(bucket.ids[each]) for each in (1, 3, 5)] == [HoldState.RELEASED] * 3
        assert first.waiting == {TARGET: 2}

    in_bucket(work)


def test_a_restore_ends_holds_in_runs_that_targets_have() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3, due_s=25), MarkDecision(0))
        run = await bucket.run(1, 2, 3, due_s=25)
        bucket.decide(RunDecision(1, (run,), bucket.clock.wall_ms()))
        await bucket.save()
        bucket.clock.advance(25_000 - CLOCK_ERROR_MS)  # the clock of their owner was ahead
        await bucket.landed(1, 3)
        first, _, report = await bucket.restore()
        assert (first.open, first.waiting, report.findings) == ({}, {TARGET: 1}, [])
        assert sorted(hold.producer for hold in first.spilled.runs[run.key].dropped) == [1, 3]

    in_bucket(work)


def test_a_restore_counts_a_hold_once_that_left_its_run_and_was_released() -> None:
    """The hold came again under another object, so its copy in the run is dead."""

    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, due_s=25), MarkDecision(0))
        run = await bucket.run(1, 2, due_s=25)
        bucket.decide(RunDecision(1, (run,), bucket.clock.wall_ms()), await bucket.held(1, due_s=25))
        await bucket.save()
        bucket.clock.advance(25_000)
        await bucket.landed(1)
        first, _, _ = await bucket.restore()
        assert (first.open, first.waiting, first.waiting_count) == ({}, {TARGET: 1}, 1)

    in_bucket(work)


def test_a_restore_takes_no_snapshot_of_another_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same epoch and offset."""

    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2))
        bucket.clock.advance(2 * MARGIN_MS)
        await bucket.save()
        wanted, other = (
            state_part_key(state_snapshot_key(CLUSTER, STATE_TOPIC, bucket.state.id, partition, 3, 5), 0)
            for partition in range(LOGS)
        )
        usual, lies = bucket.store.get, [other]

        async def get(key: str) -> bytes:
            return await usual(lies.pop() if lies and key == wanted else key)

        monkeypatch.setattr(bucket.store, "get", get)
        first, _, report = await bucket.restore()
        assert (producers(first), lies, report.findings) == ([1, 2], [], [])

    in_bucket(work)


def test_a_restore_takes_no_index_of_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bucket: Bucket) -> None:
        await bucket.save()
        one, other = await bucket.held(1), await bucket.held(2)
        usual, lies = bucket.store.get, [other.key]

        async def get(key: str) -> bytes:
            return await usual(lies.pop() if lies and key == one.key else key)

        monkeypatch.setattr(bucket.store, "get", get)
        first, _, report = await bucket.restore()
        assert {hold.producer: each.key for hold, each in first.open.items()} == {1: one.key, 2: other.key}
        assert (lies, report.findings) == ([], [])

    in_bucket(work)


def test_a_restore_finds_objects_that_one_listing_omits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bucket: Bucket) -> None:
        await bucket.save()
        young = await bucket.held(1)
        usual, lies = bucket.store.list, [young.key]

        async def listed(prefix: str) -> AsyncIterator[ObjectEntry]:
            omitted = lies.pop() if lies and young.key.startswith(prefix) else ""
            async for entry in usual(prefix):
                if entry.key != omitted:
                    yield entry

        monkeypatch.setattr(bucket.store, "list", listed)
        first, _, _ = await bucket.restore()
        assert (producers(first), lies) == ([1], [])

    in_bucket(work)


def test_a_restore_ends_while_a_store_does_not_answer_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its released holds would come again."""

    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2, 3, due_s=25), MarkDecision(0))
        bucket.decide(RunDecision(1, (await bucket.run(1, 2, 3, due_s=25),), bucket.clock.wall_ms()))
        await bucket.save()
        bucket.clock.advance(25_000)
        await bucket.landed(1, 3)

        async def get_range(key: str, first: int, length: int, **more: bool) -> bytes:
            raise StoreError("busy")

        with monkeypatch.context() as patched:
            patched.setattr(bucket.store, "get_range", get_range)
            with pytest.raises(StoreError, match="busy"):
                await bucket.restore()
        first, _, report = await bucket.restore()
        assert (first.waiting, report.findings) == ({TARGET: 1}, [])

    in_bucket(work)


def test_a_restore_reports_runs_and_held_objects_that_it_can_not_read() -> None:
    async def work(bucket: Bucket) -> None:
        bucket.decide(await bucket.held(1, 2), MarkDecision(0))
        run = await bucket.run(1, 2)
        bucket.decide(RunDecision(1, (run,), bucket.clock.wall_ms()))
        await bucket.save()
        damaged, newer = (held_object_key(CLUSTER, number, bucket.clock.wall_ms()) for number in (77, 78))
        await bucket.put_bytes(damaged, b"damaged")
        await bucket.put_bytes(newer, b"block" + TRAILER.pack(0, crc32c(b""), 99, MAGIC))
        bucket.store.objects[run.key] = bucket.store.objects[run.key][:-40]
        first, _, report = await bucket.restore()
        found = [name for name, _ in report.findings][:3]
        assert found == [*sorted([f"object '{damaged}'", f"object '{newer}'"]), f"run '{run.key}'"]
        assert list(first.spilled.runs) == [run.key], "its holds are not given up"

    in_bucket(work)
