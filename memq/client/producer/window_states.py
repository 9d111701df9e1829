"""The states of a producer's window and the table of their transitions, as data."""

from __future__ import annotations

from enum import Enum

from memq.client.producer.window_events import (
    Abandon,
    Acked,
    Drained,
    Event,
    Finish,
    Finished,
    Lost,
    Nacked,
    Opened,
    OpenFailed,
    Refused,
    Room,
    Sealed,
    Spoiled,
    Tick,
)


class WindowState(Enum):
    """Where the window's stream is. The values are the letters of the table."""

    RESTING = "R"  # there is no stream, and nothing to send
    WAITING = "W"  # there is no stream; the next try has its time
    OPENING = "G"  # the shell looks for the owner, connects and says OPEN
    OPEN = "O"  # blocks flow
    LEAVING = "L"  # the broker drains: acks still come, nothing more is written
    CLOSING = "C"  # CLOSE was said
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
    Refused: "  R   W    G     WRG  WRG   C  X",
    Drained: "  R   W    G     LWR  L     C  X",
    Lost: "     R   W    WR    WR   WR    X  X",
    Room: "     R   W    G     OGC  L     C  X",
    Tick: "     R   WRG  G     OC   LWRC  C  X",
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
