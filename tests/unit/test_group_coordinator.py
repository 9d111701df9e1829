"""The coordinator of groups: requests become few decisions, silent members end, proofs are fresh. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from memq.errors import (
    GenerationFencedError,
    InvalidNameError,
    InvalidRequestError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    QueueError,
    ThrottledError,
    TooLargeError,
)
from memq.groups import Membership
from memq.groups.coordinator import EXPIRY_CHECK_S, GroupCoordinator
from memq.groups.machine import (
    GROUPS_MACHINE,
    CommitDecision,
    Decision,
    ForgetDecision,
    GroupMachine,
    MembersDecision,
    copy_of,
    decode_decision,
    difference,
    encode_decision,
    pack,
)
from memq.notification import FormerGroup
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog
from memq.topic import Committed, Position, ReadPartition
from tests.skipping_loop import LoopClock, now_s, run_skipping, skip
from tests.unit.instant_log import InstantLog

LOGS = [ReadPartition("clicks", "0a" * 16, number) for number in range(4)]
OTHER = ReadPartition("views", "0b" * 16, 0)
SESSION_MS = 8_000
SESSION_S, F_S = 8.0, 2.0
BEGIN_S = 100.0


class Hosted:
    """A coordinator on a log in memory, which was opened long ago."""

    def __init__(self) -> None:
        self.machine = GroupMachine()
        self.log = InstantLog({GROUPS_MACHINE: self.machine})
        self.tasks = TaskOwner(self.failed, cast(Any, None))
        self.coordinator = GroupCoordinator(cast(StateLog, self.log), self.machine, LoopClock(), self.tasks, 0.0)

    def failed(self, error: BaseException) -> None:
        raise error

    async def join(self, member: str, group: str = "g", partitions: list[ReadPartition] = LOGS) -> Membership:
        return await self.coordinator.join(group, member, partitions, SESSION_MS)

    async def joins(self, *members: str) -> list[asyncio.Task[Membership]]:
        """Let members join, those of each text at once, and all while the first decision is on its way."""
        tasks = []
        for each in members:
            tasks += [asyncio.create_task(self.join(member)) for member in each]
            await skip(0.1)
        return tasks

    async def beat(self, member: str, *released: ReadPartition) -> Membership:
        return await self.coordinator.heartbeat("g", member, self.generation(), released)

    def generation(self, group: str = "g") -> int:
        return self.machine.membership(group).generation

    def members(self, group: str = "g") -> list[str]:
        return sorted(self.machine.membership(group).members)

    def decisions(self, kind: type[Decision]) -> list[Any]:
        return [each for each in (decode_decision(body) for _, body in self.log.applied) if isinstance(each, kind)]


def hosted(work: Callable[[Hosted], Awaitable[None]]) -> None:
    """Run a test."""

    async def run() -> None:
        made = Hosted()
        await skip(BEGIN_S)
        try:
            await work(made)
        finally:
            await made.tasks.stop()

    run_skipping(run())


def at(offset: int, *partitions: ReadPartition) -> dict[ReadPartition, Committed]:
    return {each: Committed(Position(each.partition, offset)) for each in partitions or LOGS[:1]}


# ---- members -------------------------------------------------------------------------------------


def test_a_coordinator_refuses_what_is_not_valid_before_a_decision() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        count = len(made.log.applied)
        coordinator, bad = made.coordinator, "no/such/group"
        former = FormerGroup(bad, 0, (), {})
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: made.join("b", group=bad),
            lambda: coordinator.heartbeat(bad, "a", 1),
            lambda: coordinator.leave(bad, "a"),
            lambda: coordinator.commit(bad, "a", 1, at(1)),
            lambda: coordinator.committed(bad, LOGS),
            lambda: coordinator.describe(bad),
            lambda: coordinator.delete_group(bad),
            lambda: coordinator.import_group(former),
        ]
        for call in calls:
            with pytest.raises((InvalidNameError, InvalidRequestError)):
                await call()
        wrong = {LOGS[0]: Committed(Position(LOGS[0].partition + 1, 1))}
        with pytest.raises(InvalidRequestError):
            await coordinator.commit("g", "a", made.generation(), wrong)
        with pytest.raises(InvalidRequestError):
            await coordinator.import_group(FormerGroup("h", 0, (), wrong))
        for member, session_ms in (("", SESSION_MS), ("b", 0)):
            with pytest.raises(InvalidRequestError):
                await coordinator.join("g", member, LOGS, session_ms)
        assert (len(made.log.applied), made.log.proofs) == (count, 1), "one for `describe`"
        assert made.members() == ["a"]

    hosted(work)


def test_members_that_join_while_a_decision_is_on_its_way_share_the_next_one() -> None:
    async def work(made: Hosted) -> None:
        made.log.delay_s = 1
        joins = await made.joins("a", "bc")
        found = await asyncio.gather(*joins)
        assert now_s() == BEGIN_S + 2
        assert [sorted(each.changed) for each in made.decisions(MembersDecision)] == [["a"], ["a", "b", "c"]]
        assert found[1] == made.machine.membership("g").membership("b")
        assert found[1].generation == 2

    hosted(work)


def test_a_member_that_leaves_while_it_joins_again_is_not_in_the_group() -> None:
    async def work(made: Hosted) -> None:
        await made.join("m")
        made.log.delay_s = 1
        leaves = asyncio.create_task(made.coordinator.leave("g", "m"))
        await skip(0.5)
        first, again = await made.joins("x", "m")
        await asyncio.wait([leaves, first, again])
        with pytest.raises(GenerationFencedError, match="member 'm' has left group 'g' again"):
            await again
        assert made.members() == ["x"]

    hosted(work)


def test_a_member_whose_join_has_no_answer_yet_is_not_removed_as_silent() -> None:
    """The next decision is made before its answer goes out, and the log was opened long ago."""

    async def work(made: Hosted) -> None:
        made.log.delay_s = 0.2
        joins = await made.joins("a", "b", "c")
        await asyncio.wait(joins)
        assert made.members() == ["a", "b", "c"]
        assert (await made.beat("a")).revoking, "it gives partitions to the others, and has them until then"

    hosted(work)


def test_the_time_of_a_member_begins_when_its_join_counts() -> None:
    """A queue that is away for a minute delays the decision; the member learns of its join then."""

    async def work(made: Hosted) -> None:
        made.log.delay_s = 60
        joins = await made.joins("a", "b")
        made.log.delay_s = 0
        await asyncio.wait(joins)
        await skip(SESSION_S - 0.1)
        await made.coordinator.expire()
        assert made.members() == ["a", "b"]
        await skip(0.2)
        await made.coordinator.expire()
        assert made.members() == []

    hosted(work)


def test_a_deletion_that_is_refused_forgets_no_times() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        with pytest.raises(InvalidRequestError, match="active members"):
            await made.coordinator.delete_group("g")
        await made.join("b")
        assert made.members() == ["a", "b"]

    hosted(work)


@pytest.mark.parametrize("beats", [False, True])
def test_a_new_owner_gives_a_member_that_it_hears_early_its_time_from_the_opening(beats: bool) -> None:
    async def work(made: Hosted) -> None:
        joined = await made.join("a")
        made.log.delay_s = 0.0
        coordinator = GroupCoordinator(cast(StateLog, made.log), made.machine, LoopClock(), made.tasks, now_s())
        if beats:
            await coordinator.heartbeat("g", "a", joined.generation)
            await coordinator.join("g", "b", LOGS, SESSION_MS)  # a decision searches for silent members again
        else:
            await coordinator.join("g", "a", LOGS, SESSION_MS)
        await skip(SESSION_S + F_S - 0.01)
        await coordinator.expire()
        assert "a" in made.members()
        await skip(0.02)
        await coordinator.expire()
        assert made.members() == []

    hosted(work)


def test_a_caller_that_gives_up_changes_nothing_for_the_others() -> None:
    async def work(made: Hosted) -> None:
        made.log.delay_s = 1
        joins = await made.joins("a", "bc")
        await skip(1)
        joins[1].cancel()
        assert (await joins[2]).generation == 2
        assert made.members() == ["a", "b", "c"]

    hosted(work)


def test_a_refused_change_is_proved_and_the_others_of_its_decision_count() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        revoked = made.machine.membership("g").membership("a")
        made.log.delay_s = 1
        proofs = made.log.proofs
        late = made.coordinator.heartbeat("g", "gone", revoked.generation, LOGS[:1])
        with pytest.raises(GenerationFencedError, match="'gone' is not in the group"):
            await late
        assert made.log.proofs == proofs + 2, "one for an unknown member, one for the refusal"
        (first,) = await made.joins("b")
        refused = asyncio.create_task(made.coordinator.heartbeat("g", "no", 1, LOGS[:1]))
        (last,) = await made.joins("c")
        await asyncio.wait([first, refused, last])
        assert isinstance(refused.exception(), GenerationFencedError)
        assert made.members() == ["a", "b", "c"]

    hosted(work)


def test_a_decision_on_an_old_state_is_made_again() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")

        def other() -> None:
            made.log.before = int
            made.machine.apply(encode_decision(MembersDecision("g", 1, 2, {})))

        made.log.before = other
        assert (await made.join("c")).generation == 3
        assert made.members() == ["a", "c"]
        assert [each.base for each in made.decisions(MembersDecision)] == [0, 1, 2]

    hosted(work)


def test_an_error_of_the_log_fails_the_changes_of_its_decision_alone() -> None:
    async def work(made: Hosted) -> None:
        made.log.delay_s = 1
        made.log.errors = [MovedError("another owner")]
        joins = await made.joins("a", "bc")
        await asyncio.wait(joins)
        assert isinstance(joins[0].exception(), MovedError)
        assert made.members() == ["b", "c"]
        await made.join("d")
        assert made.members() == ["b", "c", "d"]

    hosted(work)


def test_a_coordinator_that_closes_lets_all_callers_ask_the_next_owner() -> None:
    async def work(made: Hosted) -> None:
        made.log.delay_s = 1
        joins = await made.joins("a", "b")
        await made.tasks.stop()
        for join in joins:
            with pytest.raises(NotReadyError, match="the coordinator of this group is closed"):
                await join
        with pytest.raises(NotReadyError, match="is closed"):
            await made.join("c")

    hosted(work)


def test_only_a_member_of_the_group_leaves_it_by_a_decision() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b")
        await made.coordinator.leave("g", "c")
        assert len(made.decisions(MembersDecision)) == 2
        await made.coordinator.leave("g", "a")
        assert made.members() == ["b"]
        gone = made.decisions(MembersDecision)[-1]
        assert (gone.gone, sorted(gone.changed)) == (("a",), ["b"])

        def leave() -> None:
            before = made.machine.membership("g")
            after = copy_of(before)
            after.leave("b", int(now_s() * 1_000))
            made.machine.apply(encode_decision(difference("g", before, after)))

        made.log.on_fresh = leave
        await made.coordinator.leave("g", "b")
        assert len(made.decisions(MembersDecision)) == 3, "the proof shows that it has left"

    hosted(work)


# ---- heartbeats ----------------------------------------------------------------------------------


def test_a_heartbeat_is_no_decision_and_needs_a_proof_younger_than_a_quarter_of_the_session() -> None:
    async def work(made: Hosted) -> None:
        joined = await made.join("a")
        count = len(made.log.applied)
        for wait_s, proofs in ((F_S, 0), (0.01, 1), (F_S, 1), (0.01, 2)):
            await skip(wait_s)
            assert await made.beat("a") == joined
            assert (made.log.proofs, len(made.log.applied)) == (proofs, count)
        with pytest.raises(GenerationFencedError):
            await made.beat("b")
        assert made.log.proofs == 3, "for a member that is not known"
        with pytest.raises(GenerationFencedError):
            await made.coordinator.heartbeat("g", "a", joined.generation + 1)
        with pytest.raises(NotFoundError, match="group 'h' does not exist"):
            await made.coordinator.heartbeat("h", "a", 1)

    hosted(work)


def test_a_released_partition_goes_to_its_next_holder() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b")
        revoked = (await made.beat("a")).revoking
        assert len(revoked) == 2
        assert (await made.beat("b")).assigned == ()
        kept = await made.beat("a", *revoked)
        assert (len(kept.assigned), kept.revoking) == (2, ())
        assert (await made.beat("b")).assigned == revoked

    hosted(work)


def test_a_member_is_removed_when_it_was_silent_for_its_session() -> None:
    async def work(made: Hosted) -> None:
        for member in "abc":
            await made.join(member)
        await skip(3)
        await made.beat("b")
        await skip(SESSION_S - 3 - 0.01)
        await made.coordinator.expire()
        assert made.members() == ["a", "b", "c"]
        await skip(0.02)
        await made.coordinator.expire()
        assert made.members() == ["b"]
        await skip(2.97)
        await made.coordinator.expire()
        assert made.members() == ["b"]
        await skip(0.03)
        await made.coordinator.expire()
        assert made.members() == []
        assert len(made.decisions(MembersDecision)) == 5
        await skip(60)
        await made.coordinator.expire()
        assert len(made.decisions(MembersDecision)) == 5

    hosted(work)


def test_a_coordinator_searches_for_silent_members_all_the_time() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b", group="h")
        made.tasks.start(made.coordinator.run(), "coordinator")
        await skip(SESSION_S - EXPIRY_CHECK_S / 2)
        assert (made.members(), made.members("h")) == (["a"], ["b"])
        await skip(EXPIRY_CHECK_S)
        assert (made.members(), made.members("h")) == ([], [])

    hosted(work)


def test_a_heartbeat_that_comes_too_late_is_refused_also_before_a_search() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b")
        await skip(SESSION_S - 1)
        await made.beat("b")
        await skip(1)
        with pytest.raises(GenerationFencedError, match="'a' is not in the group; it left, or was silent"):
            await made.beat("a")
        assert made.members() == ["b"]
        assert (await made.beat("b")).assigned == tuple(LOGS)

    hosted(work)


def test_a_new_member_with_a_short_session_is_searched_for_in_time() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.coordinator.expire()  # it notes that none can be silent for 8 s
        await made.coordinator.join("g", "b", LOGS, 1_000)
        await skip(1)
        await made.coordinator.expire()
        assert made.members() == ["a"]

    hosted(work)


# ---- positions -----------------------------------------------------------------------------------


def test_positions_are_stored_by_the_holder_and_read_after_a_proof() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        generation = made.generation()
        await made.coordinator.commit("g", "a", generation, at(5, *LOGS[:2]), 7)
        (decision,) = made.decisions(CommitDecision)
        assert (decision.member, decision.generation, decision.number) == ("a", generation, 7)
        with pytest.raises(GenerationFencedError, match="commit 6 of member 'a' comes late"):
            await made.coordinator.commit("g", "a", generation, at(9), 6)
        assert await made.coordinator.committed("g", LOGS[1:]) == at(5, LOGS[1])
        made.log.on_fresh = lambda: made.machine.groups["g"].positions.update(at(6, LOGS[1]))
        assert await made.coordinator.committed("g", LOGS[1:]) == at(6, LOGS[1])
        made.log.on_fresh = int
        assert await made.coordinator.committed("none", LOGS) == {}
        await made.coordinator.commit("g", "a", generation, at(1))
        assert made.decisions(CommitDecision)[-1].number == 0, "not counted"

    hosted(work)


@pytest.mark.parametrize("call", ["commit", "delete", "import", "describe"])
def test_silent_members_are_removed_before_an_operator_changes_their_group(call: str) -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await skip(SESSION_S - 1)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "commit": lambda: made.coordinator.commit("g", "", -1, at(5)),
            "delete": lambda: made.coordinator.delete_group("g"),
            "import": lambda: made.coordinator.import_group(FormerGroup("g", 0, (), at(5))),
        }
        if call in calls:
            with pytest.raises(InvalidRequestError, match="active members"):
                await calls[call]()
        await skip(1)
        if call == "describe":
            assert (await made.coordinator.describe("g")).members == {}
        else:
            await calls[call]()
            assert await made.coordinator.groups() == ([] if call == "delete" else ["g"])

    hosted(work)


def test_imported_positions_are_read_back() -> None:
    async def work(made: Hosted) -> None:
        former = FormerGroup("g", 30, (), at(5, *LOGS[:2]))
        await made.coordinator.import_group(former)
        assert (made.generation(), made.machine.groups["g"].positions) == (30, at(5, *LOGS[:2]))
        made.machine.groups["g"].positions |= at(8)
        await made.coordinator.import_group(former)
        assert made.machine.groups["g"].positions == at(8) | at(5, LOGS[1])
        for wrong in (at(4, LOGS[1]), {}):

            def lose(positions: dict[ReadPartition, Committed] = wrong) -> None:
                made.machine.groups["g"].positions = at(8) | positions

            made.log.on_fresh = lose
            with pytest.raises(QueueError, match="does not show the position of group 'g'"):
                await made.coordinator.import_group(former)

    hosted(work)


# ---- operators -----------------------------------------------------------------------------------


def test_an_operator_sees_groups_with_members_and_positions_after_a_proof() -> None:
    async def work(made: Hosted) -> None:
        await made.join("b")
        await made.join("a", group="a-group")
        await made.coordinator.commit("g", "b", made.generation(), at(5, LOGS[1], LOGS[0]))
        made.log.delay_s = 1
        began_s = now_s()
        assert await made.coordinator.groups() == ["a-group", "g"]
        found = await made.coordinator.describe("g")
        assert now_s() == began_s + 2
        assert (found.group, found.generation, found.members) == ("g", 1, {"b": tuple(LOGS)})
        assert list(found.committed.items()) == list(at(5, LOGS[0], LOGS[1]).items())
        with pytest.raises(NotFoundError):
            await made.coordinator.describe("none")
        with pytest.raises(NotFoundError):
            await made.coordinator.delete_group("none")

    hosted(work)


def test_a_deleted_group_that_is_made_again_begins_without_the_times_of_its_members() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.coordinator.leave("g", "a")
        await made.coordinator.delete_group("g")
        assert (await made.join("a")).generation == 3

    hosted(work)


def test_a_deleted_topic_is_removed_from_members_and_positions() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a", partitions=[*LOGS, OTHER])
        await made.join("b", group="h", partitions=[OTHER])
        await made.coordinator.commit("g", "a", made.generation(), at(5, LOGS[0], OTHER))
        await made.coordinator.commit("only", "", -1, at(5, LOGS[3]))
        assert made.coordinator.named_topics() == {
            ("clicks", LOGS[0].topic_id): set(LOGS),
            ("views", OTHER.topic_id): {OTHER},
        }
        count = len(made.decisions(MembersDecision))
        await made.coordinator.forget(LOGS)
        changed = made.decisions(MembersDecision)[count:]
        assert [each.group for each in changed] == ["g"]
        assert made.decisions(ForgetDecision) == [ForgetDecision(pack(LOGS))]
        assert made.coordinator.named_topics() == {("views", OTHER.topic_id): {OTHER}}
        assert (await made.beat("a")).assigned == (OTHER,)
        assert await made.coordinator.committed("g", [*LOGS, OTHER]) == at(5, OTHER)

    hosted(work)


def test_a_partition_that_a_member_holds_and_wants_no_more_is_named() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b", partitions=[OTHER])
        await made.join("a", partitions=[OTHER])
        assert set(LOGS) <= made.coordinator.named_topics()["clicks", LOGS[0].topic_id]

    hosted(work)


@pytest.mark.parametrize("error", [ThrottledError("many wait"), TooLargeError("no entry takes it")])
def test_a_coordinator_searches_on_when_the_log_takes_no_decision_about_a_group(error: MemqError) -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        await made.join("b", group="h")
        made.tasks.start(made.coordinator.run(), "coordinator")
        await skip(SESSION_S - 1)
        made.log.errors = [error]
        await skip(1 + EXPIRY_CHECK_S)
        assert made.log.errors == []
        assert made.members("h") == [], "it is behind the other group"
        await skip(EXPIRY_CHECK_S)
        assert made.members() == []

    hosted(work)


def test_a_coordinator_ends_with_its_log() -> None:
    async def work(made: Hosted) -> None:
        await made.join("a")
        running = asyncio.create_task(made.coordinator.run())
        await skip(SESSION_S - 1)
        made.log.errors = [MovedError("another owner")]
        with pytest.raises(MemqError):
            await running

    hosted(work)
