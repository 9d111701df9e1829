"""Retention of a partition whose pointers a compaction has moved out of the queue. Parts in memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memq.broker.upkeep.retention import trim_compacted
from memq.notification import Span
from memq.topic import TopicSettings
from tests.unit.bare_cluster import compaction_manifest, part_of
from tests.unit.test_retention_rounds import DAY_MS, Keeper, keep


@pytest.mark.parametrize(("kept_bytes", "left"), [(301, 0), (300, 1), (201, 1)])
def test_the_round_after_a_compaction_counts_the_bytes_that_it_moved(kept_bytes: int, left: int) -> None:
    """The manifest of the round before lacks them; a broker reads another one every ten minutes only."""

    async def work(keeper: Keeper) -> None:
        for number in range(3):
            await keeper.write(number, age_ms=DAY_MS)
        parts = [part_of(number, keeper.now_ms - DAY_MS) for number in range(2)]
        await keeper.publish_parts(compaction_manifest(keeper.clicks, parts[0]))
        await keeper.queue.trim(keeper.log, 1)
        await keeper.round()
        assert await keeper.services.pointers.span(keeper.log) == Span(0, 3)
        await keeper.write(3)
        await keeper.publish_parts(replace(compaction_manifest(keeper.clicks, *parts), number=2))
        await trim_compacted(keeper.services, keeper.clicks)
        await keeper.round()
        assert await keeper.services.pointers.span(keeper.log) == Span(left, 4)

    keep(work, lambda: Keeper(TopicSettings(retention_ms=0, retention_bytes=kept_bytes)))
