"""Partitions that are followed: what arrives, what ends it, and what bounds it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from memq.notification import Entry
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.reading.follower import BATCHES_MAX, Follower
from memq.notification.kafka.settings import kafka_settings
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.brokers import until
from tests.librdkafka import FakeConsumer, KafkaPartition, Library, Log, Message, use
from tests.stepped_time import SteppedLoop, step, stepped_runtime

A, B = ("t", 0), ("t", 1)
IDLE_S = 60.0


@dataclass
class FollowedLibrary(Library):
    """A Kafka whose consumer returns one message at a time, except with complaints; it notes what it is ordered."""

    complaints: list[KafkaError] = field(default_factory=list)  # returned first, by messages without a partition
    batches: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # polls with a message
    orders: list[tuple[str, list[KafkaPartition]]] = field(default_factory=list)
    assigning: set[str] = field(default_factory=set)  # names of threads

    def client(self, kind: type[Any], settings: Mapping[str, Any], complain: Callable[[KafkaError], None]) -> Any:
        assert settings["enable.partition.eof"] is False
        return FollowingConsumer(self)


class FollowingConsumer(FakeConsumer):
    """See `FollowedLibrary`."""

    def __init__(self, library_: FollowedLibrary) -> None:
        super().__init__(library_)
        self._noted = library_
        self._complained = False

    def incremental_assign(self, parts: Collection[TopicPartition]) -> None:
        self._note("follow", parts)
        super().incremental_assign(parts)

    def incremental_unassign(self, parts: Collection[TopicPartition]) -> None:
        self._note("unfollow", parts)
        super().incremental_unassign(parts)

    def _note(self, order: str, parts: Collection[TopicPartition]) -> None:
        assert parts, "the library refuses an empty list"
        self._noted.orders.append((order, [(part.topic, part.partition) for part in parts]))
        self._noted.assigning.add(threading.current_thread().name)

    def poll(self, timeout_s: float) -> Message | None:
        if self._noted.complaints:
            self._complained = True
            return Message((None, None), None, None, self._noted.complaints.pop(0))
        found = super().poll(timeout_s)
        if found is not None:
            self._noted.batches.release()
        return found

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        assert timeout_s == 0, "the library waits so long for `count` messages"
        if not self._complained:
            return []
        self._complained = False
        found = super().poll(0)
        return [found, *super().consume(count, 0)] if found else []


@dataclass
class Following:
    """A follower, and what it has reported."""

    library: FollowedLibrary
    arrived: list[tuple[KafkaPartition, Entry]] = field(default_factory=list)
    unlisted: list[KafkaPartition] = field(default_factory=list)
    follower: Follower = field(init=False)

    async def come(self, *offsets: int, place: KafkaPartition = A) -> None:
        """Wait until entries with these offsets have arrived, and no others before them."""
        await until(lambda: len(self.offsets(place)) >= len(offsets))
        assert self.offsets(place) == list(offsets)

    def offsets(self, place: KafkaPartition) -> list[int]:
        return [entry.offset for arrived, entry in self.arrived if arrived == place]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FollowedLibrary:
    """A topic of two partitions: one with two records, one without any."""
    found = FollowedLibrary({"t": [Log(), Log()]})
    for number in range(2):
        found.log(A).append(1_000 + number, b"%d" % number)
    use(found, monkeypatch)
    return found


def over(library: FollowedLibrary, work: Callable[[Following], Awaitable[None]], limit_s: float = 6.0) -> None:
    async def run() -> None:
        failures, runtime, following = list[BaseException](), stepped_runtime(), Following(library)
        settings = kafka_settings("kafka://localhost", {"followed_idle_ms": (round(IDLE_S * 1000), "test")})
        tasks = TaskOwner(failures.append, EventLog(runtime.clock))
        following.follower = Follower(
            settings,
            runtime.clock,
            LastErrors(),
            tasks,
            lambda place, entry: following.arrived.append((place, entry)),
            following.unlisted.append,
        )
        try:
            async with asyncio.timeout(limit_s):
                await work(following)
        finally:
            await following.follower.close()
            await tasks.stop()
        assert failures == []
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("memq-kafka")]

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(run())


def test_entries_arrive_from_the_end_on_that_was_given(library: FollowedLibrary) -> None:
    async def work(following: Following) -> None:
        follower = following.follower
        assert follower.end(A) is None
        follower.follow({A: 1, B: 0})
        assert (follower.end(A), follower.end(B)) == (1, 0)
        library.arrive(B, 2_000, b"b")
        await following.come(0, place=B)
        await following.come(1)
        assert (A, Entry(1, 1_001, b"1")) in following.arrived
        assert (follower.end(A), follower.end(B)) == (2, 1)

    over(library, work)
    assert library.closed == 1


def test_a_partition_that_is_followed_is_not_followed_twice(library: FollowedLibrary) -> None:
    """The library refuses it, and the thread would die."""

    async def work(following: Following) -> None:
        following.follower.follow({A: 0})
        await following.come(0, 1)
        following.follower.follow({A: 0})
        following.follower.follow({A: 0, B: 0})
        library.arrive(A, 2_000, b"2")
        await following.come(0, 1, 2)
        await until(lambda: library.followed == {A, B})
        assert following.follower.end(A) == 3
        assert library.orders == [("follow", [A]), ("follow", [B])]
        assert library.assigning == {"memq-kafka-follower_0"}

    over(library, work)


def test_nothing_arrives_of_a_partition_after_its_end(library: FollowedLibrary) -> None:
    async def work(following: Following) -> None:
        following.follower.follow({A: 2, B: 0})
        await until(lambda: library.followed == {A, B})
        following.follower.unfollow([A, ("other", 0)])
        following.follower.unfollow([A])
        library.arrive(A, 2_000, b"late")  # before the thread takes the order, or after it
        await until(lambda: library.followed == {B})
        library.arrive(B, 2_000, b"b")
        await following.come(0, place=B)
        assert (following.offsets(A), following.follower.end(A)) == ([], None)
        assert library.orders[1:] == [("unfollow", [A])]
        following.follower.follow({A: 2})
        await following.come(2)

    over(library, work)


def test_a_partition_is_followed_as_long_as_it_is_used(library: FollowedLibrary) -> None:
    async def work(following: Following) -> None:
        following.follower.follow({A: 2, B: 0})
        await until(lambda: library.followed == {A, B})
        for _ in range(3):
            step(IDLE_S * 0.7)
            await asyncio.sleep(0)
            assert following.follower.end(A) == 2
        await until(lambda: library.followed == {A})
        assert (following.follower.end(A), following.follower.end(B)) == (2, None)
        step(2 * IDLE_S)
        await until(lambda: not library.followed)
        assert following.follower.end(A) is None

    over(library, work, 10 * IDLE_S)


def test_a_deleted_partition_is_reported_once_and_not_followed_any_more(library: FollowedLibrary) -> None:
    async def work(following: Following) -> None:
        library.topics["kept"] = [Log()]
        following.follower.follow({B: 0, ("kept", 0): 0})
        await until(lambda: library.followed == {B, ("kept", 0)})
        library.delete("t")
        await until(lambda: library.followed == {("kept", 0)})
        assert (following.unlisted, following.follower.end(B)) == ([B], None)
        library.arrive(("kept", 0), 1, b"kept")
        await following.come(0, place=("kept", 0))

    over(library, work)


def test_complaints_about_connections_change_nothing(library: FollowedLibrary) -> None:
    library.complaints = [KafkaError(KafkaError._ALL_BROKERS_DOWN), KafkaError(KafkaError._TRANSPORT)]

    async def work(following: Following) -> None:
        following.follower.follow({A: 0})
        await following.come(0, 1)
        await until(lambda: not library.complaints)
        library.arrive(A, 2_000, b"2")
        await following.come(0, 1, 2)
        assert following.unlisted == []

    over(library, work)


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError.TOPIC_AUTHORIZATION_FAILED])
def test_another_error_of_a_partition_leaves_it_followed(library: FollowedLibrary, code: int) -> None:
    class Refused(FollowingConsumer):
        refused = False

        def poll(self, timeout_s: float) -> Message | None:
            if self._noted.followed and not self.refused:
                self.refused = True
                return Message(A, None, None, KafkaError(code))
            return super().poll(timeout_s)

    library.client = lambda kind, settings, complain: Refused(library)  # type: ignore[method-assign]

    async def work(following: Following) -> None:
        following.follower.follow({A: 0})
        await following.come(0, 1)
        assert following.unlisted == []

    over(library, work)


def test_a_loop_that_is_busy_stops_the_polls_and_gets_all_entries_later(library: FollowedLibrary) -> None:
    """Else the entries that arrive meanwhile would have no bound."""
    count = 3 * BATCHES_MAX

    async def work(following: Following) -> None:
        following.follower.follow({B: 0})
        await until(lambda: library.followed == {B})
        for number in range(count):
            library.arrive(B, number, b"%d" % number)
        polls = 0
        while library.batches.acquire(timeout=0.3):  # the loop does nothing else
            polls += 1
        assert polls == BATCHES_MAX + 1, "one more is in the thread's hand"
        await following.come(*range(count), place=B)
        for number in range(count):
            library.arrive(B, number, b"%d" % number)
        await following.come(*range(2 * count), place=B)

    over(library, work)
