"""Moves the groups that an earlier release kept in the queue to state logs, through the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.errors import MemqError, NotFoundError, RetryableError
from memq.groups import GroupState
from memq.groups.remote import RemoteGroups
from memq.runtime.clock import backoff_s
from memq.runtime.runtime import Runtime

TRIES = 10  # of one group, while brokers open its state log


@dataclass(frozen=True, slots=True)
class GroupMigration:
    """A group as it was in the queue. It was not moved if there is an `error`, or in a dry run."""

    group: str
    members: tuple[str, ...]
    positions: int
    error: MemqError | None = None


async def migrate_groups(
    brokers: str | Sequence[str] | None, *, dry_run: bool = False
) -> AsyncIterator[GroupMigration]:
    """Move each group, and yield it. A run that was interrupted is continued by the next one.

    A group with active members is not moved. With `dry_run` nothing is changed.
    Raises: UnreachableError, QueueError; DeniedError, InvalidRequestError of the brokers about all groups.
    """
    runtime = Runtime()
    pool = LinkPool(runtime, bootstrap_addresses(brokers), owner="admin client")
    try:
        groups = RemoteGroups(BrokerRouter(pool))
        for name in await groups.former_groups():
            try:
                moved = await _moved(groups, name, runtime, dry_run=dry_run)
            except NotFoundError:
                continue  # another run has moved it
            except MemqError as error:
                yield GroupMigration(name, (), 0, error)
            else:
                yield GroupMigration(name, tuple(moved.members), len(moved.committed))
    finally:
        await pool.close()


async def _moved(groups: RemoteGroups, name: str, runtime: Runtime, *, dry_run: bool) -> GroupState:
    for tries in range(1, TRIES):
        try:
            return await groups.move_group(name, dry_run=dry_run)
        except RetryableError:
            await asyncio.sleep(backoff_s(runtime.random, tries, base_s=0.05, most_s=1.0))
    return await groups.move_group(name, dry_run=dry_run)
