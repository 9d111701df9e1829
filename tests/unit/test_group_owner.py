"""The member's requests to the owner of its group: one that hangs is left, and others are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.consumer.group.owner import CONNECT_S, HEARTBEAT_S, REQUEST_S, GroupOwner
from memq.client.link_pool import LinkPool
from memq.errors import MemqError, TimedOutError
from memq.protocol.frames import Api
from memq.protocol.group_messages import (
    CommitAnswer,
    CommitRequest,
    HeartbeatRequest,
    JoinRequest,
    MembershipAnswer,
)
from memq.runtime.network import Address, parse_address
from tests.skipping_loop import LoopClock, now_s, run_skipping, skip

OWNER = "b1:9876"
NAMED = MembershipAnswer(generation=1, owner=OWNER)


class HangingOwner:
    """The pool of a member, and a link to the owner that never answers."""

    def __init__(self) -> None:
        self.address = parse_address(OWNER)
        self.aborted: list[MemqError] = []
        self.asked: list[Api] = []

    def separate(self) -> HangingOwner:
        return self

    async def session(self, address: Address) -> Any:
        assert address == self.address
        return SimpleNamespace(link=self)

    async def request(self, api: Api, message: object, answer: object, *, timeout_s: float) -> Any:
        self.asked.append(api)
        await skip(timeout_s)
        raise TimedOutError(f"no answer in {timeout_s:g} s")

    def abort(self, error: MemqError) -> None:
        self.aborted.append(error)


class Others:
    """The other brokers of the cluster. They name the owner, or hang, too."""

    def __init__(self) -> None:
        self.hang = False
        self.asked: list[Api] = []

    async def __call__(self, api: Api, message: Any, answer: type[Any], *, timeout_s: float) -> Any:
        self.asked.append(api)
        if self.hang:
            await skip(timeout_s)
            raise TimedOutError(f"no answer in {timeout_s:g} s")
        return CommitAnswer() if answer is CommitAnswer else NAMED


REQUESTS = [
    (Api.JOIN, JoinRequest(group="g", member="m"), MembershipAnswer, REQUEST_S),
    (Api.COMMIT, CommitRequest(group="g", member="m", generation=1), CommitAnswer, REQUEST_S),
    (Api.HEARTBEAT, HeartbeatRequest(group="g", member="m", generation=1), MembershipAnswer, HEARTBEAT_S),
]


@pytest.mark.parametrize(("api", "message", "answer", "within_s"), REQUESTS)
def test_an_owner_that_hangs_is_left_and_another_broker_is_asked(
    api: Api, message: Any, answer: type[Any], within_s: float
) -> None:
    async def work() -> None:
        hanging, others = HangingOwner(), Others()
        owner = GroupOwner(cast(LinkPool, hanging), others, LoopClock())
        await owner(Api.JOIN, JoinRequest(group="g", member="m"), MembershipAnswer, timeout_s=30.0)
        began_s = now_s()
        with pytest.raises(TimedOutError):
            await owner(api, message, answer, timeout_s=30.0)
        assert (now_s() - began_s, len(hanging.aborted)) == (within_s, 1)
        assert await owner(api, message, answer, timeout_s=30.0)
        assert (now_s() - began_s, others.asked) == (within_s, [Api.JOIN, api])

    run_skipping(work())


@pytest.mark.parametrize(("api", "message", "answer", "within_s"), REQUESTS)
def test_another_broker_may_take_as_long_as_it_waits_for_the_owner(
    api: Api, message: Any, answer: type[Any], within_s: float
) -> None:
    async def work() -> None:
        others = Others()
        others.hang = True
        with pytest.raises(TimedOutError):
            await GroupOwner(cast(LinkPool, HangingOwner()), others, LoopClock())(api, message, answer, timeout_s=30.0)
        assert now_s() == within_s + CONNECT_S

    run_skipping(work())


def test_a_request_with_a_shorter_time_out_keeps_it() -> None:
    async def work() -> None:
        owner = GroupOwner(cast(LinkPool, HangingOwner()), Others(), LoopClock())
        await owner(Api.JOIN, JoinRequest(group="g", member="m"), MembershipAnswer, timeout_s=30.0)
        with pytest.raises(TimedOutError):
            await owner(Api.COMMIT, REQUESTS[1][1], CommitAnswer, timeout_s=2.0)
        assert now_s() == 2.0

    run_skipping(work())
