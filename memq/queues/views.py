"""The present state of queue items for users: state, lease, attempts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memq.queues.decisions import ItemState, ItemStatus
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Item, ItemScheduler, Moment

READY, DELAYED, LEASED = "ready", "delayed", "leased"  # the other states have the names of `ItemState`


class SeenItem(NamedTuple):
    """An item with its present state.

    `state` is ready, delayed, leased, dead, acked, expired or cancelled. `left_ms` is the time left of the lease.
    `due_ms` and `expires_ms` are Unix times; `expires_ms` is 0 for none. If the block has ended, only the state is
    known.
    """

    item: Item
    state: str
    attempts: int = 0
    note: bytes = b""
    due_ms: int = 0
    left_ms: int = 0
    priority: int = 0
    expires_ms: int = 0
    key: str = ""


def view_of(machine: QueueMachine, scheduler: ItemScheduler, item: Item, now: Moment) -> SeenItem | None:
    """Return an item with its present state; None for an unknown item."""
    state, block = machine.state_of(*item), machine.blocks.get(item[0])
    if state is None or block is None:
        return None if state is None else SeenItem(item, state.name.lower())
    ((*_, status, left_s),) = scheduler.seen(block, now, item[1], item[1] + 1)
    return SeenItem(
        item,
        _state_now(status, left_s, now),
        status.attempts,
        status.note,
        status.due_ms,
        round(left_s * 1_000),
        block.terms.priority,
        block.terms.expires_ms,
        block.terms.key,
    )


def _state_now(status: ItemStatus, left_s: float, now: Moment) -> str:
    if status.state is ItemState.LEASED:
        return LEASED if left_s > 0 else READY
    if status.state is ItemState.READY:
        return READY if status.due_ms <= now.wall_ms else DELAYED
    return status.state.name.lower()


def dead_after(machine: QueueMachine, queue: str, after: Item) -> Iterator[Item]:
    """Yield the dead items of a queue after `after`, in the order of their ids."""
    for id_ in sorted(each for each in machine.dead.get(queue, ()) if each >= after[0]):
        for number in machine.blocks[id_].numbers_in(ItemState.DEAD):
            if (id_, number) > after:
                yield id_, number
