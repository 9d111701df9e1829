"""Retention and sweep: pointers first, never a named or held object, and the last pointer stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.sweep.broker_sweep import sweep
from memq.broker.upkeep.retention import expired, retire, run_upkeep
from memq.compaction.compaction import manifest_of
from memq.compaction.plan import CompactionRule
from memq.errors import NotFoundError, StoreError
from memq.format.key import shared_prefix, staged_prefix
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.format.totals import contended_ms
from memq.governor import BrokerEntry
from memq.governor.memory import MemoryCoordinator
from memq.notification import Entry, Publication, Span
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.topic import CLOCK_ERROR_MS, ReadPartition, TopicSettings, read_partitions
from tests.brokers import BareClient, events_of, run, running_broker, until
from tests.compaction import parts_on
from tests.component.retention_rig import HOUR_MS, Rig, nothing, nothing_of
from tests.sweeps import sweep_twice

NOW_MS = 1_000 * HOUR_MS
SETTINGS = TopicSettings(retention_ms=HOUR_MS)
YOUNG_MS = SETTINGS.dedup_window_ms + CLOCK_ERROR_MS


# ---- what is decided --------------------------------------------------------------------------


def pointer(number: int, partition: int = 0, size: int = 100, key: str = "") -> Pointer:
    return Pointer(
        kind="data",
        cluster="c",
        topic="clicks",
        topic_id="0" * 32,
        partition=partition,
        epoch=1,
        batch_sequence=number,
        locations=(Location(store="main", key=key or f"k{number}", offset=0, length=size),),
        stored_bytes=size,
    )


def entries(*ages_ms: int, partitions: tuple[int, ...] = (0,)) -> list[tuple[Entry, Pointer | None]]:
    return [
        (Entry(10 + n, NOW_MS - age, b""), pointer(n, partitions[n % len(partitions)])) for n, age in enumerate(ages_ms)
    ]


def test_retention_removes_expired_batches_and_keeps_younger_ones() -> None:
    found = expired(entries(3 * HOUR_MS, 2 * HOUR_MS, HOUR_MS, 0), SETTINGS, NOW_MS)
    assert (found.before, found.keys) == (12, ("k0", "k1"))


def test_the_last_pointer_of_every_write_partition_stays_however_old() -> None:
    assert expired(entries(9 * HOUR_MS), SETTINGS, NOW_MS).keys == ()
    shared = entries(9 * HOUR_MS, 8 * HOUR_MS, 0, 0, partitions=(0, 1))
    shared[3] = (shared[3][0], pointer(3, partition=0))  # so 1 is the last of write partition 1
    found = expired(shared, SETTINGS, NOW_MS)
    assert (found.before, found.keys) == (11, ("k0",))


def test_pointers_that_settle_the_totals_of_a_last_pointer_stay_with_it() -> None:
    """What landed shortly before a last pointer is counted by nobody when that one's owner had not met it."""
    settled_ms = contended_ms(SETTINGS.stale_publish_ms)
    last_ms = 5 * HOUR_MS
    known = entries(last_ms + settled_ms + 1, last_ms + settled_ms, last_ms + 1, last_ms)
    found = expired(known, SETTINGS, NOW_MS)
    assert (found.keys, found.holding) == (("k0",), (0,))
    assert expired(entries(5 * HOUR_MS, 0), SETTINGS, NOW_MS).holding == ()


def test_retention_by_bytes_removes_the_oldest_batches() -> None:
    known = entries(*[3 * YOUNG_MS] * 5, 2 * YOUNG_MS)
    settings = TopicSettings(retention_ms=0, retention_bytes=250)
    found = expired(known, settings, NOW_MS)
    assert found.keys == ("k0", "k1", "k2"), "at least 250 bytes stay: three of a hundred"


def test_too_much_never_takes_what_the_dedup_window_is_rebuilt_from() -> None:
    """Else a failover under load would forget what was sent already, and store it twice."""
    settings = TopicSettings(retention_bytes=1)
    found = expired(entries(YOUNG_MS + 1, YOUNG_MS, YOUNG_MS - 1, 0, 0), settings, NOW_MS)
    assert (found.before, found.keys) == (11, ("k0",))


