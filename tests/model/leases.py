"""A model of leases in which the real machine and scheduler run: two owners, three workers, and one abstract log.

An entry counts if its epoch is that of the last `opened` that counts. Owners pause, crash and go on with an old epoch.
Entries, answers and requests are late, and blocks come again. After each entry the machine is compared with a port of
its rules to plain facts (`LeaseFacts`), and each worker checks what it holds by its own clock (Q3). Each choice of an
owner is compared with all items that wait in its state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    Dedupe,
    EndDecision,
    EnqueueDecision,
    ExtendDecision,
    FirstBlock,
    GrantDecision,
    GrantedBlock,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemTerms,
    LeaseDecision,
    LeasedItems,
    NackDecision,
    OutcomeRun,
    Outcomes,
    QueueDecision,
    RedriveDecision,
    decode_decision,
    encode_decision,
)
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Bounds, ItemScheduler, Moment
from tests.model.lease_facts import Item, LeaseFacts

TOPIC = "jobs"
LEASE_S = 4
BLOCKS, ITEMS = 3, 2
WORKERS, OWNERS = 3, 2
STEPS = 500


class BrokenLeaseError(AssertionError):
    """A schedule broke a promise of leases."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of the shell, which may be left out, and the kind of the items."""

    at_most_once: bool = False
    attempts_max: int = 0
    life_s: int = 0
    ordered: bool = False  # all items have one ordered key
    window_s: int = 0  # of dedupe keys, two blocks each
    grant_when_it_counts: bool = True  # Q2, S4
    ack_when_it_counts: bool = True  # S4
    lease_from_the_request: bool = True  # Q3


@dataclass(slots=True)
class Waiting:
    """A proposal, and what is called with its answer."""

    decision: QueueDecision
    settle: Callable[[object], None]


@dataclass(slots=True)
class Owner:
    """An owner; `pending` waits for the next entry, `sent` is the one on its way."""

    epoch: int = 0
    is_open: bool = False
    at: int = 0
    highest: int = 0
    machine: QueueMachine = field(default_factory=QueueMachine)
    scheduler: ItemScheduler | None = None
    last_grant: int = 0
    pending: list[Waiting] = field(default_factory=list)
    sent: list[Waiting] | None = None


@dataclass(slots=True)
class Worker:
    """A worker, and the item that it holds until its own deadline."""

    asked_s: int = -1
    item: Item | None = None
    grant: int = 0
    until_s: int = 0


