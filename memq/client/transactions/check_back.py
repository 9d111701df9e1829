"""The check-back: a producer decides about transactions of its group, by the program's checker.

The program's database knows how a prepared transaction ends. The producer that sent it is asked first, then any live
one of the group. The answer races with all other decisions: the first one has won (T4).
"""

from __future__ import annotations

import asyncio
import inspect

from memq.client.broker_router import BrokerRouter
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions.undecided import CheckAnswer, UndecidedTransaction
from memq.errors import MemqError, RetryableError
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import AnswerUndecided, AskUndecided, WireQuestion
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

ASK_AGAIN_S = 5.0  # after a failure
ANSWER_TRIES = 5
RETRY_S_BASE, RETRY_S_MAX = 0.1, 2.0


class TransactionChecks:
    """Asks for the undecided transactions of the group, and answers. Nothing without a checker."""

    def __init__(
        self, settings: ProducerSettings, runtime: Runtime, router: BrokerRouter, tasks: TaskOwner, events: EventLog
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._router = router
        self._tasks = tasks
        self._events = events
        self._threads: ThreadPool | None = None
        self._started = False

    def start(self) -> None:
        """Begin to ask, once; called on the event loop."""
        if self._settings.transaction_checker is None or self._started or self._tasks.stopped:
            return
        self._started = True
        self._tasks.start(self._run(), "check-back")

    async def close(self) -> None:
        """Leave a checker behind that runs in a thread now."""
        if self._threads is not None:
            await self._threads.close(within_s=0)

    async def _run(self) -> None:
        while True:
            pause_s = await self._check_all()
            await asyncio.sleep(pause_s)

    async def _check_all(self) -> float:
        """Answer what the group is asked now; return in how many seconds to ask again."""
        settings = self._settings
        ask = AskUndecided(producer_group=settings.producer_group, transactional_id=settings.transactional_id)
        try:
            answer = await self._ask(ask)
        except MemqError as error:
            self._events.info("producer.check-failed", f"undecided transactions are not known: {error}")
            return self._runtime.random.uniform(ASK_AGAIN_S / 2, ASK_AGAIN_S)
        for question in answer.questions:
            await self._check(question)
        return answer.ask_again_ms / 1_000 * self._runtime.random.uniform(0.75, 1)

    async def _check(self, question: WireQuestion) -> None:
        """Answer one question as the checker says."""
        named = question.transaction
        found = UndecidedTransaction(
            id=f"{named.instance}.{named.number}",
            transactional_id=named.name,
            producer_group=self._settings.producer_group,
            topics=tuple(question.topics),
            began_ms=question.began_ms,
            note=question.note,
            tries=question.tries,
        )
        try:
            said = await self._call(found)
            if not isinstance(said, CheckAnswer):
                raise TypeError(f"it returned {said!r}, and not a memq.CheckAnswer")
        except Exception as error:  # noqa: BLE001 - of the program: the group is asked again
            text = f"the checker failed for transaction {found.id} of '{found.transactional_id}': {error!r}"
            self._events.error("producer.checker-raised", text, error)
            return
        if said is CheckAnswer.UNKNOWN:
            return
        commit = said is CheckAnswer.COMMIT
        ask = AnswerUndecided(transaction=named, producer_group=self._settings.producer_group, commit=commit)
        try:
            committed = (await self._surely(ask)).committed
        except MemqError as error:
            text = f"transaction {found.id} of '{found.transactional_id}' is not decided: {error}"
            self._events.warning("producer.check-unanswered", text)
            return
        if committed != commit:
            how = "committed" if committed else "rolled back"
            self._events.warning(
                "producer.check-late", f"transaction {found.id} of '{found.transactional_id}' was {how} before"
            )

    async def _call(self, found: UndecidedTransaction) -> object:
        """Return what the checker says: of a coroutine on this loop, of a plain function in a thread."""
        checker = self._settings.transaction_checker
        assert checker is not None, "see `start`"
        if inspect.iscoroutinefunction(checker):
            return await checker(found)
        if self._threads is None:
            self._threads = ThreadPool("checker", 1)
        said = await self._threads.run(checker, found)
        return await said if inspect.isawaitable(said) else said

    async def _surely(self, ask: AnswerUndecided) -> AdminAnswer:
        """Ask until a broker answers, a few times. Raises: MemqError."""
        for tries in range(1, ANSWER_TRIES):
            try:
                return await self._ask(ask)
            except RetryableError as error:
                delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                await asyncio.sleep(error.retry_after_ms / 1_000 + delay_s)
        return await self._ask(ask)

    async def _ask(self, ask: AskUndecided | AnswerUndecided) -> AdminAnswer:
        timeout_s = self._settings.open_timeout_s
        return await self._router(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=timeout_s)
