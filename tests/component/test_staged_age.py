"""Staged batches that are too old: the sweep may take their objects, or an owner may have forgotten them."""

from __future__ import annotations

import pytest

from memq.client.bulk.staged_writer import StagedWriter
from memq.errors import QueueError, TooOldError
from memq.format.pointer import decode_pointer
from memq.format.staged_manifest import StagedObject
from memq.notification import Publication
from memq.topic import TopicSettings, writer_id
from tests.brokers import run
from tests.component.staged_rig import WRITER, Rig, asked, rigged

DAY_MS = 86_400_000
DAILY = TopicSettings(retention_ms=DAY_MS)


def test_staged_objects_that_the_sweep_may_soon_delete_are_not_published() -> None:
    async def work(rig: Rig) -> None:
        objects = await rig.staged([b"a"])
        clock, age_ms = rig.broker.services.runtime.clock, rig.broker.services.settings.staged_age_ms
        wall_ms = clock.wall_ms
        clock.wall_ms = lambda: wall_ms() + age_ms // 2 + 1_000  # type: ignore[method-assign]
        with pytest.raises(TooOldError, match="was staged"):
            await rig.commits.commit(0, objects, rig.store)
        assert await rig.commits.finish_last(rig.store) is None
        clock.wall_ms = lambda: wall_ms() + age_ms // 2 - 60_000  # type: ignore[method-assign]
        await rig.commits.commit(0, [], rig.store)
        assert len([each for each in await rig.pointers() if each.kind == "data"]) == 1

    run(rigged(work, partitions=1))


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_its_owner_may_have_forgotten_is_not_published_again(*, late: bool) -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(0, await _staged_for_a_day(rig), rig.store)
        processor = rig.broker.partitions.processors[rig.topic.id, 0]
        now_ms = _set_ahead(rig, DAY_MS + (30_000 if late else -45_000))
        processor.forget_silent(now_ms)
        assert processor.own is not None
        assert (processor.own.named.get(writer_id(WRITER)) is None) == late
        if late:
            with pytest.raises(TooOldError, match="published and forgotten it"):
                await rig.commits.commit(0, [], rig.store)
            assert await rig.commits.finish_last(rig.store) is None
        else:
            await rig.commits.commit(0, [], rig.store)
        assert len([each for each in await rig.pointers() if each.kind == "data"]) == 1

    run(rigged(work, partitions=1))


def test_an_owner_remembers_a_writer_for_as_long_as_records_wait_for_groups() -> None:
    """Else a new instance of a name would begin at 0, and a repeated commit would publish its batch again."""

    async def work(rig: Rig) -> None:
        waiting = TopicSettings(retention_ms=DAY_MS, retention_groups="slow", retention_groups_ms_max=3 * DAY_MS)
        await rig.commits.commit(0, await _staged_for_a_day(rig, waiting), rig.store)
        processor = rig.broker.partitions.processors[rig.topic.id, 0]
        processor.forget_silent(_set_ahead(rig, 2 * DAY_MS))
        await rig.commits.commit(0, [], rig.store)
        assert len([each for each in await rig.pointers() if each.kind == "data"]) == 1

    run(rigged(work, partitions=1))


@pytest.mark.parametrize(("before_ms", "refused"), [(39_000, True), (45_000, False)])
def test_a_batch_of_an_unknown_writer_is_published_if_no_owner_can_have_forgotten_it(
    before_ms: int, *, refused: bool
) -> None:
    async def work(rig: Rig) -> None:
        manifest, checksum = await rig.commits.decide(0, await _staged_for_a_day(rig), rig.store)
        _set_ahead(rig, DAY_MS - before_ms)
        if refused:
            with pytest.raises(TooOldError, match="published and forgotten it"):
                await asked(rig, manifest, checksum, 1)
        else:
            assert await asked(rig, manifest, checksum, 1) == 1
        assert len([each for each in await rig.pointers() if each.kind == "data"]) == (not refused)

    run(rigged(work, partitions=1))


@pytest.mark.parametrize("landed", [False, True])
def test_a_log_that_is_sick_until_the_sweep_may_take_a_staged_batch_gets_no_pointer_to_it(*, landed: bool) -> None:
    async def work(rig: Rig) -> None:
        services = rig.broker.services
        objects = await rig.staged([b"a"])
        clock, publish, tries = services.runtime.clock, services.queue.publish, 0
        wall_ms, monotonic, ahead_s = clock.wall_ms, clock.monotonic, 0.0
        clock.wall_ms = lambda: wall_ms() + int(ahead_s * 1_000)  # type: ignore[method-assign]
        clock.monotonic = lambda: monotonic() + ahead_s  # type: ignore[method-assign]

        async def sick(publication: Publication) -> int:
            nonlocal ahead_s, tries
            if decode_pointer(publication.body).kind != "data" or tries:
                return await publish(publication)
            tries += 1
            if landed:
                await publish(publication)
            ahead_s = services.settings.staged_age_ms / 2_000
            raise QueueError("no answer")

        services.queue.publish = sick  # type: ignore[method-assign]
        if landed:
            await rig.commits.commit(0, objects, rig.store)
        else:
            with pytest.raises(TooOldError, match="was staged"):
                await rig.commits.commit(0, objects, rig.store)
        assert len([each for each in await rig.pointers() if each.kind == "data"]) == landed
        assert await rig.records() == [b"a"] * landed

    run(rigged(work, partitions=1))


async def _staged_for_a_day(rig: Rig, settings: TopicSettings = DAILY) -> list[StagedObject]:
    """Replace the topic of the rig by one that keeps records for a day; stage a record for it."""
    rig.topic = await rig.broker.partitions.create("daily", 1, settings, exist_ok=False)
    await rig.commits.topics(["daily"])
    writer = StagedWriter(rig.commits.cluster, {"daily": rig.topic}, rig.store, WRITER)
    await writer.add("daily", b"a")
    return await writer.finish()


def _set_ahead(rig: Rig, ahead_ms: int) -> int:
    """Set the wall clock of the broker ahead; return its time in Unix ms."""
    clock = rig.broker.services.runtime.clock
    wall_ms = clock.wall_ms
    clock.wall_ms = lambda: wall_ms() + ahead_ms  # type: ignore[method-assign]
    return clock.wall_ms()
