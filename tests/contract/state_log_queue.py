"""A memory queue whose groups are on a state log in the same queue, at one owner: for the contract of groups."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from memq.groups import GroupState, Membership
from memq.groups.coordinator import GroupCoordinator
from memq.groups.machine import GROUPS_MACHINE, GroupMachine
from memq.notification.memory import MemoryQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, ReadPartition
from tests.contract.manual_clock import ManualClock

SERVICE = ReadPartition("_memq_state", "5e" * 16, 0)


class StateLogQueue(MemoryQueue):
    """Opens the state log with its first request about a group."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self._runtime = Runtime(clock=clock, random=Random(1))
        self._events = EventLog(clock)
        self._tasks = TaskOwner(self._failed, self._events)
        self._coordinator: GroupCoordinator | None = None
        self._state_logs: list[StateLog] = []
        self._epoch = 0

    def _failed(self, error: BaseException) -> None:
        raise error

    async def reopen(self, opened_s: float) -> GroupCoordinator:
        """Open the next epoch, as a new owner does at the monotonic time `opened_s`."""
        await self.create([SERVICE], 30_000)
        machine = GroupMachine()
        log = StateLog(
            self,
            MemoryHandler(self._runtime.clock),
            self._runtime,
            self._events,
            SERVICE,
            StateLogSettings(cluster="memq", broker="b"),
            lambda: {GROUPS_MACHINE: machine},
        )
        self._epoch += 1
        await log.open(self._epoch)
        self._state_logs.append(log)
        self._coordinator = GroupCoordinator(log, machine, self._runtime.clock, self._tasks, opened_s)
        return self._coordinator

    async def coordinator(self) -> GroupCoordinator:
        """Return the coordinator; open its log first, if none has."""
        long_ago_s = self._runtime.clock.monotonic() - 3_600  # no session is longer because of the opening
        return self._coordinator or await self.reopen(long_ago_s)

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        return await (await self.coordinator()).join(group, member, partitions, session_timeout_ms)

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        return await (await self.coordinator()).heartbeat(group, member, generation, released)

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        await (await self.coordinator()).leave(group, member, generation)

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        for partition in positions:
            self.log(partition)
        await (await self.coordinator()).commit(group, member, generation, positions, number)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        return await (await self.coordinator()).committed(group, partitions)

    async def groups(self, *, proven: bool = True) -> Sequence[str]:
        return await (await self.coordinator()).groups(proven=proven)

    async def describe(self, group: str, *, proven: bool = True) -> GroupState:
        return await (await self.coordinator()).describe(group, proven=proven)

    async def delete_group(self, group: str) -> None:
        await (await self.coordinator()).delete_group(group)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        await super().drop(partitions)
        await (await self.coordinator()).forget(partitions)

    async def close(self) -> None:
        await self._tasks.stop()
        for log in self._state_logs:
            await log.close()
        await super().close()
