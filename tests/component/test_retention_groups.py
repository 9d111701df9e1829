"""Retention waits for named groups, up to a limit; groups whose positions are unknown keep all up to it."""

from __future__ import annotations

import logging

import pytest

from memq.broker.upkeep.retention import expired, expired_parts, retire
from memq.client.admin import AsyncAdmin
from memq.errors import InvalidSettingError, QueueError
from memq.format.compaction_manifest import CompactionManifest, PartRef
from memq.groups.coordinator import GroupCoordinator
from memq.topic import Position, TopicSettings, parse_settings
from tests.brokers import events_of, run, running_broker
from tests.component.retention_rig import HOUR_MS, Rig
from tests.component.test_broker_retention import NOW_MS, entries

WAITING = {"retention_ms": HOUR_MS, "retention_groups": "slow, fast", "retention_groups_ms_max": 4 * HOUR_MS}
SETTINGS = parse_settings(WAITING, TopicSettings())  # type: ignore[arg-type]


# ---- what is decided ---------------------------------------------------------------------------------


def test_retention_keeps_what_a_group_has_not_committed() -> None:
    known = entries(*[2 * HOUR_MS] * 5, 0)
    assert expired(known, SETTINGS, NOW_MS, unread=0).before == 10
    assert expired(known, SETTINGS, NOW_MS, unread=12).before == 12
    assert expired(known, SETTINGS, NOW_MS, unread=99).before == 15


def test_retention_waits_for_no_group_beyond_the_limit() -> None:
    known = entries(6 * HOUR_MS, 5 * HOUR_MS, 3 * HOUR_MS, 2 * HOUR_MS, 0)
    assert expired(known, SETTINGS, NOW_MS, unread=0).before == 12


def test_retention_keeps_compacted_parts_that_a_group_has_not_committed() -> None:
    def part(first: int, age_ms: int) -> PartRef:
        numbers = {"first": first, "next": first + 10, "entries": 10, "bytes": 1}
        return PartRef(key="k", **numbers, greatest_ms=NOW_MS - age_ms, created_ms=0, objects=())

    parts = (part(0, 5 * HOUR_MS), part(10, 3 * HOUR_MS), part(20, 2 * HOUR_MS))
    manifest = CompactionManifest(
        number=1, cluster="c", topic="clicks", topic_id="0" * 32, partition=0, next=30, parts=parts
    )
    counts = [expired_parts(manifest, 0, SETTINGS, NOW_MS, None, unread) for unread in (0, 10, 15, 20, 30)]
    assert counts == [1, 1, 1, 2, 3]


# ---- what is done ------------------------------------------------------------------------------------


def test_retention_follows_the_slowest_group_and_says_when_the_limit_cuts(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            rig = await Rig.make(broker)
            for _ in range(6):
                await rig.batch()
            await rig.age(2 * HOUR_MS)
            await rig.batch()
            await admin.alter_topic("clicks", settings=WAITING)  # type: ignore[arg-type]

            async def left() -> int:
                await retire(broker.services, broker.partitions)
                return len([each for each in await rig.pointers() if each.kind == "data"])

            assert await left() == 7, "no group has a position"
            await admin.reset_group("fast", "clicks", "end", new_ok=True)
            assert await left() == 7, "one group has none"
            await admin.reset_group("slow", "clicks", Position(0, 3), new_ok=True)
            assert await left() == 5
            await admin.reset_group("slow", "clicks", Position(0, 5))
            assert await left() == 3
            assert "retention-cut" not in events_of(caplog)
            await rig.age(3 * HOUR_MS)
            await rig.batch()
            assert await left() == 2, "one is younger than the limit"
            assert "retention-cut" in events_of(caplog)
            assert broker.services.counters.retention_cuts == 1
            await rig.client.close()

    with caplog.at_level(logging.INFO):
        run(work())


def test_a_group_whose_positions_are_unknown_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            rig = await Rig.make(broker)
            for _ in range(3):
                await rig.batch()
            await rig.age(2 * HOUR_MS)
            await rig.batch()
            await admin.alter_topic("clicks", settings={**WAITING, "retention_groups": "slow"})  # type: ignore[dict-item]
            await admin.reset_group("slow", "clicks", "end", new_ok=True)

            async def fails(*_: object) -> object:
                raise QueueError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(GroupCoordinator, "committed", fails)
                await retire(broker.services, broker.partitions)
            assert len(await rig.pointers()) == 5
            await retire(broker.services, broker.partitions)
            assert len(await rig.pointers()) == 1
            await rig.client.close()

    run(work())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retention_groups": "a"}, "set both, or neither"),
        ({"retention_groups_ms_max": 10**9}, "set both, or neither"),
        ({"retention_groups": "a", "retention_groups_ms_max": 400_000}, "at least at retention_ms"),
        ({"retention_groups": "a,,b", "retention_groups_ms_max": 10**9}, "names of groups with commas"),
        ({"retention_groups": "_memq_x", "retention_groups_ms_max": 10**9}, "names of groups with commas"),
        ({"retention_groups": ",".join("abcdefghijklmnopq"), "retention_groups_ms_max": 10**9}, ""),
    ],
)
def test_a_topic_refuses_wrong_groups(settings: dict[str, int | bool | str], said: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_settings(settings, TopicSettings())
    assert said in caught.value.hint


def test_a_topic_may_wait_for_a_broadcast_consumer() -> None:
    names = {"retention_groups": "_memq_broadcast-a,b", "retention_groups_ms_max": 10**9}
    assert parse_settings(names, TopicSettings()).waits_for == ("_memq_broadcast-a", "b")  # type: ignore[arg-type]
