"""Members of Kafka groups that one broker hosts: overlapping joins and expiries, and late closes."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from memq.errors import ClosedError, GenerationFencedError, QueueError
from memq.notification.groups import OUTSIDE_GENERATION
from memq.notification.kafka import librdkafka
from memq.notification.kafka.groups import hosted_groups
from memq.notification.kafka.groups import member as member_module
from memq.notification.kafka.groups.holdings import Holdings
from memq.notification.kafka.groups.hosted_groups import EXPIRY_S, HostedGroups, Parts
from memq.notification.kafka.groups.member import Commit, HostedMember
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.settings import Names, kafka_settings
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.brokers import until
from tests.skipping_loop import LoopClock, run_skipping, skip

PARTITION = ReadPartition("clicks", "0a" * 16, 0)
CLOSE_S = 10.0


class Member:
    """A hosted member without Kafka, whose close takes as long as it may."""

    def __init__(self, name: str, *_: object) -> None:
        self.holdings = Holdings(name, 1)
        self.changed = asyncio.Event()
        self.failure: Exception | None = None
        self.topics: list[str] = []
        self.closes: list[float] = []
        self.stored: list[TopicPartition] = []

    async def commit(self, offsets: list[TopicPartition]) -> list[TopicPartition]:
        return self.stored

    async def serve(self) -> None:
        """Do nothing."""

    def subscribe(self, topics: list[str]) -> None:
        self.topics = topics
        self.changed.set()

    async def close(self) -> None:
        self.closes.append(asyncio.get_running_loop().time())
        await skip(CLOSE_S)


class Nothing:
    """Stands for what these tests do not reach."""

    def __init__(self, *_: object) -> None:
        self.errors = LastErrors()

    async def store(self, group: str, offsets: list[TopicPartition]) -> list[TopicPartition]:
        return []

    async def close(self) -> None:
        """Do nothing."""


class House:
    """Hosted groups, and all members that they ever hosted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: list[Member] = []

        def hosted(*arguments: Any) -> Member:
            self.members.append(Member(*arguments))
            return self.members[-1]

        monkeypatch.setattr(hosted_groups, "HostedMember", hosted)
        monkeypatch.setattr(hosted_groups, "Positions", Nothing)
        nothing: Any = Nothing()
        clock, settings = LoopClock(), kafka_settings("kafka://localhost", {})
        self.tasks = TaskOwner(lambda error: pytest.fail(repr(error)), EventLog(clock))
        parts = Parts(nothing, settings, Names("t."), nothing, self.tasks, clock, random.Random(1))
        self.groups = HostedGroups(parts)

    async def join(self, name: str = "a") -> None:
        await self.groups.join("g", name, [PARTITION], 10_000)

    async def close(self) -> None:
        await self.groups.close()
        await self.tasks.stop()


def test_two_joins_in_place_of_a_failed_member_host_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one hosted a member that was never closed: it kept its partitions until the broker ended."""

    async def work() -> None:
        house = House(monkeypatch)
        await house.join()
        house.members[0].failure = QueueError("fenced")
        first = asyncio.create_task(house.join())
        await skip(0)
        await house.join()
        await first
        assert [len(member.closes) for member in house.members] == [1, 0]
        await house.close()
        assert [len(member.closes) for member in house.members] == [1, 1]

    run_skipping(work())


def test_silent_members_end_at_once_and_never_those_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        house = House(monkeypatch)
        for name in ("a", "b", "c"):
            await house.join(name)
        for member in house.members[:2]:
            member.failure = QueueError("fenced")
        await skip(EXPIRY_S + 0.1)
        assert [len(member.closes) for member in house.members] == [1, 1, 0]
        assert house.members[0].closes == house.members[1].closes, "the second one does not wait for the first"
        await house.join("b")
        await skip(CLOSE_S)
        assert [len(member.closes) for member in house.members] == [1, 1, 1, 0], "the third was silent for 10 s"
        await skip(11.0)
        assert [len(member.closes) for member in house.members] == [1, 1, 1, 1], "they were silent for 10 s"
        await house.close()

    run_skipping(work())


def test_a_member_that_closes_slowly_delays_no_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for silent members waited for each close, up to 10 s while librdkafka hangs."""

    async def work() -> None:
        house = House(monkeypatch)
        for name in ("a", "b"):
            await house.join(name)
        for member in house.members:
            member.failure = QueueError("fenced")
            await skip(2 * EXPIRY_S)
        assert [len(member.closes) for member in house.members] == [1, 1]
        await house.close()

    run_skipping(work())


