"""Reports: they round-trip, garbage is damage, and too large ones are split without loss of a sequence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.latency import bucket_of, latency_of
from memq.format.ranges import Range, RangeSet
from memq.format.report import (
    Begin,
    HeldSpan,
    Report,
    ReportPart,
    ReportSpan,
    decode_report,
    encode_report,
    fitting,
    home_of,
)
from tests.golden.make import TOPIC_ID, make_reports
from tests.unit.pointer_examples import ranges

spans = st.builds(
    ReportSpan,
    stage=st.sampled_from(["sent", "acked", "gave-up", "fetched", "dropped", "processed"]),
    producer=st.integers(1, (1 << 63) - 1),
    minute=st.integers(-(1 << 40), 1 << 40),
    ranges=ranges(),
    latency=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 1 << 40)), max_size=4).map(tuple),
)


def report(parts: tuple[ReportPart, ...] = (), **fields: Any) -> Report:
    base: dict[str, Any] = {"client": 5, "kind": "producer", "number": 3, "since_ms": 10, "until_ms": 20, "next_ms": 50}
    return Report(**{**base, "parts": parts, **fields})


def part(*spans: ReportSpan, number: int = 0) -> ReportPart:
    return ReportPart(topic="clicks", topic_id=TOPIC_ID, partition=number, spans=spans)


def sequences(reports: list[Report]) -> dict[tuple[int, str, int], RangeSet]:
    """All that is said in them, by partition, stage and producer."""
    found: dict[tuple[int, str, int], RangeSet] = {}
    for each in reports:
        for one in each.parts:
            for span in one.spans:
                said = found.setdefault((one.partition, span.stage, span.producer), RangeSet())
                for piece in span.ranges:
                    said.add(*piece)
    return found


@given(st.lists(spans, max_size=4))
def test_written_report_is_read_back(written: list[ReportSpan]) -> None:
    said = report((part(*written),))
    assert decode_report(encode_report(said)) == said


def test_fields_of_tomorrow_are_passed_over_and_a_newer_version_is_no_damage() -> None:
    said = make_reports()["report-consumer.json"]
    body = json.loads(encode_report(said))
    body["tomorrow"] = body["parts"][0]["tomorrow"] = body["parts"][0]["spans"][0]["tomorrow"] = [1]
    assert decode_report(json.dumps(body).encode()) == said
    body["version"] = 2
    with pytest.raises(UnsupportedFormatError):
        decode_report(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("client", "xyz"), ("client", 5), ("kind", "admin"), ("number", -1), ("until_ms", 0), ("next_ms", 1)),
        *(("parts.topic", "a/b/c"), ("parts.topic_id", "ab"), ("parts.partition", -1), ("parts.committed", "here")),
        *(("parts.spans.stage", "lost"), ("parts.spans.ranges", [["0" * 16, "0" * 16]]), ("parts.spans.level", 3)),
        ("parts.spans.ranges", [["0" * 16, f"{1:016x}"], [f"{1:016x}", f"{2:016x}"]]),
        *(("parts.spans.latency", [[65, 1]]), ("parts.damages.offset", None), ("parts.begins.reason", "mood")),
    ],
)
def test_report_that_breaks_a_rule_is_damage(place: str, value: Any) -> None:
    body = json.loads(encode_report(make_reports()["report-consumer.json"]))
    at = body
    *outer, name = place.split(".")
    for step in outer:
        at = at[step][0]
    at[name] = value
    with pytest.raises(CorruptDataError):
        decode_report(json.dumps(body).encode())


@given(st.binary(max_size=60))
def test_garbage_is_damage(body: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_report(body)


def test_report_over_the_bound_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="65536 are allowed"):
        decode_report(encode_report(report()) + b" " * 65_536)


@given(st.lists(spans, max_size=6), st.integers(0, 2))
def test_large_report_is_cut_into_reports_with_the_same_content(written: list[ReportSpan], partitions: int) -> None:
    said = report(tuple(part(*written, number=number) for number in range(partitions)), last=True)
    cut = fitting(said, 700)
    assert sequences(cut) == sequences([said])
    assert [each.number for each in cut] == list(range(3, 3 + len(cut)))
    assert [each.until_ms for each in cut] == [10] * (len(cut) - 1) + [20]
    assert [each.last for each in cut] == [False] * (len(cut) - 1) + [True]
    latency = [sum(count for one in each.parts for span in one.spans for _, count in span.latency) for each in cut]
    assert sum(latency) == partitions * sum(count for span in written for _, count in span.latency)


def test_a_report_of_many_ranges_is_cut_into_records_that_fit() -> None:
    many: tuple[Range, ...] = tuple((3 * at, 3 * at + 1) for at in range(10_000))
    said = report((part(ReportSpan(stage="sent", producer=1, minute=7, ranges=many, latency=((1, 10_000),))),))
    cut = fitting(said)
    assert 1 < len(cut) < 20
    assert all(len(encode_report(each)) <= 65_536 for each in cut)
    assert sequences(cut) == sequences([said])
    assert fitting(replace(said, parts=())) == [replace(said, parts=())]


def test_a_cut_leaves_begins_before_what_was_processed_and_the_commit_behind_it() -> None:
    many: tuple[Range, ...] = tuple((3 * at, 3 * at + 1) for at in range(10_000))
    spans = tuple(ReportSpan(stage="processed", producer=producer, minute=7, ranges=many) for producer in (1, 2))
    begins = tuple(Begin(at=f"0:{at}:0", reason="seek") for at in range(3))
    cut = [
        one
        for each in fitting(report((replace(part(*spans), begins=begins, committed="0:9:0"),)))
        for one in each.parts
    ]
    assert tuple(begin for each in cut for begin in each.begins) == begins
    assert not any(each.spans for each in cut[: max(at for at, each in enumerate(cut) if each.begins)])
    assert [each.committed for each in cut] == [""] * (len(cut) - 1) + ["0:9:0"]


def test_buckets_and_homes() -> None:
    assert latency_of([5, 5, 900, 1_000], [1, 2, 4, 8], 1_000) == ((0, 8), (7, 4), (10, 3))
    assert (latency_of([5, 6], [1, 2], 1_000), latency_of([], [], 7)) == (((10, 3),), ())
    assert [bucket_of(latency) for latency in (-5, 0, 1, 2, 3, 4, 1_000)] == [0, 0, 1, 2, 2, 3, 10]
    homes = [home_of(TOPIC_ID, partition, 4) for partition in range(64)]
    assert set(homes) == {0, 1, 2, 3}
    assert homes == [home_of(TOPIC_ID, partition, 4) for partition in range(64)]


def test_counts_of_held_records_are_read_back_and_said_once_in_pieces() -> None:
    held = tuple(HeldSpan(stage="held", minute=minute, records=minute + 1) for minute in range(40))
    spans = (ReportSpan(stage="sent", producer=5, minute=0, ranges=((0, 4),)),)
    begins = (Begin(at="0:0:0", reason="start"), Begin(at="0:1:0", reason="seek"))
    full = replace(part(*spans), held=held, begins=begins, committed="0:2:0")
    said = report((full,))
    assert decode_report(encode_report(said)) == said
    pieces = fitting(said, 600)
    assert len(pieces) > 2
    assert [one for each in pieces for each_part in each.parts for one in each_part.held] == list(held)
    assert sequences(pieces) == sequences([said])
    assert [begin for each in pieces for each_part in each.parts for begin in each_part.begins] == list(begins)
    assert [each_part.committed for each in pieces for each_part in each.parts].count("0:2:0") == 1
