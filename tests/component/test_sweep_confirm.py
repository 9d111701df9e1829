"""Two passes of the sweep: an object that only one finds stays, for any wrong answer; and their lists."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.sweep.log_reading import keys_of
from memq.broker.sweep.sweep import Sweep, Unnamed
from memq.broker.sweep.sweep_lists import ALL
from memq.errors import CorruptDataError, InvalidRequestError, UnsupportedFormatError
from memq.format.key import object_key, parse_sweep_list_key, sweep_list_key, sweep_prefix, topic_prefix
from memq.format.packed_file import (
    KIND_SWEEP_LIST,
    LISTED_MAX,
    ListedObject,
    SweepList,
    decode_sweep_list,
    encode_sweep_list,
    pack_file,
)
from memq.format.pointer import decode_pointer
from memq.governor import Assignment
from memq.notification import Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic
from tests.brokers import run, running_broker
from tests.component.retention_rig import HOUR_MS, Rig
from tests.unit.lying_queue import LyingQueue

DAY_MS = 24 * HOUR_MS
BATCHES = 5


class SetClock(SystemClock):
    """The system's clock, with a wall time that the test moves."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


class LyingStore(MemoryHandler):
    """Shows the objects of another store; `lies` changes its listings."""

    def __init__(self, store: MemoryHandler, lies: Callable[[list[ObjectEntry]], list[ObjectEntry]]) -> None:
        super().__init__(SystemClock())
        self.objects, self.modified_ms, self._lies = store.objects, store.modified_ms, lies

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        for entry in self._lies([entry async for entry in super().list(prefix)]):
            yield entry


@dataclass
class OldTopics:
    """A coordinator that answers what it knew once."""

    known: Sequence[Topic]

    async def topics(self) -> Sequence[Topic]:
        return self.known

    async def assignments(self) -> Sequence[Assignment]:
        return [Assignment(topic_id=topic.id, partition=0, epoch=1) for topic in self.known]


@dataclass
class House:
    """A topic with some batches, an object that no pointer names, and passes at times that the test sets."""

    rig: Rig
    keys: list[str]
    orphan: str
    clock: SetClock = field(default_factory=SetClock)
    notes: list[str] = field(default_factory=list)

    @property
    def queue(self) -> MemoryQueue:
        queue = self.rig.broker.services.queue
        assert isinstance(queue, MemoryQueue)
        return queue

    @property
    def partition(self) -> ReadPartition:
        return ReadPartition("clicks", self.rig.topic.id, 0)

    @property
    def cluster(self) -> str:
        return self.rig.broker.services.settings.cluster

    @property
    def lists(self) -> list[str]:
        return [key for key in self.rig.store.objects if parse_sweep_list_key(key)]

    def sweep(self, *, queue: Any = None, store: Any = None, topics: Any = None) -> Sweep:
        topics = topics or self.rig.broker.services.coordinator
        parts = (store or self.rig.store, queue or self.queue, topics)
        return Sweep(self.cluster, *parts, self.clock, self.notes.append, DAY_MS)

    async def run(self, *, later_ms: int = 0, **parts: Any) -> list[str]:
        """Run a pass `later_ms` from the one before; return the keys that went."""
        self.clock.ahead_ms += later_ms
        return [each.key async for each in self.sweep(**parts).run(HOUR_MS, 7 * DAY_MS) if each.goes]

    def log(self) -> Any:
        return self.queue.logs[self.partition]


def in_house(work: Callable[[House], Awaitable[None]]) -> None:
    async def rigged() -> None:
        async with running_broker(audit=False) as broker:
            rig = await Rig.make(broker)
            keys = [await rig.batch() for _ in range(BATCHES)]
            orphan = object_key("memq", "clicks", rig.topic.id, 0, 1, 9, SystemClock().wall_ms())
            await rig.store.put(orphan, [b"never named"], crc32c(b"never named"))
            rig.age_objects(2 * HOUR_MS)
            try:
                await work(House(rig, keys, orphan))
            finally:
                await rig.client.close()

    run(rigged())


# ---- two passes -------------------------------------------------------------------------------------


