"""Records that no pointer has and a broker may hold: questions, answers and remaining doubts. Pure.

Theory: a broker holds a record acked with ack=1 from the ack until the queue shows it: in memory, on the way to the
next owner, or on disk. So the audit asks brokers for records that are missing below a proven end, and then reads the
queue to its end. A record that no broker held, and that is not in the queue afterwards, is lost. Only owners accept
records, and the pointers of their epochs name them. An epoch that ended with `closed` left no record behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memq.audit.account import HeldWord, apart, common
from memq.audit.pointer_facts import PointerFacts
from memq.audit.released import ReleaseAnswer
from memq.format.ranges import Range, RangeSet
from memq.limits import FORWARD_S_MAX
from memq.topic import Topic

Source = tuple[int, int]  # write partition, producer
HELD_MS = int(FORWARD_S_MAX * 1000)  # for how long a broker keeps in memory what it took with 1 for the next owner
NAMED_MAX = 3  # brokers that a doubt names


class Decision(NamedTuple):
    """The lost and the doubtful part of missing records; a broker holds the rest, or is asked for it."""

    lost: list[Range]
    doubtful: list[Range]


class Sought(NamedTuple):
    """Records of one producer in one write partition that no pointer has.

    With producer 0, they are the held records of the partition.
    """

    partition: int
    producer: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """The answers of a cluster's brokers about sought records.

    `answered` are brokers whose answer is complete; `failed` has the reason of each other one. A broker in neither did
    not exist at that moment. `error`: why no broker could be asked. `released`: the answer of shards, if asked.
    """

    held: Mapping[Source, RangeSet] = field(default_factory=dict)
    answered: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    released: ReleaseAnswer | None = None


AskHeld = Callable[[Topic, Sequence[Sought]], Awaitable[HeldAnswer]]  # raises nothing: what fails is in the answer


def doubt_of(answer: HeldAnswer, facts: PointerFacts, topic: Topic, end_ms: int, now_ms: int) -> str:
    """Return why a broker may hold records that none named, "" without a reason.

    `facts` are those of their write partition, `end_ms` the queue time at which their producer ended. A broker that is
    gone keeps its disk. After `HELD_MS` its memory has no records, nor has that of a broker without the coordinator.
    """
    if answer.error:
        return f"brokers were not asked whether they hold them: {answer.error}"
    gone = topic.settings.ack1 == "disk" or now_ms - end_ms < HELD_MS
    reasons = list(_reasons(answer, facts.holders(), gone=gone))
    if reasons:
        more = f"; and {len(reasons) - NAMED_MAX} more" if len(reasons) > NAMED_MAX else ""
        return "; ".join(reasons[:NAMED_MAX]) + more
    if facts.may_be_late() and now_ms - end_ms < topic.settings.late_ms:
        return "a pointer of an epoch that was lost may still land"
    return ""


def _reasons(answer: HeldAnswer, holders: Iterable[str], *, gone: bool) -> Iterable[str]:
    for broker in holders:
        if broker in answer.failed:
            yield f"broker '{broker}' may hold them: {answer.failed[broker]}"
        elif broker not in answer.answered and gone:
            yield f"broker '{broker}' may hold them, and is not there"


class HeldQuestions:
    """Open questions to brokers about one write partition by producer, and their last answers.

    Brokers are asked for missing records before these are reported as lost. An answer counts after the queue was read
    to its end, as `PartitionAudit.settle` requires. Records that were then neither held nor in the queue are lost;
    that is final. Held or doubtful records are asked for again.
    """

    def __init__(self) -> None:
        self._open: dict[int, RangeSet] = {}
        self._words: dict[int, HeldWord] = {}

    def begin(self, producer: int) -> None:
        """Begin to judge a producer; `decide` then notes its open records."""
        self._open.pop(producer, None)

    def decide(self, producer: int, missing: Iterable[Range], lost: RangeSet, doubtful: RangeSet) -> Decision:
        """Divide missing records; `lost` and `doubtful` are the earlier results."""
        word, missing = self._words.get(producer, HeldWord()), list(missing)
        rest = apart(missing, lost, word.held)
        asked = common(rest, word.asked)
        gone = RangeSet([*common(missing, lost), *(() if word.doubt else asked)])
        doubted = RangeSet([*(asked if word.doubt else ()), *common(apart(rest, word.asked), doubtful)])
        for piece in apart(missing, gone):
            self._open.setdefault(producer, RangeSet()).add(*piece)
        return Decision(list(gone), list(doubted))

    def sought(self, partition: int, *, again: bool) -> list[Sought]:
        """Return the records for which brokers are to be asked.

        These are records of producers with new ones; `again` adds those that the last answers left open.
        """
        return [
            Sought(partition, producer, tuple(ranges))
            for producer, ranges in self._open.items()
            if again or apart(ranges, self._words.get(producer, HeldWord()).asked)
        ]

    def take(self, producer: int, word: HeldWord) -> None:
        """Replace the brokers' last answer about a producer."""
        self._words[producer] = word

    def forget(self, producer: int) -> None:
        """Forget a producer."""
        self._open.pop(producer, None)
        self._words.pop(producer, None)
