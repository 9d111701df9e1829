"""The board of the latest values, and the event stream of its changes to each browser.

A browser that has seen version v gets the changes since. A new browser gets everything, and so does one that returns
after the board has forgotten what was removed. So an update costs what changed, however much there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from memq.errors import MemqError, ThrottledError

if TYPE_CHECKING:
    # it needs anyio, a poller does not
    from memq.audit.dashboard.records import TailPart

BoardKey = tuple[str, str]  # kind, key
GONE_MAX = 10_000
STREAMS_MAX = 32  # of all browsers together; a browser has six connections for one host
TAILS_MAX = 8
PAUSE_S = 0.04  # changes of this time go together: all in all they are to be seen within 100 ms
SILENCE_S = 15.0  # then a comment is sent: proxies close silent connections, and a closed browser is noticed
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class BoardUpdate:
    """The changes since `version` for a browser.

    `whole`: drop everything shown before. None: removed from the board.
    """

    version: int
    whole: bool
    values: tuple[tuple[BoardKey, object | None], ...]


class Board:
    """Values by kind and key. Versions begin at 1 with the first value."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[BoardKey, object] = {}
        self._changed: dict[BoardKey, int] = {}  # in the order of the versions
        self._gone = 0
        self._forgotten = 0  # the highest version of a removal that is not known any more

    def put(self, kind: str, key: str, value: object | None) -> None:
        """Set a value; None takes it off. What is as it was is no change."""
        row_key = (kind, key)
        if self._values.get(row_key) == value:
            return
        if value is None:
            del self._values[row_key]
            self._gone += 1
        else:
            if row_key not in self._values and row_key in self._changed:
                self._gone -= 1
            self._values[row_key] = value
        self.version += 1
        self._changed.pop(row_key, None)
        self._changed[row_key] = self.version
        if self._gone > GONE_MAX:
            self._forget()

    def put_all(self, kind: str, values: Mapping[str, object]) -> None:
        """Set all values of a kind; others of that kind are taken off."""
        for old_kind, key in list(self._values):
            if old_kind == kind and key not in values:
                self.put(kind, key, None)
        for key, value in values.items():
            self.put(kind, key, value)

    def get(self, kind: str, key: str) -> object | None:
        """Return a value, None when there is none."""
        return self._values.get((kind, key))

    def since(self, version: int) -> BoardUpdate:
        """Return what changed since a version, in the order of the changes.

        A version that is too old gets everything.
        """
        if not self._forgotten <= version <= self.version or version == 0:
            return BoardUpdate(self.version, True, tuple(self._values.items()))
        found = []
        for key in reversed(self._changed):
            if self._changed[key] <= version:
                break
            found.append((key, self._values.get(key)))
        return BoardUpdate(self.version, False, tuple(reversed(found)))

    def _forget(self) -> None:
        """Forget the older half of what was taken off."""
        gone = [key for key in self._changed if key not in self._values]
        for key in gone[: len(gone) // 2]:
            self._forgotten = self._changed.pop(key)
            self._gone -= 1


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
                f"{self.held} {self._what} are open, which is the maximum", hint="close other pages, or wait"
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
        """Yield the events; the seat is free after the last one, or when the browser disconnects."""
        with self.one():
            async with aclosing(events):
                async for each in events:
                    yield each


class Feed:
    """The board and those who wait for its next change.

    `run` distinguishes this process's versions from an earlier one's.
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
