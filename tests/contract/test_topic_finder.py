"""The partitions of a topic by its name, as the SQLite queue finds them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from tests.contract.queues import STALE_MS, part


def test_partitions_are_found_by_the_name_of_their_topic(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        clicks, again = [part(0), part(1)], part(0, topic_id="0c" * 16)
        views = part(0, topic="views", topic_id="0b" * 16)
        await queue.create([*clicks, views, again], STALE_MS)
        assert sorted(await queue.partitions("clicks")) == [*clicks, again]
        assert await queue.partitions("views") == [views]
        assert await queue.partitions("other") == []
        assert sorted(await queue.partitions()) == [*clicks, again, views]
        await queue.drop([part(1), views])
        assert sorted(await queue.partitions("clicks")) == [part(0), again]
        assert await queue.partitions("views") == []
        await queue.close()

    asyncio.run(work())
