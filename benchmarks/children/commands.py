"""Interface of a child process: options from the command line, commands and answers as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

TCP_CONGESTION = 13
Command = dict[str, Any]


def options() -> Command:
    """Return the options of the parent."""
    found: Command = json.loads(sys.argv[1])
    return found


def answer(**values: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def commands() -> Iterator[Command]:
    """Yield the parent's commands until it closes the pipe."""
    for line in sys.stdin:
        yield json.loads(line)


async def commands_async() -> AsyncIterator[Command]:
    """Yield the parent's commands on an event loop, until it closes the pipe."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    rest = b""

    def readable() -> None:
        nonlocal rest
        found = os.read(0, 65_536)
        if not found:
            loop.remove_reader(0)
            lines.put_nowait(b"")
            return
        *whole, rest = (rest + found).split(b"\n")
        for line in whole:
            lines.put_nowait(line)

    loop.add_reader(0, readable)
    while line := await lines.get():
        yield json.loads(line)


def use_cubic(connection: socket.socket) -> None:
    """Set the loopback's faster congestion control: some hosts default to bbr, which halves its rate."""
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, b"cubic")
