"""Kafka topics of memq: how they are made, widened, checked and deleted while Kafka is slow, wrong or denies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from memq.errors import DeniedError, InvalidRequestError, InvalidSettingError, NotFoundError, QueueError
from memq.limits import POINTER_BYTES_MAX
from memq.notification import Span
from memq.notification.kafka import queue as queue_module
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.settings import kafka_settings
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.notification.kafka.topics import KNOWN_TRIES, READY_PAUSE_S, READY_TRIES, REQUIRED, STALE, KafkaTopics
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.librdkafka import Library, Log, use
from tests.skipping_loop import now_s, run_skipping
from tests.unit.kafka_records import PARTITION, TOPIC, over_virtual

SECOND = ReadPartition(PARTITION.topic, PARTITION.topic_id, 1)
WAIT_S = READY_TRIES * READY_PAUSE_S
ONCE_S = 1.5 * READY_PAUSE_S
PART = KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A Kafka without topics. A span is not asked for again by itself."""
    found = Library()
    use(found, monkeypatch)
    monkeypatch.setattr(queue_module, "LEADERLESS_S_MAX", 0.0)
    return found


class Requests:
    """Notes all requests, and refuses those of `call` with `code` until a time of the loop."""

    def __init__(
        self,
        library: Library,
        call: str = "",
        code: int = 0,
        until_s: float = float("inf"),
        then: Callable[[], object] | None = None,
    ) -> None:
        self.all: list[tuple[str, Any]] = []
        self._call, self._code, self._until_s, self._then = call, code, until_s, then
        library.refuse = self._refuse

    def _refuse(self, call: str, subject: object) -> KafkaError | None:
        self.all.append((call, subject))
        if call != self._call or now_s() >= self._until_s:
            return None
        if self._then is not None:
            self._then()
        return KafkaError(self._code)

    def count(self, call: str) -> int:
        return sum(called == call for called, _ in self.all)


# ---- create ----------------------------------------------------------------------------------------


def test_a_new_topic_has_the_settings_that_keep_pointers(library: Library) -> None:
    requests = Requests(library)

    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION, SECOND], 9_000)
        assert len(library.topics[TOPIC]) == 2
        assert library.configs == {TOPIC: {**REQUIRED, STALE: "9000", "min.insync.replicas": "2"}}
        assert [new.replication_factor for call, new in requests.all if call == "create_topics"] == [3]
        assert requests.count("describe_configs") == 0, "Kafka may not know them yet"

    over_virtual(work, replication_factor=3, min_insync_replicas=2)


