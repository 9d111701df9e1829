"""The owner of a state log: one entry on its way, the same bytes again, answers only for what counts (S3 to S8)."""

from __future__ import annotations

import pytest

from memq.errors import EpochFencedError, LogCutError, LogLostError, NotReadyError, QueueError, TooLargeError
from memq.format.state_log.entry import (
    HEAD,
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decision_bytes,
    decode_state_entry,
)
from memq.limits import POINTER_BYTES_MAX
from memq.state_log.fold import StateFold
from memq.state_log.owner import (
    SUCCESSORS,
    UNCOVERED_BYTES_MAX,
    OwnerPhase,
    ProposalFate,
    PublishStep,
    ReadStep,
    Settled,
    SnapshotPace,
    StateOwner,
    TrimStep,
)
from tests.model.state_log import machines

COUNTS, VOID, UNKNOWN = ProposalFate.COUNTS, ProposalFate.VOID, ProposalFate.UNKNOWN
OPENED = StateEntry(3, 0, OpenedState(1, "b"))
HIGHER = StateEntry(4, 0, OpenedState(2, "c"))


def claim(request: int, slot: int = 0) -> StateDecision:
    return StateDecision("slots", bytes((slot, request)))


def new_owner() -> StateOwner:
    """Return the owner of epoch 3, whose `opened` is at offset 0."""
    fold = StateFold(machines())
    fold.meet(0, OPENED)
    return StateOwner(fold, SnapshotPace(60.0, 0, 0.0))


def published(owner: StateOwner, now_s: float = 0.0) -> StateEntry:
    """Return the entry that the owner publishes next."""
    step = owner.next_step(now_s)
    assert isinstance(step, PublishStep), step
    return decode_state_entry(step.body)


def test_an_owner_answers_when_its_entry_follows_on_what_it_read() -> None:
    owner = new_owner()
    assert owner.next_step(0.0) is None
    first, second = owner.propose(claim(7)), owner.propose(claim(8))
    entry = published(owner)
    assert entry == StateEntry(3, 0, StateDecisions((claim(7), claim(8))))
    third = owner.propose(claim(7, 1))
    assert owner.take_settled() == []
    owner.published(1, 1.0)
    assert owner.take_settled() == [Settled(first, COUNTS, True), Settled(second, COUNTS, False)]
    assert published(owner) == StateEntry(3, 1, StateDecisions((claim(7, 1),)))
    owner.published(2, 1.0)
    assert owner.take_settled() == [Settled(third, COUNTS, True)]
    assert not owner.busy


def test_an_owner_reads_after_a_jump_of_offsets_before_it_answers() -> None:
    owner = new_owner()
    ticket = owner.propose(claim(7))
    entry = published(owner)
    owner.published(2, 1.0)
    assert owner.take_settled() == []
    assert owner.next_step(1.0) == ReadStep(1, 3)
    owner.meet(1, StateEntry(2, 9, StateDecisions((claim(9),))), 1.0)
    owner.meet(2, entry, 1.0)
    owner.read(3)
    assert owner.take_settled() == [Settled(ticket, COUNTS, True)]
    assert owner.next_step(2.0) is None


def test_an_owner_repeats_the_same_bytes_after_a_read_to_the_end() -> None:
    owner = new_owner()
    owner.propose(claim(7))
    step = owner.next_step(0.0)
    owner.propose(claim(8))
    owner.failed()
    assert owner.next_step(1.0) == ReadStep(1, 1)
    owner.failed()
    assert owner.next_step(2.0) == ReadStep(1, 1)
    owner.read(1)
    assert owner.next_step(3.0) == step
    assert owner.take_settled() == []


def test_an_owner_says_that_nothing_was_done_behind_a_higher_opened() -> None:
    owner = new_owner()
    first, second = owner.propose(claim(7)), owner.propose(claim(8))
    entry = published(owner)
    third = owner.propose(claim(9))
    owner.failed()
    owner.next_step(1.0)
    owner.meet(1, HIGHER, 1.0)
    owner.meet(2, entry, 1.0)
    owner.read(3)
    assert sorted(owner.take_settled()) == sorted(Settled(ticket, VOID) for ticket in (first, second, third))
    assert isinstance(owner.end_cause, EpochFencedError)
    assert owner.next_step(2.0) is None


def test_an_owner_answers_what_counts_before_a_higher_opened() -> None:
    owner = new_owner()
    first = owner.propose(claim(7))
    entry = published(owner)
    second = owner.propose(claim(8))
    owner.failed()
    owner.next_step(1.0)
    owner.meet(1, entry, 1.0)
    owner.meet(2, HIGHER, 1.0)
    assert owner.take_settled() == [Settled(first, COUNTS, True), Settled(second, VOID)]


