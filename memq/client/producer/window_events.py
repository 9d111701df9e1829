"""Events, instructions and states of a producer's window, exchanged by machine and shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from memq.errors import MemqError
from memq.format.blocks.header import check_block
from memq.protocol.frames import AckPosition


class UnackedBlock:
    """A sealed block from its seal to its settlement: records `first` up to `next`.

    `data` never changes: a block is sent again as it was. Times are monotonic seconds; `first_sent_s` is None
    until the first write. `position` is known once its ack has named it. `refused` is set once a broker has called
    its bytes damaged.
    """

    __slots__ = ("data", "deadline_s", "first", "first_sent_s", "next", "position", "refused", "writes")

    def __init__(self, first: int, records: int, deadline_s: float, data: bytes | bytearray | memoryview = b"") -> None:
        self.first = first
        self.next = first + records
        self.deadline_s = deadline_s
        self.data = data
        self.first_sent_s: float | None = None
        self.writes = 0
        self.position: AckPosition | None = None
        self.refused = False

    def is_sound(self) -> bool:
        """Whether the bytes in memory still match the block's own checksum."""
        try:
            check_block(self.data)
        except MemqError:
            return False
        return True


# ---- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sealed:
    """The next block of the partition is sealed."""

    block: UnackedBlock


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The next block could not be sealed: it failed and its sequences will not be used."""

    block: UnackedBlock
    error: MemqError


@dataclass(frozen=True, slots=True)
class Opened:
    """OPEN was answered: the stream takes blocks."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """OPEN was refused, or the connection to the owner failed before an answer."""

    error: MemqError
    now_s: float


@dataclass(frozen=True, slots=True)
class Acked:
    """All blocks of the stream below `next_sequence` are acked at the level that the producer asked for."""

    next_sequence: int
    positions: Sequence[AckPosition] = ()


@dataclass(frozen=True, slots=True)
class Nacked:
    """The block that starts at `first_sequence` was not taken. The stream is closed."""

    first_sequence: int
    error: MemqError
    now_s: float


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """THROTTLE or REDIRECT: the stream is closed."""

    error: MemqError
    now_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The broker leaves: it acks what it holds and takes nothing new."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection of the stream is gone."""

    error: MemqError
    now_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """The socket of the open stream takes another block."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, to `next_deadline_s` or beyond."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Delayed:
    """Acks are late, for a reason that the broker has named, or because it does not answer."""

    error: MemqError


@dataclass(frozen=True, slots=True)
class Finish:
    """No block will come any more: report the end of the stream once all are settled."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """CLOSE was answered, or will not be."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The producer stops waiting: unsettled blocks fail with `error`, or as unknown if sent."""

    error: MemqError


Event = (
    Sealed
    | Spoiled
    | Opened
    | OpenFailed
    | Acked
    | Nacked
    | StreamRefused
    | Drained
    | Lost
    | Room
    | Tick
    | Delayed
    | Finish
    | Finished
    | Abandon
)

# ---- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream from `sequence` on: at `address` when it is named, else at the partition's owner.

    `refresh` asks for the owner again. Any stream that was open for this partition is over.
    """

    sequence: int
    address: str
    refresh: bool


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write the block on the open stream."""

    block: UnackedBlock


@dataclass(frozen=True, slots=True)
class Settle:
    """The block is done: acked when `error` is None."""

    block: UnackedBlock
    error: MemqError | None


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Send CLOSE: all sequences are below `next_sequence`; `burned` ranges (half-open) were given up."""

    next_sequence: int
    burned: list[tuple[int, int]]


Instruction = OpenStream | WriteBlock | Settle | CloseStream


# ---- states ----------------------------------------------------------------------------------


class WindowState(Enum):
    """Where the window's stream is. The values are the letters of the table."""

    RESTING = "R"  # there is no stream, and nothing to send
    WAITING = "W"  # there is no stream; the next try has its time
    OPENING = "G"  # the shell finds the owner, connects and sends OPEN
    OPEN = "O"  # blocks flow
    LEAVING = "L"  # the broker drains: acks still come, nothing more is written
    CLOSING = "C"  # CLOSE was sent
    CLOSED = "X"  # the end


# Event: for each state (in the order of the columns) the states that it may lead to; "-" cannot happen.
# Frames of the broker may come late, in any state: then they lead nowhere, and are not an error of this side.
_ROWS: dict[type[Event], str] = {
    # .         R   W    G     O    L     C  X
    Sealed: "   G   W    G     O    L     -  X",
    Spoiled: "  R   W    G     O    L     -  X",
    Opened: "   -   -    OC    -    -     -  X",
    OpenFailed: "-  -    WRGX  -    -     -  X",
    Acked: "    R   WR   G     OC   LWRC  C  X",
    Nacked: "   R   W    G     WRG  WRG   C  X",
    StreamRefused: "R   W    G     WRG  WRG   C  X",
    Drained: "  R   W    G     LWR  L     C  X",
    Lost: "     R   W    WR    WR   WR    X  X",
    Room: "     R   W    G     OGC  L     C  X",
    Tick: "     R   WRG  G     OC   LWRC  C  X",
    Delayed: "  R   W    G     O    L     C  X",
    Finish: "   GX  W    G     OC   L     -  -",
    Finished: " -   -    -     -    -     X  X",
    Abandon: "  X   X    X     X    X     X  X",
}

TABLE: dict[WindowState, dict[type[Event], frozenset[WindowState]]] = {
    state: {
        event: frozenset(WindowState(letter) for letter in row.split()[column])
        for event, row in _ROWS.items()
        if row.split()[column] != "-"
    }
    for column, state in enumerate(WindowState)
}
