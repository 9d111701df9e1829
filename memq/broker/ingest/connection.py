"""One client connection: bytes into slabs, blocks checked in place, frames to their handlers.

Sound blocks are taken many at once (`memq.broker.ingest.intake`). All other frames are checked here, one after another.
Answers are sent through the `Outbox`, which detects a client that does not read them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol, cast

from memq.broker.ingest.block_contents import check_contents, first_sequence_of, first_to_open
from memq.broker.ingest.intake import Intake, sound_run
from memq.broker.ingest.partial_frames import Region
from memq.broker.ingest.quotas import Limiters
from memq.broker.ingest.report_checks import check_reports
from memq.broker.ingest.slabs import Slab
from memq.broker.partition.append import (
    ACCEPTED,
    Accepted,
    BlockRun,
    Redirected,
    Stream,
    Throttled,
    TurnedAway,
    turned_away,
)
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
from memq.format.blocks.header import BlockHeader, check_block, parse_header
from memq.format.report import AUDIT_TOPIC
from memq.limits import BLOCK_HEADER_BYTES, FRAME_PREFIX_BYTES, KIB, MIB
from memq.protocol.connection import ANONYMOUS, ConnectionState, Conversation, Principal, Side
from memq.protocol.frames import (
    PREFIX,
    WRITE_PREFIX,
    AckPosition,
    Api,
    Frame,
    add_checksum,
    as_damage,
    check_hello_start,
    check_prefix,
    encode_ack,
    encode_frame,
    take_checksum,
)
from memq.protocol.messages import Hello, Redirect, Throttle, encode_message, nack_of
from memq.runtime.clock import Clock
from memq.runtime.network import host_of, peer_text
from memq.runtime.tls import subject_of
from memq.scram import ScramServer

THROTTLE_MS = 100
UNSENT_BYTES_MAX = 1 * MIB  # of unsent answers to the requests of one read; more close the connection
JOINED_BYTES_MAX = 4 * KIB  # an answer up to this length is copied into one piece
_WRITE = int(Api.WRITE)
_GREETING = frozenset({int(Api.HELLO), int(Api.AUTHENTICATE)})  # of at most 4 KiB
_SENT_BEFORE_MS_MAX = 1 << 32  # 50 days before HELLO: an older time of a WRITE is a changed one


class Handler(Protocol):
    """Answers the requests of connections."""

    def request(self, connection: Connection, frame: Frame) -> None:
        """Take a control frame; its body is a copy. Raises: ProtocolError when the connection must be closed."""
        ...

    def forward(self, connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
        """Take a FORWARD, whose body lies in a slab."""
        ...

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection, which is closed."""
        ...