@pytest.mark.parametrize(
    ("entry", "offset"),
    [
        (StateEntry(5, 3, StateDecisions(())), 1),  # a newer owner has trimmed its `opened`
        (StateEntry(3, 1, StateDecisions(())), 1),  # the queue has lost number 0
        (StateEntry(3, 0, StateDecisions((claim(99),))), 1),  # another process publishes in this epoch
        (HIGHER, 2),  # a hole before it
    ],
)
def test_an_owner_that_has_lost_track_does_not_know(entry: StateEntry, offset: int) -> None:
    owner = new_owner()
    first = owner.propose(claim(7))
    published(owner)
    second = owner.propose(claim(8))
    owner.failed()
    owner.next_step(1.0)
    owner.meet(offset, entry, 1.0)
    assert owner.take_settled() == [Settled(first, UNKNOWN), Settled(second, VOID)]
    assert isinstance(owner.end_cause, LogLostError)


def test_an_owner_ends_when_the_log_ends_in_a_hole() -> None:
    owner = new_owner()
    owner.propose(claim(7))
    published(owner)
    owner.failed()
    owner.next_step(1.0)
    owner.read(5)
    assert [fate for _, fate, _ in owner.take_settled()] == [UNKNOWN]


def test_an_owner_ends_in_a_log_that_was_cut() -> None:
    owner = new_owner()
    owner.propose(claim(7))
    published(owner)
    owner.published(0, 1.0)
    assert [fate for _, fate, _ in owner.take_settled()] == [UNKNOWN]
    assert isinstance(owner.end_cause, LogCutError)


