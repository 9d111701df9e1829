"""The Kafka queue on a librdkafka that answers wrongly: no offset, end or denial comes from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from memq.errors import (
    ClosedError,
    DeniedError,
    LogCutError,
    MemqError,
    NotFoundError,
    QueueError,
    UnreachableError,
)
from memq.notification import FROM_THE_LOG, Span
from memq.notification.kafka import librdkafka as library_module
from memq.notification.kafka import topics as topics_module
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.groups import requests
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading import offsets as offsets_module
from memq.notification.kafka.reading.import_source import KafkaSource, SourceTopic
from memq.notification.kafka.settings import kafka_settings
from memq.notification.log_reader import all_entries
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, Totals
from tests.brokers import until
from tests.librdkafka import INVALID, Library, Log
from tests.unit.kafka_records import ALL, PARTITION, RECORDS, TOPIC, few_records, over, publication

FETCHERS = kafka_settings("kafka://localhost", {}).fetchers_max


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """See `few_records`."""
    return few_records(monkeypatch)


@pytest.mark.parametrize(
    ("call", "offset"),
    [
        (call, offset)
        for call in ("read", "end", "begin", "wait", "trim", "time")
        for offset in (INVALID, -1, -2, -1000)
        if (call, offset) != ("time", -1)  # Kafka's own answer for a time behind all records
    ],
)
def test_a_negative_offset_is_an_error_that_may_pass(library: Library, call: str, offset: int) -> None:
    async def work(queue: KafkaQueue) -> None:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "read": lambda: queue.read(PARTITION, 2, ALL),
            "end": lambda: queue.span(PARTITION),
            "begin": lambda: queue.span(PARTITION),
            "wait": lambda: queue.wait({PARTITION: 9}, 0.01),
            "trim": lambda: queue.trim(PARTITION, 3),
            "time": lambda: queue.seek_time(PARTITION, 1_002),
        }
        library.offsets.extend({"end": [None, offset], "time": [None, offset]}.get(call, [offset]))
        with pytest.raises(QueueError, match=f"librdkafka answered {offset}, which is no offset"):
            await calls[call]()
        library.offsets.clear()
        assert await queue.span(PARTITION) == Span(0, RECORDS)
        assert await queue.seek_time(PARTITION, 1_002) == 2
        assert [entry.offset for entry in await queue.read(PARTITION, 2, ALL)] == [2, 3, 4]

    over(work)


def test_a_trim_is_done_when_kafka_shows_it(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.kept = 1
        with pytest.raises(QueueError, match="Kafka kept offset 0, below 3"):
            await queue.trim(PARTITION, 3)
        library.denied_absence = 1
        with pytest.raises(QueueError, match="but Kafka shows it to others"):
            await queue.trim(PARTITION, 3)
        await queue.trim(PARTITION, 3)
        assert await queue.span(PARTITION) == Span(3, RECORDS)

    over(work)


@pytest.mark.parametrize("times", [2, topics_module.KNOWN_TRIES + 1])
def test_a_topic_whose_settings_one_node_does_not_know_yet_is_asked_for_again(
    library: Library, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A broker ended at its start, because another one had just made the audit topic."""
    monkeypatch.setattr(topics_module, "READY_PAUSE_S", 0.0)
    library.configs[TOPIC] = {**topics_module.REQUIRED, topics_module.STALE: "9000", "min.insync.replicas": "1"}
    library.configs_unknown = times

    async def work(queue: KafkaQueue) -> None:
        if times == 2:
            await queue.create([PARTITION], 9_000)
        else:
            with pytest.raises(QueueError, match="reading the settings of Kafka topic"):
                await queue.create([PARTITION], 9_000)
        assert library.configs_unknown == 0

    over(work)


def test_a_topic_that_kafka_shows_for_a_moment_after_its_deletion_is_deleted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_module, "READY_PAUSE_S", 0.0)

    async def work(queue: KafkaQueue) -> None:
        library.lingering = 2
        await queue.drop([PARTITION])
        assert TOPIC not in library.topics

    over(work)