def test_a_join_that_waits_during_the_close_hosts_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closed that member, and the close of the queue waited for its thread for ever."""

    async def work() -> None:
        house = House(monkeypatch)
        await house.join()
        house.members[0].failure = QueueError("fenced")
        joining = asyncio.create_task(house.join())
        await skip(0)
        await house.groups.close()
        with pytest.raises(ClosedError):
            await joining
        with pytest.raises(ClosedError):
            await house.join("b")
        assert len(house.members) == 1
        await house.close()

    run_skipping(work())


def test_a_close_waits_for_a_member_that_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not, and then waited without a bound for a thread that librdkafka blocks."""

    async def work() -> None:
        house = House(monkeypatch)
        await house.join()
        leaving = asyncio.create_task(house.groups.leave("g", "a"))
        await skip(0)
        await house.groups.close()
        assert asyncio.get_running_loop().time() >= house.members[0].closes[0] + CLOSE_S
        await leaving
        await house.close()

    run_skipping(work())


def test_a_commit_whose_offsets_are_not_all_answered_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned as if Kafka had stored them."""

    async def work() -> None:
        house = House(monkeypatch)
        await house.join()
        (member,) = house.members
        other = ReadPartition("clicks", "0a" * 16, 1)
        member.holdings.assign([PARTITION, other])
        positions = {each: Committed(Position(each.partition, 7), Totals()) for each in (PARTITION, other)}
        for name, generation in (("a", member.holdings.generation), ("", OUTSIDE_GENERATION)):
            with pytest.raises(QueueError, match=r"committing 2 positions of group 'g' .*: kafka's answer lacks them"):
                await house.groups.commit("g", name, generation, positions, 0)
        member.stored = [TopicPartition(Names("t.").kafka_topic(PARTITION), 0, 7)]
        with pytest.raises(QueueError, match=r"committing 1 positions of group 'g' .*: kafka's answer lacks them"):
            await house.groups.commit("g", "a", member.holdings.generation, positions, 0)
        member.stored.append(TopicPartition(Names("t.").kafka_topic(other), 1, 7))
        await house.groups.commit("g", "a", member.holdings.generation, positions, 0)
        await house.close()

    run_skipping(work())


class FailingConsumer:
    """A consumer of librdkafka that gets a partition, and then a second time, which the library refuses."""

    def __init__(self) -> None:
        self.assigned = False
        self._assigns: Any = None

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._assigns = on_assign

    def poll(self, timeout_s: float) -> None:
        if self._assigns is not None:
            self._assigns(self, [TopicPartition(Names("t.").kafka_topic(PARTITION), 0)])

    def incremental_assign(self, parts: list[TopicPartition]) -> None:
        if self.assigned:
            raise KafkaException(KafkaError(KafkaError._CONFLICT))
        self.assigned = True

    def pause(self, parts: list[TopicPartition]) -> None:
        """Nothing is fetched."""

    def close(self) -> None:
        """Leave the group."""


class RevokingConsumer:
    """A consumer of librdkafka whose partition is revoked when the test asks; it answers commits when the test asks.

    Commits of a revocation return when the test ends.
    """

    def __init__(self) -> None:
        self.committing, self.revoke, self.free = threading.Event(), threading.Event(), threading.Event()
        self.commits: list[list[TopicPartition]] = []  # all asynchronous ones
        self.answers: SimpleQueue[tuple[KafkaError | None, list[TopicPartition]]] = SimpleQueue()
        self._on_commit: Any = None
        self._on_revoke: Any = None

    def of(self, settings: dict[str, Any], complain: object) -> RevokingConsumer:
        self._on_commit = settings["on_commit"]
        return self

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._on_revoke = on_revoke

    def poll(self, timeout_s: float) -> None:
        if self.revoke.is_set() and self._on_revoke is not None:
            self._on_revoke(self, [TopicPartition(Names("t.").kafka_topic(PARTITION), 0)])
        with suppress(Empty):
            self._on_commit(*self.answers.get(timeout=0.001))

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        if asynchronous:
            self.commits.append(offsets)
            self.committing.set()
            return None
        self.committing.set()
        self.free.wait()
        return offsets

    def close(self) -> None:
        """Leave the group."""


def offset(number: int) -> list[TopicPartition]:
    return [TopicPartition(Names("t.").kafka_topic(PARTITION), 0, number, metadata="memq1")]


def test_a_commit_in_which_librdkafka_hangs_ends_with_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever, although the close leaves such a thread behind."""

    async def work() -> None:
        consumer = RevokingConsumer()
        monkeypatch.setattr(member_module, "consumer_of", consumer.of)
        monkeypatch.setattr(librdkafka, "CLOSE_S", 0.1)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        member.holdings.assign([PARTITION])
        member.subscribe([Names("t.").kafka_topic(PARTITION)])
        serving = asyncio.create_task(member.serve())
        consumer.revoke.set()
        await until(lambda: bool(member.holdings.revoking))
        commits = [asyncio.create_task(member.commit(offset(7))) for _ in range(2)]
        await until(consumer.committing.is_set)
        await member.close()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*commits)
        consumer.free.set()
        assert [each.code() for each in found if isinstance(each, KafkaError)] == [KafkaError.UNKNOWN_MEMBER_ID] * 2
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(work())
    for thread in threading.enumerate():
        if thread.name.startswith("memq-kafka"):
            thread.join(30)


