"""A model of pop groups: that of leases, in which items come from a topic behind the state of the group (Q1).

The topic is a list of blocks, some of which come again. Each owner reads it from the position that its state has. A
read may be refused before it is proposed, or get no answer in time: then the reader begins again at its state. What has
ended is forgotten at once, so that only position and look-back keep acked items away.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.decisions import EndPopDecision, ItemTerms, LeasedItems, QueueDecision, ranges_of
from memq.queues.machine import QueueMachine
from memq.queues.pop.groups import BeginPopDecision, PopPlace, PopPosition, ReadPopDecision
from tests.model.lease_facts import Fact, LeaseFacts
from tests.model.leases import BLOCKS, ITEMS, LEASE_S, TOPIC, BrokenLeaseError, LeaseModel, Owner, Rules, Waiting

TOPIC_ID = "0a" * 16
POINTERS = 8


@dataclass(frozen=True, slots=True)
class PopRules(Rules):
    """Rules of the reader, which may be left out."""

    look_back: bool = True  # Q1: it knows the blocks before its position
    again_from_the_state: bool = True  # Q1: after an error it forgets what it has judged


@dataclass(slots=True)
class Reader:
    """The reader of one owner."""

    is_open: bool = False
    next: int = 0
    seen: set[int] = field(default_factory=set)
    waits: int = 0  # number of the read that has no answer yet
    reads: int = 0


class PopFacts(LeaseFacts):
    """The rules of leases, and those of a group: one position, and blocks that come once."""

    position: int | None = None

    def apply(self, decision: QueueDecision) -> None:
        """Apply the rules to one decision that counts."""
        match decision:
            case BeginPopDecision():
                self.position = 0 if self.position is None else self.position
            case ReadPopDecision():
                if decision.begin.offset == self.position:
                    self.position = decision.end.offset
                    for lane in decision.lanes:
                        for block in lane.blocks:
                            self._come(block)
            case EndPopDecision():
                for lease in decision.leases:
                    for item in self.known([lease.items]):
                        fact = self.items[item]
                        if fact.grant == lease.grant and not fact.over:
                            fact.over, fact.leased = True, False
            case _:
                super().apply(decision)

    def _come(self, block: HeldBlock) -> None:
        for number in range(block.next):
            self.items.setdefault((block.id.producer, number), Fact(due_ms=block.due_ms))

    def difference(self, machine: QueueMachine) -> str:
        """Return how a machine differs from the facts; empty if it does not."""
        group = machine.pops.groups.get(TOPIC)
        found = group.positions[0].offset if group is not None else None
        wrong = f"the position is {found}, the rules say {self.position}" if found != self.position else ""
        return wrong or super().difference(machine)


class PopModel(LeaseModel):
    """One schedule of a pop group."""

    arrivals = 24

    def __init__(self, seed: int, rules: PopRules = PopRules()) -> None:
        super().__init__(seed, rules)
        self.facts: PopFacts = PopFacts(at_most_once=False, attempts_max=0, ordered=False)
        self.reader_rules = rules
        self.topic: list[int] = []
        self.readers: dict[int, Reader] = {}  # by epoch

    def enqueue(self) -> None:
        """The topic gets a block, retention takes items, or an owner reads."""
        match self.draw.randrange(8):
            case 0 | 1:
                self._produce()
            case 2:
                self._retain()
            case _:
                self._read_topic()

    def _produce(self) -> None:
        fresh = [id_ for id_ in range(1, BLOCKS + 1) if id_ not in self.topic]
        if len(self.topic) < POINTERS:
            copies = self.topic if self.topic and self.draw.randrange(2) else fresh
            self.topic.append(self.draw.choice(copies or self.topic))

    def _retain(self) -> None:
        """An owner finds that retention took a block, and ends the items that no worker has."""
        owner = self.some()
        if owner is None or owner.scheduler is None or not owner.machine.blocks or self.draw.randrange(4):
            return
        scheduler, block = owner.scheduler, self.draw.choice(list(owner.machine.blocks.values()))
        leases = tuple(
            LeasedItems(ranges_of(block.number, range(begin, end)), status.grant)
            for begin, end, status, left_s in scheduler.seen(block, self.now())
            if not status.state.is_over and not left_s
        )
        items = [each.items for each in leases]

        def settle(answer: object) -> None:
            scheduler.released(items)
            self.met["taken"] += len(items)

        scheduler.hold(items)
        owner.pending.append(Waiting(EndPopDecision(self.now().wall_ms, False, leases), settle))

    def _read_topic(self) -> None:
        owner = self.some()
        if owner is None:
            return
        group = owner.machine.pops.groups.get(TOPIC)
        if group is None:
            begin = BeginPopDecision(TOPIC, TOPIC_ID, LEASE_S * 1_000, 0, (PopPosition(0, 0),))
            owner.pending.append(Waiting(begin, lambda _: None))
            return
        reader = self.readers.setdefault(owner.epoch, Reader())
        if reader.waits:
            if self.draw.randrange(4):
                return
            self._fail(reader, "gave up")
        if not reader.is_open:
            reader.next = group.positions[0].offset
            reader.seen = set(self.topic[: reader.next]) if self.reader_rules.look_back else set()
            reader.is_open = True
        while reader.next < len(self.topic) and self.topic[reader.next] in reader.seen:
            self.met["copy"] += 1
            reader.next += 1
        if reader.next < len(self.topic):
            self._propose(owner, reader, group.positions[0], group.life)

    def _propose(self, owner: Owner, reader: Reader, begin: PopPosition, life: int) -> None:
        id_, at = self.topic[reader.next], reader.next
        reader.seen.add(id_)
        reader.next = at + 1
        if not self.draw.randrange(6):
            self._fail(reader, "throttled")
            return
        now_ms = self.now().wall_ms
        lane = ItemTerms(id_, LEASE_S * 1_000, 0, 0).lane()
        block = HeldBlock(HoldId(id_, 0), ITEMS, now_ms, 0, 10)
        lanes = (HeldLane(Target(TOPIC, TOPIC_ID, 0), lane, (block,)),)
        place = str(PopPlace(life, 0, at, 1))
        decision = ReadPopDecision(TOPIC, life, now_ms + 1, begin, PopPosition(0, at + 1), place, lanes)
        reader.reads += 1
        number = reader.waits = reader.reads

        def settle(answer: object) -> None:
            reader.waits = 0 if reader.waits == number else reader.waits
            if answer is None:
                self.met["refused"] += 1
                reader.is_open = False
                return
            assert owner.scheduler is not None
            self.met["taken in"] += 1
            owner.scheduler.enqueued(id_, self.now())

        owner.pending.append(Waiting(decision, settle))

    def _fail(self, reader: Reader, why: str) -> None:
        self.met[why] += 1
        reader.waits = 0
        if self.reader_rules.again_from_the_state:
            reader.is_open = False

    def redrive(self) -> None:
        """No item is dead."""

    def drain(self) -> None:
        super().drain()
        passed = set(self.topic[: self.facts.position or 0]) - {id_ for id_, _ in self.facts.items}
        if passed:
            raise BrokenLeaseError(f"blocks {passed} lie before the position, and never came")


def run(seed: int, rules: PopRules = PopRules()) -> Counter[str]:
    """Run one schedule; return what happened. Raises: BrokenLeaseError."""
    return PopModel(seed, rules).run()
