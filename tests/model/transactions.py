"""A model of transactions in which the real machine runs: random schedules of requests, each step checked.

Several instances of two producers begin, hold blocks, commit with positions of a group, and roll back. Each request may
come late, twice or never. Transactions time out, an operator decides, and snapshots replace the machines. Some are
prepared: then a database decides, and its answer comes by the producer, by its group, or by the operator. The state log
is one list of decisions here: `tests.model.state_log` has its own schedules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import MemqError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.groups.machine import copy_of, difference
from memq.groups.machine import encode_decision as encode_group
from memq.holds.decisions import DoneDecision, HoldDecision, HoldState, Unit
from memq.holds.decisions import encode_decision as encode_hold
from memq.topic import Committed, Position, ReadPartition
from memq.transactions import machine as product
from memq.transactions.machine import (
    ANY_BLOCKS,
    AbortDecision,
    AnswerDecision,
    BeginDecision,
    CheckDecision,
    CommitTransactionDecision,
    PrepareDecision,
    PreparedTransaction,
    SettledTransaction,
    TransactionalId,
    encode_decision,
    lane_of,
    moves_of,
)

TARGETS = tuple(Target("out", "ab" * 16, number) for number in range(2))
INPUT = ReadPartition("in", "cd" * 16, 0)
GROUP = "g"
IDS = (TransactionalId("a", GROUP), TransactionalId("b", GROUP))
BLOCKS_MAX = 3  # T5, for each target
SHOP, STRANGERS = "shop", "strangers"  # producer groups
TRIES_MAX = 3
STEPS = 220


class BrokenPromiseError(AssertionError):
    """A schedule broke a promise of transactions."""


@dataclass
class Sent:
    """A transaction as its producer made it: its blocks by hold, the move of the position, and the answers."""

    blocks: dict[HoldId, Target] = field(default_factory=dict)
    move: tuple[int, int] | None = None
    member: tuple[str, int] = ("", -1)
    decided: bool = False  # its producer has sent its end
    answered: set[bool] = field(default_factory=set)
    in_database: bool | None = None  # whether the database has committed it, since it is prepared


@dataclass
class Instance:
    """An instance of a producer; `number` is its present transaction."""

    id: TransactionalId
    token: int
    instance: int = 0
    number: int = 0
    fenced: bool = False
    sent: dict[int, Sent] = field(default_factory=dict)


class TransactionModel:
    """One schedule. `met` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.met: Counter[str] = Counter()
        self.machines = ServiceMachines()
        self.instances: list[Instance] = []
        self.requests: list[Callable[[], None]] = []  # on their way
        self.released: dict[HoldId, tuple[Target, int]] = {}
        self.open_units: dict[Target, int] = dict.fromkeys(TARGETS, 0)
        self.now_ms = 1_000
        self.ids = 0
        self.steps: list[str] = []
        self.position: int | None = None
        self.asked: Counter[str] = Counter()  # questions about each prepared lane

    def run(self) -> None:
        """Run the schedule. Raises: BrokenPromiseError."""
        self._join("m1")
        for _ in range(STEPS):
            self.now_ms += self.draw.randrange(3)
            self.draw.choices(
                [
                    self._begin,
                    self._send,
                    self._end,
                    self._prepare,
                    self._ask,
                    self._answer,
                    self._deliver,
                    self._time_out,
                    self._operator,
                    self._rebalance,
                    self._done,
                    self._snapshot,
                ],
                [3, 14, 5, 7, 8, 4, 28, 2, 1, 1, 4, 2],
            )[0]()
            self._check()
        while self.requests:
            self._deliver()
            self._check()
        self._check_end()

    # ---- producers -------------------------------------------------------------------------------

    def _begin(self) -> None:
        made = Instance(self.draw.choice(IDS), self._number())
        self.instances.append(made)
        self._send_later(lambda: self._begun(made))

    def _begun(self, made: Instance) -> None:
        answer = self._apply(BeginDecision(made.id, made.token, 60_000, self.now_ms, self.now_ms - 10_000))
        if isinstance(answer, MemqError):
            self.met["begin refused"] += 1
            return
        assert isinstance(answer, int)
        if made.instance not in (0, answer):
            raise BrokenPromiseError(f"an instance that begins again got number {answer}")
        self.met["begins again" if made.instance else "begins"] += 1
        if not made.instance:
            for other in self.instances:
                other.fenced |= other.id == made.id and other.instance > 0
        elif made.fenced:
            raise BrokenPromiseError("a former instance begins again by a late request")
        made.instance = answer

    def _send(self) -> None:
        made = self._live()
        if made is None:
            return
        if not made.number or made.sent[made.number].decided:
            made.number += 1
            made.sent[made.number] = Sent()
        number, transaction = made.number, made.sent[made.number]
        target = self.draw.choice(TARGETS)
        producer = 1_000 * made.instance + 10 * number + target.partition
        first = sum(each == target for each in transaction.blocks.values())
        hold = HoldId(producer, first)
        transaction.blocks[hold] = target
        lane = HeldLane(target, lane_of(made.instance, number), (HeldBlock(hold, first + 1, 0, 0, 10),))
        decision = HoldDecision(f"key{self._number()}", self.now_ms - 10_000, (lane,))

        def held() -> None:
            (state,) = self.machines.holds.apply(encode_hold(decision))  # type: ignore[misc]
            self.met[f"block {HoldState(state).name.lower()}"] += 1  # type: ignore[has-type]

        self._send_later(held)

    def _end(self) -> None:
        made = self._live()
        if made is None or not made.number or made.sent[made.number].decided:
            return
        number, transaction = made.number, made.sent[made.number]
        transaction.decided = True
        if self.draw.random() < 0.3:
            self._send_later(lambda: self._abort(made, number))
            return
        if self.draw.random() < 0.6:
            before = self.position or 0
            transaction.move = before, before + self.draw.randrange(1, 4)
            members = list(self.machines.groups.membership(GROUP).members)
            transaction.member = (
                self.draw.choice([*members, "stranger"]),
                self.machines.groups.membership(GROUP).generation,
            )
        self._send_later(lambda: self._commit(made, number))

    def _prepare(self) -> None:
        made = self._live()
        if made is None or not made.number or made.sent[made.number].decided:
            return
        number, transaction = made.number, made.sent[made.number]
        transaction.decided = True
        in_database, ends = self.draw.random() < 0.6, self.draw.random() < 0.5
        blocks = len(transaction.blocks)
        decision = PrepareDecision(made.id, made.instance, number, self.now_ms, blocks, SHOP, b"note", 1)

        def prepared() -> None:
            answer = self._apply(decision)
            if not isinstance(answer, PreparedTransaction):
                self.met["not prepared"] += 1
                return
            self.met["prepared"] += 1
            if transaction.in_database is None:
                transaction.in_database = in_database
                if ends:
                    self._send_later(lambda: (self._commit if in_database else self._abort)(made, number))

        self._send_later(prepared)

    def _commit(self, made: Instance, number: int) -> None:
        transaction = made.sent[number]
        moves = None
        if transaction.move is not None:
            before, after = transaction.move
            moves = moves_of(*transaction.member, {INPUT: _at(before)} if before else {}, {INPUT: _at(after)})
        blocks = len(transaction.blocks)
        self._told(made, number, CommitTransactionDecision(made.id, made.instance, number, self.now_ms, blocks, moves))

    def _abort(self, made: Instance, number: int) -> None:
        self._told(made, number, AbortDecision(made.id, made.instance, number, self.now_ms, "was left"))

    def _told(
        self, made: Instance, number: int, decision: CommitTransactionDecision | AbortDecision | AnswerDecision
    ) -> None:
        transaction, seen, before = made.sent[number], dict(self.released), self.position
        answer = self._apply(decision)
        self._note_position()
        if not isinstance(answer, SettledTransaction):
            self.met["refused"] += 1
            if self.released != seen or before != self.position:
                raise BrokenPromiseError(f"transaction {number} was refused, and changed something")
            return
        self.met["answer: committed" if answer.committed else "answer: rolled back"] += 1
        transaction.answered.add(answer.committed)
        if len(transaction.answered) == 2:
            raise BrokenPromiseError(f"transaction {number} was answered as committed and as rolled back")
        if self.released.keys() - seen.keys() and made.fenced and transaction.in_database is None:
            raise BrokenPromiseError("a fenced instance has committed")
        if before != self.position and (not answer.committed or (before or 0, self.position) != transaction.move):
            raise BrokenPromiseError(f"the position moved from {before} to {self.position} without its transaction")
        if before != self.position and transaction.member[0] == "stranger":
            raise BrokenPromiseError("one that is no member has moved a position")
        if self.released != seen and transaction.move and self.position == before:
            raise BrokenPromiseError("records were released without their position")

    # ---- check-back ------------------------------------------------------------------------------

    def _ask(self) -> None:
        """The owner asks the group, or parks."""
        found = [each for each in self.machines.transactions.prepared.values() if not each.parked]
        if not found:
            return
        each = self.draw.choice(found)
        park = each.tries >= TRIES_MAX
        lane, tries = each.lane, each.tries + (not park)
        if self._apply(CheckDecision(each.instance, each.number, tries, park)) is not True:
            raise BrokenPromiseError(f"question {tries} about {lane} does not count")
        self.met["parked" if park else "asked"] += 1
        self.asked[lane] += not park
        if self.asked[lane] > TRIES_MAX:
            raise BrokenPromiseError(f"the group is asked {self.asked[lane]} times about {lane}")

    def _answer(self) -> None:
        """A member of the group, or a stranger, answers a question about what is prepared, or was."""
        named = [
            (made, number, transaction)
            for made in self.instances
            for number, transaction in made.sent.items()
            if transaction.in_database is not None
        ][-8:]
        if not named:
            return
        made, number, transaction = self.draw.choice(named)
        at = made.id, made.instance, number, self.now_ms
        if self.draw.random() < 0.2:
            wrong = AnswerDecision(*at, STRANGERS, not transaction.in_database)
            self._send_later(lambda: self._told(made, number, wrong))
            return
        self.met["answers"] += 1
        right = AnswerDecision(*at, SHOP, transaction.in_database is True)
        self._send_later(lambda: self._told(made, number, right))

    # ---- owner and operator ----------------------------------------------------------------------

    def _time_out(self) -> None:
        for id_, known in self.machines.transactions.ids.items():
            if known.open:
                late = AbortDecision(id_, known.instance, known.open, self.now_ms, "took too long", expired=True)
                self._send_later(partial(self._by_others, late))
                self.met["times out"] += 1
                return

    def _operator(self) -> None:
        for id_, known in self.machines.transactions.ids.items():
            made = next((each for each in self.instances if each.instance == known.instance), None)
            transaction = made.sent.get(known.open) if made is not None else None
            if transaction is not None and len(
                self.machines.holds.lanes.get(lane_of(known.instance, known.open), ())
            ) == len(transaction.blocks):
                transaction.decided = True
                self._by_others(CommitTransactionDecision(id_, known.instance, known.open, self.now_ms, ANY_BLOCKS))
                self.met["operator commits"] += 1
                return

        for each in self.machines.transactions.prepared.values():
            if self.draw.random() < 0.5:
                self._decide_as_operator(each)
                return

    def _decide_as_operator(self, each: PreparedTransaction) -> None:
        """An operator has looked into the database."""
        made = next(made for made in self.instances if made.instance == each.instance)
        if made.sent[each.number].in_database:
            decision: CommitTransactionDecision | AbortDecision = CommitTransactionDecision(
                each.id, each.instance, each.number, self.now_ms, ANY_BLOCKS
            )
        else:
            decision = AbortDecision(each.id, each.instance, each.number, self.now_ms, "by an operator")
        self._by_others(decision)
        self.met["operator decides"] += 1

    def _by_others(self, decision: CommitTransactionDecision | AbortDecision) -> None:
        before = self.position
        self._apply(decision)
        self._note_position()
        if before != self.position:
            raise BrokenPromiseError("a position moved without its producer")

    def _rebalance(self) -> None:
        self._join(f"m{self._number()}")

    def _join(self, member: str) -> None:
        groups = self.machines.groups
        before = groups.membership(GROUP)
        after = copy_of(before)
        for former in list(after.members):
            after.leave(former, 0)
        after.join(member, [INPUT], 10_000, 0)
        groups.apply(encode_group(difference(GROUP, before, after)))

    def _done(self) -> None:
        holds = self.machines.holds
        for target, units in list(holds.units.items()):
            holds.apply(encode_hold(DoneDecision(self.now_ms, ((target, min(units)),))))
            self.met["unit done"] += 1

    def _snapshot(self) -> None:
        made = ServiceMachines()
        for name, machine in self.machines.by_name().items():
            made.by_name()[name].restore(machine.snapshot())
        self.machines = made
        self.met["snapshot"] += 1

    # ---- inside ----------------------------------------------------------------------------------

    def _live(self) -> Instance | None:
        """Return an instance that was answered; a fenced one may not know that."""
        begun = [each for each in self.instances if each.instance][-4:]
        return self.draw.choice(begun) if begun else None

    def _send_later(self, request: Callable[[], None]) -> None:
        for _ in range(self.draw.choice([0, 1, 1, 1, 1, 1, 1, 2, 3])):
            self.requests.append(request)

    def _deliver(self) -> None:
        """Deliver a request; mostly the oldest."""
        if self.requests:
            at = 0 if self.draw.random() < 0.75 else self.draw.randrange(len(self.requests))
            self.requests.pop(at)()

    def _apply(self, decision: product.TransactionDecision) -> object:
        answer = self.machines.transactions.apply(encode_decision(decision))
        self.steps.append(f"{decision} -> {answer!r}")
        self._note_units()
        return answer

    def _note_units(self) -> None:
        for target, units in self.machines.holds.units.items():
            for number in sorted(each for each in units if each > self.open_units[target]):
                if number != self.open_units[target] + 1:
                    raise BrokenPromiseError(f"unit {number} follows on {self.open_units[target]}")
                self.open_units[target] = number
                self._note_unit(units[number].unit, [hold.block.id for hold in units[number].holds])

    def _note_unit(self, unit: Unit, holds: list[HoldId]) -> None:
        if len(holds) > BLOCKS_MAX:
            raise BrokenPromiseError(f"a unit has {len(holds)} blocks")
        for hold in holds:
            if hold in self.released:
                raise BrokenPromiseError(f"{hold} was released twice")
            self.released[hold] = unit.target, unit.r

    def _note_position(self) -> None:
        stored = self.machines.groups.groups.get(GROUP)
        found = stored.positions.get(INPUT) if stored is not None else None
        self.position = found.position.pointer_offset if found is not None else None

    def _number(self) -> int:
        self.ids += 1
        return self.ids

    # ---- promises --------------------------------------------------------------------------------

    def _check(self) -> None:
        """All or nothing of each transaction, in one unit of each target; nothing of one that was rolled back."""
        for made in self.instances:
            for number, transaction in made.sent.items():
                shown = {hold: self.released[hold] for hold in transaction.blocks if hold in self.released}
                if shown and (len(shown) < len(transaction.blocks) or not transaction.decided):
                    raise BrokenPromiseError(f"transaction {number} is visible in part: {shown}")
                if len(set(shown.values())) > len({target for target, _ in shown.values()}):
                    raise BrokenPromiseError(f"transaction {number} lies in two units of a target")
                if shown and False in transaction.answered:
                    raise BrokenPromiseError(f"transaction {number} was answered as rolled back, and is visible")
                if shown and transaction.in_database is False:
                    raise BrokenPromiseError(f"transaction {number} is visible, and its database rolled it back")
                lane = lane_of(made.instance, number)
                undecided = lane in self.machines.transactions.prepared
                if transaction.in_database and transaction.blocks and not (shown or undecided):
                    raise BrokenPromiseError(f"transaction {number} is lost, and its database has committed it")
                if not shown and transaction.blocks and True in transaction.answered:
                    raise BrokenPromiseError(f"transaction {number} was answered as committed, and is not visible")
        transactions = self.machines.transactions
        present = {lane_of(each.instance, each.open) for each in transactions.ids.values()}
        if extra := self.machines.holds.lanes.keys() - present - transactions.prepared.keys():
            raise BrokenPromiseError(f"blocks are held for ever: {extra}")

    def _check_end(self) -> None:
        """After a time-out of all, and a decision about what is prepared, nothing is held."""
        for _ in range(20):  # some time-outs are lost
            self._time_out()
            while self.requests:
                self._deliver()
        for each in list(self.machines.transactions.prepared.values()):
            self._decide_as_operator(each)
            self._check()
        if self.machines.holds.open:
            raise BrokenPromiseError(f"{len(self.machines.holds.open)} blocks are held after all time-outs")


def _at(offset: int) -> Committed:
    return Committed(Position(0, offset))


def run(seed: int) -> TransactionModel:
    """Run one schedule. Raises: BrokenPromiseError."""
    model = TransactionModel(seed)
    before = product.TARGET_BLOCKS_MAX
    product.TARGET_BLOCKS_MAX = BLOCKS_MAX
    try:
        model.run()
    finally:
        product.TARGET_BLOCKS_MAX = before
    return model
