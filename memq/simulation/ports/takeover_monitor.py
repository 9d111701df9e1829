"""Checks early takeovers: a refused connection comes first, and a minute lies between two."""

from __future__ import annotations

from collections.abc import Callable

from memq.governor import TAKEOVER_INTERVAL_MS, BrokerEntry
from memq.runtime.network import Address, parse_address

REFUSED_S_MAX = 60.0  # from the refusal to the change at the coordinator: calls may be late, and processes paused


class TakeoverMonitor:
    """Notified of each refused connection and each early takeover as it happens. `fail` ends the run."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self._refused_s: dict[tuple[str, Address], float] = {}
        self._taken_ms: dict[str, int] = {}  # by session

    def refused(self, source: str, target: Address, now_s: float) -> None:
        """Note that a host's connection was refused."""
        self._refused_s[source, target] = now_s

    def taken_over(self, source: str, suspect: BrokerEntry, now_ms: int, now_s: float) -> None:
        """Check an early takeover; `now_ms` is the wall clock of `source`."""
        name = f"early takeover of '{suspect.id}' by '{source}'"
        refused_s = self._refused_s.get((source, parse_address(suspect.address)))
        if refused_s is None or now_s - refused_s > REFUSED_S_MAX:
            self._fail(f"{name}, whose connection it did not refuse")
        last_ms = self._taken_ms.get(suspect.session)
        if last_ms is not None and abs(now_ms - last_ms) < TAKEOVER_INTERVAL_MS:
            self._fail(f"{name}, {abs(now_ms - last_ms)} ms after the last one")
        self._taken_ms[suspect.session] = now_ms