@pytest.mark.parametrize("lie", ["kept", "denied_absence"])
def test_a_topic_is_deleted_when_kafka_shows_it_no_more(
    library: Library, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_module, "READY_PAUSE_S", 0.0)

    async def work(queue: KafkaQueue) -> None:
        assert await queue.span(PARTITION) == Span(0, RECORDS)
        setattr(library, lie, 1)
        with pytest.raises(QueueError, match="Kafka shows it after"):
            await queue.drop([PARTITION])
        await queue.drop([PARTITION])
        assert TOPIC not in library.topics
        await queue.drop([PARTITION])

    over(work)


def test_a_time_behind_all_records_lies_at_the_end(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        assert await queue.seek_time(PARTITION, 5_000) == RECORDS

    over(work)


def test_seek_by_time_keeps_entries_published_between_its_questions(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)
        listed, asked = KafkaAdmin.list_offsets, list[Any]()

        async def then_publish(admin: KafkaAdmin, questions: Any) -> Any:
            found = await listed(admin, questions)
            asked.append(questions)
            if len(asked) == 1:
                assert await queue.publish(publication(b"new")) == RECORDS
            return found

        monkeypatch.setattr(KafkaAdmin, "list_offsets", then_publish)
        assert await queue.seek_time(PARTITION, 1_500) == RECORDS
        assert len(asked) == 2

    over(work)


def test_an_end_before_the_beginning_is_none(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.offsets.extend([4, 3])
        with pytest.raises(QueueError, match="begins at 4 and ends at 3"):
            await queue.span(PARTITION)
        assert await queue.span(PARTITION) == Span(0, RECORDS)

    over(work)


@pytest.mark.parametrize("proof", ["read", "end", "publish"])
def test_an_end_that_goes_back_is_none(library: Library, proof: str) -> None:
    """Whatever has shown the end before; another process that has not seen it can't know."""

    async def work(queue: KafkaQueue) -> None:
        if proof == "read":
            library.visible = RECORDS
            library.offsets.append(RECORDS)
            assert len(await queue.read(PARTITION, 0, ALL)) == RECORDS
        elif proof == "end":
            assert (await queue.span(PARTITION)).end == RECORDS
        else:
            assert await queue.publish(publication(b"new")) == RECORDS
        end = RECORDS + (proof == "publish")
        library.offsets.append(RECORDS - 1)
        with pytest.raises(QueueError, match=f"the end is {RECORDS - 1}, after it was {end}") as caught:
            await queue.read(PARTITION, RECORDS - 1, ALL)
        assert "docs/recovery.md" in caught.value.hint
        assert [entry.offset for entry in await queue.read(PARTITION, RECORDS - 1, 1)] == [RECORDS - 1]

    over(work)


def test_an_end_that_stays_lower_than_what_was_published_is_a_cut_log(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets_module, "CUT_S", 0.1)

    async def work(queue: KafkaQueue) -> None:
        assert await queue.publish(publication(b"new")) == RECORDS
        texts: list[str] = []
        error: QueueError | None = None
        while not isinstance(error, LogCutError):
            library.offsets.append(RECORDS - 1)
            with pytest.raises(QueueError) as caught:
                await queue.read(PARTITION, RECORDS - 1, ALL)
            error = caught.value
            texts.append(str(error))
        assert len(texts) > 1, "one answer proves nothing"
        assert texts[-1].endswith(f"the end is {RECORDS - 1}, after it was {RECORDS + 1}")
        assert [entry.offset for entry in await queue.read(PARTITION, RECORDS - 1, 1)] == [RECORDS - 1]
        library.offsets.append(RECORDS - 1)
        with pytest.raises(QueueError) as caught:
            await queue.read(PARTITION, RECORDS - 1, ALL)
        assert not isinstance(caught.value, LogCutError), "a right answer came in between"

    over(work)


def test_an_entry_of_the_log_comes_from_kafka_and_corrects_the_memory_of_the_queue(library: Library) -> None:
    """A log was cut, and grew again: the queue still has the lost entry, which it received, in its memory."""

    async def work(queue: KafkaQueue) -> None:
        waiting = asyncio.create_task(queue.wait({PARTITION: RECORDS}, 30))
        await until(lambda: (TOPIC, 0) in library.followed)
        library.arrive((TOPIC, 0), 2_000, b"lost")
        await waiting
        log = library.log((TOPIC, 0))
        log.records[RECORDS] = replace(log.records[RECORDS], value=b"new")
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"lost"]
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, FROM_THE_LOG)] == [b"new"]
        assert [entry.body for entry in await queue.read(PARTITION, RECORDS, ALL)] == [b"new"]

    over(work)


