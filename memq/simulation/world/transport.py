"""One end of a simulated connection: a transport of asyncio that behaves as a real one does.

Sender: `write` keeps the caller's buffer by reference. It copies the buffer only when it is "sent", at a later
callback, as uvloop does when the socket is full. A caller that changes a buffer too early always sends wrong bytes
here. Receiver: bytes are copied into the protocol's buffer when they are delivered, cut anywhere, several writes
merged. `get_buffer` is sometimes called without bytes, as uvloop does when the kernel had none.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from memq.runtime.network import Address
from memq.simulation.world.node import SimNode

READ_BYTES_MAX = 256 << 10
HIGH_WATER_BYTES = 64 << 10


class End(enum.Enum):
    """How a direction ends: an orderly FIN after all bytes, or a reset."""

    FIN = "fin"
    RST = "rst"


class Pipe:
    """One direction of a connection: bytes that fly, then the kernel buffer of the receiver."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.flying: deque[tuple[float, bytes | End]] = deque()
        self.flying_bytes = 0
        self.inbox = bytearray()
        self.end: End | None = None
        self.last_arrival = 0.0

    def room(self) -> int:
        """Return the number of bytes that the sender's kernel takes now."""
        return self.window_bytes - self.flying_bytes - len(self.inbox)


class PieceCarrier(Protocol):
    """The switch, as a transport uses it."""

    certified: bool

    def draw_piece_bytes(self) -> int:
        """See `Switch.draw_piece_bytes`."""

    def draw_send_delay_s(self) -> float:
        """See `Switch.draw_send_delay_s`."""

    def draw_spurious_buffer(self) -> bool:
        """See `Switch.draw_spurious_buffer`."""

    def send(self, end: SimTransport, piece: bytes) -> None:
        """See `Switch.send`."""

    def send_end(self, end: SimTransport, how: End) -> None:
        """See `Switch.send_end`."""

    def delivered(self, end: SimTransport, count: int) -> None:
        """See `Switch.delivered`."""

    def node_died(self, end: SimTransport) -> None:
        """See `Switch.node_died`."""

    def forget_pair(self, end: SimTransport) -> None:
        """See `Switch.forget_pair`."""


