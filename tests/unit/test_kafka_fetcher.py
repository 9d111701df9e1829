"""Reads of single partitions: what ends them, what they share, and what becomes of their consumers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from memq.errors import ClosedError, InvalidSettingError, MemqError, NotFoundError, QueueError
from memq.notification import Entries, Entry
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.reading.fetcher import METADATA_REQUESTS_MAX, TOGETHER_MAX, WAITS_MAX, EntryFetcher
from memq.notification.kafka.settings import kafka_settings
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.brokers import until
from tests.librdkafka import FakeConsumer, KafkaPartition, Library, Log, Message, Record, use
from tests.stepped_time import SteppedLoop, step, stepped_runtime

ALL = 1 << 30
TIMEOUT_S = 5.0


@dataclass
class ReadLibrary(Library):
    """A Kafka whose consumers are watched."""

    made: list[ReadConsumer] = field(default_factory=list)
    received: deque[Message] = field(default_factory=deque)  # by the next polls, before anything else
    failing: BaseException | None = None  # raised by the next request for metadata
    invalid: bool = False  # whether the library refuses its settings
    gate: threading.Event = field(default_factory=threading.Event)  # polls wait for it

    def client(self, kind: type[Any], settings: Mapping[str, Any], complain: Callable[[KafkaError], None]) -> Any:
        assert kind is Consumer
        if self.invalid:
            raise InvalidSettingError("Kafka's library refuses its settings")
        self.made.append(ReadConsumer(self))
        return self.made[-1]


class ReadConsumer(FakeConsumer):
    """Notes its calls."""

    def __init__(self, library_: ReadLibrary) -> None:
        super().__init__(library_)
        self._reads = library_
        self.looks: list[str] = []  # topics whose metadata were requested, in between those of assignments
        self.assigned: list[list[KafkaPartition]] = []  # each assignment, [] for none
        self.closes = 0

    def list_topics(self, topic: str, timeout_s: float) -> None:
        assert not any(self.assigned[-1:]), "the library looks for an assigned topic by itself, once a second"
        self.looks.append(topic)
        failing, self._reads.failing = self._reads.failing, None
        if failing is not None:
            raise failing

    def assign(self, parts: Collection[TopicPartition]) -> None:
        self.assigned.append([(part.topic, part.partition) for part in parts])
        super().assign(parts)

    def unassign(self) -> None:
        self.assigned.append([])
        super().unassign()

    def poll(self, timeout_s: float) -> Message | None:
        self._reads.gate.wait()
        return self._reads.received.popleft() if self._reads.received else super().poll(timeout_s)

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        assert timeout_s == 0, "the library waits so long for `count` messages"
        return super().consume(count, timeout_s)

    def close(self) -> None:
        self.closes += 1
        super().close()


class TimerLoop(SteppedLoop):
    """Notes its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        timer = super().call_later(*args, **named)
        self.timers.append(timer)
        return timer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ReadLibrary:
    """Many topics of one partition with three records, at 1,000 ms and later."""
    found = ReadLibrary({f"t{number}": [Log()] for number in range(TOGETHER_MAX + 1)})
    for logs in found.topics.values():
        for number in range(3):
            logs[0].append(1_000 + number, b"%d" % number)
    found.gate.set()
    use(found, monkeypatch)
    return found


def over(
    work: Callable[[EntryFetcher], Awaitable[None]], fetchers_max: int = 1, failed: type[BaseException] | None = None
) -> None:
    """Run work with a fetcher; its tasks end, by an error only of the type `failed`."""

    async def run() -> None:
        failures, runtime = list[BaseException](), stepped_runtime()
        section: dict[str, tuple[object, str]] = {
            "request_timeout_ms": (round(TIMEOUT_S * 1000), "test"),
            "fetchers_max": (fetchers_max, "test"),
        }
        settings = kafka_settings("kafka://localhost", section)
        tasks = TaskOwner(failures.append, EventLog(runtime.clock))
        fetcher = EntryFetcher(settings, runtime.clock, LastErrors(), tasks)
        try:
            await work(fetcher)
        finally:
            await fetcher.close()
            await tasks.stop()
        assert [type(failure) for failure in failures] == ([failed] if failed else [])

    with asyncio.Runner(loop_factory=TimerLoop) as runner:
        runner.run(run())


