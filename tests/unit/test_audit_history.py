"""Random histories with known faults: the verdict names exactly these."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from memq.audit.auditor import Auditor
from memq.audit.checks.batch_check import BatchCheck, BlockCheck
from memq.audit.finding import Kind, Outcome
from memq.audit.verdict import Verdict
from memq.errors import CorruptDataError, StoreError, UnsupportedFormatError
from memq.format.pointer import Adopted, ProducerEnd
from memq.format.ranges import Range, RangeSet
from memq.notification import Span
from memq.topic import CLOCK_ERROR_MS, Totals
from tests.unit.audited import KEY, TOPIC, data_pointer, pointer

NOW_MS = 1_000_000_000_000
LATE_MS = TOPIC.settings.stale_publish_ms + CLOCK_ERROR_MS  # what is older is refused by the queue
LONG_MS = 10 * TOPIC.settings.dedup_window_ms
DEEDS = ("keep", "keep", "keep", "drop", "burn", "corrupt", "unread", "copy", "late copy", "overlap")


@dataclass(slots=True)
class Deeds:
    """What was done to one producer, sequence by sequence: the oracle counts them one by one."""

    delivered: set[int] = field(default_factory=set)
    doubled: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    burned: set[int] = field(default_factory=set)
    copies: int = 0
    end: int = 0
    closes: bool = True

    @property
    def missing(self) -> set[int]:
        reach = self.end if self.closes else max(self.delivered | self.corrupt | self.unread, default=-1) + 1
        burned = self.burned if self.closes else set()
        return set(range(reach)) - self.delivered - burned - self.corrupt - self.unread


def ranges_of(sequences: set[int]) -> tuple[Range, ...]:
    return tuple(RangeSet((number, number + 1) for number in sorted(sequences)))


class History:
    """Feeds an auditor and keeps the books next to it, in sets."""

    def __init__(self) -> None:
        self.auditor = Auditor(TOPIC)
        self.auditor.open_partition(0, Span(0, 1 << 20))
        self.deeds: dict[int, Deeds] = {}
        self.later: list[tuple[int, int, int]] = []
        self.offset = self.batch = 0
        self.time_ms = NOW_MS

    def put(self, producer: int, first: int, next_: int, cause: Exception | None = None) -> None:
        error = cause if isinstance(cause, CorruptDataError | StoreError) else None
        check = BatchCheck(KEY, (BlockCheck(0, producer, first, next_, error),))
        named = data_pointer([(producer, first, next_)], batch_sequence=self.batch)
        self.auditor.take_batch(0, self.offset, self.time_ms, named, check)
        self.offset, self.batch, self.time_ms = self.offset + 1, self.batch + 1, self.time_ms + 1

    def do(self, deed: str, producer: int, first: int, next_: int) -> None:
        books = self.deeds.setdefault(producer, Deeds())
        sequences = set(range(first, next_))
        books.end = next_
        if deed == "drop":
            return
        if deed == "burn":
            books.burned |= sequences
            return
        if deed in ("corrupt", "unread"):
            self.put(producer, first, next_, CorruptDataError("flipped") if deed == "corrupt" else StoreError("away"))
            (books.corrupt if deed == "corrupt" else books.unread).update(sequences)
            return
        if deed == "overlap" and first - 1 in books.delivered:
            first -= 1
            books.doubled.add(first)
        self.put(producer, first, next_)
        books.delivered |= sequences
        if deed == "copy":
            self.put(producer, first, next_)
            books.copies += len(sequences)
        if deed == "late copy":
            self.later.append((producer, first, next_))
            books.doubled |= sequences

    def finish(self) -> Verdict:
        self.time_ms += LONG_MS
        for late in self.later:
            self.put(*late)
        for producer, books in self.deeds.items():
            if books.closes:
                end = ProducerEnd(producer=producer, next_sequence=books.end, burned=ranges_of(books.burned), acks=2)
                self.auditor.take_control(0, self.offset, self.time_ms, pointer(kind="ended", ended=(end,)))
                self.offset += 1
        return self.auditor.verdict(self.time_ms + LONG_MS)


steps = st.tuples(st.sampled_from(DEEDS), st.integers(1, 3), st.integers(1, 4))


@given(st.lists(steps, min_size=1, max_size=40), st.sets(st.integers(1, 3)))
@settings(max_examples=400, deadline=None)
def test_the_verdict_names_exactly_what_was_done(history: list[tuple[str, int, int]], silent: set[int]) -> None:
    world = History()
    for deed, producer, count in history:
        first = world.deeds[producer].end if producer in world.deeds else 0
        world.do(deed, producer, first, first + count)
    for producer in silent & set(world.deeds):
        world.deeds[producer].closes = False
    verdict = world.finish()
    balances = {balance.producer: balance for balance in verdict.balances}
    for producer, books in world.deeds.items():
        balance = balances.get(producer)
        if balance is None:
            assert not books.closes, "only a producer that left no trace is unknown"
            assert not books.delivered | books.corrupt | books.unread
            continue
        missing = ranges_of(books.missing)
        assert balance.delivered == len(books.delivered)
        assert balance.doubled == ranges_of(books.doubled)
        assert balance.corrupt == ranges_of(books.corrupt)
        assert balance.unread == ranges_of(books.unread)
        assert (balance.lost, balance.unproven) == ((missing, ()) if books.closes else ((), missing))
        assert balance.copies == books.copies
    check_findings(verdict, list(world.deeds.values()))


def check_findings(verdict: Verdict, deeds: list[Deeds]) -> None:
    lost = sum(len(books.missing) for books in deeds if books.closes)
    doubled = sum(len(books.doubled) for books in deeds)
    assert verdict.finding(Kind.LOST).count == lost
    assert verdict.finding(Kind.DOUBLED).count == doubled
    wrong = [Outcome.LOST] * bool(lost) + [Outcome.DAMAGED] * any(books.corrupt for books in deeds)
    wrong += [Outcome.DOUBLED] * bool(doubled)
    if wrong:
        assert verdict.outcome is wrong[0]
        assert not verdict.passed
    else:
        traces = [books for books in deeds if books.delivered or books.unread]
        open_ = any(books.unread or not books.closes for books in traces)
        assert verdict.outcome is (Outcome.INCOMPLETE if open_ else Outcome.CLEAN)
        assert verdict.passed


def test_holes_in_batch_sequences_are_found_in_every_epoch() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(0, 10))
    check = BatchCheck(KEY, ())
    for offset, (epoch, batch) in enumerate([(1, 1), (1, 3), (2, 0), (2, 1)]):
        auditor.take_batch(0, offset, NOW_MS, data_pointer([(5, 0, 1)], epoch=epoch, batch_sequence=batch), check)
    verdict = auditor.verdict(NOW_MS)
    causes = [finding.cause for finding in verdict.finding(Kind.BATCH_HOLE).findings]
    assert causes == ["epoch 1 has no pointer of batch 0", "epoch 1 has no pointer of batch 2"]
    assert verdict.outcome is Outcome.DAMAGED


def test_retention_explains_what_lies_before_the_first_pointer_and_nothing_else() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(7, 10))
    for batch, first in ((2, 20), (4, 40), (5, 50), (7, 70)):  # the first one may be a copy of what retention took
        pointer_ = data_pointer([(5, first, first + 10)], batch_sequence=batch, totals=Totals(first, 1))
        check = BatchCheck(KEY, (BlockCheck(0, 5, first, first + 10),))
        auditor.take_batch(0, 5 + batch, NOW_MS + batch * LATE_MS, pointer_, check)
    end = ProducerEnd(producer=5, next_sequence=80, acks=2)
    auditor.take_control(0, 13, NOW_MS + 8 * LATE_MS, pointer(kind="ended", ended=(end,)))
    verdict = auditor.verdict(NOW_MS)
    assert verdict.finding(Kind.LOST).count == 10
    assert (verdict.finding(Kind.BATCH_HOLE).count, verdict.coverage.expired) == (1, 30)


def test_records_between_late_copies_of_expired_ones_are_not_missing() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(7, 10))
    for batch in (2, 4, 7):
        pointer_ = data_pointer([(5, batch, batch + 1)], batch_sequence=batch, totals=Totals(batch, 1))
        auditor.take_batch(0, 5 + batch, NOW_MS, pointer_, BatchCheck(KEY, (BlockCheck(0, 5, batch, batch + 1),)))
    end = ProducerEnd(producer=5, next_sequence=8, acks=2)
    auditor.take_control(0, 13, NOW_MS, pointer(kind="ended", ended=(end,)))
    verdict = auditor.verdict(NOW_MS)
    assert (verdict.outcome, verdict.coverage.expired) == (Outcome.CLEAN, 5)


def test_totals_show_a_batch_whose_pointer_is_gone_without_any_other_trace() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(0, 3))
    auditor.take_batch(0, 0, NOW_MS, data_pointer([(5, 0, 3)]), BatchCheck(KEY, (BlockCheck(0, 5, 0, 3),)))
    for offset in (1, 2):
        auditor.take_control(0, offset, NOW_MS, pointer(kind="opened", epoch=1 + offset, totals=Totals(7, 1)))
    found = auditor.verdict(NOW_MS).finding(Kind.TOTALS)
    assert (found.count, [finding.offset for finding in found.findings]) == (4, [1]), "told once"


def test_totals_that_come_late_or_behind_an_unreadable_pointer_are_no_finding() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(9, 14))
    auditor.take_control(0, 9, NOW_MS, pointer(kind="opened", totals=Totals(100, 1)))
    auditor.take_batch(0, 10, NOW_MS, data_pointer([(5, 0, 3)], totals=Totals(100, 1)), BatchCheck(KEY, ()))
    auditor.take_control(0, 11, NOW_MS, pointer(kind="opened", epoch=2, totals=Totals(100, 1)))  # had not met it
    late = Adopted(offset=4, epoch=1, batch_sequence=0, records=5, bytes=1)
    auditor.take_control(0, 12, NOW_MS, pointer(kind="opened", epoch=3, totals=Totals(108, 1), adopted=(late,)))
    auditor.take_unreadable(0, 13, CorruptDataError("cut"))
    auditor.take_control(0, 14, NOW_MS, pointer(kind="closed", epoch=3, totals=Totals(200, 1)))
    assert not auditor.verdict(NOW_MS).finding(Kind.TOTALS).count


def test_an_epoch_that_began_behind_the_first_pointer_must_begin_at_batch_0() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(7, 9))
    for offset, (epoch, batch) in enumerate([(3, 8), (4, 1)], 7):
        named = data_pointer([(5, 0, 1)], epoch=epoch, batch_sequence=batch, totals=Totals(9, 1))
        auditor.take_batch(0, offset, NOW_MS + 2 * offset * LATE_MS, named, BatchCheck(KEY, ()))
    (finding,) = auditor.verdict(NOW_MS).finding(Kind.BATCH_HOLE).findings
    assert finding.cause == "epoch 4 has no pointer of batch 0"


def test_an_unread_batch_whose_producers_are_not_all_named_leaves_nothing_lost_for_sure() -> None:
    end = pointer(kind="ended", ended=(ProducerEnd(producer=5, next_sequence=9, acks=2),))
    for complete, kind in ((True, Kind.LOST), (False, Kind.HOLE)):
        auditor = Auditor(TOPIC)
        auditor.open_partition(0, Span(0, 2))
        check = BatchCheck(KEY, (BlockCheck(0, 5, 0, 4, StoreError("away")),), complete=complete)
        auditor.take_batch(0, 0, NOW_MS, data_pointer([(5, 0, 4)]), check)
        auditor.take_control(0, 1, NOW_MS, end)
        assert auditor.verdict(NOW_MS).finding(kind).count == 5


def test_a_pointer_of_another_topic_is_a_contradiction() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(0, 1))
    auditor.take_control(0, 0, NOW_MS, pointer(kind="opened", topic_id="f" * 32))
    assert auditor.verdict(NOW_MS).finding(Kind.FAULT).count == 1


def test_totals_prove_that_retention_took_nothing() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(1, 3))  # an old `opened` was trimmed, no batch
    named = data_pointer([(5, 10, 20)], batch_sequence=0)
    auditor.take_batch(0, 1, NOW_MS, named, BatchCheck(KEY, (BlockCheck(0, 5, 10, 20),)))
    auditor.take_control(
        0, 2, NOW_MS, pointer(kind="ended", ended=(ProducerEnd(producer=5, next_sequence=20, acks=2),))
    )
    verdict = auditor.verdict(NOW_MS)
    assert (verdict.finding(Kind.LOST).count, verdict.coverage.expired) == (10, 0)


def test_an_unreadable_pointer_is_damage_and_a_newer_one_makes_losses_unproven() -> None:
    end = pointer(kind="ended", ended=(ProducerEnd(producer=5, next_sequence=20, acks=2),))
    for error, kind, outcome in (
        (CorruptDataError("cut"), Kind.POINTER, Outcome.LOST),
        (UnsupportedFormatError("newer"), Kind.UNREAD, Outcome.INCOMPLETE),
    ):
        auditor = Auditor(TOPIC)
        auditor.open_partition(0, Span(0, 2))
        auditor.take_unreadable(0, 0, error)
        auditor.take_control(0, 1, NOW_MS, end)
        verdict = auditor.verdict(NOW_MS)
        assert verdict.finding(kind).count == 1
        assert verdict.outcome is outcome


def test_blocks_that_pointers_skip_are_copies() -> None:
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(0, 2))
    auditor.take_batch(0, 0, NOW_MS, data_pointer([(5, 0, 4)]), BatchCheck(KEY, (BlockCheck(0, 5, 0, 4),)))
    blocks = (BlockCheck(0, 5, 0, 4), BlockCheck(1, 5, 4, 6))
    named = data_pointer([(5, 0, 6)], batch_sequence=1, skip=(0,))
    auditor.take_batch(0, 1, NOW_MS + LONG_MS, named, BatchCheck(KEY, blocks))
    verdict = auditor.verdict(NOW_MS + LONG_MS)
    assert (verdict.coverage.copies_dropped, verdict.coverage.records, verdict.coverage.blocks) == (4, 6, 3)
    assert not verdict.finding(Kind.DOUBLED).count


def test_json_names_producers_in_hex_and_counts_exactly() -> None:
    world = History()
    world.do("drop", 0xAB, 0, 3)
    world.do("keep", 0xAB, 3, 4)
    report = json.loads(json.dumps(world.finish().to_json()))
    assert report["verdict"] == "lost"
    assert report["findings"] == [
        {
            "kind": "lost",
            "count": 3,
            "unit": "record",
            "places": [{"partition": 0, "producer": "00000000000000ab", "first": 0, "next": 3}],
        }
    ]
    assert report["producers"][0]["lost"] == {"records": 3, "ranges": [[0, 3]]}
    assert report["coverage"]["partitions"] == [
        {"partition": 0, "begin": 0, "end": 1 << 20, "pointers": 2, "error": ""}
    ]
