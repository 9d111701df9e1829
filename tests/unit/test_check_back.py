"""The coordinator asks about prepared transactions: when, how often, whom, and parks them at last. Virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from memq.errors import (
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    ThrottledError,
    TransactionAbortedError,
)
from memq.transactions import coordinator as coordinator_module
from memq.transactions.coordinator import (
    OWN_FIRST,
    QUESTIONS_MAX,
    TIMEOUT_CHECK_S,
    Question,
    TransactionCounts,
    ask_again_ms,
)
from memq.transactions.machine import (
    AbortDecision,
    CheckDecision,
    PrepareDecision,
    PreparedTransaction,
    TransactionalId,
    encode_decision,
    lane_of,
)
from tests.skipping_loop import now_s, skip
from tests.unit.hold_shard import A, B
from tests.unit.test_transaction_coordinator import (
    ID,
    INTERVAL_MS,
    OTHER,
    TIMEOUT_MS,
    TRIES,
    Coordinated,
    coordinated,
)

TIMEOUT_S, INTERVAL_S = TIMEOUT_MS / 1_000, INTERVAL_MS / 1_000
ONE_CHECK_S = 2 * TIMEOUT_CHECK_S  # in which a check happens


async def prepare(
    made: Coordinated, id_: TransactionalId = ID, number: int = 1, group: str = "shop", instance: int = 0
) -> int:
    """Prepare a transaction with two blocks; return its instance."""
    instance = instance or await made.begin(id_)
    await made.hold(instance, number, A, B, id_=id_)
    await made.coordinator.prepare(id_, instance, number, 2, producer_group=group, note=b"order 7", began_ms=900)
    return instance


def run(made: Coordinated) -> None:
    made.shard.tasks.start(made.coordinator.run(), "coordinator")


def asked(made: Coordinated, group: str = "shop") -> list[tuple[str, int]]:
    """Return lane and number of the questions to a group."""
    found = [each for id_ in (ID, OTHER) for each in made.coordinator.questions(group, id_.name)]
    return [(each.transaction.lane, each.transaction.tries) for each in found]


async def next_question(made: Coordinated) -> list[tuple[str, int]]:
    """Wait for the next question."""
    for _ in range(100):
        if found := asked(made):
            return found
        await skip(TIMEOUT_CHECK_S)
    return []


def test_a_producer_group_is_asked_after_the_time_out_and_decides() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        made.shard.run()
        instance = await prepare(made)
        await skip(TIMEOUT_S)
        assert made.coordinator.questions("shop", ID.name) == []
        await skip(ONE_CHECK_S)
        assert made.coordinator.questions("other", ID.name) == []
        (question,) = made.coordinator.questions("shop", ID.name)
        assert question == Question(made.machines.transactions.prepared[lane_of(instance, 1)], ("clicks", "orders"))
        assert (question.transaction.note, question.transaction.began_ms) == (b"order 7", 900)
        assert made.coordinator.questions("shop", ID.name) == [], "each question is given once"
        arguments = (ID, instance, 1)
        with pytest.raises(InvalidRequestError, match="is not of producer group 'other'"):
            await made.coordinator.answer(*arguments, producer_group="other", commit=True)
        assert await made.coordinator.answer(*arguments, producer_group="shop", commit=True)
        await skip(1)
        assert [each[1] for each in made.shard.appended] == [A, B]
        assert await made.coordinator.answer(*arguments, producer_group="shop", commit=False), "it is committed"
        counters = made.shard.counters
        counts = counters.committed_transactions, counters.aborted_transactions, counters.expired_transactions
        assert (*counts, counters.transaction_checks) == (1, 0, 0, 1)
        with pytest.raises(NotFoundError):
            await made.coordinator.answer(ID, instance, 9, producer_group="shop", commit=True)

    coordinated(work)


def test_a_question_goes_to_the_producer_of_the_transaction_first_and_then_to_any_member() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        await prepare(made)
        own_first_s = OWN_FIRST * ask_again_ms(INTERVAL_MS) / 1_000
        await skip(TIMEOUT_S + ONE_CHECK_S)
        assert made.coordinator.questions("shop", "another") == []
        (question,) = made.coordinator.questions("shop", ID.name)
        assert question.transaction.tries == 1
        await skip(own_first_s + ONE_CHECK_S)
        assert made.coordinator.questions("shop", "another") == [], "each question is given once"
        while made.machines.transactions.prepared[question.transaction.lane].tries < 2:
            await skip(TIMEOUT_CHECK_S)
        assert made.coordinator.questions("shop", "another") == []
        await skip(own_first_s)
        (question,) = made.coordinator.questions("shop")
        assert question.transaction.tries == 2, "its producer has not asked"
        assert made.coordinator.questions("shop", ID.name) == []
        assert own_first_s < INTERVAL_S, "before the next question"

    coordinated(work)


def test_a_group_is_asked_after_the_whole_time_out_about_what_was_open_for_long_before() -> None:
    """The time-out says how long the commit of a database may take, and that begins after the prepare."""

    async def work(made: Coordinated) -> None:
        run(made)
        instance = await made.begin(ID)
        await made.hold(instance, 1, A, id_=ID)
        await skip(TIMEOUT_S * 0.9)
        await made.coordinator.prepare(ID, instance, 1, 1, producer_group="shop", note=b"", began_ms=900)
        await skip(TIMEOUT_S)
        assert asked(made) == []
        await skip(ONE_CHECK_S)
        assert asked(made) == [(lane_of(instance, 1), 1)]

    coordinated(work)


def test_a_group_is_asked_a_few_times_then_the_transaction_is_parked() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        instance = await prepare(made)
        lane = lane_of(instance, 1)
        times = list[float]()
        for tries in range(1, TRIES + 1):
            assert await next_question(made) == [(lane, tries)]
            assert made.shard.events == []
            times.append(now_s())
        assert TIMEOUT_S < times[0] <= TIMEOUT_S + ONE_CHECK_S
        pauses = [later - sooner for sooner, later in pairwise(times)]
        assert all(INTERVAL_S <= pause <= INTERVAL_S + ONE_CHECK_S for pause in pauses)
        await skip(INTERVAL_S + ONE_CHECK_S)
        assert asked(made) == []
        ((event, text),) = made.shard.events
        assert event == "transaction-parked"
        assert text == (
            f"transaction {lane} of producer 'pay': producer group 'shop' was asked 3 times and did not decide; "
            "memq transaction commit or abort does"
        )
        await skip(10 * TIMEOUT_S)
        assert len(made.decisions(CheckDecision)) == TRIES + 1
        assert len(made.machines.holds.open) == 2, "nothing but a decision ends it"
        assert made.shard.counters.transaction_checks == TRIES
        (shown,) = await made.coordinator.transactions()
        assert shown.prepared is not None
        assert (shown.prepared.parked, shown.blocks, shown.timeout_ms) == (True, {"clicks": 1, "orders": 1}, TIMEOUT_MS)
        assert shown.open_ms >= 10 * TIMEOUT_MS
        assert made.coordinator.counts() == TransactionCounts(0, 1, 1, 2, 0.0)
        await made.coordinator.settle(ID, commit=True)
        assert list(made.machines.holds.units) == [A, B]
        assert made.coordinator.counts() == TransactionCounts(0, 0, 0, 0, 0.0)

    coordinated(work)


def test_many_old_transactions_are_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each with an answer of the log, those of a large group that died would take minutes."""
    monkeypatch.setattr(coordinator_module, "DECISIONS_AT_ONCE", 20)

    async def work(made: Coordinated) -> None:
        made.shard.run()
        count = 30
        for number in range(count):
            await prepare(made, TransactionalId(f"prepared {number}", ""))
            id_ = TransactionalId(f"open {number}", "")
            await made.hold(await made.begin(id_), 1, A, id_=id_)
        made.log.delay_s = 1.0
        run(made)
        await skip(TIMEOUT_S + ONE_CHECK_S + 4)
        assert made.open() == []
        assert made.shard.counters.expired_transactions == count
        assert made.shard.counters.transaction_checks == count

    coordinated(work)


