"""The shell of a producer window: finds the owner, opens the stream, writes, sets timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memq.client.link_pool import LinkPool, Session
from memq.client.metadata import ClusterMetadata
from memq.client.producer.open_block import PartitionBuffer, PendingBlock
from memq.client.producer.send_buffer import SendBuffer
from memq.client.producer.settings import ProducerSettings
from memq.client.producer.window import ProducerWindow
from memq.client.producer.window_events import (
    Abandon,
    Acked,
    BrokerDraining,
    CloseStream,
    ConnectionLost,
    Delayed,
    Event,
    Finish,
    Finished,
    Instruction,
    Nacked,
    Opened,
    OpenFailed,
    OpenStream,
    Room,
    Sealed,
    SealFailed,
    Settle,
    StreamRefused,
    Tick,
    UnackedBlock,
    WindowState,
    WriteBlock,
)
from memq.errors import (
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ThrottledError,
    TimedOutError,
    UnreachableError,
)
from memq.format.blocks.header import base_ms_of
from memq.format.report import HeldStage, Stage
from memq.protocol.frames import WRITE_PREFIX, AckLevel, Api, Frame, decode_positions
from memq.protocol.link import Link
from memq.protocol.messages import Close, Done, Message, Nack, Open, Redirect, Throttle, decode_message, error_of
from memq.runtime.logs import EventLog
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic

CLOSE_TIMEOUT_S = 2.0
_TIMER_S_MIN = 0.001


class BlockObserver(Protocol):
    """Observes the blocks of one write partition."""

    def pass_stage(
        self, stage: Stage, producer: int, first: int, next_: int, base_ms: int, now_ms: int, level: int = 0
    ) -> None:
        """Sequences `first` up to `next_` passed a stage; their least timestamp is `base_ms`."""

    def hold(self, stage: HeldStage, minute: int, records: int) -> None:
        """Note that delayed records, or records of a transaction, of a Unix minute came to a stage."""
        ...


class ProducerObserver(Protocol):
    """Observes a producer, for the audit. A producer works the same without it."""

    def part(self, topic: Topic, partition: int) -> BlockObserver | None:
        """Return the observer of a write partition; None without one."""

    async def close(self, timeout_s: float | None) -> None:
        """Finish within `timeout_s`, or its own bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderParts:
    """The shared parts of a producer's senders.

    `settled` gets each block with its error, None if it is acked. `broke` gets unexpected errors. The
    `observer`, if any, gets each sent and each acked block.
    """

    producer_id: int
    secret: str = field(repr=False)
    settings: ProducerSettings
    runtime: Runtime
    buffer: SendBuffer
    pool: LinkPool
    metadata: ClusterMetadata
    tasks: TaskOwner
    events: EventLog
    settled: Callable[[PendingBlock, MemqError | None], None]
    broke: Callable[[BaseException], None]
    observer: ProducerObserver | None


