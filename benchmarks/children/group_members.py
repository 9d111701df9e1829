"""Many members of groups on one event loop, each with a connection of its own; they read no records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from benchmarks.children.commands import answer, commands_async, options
from memq.broker.process import calm_collector
from memq.errors import MemqError, RetryableError
from memq.groups import Membership
from memq.groups.remote import RemoteGroups
from memq.protocol.link import connect_link
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition

HEARTBEAT_S = 3.0  # as consumers have it
CONNECTING_AT_ONCE = 100


@dataclass
class Crowd:
    """All members, and when each got its assignment; a group is settled when its members hold all partitions."""

    runtime: Runtime
    logs: list[ReadPartition]
    members: int  # of each group
    session_ms: int
    holds: dict[tuple[int, int], Membership] = field(default_factory=dict)
    last_join_s: float = 0.0
    settled_s: dict[int, float] = field(default_factory=dict)
    slow_s: list[float] = field(default_factory=list)  # how long requests took
    retries: int = 0
    fenced: int = 0

    async def connect(self, address: str, limit: asyncio.Semaphore) -> RemoteGroups:
        async with limit:
            link = await connect_link(self.runtime, None, parse_address(address), client="bench")
        return RemoteGroups(link.request)

    async def join(self, groups: RemoteGroups, group: int, number: int) -> None:
        """Join, and send heartbeats until cancelled."""
        name, member = f"g{group}", f"m{number}"
        while True:
            try:
                known = await self._timed(groups, name, member, None)
                self.last_join_s = max(self.last_join_s, time.monotonic())
                while True:
                    self.note(group, number, known)
                    if not known.revoking:
                        await asyncio.sleep(HEARTBEAT_S)
                    known = await self._timed(groups, name, member, known)
            except RetryableError:
                self.retries += 1
                await asyncio.sleep(0.2)
            except MemqError:
                self.fenced += 1

    async def _timed(self, groups: RemoteGroups, name: str, member: str, known: Membership | None) -> Membership:
        began_s = time.monotonic()
        if known is None:
            found = await groups.join(name, member, self.logs, self.session_ms)
        else:
            found = await groups.heartbeat(name, member, known.generation, known.revoking)
        self.slow_s.append(time.monotonic() - began_s)
        return found

    def note(self, group: int, number: int, known: Membership) -> None:
        """Note what a member holds; a group is settled when its members hold each partition once."""
        self.holds[group, number] = known
        held = [self.holds.get((group, each)) for each in range(self.members)]
        assigned = [log for each in held if each is not None for log in each.assigned]
        moving = any(each is None or each.revoking for each in held)
        if not moving and len(assigned) == len(set(assigned)) == len(self.logs):
            self.settled_s.setdefault(group, time.monotonic())
        else:
            self.settled_s.pop(group, None)


async def main(
    addresses: Sequence[str], topic: str, topic_id: str, groups: int, members: int, partitions: int, session_ms: int
) -> None:
    """Connect all members; `join` lets them join and waits for all assignments; `stay` lets them send heartbeats."""
    logs = [ReadPartition(topic, topic_id, number) for number in range(partitions)]
    crowd = Crowd(Runtime(), logs, members, session_ms)
    limit = asyncio.Semaphore(CONNECTING_AT_ONCE)
    who = [(group, number) for group in range(groups) for number in range(members)]
    queues = await asyncio.gather(*(crowd.connect(addresses[at % len(addresses)], limit) for at, _ in enumerate(who)))
    calm_collector()
    answer(connected=len(queues))
    work: list[asyncio.Task[None]] = []
    async for command in commands_async():
        crowd.slow_s.clear()
        if command["command"] == "join":
            began_s = time.monotonic()
            for remote, (group, number) in zip(queues, who, strict=True):
                work.append(asyncio.create_task(crowd.join(remote, group, number)))
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
        "requests": len(crowd.slow_s),
        "p50_ms": 1_000 * slow[len(slow) // 2],
        "p99_ms": 1_000 * slow[int(0.99 * (len(slow) - 1))],
        "retries": crowd.retries,
        "fenced": crowd.fenced,
        "settled": len(crowd.settled_s),
    }


if __name__ == "__main__":
    uvloop.run(main(**options()))
