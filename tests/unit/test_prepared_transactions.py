"""Prepared transactions in the machine: nothing but a decision ends them, and the first one has won (T4)."""

from __future__ import annotations

import msgspec
import pytest

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import (
    InvalidRequestError,
    NotFoundError,
    ProducerFencedError,
    TooLargeError,
    TransactionAbortedError,
)
from memq.holds.decisions import HoldState
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.transactions.machine import (
    ENDED_PREPARED_MAX,
    AbortDecision,
    AnswerDecision,
    CheckDecision,
    PrepareDecision,
    PreparedTransaction,
    SettledTransaction,
    encode_decision,
    lane_of,
    moves_of,
)
from tests.unit.test_transaction_machine import CLICKS, DAY_MS, ID, ORDERS, Log, at, begun, error_of


def prepare(log: Log, instance: int, number: int, blocks: int) -> object:
    decision = PrepareDecision(ID, instance, number, log.now_ms, blocks, "shop", b"order 7", 900)
    return log.machines.transactions.apply(encode_decision(decision))


def answer(log: Log, instance: int, number: int, *, commit: bool, group: str = "shop") -> object:
    decision = AnswerDecision(ID, instance, number, log.now_ms, group, commit)
    return log.machines.transactions.apply(encode_decision(decision))


def check(log: Log, instance: int, number: int, tries: int, *, parked: bool = False) -> object:
    return log.machines.transactions.apply(encode_decision(CheckDecision(instance, number, tries, parked)))


def prepared(blocks: int = 1) -> tuple[Log, int]:
    """Return a log whose transaction 1 is prepared."""
    log, instance = begun()
    for _ in range(blocks):
        log.hold(instance, 1)
    assert isinstance(prepare(log, instance, 1, blocks), PreparedTransaction)
    return log, instance


def test_a_prepared_transaction_is_committed_by_its_producer_and_answered_again() -> None:
    log, instance = begun()
    for target in (CLICKS, ORDERS, CLICKS):
        log.hold(instance, 1, target)
    for _ in range(2):
        assert prepare(log, instance, 1, 3) == PreparedTransaction(ID, instance, 1, 3, 60_000, "shop", b"order 7", 900)
    assert log.units() == {}
    assert log.hold(instance, 1) is HoldState.REFUSED
    assert str(log.machines.transactions.refusal_of(ID, instance, 1)) == (
        "transaction 1 of producer 'pay' is prepared: it takes no more records"
    )
    for _ in range(2):
        assert log.commit(instance, 1, 3) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [2], ORDERS: [1]}
    for late in (log.abort(instance, 1), prepare(log, instance, 1, 3), answer(log, instance, 1, commit=False)):
        assert late == SettledTransaction(1, True), "the first decision has won"
    assert log.units() == {CLICKS: [2], ORDERS: [1]}
    assert log.hold(instance, 1) is HoldState.REFUSED


def test_a_transaction_whose_commit_would_be_refused_is_not_prepared() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    for _ in range(2):
        error = error_of(prepare(log, instance, 1, 2))
        assert isinstance(error, TransactionAbortedError)
        assert "has 1 of its 2 blocks" in str(error)
    for _ in range(2):
        log.hold(instance, 2, size=TRANSACTION_TARGET_BYTES_MAX // 2 + 1)
    assert isinstance(error_of(prepare(log, instance, 2, 2)), TooLargeError)
    assert isinstance(prepare(log, instance, 1, 1), InvalidRequestError)
    assert (log.machines.holds.open, log.machines.transactions.prepared) == ({}, {})
    log.abort(instance, 3)
    assert isinstance(error_of(prepare(log, instance, 3, 0)), TransactionAbortedError)
    log.begin(token=2)
    assert isinstance(prepare(log, instance, 4, 0), ProducerFencedError)


def test_a_new_instance_leaves_a_prepared_transaction_undecided() -> None:
    """Its database may have committed it: only the open one is rolled back."""
    log, first = prepared()
    log.hold(first, 2)
    second = log.begin(token=2)
    assert isinstance(second, int)
    assert len(log.machines.holds.open) == 1
    log.hold(second, 1, ORDERS)
    log.commit(second, 1, 1)
    assert answer(log, first, 1, commit=True) == SettledTransaction(1, True)
    assert log.units() == {ORDERS: [1], CLICKS: [1]}


def test_the_end_of_a_former_instances_transaction_is_not_that_of_the_present_one() -> None:
    """Both have a transaction of the same number."""
    log, first = prepared()
    second = log.begin(token=2)
    assert isinstance(second, int)
    log.hold(second, 1, ORDERS)
    assert answer(log, first, 1, commit=True) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [1]}
    assert log.commit(second, 1, 1) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [1], ORDERS: [1]}


def test_a_former_instance_may_decide_about_what_it_has_prepared() -> None:
    for commit in (True, False):
        log, first = prepared()
        log.begin(token=2)
        settled = log.commit(first, 1, 1) if commit else log.abort(first, 1)
        assert isinstance(settled, SettledTransaction)
        assert settled.committed is commit
        assert log.units() == ({CLICKS: [1]} if commit else {})


def test_an_instance_goes_on_while_its_prepared_transactions_are_undecided() -> None:
    log, instance = prepared()
    assert log.hold(instance, 2) is HoldState.HELD
    assert isinstance(prepare(log, instance, 2, 1), PreparedTransaction)
    log.hold(instance, 3)
    assert answer(log, instance, 2, commit=True) == SettledTransaction(2, True)
    assert log.machines.transactions.ids[ID].open == 3
    assert log.commit(instance, 3, 1) == SettledTransaction(3, True)
    assert log.units() == {CLICKS: [1, 1]}
    assert str(error_of(answer(log, instance, 1, commit=False))) == (
        "transaction 1 of producer 'pay' was rolled back by its producer group"
    )
    assert log.machines.transactions.ids[ID].settled == SettledTransaction(3, True)
    assert log.machines.holds.open == {}
    assert log.hold(instance, 1) is HoldState.REFUSED