def test_an_object_that_a_younger_pointer_names_too_stays() -> None:
    known = entries(3 * HOUR_MS, 0, 0)
    known[1] = (known[1][0], pointer(1, key="k0"))
    assert expired(known, SETTINGS, NOW_MS).keys == ()


def test_damaged_entries_go_with_what_is_around_them() -> None:
    known = entries(3 * HOUR_MS, 3 * HOUR_MS, 3 * HOUR_MS, 0)
    known[1] = (known[1][0], None)
    found = expired(known, SETTINGS, NOW_MS)
    assert (found.before, found.keys) == (13, ("k0", "k2"))


def test_without_bounds_and_without_entries_nothing_goes() -> None:
    assert expired([], SETTINGS, NOW_MS).keys == ()
    assert expired(entries(9 * HOUR_MS, 9 * HOUR_MS), TopicSettings(retention_ms=0), NOW_MS).keys == ()


@given(
    ages_ms=st.lists(st.integers(0, 3 * HOUR_MS), max_size=12).map(lambda ages: sorted(ages, reverse=True)),
    owners=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    retention_ms=st.sampled_from([0, HOUR_MS]),
    retention_bytes=st.sampled_from([0, 1, 350]),
)
def test_retention_removes_a_prefix_without_any_last_pointer(
    ages_ms: list[int], owners: list[int], retention_ms: int, retention_bytes: int
) -> None:
    known = entries(*ages_ms, partitions=tuple(owners))
    settings = TopicSettings(retention_ms=retention_ms, retention_bytes=retention_bytes)
    found = expired(known, settings, NOW_MS)
    taken = [item for item in known if item[0].offset < found.before]
    left = known[len(taken) :]
    assert taken == known[: len(taken)]
    assert {part.partition for _, part in known if part} == {part.partition for _, part in left if part}
    assert list(found.keys) == [part.locations[0].key for _, part in taken if part]
    for entry, _ in taken:
        assert entry.time_ms < NOW_MS - min(retention_ms or YOUNG_MS, YOUNG_MS)


# ---- what is done ------------------------------------------------------------------------------


class SetClock(SystemClock):
    """A wall clock that the test sets."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


def test_retention_removes_nothing_because_a_clock_was_set_forward() -> None:
    """One wrong clock made the records of all partitions that its broker owned too old."""

    async def work() -> None:
        clock = SetClock()
        async with running_broker(runtime=Runtime(clock)) as broker:
            rig = await Rig.make(broker)
            keys = [await rig.batch() for _ in range(2)]
            await rig.age(HOUR_MS)
            keys.append(await rig.batch())
            clock.ahead_ms = 30 * 24 * HOUR_MS
            await retire(broker.services, broker.partitions)
            assert [place.key for each in await rig.pointers() for place in each.locations] == keys
            await rig.client.close()

    run(work())


def test_retention_removes_nothing_because_a_broker_started_with_a_clock_that_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own clocks agree with each other; the coordinator's shows the fault."""
    register = MemoryCoordinator.register

    async def register_at(coordinator: MemoryCoordinator, broker: BrokerEntry) -> int:
        await register(coordinator, broker)
        return SystemClock().wall_ms()

    monkeypatch.setattr(MemoryCoordinator, "register", register_at)

    async def work() -> None:
        clock = SetClock()
        clock.ahead_ms = 30 * 24 * HOUR_MS
        async with running_broker(runtime=Runtime(clock)) as broker:
            rig = await Rig.make(broker)
            keys = [await rig.batch() for _ in range(2)]
            await rig.age(30 * 24 * HOUR_MS)  # the clock of the others is right
            keys.append(await rig.batch())
            await retire(broker.services, broker.partitions)
            assert [place.key for each in await rig.pointers() for place in each.locations] == keys
            await rig.client.close()

    run(work())


