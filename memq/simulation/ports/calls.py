"""Calls from a node to a service outside of all nodes: store, queue or coordinator, with their faults.

A call travels to the service, takes effect on the service's own node, and its answer travels back to the caller's
loop. The caller may be paused or dead by then. A call that is on its way when its caller dies, or gives up, may still
arrive.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar, cast

from memq.errors import DeniedError, InvalidRequestError, MemqError, NotFoundError, QueueRefusedError
from memq.simulation.ports.faults import CallFaults
from memq.simulation.ports.wrong_answers import WrongAnswers
from memq.simulation.world.node import SimNode

T = TypeVar("T")
Met = dict[tuple[str, str], int]  # (fault, work): count
# The first words of the tasks' names (see `TaskOwner.start`), and the work of these tasks. A task with the name of a
# request serves a client at a broker.
WORKS = {
    "open": "opening",
    "upload": "uploading",
    "shared": "uploading",
    "publish": "publishing",
    "forward": "forwarding",
    "replay": "replaying",
    "follow": "governing",
    "report": "governing",
    "house": "upkeep",
    "compactor": "upkeep",
    "consumer": "reading",
    "READ": "reading",
    "POLL": "polling",
    "COMMIT": "committing",
    "JOIN": "grouping",
    "HEARTBEAT": "grouping",
}
OTHER = "other"


class CallFate(enum.StrEnum):
    """The outcome of one call."""

    FINE = "fine"
    BEFORE = "error before"
    AFTER = "error after"
    LATE = "late"
    HANG = "hang"
    STALL = "stall"


# Errors of the wrong kind by lie: whether the call takes effect, and the error.
WRONG_ERRORS: dict[str, tuple[CallFate, type[MemqError]]] = {
    "denied": (CallFate.BEFORE, DeniedError),
    "invalid": (CallFate.BEFORE, InvalidRequestError),
    "not-found": (CallFate.BEFORE, NotFoundError),
    "denied-landed": (CallFate.AFTER, DeniedError),
    "refused-landed": (CallFate.AFTER, QueueRefusedError),
}


def work_under_way() -> str:
    """Return the work that the running task does."""
    task = asyncio.current_task()
    return OTHER if task is None else WORKS.get(task.get_name().split(" ")[0].split("-")[0], OTHER)


class Payload(Protocol):
    """Buffers that a call carries by reference. They are read on the way to the service."""

    def read(self, *, whole: bool) -> None:
        """Read a part of the caller's buffers, or the whole rest."""
        ...

    def abandon(self) -> None:
        """Read nothing more."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all was read."""
        ...


class Caller:
    """One node's door to one service; its lost calls raise `error`.

    Until `blocked_until` (virtual time) calls and answers wait, as on a cut link.
    """

    def __init__(
        self,
        node: SimNode,
        service: SimNode,
        name: str,
        faults: CallFaults,
        error: Callable[[str], MemqError],
        wrong: WrongAnswers | None = None,
    ) -> None:
        self.node = node
        self.service = service
        self.name = name
        self.faults = faults
        self.error = error
        self.blocked_until = 0.0
        self._wrong = wrong
        self.met: Met = {}
        self._random = node.world.random(f"calls/{name}")

    async def call(
        self,
        what: str,
        effect: Callable[[], Coroutine[Any, Any, T]],
        *,
        payload: Payload | None = None,
        waits: bool = False,
        lies: tuple[str, ...] = (),
    ) -> T:
        """Let `effect` happen at the service, once, never or late, and return its answer or raise.

        `what` goes into the trace; `lies` are the wrong errors that the call may get. If the caller is cancelled, the
        call may still arrive. An effect takes one step; if it `waits`, it is a task of the service.
        """
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        lie = self.lie(*lies)
        fate, error = WRONG_ERRORS[lie] if lie else (self._draw_fate(), self.error)
        if not lie and fate is not CallFate.FINE:
            self._meet(fate.value)
        flight = Flight(self, what, effect, reply, payload, fate, error, waits=waits)
        flight.start()
        try:
            return await reply
        finally:
            flight.caller_left()
            del reply, flight  # an error in `reply` has this frame in its traceback: a cycle

    def lie(self, *possible: str) -> str:
        """Return one of the `possible` lies for this call; "" for a true answer."""
        if self._wrong is None or not possible:
            return ""
        kind = self._wrong.lie(self.node.name, self.node.world.now, possible)
        if kind:
            self._meet(kind)
        return kind

    def _meet(self, fault: str) -> None:
        key = (f"{self.name}: {fault}", work_under_way())
        self.met[key] = self.met.get(key, 0) + 1

    def _draw_fate(self) -> CallFate:
        faults = self.faults
        draw = self._random.random()
        if draw >= faults.rate:
            return CallFate.FINE
        for fate, rate in (
            (CallFate.BEFORE, faults.before_rate),
            (CallFate.AFTER, faults.after_rate),
            (CallFate.LATE, faults.late_rate),
            (CallFate.HANG, faults.hang_rate),
            (CallFate.STALL, faults.stall_rate),
        ):
            if draw < rate:
                return fate
            draw -= rate
        return CallFate.FINE

    def draw_latency_s(self) -> float:
        """Return the duration of one way in seconds."""
        return self._random.uniform(self.faults.latency_s_min, self.faults.latency_s_max)

    def draw(self) -> float:
        """Return a number from 0 to 1."""
        return self._random.random()


