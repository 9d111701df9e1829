"""An audit in parts has the findings of one audit of all, and checks survive pickling between processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memq.audit.auditor import Auditor
from memq.audit.checks.batch_check import (
    BatchCheck,
    BlockCheck,
    CheckedEntry,
    check_batch,
    decode_checked,
    encode_checked,
    missing_batch,
)
from memq.audit.finding import Kind
from memq.audit.verdict import Verdict, merge_verdicts
from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError, UnreachableError
from memq.format.pointer import Pointer, ProducerEnd, encode_pointer
from memq.notification import Entry, Span
from tests.unit.audited import TOPIC, data_pointer, pointer, stored

NOW_MS = 1_800_000_000_000
PARTITIONS = 3
Events = dict[int, list[tuple[Pointer | None, BatchCheck | None]]]  # None: a pointer that can't be read


def sound(runs: list[tuple[int, int, int]], key: str) -> BatchCheck:
    """Return the check of a batch whose blocks are all well."""
    return BatchCheck(key, tuple(BlockCheck(number, *run) for number, run in enumerate(runs)))


def draw_events(draw: random.Random) -> Events:
    """Return pointers and checks of three read partitions, with holes, copies, damage, and tails that are open."""
    events: Events = {partition: [] for partition in range(PARTITIONS)}
    for partition in events:
        numbers = 0
        for producer in range(1, 5):
            for first in range(0, 40, 4):
                if draw.random() < 0.1:
                    continue  # lost, or its batch is
                run = (producer, first, first + draw.choice([4, 4, 4, 6]))
                named = data_pointer([run], partition=partition, batch_sequence=numbers)
                numbers += draw.choice([1, 1, 1, 2])
                cause = draw.choice([None] * 6 + [CorruptDataError("damaged"), UnreachableError("no answer")])
                location = named.locations[0]
                check = missing_batch(named, location, cause) if cause else sound([run], location.key)
                events[partition].append((named, check))
                if draw.random() < 0.1:
                    events[partition].append((None, None))
            if draw.random() < 0.5:
                end = ProducerEnd(producer=producer, next_sequence=40, acks=2)
                events[partition].append((pointer(partition=partition, kind="opened", ended=(end,)), None))
    return events


def audited(events: Events, partitions: list[int]) -> Verdict:
    """Return the verdict of one auditor that takes these partitions."""
    auditor = Auditor(TOPIC)
    for partition in partitions:
        auditor.open_partition(partition, Span(0, len(events[partition])))
        for offset, (named, check) in enumerate(events[partition]):
            body = b"no pointer" if named is None else encode_pointer(named)
            sizes = () if check is None else (100 + offset,)
            checked = CheckedEntry(Entry(offset, NOW_MS, body), named, check, sizes)
            auditor.take(partition, decode_checked(encode_checked(checked)))
    return auditor.verdict(NOW_MS)


@pytest.mark.parametrize("seed", range(20))
def test_the_verdicts_of_parts_make_that_of_the_whole(seed: int) -> None:
    events = draw_events(random.Random(seed))
    whole = audited(events, list(events))
    assert {Kind.CORRUPT, Kind.POINTER, Kind.IN_FLIGHT} & {finding.kind for finding in whole.findings}
    assert merge_verdicts([audited(events, [partition]) for partition in events]) == whole


def test_checks_survive_their_way() -> None:
    named, data = stored([(5, 0, 3), (6, 0, 3)])
    damaged = bytearray(data)
    damaged[80] ^= 1
    location = named.locations[0]
    checks = [
        check_batch(named, location, data),
        check_batch(named, location, bytes(damaged)),
        missing_batch(named, location, UnreachableError("no answer")),
    ]
    for check in checks:
        sent = CheckedEntry(Entry(7, NOW_MS, encode_pointer(named)), named, check, (len(data),))
        back = decode_checked(encode_checked(sent))
        assert (back.entry, back.pointer, back.object_bytes) == (sent.entry, named, (len(data),))
        assert back.check is not None
        assert (back.check.key, back.check.faults, back.check.complete) == (check.key, check.faults, check.complete)
        assert [facts(block) for block in back.check.blocks] == [facts(block) for block in check.blocks]


def facts(block: BlockCheck) -> tuple[object, ...]:
    return (block.number, block.producer, block.first, block.next, str(block.cause), block.unread)


def test_entries_without_a_pointer_survive_their_way() -> None:
    gone = CheckedEntry(Entry(3, 0, b""), error=NotFoundError("retention removed pointers 3 to 4 while the audit ran"))
    back = decode_checked(encode_checked(gone))
    assert (back.expired, back.entry, str(back.error)) == (True, gone.entry, str(gone.error))
    broken = decode_checked(encode_checked(CheckedEntry(Entry(3, 0, b""), error=CorruptDataError("cut"))))
    assert isinstance(broken.error, CorruptDataError)
    assert not broken.expired


def test_verdicts_of_several_topics_are_not_merged() -> None:
    part = audited({0: []}, [0])
    for parts in ([], [part, replace(part, topic="views")]):
        with pytest.raises(InvalidRequestError, match="of one topic"):
            merge_verdicts(parts)
