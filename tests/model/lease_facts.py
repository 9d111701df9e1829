"""The rules of leased items on plain facts: what each decision does to each item alone, and in the order of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memq.queues.decisions import (
    AckDecision,
    EndDecision,
    EnqueueDecision,
    GrantDecision,
    ItemRanges,
    ItemState,
    NackDecision,
    QueueDecision,
    RedriveDecision,
    terms_of,
)
from memq.queues.machine import QueueMachine

Item = tuple[int, int]


@dataclass(slots=True)
class Fact:
    """An item, by the rules alone. Dead items are over until they are sent back."""

    grant: int = 0
    leased: bool = False
    over: bool = False
    dead: bool = False
    grants: int = 0
    due_ms: int = 0


class LeaseFacts:
    """All items that the log has had, in the order of their arrival."""

    def __init__(self, *, at_most_once: bool, attempts_max: int, ordered: bool) -> None:
        self.items: dict[Item, Fact] = {}
        self._at_most_once = at_most_once
        self._attempts_max = attempts_max
        self._ordered = ordered
        self._same: set[int] = set()  # blocks that were not the first: they never come
        self._windows: dict[bytes, int] = {}  # until when a block is the first one under a dedupe key

    def apply(self, decision: QueueDecision) -> None:
        """Apply the rules to one decision that counts."""
        match decision:
            case EnqueueDecision():
                self.enqueue(decision)
            case GrantDecision():
                for item in self.known(decision.items):
                    fact = self.items[item]
                    if not fact.over and (not self._ordered or self._next() == item):
                        fact.grant, fact.leased, fact.over = decision.number, True, self._at_most_once
                        fact.grants += 1
            case AckDecision() | NackDecision() | EndDecision():
                for lease in decision.leases:
                    for item in self.known([lease.items]):
                        self._end(decision, self.items[item], lease.grant)
            case RedriveDecision():
                for item in self.known(decision.items):
                    if self.items[item].dead:
                        self.items[item] = Fact(self.items[item].grant, due_ms=decision.now_ms)

    def enqueue(self, decision: EnqueueDecision) -> None:
        """Note the blocks of a decision."""
        lane = decision.lanes[0]
        dedupe = terms_of(lane.lane).dedupe
        for block in lane.blocks:
            if (block.id.producer, 0) in self.items or block.id.producer in self._same:
                continue
            if dedupe is not None:
                if self._windows.get(dedupe.digest, 0) > dedupe.since_ms:
                    self._same.add(block.id.producer)
                    continue
                self._windows[dedupe.digest] = dedupe.until_ms
            for number in range(block.next):
                self.items[block.id.producer, number] = Fact(due_ms=block.due_ms)

    def _end(self, decision: AckDecision | NackDecision | EndDecision, fact: Fact, grant: int) -> None:
        held = fact.leased or isinstance(decision, EndDecision)
        if fact.grant != grant or fact.over or not held:
            return
        fact.leased = False
        fact.over = isinstance(decision, AckDecision | EndDecision)
        fact.dead = isinstance(decision, EndDecision) and decision.dead
        if isinstance(decision, NackDecision):
            fact.due_ms = decision.due_ms
            fact.over = fact.dead = 0 < self._attempts_max <= fact.grants

    def _next(self) -> Item | None:
        """Return the only item of the ordered key that may be granted."""
        leased = (item for item, fact in self.items.items() if fact.leased and not fact.over)
        first = (item for item, fact in self.items.items() if not fact.over)
        return next(leased, None) or next(first, None)

    def known(self, items: Sequence[ItemRanges]) -> list[Item]:
        """Return the known ones of some items."""
        found = [(each.block, number) for each in items for number in each]
        return [item for item in found if item in self.items]

    def difference(self, machine: QueueMachine) -> str:
        """Return how a machine differs from the facts; empty if it does not."""
        for (id_, number), fact in self.items.items():
            block = machine.blocks.get(id_)
            if block is None:
                if not fact.over or fact.dead:
                    return f"item {id_}:{number} is gone, and is not over"
                continue
            status = block.status(number)
            state = status.state
            over = state.is_over or state is ItemState.DEAD
            if (over, state is ItemState.LEASED) != (fact.over, fact.leased and not fact.over):
                return f"item {id_}:{number} is {state.name}, the rules say {fact}"
            found = Fact(status.grant, grants=status.attempts, due_ms=status.due_ms)
            if not over and (found.grant, found.grants, found.due_ms) != (fact.grant, fact.grants, fact.due_ms):
                return f"item {id_}:{number} has another grant, due time or number of attempts than {fact}"
        more = machine.blocks.keys() - {id_ for id_, _ in self.items}
        return f"blocks {more} are not the first under their dedupe keys" if more else ""

    def next_ordered(self, machine: QueueMachine) -> Item | None:
        """Return the item of the ordered key that the state of an owner, perhaps an old one, may grant."""
        waits = [
            (block.state(number) is not ItemState.LEASED, block.arrival, number, id_)
            for id_, block in machine.blocks.items()
            for number in range(block.count)
            if block.state(number) in (ItemState.READY, ItemState.LEASED)
        ]
        if not waits:
            return None
        _, _, number, id_ = min(waits)
        return id_, number
