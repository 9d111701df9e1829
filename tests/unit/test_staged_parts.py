"""Staged parts of transactions: their holds, the check at the coordinator, the sweep, and the restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from awscrt.checksums import crc32c

from memq.broker.holds.staged_parts import StagedParts, mark_committed
from memq.broker.sweep import sweep as sweep_module
from memq.broker.sweep.sweep import UNNAMED, UNPROVEN, Sweep
from memq.broker.sweep.undecided_parts import manifests_in_use
from memq.broker.sweep.unproven_objects import committed_objects, is_decided
from memq.errors import InvalidRequestError, NotFoundError, TooOldError, TransactionAbortedError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import decided_key, is_manifest_key, manifest_key, manifest_of_mark, staged_object_key
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.format.staged_manifest import (
    MARK,
    TRANSACTIONS_WRITER,
    Manifest,
    StagedObject,
    StagedPiece,
    decode_manifest,
    encode_manifest,
)
from memq.format.state_log.entry import OpenedState, StateEntry
from memq.governor import Coordinator
from memq.holds.decisions import DoneDecision, HoldStagedDecision, HoldState
from memq.holds.decisions import encode_decision as encode_hold
from memq.holds.machine import HoldMachine
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.notification import Publication
from memq.storage_handlers import ObjectEntry, confirmed_reads
from memq.topic import Topic, read_partitions
from tests.unit.bare_cluster import CLUSTER, topic_of
from tests.unit.test_restored_holds import TARGET as RESTORED
from tests.unit.test_restored_holds import Bucket
from tests.unit.test_transaction_machine import CLICKS, Log
from tests.unit.test_unnamed_held import DAY_MS, HOUR_MS, HeldYard

TARGET = Target("clicks", "ab" * 16, 0)
WRITER = "nightly"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


def manifest_of(*numbers: int, writer: str = WRITER, created_ms: int = 0, **changes: Any) -> Manifest:
    """Return the manifest of batch 7: one object for each number, with a piece of so many records."""
    objects = tuple(
        StagedObject(
            key=staged_object_key(CLUSTER, writer, number, 0),
            bytes=1_000,
            index_offset=700,
            pieces=(
                StagedPiece(
                    topic="clicks",
                    topic_id="ab" * 16,
                    partition=0,
                    offset=0,
                    length=500,
                    records=number,
                    raw_bytes=500,
                ),
            ),
            created_ms=created_ms,
        )
        for number in numbers
    )
    whole = {"atomic": True, "created_ms": created_ms} | changes
    return Manifest(cluster=CLUSTER, writer=writer, batch_id=7, store="main", objects=objects, **whole)


def part(key: str, target: Target = TARGET, lane: str = "", producer: int = 1) -> HoldStagedDecision:
    lanes = (HeldLane(target, lane, (HeldBlock(HoldId(producer, 0), 5, 0, 0, 100),)),)
    return HoldStagedDecision(key, 0, 1_000, lanes)


# ---- machine -------------------------------------------------------------------------------------


class PartLog(Log):
    """The machines of a log that hold staged parts, too."""

    def hold_part(self, instance: int, number: int, target: Target = CLICKS) -> HoldState:
        self.holds += 1
        decision = part(manifest_key("c", WRITER, self.holds), target, f"{instance}.{number}", self.holds)
        (state,) = self.machines.holds.apply(encode_hold(decision))  # type: ignore[misc]
        return state  # type: ignore[has-type, no-any-return]


def test_a_staged_part_replaces_the_held_blocks_of_its_target_and_has_no_bound_of_bytes() -> None:
    log = PartLog()
    instance = cast(int, log.begin())
    other = Target("orders", "cd" * 16, 3)
    for target in (CLICKS, CLICKS, other):
        log.hold(instance, 1, target, size=TRANSACTION_TARGET_BYTES_MAX // 2)
    assert log.hold_part(instance, 1) is HoldState.HELD
    assert [each.target for each in log.machines.holds.open.values()] == [other, CLICKS]
    log.commit(instance, 1, 2)
    units = log.machines.holds.units
    assert {target: [each.holds[0].is_staged for each in found.values()] for target, found in units.items()} == {
        other: [False],
        CLICKS: [True],
    }
    assert log.hold_part(instance, 1) is HoldState.REFUSED, "the transaction has ended"


def test_a_commit_without_its_staged_part_is_rolled_back() -> None:
    log = PartLog()
    instance = cast(int, log.begin())
    log.hold(instance, 1)
    assert isinstance(cast(Any, log.commit(instance, 1, 2)).error, TransactionAbortedError)
    log.hold_part(instance, 2)
    log.hold(instance, 2)  # a late block next to the part
    assert "2 parts in topic 'clicks'" in str(cast(Any, log.commit(instance, 2, 2)).error)
    assert (log.machines.holds.units, log.machines.holds.open) == ({}, {})


def test_a_state_names_a_manifest_until_its_units_are_done() -> None:
    log, key = PartLog(), manifest_key("c", WRITER, 1)
    instance = cast(int, log.begin())
    log.hold_part(instance, 1)
    assert log.machines.holds.objects == {key: 1}
    for _ in range(2):  # open, and released
        restored = HoldMachine()
        restored.restore(log.machines.holds.snapshot())
        assert restored.objects == {key: 1}
        assert b"version\x03" in log.machines.holds.snapshot(), "a broker of an earlier release can't read it"
        log.commit(instance, 1, 1)
    log.machines.holds.apply(encode_hold(DoneDecision(1, ((CLICKS, 1),))))
    assert log.machines.holds.objects == {}
    assert b"version\x01" in log.machines.holds.snapshot()


# ---- keys and manifests --------------------------------------------------------------------------


def test_a_mark_and_its_manifest_name_each_other() -> None:
    key = manifest_key(CLUSTER, WRITER, 7)
    assert is_manifest_key(key)
    assert manifest_of_mark(decided_key(key)) == key
    for other in (decided_key(key), staged_object_key(CLUSTER, WRITER, 1, 0), f"{CLUSTER}/held/00/x"):
        assert not is_manifest_key(other)
    assert manifest_of_mark(key) == ""


def test_a_manifest_of_an_earlier_writer_is_not_atomic() -> None:
    plain = manifest_of(3)
    plain = Manifest(**{name: getattr(plain, name) for name in Manifest.__struct_fields__ if name != "atomic"})
    body = encode_manifest(plain)
    assert b"atomic" not in body
    assert not decode_manifest(body, "m").is_atomic
    assert decode_manifest(encode_manifest(manifest_of(3)), "m").is_atomic
    assert not manifest_of(3, writer=TRANSACTIONS_WRITER).is_remembered
    assert manifest_of(3).is_remembered


# ---- the coordinator -----------------------------------------------------------------------------


def services_of(yard: HeldYard) -> Any:
    settings = SimpleNamespace(cluster=CLUSTER, staged_age_ms=2 * DAY_MS)
    return SimpleNamespace(settings=settings, store=yard.store, runtime=SimpleNamespace(clock=yard.clock))


async def put_manifest(yard: HeldYard, manifest: Manifest) -> str:
    key, body = manifest_key(CLUSTER, manifest.writer, manifest.batch_id), encode_manifest(manifest)
    await yard.store.put(key, [body], crc32c(body))
    return key


def in_yard(work: Callable[[HeldYard], Awaitable[None]], *, opened: bool = True) -> None:
    async def made() -> None:
        yard = HeldYard()
        yard.clock.advance(30 * DAY_MS)
        await yard.topic(yard.state)
        if opened:
            await yard.publish(StateEntry(1, 0, OpenedState(1, "b")))
        await work(yard)

    asyncio.run(made())


def test_a_part_is_held_as_its_manifest_says_and_only_while_its_objects_are_young() -> None:
    async def work(yard: HeldYard) -> None:
        now_ms = yard.clock.wall_ms()
        key = await put_manifest(yard, manifest_of(3, 4, created_ms=now_ms))
        parts = await StagedParts.read(services_of(yard), WRITER, 7)
        lane = parts.lane(TARGET, "1.1", HoldId(9, 0), 7)
        assert (parts.key, lane.blocks[0].id, lane.blocks[0].next) == (key, HoldId(9, 0), 7)
        with pytest.raises(InvalidRequestError, match="2 pieces with 7 records"):
            parts.lane(TARGET, "1.1", HoldId(9, 0), 6)
        with pytest.raises(InvalidRequestError, match="0 pieces with 0 records"):
            parts.lane(Target("clicks", "ab" * 16, 1), "1.1", HoldId(9, 0), 0)
        yard.clock.advance(DAY_MS)
        parts.check_age(services_of(yard))
        yard.clock.advance(1)
        with pytest.raises(TooOldError):
            await StagedParts.read(services_of(yard), WRITER, 7)

    in_yard(work)


def test_a_part_of_a_producer_has_one_piece_and_its_batch_is_atomic() -> None:
    async def work(yard: HeldYard) -> None:
        now_ms = yard.clock.wall_ms()
        await put_manifest(yard, manifest_of(3, 4, writer=TRANSACTIONS_WRITER, created_ms=now_ms))
        parts = await StagedParts.read(services_of(yard), TRANSACTIONS_WRITER, 7)
        with pytest.raises(InvalidRequestError, match="2 pieces"):
            parts.lane(TARGET, "1.1", HoldId(9, 0), 7)
        await put_manifest(yard, manifest_of(3, created_ms=now_ms, atomic=False))
        with pytest.raises(InvalidRequestError, match="not one of a transaction"):
            await StagedParts.read(services_of(yard), WRITER, 7)

    in_yard(work)


# ---- sweep ---------------------------------------------------------------------------------------


async def staged(yard: HeldYard, writer: str, *, marked: bool = False) -> set[str]:
    """Store a manifest with an object, and its mark if it is committed; return their keys."""
    manifest = manifest_of(3, writer=writer, created_ms=yard.clock.wall_ms())
    key, data = await put_manifest(yard, manifest), b"staged"
    await yard.store.put(manifest.objects[0].key, [data], crc32c(data))
    if marked:
        for _ in range(2):
            await mark_committed(services_of(yard), key)
        assert bytes(yard.store.objects[decided_key(key)]) == MARK
    return {key, manifest.objects[0].key, *([decided_key(key)] if marked else [])}


async def passes(yard: HeldYard) -> tuple[set[str], set[str]]:
    """Run two passes, 8 and 16 days later; return what went, and what is kept as unproven."""
    gone, kept = set[str](), set[str]()
    for _ in range(2):
        yard.clock.advance(8 * DAY_MS)
        topics = cast("Coordinator", yard.topics)
        sweep = Sweep(CLUSTER, yard.store, yard.queue, topics, yard.clock, yard.notes.append, DAY_MS)
        async for each in sweep.run(HOUR_MS, 7 * DAY_MS):
            if each.goes and each.why == UNNAMED:
                gone.add(each.key)
            if each.kept and each.why == UNPROVEN:
                kept.add(each.key)
    return gone, kept


def test_a_sweep_keeps_what_an_undecided_transaction_names_and_takes_what_was_rolled_back() -> None:
    async def work(yard: HeldYard) -> None:
        held, rolled_back = await staged(yard, "held"), await staged(yard, "rolled-back")
        await yard.decide(part(manifest_key(CLUSTER, "held", 7)))
        gone, _ = await passes(yard)
        assert gone == rolled_back
        assert held <= set(yard.store.objects)

    in_yard(work)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_sweep_keeps_the_objects_of_a_writer_if_a_manifest_that_a_state_log_names_is_unreadable(fault: str) -> None:
    """The store may be wrong for a moment, and without the manifest nothing says which objects are in use."""

    async def work(yard: HeldYard) -> None:
        held, other = await staged(yard, "held"), await staged(yard, "other")
        key = manifest_key(CLUSTER, "held", 7)
        await yard.decide(part(key))
        if fault == "missing":
            del yard.store.objects[key]
        else:
            yard.store.objects[key] = b"x" * len(yard.store.objects[key])
        gone, _ = await passes(yard)
        assert gone == other
        assert held - {key} <= set(yard.store.objects)
        assert any("the staged objects of writer 'held' are not swept" in note for note in yard.notes)

    in_yard(work)


def test_a_sweep_keeps_the_objects_of_transactions_if_a_state_log_is_unreadable() -> None:
    async def work(yard: HeldYard) -> None:
        held = await staged(yard, "held")
        plain = await put_manifest(yard, manifest_of(4, atomic=False))
        gone, _ = await passes(yard)
        assert gone == {plain}
        assert held <= set(yard.store.objects)
        assert any("staged objects of transactions are not swept" in note for note in yard.notes)

    in_yard(work, opened=False)


def test_a_staged_object_counts_as_committed_if_its_transaction_has_a_mark() -> None:
    async def work(yard: HeldYard) -> None:
        marked, open_ = await staged(yard, "marked", marked=True), await staged(yard, "open")
        entries = [entry async for entry in yard.store.list(f"{CLUSTER}/staged/") if "/objects/" in entry.key]
        assert len(entries) == 2
        found = await committed_objects(yard.store, CLUSTER, entries, yard.notes.append)
        assert found == marked
        assert not found & open_
        assert [await is_decided(yard.store, manifest_key(CLUSTER, each, 7)) for each in ("marked", "open")] == [
            True,
            False,
        ]

    in_yard(work)


def test_a_transaction_is_decided_if_the_list_or_the_store_has_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may leave out a key of a list, or answer for a moment that an object does not exist."""

    async def work(yard: HeldYard) -> None:
        await staged(yard, "marked", marked=True)
        key = manifest_key(CLUSTER, "marked", 7)
        get = yard.store.get

        async def absent(key: str, **_: object) -> bytes:
            raise NotFoundError("not now")

        async def nothing(prefix: str) -> AsyncIterator[ObjectEntry]:
            for entry in list[ObjectEntry]():
                yield entry

        monkeypatch.setattr(yard.store, "get", absent)
        assert await is_decided(yard.store, key)
        monkeypatch.setattr(yard.store, "list", nothing)
        assert not await is_decided(yard.store, key)
        monkeypatch.setattr(yard.store, "get", get)
        assert await is_decided(yard.store, key)

    in_yard(work)