def test_a_commit_that_librdkafka_never_answers_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of Kafka the member's thread waited in such a commit, and then the member left its group."""

    async def work() -> None:
        consumer = RevokingConsumer()
        monkeypatch.setattr(member_module, "consumer_of", consumer.of)
        monkeypatch.setattr(member_module, "COMMIT_S", 0.1)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        serving = asyncio.create_task(member.serve())
        with pytest.raises(QueueError, match="has not answered a commit of member 'a'"):
            await member.commit(offset(7))
        monkeypatch.setattr(member_module, "COMMIT_S", 30.0)
        commits = [asyncio.create_task(member.commit(offset(number))) for number in (7, 8, 9)]
        await until(lambda: len(consumer.commits) == 4)
        lost = KafkaError(KafkaError._WAIT_COORD)
        for answer in ((None, offset(8)), (lost, offset(9)), (None, offset(5)), (None, offset(7))):
            consumer.answers.put(answer)
        found = await asyncio.gather(*commits)
        assert [each if isinstance(each, KafkaError) else each[0].offset for each in found] == [7, 8, lost]
        assert member.failure is None
        await member.close()
        await serving

    asyncio.run(work())


def test_commits_of_the_same_offsets_are_answered_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        consumer = RevokingConsumer()
        monkeypatch.setattr(member_module, "consumer_of", consumer.of)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        serving = asyncio.create_task(member.serve())
        commits = [asyncio.create_task(member.commit(offset(7))) for _ in range(2)]
        await until(lambda: len(consumer.commits) == 2)
        lost = KafkaError(KafkaError._WAIT_COORD)
        for answer in ((lost, offset(7)), (None, offset(7))):
            consumer.answers.put(answer)
        first, second = await asyncio.gather(*commits)
        await member.close()
        await serving
        assert (first, isinstance(second, KafkaError)) == (lost, False)

    asyncio.run(work())


