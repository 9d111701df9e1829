"""The judge of a chaos run finds lost, changed, misplaced, unordered and doubled records and commits."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from confluent_kafka import KafkaException

from tests.chaos.journal import Journal, lines_of, value_of
from tests.chaos.judge import (
    GroupRules,
    LogRules,
    Record,
    blocks_of,
    check_once,
    patiently,
    read_journals,
    read_object,
)
from tests.chaos.spark_rules import SparkRules, rows_of
from tests.chaos.verdict import Acks, Verdict
from tests.golden.make import FOLDER

PRODUCER = "00000000000000aa"
PLACE = "all", 0, PRODUCER
SIZE = 40


def records(*numbers: int, worker: str = "all-1") -> list[Record]:
    return [Record(PRODUCER, number, value_of(worker, number, SIZE)) for number in numbers]


def judged(blocks: list[list[Record]], acked: tuple[int, int] = (0, 4)) -> list[str]:
    verdict, acks = Verdict(), Acks()
    acks.ranges[PLACE].append(acked)
    acks.workers[PRODUCER] = "all-1"
    rules = LogRules(verdict, acks, SIZE)
    for block in blocks:
        rules.take("all", 0, block)
    rules.finish()
    return verdict.findings


def test_a_sound_log_has_no_finding() -> None:
    assert judged([records(0, 1), records(2, 3)]) == []


def test_a_copy_is_counted_and_no_finding() -> None:
    assert judged([records(0, 1), records(0, 1), records(2, 3)]) == []


def test_a_staged_record_may_have_copies_of_one_identity_alone() -> None:
    once, again = (
        Record("0" * 15 + "7", 0, value_of("staged", 5, SIZE)),
        Record("0" * 15 + "7", 1, value_of("staged", 5, SIZE)),
    )
    assert judged([records(0, 1), [once], records(2, 3), [once]]) == []
    (finding,) = judged([records(0, 1), [once], records(2, 3), [again]])
    assert "record 5 of staged is there twice" in finding


@pytest.mark.parametrize(
    ("blocks", "finding"),
    [
        ([records(0, 1), records(3)], "1 acked records are lost, the first [2]"),
        ([records(0, 1), [Record(PRODUCER, 2, b"all-1 2 00000001")], records(3)], "holds other bytes"),
        ([records(0, 1), [Record(PRODUCER, 2, value_of("all-1", 3, SIZE))], records(3)], "holds record 3 of all-1"),
        ([records(2, 3), records(0, 1)], "2 acked records lie out of order, the first [0, 1]"),
    ],
)
def test_a_broken_log_is_found(blocks: list[list[Record]], finding: str) -> None:
    assert any(finding in text for text in judged(blocks)), judged(blocks)


def test_unacked_records_may_be_missing_and_out_of_order() -> None:
    assert judged([records(2, 3), records(0, 1)], acked=(2, 4)) == []


def committed(*lines: str, at_end: bool = True) -> list[str]:
    verdict, acks = Verdict(), Acks()
    acks.ranges[PLACE].append((0, 4))
    acks.workers[PRODUCER] = "all-1"
    group = GroupRules(verdict, "member")
    group.take("member-1.0", [line.split(" ") for line in lines])
    group.finish(acks, at_end)
    return verdict.findings


def test_a_sound_group_has_no_finding() -> None:
    assert committed(
        "D all 0 0:1:0 0:2:0 all-1:0-1", "C all 0 0:2:0 10 11", "D all 0 0:2:0 0:3:0 all-1:2-3", "C all 0 0:3:0 12 13"
    ) == []  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        (["D all 0 0:1:0 0:2:0 all-1:0-2", "C all 0 0:2:0 10 11"], "never got 1 acked records"),
        (
            [
                "D all 0 0:1:0 0:3:0 all-1:0-3",
                "C all 0 0:3:0 10 11",
                "D all 0 0:1:0 0:2:0 all-1:0-1",
                "C all 0 0:2:0 20 21",
            ],
            "was committed after (0, 3, 0): twice",
        ),
        (["D all 0 0:1:0 0:2:0 all-1:0-3", "C all 0 0:9:0 10 11"], "without having got it"),
    ],
)
def test_a_broken_group_is_found(lines: list[str], finding: str) -> None:
    assert any(finding in text for text in committed(*lines)), committed(*lines)


def test_a_group_that_is_not_at_the_end_may_lack_records() -> None:
    assert committed("D all 0 0:1:0 0:2:0 all-1:0-2", "C all 0 0:2:0 10 11", at_end=False) == []


def test_a_reader_that_begins_again_may_get_all_once_more() -> None:
    verdict, line = Verdict(), ["D", "all", "0", "0:1:0", "0:2:0", "all-1:0-3"]
    check_once(verdict, "reader", [line, ["N"], line])
    assert verdict.findings == []


def test_a_reader_that_gets_a_record_twice_is_found() -> None:
    verdict = Verdict()
    check_once(verdict, "reader", [["D", "all", "0", "0:1:0", "0:2:0", "all-1:0-3"]])
    assert verdict.findings == []
    check_once(verdict, "reader", [["D", "all", "0", "0:1:0", "0:2:0", "all-1:0-3", "all-1:2-4"]])
    assert verdict.findings == ["reader: ('all', 0, 'all-1') delivered twice: [2, 3]"]


def spark_judged(rows: list[tuple[str, int, bytes]], copies: list[bytes]) -> list[str]:
    verdict, acks = Verdict(), Acks()
    acks.ranges[PLACE].append((0, 2))
    acks.workers[PRODUCER] = "all-1"
    acks.staged["staged", "staged"].append((0, 1))
    rules = SparkRules(verdict, SIZE)
    for row in rows:
        rules.take_row(*row)
    for copy in copies:
        rules.take_copy(copy)
    rules.finish(acks, copied="all")
    return verdict.findings


ROWS = [("all", 0, value_of("all-1", number, SIZE)) for number in (0, 1)]
STAGED = ("staged", 1, value_of("staged", 0, SIZE))
COPIED = [b"0:" + value for _, _, value in ROWS]


def test_sound_files_and_copies_of_spark_have_no_finding() -> None:
    assert spark_judged([*ROWS, STAGED], COPIED) == []


@pytest.mark.parametrize(
    ("rows", "copies", "finding"),
    [
        ([*ROWS, ROWS[0], STAGED], COPIED, "record 0 of all-1 in all 0 is there twice"),
        ([ROWS[0], STAGED], COPIED, "all 0 lacks 1 acked records of all-1, the first [1]"),
        (ROWS, COPIED, "staged lacks 1 acked records of staged, the first [0]"),
        ([*ROWS, ("all", 0, ROWS[1][2] + b"?"), STAGED], COPIED, "holds other bytes"),
        ([*ROWS, STAGED], [*COPIED, COPIED[1]], "wrote record 1 of all-1 in partition 0 twice"),
        ([*ROWS, STAGED], COPIED[1:], "copies of all 0 lacks 1 acked records of all-1, the first [0]"),
        ([*ROWS, STAGED], [*COPIED, b"1:" + b"all-1 0 00"], "copy of Spark's holds other bytes"),
        ([*ROWS, ("all", 1, ROWS[0][2]), STAGED], [COPIED[1], b"1" + COPIED[0][1:]], "copies of all 0 lacks 1"),
    ],
)
def test_broken_files_and_copies_of_spark_are_found(
    rows: list[tuple[str, int, bytes]], copies: list[bytes], finding: str
) -> None:
    assert any(finding in text for text in spark_judged(rows, copies)), spark_judged(rows, copies)


def test_rows_are_those_of_the_files_that_the_log_of_the_sink_names(tmp_path: Path) -> None:
    (tmp_path / "_spark_metadata").mkdir()
    for name in ("committed", "later", "never"):
        table = pyarrow.table({"topic": ["all"], "partition": [0], "value": [name.encode()]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    lines = [f'{{"path":"file://{tmp_path}/{name}.parquet","action":"add"}}' for name in ("committed", "later")]
    (tmp_path / "_spark_metadata" / "0.compact").write_text("v1\n" + lines[0])
    (tmp_path / "_spark_metadata" / "1").write_text("v1\n" + "\n".join(lines))
    (tmp_path / "_spark_metadata" / ".2.tmp").write_text("v1\nhalf")
    assert list(rows_of(tmp_path)) == [("all", 0, b"committed"), ("all", 0, b"later")]


def test_journals_are_read_and_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "all-1.0.journal")
    journal.write("A", "all", 0, PRODUCER, 0, 4, 1)
    journal.write("X", "all-1 died of something")
    journal.write("E")
    journal.close()
    with (tmp_path / "all-1.0.journal").open("ab") as file:
        file.write(b"A all 0 ")
    assert [words[0] for words in lines_of(tmp_path / "all-1.0.journal")] == ["A", "X", "E"]
    verdict = Verdict()
    acks, _ = read_journals(tmp_path, verdict)
    assert acks.ranges == {PLACE: [(0, 4)]}
    assert verdict.findings == ["all-1.0.journal: all-1 died of something"]


def test_a_partition_without_a_leader_is_asked_again() -> None:
    refusals = ["not the leader", "no leader"]

    def ask() -> tuple[int, int]:
        if refusals:
            raise KafkaException(refusals.pop())
        return 3, 7

    assert patiently(ask, pause_s=0.0) == (3, 7)


def test_the_blocks_of_a_batch_are_decoded_but_for_those_that_its_pointer_skips() -> None:
    data = (FOLDER / "object.bin").read_bytes()
    meta, batches, _ = read_object.read_index(data)
    offset, length, _, sequence, _, _, count, partition, epoch, topic = batches[0]
    pointer = {
        "topic": meta["topics"][topic]["name"],
        "partition": partition,
        "epoch": epoch,
        "batch_sequence": sequence,
        "locations": [{"key": "golden/topics/x", "offset": offset, "length": length}],
    }
    blocks = list(blocks_of(pointer, lambda key: data))
    assert len(blocks) == count
    assert len(list(blocks_of({**pointer, "skip": [0]}, lambda key: data))) == count - 1
    with pytest.raises(read_object.RefusedError, match="holds batch"):
        list(blocks_of({**pointer, "epoch": epoch + 1}, lambda key: data))
    hurt = bytearray(data)
    hurt[offset + 80] ^= 1
    with pytest.raises((read_object.RefusedError, struct.error)):
        list(blocks_of(pointer, lambda key: bytes(hurt)))
