"""The machine of transactions: instances, one answer for each number, all or nothing, positions with the decision."""

from __future__ import annotations

import pytest

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import (
    CorruptDataError,
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    ProducerFencedError,
    TooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
    UnsupportedFormatError,
)
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.groups.group import Group
from memq.groups.machine import CommitDecision, StoredGroup, pack_positions
from memq.groups.machine import encode_decision as encode_group
from memq.holds.decisions import HoldDecision, HoldState
from memq.holds.decisions import encode_decision as encode_hold
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.topic import Committed, Position, ReadPartition
from memq.transactions.machine import (
    ANY_BLOCKS,
    FORMER_INSTANCES_MAX,
    AbortDecision,
    BeginDecision,
    CommitTransactionDecision,
    PositionMoves,
    SettledTransaction,
    TransactionalId,
    TransactionMachine,
    encode_decision,
    lane_of,
    moves_of,
)

ID = TransactionalId("pay", "g")
CLICKS, ORDERS = Target("clicks", "ab" * 16, 0), Target("orders", "cd" * 16, 3)
INPUT = ReadPartition("in", "ef" * 16, 0)
DAY_MS = 86_400_000


class Log:
    """The machines of one log, and decisions of one producer."""

    def __init__(self) -> None:
        self.machines = ServiceMachines()
        self.now_ms = 1_000
        self.holds = 0

    def begin(self, token: int = 1, id_: TransactionalId = ID) -> object:
        return self.apply(BeginDecision(id_, token, 60_000, self.now_ms, self.now_ms - DAY_MS))

    def hold(self, instance: int, number: int, target: Target = CLICKS, size: int = 10) -> HoldState:
        self.holds += 1
        block = HeldBlock(HoldId(self.holds, 0), 1, 0, 0, size)
        lane = HeldLane(target, lane_of(instance, number), (block,))
        (state,) = self.machines.holds.apply(encode_hold(HoldDecision(f"k{self.holds}", 0, (lane,))))  # type: ignore[misc]
        return state  # type: ignore[has-type, no-any-return]

    def commit(self, instance: int, number: int, blocks: int, moves: PositionMoves | None = None) -> object:
        return self.apply(CommitTransactionDecision(ID, instance, number, self.now_ms, blocks, moves))

    def abort(self, instance: int, number: int) -> object:
        return self.apply(AbortDecision(ID, instance, number, self.now_ms, "was left"))

    def apply(self, decision: BeginDecision | CommitTransactionDecision | AbortDecision) -> object:
        return self.machines.transactions.apply(encode_decision(decision))

    def position(self) -> int | None:
        stored = self.machines.groups.groups.get("g")
        found = stored.positions.get(INPUT) if stored is not None else None
        return found.position.pointer_offset if found is not None else None

    def units(self) -> dict[Target, list[int]]:
        units = self.machines.holds.units
        return {target: [len(each.holds) for each in found.values()] for target, found in units.items()}


def begun() -> tuple[Log, int]:
    log = Log()
    instance = log.begin()
    assert isinstance(instance, int)
    return log, instance


def at(offset: int) -> dict[ReadPartition, Committed]:
    return {INPUT: Committed(Position(0, offset))}


def error_of(answer: object) -> MemqError:
    assert isinstance(answer, SettledTransaction)
    assert not answer.committed
    return answer.error


def test_a_commit_releases_one_unit_for_each_target_and_is_answered_again() -> None:
    log, instance = begun()
    for target in (CLICKS, ORDERS, CLICKS):
        assert log.hold(instance, 1, target) is HoldState.HELD
    assert log.units() == {}
    for _ in range(2):
        assert log.commit(instance, 1, 3) == SettledTransaction(1, True)
        assert log.units() == {CLICKS: [2], ORDERS: [1]}
    assert log.abort(instance, 1) == SettledTransaction(1, True)  # the first decision that counts wins (T4)
    assert log.hold(instance, 1) is HoldState.REFUSED
    assert log.hold(instance, 2) is HoldState.HELD


def test_an_abort_drops_all_and_a_later_commit_gets_its_answer() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    for answer in (log.abort(instance, 1), log.commit(instance, 1, 1)):
        error = error_of(answer)
        assert isinstance(error, TransactionAbortedError)
        assert str(error) == "transaction 1 of producer 'pay' was left"
    assert log.machines.holds.open == {}
    assert log.hold(instance, 1) is HoldState.REFUSED
    assert isinstance(log.machines.transactions.refusal_of(ID, instance, 1), TransactionAbortedError)