def pointer_to(topic: Topic, key: str, now_ms: int) -> bytes:
    return encode_pointer(
        Pointer(
            kind="data",
            cluster=CLUSTER,
            topic=topic.name,
            topic_id=topic.id,
            partition=0,
            epoch=1,
            locations=(Location(store="main", key=key, offset=0, length=10),),
            records=1,
            raw_bytes=10,
            stored_bytes=10,
            producers=(ProducerRanges(5, ((0, 1),)),),
            checksum=1,
            broker="b",
            sealed_ms=now_ms,
        )
    )


@pytest.mark.parametrize("part_keys", [1, 100])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_sweep_keeps_manifest_and_mark_while_a_pointer_names_an_object(
    monkeypatch: pytest.MonkeyPatch, *, atomic: bool, part_keys: int
) -> None:
    monkeypatch.setattr(sweep_module, "SWEPT_KEYS_MAX", part_keys)

    async def work(yard: HeldYard) -> None:
        topic = await yard.topic(topic_of("clicks"))
        manifest = manifest_of(3, created_ms=yard.clock.wall_ms(), atomic=atomic)
        key, (staged_object,) = await put_manifest(yard, manifest), manifest.objects
        await yard.store.put(staged_object.key, [b"staged"], crc32c(b"staged"))
        await mark_committed(services_of(yard), key)
        gone_batch = await staged(yard, "gone", marked=True)
        await yard.store.delete(next(each for each in gone_batch if "/objects/" in each))
        (log,), now_ms = read_partitions(topic), yard.clock.wall_ms()
        await yard.queue.publish(Publication(log, 0, 1, now_ms, pointer_to(topic, staged_object.key, now_ms)))
        gone, _ = await passes(yard)
        own = {key, decided_key(key)}
        assert gone == {each for each in gone_batch if "/objects/" not in each} | (set() if atomic else own)
        assert staged_object.key in yard.store.objects

    in_yard(work)