class LeaseModel:
    """One schedule. `met` counts what happened. `arrivals` is how often items come, among all steps."""

    arrivals = 3

    def __init__(self, seed: int, rules: Rules = Rules()) -> None:
        self.draw = random.Random(seed)
        self.rules = rules
        self.met: Counter[str] = Counter()
        self.now_s = 1
        self.log: list[tuple[int, list[bytes] | None]] = []
        self.net: list[tuple[int, int, list[bytes] | None]] = []  # owner, epoch, decisions; None: `opened`
        self.owners = [Owner() for _ in range(OWNERS)]
        self.workers = [Worker() for _ in range(WORKERS)]
        self.epochs = 0
        self.reference, self.highest = QueueMachine(), 0
        self.facts = LeaseFacts(at_most_once=rules.at_most_once, attempts_max=rules.attempts_max, ordered=rules.ordered)
        self.grants: list[tuple[int, Item, int, int, int]] = []  # on their way: worker, item, grant, asked, wall ms
        self.acked: set[Item] = set()  # as workers were told
        self.started: Counter[Item] = Counter()
        self.paused: set[int] = set()

    def run(self) -> Counter[str]:
        """Run the schedule. Raises: BrokenLeaseError."""
        steps = [self.tick, self.enqueue, self.open, self.land, self.read, self.publish]
        steps += [self.dequeue, self.receive, self.work, self.end, self.crash, self.save, self.redrive]
        for _ in range(STEPS):
            if self.draw.random() < 0.02:
                self.paused = {self.draw.randrange(OWNERS)} if not self.paused else set()
            self.draw.choices(steps, [2, self.arrivals, 0.7, 16, 16, 12, 12, 10, 12, 2, 0.1, 1, 2])[0]()
        self.drain()
        return self.met

    # ---- the log ---------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_s += 1

    def now(self) -> Moment:
        return Moment(self.now_s * 1_000, float(self.now_s))

    def land(self) -> None:
        """An entry lands: those of one owner in their order."""
        if not self.net:
            return
        owner = self.draw.choice(self.net)[0]
        index = next(index for index, each in enumerate(self.net) if each[0] == owner)
        _, epoch, bodies = self.net.pop(index)
        self.log.append((epoch, bodies))
        if bodies is None:
            self.highest = max(self.highest, epoch)
        elif epoch == self.highest:
            for body in bodies:
                self.facts.apply(decode_decision(body))
                self.reference.apply(body)
                self._compare()

    def _compare(self) -> None:
        wrong = self.facts.difference(self.reference)
        if wrong:
            raise BrokenLeaseError(wrong)

    def save(self) -> None:
        """A snapshot replaces the machine: that of the reference, and of an owner that opens now."""
        state = self.reference.snapshot()
        if state:
            self.reference = QueueMachine()
            self.reference.restore(state)
            self._compare()
            self.met["snapshot"] += 1

    # ---- owners ----------------------------------------------------------------------------------

    def some(self) -> Owner | None:
        """Return an owner that runs, and believes that it has the log."""
        number = self.draw.randrange(OWNERS)
        owner = self.owners[number]
        return owner if number not in self.paused and owner.is_open else None

    def open(self) -> None:
        number = self.draw.randrange(OWNERS)
        if (
            number not in self.paused
            and self.epochs < 6
            and (self.epochs < 1 or self.draw.randrange(3) == 0 or not self._any_open())
        ):
            self.epochs += 1
            self.owners[number] = Owner(epoch=self.epochs)
            self.net.append((number, self.epochs, None))

    def _any_open(self) -> bool:
        return any(owner.is_open and owner.epoch == self.highest for owner in self.owners)

    def crash(self) -> None:
        self.owners[self.draw.randrange(OWNERS)] = Owner()
        self.met["crash"] += 1

    def read(self) -> None:
        """An owner reads its log: what counts is answered."""
        number = self.draw.randrange(OWNERS)
        owner = self.owners[number]
        while number not in self.paused and owner.epoch and owner.at < len(self.log):
            epoch, bodies = self.log[owner.at]
            owner.at += 1
            if bodies is None:
                owner.highest = max(owner.highest, epoch)
                if owner.highest > owner.epoch:
                    self.owners[number] = Owner()
                    self.met["fenced"] += 1
                    return
                if epoch == owner.epoch:
                    owner.is_open = True
                    owner.scheduler = ItemScheduler(owner.machine, self.now())
                    owner.last_grant = owner.machine.last_grant
                    self.met["opened"] += 1
                continue
            if epoch == owner.highest:
                answers = [owner.machine.apply(body) for body in bodies]
                if epoch == owner.epoch and owner.sent is not None:
                    sent, owner.sent = owner.sent, None
                    for waiting, answer in zip(sent, answers, strict=True):
                        waiting.settle(answer)

    def publish(self) -> None:
        number = self.draw.randrange(OWNERS)
        owner = self.owners[number]
        if number not in self.paused and owner.is_open and owner.sent is None and owner.pending:
            owner.sent, owner.pending = owner.pending, []
            self.net.append((number, owner.epoch, [encode_decision(each.decision) for each in owner.sent]))

    def enqueue(self) -> None:
        """A block comes, or comes again."""
        owner = self.some()
        if owner is None:
            return
        id_ = self.draw.randrange(1, BLOCKS + 1)
        now_ms, window_ms = self.now().wall_ms, self.rules.window_s * 1_000
        dedupe = Dedupe(bytes([id_ % 2]) * 16, now_ms, now_ms + window_ms) if window_ms else None
        expires_ms = (self.now_s + self.rules.life_s) * 1_000 if self.rules.life_s else 0
        lease_ms = 0 if self.rules.at_most_once else LEASE_S * 1_000
        key = "k" if self.rules.ordered else ""
        terms = ItemTerms(id_, lease_ms, self.rules.attempts_max, expires_ms, key, self.rules.ordered, dedupe)
        block = HeldBlock(HoldId(id_, 0), ITEMS, (self.now_s + self.draw.randrange(2)) * 1_000, 0, 10)
        lane = HeldLane(Target(TOPIC, "", 0), terms.lane(), (block,))
        decision = EnqueueDecision(f"object {id_}", 0, (lane,))

        def settle(answer: object) -> None:
            assert owner.scheduler is not None
            taken = answer[0] if isinstance(answer, tuple) else None
            self.met["same" if isinstance(taken, FirstBlock) else "enqueued" if taken else "known"] += 1
            owner.scheduler.enqueued(id_, self.now())

        if id_ not in self.reference.blocks:  # a block that is open has one due time and one end of life
            owner.pending.append(Waiting(decision, settle))

    def end(self) -> None:
        """An owner ends items whose life or attempts are over."""
        owner = self.some()
        if owner is None or owner.scheduler is None:
            return
        scheduler = owner.scheduler
        scheduler.pass_time(self.now())
        for decision in scheduler.ends(self.now()):
            self.met["ends"] += 1
            owner.pending.append(Waiting(decision, lambda _, decision=decision: scheduler.ended(decision)))  # type: ignore[misc]

    # ---- workers ---------------------------------------------------------------------------------

    def dequeue(self) -> None:
        number = self.draw.randrange(WORKERS)
        worker, owner = self.workers[number], self.some()
        if worker.item is not None:
            return
        if worker.asked_s < 0 or self.draw.randrange(3) == 0:  # it asks again
            worker.asked_s = self.now_s
        asked_s = worker.asked_s
        if owner is None or owner.scheduler is None or self.draw.randrange(3) == 0:
            return
        scheduler, now = owner.scheduler, self.now()
        waiting = self._waiting(owner)
        items = scheduler.take({TOPIC: 1}, Bounds(1_000), now)
        self._check_choice(owner, items, waiting)
        if not items:
            return
        owner.last_grant += 1
        decision = GrantDecision(owner.last_grant, now.wall_ms, tuple(items))
        item, wall_ms = (items[0].block, next(iter(items[0]))), now.wall_ms
        worker.asked_s = -1
        hand_out = (number, item, decision.number, asked_s, wall_ms)

        def settle(answer: object) -> None:
            blocks: tuple[GrantedBlock, ...] = answer  # type: ignore[assignment]
            scheduler.granted(items, blocks, now.steady_s)
            if blocks and self.rules.grant_when_it_counts:
                self.grants.append(hand_out)

        owner.pending.append(Waiting(decision, settle))
        if not self.rules.grant_when_it_counts:
            self.grants.append(hand_out)

    def _waiting(self, owner: Owner) -> list[Item]:
        """Return the items that an owner may choose: ready, due, alive, and without a decision on its way."""
        now_ms, busy = self.now().wall_ms, set[Item]()
        for each in (*owner.pending, *(owner.sent or ())):
            busy.update((ranges.block, number) for ranges in _items_of(each.decision) for number in ranges)
        return [
            (id_, number)
            for id_, block in owner.machine.blocks.items()
            for number in block.numbers_in(ItemState.READY)
            if block.status(number).due_ms <= now_ms
            and not 0 < block.terms.expires_ms <= now_ms
            and (id_, number) not in busy
        ]

    def _check_choice(self, owner: Owner, items: Sequence[ItemRanges], waiting: list[Item]) -> None:
        """An owner chooses a waiting item of the first priority, or one whose lease is over; in order, the next one."""
        chosen = [(each.block, number) for each in items for number in each]
        if self.rules.ordered:
            allowed = self.facts.next_ordered(owner.machine)
            if chosen and chosen != [allowed]:
                raise BrokenLeaseError(f"item {chosen} of an ordered key comes before {allowed}")
            if not chosen and allowed in waiting:
                raise BrokenLeaseError(f"item {allowed} of an ordered key waits, and is not offered")
            return
        if waiting and not chosen:
            raise BrokenLeaseError(f"items {waiting} wait, and are not offered")
        for item in chosen:
            block = owner.machine.blocks[item[0]]
            if block.state(item[1]) is ItemState.READY and item not in waiting:
                raise BrokenLeaseError(f"item {item} is not due, or its life is over, and is chosen")
            if waiting and min(waiting)[0] < item[0]:  # the number of a block is its priority
                raise BrokenLeaseError(f"item {item} is chosen before {min(waiting)}")

    def redrive(self) -> None:
        """An operator sends a dead item back."""
        owner = self.some()
        if owner is None or owner.scheduler is None:
            return
        dead = [item for item, fact in self.facts.items.items() if fact.dead]
        (id_, number), was_dead = self.draw.choice(dead) if dead else (1, 0), bool(dead)
        items, scheduler = (ItemRanges(id_, (number, number + 1)),), owner.scheduler

        def settle(answer: object) -> None:
            scheduler.released(items)
            self.met["redriven"] += was_dead and answer == (OutcomeRun(ItemOutcome.RETURNED, 1),)

        scheduler.hold(items)
        owner.pending.append(Waiting(RedriveDecision(self.now().wall_ms, items), settle))

    def receive(self) -> None:
        """A grant arrives, late or never."""
        if not self.grants:
            return
        number, item, grant, asked_s, wall_ms = self.grants.pop(self.draw.randrange(len(self.grants)))
        worker = self.workers[number]
        from_s = asked_s if self.rules.lease_from_the_request else self.now_s
        if self.draw.randrange(8) == 0 or worker.item is not None:
            self.met["answer lost"] += 1
            return
        if self.rules.at_most_once:
            self.started[item] += 1
            if self.started[item] > 1:
                raise BrokenLeaseError(f"item {item} is at most once, and came twice")
            self.met["started"] += 1
            return
        if self.now_s >= from_s + LEASE_S:
            self.met["too late"] += 1
            return
        if item in self.acked:
            raise BrokenLeaseError(f"item {item} was acked, and comes again")
        if any(each.item == item and each.until_s > self.now_s for each in self.workers):
            raise BrokenLeaseError(f"item {item} is held by two workers")
        if self.rules.ordered and any(each.item and each.until_s > self.now_s for each in self.workers):
            raise BrokenLeaseError(f"item {item} and another one of its ordered key are held at once")
        fact = self.facts.items.get(item)
        if fact is not None and fact.grant == grant and fact.due_ms > wall_ms:
            raise BrokenLeaseError(f"item {item} comes before it is due")
        worker.item, worker.grant, worker.until_s = item, grant, from_s + LEASE_S
        self.met["started"] += 1

    def work(self) -> None:
        """A worker acks, gives back, extends, or is too slow."""
        worker, owner = self.draw.choice(self.workers), self.some()
        if worker.item is None:
            return
        if self.now_s >= worker.until_s and self.draw.randrange(2):
            worker.item = None
            return
        if owner is None or owner.scheduler is None:
            return
        item, scheduler, now = worker.item, owner.scheduler, self.now()
        ranges = ItemRanges(item[0], (item[1], item[1] + 1))
        leases = (LeasedItems(ranges, worker.grant),)
        kinds = ["nack", "nack", "ack"] if self.rules.attempts_max else ["ack", "ack", "nack", "extend"]
        kind, lease_s = self.draw.choice(kinds), self.draw.choice([1, LEASE_S])
        decision: AckDecision | NackDecision | ExtendDecision = AckDecision(now.wall_ms, leases)
        if kind == "nack":
            decision = NackDecision(now.wall_ms + 1_000 * self.draw.randrange(4), b"note", leases)
        elif kind == "extend":
            decision = ExtendDecision(lease_s * 1_000, leases)
        if kind != "extend":
            worker.item = None
        sent_s, grant = self.now_s, worker.grant

        def settle(answer: object) -> None:
            outcomes: Outcomes = answer  # type: ignore[assignment]
            scheduler.released([ranges], outcomes, now.steady_s)
            ((outcome, _),) = outcomes
            self.met[outcome] += 1
            if outcome is ItemOutcome.ACKED:
                self._told(item)
            if outcome is ItemOutcome.EXTENDED and (worker.item, worker.grant) == (item, grant):
                worker.until_s = max(worker.until_s, sent_s + lease_s)

        scheduler.hold([ranges])
        owner.pending.append(Waiting(decision, settle))
        if kind == "ack" and not self.rules.ack_when_it_counts:
            self._told(item)

    def _told(self, item: Item) -> None:
        """A worker learns that its ack is final: the log has it."""
        self.acked.add(item)
        if not self.facts.items[item].over:
            raise BrokenLeaseError(f"the ack of item {item} was answered, and the log does not have it")

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """All items that wait are granted by one more owner: none is lost."""
        self.paused.clear()
        while self.net:
            self.land()
        machine = QueueMachine()
        state = self.reference.snapshot()
        if state:
            machine.restore(state)
        self.now_s += 10 * LEASE_S
        scheduler = ItemScheduler(machine, self.now())
        self.now_s += LEASE_S
        ending = {
            (lease.items.block, number)
            for decision in self._ends_of(scheduler)
            for lease in decision.leases
            for number in lease.items
        }
        found = scheduler.take({TOPIC: 1_000}, Bounds(1 << 20), self.now())
        taken = {(each.block, number) for each in found for number in each}
        left = {item for item, fact in self.facts.items.items() if not fact.over}
        if self.rules.ordered:
            first = self.facts.next_ordered(machine)
            left &= ending | ({first} if first is not None and first not in ending else set())
        if taken and self.rules.life_s:
            raise BrokenLeaseError(f"items {taken} come after the end of their lives")
        if taken | ending != left:
            raise BrokenLeaseError(f"items {left ^ (taken | ending)} are lost, or come again")
        self.met["left"] += len(left)

    def _ends_of(self, scheduler: ItemScheduler) -> list[EndDecision]:
        scheduler.pass_time(self.now())
        return scheduler.ends(self.now())


def run(seed: int, rules: Rules = Rules()) -> Counter[str]:
    """Run one schedule; return what happened. Raises: BrokenLeaseError."""
    return LeaseModel(seed, rules).run()


def _items_of(decision: QueueDecision) -> Iterator[ItemRanges]:
    if isinstance(decision, GrantDecision | CancelDecision | RedriveDecision):
        yield from decision.items
    elif isinstance(decision, LeaseDecision):
        yield from (each.items for each in decision.leases)


def rules_of(seed: int) -> Rules:
    """Return all rules of the shell, and items of a kind that the seed draws."""
    kinds = (
        *(Rules(), Rules(attempts_max=2), Rules(life_s=6), Rules(at_most_once=True), Rules(ordered=True)),
        *(Rules(ordered=True, attempts_max=2), Rules(window_s=8)),
    )
    return kinds[seed % len(kinds)]
