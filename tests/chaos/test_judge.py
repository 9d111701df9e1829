"""The judge of a chaos run finds what is lost, changed, misplaced, out of order, delivered or committed twice."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.chaos.journal import Journal, lines_of, value_of
from tests.chaos.judge import (
    Acks,
    GroupRules,
    LogRules,
    Record,
    Verdict,
    blocks_of,
    check_once,
    read_journals,
    read_object,
)
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


def test_what_was_not_acked_may_be_missing_and_out_of_order() -> None:
    assert judged([records(2, 3), records(0, 1)], acked=(2, 4)) == []


def committed(*lines: str) -> list[str]:
    verdict, acks = Verdict(), Acks()
    acks.ranges[PLACE].append((0, 4))
    acks.workers[PRODUCER] = "all-1"
    group = GroupRules(verdict, "member")
    group.take("member-1.0", [line.split(" ") for line in lines])
    group.finish(acks)
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


def test_a_reader_that_gets_a_record_twice_is_found() -> None:
    verdict = Verdict()
    check_once(verdict, "reader", [["D", "all", "0", "0:1:0", "0:2:0", "all-1:0-3"]])
    assert verdict.findings == []
    check_once(verdict, "reader", [["D", "all", "0", "0:1:0", "0:2:0", "all-1:0-3", "all-1:2-4"]])
    assert verdict.findings == ["reader: ('all', 0, 'all-1') delivered twice: [2, 3]"]


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