def test_a_sweep_reads_manifests_in_the_order_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a set differs from process to process, and a simulated run must not."""

    async def work(yard: HeldYard) -> None:
        keys = {key for number in range(8) for key in await staged(yard, f"writer-{number}", marked=True)}
        reads: list[str] = []
        get = yard.store.get

        async def note(key: str, *, checked: bool = True) -> bytes:
            reads.append(key)
            return await get(key, checked=checked)

        monkeypatch.setattr(yard.store, "get", note)
        await manifests_in_use(yard.store, keys, keys)
        assert len(reads) == 8
        assert reads == sorted(reads)

    in_yard(work)


# ---- restore -------------------------------------------------------------------------------------


def test_a_restore_ends_committed_parts_and_releases_the_others_of_their_transaction() -> None:
    async def work() -> None:
        bucket = Bucket()
        keys = [manifest_key(CLUSTER, WRITER, number) for number in (1, 2)]
        bucket.decide(*(part(key, RESTORED, "5.1", producer) for producer, key in enumerate(keys, 1)))
        assert len(bucket.machine.open) == 1, "a later part of the target replaces the former one"
        bucket.decide(part(keys[0], Target("clicks", RESTORED.topic_id, RESTORED.partition + 1), "5.1", 3))
        await bucket.put_bytes(decided_key(keys[1]), MARK)
        await bucket.save()
        found, _, report = await bucket.restore()
        assert not found.open
        (unit,) = [each for units in found.units.values() for each in units.values()]
        assert [hold.key for hold in unit.holds] == [keys[0]]
        assert not report.findings
        assert found.state_of(HoldId(2, 0)) is HoldState.RELEASED

    asyncio.run(work())
