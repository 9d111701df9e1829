"""Ends of Kafka's logs: which answers count, which are refused, and for how long."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from memq.errors import LogCutError, NotFoundError, QueueError
from memq.notification.kafka.reading.offsets import CUT_S, LOWER_END_S, Offsets
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from tests.librdkafka import Library, Log
from tests.skipping_loop import skip
from tests.unit.kafka_records import RECORDS, TOPIC, few_records, over_offsets

OFFLINE = KafkaError(KafkaError._TRANSPORT)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    return few_records(monkeypatch)


async def is_cut(offsets: Offsets) -> bool:
    """Ask for an end that is refused; whether it counts as that of a cut log."""
    with pytest.raises(QueueError, match=r"the end is \d+, after it was") as caught:
        await offsets.end(TOPIC, 0)
    return isinstance(caught.value, LogCutError)


@pytest.mark.parametrize(("pause_s", "cut"), [(CUT_S / 2, True), (CUT_S + 1, False)])
def test_lower_ends_count_as_a_cut_log_only_if_they_follow_one_another(
    library: Library, pause_s: float, *, cut: bool
) -> None:
    """Each may be of a replica that lags for a moment, if nobody asked in between."""

    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        offsets.prove(TOPIC, 0, RECORDS + 1)
        found: list[bool] = []
        for _ in range(5):
            found.append(await is_cut(offsets))
            await skip(pause_s)
        assert found == ([False, False, True, True, True] if cut else [False] * 5)

    over_offsets(work)


@pytest.mark.parametrize("pause_s", [LOWER_END_S, CUT_S])
def test_the_proven_end_is_accepted_after_a_higher_one_that_kafka_only_answered(
    library: Library, pause_s: float
) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        offsets.prove(TOPIC, 0, RECORDS)
        library.offsets.append(RECORDS + 2)
        assert await offsets.end(TOPIC, 0) == RECORDS + 2
        assert not await is_cut(offsets)
        await skip(pause_s)
        assert await offsets.end(TOPIC, 0) == RECORDS

    over_offsets(work)


def test_a_right_answer_begins_the_time_of_the_lower_ones_again(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.offsets.append(RECORDS + 2)
        assert await offsets.end(TOPIC, 0) == RECORDS + 2
        assert not await is_cut(offsets)
        library.offsets.append(RECORDS + 2)
        assert await offsets.end(TOPIC, 0) == RECORDS + 2
        await skip(LOWER_END_S)
        assert not await is_cut(offsets)

    over_offsets(work)


def test_a_partition_that_was_forgotten_may_have_a_lower_end(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        offsets.prove(TOPIC, 0, RECORDS + 1)
        assert not await is_cut(offsets)
        offsets.forget(TOPIC, 0)
        assert offsets.proven(TOPIC, 0) == 0
        assert await offsets.end(TOPIC, 0) == RECORDS

    over_offsets(work)


def test_a_topic_that_another_process_deleted_and_made_again_begins_at_0(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        assert await offsets.end(TOPIC, 0) == RECORDS
        offsets.prove(TOPIC, 0, RECORDS)
        library.delete(TOPIC)
        metadata.drop(TOPIC)
        with pytest.raises(NotFoundError):
            await offsets.end(TOPIC, 0)
        library.topics[TOPIC] = [Log()]
        assert await offsets.end(TOPIC, 0) == 0

    over_offsets(work)


def test_a_look_up_that_fails_makes_no_lower_end_right(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        offsets.prove(TOPIC, 0, RECORDS + 1)
        library.refuse = lambda call, subject: OFFLINE if call == "describe_topics" else None
        with pytest.raises(QueueError, match="reading the metadata"):
            await offsets.end(TOPIC, 0)
        library.refuse = lambda call, subject: None
        assert not await is_cut(offsets)
        assert offsets.proven(TOPIC, 0) == RECORDS + 1

    over_offsets(work)


def test_after_a_leader_that_failed_answers_again_its_metadata_are_read_once(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        looks: list[object] = []

        def note(call: str, subject: object) -> None:
            if call == "describe_topics":
                looks.append(subject)

        library.refuse = note
        library.offsets.append(OFFLINE)
        with pytest.raises(QueueError):
            await offsets.end(TOPIC, 0)
        for _ in range(3):
            assert await offsets.end(TOPIC, 0) == RECORDS
        assert looks == [TOPIC, TOPIC]

    over_offsets(work)


def test_an_empty_partition_has_proofs_and_ends_of_0(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.topics[TOPIC].append(Log())
        offsets.prove(TOPIC, 1, 0)
        for _ in range(2):
            assert (offsets.proven(TOPIC, 1), await offsets.end(TOPIC, 1)) == (0, 0)

    over_offsets(work)


def test_a_time_before_all_records_is_that_of_the_first_one(library: Library) -> None:
    async def work(offsets: Offsets, metadata: TopicMetadataCache) -> None:
        library.topics[TOPIC].append(Log())
        for time_ms in (0, 1):
            library.log((TOPIC, 1)).append(time_ms, b"early")
        found = [await offsets.at_time(TOPIC, 1, time_ms) for time_ms in (-5, 0, 1, 2)]
        assert found == [0, 0, 1, None]

    over_offsets(work)
