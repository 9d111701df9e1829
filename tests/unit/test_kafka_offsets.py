"""Offsets of Kafka topics: each caller reads the metadata first, and concurrent callers share a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.errors import NotFoundError, QueueError
from memq.notification.kafka import topic_metadata_cache as looks_module
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.reading.offsets import PARTITIONS_MAX, Offsets
from memq.notification.kafka.request_coalescer import REQUESTS_MAX, RequestCoalescer
from memq.notification.kafka.settings import kafka_settings
from memq.notification.kafka.topic_metadata_cache import FRESH_S, GONE_S, TopicMetadataCache
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.brokers import run, until
from tests.contract.manual_clock import ManualClock
from tests.librdkafka import finished


@dataclass
class Library:
    """An admin client: what it is asked is noted; it holds nobody up that asks for a topic it was not asked to show."""

    topics: Mapping[str, Sequence[int]]  # for each partition the node that leads it, 0 for nobody
    silent: int = -1  # a node that answers nothing
    looks: list[list[str]] = field(default_factory=list)
    lists: list[list[tuple[str, int]]] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)
    refused: list[KafkaError] = field(default_factory=list)  # what the next places are answered

    def describe_topics(self, topics: TopicCollection, request_timeout: float) -> dict[str, Future[Any]]:
        self.looks.append(list(topics.topic_names))
        return {name: finished(self._description(name)) for name in topics.topic_names}

    def _description(self, name: str) -> object:
        if name not in self.topics:
            return KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        self.shown[name] = len(self.topics[name])
        nodes = enumerate(self.topics[name])
        parts = [SimpleNamespace(id=id_, leader=SimpleNamespace(id=node) if node else None) for id_, node in nodes]
        return SimpleNamespace(partitions=parts)

    def list_offsets(self, asked: Mapping[TopicPartition, Any], request_timeout: float) -> dict[Any, Future[Any]]:
        places = [(place.topic, place.partition) for place in asked]
        self.lists.append(places)
        assert all(number < self.shown.get(name, 0) for name, number in places), "the library would look by itself"
        waits = any(self.topics.get(name, [0])[number] == self.silent for name, number in places)
        return {place: Future() if waits else finished(self._offset(place)) for place in asked}

    def _offset(self, place: TopicPartition) -> object:
        if self.refused:
            return KafkaException(self.refused.pop(0))
        return SimpleNamespace(offset=place.partition * 10)

    def poll(self, timeout_s: float) -> None:
        pass


def over(library: Library, work: Callable[[Offsets, ManualClock], Awaitable[None]]) -> None:
    """Run a test's work with offsets that are asked of this library."""

    async def whole() -> None:
        clock, failures = ManualClock(), list[BaseException]()
        tasks = TaskOwner(failures.append, EventLog(clock))
        admin = KafkaAdmin(kafka_settings("kafka://localhost", {}), LastErrors())
        admin.client = cast(AdminClient, library)
        looks = TopicMetadataCache(admin, clock, tasks)
        await work(Offsets(admin, looks, tasks), clock)
        await admin.close()
        await tasks.stop()
        assert failures == []

    run(whole())


def test_of_many_topics_each_is_looked_at_once_before_its_offsets_are_asked_for() -> None:
    names = [f"t{number}" for number in range(3 * looks_module.ASKED_MAX + 1)]
    library = Library({name: [True] * 2 for name in names})

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        asked = [ask(name, number) for name in names for number in range(2) for ask in (offsets.begin, offsets.end)]
        assert await asyncio.gather(*asked) == [0, 0, 10, 10] * len(names)
        assert sorted(name for request in library.looks for name in request) == sorted(names)
        assert max(map(len, library.looks)) == looks_module.ASKED_MAX
        assert len(library.looks) == 4
        assert len(library.lists) <= 4, "those of a look go together"
        assert all(len(set(places)) == len(places) for places in library.lists), "each place is asked for one thing"
        assert await offsets.end("t1", 1) == 10
        assert len(library.looks) == 4, "it was shown not long ago"
        clock.advance(int(FRESH_S * 1000) + 1)
        assert await offsets.end("t1", 1) == 10
        assert library.looks[4:] == [["t1"]], "the library forgets it after a while"

    over(library, work)


def test_a_request_asks_for_no_more_places_than_the_library_bears() -> None:
    library = Library({"wide": [True] * (2 * PARTITIONS_MAX + 1)})

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        found = await asyncio.gather(*(offsets.end("wide", number) for number in range(2 * PARTITIONS_MAX + 1)))
        assert found == [10 * number for number in range(2 * PARTITIONS_MAX + 1)]
        assert sorted(map(len, library.lists)) == [1, PARTITIONS_MAX, PARTITIONS_MAX]

    over(library, work)


