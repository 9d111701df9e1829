"""A proxy before a real ZooKeeper that cuts, delays and falsifies operations of one kind, at a phase."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from tests.integration.framed_proxy import FramedProxy, Outcome

ANSWER_DELAY_S = 2.5  # longer than the sessions of the tests, and than their calls may take
CLOSING = 1 << 30  # the number of the request by which the proxy itself ends a session
_CLOSE_SESSION = struct.pack(">ii", CLOSING, -11)
_MULTI = 14


class Op(Enum):
    """What kazoo sends for memq, by ZooKeeper's numbers; a multi has also the kind of its first operation.

    kazoo sets no watches again after a reconnection. memq creates, removes and writes nodes in multis alone.
    """

    CONNECT = (0, 0)
    CREATE = (1, 0)
    EXISTS = (3, 0)
    GET_DATA = (4, 0)
    GET_CHILDREN = (8, 0)
    SYNC = (9, 0)
    PING = (11, 0)
    MULTI_CREATE = (_MULTI, 1)
    MULTI_DELETE = (_MULTI, 2)
    MULTI_SET_DATA = (_MULTI, 5)
    CLOSE = (-11, 0)
    EVENT = (-1, 0)  # of a watch: it has no request


class Phase(Enum):
    """Where an operation goes wrong."""

    BEFORE = "the connection ends before the request reaches ZooKeeper"
    AFTER = "the connection ends when ZooKeeper has done it, before its answer"
    MIDDLE = "the connection ends in the middle of the answer"
    LATE = "the answer comes after the call has timed out"
    SHORT = "the answer is well framed, and its second half is missing"
    OTHER = "the answer is one of another request"
    STALE = "the answer is the one that the same request had before"
    EXPIRED_BEFORE = "the session ends before the operation is done"
    EXPIRED_AFTER = "the session ends when the operation is done"
    FALSE = "the answer has another error, and nothing was done"
    FALSE_DONE = "the answer has another error, and the operation was done"


TRANSPORT = [phase for phase in Phase if phase not in (Phase.STALE, Phase.FALSE, Phase.FALSE_DONE)]
PASSING = {"system": -1, "inconsistent": -2, "loss": -4, "timed-out": -7, "expired": -112, "moved": -118} | {
    "throttled": -127,
    "unknown": -9_999,  # no client has a name for it
}
FINAL = {"bad-arguments": -8, "no-node": -101, "no-auth": -102, "bad-version": -103, "exists": -110} | {
    "not-empty": -111,
    "bad-acl": -114,
    "auth-failed": -115,
    "too-large": -5,
}


@dataclass
class Fault:
    """The fault of the next `times` operations of a kind, behind `skip`; `code` is the error of a false answer."""

    op: Op
    phase: Phase
    times: int
    code: int = 0
    skip: int = 0
    met: int = 0


class ZookeeperProxy(FramedProxy):
    """Hands on what clients say to a ZooKeeper, request by request, what it answers, and the events of watches."""

    def __init__(self, target: int) -> None:
        self.seen: Counter[Op] = Counter()
        self._fault: Fault | None = None
        super().__init__(target)

    def arm(self, fault: Fault | None) -> None:
        """Have this befall operations from now on, in place of what was to befall them before."""
        self.seen.clear()
        self._fault = fault

    @property
    def met(self) -> int:
        """How many operations the fault has met."""
        return self._fault.met if self._fault is not None else 0

    def conversation(self) -> _Conversation:
        """See `FramedProxy.conversation`."""
        return _Conversation(self)

    def fault_of(self, op: Op | None) -> Fault | None:
        """Return the fault that an operation meets, and count it."""
        if op is not None:
            self.seen[op] += 1
        fault = self._fault
        if fault is None or fault.op is not op or fault.times <= 0:
            return None
        if fault.skip:
            fault.skip -= 1
            return None
        fault.times -= 1
        fault.met += 1
        return fault


class _Conversation:
    def __init__(self, proxy: ZookeeperProxy) -> None:
        self._proxy = proxy
        self._greeted = self._answered = False
        self._under_way: dict[int, tuple[bytes, Fault | None]] = {}  # by the request's number
        self._before: dict[bytes, bytes] = {}  # what a request was answered the last time

    def request(self, body: bytes) -> Outcome:
        op: Op | None
        if not self._greeted:
            self._greeted = True
            number, op = 0, Op.CONNECT
        else:
            number, kind = struct.unpack_from(">ii", body)
            first = struct.unpack_from(">i", body, 8)[0] if kind == _MULTI else 0
            op = next((each for each in Op if each.value == (kind, first)), None)
        fault = self._proxy.fault_of(op)
        self._under_way[number] = body[4:], fault
        if fault is None or op is Op.EVENT:
            return Outcome((body,))
        if fault.phase is Phase.BEFORE:
            return Outcome(ends=True)
        if fault.phase is Phase.EXPIRED_BEFORE and op is not Op.CONNECT:
            return Outcome((_CLOSE_SESSION, body))
        if fault.phase is Phase.EXPIRED_AFTER and op is not Op.CLOSE:
            return Outcome((body, _CLOSE_SESSION))
        if fault.phase is Phase.FALSE and op not in (Op.CONNECT, Op.PING, Op.CLOSE):
            return Outcome((_harmless(number),))
        return Outcome((body,))

    def answer(self, body: bytes) -> Outcome:
        number = struct.unpack_from(">i", body)[0] if self._answered else 0
        self._answered = True
        if number == CLOSING:
            return Outcome(ends=True)
        if number == Op.EVENT.value[0]:
            fault, request = self._proxy.fault_of(Op.EVENT), b""
            if fault is not None and fault.phase in (Phase.BEFORE, Phase.FALSE):
                return Outcome()  # it is lost, and the connection stays
        else:
            request, fault = self._under_way.pop(number, (b"", None))
        before = self._before.get(request)
        if number > 0:
            self._before[request] = body
        return Outcome((body,)) if fault is None else _spoiled(body, fault, before)


def _spoiled(body: bytes, fault: Fault, before: bytes | None) -> Outcome:
    phase = fault.phase
    if phase in (Phase.AFTER, Phase.EXPIRED_BEFORE, Phase.EXPIRED_AFTER):
        return Outcome(ends=True)
    if phase is Phase.MIDDLE:
        return Outcome((body,), cut=True, ends=True)
    if phase is Phase.LATE:
        return Outcome((body,), wait_s=ANSWER_DELAY_S)
    if phase is Phase.SHORT:
        return Outcome((body[: len(body) // 2],))
    if phase is Phase.OTHER and fault.op is not Op.CONNECT:
        return Outcome((struct.pack(">i", struct.unpack_from(">i", body)[0] + 7) + body[4:],))
    if phase is Phase.STALE and before is not None:
        return Outcome((body[:4] + before[4:],))
    if phase in (Phase.FALSE, Phase.FALSE_DONE) and fault.op not in (Op.CONNECT, Op.EVENT):
        return Outcome((body[:12] + struct.pack(">i", fault.code),))
    return Outcome((body,))


def _harmless(number: int) -> bytes:
    """Return a request of this number that does nothing: whether the root exists, without a watch."""
    return struct.pack(">iii", number, Op.EXISTS.value[0], 1) + b"/\x00"
