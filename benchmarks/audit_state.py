"""A state of the live audit as a day of 1,000 topics leaves it, filled by the auditors' own store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from memq.audit.live.partition_state import PartitionState
from memq.audit.live.storage.database import SqliteDatabase
from memq.audit.live.storage.store import AuditStore, PartitionChanges, Step
from memq.audit.minutes import MINUTE_MS, QUEUE, MinuteRow
from memq.runtime.clock import SystemClock

TOPICS = 1_000
MINUTES = 1_440
TOPICS_IN_STEP = 20
OWNER = "benchmark"


def topic_name(number: int) -> str:
    """Return the name of a topic, which sort as their numbers do."""
    return f"topic-{number:04}"


def fill(path: Path, minutes: int) -> None:
    """Make the state: so many minutes up to now of TOPICS topics with one partition and one group each."""
    asyncio.run(_fill(path, minutes))


async def _fill(path: Path, minutes: int) -> None:
    database = SqliteDatabase(path)
    try:
        store = AuditStore(database)
        await store.take_home(0, OWNER)
        now = SystemClock().wall_ms() // MINUTE_MS
        for begin in range(0, TOPICS, TOPICS_IN_STEP):
            step = Step(0, OWNER, begin, "", {})
            for number in range(begin, begin + TOPICS_IN_STEP):
                rows = {minute: _row(number, minute) for minute in range(now - minutes + 1, now + 1)}
                step.changes[f"{number:032x}", 0] = PartitionChanges(topic_name(number), PartitionState(), rows, [])
            await store.save(step)
    finally:
        await database.close()


def _row(number: int, minute: int) -> MinuteRow:
    """Return a minute in which all is well: as many records as topic and minute say."""
    records = 100 + (number * 7 + minute * 13) % 900
    row = MinuteRow()
    queue, group = row.side(QUEUE), row.side("report")
    for name in ("sent", "acked", "committed"):
        queue.count(name, records)
        queue.time(name, [(2, records // 2), (3, records // 3), (5, records // 9)])
    for name in ("fetched", "processed"):
        group.count(name, records)
        group.time(name, [(4, records // 2), (6, records // 3)])
    return row
