"""Blocks on their way into objects below `<cluster>/held/`, and into the state of a service partition.

Blocks that arrive together go into one object, and become one decision. What arrives meanwhile goes into the next
object. The answers go out when the decision counts (S4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from awscrt.checksums import crc32c

from memq.errors import MemqError, NotReadyError, ThrottledError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target, held_object_end
from memq.format.key import held_object_key
from memq.limits import KIB, MIB
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.state_log import Answer
from memq.storage_handlers import StorageHandler

WAITING_BYTES_MAX = 64 * MIB  # of blocks that wait, or are being stored
OBJECT_BYTES = 8 * MIB  # an object takes no further block from this size on
STORES_AT_ONCE = 4
PROMPT_BYTES = 256 * KIB  # from this size on, blocks do not wait for the end of a gap
STORE_TIMEOUT_S = 60.0
DECISION_BYTES = 48 * KIB  # of an entry of 64 KiB
BLOCK_COST, PLACE_COST = 56, 64  # bytes of a decision: for a block, and for object and target without their names

Decide = Callable[[str, Sequence[HeldLane]], Awaitable[Sequence[Answer]]]  # an answer for each block, in order


@dataclass(frozen=True, slots=True)
class NewHold:
    """A block to be held: its identity, target, lane, due time (Unix ms) and bytes."""

    id: HoldId
    next: int
    target: Target
    lane: str
    due_ms: int
    data: bytes


class StoringParts(Protocol):
    """The parts that store blocks.

    `key_valid_s` is the time after its first put in which an object may be named (ADR 6).
    """

    @property
    def cluster(self) -> str:
        """The cluster."""
        ...

    @property
    def store(self) -> StorageHandler:
        """The store for new objects."""
        ...

    @property
    def runtime(self) -> Runtime:
        """Clock and random numbers."""
        ...

    @property
    def events(self) -> EventLog:
        """The log of events."""
        ...

    @property
    def key_valid_s(self) -> float:
        """See above."""
        ...

    @property
    def shard(self) -> int:
        """The id of the service partition in the index of objects."""
        ...


class ArrivingBlocks:
    """Stores the arriving blocks of one service partition as objects, and adds them to the state.

    `decide` adds the blocks of an object to the state. `settled` gets each block with its answer, before the callers of
    `take`. While an object is stored, less than PROMPT_BYTES wait until `gap_s` after its beginning. Otherwise 1,000
    small blocks per second would be 1,000 objects, each with an fsync or a PUT of its own.
    """

    def __init__(
        self,
        parts: StoringParts,
        tasks: TaskOwner,
        decide: Decide,
        settled: Callable[[NewHold, Answer], None],
        gap_s: float = 0.0,
    ) -> None:
        self._parts = parts
        self._tasks = tasks
        self._decide = decide
        self._settled = settled
        self._arrived: dict[HoldId, tuple[NewHold, asyncio.Future[Answer]]] = {}
        self._pending: dict[HoldId, asyncio.Future[Answer]] = {}
        self._waiting_bytes = 0
        self._stores = 0
        self._gap_s = gap_s
        self._arrived_bytes = 0
        self._began_s = 0.0  # of the latest store
        self._is_paused = False

    def __len__(self) -> int:
        return len(self._pending)

    def pending(self, hold: HoldId) -> asyncio.Future[Answer] | None:
        """Return the future answer to a block that is being stored; None for another one."""
        return self._pending.get(hold)

    def take(self, new: NewHold, check_room: Callable[[], None]) -> asyncio.Future[Answer]:
        """Add a block for the next `store`; return its answer.

        Raises: NotReadyError, ThrottledError; as `check_room`.
        """
        if self._tasks.stopped:
            raise NotReadyError("the service partition of these held records is closed")
        if self._waiting_bytes + len(new.data) > WAITING_BYTES_MAX:
            raise ThrottledError(f"{self._waiting_bytes} bytes of records wait until they are held")
        check_room()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_mark_retrieved)
        self._waiting_bytes += len(new.data)
        self._pending[new.id] = future
        self._arrived[new.id] = new, future
        self._arrived_bytes += len(new.data)
        return future

    def store(self) -> None:
        """Begin to store the blocks that have arrived. Later ones go into the next object."""
        while self._arrived and self._stores < STORES_AT_ONCE and not self._pause():
            chosen = _first_batch(new for new, _ in self._arrived.values())
            batch = [self._arrived.pop(new.id) for new in chosen]
            self._arrived_bytes -= sum(len(new.data) for new in chosen)
            self._began_s = self._parts.runtime.clock.monotonic()
            self._stores += 1
            self._tasks.start(self._hold_batch(batch), f"hold {len(batch)} blocks")

    def _pause(self) -> bool:
        """Whether the blocks that have arrived wait for more; then a task stores them after the gap."""
        left_s = self._began_s + self._gap_s - self._parts.runtime.clock.monotonic()
        if not self._stores or left_s <= 0 or self._arrived_bytes >= PROMPT_BYTES:
            return False
        if not self._is_paused:
            self._is_paused = True
            self._tasks.start(self._store_after(left_s), "hold blocks after a gap")
        return True

    async def _store_after(self, gap_s: float) -> None:
        try:
            await asyncio.sleep(gap_s)
        finally:
            self._is_paused = False
            self._continue(NotReadyError("the service partition of these held records was closed"))

    def _continue(self, error: MemqError) -> None:
        """Store the blocks that have arrived; refuse them with `error` if this is closed."""
        if not self._tasks.stopped:
            self.store()
            return
        for new, future in self._arrived.values():
            self._waiting_bytes -= len(new.data)
            self._pending.pop(new.id, None)
            if not future.done():
                future.set_exception(error)
        self._arrived.clear()

    async def _hold_batch(self, batch: Sequence[tuple[NewHold, asyncio.Future[Answer]]]) -> None:
        error: MemqError = NotReadyError("the service partition of these held records was closed")
        try:
            answers = await self._hold_until_named([new for new, _ in batch])
        except MemqError as found:
            error = found
        else:
            for (new, future), answer in zip(batch, answers, strict=True):
                self._settled(new, answer)
                if not future.done():
                    future.set_result(answer)
        finally:
            self._stores -= 1
            for new, future in batch:
                self._waiting_bytes -= len(new.data)
                self._pending.pop(new.id, None)
                if not future.done():
                    future.set_exception(error)
            self._continue(error)

    async def _hold_until_named(self, batch: Sequence[NewHold]) -> Sequence[Answer]:
        """Store blocks and decide that they are held; return the answers, in the order of `batch`.

        If the decision counts so late that the sweep may have deleted the object (ADR 6), another object replaces it.
        """
        clock, found = self._parts.runtime.clock, dict[HoldId, Answer]()
        while True:
            began_s = clock.monotonic()
            key, lanes = await self._put(batch)
            answers = await self._decide(key, lanes)
            if not found:  # to a later decision the blocks are known, and not new
                found = dict(zip((block.id for lane in lanes for block in lane.blocks), answers, strict=True))
            if clock.monotonic() - began_s <= self._parts.key_valid_s:
                return [found[new.id] for new in batch]
            self._parts.events.warning("held-object-late", f"object '{key}' was named late, and is stored again")

    async def _put(self, batch: Sequence[NewHold]) -> tuple[str, list[HeldLane]]:
        """Store an object with these blocks; return its key and its index. Raises: NotReadyError."""
        parts, lanes = self._parts, dict[tuple[Target, str], list[HeldBlock]]()
        offset = 0
        for new in batch:
            block = HeldBlock(new.id, new.next, new.due_ms, offset, len(new.data))
            lanes.setdefault((new.target, new.lane), []).append(block)
            offset += len(new.data)
        index = [HeldLane(*place, tuple(blocks)) for place, blocks in lanes.items()]
        buffers = [*(new.data for new in batch), held_object_end(index, parts.shard)]
        return await put_held_object(parts, buffers, "held records"), index


async def put_held_object(parts: StoringParts, buffers: Sequence[bytes], content: str) -> str:
    """Store an object below `<cluster>/held/`; return its key. Raises: NotReadyError with `content`."""
    checksum = 0
    for buffer in buffers:
        checksum = crc32c(buffer, checksum)
    object_id = parts.runtime.random.getrandbits(64)
    key = held_object_key(parts.cluster, object_id, parts.runtime.clock.wall_ms())
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await parts.store.put(key, buffers, checksum)
    except (MemqError, TimeoutError) as error:
        raise NotReadyError(f"the store does not take {content}: {error!r}") from error
    return key


def _first_batch(arrived: Iterable[NewHold]) -> list[NewHold]:
    """Return the first blocks that fit into one object and one decision; at least one."""
    chosen: list[NewHold] = []
    places: set[tuple[Target, str]] = set()
    cost = size = 0
    for new in arrived:
        cost += BLOCK_COST
        if (new.target, new.lane) not in places:
            places.add((new.target, new.lane))
            cost += PLACE_COST + len(new.target.topic) + len(new.target.topic_id) + len(new.lane.encode())
        size += len(new.data)
        if chosen and (cost > DECISION_BYTES or size > OBJECT_BYTES):
            break
        chosen.append(new)
    return chosen


def _mark_retrieved(future: asyncio.Future[Answer]) -> None:
    """Mark the error of a future as retrieved: its callers may have been cancelled."""
    if not future.cancelled():
        future.exception()