def test_number_of_copies_is_left_to_kafka_unless_it_is_set(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        assert library.configs == {TOPIC: {**REQUIRED, STALE: "9000"}}
        library.configs[TOPIC]["min.insync.replicas"] = "7"
        await queue.create([PARTITION], 9_000)
        assert library.configs[TOPIC]["min.insync.replicas"] == "7"

    over_virtual(work, min_insync_replicas=0, replication_factor=1)


def test_a_topic_that_is_as_it_should_be_is_not_changed(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        requests = Requests(library)
        await queue.create([PARTITION], 9_000)
        assert {call for call, _ in requests.all} == {"describe_topics", "describe_configs", "list_offsets"}
        await queue.create([PARTITION, SECOND], 8_000)
        assert library.configs[TOPIC][STALE] == "8000"
        assert (requests.count("create_topics"), requests.count("create_partitions")) == (0, 1)
        assert await queue.span(SECOND) == Span(0, 0)

    over_virtual(work)


@pytest.mark.parametrize("name", [*REQUIRED, "max.message.bytes"])
def test_a_setting_that_loses_pointers_is_named_with_its_cure(library: Library, name: str) -> None:
    least = str(2 * POINTER_BYTES_MAX)

    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        library.configs[TOPIC] |= {"max.message.bytes": least}
        await queue.create([PARTITION], 9_000)
        right = library.configs[TOPIC][name]
        wrong = str(int(least) - 1) if name == "max.message.bytes" else "1"
        library.configs[TOPIC][name] = wrong
        with pytest.raises(InvalidSettingError, match="pointers could get lost, or never be accepted") as caught:
            await queue.create([PARTITION], 9_000)
        assert f"Kafka topic '{TOPIC}' has {name} = {wrong}:" in str(caught.value)
        assert caught.value.hint == (
            "kafka-configs.sh --bootstrap-server k1:9092 --alter --entity-type topics --entity-name "
            f"{TOPIC} --add-config {name}={right}"
        )

    over_virtual(work, servers="k1,k2")


def test_a_topic_that_another_broker_makes_at_the_same_time_is_waited_for(library: Library) -> None:
    """Kafka may not list it yet. It is then checked and widened like any other."""
    library.topics[TOPIC], library.configs[TOPIC] = [Log()], {**REQUIRED, STALE: "9000", "min.insync.replicas": "1"}

    async def work(queue: KafkaQueue) -> None:
        Requests(library, "describe_topics", PART, until_s=WAIT_S / 2)
        await queue.create([PARTITION, SECOND], 8_000)
        assert WAIT_S / 2 <= now_s() < WAIT_S / 2 + ONCE_S
        assert (library.configs[TOPIC][STALE], len(library.topics[TOPIC])) == ("8000", 2)

    over_virtual(work)


def test_a_topic_that_exists_and_is_never_listed_is_an_error(library: Library) -> None:
    library.topics[TOPIC] = [Log()]

    async def work(queue: KafkaQueue) -> None:
        Requests(library, "describe_topics", PART)
        with pytest.raises(QueueError, match="exists, but does not list it"):
            await queue.create([PARTITION], 9_000)
        assert now_s() == pytest.approx(WAIT_S, abs=ONCE_S)

    over_virtual(work)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (PART, QueueError),
        (KafkaError._TIMED_OUT, QueueError),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, DeniedError),
        (KafkaError.POLICY_VIOLATION, InvalidRequestError),
    ],
)
@pytest.mark.parametrize("call", ["create_topics", "create_partitions", "incremental_alter_configs"])
def test_a_topic_that_kafka_does_not_make_or_change_is_an_error(
    library: Library, call: str, code: int, kind: type[Exception]
) -> None:
    """No such topic, as an answer to one that is just made, may pass."""

    async def work(queue: KafkaQueue) -> None:
        if call != "create_topics":
            await queue.create([PARTITION], 9_000)
        Requests(library, call, code)
        with pytest.raises(kind, match="Kafka topic") as caught:
            await queue.create([PARTITION, SECOND], 8_000)
        assert type(caught.value) is kind
        retried = (call, code) == ("incremental_alter_configs", PART)  # the node may not know the topic yet
        assert now_s() == pytest.approx(KNOWN_TRIES * READY_PAUSE_S if retried else 0)
        Requests(library)
        await queue.create([PARTITION, SECOND], 8_000)

    over_virtual(work)


