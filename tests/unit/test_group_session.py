"""A member's session in its group: heartbeats, release of partitions, and allowed commits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from memq.client.consumer.group.session import GroupSession
from memq.errors import DeniedError, GenerationFencedError, MemqError, QueueError
from memq.groups import GroupState, Membership
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.skipping_loop import LongestWait, now_s, run_skipping, skip, skipping_runtime

PARTITION = ReadPartition("clicks", "0" * 32, 0)
OTHER = ReadPartition("clicks", "0" * 32, 1)
HERE = {PARTITION: Committed(Position(0, 5))}
SESSION_MS = 10_000


class Group:
    """A group of one member: each request takes `latency_ms`, and fails with `error` while there is one."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.latency_ms = 0
        self.error: MemqError | None = None
        self.answers: list[MemqError | None] = []  # in place of `error`, for the next requests
        self.asked: list[str] = []
        self.revoking: tuple[ReadPartition, ...] = ()
        self.released: list[ReadPartition] = []
        self.delays_s: list[float] = []  # of the next answers
        self.waits_ms: list[int] = []
        self.left: list[int | None] = []  # generations
        self.session_ms = 0
        self.asked_sessions_ms: list[int] = []

    def _answer(self, what: str) -> Membership:
        self.asked.append(what)
        self.clock.advance(self.latency_ms)
        error = self.answers.pop(0) if self.answers else self.error
        if error is not None:
            raise error
        kept = [partition for partition in self.revoking if partition not in self.released]
        return Membership(1, () if PARTITION in kept else (PARTITION,), tuple(kept), session_ms=self.session_ms)

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        await self._delay()
        self.asked_sessions_ms.append(session_timeout_ms)
        return self._answer("join")

    async def _delay(self) -> None:
        if self.delays_s:
            await skip(self.delays_s.pop(0))

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        self.released += released
        await self._delay()
        return self._answer("heartbeat")

    async def await_change(self, group: str, member: str, generation: int, wait_ms: int) -> Membership | None:
        self.waits_ms.append(wait_ms)
        return await self.heartbeat(group, member, generation)

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        self._answer("leave")
        self.left.append(generation)

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        self._answer(f"commit {number}")

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        raise AssertionError("a session reads no positions")

    async def groups(self) -> Sequence[str]:
        raise AssertionError("a session lists no groups")

    async def describe(self, group: str) -> GroupState:
        raise AssertionError("a session describes no group")

    async def delete_group(self, group: str) -> None:
        raise AssertionError("a session deletes no group")