def test_a_parked_transaction_is_no_question_although_no_member_was_there_to_get_one() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        await prepare(made)
        await skip(TIMEOUT_S + TRIES * (INTERVAL_S + ONE_CHECK_S) + ONE_CHECK_S)
        assert [event for event, _ in made.shard.events] == ["transaction-parked"]
        assert asked(made) == []

    coordinated(work)


def test_a_transaction_that_ends_when_it_would_be_parked_raises_no_alarm() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        lane = lane_of(await prepare(made), 1)
        for tries in range(1, TRIES + 1):
            assert await next_question(made) == [(lane, tries)]
        made.log.before = lambda: made.machines.transactions.prepared.pop(lane, None)
        await skip(INTERVAL_S + ONE_CHECK_S)
        assert made.decisions(CheckDecision)[-1].parked
        assert made.shard.events == []

    coordinated(work)


def test_a_time_out_that_meets_a_prepared_transaction_lets_the_owner_work_on() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        instance = await made.begin()
        await made.hold(instance, 1, A, B)
        machine = made.machines.transactions

        def prepare_meanwhile() -> None:
            made.log.before = int
            decision = PrepareDecision(ID, instance, 1, 5, 2, "shop", b"", 1)
            assert isinstance(machine.apply(encode_decision(decision)), PreparedTransaction)

        made.log.before = prepare_meanwhile
        assert await next_question(made) == [(lane_of(instance, 1), 1)]
        assert len(made.decisions(AbortDecision)) == 1
        counters = made.shard.counters
        assert (counters.expired_transactions, counters.aborted_transactions) == (0, 0)

    coordinated(work)


