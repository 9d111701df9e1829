"""Settings, positions and fields of records that clients accept: each bound, on both of its sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import memq
from memq.client.arguments import check_seconds, check_timeout
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.settings import Point, check_point, point_of
from memq.client.producer.fields import RecordColumns, RecordFields, check_fields, check_many, header_pairs
from memq.client.producer.settings import ProducerSettings
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError
from memq.limits import KIB, MIB, NAME_CHARS_MAX, TIME_MS_END
from memq.topic import Position

HERE = "127.0.0.1:1"
ANY: Any = memq  # without the types that would say the same
DAY_MS = 86_400_000


def make_producer(**settings: object) -> object:
    return ANY.aio.Producer(HERE, **settings)


def make_consumer(**settings: object) -> object:
    return ANY.aio.Consumer(HERE, **({"topics": "clicks"} | settings))


def make_admin(**settings: object) -> object:
    return ANY.aio.Admin(HERE, **settings)


Make = Callable[..., object]


@pytest.mark.parametrize(
    ("make", "name", "low", "high"),
    [
        (make_producer, "linger_ms", 0, 60_000),
        (make_producer, "block_bytes", KIB, MIB),
        (make_producer, "pending_bytes_max", 2 * 512 * KIB, 1 << 40),
        (make_producer, "delivery_timeout_ms", 1, DAY_MS),
        (make_producer, "metadata_timeout_ms", 1, DAY_MS),
        (make_producer, "connect_timeout_ms", 1, DAY_MS),
        (make_producer, "when_full", 0, 86_400),
        (make_consumer, "auto_commit_interval_ms", 10, 3_600_000),
        (make_consumer, "session_timeout_ms", 100, 3_600_000),
        (make_consumer, "prefetch_bytes_max", 4 * KIB, 1 << 40),
        (make_consumer, "connect_timeout_ms", 1, DAY_MS),
        (make_admin, "connect_timeout_ms", 1, DAY_MS),
    ],
)
def test_a_number_is_taken_up_to_both_of_its_bounds(make: Make, name: str, low: int, high: int) -> None:
    for taken in (low, low + 1, high - 1, high):
        make(**{name: taken})
    wrong: list[object] = [low - 1, high + 1, True, "5", None, [], float("nan")]
    for refused in wrong:
        with pytest.raises(InvalidSettingError, match=name):
            make(**{name: refused})


@pytest.mark.parametrize(
    ("make", "name", "taken", "refused"),
    [
        (make_producer, "acks", (0, 1, "0", "1", "all"), (2, -1, "2", "", None, True, False)),
        (make_producer, "codec", ("none", "zstd", "lz4"), ("gzip", None, 5)),
        (make_producer, "when_full", ("block", "raise", 0.5), ("wait",)),
        (make_consumer, "on_damaged", ("fail", "skip", "dead-letter"), ("", "stop", None)),
        (make_consumer, "on_expired", ("fail", "skip"), ("dead-letter", None)),
        (make_consumer, "read", ("auto", "direct", "broker"), ("", "store", None)),
    ],
)
def test_a_choice_is_one_of_those_there_are(
    make: Make, name: str, taken: Sequence[object], refused: Sequence[object]
) -> None:
    for value in taken:
        make(**{name: value})
    for value in refused:
        with pytest.raises(InvalidSettingError, match=name):
            make(**{name: value})


@pytest.mark.parametrize("make", [make_producer, make_consumer])
def test_names_of_clients_and_zones_have_bounds(make: Make) -> None:
    make(client_id="", zone="")
    make(client_id="billing-7", zone="z" * NAME_CHARS_MAX)
    for client_id in ("two words", "x" * (NAME_CHARS_MAX + 1)):
        with pytest.raises(InvalidNameError, match="client name"):
            make(client_id=client_id)
    with pytest.raises(InvalidSettingError, match=f"zone has {NAME_CHARS_MAX + 1} characters"):
        make(zone="z" * (NAME_CHARS_MAX + 1))
    with pytest.raises(TypeError, match="zone must be str, not int"):
        make(zone=5)


def test_a_named_producer_waits_for_all_acks() -> None:
    make_producer(name="orders")
    for acks in (0, 1):
        with pytest.raises(InvalidSettingError, match="of producer 'orders'"):
            make_producer(name="orders", acks=acks)
    for name in ("two words", ""):  # an empty one comes from a variable that is not set
        with pytest.raises(InvalidNameError, match=f"producer name '{name}'"):
            make_producer(name=name)
    with pytest.raises(TypeError, match="name must be str"):
        make_producer(name=5)


def test_times_within_a_delivery_are_a_share_of_its_timeout_up_to_a_bound() -> None:
    assert [ProducerSettings(delivery_timeout_s=each).open_timeout_s for each in (8.0, 120.0, 400.0)] == [2, 30, 30]
    assert [ProducerSettings(delivery_timeout_s=each).silence_s_max for each in (8.0, 40.0, 400.0)] == [1, 5, 5]


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"topics": ()}, InvalidRequestError, "at least one topic"),
        ({"topics": ["fine", "not fine"]}, InvalidNameError, "topic name 'not fine'"),
        ({"group": "two words"}, InvalidNameError, "group name"),
        ({"group": ""}, InvalidNameError, "group name"),
        ({"group": 5}, TypeError, "group must be str, not int"),
        ({"s3": 5}, TypeError, "s3 must be a mapping of settings, not int"),
        ({"auto_commit": 1}, TypeError, "auto_commit must be bool"),
        ({"audit": None}, TypeError, "audit must be bool"),
        ({"start": "middle"}, InvalidRequestError, "start = 'middle' is not a position"),
        ({"end": "middle"}, InvalidRequestError, "end = 'middle' is not a position"),
        ({"start": datetime(2026, 1, 1)}, InvalidRequestError, "has no time zone"),  # noqa: DTZ001  # that is the point
        ({"start": {"clicks": Position(0, 1)}}, TypeError, "by .topic, partition., not by 'clicks'"),
        ({"start": {("clicks",): Position(0, 1)}}, TypeError, "by .topic, partition."),
        ({"start": {("clicks", 0, 0): Position(0, 1)}}, TypeError, "by .topic, partition."),
        ({"start": {(0, "clicks"): Position(0, 1)}}, TypeError, "by .topic, partition."),
        ({"start": {("clicks", "0"): Position(0, 1)}}, TypeError, "by .topic, partition."),
        ({"start": {("clicks", 0): "middle"}}, InvalidRequestError, "is not a position"),
        ({"start": {("clicks", 0): [Position(0, 1)]}}, TypeError, "must be a memq.Position, not list"),
        ({"start": {("clicks", 0): {("clicks", 0): "end"}}}, TypeError, "must be a memq.Position, not dict"),
        ({"start": [Position(0, 1), "end"]}, TypeError, "start must be 'beginning'"),
        ({"start": b"end"}, TypeError, "start must be 'beginning'"),
        ({"topics": ["a", "b"], "start": Position(0, 1)}, InvalidRequestError, "there are 2 topics"),
        ({"topics": ["a", "b"], "start": [Position(0, 1)]}, InvalidRequestError, "there are 2 topics"),
        ({"topics": ["a", "b"], "end": [Position(0, 1)]}, InvalidRequestError, "there are 2 topics"),
    ],
)
def test_a_consumer_that_asks_for_what_is_not_there(settings: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make_consumer(**settings)


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        ("earliest", "memq's word is 'beginning'"),
        ("Latest", "memq's word is 'end'"),
        ("0:17:3", "write memq.Position.parse('0:17:3')"),
        ("2026-01-31T08:00:00Z", "write datetime.fromisoformat('2026-01-31T08:00:00Z')"),
        ("2026-01-31", "write datetime.fromisoformat('2026-01-31').astimezone()"),
        ("middle", "use 'beginning', 'end', a datetime or a memq.Position"),
    ],
)
def test_a_consumer_with_a_text_as_its_start_says_what_to_write(start: str, hint: str) -> None:
    for point in ("start", "end"):
        with pytest.raises(InvalidRequestError, match=f"{point} = '{start}' is not a position") as refused:
            memq.Consumer("127.0.0.1:1", "clicks", **{point: start})  # type: ignore[arg-type]
        assert refused.value.hint == hint


@pytest.mark.parametrize(
    "settings",
    [
        {"topics": ["a", "b"], "start": "end", "end": datetime(2026, 1, 1, tzinfo=UTC)},
        {"topics": ["a", "b"], "start": {("a", 0): Position(0, 1), ("b", 1): Position(1, 1)}},
        {"topics": ("_memq_audit",), "group": None, "s3": {}},
        {"start": [], "end": [Position(0, 1), Position(1, 1, 7)]},
        {"start": Position(3, 1), "group": "billing"},
    ],
)
def test_places_that_a_consumer_takes(settings: dict[str, Any]) -> None:
    make_consumer(**settings)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("end", "end"),
        (datetime(1970, 1, 1, 1, 0, 5, tzinfo=timezone(timedelta(hours=1))), 5_000),
        (Position(3, 7), Position(3, 7)),
        (Position(2, 7), "beginning"),
        ([Position(2, 7), Position(3, 8), Position(3, 9)], Position(3, 8)),
        ([], "beginning"),
        ({("clicks", 3): Position(3, 5)}, Position(3, 5)),
        ({("other", 3): Position(3, 5), ("clicks", 2): Position(2, 1)}, "beginning"),
        ({("clicks", 3): Position(2, 5)}, Position(2, 5)),
        ({("clicks", 3): "end"}, "end"),
        ({("clicks", 3): datetime(1970, 1, 1, 0, 0, 5, 678_999, tzinfo=UTC)}, 5_678),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))), -62_135_600_400_000),
    ],
)
def test_a_place_means_something_for_each_partition(point: Point, expected: object) -> None:
    check_point(point, "start", ("clicks",))
    assert point_of(point, TopicPartition("clicks", 3)) == expected


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-TIME_MS_END, TIME_MS_END])
def test_a_timestamp_lies_within_its_bounds(bound: int) -> None:
    inside = bound - 1 if bound > 0 else bound + 1
    assert check_fields(b"v", timestamp_ms=inside).timestamp_ms == inside
    assert check_many([b"a", b"b"], None, [0, inside], None).timestamps_ms == [0, inside]
    with pytest.raises(InvalidRequestError, match="outside -2\\^53 to 2\\^53"):
        check_fields(b"v", timestamp_ms=bound)
    with pytest.raises(InvalidRequestError, match="outside -2\\^53 to 2\\^53"):
        check_many([b"a", b"b"], None, [0, bound], None)


def test_a_record_is_as_large_as_its_parts() -> None:
    assert check_fields(None).size == 0
    assert check_fields(b"12345", b"123", {"ab": b"1234", "c": None}).size == 5 + 3 + 2 + 4 + 1
    assert check_fields("ä", "k").size == 3
    many = check_many([b"123", None, b""], [None, b"12", b"1"], None, None)
    assert many.sizes(0, 3) == [3, 2, 1]
    assert many.sizes(1, 2) == [2]
    assert check_many([b"123", None], None, None, None).sizes(0, 2) == [3, 0]
    assert check_many([b"123", b"1"], [b"1", b"12"], None, None).sizes(0, 2) == [4, 3]


def test_columns_keep_their_rows_together() -> None:
    many = check_many((value for value in ("a", b"b", bytearray(b"c"))), ["x", None, b"z"], (1, 2, 3), "t")  # type: ignore[arg-type]  # an iterable will do
    assert many == RecordColumns([b"a", b"b", b"c"], [b"x", None, b"z"], [1, 2, 3], "t")
    assert many.part(1, 3) == ([b"b", b"c"], [None, b"z"], [2, 3], "t")
    assert many.pick([2, 0]) == ([b"c", b"a"], [b"z", b"x"], [3, 1], "t")
    assert check_many([], [], [], None) == ([], [], [], None)
    assert check_fields("v", "k", [("h", "x")], 5, "t") == RecordFields(b"v", b"k", (("h", b"x"),), 5, "t")


@pytest.mark.parametrize(
    ("columns", "kind", "said"),
    [
        ((["a"], ["k", "l"], None, None), InvalidRequestError, "2 keys for 1 values"),
        ((["a"], None, [1, 2], None), InvalidRequestError, "2 timestamps for 1 values"),
        ((["a"], None, 5, None), TypeError, "timestamps_ms must be a sequence of int, not int"),
        ((["a"], None, [True], None), TypeError, "timestamp_ms must be int, not bool"),
        ((["a", "b"], None, [1, "2"], None), TypeError, "timestamp_ms must be int, not str"),
        (("text", None, None, None), TypeError, "values must be a sequence of bytes, not str"),
        ((b"text", None, None, None), TypeError, "values must be a sequence of bytes, not bytes"),
        ((5, None, None, None), TypeError, "values must be a sequence of bytes, not int"),
        ((["a"], "k", None, None), TypeError, "keys must be a sequence of bytes, not str"),
        (([5], None, None, None), TypeError, "value must be bytes-like or str, not int"),
        ((["a"], [5], None, None), TypeError, "key must be bytes-like or str, not int"),
        ((["a"], None, None, 5), TypeError, "tag must be str, not int"),
    ],
)
def test_columns_that_do_not_fit(columns: tuple[Any, Any, Any, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        check_many(*columns)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": b"1", "b": None}, (("a", b"1"), ("b", None))),
        ([("a", "1"), ["a", b"2"]], (("a", b"1"), ("a", b"2"))),
        ((), ()),
    ],
)
def test_headers_are_pairs(given: Any, expected: tuple[tuple[str, bytes | None], ...]) -> None:
    assert header_pairs(given) == expected


@pytest.mark.parametrize("pair", [("a",), ("a", b"1", b"2"), (5, b"1"), "ab", None, {"a", "b"}])
def test_header_that_is_no_pair_is_refused(pair: object) -> None:
    with pytest.raises(TypeError, match="a header must be a pair"):
        header_pairs([pair])  # type: ignore[list-item]  # as a newcomer would


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timestamp_ms": True}, "timestamp_ms must be int, not bool"),
        ({"timestamp_ms": 1.5}, "timestamp_ms must be int, not float"),
        ({"tag": 5}, "tag must be str, not int"),
        ({"key": 5}, "key must be bytes-like or str, not int"),
        ({"headers": {"a": 5}}, "header 'a' must be bytes-like or str, not int"),
    ],
)
def test_fields_of_another_kind(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        check_fields(b"v", **arguments)


@pytest.mark.parametrize("timeout", [True, "1", b"1", [1]], ids=repr)
def test_a_timeout_is_a_number(timeout: object) -> None:
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        check_timeout(timeout)  # type: ignore[arg-type]


def test_a_timeout_of_centuries_is_none() -> None:
    assert [check_timeout(timeout) for timeout in (None, 0, -1, 2.5, 1e9, math.inf)] == [None, 0, -1, 2.5, None, None]
    with pytest.raises(InvalidSettingError, match="timeout = nan"):
        check_timeout(math.nan)


def test_an_error_about_seconds_names_the_unit_and_the_value_that_was_meant() -> None:
    for value, message, hint in (
        (60_000, "lease = 60000 s is outside 1 s to 43200 s", "lease is in seconds: write 60 for 60000 ms"),
        (0.5, "lease = 0.5 s is outside 1 s to 43200 s", "lease is in seconds"),
        (1e9, "lease = 1000000000.0 s is outside", "lease is in seconds"),
        ("90s", "lease = '90s' is no number of seconds", "write 90 in place of '90s'"),
        ("soon", "lease = 'soon' is no number of seconds", "write a number, without a unit"),
        (None, "lease = None is no number of seconds", "write a number, without a unit"),
        (math.nan, "lease = nan s is outside", "lease is in seconds"),
    ):
        with pytest.raises(InvalidSettingError) as caught:
            check_seconds("lease", value, 1, 43_200)
        assert str(caught.value).startswith(message)
        assert caught.value.hint == hint
    for allowed in (1, 43_200, 2.5):
        check_seconds("lease", allowed, 1, 43_200)
