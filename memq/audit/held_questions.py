"""Open questions to brokers about one write partition, and their last answers. Pure.

What would be lost is asked for before it is called that. An answer counts when the queue was read behind it, which
`PartitionAudit.settle` rests on anyway: what was then neither held nor in the queue is nowhere, and stays so. What is
held, or in doubt, is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memq.audit.account import HeldWord, apart, common
from memq.audit.held import Sought
from memq.format.ranges import Range, RangeSet


class Decision(NamedTuple):
    """The lost and the doubtful part of missing records; the rest is held, or asked for."""

    lost: list[Range]
    doubtful: list[Range]


class HeldQuestions:
    """By producer what is open, and the last word of the brokers."""

    def __init__(self) -> None:
        self._open: dict[int, RangeSet] = {}
        self._words: dict[int, HeldWord] = {}

    def begin(self, producer: int) -> None:
        """Judge a producer again: `decide` notes what is open of it now."""
        self._open.pop(producer, None)

    def decide(self, producer: int, missing: Iterable[Range], lost: RangeSet, doubtful: RangeSet) -> Decision:
        """Part what is missing; `lost` and `doubtful` is what was called that before."""
        word, missing = self._words.get(producer, HeldWord()), list(missing)
        rest = apart(missing, lost, word.held)
        asked = common(rest, word.asked)
        gone = RangeSet([*common(missing, lost), *(() if word.doubt else asked)])
        doubted = RangeSet([*(asked if word.doubt else ()), *common(apart(rest, word.asked), doubtful)])
        for piece in apart(missing, gone):
            self._open.setdefault(producer, RangeSet()).add(*piece)
        return Decision(list(gone), list(doubted))

    def sought(self, partition: int, *, again: bool) -> list[Sought]:
        """Return the records that brokers are to be asked for.

        These are those of producers with new ones; with `again` also those that the last answers did not settle.
        """
        return [
            Sought(partition, producer, tuple(ranges))
            for producer, ranges in self._open.items()
            if again or apart(ranges, self._words.get(producer, HeldWord()).asked)
        ]

    def take(self, producer: int, word: HeldWord) -> None:
        """Take what brokers said of a producer, in place of what they said before."""
        self._words[producer] = word

    def forget(self, producer: int) -> None:
        """Forget a producer."""
        self._open.pop(producer, None)
        self._words.pop(producer, None)