def test_one_end_that_is_too_high_is_not_held_against_all_later_ones(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has read or written up to it; each later question was refused until a restart."""
    monkeypatch.setattr(offsets_module, "LOWER_END_S", 0.1)

    async def work(queue: KafkaQueue) -> None:
        library.offsets.extend([0, RECORDS + 100])
        assert (await queue.span(PARTITION)).end == RECORDS + 100
        texts: list[str] = []
        found: Span | None = None
        while found is None:
            try:
                found = await queue.span(PARTITION)
            except QueueError as error:
                texts.append(str(error))
        assert f"the end is {RECORDS}, after it was {RECORDS + 100}" in texts[0]
        assert found == Span(0, RECORDS)
        assert await queue.publish(publication(b"new")) == RECORDS
        library.offsets.extend([0, RECORDS])
        with pytest.raises(QueueError, match=f"the end is {RECORDS}, after it was {RECORDS + 1}"):
            await queue.span(PARTITION)

    over(work)


def test_an_end_that_was_asked_for_before_a_publish_may_lie_before_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question was handed over first, so its answer is true."""

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)
        held = asyncio.Event()
        listed = KafkaAdmin.list_offsets

        async def late(admin: KafkaAdmin, asked: Any) -> Any:
            found = await listed(admin, asked)
            await held.wait()
            return found

        monkeypatch.setattr(KafkaAdmin, "list_offsets", late)
        reading = asyncio.create_task(queue.read(PARTITION, RECORDS, ALL))
        await until(lambda: library.asked == 2)
        assert await queue.publish(publication(b"new")) == RECORDS
        held.set()
        await reading

    over(work)