class Connection(asyncio.BufferedProtocol):
    """A client's connection, from accept to close."""

    def __init__(self, services: Services, intake: Intake, handler: Handler) -> None:
        self.conversation = Conversation()
        self.streams: dict[int, Stream] = {}
        self.half_since_s: float | None = None  # when the incomplete frame began, or reading resumed
        self.opened_s = services.runtime.clock.monotonic()
        self.ready_s = 0.0
        self.peer = self.host = ""
        self.program = ""  # its software, by its HELLO, without the version
        self.client = ""  # its name for the limits: the client id, else the host
        self.limiters: Limiters = ()
        self.admitted = False  # by HELLO: the limits of its client count it
        self.charged: str | None = None  # the principal whose quota counts this connection
        self.checksums = False  # whether the client sends one with each message
        self.frame_checksums = False  # whether both sides send one with each frame
        self.principal = ANONYMOUS
        self.hello: Hello | None = None  # while the client logs in
        self.login: ScramServer | None = None  # of a client with a password
        self.token_ends_s = math.inf  # when the client must have connected again with a new token
        self.paused = False  # by the intake, because memory is short: the client is not silent
        self.outbox = Outbox(services.runtime.clock)
        self._forwards = False
        self._services = services
        self._intake = intake
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._region: Region | None = None
        self._waiting: Region | None = None  # received bytes of a frame that got no region, or no larger one
        self.leaving_since_s: float | None = None  # closed by the broker, which waits until the client has read why

    # ---- asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the broker's connections."""
        self._transport = self.outbox.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer, self.host = peer_text(name), host_of(name)
        if subject := subject_of(transport.get_extra_info("peercert")):
            self.principal = Principal(subject)
        self._services.counters.connections += 1
        self._intake.readers[self] = None
        refusal = self._services.connection_limits.joined(self)
        if refusal is not None:
            self._services.counters.turned_away_connections += 1
            self.refuse(refusal)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        if self._region is not None:
            self._region = self._intake.follow(self, self._region)
        return self._intake.buffer(self._region)

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes: complete frames at once; an incomplete one keeps its region."""
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
        if region is not None and at == start and end < region.end and need <= region.need:
            region.filled = end
        else:
            self._keep_rest(slab, at, end, need)
        intake.after_read(self)

    def _keep_rest(self, slab: Slab, at: int, end: int, need: int) -> None:
        """Reserve a region for an incomplete frame; without memory, wait for one."""
        held = self._region
        if at == end:
            self._region = self.half_since_s = None
            if held is not None:
                self._intake.partial.forget(self)
                self._services.pool.release(held.slab)
            return
        if self.half_since_s is None or held is None or at != held.start:  # the time of a frame is never extended
            self.half_since_s = self._services.runtime.clock.monotonic()
        if need > self._intake.partial.frame_bytes_max:
            self.refuse(ProtocolError(f"a frame of {need} bytes is larger than the memory of this broker"))
            return
        self._region = self._intake.reserve(self, slab, at, end, need)
        if self._region is None and held is not None and held.own:  # its bytes stay in it until there is memory
            held.filled, held.need = end, need
            self._region = self._waiting = held
            self._intake.wait(self)
            return
        if self._region is None:
            kept = Slab(end - at)
            kept.view[:] = slab.view[at:end]
            self._waiting = Region(kept, 0, end - at, end - at, need)
            self._intake.wait(self)
        if held is not None:
            self._services.pool.release(held.slab)

    def pause_writing(self) -> None:
        """Stop reading requests until the client reads its answers."""
        self.outbox.stop()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue to read requests, because the client reads its answers again."""
        self.outbox.release_waiters()
        if not self.paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the streams of the closed connection; received blocks stay."""
        self.conversation.close()
        self.outbox.release_waiters()
        if self._region is not None:
            self._services.pool.release(self._region.slab)
            self._region = None
        self._intake.forget(self)
        self._services.connection_limits.left(self)
        for stream in self.streams.values():
            stream.target.close_stream(stream)
        self.streams.clear()
        self._handler.disconnected(self)

    # ---- calls of the intake ---------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether HELLO was received and answered, and the connection is open."""
        return self.conversation.state in (ConnectionState.READY, ConnectionState.DRAINING)

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.conversation.state is ConnectionState.CLOSED

    @property
    def reads_on(self) -> bool:
        """Whether it may read while memory is short: its frame has a region, or it sends no blocks."""
        return self._waiting is None and (self._region is not None or not (self.streams or self._forwards))

    def pause(self) -> None:
        """Stop reading the socket: the memory budget is used up."""
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def take_region(self) -> bool:
        """Get a region for the waiting frame and resume reading; False when memory is still short."""
        frame = self._waiting
        assert frame is not None, "no frame waits for a region"
        region = self._intake.reserve(self, frame.slab, frame.start, frame.filled, frame.need)
        if region is None:
            return False
        if frame is self._region:
            self._services.pool.release(frame.slab)
        self._region, self._waiting = region, None
        self.resume()
        return True

    def resume(self) -> None:
        """Read the socket again, unless a frame waits for memory; an incomplete frame gets its full time."""
        if self._waiting is not None:
            return
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
        """Take complete frames between `at` and `end`; return where the rest starts and the length it needs."""
        view, ready = slab.view, self.ready
        if not ready and self.login is None and end - at >= 4:
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
                if not ready and api not in _GREETING:  # before it gets memory
                    raise ProtocolError(f"a frame {api} before the end of the login")
                check_prefix(length, api)
                if api == _WRITE and ready:  # before it gets memory
                    _check_beginning(self._stream(number), view[at + FRAME_PREFIX_BYTES : end], length)
                if stop > end:
                    break
                if api == Api.FORWARD and ready:
                    self._take_forward(argument, slab, at + FRAME_PREFIX_BYTES, stop)
                    at = stop
                    continue
                self._take_control(Frame(api, flags, number, argument, bytes(view[at + FRAME_PREFIX_BYTES : stop])))
                ready = self.ready
            else:
                stream = self._stream(number)
                if stream.open:
                    touched[stream] = None
                    stop = self._take_run(stream, slab, at, end, now_s) or self._take_block(
                        stream, slab, at, stop, now_s
                    )
                else:  # ignored: blocks after a refused one, until the client opens the stream again
                    _check_beginning(stream, view[at + FRAME_PREFIX_BYTES : stop], length)
            at = stop
        for stream in touched:
            stream.target.appended(stream)
        return at, need

    def _stream(self, number: int) -> Stream:
        """Return the stream of a WRITE. Raises: ProtocolError."""
        stream = self.streams.get(number)
        if stream is None:
            raise ProtocolError(f"WRITE on stream {number}, which was never opened")
        return stream

    def _take_run(self, stream: Stream, slab: Slab, at: int, end: int, now_s: float) -> int:
        """Append the sound blocks from `at` on to their partition; return where they end, 0 without any."""
        target = stream.target
        blocks_max, bytes_max = target.room(stream, now_s)
        if not blocks_max or not stream.checked:
            return 0
        run = sound_run(
            stream,
            slab,
            at,
            end,
            oldest_ms=(now_s - self.ready_s) * 1000 - target.delivery_timeout_ms,
            blocks_max=blocks_max,
            bytes_max=bytes_max,
        )
        large = first_to_open(run.extents, target.topic.settings.record_bytes_max)
        if large is not None:
            next_ = first_sequence_of(run.extents[large])
            extents = run.extents[:large]
            size = sum(stop - start for _, start, stop in extents)
            run = BlockRun(extents, run.first, next_, size)
        if not run.extents:
            return 0
        self._append(stream, run, now_s)
        return run.extents[-1][2]

    def _append(self, stream: Stream, run: BlockRun, now_s: float) -> None:
        """Append checked blocks to their partition, or close their stream with the reason."""
        outcome = stream.target.append(stream, run, now_s)
        if outcome is ACCEPTED:
            counters = self._services.counters
            counters.received_blocks += len(run.extents)
            counters.received_records += run.next - run.first
        elif not isinstance(outcome, Accepted):
            self._turn_away(stream, outcome)

    def _take_block(self, stream: Stream, slab: Slab, at: int, stop: int, now_s: float) -> int:
        """Check one block in full: append it, or close its stream with the reason. Return where it ends."""
        start = at + FRAME_PREFIX_BYTES
        _check_beginning(stream, slab.view[start:stop], stop - start)
        sent_ms = WRITE_PREFIX.unpack_from(slab.view, at)[4]
        if sent_ms < -_SENT_BEFORE_MS_MAX:
            raise ProtocolError(f"WRITE of a block that was first sent at {sent_ms} ms, which no client has")
        try:
            header = _checked_block(stream, slab.view[start:stop])
            first = header.first_sequence
            if first != stream.expected:
                raise OutOfSequenceError(f"block starts at sequence {first}, stream expects {stream.expected}")
            timeout_ms = stream.target.delivery_timeout_ms
            if (now_s - self.ready_s) * 1000 - sent_ms > timeout_ms:
                raise TooOldError(f"block {first} was first sent over {timeout_ms} ms ago")
            checks, topic = self._services.permissions, stream.target.topic
            reports = checks.enforced and topic.name == AUDIT_TOPIC
            if not stream.checked or header.raw_length > topic.settings.record_bytes_max:
                check_contents(slab.view[start:stop], header, topic)
                stream.checked = not reports  # each block of those comes here
            if reports:
                check_reports(slab.view[start:stop], header, checks, self.principal.name, self.peer)
        except MemqError as error:
            self._turn_away(stream, turned_away(error))
            return stop
        self._append(stream, BlockRun([(slab, start, stop)], first, header.next_sequence, stop - start), now_s)
        return stop

    def _turn_away(self, stream: Stream, outcome: TurnedAway) -> None:
        """Close the stream, with the reason; its next blocks are ignored until it is opened again."""
        stream.open = False
        if isinstance(outcome, Redirected):
            self.send_redirect(stream, outcome.address)
            return
        error, services, soft = outcome.error, self._services, isinstance(outcome, Throttled)
        text, retry_after_ms = f"{self.peer} {stream.target.name}: {error}", THROTTLE_MS
        if isinstance(error, OverLimitError):
            retry_after_ms = error.retry_after_ms
            services.events.info("over-limit", f"{self.peer}, {'soft' if soft else 'hard'}: {error}", source=self.host)
        elif soft:
            services.counters.throttled_blocks += 1
            services.events.info("throttled", text, source=self.host)
        else:
            services.counters.refused_blocks += 1
            services.events.warning("block-refused", text, source=self.host)
        if soft:
            self._throttle(
                stream, stream.expected, Throttle(retry_after_ms=retry_after_ms, text=str(error), hint=error.hint)
            )
        else:
            body = encode_message(nack_of(error))
            self._send_frame(encode_frame(Api.NACK, stream.number, stream.expected, body))

    def _throttle(self, stream: Stream, first: int, throttle: Throttle) -> None:
        self._send_frame(encode_frame(Api.THROTTLE, stream.number, first, encode_message(throttle)))

    def _take_control(self, frame: Frame) -> None:
        unsent = self.outbox.unsent_bytes
        if unsent > UNSENT_BYTES_MAX:  # reading stops at once, but one read may hold thousands of requests
            raise ThrottledError(f"{unsent} bytes of answers wait until this client reads them")
        self.conversation.sent(Side.CLIENT, frame.api)
        self._handler.request(self, take_checksum(frame) if self.frame_checksums else frame)

    def _take_forward(self, request: int, slab: Slab, start: int, stop: int) -> None:
        """Take another broker's block in place. From now on the connection counts as one that sends blocks."""
        self.conversation.sent(Side.CLIENT, Api.FORWARD)
        self._forwards = True
        if slab is self._intake.aside:
            error = ThrottledError("the memory budget is used up")
            self._send_frame(encode_frame(Api.ERROR, 0, request, encode_message(nack_of(error))))
        else:
            self._handler.forward(self, request, slab, start, stop)

    # ---- out -----------------------------------------------------------------------------------------

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()
    ) -> None:
        """See `memq.broker.partition.append.AckSink`.

        An ack is dropped when another stream has the stream's number by now: no client waits for it.
        """
        if self.streams.get(stream.number) is not stream:
            return
        self._services.counters.acks += 1
        self._send_frame(encode_ack(level, stream.number, next_sequence, epoch, positions))

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """See `memq.broker.partition.append.AckSink`."""
        if stream.open and self.streams.get(stream.number) is stream:
            stream.open = False
            self._throttle(stream, first, Throttle(retry_after_ms=THROTTLE_MS, text=str(error)))

    def send_redirect(self, stream: Stream, address: str) -> None:
        """See `memq.broker.partition.append.AckSink`."""
        body = encode_message(Redirect(address=address))
        self._send_frame(encode_frame(Api.REDIRECT, stream.number, stream.expected, body))

    def send(self, prefix: bytes, body: bytes = b"") -> None:
        """Send an answer; the prefix may include the body. The answer to HELLO starts the connection's clock."""
        api = prefix[4]
        self.conversation.sent(Side.BROKER, api)
        if api == Api.HELLO:
            self.ready_s = self._services.runtime.clock.monotonic()
            self._services.connection_limits.greeted(self)
        if api == Api.READ:
            self.outbox.write(prefix)
            self.outbox.write(body)  # joining the two would copy the body
        else:
            self._send_frame(prefix, body)

    def _send_frame(self, frame: bytes, body: bytes = b"") -> None:
        """Send a frame with its checksum, if the client takes them; the first piece may include the body."""
        pieces = add_checksum(frame, body) if self.frame_checksums and frame[4] != Api.HELLO else (frame, body)
        if len(body) <= JOINED_BYTES_MAX:  # one call of the socket takes half the CPU of three
            self.outbox.write(b"".join(pieces))
            return
        for piece in pieces:
            self.outbox.write(piece)

    def refuse(self, error: MemqError) -> None:
        """Send the client an error that concerns the whole connection, and close it."""
        if self.leaving_since_s is not None or self._transport is None:
            return
        error = as_damage(error) if self.frame_checksums else error
        self.leaving_since_s = self._services.runtime.clock.monotonic()
        self._services.counters.rejected_connections += 1
        self._services.events.warning("connection-refused", f"{self.peer}: {error}", source=self.host)
        if isinstance(error, ForeignProtocolError) and str(error).endswith("HTTP"):
            self.outbox.write(_http_answer(error))
        else:
            self._send_frame(encode_frame(Api.ERROR, 0, 0, encode_message(nack_of(error))))
        self.conversation.close()
        self._transport.close()

    def close(self) -> None:
        """Close after all written bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


def _check_beginning(stream: Stream, beginning: memoryview, length: int) -> None:
    """Compare the prefix of a WRITE with its block's own header, once that has come.

    The prefix has no checksum. With a greater length the connection would wait for bytes that do not come. With a
    smaller one the block would seem damaged, and its records would fail. On the stream of another partition the block
    would be refused, and its producer would not learn that its own stream lacks it.
    Raises: ProtocolError.
    """
    if length < BLOCK_HEADER_BYTES:
        raise ProtocolError(f"WRITE of {length} bytes, but a block has at least {BLOCK_HEADER_BYTES}")
    if len(beginning) < BLOCK_HEADER_BYTES:
        return
    try:
        header = parse_header(beginning)
    except MemqError:  # the whole block will show what is wrong
        return
    if header.length != length:
        raise ProtocolError(f"WRITE of {length} bytes, but its block has {header.length}")
    if (header.scope, header.producer_id) != (stream.target.scope, stream.producer_id):
        raise ProtocolError(
            f"WRITE on stream {stream.number} of scope {stream.target.scope:08x} and producer "
            f"{stream.producer_id:016x}, but its block is of scope {header.scope:08x} and producer "
            f"{header.producer_id:016x}"
        )


def _checked_block(stream: Stream, block: memoryview) -> BlockHeader:
    """Return the header of a block that is sound and belongs to this stream's instance.

    Raises: the MemqErrors of `check_block`; ProtocolError for a block of another instance.
    """
    header = check_block(block)
    if header.producer_epoch != stream.producer_epoch:
        raise ProtocolError(f"block of instance {header.producer_epoch} on a stream of {stream.producer_epoch}")
    return header


def _http_answer(error: MemqError) -> bytes:
    body = f"{error}\n{error.hint}\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


class Outbox:
    """The writing half of a connection. `congested` while the client reads its answers too slowly."""

    def __init__(self, clock: Clock) -> None:
        self.transport: asyncio.Transport | None = None
        self.standing_since_s = 0.0  # while congested: when the client last read any byte
        self._clock = clock
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent_bytes_seen = 0
        self.congested = False  # whether more bytes wait than the transport buffers

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def write(self, frame: bytes) -> None:
        """Send a frame; on a closing connection it is dropped."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(frame)

    def stop(self) -> None:
        """Note that the socket is full."""
        self._writable.clear()
        self.congested = True
        self.standing_since_s = self._clock.monotonic()
        self._unsent_bytes_seen = self.unsent_bytes

    def release_waiters(self) -> None:
        """Release all waiters: the socket accepts bytes again, or the connection is closed."""
        self._writable.set()
        self.congested = False

    async def writable(self) -> None:
        """Wait until the socket takes more, or the connection is closed."""
        await self._writable.wait()

    def note_progress(self, now_s: float) -> None:
        """Note whether the client has read any byte since the last call."""
        if self.unsent_bytes < self._unsent_bytes_seen:
            self.standing_since_s = now_s
        self._unsent_bytes_seen = self.unsent_bytes

    def is_stuck(self, now_s: float, timeout_ms: int) -> bool:
        """Whether answers wait, and the client has read nothing of them for this long."""
        return self.congested and now_s - self.standing_since_s > timeout_ms / 1000
