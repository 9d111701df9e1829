"""One client connection: bytes into slabs, blocks checked in place, frames to their handlers.

What is plainly right goes the short way, many blocks at once (`memq.broker.ingest.block_run`); everything else is
judged here, one frame after another.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from memq.broker.ingest.block_run import sound_run
from memq.broker.ingest.intake import Intake, Region
from memq.broker.ingest.outbox import Outbox
from memq.broker.ingest.rate_limit import Limiters, refusal_of, room_of
from memq.broker.ingest.slabs import Slab
from memq.broker.ingest.streams import Stream
from memq.broker.services import Services
from memq.errors import (
    ForeignProtocolError,
    MemqError,
    OutOfSequenceError,
    OverLimitError,
    ProtocolError,
    ThrottledError,
    TooOldError,
)
from memq.format.blocks.header import BlockHeader, check_block
from memq.limits import FRAME_PREFIX_BYTES, MIB
from memq.protocol.connection import ANONYMOUS, ConnectionState, Conversation, Side
from memq.protocol.frames import (
    PREFIX,
    WRITE_PREFIX,
    AckLevel,
    Api,
    Frame,
    check_hello_start,
    check_prefix,
    encode_ack,
    encode_frame,
)
from memq.protocol.messages import Redirect, Throttle, encode_message, nack_of
from memq.runtime.network import peer_text
from memq.topic import LimitMode

THROTTLE_MS = 100
UNSENT_BYTES_MAX = 1 * MIB  # what one read of a client's requests may leave in its socket before it is closed
_WRITE = int(Api.WRITE)


class Handler(Protocol):
    """Answers the requests of connections."""

    def request(self, connection: Connection, frame: Frame) -> None:
        """Take a control frame; its body is a copy. Raises: ProtocolError when the connection must be closed."""
        ...

    def forward(self, connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
        """Take a FORWARD, whose body lies in a slab."""
        ...

    def gone(self, connection: Connection) -> None:
        """The connection is closed."""
        ...


class Connection(asyncio.BufferedProtocol):
    """A client's connection, from accept to close."""

    def __init__(self, services: Services, intake: Intake, handler: Handler) -> None:
        self.conversation = Conversation()
        self.streams: dict[int, Stream] = {}
        self.half_since_s: float | None = None  # when the frame that is half there was begun or last resumed
        self.opened_s = services.runtime.clock.monotonic()
        self.ready_s = 0.0
        self.peer = ""
        self.turned_away = False  # over the broker's bound on connections
        self.client = ""  # who it is, for the limits: the client id, else the host
        self.limiters: Limiters = ()
        self.principal = ANONYMOUS  # HELLO has no credentials yet
        self.paused = False  # by the intake: memory is short, and a silence is not the client's
        self.outbox = Outbox(services.runtime.clock)
        self._forwards = False
        self._services = services
        self._intake = intake
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._region: Region | None = None
        self._waiting: tuple[bytes, int] | None = None  # a frame's beginning that found no place, and its length
        self.leaving_since_s: float | None = None  # closed by the broker, which waits until the client has read why

    # ---- asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the broker's connections."""
        self._transport = self.outbox.transport = cast(asyncio.Transport, transport)
        self.peer = peer_text(transport.get_extra_info("peername"))
        self._services.counters.connections += 1
        self._intake.readers[self] = None
        if self.turned_away:
            self.refuse(ThrottledError("the broker has as many connections as its connections_max allows"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        if self._region is not None:
            self._region = self._intake.follow(self._region)
        return self._intake.buffer(self._region)

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes: whole frames at once, a half one keeps its place."""
        intake, region = self._intake, self._region
        self._services.counters.received_bytes += nbytes
        at_cursor = intake.at_cursor(region)
        if region is None:
            slab, start = intake.begin(self)
            end = start + nbytes
        else:
            slab, start = region.slab, region.start
            end = region.filled + nbytes
        if at_cursor:
            intake.cursor = max(intake.cursor, end)
        try:
            at, need = self._take_frames(slab, start, end)
        except MemqError as error:
            self.refuse(error)
            at, need = end, 0
        if region is not None and at == start and end - start < need <= region.end - start:
            region.filled = end
        else:
            self._keep_rest(slab, at, end, need)
            if region is not None:
                self._services.pool.release(region.slab)
        intake.after_read(self)

    def _keep_rest(self, slab: Slab, at: int, end: int, need: int) -> None:
        """Reserve a place for a frame that is half there; without one, wait for it."""
        if at == end:
            self._region = None
            self.half_since_s = None
            return
        self.half_since_s = self._services.runtime.clock.monotonic()
        self._region = self._intake.reserve(slab, at, end, need)
        if self._region is None:
            self._waiting = (bytes(slab.view[at:end]), need)
            self._intake.wait(self)

    def pause_writing(self) -> None:
        """The client does not read: take nothing more from it until it does."""
        self.outbox.stop()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        self.outbox.go_on()
        if not self.paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave: what was received stays, streams are forgotten."""
        self.conversation.close()
        self.outbox.go_on()
        if self._region is not None:
            self._services.pool.release(self._region.slab)
            self._region = None
        self._intake.leave(self)
        for stream in self.streams.values():
            stream.processor.close_stream(stream)
        self.streams.clear()
        self._handler.gone(self)

    # ---- the intake's wishes ---------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether HELLO was said and answered, and the connection is open."""
        return self.conversation.state in (ConnectionState.READY, ConnectionState.DRAINING)

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.conversation.state is ConnectionState.CLOSED

    @property
    def reads_on(self) -> bool:
        """Whether it may read while memory is short: its frame has a place already, or it sends no blocks."""
        return self._region is not None or not (self.streams or self._waiting or self._forwards)

    def pause(self) -> None:
        """Stop reading the socket: the memory budget is used up."""
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def take_place(self) -> bool:
        """Give the frame that waits its place and read on; False when there is still none."""
        assert self._waiting is not None, "no frame waits for a place"
        beginning, need = self._waiting
        place = self._intake.place(need)
        if place is None:
            return False
        slab, at = place
        slab.view[at : at + len(beginning)] = beginning
        self._region = Region(slab, at, at + len(beginning), at + need)
        self._waiting = None
        self.resume()
        return True

    def resume(self) -> None:
        """Read the socket again; a frame that is half there has its time from now on."""
        if self.half_since_s is not None:
            self.half_since_s = self._services.runtime.clock.monotonic()
        if self.paused and self._transport is not None and not self._transport.is_closing():
            self.paused = False
            if not self.outbox.congested:
                self._transport.resume_reading()

    def bind(self, stream: Stream) -> None:
        """Take blocks on a stream from now on, as soon as there is memory for them."""
        self.streams[stream.number] = stream
        self._intake.after_read(self)

    # ---- frames ------------------------------------------------------------------------------------

    def _take_frames(self, slab: Slab, at: int, end: int) -> tuple[int, int]:
        """Take the whole frames between `at` and `end`; return where the rest starts and the length it needs."""
        view, ready = slab.view, self.ready
        if not ready and end - at >= 4:
            check_hello_start(bytes(view[at : min(end, at + FRAME_PREFIX_BYTES)]))
        touched: dict[Stream, None] = {}
        now_s = self._services.runtime.clock.monotonic()
        need = 0
        while at < end:
            need = FRAME_PREFIX_BYTES
            if end - at < need:
                break
            length, api, flags, number, argument = PREFIX.unpack_from(view, at)
            need += length
            stop = at + need
            if stop > end or api != _WRITE or not ready:
                check_prefix(length, api)
                if api == _WRITE and ready and number not in self.streams:  # before memory is given to it
                    raise ProtocolError(f"WRITE on stream {number}, which was never opened")
                if stop > end:
                    break
                if api == Api.FORWARD and ready:
                    self._take_forward(argument, slab, at + FRAME_PREFIX_BYTES, stop)
                    at = stop
                    continue
                self._take_control(Frame(api, flags, number, argument, bytes(view[at + FRAME_PREFIX_BYTES : stop])))
                ready = self.ready
            else:
                stream = self.streams.get(number)
                if stream is None:
                    raise ProtocolError(f"WRITE on stream {number}, which was never opened")
                if stream.open:  # else: what follows a refused block is ignored until OPEN
                    touched[stream] = None
                    stop = self._take_run(stream, slab, at, end, now_s) or self._take_block(
                        stream, slab, at, stop, now_s
                    )
            at = stop
        if touched:
            self._after_blocks(touched)
        return at, need

    def _take_run(self, stream: Stream, slab: Slab, at: int, end: int, now_s: float) -> int:
        """Append the sound blocks that lie there to the open batch; return where they end, 0 without any."""
        processor = stream.processor
        limiters = processor.limiters + self.limiters
        blocks_max, bytes_max = processor.ring.room()
        if limiters:
            requests, size = room_of(limiters, now_s)
            blocks_max, bytes_max = min(blocks_max, requests), min(bytes_max, size)
        spool = processor.spool if stream.acks == AckLevel.ONE else None
        if processor.draining or not blocks_max or (spool is not None and spool.refusal is not None):
            return 0
        run = sound_run(
            stream,
            slab,
            at,
            end,
            oldest_ms=(now_s - self.ready_s) * 1000 - processor.delivery_timeout_ms,
            blocks_max=blocks_max,
            bytes_max=bytes_max,
        )
        if not run.extents:
            return 0
        size = run.end - at - FRAME_PREFIX_BYTES * len(run.extents)
        processor.ring.extend(stream, stream.expected, run.next_sequence, run.extents, size, now_s)
        if spool is not None:
            spool.take(stream, run.extents, stream.expected, run.next_sequence)
        self._taken(stream, run.next_sequence, len(run.extents))
        for limiter in limiters:
            limiter.take(len(run.extents), size)
        return run.end

    def _taken(self, stream: Stream, next_: int, blocks: int) -> None:
        """Move the stream on behind blocks that the open batch has."""
        counters = self._services.counters
        counters.received_blocks += blocks
        counters.received_records += next_ - stream.expected
        stream.expected = next_
        stream.producer.next = max(stream.producer.next, next_)

    def _take_block(self, stream: Stream, slab: Slab, at: int, stop: int, now_s: float) -> int:
        """Judge one block in full: append it, or close its stream with the reason. Return where it ends."""
        start = at + FRAME_PREFIX_BYTES
        try:
            header = _checked_block(stream, slab.view[start:stop])
            first, next_ = header.first_sequence, header.next_sequence
            if first != stream.expected:
                raise OutOfSequenceError(f"block starts at sequence {first}, stream expects {stream.expected}")
            sent_ms, timeout_ms = WRITE_PREFIX.unpack_from(slab.view, at)[4], stream.processor.delivery_timeout_ms
            if (now_s - self.ready_s) * 1000 - sent_ms > timeout_ms:
                raise TooOldError(f"block {first} was first sent over {timeout_ms} ms ago")
            spool = stream.processor.spool if stream.acks == AckLevel.ONE else None
            if spool is not None and spool.refusal is not None:
                raise spool.refusal
            if first < stream.producer.next and stream.processor.duplicate(stream, header):
                stream.expected = next_
                if spool is not None:
                    spool.take(stream, [(slab, start, stop)], first, next_)
                return stop
        except MemqError as error:
            self._refuse_block(stream, error)
            return stop
        processor = stream.processor
        limiters = processor.limiters + self.limiters
        refusal = refusal_of(limiters, now_s) if limiters and not processor.draining else None
        if refusal is not None:
            self._hold_back(stream, first, *refusal)
        elif processor.draining or not processor.ring.append(stream, first, header.count, slab, start, stop, now_s):
            self._turn_away(stream, first)
        else:
            if spool is not None:
                spool.take(stream, [(slab, start, stop)], first, next_)
            self._taken(stream, next_, 1)
            for limiter in limiters:
                limiter.take(1, stop - start)
        return stop

    def _after_blocks(self, touched: dict[Stream, None]) -> None:
        """Ack at level ONE what was taken in this read, once per stream, and set the ring going."""
        for stream in touched:
            if stream.acks == AckLevel.ONE and stream.processor.own is not None and stream.processor.spool is None:
                self.send_ack(stream, AckLevel.ONE, stream.expected, stream.processor.own.epoch)
            stream.processor.pump_soon()

    def _turn_away(self, stream: Stream, first: int) -> None:
        """A sound block that finds no room: throttle, or send it elsewhere when the partition drains."""
        stream.open = False
        if stream.processor.draining:
            self.send_redirect(stream)
            return
        self._throttle_for(stream, first, "the ring of the partition is full")

    def _hold_back(self, stream: Stream, first: int, mode: LimitMode, error: OverLimitError) -> None:
        """A sound block that is over a limit: slow its producer, or refuse it."""
        stream.open = False
        self._services.events.info("over-limit", f"{self.peer}, {mode}: {error}")
        if mode == "soft":
            self._throttle(stream, first, Throttle(retry_after_ms=error.retry_after_ms, text=str(error)))
        else:
            self.outbox.write(encode_frame(Api.NACK, stream.number, first, encode_message(nack_of(error))))

    def _throttle(self, stream: Stream, first: int, throttle: Throttle) -> None:
        self.outbox.write(encode_frame(Api.THROTTLE, stream.number, first, encode_message(throttle)))

    def _throttle_for(self, stream: Stream, first: int, cause: str) -> None:
        """Have the producer send again soon what found no room."""
        self._services.counters.throttled_blocks += 1
        self._services.events.info("throttled", f"{self.peer} topic '{stream.processor.topic.name}': {cause}")
        self._throttle(stream, first, Throttle(retry_after_ms=THROTTLE_MS, text=cause))

    def _refuse_block(self, stream: Stream, error: MemqError) -> None:
        """Close the stream: what follows is ignored until it is opened again."""
        stream.open = False
        if isinstance(error, ThrottledError):
            self._throttle_for(stream, stream.expected, str(error))
            return
        self._services.counters.refused_blocks += 1
        text = f"{self.peer} topic '{stream.processor.topic.name}': {error}"
        self._services.events.warning("block-refused", text)
        self.outbox.write(encode_frame(Api.NACK, stream.number, stream.expected, encode_message(nack_of(error))))

    def _take_control(self, frame: Frame) -> None:
        unsent = self.outbox.unsent_bytes
        if unsent > UNSENT_BYTES_MAX:  # reading stops at once, but one read may hold thousands of requests
            raise ThrottledError(f"{unsent} bytes of answers wait until this client reads them")
        self.conversation.said(Side.CLIENT, frame.api)
        self._handler.request(self, frame)

    def _take_forward(self, request: int, slab: Slab, start: int, stop: int) -> None:
        """Take another broker's block, which stays where it lies. From now on this connection sends blocks."""
        self.conversation.said(Side.CLIENT, Api.FORWARD)
        self._forwards = True
        if slab is self._intake.aside:
            error = ThrottledError("the memory budget is used up")
            self.outbox.write(encode_frame(Api.ERROR, 0, request, encode_message(nack_of(error))))
        else:
            self._handler.forward(self, request, slab, start, stop)

    # ---- out -----------------------------------------------------------------------------------------

    def send_ack(self, stream: Stream, level: int, next_sequence: int, epoch: int) -> None:
        """See `memq.broker.ingest.streams.AckSink`.

        Its number may be that of another stream by now: then nobody waits.
        """
        if self.streams.get(stream.number) is not stream:
            return
        self._services.counters.acks += 1
        self.outbox.write(encode_ack(level, stream.number, next_sequence, epoch))

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """See `memq.broker.ingest.streams.AckSink`."""
        if stream.open and self.streams.get(stream.number) is stream:
            stream.open = False
            self._throttle(stream, first, Throttle(retry_after_ms=THROTTLE_MS, text=str(error)))

    def send_redirect(self, stream: Stream) -> None:
        """See `memq.broker.ingest.streams.AckSink`."""
        body = encode_message(Redirect(address=stream.processor.moved_to))
        self.outbox.write(encode_frame(Api.REDIRECT, stream.number, stream.expected, body))

    def send(self, prefix: bytes, body: bytes = b"") -> None:
        """Send an answer, whose body may be one with the prefix; HELLO's starts the connection's clock."""
        api = prefix[4]
        self.conversation.said(Side.BROKER, api)
        if api == Api.HELLO:
            self.ready_s = self._services.runtime.clock.monotonic()
        self.outbox.write(prefix)
        if body:
            self.outbox.write(body)  # not joined: that would copy it

    def refuse(self, error: MemqError) -> None:
        """Send the client the error of the connection as a whole, and close it."""
        if self.leaving_since_s is not None or self._transport is None:
            return
        self.leaving_since_s = self._services.runtime.clock.monotonic()
        self._services.counters.rejected_connections += 1
        self._services.events.warning("connection-refused", f"{self.peer}: {error}")
        if isinstance(error, ForeignProtocolError) and str(error).endswith("HTTP"):
            self.outbox.write(_http_answer(error))
        else:
            self.outbox.write(encode_frame(Api.ERROR, 0, 0, encode_message(nack_of(error))))
        self.conversation.close()
        self._transport.close()

    def close(self) -> None:
        """Close after what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


def _checked_block(stream: Stream, block: memoryview) -> BlockHeader:
    """Return the header of a block that is sound and belongs on this stream.

    Raises: MemqError that says what not.
    """
    header = check_block(block, stream.processor.scope)
    if header.producer_id != stream.producer_id:
        raise ProtocolError(f"block of producer {header.producer_id:016x} on a stream of {stream.producer_id:016x}")
    if header.producer_epoch != stream.producer_epoch:
        raise ProtocolError(f"block of instance {header.producer_epoch} on a stream of {stream.producer_epoch}")
    return header


def _http_answer(error: MemqError) -> bytes:
    body = f"{error}\n{error.hint}\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