def test_a_group_is_asked_at_once_about_what_a_former_instance_has_prepared() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        instance = await prepare(made)
        await made.begin(token=2)
        await skip(ONE_CHECK_S)
        assert asked(made) == [(lane_of(instance, 1), 1)]
        assert made.shard.counters.aborted_transactions == 0

    coordinated(work)


def test_a_new_owner_continues_to_count_and_asks_the_present_question_again() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        lane = lane_of(await prepare(made), 1)
        await skip(TIMEOUT_S + INTERVAL_S + 2 * ONE_CHECK_S)
        assert asked(made) == [(lane, 2)]
        await made.shard.tasks.stop()
        other = Coordinated()
        for name, machine in made.machines.by_name().items():
            other.machines.by_name()[name].restore(machine.snapshot())
        run(other)
        assert asked(other) == [(lane, 2)]
        await skip(INTERVAL_S - ONE_CHECK_S)
        assert asked(other) == []
        await skip(2 * ONE_CHECK_S)
        assert asked(other) == [(lane, 3)]
        await skip(INTERVAL_S + ONE_CHECK_S)
        assert [event for event, _ in other.shard.events] == ["transaction-parked"]
        await other.shard.tasks.stop()

    coordinated(work)


def test_a_question_that_is_throttled_or_late_is_not_counted() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        first, second = await prepare(made), await prepare(made, OTHER)
        await skip(TIMEOUT_S - TIMEOUT_CHECK_S)
        made.log.errors = [ThrottledError("full")]
        made.log.before = lambda: made.machines.transactions.prepared.pop(lane_of(second, 1), None)
        assert await next_question(made) == [(lane_of(first, 1), 1)]
        assert made.log.errors == []
        assert made.shard.counters.transaction_checks == 1, "the other one ended meanwhile"

    coordinated(work)


