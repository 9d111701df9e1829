"""A random schedule of two owners of one service partition with held records, and its promises (H1, H2, H5, H6).

Both owners plan on what they have read so far, one of them often on less, and everything that they decide counts. The
reference knows only the plain facts: what was answered, what each unit carried, and what is done. The schedule keeps
the content of runs: a run that is written, or merged, is named some steps later.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import delayed_sequence, due_time_of
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunWriter
from memq.holds.decisions import (
    DoneDecision,
    DropDecision,
    Hold,
    HoldDecision,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import (
    BringDecision,
    MarkDecision,
    MergeDecision,
    ReplacedRun,
    RunDecision,
    SpilledPlace,
)

TARGETS = tuple(Target("clicks", "ab" * 16, partition) for partition in range(2))
HOLDS = 12
STEPS = 100
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
    moved_ms: dict[HoldId, int] = field(default_factory=dict)


class Schedule:
    """One run: `met` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = HoldMachine()
        self.facts = Facts()
        self.met: Counter[str] = Counter()
        self.now_ms = 1_000
        self.ids = [HoldId(each, delayed_sequence(self.draw.randint(1_000, 1_300))) for each in range(1, HOLDS + 1)]
        self.objects = 0
        self.stale: list[tuple[Target, int]] = []  # numbers that an owner has seen as the next ones
        self.runs: dict[str, list[RunEntry]] = {}  # the content of all runs that were written
        self.written: list[tuple[int, NamedRun]] = []  # runs that marks wait for
        self.merges: list[MergeDecision] = []
        self.places: dict[HoldId, SpilledPlace] = {}  # where an owner has found holds, perhaps long ago

    def run(self) -> Counter[str]:
        """Run all steps. Raises: BrokenHoldError."""
        for _ in range(STEPS):
            self.now_ms += self.draw.randint(0, 5)
            step = self.draw.choice(
                [
                    *(self.hold, self.hold, self.hold, self.cancel, self.release, self.done, self.save),
                    *(self.mark, self.move, self.move, self.bring, self.bring),
                    *(self.begin_merge, self.begin_merge, self.merge, self.merge),
                ]
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
        return self.draw.choice(self.ids)

    # ---- steps -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """A producer sends a block, perhaps again; not after the window, in which it gives up."""
        hold, facts = self.some(), self.facts
        for known_ms in (facts.ended_ms, facts.moved_ms):
            if self.now_ms - known_ms.get(hold, self.now_ms) > WINDOW_MS:
                return
        self.objects += 1
        key = f"object {self.objects}"
        lane = HeldLane(self.target_of(hold), "", (HeldBlock(hold, hold.first + 1, due_time_of(hold.first), 0, 1),))
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
        found = self.live().get(hold)
        if found is not None and self.draw.random() < 0.7:
            self.places[hold] = SpilledPlace(found, due_time_of(hold.first), self.target_of(hold), 1)
        (state,) = self.decide(DropDecision(self.now_ms, (hold,), (self.places.get(hold),)))
        self.met[f"cancelled: {state!r}"] += 1
        if state is HoldState.DROPPED:
            if facts.carried[hold]:
                raise BrokenHoldError(f"{hold} is released, and answered as dropped")
            facts.dropped.add(hold)
            facts.named.pop(hold, None)
            facts.ended_ms.setdefault(hold, self.now_ms)
        elif state is None or state is HoldState.HELD:
            if found is None or (hold in self.places and self.places[hold].run == found):
                raise BrokenHoldError(f"{hold} is in run {found}, and is answered with {state!r}")
        elif state is not HoldState.RELEASED or hold in facts.dropped:
            raise BrokenHoldError(f"{hold} is answered with {state!r}")

    def release(self) -> None:
        """An owner releases some holds, under the next number that it knows: an old one, if it is behind."""
        target = self.draw.choice(TARGETS)
        number = self.machine.next_number(target)
        self.stale.append((target, number))
        if self.draw.random() < 0.3:
            target, number = self.draw.choice(self.stale)
        holds = tuple(self.draw.sample(self.ids, 3))
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
        if _content(restored) != _content(self.machine) or restored.numbers != self.machine.numbers:
            raise BrokenHoldError("a snapshot has other units")
        if restored.waiting != self.machine.waiting or restored.spilled.marked != self.machine.spilled.marked:
            raise BrokenHoldError("a snapshot has other counts, or other marked holds")
        self.machine = restored
        self.met["restored"] += 1

    # ---- runs ------------------------------------------------------------------------------------

    def mark(self) -> None:
        """An owner begins to move some holds, and writes their run."""
        number = self.machine.apply(encode_decision(MarkDecision(self.now_ms + self.draw.randint(0, 30))))
        assert isinstance(number, int), f"the number of a mark is {number!r}"
        held = (self.machine.open[hold] for hold in self.machine.spilled.marked)
        holds = sorted((RunEntry(each.block, each.target, each.key) for each in held), key=lambda each: each.place)
        if holds:
            self.written.append((number, self.write(holds)))
        self.met["marked"] += bool(holds)

    def write(self, holds: list[RunEntry]) -> NamedRun:
        writer = RunWriter(HELD_ROWS)
        writer.add(holds)
        run, _ = writer.finish(f"run {len(self.runs)}", 0, len(self.runs))
        self.runs[run.key] = holds
        return run

    def move(self) -> None:
        """The run of a mark is named; an owner that is behind names one of an earlier mark."""
        if not self.written:
            return
        mark, run = self.written[-1] if self.draw.random() < 0.8 else self.draw.choice(self.written)
        moved = list(self.machine.spilled.marked)
        counts = self.machine.apply(encode_decision(RunDecision(mark, (run,), self.now_ms)))
        self.met["moved" if counts else "old mark"] += 1
        if counts:
            self.facts.moved_ms |= dict.fromkeys(moved, self.now_ms)

    def bring(self) -> None:
        """The first holds of a run come back, in an order that an owner may have read long ago."""
        runs = list(self.machine.spilled.runs.values())
        if not runs:
            return
        begun = [each for each in runs if each.at > (0, 0, 0)]
        is_behind = bool(begun) and self.draw.random() < 0.4
        state = self.draw.choice(begun if is_behind else runs)
        before = (0, 0, 0) if is_behind else state.at
        holds = [each for each in self.runs[state.run.key] if each.place > before][: self.draw.randint(1, 2)]
        objects = tuple((key, (HeldLane(target, "", (block,)),)) for block, target, key in holds)
        decision = BringDecision(state.run.key, before, holds[-1].place, objects)
        counts = self.machine.apply(encode_decision(decision))
        self.met["brought" if counts else "brought before"] += 1
        for each in holds:
            if counts and each.block.id in self.machine.open:
                self.facts.moved_ms.pop(each.block.id, None)

    def begin_merge(self) -> None:
        """An owner merges two runs, or writes one again."""
        runs = list(self.machine.spilled.runs.values())
        chosen = self.draw.sample(runs, min(len(runs), self.draw.randint(1, 2)))
        live = [
            each
            for state in chosen
            for each in self.runs[state.run.key]
            if each.place > state.at and each.block.id not in state.dropped
        ]
        replaced = tuple(ReplacedRun(state.run.key, state.at, len(state.dropped)) for state in chosen)
        if chosen:
            new = (self.write(sorted(live, key=lambda each: each.place)),) if live else ()
            self.merges.append(MergeDecision(replaced, new))

    def merge(self) -> None:
        """The result of a merge is named, if its runs are as they were."""
        if self.merges:
            merge = self.merges.pop(self.draw.randrange(len(self.merges)))
            self.met["merged" if self.machine.apply(encode_decision(merge)) else "old merge"] += 1

    def live(self) -> dict[HoldId, str]:
        """Return the live holds in runs, with the keys of their runs."""
        return {
            each.block.id: key
            for key, state in self.machine.spilled.runs.items()
            for each in self.runs[key]
            if each.place > state.at and each.block.id not in state.dropped
        }

    # ---- promises --------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the state names the objects that are needed, and no others."""
        needed, named = set(self.facts.named.values()), set(self.machine.objects)
        live = self.live()
        in_runs = {
            each.key for key in self.machine.spilled.runs for each in self.runs[key] if live.get(each.block.id) == key
        }
        if needed - named - in_runs:
            raise BrokenHoldError(f"{needed - named - in_runs} are needed, and not named")
        if named - needed:
            raise BrokenHoldError(f"{named - needed} are named, and not needed")
        waiting = sum(self.machine.waiting.values())
        if not waiting == self.machine.waiting_count == len(self.machine.open) + len(live):
            raise BrokenHoldError(f"{waiting} are counted, {len(self.machine.open)} wait, and {len(live)} in runs")
        lost = {hold for hold, state in self.facts.answered.items() if state is HoldState.HELD}
        lost -= {*self.machine.open, *live, *self.facts.dropped, *self.facts.carried}
        if lost:
            raise BrokenHoldError(f"{lost} are held, and nowhere")


def _content(machine: HoldMachine) -> dict[Target, dict[int, tuple[Unit, list[Hold]]]]:
    """Return the units without their totals, which count only for units that are done in their order."""
    return {
        target: {r: (each.unit, each.holds) for r, each in units.items()} for target, units in machine.units.items()
    }
