"""The present state of queue items for users: state, lease, attempts, payload."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from memq.queues.decisions import ItemState, ItemStatus
from memq.queues.machine import QueueMachine
from memq.queues.meter import QueueCounts, count_waiting
from memq.queues.payloads import LOST, PayloadReader
from memq.queues.scheduler import Item, ItemScheduler, Moment

COUNTED_AT_ONCE = 2_000  # blocks
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


class SeenItems(NamedTuple):
    """Items with their present states, and the bytes of their blocks that exist."""

    items: list[SeenItem]
    blocks: dict[int, bytes]


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


async def counts_of(
    machine: QueueMachine, scheduler: ItemScheduler, now: Moment, prefix: str = ""
) -> dict[str, QueueCounts]:
    """Return the counts of all queues whose names begin with `prefix`.

    All items of a run count as ready, or as delayed, like the first one.
    """
    found: dict[str, list[int]] = {}
    for index, block in enumerate(list(machine.blocks.values()), start=1):
        if not index % COUNTED_AT_ONCE:
            await asyncio.sleep(0)  # let the event loop do other work
        if not block.topic.startswith(prefix):
            continue
        counts = found.setdefault(block.topic, [0] * len(QueueCounts._fields))
        if not block.is_touched:
            count_waiting(counts, block.block.due_ms, block.count, now.wall_ms)
            continue
        for begin, end, status, left_s in scheduler.seen(block, now):
            if status.state is ItemState.DEAD:
                counts[3] += end - begin
            elif left_s:
                counts[1] += end - begin
            elif not status.state.is_over:
                count_waiting(counts, status.due_ms, end - begin, now.wall_ms)
    for run in machine.spilled.runs.values():
        if run.lane.queue.startswith(prefix):
            counts = found.setdefault(run.lane.queue, [0] * len(QueueCounts._fields))
            count_waiting(counts, run.head[0], run.items, now.wall_ms)
    return {topic: QueueCounts(*counts) for topic, counts in found.items()}


def views_of(machine: QueueMachine, scheduler: ItemScheduler, items: Iterable[Item], now: Moment) -> list[SeenItem]:
    """Return the known ones of some items with their present states."""
    found = [view_of(machine, scheduler, item, now) for item in items]
    return [each for each in found if each is not None]


async def seen_items(
    machine: QueueMachine, reader: PayloadReader, views: Iterable[SeenItem], bytes_max: int
) -> SeenItems:
    """Return items with the payloads that exist; `bytes_max` bounds the payloads, except the first one."""
    seen, blocks, room = list[SeenItem](), dict[int, bytes](), bytes_max
    for view in views:
        block = machine.blocks.get(view.item[0])
        if block is not None and view.item[0] not in blocks:
            room -= block.block.length
            if blocks and room < 0:
                break
            with suppress(*LOST):
                blocks[view.item[0]] = await reader.read(block)
        seen.append(view)
    return SeenItems(seen, blocks)
