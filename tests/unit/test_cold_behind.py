"""Retention that was faster than a compaction: what is older than what it took is gone, though a manifest names it."""

from __future__ import annotations

import asyncio

from memq.cold.compaction import manifest_of
from memq.notification import Span
from tests.unit.test_cold_compaction import OLD, PARTITION, World, replace_rule


def test_nobody_reads_what_lies_before_a_hole_and_the_next_compaction_leaves_it_out() -> None:
    async def work() -> None:
        world = await World.made()
        early = world.reader()
        await early.span(PARTITION)
        await world.compact(replace_rule(rest=False, object_bytes=5_000))
        files = world.parts().files
        island = await manifest_of(files, PARTITION)
        end = len(world.expected)
        first = island.next + 2
        assert island.parts
        assert first < OLD
        await world.queue.trim(PARTITION, first)
        for reader in (early, world.reader()):
            assert await reader.span(PARTITION) == Span(first, end)
            assert await reader.seek_time(PARTITION, 0) == first
            assert (await reader.read(PARTITION, 0, 1))[0].offset == first
        assert await world.compact() > 0
        joined = await manifest_of(files, PARTITION)
        assert joined.begin == first
        assert [each.part for each in joined.left] == list(island.parts)
        for reader in (early, world.reader()):
            assert await reader.span(PARTITION) == Span(first, end)
            assert (await reader.read(PARTITION, 0, 1))[0].offset == first

    asyncio.run(work())
