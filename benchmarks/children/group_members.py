"""Many members of groups on one event loop, each with a connection to its owner; they read no records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop

from benchmarks.children.commands import answer, commands_async, options
from memq.broker.process import calm_collector
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.group.membership import MemberState
from memq.client.consumer.group.owner import Answer, GroupOwner
from memq.client.consumer.group.session import GroupSession
from memq.client.link_pool import LinkPool
from memq.errors import MemqError, RetryableError
from memq.groups.remote import RemoteGroups
from memq.notification.remote import Ask
from memq.protocol.frames import Api
from memq.protocol.group_messages import HeartbeatRequest
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition


class TimedAsk:
    """Asks as `ask` does; notes how long requests take that do not wait for a change."""

    def __init__(self, ask: Ask, crowd: Crowd) -> None:
        self._ask = ask
        self._crowd = crowd

    async def __call__(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        began_s = time.monotonic()
        self._crowd.requests += 1
        try:
            found = await self._ask(api, message, answer, timeout_s=timeout_s)
        except RetryableError:
            self._crowd.retries += 1
            raise
        except MemqError:
            self._crowd.fenced += 1
            raise
        if api == Api.JOIN:
            self._crowd.last_join_s = max(self._crowd.last_join_s, time.monotonic())
        if not (isinstance(message, HeartbeatRequest) and message.wait_ms):
            self._crowd.slow_s.append(time.monotonic() - began_s)
        return found


@dataclass
class Crowd:
    """All members, and when each got its assignment; a group is settled when its members hold all partitions."""

    runtime: Runtime
    logs: list[ReadPartition]
    members: int  # of each group
    session_ms: int
    states: dict[tuple[int, int], MemberState] = field(default_factory=dict)
    last_join_s: float = 0.0
    settled_s: dict[int, float] = field(default_factory=dict)
    slow_s: list[float] = field(default_factory=list)  # how long requests took that do not wait
    requests: int = 0
    retries: int = 0
    fenced: int = 0

    def pool(self, address: str) -> LinkPool:
        """Return the connection by which the members of a group join: to any broker."""
        return LinkPool(self.runtime, [parse_address(address)])

    async def join(self, pool: LinkPool, group: int, number: int) -> None:
        """Stay in the group as a consumer does, until cancelled."""
        groups = RemoteGroups(TimedAsk(GroupOwner(pool, BrokerRouter(pool), self.runtime.clock), self))
        session = GroupSession(
            self.runtime, groups, f"g{group}", self.session_ms, lambda: self.note(group, number, session)
        )
        session.share(self.logs)
        await session.run()

    def note(self, group: int, number: int, session: GroupSession) -> None:
        """Take the changes of a member; a group is settled when its members hold each partition once."""
        state, changes = session.state, session.state.changes()
        self.states[group, number] = state
        for partition in changes.lost:
            state.confirm_lost(partition)
        for partition in changes.revoked:
            state.confirm_revoked(partition)
        for partition in changes.assigned:
            state.confirm_assigned(partition)
        held = [self.states.get((group, each)) for each in range(self.members)]
        assigned = [log for each in held if each is not None for log in each.granted]
        moving = any(each is None or each.released for each in held)
        if not moving and len(assigned) == len(set(assigned)) == len(self.logs):
            self.settled_s.setdefault(group, time.monotonic())
        else:
            self.settled_s.pop(group, None)


async def main(
    addresses: Sequence[str], topic: str, topic_id: str, groups: int, members: int, partitions: int, session_ms: int
) -> None:
    """`join` lets all members join and waits for all assignments; `stay` lets them send heartbeats."""
    logs = [ReadPartition(topic, topic_id, number) for number in range(partitions)]
    crowd = Crowd(Runtime(), logs, members, session_ms)
    who = [(group, number) for group in range(groups) for number in range(members)]
    pools = [crowd.pool(addresses[group % len(addresses)]) for group in range(groups)]
    calm_collector()
    answer(members=len(who))
    work: list[asyncio.Task[None]] = []
    async for command in commands_async():
        crowd.slow_s.clear()
        crowd.requests = 0
        if command["command"] == "join":
            began_s = time.monotonic()
            for group, number in who:
                work.append(asyncio.create_task(crowd.join(pools[group], group, number)))
                if len(work) % 100 == 0:
                    await asyncio.sleep(command["over_s"] * 100 / len(who))
            while len(crowd.settled_s) < groups and time.monotonic() < began_s + command["wait_s"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            settled_s = max(crowd.settled_s.values(), default=0.0) if len(crowd.settled_s) == groups else -1.0
            seconds = settled_s - crowd.last_join_s if settled_s >= 0 else -1.0
            answer(seconds=seconds, joined_s=crowd.last_join_s - began_s, **facts(crowd))
        else:
            await asyncio.sleep(command["seconds"])
            answer(**facts(crowd))
    for task in work:
        task.cancel()


def facts(crowd: Crowd) -> dict[str, float]:
    """Return counts, and how long the requests took since the last command."""
    slow = sorted(crowd.slow_s) or [0.0]
    return {
        "requests": crowd.requests,
        "p50_ms": 1_000 * slow[len(slow) // 2],
        "p99_ms": 1_000 * slow[int(0.99 * (len(slow) - 1))],
        "retries": crowd.retries,
        "fenced": crowd.fenced,
        "settled": len(crowd.settled_s),
    }


if __name__ == "__main__":
    uvloop.run(main(**options()))