def test_retention_takes_pointers_first_then_their_objects() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            keys = [await rig.batch() for _ in range(3)]
            await rig.age(8 * 24 * HOUR_MS)
            keys.append(await rig.batch())
            named: list[int] = []

            async def deleting(key: str) -> None:
                named.append(sum(place.key == key for each in await rig.pointers() for place in each.locations))

            rig.store.deleting = deleting
            await retire(broker.services, broker.partitions)
            assert named == [0, 0, 0], "an object went while a pointer named it"
            assert list(rig.store.objects) == keys[3:]
            assert [place.key for each in await rig.pointers() for place in each.locations] == keys[3:]
            assert broker.services.counters.retired_objects == 3
            await rig.client.close()

    run(work())


@pytest.mark.parametrize("prefix_of", [staged_prefix, shared_prefix])
def test_retention_leaves_objects_that_other_partitions_may_name_to_the_sweep(prefix_of: Callable[[str], str]) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            key = f"{prefix_of(broker.services.settings.cluster)}nightly/objects/one"
            await rig.store.put(key, [b"of many"], crc32c(b"of many"))
            (partition,) = read_partitions(rig.topic)
            log = broker.services.queue.log(partition)  # type: ignore[attr-defined]  # the memory queue
            for number, pointer in enumerate(await rig.pointers()):
                places = tuple(msgspec.structs.replace(place, key=key) for place in pointer.locations)
                body = encode_pointer(msgspec.structs.replace(pointer, locations=places))
                log.entries[number] = Entry(number, log.entries[number].time_ms, body)
            await rig.age(8 * 24 * HOUR_MS)
            await rig.batch()
            await retire(broker.services, broker.partitions)
            assert broker.services.counters.retired_pointers == 2
            assert key in rig.store.objects
            await rig.client.close()

    run(work())


def test_a_partition_is_left_alone_until_its_first_pointer_can_be_too_old() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            await retire(broker.services, broker.partitions)
            asked, span = 0, broker.services.queue.span

            async def counted(partition: ReadPartition) -> Span:
                nonlocal asked
                asked += 1
                return await span(partition)

            broker.services.queue.span = counted  # type: ignore[method-assign]
            await retire(broker.services, broker.partitions)
            assert asked == 0
            await broker.partitions.alter(broker.partitions.topic("clicks"), TopicSettings(retention_ms=24 * HOUR_MS))
            await retire(broker.services, broker.partitions)
            assert asked == 1, "other settings, another day"
            due, now_ms = broker.partitions.retention_due, SystemClock().wall_ms()
            [due_ms] = [due_ms for partition, (_, due_ms) in due.items() if partition.topic == "clicks"]
            assert now_ms + 23 * HOUR_MS < due_ms <= now_ms + 24 * HOUR_MS + 1_000
            await rig.client.close()

    run(work())


def test_sweep_deletes_objects_that_a_store_error_left_over() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            for _ in range(2):
                await rig.batch()
            await rig.age(8 * 24 * HOUR_MS)
            kept = await rig.batch()

            async def failing(key: str) -> None:
                raise StoreError("not now")

            rig.store.deleting = failing
            await retire(broker.services, broker.partitions)  # logs it, and continues with the next topic
            assert len(rig.store.objects) == 3
            await run_upkeep(broker.services, broker.partitions)  # logs it, and does not raise
            rig.store.deleting = nothing_of
            await sweep_twice(broker.services, HOUR_MS)
            assert list(rig.store.objects) == [kept]
            await rig.client.close()

    run(work())


def test_an_old_last_pointer_is_published_again_and_then_goes() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            await rig.batch()
            await rig.age(8 * 24 * HOUR_MS)
            await retire(broker.services, broker.partitions)
            assert len(rig.store.objects) == 2, "the totals of the partition are in its last pointers only"
            await until(lambda: broker.services.counters.published_pointers == 3)
            await retire(broker.services, broker.partitions)
            assert rig.store.objects == {}
            assert [(each.kind, each.totals.records) for each in await rig.pointers()] == [("opened", 2)]
            assert (await rig.batch()) in rig.store.objects
            assert (await rig.pointers())[-1].totals.records == 2
            await rig.client.close()

    run(work())


