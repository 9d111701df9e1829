"""Hostile connections of all kinds to one broker: `python -m tests.hostile_connections PORT COUNT`.

Prints `ready` when COUNT connections were open at once, and attacks until its standard input ends. A closed connection
is made again. Kinds: silent, slow, half frames, declared lengths, floods, TLS alerts.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from memq.limits import MIB
from memq.protocol.frames import HELLO_MAGIC, PREFIX, VERSIONS, Api, encode_frame
from memq.protocol.messages import Hello, MetadataRequest, encode_message

PAUSE_S = 1.0
OPENED_AT_ONCE = 100
ADDRESSES = 4  # of the loopback network: each has a bound of connections
GREETING = encode_frame(
    Api.HELLO, 0, HELLO_MAGIC, encode_message(Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1]))
)
QUESTION = encode_frame(Api.METADATA, 0, 1, encode_message(MetadataRequest(topics=["clicks"])))
TLS_ALERT = bytes.fromhex("15030300020228")
TLS_CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(32)


async def pace(seconds: float) -> None:
    """Hold a rate of sending; nothing is waited for."""
    turn = asyncio.get_running_loop().create_future()
    timer = asyncio.get_running_loop().call_later(seconds, turn.cancel)
    try:
        await asyncio.wait((turn,))
    finally:
        timer.cancel()


async def _silent() -> AsyncIterator[bytes]:
    while True:
        yield b""


async def _slow() -> AsyncIterator[bytes]:
    for at in itertools.count():
        yield GREETING[at : at + 1]


async def _half_frames() -> AsyncIterator[bytes]:
    yield GREETING + QUESTION[:20]
    while True:
        yield b""


async def _declared() -> AsyncIterator[bytes]:
    yield GREETING + PREFIX.pack(4 * MIB, Api.METADATA, 0, 0, 1)
    while True:
        yield b" "


async def _flood() -> AsyncIterator[bytes]:
    yield GREETING
    while True:
        yield QUESTION * 20  # and no answer is ever read


async def _alerts() -> AsyncIterator[bytes]:
    yield TLS_CLIENT_HELLO
    while True:
        yield TLS_ALERT


KINDS: tuple[Callable[[], AsyncIterator[bytes]], ...] = (_silent, _slow, _half_frames, _declared, _flood, _alerts)


async def _attack(port: int, number: int, opened: asyncio.Semaphore, first: asyncio.Event) -> None:
    """Keep one hostile connection; `first` is set when it was open once."""
    address = (f"127.0.0.{2 + number % ADDRESSES}", 0)
    while True:
        with suppress(OSError):
            async with opened:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)  # noqa: TID251
            first.set()
            try:
                async for piece in KINDS[number % len(KINDS)]():
                    if writer.transport.get_write_buffer_size() < MIB:
                        writer.write(piece)
                    if reader.at_eof() or writer.is_closing():
                        break
                    await pace(PAUSE_S)
            finally:
                writer.transport.abort()
        await pace(PAUSE_S)


async def main(port: int, count: int) -> None:
    """Attack until the standard input ends."""
    opened = asyncio.Semaphore(OPENED_AT_ONCE)
    firsts = [asyncio.Event() for _ in range(count)]
    attacks = [asyncio.create_task(_attack(port, number, opened, first)) for number, first in enumerate(firsts)]
    for first in firsts:
        await first.wait()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for attack in attacks:
        attack.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