def test_a_commit_on_its_way_is_stored_before_a_revocation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poll hands out its answer before the release, and the consumer releases only after its commit."""

    async def work() -> None:
        consumer = RevokingConsumer()
        consumer.free.set()
        monkeypatch.setattr(member_module, "consumer_of", consumer.of)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        member.holdings.assign([PARTITION])
        member.subscribe([Names("t.").kafka_topic(PARTITION)])
        serving = asyncio.create_task(member.serve())
        commit = asyncio.create_task(member.commit(offset(7)))
        await until(consumer.committing.is_set)
        consumer.revoke.set()
        async with asyncio.timeout(10):
            stored = await commit
        assert not isinstance(stored, KafkaError)
        assert [each.offset for each in stored] == [7]
        await member.close()
        await serving

    asyncio.run(work())


def test_a_commit_that_hangs_in_a_revocation_ends_the_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocked all later commits of the member for ever."""

    async def work() -> None:
        consumer = RevokingConsumer()
        monkeypatch.setattr(member_module, "consumer_of", consumer.of)
        monkeypatch.setattr(member_module, "COMMIT_S", 0.1)
        monkeypatch.setattr(librdkafka, "CLOSE_S", 0.1)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        member.holdings.assign([PARTITION])
        member.subscribe([Names("t.").kafka_topic(PARTITION)])
        serving = asyncio.create_task(member.serve())
        consumer.revoke.set()
        await until(lambda: bool(member.holdings.revoking))
        with pytest.raises(GenerationFencedError, match="has not answered a commit of member 'a'"):
            await member.commit(offset(7))
        assert isinstance(member.failure, GenerationFencedError)
        assert member.changed.is_set()
        await member.close()
        consumer.free.set()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(work())
    for thread in threading.enumerate():
        if thread.name.startswith("memq-kafka"):
            thread.join(30)


class LateQueue(SimpleQueue[Any]):
    """A queue of orders that gets a commit just after the member's thread has emptied it for the last time."""

    def __init__(self) -> None:
        self.entered, self.ended, self.emptied = threading.Event(), threading.Event(), threading.Event()

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Commit):
            self.entered.set()
            self.ended.wait()
            self.emptied.wait(0.2)
        super().put(item)

    def empty(self) -> bool:
        self.emptied.set()
        return super().empty()


def test_a_commit_that_meets_the_end_of_its_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order came into the queue behind the last look of the thread, and it waited for ever."""

    class Ending(FailingConsumer):
        def poll(self, timeout_s: float) -> None:
            orders.entered.wait()
            raise KafkaException(KafkaError(KafkaError._CONFLICT))

        def close(self) -> None:
            orders.ended.set()

    async def work() -> None:
        monkeypatch.setattr(member_module, "consumer_of", lambda settings, complain: Ending())
        monkeypatch.setattr(member_module, "SimpleQueue", lambda: orders)
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        serving = asyncio.create_task(member.serve())
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            found = await member.commit([TopicPartition("t", 0, 7)])
        assert isinstance(found, KafkaError)
        await serving
        await member.close()

    orders = LateQueue()
    asyncio.run(work())


def test_a_member_whose_thread_ended_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the group in Kafka, and its heartbeats still said that it holds its partition."""

    async def work() -> None:
        monkeypatch.setattr(member_module, "consumer_of", lambda settings, complain: FailingConsumer())
        member = HostedMember("a", {}, Names("t."), LastErrors(), 1)
        serving = asyncio.create_task(member.serve())
        member.subscribe([Names("t.").kafka_topic(PARTITION)])
        async with asyncio.timeout(30):
            await serving
        await until(lambda: bool(member.holdings.membership().assigned))
        assert isinstance(member.failure, GenerationFencedError)
        await member.close()

    asyncio.run(work())