def test_retention_takes_the_compacted_part_first_and_the_sweep_its_objects() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            services = broker.services
            (partition,) = read_partitions(rig.topic)
            parts = parts_on(services.queue, rig.store, services.runtime, services.settings.cluster)
            services.manifests.store = rig.store  # the one with the test's clock
            keys = [await rig.batch() for _ in range(3)]
            await rig.age(2 * 24 * HOUR_MS)
            keys += [await rig.batch() for _ in range(3)]
            await rig.age(6 * 24 * HOUR_MS)
            keys.append(await rig.batch())
            rule = CompactionRule(age_ms=24 * HOUR_MS, object_bytes=1, rest=True)
            assert len(await parts.compact(partition, rig.topic.settings, rule)) == 6
            await broker.partitions.alter(
                broker.partitions.topic("clicks"), TopicSettings(retention_ms=7 * 24 * HOUR_MS)
            )
            assert (await services.pointers.span(partition)).begin == 0
            await retire(services, broker.partitions)
            manifest = await manifest_of(services.manifests, partition)
            assert [part.entries for part in manifest.parts] == [1, 1, 1]
            assert (manifest.begin, manifest.next) == (4, 7)
            assert (await services.queue.span(partition)).begin == 7
            assert keys[0] in rig.store.objects, "retention leaves what manifests named to the sweep"
            rig.age_objects(2 * HOUR_MS)
            await sweep_twice(services, HOUR_MS)
            assert keys[0] in rig.store.objects, "readers may still be at it"
            await retire(services, broker.partitions)
            assert len([pointer for pointer in await rig.pointers() if pointer.kind == "data"]) == 1
            await rig.client.close()

    run(work())


def test_a_sweep_takes_only_what_nothing_names_and_what_is_old() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            named = await rig.batch()
            old, young = (named[:-2] + ending for ending in ("8a", "8b"))
            foreign = "other/topics/clicks/00000000/aa/key"
            for key in (old, foreign):
                rig.store.objects[key], rig.store.modified_ms[key] = b"x", 0
            rig.store.objects[young] = b"x"
            rig.store.modified_ms[young] = SystemClock().wall_ms()
            await rig.age(2 * HOUR_MS)
            rig.store.modified_ms[young] += 2 * HOUR_MS
            assert await sweep_twice(broker.services, HOUR_MS) == (1, 1)
            assert list(rig.store.objects) == [named, foreign, young]
            await rig.client.close()

    run(work())


def test_objects_of_a_deleted_topic_go_after_the_safety_age() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            await broker.partitions.delete(broker.partitions.topic("clicks"))
            assert await sweep_twice(broker.services, HOUR_MS) == (0, 0)
            rig.age_objects(2 * HOUR_MS)
            assert (await sweep_twice(broker.services, HOUR_MS))[0] == 1
            assert rig.store.objects == {}
            again = await BareClient.connect(broker)
            assert (await again.topic()).id != rig.topic.id
            await again.close()
            await rig.client.close()

    run(work())


def test_a_deletion_that_came_to_no_end_is_ended_by_the_second_sweep() -> None:
    """As after a broker died between the coordinator's deletion and the queue's."""

    async def work() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            rig = await Rig.make(broker)
            await rig.batch()
            await broker.services.coordinator.delete_topic(rig.topic)
            rig.age_objects(2 * HOUR_MS)
            late = replace(broker.services, settings=replace(broker.services.settings, sweep_confirm_ms=0))
            await sweep(late, HOUR_MS)
            for partition in read_partitions(rig.topic):
                await broker.services.queue.span(partition)  # one pass is one witness
            await sweep(late, HOUR_MS)
            for partition in read_partitions(rig.topic):
                with pytest.raises(NotFoundError):
                    await broker.services.queue.span(partition)
            assert (await sweep_twice(broker.services, HOUR_MS))[0] == 1
            await rig.client.close()

    run(work())


async def not_deleted(topic_id: str) -> bool:
    return False