def test_a_time_out_that_comes_late_ends_no_prepared_transaction() -> None:
    """The owner had decided it before the transaction was prepared."""
    log, instance = prepared()
    late = AbortDecision(ID, instance, 1, log.now_ms, "was open for too long", expired=True)
    assert str(log.apply(late)) == "transaction 1 of producer 'pay' is prepared: no time-out ends it"
    assert log.commit(instance, 1, 1) == SettledTransaction(1, True)
    assert log.apply(late) == SettledTransaction(1, True)
    log.hold(instance, 2)
    assert isinstance(error_of(log.apply(msgspec.structs.replace(late, number=2))), TransactionAbortedError)


def test_a_prepare_ends_what_was_open_before() -> None:
    log, instance = begun()
    log.hold(instance, 1)
    assert isinstance(prepare(log, instance, 2, 0), PreparedTransaction)
    assert (log.machines.holds.open, log.machines.transactions.ids[ID].open) == ({}, 0)


def test_a_stranger_does_not_decide() -> None:
    log, instance = prepared()
    for commit in (True, False):
        error = answer(log, instance, 1, commit=commit, group="other")
        assert isinstance(error, InvalidRequestError)
        assert str(error) == "transaction 1 of producer 'pay' is not of producer group 'other'"
    assert len(log.machines.transactions.prepared) == len(log.machines.holds.open) == 1
    for number in (2, 9):
        log.hold(instance, 2)
        assert isinstance(answer(log, instance, number, commit=True), NotFoundError), "it is not prepared"
    assert log.units() == {}


def test_a_prepared_transaction_moves_no_positions() -> None:
    log, instance = prepared()
    assert isinstance(log.commit(instance, 1, 1, moves_of("", -1, {}, at(5))), InvalidRequestError)
    assert (log.position(), log.units()) == (None, {})


def test_questions_are_counted_one_by_one_and_none_after_the_parking() -> None:
    log, instance = prepared()
    counts = [check(log, instance, 1, tries) for tries in (0, 2, 1, 1, 3, 2)]
    assert counts == [False, False, True, False, False, True]
    assert check(log, instance, 1, 3, parked=True) is False
    assert check(log, instance, 1, 2, parked=True) is True
    assert check(log, instance, 1, 2, parked=True) is False
    assert check(log, instance, 1, 3) is False
    assert check(log, instance, 2, 1) is False, "it is not prepared"
    (found,) = log.machines.transactions.prepared.values()
    assert (found.tries, found.parked) == (2, True)
    assert answer(log, instance, 1, commit=True) == SettledTransaction(1, True), "a late answer is an answer"


def test_a_prepared_transaction_outlives_its_unused_id() -> None:
    log, instance = prepared()
    log.now_ms += 2 * DAY_MS
    log.begin(id_=msgspec.structs.replace(ID, name="other"))
    assert ID not in log.machines.transactions.ids
    assert answer(log, instance, 1, commit=True) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [1]}


def test_the_last_ends_of_prepared_transactions_are_known() -> None:
    log, instance = begun()
    for number in range(1, ENDED_PREPARED_MAX + 2):
        prepare(log, instance, number, 0)
        answer(log, instance, number, commit=True)
    assert answer(log, instance, 2, commit=False) == SettledTransaction(2, True)
    assert isinstance(answer(log, instance, 1, commit=True), NotFoundError)
    assert isinstance(log.commit(instance, 1, 0), InvalidRequestError)


def test_a_snapshot_has_the_prepared_transactions_with_their_questions_and_ends() -> None:
    log, instance = prepared()
    check(log, instance, 1, 1)
    check(log, instance, 1, 1, parked=True)
    prepare(log, instance, 2, 0)
    log.commit(instance, 2, 0)
    prepare(log, instance, 3, 0)
    check(log, instance, 3, 1)
    made = ServiceMachines()
    for name, machine in log.machines.by_name().items():
        made.by_name()[name].restore(machine.snapshot())
        assert made.by_name()[name].snapshot() == machine.snapshot()
    assert made.transactions.prepared == log.machines.transactions.prepared
    log.machines = made
    assert check(log, instance, 3, 1) is False
    assert check(log, instance, 3, 2) is True
    assert check(log, instance, 1, 2) is False, "it is parked"
    assert answer(log, instance, 2, commit=False) == SettledTransaction(2, True)
    assert log.hold(instance, 3) is HoldState.REFUSED
    assert answer(log, instance, 1, commit=True) == SettledTransaction(1, True)
    assert log.units() == {CLICKS: [1]}


@pytest.mark.parametrize("begin", [b"", b"\xa8prepared\x90\xa5ended\x90"])
def test_a_state_without_prepared_transactions_is_read(begin: bytes) -> None:
    """The states of earlier releases have no such fields, and theirs is written if there are none."""
    fields = b"\xa7version\x01\xa4last\x07\xa3ids\x90" + begin
    body = bytes([0x80 + (5 if begin else 3)]) + fields
    machines = ServiceMachines()
    machines.transactions.restore(body)
    assert machines.transactions.prepared == {}
    assert machines.transactions.snapshot() == b"\x83\xa7version\x01\xa4last\x07\xa3ids\x90"


def test_the_lane_of_a_prepared_transaction_is_that_of_its_blocks() -> None:
    log, instance = prepared()
    (lane,) = log.machines.transactions.prepared
    assert lane == lane_of(instance, 1) == f"{instance}.1"