def test_an_end_of_file_before_the_end_is_none(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.eof_early = 1
        with pytest.raises(QueueError, match=f"shows nothing at offset 1, and the end before was {RECORDS}"):
            await queue.read(PARTITION, 1, ALL)
        assert len(await queue.read(PARTITION, 1, ALL)) == RECORDS - 1

    over(work)


def test_entries_of_a_lagging_replica_are_returned_and_are_not_the_end(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.visible = 3
        entries = await queue.read(PARTITION, 1, ALL)
        assert ([entry.offset for entry in entries], entries.next) == ([1, 2], 3)
        with pytest.raises(QueueError, match="shows nothing at offset 3"):
            await queue.read(PARTITION, 3, ALL)
        with pytest.raises(QueueError, match="shows nothing at offset 3"):
            _ = [page async for page in all_entries(queue, PARTITION)]

    over(work)


def test_a_log_that_was_cut_at_its_end_is_not_read_from_its_beginning(library: Library) -> None:
    """Librdkafka begins where the log begins when its offset is behind the end."""

    async def work(queue: KafkaQueue) -> None:
        log = library.log((TOPIC, 0))
        library.offsets.append(RECORDS)
        del log.records[2:]
        log.end = 2
        with pytest.raises(QueueError, match="its log was cut, it shows offset 0"):
            await queue.read(PARTITION, 4, ALL)

    over(work)


def test_a_read_that_begins_again_in_its_middle_shows_no_record_twice(library: Library) -> None:
    """Librdkafka begins where the log begins when Kafka says that an offset is out of range, truly or not."""

    async def work(queue: KafkaQueue) -> None:
        library.rewinds = 1
        pages = [entry.offset async for page in all_entries(queue, PARTITION) for entry in page]
        assert pages == list(range(RECORDS))

    over(work)


# ---- metadata --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["unknown", "narrow", "short"])
def test_a_topic_that_was_seen_is_not_gone_by_wrong_metadata(library: Library, lie: str) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.topics[TOPIC].append(Log())
        last = replace(PARTITION, partition=1)
        assert await queue.span(last) == Span(0, 0)
        setattr(library, lie, 4)
        library.offsets.extend([KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)] * 2)
        with pytest.raises(QueueError):
            await queue.span(last)
        setattr(library, lie, 0)
        library.offsets.clear()
        assert await queue.span(last) == Span(0, 0)

    over(work)


def test_a_topic_that_was_never_seen_is_absent_by_two_answers(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.unknown = 1
        assert await queue.span(PARTITION) == Span(0, RECORDS)
        with pytest.raises(NotFoundError):
            await queue.span(replace(PARTITION, topic="other"))

    over(work)


def test_a_partition_that_metadata_show_is_not_missing_when_offsets_say_so(library: Library) -> None:
    async def work(queue: KafkaQueue) -> None:
        library.offsets.extend([KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)] * 4)
        with pytest.raises(QueueError):
            await queue.span(PARTITION)
        library.offsets.clear()
        assert await queue.span(PARTITION) == Span(0, RECORDS)

    over(work)


def test_an_end_behind_a_record_of_the_queue_itself_is_reached(library: Library) -> None:
    """Kafka's own records use offsets and are never shown: what counts is where the consumer came to."""

    async def work(queue: KafkaQueue) -> None:
        library.log((TOPIC, 0)).end += 2
        entries = await queue.read(PARTITION, RECORDS, ALL)
        assert (list(entries), entries.next) == ([], RECORDS + 2)
        pages = [entry.offset async for page in all_entries(queue, PARTITION) for entry in page]
        assert pages == list(range(RECORDS))

    over(work)


# ---- the end ---------------------------------------------------------------------------------------


def test_a_client_that_does_not_end_is_left_behind(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library_module, "CLOSE_S", 0.05)
    library.stuck = threading.Event()

    async def work(queue: KafkaQueue) -> None:
        await queue.read(PARTITION, 0, ALL)

    over(work)
    library.stuck.set()
    for thread in threading.enumerate():
        if thread.name.startswith("memq-kafka"):
            thread.join(30)
    assert "a thread of 'kafka-fetcher' is left behind" in caplog.text


def test_reads_that_wait_for_stuck_threads_end_with_the_queue(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that no thread had begun waited for ever, also after the close; before it they fail in time."""
    monkeypatch.setattr(library_module, "CLOSE_S", 0.05)
    library.stuck, library.mute = threading.Event(), True

    async def work(queue: KafkaQueue) -> None:
        for _ in range(FETCHERS):
            with pytest.raises(QueueError, match="no answer"):
                await queue.read(PARTITION, 0, ALL)
        with pytest.raises(QueueError, match=f"all {FETCHERS} threads were busy for 0.3 s"):
            await queue.read(PARTITION, 0, ALL)
        waiting = asyncio.create_task(queue.read(PARTITION, 0, ALL))
        for _ in range(5):  # each of its requests for an end was answered before these
            await queue.span(PARTITION)
        await queue.close()
        async with asyncio.timeout(5):
            with pytest.raises(ClosedError):
                await waiting

    over(work, request_timeout_ms=100)
    library.stuck.set()
    for thread in threading.enumerate():
        if thread.name.startswith("memq-kafka"):
            thread.join(30)


# ---- the source of an import -----------------------------------------------------------------------


@pytest.mark.parametrize(("answers", "said"), [([INVALID], "which is no offset"), ([4, 3], "ends at 3, before it")])
def test_a_copy_begins_with_valid_offsets_alone(library: Library, answers: list[int], said: str) -> None:
    async def work() -> None:
        source = KafkaSource(kafka_settings("kafka://localhost", {}), Runtime().clock)
        library.offsets.extend(answers)
        with pytest.raises(QueueError, match=said):
            await source.ends([(TOPIC, 0)])
        assert await source.ends([(TOPIC, 0)]) == {(TOPIC, 0): (0, RECORDS)}
        await source.close()

    asyncio.run(work())


def test_a_copy_learns_the_id_of_its_kafka_without_describe_cluster(library: Library) -> None:
    """The library may end the process when that request times out; this one does not have it."""

    async def work() -> None:
        source = KafkaSource(kafka_settings("kafka://localhost", {}), Runtime().clock)
        assert await source.describe([TOPIC]) == ("kafka-1", {TOPIC: SourceTopic(f"id of {TOPIC}", 1)})
        library.unknown = 1
        with pytest.raises(NotFoundError) as caught:
            await source.describe([TOPIC])
        assert "check --from" in caught.value.hint
        library.silent = 1
        with pytest.raises(UnreachableError, match="listing Kafka's topics") as silence:
            await source.describe([TOPIC])
        assert "check --from" in silence.value.hint
        await source.close()

    asyncio.run(work())


@pytest.mark.parametrize("code", [KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_a_position_that_kafka_does_not_tell_is_not_taken_for_none(
    library: Library, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group would begin where nothing is stored."""

    async def work(queue: KafkaQueue) -> None:
        part = TopicPartition(TOPIC, 0, INVALID)
        part_with_error: Any = _Refused(part, KafkaError(code))
        monkeypatch.setattr(requests, "consumer_of", lambda *given: _Committed([part_with_error]))
        with pytest.raises(QueueError, match="reading the positions of group"):
            await queue.former.read("report")

    over(work)


@pytest.mark.parametrize("shown", [[], [TopicPartition(TOPIC, 0, 2)]], ids=["none", "other"])
def test_positions_that_were_set_from_outside_are_believed_when_kafka_shows_them(
    library: Library, shown: list[TopicPartition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library calls a position stored that Kafka's answer lacks: a reset changed nothing, and was reported done."""

    async def work(queue: KafkaQueue) -> None:
        wanted = {PARTITION: Committed(Position(PARTITION.partition, 3, 0), Totals(0, 0), 0)}
        monkeypatch.setattr(requests, "consumer_of", lambda *given: _Committed(shown))
        with pytest.raises(QueueError, match="does not show"):
            await queue.former.store("report", wanted)
        stored = TopicPartition(TOPIC, 0, 3)
        monkeypatch.setattr(requests, "consumer_of", lambda *given: _Committed([stored]))
        await queue.former.store("audit", wanted)

    over(work)


class _Refused:
    """A partition in an answer, with its own error."""

    def __init__(self, part: TopicPartition, error: KafkaError) -> None:
        self.topic, self.partition, self.offset, self.error = part.topic, part.partition, part.offset, error


class _Committed:
    """A consumer that tells positions."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def committed(self, places: list[TopicPartition], timeout: float) -> list[Any]:
        return self._parts

    def close(self) -> None:
        """Nothing is held."""


# ---- complaints --------------------------------------------------------------------------------------

TRUST = KafkaError(KafkaError._SSL, "ssl://k:9093: SSL handshake failed: certificate verify failed: (after 9ms)")
BROKEN_OFF = KafkaError(KafkaError._SSL, "ssl://k:9093: SSL handshake failed: Disconnected: connecting to PLAINTEXT?")
LOGIN = KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error: Invalid username or password")
LOGIN_BROKEN_OFF = KafkaError(KafkaError._AUTHENTICATION, "SASL handshake failed: Local: Broker transport failure")
ALERT = KafkaError(KafkaError._TRANSPORT, "Receive failed: error:0A000412:SSL routines::ssl/tls alert bad certificate")
SILENT = (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT)


@pytest.mark.parametrize("complaint", [TRUST, BROKEN_OFF, LOGIN, LOGIN_BROKEN_OFF, ALERT])
@pytest.mark.parametrize("code", SILENT)
def test_a_complaint_explains_an_outage_and_is_none(complaint: KafkaError, code: int) -> None:
    complaints = LastErrors()
    complaints.note(complaint)
    complaints.note(KafkaError(KafkaError._TRANSPORT, "connection refused"))
    error = complaints.failure(KafkaError(code), "publishing")
    assert type(error) is QueueError
    assert complaint.str().lower() in str(error)
    cures = {KafkaError._SSL: "ssl.ca.location", KafkaError._TRANSPORT: "ssl.certificate.location"}
    assert cures.get(complaint.code(), "sasl.") in error.hint


@pytest.mark.parametrize(
    ("complaint", "judged"),
    [(TRUST, True), (BROKEN_OFF, False), (LOGIN, True), (LOGIN_BROKEN_OFF, False), (ALERT, True)],
)
def test_a_connection_is_denied_by_a_kafka_that_never_answered_alone(complaint: KafkaError, *, judged: bool) -> None:
    complaints = LastErrors()
    complaints.note(complaint)
    found = complaints.denial("asking Kafka")
    assert isinstance(found, DeniedError) is judged
    complaints.clear()
    complaints.note(complaint)
    assert complaints.denial("asking Kafka") is None


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    ],
)
def test_a_right_that_a_response_denies_is_denied(code: int) -> None:
    complaints = LastErrors()
    complaints.clear()
    error: MemqError = complaints.failure(KafkaError(code), "reading")
    assert type(error) is DeniedError