class Member:
    """A session on a manual clock; `exchange` lets it ask the group once."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.clock = ManualClock()
        self.group = Group(self.clock)
        self.session = GroupSession(
            Runtime(self.clock, chance or random.Random(1)),
            self.group,
            "readers",
            SESSION_MS,
            self._changed,
        )
        self._answered = asyncio.Event()

    def _changed(self) -> None:
        self._answered.set()

    def inside(self) -> bool:
        return self.session.state.inside

    def failure(self) -> MemqError | None:
        return self.session.failure

    async def exchange(self, error: MemqError | None = None) -> None:
        self.group.error = error
        self._answered.clear()
        self.session.kick()
        await self._answered.wait()


def run(
    work: Callable[[Member], Coroutine[Any, Any, None]],
    runner: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
    chance: random.Random | None = None,
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            member = Member(chance)
            member.session.share([PARTITION])
            task = asyncio.create_task(member.session.run())
            try:
                await work(member)
            finally:
                task.cancel()
                await asyncio.wait([task])

    runner(bounded())


def test_a_member_that_is_not_in_its_group_commits_nothing() -> None:
    async def work() -> None:
        member = Member()
        with pytest.raises(GenerationFencedError):
            await member.session.commit(HERE)
        assert member.group.asked == []

    asyncio.run(work())


def test_a_commit_after_one_that_failed_has_a_higher_number() -> None:
    """The failed one may still be on its way: with the same number it would set the positions back."""

    async def work(member: Member) -> None:
        await member.exchange()
        member.group.error = QueueError("the connection was lost")
        with pytest.raises(QueueError):
            await member.session.commit(HERE)
        member.group.error = None
        await member.session.commit(HERE)
        assert member.group.asked[-2:] == ["commit 1", "commit 2"]

    run(work)


def test_a_member_joins_once_and_then_says_that_it_lives() -> None:
    async def work(member: Member) -> None:
        for _ in range(3):
            await member.exchange()
        assert member.group.asked == ["join", "heartbeat", "heartbeat"]
        for _ in range(2):
            await member.session.commit(HERE)
        assert member.group.asked[3:] == ["commit 1", "commit 2"]

    run(work)


def test_partition_that_a_member_never_held_is_released_at_once() -> None:
    """Another member waits for it: not until the next heartbeat is due."""

    async def work(member: Member) -> None:
        other = ReadPartition("clicks", "0" * 32, 1)
        member.group.revoking = (other,)
        await member.exchange()
        await skip(1.0)  # nobody kicks, and the next heartbeat is due after three seconds
        assert member.group.released == [other]
        assert member.group.asked == ["join", "heartbeat"], "once is enough"

    run(work, run_skipping)


def test_a_join_that_failed_is_tried_again() -> None:
    async def work(member: Member) -> None:
        await member.exchange(QueueError("not now"))
        assert not member.inside()
        await member.exchange()
        assert member.inside()
        member.session.share([PARTITION, ReadPartition("clicks", "0" * 32, 1)])
        await member.exchange(QueueError("not now"))
        await member.exchange()
        await member.exchange()
        assert member.group.asked == ["join", "join", "join", "join", "heartbeat"]

    run(work)


def test_requests_that_fail_are_tried_again_after_waits_that_double_up_to_a_second() -> None:
    async def work(member: Member) -> None:
        await member.exchange()
        await member.exchange(QueueError("not now"))
        asked = []
        for _ in range(300):
            asked.append(len(member.group.asked))
            await skip(0.01)
        assert [asked.index(count) for count in range(2, 8)] == pytest.approx([0, 10, 30, 70, 150, 250], abs=1)
        await member.exchange()  # an answer begins the waits again
        await member.exchange(QueueError("not now"))
        first = len(member.group.asked)
        await skip(0.11)
        assert len(member.group.asked) == first + 1

    run(work, run_skipping, LongestWait())


def test_a_member_shares_in_new_partitions_at_once_and_the_same_ones_are_no_news() -> None:
    """Its next heartbeat is seconds away: until then nobody would read a partition that is new."""

    async def work(member: Member) -> None:
        await member.exchange()
        member.session.share([PARTITION])
        await skip(1.0)
        assert member.group.asked == ["join"]
        member.session.share([PARTITION, ReadPartition("clicks", "0" * 32, 1)])
        await skip(0.01)
        assert member.group.asked == ["join", "join"]

    run(work, run_skipping)


def test_the_session_runs_from_the_question_since_the_group_counts_from_when_it_took_it() -> None:
    """The answer came late: by the group's clock the member was silent since it asked."""

    async def work(member: Member) -> None:
        await member.exchange()
        member.group.latency_ms = SESSION_MS - 2_000
        await member.exchange()
        assert member.inside()
        member.group.latency_ms = 2_001
        await member.exchange(QueueError("not now"))
        assert not member.inside()
        assert member.failure() is None

    run(work)


def test_partitions_are_kept_through_errors_within_the_session_and_not_beyond() -> None:
    async def work(member: Member) -> None:
        await member.exchange()
        member.group.latency_ms = SESSION_MS
        await member.exchange(QueueError("not now"))
        assert member.inside()
        member.group.latency_ms = 1
        await member.exchange(QueueError("not now"))
        assert not member.inside()

    run(work)


@pytest.mark.parametrize("asks", ["heartbeat", "join"])
def test_a_member_gives_its_partitions_up_at_the_end_of_its_session_while_a_request_waits(asks: str) -> None:
    """A broker that hangs answers after up to 30 s, and another member may have the partitions by then (G4)."""

    async def work() -> None:
        runtime, changes = skipping_runtime(), list[tuple[float, bool]]()
        group = Group(ManualClock())
        session = GroupSession(
            runtime, group, "readers", SESSION_MS, lambda: changes.append((now_s(), session.state.inside))
        )
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(1)
        assert changes == [(0, True)]
        group.delays_s = [25.0]
        if asks == "join":
            session.share([PARTITION, OTHER])
        await skip(29)
        task.cancel()
        if asks == "join":
            assert changes == [(0, True), (10, False), (26, True), (29, True)]
            assert group.asked == ["join", "join", "heartbeat", "heartbeat"], "the first one proves that it is a member"
        else:
            assert changes[:4] == [(0, True), (10, False), (10, False), (10, True)], "it joins again at once"
            assert group.asked[:3] == ["join", "join", "heartbeat"], "the request that hangs is given up"

    run_skipping(work())


