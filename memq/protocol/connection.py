"""The state machine of one connection, for both sides: which frames each may send in which state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from memq.errors import ProtocolError
from memq.protocol.frames import Api


class Side(Enum):
    """The two ends of a connection."""

    __hash__ = object.__hash__  # in C; Enum's own is a Python call, several for each frame

    CLIENT = auto()
    BROKER = auto()


@dataclass(frozen=True, slots=True)
class Principal:
    """The user for whom a connection acts. Permissions belong to it, not to the client id."""

    name: str


ANONYMOUS = Principal("anonymous")  # of a peer that gave no name


class ConnectionState(Enum):
    """GREETING until both HELLOs are sent, READY, DRAINING after the broker's DRAINING, CLOSED.

    AUTHENTICATING is between the two HELLOs of a client with a password, after the broker's challenge.
    """

    __hash__ = object.__hash__

    GREETING = auto()
    AUTHENTICATING = auto()
    READY = auto()
    DRAINING = auto()
    CLOSED = auto()


_REQUESTS = frozenset(
    {
        Api.OPEN,
        Api.CLOSE,
        Api.WRITE,
        Api.METADATA,
        Api.READ,
        Api.POLL,
        Api.COMMIT,
        Api.JOIN,
        Api.HEARTBEAT,
        Api.ADMIN,
        Api.FORWARD,
    }
)
_ANSWERS = (_REQUESTS - {Api.WRITE}) | {Api.ACK, Api.NACK, Api.THROTTLE, Api.DRAINING, Api.REDIRECT, Api.ERROR}

# ALLOWED: state -> sender -> frames that it may send. NEXT: the state after a frame, where it changes.
ALLOWED: dict[ConnectionState, dict[Side, frozenset[Api]]] = {
    ConnectionState.GREETING: {
        Side.CLIENT: frozenset({Api.HELLO}),
        Side.BROKER: frozenset({Api.HELLO, Api.AUTHENTICATE, Api.ERROR}),
    },
    ConnectionState.AUTHENTICATING: {
        Side.CLIENT: frozenset({Api.AUTHENTICATE}),
        Side.BROKER: frozenset({Api.HELLO, Api.ERROR}),
    },
    ConnectionState.READY: {Side.CLIENT: _REQUESTS, Side.BROKER: _ANSWERS},
    ConnectionState.DRAINING: {Side.CLIENT: _REQUESTS, Side.BROKER: _ANSWERS},
    ConnectionState.CLOSED: {Side.CLIENT: frozenset(), Side.BROKER: frozenset()},
}
NEXT: dict[tuple[ConnectionState, Side, int], ConnectionState] = {
    (ConnectionState.GREETING, Side.BROKER, Api.HELLO): ConnectionState.READY,
    (ConnectionState.GREETING, Side.BROKER, Api.ERROR): ConnectionState.CLOSED,
    (ConnectionState.GREETING, Side.BROKER, Api.AUTHENTICATE): ConnectionState.AUTHENTICATING,
    (ConnectionState.AUTHENTICATING, Side.BROKER, Api.HELLO): ConnectionState.READY,
    (ConnectionState.AUTHENTICATING, Side.BROKER, Api.ERROR): ConnectionState.CLOSED,
    (ConnectionState.READY, Side.BROKER, Api.DRAINING): ConnectionState.DRAINING,
}


class Conversation:
    """Follows the state of one connection. Each side passes it every sent and received frame, in order.

    In the states READY and DRAINING, a side may leave out WRITE and the stream frames: they are always allowed there.
    """

    def __init__(self) -> None:
        self.state = ConnectionState.GREETING
        self._client_sent_hello = False

    def sent(self, side: Side, api: int) -> None:
        """Record that `side` sent a frame. Raises: ProtocolError when it may not send this frame now."""
        if api not in ALLOWED[self.state][side]:
            name = Api(api).name if api in Api.__members__.values() else str(api)
            raise ProtocolError(f"{side.name.lower()} sent {name} in state {self.state.name}")
        if self.state is ConnectionState.GREETING and side is Side.CLIENT:
            if self._client_sent_hello:
                raise ProtocolError("client sent HELLO twice")
            self._client_sent_hello = True
        self.state = NEXT.get((self.state, side, api), self.state)

    def close(self) -> None:
        """Record that the connection is closed."""
        self.state = ConnectionState.CLOSED