def test_a_topic_that_kafka_knows_too_late_is_asked_for_with_pauses(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        library.configs_unknown = 2 * KNOWN_TRIES
        with pytest.raises(QueueError, match="reading the settings"):
            await queue.create([PARTITION], 9_000)
        assert now_s() == pytest.approx(KNOWN_TRIES * READY_PAUSE_S, abs=0.01)

    over_virtual(work)


@pytest.mark.parametrize("code", [KafkaError.LEADER_NOT_AVAILABLE, PART])
def test_a_new_topic_is_ready_when_the_leader_of_each_partition_answers(library: Library, code: int) -> None:
    async def work(queue: KafkaQueue) -> None:
        Requests(library, "list_offsets", code, until_s=WAIT_S / 2)
        await queue.create([PARTITION, SECOND], 9_000)
        assert WAIT_S / 2 <= now_s() < WAIT_S / 2 + ONCE_S
        begin_s = now_s()
        requests = Requests(library, "list_offsets", code)
        with pytest.raises(QueueError, match="was created but does not answer"):
            await queue.create([SECOND], 9_000)
        assert now_s() - begin_s == pytest.approx(WAIT_S, abs=ONCE_S)
        assert {place[1] for call, place in requests.all if call == "list_offsets"} == {0, 1}

    over_virtual(work)


def test_a_topic_that_is_deleted_while_it_is_made_is_an_error_that_may_pass(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        Requests(library, "list_offsets", PART, then=library.topics.clear)
        with pytest.raises(QueueError, match="was created but does not answer"):
            await queue.create([PARTITION], 9_000)

    over_virtual(work)


def test_a_denied_offset_is_not_waited_for(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        Requests(library, "list_offsets", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(DeniedError, match="asking for offsets"):
            await queue.create([PARTITION], 9_000)
        assert now_s() < READY_PAUSE_S

    over_virtual(work)


# ---- trim ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [(KafkaError._TIMED_OUT, QueueError), (PART, QueueError), (KafkaError.TOPIC_AUTHORIZATION_FAILED, DeniedError)],
)
def test_after_a_failed_trim_the_leader_is_looked_up_again(library: Library, code: int, kind: type[Exception]) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        library.log((TOPIC, 0)).append(1, b"first")
        await queue.trim(PARTITION, 0)
        requests = Requests(library, "delete_records", code)
        with pytest.raises(kind, match="trimming partition 0 of Kafka topic"):
            await queue.trim(PARTITION, 1)
        Requests(library)
        looked = requests.count("describe_topics")
        requests = Requests(library)
        await queue.trim(PARTITION, 1)
        assert looked + requests.count("describe_topics") == 1
        assert await queue.span(PARTITION) == Span(1, 1)

    over_virtual(work)


def test_a_trim_of_a_topic_that_is_deleted_meanwhile_finds_nothing(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION, SECOND], 9_000)
        for partition in (PARTITION, SECOND):
            library.log((TOPIC, partition.partition)).append(1, b"first")
        Requests(library, "delete_records", PART, then=library.topics.clear)
        with pytest.raises(QueueError, match="shown before"):  # maybe of metadata that are old
            await queue.trim(SECOND, 1)

    over_virtual(work)


def test_a_trim_of_a_topic_that_this_queue_drops_meanwhile_is_not_found(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        library.log((TOPIC, 0)).append(1, b"first")
        drops: list[asyncio.Task[None]] = []
        Requests(
            library,
            "delete_records",
            PART,
            then=lambda: drops.append(asyncio.create_task(queue.drop([PARTITION]))),
        )
        with pytest.raises(NotFoundError):
            await queue.trim(PARTITION, 1)
        await drops[0]

    over_virtual(work)


def test_the_library_knows_the_leader_of_a_partition_before_its_trim(library: Library) -> None:
    """It would look the leader up itself, with a fault that may end the process."""
    library.topics[TOPIC] = [Log()]
    library.log((TOPIC, 0)).append(1, b"first")
    requests = Requests(library)

    async def work() -> None:
        settings, clock = kafka_settings("kafka://localhost", {}), ManualClock()
        tasks = TaskOwner(lambda error: None, EventLog(clock))
        admin = KafkaAdmin(settings, LastErrors())
        metadata = TopicMetadataCache(admin, clock, tasks)
        topics = KafkaTopics(admin, settings, metadata, Offsets(admin, metadata, tasks), tasks)
        for _ in range(2):
            await topics.trim(TOPIC, 0, 1)
        await tasks.stop()

    run_skipping(work())
    assert [call for call, _ in requests.all] == ["describe_topics", "delete_records", "delete_records"]


# ---- drop ------------------------------------------------------------------------------------------


def test_a_deletion_lasts_until_kafka_lists_the_topic_no_more(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION, SECOND], 9_000)
        requests = Requests(library)
        library.lingering = 10
        await queue.drop([PARTITION, SECOND])
        assert now_s() == pytest.approx(10 * READY_PAUSE_S, abs=0.01)
        assert [subject for call, subject in requests.all if call == "delete_topics"] == [TOPIC]
        with pytest.raises(NotFoundError):
            await queue.span(PARTITION)
        await queue.create([PARTITION], 9_000)
        library.kept = 1
        begin_s = now_s()
        with pytest.raises(QueueError, match=f"deleting Kafka topic '{TOPIC}': Kafka shows it after 20 s"):
            await queue.drop([PARTITION])
        assert now_s() - begin_s == pytest.approx(WAIT_S, abs=ONCE_S)

    over_virtual(work)


def test_a_denied_deletion_is_raised_at_once(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([PARTITION], 9_000)
        Requests(library, "delete_topics", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(DeniedError, match=f"deleting Kafka topic '{TOPIC}'"):
            await queue.drop([PARTITION])
        assert now_s() == 0
        assert await queue.span(PARTITION) == Span(0, 0)

    over_virtual(work)


def test_no_partitions_are_deleted_without_a_request(library: Library) -> None:
    """The library refuses an empty list."""

    async def work(queue: KafkaQueue) -> None:
        await queue.drop([])

    over_virtual(work)