def test_a_member_gets_a_bounded_number_of_questions_and_the_next_one_the_rest() -> None:
    async def work(made: Coordinated) -> None:
        run(made)
        instance = await made.begin()
        for number in range(1, QUESTIONS_MAX + 3):
            await prepare(made, number=number, instance=instance)
        await made.begin(token=2)
        await skip(ONE_CHECK_S)
        found = [asked(made), asked(made), asked(made)]
        assert [len(each) for each in found] == [QUESTIONS_MAX, 2, 0]
        assert len({lane for each in found for lane, _ in each}) == QUESTIONS_MAX + 2

    coordinated(work)


def test_a_prepare_that_is_refused_rolls_back_once() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        for _ in range(2):
            with pytest.raises(TransactionAbortedError, match="has 1 of its 2 blocks"):
                await made.coordinator.prepare(ID, instance, 1, 2, producer_group="shop", note=b"", began_ms=1)
        assert made.shard.counters.aborted_transactions == 1
        await prepare(made, number=2, instance=instance)
        await made.coordinator.commit(ID, instance, 2, 2, None)
        with pytest.raises(InvalidRequestError, match="transaction 2 of producer 'pay' is committed"):
            await made.coordinator.prepare(ID, instance, 2, 2, producer_group="shop", note=b"", began_ms=1)
        assert made.shard.counters.aborted_transactions == 1

    coordinated(work)


def test_a_coordinator_has_a_bound_on_undecided_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(made: Coordinated) -> None:
        monkeypatch.setattr(coordinator_module, "PREPARED_MAX", 2)
        instance = await made.begin()
        about = {"producer_group": "shop", "note": b"", "began_ms": 1}
        for number in (1, 2, 2):
            await made.coordinator.prepare(ID, instance, number, 0, **about)  # type: ignore[arg-type]
        with pytest.raises(ThrottledError, match="2 prepared transactions of this service partition are undecided"):
            await made.coordinator.prepare(ID, instance, 3, 0, **about)  # type: ignore[arg-type]
        await made.coordinator.commit(ID, instance, 1, 0, None)
        await made.coordinator.prepare(ID, instance, 3, 0, **about)  # type: ignore[arg-type]

    coordinated(work)


def test_a_prepare_or_an_answer_of_unknown_outcome_may_be_repeated() -> None:
    async def work(made: Coordinated) -> None:
        instance = await made.begin()
        await made.hold(instance, 1)
        about = {"producer_group": "shop", "note": b"", "began_ms": 1}
        made.log.errors = [OutcomeUnknownError("it may count")]
        with pytest.raises(Exception, match="the outcome is unknown"):
            await made.coordinator.prepare(ID, instance, 1, 1, **about)  # type: ignore[arg-type]
        for _ in range(2):
            await made.coordinator.prepare(ID, instance, 1, 1, **about)  # type: ignore[arg-type]
        made.log.errors = [OutcomeUnknownError("it may count")]
        with pytest.raises(Exception, match="the outcome is unknown"):
            await made.coordinator.answer(ID, instance, 1, producer_group="shop", commit=False)
        assert not await made.coordinator.answer(ID, instance, 1, producer_group="shop", commit=False)
        assert made.shard.counters.aborted_transactions == 1

    coordinated(work)


def test_an_operator_names_one_of_several_undecided_transactions() -> None:
    async def work(made: Coordinated) -> None:
        instance = await prepare(made)
        await prepare(made, number=2, instance=instance)
        await made.hold(instance, 3)
        names = ", ".join(lane_of(instance, number) for number in (3, 1, 2))
        with pytest.raises(InvalidRequestError, match=f"has 3 undecided transactions: {names}"):
            await made.coordinator.settle(ID, commit=True)
        with pytest.raises(NotFoundError, match=f"no open transaction '{instance}.4'"):
            await made.coordinator.settle(ID, commit=True, lane=lane_of(instance, 4))
        await made.coordinator.settle(ID, commit=False, lane=lane_of(instance, 1))
        await made.coordinator.settle(ID, commit=True, lane=lane_of(instance, 2))
        await made.coordinator.settle(ID, commit=True)
        assert [len(each) for each in made.machines.holds.units.values()] == [2, 1]
        assert made.machines.holds.open == {}

    coordinated(work)