class Flight(Generic[T]):
    """One call on its way. Its steps are events of the world, not callbacks of the caller's node."""

    def __init__(
        self,
        caller: Caller,
        what: str,
        effect: Callable[[], Coroutine[Any, Any, T]],
        reply: asyncio.Future[T],
        payload: Payload | None,
        fate: CallFate,
        error: Callable[[str], MemqError],
        *,
        waits: bool,
    ) -> None:
        self._caller = caller
        self._what = what
        self._effect = effect
        self._reply = reply
        self._payload = payload
        self._fate = fate
        self._error = error
        self._waits = waits
        self._world = caller.node.world
        self._back_s = 0.0
        self._arrived = False
        self._dropped = False
        self._task: asyncio.Task[T] | None = None
        self._forget_death = caller.node.at_death(self._caller_died)

    def start(self) -> None:
        """Begin the way to the service; a payload is read in pieces, the last one at the end of the way."""
        caller = self._caller
        out_s = caller.draw_latency_s()
        if self._fate is CallFate.STALL:
            stall_s = caller.draw() * caller.faults.stall_s_max
            if caller.draw() < 0.5:
                out_s += stall_s
            else:
                self._back_s = stall_s
        if self._payload is not None:
            for _ in range(2):
                self._world.schedule(out_s * caller.draw(), self._read_some)
        self._world.schedule(out_s, self._arrive)

    def _read_some(self) -> None:
        if self._payload is not None and not self._dropped:
            self._payload.read(whole=False)

    def _arrive(self) -> None:
        if self._dropped:
            return
        caller = self._caller
        blocked_s = caller.blocked_until - self._world.now
        if blocked_s > 0:
            self._world.schedule(blocked_s + caller.draw_latency_s(), self._arrive)
            return
        self._arrived = True
        self._trace(self._fate)
        if self._payload is not None and not self._read_payload(self._payload):
            self._answer_error("connection lost")
        elif self._fate is CallFate.BEFORE:
            self._answer_error("refused")
        elif self._fate is CallFate.LATE:
            self._world.schedule(caller.draw() * caller.faults.late_s_max, self._happen)
            self._answer_error("timed out")
        elif self._fate is CallFate.HANG:
            if caller.draw() < 0.5:
                self._world.schedule(caller.draw() * caller.faults.late_s_max, self._happen)
            self._world.schedule(caller.faults.hang_s, lambda: self._answer_error("timed out"))
        else:
            self._happen()

    def _read_payload(self, payload: Payload) -> bool:
        """Read the rest; return whether the payload is complete. An early error leaves it incomplete."""
        if self._fate is CallFate.BEFORE:
            payload.abandon()
        else:
            payload.read(whole=True)
        return payload.complete

    def _happen(self) -> None:
        loop = self._caller.service.loop
        if self._waits:
            self._task = loop.create_task(self._effect(), name=f"{self._caller.name} {self._what}")
            self._task.add_done_callback(self._happened)
            return
        try:
            result = loop.run_through(self._effect())
        except Exception as error:  # noqa: BLE001  the caller gets it
            self._end(error)
        else:
            self._end(None, result)

    def _happened(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._trace("cancelled")
            return
        error = task.exception()
        if isinstance(error, Exception):
            self._end(error)
        else:
            self._end(None, task.result())

    def _end(self, error: Exception | None, result: T | None = None) -> None:
        self._trace("done" if error is None else type(error).__name__)
        if error is not None and not isinstance(error, MemqError):
            self._world.fail(f"{self._caller.name} {self._what} failed", error)
        if self._fate in (CallFate.LATE, CallFate.HANG):
            return
        if self._fate is CallFate.AFTER:
            self._answer_error("answer lost")
        elif error is not None:
            self._answer(lambda: self._reply.set_exception(error))
        else:
            self._answer(lambda: self._reply.set_result(cast("T", result)))

    def _answer_error(self, why: str) -> None:
        caller = self._caller
        text = f"{caller.name} {self._what}: {why}"
        self._answer(lambda: self._reply.set_exception(self._error(text)))

    def _answer(self, settle: Callable[[], None]) -> None:
        caller = self._caller
        self._forget_death()

        def settle_once() -> None:
            if not self._reply.done() and caller.node.alive:
                settle()  # the waiting task is ready now, and runs when its node runs

        blocked_s = max(0.0, caller.blocked_until - self._world.now)
        self._world.schedule(blocked_s + self._back_s + caller.draw_latency_s(), settle_once)

    def caller_left(self) -> None:
        """The caller has its answer, or gave up: then an effect that has not happened yet may not happen."""
        if not self._reply.cancelled():
            return
        self._forget_death()
        if not self._arrived and self._payload is None and self._caller.draw() < 0.5:
            self._dropped = True
        if self._task is not None and not self._task.done():
            self._task.cancel()  # only waits are tasks

    def _caller_died(self) -> None:
        """A dead process sends nothing more, so an incomplete payload never arrives."""
        if self._arrived:
            return
        if self._payload is not None and not self._payload.complete:
            self._payload.abandon()
            self._dropped = True
        elif self._caller.draw() < 0.5:
            self._dropped = True

    def _trace(self, how: str) -> None:
        self._world.trace.event(self._world.now, self._caller.name, self._caller.node.name, self._what, how)
