"""A proxy for protocols of length-prefixed frames; a subclass decides about each frame."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from memq_localstack.ports import HOST

HANG_S = 120.0
BACKLOG = 100
TURNS_TO_CLOSE = 3  # of the loop, until the sockets of transports that were ended are closed


@dataclass(frozen=True)
class Outcome:
    """What is sent in place of a frame: other frames, after a wait, whole or cut, and whether the connection ends.

    The wait is a time, or lasts until `gate` is set; `sent` is set once the frames are with the system.
    """

    frames: tuple[bytes, ...] = ()
    wait_s: float = 0.0
    gate: asyncio.Event | None = None
    sent: threading.Event | None = None
    cut: bool = False
    ends: bool = False


class Conversation(Protocol):
    """One connection; both methods are called in the order of the frames."""

    def request(self, body: bytes) -> Outcome:
        """Return what the server gets."""
        ...

    def answer(self, body: bytes) -> Outcome:
        """Return what the client gets."""
        ...


Rule = Callable[[bytes], Outcome]


class FramedProxy:
    """Hands on frames between clients and a server on this machine, in a thread of its own."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._let_in: list[asyncio.StreamWriter] = []
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], name="framed-proxy")
        self._thread.start()
        assert self._ready.wait(HANG_S)

    @property
    def address(self) -> str:
        """Where clients come in."""
        return f"{HOST}:{self.port}"

    def conversation(self) -> Conversation:
        """Return the rules of a new connection; called in the thread."""
        raise NotImplementedError

    def call(self, action: Callable[[], None]) -> None:
        """Have its thread do something. Safe from any thread."""
        self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        """End it and its connections."""
        self.call(self._ended.set)
        self._thread.join()
        self._loop.close()

    # ---- in the thread ---------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Let connections in until the end, one after another.

        `asyncio.start_server` accepts many at once, and forgets those that it has not handed over at its close.
        """
        with socket.create_server((HOST, 0), backlog=BACKLOG) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._loop.add_reader(listener, self._accept, listener)
            self._ready.set()
            await self._ended.wait()
            self._loop.remove_reader(listener)
            while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        for writer in self._let_in:  # a task that is cancelled before its first step ends nothing
            with suppress(asyncio.CancelledError):  # of a task that waited for the same end, and was cancelled
                await _end(writer)
        for _ in range(TURNS_TO_CLOSE):
            await asyncio.sleep(0)
        for accepted in self._accepted:
            accepted.close()  # of a task that was cancelled before its first step

    def _accept(self, listener: socket.socket) -> None:
        """Let one connection in. `sock_accept` loses a socket if its task is cancelled in the same turn."""
        with suppress(BlockingIOError):
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            self._accepted.append(accepted)
            task = self._loop.create_task(self._connected(accepted))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _connected(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)  # noqa: TID251 - not memq's own traffic
        self._let_in.append(writer)
        try:
            answers, requests = await asyncio.open_connection(HOST, self._target)  # noqa: TID251 - as above
        except OSError:
            await _end(writer)
            return
        talk = self.conversation()
        ways = [
            asyncio.create_task(self._hand_on(reader, requests, talk.request)),
            asyncio.create_task(self._hand_on(answers, writer, talk.answer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            await _end(requests)
            await _end(writer)

    async def _hand_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, rule: Rule) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await source.readexactly(4)
                outcome = rule(await source.readexactly(int.from_bytes(size)))
                if outcome.wait_s:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(outcome.wait_s):
                            await self._ended.wait()
                if outcome.gate is not None:
                    await outcome.gate.wait()
                for frame in outcome.frames:
                    sink.write(len(frame).to_bytes(4) + frame[: len(frame) // 2 if outcome.cut else None])
                await sink.drain()
                if outcome.sent is not None:
                    outcome.sent.set()
                if outcome.ends:
                    return


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
