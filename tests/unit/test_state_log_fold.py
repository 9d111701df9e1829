"""Which entries of a state log count (S1), and where an opener begins (S2, S7)."""

from __future__ import annotations

import random

import pytest

from memq.errors import EpochFencedError, LogLostError, UnsupportedFormatError
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.notification import Entry
from memq.state_log.fold import Judgement, StateFold
from memq.state_log.opening import LogScan, check_opened
from tests.model.state_log import machines

COUNTS, VOID, GAP = Judgement.COUNTS, Judgement.VOID, Judgement.GAP


def opened(epoch: int, nonce: int = 1) -> StateEntry:
    return StateEntry(epoch, 0, OpenedState(nonce, "b"))


def claim(epoch: int, number: int, request: int = 1, slot: int = 0) -> StateEntry:
    return StateEntry(epoch, number, StateDecisions((StateDecision("slots", bytes((slot, request))),)))


def named(epoch: int, number: int, offset: int, state: tuple[int, int]) -> StateEntry:
    """Return the entry of a snapshot below `offset`; `state` is its epoch and next number."""
    return StateEntry(epoch, number, StateSnapshot(offset, state[1], state[0], 1, 0, 1, f"{epoch}-{offset}"))


def judged(entries: list[StateEntry]) -> list[Judgement]:
    fold = StateFold(machines())
    return [fold.meet(offset, entry).judgement for offset, entry in enumerate(entries)]


def scan_of(entries: list[StateEntry], begin: int = 0, holes: frozenset[int] = frozenset()) -> LogScan:
    scan = LogScan(begin)
    for offset, entry in enumerate(entries):
        if offset >= begin and offset not in holes:
            scan.add(Entry(offset, 0, encode_state_entry(entry)), entry)
    return scan


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([opened(1), claim(1, 0), claim(1, 1)], [COUNTS] * 3),
        ([opened(1), claim(1, 0), claim(1, 0)], [COUNTS, COUNTS, VOID]),
        ([opened(1), claim(1, 1), claim(1, 0)], [COUNTS, GAP, COUNTS]),
        ([opened(2), opened(1), claim(1, 0), claim(2, 0)], [COUNTS, VOID, VOID, COUNTS]),
        ([opened(2), opened(2), claim(2, 0)], [COUNTS, VOID, COUNTS]),
        ([opened(1), claim(1, 0), opened(3), claim(1, 1), claim(3, 0)], [COUNTS, COUNTS, COUNTS, VOID, COUNTS]),
        ([opened(1), claim(2, 0)], [COUNTS, GAP]),
        ([claim(1, 0)], [GAP]),
        ([opened(1), named(1, 0, 1, (1, 0)), claim(1, 1)], [COUNTS] * 3),
    ],
)
def test_an_entry_counts_by_epoch_and_number(entries: list[StateEntry], expected: list[Judgement]) -> None:
    assert judged(entries) == expected


def test_the_state_has_what_counts_and_nothing_else() -> None:
    fold = StateFold(machines())
    entries = [opened(1), claim(1, 0, 7), claim(1, 0, 7), opened(2), claim(1, 1, 8), claim(2, 0, 9), claim(2, 1, 9, 1)]
    answers = [fold.meet(offset, entry).answers for offset, entry in enumerate(entries)]
    assert answers == [(), (True,), (), (), (), (False,), (True,)]
    assert fold.machines["slots"].snapshot() == b"[[[0, 7], [1, 9]], [7, 9, 9]]"
    assert (fold.offset, fold.epoch, fold.nonce, fold.number, fold.last) == (7, 2, 1, 2, entries[-1])


def test_a_decision_of_an_unknown_machine_forbids_to_continue() -> None:
    fold = StateFold(machines())
    fold.meet(0, opened(1))
    content = StateDecisions((StateDecision("slots", bytes((0, 1))), StateDecision("newer", b"")))
    with pytest.raises(UnsupportedFormatError, match="newer"):
        fold.meet(1, StateEntry(1, 0, content))
    assert fold.machines["slots"].snapshot() == b"[[], []]"
    with pytest.raises(UnsupportedFormatError, match="newer"):
        fold.restore(SavedState(1, 1, 0, {"newer": b""}))


