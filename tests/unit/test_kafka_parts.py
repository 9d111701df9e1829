"""The pure parts of the Kafka queue: names, settings, commit metadata, tail cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import InvalidNameError, InvalidSettingError, QueueError
from memq.notification.kafka.groups.former_groups import decode_commit, encode_metadata
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.reading import fetcher as fetcher_module
from memq.notification.kafka.reading import follower as follower_module
from memq.notification.kafka.reading.fetcher import METADATA_REQUESTS_MAX, AssignedConsumer, EntryFetcher
from memq.notification.kafka.reading.follower import Follower
from memq.notification.kafka.settings import OWN, KafkaSettings, Names, kafka_settings
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.brokers import until
from tests.contract.manual_clock import ManualClock
from tests.librdkafka import Message, Record

A, B = ReadPartition("clicks", "0a" * 16, 0), ReadPartition("clicks", "0a" * 16, 1)
ALL = 1 << 30


def settings_of(url: str = "kafka://localhost", **section: Any) -> KafkaSettings:
    return kafka_settings(url, {name: (value, "test") for name, value in section.items()})


# ---- names -----------------------------------------------------------------------------------


def test_names_go_there_and_back() -> None:
    names = Names("memq.")
    assert names.kafka_topic(A) == "memq.clicks." + "0a" * 16
    assert names.read_partition(names.kafka_topic(A), 0) == A
    assert names.read_partition("memq.x.y." + "0a" * 16, 3) == ReadPartition("x.y", "0a" * 16, 3)
    for other in ("clicks." + "0a" * 16, "memq.clicks", "memq.clicks." + "0A" * 16, "memq.." + "0a" * 15):
        assert names.read_partition(other, 0) is None
    assert (names.kafka_group("g"), names.group("memq.g"), names.group("g")) == ("memq.g", "g", None)


def test_a_name_that_kafka_can_not_hold_is_refused() -> None:
    assert len(Names("memq.").kafka_topic(ReadPartition("x" * 211, "0a" * 16, 0))) == 249
    with pytest.raises(InvalidNameError, match="211 are allowed"):
        Names("memq.").kafka_topic(ReadPartition("x" * 212, "0a" * 16, 0))


# ---- settings --------------------------------------------------------------------------------


def test_librdkafka_settings_pass_through_in_every_spelling() -> None:
    for section in (
        {"security.protocol": "SASL_SSL", "ssl.ca.location": "ca.pem"},
        {"security": {"protocol": "SASL_SSL"}, "ssl": {"ca": {"location": "ca.pem"}}},
        {"security_protocol": "SASL_SSL", "ssl_ca_location": "ca.pem"},
    ):
        found = settings_of(**section)
        assert found.library == {"security.protocol": "SASL_SSL", "ssl.ca.location": "ca.pem"}
        for client in (found.client(), found.producer(), found.reader(5, 1_024), found.positions("g")):
            assert client["security.protocol"] == "SASL_SSL"
            assert client["bootstrap.servers"] == "localhost:9092"


def test_kafka_settings_that_the_guarantees_need_are_refused() -> None:
    for name in OWN:
        with pytest.raises(InvalidSettingError, match="can't be set"):
            settings_of(**{name: "1"})
    for name in ("group_members_max", "group_protocol", "heartbeat_interval_ms", "static_members"):
        with pytest.raises(InvalidSettingError, match=f"setting '{name}' .*: groups are on memq's state logs") as gone:
            settings_of(**{name: "1"})
        assert gone.value.hint == "leave it out"
    with pytest.raises(InvalidSettingError, match="unknown setting 'prefx'") as caught:
        settings_of(prefx="x")
    assert "prefix" in caught.value.hint
    with pytest.raises(InvalidSettingError, match="prefix"):
        settings_of(prefix="a/b")
    with pytest.raises(InvalidSettingError, match="no pointer would ever count"):
        settings_of(replication_factor=1, min_insync_replicas=2)


REFRESH, AGE = "topic.metadata.refresh.interval.ms", "metadata.max.age.ms"


@pytest.mark.parametrize(
    ("library", "most"),
    [({REFRESH: 715_828}, 715_827), ({AGE: 2_147_484}, 2_147_483), ({AGE: 2_147_484, REFRESH: 1}, 2_147_483)],
)
def test_an_age_that_the_library_can_not_count_is_refused(library: dict[str, Any], most: int) -> None:
    """With a longer one it forgot each topic at once, and no pointer could be read."""
    with pytest.raises(InvalidSettingError, match=r"ms = \d+ in \[kafka\] is too long") as caught:
        settings_of(**library)
    assert f"set it to {most} or less" in caught.value.hint
    fine: list[dict[str, Any]] = [{name: min(value, most) for name, value in library.items()}]
    fine += [{REFRESH: 900_000, AGE: 900_000}, {REFRESH: -1}]
    for each in fine:
        settings_of(**each)


def test_servers_come_from_the_url() -> None:
    assert settings_of("kafka://a:1, b,[::1]:3/").servers == "a:1,b:9092,[::1]:3"
    for url in (
        "kafka://",
        "kafka:a:1",
        "kafka://a:1,",
        "kafka://a:1/x",
        "http://a:1",
        "kafka://a b",
        "kafka://a:99999",
    ):
        with pytest.raises(InvalidSettingError, match="does not name a Kafka"):
            settings_of(url)


# ---- commits ---------------------------------------------------------------------------------

COMMITTED = st.builds(
    Committed,
    st.builds(Position, st.just(1), st.integers(0, (1 << 39) - 1), st.integers(0, (1 << 24) - 1)),
    st.builds(Totals, st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1)),
    st.integers(0, (1 << 32) - 1),
)


@given(COMMITTED)
def test_a_commit_comes_back_as_it_was(committed: Committed) -> None:
    metadata = encode_metadata(committed)
    assert len(metadata.encode("utf-16-le")) // 2 <= 76
    assert decode_commit(B, committed.position.pointer_offset, metadata) == committed


def test_a_commit_of_an_earlier_release_has_no_mark() -> None:
    assert decode_commit(B, 5, "memq1 3 10 100") == Committed(Position(1, 5, 3), Totals(10, 100))


@given(st.integers(-2, 1 << 62), st.one_of(st.none(), st.text(), st.from_regex(r"memq1 \d+ \d+ \d+( \d+)?")))
def test_any_commit_is_read(offset: int, metadata: str | None) -> None:
    found = decode_commit(B, offset, metadata)
    assert (found is None) == (not 0 <= offset < 1 << 39)
    if found is not None:
        assert found.position.pointer_offset == offset


# ---- faults of the library -------------------------------------------------------------------


def test_every_fault_of_the_library_has_its_place_and_its_test() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/architecture.md").read_text().partition("## Faults of librdkafka")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    for fault, place, test in rows[1:]:
        file, _, name = place.partition(", ")
        source = (root / "memq/notification/kafka" / file.strip("`")).read_text()
        assert (name or '"""').strip("`") in source, fault
        assert (root / test.strip("`")).exists(), fault
    assert len(rows) > 10


