"""The partitions of a group member, and the notifications of its user, against a correct group."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memq.client.consumer.group.membership import AssignmentEvents, MemberState
from memq.groups import Membership
from memq.topic import Committed, Position, ReadPartition

PARTS = tuple(ReadPartition("clicks", "0" * 32, number) for number in range(4))


class MemberBesideGroup(RuleBasedStateMachine):
    """A group that assigns and revokes at will, the member's heartbeats, and a user who takes changes at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.member = MemberState()
        self.generation = 0
        self.assigned: set[ReadPartition] = set()
        self.revoking: set[ReadPartition] = set()
        self.users: set[ReadPartition] = set()  # what the user believes it has
        self.told: AssignmentEvents | None = None  # changes that the user is just taking

    @rule(part=st.sampled_from(PARTS))
    def assign(self, part: ReadPartition) -> None:
        if part not in self.revoking:
            self.assigned.add(part)

    @rule(part=st.sampled_from(PARTS))
    def revoke(self, part: ReadPartition) -> None:
        if part in self.assigned:
            self.assigned.remove(part)
            self.revoking.add(part)

    @rule()
    def heartbeat(self) -> None:
        released = self.member.released
        for part in released:
            self.revoking.discard(part)
        self.generation += 1
        answer = Membership(self.generation, tuple(sorted(self.assigned)), tuple(sorted(self.revoking)))
        self.member.answered(answer, released)

    @rule()
    def fence(self) -> None:
        self.assigned.clear()
        self.revoking.clear()
        self.member.fenced()

    @precondition(lambda self: self.told is None)
    @rule()
    def user_hears(self) -> None:
        """The callbacks run; heartbeats are answered meanwhile, until the user has finished."""
        self.told = changes = self.member.changes()
        for part in (*changes.lost, *changes.revoked):
            assert part in self.users
            self.users.remove(part)
        for part in changes.assigned:
            assert part not in self.users
            self.users.add(part)

    @precondition(lambda self: self.told is not None)
    @rule()
    def user_finishes(self) -> None:
        assert self.told is not None
        for part in self.told.lost:
            self.member.confirm_lost(part)
        for part in self.told.revoked:
            self.member.confirm_revoked(part)
        for part in self.told.assigned:
            self.member.confirm_assigned(part)
        self.told = None
        assert self.users == {*self.member.held, *self.member.changes().lost}

    @rule()
    def user_takes_all(self) -> None:
        if self.told is not None:
            self.user_finishes()
        self.user_hears()
        self.user_finishes()
        assert not self.member.changes()
        assert self.users == set(self.member.held)

    @invariant()
    def what_is_granted_is_held_or_to_be_assigned(self) -> None:
        assert set(self.member.granted) == {*self.member.held, *self.member.changes().assigned}

    @precondition(lambda self: self.member.inside)
    @invariant()
    def nothing_is_released_while_the_user_has_it(self) -> None:
        assert not set(self.member.released) & set(self.member.held)

    @precondition(lambda self: self.told is None)
    @invariant()
    def a_partition_is_told_once_in_one_direction(self) -> None:
        changes = self.member.changes()
        assert not set(changes.revoked) & set(changes.assigned)
        assert set(changes.revoked) <= self.users
        assert set(changes.lost) <= self.users


TestMemberBesideGroup = MemberBesideGroup.TestCase
TestMemberBesideGroup.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_partition_that_came_and_went_unseen_is_given_back_at_once() -> None:
    member = MemberState()
    member.answered(Membership(1, (PARTS[0],)))
    member.answered(Membership(2, (), (PARTS[0],)))
    assert member.changes() == AssignmentEvents()
    assert list(member.released) == [PARTS[0]]
    member.answered(Membership(3, ()), (PARTS[0],))
    assert list(member.released) == []


def test_revoked_partition_stays_held_until_the_user_is_notified() -> None:
    member = MemberState()
    member.answered(Membership(1, PARTS[:2]))
    for part in member.changes().assigned:
        member.confirm_assigned(part)
    member.answered(Membership(2, PARTS[:1], PARTS[1:2]))
    assert (member.changes().revoked, member.held, member.released) == (PARTS[1:2], PARTS[:2], ())
    member.confirm_revoked(PARTS[1])
    assert (member.held, member.released) == (PARTS[:1], PARTS[1:2])


def test_lost_partition_that_returns_is_another_grant() -> None:
    member = MemberState()
    member.answered(Membership(1, PARTS[:1]))
    member.confirm_assigned(PARTS[0])
    first = member.granted[PARTS[0]]
    member.fenced()
    assert not member.granted
    member.answered(Membership(5, PARTS[:1]))
    assert member.granted[PARTS[0]] > first
    assert member.changes() == AssignmentEvents(lost=PARTS[:1], assigned=PARTS[:1])


