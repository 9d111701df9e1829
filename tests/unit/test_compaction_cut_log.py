"""A log is cut below the pointers that a compaction has copied, and grows again over their offsets."""

from __future__ import annotations

import asyncio

import pytest

from memq.compaction.compaction import leave_queue, manifest_of
from memq.format.pointer import decode_pointer
from memq.topic import ReadPartition
from tests.unit.compaction_world import OLD, PARTITION, World


async def cut_world(left: int, new: int) -> tuple[World, list[int]]:
    """Return a compacted log that has lost all but `left` pointers, has `new` batches since, and their offsets."""
    world = await World.made()
    trim = world.queue.trim

    async def kept(partition: ReadPartition, before: int) -> None:
        """A replica that lags has not followed the trim."""

    world.queue.trim = kept  # type: ignore[method-assign]
    assert await world.compact()
    world.queue.trim = trim  # type: ignore[method-assign]
    del world.queue.log(PARTITION).entries[left:]
    for number in range(new):
        await world.batch(1_000 + number, world.clock.wall_ms())
    return world, list(range(left, left + new))


@pytest.mark.parametrize("new", [2, OLD + 10], ids=["below the moved pointers", "over all moved pointers"])
def test_the_new_pointers_of_a_cut_log_are_read_and_stay_in_the_queue(new: int) -> None:
    async def work() -> None:
        world, offsets = await cut_world(3, new)
        files = world.parts().files
        manifest = await manifest_of(files, PARTITION)
        assert manifest.next > offsets[0]
        reader = world.reader()
        await reader.manifest(PARTITION, 0, 0.0)
        found = list[int]()
        at = 0
        while entries := await reader.read(PARTITION, at, 1_000):
            found += [decode_pointer(entry.body).batch_sequence for entry in entries if entry.offset in offsets]
            at = entries.next
        assert found == [1_000 + number for number in range(new)]
        await leave_queue(world.queue, files, PARTITION, manifest)
        assert (await world.queue.span(PARTITION)).begin == 0

    asyncio.run(work())