@pytest.mark.parametrize("shared", [False, True])
def test_objects_of_a_topic_that_only_the_queue_knows_stay(caplog: pytest.LogCaptureFixture, *, shared: bool) -> None:
    """As after a coordinator was put back to a backup that is older than the topic, or lost everything."""

    async def work() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 1, TopicSettings(shared_objects=shared), exist_ok=False)
            rig = await Rig.make(broker)
            await rig.batch()
            await broker.services.coordinator.delete_topic(rig.topic)
            broker.services.coordinator.deleted = not_deleted  # type: ignore[method-assign]  # nor does it know that
            rig.age_objects(2 * HOUR_MS)
            with caplog.at_level(logging.WARNING, "memq"):
                assert (await sweep_twice(broker.services, HOUR_MS))[0] == 0
            assert len(rig.store.objects) == 1
            assert broker.services.counters.kept_objects == 2, "by each of two passes"
            assert f"topic 'clicks' with id {rig.topic.id}: the coordinator does not know it" in caplog.text
            await broker.services.queue.drop(read_partitions(rig.topic))
            assert (await sweep_twice(broker.services, HOUR_MS))[0] == 1
            await rig.client.close()

    run(work())


class ShiftedClock(SystemClock):
    """The system's clock, set forward by the test."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def test_a_batch_whose_pointer_is_late_gets_another_key_that_no_sweep_has_listed() -> None:
    """Its store or queue was away for half the safety age: a sweep may be about to delete its first object."""

    async def work() -> None:
        clock = ShiftedClock()
        async with running_broker(runtime=Runtime(clock=clock)) as broker:
            rig = await Rig.make(broker)
            gate = rig.store.gate = asyncio.Event()
            rig.send()
            await rig.store.reached.wait()
            (first,) = rig.store.objects
            rig.store.gate = None
            clock.ahead_s = broker.services.settings.sweep_age_ms / 2000
            gate.set()
            assert (await rig.client.frame()).argument == 1
            ((place,),) = [each.locations for each in await rig.pointers() if each.kind == "data"]
            assert place.key != first
            assert list(rig.store.objects) == [first, place.key]
            rig.age_objects(HOUR_MS)
            assert await sweep_twice(broker.services, HOUR_MS) == (1, len(rig.store.objects[place.key]))
            assert list(rig.store.objects) == [place.key]
            await rig.client.close()

    run(work())


def test_a_topic_with_a_damaged_pointer_is_not_swept() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            part = read_partitions(rig.topic)[0]
            await broker.services.queue.publish(
                Publication(part, 0, 99, broker.services.runtime.clock.wall_ms(), b"{damaged")
            )
            await rig.store.put("memq/topics/clicks/" + rig.topic.id[:8] + "/aa/unnamed", [b"x"], crc32c(b"x"))
            assert await sweep_twice(broker.services, 0) == (0, 0)
            await rig.client.close()

    run(work())


def test_a_topic_whose_queue_is_gone_is_an_error_that_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            await rig.batch()
            await broker.services.queue.drop(read_partitions(rig.topic))
            await run_upkeep(broker.services, broker.partitions)
            assert await sweep_twice(broker.services, 0) == (0, 0)  # nobody knows what it named
            await rig.client.close()

    run(work())
    assert "retention-failed" in events_of(caplog)


@pytest.mark.parametrize(
    ("error", "text", "traced"),
    [
        (StoreError("not now"), "not now", False),
        (KeyError("NextContinuationToken"), "'NextContinuationToken'", True),
        (ValueError(), "ValueError()", True),
    ],
)
def test_a_round_that_fails_is_named_and_the_next_one_tries_again(
    error: Exception, text: str, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of memq says what an operator needs; of another error the log has the traceback."""

    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)

            async def failing() -> None:
                raise error

            await rig.batch()
            rig.store.listed = failing
            await run_upkeep(broker.services, broker.partitions, sweeps=False)
            assert "housekeeping-failed" not in events_of(caplog)
            await run_upkeep(broker.services, broker.partitions)
            [line] = [each for each in caplog.records if each.getMessage().startswith("housekeeping-failed")]
            assert (line.getMessage(), bool(line.exc_info)) == (f"housekeeping-failed: {text}", traced)
            rig.store.listed = nothing
            await run_upkeep(broker.services, broker.partitions)
            assert events_of(caplog).count("housekeeping-failed") == 1
            await rig.client.close()

    run(work())


def test_batch_of_exactly_the_retention_age_stays() -> None:
    found = expired(entries(HOUR_MS + 1, HOUR_MS, 0, 0), SETTINGS, NOW_MS)
    assert (found.before, found.keys) == (11, ("k0",))
