"""The audit of held records: units in pointers, the counts of shards, and blocks that come twice or early."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from memq.audit.account import Fate
from memq.audit.auditor import Auditor
from memq.audit.checks.batch_check import BatchCheck, check_batch
from memq.audit.finding import Kind, Outcome
from memq.audit.held import Sought
from memq.audit.holders import Holders
from memq.audit.minutes import Minutes
from memq.audit.released import UNKNOWN, ReleaseAnswer, ReleasedBlocks, ReleaseFacts, ShardCounts, UnitState
from memq.audit.verdict import Verdict
from memq.errors import CorruptDataError, UnreachableError
from memq.format.held_sequences import (
    HELD_BEGIN,
    TRANSACTIONAL_BEGIN,
    delayed_sequence,
    due_time_of,
    held_minute,
    is_held,
    is_transactional,
    transactional_sequence,
)
from memq.format.pointer import NamedProducer, Pointer, decode_pointer, encode_pointer
from memq.limits import SEQUENCE_END
from memq.notification import Span
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.hold_messages import WireUnits, WireWaiting
from memq.topic import CLOCK_ERROR_MS, Totals
from tests.unit.audited import TOPIC, Run, pointer, stored
from tests.unit.blocks import NOW_MS

SHARD, OTHER = 77, 78
DUE = delayed_sequence(NOW_MS)
BEGUN = transactional_sequence(NOW_MS)
WINDOW_MS = TOPIC.settings.reader_window_ms


def delayed(producer: int, due_ms: int = NOW_MS) -> Run:
    return producer, delayed_sequence(due_ms), delayed_sequence(due_ms) + 1


def unit(number: int, records: int, shard: int = SHARD) -> NamedProducer:
    return NamedProducer(producer=shard, epoch=0, last_sequence=number, records=records)


class Log:
    """An audited log with one partition, whose pointers the test writes."""

    def __init__(self, begin: int = 0, minutes: Minutes | None = None) -> None:
        self.auditor = Auditor(TOPIC, minutes=minutes)
        self.totals = Totals(records=begin)
        self.offset = begin
        self.batches = 0
        self.time_ms = NOW_MS
        self.auditor.open_partition(0, Span(begin, 1_000))

    def batch(self, *runs: Run, units: Sequence[NamedProducer] = (), **fields: Any) -> None:
        made, data = stored(
            runs, **{"named": tuple(units), "sealed_ms": NOW_MS, "batch_sequence": self.batches, **fields}
        )
        made = self._counted(made)
        self.take(made, replace(check_batch(made, made.locations[0], data), faults=()))  # the index has batch 0

    def take(self, made: Pointer, check: BatchCheck) -> None:
        self.batches += 1
        self.auditor.take_batch(0, self.offset, self.time_ms, made, check)
        self._move(made)

    def opened(self, *units: NamedProducer, **fields: Any) -> None:
        made = self._counted(pointer(kind="opened", named=units, **fields))
        self.auditor.take_control(0, self.offset, self.time_ms, made)
        self._move(made)

    def _counted(self, made: Pointer) -> Pointer:
        return decode_pointer(encode_pointer(msgspec.structs.replace(made, totals=self.totals)))

    def _move(self, made: Pointer) -> None:
        self.offset += 1
        self.totals = self.totals.plus(made.records, made.stored_bytes)

    def said(self, *shards: ShardCounts, waiting: int = 0) -> Verdict:
        """Return the verdict after the counts of shards."""
        self.auditor.take_shards(ReleaseAnswer(shards, waiting))
        return self.auditor.verdict(NOW_MS)


def counts(verdict: Verdict) -> dict[Kind, int]:
    return {found.kind: found.count for found in verdict.findings}


# ---- sequences -----------------------------------------------------------------------------------


def test_a_sequence_says_when_a_held_record_is_due_or_its_transaction_began() -> None:
    assert (is_held(HELD_BEGIN - 1), is_held(HELD_BEGIN), is_transactional(DUE), is_transactional(BEGUN)) == (
        *(False, True),
        *(False, True),
    )
    assert (due_time_of(DUE), due_time_of(BEGUN), due_time_of(5)) == (NOW_MS, 0, 0)
    assert (held_minute(DUE), held_minute(BEGUN), held_minute(BEGUN + 512 * 1_024)) == (NOW_MS // 60_000,) * 3
    assert DUE < TRANSACTIONAL_BEGIN <= transactional_sequence(-5) < transactional_sequence(1 << 60) < SEQUENCE_END
    assert delayed_sequence(1 << 62) < TRANSACTIONAL_BEGIN


# ---- blocks that were met ------------------------------------------------------------------------


def test_a_block_that_comes_again_is_a_copy_within_the_window_and_doubled_after_it() -> None:
    blocks = ReleasedBlocks(WINDOW_MS)
    assert blocks.meet(1, DUE, NOW_MS) is Fate.NEW
    assert blocks.meet(1, BEGUN, NOW_MS) is Fate.NEW
    assert blocks.meet(2, DUE, NOW_MS) is Fate.NEW
    assert blocks.meet(1, DUE, NOW_MS + WINDOW_MS) is Fate.COPY
    assert blocks.meet(1, DUE, NOW_MS + 3 * WINDOW_MS) is Fate.DOUBLED
    assert blocks.meet(1, DUE, NOW_MS + 3 * WINDOW_MS) is Fate.COPY


def test_many_blocks_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ReleasedBlocks(WINDOW_MS)
    fates = {blocks.meet(producer * 0x1234_5678_9ABC, DUE, NOW_MS) for producer in range(1, 5_000)}
    again = {blocks.meet(producer * 0x1234_5678_9ABC, DUE, NOW_MS) for producer in range(1, 5_000)}
    assert (fates, again) == ({Fate.NEW}, {Fate.COPY})
    monkeypatch.setattr("memq.audit.released.BLOCKS_KEPT_MAX", 4_999)
    assert [blocks.meet(3, DUE, NOW_MS), blocks.meet(3, DUE, NOW_MS)] == [Fate.NEW, Fate.NEW]


# ---- a whole log ---------------------------------------------------------------------------------


def test_a_topic_with_delayed_and_transactional_records_is_clean() -> None:
    log = Log()
    log.opened()
    log.batch(delayed(1), delayed(2), units=[unit(1, 2)])
    log.batch((9, BEGUN, BEGUN + 4), delayed(3), units=[unit(2, 3), unit(1, 4, OTHER)])
    found = log.said(ShardCounts(0, SHARD, 2, 3, 2, 3), ShardCounts(0, OTHER, 1, 4, 1, 4), waiting=7)
    assert (counts(found), found.outcome) == ({}, Outcome.CLEAN)
    assert (found.coverage.records, found.coverage.held, found.coverage.waiting) == (7, 7, 7)
    assert found.coverage.producers == 0, "they are no producers"
    assert "7 records delayed or of transactions; 7 delayed records not due" in str(found.coverage)


def test_without_an_answer_of_its_shards_the_end_of_held_records_is_unknown() -> None:
    log = Log()
    log.batch(delayed(1), units=[unit(1, 1)])
    assert counts(log.auditor.verdict(NOW_MS)) == {Kind.UNKNOWN: 1}
    log.auditor.take_shards(ReleaseAnswer(error="away"))
    (found,) = log.auditor.verdict(NOW_MS).finding(Kind.UNKNOWN).findings
    assert (found.partition, found.cause) == (0, "its shards did not say how many held records it has: away")
    plain = Log()
    plain.opened()
    assert counts(plain.auditor.verdict(NOW_MS)) == {}


@pytest.mark.parametrize("control", [False, True])
def test_records_that_a_unit_lacks_are_lost(control: bool) -> None:
    log = Log()
    if control:  # no block of the unit could be read
        log.opened(unit(1, 3))
    else:
        log.batch(delayed(1), units=[unit(1, 3)])
    log.batch(delayed(2), units=[unit(2, 4)])
    found = log.said(ShardCounts(0, SHARD, 2, 4, 2, 4))
    assert counts(found) == {Kind.LOST: 3 if control else 2}
    (lost,) = found.finding(Kind.LOST).findings
    there = 0 if control else 1
    assert (lost.offset, lost.cause) == (0, f"units up to 1 of shard {SHARD:016x} have 3 records, {there} are there")


def test_an_empty_first_unit_hides_no_loss_of_the_next_one() -> None:
    """Its count of 0 is known: the batch has no held record. With one, a broker of an earlier release did not count."""
    for first, lost in (((5, 0, 1), 4), (delayed(1), 0)):
        log = Log()
        log.batch(first, units=[unit(1, 0)])
        log.batch(delayed(2), units=[unit(3, 5)])
        assert counts(log.said(ShardCounts(0, SHARD, 3, 5, 3, 5))).get(Kind.LOST, 0) == lost


def test_a_late_pointer_fills_what_was_missing() -> None:
    log = Log()
    log.opened(epoch=2)
    log.batch(delayed(3), units=[unit(3, 3)], epoch=2, batch_sequence=0)
    assert counts(log.said(ShardCounts(0, SHARD, 3, 3, 3, 3))) == {Kind.LOST: 2}
    log.batch(delayed(2), units=[unit(2, 2)], epoch=1, batch_sequence=0)
    assert counts(log.said(ShardCounts(0, SHARD, 3, 3, 3, 3))) == {Kind.LOST: 1}
    log.batch(delayed(1), units=[unit(1, 1)], epoch=1, batch_sequence=1)
    assert counts(log.said(ShardCounts(0, SHARD, 3, 3, 3, 3))) == {}
    log.batch(delayed(2), units=[unit(2, 2)], epoch=2, batch_sequence=1)
    assert log.said().coverage.copies_dropped == 1
    assert counts(log.said()) == {}


def test_a_unit_that_is_done_and_in_no_pointer_is_lost() -> None:
    log = Log()
    log.batch(delayed(1), units=[unit(1, 1)])
    found = log.said(ShardCounts(0, SHARD, 3, 6, 2, 4), ShardCounts(0, OTHER, 1, 5, 1, 5))
    assert counts(found) == {Kind.LOST: 3 + 5, Kind.HELD: 2}
    assert {each.cause for each in found.finding(Kind.LOST).findings} == {
        f"unit 2 of shard {SHARD:016x} is done, and in no pointer",
        f"unit 1 of shard {OTHER:016x} is done, and in no pointer",
    }
    (held,) = found.finding(Kind.HELD).findings
    assert held.cause == f"units up to 3 of shard {SHARD:016x} are on their way"


def test_a_partition_without_any_pointer_lacks_its_done_units() -> None:
    assert counts(Log().said(ShardCounts(0, SHARD, 1, 5, 1, 5))) == {Kind.LOST: 5}
    assert counts(Log(begin=4).said(ShardCounts(0, SHARD, 1, 5, 1, 5))) == {}, "retention may have taken them"


def test_units_before_the_first_pointer_are_not_lost() -> None:
    log = Log(begin=10)
    log.opened(unit(5, 100))
    log.batch(delayed(1), units=[unit(6, 101), unit(9, 50, OTHER)])
    log.batch(delayed(2), units=[unit(10, 52, OTHER)])
    assert counts(log.said(ShardCounts(0, SHARD, 6, 101, 6, 101), ShardCounts(0, 99, 7, 7, 7, 7))) == {Kind.LOST: 1}


def test_an_unreadable_pointer_hides_what_it_may_have() -> None:
    log = Log()
    log.batch(delayed(1), units=[unit(1, 1)])
    log.auditor.take_unreadable(0, log.offset, CorruptDataError("cut"))
    log.offset += 1
    log.batch(delayed(4), units=[unit(4, 4)])
    log.batch(delayed(5), units=[unit(5, 6)])
    assert counts(log.said(ShardCounts(0, SHARD, 5, 6, 5, 6))) == {Kind.POINTER: 1, Kind.LOST: 1}


def test_a_shard_that_does_not_count_proves_nothing() -> None:
    log = Log()
    log.batch(delayed(1), units=[unit(1, 0)])
    log.batch(delayed(2), units=[unit(2, 7)])
    assert counts(log.said(ShardCounts(0, SHARD, 2, 7, 2, 7))) == {}
    log.batch(delayed(3), units=[unit(3, 1)])  # it counts from zero again
    log.batch(delayed(4), units=[unit(4, 2)])
    assert counts(log.said(ShardCounts(0, SHARD, 4, 2, 4, 2))) == {}


# ---- what should not be there --------------------------------------------------------------------


def test_a_record_that_no_shard_released_is_named() -> None:
    log = Log()
    log.batch(delayed(1), (9, BEGUN, BEGUN + 2), units=[unit(1, 1)])
    found = log.said(ShardCounts(0, SHARD, 1, 1, 1, 1))
    assert (counts(found), found.outcome) == ({Kind.UNRELEASED: 2}, Outcome.DAMAGED)
    (wrong,) = found.finding(Kind.UNRELEASED).findings
    assert (wrong.offset, wrong.cause) == (0, "2 more held records than their shards have released")
    restored = Log()
    restored.batch(delayed(1))
    assert counts(restored.said()) == {}, "a restored pointer names no unit"


def test_a_record_that_comes_twice_after_the_window_is_doubled() -> None:
    log = Log()
    log.batch(delayed(1), units=[unit(1, 1)])
    log.batch(delayed(1), delayed(2), units=[unit(2, 3)])
    assert counts(log.said(ShardCounts(0, SHARD, 2, 3, 2, 3))) == {}, "readers drop it"
    log.time_ms += 3 * WINDOW_MS
    log.batch(delayed(1), units=[unit(3, 4)])
    found = log.said(ShardCounts(0, SHARD, 3, 4, 3, 4))
    assert counts(found) == {Kind.DOUBLED: 1}
    (wrong,) = found.finding(Kind.DOUBLED).findings
    assert (wrong.producer, wrong.ranges) == (1, ((DUE, DUE + 1),))


@pytest.mark.parametrize("late_ms", [0, 1])
def test_a_record_before_its_due_time_is_early(late_ms: int) -> None:
    log = Log()
    due_ms = NOW_MS + CLOCK_ERROR_MS + 1 - late_ms
    log.batch(delayed(1, due_ms), (9, BEGUN, BEGUN + 1), units=[unit(1, 2)])
    log.batch(delayed(2, due_ms), units=[unit(2, 3)], sealed_ms=0)
    found = log.said(ShardCounts(0, SHARD, 2, 3, 2, 3))
    assert counts(found) == ({Kind.EARLY: 1} if not late_ms else {})
    for wrong in found.finding(Kind.EARLY).findings:
        assert (wrong.producer, wrong.cause) == (1, f"in the log {CLOCK_ERROR_MS + 1} ms before it is due")
        assert found.outcome is Outcome.DAMAGED


def test_a_damaged_block_of_a_unit_is_corrupt_and_not_lost() -> None:
    log = Log()
    made, data = stored([delayed(1), delayed(2)], named=(unit(1, 2),), sealed_ms=NOW_MS)
    broken = bytearray(data)
    broken[100] ^= 1
    log.take(made, check_batch(made, made.locations[0], bytes(broken)))
    found = log.said(ShardCounts(0, SHARD, 1, 2, 1, 2))
    assert counts(found)[Kind.CORRUPT] == 1
    assert Kind.LOST not in counts(found)


def test_the_table_has_one_row_for_all_held_records_of_a_partition() -> None:
    minutes = Minutes()
    log = Log(minutes=minutes)
    log.batch(delayed(1), delayed(2), (9, BEGUN, BEGUN + 4), units=[unit(1, 6)])
    log.batch(delayed(1), units=[unit(1, 6)])
    rows = minutes.take_rows()
    assert list(rows) == [((0, 0), NOW_MS // 60_000 * 60_000)]
    (row,) = rows.values()
    assert (row.side("")["sent"], row.side("")["delivered"], row.side("")["copies"]) == (6, 6, 1)
    log.batch(delayed(3), units=[unit(2, 9)])
    ((partition, short),) = log.auditor.shortfalls()
    assert (partition, short.records, short.time_ms) == (0, 2, NOW_MS)
    minutes.lose(partition, short.time_ms, short.records)
    (row,) = minutes.settle(log.auditor.balances(NOW_MS)).values()
    assert [row.side("")[name] for name in ("sent", "delivered", "lost")] == [3, 1, 2]


# ---- the question --------------------------------------------------------------------------------


class Brokers:
    """Answers questions about held records."""

    def __init__(self, answer: AdminAnswer | Exception) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def __call__(self, api: Any, request: AdminRequest, kind: Any, *, timeout_s: float) -> AdminAnswer:
        self.asked.append(request.ask)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_an_owner_that_states_no_counts_for_a_known_unit_changes_nothing() -> None:
    """Its `opened` is of an earlier release. The next unit is counted from the last statement."""
    facts = ReleaseFacts(begun=True)
    assert facts.meet(pointer(kind="opened", named=(unit(3, 5),)), whole=True) == 5
    assert facts.meet(pointer(kind="opened", named=(unit(3, 0),)), whole=True) == 0
    assert facts.meet(pointer(kind="opened", named=(unit(4, 7),)), whole=True) == 2


def test_a_copy_of_a_later_batch_brings_no_missing_records() -> None:
    """A late pointer does, if its unit is one of those that were missing."""
    facts = ReleaseFacts(begun=True)
    first, third, second = (pointer(kind="data", named=(unit(*each),)) for each in ((1, 3), (3, 9), (2, 6)))
    assert facts.compare(first, 0, NOW_MS, facts.meet(first, whole=True), 3) == 0
    assert facts.compare(third, 1, NOW_MS, facts.meet(third, whole=True), 3) == 0
    for copy in (first, third):
        assert facts.awaited_with(copy) == 0
        assert facts.compare(copy, 2, NOW_MS, facts.meet(copy, whole=True), 3) == 3
    assert [each.records for each in facts.short] == [3]
    assert facts.awaited_with(second) == 3
    assert facts.compare(second, 4, NOW_MS, facts.meet(second, whole=True), 3) == 0
    assert facts.short == []


def test_units_that_pointers_name_are_not_on_their_way_also_without_counts() -> None:
    facts = ReleaseFacts({SHARD: UnitState(3, UNKNOWN)})
    assert facts.pending(ShardCounts(0, SHARD, released=3, released_records=9, done=1, done_records=4)) == 0
    assert facts.pending(ShardCounts(0, SHARD, released=4, released_records=9, done=1, done_records=4)) == 5


def test_shards_are_asked_for_their_units() -> None:
    units = WireUnits(shard=f"{SHARD:016x}", released=5, released_records=9, done=4, done_records=8, dropped=2)
    answer = AdminAnswer(
        waiting=[
            WireWaiting(partition=0, blocks=3, next_ms=70, units=units),
            WireWaiting(partition=0, blocks=1, next_ms=60),
            WireWaiting(partition=1, blocks=0, next_ms=0),
        ]
    )
    brokers = Brokers(answer)
    holders = Holders(cast(Any, None), cast(Any, brokers))
    said = asyncio.run(holders.ask_released(TOPIC))
    assert said == ReleaseAnswer((ShardCounts(0, SHARD, 5, 9, 4, 8, 2),), waiting=4, next_ms={0: 60})
    (asked,) = brokers.asked
    assert (asked.topic, asked.topic_id, asked.undelivered, asked.units) == ("clicks", TOPIC.id, True, True)
    by_live = asyncio.run(holders.ask(TOPIC, [Sought(0, 0, ())]))
    assert (by_live.released, by_live.answered) == (said, frozenset()), "no other question is asked"
    assert len(brokers.asked) == 2
    away = Holders(cast(Any, None), cast(Any, Brokers(UnreachableError("away"))))
    assert asyncio.run(away.ask_released(TOPIC)).error == "away"


def test_one_part_of_several_has_what_waits() -> None:
    answer = ReleaseAnswer((ShardCounts(0, 1, 1, 1, 1, 1), ShardCounts(3, 1, 1, 1, 1, 1)), waiting=5)
    assert answer.of([0, 1], first=True) == ReleaseAnswer(answer.shards[:1], waiting=5)
    assert answer.of([3], first=False) == ReleaseAnswer(answer.shards[1:])
