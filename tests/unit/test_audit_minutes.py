"""The table by minute adds up to the verdict, and dates a missing record by the pointer that showed it."""

from __future__ import annotations

import random

import pytest

from memq.audit.auditor import Auditor
from memq.audit.checks.batch_check import BatchCheck, BlockCheck, CheckedEntry, missing_batch
from memq.audit.minutes import COUNTS, MINUTE_MS, QUEUE, WORDS, MinuteRow, Minutes, watermark_ms
from memq.errors import CorruptDataError, UnreachableError
from memq.format.pointer import Pointer, ProducerEnd, encode_pointer
from memq.notification import Entry, Span
from memq.topic import Position, TopicSettings
from tests.unit.audited import TOPIC, data_pointer, pointer

BEGIN_MS = 30_000_000 * MINUTE_MS
Step = tuple[int, Pointer, BatchCheck | None]  # minute


def batch(minute: int, *runs: tuple[int, int, int], cause: Exception | None = None, epoch: int = 1) -> Step:
    """Return a batch with a block for each run (producer, first, next); all of them have the cause."""
    named = data_pointer(list(runs), epoch=epoch)
    location = named.locations[0]
    if isinstance(cause, CorruptDataError | UnreachableError):
        return minute, named, missing_batch(named, location, cause)
    return minute, named, BatchCheck(location.key, tuple(BlockCheck(at, *run) for at, run in enumerate(runs)))


def ended(minute: int, producer: int, next_: int) -> Step:
    end = ProducerEnd(producer=producer, next_sequence=next_, acks=2)
    return minute, pointer(kind="ended", ended=(end,)), None


def opened(minute: int, epoch: int) -> Step:
    return minute, pointer(kind="opened", epoch=epoch), None


def counted(steps: list[Step], now_minute: int = 1_000, **committed: Position | None) -> dict[str, MinuteRow]:
    """Return the rows of an audit of these steps by `producer@minute`, added up and held against the balances."""
    minutes = Minutes({0: committed})
    auditor = Auditor(TOPIC, minutes=minutes)
    auditor.open_partition(0, Span(0, len(steps)))
    taken = []
    for offset, (minute, named, check) in enumerate(steps):
        entry = Entry(offset, BEGIN_MS + minute * MINUTE_MS + 7, encode_pointer(named))
        auditor.take(0, CheckedEntry(entry, named, check))
        taken += [minutes.take_rows()] if offset % 3 == 0 else []
    balances = auditor.balances(BEGIN_MS + now_minute * MINUTE_MS)
    taken.append(minutes.settle(balances))
    assert not len(minutes)
    total, rows = MinuteRow(), dict[str, MinuteRow]()
    for key, row in ((key, row) for each in taken for key, row in each.items()):
        (_, producer), minute_ms = key
        rows.setdefault(f"{producer}@{(minute_ms - BEGIN_MS) // MINUTE_MS}", MinuteRow()).add(row)
        total.add(row)
    for kind in ("lost", "corrupt", "doubled", "unread"):
        report = sum(next_ - first for balance in balances for first, next_ in getattr(balance, kind))
        assert total.side(QUEUE)[kind] == report
    unproven = sum(next_ - first for balance in balances for first, next_ in balance.unproven)
    assert total.side(QUEUE)["in_flight"] + total.side(QUEUE)["unknown"] == unproven
    assert total.side(QUEUE)["delivered"] == sum(balance.delivered for balance in balances)
    return rows


def counts_of(row: MinuteRow) -> dict[str, int]:
    return row.side(QUEUE).counts


def test_missing_records_are_dated_by_the_pointer_that_showed_them() -> None:
    rows = counted([batch(0, (5, 0, 4)), batch(2, (5, 6, 10)), ended(3, 5, 13)])
    assert {name: counts_of(row) for name, row in rows.items()} == {
        "5@0": {"sent": 4, "delivered": 4},
        "5@2": {"sent": 6, "delivered": 4, "lost": 2},
        "5@3": {"sent": 3, "lost": 3},
    }


def test_a_late_batch_fills_its_hole() -> None:
    steps = [batch(0, (5, 0, 4)), opened(1, 2), batch(1, (5, 8, 10), epoch=2), batch(3, (5, 4, 8)), ended(4, 5, 10)]
    rows = counted(steps)
    assert counts_of(rows["5@3"]) == {"sent": 4, "delivered": 4, "late": 4}
    assert counts_of(rows["5@1"]) == {"sent": 2, "delivered": 2}


def test_damage_and_what_could_not_be_read_are_dated_where_they_were_met() -> None:
    steps = [
        batch(0, (5, 0, 4), cause=CorruptDataError("flipped")),
        batch(1, (5, 4, 6), cause=UnreachableError("no answer")),
        batch(2, (5, 6, 8)),
    ]
    rows = counted(steps)
    assert counts_of(rows["5@0"]) == {"sent": 4, "corrupt": 4}
    assert counts_of(rows["5@1"]) == {"sent": 2, "unread": 2}


def test_copies_and_doubles_are_counted_where_they_came() -> None:
    window = TOPIC.settings.dedup_window_ms // MINUTE_MS
    steps = [batch(0, (5, 0, 4)), batch(1, (5, 0, 4)), batch(20 * window, (5, 0, 4)), ended(20 * window, 5, 4)]
    rows = counted(steps)
    assert counts_of(rows["5@0"]) == {"sent": 4, "delivered": 4}
    assert counts_of(rows["5@1"]) == {"copies": 4}
    assert counts_of(rows[f"5@{20 * window}"]) == {"doubled": 4}


@pytest.mark.parametrize(("now", "kind"), [(1, "in_flight"), (1_000, "unknown")])
def test_an_open_tail_is_in_flight_first_and_unknown_later(now: int, kind: str) -> None:
    rows = counted([batch(0, (5, 0, 4)), batch(0, (5, 6, 8))], now_minute=now)
    assert counts_of(rows["5@0"]) == {"sent": 8, "delivered": 6, kind: 2}


def test_groups_have_processed_what_lies_before_their_positions() -> None:
    steps = [batch(0, (5, 0, 4), (6, 0, 3)), batch(1, (5, 4, 8))]
    rows = counted(steps, a=Position(0, 0, 5), b=None, c=Position(0, 1, 2), d=Position(0, 9))
    done = {name: [row.side(group)["processed"] for group in "abcd"] for name, row in rows.items()}
    assert done == {"5@0": [4, 0, 4, 4], "6@0": [1, 0, 3, 3], "5@1": [0, 0, 2, 4]}


@pytest.mark.parametrize("seed", range(20))
def test_the_table_adds_up_to_the_balances(seed: int) -> None:
    """`counted` compares the sums."""
    draw = random.Random(seed)
    steps: list[Step] = []
    for minute in range(60):
        runs = [(producer, first := draw.randrange(0, 80, 4), first + 4) for producer in draw.sample(range(1, 4), 2)]
        cause = draw.choice([None] * 6 + [CorruptDataError("flipped"), UnreachableError("no answer")])
        steps.append(batch(minute, *runs, cause=cause, epoch=draw.choice([1, 1, 2])))
    steps += [ended(60, producer, 90) for producer in draw.sample(range(1, 4), 2)]
    counted(steps, a=Position(0, 30))


def test_words_and_watermark() -> None:
    assert set(COUNTS) >= set(WORDS)
    settings = TopicSettings()
    assert watermark_ms(settings, 10**12) == 10**12 - 120_000 - 30_000 - 20_000