def test_missing_or_leaderless_partition_is_answered_without_a_request() -> None:
    library = Library({"a": [True, False]})

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        asked = (offsets.end("a", 0), offsets.end("a", 1), offsets.end("a", 2), offsets.end("b", 0))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[0] == 0
        assert [type(each) for each in found[1:]] == [QueueError, NotFoundError, NotFoundError]
        assert ["no leader" in str(found[1]), "has 2 partitions" in str(found[2])] == [True, True]
        assert library.lists == [[("a", 0)]]
        library.topics = {"a": [1, 1, 1]}  # widened, and led
        assert [await offsets.end("a", 1), await offsets.end("a", 2)] == [10, 20]
        library.topics = {}
        library.refused = [KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)]
        with pytest.raises(QueueError, match="shown before"):  # maybe of metadata that are old
            await offsets.end("a", 0)
        clock.advance(int(GONE_S * 1000))
        for _ in range(2):
            with pytest.raises(NotFoundError, match="reading the metadata of"):
                await offsets.end("a", 0)

    over(library, work)


def test_a_partition_that_the_library_does_not_know_is_looked_at_and_asked_for_once_more() -> None:
    library = Library({"a": [True, True]})

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        library.refused = [KafkaError(KafkaError.FENCED_LEADER_EPOCH)]
        assert list(await asyncio.gather(*(offsets.end("a", number) for number in range(2)))) == [0, 10]
        assert library.looks == [["a"], ["a"]]
        assert library.lists == [[("a", 0), ("a", 1)], [("a", 0)]]
        library.refused = [KafkaError(KafkaError.FENCED_LEADER_EPOCH)] * 2
        with pytest.raises(QueueError):
            await offsets.end("a", 0)

    over(library, work)


def test_a_leader_that_does_not_answer_delays_no_place_of_another() -> None:
    library = Library({"a": [1, 2, 1], "b": [2]}, silent=2)

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        sick = [asyncio.create_task(offsets.end("b", 0)), asyncio.create_task(offsets.begin("a", 1))]
        for ask in (offsets.end, offsets.begin) * REQUESTS_MAX:
            sick += [asyncio.create_task(ask("a", 1)), asyncio.create_task(ask("b", 0))]
            assert list(await asyncio.gather(offsets.end("a", 0), offsets.end("a", 2))) == [0, 20]
        assert not any(task.done() for task in sick)
        for task in sick:
            task.cancel()

    over(library, work)


def test_a_place_whose_leader_failed_is_looked_at_again_and_no_other() -> None:
    library = Library({"a": [1, 1]})

    async def work(offsets: Offsets, clock: ManualClock) -> None:
        assert list(await asyncio.gather(offsets.end("a", 0), offsets.end("a", 1))) == [0, 10]
        library.refused = [KafkaError(KafkaError._TIMED_OUT)]
        with pytest.raises(QueueError):
            await offsets.end("a", 1)
        assert await offsets.end("a", 0) == 0
        assert library.looks == [["a"]]
        assert await offsets.end("a", 1) == 10
        assert library.looks == [["a"], ["a"]]

    over(library, work)


def test_an_answer_is_never_of_a_request_that_went_before_the_question() -> None:
    async def work() -> None:
        requests: list[Sequence[str]] = []
        gate = asyncio.Event()

        async def request(asked: Sequence[str]) -> dict[str, Any]:
            requests.append(asked)
            number = len(requests)
            await gate.wait()
            return dict.fromkeys(asked, number)

        tasks = TaskOwner(lambda error: None, EventLog(ManualClock()))
        joined: RequestCoalescer[str, int] = RequestCoalescer(request, str, 2, tasks, "test")
        asks = []
        for number in range(REQUESTS_MAX):
            asks.append(asyncio.create_task(joined.ask("a")))
            await until(lambda number=number: len(requests) == number + 1)  # type: ignore[misc]
        late = [asyncio.create_task(joined.ask(question)) for question in ("a", "a", "b", "c")]
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(requests) == REQUESTS_MAX, "no more are under way"
        gate.set()
        assert await asyncio.gather(*asks) == [1, 2, 3, 4]
        assert await asyncio.gather(*late) == [5, 5, 5, 6]
        assert requests[REQUESTS_MAX:] == [["a", "b"], ["c"]]
        await tasks.stop()

    run(work())
