"""The window of one producer in one partition: unacked blocks, and when to send them. Pure.

Its rules:
- Blocks are sent in order, and a block always has the same bytes.
- A stream is dense. After a block that was given up, the next block waits until all earlier blocks are acked. Then the
  stream is opened again.
- Nothing is written before OPEN is answered.
- A stream that was closed is opened again from the oldest live block.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from memq.client.producer.window_events import (
    TABLE,
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
    ClosedError,
    CorruptDataError,
    DeniedError,
    IdentityConflictError,
    InvalidRequestError,
    MemqError,
    MovedError,
    NotReadyError,
    OutcomeUnknownError,
    OutOfSequenceError,
    OverLimitError,
    ProducerFencedError,
    ProtocolError,
    ThrottledError,
    TimedOutError,
    TooOldError,
    UnsupportedVersionError,
)
from memq.protocol.frames import AckPosition
from memq.runtime.clock import backoff_s

RETRY_S_BASE = 0.05
RETRY_S_MAX = 0.5  # bound of the delay that a client adds to a takeover
NOT_READY_ASKS = 4  # the metadata is refreshed after so many answers "not ready"
MOVED_ASKS = 4  # redirects after which the metadata are asked for
BURNED_RANGES_MAX = 4_096  # beyond it, the oldest are not reported: the audit calls them unknown


class ProducerWindow:
    """The machine. Only `handle` changes it, and returns the instructions for the shell, in order.

    `wants_acks` is false for acks=0: a block is settled when it is written. While the state is OPEN, the shell passes
    `Room` after every event, until no instruction is returned or the socket is full.
    """

    def __init__(self, name: str, random: random.Random, *, wants_acks: bool = True) -> None:
        self.state = WindowState.RESTING
        self.next_sequence = 0
        self.burned: list[tuple[int, int]] = []
        self._name = name
        self._random = random
        self._wants_acks = wants_acks
        self._sent: deque[UnackedBlock] = deque()  # written on the stream, in order
        self._queued: deque[UnackedBlock] = deque()  # not written on the stream, in order, all after `_sent`
        self._stream_next = self.next_sequence  # the sequence that the broker expects on the stream
        self._seen_next = 0  # without a stream: the end of what was sent on the last stream of the connection
        self._attempts = 0  # since the last ack
        self._retry_at_s = 0.0
        self._address = ""
        self._refresh = False
        self._finishing = False
        self._written = False  # whether any block was written, on any stream: otherwise there is no end to report
        self._why: MemqError | None = None  # cause of late acks or of the last loss of the stream, since the last ack
        self._out: list[Instruction] = []

    # ---- what the shell reads -------------------------------------------------------------

    @property
    def live(self) -> int:
        """How many blocks are neither acked nor given up."""
        return len(self._sent) + len(self._queued)

    @property
    def queued(self) -> int:
        """How many blocks wait to be written."""
        return len(self._queued)

    def blocks(self) -> list[UnackedBlock]:
        """Return the blocks that are neither acked nor given up, in order."""
        return [*self._sent, *self._queued]

    @property
    def oldest_sent_s(self) -> float | None:
        """When the oldest unacked block on the stream was first sent; None without such a block."""
        return self._sent[0].first_sent_s if self._sent else None

    @property
    def why(self) -> MemqError | None:
        """The cause of late acks or of the last loss of the stream, since the last ack."""
        return self._why

    @property
    def next_deadline_s(self) -> float | None:
        """When the next Tick is due (monotonic s); None if no Tick is needed."""
        times = [blocks[0].deadline_s for blocks in (self._sent, self._queued) if blocks]
        if self.state is WindowState.WAITING:
            times.append(self._retry_at_s)
        return min(times, default=None)

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event and return the instructions that follow from it."""
        successors = TABLE[self.state].get(type(event))
        assert successors is not None, f"{type(event).__name__} cannot happen in state {self.state.name}"
        out: list[Instruction] = []
        self._out = out
        _HANDLERS[type(event)](self, event)
        assert self.state in successors, f"{type(event).__name__} led to {self.state.name}"
        return out

    # ---- blocks --------------------------------------------------------------------------------

    def _sealed(self, event: Sealed) -> None:
        block = event.block
        if self.state is WindowState.CLOSED:
            self._burn(block, ClosedError(f"the producer was closed before a block of {self._name} was sealed"))
            return
        assert block.first >= self.next_sequence, f"block {block.first} does not follow on {self.next_sequence}"
        assert not self._finishing, "a block was sealed after the end"
        self._note_burned(self.next_sequence, block.first)
        self.next_sequence = block.next
        self._queued.append(block)
        if self.state is WindowState.RESTING:
            self._open()

    def _seal_failed(self, event: SealFailed) -> None:
        self.next_sequence = event.block.next
        self._burn(event.block, event.error)

    def _room(self, event: Room) -> None:
        if self.state is not WindowState.OPEN:
            return
        self._expire(event.now_s)
        if self._queued and self._queued[0].first == self._stream_next:
            self._write(self._queued.popleft(), event.now_s)
        elif self._queued and not self._sent:
            self._open()  # beyond the gap that a burned block left
        self._close_when_done()

    def _write(self, block: UnackedBlock, now_s: float) -> None:
        block.writes += 1
        self._written = True
        if block.first_sent_s is None:
            block.first_sent_s = now_s
        self._stream_next = block.next
        self._out.append(WriteBlock(block))
        if self._wants_acks:
            self._sent.append(block)
        else:
            self._attempts = 0
            self._out.append(Settle(block, None))

    def _acked(self, event: Acked) -> None:
        if self.state in (WindowState.OPEN, WindowState.LEAVING):
            self._settle_below(self._sent, event.next_sequence, event.positions)
        elif self.state in (WindowState.WAITING, WindowState.OPENING):  # a late ack of the closed stream is still valid
            self._settle_below(self._queued, min(event.next_sequence, self._seen_next), event.positions)
        self._close_when_done()
        self._rest_without_stream()

    def _settle_below(self, blocks: deque[UnackedBlock], bound: int, positions: Sequence[AckPosition]) -> None:
        ordered = sorted(positions)
        firsts = [position.first for position in ordered]
        while blocks and blocks[0].next <= bound:
            block = blocks.popleft()
            at = bisect_right(firsts, block.first) - 1
            if at >= 0 and block.next <= ordered[at].next:
                block.position = ordered[at]
            self._out.append(Settle(block, None))
            self._attempts, self._why = 0, None

    def _tick(self, event: Tick) -> None:
        self._expire(event.now_s)
        if self.state is WindowState.WAITING and event.now_s >= self._retry_at_s and (self.live or self._finishing):
            self._open()
            return
        self._close_when_done()
        self._rest_without_stream()

    def _delayed(self, event: Delayed) -> None:
        if self.live:
            self._why = event.error

    def _expire(self, now_s: float) -> None:
        """Give up blocks past their deadlines. The oldest blocks have the earliest deadlines."""
        for blocks in (self._sent, self._queued):
            while blocks and blocks[0].deadline_s <= now_s:
                self._burn(blocks.popleft(), self._late())

    def _late(self) -> TimedOutError:
        """Return the error of a block that is given up at its deadline, with the known cause."""
        text = f"{self._name} took no block within the delivery timeout"
        return TimedOutError(text) if self._why is None else TimedOutError(f"{text}: {self._why}", hint=self._why.hint)

    def _burn(self, block: UnackedBlock, error: MemqError, *, unknown: bool = False) -> None:
        """Settle a block that is given up. If it was sent, it may be stored, so its outcome is unknown.

        After an IdentityConflictError the outcome is known: the owner has compared the block with a stored one.
        """
        self._note_burned(block.first, block.next)
        if unknown or (block.writes and not isinstance(error, IdentityConflictError)):
            count = block.next - block.first
            records = "1 record" if count == 1 else f"{count} records"
            doubt = OutcomeUnknownError(
                f"{records} of {self._name} from sequence {block.first} on, sent and not acked: {error}"
            )
            doubt.__cause__ = error
            error = doubt
        self._out.append(Settle(block, error))

    def _note_burned(self, first: int, next_: int) -> None:
        """Remember sequences that no record will have: given up, or skipped by a caller that chose sequences."""
        if first == next_:
            return
        if self.burned and self.burned[-1][1] == first:
            self.burned[-1] = (self.burned[-1][0], next_)
        else:
            self.burned.append((first, next_))
            del self.burned[:-BURNED_RANGES_MAX]

    # ---- the stream ------------------------------------------------------------------------------

    def _open(self) -> None:
        """Instruct the shell to open a stream from the oldest live block on."""
        assert not self._sent, "a stream is opened while another one has unacked blocks"
        self.state = WindowState.OPENING
        self._stream_next = self._queued[0].first if self._queued else self.next_sequence
        self._out.append(OpenStream(self._stream_next, self._address, self._refresh))
        self._address, self._refresh = "", False

    def _opened(self, event: Opened) -> None:
        if self.state is WindowState.CLOSED:
            return
        self.state = WindowState.OPEN
        self._close_when_done()

    def _open_failed(self, event: OpenFailed) -> None:
        if self.state is WindowState.CLOSED:
            return
        if _is_final(event.error):
            while self._queued:
                self._burn(self._queued.popleft(), event.error)
            self.state = WindowState.CLOSED if self._finishing else WindowState.RESTING
        else:
            self._retry(event.error, event.now_s)

    def _nacked(self, event: Nacked) -> None:
        if self.state not in (WindowState.OPEN, WindowState.LEAVING):
            return  # the stream was closed before
        self._seen_next = min(event.first_sequence, self._stream_next)
        for block in self._sent:
            if block.first >= event.first_sequence:
                block.writes -= 1  # the broker took neither this block nor the later ones of the stream
        for blocks in (self._sent, self._queued):
            for block in blocks:
                if block.first == event.first_sequence:
                    if _is_final_for_block(event.error) and not _may_be_sent_again(block, event.error):
                        blocks.remove(block)
                        self._burn(block, event.error, unknown=isinstance(event.error, TooOldError))
                    break
        self._retry(event.error, event.now_s, at_once=_is_final_for_block(event.error))

    def _refused(self, event: StreamRefused) -> None:
        if self.state in (WindowState.OPEN, WindowState.LEAVING):
            self._seen_next = self._stream_next
            self._retry(event.error, event.now_s)

    def _broker_draining(self, event: BrokerDraining) -> None:
        if self.state is WindowState.OPEN:
            self.state = WindowState.LEAVING
            self._rest_without_stream()

    def _connection_lost(self, event: ConnectionLost) -> None:
        self._seen_next = 0
        if self.state is WindowState.CLOSING:
            self.state = WindowState.CLOSED
        elif self.state in (WindowState.OPENING, WindowState.OPEN, WindowState.LEAVING):
            self._retry(event.error, event.now_s)

    def _retry(self, error: MemqError, now_s: float, *, at_once: bool = False) -> None:
        """After the loss of the stream, retry after a random time below a bound that doubles, or rest.

        - Moved: open at the named broker at once. At every MOVED_ASKS-th answer refresh the metadata: brokers that the
          coordinator does not reach may name each other.
        - Not ready: retry at the same owner; refresh the metadata only at every NOT_READY_ASKS-th answer.
        - Over capacity: wait for the time in the error, and do not refresh the metadata.
        - All other errors: refresh the metadata, which name the owner.
        """
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()
        self._why = error
        delay_s = backoff_s(self._random, self._attempts, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
        first_time = self._attempts == 0
        self._attempts += 1
        self._address = error.address if isinstance(error, MovedError) and self._attempts % MOVED_ASKS else ""
        asks = not isinstance(error, NotReadyError) or self._attempts % NOT_READY_ASKS == 0
        self._refresh = asks and not self._address and not at_once and not isinstance(error, ThrottledError)
        if not self.live and not self._finishing:
            self.state = WindowState.RESTING
        elif at_once or (self._address and first_time):
            self._open()
        else:
            self.state = WindowState.WAITING
            self._retry_at_s = now_s + error.retry_after_ms / 1000 + delay_s

    def _rest_without_stream(self) -> None:
        """Rest when no block is live; leave a draining broker when it has acked all blocks that it took."""
        if self.state is WindowState.LEAVING and not self._sent:
            self._refresh = True
            self.state = WindowState.WAITING
            self._retry_at_s = 0.0
        if self.state is WindowState.WAITING and not self.live and not self._finishing:
            self.state = WindowState.RESTING

    # ---- the end -----------------------------------------------------------------------------------

    def _finish(self, event: Finish) -> None:
        self._finishing = True
        if self.state is WindowState.RESTING and self._written:
            self._open()
        elif self.state is WindowState.RESTING:
            self.state = WindowState.CLOSED
        self._close_when_done()

    def _close_when_done(self) -> None:
        if self._finishing and not self.live and self.state in (WindowState.OPEN, WindowState.LEAVING):
            self.state = WindowState.CLOSING
            self._out.append(CloseStream(self.next_sequence, list(self.burned)))

    def _finished(self, event: Finished) -> None:
        self.state = WindowState.CLOSED

    def _abandon(self, event: Abandon) -> None:
        for blocks in (self._sent, self._queued):
            while blocks:
                self._burn(blocks.popleft(), event.error)
        self._finishing = True
        self.state = WindowState.CLOSED


def _is_final(error: MemqError) -> bool:
    """Whether an answer to OPEN means that no later OPEN will succeed."""
    if isinstance(error, ProducerFencedError):
        return True
    passing = (OutOfSequenceError, TooOldError, ProtocolError, UnsupportedVersionError)
    return isinstance(error, InvalidRequestError | DeniedError) and not isinstance(error, passing)


def _may_be_sent_again(block: UnackedBlock, error: MemqError) -> bool:
    """Whether a block was refused as damaged once and is sound here: a bit changed on the way."""
    if not isinstance(error, CorruptDataError) or block.refused:
        return False
    block.refused = True
    return block.is_sound()


def _is_final_for_block(error: MemqError) -> bool:
    """Whether a NACK is final for its block, unless a bit of the block changed on the way."""
    if isinstance(error, OutOfSequenceError | ProtocolError):
        return False
    refused = (InvalidRequestError, DeniedError, CorruptDataError, OutcomeUnknownError, OverLimitError)
    return isinstance(error, refused)


_HANDLERS: dict[type[Event], Callable[[ProducerWindow, Any], None]] = {
    Sealed: ProducerWindow._sealed,
    SealFailed: ProducerWindow._seal_failed,
    Opened: ProducerWindow._opened,
    OpenFailed: ProducerWindow._open_failed,
    Acked: ProducerWindow._acked,
    Nacked: ProducerWindow._nacked,
    StreamRefused: ProducerWindow._refused,
    BrokerDraining: ProducerWindow._broker_draining,
    ConnectionLost: ProducerWindow._connection_lost,
    Room: ProducerWindow._room,
    Tick: ProducerWindow._tick,
    Delayed: ProducerWindow._delayed,
    Finish: ProducerWindow._finish,
    Finished: ProducerWindow._finished,
    Abandon: ProducerWindow._abandon,
}