def test_an_entry_has_as_many_decisions_as_fit() -> None:
    owner = new_owner()
    large = StateDecision("slots", bytes((0, 1)) + b"x" * (POINTER_BYTES_MAX // 2))
    tickets = [owner.propose(large), owner.propose(large), owner.propose(claim(1))]
    assert owner.waiting_bytes > POINTER_BYTES_MAX
    assert published(owner).content == StateDecisions((large,))
    owner.failed()
    owner.end(NotReadyError("closed"))
    assert [(ticket, fate) for ticket, fate, _ in owner.take_settled()] == list(
        zip(tickets, (UNKNOWN, VOID, VOID), strict=True)
    )
    assert owner.waiting_bytes == 0
    with pytest.raises(TooLargeError):
        new_owner().propose(StateDecision("slots", b"x" * POINTER_BYTES_MAX))


def test_an_entry_is_filled_to_the_last_byte() -> None:
    room = POINTER_BYTES_MAX - HEAD.size - 2 * decision_bytes("slots", b"")
    for spare, count in ((0, 2), (1, 1)):
        owner = new_owner()
        for size in (room // 2, room - room // 2 + spare):
            owner.propose(StateDecision("slots", b"x" * size))
        owner.propose(claim(1))
        step = owner.next_step(0.0)
        assert isinstance(step, PublishStep)
        assert len(step.body) <= POINTER_BYTES_MAX
        content = decode_state_entry(step.body).content
        assert isinstance(content, StateDecisions)
        assert len(content.decisions) == count


def test_an_owner_counts_the_bytes_that_wait_for_an_entry() -> None:
    owner = new_owner()
    assert (owner.waiting_bytes, owner.busy) == (0, False)
    owner.propose(None)
    assert (owner.waiting_bytes, owner.busy) == (0, True)
    for _ in range(2):
        owner.propose(claim(7))
    assert owner.waiting_bytes == 2 * decision_bytes(*claim(7))
    published(owner)
    assert (owner.waiting_bytes, owner.busy) == (0, True)
    owner.propose(claim(8))
    owner.published(1, 1.0)
    assert (owner.waiting_bytes, owner.busy) == (decision_bytes(*claim(8)), True)
    owner.end(NotReadyError("closed"))
    assert (owner.waiting_bytes, owner.busy) == (0, False)


def test_a_proof_is_an_entry_that_is_made_after_the_request() -> None:
    owner = new_owner()
    owner.propose(claim(7))
    published(owner, 5.0)
    ticket = owner.propose(None)
    owner.published(1, 9.0)
    assert owner.proved_s == 5.0
    assert ticket not in [settled.ticket for settled in owner.take_settled()]
    assert published(owner, 11.0) == StateEntry(3, 1, StateDecisions(()))
    owner.failed()
    owner.next_step(12.0)
    owner.read(2)
    published(owner, 13.0)
    owner.published(2, 14.0)
    assert owner.take_settled() == [Settled(ticket, COUNTS)]
    assert owner.proved_s == 11.0


# ---- snapshots -------------------------------------------------------------------------------


def test_an_owner_trims_only_when_the_snapshot_counts() -> None:
    owner = new_owner()
    owner.propose(claim(7))
    published(owner)
    saved = next(each for each in owner.save() if each is not None)
    assert (saved.offset, saved.epoch, saved.number, saved.machines["slots"]) == (1, 3, 0, b"[[], []]")
    owner.published(1, 1.0)
    first = StateSnapshot(1, 0, 3, 1, 0, 1, "first")
    owner.name(first, 100.0)
    assert owner.naming
    assert published(owner) == StateEntry(3, 1, first)
    owner.published(3, 1.0)
    assert owner.take_trims() == []
    owner.next_step(1.0)
    owner.meet(2, StateEntry(3, 1, first), 1.0)
    owner.meet(3, StateEntry(3, 1, first), 1.0)
    owner.read(4)
    assert owner.take_trims() == [TrimStep(1, None)]
    second = StateSnapshot(4, 2, 3, 1, 0, 1, "second")
    owner.name(second, 100.0)
    published(owner)
    owner.published(4, 2.0)
    assert owner.take_trims() == [TrimStep(4, first)]
    assert not owner.naming


def test_an_opener_trims_for_an_owner_that_died() -> None:
    fold = StateFold(machines())
    snapshot = StateSnapshot(1, 0, 3, 1, 0, 1, "key")
    fold.meet(0, OPENED)
    fold.meet(1, StateEntry(3, 0, snapshot))
    fold.meet(2, HIGHER)
    owner = StateOwner(fold, SnapshotPace(60.0, 0, 0.0))
    assert (owner.epoch, owner.take_trims()) == (4, [TrimStep(1, None)])


def test_a_snapshot_is_not_named_after_its_time() -> None:
    owner = new_owner()
    owner.name(StateSnapshot(1, 0, 3, 1, 0, 1, "old"), 10.0)
    assert owner.next_step(10.5) is None
    assert not owner.naming
    owner.name(StateSnapshot(1, 0, 3, 1, 0, 1, "old"), 10.0)
    owner.propose(claim(7))
    assert published(owner, 10.5) == StateEntry(3, 0, StateDecisions((claim(7),)))
    owner.published(1, 11.0)
    owner.name(StateSnapshot(1, 0, 3, 1, 0, 1, "late"), 20.0)
    published(owner, 20.0)
    owner.failed()
    owner.next_step(30.0)
    owner.read(2)
    assert owner.next_step(30.0) is None
    assert isinstance(owner.end_cause, QueueError)


def test_a_snapshot_is_due_by_age_and_by_bytes() -> None:
    pace = SnapshotPace(60.0, 0, 0.0)
    assert pace.due_s(5.0) == float("inf")
    pace.counts(100, 5.0, changes=False)
    assert pace.due_s(5.0) == float("inf")
    pace.counts(100, 7.0, changes=True)
    pace.counts(100, 9.0, changes=True)
    assert pace.due_s(9.0) == 67.0
    pace.saved()
    pace.counts(50, 20.0, changes=True)
    pace.covered()
    assert pace.due_s(21.0) == 80.0
    pace.counts(UNCOVERED_BYTES_MAX - 51, 22.0, changes=False)
    assert pace.due_s(22.0) == 80.0
    pace.counts(1, 23.0, changes=False)
    assert pace.due_s(23.0) == 23.0
    assert SnapshotPace(60.0, 10, 5.0).due_s(6.0) == 65.0


# ---- the table of phases ---------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(OwnerPhase))
def test_an_owner_refuses_events_that_its_phase_does_not_allow(phase: OwnerPhase) -> None:
    def owner_in() -> StateOwner:
        owner = new_owner()
        owner.propose(claim(7))
        if phase is not OwnerPhase.IDLE:
            published(owner)
        if phase is OwnerPhase.READING:
            owner.published(5, 0.0)
            owner.next_step(0.0)
        if phase is OwnerPhase.ENDED:
            owner.end(NotReadyError("closed"))
        assert owner.phase is phase
        return owner

    if phase in (OwnerPhase.PUBLISHING, OwnerPhase.READING):
        with pytest.raises(AssertionError):
            owner_in().next_step(0.0)
        owner_in().failed()
    elif phase is OwnerPhase.IDLE:
        with pytest.raises(AssertionError):
            owner_in().failed()
    if phase is OwnerPhase.IDLE:
        with pytest.raises(AssertionError):
            owner_in().published(1, 0.0)
    if phase is OwnerPhase.ENDED:
        owner_in().failed()  # its step ends after it
        owner_in().read(9)
        owner_in().published(1, 0.0)
        with pytest.raises(AssertionError):
            owner_in().propose(None)
    assert OwnerPhase.ENDED in SUCCESSORS[phase] or phase is OwnerPhase.ENDED
