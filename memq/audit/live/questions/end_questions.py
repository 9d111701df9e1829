"""Acked records of one write partition that no pointer has, until the end of its log is proved. Pure.

An end that a queue shows may be too low: a replica that lags has one, and what is acked may lie after it. So an acked
record is called lost only when the log was read up to an end that owners proved after the record was missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memq.audit.account import apart, common
from memq.format.ranges import Range, RangeSet

Missing = Mapping[int, tuple[Range, ...]]  # by producer


class EndQuestions:
    """Missing sequences by producer, and those below a proved end."""

    def __init__(self) -> None:
        self._open: dict[int, RangeSet] = {}
        self._proved: dict[int, RangeSet] = {}

    def decide(self, producer: int, missing: Iterable[Range], lost: RangeSet) -> list[Range]:
        """Return the lost part of missing sequences; `lost` is the earlier result."""
        missing = list(missing)
        if not missing:
            self._open.pop(producer, None)
            return []
        sure = common(missing, RangeSet([*lost, *self._proved.get(producer, RangeSet())]))
        self._open[producer] = RangeSet(apart(missing, RangeSet(sure)))
        if not self._open[producer]:
            del self._open[producer]
        return sure

    def missing(self) -> Missing:
        """Return missing sequences that need an end proved from now on."""
        return {producer: tuple(ranges) for producer, ranges in self._open.items()}

    def confirm(self, missing: Missing) -> None:
        """Note missing sequences up to an end that was proved later, for the next judgement."""
        self._proved = {producer: RangeSet(ranges) for producer, ranges in missing.items()}

    def forget(self, producer: int) -> None:
        """Forget a producer."""
        self._open.pop(producer, None)

    def close(self) -> None:
        """End a judgement: later missing sequences need another proof."""
        self._proved = {}