def test_orphan_is_deleted_by_a_later_pass_that_finds_it_again() -> None:
    async def work(house: House) -> None:
        assert await house.run() == []
        assert await house.run() == []
        assert await house.run(later_ms=DAY_MS // 2) == []
        assert len(house.lists) == 1, "what waits is written down once"
        assert house.orphan in house.rig.store.objects
        assert await house.run(later_ms=DAY_MS // 2 + 1_000) == [house.orphan]
        assert list(house.rig.store.objects) == house.keys
        assert house.notes == []

    in_house(work)


def test_a_dry_run_names_everything_and_changes_nothing() -> None:
    async def work(house: House) -> None:
        async def found() -> list[Unnamed]:
            return [each async for each in house.sweep().find(HOUR_MS, HOUR_MS)]

        (first,) = await found()
        assert (first.key, first.goes, house.lists) == (house.orphan, False, [])
        await house.run()
        before = dict(house.rig.store.objects)
        house.clock.ahead_ms += DAY_MS + 1_000
        (last,) = await found()
        assert (last.key, last.goes, house.rig.store.objects) == (house.orphan, True, before)

    in_house(work)


def test_one_sweep_is_one_pass() -> None:
    async def work(house: House) -> None:
        sweep = house.sweep()
        assert [each.key async for each in sweep.find(HOUR_MS, HOUR_MS)] == [house.orphan]
        with pytest.raises(AssertionError, match="one pass"):
            await anext(sweep.run(HOUR_MS, HOUR_MS))

    in_house(work)


def test_object_that_a_pointer_names_again_before_the_second_pass_stays() -> None:
    """A row that was lost, and came back with a backup of the queue."""

    async def work(house: House) -> None:
        log = house.log()
        last = log.entries.pop()
        assert await house.run() == []
        assert len(house.lists) == 1
        log.entries.append(last)
        assert await house.run(later_ms=2 * DAY_MS) == [house.orphan]
        assert list(house.rig.store.objects) == house.keys, "its list is gone, too"

    in_house(work)


def test_object_rewritten_since_the_first_pass_waits_again() -> None:
    async def work(house: House) -> None:
        await house.run()
        house.clock.ahead_ms += DAY_MS
        house.rig.store.objects[house.orphan] = b"another"
        assert await house.run(later_ms=1_000) == []
        house.rig.store.modified_ms[house.orphan] = house.clock.wall_ms() + 1
        assert await house.run(later_ms=DAY_MS + HOUR_MS) == []
        assert await house.run(later_ms=DAY_MS + HOUR_MS) == [house.orphan]

    in_house(work)


def test_a_list_counts_from_the_later_of_its_own_time_and_the_stores() -> None:
    async def work(house: House) -> None:
        house.clock.ahead_ms = -10 * DAY_MS
        house.rig.store.modified_ms[house.orphan] -= 20 * DAY_MS
        assert await house.run() == []
        assert len(house.lists) == 1
        house.clock.ahead_ms = 0
        assert await house.run() == [], "the clock that wrote the list was wrong"
        assert await house.run(later_ms=DAY_MS + 1_000) == [house.orphan]

    in_house(work)


def test_a_list_from_the_future_counts_for_nothing_and_does_not_hold_up_others() -> None:
    async def work(house: House) -> None:
        house.clock.ahead_ms = 400 * DAY_MS
        assert await house.run() == []
        house.clock.ahead_ms = 0
        assert await house.run() == []
        assert len(house.lists) == 2
        assert await house.run(later_ms=DAY_MS + 1_000) == [house.orphan]

    in_house(work)


def test_two_sweeps_at_once_do_no_harm() -> None:
    async def work(house: House) -> None:
        one, two = house.sweep(), house.sweep()
        for sweep in (one, two):
            assert [each.goes async for each in sweep.run(HOUR_MS, HOUR_MS)] == [False]
        house.clock.ahead_ms += DAY_MS + 1_000
        first, second = house.sweep().run(HOUR_MS, HOUR_MS), house.sweep().run(HOUR_MS, HOUR_MS)
        assert (await anext(first)).goes
        assert [each async for each in second] == []
        assert [each async for each in first] == []
        assert list(house.rig.store.objects) == house.keys

    in_house(work)


# ---- parts that lie ---------------------------------------------------------------------------------


def queue_that(**lies: Any) -> Callable[[House], dict[str, Any]]:
    def parts(house: House) -> dict[str, Any]:
        queue = LyingQueue(house.queue, of=house.partition)
        for name, lie in lies.items():
            setattr(queue, name, lie)
        return {"queue": queue}

    return parts


def store_that(lies: Callable[[list[ObjectEntry]], list[ObjectEntry]]) -> Callable[[House], dict[str, Any]]:
    return lambda house: {"store": LyingStore(house.rig.store, lies)}


def shows_an_older_log(house: House) -> dict[str, Any]:
    """An end that went back, and the answers to match: nothing in them is wrong by itself."""
    queue = MemoryQueue(SystemClock())
    queue.logs = dict(house.queue.logs)
    queue.logs[house.partition] = replace(house.log(), entries=house.log().entries[:3])
    return {"queue": queue}


def knows_no_topic(house: House) -> dict[str, Any]:
    return {"topics": OldTopics([])}


def knows_an_old_topic(house: House) -> dict[str, Any]:
    """The topic was created again since."""
    return {"topics": OldTopics([replace_id(house.rig.topic)])}


def replace_id(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, id="f" * 32)


def lies_of_the_topic_and_the_log(house: House) -> dict[str, Any]:
    """Neither the coordinator nor the queue knows the topic: it looks deleted."""
    queue = MemoryQueue(SystemClock())
    return {"queue": queue, **knows_no_topic(house)}


LIES = {
    "an empty read in the middle": queue_that(over_at=3),
    "an empty read at once": queue_that(over_at=0),
    "no end": queue_that(says=Span(0, -1001)),
    "no begin": queue_that(says=Span(-1001, 6)),
    "a begin far behind": queue_that(says=Span(6, 6)),
    "an end that went back": queue_that(says=Span(0, 2), over_at=2),
    "an older log": shows_an_older_log,
    "a pointer is left out": queue_that(omits=frozenset({3})),
    "all pointers are left out": queue_that(omits=frozenset(range(10))),
    "entries twice": queue_that(repeats=3),
    "old times of writing": store_that(lambda found: [replace(each, modified_ms=0) for each in found]),
    "objects twice": store_that(lambda found: [*found, *found]),
    "objects left out": store_that(lambda found: found[::2]),
    "nothing is listed": store_that(lambda found: []),
    "no topic": knows_no_topic,
    "an older topic of the name": knows_an_old_topic,
    "a topic that seems deleted": lies_of_the_topic_and_the_log,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("second", [False, True], ids=["first pass", "second pass"])
def test_nothing_goes_that_a_pointer_names_when_a_part_lies_in_one_of_the_passes(
    lie: Callable[[House], dict[str, Any]], *, second: bool
) -> None:
    async def work(house: House) -> None:
        for number in range(2):
            await house.run(later_ms=number * 2 * DAY_MS, **(lie(house) if number == second else {}))
        assert [key for key in house.keys if key not in house.rig.store.objects] == []
        for _ in range(2):
            await house.run(later_ms=2 * DAY_MS)
        assert list(house.rig.store.objects) == house.keys, "sound passes clean up, and keep what is named"

    in_house(work)


@pytest.mark.parametrize("row", [1, 2, 3, 4])
def test_a_pointer_that_is_gone_between_others_keeps_its_object_in_all_passes(row: int) -> None:
    """Its batch number is missing, though the offsets do not show it."""

    async def work(house: House) -> None:
        (key,) = keys_of(decode_pointer(house.log().entries[row].body))
        del house.log().entries[row]
        house.log().entries[:] = [replace(each, offset=at) for at, each in enumerate(house.log().entries)]
        for _ in range(3):
            await house.run(later_ms=2 * DAY_MS)
        assert key in house.rig.store.objects
        assert all("the queue has lost what may have named 1 objects" in note and key in note for note in house.notes)
        assert len(house.notes) == 3

    in_house(work)


def test_holes_between_offsets_keep_all_that_the_log_does_not_show() -> None:
    async def work(house: House) -> None:
        for _ in range(2):
            await house.run(later_ms=2 * DAY_MS, **queue_that(omits=frozenset({3}))(house))
        assert house.orphan in house.rig.store.objects
        assert any("1 pointers that the queue should have are missing" in note for note in house.notes)

    in_house(work)


# ---- lists that can't be read -----------------------------------------------------------------------


def put_list(house: House, key: str, body: bytes) -> None:
    house.rig.store.objects[key] = body
    house.rig.store.modified_ms[key] = house.clock.wall_ms()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "newer", "of another cluster", "of another prefix"])
def test_a_list_that_is_not_sound_confirms_nothing(damage: str) -> None:
    async def work(house: House) -> None:
        await house.run()
        (key,) = house.lists
        body = house.rig.store.objects[key]
        sound = decode_sweep_list(body)
        changed = {
            "cut": body[:-1],
            "flipped": body[:20] + bytes([body[20] ^ 1]) + body[21:],
            "empty": b"",
            "newer": encode_sweep_list(replaced(sound, requires=("more",))),
            "of another cluster": encode_sweep_list(replaced(sound, cluster="other")),
            "of another prefix": encode_sweep_list(replaced(sound, prefix="memq/")),
        }
        house.rig.store.objects[key] = changed[damage]
        assert await house.run(later_ms=2 * DAY_MS) == []
        assert house.orphan in house.rig.store.objects
        assert any(key in note and "so nothing goes by it" in note for note in house.notes)
        assert await house.run(later_ms=2 * DAY_MS) == [house.orphan], "the next list is sound"

    in_house(work)


def replaced(found: SweepList, **fields: Any) -> SweepList:
    return msgspec.structs.replace(found, **fields)


def test_object_kept_by_an_operator_stays_until_its_release() -> None:
    async def work(house: House) -> None:
        lists = house.sweep().lists
        with pytest.raises(InvalidRequestError, match="no sweep has found"):
            await lists.keep(house.orphan, house.clock.wall_ms())
        await house.run()
        assert [each.key for each in await lists.keep(house.orphan, house.clock.wall_ms())] == [house.orphan]
        for _ in range(3):
            assert await house.run(later_ms=2 * DAY_MS) == []
        assert [(each.found.key, each.kept) async for each in lists.all()] == [(house.orphan, True)]
        with pytest.raises(InvalidRequestError, match="is not kept"):
            await lists.release("memq/topics/other", house.clock.wall_ms())
        assert [each.key for each in await lists.release(ALL, house.clock.wall_ms())] == [house.orphan]
        assert await house.run(later_ms=2 * DAY_MS) == []
        assert await house.run(later_ms=2 * DAY_MS) == [house.orphan]
        assert house.lists == []

    in_house(work)


def test_a_list_of_kept_objects_that_can_not_be_read_keeps_all_of_its_prefix() -> None:
    async def work(house: House) -> None:
        lists = house.sweep().lists
        await house.run()
        await lists.keep(ALL, house.clock.wall_ms())
        (kept,) = [key for key in house.lists if "/kept/" in key]
        house.rig.store.objects[kept] = b"damaged"
        for _ in range(3):
            assert await house.run(later_ms=2 * DAY_MS) == []
        assert house.orphan in house.rig.store.objects
        assert any(kept in note for note in house.notes)

    in_house(work)


# ---- the format -------------------------------------------------------------------------------------

listed = st.builds(
    ListedObject,
    key=st.text(max_size=50).map(lambda text: f"c/topics/t/{text}"),
    size=st.integers(0, 1 << 50),
    modified_ms=st.integers(-(1 << 50), 1 << 50),
    why=st.text(max_size=50),
)


@given(objects=st.lists(listed, max_size=5), kept=st.booleans(), since_ms=st.integers(0, 1 << 50))
def test_a_list_comes_back_as_it_was(objects: list[ListedObject], kept: bool, since_ms: int) -> None:
    found = SweepList(cluster="c", prefix="c/topics/t/", since_ms=since_ms, kept=kept, objects=tuple(objects))
    data = encode_sweep_list(found)
    assert decode_sweep_list(data) == found
    named = parse_sweep_list_key(sweep_list_key("c", "c/topics/t/", since_ms, data, kept=kept))
    assert named is not None
    assert (named.kept, named.since_ms) == (kept, since_ms)


@given(body=st.binary(max_size=200))
def test_whatever_a_list_holds_it_is_read_or_damaged(body: bytes) -> None:
    for data in (body, pack_file(KIND_SWEEP_LIST, body, "list", "")):
        with suppress(CorruptDataError, UnsupportedFormatError):
            decode_sweep_list(data)


def test_a_list_is_bounded_and_a_pass_writes_as_many_as_it_needs() -> None:
    async def work(house: House) -> None:
        prefix = topic_prefix(house.cluster, "clicks", house.rig.topic.id)
        objects = [ListedObject(f"{prefix}{number}", 1, 0, "") for number in range(LISTED_MAX + 1)]
        await house.sweep().lists.add(prefix, objects, 17)
        assert sorted(len(decode_sweep_list(house.rig.store.objects[key]).objects) for key in house.lists) == [
            1,
            LISTED_MAX,
        ]
        assert all(key.startswith(sweep_prefix(house.cluster)) for key in house.lists)

    in_house(work)