def test_a_new_instance_fences_the_former_one_and_drops_what_it_has_open() -> None:
    log, first = begun()
    assert log.begin() == first
    log.hold(first, 1)
    assert log.commit(first, 1, 1) == SettledTransaction(1, True)
    log.hold(first, 2)
    second = log.begin(token=2)
    assert isinstance(second, int)
    assert second > first
    assert log.machines.holds.open == {}
    assert log.hold(first, 3) is HoldState.REFUSED
    assert isinstance(log.machines.transactions.refusal_of(ID, first, 3), ProducerFencedError)
    assert isinstance(log.begin(token=1), ProducerFencedError)
    assert isinstance(log.commit(first, 3, 0), ProducerFencedError)
    assert isinstance(error_of(log.commit(first, 2, 1)), ProducerFencedError)
    assert log.hold(second, 1) is HoldState.HELD


def test_the_last_commit_of_a_former_instance_is_answered_as_before() -> None:
    log, first = begun()
    log.hold(first, 1)
    log.commit(first, 1, 1)
    log.begin(token=2)
    assert log.commit(first, 1, 1) == SettledTransaction(1, True)


def test_a_transaction_is_refused_while_an_earlier_one_is_open() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    assert log.hold(instance, 2) is HoldState.REFUSED
    assert str(log.machines.transactions.refusal_of(ID, instance, 2)) == (
        "transaction 1 of producer 'pay' is open: end it first"
    )


