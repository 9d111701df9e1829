"""The check-back of a producer: what it prepares, what it leaves undecided, and how it answers. On virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from memq.client.producer.producer import Producer
from memq.client.producer.settings import producer_settings
from memq.client.transactions.check_back import ANSWER_TRIES, ASK_AGAIN_S, TransactionChecks
from memq.client.transactions.core import TransactionalCore
from memq.client.transactions.undecided import CheckAnswer, UndecidedTransaction, checked_note
from memq.errors import (
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    TimedOutError,
    TooLargeError,
    TransactionAbortedError,
    UnreachableError,
)
from memq.limits import TRANSACTION_NOTE_BYTES_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import (
    AnswerUndecided,
    AskUndecided,
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldTransaction,
    PrepareTransaction,
    WireQuestion,
    WireTransaction,
)
from memq.runtime.tasks import TaskOwner
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime
from tests.unit.transactional_cluster import SETTINGS, Cluster, Way, fields, on_cluster

CHECKED: dict[str, Any] = {"transaction_group": "", "producer_group": "shop"}
NAMED = WireTransaction(name="pay", group="", instance=70, number=3)
QUESTION = WireQuestion(transaction=NAMED, topics=["clicks", "orders"], note=b"order 7", began_ms=900, tries=2)


# ---- transactions that are prepared ----------------------------------------------------------------


def test_a_producer_prepares_when_all_records_are_held_and_commits_then() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin(b"order 7")
        began_ms = transaction.began_ms
        transaction.add(cast(Any, Way()), fields(b"x"), 0)
        await skip(1)
        for _ in range(2):
            await cluster.core.prepare(transaction)
        named = WireTransaction(name="pay", group="", instance=77, number=1)
        assert cluster.asked[2:] == [
            PrepareTransaction(transaction=named, blocks=1, producer_group="shop", note=b"order 7", began_ms=began_ms)
        ]
        assert isinstance(cluster.asked[1], HoldTransaction)
        with pytest.raises(InvalidRequestError, match="the transaction is prepared"):
            transaction.add(cast(Any, Way()), fields(b"y"), 0)
        await cluster.core.commit(transaction)
        assert (cluster.ends(), transaction.ended) == ([(1, True, 1)], "is committed")
        assert (await cluster.core.begin()).number == 2

    on_cluster(work, **CHECKED)


def test_a_producer_with_a_group_commits_no_records_that_are_not_prepared() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x"), 0)
        with pytest.raises(InvalidRequestError, match="is not prepared") as raised:
            await cluster.core.commit(transaction)
        assert raised.value.hint == "call prepare() after the last record"
        assert cluster.ends() == [(1, False, 0)]
        await cluster.core.commit(await cluster.core.begin())
        assert cluster.ends()[-1] == (2, True, 0), "without records there is nothing to decide"

    on_cluster(work, **CHECKED)


def test_a_producer_without_a_group_prepares_nothing_and_has_no_notes() -> None:
    async def work(cluster: Cluster) -> None:
        with pytest.raises(InvalidRequestError, match="a note is for a checker"):
            await cluster.core.begin(b"note")
        transaction = await cluster.core.begin()
        with pytest.raises(InvalidRequestError, match="has no producer group"):
            await cluster.core.prepare(transaction)

    on_cluster(work)


def test_a_prepared_transaction_that_is_left_is_not_rolled_back() -> None:
    async def work(cluster: Cluster) -> None:
        noted: list[tuple[Any, ...]] = []
        cluster.core.note_held = lambda *each: noted.append(each)
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x"), 0)
        await cluster.core.prepare(transaction)
        await cluster.core.leave(transaction)
        assert [(each[2], each[4]) for each in noted] == [("unsure", 1)], "the audit gets either end"
        await cluster.core.abort(transaction)
        await cluster.core.commit(await cluster.core.begin())
        assert cluster.ends() == [(2, True, 0)]
        with pytest.raises(InvalidRequestError, match="is undecided: its producer group is asked"):
            transaction.check_open()
        with pytest.raises(OutcomeUnknownError, match="is undecided: its producer group is asked"):
            await cluster.core.settle(transaction)

    on_cluster(work, **CHECKED)


def test_a_prepared_transaction_is_rolled_back_on_demand() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        await cluster.core.abort(transaction)
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work, **CHECKED)


def test_a_prepare_that_fails_leaves_a_transaction_that_is_rolled_back() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        cluster.errors[PrepareTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(TimedOutError):
            await cluster.core.prepare(transaction)
        assert not transaction.prepared
        await cluster.core.abort(transaction)
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work, **CHECKED)


@pytest.mark.parametrize("error", [UnreachableError("away"), InvalidRequestError("settled long ago")])
def test_a_commit_of_a_prepared_transaction_without_an_answer_is_asked_again_and_never_rolled_back(
    error: MemqError,
) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [error] * 100
        with pytest.raises(OutcomeUnknownError, match="whether the prepared transaction 1 is committed"):
            await cluster.core.commit(transaction)
        cluster.asked.clear()
        with pytest.raises((TimedOutError, InvalidRequestError)):
            await cluster.core.settle(transaction)
        assert (await cluster.core.begin()).number == 2
        assert {commit for _, commit, _ in cluster.ends()} == {True}
        cluster.errors.clear()
        assert await cluster.core.settle(transaction), "also after the next one has begun"
        assert {commit for _, commit, _ in cluster.ends()} == {True}

    on_cluster(work, **CHECKED)


def test_a_producer_begins_although_an_earlier_commit_still_has_no_answer() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [asyncio.CancelledError()]
        with pytest.raises(asyncio.CancelledError):
            await cluster.core.commit(transaction)
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        second = await cluster.core.begin()
        cluster.errors.clear()
        cluster.asked.clear()
        await cluster.core.commit(second)
        await cluster.core.begin()
        assert cluster.ends() == [(2, True, 0)], "the group is asked about the first one"

    on_cluster(work, **CHECKED)


def test_a_producer_asks_once_more_about_an_earlier_commit_and_not_at_each_begin() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [asyncio.CancelledError()]
        with pytest.raises(asyncio.CancelledError):
            await cluster.core.commit(transaction)
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        second = await cluster.core.begin()
        await cluster.core.prepare(second)
        await cluster.core.leave(second)
        cluster.asked.clear()
        await cluster.core.begin()
        assert cluster.ends() == []

    on_cluster(work, **CHECKED)


def test_a_prepared_transaction_that_others_rolled_back_says_so() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [TransactionAbortedError("was rolled back by its producer group")]
        with pytest.raises(TransactionAbortedError, match="by its producer group"):
            await cluster.core.commit(transaction)
        assert transaction.ended == "was rolled back"
        assert not await cluster.core.settle(transaction)
        await cluster.core.begin()
        assert cluster.ends() == [(1, True, 0)]

    on_cluster(work, **CHECKED)


@pytest.mark.parametrize("committed", [True, False])
def test_a_producer_learns_the_end_of_a_prepared_transaction_by_its_next_one(committed: bool) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [InvalidRequestError("no")]
        with pytest.raises(OutcomeUnknownError):
            await cluster.core.commit(transaction)
        cluster.errors[EndTransaction] = [] if committed else [TransactionAbortedError("by its producer group")]
        await cluster.core.begin()
        asked = len(cluster.asked)
        assert await cluster.core.settle(transaction) is committed
        assert len(cluster.asked) == asked, "it is known"

    on_cluster(work, **CHECKED)


def test_a_roll_back_of_a_prepared_transaction_without_an_answer_is_repeated() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        await cluster.core.prepare(transaction)
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(TimedOutError):
            await cluster.core.abort(transaction)
        cluster.errors.clear()
        cluster.asked.clear()
        await cluster.core.begin()
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work, **CHECKED)


def test_a_note_is_short_bytes_or_text() -> None:
    assert checked_note("ß") == b"\xc3\x9f"
    assert len(checked_note(b"x" * TRANSACTION_NOTE_BYTES_MAX)) == TRANSACTION_NOTE_BYTES_MAX
    with pytest.raises(TooLargeError):
        checked_note("ß" * TRANSACTION_NOTE_BYTES_MAX)
    with pytest.raises(TypeError, match="note must be bytes or str, not int"):
        checked_note(cast(Any, 7))


# ---- visible records -------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [True, False])
def test_a_commit_waits_for_visible_records_if_the_program_wants_that(prepared: bool) -> None:
    async def work(cluster: Cluster) -> None:
        for visible in (False, True):
            transaction = await cluster.core.begin(visible=visible)
            if prepared:
                await cluster.core.prepare(transaction)
            cluster.asked.clear()
            cluster.invisible = 2
            await cluster.core.commit(transaction)
            waits = [each for each in cluster.asked if isinstance(each, AwaitTransaction)]
            named = WireTransaction(name="pay", group="", instance=77, number=transaction.number)
            assert waits == ([AwaitTransaction(transaction=named)] * 3 if visible else [])
            assert isinstance(cluster.asked[0], EndTransaction)

    on_cluster(work, **CHECKED)


def test_a_commit_whose_records_do_not_become_visible_says_that_it_is_committed() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin(visible=True)
        cluster.invisible, cluster.wait_s = 1_000, 5.0
        with pytest.raises(TimedOutError, match="transaction 1 is committed, and some of its records are not visible"):
            await cluster.core.commit(transaction)
        assert await cluster.core.settle(transaction)
        assert 20 < now_s() <= 30
        await cluster.core.begin()

    on_cluster(work, **CHECKED)


# ---- settings --------------------------------------------------------------------------------------


def settings(**arguments: Any) -> Any:
    plain: dict[str, Any] = {
        "acks": "all",
        "codec": "none",
        "linger_ms": 5,
        "block_bytes": 2_048,
        "pending_bytes_max": 1 << 20,
        "when_full": "block",
        "delivery_timeout_ms": 1_000,
        "metadata_timeout_ms": 1_000,
        "connect_timeout_ms": 1_000,
        "client_id": "",
        "zone": "",
        "on_ack": None,
        "name": None,
        "audit": False,
    }
    return producer_settings(**{**plain, **arguments})


def test_the_producer_group_is_the_given_one_or_the_transactional_id() -> None:
    checker = cast(Any, len)
    for arguments, group in (
        ({}, ""),
        ({"transactional_id": "pay"}, ""),
        ({"transactional_id": "pay", "transaction_checker": checker}, "pay"),
        ({"transactional_id": "pay", "transaction_checker": checker, "producer_group": "shop"}, "shop"),
        ({"transactional_id": "pay", "producer_group": "shop"}, "shop"),
    ):
        assert settings(**arguments).producer_group == group


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"transaction_checker": len}, InvalidSettingError),
        ({"producer_group": "shop"}, InvalidSettingError),
        ({"transactional_id": "pay", "transaction_checker": 5}, TypeError),
        ({"transactional_id": "pay", "producer_group": "a/b/c"}, MemqError),
        ({"transactional_id": "pay", "transaction_checker": len, "transaction_group": "g"}, InvalidSettingError),
    ],
)
def test_a_checker_needs_an_id_and_moves_no_positions(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        settings(**arguments)


def test_a_blocking_producer_takes_no_coroutine_function() -> None:
    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        return CheckAnswer.UNKNOWN

    with pytest.raises(InvalidSettingError, match="is a coroutine function"):
        Producer("localhost:1", transactional_id="pay", transaction_checker=checker)


# ---- questions -------------------------------------------------------------------------------------


class Checks:
    """The check-back of a producer whose checker is `checker`, with a cluster that has `questions`."""

    def __init__(self, checker: Any) -> None:
        self.asked: list[tuple[float, Any]] = []
        self.questions: list[WireQuestion] = []
        self.errors: list[BaseException] = []
        self.committed = True
        self.answered = asyncio.Event()
        self.events: list[str] = []
        self.texts: list[str] = []
        self.tasks = TaskOwner(self.failed, cast(Any, self))
        runtime = skipping_runtime()
        made = settings(transactional_id="pay", transaction_checker=checker, producer_group="shop")
        self.checks = TransactionChecks(made, runtime, cast(Any, self.route), self.tasks, cast(Any, self))

    async def route(self, api: Api, request: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        assert (api, answer) == (Api.ADMIN, AdminAnswer)
        self.asked.append((now_s(), request.ask))
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(request.ask, AskUndecided):
            assert request.ask.producer_group == "shop"
            found, self.questions = self.questions, []
            return AdminAnswer(questions=found, ask_again_ms=1_000)
        self.answered.set()
        return AdminAnswer(committed=self.committed)

    def failed(self, error: BaseException) -> None:
        raise error

    def info(self, event: str, text: str) -> None:
        self.events.append(event)
        self.texts.append(text)

    warning = info

    def error(self, event: str, text: str, error: BaseException | None = None) -> None:
        self.events.append(event)

    def answers(self) -> list[bool]:
        asked = [each for _, each in self.asked if isinstance(each, AnswerUndecided)]
        assert all((each.transaction, each.producer_group) == (NAMED, "shop") for each in asked)
        return [each.commit for each in asked]


def on_checks(checker: Any, work: Callable[[Checks], Any]) -> None:
    async def run() -> None:
        made = Checks(checker)
        try:
            await work(made)
        finally:
            await made.checks.close()
            await made.tasks.stop()

    run_skipping(run())


@pytest.mark.parametrize("said", list(CheckAnswer))
def test_a_checker_decides_about_a_transaction_of_its_group(said: CheckAnswer) -> None:
    seen: list[UndecidedTransaction] = []

    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        seen.append(found)
        return said

    async def work(made: Checks) -> None:
        made.questions = [QUESTION]
        made.committed = said is CheckAnswer.COMMIT
        made.checks.start()
        made.checks.start()
        await skip(0.1)
        assert seen == [
            UndecidedTransaction(
                id="70.3",
                transactional_id="pay",
                producer_group="shop",
                topics=("clicks", "orders"),
                began_ms=900,
                note=b"order 7",
                tries=2,
            )
        ]
        assert made.answers() == ([] if said is CheckAnswer.UNKNOWN else [said is CheckAnswer.COMMIT])
        assert made.events == []

    on_checks(checker, work)


def test_a_producer_without_a_checker_asks_nothing() -> None:
    async def work(made: Checks) -> None:
        made.checks.start()
        await skip(10)
        assert made.asked == []

    on_checks(None, work)


def test_a_producer_asks_again_and_again_also_after_a_failure() -> None:
    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        return CheckAnswer.COMMIT

    async def work(made: Checks) -> None:
        made.errors = [UnreachableError("away")]
        made.checks.start()
        await skip(ASK_AGAIN_S)
        assert made.events == ["producer.check-failed"]
        times = [at_s for at_s, _ in made.asked]
        assert ASK_AGAIN_S / 2 <= times[1] - times[0] <= ASK_AGAIN_S
        await skip(6)
        times = [at_s for at_s, _ in made.asked[1:]]
        pauses = [later - sooner for sooner, later in pairwise(times)]
        assert all(0.75 <= pause <= 1 for pause in pauses)
        assert len(made.asked) >= 7

    on_checks(checker, work)


def test_a_checker_that_raises_or_says_something_else_is_asked_again_and_the_others_meanwhile() -> None:
    says: list[Any] = [ZeroDivisionError(), True, None, CheckAnswer.ABORT]

    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        said = says.pop(0)
        if isinstance(said, Exception):
            raise said
        return cast(CheckAnswer, said)

    async def work(made: Checks) -> None:
        made.questions = [QUESTION] * 4
        made.committed = False
        made.checks.start()
        await skip(0.5)
        assert made.events == ["producer.checker-raised"] * 3
        assert made.answers() == [False]

    on_checks(checker, work)


def test_an_answer_is_sent_until_a_broker_takes_it_a_few_times() -> None:
    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        made = checks[0]
        made.errors = [UnreachableError("away")] * made_errors[0]
        return CheckAnswer.COMMIT

    checks: list[Checks] = []
    made_errors = [ANSWER_TRIES - 1]

    async def work(made: Checks) -> None:
        checks.append(made)
        made.questions = [QUESTION]
        made.checks.start()
        await skip(20)
        assert made.answers() == [True] * ANSWER_TRIES
        assert made.events == []
        made_errors[0] = ANSWER_TRIES
        made.questions = [QUESTION]
        await skip(20)
        assert made.answers() == [True] * 2 * ANSWER_TRIES
        assert made.events == ["producer.check-unanswered"]

    on_checks(checker, work)


@pytest.mark.parametrize("commit", [True, False])
def test_a_late_answer_is_reported_with_the_end(commit: bool) -> None:
    async def checker(found: UndecidedTransaction) -> CheckAnswer:
        return CheckAnswer.COMMIT if commit else CheckAnswer.ABORT

    async def work(made: Checks) -> None:
        made.questions = [QUESTION]
        made.committed = not commit
        made.checks.start()
        await skip(0.1)
        assert made.events == ["producer.check-late"]
        assert made.texts[0].endswith("was rolled back before" if commit else "was committed before")

    on_checks(checker, work)


def test_a_plain_function_is_called_in_a_thread() -> None:
    threads: list[str] = []

    def checker(found: UndecidedTransaction) -> CheckAnswer:
        threads.append(threading.current_thread().name)
        return CheckAnswer.ABORT

    async def run() -> None:
        made = Checks(checker)
        made.questions, made.committed = [QUESTION], False
        made.checks.start()
        async with asyncio.timeout(10):
            await made.answered.wait()
        assert made.answers() == [False]
        await made.checks.close()
        await made.tasks.stop()
        made.checks.start()
        assert len(made.tasks) == 0, "a closed producer asks nothing"

    asyncio.run(run())
    assert threads[0].startswith("memq-checker")


def test_a_begin_starts_the_check_back() -> None:
    async def work(cluster: Cluster) -> None:
        began: list[int] = []
        route = cast(Any, cluster.route)
        core = TransactionalCore(cluster.settings, skipping_runtime(), route, lambda: began.append(1))
        cluster.errors[BeginTransactions] = [NotFoundError("no")]
        with pytest.raises(NotFoundError):
            await core.begin()
        await core.begin()
        assert began == [1, 1]

    on_cluster(work, **CHECKED)
    assert SETTINGS.producer_group == ""
