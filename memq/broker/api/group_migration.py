"""Moves the groups that an earlier release kept in the queue to state logs: one by one, and once.

A group is read, imported into its state log, read back there, and removed from the queue. So a move that ends at any
point can be repeated. While the queue has groups, no request about groups is answered: a member of a group that was not
moved yet would begin as that of a new group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from memq.broker.services import Services
from memq.errors import InvalidRequestError, MemqError, NotFoundError, QueueError
from memq.groups.coordinator import GroupCoordinator
from memq.notification import FormerGroup

EQUAL_READS_TRIES = 5  # until two reads of a group in a row are equal
NAMES_KEPT_S = 1.0  # the names are read again after this time, while the queue has groups
FindCoordinator = Callable[[str], Awaitable[GroupCoordinator]]


class GroupMigrator:
    """The groups in the queue of a broker.

    `alone`: no other process uses the queue, as in a data folder. Then the broker moves the groups itself, and former
    members do not count: they were members at an earlier run of this broker.
    """

    def __init__(self, services: Services, *, alone: bool) -> None:
        self._services = services
        self._former = services.queue.former
        self._alone = alone
        self._none_left = False
        self._names: tuple[str, ...] = ()
        self._names_read_s = -NAMES_KEPT_S
        self._turn = asyncio.Lock()
        self._checked: tuple[float, MemqError | None] = (-1.0, None)  # when the last check ended, and its error

    async def names(self) -> list[str]:
        """Return the names of the groups in the queue, sorted.

        The queue is asked twice, because one answer may be wrong.
        """
        return sorted({name for _ in range(2) for name in await self._former.names()})

    async def check(self, find: FindCoordinator) -> None:
        """Return if the queue has no groups, and no broker of an earlier release can make one.

        Raises: InvalidRequestError, which names the tool; as `move`.
        """
        if self._none_left:
            return
        clock = self._services.runtime.clock
        asked_s = clock.monotonic()
        async with self._turn:
            ended_s, failure = self._checked
            if ended_s > asked_s and failure is not None:
                raise failure  # one try for all that wait: else each would wait for those before its own
            if ended_s <= asked_s and clock.monotonic() - self._names_read_s >= NAMES_KEPT_S:
                try:
                    await self._check(find, clock.monotonic())
                except MemqError as error:
                    self._checked = clock.monotonic(), error
                    raise
                self._checked = clock.monotonic(), None
        if self._names:
            raise InvalidRequestError(
                f"the queue has {len(self._names)} groups of an earlier release, first '{self._names[0]}'",
                hint="move them with memq group migrate; --dry-run shows them",
            )

    async def _check(self, find: FindCoordinator, now_s: float) -> None:
        self._names = tuple(await self.names())
        if self._alone and self._names:
            for name in self._names:
                await self.move(name, await find(name))
            self._names = tuple(await self.names())
        if not self._names:
            await self.check_brokers()
        self._none_left, self._names_read_s = not self._names, now_s

    async def check_brokers(self) -> None:
        """Refuse while a broker of an earlier release runs: it takes members into groups in the queue.

        Raises: InvalidRequestError; as the coordinator.
        """
        earlier = [entry.id for entry in await self._services.coordinator.brokers() if not entry.state_logs]
        if earlier:
            raise InvalidRequestError(
                f"broker '{min(earlier)}' is of an earlier release, and takes members into groups in the queue",
                hint="upgrade all brokers first",
            )

    async def read(self, name: str) -> FormerGroup:
        """Return a group as two reads in a row show it. Raises: NotFoundError, QueueError."""
        before = await self._former.read(name)
        for _ in range(EQUAL_READS_TRIES):
            found = await self._former.read(name)
            if found == before:
                return found
            before = found
        raise QueueError(f"{EQUAL_READS_TRIES} reads of group '{name}' in the queue differ", hint="stop its consumers")

    async def move(self, name: str, coordinator: GroupCoordinator) -> FormerGroup:
        """Move a group to its coordinator, and return it as it was in the queue.

        Raises: NotFoundError; InvalidRequestError if it has members; QueueError if it changes meanwhile; as
        `GroupCoordinator.import_group`.
        """
        former = await self.read(name)
        if not self._alone and former.members:
            raise InvalidRequestError(
                f"group '{name}' has {len(former.members)} active members in the queue, first '{former.members[0]}'",
                hint="stop its consumers, wait for the end of their sessions, and repeat the command",
            )
        await coordinator.import_group(former)
        if not self._alone and await self.read(name) != former:
            raise QueueError(f"group '{name}' was changed in the queue while it was moved", hint="stop its consumers")
        with suppress(NotFoundError):  # another run has removed it
            await self._former.remove(name)
        self._names_read_s = -NAMES_KEPT_S
        text = f"group '{name}' with {len(former.committed)} positions is on its state log, and not in the queue"
        self._services.events.info("group-moved", text)
        return former
