"""Foreign topics that are copied: what is read, where the copy begins, and when another copy has taken over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from confluent_kafka import KafkaError

from memq.errors import DeniedError, GenerationFencedError, MemqError, NotFoundError, QueueError
from memq.notification.kafka.reading.import_source import JOIN_S, KafkaSource, SourceEnd, SourceRecord
from memq.notification.kafka.settings import kafka_settings
from tests.contract.manual_clock import ManualClock
from tests.librdkafka import KafkaPartition, Log, Record, use
from tests.librdkafka_groups import GroupLibrary

A, B = ("orders", 0), ("orders", 1)
GROUP = "copy"
DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> GroupLibrary:
    """A topic of two partitions: one with three records, one without any."""
    found = GroupLibrary({"orders": [Log(), Log()]})
    for number in range(3):
        found.log(A).append(number, b"%d" % number)
    use(found, monkeypatch)
    return found


def over(work: Callable[[KafkaSource], Awaitable[None]], clock: ManualClock | None = None) -> None:
    """Run work with a source, which then leaves no thread."""

    async def run() -> None:
        source = KafkaSource(kafka_settings("kafka://localhost", {}), clock or ManualClock())
        try:
            async with asyncio.timeout(30):
                await work(source)
        finally:
            await source.close()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("memq-kafka")] == []

    asyncio.run(run())


async def join(source: KafkaSource) -> None:
    await source.join(GROUP, ["orders"], [A, B])


async def all_of(source: KafkaSource) -> dict[KafkaPartition, list[int]]:
    """Return the offsets of all records and ends that are received, by partition."""
    found: dict[KafkaPartition, list[int]] = {}
    while taken := await source.take(0.0):
        for each in taken:
            found.setdefault(each.partition, []).append(each.offset)
    return found


def test_records_come_from_the_offsets_of_the_start_on_and_then_the_ends(library: GroupLibrary) -> None:
    async def work(source: KafkaSource) -> None:
        await join(source)
        assert await source.take(0.0) == [], "nothing is read before the start"
        await source.start({A: 1, B: 0})
        assert await all_of(source) == {A: [1, 2, 3], B: [0]}
        await source.seek(A, 2)
        assert await all_of(source) == {A: [2, 3]}

    over(work)


def test_a_record_comes_with_all_that_kafka_has_of_it(library: GroupLibrary) -> None:
    records = [
        Record(0, 0, b"v", b"k", [("a", b"1"), ("b", None)]),
        Record(1, None, None),
        Record(2, 7, b"", b"", []),
    ]
    library.topics["orders"] = [Log(), Log(records, 0, 3)]

    async def work(source: KafkaSource) -> None:
        await join(source)
        await source.start({B: 0})
        assert await source.take(0.0) == [
            SourceRecord(B, 0, b"v", b"k", (("a", b"1"), ("b", None)), 0),
            SourceRecord(B, 1, None, None, None, None),
            SourceRecord(B, 2, b"", b"", None, 7),
        ]
        assert await source.take(0.0) == [SourceEnd(B, 3)]

    over(work)


def test_positions_and_their_states_are_kept_by_the_group(library: GroupLibrary) -> None:
    async def work(source: KafkaSource) -> None:
        await join(source)
        assert await source.stored([A, B]) == {}
        await source.store({A: (0, "begin"), B: (4, "")})
        assert await source.stored([A, B]) == {A: (0, "begin"), B: (4, "")}
        assert await source.stored([B]) == {B: (4, "")}

    over(work)


@pytest.mark.parametrize("call", ["committed", "commit"])
def test_a_position_that_fails_for_one_partition_is_an_error(library: GroupLibrary, call: str) -> None:
    """The copy would begin as if nothing was stored, or send records whose position it did not store."""
    library.refuse = lambda asked, place: DENIED if (asked, place) == (call, B) else None

    async def work(source: KafkaSource) -> None:
        await join(source)
        with pytest.raises(DeniedError, match="copying Kafka's topics"):
            await (source.stored([A, B]) if call == "committed" else source.store({A: (1, ""), B: (1, "")}))

    over(work)


def test_a_copy_is_fenced_by_the_one_that_joined_last(library: GroupLibrary) -> None:
    """Whichever call learns of it first, also when Kafka refuses the position of a copy that has not polled since."""

    async def work(source: KafkaSource) -> None:
        await join(source)
        await source.start({A: 0, B: 0})

        later = KafkaSource(kafka_settings("kafka://localhost", {}), ManualClock())
        try:
            await join(later)
            with pytest.raises(GenerationFencedError):
                await source.store({A: (1, "")})
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: source.take(0.0),
                lambda: source.store({A: (1, "")}),
                lambda: source.stored([A]),
                lambda: source.start({A: 0}),
                lambda: source.seek(A, 0),
            ]
            for call in calls:
                with pytest.raises(GenerationFencedError, match="took over") as caught:
                    await call()
                assert caught.value.hint == "let the other import continue"
            await later.store({A: (2, "")})
            assert library.positions[GROUP] == {A: (2, "")}
        finally:
            await later.close()

    over(work)


def test_a_group_is_joined_when_the_other_member_gives_its_partitions_back(library: GroupLibrary) -> None:
    clock, polls = ManualClock(), list[float]()
    library.held = {B}

    def idle(timeout_s: float) -> None:
        polls.append(timeout_s)
        clock.advance(round(timeout_s * 1000))
        if clock.monotonic() - begin_s > JOIN_S - 2 * timeout_s:
            library.held = set()

    library.idle, begin_s = idle, clock.monotonic()

    async def work(source: KafkaSource) -> None:
        await join(source)
        assert len(polls) > 100
        assert await source.take(0.0) == [], "it lost a part of them while it joined"
        await source.start({A: 0, B: 0})
        assert await all_of(source) == {A: [0, 1, 2, 3], B: [0]}

    over(work, clock)


def test_a_group_whose_other_member_stays_is_not_joined(library: GroupLibrary) -> None:
    clock = ManualClock()
    library.held, begin_s = {A}, clock.monotonic()
    library.idle = lambda timeout_s: clock.advance(round(timeout_s * 1000))

    async def work(source: KafkaSource) -> None:
        with pytest.raises(GenerationFencedError, match="has another member that does not leave") as caught:
            await join(source)
        assert "end the other import" in caught.value.hint
        assert clock.monotonic() - begin_s == pytest.approx(JOIN_S, abs=1)

    over(work, clock)


def test_outages_of_kafka_pass_and_other_errors_end_a_read(library: GroupLibrary) -> None:
    outage, gone = KafkaError(KafkaError._ALL_BROKERS_DOWN), KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)

    async def work(source: KafkaSource) -> None:
        library.held, library.idle = {B}, lambda timeout_s: library.held.clear()
        library.errors.append(outage)
        await join(source)
        await source.start({A: 3, B: 0})
        library.errors.append(outage)
        assert await source.take(0.0) == []
        library.errors.append(gone)
        with pytest.raises(NotFoundError, match="reading Kafka's topics"):
            await source.take(0.0)

    over(work)


def test_a_join_that_kafka_denies_ends_at_once(library: GroupLibrary) -> None:
    library.errors.append(DENIED)

    async def work(source: KafkaSource) -> None:
        with pytest.raises(DeniedError, match="reading Kafka's topics"):
            await join(source)

    over(work)


def test_a_seek_that_the_library_refuses_is_an_error_of_the_queue(library: GroupLibrary) -> None:
    async def work(source: KafkaSource) -> None:
        await join(source)
        with pytest.raises(QueueError, match="copying Kafka's topics"):
            await source.seek(("orders", 2), 0)

    over(work)


def test_after_its_close_another_copy_may_join_at_once(library: GroupLibrary) -> None:
    async def work(source: KafkaSource) -> None:
        await join(source)
        await source.committed_of_others([A], "other")

    library.positions[GROUP] = {A: (1, "")}
    over(work)
    assert library.members == {}
    assert library.closed == 2, "also the one that read positions"


def test_positions_of_all_other_groups_are_found(library: GroupLibrary) -> None:
    library.positions = {"b": {A: (0, ""), B: (2, "")}, GROUP: {A: (1, "")}, "a": {B: (3, "")}, "none": {}}

    async def work(source: KafkaSource) -> None:
        assert await source.committed_of_others([A, B], GROUP) == {"a": {B: 3}, "b": {A: 0, B: 2}}

    over(work)


def test_a_span_ends_before_the_first_open_transaction(library: GroupLibrary) -> None:
    library.log(A).stable = 1

    async def work(source: KafkaSource) -> None:
        assert await source.ends([A, B]) == {A: (0, 1), B: (0, 0)}

    over(work)


def test_a_denied_description_names_the_right(library: GroupLibrary) -> None:
    library.refuse = lambda call, subject: DENIED if call == "describe_topics" else None

    async def work(source: KafkaSource) -> None:
        with pytest.raises(DeniedError) as caught:
            await source.describe(["orders"])
        assert caught.value.hint == "Kafka denies the right to use the topic"

    over(work)


def test_a_kafka_without_an_id_is_refused(library: GroupLibrary) -> None:
    library.cluster_id = None

    async def work(source: KafkaSource) -> None:
        with pytest.raises(MemqError, match="does not report the id of its cluster"):
            await source.describe(["orders"])

    over(work)
