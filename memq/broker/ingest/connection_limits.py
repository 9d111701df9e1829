"""Bounds on connections: in all, and per address. At the bound, connections without HELLO make room.

So strangers that connect and send nothing do not keep a client out, and one address does not take all places.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from memq.errors import MemqError, ThrottledError


class LimitedConnection(Protocol):
    """A connection, as the limits see it."""

    host: str

    def refuse(self, error: MemqError) -> None:
        """Send the client an error that concerns the whole connection, and close it."""
        ...


class ConnectionLimits:
    """The open connections by address, and those that have not sent HELLO, oldest first."""

    def __init__(self, connections_max: int, per_address_max: int) -> None:
        self._connections_max = connections_max
        self._per_address_max = per_address_max
        self._hosts: Counter[str] = Counter()
        self._open: dict[LimitedConnection, None] = {}
        self._greeting: dict[LimitedConnection, None] = {}

    def joined(self, connection: LimitedConnection) -> MemqError | None:
        """Take a connection; return the error with which the broker refuses it, if it has too many."""
        error: MemqError | None = None
        if self._hosts[connection.host] >= self._per_address_max:
            error = ThrottledError(
                f"{self._per_address_max} connections of address {connection.host} are open, as many as "
                "connections_per_address_max allows"
            )
        elif len(self._open) >= self._connections_max and not self._make_room():
            error = ThrottledError("the broker has as many connections as its connections_max allows")
        if error is None:
            self._open[connection] = self._greeting[connection] = None
            self._hosts[connection.host] += 1
        return error

    def greeted(self, connection: LimitedConnection) -> None:
        """Note the accepted HELLO of a connection: it makes no room for others any more."""
        self._greeting.pop(connection, None)

    def left(self, connection: LimitedConnection) -> None:
        """Forget a connection."""
        self._greeting.pop(connection, None)
        if connection not in self._open:
            return
        del self._open[connection]
        self._hosts[connection.host] -= 1
        if not self._hosts[connection.host]:
            del self._hosts[connection.host]

    def _make_room(self) -> bool:
        """Close the oldest connection without HELLO; return whether there is one."""
        oldest = next(iter(self._greeting), None)
        if oldest is None:
            return False
        self.left(oldest)
        oldest.refuse(ThrottledError("no HELLO yet, and others need the connection: connections_max is reached"))
        return True