def test_partition_lost_and_assigned_by_one_answer_is_another_grant() -> None:
    member = MemberState()
    member.answered(Membership(1, PARTS[:2]))
    member.confirm_assigned(PARTS[0])
    grants = dict(member.granted)
    member.answered(Membership(2, PARTS[1:2]))
    member.answered(Membership(3, PARTS[:2]))
    assert member.granted[PARTS[0]] > grants[PARTS[0]]
    assert member.granted[PARTS[1]] == grants[PARTS[1]], "what stayed keeps its grant"


def test_a_member_is_inside_from_generation_0_on_and_outside_when_it_is_fenced() -> None:
    member = MemberState()
    inside = [member.inside]
    member.answered(Membership(0, (), ()))
    inside.append(member.inside)
    member.fenced()
    assert [*inside, member.inside] == [False, True, False]


def test_a_fenced_member_has_nothing_to_read_to_take_or_to_give_back() -> None:
    """What it was to give back belongs to others by now, and so does what it was to get."""
    member = MemberState()
    member.answered(Membership(1, PARTS[:2], ()))
    member.confirm_assigned(PARTS[0])
    member.answered(Membership(2, PARTS[1:2], PARTS[:1]), ())
    member.confirm_revoked(PARTS[0])
    assert (member.released, list(member.granted)) == (PARTS[:1], [PARTS[1]])
    member.fenced()
    assert (member.released, dict(member.granted), member.changes()) == ((), {}, AssignmentEvents((), (), ()))
    member.answered(Membership(3, PARTS[:1], ()))
    assert member.changes().assigned == PARTS[:1], "it is a grant like any other"


def test_a_partition_that_goes_while_its_user_learns_of_it_is_lost() -> None:
    """The callback runs while heartbeats are answered: it named the partition, and no other call took that back."""
    for goes in (Membership(2, (), PARTS[:1]), Membership(2, ())):
        member = MemberState()
        member.answered(Membership(1, PARTS[:1]))
        told = member.changes()
        member.answered(goes)
        for part in told.assigned:
            member.confirm_assigned(part)
        assert (member.held, member.changes()) == ((), AssignmentEvents(lost=PARTS[:1]))
        member.confirm_lost(PARTS[0])
        assert member.changes() == AssignmentEvents()


def test_a_partition_that_stays_while_its_user_finishes_is_assigned_again() -> None:
    """Its user had heard that it is revoked, and got its records all the same."""
    member = MemberState()
    member.answered(Membership(1, PARTS[:1]))
    member.confirm_assigned(PARTS[0])
    before = member.granted[PARTS[0]]
    member.answered(Membership(2, (), PARTS[:1]))
    told = member.changes()
    member.answered(Membership(3, PARTS[:1]))
    for part in told.revoked:
        member.confirm_revoked(part)
    assert (member.held, member.released) == ((), ())
    assert member.changes() == AssignmentEvents(assigned=PARTS[:1])
    assert member.granted[PARTS[0]] > before


def test_a_partition_that_is_lost_while_its_user_finishes_is_named_once() -> None:
    member = MemberState()
    member.answered(Membership(1, PARTS[:1]))
    member.confirm_assigned(PARTS[0])
    member.answered(Membership(2, (), PARTS[:1]))
    told = member.changes()
    member.fenced()
    for part in told.revoked:
        member.confirm_revoked(part)
    assert member.changes() == AssignmentEvents()


def test_a_partition_that_is_given_back_is_not_assigned_before_the_group_has_heard_it() -> None:
    """Its records would be read for a moment, and the next heartbeat would give them to another member."""
    member = MemberState()
    member.answered(Membership(1, PARTS[:1]))
    member.confirm_assigned(PARTS[0])
    member.answered(Membership(2, (), PARTS[:1]))
    member.confirm_revoked(PARTS[0])
    member.answered(Membership(3, PARTS[:1]))
    assert (dict(member.granted), member.changes(), member.released) == ({}, AssignmentEvents(), PARTS[:1])
    member.answered(Membership(4, PARTS[:1]), PARTS[:1])
    assert member.changes() == AssignmentEvents(assigned=PARTS[:1])


def test_a_member_takes_a_position_once_and_only_for_the_grant_that_it_came_with() -> None:
    first, second, third = PARTS[:3]
    stored = {part: Committed(Position(part.partition, 5)) for part in PARTS}
    member = MemberState()
    member.answered(Membership(1, (first, second), positions={first: stored[first], third: stored[third]}))
    assert member.take_position(third, 1) is None, "it is not granted"
    assert member.take_position(first, member.granted[first]) == stored[first]
    assert member.take_position(first, member.granted[first]) is None
    member.answered(Membership(2, (first, second), positions=stored))
    assert member.take_position(first, member.granted[first]) is None, "it may have committed since the grant"
    member.fenced()
    member.answered(Membership(3, (first, second), positions=stored))
    old = member.granted[first]
    member.fenced()
    member.answered(Membership(4, (first, second)))
    assert member.granted[first] != old
    assert member.take_position(first, member.granted[first]) is None