def test_a_member_does_not_believe_a_join_that_was_answered_after_its_session() -> None:
    """The group may have taken it in, heard nothing for a session, and dropped it (G4)."""

    async def work() -> None:
        runtime, changes = skipping_runtime(), list[tuple[float, bool]]()
        group = Group(ManualClock())
        session = GroupSession(
            runtime, group, "readers", SESSION_MS, lambda: changes.append((now_s(), session.state.inside))
        )
        session.share([PARTITION])
        group.delays_s = [SESSION_MS / 1_000, 0, SESSION_MS / 1_000 - 0.1, 0]
        group.answers = [None, GenerationFencedError("it was silent for too long")]
        task = asyncio.create_task(session.run())
        await skip(SESSION_MS / 1_000 + 0.01)
        assert (changes, group.asked) == ([(10, False), (10, False)], ["join", "heartbeat"])
        await skip(SESSION_MS / 1_000)
        task.cancel()
        assert group.asked == ["join", "heartbeat", "join"]
        (at_s, inside) = changes[-1]
        assert inside
        assert at_s == pytest.approx(19.95, abs=0.05)

    run_skipping(work())


@pytest.mark.parametrize("session_ms", [200, 2_000, SESSION_MS])
def test_a_member_gives_its_partitions_up_at_the_end_of_its_session_between_two_tries(session_ms: int) -> None:
    """It pauses up to a second after a request that failed, and another member may have the partitions by then (G4)."""

    async def work() -> None:
        runtime, changes = skipping_runtime(), list[tuple[float, bool]]()
        group = Group(ManualClock())
        session = GroupSession(
            runtime, group, "readers", session_ms, lambda: changes.append((now_s(), session.state.inside))
        )
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(0)
        group.error = QueueError("no broker has it")
        await skip(30)
        task.cancel()
        lost_s = min(at_s for at_s, inside in changes if not inside)
        assert lost_s <= session_ms / 1_000
        assert lost_s >= session_ms / 1_000 - 0.01, "no earlier: a request may still be answered"

    run_skipping(work())


def test_a_session_that_has_ended_gives_nothing_up_later() -> None:
    async def work() -> None:
        runtime, changes = skipping_runtime(), list[float]()
        session = GroupSession(
            runtime, Group(ManualClock()), "readers", SESSION_MS, lambda: changes.append(now_s()), alone=True
        )
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(1)
        task.cancel()
        await skip(2 * SESSION_MS / 1_000)
        assert changes == [0]

    run_skipping(work())


def test_a_member_follows_the_session_of_its_group() -> None:
    async def work() -> None:
        group, lost = Group(ManualClock()), list[float]()
        group.session_ms = 3 * SESSION_MS
        session = GroupSession(skipping_runtime(), group, "readers", SESSION_MS, lambda: None)
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(1)
        assert group.asked_sessions_ms == [SESSION_MS]
        assert group.waits_ms[-1:] in ([], [SESSION_MS]), "a third of the long session"
        group.error = QueueError("no broker has it")
        began_s = now_s()
        while session.state.inside:
            await skip(0.1)
            lost.append(now_s() - began_s)
        task.cancel()
        assert 2 * SESSION_MS / 1_000 - 1 <= lost[-1] <= 3 * SESSION_MS / 1_000
        group.error, group.session_ms = None, 1
        session = GroupSession(skipping_runtime(), group, "readers", SESSION_MS, lambda: None)
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(SESSION_MS / 2_000)
        assert session.state.inside, "never shorter than what the member asked for"
        task.cancel()

    run_skipping(work())


def test_a_member_that_is_alone_leaves_by_its_generation_and_only_from_inside() -> None:
    async def work() -> None:
        group = Group(ManualClock())
        session = GroupSession(skipping_runtime(), group, "readers", SESSION_MS, lambda: None, alone=True)
        session.share([PARTITION])
        await session.leave(1.0)
        assert group.left == [], "it has not joined yet"
        task = asyncio.create_task(session.run())
        await skip(1)
        task.cancel()
        generation = session.state.generation
        await session.leave(1.0)
        await session.leave(1.0)
        assert (group.left, session.state.inside) == ([generation], False)

    run_skipping(work())


def test_permanent_errors_reach_the_user_and_fencing_rejoins() -> None:
    async def work(member: Member) -> None:
        await member.exchange()
        await member.exchange(GenerationFencedError("another member has it"))
        assert member.failure() is None
        assert not member.inside()
        await member.exchange()
        assert member.inside(), "it joins again"
        await member.exchange(DeniedError("no right to read the group"))
        assert isinstance(member.failure(), DeniedError)
        assert member.inside()

    run(work)