class PartitionSender:
    """Sends the blocks of one partition. It is the `LinkOwner` of its stream."""

    def __init__(self, parts: SenderParts, buffer: PartitionBuffer) -> None:
        self.buffer = buffer
        self._parts = parts
        self._name = f"topic '{buffer.topic.name}' partition {buffer.partition}"
        wants_acks = parts.settings.acks is not AckLevel.NONE
        self.window = ProducerWindow(self._name, parts.runtime.random, wants_acks=wants_acks)
        self.window.next_sequence = buffer.first_sequence
        self._session: Session | None = None
        self._stream = 0
        self._open_request = 0  # 0 while no answer to OPEN is awaited
        self._open_timer: asyncio.TimerHandle | None = None
        self._open_sent_s = 0.0
        self._finding: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._sealed_at_s = self._acked_s = -1e9
        self._observer: BlockObserver | None = None
        if parts.observer is not None:
            self._observer = parts.observer.part(buffer.topic, buffer.partition)
        self.closed = asyncio.Event()
        self.written = asyncio.Event()  # no block waits for the socket or the owner

    # ---- what the producer calls ---------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The session of the stream; None without a stream."""
        return self._session

    @property
    def owed_since_s(self) -> float | None:
        """Since when (monotonic s) the broker owes the next ack; None if it owes none."""
        sent_s = self.window.oldest_sent_s
        return None if sent_s is None else max(sent_s, self._acked_s)

    def delayed(self, error: MemqError) -> None:
        """Take the cause of late acks; the errors of blocks that are given up meanwhile name it."""
        self._handle(Delayed(error))

    def pending(self) -> list[tuple[PendingBlock, int]]:
        """Return the blocks of the window with their numbers of records."""
        return [(block, block.next - block.first) for block in self.window.blocks() if isinstance(block, PendingBlock)]

    def take_sealed(self) -> None:
        """Take the sealed blocks, and seal the open block when it is due."""
        try:
            self._take_sealed()
        except Exception as error:  # noqa: BLE001  # in a callback of the event loop no other code would get the error
            self._parts.broke(error)

    def _take_sealed(self) -> None:
        for pending in self._parts.buffer.take_ready(self.buffer):
            self._handle(SealFailed(pending, pending.error) if pending.error is not None else Sealed(pending))
        block = self.buffer.open
        if block is not None and block.count:
            due_s = self._seal_due_s(block.opened_s)
            if due_s <= self._now_s():
                self._sealed_at_s = self._now_s()
                self._parts.buffer.seal_open(self.buffer)
                self._take_sealed()
                return
        self._arm()

    def finish(self) -> None:
        """Report the end of the stream when all blocks are settled, then set `closed`."""
        if self.window.state is not WindowState.CLOSED:  # it was abandoned with its producer
            self._handle(Finish(self._now_s()))

    def abandon(self, error: MemqError) -> None:
        """Settle all remaining blocks with `error`, or as unknown; release stream and timers."""
        self._handle(Abandon(error))
        self._stop_finding()
        self._release_stream()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _seal_due_s(self, opened_s: float) -> float:
        """Return when to seal the open block (monotonic s): 0 for at once, else after `linger_s`.

        It is sealed at once if no block is in flight. While sealed blocks wait for the socket or the owner, one more
        gains nothing. So the open block grows until it is full or must be given up. Without acks, blocks that were
        sealed within `linger_s` count as in flight.
        """
        settings = self._parts.settings
        if self.window.queued:
            return opened_s + settings.delivery_timeout_s
        if not self.window.live and not self.buffer.cut:
            return 0.0 if settings.acks is not AckLevel.NONE else self._sealed_at_s + settings.linger_s
        return opened_s + settings.linger_s

    # ---- the window ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for instruction in self.window.handle(event):
            self._execute(instruction)
        while self.window.state is WindowState.OPEN and self._session is not None and not self._session.link.congested:
            instructions = self.window.handle(Room(self._now_s()))
            if not instructions:
                break
            for instruction in instructions:
                self._execute(instruction)
        self.buffer.backlog = self.window.queued
        if self.window.queued:
            self.written.clear()
        else:
            self.written.set()
        if self.window.state is WindowState.CLOSED:
            self.closed.set()

    def _step(self, event: Event) -> None:
        """Handle an event from outside, then seal the open block if it is due."""
        try:
            self._handle(event)
            self._take_sealed()
        except Exception as error:  # noqa: BLE001  # as in `take_sealed`
            self._parts.broke(error)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, WriteBlock):
            self._write(instruction)
        elif isinstance(instruction, Settle):
            assert isinstance(instruction.block, PendingBlock)
            if instruction.error is not None:
                self._report("gave-up", instruction.block)
            elif self._parts.settings.acks is not AckLevel.NONE:
                self._report("acked", instruction.block)
            self._parts.settled(instruction.block, instruction.error)
        elif isinstance(instruction, OpenStream):
            self._open(instruction)
        else:
            assert self._session is not None, "CLOSE is sent on an open stream"
            # The connection may be lost before the task runs: then the request fails on this link.
            close = self._send_close(self._session.link, self._stream, instruction)
            self._parts.tasks.start(close, f"close {self._name}")

    def _write(self, instruction: WriteBlock) -> None:
        assert self._session is not None, "a block is written on an open stream"
        block, link = instruction.block, self._session.link
        assert block.first_sent_s is not None
        if block.writes == 1:
            self._report("sent", block)
        sent_ms = link.clock_ms(block.first_sent_s)
        link.write(WRITE_PREFIX.pack(len(block.data), Api.WRITE, 0, self._stream, sent_ms), block.data)

    def _report(self, stage: Stage, block: UnackedBlock) -> None:
        """Report a block to the audit. A block that was never sealed gets the present time."""
        observer, parts = self._observer, self._parts
        if observer is not None:
            now_ms = parts.runtime.clock.wall_ms()
            base_ms = base_ms_of(block.data) if block.data else now_ms
            level = parts.settings.acks
            observer.pass_stage(stage, parts.producer_id, block.first, block.next, base_ms, now_ms, level)

    # ---- opening and closing -----------------------------------------------------------------------

    def _open(self, instruction: OpenStream) -> None:
        self._stop_finding()
        self._forget_open()
        self._finding = self._parts.tasks.start(self._find_owner(instruction), f"open {self._name}")

    async def _find_owner(self, instruction: OpenStream) -> None:
        try:
            async with asyncio.timeout(self._parts.settings.open_timeout_s):
                session = await self._owner_session(instruction)
            if not session.link.open:
                raise NotReadyError(f"the connection for {self._name} is lost again")
        except MemqError as error:
            self._finding = None
            self._open_failed(error)
        except TimeoutError:
            self._finding = None
            self._open_failed(TimedOutError(f"no owner of {self._name} was reached in time"))
        else:
            self._finding = None
            self._send_open(session, instruction.sequence)

    async def _owner_session(self, instruction: OpenStream) -> Session:
        topic, partition = self.buffer.topic, self.buffer.partition
        metadata = self._parts.metadata
        if instruction.address:
            metadata.moved(topic.name, topic.id, partition, instruction.address)
            return await self._parts.pool.session(parse_address(instruction.address))
        if instruction.refresh:
            await metadata.refresh(topic.name)
        address = metadata.owner(topic.name, topic.id, partition)
        if address is None and not instruction.refresh:
            await metadata.refresh(topic.name)
            address = metadata.owner(topic.name, topic.id, partition)
        if address is None:
            raise NotReadyError(f"{self._name} has no owner now")
        return await self._parts.pool.session(address)

    def _send_open(self, session: Session, sequence: int) -> None:
        if session is not self._session:
            self._release_stream()
            self._stream = session.bind(self)
            self._session = session
        message = Open(
            topic=self.buffer.topic.name,
            topic_id=self.buffer.topic.id,
            partition=self.buffer.partition,
            producer=f"{self._parts.producer_id:016x}",
            acks=int(self._parts.settings.acks),
            sequence=sequence,
            producer_epoch=self.buffer.producer_epoch,
            map_version=self.buffer.topic.map_version,
            positions=True,
            secret=self._parts.secret,
        )
        self._open_request = session.link.open_stream(self._stream, message)
        self._open_timer = asyncio.get_running_loop().call_later(
            self._parts.settings.open_timeout_s, self._open_timed_out
        )
        self._open_sent_s = self._now_s()

    def _open_timed_out(self) -> None:
        self._forget_open()
        error = TimedOutError(f"the owner of {self._name} did not answer OPEN in time")
        if self._session is not None and self._session.link.heard_s <= self._open_sent_s:
            self._session.link.abort(error)  # the broker sent nothing: the next try gets a new connection
            return
        self._open_failed(error)

    def _open_failed(self, error: MemqError) -> None:
        late = self._parts.pool.waits.describe()
        if late and isinstance(error, TimedOutError | UnreachableError):
            error = type(error)(f"{error}; {late}", hint=error.hint)
        topic, metadata = self.buffer.topic, self._parts.metadata
        if isinstance(error, NotFoundError) and metadata.is_unconfirmed(topic.name, topic.id):
            text = f"{error}; no broker could confirm the id with the coordinator when the records were batched"
            error = NotFoundError(text, hint="send the records again: the next answer is confirmed")
        self._parts.events.info("producer.open-failed", f"{self._name} is not open: {error}")
        if isinstance(error, NotFoundError):
            self._parts.buffer.drop_route(topic.name)
            metadata.doubt(topic.name, topic.id)
        self._step(OpenFailed(error, self._now_s()))

    def _forget_open(self) -> None:
        self._open_request = 0
        if self._open_timer is not None:
            self._open_timer.cancel()
            self._open_timer = None

    def _stop_finding(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None

    def _release_stream(self) -> None:
        """Release the stream: its later frames are ignored."""
        self._forget_open()
        if self._session is not None:
            self._session.unbind(self._stream)
            self._session = None

    async def _send_close(self, link: Link, stream: int, instruction: CloseStream) -> None:
        message = Close(next_sequence=instruction.next_sequence, burned=instruction.burned)
        try:
            await link.request(Api.CLOSE, message, Done, stream=stream, timeout_s=CLOSE_TIMEOUT_S)
        except MemqError as error:
            self._parts.events.info("producer.close-failed", f"the end of {self._name} is not reported: {error}")
        if self.window.state is not WindowState.CLOSED:
            self._handle(Finished())

    # ---- frames: LinkOwner -----------------------------------------------------------------------------

    def stream_frame(self, frame: Frame) -> None:
        """See `LinkOwner.stream_frame`."""
        try:
            event = self._event_of(frame)
        except MemqError as error:
            if self._session is not None:
                self._session.link.abort(error)
            return
        if isinstance(event, OpenFailed):
            self._open_failed(event.error)
        elif event is not None:
            self._step(event)

    def draining(self) -> None:
        """See `LinkOwner.draining`."""
        self._step(BrokerDraining())

    def writable(self) -> None:
        """See `LinkOwner.writable`."""
        self._step(Room(self._now_s()))

    def lost(self, error: MemqError) -> None:
        """See `LinkOwner.lost`. While the owner is looked for, the loss of the last stream changes nothing."""
        self._session = None
        self._forget_open()
        if self._finding is None:
            self._step(ConnectionLost(error, self._now_s()))

    def _event_of(self, frame: Frame) -> Event | None:
        """Return the event of a frame; None for an unawaited answer, or one of too low a level."""
        now_s = self._now_s()
        if frame.api in (Api.OPEN, Api.ERROR):
            if frame.argument != self._open_request:
                return None
            self._forget_open()
            if frame.api == Api.OPEN:
                return Opened()
            return OpenFailed(error_of(self._message(frame, Nack)), now_s)
        if frame.api == Api.ACK:
            positions, self._acked_s = decode_positions(frame.body), now_s
            return Acked(frame.argument, positions) if frame.flags >= self._parts.settings.acks else None
        if frame.api == Api.NACK:
            return Nacked(frame.argument, error_of(self._message(frame, Nack)), now_s)
        if frame.api == Api.THROTTLE:
            throttle = self._message(frame, Throttle)
            text = throttle.text or f"{self._name} is throttled"
            return StreamRefused(
                ThrottledError(text, hint=throttle.hint, retry_after_ms=throttle.retry_after_ms), now_s
            )
        moved = MovedError(f"{self._name} moved")
        moved.address = self._message(frame, Redirect).address
        return StreamRefused(moved, now_s)

    def _message(self, frame: Frame, kind: type[Message]) -> Message:
        assert self._session is not None, "a frame comes on the stream of a session"
        return decode_message(frame.body, kind, checksum_wanted=self._session.link.checksums)

    # ---- time ------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._parts.runtime.clock.monotonic()

    def _arm(self) -> None:
        """Keep one timer for whatever is due first; one that is due too early is kept and asks again."""
        due_s = self.window.next_deadline_s
        block = self.buffer.open
        if block is not None and block.count:
            seal_s = self._seal_due_s(block.opened_s)
            due_s = seal_s if due_s is None else min(due_s, seal_s)
        if due_s is None or (self._timer is not None and self._timer_at_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(_TIMER_S_MIN, due_s - self._now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)
        self._timer_at_s = due_s

    def _timer_fired(self) -> None:
        self._timer = None
        if self.window.state is not WindowState.CLOSED:
            self._step(Tick(self._now_s()))