def test_a_commit_without_all_blocks_or_with_too_many_rolls_back_and_burns_the_number() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    for _ in range(2):
        assert str(error_of(log.commit(instance, 1, 2))) == (
            "transaction 1 of producer 'pay' has 1 of its 2 blocks of records"
        )
    for _ in range(2):
        log.hold(instance, 2, size=TRANSACTION_TARGET_BYTES_MAX // 2 + 1)
    assert isinstance(error_of(log.commit(instance, 2, 2)), TooLargeError)
    assert log.machines.holds.open == {}
    assert log.units() == {}
    assert isinstance(log.commit(instance, 1, 1), InvalidRequestError)  # a lower number is not answered at all


def test_positions_move_with_the_decision_and_from_the_expected_ones_alone() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    assert log.commit(instance, 1, 1, moves_of("", -1, {}, at(5))) == SettledTransaction(1, True)
    assert log.position() == 5
    for number, before in enumerate(({}, at(4), at(6)), 2):
        log.hold(instance, number)
        error = error_of(log.commit(instance, number, 1, moves_of("", -1, before, at(7))))
        assert isinstance(error, TransactionAbortedError)
    assert isinstance(error_of(log.commit(instance, 5, 0, moves_of("m", 3, at(5), at(7)))), GenerationFencedError)
    assert isinstance(error_of(log.commit(instance, 6, 0, moves_of("", -1, at(5), at(4)))), TransactionAbortedError)
    assert (log.position(), log.units()) == (5, {CLICKS: [1]})
    outside = CommitDecision("g", "", -1, 0, pack_positions(at(9)))
    assert log.machines.groups.apply(encode_group(outside)) is None
    assert log.commit(instance, 7, 0, moves_of("", -1, at(9), at(11))) == SettledTransaction(7, True)
    assert log.position() == 11


def test_a_commit_of_an_operator_moves_no_positions_and_a_producer_with_some_learns_it() -> None:
    log, instance = begun()
    moves = moves_of("", -1, {}, at(5))
    log.hold(instance, 1)
    by_operator = SettledTransaction(1, True, moved=False)
    assert log.commit(instance, 1, ANY_BLOCKS) == by_operator
    for _ in range(2):
        error = log.commit(instance, 1, 1, moves)
        assert isinstance(error, TransactionCommittedError)
        assert "no position of group 'g' has moved" in str(error)
        assert (log.commit(instance, 1, 1), log.abort(instance, 1)) == (by_operator, by_operator)
        log.begin(token=2)  # as a former instance, too
    assert (log.position(), log.units()) == (None, {CLICKS: [1]})
    log, instance = begun()
    for _ in range(2):
        assert log.commit(instance, 1, 0, moves) == SettledTransaction(1, True), "again, as before"
    assert log.position() == 5


def test_positions_that_are_not_possible_roll_a_transaction_back() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    membership = Group()
    membership.join("m", (INPUT,), 10_000, 0)
    log.machines.groups.groups["g"] = StoredGroup(membership, {})
    error = error_of(log.commit(instance, 1, 1, moves_of("", -1, {}, at(5))))  # from outside of its members
    assert isinstance(error, TransactionAbortedError)
    assert "positions of group 'g' can't move" in str(error)
    assert (log.position(), log.units()) == (None, {})


def test_the_end_of_an_instance_before_the_known_ones_is_unknown() -> None:
    """Its commit may have counted, and its producer must not send the records again."""
    log, instance = begun()
    log.hold(instance, 1)
    assert log.commit(instance, 1, 1) == SettledTransaction(1, True)
    for token in range(FORMER_INSTANCES_MAX):
        log.begin(token + 2)
    assert log.commit(instance, 1, 1) == SettledTransaction(1, True)
    assert isinstance(log.commit(instance, 2, 0), ProducerFencedError), "it is known, and has no such transaction"
    log.begin(99)
    assert isinstance(log.commit(instance, 1, 1), OutcomeUnknownError)
    assert isinstance(log.commit(10**15, 1, 1), ProducerFencedError)  # no instance that this log gave


def test_an_id_that_is_not_used_is_forgotten_unless_it_is_open() -> None:
    log, instance = begun()
    other = TransactionalId("other", "")
    log.begin(id_=other)
    log.now_ms += 1
    log.hold(instance, 1)
    log.now_ms += DAY_MS
    log.begin(id_=TransactionalId("third", ""))
    assert [each.name for each in log.machines.transactions.ids] == ["pay", "other", "third"]
    log.abort(instance, 1)
    log.begin(id_=TransactionalId("fourth", ""))
    assert [each.name for each in log.machines.transactions.ids] == ["third", "pay", "fourth"]


def test_an_instance_gets_a_number_above_all_before_it() -> None:
    log = Log()
    log.now_ms = 0
    assert [log.begin(token=token) for token in (1, 2)] == [1, 2]
    log.now_ms = 50
    assert [log.begin(token=token) for token in (3, 4)] == [50, 51]
    log.now_ms = 20  # the clock went back
    assert log.begin(token=5) == 52


def test_an_id_is_used_at_the_latest_time_of_its_decisions() -> None:
    log, instance = begun()
    log.now_ms += DAY_MS + 5
    log.abort(instance, 1)
    log.now_ms -= DAY_MS  # the clock of another owner
    log.abort(instance, 2)
    log.now_ms += 2 * DAY_MS
    log.begin(id_=TransactionalId("second", ""))
    assert [each.name for each in log.machines.transactions.ids] == ["pay", "second"], "it was used a day ago"
    log.now_ms += 1
    log.begin(id_=TransactionalId("third", ""))
    assert [each.name for each in log.machines.transactions.ids] == ["second", "third"]


def test_a_transaction_that_has_ended_takes_no_block() -> None:
    log, instance = begun()
    for number in (1, 2):
        log.hold(instance, number)
        log.commit(instance, number, 1)
    for number in (1, 2):
        assert str(log.machines.transactions.refusal_of(ID, instance, number)) == (
            f"transaction {number} of producer 'pay' has ended"
        )
    log.abort(instance, 4)
    assert str(log.machines.transactions.refusal_of(ID, instance, 3)) == "transaction 3 of producer 'pay' has ended"


def test_a_transaction_takes_as_many_bytes_for_a_target_as_a_batch() -> None:
    log, instance = begun()
    for _ in range(2):
        log.hold(instance, 1, size=TRANSACTION_TARGET_BYTES_MAX // 2)
    assert log.commit(instance, 1, 2) == SettledTransaction(1, True)


def test_positions_may_stay_and_those_of_a_group_with_members_can_not_move_from_outside() -> None:
    log, instance = begun()
    assert log.commit(instance, 1, 0, moves_of("", -1, {}, at(5))) == SettledTransaction(1, True)
    assert log.commit(instance, 2, 0, moves_of("", -1, at(5), at(5))) == SettledTransaction(2, True)
    membership = log.machines.groups.groups["g"].membership
    membership.join("m", [INPUT], 60_000, 0)
    error = error_of(log.commit(instance, 3, 0, moves_of("", -1, at(5), at(6))))
    assert isinstance(error, InvalidRequestError)
    assert log.position() == 5
    moves = moves_of("m", membership.generation, at(5), at(6))
    assert log.commit(instance, 4, 0, moves) == SettledTransaction(4, True)
    assert log.position() == 6


def test_a_snapshot_continues_as_the_machines_would() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    made = ServiceMachines()
    for name, machine in log.machines.by_name().items():
        made.by_name()[name].restore(machine.snapshot())
        assert made.by_name()[name].snapshot() == machine.snapshot()
    log.machines = made
    assert log.hold(instance, 2) is HoldState.REFUSED
    assert log.commit(instance, 1, 1) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [1]}
    with pytest.raises(CorruptDataError):
        made.transactions.restore(b"\x93")
    newer = log.machines.transactions.snapshot().replace(b"version\x01", b"version\x02")
    with pytest.raises(UnsupportedFormatError):
        TransactionMachine(made.groups, made.holds).restore(newer)
    with pytest.raises(CorruptDataError):
        made.transactions.apply(b"\xc1")