async def offsets(fetcher: EntryFetcher, topic: str = "t0", offset: int = 0, end: int = 3) -> list[int]:
    return [entry.offset for entry in await fetcher.fetch(topic, 0, offset, end, ALL)]


def record(offset: int, topic: str = "t0") -> Message:
    return Message((topic, 0), offset, Record(offset, 0, b"%d" % offset), None)


def complaint(code: int, place: Any = (None, None)) -> Message:
    return Message(place, None, None, KafkaError(code))


def test_entries_have_the_time_and_the_body_of_their_records(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        found = await fetcher.fetch("t0", 0, 1, 3, ALL)
        assert list(found) == [Entry(1, 1_001, b"1"), Entry(2, 1_002, b"2")]
        assert found.next == 3

    over(work)


@pytest.mark.parametrize(("bytes_max", "count"), [(1, 1), (2, 1), (20, 2), (29, 2), (30, 3)])
def test_a_read_has_as_many_entries_as_its_bytes_allow_and_at_least_one(
    library: ReadLibrary, bytes_max: int, count: int
) -> None:
    library.topics["t0"] = [Log()]
    for number in range(3):
        library.log(("t0", 0)).append(number, b"0123456789")

    async def work(fetcher: EntryFetcher) -> None:
        found = await fetcher.fetch("t0", 0, 0, 3, bytes_max)
        assert ([entry.offset for entry in found], found.next) == (list(range(count)), count)

    over(work)


@pytest.mark.parametrize("again", [2, 1, 0])
def test_records_that_come_again_end_a_read(library: ReadLibrary, again: int) -> None:
    """Librdkafka begins again where the log begins when Kafka says that an offset is out of range."""
    library.mute = True
    library.received.extend([record(0), record(1), record(2), record(again), record(3)])

    async def work(fetcher: EntryFetcher) -> None:
        found = await fetcher.fetch("t0", 0, 0, 5, ALL)
        assert ([entry.offset for entry in found], found.next) == ([0, 1, 2], 3)

    over(work)


def test_an_end_at_the_begin_is_not_the_end_that_was_known(library: ReadLibrary) -> None:
    library.topics["t0"] = [Log()]

    async def work(fetcher: EntryFetcher) -> None:
        with pytest.raises(QueueError, match="shows nothing at offset 0, and the end before was 1"):
            await fetcher.fetch("t0", 0, 0, 1, ALL)

    over(work)


def test_reads_at_once_share_an_assignment_and_those_beyond_its_bound_follow(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        found = await asyncio.gather(*(offsets(fetcher, topic) for topic in library.topics))
        assert found == [[0, 1, 2]] * (TOGETHER_MAX + 1)

    over(work)
    assert [len(places) for places in library.made[0].assigned] == [TOGETHER_MAX, 0, 1, 0]


def test_reads_of_one_partition_follow_one_another_in_their_order(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        ended: list[int] = []

        async def read(offset: int) -> None:
            assert await offsets(fetcher, "t0", offset) == list(range(offset, 3))
            ended.append(offset)

        async with asyncio.timeout(30):
            await asyncio.gather(read(1), read(0), read(2), offsets(fetcher, "t1"))
        assert ended == [1, 0, 2]
        assert library.made[0].assigned[:3] == [[("t0", 0), ("t1", 0)], [], [("t0", 0)]]

    over(work)


def test_metadata_of_new_topics_are_requested_before_their_assignment(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        names = list(library.topics)[: METADATA_REQUESTS_MAX + 1]
        await asyncio.gather(*(offsets(fetcher, topic) for topic in names[:-1]))
        assert library.made[0].looks == names[:-1]
        await offsets(fetcher, names[0])
        assert library.made[0].looks == names[:-1], "the consumer has them"
        await asyncio.gather(*(offsets(fetcher, topic) for topic in list(library.topics)[-METADATA_REQUESTS_MAX - 1 :]))
        assert library.made[0].looks == names[:-1], "librdkafka finds many at once sooner"

    over(work)


def test_a_consumer_is_kept_for_the_next_read_without_an_assignment(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        for _ in range(3):
            await offsets(fetcher)
        assert library.made[0].closes == 0

    over(work)
    assert library.made[0].assigned == [[("t0", 0)], []] * 3
    assert [consumer.closes for consumer in library.made] == [1]


def test_outages_pass_during_a_read(library: ReadLibrary) -> None:
    codes = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE)
    library.received.extend(complaint(code) for code in codes)

    async def work(fetcher: EntryFetcher) -> None:
        assert await offsets(fetcher) == [0, 1, 2]

    over(work)


@pytest.mark.parametrize(
    ("place", "failed"), [((None, None), {"t0", "t1"}), (("t1", 0), {"t1"}), (("t1", None), set()), (("t9", 0), set())]
)
def test_another_error_ends_the_reads_that_it_names(library: ReadLibrary, place: Any, failed: set[str]) -> None:
    """All, if it names no partition. The consumer is not used again."""
    library.received.append(complaint(KafkaError.UNKNOWN_TOPIC_OR_PART, place))

    async def work(fetcher: EntryFetcher) -> None:
        reads = (offsets(fetcher, topic) for topic in ("t0", "t1"))
        found = dict(zip(("t0", "t1"), await asyncio.gather(*reads, return_exceptions=True), strict=True))
        assert {topic for topic, each in found.items() if isinstance(each, NotFoundError)} == failed
        for topic in failed:
            assert f"reading partition 0 of Kafka topic '{topic}'" in str(found[topic])
        assert all(found[topic] == [0, 1, 2] for topic in found if topic not in failed)
        assert await offsets(fetcher) == [0, 1, 2]
        assert library.made[0].closes == bool(failed)

    over(work)


def test_a_call_that_the_library_refuses_fails_its_reads_and_no_later_one(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        library.failing = KafkaException(KafkaError(KafkaError._TRANSPORT))
        reads = [offsets(fetcher, topic) for topic in ("t0", "t1")]
        for topic, error in zip(("t0", "t1"), await asyncio.gather(*reads, return_exceptions=True), strict=True):
            assert isinstance(error, QueueError)
            assert f"reading partition 0 of Kafka topic '{topic}'" in str(error)
        assert library.made[0].closes == 1
        assert await offsets(fetcher) == [0, 1, 2]

    over(work)


def test_settings_that_the_library_refuses_fail_a_read(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        library.invalid = True
        with pytest.raises(InvalidSettingError):
            await offsets(fetcher)
        library.invalid = False
        assert await offsets(fetcher) == [0, 1, 2]

    over(work)


def test_a_fault_in_the_thread_ends_its_reads(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        library.failing = RuntimeError("a fault")
        async with asyncio.timeout(30):
            with pytest.raises(ClosedError, match="the queue is closed"):
                await offsets(fetcher)

    over(work, failed=RuntimeError)


def test_a_read_that_no_thread_begins_fails_in_time(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        for _ in range(2):
            await offsets(fetcher)
        library.gate.clear()
        blocked = asyncio.create_task(offsets(fetcher))
        await until(lambda: len(library.made[0].assigned) == 5)
        waiting = asyncio.create_task(offsets(fetcher, "t1"))
        await asyncio.sleep(0)
        step(WAITS_MAX * TIMEOUT_S)
        try:
            with pytest.raises(QueueError, match="all 1 threads were busy for 15 s") as caught:
                await waiting
            assert "restart this broker" in caught.value.hint
        finally:
            library.gate.set()
        found: Entries | MemqError | Any = (await asyncio.gather(blocked, return_exceptions=True))[0]
        assert found == [0, 1, 2]
        assert await offsets(fetcher, "t1") == [0, 1, 2]

    over(work)


def test_a_read_that_ended_leaves_no_timer(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimerLoop)
        await offsets(fetcher)
        assert [timer.cancelled() for timer in loop.timers] == [True]

    over(work)


def test_a_consumer_whose_read_ends_during_the_close_is_closed(library: ReadLibrary) -> None:
    async def work(fetcher: EntryFetcher) -> None:
        library.gate.clear()
        reading = asyncio.create_task(offsets(fetcher))
        await until(lambda: any(consumer.assigned for consumer in library.made))
        closing = asyncio.create_task(fetcher.close())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="the queue is closed"):
            await offsets(fetcher, "t1")
        library.gate.set()
        await closing
        assert await reading == [0, 1, 2]
        assert library.made[0].closes == 1

    over(work, fetchers_max=2)
