"""Notes of readers and of staged batches for the audit: what counts, from when on, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from memq.client.consumer.batch import Damage, Slice
from memq.client.consumer.fetch.cursor_outcomes import LeftOut, ReadyRange
from memq.client.observers import audit_recorder
from memq.client.observers.audit_recorder import (
    HEARTBEAT_INTERVALS,
    AuditRecorder,
    PartRecorder,
    ReadRecorder,
    StagedRecorder,
)
from memq.errors import CorruptDataError
from memq.format.pointer import decode_pointer
from memq.format.report import Report, ReportPart
from memq.format.staged_manifest import StagedObject, StagedPiece
from memq.protocol.frames import AckLevel
from memq.topic import Committed, Position
from tests.unit.queue_model import TOPIC_ID, Block, Log

INTERVAL_MS = 100
Ranges = tuple[tuple[int, int], ...]
MINUTE_MS = 60_000


class Noted:
    """An audit recorder with one partition of the audit topic."""

    def __init__(self) -> None:
        self.recorder = AuditRecorder(5, "consumer", "g", "host", INTERVAL_MS, lambda: None)

    def part(self, writer: int = 0, now_ms: int = 0) -> PartRecorder:
        return self.recorder.part("clicks", TOPIC_ID, writer, now_ms)

    def reports(self, now_ms: int = 1) -> list[Report]:
        return [report for _, report in self.recorder.take(now_ms, 1)]

    def parts(self) -> list[ReportPart]:
        return [part for report in self.reports() for part in report.parts]


def delivered(log: Log, *blocks: Block) -> ReadyRange:
    """Return a delivery of a new batch."""
    offset = log.batch(*blocks)
    pointer = decode_pointer(log.entries[-1].body)
    slices = tuple(Slice(piece, 0, piece.records) for piece in log.pieces(offset, pointer))
    return ReadyRange(Position(0, offset), Committed(Position(0, offset + 1)), pointer=pointer, slices=slices)


def stages(parts: Sequence[ReportPart]) -> list[tuple[str, int, tuple[tuple[int, int], ...]]]:
    return [(span.stage, span.producer, span.ranges) for part in parts for span in part.spans]


@pytest.mark.parametrize(("now_ms", "since_ms"), [(90, 5), (3, 3)], ids=["later", "a clock that was set back"])
def test_the_first_report_begins_with_the_first_note(now_ms: int, since_ms: int) -> None:
    noted = Noted()
    noted.part(0, 5).commit("0:1:0")
    noted.part(1, 50).commit("0:1:0")
    (report,) = noted.reports(now_ms)
    assert (report.since_ms, report.until_ms) == (since_ms, now_ms)
    noted.part(0, now_ms).commit("0:2:0")
    (report,) = noted.reports(now_ms + 7)
    assert (report.since_ms, report.until_ms) == (now_ms, now_ms + 7)


def test_nothing_is_due_just_after_a_report() -> None:
    noted = Noted()
    noted.part().commit("0:1:0")
    assert noted.recorder.due(0)
    noted.reports(5)
    half = INTERVAL_MS * HEARTBEAT_INTERVALS // 2
    assert [noted.recorder.due(5 + passed) for passed in (0, 1, half - 1, half)] == [False, False, False, True]


def test_a_task_that_has_read_all_up_to_a_position_has_something_to_report() -> None:
    noted = Noted()
    noted.part().end("0:1:0", "0:9:0")
    assert noted.recorder.due(0)
    assert [part.read for part in noted.parts()] == [("0:1:0", "0:9:0")]
    assert noted.parts() == []


def test_records_that_were_only_fetched_are_not_separated_from_a_later_begin() -> None:
    noted = Noted()
    part = noted.part()
    part.begin("0:9:0", "stored")
    part.pass_stage("fetched", 1, 0, 3, 0, 0)
    part.begin("0:4:0", "seek")
    assert [[begin.at for begin in each.begins] for each in noted.parts()] == [["0:9:0", "0:4:0"]]


@pytest.mark.parametrize(
    ("mask", "passed", "fetched"),
    [
        ([1, 1, 0, 0], ((2, 4),), ((0, 2),)),
        ([0, 1, 0, 1], ((0, 1), (2, 3)), ((1, 2), (3, 4))),
        ([1, 0] * audit_recorder.RUNS_MAX, (), ((0, 2 * audit_recorder.RUNS_MAX),)),
    ],
    ids=["one run", "four runs", "too many runs"],
)
def test_records_that_a_filter_leaves_out_of_a_block_are_passed(
    mask: list[int], passed: Ranges, fetched: Ranges
) -> None:
    noted, log = Noted(), Log()
    reading = ReadRecorder(noted.part, (), commits=True)
    whole = delivered(log, Block(1, 0, len(mask)))
    delivery = replace(whole, slices=tuple(part._replace(mask=bytes(mask)) for part in whole.slices))
    reading.deliver(delivery, 1)
    assert sorted(stages(noted.parts())) == sorted(
        [("fetched", 1, fetched), *([("passed", 1, passed)] if passed else [])]
    )
    reading.store(delivery.behind, 2)
    assert stages(noted.parts()) == [("processed", 1, fetched)]


def test_blocks_that_a_filter_leaves_out_are_passed_in_their_write_partition() -> None:
    noted = Noted()
    reading = ReadRecorder(noted.part, (0,), commits=True)
    reading.begin(Position(0, 0), "start")
    noted.parts()
    reading.leave_out([LeftOut(0, 1, 0, 4, 0), LeftOut(3, 2, 5, 7, 60_000)], 1)
    parts = noted.parts()
    assert stages(parts) == [("passed", 1, ((0, 4),)), ("passed", 2, ((5, 7),))]
    assert [(part.partition, part.spans[0].minute, len(part.begins)) for part in parts] == [(0, 0, 0), (3, 1, 1)]


@pytest.mark.parametrize("commits", [True, False])
def test_records_are_fetched_when_they_are_given_out_and_processed_when_they_are_committed(commits: bool) -> None:
    noted, log = Noted(), Log()
    reading = ReadRecorder(noted.part, (), commits=commits)
    first, second = delivered(log, Block(1, 0, 3), Block(2, 0, 2)), delivered(log, Block(1, 3, 3))
    reading.deliver(first, 1)
    reading.deliver(second, 1)
    assert stages(noted.parts()) == [("fetched", 1, ((0, 6),)), ("fetched", 2, ((0, 2),))]
    reading.store(first.behind, 2)
    assert stages(noted.parts()) == ([("processed", 1, ((0, 3),)), ("processed", 2, ((0, 2),))] if commits else [])
    reading.store(second.behind, 2)
    assert stages(noted.parts()) == ([("processed", 1, ((3, 6),))] if commits else [])


def test_only_a_part_of_a_block_is_noted() -> None:
    noted, log = Noted(), Log()
    whole = delivered(log, Block(1, 10, 5))
    (piece,) = (each.piece for each in whole.slices)
    part = ReadyRange(whole.first, whole.behind, pointer=whole.pointer, slices=(Slice(piece, 1, 4),))
    ReadRecorder(noted.part, (), commits=False).deliver(part, 1)
    assert stages(noted.parts()) == [("fetched", 1, ((11, 14),))]


def test_a_partition_without_an_audit_is_not_noted() -> None:
    log = Log()
    reading = ReadRecorder(lambda writer: None, (0,), commits=True)
    reading.begin(Position(0, 0), "stored")
    delivery = delivered(log, Block(1, 0, 3))
    reading.deliver(delivery, 1)
    reading.store(delivery.behind, 2)
    (piece,) = (each.piece for each in delivery.slices)
    assert piece.header is not None
    reading.drop_copies([(0, piece.header)], 1)
    reading.note_damage(0, Damage("k", 1, Position(0, 3), 3, b"", CorruptDataError("a checksum")))


def test_a_block_that_the_user_finds_damaged_is_noted_in_its_partition() -> None:
    noted = Noted()
    reading = ReadRecorder(noted.part, (), commits=True)
    reading.note_damage(4, Damage("k", 1, Position(0, 3), 7, b"", CorruptDataError("a checksum")))
    (part,) = noted.parts()
    (damage,) = part.damages
    assert (part.partition, damage.object, damage.block, damage.offset, damage.records) == (4, "k", 1, 3, 7)


def test_of_too_many_blocks_without_a_commit_the_oldest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_recorder, "HANDED_MAX", 2)
    noted, log = Noted(), Log()
    reading = ReadRecorder(noted.part, (), commits=True)
    given = [delivered(log, Block(1, first, 3)) for first in (0, 3, 6)]
    for delivery in given[:2]:
        reading.deliver(delivery, 1)
    assert not noted.part().lacks
    reading.deliver(given[2], 1)
    assert noted.part().lacks
    reading.store(given[2].behind, 2)
    assert ("processed", 1, ((3, 9),)) in stages(noted.parts())


def staged(producer: int, *pieces: tuple[tuple[int, int], ...]) -> list[tuple[StagedObject, StagedPiece]]:
    """Return pieces of one object, each with its times."""
    made = tuple(
        StagedPiece(
            topic="clicks", topic_id=TOPIC_ID, partition=0, offset=0, length=1, records=1, raw_bytes=1, times=times
        )
        for times in pieces
    )
    parent = StagedObject(key="k", bytes=1, index_offset=1, pieces=made, producer=f"{producer:016x}")
    return [(parent, piece) for piece in made]


def test_pieces_of_a_batch_are_sent_at_once_and_acked_as_the_owner_publishes_them() -> None:
    noted = Noted()
    pieces = staged(0x1A2, ((0, 3), (MINUTE_MS, 5))) + staged(8, ((0, 4),)) + staged(9, ((0, 2),))
    recorder = StagedRecorder(noted.part(), pieces)
    recorder.send(1)
    (part,) = noted.parts()
    found = [(span.stage, span.producer, span.minute, span.ranges, span.level) for span in part.spans]
    assert found == [
        ("sent", 0x1A2, 0, ((0, 3),), AckLevel.ALL),
        ("sent", 0x1A2, 1, ((3, 5),), AckLevel.ALL),
        ("sent", 8, 0, ((0, 4),), AckLevel.ALL),
        ("sent", 9, 0, ((0, 2),), AckLevel.ALL),
    ]
    acked: list[list[int]] = []
    for published in (1, 2, 1, 3):
        recorder.ack(published, 2)
        acked.append(sorted({producer for _, producer, _ in stages(noted.parts())}))
    assert acked == [[0x1A2], [8], [], [9]]
    nobody = StagedRecorder(None, pieces)
    nobody.send(1)
    nobody.ack(3, 1)


def test_the_latency_of_records_is_counted_by_its_bits() -> None:
    noted = Noted()
    for late_ms, records in ((-5, 1), (0, 2), (1, 4), (2, 8), (1_000, 16)):
        noted.part().pass_stage("fetched", 1, 0, records, 0, late_ms)
    (span,) = (span for part in noted.parts() for span in part.spans)
    assert span.latency == ((0, 3), (1, 4), (2, 8), (10, 16))


def test_an_error_that_is_given_out_is_no_record() -> None:
    noted = Noted()
    failure = ReadyRange(Position(0, 0), Committed(Position(0, 1)), failure=CorruptDataError("a checksum"))
    ReadRecorder(noted.part, (), commits=True).deliver(failure, 1)
    assert noted.parts() == []


def test_only_records_that_are_processed_again_begin_a_new_part() -> None:
    noted = Noted()
    part = noted.part()
    for stage, first, next_ in (("processed", 0, 3), ("processed", 10, 12), ("fetched", 0, 3), ("fetched", 0, 3)):
        part.pass_stage(stage, 1, first, next_, 0, 0)  # type: ignore[arg-type]
    assert [len(each.spans) for each in noted.parts()] == [2]
    for _ in range(2):
        part.pass_stage("processed", 1, 0, 3, 0, 0)
    assert [len(each.spans) for each in noted.parts()] == [1, 1]