def test_a_fold_continues_from_its_snapshot_at_any_offset() -> None:
    draw = random.Random(1)
    for _ in range(50):
        epoch, number, whole = 0, 0, StateFold(machines())
        folds = []
        for offset in range(30):
            kind = draw.randrange(5)
            if kind == 0 or not epoch:
                epoch, number = epoch + 1, 0
                entry = opened(epoch)
            elif kind == 1:
                entry = claim(draw.randint(1, epoch), draw.randint(0, max(0, number - 1)), draw.randrange(9))
            else:
                entry = claim(epoch, number, draw.randrange(9), draw.randrange(3))
            later = StateFold(machines())
            later.restore(whole.save())
            folds.append(later)
            met = [fold.meet(offset, entry) for fold in (whole, *folds)]
            assert len(set(met)) == 1
            epoch, number = whole.epoch, whole.number
        assert all(fold.save() == whole.save() for fold in folds)


# ---- the opening -----------------------------------------------------------------------------

BASE = [opened(1), claim(1, 0, 5), named(1, 1, 2, (1, 1)), claim(1, 2, 6, 1)]


def test_an_opener_begins_at_the_last_snapshot_that_counts() -> None:
    late = named(1, 3, 1, (1, 0))
    for entries, offset in (
        (BASE, 2),
        ([*BASE, named(1, 3, 4, (1, 3))], 4),
        ([*BASE, opened(2), late], 2),
        ([*BASE, opened(2), named(2, 0, 4, (1, 3)), late], 4),
        ([*BASE, named(1, 3, 4, (1, 3)), BASE[2]], 4),
    ):
        snapshot = scan_of(entries).snapshot
        assert snapshot is not None
        assert snapshot.offset == offset, entries
    assert scan_of([opened(2), late]).snapshot is None


def test_an_opener_of_a_trimmed_log_knows_the_epoch_by_any_entry() -> None:
    """The `opened` of epoch 2 is trimmed, and a late snapshot entry of epoch 1 is the first that is left."""
    entries = [*BASE, opened(2), named(1, 3, 1, (1, 0)), claim(2, 0, 8, 2), named(2, 1, 5, (2, 0)), claim(2, 2, 9)]
    scan = scan_of(entries, 5)
    assert (scan.highest_epoch, scan.snapshot) == (2, entries[7].content)
    state = StateFold(machines())
    for offset, entry in enumerate(entries[:5]):
        state.meet(offset, entry)
    fold = scan.fold(machines, state.save())
    assert (fold.epoch, fold.number, fold.nonce) == (2, 3, 0)
    assert fold.machines["slots"].snapshot() == b"[[[0, 5], [1, 6], [2, 8]], [5, 6, 8, 9]]"
    with pytest.raises(EpochFencedError):
        check_opened(fold, 2, 1)


def test_an_opener_reports_a_state_that_the_log_does_not_have() -> None:
    saved = SavedState(2, 1, 1, {"slots": b"[[[0, 5]], [5]]"})
    assert scan_of(BASE, 2).fold(machines, saved).number == 3
    with pytest.raises(LogLostError, match="begins at 4"):
        scan_of([*BASE, claim(1, 3)], 2, frozenset({3})).fold(machines, saved)
    with pytest.raises(LogLostError, match="begins at 1"):
        scan_of(BASE[:2], 1).fold(machines, None)
    with pytest.raises(LogLostError, match="lacks an entry"):
        scan_of([opened(1), claim(1, 1)]).fold(machines, None)
    with pytest.raises(LogLostError, match="does not count"):
        scan_of([opened(1), named(1, 0, 0, (1, 0))]).fold(machines, SavedState(2, 1, 1, {}))


def test_an_opener_does_not_pass_over_a_hole() -> None:
    """Epoch 1 may have had more entries in the hole, and nothing shows that they are missing."""
    entries = [opened(1), claim(1, 0, 5), claim(1, 1, 6, 1), opened(2), claim(2, 0)]
    with pytest.raises(LogLostError, match="begins at 3"):
        scan_of(entries, holes=frozenset({2})).fold(machines, None)
    covered = [*entries, named(2, 1, 4, (2, 0))]
    fold = scan_of(covered, holes=frozenset({2})).fold(machines, SavedState(4, 2, 0, {"slots": b"[[], []]"}))
    assert (fold.offset, fold.number) == (6, 2)


def test_an_opener_passes_over_entries_that_it_knows() -> None:
    scan = scan_of(BASE)
    scan.add(Entry(1, 0, b"again"), opened(9))
    assert (scan.end, scan.highest_epoch) == (4, 1)
    assert scan.uncovered_bytes() == sum(len(encode_state_entry(entry)) for entry in BASE[2:])


def test_an_opener_owns_only_its_own_opened() -> None:
    fold = scan_of([opened(3, nonce=8)]).fold(machines, None)
    check_opened(fold, 3, 8)
    for epoch, nonce in ((3, 9), (2, 8), (4, 8)):
        with pytest.raises(EpochFencedError):
            check_opened(fold, epoch, nonce)