# ---- reads -----------------------------------------------------------------------------------


def test_a_reader_looks_at_the_few_topics_that_are_new_to_it_and_leaves_many_to_the_library() -> None:
    looks: list[tuple[str, float]] = []

    class Library:
        def list_topics(self, topic: str, timeout_s: float) -> None:
            looks.append((topic, timeout_s))

    reader = AssignedConsumer(cast(Consumer, Library()))
    reader.request_metadata(["a", "b"], 3.0)
    reader.request_metadata(["b", "c"], 3.0)
    reader.request_metadata(["b", "c"], 3.0)
    assert looks == [("a", 3.0), ("b", 3.0), ("c", 3.0)]
    reader.request_metadata([f"t{number}" for number in range(METADATA_REQUESTS_MAX + 1)], 3.0)
    assert len(looks) == 3
    reader.request_metadata([f"t{number}" for number in range(METADATA_REQUESTS_MAX)], 3.0)
    assert len(looks) == 3, "it was assigned them"


class PointerOfZero:
    """A message of partition 0, as the library gives them."""

    def __init__(self, offset: int) -> None:
        self.at = offset

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def value(self) -> bytes:
        return b"pointer"

    def timestamp(self) -> tuple[int, int]:
        return 1, 5


class BusyZero:
    """A consumer of the library: partition 0 has an entry for each read; of partition 1 nothing comes."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.polls = 0

    def list_topics(self, topic: str, timeout_s: float) -> None:
        """It knows all."""

    def assign(self, partitions: list[Any]) -> None:
        assert len(partitions) == 2

    def poll(self, timeout_s: float) -> PointerOfZero:
        self.clock.advance(round(timeout_s * 1000))
        self.polls += 1
        assert self.polls < 1_000, "the read never ends"
        return PointerOfZero(self.polls - 1)

    def consume(self, count: int, timeout_s: float) -> list[PointerOfZero]:
        return []

    def unassign(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def test_a_read_that_hears_nothing_fails_in_time_next_to_a_busy_partition_whose_read_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        clock = ManualClock()
        settings = settings_of(request_timeout_ms=5_000, fetchers_max=1)
        async with asyncio.timeout(30):
            tasks = TaskOwner(lambda error: None, EventLog(clock))
            fetcher = EntryFetcher(settings, clock, LastErrors(), tasks)
            monkeypatch.setattr(fetcher_module, "consumer_of", lambda *given: BusyZero(clock))
            busy = asyncio.create_task(fetcher.fetch("t", 0, 0, 3, ALL))
            silent = asyncio.create_task(fetcher.fetch("t", 1, 0, 3, ALL))
            assert [entry.offset for entry in await busy] == [0, 1, 2]
            with pytest.raises(QueueError, match="partition 1 of Kafka topic 't': no answer in 5 s"):
                await silent
            await fetcher.close()
            await tasks.stop()

    asyncio.run(run())


class Rewinding:
    """A consumer that begins again at the first record, as librdkafka does for an offset out of range."""

    def __init__(self, offsets: list[int]) -> None:
        self._left = offsets
        self._assigned: list[TopicPartition] = []

    def assignment(self) -> list[TopicPartition]:
        return self._assigned

    def incremental_assign(self, parts: list[TopicPartition]) -> None:
        self._assigned += parts

    def poll(self, timeout_s: float) -> Message | None:
        if not self._assigned or not self._left:
            return None
        offset = self._left.pop(0)
        return Message(("t", 0), offset, Record(offset, 0, b"%d" % offset), None)

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_entries_before_its_place_do_not_set_the_end_of_a_follower_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later wait for an entry that had arrived lasted until all of the log had come again."""

    async def run() -> None:
        clock, arrived = ManualClock(), list[int]()
        monkeypatch.setattr(follower_module, "consumer_of", lambda *given: Rewinding([5, 0, 1, 2, 6]))
        tasks = TaskOwner(lambda error: pytest.fail(repr(error)), EventLog(clock))
        follower = Follower(
            settings_of(),
            clock,
            LastErrors(),
            tasks,
            lambda place, entry: arrived.append(entry.offset),
            lambda place: None,
        )
        follower.follow({("t", 0): 5})
        await until(lambda: 6 in arrived)
        end = follower.end(("t", 0))
        await follower.close()
        await tasks.stop()
        assert (arrived, end) == ([5, 0, 1, 2, 6], 7), "the cache compares those before its place"

    asyncio.run(run())
