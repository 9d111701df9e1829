"""Sends pre-built blocks as fast as it may: to a broker within a window of unacked bytes, or to the plain sink.

The blocks are built before the clock starts, so the sender costs next to nothing while it sends, and the
receiver is what limits.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time

from awscrt.checksums import crc32c

from benchmarks.children.commands import Command, answer, commands, use_cubic
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import CHECKED_FROM, scope_of
from memq.limits import BLOCK_HEADER_BYTES, FRAME_PREFIX_BYTES, KIB, MIB
from memq.protocol.frames import ACK, HELLO_MAGIC, VERSIONS, WRITE_PREFIX, AckLevel, Api, Frame, encode_frame
from memq.protocol.frames import PREFIX as FRAME_PREFIX
from memq.protocol.messages import Hello, Metadata, MetadataRequest, Open, OpenAnswer, decode_message, encode_message
from memq.runtime.network import parse_address

WINDOW_BYTES = 32 * MIB  # unacked, of all connections
SEND_BYTES = 1 * MIB
RECORD_BYTES = 100
_CHECKSUM = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")


class Lane:
    """One connection and what it sends: `frames` of equal length, built for one producer."""

    def __init__(self, connection: socket.socket, frame_bytes: int, block_records: int, frames: memoryview) -> None:
        self.connection = connection
        self.frames = frames
        self.frame_bytes = frame_bytes
        self.block_records = block_records
        self.sent = 0
        self.acked = 0
        self.half = b""

    def send(self, window: int) -> None:
        """Send what the window allows."""
        end = min(self.sent + SEND_BYTES, self.acked + window, len(self.frames))
        if end > self.sent:
            self.sent += self.connection.send(self.frames[self.sent : end])

    def take_acks(self) -> None:
        """Read acks; anything else is an error that ends the run."""
        data = self.half + self.connection.recv(64 * KIB)
        whole = len(data) - len(data) % ACK.size
        self.half = data[whole:]
        if not whole:
            return
        _, api, _, _, sequence, _, _ = ACK.unpack_from(data, whole - ACK.size)
        if api != Api.ACK:
            raise RuntimeError(f"the broker answered {data[:300]!r}")
        self.acked = sequence // self.block_records * self.frame_bytes


def exchange(connection: socket.socket, frame: bytes) -> Frame:
    """Send a request and wait for its answer."""
    connection.sendall(frame)
    length, api, flags, stream, argument = FRAME_PREFIX.unpack(connection.recv(FRAME_PREFIX_BYTES, socket.MSG_WAITALL))
    body = connection.recv(length, socket.MSG_WAITALL)
    if api == Api.ERROR:
        raise RuntimeError(f"the broker answered {body!r}")
    return Frame(api, flags, stream, argument, body)


def connect(address: str) -> socket.socket:
    connection = socket.create_connection(parse_address(address))
    use_cubic(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def open_stream(connection: socket.socket, topic: str, producer: int) -> int:
    """Say HELLO and open stream 1; return the scope of its blocks."""
    hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1], client="bench")
    exchange(connection, encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
    request = MetadataRequest(topics=[topic], create=True)
    frame = exchange(connection, encode_frame(Api.METADATA, 0, 1, encode_message(request)))
    found = decode_message(frame.body, Metadata).topics[0].topic
    opening = Open(
        topic=topic, topic_id=found.id, partition=0, producer=f"{producer:016x}", acks=AckLevel.ALL, sequence=0
    )
    frame = exchange(connection, encode_frame(Api.OPEN, 1, 2, encode_message(opening)))
    decode_message(frame.body, OpenAnswer)
    return scope_of(found.id_bytes, 0)


def build(buffer: bytearray, block_bytes: int, producer: int, scope: int) -> tuple[int, int, int]:
    """Fill `buffer` with WRITE frames of one producer; return their bytes, records per block and the bytes filled."""
    builder = BlockBuilder()
    records = max(1, (block_bytes - BLOCK_HEADER_BYTES) // (RECORD_BYTES + 4))
    for number in range(records):
        builder.append(f"{number:0{RECORD_BYTES}}".encode())
    block = bytearray(builder.seal(producer_id=producer, first_sequence=0, scope=scope, now_ms=0, codec="none").data)
    frame_bytes = FRAME_PREFIX_BYTES + len(block)
    checked = memoryview(block)[CHECKED_FROM:]
    prefix = WRITE_PREFIX.pack(len(block), Api.WRITE, 0, 1, 0)
    count = len(buffer) // frame_bytes
    for number in range(count):
        _SEQUENCE.pack_into(block, 40, number * records)
        _CHECKSUM.pack_into(block, 4, crc32c(checked))
        at = number * frame_bytes
        buffer[at : at + FRAME_PREFIX_BYTES] = prefix
        buffer[at + FRAME_PREFIX_BYTES : at + frame_bytes] = block
    return frame_bytes, records, count * frame_bytes


class Sender:
    """Lanes for one case; the memory of the frames is kept from round to round."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._producer = 1
        self._selector = selectors.DefaultSelector()
        self._lanes: list[Lane] = []
        self._acked = True
        self._window_bytes = WINDOW_BYTES

    def prepare(self, params: Command) -> None:
        """Connect, open streams, and build the frames."""
        connections = params["connections"]
        size = params["total_bytes"] // connections
        if len(self._buffers) != connections or len(self._buffers[0]) != size:
            self._buffers = [bytearray(size) for _ in range(connections)]
        self._acked = params["acked"]
        self._window_bytes = params.get("window_bytes", WINDOW_BYTES)
        for buffer in self._buffers:
            self._producer += 1
            connection = connect(params["address"])
            scope = open_stream(connection, params["topic"], self._producer) if self._acked else 1
            frame_bytes, records, filled = build(buffer, params["block_bytes"], self._producer, scope)
            connection.setblocking(False)
            self._lanes.append(Lane(connection, frame_bytes, records, memoryview(buffer)[:filled]))
        answer(total_bytes=sum(len(lane.frames) for lane in self._lanes))

    def run(self) -> None:
        """Send everything; return when it is acked, or, to the sink, read."""
        began_s = time.perf_counter()
        lane_bytes = max(self._window_bytes // len(self._lanes), 2 * self._lanes[0].frame_bytes)
        window = lane_bytes if self._acked else 1 << 60
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        for lane in self._lanes:
            self._selector.register(lane.connection, both, lane)
        while self._selector.get_map():
            for key, events in self._selector.select():
                self._step(key.data, events, window)
        answer(seconds=time.perf_counter() - began_s)
        for lane in self._lanes:
            lane.connection.close()
        self._lanes.clear()

    def _step(self, lane: Lane, events: int, window: int) -> None:
        if events & selectors.EVENT_WRITE:
            lane.send(window)
        if events & selectors.EVENT_READ:
            if self._acked:
                lane.take_acks()
            else:  # the sink closes when it has read everything
                self._selector.unregister(lane.connection)
                return
        unsent = lane.sent < len(lane.frames)
        if not unsent and self._acked and lane.acked >= lane.sent:
            self._selector.unregister(lane.connection)
            return
        if not unsent and not self._acked and events & selectors.EVENT_WRITE:
            lane.connection.shutdown(socket.SHUT_WR)
        may_send = unsent and lane.sent - lane.acked < window
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if may_send else 0)
        if self._selector.get_key(lane.connection).events != wanted:
            self._selector.modify(lane.connection, wanted, lane)


def main() -> None:
    sender = Sender()
    answer(ready=True)
    for params in commands():
        if params["command"] == "prepare":
            sender.prepare(params)
        else:
            sender.run()


if __name__ == "__main__":
    main()
