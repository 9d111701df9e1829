"""A random schedule of two owners of one service partition with held records, and its promises (H1, H2, H5).

Both owners plan on what they have read so far, one of them often on less, and everything that they decide counts. The
reference knows only the plain facts: what was answered, what each unit carried, and what is done.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.holds.machine import (
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldMachine,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    encode_decision,
)

TARGETS = tuple(Target("clicks", "ab" * 16, partition) for partition in range(2))
HOLDS = 6
STEPS = 60
WINDOW_MS = 20  # how long an ended hold is remembered


class BrokenHoldError(Exception):
    """A promise is broken."""


@dataclass(slots=True)
class Facts:
    """The reference: what counts so far."""

    answered: dict[HoldId, HoldState] = field(default_factory=dict)  # the last answer about a hold
    carried: Counter[HoldId] = field(default_factory=Counter)  # in how many units it was
    dropped: set[HoldId] = field(default_factory=set)
    named: dict[HoldId, str] = field(default_factory=dict)  # objects that must stay
    ended_ms: dict[HoldId, int] = field(default_factory=dict)
    numbers: dict[Target, int] = field(default_factory=dict)


class Schedule:
    """One run: `met` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = HoldMachine()
        self.facts = Facts()
        self.met: Counter[str] = Counter()
        self.now_ms = 1_000
        self.objects = 0
        self.stale: list[tuple[Target, int]] = []  # numbers that an owner has seen as the next ones

    def run(self) -> Counter[str]:
        """Run all steps. Raises: BrokenHoldError."""
        for _ in range(STEPS):
            self.now_ms += self.draw.randint(0, 5)
            step = self.draw.choice(
                [self.hold, self.hold, self.cancel, self.release, self.release, self.done, self.save]
            )
            step()
            self.check()
        return self.met

    def decide(self, decision: HoldsDecision) -> tuple[object, ...]:
        """Let a decision count, and return the answers."""
        answers = self.machine.apply(encode_decision(decision))
        return answers if isinstance(answers, tuple) else ()

    def target_of(self, hold: HoldId) -> Target:
        return TARGETS[hold.producer % 2]

    def some(self) -> HoldId:
        return HoldId(self.draw.randint(1, HOLDS), 0)

    # ---- steps -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """A producer sends a block, perhaps again; not after the window, in which it gives up."""
        hold, facts = self.some(), self.facts
        if self.now_ms - facts.ended_ms.get(hold, self.now_ms) > WINDOW_MS:
            return
        self.objects += 1
        key = f"object {self.objects}"
        lane = HeldLane(self.target_of(hold), "", (HeldBlock(hold, 1, self.now_ms, 0, 1),))
        (state,) = self.decide(HoldDecision(key, self.now_ms - WINDOW_MS, (lane,)))
        self.met[f"held: {state!r}"] += 1
        if hold in facts.ended_ms and state is HoldState.HELD:
            raise BrokenHoldError(f"{hold} has ended, and is held again")
        if state is HoldState.HELD:
            facts.named[hold] = key
        assert isinstance(state, HoldState), f"{hold} has state {state!r} after a hold"
        facts.answered[hold] = state

    def cancel(self) -> None:
        """A producer cancels a hold that it knows."""
        hold, facts = self.some(), self.facts
        if hold not in facts.answered or self.now_ms - facts.ended_ms.get(hold, self.now_ms) > WINDOW_MS:
            return
        (state,) = self.decide(DropDecision(self.now_ms, (hold,)))
        self.met[f"cancelled: {state!r}"] += 1
        if state is HoldState.DROPPED:
            if facts.carried[hold]:
                raise BrokenHoldError(f"{hold} is released, and answered as dropped")
            facts.dropped.add(hold)
            facts.named.pop(hold, None)
            facts.ended_ms.setdefault(hold, self.now_ms)
        elif state is not HoldState.RELEASED or hold in facts.dropped:
            raise BrokenHoldError(f"{hold} is answered with {state!r}")

    def release(self) -> None:
        """An owner releases some holds, under the next number that it knows: an old one, if it is behind."""
        target = self.draw.choice(TARGETS)
        number = self.machine.next_number(target)
        self.stale.append((target, number))
        if self.draw.random() < 0.3:
            target, number = self.draw.choice(self.stale)
        holds = tuple(HoldId(each, 0) for each in self.draw.sample(range(1, HOLDS + 1), 3))
        (counts,) = self.decide(ReleaseDecision((Unit(target, number, holds),)))
        self.met["released" if counts else "old number"] += 1
        facts = self.facts
        if not counts:
            return
        if number != facts.numbers.get(target, 0) + 1:
            raise BrokenHoldError(f"number {number} of {target} after {facts.numbers.get(target, 0)}")
        facts.numbers[target] = number
        for hold in self.machine.units[target][number].holds:
            found = hold.block.id
            facts.carried[found] += 1
            if facts.carried[found] > 1 or found in facts.dropped or target != self.target_of(found):
                raise BrokenHoldError(f"{found} goes to {target}, dropped: {found in facts.dropped}")

    def done(self) -> None:
        """A target has the oldest unit."""
        target = self.draw.choice(TARGETS)
        units = self.machine.units.get(target)
        if not units:
            return
        number = next(iter(units))
        if self.draw.random() < 0.3:
            number += 1  # of another decision: it may not be there
        holds = [hold.block.id for hold in units[number].holds] if number in units else []
        self.decide(DoneDecision(self.now_ms, ((target, number),)))
        self.met["done"] += 1
        for hold in holds:
            self.facts.named.pop(hold, None)
            self.facts.ended_ms[hold] = self.now_ms

    def save(self) -> None:
        """A new owner begins with a snapshot."""
        restored = HoldMachine()
        restored.restore(self.machine.snapshot())
        if restored.units != self.machine.units or restored.numbers != self.machine.numbers:
            raise BrokenHoldError("a snapshot has other units")
        self.machine = restored
        self.met["restored"] += 1

    # ---- promises --------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the state names the objects that are needed, and no others."""
        needed, named = set(self.facts.named.values()), set(self.machine.objects)
        if needed - named:
            raise BrokenHoldError(f"{needed - named} are needed, and not named")
        if named - needed:
            raise BrokenHoldError(f"{named - needed} are named, and not needed")
        waiting = sum(self.machine.waiting.values())
        if waiting != len(self.machine.open):
            raise BrokenHoldError(f"{waiting} are counted, {len(self.machine.open)} wait")
