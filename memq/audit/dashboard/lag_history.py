"""Lag of groups over the last day, one sample a minute. Pure."""

from __future__ import annotations

from array import array

MINUTES = 24 * 60
SERIES_MAX = 1_000  # groups times topics, 11.5 KB each; of more than that the ones that came first have a history
_NOT_KNOWN = -1


class LagHistory:
    """Takes lags, in records or in ms, and returns the greatest of each column of minutes."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], array[int]] = {}
        self._last: dict[tuple[str, str], int] = {}

    def take(self, topic: str, group: str, minute: int, lag: int) -> None:
        """Add the lag that was read in a Unix minute; minutes never go back."""
        key = (topic, group)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= SERIES_MAX:
                return
            series = self._series[key] = array("q", [_NOT_KNOWN] * MINUTES)
            self._last[key] = minute
        for skipped in range(max(self._last[key] + 1, minute - MINUTES + 1), minute + 1):
            series[skipped % MINUTES] = _NOT_KNOWN
        self._last[key] = max(minute, self._last[key])
        series[minute % MINUTES] = max(series[minute % MINUTES], lag)

    def keep(self, keys: dict[tuple[str, str], None]) -> None:
        """Forget all other pairs of topic and group."""
        for gone in [key for key in self._series if key not in keys]:
            del self._series[gone], self._last[gone]

    def columns(self, topic: str, group: str, first: int, span: int, width: int) -> tuple[int | None, ...]:
        """Return the greatest lag of each `width` minutes, for `span` minutes from `first` on.

        None: not looked at.
        """
        series, last = self._series.get((topic, group)), self._last.get((topic, group), 0)
        found: list[int | None] = []
        for begin in range(first, first + span, width):
            minutes = range(max(begin, last - MINUTES + 1), min(begin + width, last + 1))
            most = (
                max((series[minute % MINUTES] for minute in minutes), default=_NOT_KNOWN) if series is not None else -1
            )
            found.append(most if most != _NOT_KNOWN else None)
        return tuple(found)
