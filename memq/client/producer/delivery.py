"""The result of a block: the delivery that `send` returns, one for all records of a block."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, NoReturn

from memq.client.arguments import check_timeout
from memq.client.io_thread import forked_error, on_io_thread
from memq.errors import InvalidRequestError, MemqError, NotReadyError, TimedOutError
from memq.protocol.frames import AckLevel
from memq.topic import Position


class Ack(NamedTuple):
    """The ack of a block: `records` records from `first_sequence` on, of this producer in this partition.

    `position` is the position of the first record; each following record has the next record index. It is None with
    acks 0 and 1, and if readers may find a copy at another position (docs/adr/0023-positions-in-acks.md).
    As text, `producer_id` has 16 hex digits, as in messages, findings and `memq trace --producer`.
    """

    topic: str
    partition: int
    producer_id: int
    first_sequence: int
    records: int
    level: AckLevel
    position: Position | None = None

    def __repr__(self) -> str:
        texts = {name: repr(value) for name, value in self._asdict().items()}
        texts["producer_id"] = f"0x{self.producer_id:016x}"
        return f"Ack({', '.join(f'{name}={text}' for name, text in texts.items())})"


class Promise:
    """The state that both deliveries share. Any thread may read it, and one settles it, once."""

    __slots__ = ("_callbacks", "_lock", "_outcome", "_process", "observed")

    def __init__(self) -> None:
        self._outcome: Ack | MemqError | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._process = os.getpid()  # in a forked child process, no thread settles it
        self.observed = False  # a caller waits for the outcome or has seen it

    def done(self) -> bool:
        """Whether the block is acked or has failed."""
        return self._outcome is not None

    @property
    def outcome(self) -> Ack | MemqError | None:
        """The block's result, None while it is pending. Reading it does not mark an error as seen."""
        return self._outcome

    def __repr__(self) -> str:
        state = "pending" if self._outcome is None else str(self._outcome)
        if isinstance(self._outcome, MemqError):
            state = f"failed: {state}"
        return f"<{type(self).__name__} {state}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: no other process settles it."""
        name = type(self).__name__
        raise TypeError(f"this {name} of memq can't be pickled or copied: wait for its Ack, and pass that on")

    def settle(self, outcome: Ack | MemqError) -> list[Callable[[], object]]:
        """Store the outcome and return the callbacks to call."""
        with self._lock:
            assert self._outcome is None, "a block is settled once"
            self._outcome = outcome
            callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the block is settled: at once if it is, else on the thread that settles it."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Remove a callback."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _seen(self) -> Ack | MemqError:
        self.observed = True
        if self._outcome is None:
            raise NotReadyError("the block is not acked yet", hint="wait for it, or check done() first")
        return self._outcome


class Delivery(Promise):
    """The result of a record's block. All records of a block share one."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Ack:
        """Wait for the ack, at most `timeout` seconds, and return it.

        Raises: TimedOutError if the ack does not come in time (the record may still be stored); OutcomeUnknownError
        if the producer gave up a block that it had sent; the broker's error if it refused the block; ForkedError in a
        child process, unless the block was settled before.
        """
        outcome = self._wait(timeout)
        if isinstance(outcome, MemqError):
            raise outcome
        return outcome

    def exception(self, timeout: float | None = None) -> MemqError | None:
        """Wait for the outcome and return its error, None if the block is acked. Raises: TimedOutError."""
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, MemqError) else None

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback(delivery)` when the block is settled: on the I/O thread, or at once if it is."""
        self.observed = True
        self.when_done(lambda: callback(self))

    def _wait(self, timeout: float | None) -> Ack | MemqError:
        timeout_s = check_timeout(timeout)
        self.observed = True
        if not self.done():
            if self._process != os.getpid():
                raise forked_error("delivery")
            if on_io_thread():
                raise InvalidRequestError("a callback can't wait for a delivery", hint="use add_done_callback")
            settled = threading.Event()
            self.when_done(settled.set)
            if not settled.wait(timeout_s):
                self.forget(settled.set)
                raise TimedOutError(f"the block is not acked after {timeout_s:g} s")
        return self._seen()


class AsyncDelivery(Promise):
    """The result of a record's block: await it for its Ack. All records of a block share one."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Ack]:
        self.observed = True
        if not self.done():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            wake = partial(_wake, future)
            self.when_done(wake)
            try:
                yield from future
            except asyncio.CancelledError:  # for example by a timeout: other callers may still wait
                self.forget(wake)
                raise
        return self.result()

    def result(self) -> Ack:
        """Return the ack of a settled block. Raises: its error; NotReadyError before it is settled."""
        outcome = self._seen()
        if isinstance(outcome, MemqError):
            raise outcome
        return outcome

    def exception(self) -> MemqError | None:
        """Return the error of a settled block, None if it is acked. Raises: NotReadyError."""
        outcome = self._seen()
        return outcome if isinstance(outcome, MemqError) else None

    def add_done_callback(self, callback: Callable[[AsyncDelivery], object]) -> None:
        """Call `callback(delivery)` when the block is settled, or at once if it is."""
        self.observed = True
        self.when_done(lambda: callback(self))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # else the waiting caller was cancelled
        future.set_result(None)
