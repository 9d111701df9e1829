"""Writes ack=1 blocks to the spool, many with one fsync, acks them, and removes old segments.

Theory: an fsync costs about the same for one block as for thousands. So blocks that arrive during an fsync wait, and
are written with the next one. Their batches are stored meanwhile: if the pointer of a block is in the queue before its
turn, the block is acked without being written. The needed blocks of a mostly unneeded segment are copied to the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from memq.broker.ingest.slabs import Slab
from memq.broker.metrics import Counters
from memq.broker.partition.append import BlockRun, Stream
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.ring import BatchSlot, SlotState
from memq.broker.spool import SpoolDisk
from memq.broker.spool.segments import Segment, Segments, Span, Ticket
from memq.errors import CorruptDataError, InvalidSettingError, MemqError, SpoolError, ThrottledError
from memq.format.spool import copied_entries, encode_entry, encode_head
from memq.limits import MIB
from memq.protocol.frames import AckLevel
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.settings import BrokerSettings
from memq.topic import TopicSettings

GROUP_BYTES_MAX = 8 * MIB  # of one write and fsync; one run of blocks at least
WAITING_SHARE = 8  # an eighth of the memory budget may wait for the disk
IDLE_S = 1.0  # a segment without an append for this time is closed, so that it can be removed
RETRY_S_BASE, RETRY_S_MAX = 0.5, 5.0
SLICE_ENTRIES = 256  # entries copied at once: a millisecond of the event loop
NO_FOLDER = "set spool = FOLDER for this broker, or the topic's ack1 to memory; acks=all continues"

Moves = list[tuple[Ticket, tuple[Span, ...]]]


class PendingRun:
    """Blocks of one stream in one slab, in order. The run has a reference on the slab until it is written."""

    __slots__ = (
        "appended_ms",
        "bytes",
        "epoch",
        "extents",
        "first",
        "next",
        "partition",
        "queue_offset",
        "slab",
        "stream",
        "ticket",
        "topic_id",
    )

    def __init__(
        self, stream: Stream, run: BlockRun, topic_id: bytes, own: Ownership, ticket: Ticket, now_ms: int
    ) -> None:
        self.stream = stream
        self.extents = run.extents
        self.slab: Slab = run.extents[0][0]
        self.first = run.first
        self.next = run.next
        self.ticket = ticket
        self.topic_id = topic_id
        self.partition = own.partition
        self.epoch = own.epoch
        self.queue_offset = own.read_to
        self.appended_ms = now_ms
        self.bytes = run.bytes


class Spool:
    """The spool of all partitions of a broker. Without a disk it takes no blocks: see `refusal`.

    `failed` gets unexpected errors; `release` gets each slab whose blocks are written.
    """

    def __init__(
        self,
        disk: SpoolDisk | None,
        settings: BrokerSettings,
        runtime: Runtime,
        counters: Counters,
        release: Callable[[Slab], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.disk = disk
        self.segments = Segments(settings.spool_bytes_max)
        self._settings = settings
        self._runtime = runtime
        self._counters = counters
        self._release = release
        self._events = EventLog(runtime.clock)
        self._tasks = TaskOwner(failed, self._events)
        self._waiting: deque[PendingRun] = deque()
        self._waiting_bytes = 0
        self._waiting_bytes_max = settings.memory_bytes_max // WAITING_SHARE
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._failure: SpoolError | None = None

    # ---- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write blocks."""
        if self.disk is not None:
            self._tasks.start(self._work(self.disk), "spool")

    async def stop(self) -> None:
        """Stop at once; unwritten blocks are not acked."""
        await self._tasks.stop()
        while self._waiting:
            self._release(self._waiting.popleft().slab)
        if self.disk is not None:
            await self.disk.close()

    async def settle(self) -> None:
        """Return when all blocks are acked or refused, and unneeded segments are removed."""
        while self.disk is not None:
            self.segments.open = None
            self._settled.clear()
            self._wake.set()
            await self._settled.wait()
            if self.segments.open is None:  # nothing was copied meanwhile
                return

    def check(self, settings: TopicSettings) -> None:
        """Refuse settings that this broker can't keep. Raises: InvalidSettingError."""
        if settings.ack1 == "disk" and self.disk is None:
            raise InvalidSettingError(
                f"setting ack1 = disk needs a spool, and broker '{self._settings.broker_id}' has none",
                hint="set spool = FOLDER for every broker, or ack1 = memory",
            )

    # ---- blocks ------------------------------------------------------------------------------------

    @property
    def refusal(self) -> MemqError | None:
        """The error for which no block is taken now; None when blocks are taken."""
        if self._failure is not None:
            return self._failure
        name, settings = self._settings.broker_id, self._settings
        if self.disk is None:
            return SpoolError(f"broker '{name}' has no spool for a topic with ack1 = disk", hint=NO_FOLDER)
        if self._waiting_bytes >= self._waiting_bytes_max:
            return ThrottledError(f"{self._waiting_bytes} bytes wait for the disk of broker '{name}'")
        if self.segments.bytes + self._waiting_bytes >= settings.spool_bytes_max:
            return SpoolError(
                f"the spool of broker '{name}' has {self.segments.bytes} bytes, {settings.spool_bytes_max} are allowed",
                hint="find the cause with memq doctor, or raise spool_bytes_max; acks=all continues",
            )
        return None

    def take(self, stream: Stream, run: BlockRun, topic_id: bytes, own: Ownership, slot: BatchSlot | None) -> None:
        """Write blocks that `slot` holds, or the queue if it is None; then ack them with ack=1.

        The blocks may be new or copies. A copy of a block in the ring is written, because the first block may not be on
        disk. A copy of a block in the queue is not written, nor is a block whose pointer is in the queue
        before its turn.
        """
        ticket = Ticket(self.freed)
        if slot is None or slot.state in (SlotState.PUBLISHED, SlotState.FREE):
            ticket.release()
        else:
            slot.tickets.append(ticket)
        pending = PendingRun(stream, run, topic_id, own, ticket, self._runtime.clock.wall_ms())
        pending.slab.references += 1
        self._waiting.append(pending)
        self._waiting_bytes += pending.bytes
        self._wake.set()

    def freed(self) -> None:
        """Check the segments again, because one may be unneeded."""
        self._wake.set()

    # ---- the disk ----------------------------------------------------------------------------------

    async def _work(self, disk: SpoolDisk) -> None:
        tries = 0
        while True:
            self._wake.clear()  # first, so that events during this round start the next one
            await self._remove_unwanted(disk)
            group: list[PendingRun] = []
            try:
                copied = await self.copy_forward(disk)
                if self._waiting:
                    group = self._next_group()
                    await self._write(disk, group)
                elif not copied:
                    await self._rest()
                tries = 0
            except SpoolError as error:
                tries += 1
                self._fail(group, error)
                await self._remove_unwanted(disk)
                self._settle()
                delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                await asyncio.sleep(delay_s)
                self._failure = None
            finally:
                for run in group:
                    self._release(run.slab)

    def _settle(self) -> None:
        """Let `settle` return, unless there is work since the beginning of this round."""
        if not self._wake.is_set():
            self._settled.set()

    async def _rest(self) -> None:
        """Wait for work; close the open segment after IDLE_S without any."""
        self._settle()
        try:
            async with asyncio.timeout(IDLE_S if self.segments.open is not None else None):
                await self._wake.wait()
        except TimeoutError:
            self.segments.open = None

    def _next_group(self) -> list[PendingRun]:
        """Remove and return the runs for the next write and fsync."""
        group: list[PendingRun] = []
        size = 0
        while self._waiting and (not group or size + self._waiting[0].bytes <= GROUP_BYTES_MAX):
            group.append(self._waiting.popleft())
            size += group[-1].bytes
        self._waiting_bytes -= size
        return group

    async def _write(self, disk: SpoolDisk, group: list[PendingRun]) -> None:
        """Write the blocks that are not in the queue yet, then ack. Raises: SpoolError."""
        runs = [run for run in group if not run.ticket.released]
        if runs:
            segment, buffers = self._open_segment()
            blocks = sum(len(run.extents) for run in runs)
            at = segment.bytes + sum(map(len, buffers))
            spans: list[Span] = []
            for run in runs:
                entries = _entries(segment.seed, run)
                spans.append((at, at + sum(map(len, entries))))
                at = spans[-1][1]
                buffers += entries
            size = at - segment.bytes
            self.segments.grow(segment, size)
            await disk.append(segment.name, buffers)
            for run, span in zip(runs, spans, strict=True):
                run.ticket.bind(segment, (span,))
            self._counters.spool_syncs += 1
            self._counters.spooled_blocks += blocks
            self._counters.spooled_bytes += size
        acks = {run.stream: run for run in group}
        for stream, run in acks.items():
            stream.sink.send_ack(stream, AckLevel.ONE, run.next, run.epoch)

    def _open_segment(self) -> tuple[Segment, list[bytes | memoryview]]:
        """Return the segment to append to, and its head when it is new."""
        segment = self.segments.open
        if segment is not None:
            return segment, []
        seed, now_ms = self._runtime.random.getrandbits(32), self._runtime.clock.wall_ms()
        return self.segments.begin(segment_name(now_ms, seed), seed), [encode_head(seed, now_ms)]

    async def copy_forward(self, disk: SpoolDisk) -> bool:
        """Copy the needed blocks of a mostly unneeded segment; return whether one existed.

        A segment that can't be read, or is damaged, is not copied. Its blocks are also in memory, as long as this
        process runs. Raises: SpoolError.
        """
        old = self.segments.to_copy()
        if old is None:
            return False
        try:
            data = await disk.read(old.name)
            segment, buffers = self._open_segment()
            entries, moves = await _wanted_entries(old, data, segment.seed, segment.bytes + sum(map(len, buffers)))
        except (SpoolError, CorruptDataError) as error:
            old.fixed = True
            self.segments.open = None  # the open segment may be new, and its head was not written
            self._counters.spool_damages += 1
            self._events.error("spool-damaged", f"segment {old.name}, which stays until its blocks are queued: {error}")
            return True
        buffers += entries
        size = sum(map(len, buffers))
        self.segments.grow(segment, size)
        await disk.append(segment.name, buffers)
        for ticket, spans in moves:
            ticket.move(segment, spans)
        self._counters.spool_copied_bytes += size
        return True

    def _fail(self, group: list[PendingRun], error: SpoolError) -> None:
        """Refuse the failed blocks and all waiting ones after them; append nothing more to the segment.

        The blocks are in the ring and may be stored. So their producers get a throttle, not a failure.
        """
        self._failure = error
        self.segments.open = None
        refused = [*group, *self._waiting]
        for run in self._waiting:
            self._release(run.slab)
        self._waiting.clear()
        self._waiting_bytes = 0
        firsts: dict[Stream, int] = {}
        for run in refused:
            firsts.setdefault(run.stream, run.first)
            self._counters.spool_refused_blocks += len(run.extents)
        self._events.error("spool-failed", f"{len(refused)} runs of blocks are not acked: {error}: {error.hint}")
        for stream, first in firsts.items():
            stream.sink.send_throttle(stream, first, error)

    async def _remove_unwanted(self, disk: SpoolDisk) -> None:
        """Remove segments whose blocks are all in the queue; set aside those that an operator must inspect."""
        for segment in self.segments.unwanted():
            try:
                if segment.kept:
                    path = await disk.set_aside(segment.name)
                    self._events.error("spool-aside", f"segment {path} holds what could not be brought to the queue")
                else:
                    await disk.remove(segment.name)
            except SpoolError as error:
                self._events.error("spool-failed", str(error))
                continue
            self.segments.forget(segment)


