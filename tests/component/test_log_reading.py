"""A reading of all pointers is complete, or names the reason; retention deletes nothing after a partial one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from memq.broker.services import Services
from memq.broker.sweep.log_reading import LogReading, whole_log
from memq.broker.upkeep.retention import retire
from memq.errors import QueueError
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Publication, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, TopicSettings
from tests.brokers import run, running_broker
from tests.component.retention_rig import HOUR_MS, Rig
from tests.unit.lying_queue import LyingQueue

PARTITION = ReadPartition("clicks", "0" * 32, 0)
ENTRIES, BEGIN = 10, 3


async def filled() -> LyingQueue:
    """Return a queue whose log has lost its first entries to retention."""
    queue = MemoryQueue(SystemClock())
    await queue.create([PARTITION], 1)
    opened = Pointer(
        kind="opened", cluster="c", topic=PARTITION.topic, topic_id=PARTITION.topic_id, partition=0, epoch=1
    )
    for _ in range(ENTRIES):
        await queue.publish(Publication(PARTITION, 0, 1, 0, encode_pointer(opened)))
    await queue.trim(PARTITION, BEGIN)
    return LyingQueue(queue)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a reading."""

    offsets: list[int]
    fault: str
    lost: int
    begin: int


def read(**lies: Any) -> ReadResult:
    readings: list[ReadResult] = []

    async def work() -> None:
        queue = await filled()
        for name, lie in lies.items():
            setattr(queue, name, lie)
        reading = LogReading(queue, PARTITION, pytest.fail)
        offsets = [entry.offset async for entry, _ in reading.entries()]
        readings.append(ReadResult(offsets, reading.fault, reading.lost, reading.begin))

    run(work())
    return readings[0]


def test_a_sound_log_is_read_from_its_begin_to_its_end() -> None:
    assert read() == ReadResult(list(range(BEGIN, ENTRIES)), "", 0, BEGIN)


@pytest.mark.parametrize(
    ("lies", "fault"),
    [
        ({"over_at": 5}, "shows nothing from offset 5 on, though its end is 10"),
        ({"over_at": 0}, "shows nothing from offset 3 on, though its end is 10"),
        ({"says": Span(3, -1001)}, "lies between 3 and -1001"),
        ({"says": Span(-1001, 10)}, "lies between -1001 and 10"),
        ({"repeats": 5}, "shows offset 5 where 6 or more was asked for"),
    ],
)
def test_a_reading_that_is_not_whole_says_why(lies: dict[str, Any], fault: str) -> None:
    assert fault in read(**lies).fault


def test_an_end_that_went_back_hides_nothing_that_can_be_read() -> None:
    assert read(says=Span(3, 5)).offsets == list(range(BEGIN, ENTRIES))


def test_entries_that_a_queue_omits_are_counted() -> None:
    assert read(omits=frozenset({3, 6, 7})) == ReadResult([4, 5, 8, 9], "", 3, BEGIN)
    assert read(omits=frozenset({9})) == ReadResult([3, 4, 5, 6, 7, 8], "", 1, BEGIN)


def test_entries_that_retention_removes_meanwhile_require_another_reading() -> None:
    async def work() -> None:
        queue = await filled()
        reading = LogReading(queue, PARTITION, pytest.fail)
        seen = []
        async for entry, _ in reading.entries():
            seen.append(entry.offset)
            if entry.offset == 4:
                await queue.trim(PARTITION, 8)
        assert (seen, reading.lost, reading.trimmed_meanwhile) == ([3, 4], 0, True)
        span, known = await whole_log(queue, PARTITION, pytest.fail)
        assert (span, len(known)) == (Span(8, 10), 2)

    run(work())


# ---- retention --------------------------------------------------------------------------------------


async def old_batches(rig: Rig) -> list[str]:
    """Return the keys of three batches that are too old, and of one that is not."""
    keys = [await rig.batch() for _ in range(3)]
    await rig.age(8 * 24 * HOUR_MS)
    return [*keys, await rig.batch()]


def lying(rig: Rig, **lies: Any) -> Services:
    queue = rig.broker.services.queue
    assert isinstance(queue, MemoryQueue)
    found = LyingQueue(queue, of=ReadPartition("clicks", rig.topic.id, 0))
    for name, lie in lies.items():
        setattr(found, name, lie)
    return replace(rig.broker.services, queue=found)


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize(
    "lies",
    [{"over_at": 3}, {"over_at": 4}, {"over_at": 0}, {"says": Span(0, -1001)}, {"repeats": 3}],
    ids=["half", "all but the last", "nothing", "no end", "entries twice"],
)
def test_retention_takes_nothing_on_a_short_answer(lies: dict[str, Any], *, by_size: bool) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            settings = TopicSettings(retention_ms=0, retention_bytes=1) if by_size else TopicSettings()
            await broker.partitions.alter(broker.partitions.topic("clicks"), settings)
            keys = await old_batches(rig)
            pointers = await rig.pointers()
            await retire(lying(rig, **lies), broker.partitions)
            assert await rig.pointers() == pointers
            assert list(rig.store.objects) == keys
            broker.partitions.retention_due.clear()
            await retire(broker.services, broker.partitions)
            assert list(rig.store.objects) == keys[3:], "the same, of a queue that answers"
            await rig.client.close()

    run(work())


def test_retention_deletes_no_object_that_a_pointer_names_which_its_first_reading_missed() -> None:
    """A copy of a pointer lies behind it; the queue shows it only after the trim."""

    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            keys = await old_batches(rig)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            partition = ReadPartition("clicks", rig.topic.id, 0)
            log = queue.logs[partition]
            log.entries.append(replace(log.entries[1], offset=log.end, time_ms=log.entries[-1].time_ms))

            class Late(LyingQueue):
                async def trim(self, partition: ReadPartition, before: int) -> None:
                    self.over_at, self.says = None, None
                    await super().trim(partition, before)

            late = Late(queue, of=partition)
            late.over_at, late.says = log.end - 1, Span(log.begin, log.end - 1)
            await retire(replace(broker.services, queue=late), broker.partitions)
            assert list(rig.store.objects) == [keys[0], keys[3]]
            await rig.client.close()

    run(work())


def test_retention_leaves_the_objects_when_the_trim_does_not_show() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            rig = await Rig.make(broker)
            keys = await old_batches(rig)

            class Deaf(LyingQueue):
                async def trim(self, partition: ReadPartition, before: int) -> None: ...

            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            assert isinstance(rig.store, MemoryHandler)
            await retire(replace(broker.services, queue=Deaf(queue)), broker.partitions)
            assert list(rig.store.objects) == keys
            await rig.client.close()

    run(work())


def test_a_log_that_is_not_whole_is_an_error_that_may_pass() -> None:
    async def work() -> None:
        queue = await filled()
        queue.over_at = 4
        with pytest.raises(QueueError, match="topic 'clicks' partition 0: the queue shows nothing from offset 4 on"):
            await whole_log(queue, PARTITION, pytest.fail)

    run(work())
