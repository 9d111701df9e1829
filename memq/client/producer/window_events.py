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

    `data` never changes: a block is always sent with the same bytes. Times are monotonic seconds; `first_sent_s` is
    None until the first write. An ack may set `position`. `refused` is set when a broker has refused the bytes as
    damaged.
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
class SealFailed:
    """The next block could not be sealed; no record will have its sequences."""

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
class BrokerDraining:
    """The broker drains: it acks the blocks that it holds, and takes no new ones."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection of the stream is lost."""

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
    """No more blocks follow: report the end of the stream when all blocks are settled."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """CLOSE was answered, or its request has failed."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The producer stops waiting: unsettled blocks fail with `error`, or as unknown if sent."""

    error: MemqError


Event = (
    Sealed
    | SealFailed
    | Opened
    | OpenFailed
    | Acked
    | Nacked
    | StreamRefused
    | BrokerDraining
    | ConnectionLost
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
    """Open a stream from `sequence` on: at `address` if it is not empty, else at the partition's owner.

    With `refresh`, the shell first refreshes the metadata. An earlier stream for this partition has ended.
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
    """The block is settled: acked if `error` is None."""

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
    """State of the window's stream. The values are the letters in the table."""

    RESTING = "R"  # no stream, and no block to send
    WAITING = "W"  # no stream; the next try is at a known time
    OPENING = "G"  # the shell finds the owner, connects and sends OPEN
    OPEN = "O"  # blocks are sent and acked
    LEAVING = "L"  # the broker drains: acks still arrive, no block is written
    CLOSING = "C"  # CLOSE was sent
    CLOSED = "X"  # final


# Event: for each state (in the order of the columns) the possible next states; "-": the event can't happen.
# Frames of the broker may arrive late, in any state: then they change nothing, and are no error of this side.
_ROWS: dict[type[Event], str] = {
    # .         R   W    G     O    L     C  X
    Sealed: "   G   W    G     O    L     -  X",
    SealFailed: "  R   W    G     O    L     -  X",
    Opened: "   -   -    OC    -    -     -  X",
    OpenFailed: "-  -    WRGX  -    -     -  X",
    Acked: "    R   WR   G     OC   LWRC  C  X",
    Nacked: "   R   W    G     WRG  WRG   C  X",
    StreamRefused: "R   W    G     WRG  WRG   C  X",
    BrokerDraining: "  R   W    G     LWR  L     C  X",
    ConnectionLost: "     R   W    WR    WR   WR    X  X",
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