class SimTransport(asyncio.Transport):
    """One end. `peer`, `inward` and `outward` are set by the switch before anything happens."""

    peer: SimTransport
    inward: Pipe
    outward: Pipe

    def __init__(
        self, switch: PieceCarrier, node: SimNode, number: int, address: Address, peer_address: Address
    ) -> None:
        certificate = {"subject": ((("commonName", peer_address[0]),),)} if switch.certified else None
        super().__init__({"peername": peer_address, "sockname": address, "peercert": certificate})
        self.switch = switch
        self.node = node
        self.number = number
        self.address = address
        self.gone = False  # true: has no further effect on the peer
        self._protocol: asyncio.BufferedProtocol | None = None
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._high_bytes = HIGH_WATER_BYTES
        self._low_bytes = HIGH_WATER_BYTES // 4
        self._closing = False
        self._eof_wanted = False
        self._write_paused = False
        self._read_paused = False
        self._read_scheduled = False
        self._pump_scheduled = False
        self._forget_death = node.at_death(self._node_died)

    # ---- life --------------------------------------------------------------------------------

    def begin(self, protocol: asyncio.BufferedProtocol) -> None:
        """Hand the connection to its protocol; runs in the node's loop."""
        if self.gone:
            return
        self._protocol = protocol
        protocol.connection_made(self)
        self.notify()

    def close(self) -> None:
        """Send the buffered bytes, then end."""
        if self._closing:
            return
        self._closing = True
        if not self._outbox:
            self._finish(None)

    def abort(self) -> None:
        """End at once; buffered bytes are lost, and the peer is reset."""
        self._closing = True
        self._finish(None, End.RST)

    def reset(self, why: str) -> None:
        """End the connection at this end, as a reset or a timeout of the kernel does."""
        if not self.gone:
            self.node.loop.call_soon(self._lose, ConnectionResetError(why))

    def _lose(self, error: Exception) -> None:
        self._closing = True
        self._finish(error, End.RST)

    def _finish(self, error: Exception | None, end: End = End.FIN) -> None:
        if self.gone:
            return
        self.gone = True
        self._forget_death()
        self._outbox.clear()
        self._outbox_bytes = 0
        # A kernel that has unread bytes at close resets the peer, which may lose bytes that it has not read yet.
        self.switch.send_end(self, End.RST if self.inward.inbox else end)
        self.switch.forget_pair(self)
        if self._protocol is not None:
            self.node.loop.call_soon(self._protocol.connection_lost, error)

    def _node_died(self) -> None:
        self.gone = True
        self._outbox.clear()
        self.switch.node_died(self)

    def is_closing(self) -> bool:
        """Return True after close, abort or loss."""
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Change the protocol."""
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        assert self._protocol is not None
        return self._protocol

    # ---- writing -----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Keep `data` by reference; it is sent at a later callback."""
        if self._eof_wanted:
            raise RuntimeError("cannot call write() after write_eof()")
        if self._closing or not self.node.alive or not len(data):
            return
        view = memoryview(data).cast("B")
        self._outbox.append(view)
        self._outbox_bytes += len(view)
        self._schedule_pump()
        if self._outbox_bytes > self._high_bytes and not self._write_paused:
            self._write_paused = True
            self.get_protocol().pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Buffer each by reference."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        """Return True."""
        return True

    def write_eof(self) -> None:
        """Send the buffered bytes, then FIN; reading continues."""
        if not self._eof_wanted and not self._closing:
            self._eof_wanted = True
            if not self._outbox:
                self.switch.send_end(self, End.FIN)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the marks at which the protocol is paused and resumed, in bytes."""
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        self._high_bytes = high
        self._low_bytes = high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return (low, high) in bytes."""
        return self._low_bytes, self._high_bytes

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait here."""
        return self._outbox_bytes

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled and not self.gone:
            self._pump_scheduled = True
            delay_s = self.switch.draw_send_delay_s()
            if delay_s:
                self.node.loop.call_later(delay_s, self._pump)
            else:
                self.node.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Pass bytes to the kernel, as many as it takes now."""
        self._pump_scheduled = False
        if self.gone or not self._outbox:
            return
        room = self.outward.room()
        if room <= 0:
            return  # the receiver's reading schedules the next one
        piece = self._take(min(room, self.switch.draw_piece_bytes()))
        self.switch.send(self, piece)
        if self._write_paused and self._outbox_bytes <= self._low_bytes:
            self._write_paused = False
            self.get_protocol().resume_writing()
        if self._outbox:
            self._schedule_pump()
        elif self._closing:
            self._finish(None)
        elif self._eof_wanted:
            self.switch.send_end(self, End.FIN)

    def _take(self, count: int) -> bytes:
        taken: list[bytes] = []
        while count and self._outbox:
            view = self._outbox[0]
            part = bytes(view[:count])
            taken.append(part)
            count -= len(part)
            self._outbox_bytes -= len(part)
            if len(part) == len(view):
                self._outbox.popleft()
            else:
                self._outbox[0] = view[len(part) :]
        return b"".join(taken)

    def made_room(self) -> None:
        """The receiver has read bytes: send more."""
        if self._outbox:
            self._schedule_pump()

    # ---- reading -----------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Return True while bytes are delivered."""
        return not self._read_paused and not self._closing

    def pause_reading(self) -> None:
        """Deliver nothing until resumed; the peer's bytes pile up at the peer."""
        self._read_paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        self._read_paused = False
        self.notify()

    def notify(self) -> None:
        """Bytes or the end may be ready to read."""
        pipe = self.inward
        if not self._read_scheduled and self._protocol is not None and (pipe.inbox or pipe.end):
            self._read_scheduled = True
            self.node.loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        if self._closing or self._read_paused:
            return
        try:
            if self.inward.inbox:
                self._deliver()
            elif self.inward.end is End.FIN:
                self.inward.end = None
                if not self._ask_end():
                    self.close()
                return
            elif self.inward.end is End.RST:
                self._lose(ConnectionResetError("connection reset by peer"))
                return
        except Exception as error:  # noqa: BLE001  asyncio: an error of the protocol is fatal to the connection
            self.node.loop.call_exception_handler({"message": f"protocol of {self!r} failed", "exception": error})
            self._lose(error)
        self.notify()

    def _ask_end(self) -> bool:
        protocol = self._protocol
        assert protocol is not None
        if self.switch.draw_spurious_buffer():
            protocol.get_buffer(READ_BYTES_MAX)
        return bool(protocol.eof_received())

    def _deliver(self) -> None:
        protocol = self._protocol
        assert protocol is not None
        if self.switch.draw_spurious_buffer():
            protocol.get_buffer(READ_BYTES_MAX)
            return
        inbox = self.inward.inbox
        buffer = memoryview(protocol.get_buffer(READ_BYTES_MAX)).cast("B")
        if not len(buffer):
            raise RuntimeError("get_buffer() returned an empty buffer")
        count = min(len(buffer), len(inbox), self.switch.draw_piece_bytes())
        buffer[:count] = inbox[:count]
        buffer.release()
        del inbox[:count]
        self.switch.delivered(self, count)
        protocol.buffer_updated(count)
        self.peer.made_room()

    def __repr__(self) -> str:
        return f"<end {self.number} of {self.node.name}>"
