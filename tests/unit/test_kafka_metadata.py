"""Metadata of Kafka topics: how long they count, and which answers are not believed."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from memq.errors import DeniedError, NotFoundError, QueueError
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.topic_metadata_cache import FRESH_S, GONE_S, TopicMetadataCache
from tests.librdkafka import Library, Log
from tests.skipping_loop import skip
from tests.unit.kafka_records import TOPIC, few_records, over_offsets

DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    return few_records(monkeypatch)


def looks_of(library: Library) -> list[object]:
    """Return the list of topics whose metadata will be requested."""
    looks: list[object] = []
    library.refuse = lambda call, subject: looks.append(subject) if call == "describe_topics" else None
    return looks


def test_a_view_counts_for_a_time(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        assert metadata.known(TOPIC) is None
        view = await metadata.refresh(TOPIC)
        assert (view.count, view.leader(0), view.leader(1), metadata.known(TOPIC)) == (1, 1, None, view)
        await skip(FRESH_S)
        assert metadata.known(TOPIC) == view
        await skip(1.0)
        assert metadata.known(TOPIC) is None

    over_offsets(work)


def test_a_need_requests_metadata_only_of_partitions_that_are_not_known(library: Library) -> None:
    looks = looks_of(library)

    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        for _ in range(2):
            await metadata.need(TOPIC, 0)
        assert looks == [TOPIC]
        with pytest.raises(NotFoundError, match="partition 1 of Kafka topic"):
            await metadata.need(TOPIC, 1)
        library.topics[TOPIC].append(Log())
        await metadata.need(TOPIC, 1)
        assert looks == [TOPIC] * 3
        await skip(2 * FRESH_S)
        await metadata.need(TOPIC, 1)
        assert looks == [TOPIC] * 3, "partitions do not disappear by age"
        metadata.forget(TOPIC)
        await metadata.need(TOPIC, 1)
        assert looks == [TOPIC] * 4
        with pytest.raises(NotFoundError, match="partition 0 of Kafka topic 'none'"):
            await metadata.need("none", 0)

    over_offsets(work)


def test_a_topic_is_gone_after_answers_without_it_for_long(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.topics[TOPIC].append(Log())
        assert await metadata.count(TOPIC) == 2
        del library.topics[TOPIC]
        with pytest.raises(QueueError, match="which it has shown before"):
            await metadata.refresh(TOPIC)
        assert metadata.known(TOPIC) is None
        await skip(GONE_S - 1)
        with pytest.raises(QueueError, match="which it has shown before"):
            await metadata.refresh(TOPIC)
        await skip(1)
        with pytest.raises(NotFoundError):
            await metadata.refresh(TOPIC)
        assert await metadata.count(TOPIC) == 0
        library.topics[TOPIC] = [Log()]
        assert await metadata.count(TOPIC) == 1, "another process made it again"

    over_offsets(work)


def test_an_answer_with_the_topic_begins_the_time_without_it_again(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        await metadata.refresh(TOPIC)
        logs = library.topics[TOPIC]
        for _ in range(2):
            del library.topics[TOPIC]
            with pytest.raises(QueueError, match="which it has shown before"):
                await metadata.refresh(TOPIC)
            library.topics[TOPIC] = logs
            await metadata.refresh(TOPIC)
            await skip(GONE_S)

    over_offsets(work)


def test_a_topic_that_was_dropped_may_be_gone_at_once_and_come_back_smaller(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.topics[TOPIC].append(Log())
        assert await metadata.count(TOPIC) == 2
        del library.topics[TOPIC]
        with pytest.raises(QueueError):
            await metadata.refresh(TOPIC)
        metadata.drop(TOPIC)
        with pytest.raises(NotFoundError):
            await metadata.refresh(TOPIC)
        library.topics[TOPIC] = [Log()]
        assert await metadata.count(TOPIC) == 1
        del library.topics[TOPIC]
        with pytest.raises(QueueError, match="which it has shown before"):
            await metadata.refresh(TOPIC)

    over_offsets(work)


def test_fewer_partitions_than_before_are_an_error_and_change_nothing(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.topics[TOPIC].append(Log())
        view = await metadata.refresh(TOPIC)
        library.narrow = 1
        with pytest.raises(QueueError, match=r"shows 1 partitions of topic .+, and showed 2 before"):
            await metadata.refresh(TOPIC)
        assert metadata.known(TOPIC) == view
        assert await metadata.count(TOPIC) == 2

    over_offsets(work)


def test_another_error_keeps_the_view_and_is_no_answer(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        view = await metadata.refresh(TOPIC)
        looks = list[object]()

        def deny(call: str, subject: object) -> KafkaError | None:
            looks.append(subject)
            return DENIED

        library.refuse = deny
        with pytest.raises(DeniedError, match="reading the metadata of Kafka topic"):
            await metadata.count(TOPIC)
        assert looks == [TOPIC], "only an absence is asked for again"
        assert metadata.known(TOPIC) == view

    over_offsets(work)


def test_only_absent_topics_of_a_shared_request_are_asked_for_again(library: Library) -> None:
    looks = looks_of(library)

    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        with pytest.raises(NotFoundError):
            await metadata.refresh("none")
        assert looks == ["none", "none"]
        library.unknown = 1
        assert await metadata.count(TOPIC) == 1
        assert looks == ["none", "none", TOPIC, TOPIC]

    over_offsets(work)