def test_a_member_that_leaves_says_so_and_holds_nothing() -> None:
    async def work(member: Member) -> None:
        await member.exchange()
        await member.session.leave(1.0)
        assert member.group.asked[-1] == "leave"
        assert not member.inside()
        member.group.error = QueueError("not now")
        await member.session.leave(1.0)  # nobody hears it: the session times out there

    run(work)


@pytest.mark.parametrize(("silent_ms", "lost"), [(SESSION_MS - 1, ()), (SESSION_MS, (PARTITION,))])
def test_a_member_that_joins_again_after_a_session_of_silence_has_lost_what_it_held(
    silent_ms: int, lost: tuple[ReadPartition, ...]
) -> None:
    """The group may have dropped it, and given the partition to another one meanwhile."""

    async def work(member: Member) -> None:
        await member.exchange()
        state = member.session.state
        state.confirm_assigned(PARTITION)
        member.clock.advance(silent_ms)
        member.session.share([PARTITION, ReadPartition("clicks", "0" * 32, 1)])
        await member.exchange()
        assert member.group.asked[-1] == "join"
        assert state.changes().lost == lost
        assert PARTITION in state.granted, "it may be assigned again by the same answer"

    run(work)


# ---- heartbeats that wait ------------------------------------------------------------------------


class WaitingOwner(Group):
    """An owner that lets heartbeats wait for `wait_s`, unless something is `news`; notes when each request came."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.came: list[tuple[str, float]] = []
        self.news: asyncio.Event = asyncio.Event()
        self.generation = 1
        self.waits = True
        self.failures = 0

    def _membership(self, asked: str) -> Membership:
        self.came.append((asked, now_s()))
        if self.failures:
            self.failures -= 1
            raise QueueError("not now")
        return Membership(self.generation, (PARTITION,), waits=self.waits)

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        return self._membership("join")

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        return self._membership("heartbeat")

    async def await_change(self, group: str, member: str, generation: int, wait_ms: int) -> Membership | None:
        found = self._membership("wait")
        if not self.waits or generation < self.generation:
            return found
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await self.news.wait()
        except TimeoutError:
            return None
        self.news.clear()
        return Membership(self.generation, (PARTITION,), waits=True)


def with_owner(work: Callable[[WaitingOwner, GroupSession], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        owner = WaitingOwner()
        session = GroupSession(skipping_runtime(), owner, "readers", 9_000, lambda: None)
        session.share([PARTITION])
        task = asyncio.create_task(session.run())
        await skip(0.01)
        try:
            await work(owner, session)
        finally:
            task.cancel()

    run_skipping(bounded())


def test_a_heartbeat_waits_for_a_third_of_the_session_and_the_next_one_follows() -> None:
    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        await skip(30)
        assert owner.came == [("join", 0), *(("wait", 3.0 * number) for number in range(11))]
        assert session.state.inside

    with_owner(work)


def test_after_a_change_the_next_heartbeat_waits_again_at_once() -> None:
    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        await skip(1)
        owner.generation = 2
        owner.news.set()
        await skip(1)
        assert session.state.generation == 2
        assert owner.came == [("join", 0), ("wait", 0), ("wait", 1.01)]

    with_owner(work)


def test_a_kick_ends_a_wait() -> None:
    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        await skip(1)
        session.share([PARTITION, OTHER])
        await skip(1)
        assert owner.came == [("join", 0), ("wait", 0), ("join", 1.01), ("wait", 1.01)]

    with_owner(work)


def test_a_broker_that_lets_no_heartbeat_wait_gets_one_each_third_of_a_session() -> None:
    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        owner.waits = False
        owner.news.set()
        await skip(10)
        assert owner.came == [("join", 0), ("wait", 0), *(("wait", 3.01 + 3 * number) for number in range(3))]

    with_owner(work)


def test_an_owner_that_answers_at_once_without_news_is_not_asked_again_at_once() -> None:
    """A session may be too short for a wait, and a part of an answer may be wrong."""

    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        owner.news.set()
        await skip(1)
        assert owner.came == [("join", 0), ("wait", 0)]
        await skip(3)
        assert owner.came == [("join", 0), ("wait", 0), ("wait", 3.01)]

    with_owner(work)


def test_after_an_error_a_heartbeat_does_not_wait() -> None:
    """If its answer failed, too, the session would end."""

    async def work(owner: WaitingOwner, session: GroupSession) -> None:
        await skip(1)
        owner.failures = 2
        await skip(3)
        assert [asked for asked, _ in owner.came] == ["join", "wait", "wait", "heartbeat", "heartbeat", "wait"]
        assert owner.came[-1][1] < 3.5

    with_owner(work)
