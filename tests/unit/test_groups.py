"""Consumer groups as a machine: invariants under any order of joins, heartbeats, silence, leaving and commits."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import GenerationFencedError, InvalidRequestError, MemqError, TooLargeError
from memq.groups import Membership
from memq.groups import group as groups
from memq.groups.group import SESSION_TIMEOUT_MS_MAX, SESSION_TIMEOUT_MS_MIN, Group, PlannedGroup, balance
from memq.topic import Committed, Position, ReadPartition

TIMEOUT_MS = 1_000
PARTITIONS = [ReadPartition("clicks", "0a" * 16, number) for number in range(7)]


def committed(partition: ReadPartition) -> dict[ReadPartition, Committed]:
    return {partition: Committed(Position(partition.partition, 1))}


class Reader:
    """A member as a client plays it: it knows its last answer, and is alive while it was heard in time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known = Membership(-1, ())
        self.joined_before = False
        self.last_heard_ms = 0

    def learn(self, known: Membership, now_ms: int) -> None:
        self.known = known
        self.joined_before = True
        self.last_heard_ms = now_ms

    def alive(self, now_ms: int) -> bool:
        return self.joined_before and now_ms - self.last_heard_ms < TIMEOUT_MS


class World:
    """A group, its members, a clock; checked after every step."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.group = Group()
        self.now_ms = 10_000
        self.readers = [Reader(name) for name in "abcd"]

    def step(self) -> None:
        reader = self.draw.choice(self.readers)
        before = self.group.generation
        text = msgspec.json.encode(self.group)
        action = self.draw.choice([self.join, self.beat, self.beat, self.beat, self.leave, self.wait, self.commit])
        action(reader)
        self.check()
        assert self.group.generation >= before
        if self.group.generation == before:
            same = msgspec.json.decode(text, type=Group)
            for name, member in self.group.members.items():
                same.members[name].heard_ms = member.heard_ms
            assert same == self.group, "a change without a generation"
        assert msgspec.json.decode(msgspec.json.encode(self.group), type=Group) == self.group

    def join(self, reader: Reader) -> None:
        wanted = [partition for partition in PARTITIONS if self.draw.random() < 0.8]
        reader.learn(self.group.join(reader.name, wanted, TIMEOUT_MS, self.now_ms), self.now_ms)

    def beat(self, reader: Reader) -> None:
        released = [partition for partition in reader.known.revoking if self.draw.random() < 0.6]
        alive = reader.alive(self.now_ms)
        try:
            known = self.group.heartbeat(reader.name, reader.known.generation, released, self.now_ms)
        except GenerationFencedError:
            assert not alive, "a member that was heard in time was fenced"
            reader.joined_before = False
            return
        assert alive, "a member that was silent too long is still in"
        assert not set(released) & set(known.revoking)
        reader.learn(known, self.now_ms)

    def leave(self, reader: Reader) -> None:
        if self.draw.random() < 0.3:
            self.group.leave(reader.name, self.now_ms)
            reader.joined_before = False

    def wait(self, reader: Reader) -> None:
        self.now_ms += self.draw.randrange(TIMEOUT_MS // 2)

    def commit(self, reader: Reader) -> None:
        """A commit goes through exactly when the reader is alive and holds the partition in the generation it knows."""
        self.group.expire(self.now_ms)
        for partition in PARTITIONS:
            knows = partition in reader.known.assigned + reader.known.revoking
            member = self.group.members.get(reader.name)
            holds = member is not None and any(hold.partition == partition for hold in member.holds)
            try:
                self.group.check_commit(reader.name, reader.known.generation, committed(partition))
            except GenerationFencedError:
                assert not (knows and reader.alive(self.now_ms)), "a rightful commit was refused"
            else:
                assert knows, "a commit of what the member was never told of"
                assert holds
                assert reader.alive(self.now_ms)

    def check(self) -> None:
        held = [hold.partition for member in self.group.members.values() for hold in member.holds]
        assert len(held) == len(set(held)), "a partition with two holders"
        wanted = {partition for member in self.group.members.values() for partition in member.wanted}
        assert wanted <= set(held), "a wanted partition without a holder"
        for member in self.group.members.values():
            assert all(hold.partition in member.wanted for hold in member.holds if not hold.revoking)


@given(st.integers(0, 1 << 32))
def test_no_order_of_events_gives_a_partition_to_two(seed: int) -> None:
    world = World(seed)
    for _ in range(120):
        world.step()


@given(st.integers(0, 1 << 32))
def test_a_group_that_is_left_in_peace_comes_to_rest_in_balance(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        world.step()
    for reader in world.readers[:3]:
        reader.learn(world.group.join(reader.name, PARTITIONS, TIMEOUT_MS, world.now_ms), world.now_ms)
    world.group.leave("d", world.now_ms)
    for _ in range(6):
        for reader in world.readers[:3]:
            known = world.group.heartbeat(reader.name, reader.known.generation, reader.known.revoking, world.now_ms)
            reader.learn(known, world.now_ms)
    at_rest = world.group.generation
    shares = [reader.known for reader in world.readers[:3]]
    assert sorted(len(known.assigned) for known in shares) == [2, 2, 3]
    assert all(not known.revoking for known in shares)
    for reader in world.readers[:3]:
        world.group.heartbeat(reader.name, reader.known.generation, (), world.now_ms)
    assert world.group.generation == at_rest


def test_a_refused_request_changes_nothing_but_what_time_did() -> None:
    group = Group()
    known = group.join("a", PARTITIONS, TIMEOUT_MS, 0)
    text = msgspec.json.encode(group)
    for refused in (
        lambda: group.join("..", PARTITIONS, TIMEOUT_MS, 1),
        lambda: group.join("b", PARTITIONS, 1, 1),
        lambda: group.heartbeat("b", known.generation, (), 1),
        lambda: group.heartbeat("a", known.generation + 1, (), 1),
        lambda: group.check_commit("b", known.generation, committed(PARTITIONS[0])),
    ):
        with pytest.raises(MemqError):
            refused()
    assert msgspec.json.encode(group) == text


# ---- balance ---------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from(PARTITIONS), unique=True), max_size=6),
    st.dictionaries(st.sampled_from(PARTITIONS), st.sampled_from("abcdefg")),
)
def test_every_wanted_partition_gets_one_who_wants_it(
    wanted: dict[str, list[ReadPartition]], kept: dict[ReadPartition, str]
) -> None:
    owners = balance(wanted, kept)
    assert set(owners) == {partition for each in wanted.values() for partition in each}
    assert all(partition in wanted[owner] for partition, owner in owners.items())
    assert balance(wanted, owners) == owners, "a balance that is not at rest"
    reversed_wanted = {name: wanted[name] for name in sorted(wanted, reverse=True)}
    assert balance(reversed_wanted, dict(reversed(kept.items()))) == owners, "it depends on the order of mappings"


@given(st.integers(1, 6), st.dictionaries(st.sampled_from(PARTITIONS), st.sampled_from("abcdef")))
def test_equal_wishes_get_equal_shares_with_the_fewest_moves(members: int, kept: dict[ReadPartition, str]) -> None:
    names: Sequence[str] = "abcdef"[:members]
    owners = balance(dict.fromkeys(names, PARTITIONS), kept)
    loads = sorted(list(owners.values()).count(name) for name in names)
    assert loads[-1] - loads[0] <= 1
    moved = sum(owners[partition] != name for partition, name in kept.items() if name in names)
    before = sorted((list(kept.values()).count(name) for name in names), reverse=True)
    least = sum(max(have - share, 0) for have, share in zip(before, reversed(loads), strict=True))
    assert moved == least


@pytest.mark.parametrize("timeout_ms", [SESSION_TIMEOUT_MS_MIN, SESSION_TIMEOUT_MS_MAX])
def test_a_session_timeout_may_be_as_short_and_as_long_as_its_bounds(timeout_ms: int) -> None:
    assert Group().join("a", PARTITIONS, timeout_ms, 0).assigned == tuple(PARTITIONS)
    for beyond in (SESSION_TIMEOUT_MS_MIN - 1, SESSION_TIMEOUT_MS_MAX + 1):
        with pytest.raises(InvalidRequestError):
            Group().join("a", PARTITIONS, beyond, 0)


def test_a_deleted_partition_leaves_those_who_only_give_it_back_and_others_notice_nothing() -> None:
    group = Group()
    group.join("a", PARTITIONS, TIMEOUT_MS, 0)
    group.join("a", PARTITIONS[1:], TIMEOUT_MS, 0)
    assert group.membership("a").revoking == (PARTITIONS[0],)
    before = group.generation
    group.forget([ReadPartition("views", "0b" * 16, 0)])
    assert group.generation == before
    group.forget([PARTITIONS[0]])
    assert group.generation > before
    assert group.held() == {"a": tuple(PARTITIONS[1:])}
    before = group.generation
    group.forget([PARTITIONS[0]])
    assert group.generation == before


def test_a_full_group_takes_no_other_member_and_keeps_those_that_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_MEMBERS_MAX", 2)
    group = Group()
    for name in "abab":
        group.join(name, PARTITIONS, TIMEOUT_MS, 0)
    with pytest.raises(TooLargeError):
        group.join("c", PARTITIONS, TIMEOUT_MS, 0)
    group.leave("a", 0)
    group.join("c", PARTITIONS, TIMEOUT_MS, 0)
    assert set(group.held()) == {"b", "c"}


def test_a_large_group_has_long_sessions_which_get_no_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SESSION_MS_PER_MEMBER", 1_000)
    group = PlannedGroup()

    def sessions_ms() -> list[int]:
        group.settle()
        return [member.session_timeout_ms for member in group.members.values()]

    for name in "abc":
        group.join(name, PARTITIONS, 2_000, 0)
    group.join("own", PARTITIONS, 60_000, 0)
    assert sessions_ms() == [4_000, 4_000, 4_000, 60_000]
    group.join("d", PARTITIONS, 4_000, 0)
    assert sessions_ms() == [4_000, 4_000, 4_000, 60_000, 4_000], "5 s are not a half more"
    group.join("e", PARTITIONS, 2_000, 0)
    assert sessions_ms() == [6_000, 6_000, 6_000, 60_000, 6_000, 6_000]
    assert group.membership("a").session_ms == 6_000
    for name in "bcde":
        group.leave(name, 0)
    group.join("a", PARTITIONS, 2_000, 0)
    assert sessions_ms() == [6_000, 60_000], "the member may not know yet that it may be silent for less"
    group.leave("a", 0)
    group.join("a", PARTITIONS, 2_000, 0)
    assert sessions_ms() == [60_000, 2_000]
