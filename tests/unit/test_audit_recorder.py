"""Reports of a client: events become ranges by stage and minute; numbers are dense."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.client.observers.audit_recorder import (
    HEARTBEAT_INTERVALS,
    NOTES_MAX,
    AuditRecorder,
    PartRecorder,
    ReadRecorder,
)
from memq.format.held_sequences import delayed_sequence
from memq.format.ranges import RangeSet
from memq.format.report import HeldStage, Report, ReportedDamage, home_of
from memq.topic import Committed, Position
from tests.golden.make import TOPIC_ID

MINUTE = 60_000
HOMES = 4
PROMISE_MS = 100 * HEARTBEAT_INTERVALS


class RecordedReports:
    """A recorder with its reports, which are checked against the rules of numbers and times."""

    def __init__(self) -> None:
        self.early = 0
        self.tally = AuditRecorder(5, "producer", "billing", "web-1", 100, self._full)
        self.reports: dict[int, list[Report]] = {}

    def _full(self) -> None:
        self.early += 1

    def part(self, number: int, now_ms: int = 0) -> PartRecorder:
        return self.tally.part("clicks", TOPIC_ID, number, now_ms)

    def take(self, now_ms: int, *, last: bool = False) -> list[Report]:
        taken = self.tally.take(now_ms, HOMES, last=last)
        for home, report in taken:
            reported = self.reports.setdefault(home, [])
            assert all(home_of(TOPIC_ID, part.partition, HOMES) == home for part in report.parts)
            assert not reported or report.since_ms == reported[-1].until_ms
            assert report.since_ms <= report.until_ms <= report.next_ms
            reported.append(report)
        return [report for _, report in taken]

    def numbers(self, number: int) -> list[int]:
        return [report.number for report in self.reports.get(home_of(TOPIC_ID, number, HOMES), [])]


events = st.tuples(
    st.integers(0, 5),  # write partition
    st.sampled_from(["sent", "acked", "fetched", "processed"]),
    st.integers(1, 2),  # producer
    st.integers(0, 50),  # first sequence
    st.integers(1, 9),  # records
    st.integers(0, 3 * MINUTE),  # event time
)


@given(st.lists(st.lists(events, max_size=10), max_size=6))
def test_all_that_was_noted_is_said_once(rounds: list[list[tuple[int, str, int, int, int, int]]]) -> None:
    reported, latency = RecordedReports(), 0
    wanted: dict[tuple[int, str, int, int], RangeSet] = {}
    for now_ms, noted in enumerate(rounds):
        for number, stage, producer, first, records, base_ms in noted:
            reported.part(number).pass_stage(stage, producer, first, first + records, base_ms, base_ms + 5)  # type: ignore[arg-type]
            key = (number, stage, producer, base_ms // MINUTE)
            wanted.setdefault(key, RangeSet()).add(first, first + records)
            latency += records
        reported.take(now_ms)
    said: dict[tuple[int, str, int, int], RangeSet] = {}
    for reports in reported.reports.values():
        assert [report.number for report in reports] == list(range(len(reports)))
        for part in (part for report in reports for part in report.parts):
            for span in part.spans:
                for piece in span.ranges:
                    said.setdefault((part.partition, span.stage, span.producer, span.minute), RangeSet()).add(*piece)
                assert [bucket for bucket, _ in span.latency] == [3]
                latency -= sum(count for _, count in span.latency)
    assert said == wanted
    assert latency == 0


def test_consumer_reports_begin_damage_and_last_commit() -> None:
    reported = RecordedReports()
    damage = ReportedDamage(object="c/x", block=1, offset=17, records=6, cause="checksum")
    part = reported.part(3)
    part.begin("0:17:0", "seek")
    part.damage(damage)
    part.damage(damage)
    part.commit("0:18:0")
    part.commit("0:19:0")
    [report] = reported.take(1)
    [said] = report.parts
    assert (said.damages, said.committed) == ((damage,), "0:19:0")
    assert [(begin.at, begin.reason) for begin in said.begins] == [("0:17:0", "seek")]


def test_records_processed_before_a_new_begin_are_reported_before_it() -> None:
    reported = RecordedReports()
    part = reported.part(3)
    part.begin("0:9:0", "stored")
    part.pass_stage("processed", 1, 0, 3, 0, 0)
    part.commit("0:17:0")
    part.begin("0:4:0", "seek")
    part.begin("0:5:0", "seek")
    part.pass_stage("processed", 1, 0, 2, 0, 0)
    [report] = reported.take(1)
    said = [([begin.at for begin in each.begins], [span.ranges for span in each.spans]) for each in report.parts]
    assert said == [(["0:9:0"], [((0, 3),)]), (["0:4:0", "0:5:0"], [((0, 2),)])]
    assert [each.committed for each in report.parts] == ["0:17:0", ""]
    assert reported.take(2) == []


def test_records_processed_twice_are_reported_twice() -> None:
    reported = RecordedReports()
    part = reported.part(3)
    for first, next_ in ((0, 3), (3, 6), (3, 6), (6, 9)):
        part.pass_stage("fetched", 1, first, next_, 0, 0)
        part.pass_stage("processed", 1, first, next_, 0, 0)
    part.commit("0:17:0")
    [report] = reported.take(1)
    said = [span.ranges for each in report.parts for span in each.spans if span.stage == "processed"]
    assert said == [((0, 6),), ((3, 9),)]
    assert [each.committed for each in report.parts] == ["", "0:17:0"]


def test_a_seek_while_a_commit_is_under_way_is_said_behind_it() -> None:
    reported = RecordedReports()
    readings = [ReadRecorder(reported.part, (3,), commits=True) for _ in range(3)]
    readings[0].begin(Position(0, 9), "stored")
    readings[0].begin_storing()
    readings[1].begin(Position(0, 4), "seek", readings[0])
    readings[2].begin(Position(0, 5), "seek", readings[1])
    assert [begin.at for report in reported.take(1) for part in report.parts for begin in part.begins] == ["0:9:0"]
    readings[0].store(Committed(Position(0, 17)), 2)
    readings[0].end_storing()
    [report] = reported.take(3)
    assert [part.committed for part in report.parts] == ["0:17:0", ""]
    assert [[begin.at for begin in part.begins] for part in report.parts] == [[], ["0:4:0", "0:5:0"]]


def test_silence_is_broken_within_half_of_what_was_promised_wherever_something_was_said() -> None:
    reported = RecordedReports()
    assert not reported.tally.due(10_000)
    reported.part(0).pass_stage("sent", 1, 0, 9, 0, 5)
    assert reported.tally.due(5)
    [report] = reported.take(5)
    assert report.next_ms == 5 + PROMISE_MS
    assert not reported.tally.due(5 + PROMISE_MS // 2 - 1)
    assert reported.tally.due(5 + PROMISE_MS // 2)
    [silent] = reported.take(5 + PROMISE_MS // 2)
    assert (silent.number, silent.parts, silent.last) == (1, (), False)
    assert reported.tally.due(0), "a clock that was set back must not keep it silent"
    [last] = reported.take(PROMISE_MS, last=True)
    assert (last.number, last.last) == (2, True)


def test_unnoted_records_show_as_a_hole() -> None:
    reported = RecordedReports()
    reported.part(0).pass_stage("sent", 1, 0, 1, 0, 0)
    reported.take(1)
    reported.part(0).lacks = True
    reported.part(0).pass_stage("sent", 1, 2, 3, 0, 0)
    reported.take(2)
    reported.part(0).pass_stage("sent", 1, 3, 4, 0, 0)
    reported.take(3)
    assert reported.numbers(0) == [0, 2, 3]


def test_at_the_bound_a_report_is_due_at_once_and_beyond_it_nothing_is_kept() -> None:
    reported = RecordedReports()
    for number in range(2 * NOTES_MAX + 5):
        reported.part(0).pass_stage("sent", 1, 2 * number, 2 * number + 1, 0, 0)
    assert reported.early == 1
    reported.take(1)
    parts = [part for report in reported.reports[home_of(TOPIC_ID, 0, HOMES)] for part in report.parts]
    assert sum(len(span.ranges) for part in parts for span in part.spans) == 2 * NOTES_MAX
    assert reported.numbers(0)[0] == 1, "the number that is left out says that something is lacking"


def test_delayed_and_transactional_records_are_counted_by_stage_and_minute() -> None:
    reported = RecordedReports()
    counts: list[tuple[HeldStage, int, int]] = [("held", 7, 1), ("held", 7, 2), ("held", 8, 1), ("cancelled", 7, 1)]
    for count in counts:
        reported.part(0).hold(*count)
    for producer in (1, 2):
        reported.part(0).pass_stage("fetched", producer, due := delayed_sequence(9 * MINUTE), due + 1, 5, 6)
    (said,) = reported.take(1)
    assert [(each.stage, each.minute, each.records) for each in said.parts[0].held] == [
        *(("held", 7, 3), ("held", 8, 1)),
        *(("cancelled", 7, 1), ("fetched", 9, 2)),
    ]
    assert said.parts[0].spans == ()
    assert reported.take(2) == []
    for minute in range(2 * NOTES_MAX + 5):
        reported.part(0).hold("held", minute, 1)
    assert reported.early == 1
    reported.take(3)
    assert reported.numbers(0)[1] == 2, "the number that is left out says that something is lacking"
