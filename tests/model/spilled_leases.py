"""A model of leases whose blocks lie in runs: the model of leases with runs that are written, named, brought and read.

Runs are written first, and named later: meanwhile items are granted or cancelled, and blocks come again with another
object. All blocks are in one queue, and have one of two priorities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memq.audit.items.fold import ItemFold, decode_saved
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.state_log.queue_run import QueueRunEntry
from memq.format.state_log.run import BEFORE_ALL, NamedRun, RunPlace
from memq.queues.block import lane_of, may_move
from memq.queues.decisions import (
    CancelDecision,
    EnqueueDecision,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemTerms,
    Outcomes,
    QueueDecision,
    encode_decision,
    terms_of,
)
from memq.queues.machine import QueueMachine
from memq.queues.runs.spilled import BringBlocksDecision, BroughtBlock, QueueLane, SpillBlocksDecision, bytes_of, ids_in
from tests.model.lease_facts import Fact, Item, LeaseFacts
from tests.model.leases import LEASE_S, TOPIC, BrokenLeaseError, LeaseModel, Owner, Rules, Waiting

BLOCKS, ITEMS, PRIORITIES = 8, 2, 2
Order = tuple[int, int, int]  # priority, due time and arrival


@dataclass(frozen=True, slots=True)
class Run:
    """A run in the store."""

    named: NamedRun
    lane: QueueLane
    entries: tuple[QueueRunEntry, ...]


class SpilledLeaseModel(LeaseModel):
    """One schedule. `picks`: a cancel brings the block of its item first."""

    arrivals = 5

    def __init__(self, seed: int, rules: Rules, *, picks: bool = True) -> None:
        super().__init__(seed, rules)
        self.picks = picks
        self.runs: dict[str, Run] = {}
        self.written: list[tuple[Owner, Run]] = []  # not named yet
        self.facts = SpilledFacts(self)
        self.objects = 0
        self.audit = ItemFold(0)

    def run(self) -> Counter[str]:
        """Run the schedule. Raises: BrokenLeaseError."""
        steps = [self.tick, self.enqueue, self.open, self.land, self.read, self.publish, self.dequeue, self.receive]
        steps += [self.work, self.end, self.crash, self.save, self.write, self.name, self.bring, self.cancel]
        weights = [2, self.arrivals, 0.7, 16, 16, 12, 12, 10, 12, 2, 0.1, 1, 3, 4, 6, 1.5]
        for _ in range(600):
            if self.draw.random() < 0.02:
                self.paused = {self.draw.randrange(len(self.owners))} if not self.paused else set()
            self.draw.choices(steps, weights)[0]()
        self.drain()
        return self.met

    # ---- steps -----------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """A block comes, or comes again with another object."""
        owner = self.some()
        if owner is None:
            return
        id_ = self.draw.randrange(1, BLOCKS + 1)
        lease_ms = 0 if self.rules.at_most_once else LEASE_S * 1_000
        terms = ItemTerms(id_ % PRIORITIES, lease_ms, self.rules.attempts_max, 0)
        block = HeldBlock(HoldId(id_, 0), ITEMS, (self.now_s + self.draw.choice([0, 0, 1, 9])) * 1_000, 0, 10)
        known = self.facts.items.get((id_, 0))
        if known is not None and id_ in self.reference.blocks:  # a block that is open has one due time
            block = self.reference.blocks[id_].block
        self.objects += 1
        lane = HeldLane(Target(TOPIC, "", 0), terms.lane(), (block,))
        decision = EnqueueDecision(f"object {self.objects}", 0, (lane,))

        def settle(answer: object) -> None:
            assert owner.scheduler is not None
            self.met["enqueued" if isinstance(answer, tuple) and answer[0] else "known"] += 1
            owner.scheduler.enqueued(id_, self.now())

        owner.pending.append(Waiting(decision, settle))

    def write(self) -> None:
        """An owner writes a run."""
        owner = self.some()
        if owner is None:
            return
        blocks = [each for each in owner.machine.blocks.values() if may_move(each)]
        if not blocks:
            return
        lane = lane_of(self.draw.choice(blocks))
        same = [each for each in blocks if lane_of(each) == lane]
        found = [QueueRunEntry(each.block, each.target, each.key, each.lane, each.arrival) for each in same]
        entries = tuple(sorted(found, key=lambda each: each.place)[self.draw.randrange(2) :])
        if entries:
            self.objects += 1
            key = f"run {self.objects}"
            named = NamedRun(key, 0, 0, len(entries), 0, 0, 0, entries[0].place, entries[-1].place)
            self.written.append((owner, Run(named, lane, entries)))

    def name(self) -> None:
        """A run that was written is named."""
        if not self.written:
            return
        owner, run = self.written.pop(self.draw.randrange(len(self.written)))
        if owner not in self.owners or not owner.is_open:
            return
        self.runs[run.named.key] = run

        def settle(answer: object) -> None:
            assert owner.scheduler is not None
            owner.scheduler.spilled(TOPIC)
            self.met["spilled"] += answer is True

        ids = bytes_of(each.block.id.producer for each in run.entries)
        owner.pending.append(Waiting(SpillBlocksDecision(run.named, run.lane, ids), settle))

    def bring(self) -> None:
        """An owner brings the next blocks of a run, perhaps one that it brings already."""
        owner = self.some()
        if owner is not None and owner.machine.spilled.runs:
            key = self.draw.choice(list(owner.machine.spilled.runs))
            self._propose(owner, next_of(owner.machine, self.runs[key], self.draw.randrange(1, 3)))

    def _propose(self, owner: Owner, decision: BringBlocksDecision) -> None:
        def settle(answer: object) -> None:
            assert owner.scheduler is not None
            self.met["brought" if answer else "at another place"] += 1
            for each in decision.blocks:
                owner.scheduler.enqueued(each.block.id.producer, self.now())

        owner.pending.append(Waiting(decision, settle))

    def cancel(self) -> None:
        """An operator cancels an item."""
        owner = self.some()
        if owner is not None and owner.scheduler is not None:
            self._cancel(owner, self.draw.randrange(1, BLOCKS + 1), self.draw.randrange(ITEMS))

    def _cancel(self, owner: Owner, id_: int, number: int) -> None:
        items, scheduler = (ItemRanges(id_, (number, number + 1)),), owner.scheduler
        assert scheduler is not None
        state = owner.machine.spilled.run_of(id_)
        if state is not None and self.picks:
            live = self._live(state.run.key, state.ids)
            (entry,) = [each for each in live if each.block.id.producer == id_]
            head = next((each.place for each in live if each is not entry), state.run.last)
            decision = BringBlocksDecision(state.run.key, state.at, state.at, head, (brought_of(entry),))
            self._propose(owner, decision)
            self.met["picked"] += 1

        def settle(answer: object) -> None:
            outcomes: Outcomes = answer  # type: ignore[assignment]
            scheduler.released(items)
            self.met[f"cancel: {outcomes[0].outcome}"] += 1
            if outcomes[0].outcome is not ItemOutcome.UNKNOWN:
                return
            known = owner.machine.blocks.get(id_)
            if self.picks and (known is not None or owner.machine.spilled.run_of(id_) is not None):
                self._cancel(owner, id_, number)  # it moved meanwhile
            elif (fact := self.facts.items.get((id_, number))) is not None and owner.machine.is_known(id_):
                raise BrokenLeaseError(f"item {id_}:{number} was cancelled in vain: {fact}")

        scheduler.hold(items)
        owner.pending.append(Waiting(CancelDecision(self.now().wall_ms, items), settle))

    def save(self) -> None:
        """The audit compares a snapshot with the log; then the snapshot replaces the machine."""
        saved = decode_saved(self.reference.snapshot())
        if saved is not None:
            self.audit.compare(saved, 0)
        if found := self.audit.take_findings():
            raise BrokenLeaseError(f"the audit finds {found[0]}")
        super().save()

    # ---- checks ----------------------------------------------------------------------------------

    def _check_choice(self, owner: Owner, items: Sequence[ItemRanges], waiting: list[Item]) -> None:
        """An owner chooses the first item of all that wait; none while a due block in a run comes before."""
        machine, now_ms = owner.machine, self.now().wall_ms
        entries = [each for key, run in machine.spilled.runs.items() for each in self._live(key, run.ids)]
        in_runs = [order_of(each.lane, each.block, each.arrival) for each in entries if each.block.due_ms <= now_ms]
        first = min(in_runs, default=None)
        orders = {item: self._order(machine, item) for item in waiting}
        for item in ((each.block, number) for each in items for number in each):
            if machine.blocks[item[0]].state(item[1]) is ItemState.READY and item not in orders:
                raise BrokenLeaseError(f"item {item} is not due, and is chosen")
            order = self._order(machine, item)
            before = [other for other, at in orders.items() if at < order]
            if before:
                raise BrokenLeaseError(f"item {item} is chosen before {before}")
            if first is not None and first < order:
                raise BrokenLeaseError(f"item {item} is chosen before the block {first} in a run")
            self.met["chosen with runs"] += bool(entries)
        if waiting and not items and (first is None or min(orders.values()) < first):
            raise BrokenLeaseError(f"items {waiting} wait, and are not offered")

    def _order(self, machine: QueueMachine, item: Item) -> Order:
        block = machine.blocks[item[0]]
        return block.terms.priority, block.status(item[1]).due_ms, block.arrival

    def _live(self, key: str, ids: set[int]) -> list[QueueRunEntry]:
        return [each for each in self.runs[key].entries if each.block.id.producer in ids]

    def drain(self) -> None:
        """The last owner brings all runs, and grants all items that wait: none is lost, and none comes twice."""
        self.paused.clear()
        while self.net:
            self.land()
        for key in list(self.reference.spilled.runs):
            while key in self.reference.spilled.runs:
                decision = next_of(self.reference, self.runs[key], 2)
                self.facts.apply(decision)
                if self.reference.apply(encode_decision(decision)) is not True:
                    raise BrokenLeaseError(f"{decision} does not count")
                self._compare()
        super().drain()


class SpilledFacts(LeaseFacts):
    """The same facts, with the blocks that are in runs, and the object of each block."""

    def __init__(self, model: SpilledLeaseModel) -> None:
        rules = model.rules
        super().__init__(at_most_once=rules.at_most_once, attempts_max=rules.attempts_max, ordered=False)
        self.in_runs: dict[int, str] = {}  # by block, the key of its run
        self.model = model
        self._at: dict[str, RunPlace] = {}
        self._again: set[int] = set()  # blocks that came again
        self._objects: dict[int, str] = {}

    def apply(self, decision: QueueDecision) -> None:
        """Apply the rules to one decision that counts."""
        self.model.audit.apply(encode_decision(decision))
        match decision:
            case SpillBlocksDecision():
                moved = [id_ for id_ in ids_in(decision.ids) if self._may_move(id_)]
                self.in_runs |= dict.fromkeys(moved, decision.run.key)
                self._at[decision.run.key] = BEFORE_ALL
            case BringBlocksDecision():
                if self._at.get(decision.run) == decision.before:
                    self._at[decision.run] = decision.to
                    for each in decision.blocks:
                        if self.in_runs.get(each.block.id.producer) == decision.run:
                            del self.in_runs[each.block.id.producer]
                    if decision.run not in self.in_runs.values():
                        del self._at[decision.run]
            case CancelDecision():
                for item in self.known(decision.items):
                    fact = self.items[item]
                    fact.over = fact.over or not fact.leased
            case _:
                super().apply(decision)

    def _may_move(self, id_: int) -> bool:
        facts = [self.items.get((id_, number), Fact(over=True)) for number in range(ITEMS)]
        named = any(each.grant or each.over for each in facts)
        return not (named or id_ in self._again or id_ in self.in_runs)

    def enqueue(self, decision: EnqueueDecision) -> None:
        """Note the blocks of a decision, and their object."""
        for block in decision.lanes[0].blocks:
            id_ = block.id.producer
            if id_ not in self.in_runs:
                self._objects[id_] = decision.key
                if (id_, 0) in self.items:
                    self._again.add(id_)
        super().enqueue(decision)

    def known(self, items: Sequence[ItemRanges]) -> list[Item]:
        """Return the known items that are in memory."""
        return [item for item in super().known(items) if item[0] not in self.in_runs]

    def difference(self, machine: QueueMachine) -> str:
        """Return how a machine differs from the facts; empty if it does not."""
        found = {id_: key for key, run in machine.spilled.runs.items() for id_ in run.ids}
        if sum(len(run.ids) for run in machine.spilled.runs.values()) > len(found) or found != self.in_runs:
            return f"blocks {found} are in runs, the rules say {self.in_runs}"
        if both := found.keys() & machine.blocks.keys():
            return f"blocks {both} are in a run and in memory"
        if machine.items != sum(not fact.over for fact in self.items.values()):
            return f"{machine.items} items are counted"
        for key in machine.spilled.runs:
            for each in self.model.runs[key].entries:
                id_ = each.block.id.producer
                if found.get(id_) == key and self._objects[id_] != each.key:
                    return f"run '{key}' names object {each.key} of block {id_}, which is in {self._objects[id_]}"
        known, self.items = self.items, {item: fact for item, fact in self.items.items() if item[0] not in found}
        try:
            return super().difference(machine)
        finally:
            self.items = known


def order_of(lane: str, block: HeldBlock, arrival: int) -> Order:
    """Return the place of a block among all of the queue."""
    return terms_of(lane).priority, block.due_ms, arrival


def brought_of(entry: QueueRunEntry) -> BroughtBlock:
    """Return a block of a run for a decision that brings it."""
    return BroughtBlock(entry.arrival, entry.key, entry.lane, entry.block)


def next_of(machine: QueueMachine, run: Run, count: int) -> BringBlocksDecision:
    """Return the decision that brings the next blocks of a run."""
    state = machine.spilled.runs[run.named.key]
    left = [each for each in run.entries if each.place > state.at and each.block.id.producer in state.ids]
    chosen = left[:count]
    ends = (chosen[-1].place, left[count].place) if len(left) > count else (run.named.last, run.named.last)
    return BringBlocksDecision(run.named.key, state.at, *ends, tuple(map(brought_of, chosen)))


def rules_of(seed: int) -> Rules:
    """Return items of a kind that the seed draws."""
    return (Rules(), Rules(at_most_once=True))[seed % 4 == 3]


def run(seed: int, *, picks: bool = True) -> Counter[str]:
    """Run one schedule; return what happened. Raises: BrokenLeaseError."""
    return SpilledLeaseModel(seed, rules_of(seed), picks=picks).run()
