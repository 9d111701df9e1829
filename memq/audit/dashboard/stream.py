"""The event stream: what changed on the board, to each browser that listens, as it can take it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

import msgspec

from memq.audit.dashboard.board import Board, BoardUpdate
from memq.errors import MemqError, ThrottledError

if TYPE_CHECKING:  # it needs anyio, a poller does not
    from memq.audit.dashboard.records import TailPart

STREAMS_MAX = 32  # of all browsers together; a browser has six connections for one host
TAILS_MAX = 8
PAUSE_S = 0.04  # changes of this time go together: all in all they are to be seen within 100 ms
SILENCE_S = 15.0  # then a comment is sent: proxies close what is silent, and who has gone is noticed
_encode = msgspec.json.encode


class Seats:
    """How many streams or requests of a kind there may be at once."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self.held = 0

    def check(self) -> None:
        """Raises: ThrottledError when all seats are taken."""
        if self.held >= self._most:
            raise ThrottledError(
                f"{self.held} {self._what} are open, the most there may be", hint="close other pages, or wait"
            )

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a seat. Raises: ThrottledError when all are taken."""
        self.check()
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def taken(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events, on a seat that is free again after the last one, or when nobody listens any more."""
        with self.one():
            async with aclosing(events):
                async for each in events:
                    yield each


class Feed:
    """The board and those who wait for its next change.

    `run` tells this process's versions from an earlier one's.
    """

    def __init__(self, run: str) -> None:
        self.board = Board()
        self.run = run
        self.streams = Seats(STREAMS_MAX, "event streams")
        self.tails = Seats(TAILS_MAX, "tails")
        self.closed = False
        self._changed = asyncio.Event()
        self._told = 0

    def announce(self) -> None:
        """Wake those who wait, when something changed since the last time."""
        if self.board.version != self._told or self.closed:
            self._told = self.board.version
            self._changed.set()
            self._changed = asyncio.Event()

    def close(self) -> None:
        """Let all streams end."""
        self.closed = True
        self.announce()

    async def events(self, last_id: str) -> AsyncGenerator[bytes, None]:
        """Yield what changed since the event `last_id`, everything at first, then each change.

        Until the close.
        """
        run, _, number = last_id.partition("-")
        version = int(number) if run == self.run and number.isdigit() and len(number) < 19 else 0
        first = True
        while not self.closed:
            changed = self._changed  # taken before looking: what comes after the look sets this one
            changes = self.board.since(version)
            if first or changes.values or changes.whole:
                yield self._event(changes)
                version, first = changes.version, False
                await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await changed.wait()
            except TimeoutError:
                yield b": nothing new\n\n"

    def _event(self, changes: BoardUpdate) -> bytes:
        body = {"whole": changes.whole, "values": [(kind, key, value) for (kind, key), value in changes.values]}
        return event(body, f"{self.run}-{changes.version}")


async def tail_events(parts: AsyncGenerator[TailPart, None], feed: Feed) -> AsyncGenerator[bytes, None]:
    """Yield the events of a tail until the feed is closed; what ends it before is an event of its own."""
    try:
        async with aclosing(parts):
            async for part in parts:
                if feed.closed:
                    return
                if part.records or part.passed:
                    yield event({"records": part.records, "passed": part.passed})
                else:
                    yield b": nothing new\n\n"
    except MemqError as error:
        yield event({"error": str(error), "hint": error.hint}, name="failed")


def event(body: object, id_: str = "", name: str = "") -> bytes:
    """Return one server-sent event; JSON has no line ends, so one data line holds it."""
    head = (f"id: {id_}\n" if id_ else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + _encode(body) + b"\n\n"