def segment_name(created_ms: int, seed: int) -> str:
    """Return a segment's name, which is unique among brokers and sorts by age."""
    return f"{created_ms:016d}-{seed:08x}.spool"


def _entries(seed: int, run: PendingRun) -> list[bytes | memoryview]:
    buffers: list[bytes | memoryview] = []
    for slab, start, end in run.extents:
        buffers.append(encode_entry(seed, run.topic_id, run.partition, run.queue_offset, run.appended_ms, end - start))
        buffers.append(slab.view[start:end])
    return buffers


async def _wanted_entries(segment: Segment, data: bytes, seed: int, at: int) -> tuple[list[bytes | memoryview], Moves]:
    """Return a segment's needed entries as entries of segment `seed` from byte `at` on, with their moves.

    Raises: CorruptDataError when one of them can't be read.
    """
    buffers: list[bytes | memoryview] = []
    moves: Moves = []
    for ticket in list(segment.tickets):
        began = at
        for start, end in ticket.spans:
            for header, block in copied_entries(data, start, end, seed):
                buffers += (header, block)
                at += len(header) + len(block)
                if len(buffers) % (2 * SLICE_ENTRIES) == 0:
                    await asyncio.sleep(0)
        moves.append((ticket, ((began, at),)))
    return buffers, moves
