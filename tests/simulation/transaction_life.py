"""A producer of transactions: some end by a commit, some by a roll-back, some not before their time-out.

An operator commits some that were to be rolled back. The producer learns each end, also after a lost answer.

In a part of the runs its transactions also read: each takes a batch of records, and moves the position of its group.
After a roll-back a new consumer reads the batch again.

In another part it has a database and a checker: a transaction is prepared, the database decides, and then the
process commits, or leaves that to the check-back, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.client.transactions.transaction import AsyncTransaction
from memq.client.transactions.undecided import CheckAnswer, UndecidedTransaction
from memq.errors import MemqError, OutcomeUnknownError, ProducerFencedError, TransactionCommittedError
from memq.runtime.runtime import Runtime
from memq.simulation.world.node import SimNode
from tests.simulation.checker import Checker
from tests.simulation.plan import Plan
from tests.simulation.transaction_rules import SentTransaction, TransactionRules

TIMEOUT_MS = 4_000
ABORT_RATE, SLOW_RATE, EARLY_RATE, OPERATOR_RATE = 0.2, 0.1, 0.5, 0.3
TRANSACTION_BLOCKS = 2  # a transaction takes as long as so many blocks of other producers, or longer
PACED_S_MAX = 100.0  # of the longest pauses between the transactions of a life
CHECKED_RATE = 0.5  # of the runs
LEFT_RATE, NEVER_KNOWN_RATE, KILL_RATE = 0.2, 0.05, 0.1
VISIBLE_RATE = 0.3  # whose commit waits until all records are visible
LIVES = 4  # after which it does not kill itself any more
RECORDS_MAX = 8
SIZES = (10, 300, 3_000)
GROUP, STRANGERS = "shop", "strangers"
READERS = "readers"  # the group whose positions move
READING_RATE = 0.6  # of the runs without a checker


class _RollBackError(Exception):
    pass


class _LeftError(Exception):
    """The program fails after its database has decided."""


class TransactionLife:
    """One life of the process; `life` is its number. `make` returns a new producer, `kill` ends the process."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        brokers: str,
        runtime: Runtime,
        make: Callable[..., AsyncProducer],
        kill: Callable[[], None],
        life: int,
        checker: Checker,
        rules: TransactionRules,
    ) -> None:
        self._plan = plan
        self._node = node
        self._kill = kill
        self._brokers = brokers
        self._runtime = runtime
        self._admin = AsyncAdmin(brokers, runtime=runtime)
        self._checker = checker
        self._rules = rules
        self._life = life
        self._checked = random.Random(f"{plan.seed}/check-back").random() < CHECKED_RATE
        self._working: SentTransaction | None = None
        self._consumer: AsyncConsumer | None = None
        is_cut = plan.faults.chaos.log_cut_every_s > 0  # then positions are of a log that is gone
        reads = random.Random(f"{plan.seed}/positions").random() < READING_RATE
        self._group = READERS if reads and not self._checked and not is_cut else ""
        settings = {"transactional_id": node.name, "transaction_timeout_ms": TIMEOUT_MS}
        if not self._checked:
            self._producer = make(**settings, transaction_group=self._group or None)
            return
        self._producer = make(**settings, transaction_checker=self._check, producer_group=GROUP)
        stranger = {"transaction_checker": self._check_as_stranger, "producer_group": STRANGERS}
        self._stranger = make(transactional_id=f"{node.name}-stranger", **stranger)

    async def run(self) -> None:
        """Make transactions until enough are committed, or another instance has begun."""
        if self._checked:
            await self._stranger.__aenter__()
            await self._producer.__aenter__()
        await self._make_all()
        while self._checked and self._rules.missing():  # noqa: ASYNC110 - it comes by the check-back
            await asyncio.sleep(0.5)
        with contextlib.suppress(MemqError):
            await self._forget_consumer()
            await self._producer.close()
            await self._admin.close()
            if self._checked:
                await self._stranger.close()

    async def _make_all(self) -> None:
        committed = number = 0
        wanted = min(self._plan.blocks // TRANSACTION_BLOCKS, int(PACED_S_MAX / self._plan.pace_s_max))
        while committed < max(10, wanted // self._life):
            number += 1
            made = self._working = self._rules.begin(f"{self._node.name}.{self._life}.{number}")
            made.visible = random.Random(made.name).random() < VISIBLE_RATE
            transaction = self._producer.transaction(made.name if self._checked else "", visible=made.visible)
            try:
                await self._make(made, transaction)
            except ProducerFencedError:
                if made.committing:
                    return  # its end is unknown: another life may know it
                self._rules.answered(made, committed=False)
                return
            except _LeftError:
                committed += 1  # perhaps, later
            except OutcomeUnknownError:
                committed += self._checked
                await self._settle(made, transaction)
            except TransactionCommittedError:
                self._rules.answered(made, committed=True)
                await self._forget_consumer()
            except (_RollBackError, MemqError):
                await self._settle(made, transaction)
                await asyncio.sleep(0.2)
            else:
                self._rules.answered(made, committed=True)
                self._rules.check_visible(made)
                committed += 1
            finally:
                self._working = None
            await asyncio.sleep(self._node.random.uniform(0, self._plan.pace_s_max))

    async def _settle(self, made: SentTransaction, transaction: AsyncTransaction) -> None:
        """Learn the end of a transaction; if no broker says it, the next one settles it."""
        with contextlib.suppress(MemqError):
            committed = await transaction.settle()
            self._rules.answered(made, committed=committed)
            if committed:
                return
        await self._forget_consumer()

    async def _make(self, made: SentTransaction, transaction: AsyncTransaction) -> None:
        draw = self._node.random
        async with transaction:
            for number in range(draw.randint(1, RECORDS_MAX)):
                partition = draw.randrange(self._plan.shape.partitions)
                stream = f"{made.name}.{number}"
                value = f"{stream} {partition} 1 ".encode() + draw.randbytes(draw.choice(SIZES))
                self._checker.sent(stream, partition, 1, value)
                self._checker.give_up(value)  # of the log's promises only that it is there once, at most
                self._rules.sent(made, value, partition)
                await transaction.send(self._plan.shape.topic, value, partition=partition)
                if draw.random() < EARLY_RATE:
                    await transaction.flush()
            if self._group:
                await self._read(made, transaction)
            if draw.random() < SLOW_RATE:
                await asyncio.sleep(TIMEOUT_MS / 1_000 * draw.uniform(0.5, 2))
            if draw.random() < ABORT_RATE:
                if draw.random() < OPERATOR_RATE and not self._checked:
                    await transaction.flush()  # an operator commits what is held
                    made.committing = True
                    made.inputs.clear()  # its positions do not move
                    with contextlib.suppress(MemqError):  # it may have landed
                        await self._admin.commit_transaction(self._node.name, self._group)
                raise _RollBackError
            if self._checked:
                await self._decide(made, transaction)
            made.committing = True

    # ---- positions -------------------------------------------------------------------------------

    async def _read(self, made: SentTransaction, transaction: AsyncTransaction) -> None:
        """Take the next batch, and let the transaction move the position behind it."""
        draw = self._node.random
        if self._consumer is None:
            self._consumer = AsyncConsumer(
                self._brokers,
                self._plan.shape.topic,
                group=self._group,
                auto_commit=False,
                session_timeout_ms=draw.choice([1_000, 3_000]),
                on_expired="skip",
                audit=False,
                runtime=self._runtime,
            )
            await self._consumer.__aenter__()
        batch = await self._consumer.poll(timeout=draw.uniform(0.1, 0.5))
        if batch is None:
            return
        made.inputs |= {
            (batch.partition, record.position.pointer_offset, record.position.record_index) for record in batch
        }
        await transaction.commit_positions(self._consumer, batch)

    async def _forget_consumer(self) -> None:
        """Close the consumer: the next one continues at the stored positions."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(MemqError):
                await consumer.close()

    # ---- check-back ------------------------------------------------------------------------------

    async def _decide(self, made: SentTransaction, transaction: AsyncTransaction) -> None:
        """Prepare, and let the database decide."""
        draw = self._node.random
        await transaction.prepare()
        made.never_known = draw.random() < NEVER_KNOWN_RATE
        if draw.random() < SLOW_RATE:
            await asyncio.sleep(TIMEOUT_MS / 1_000 * draw.uniform(0.5, 2))
        if made.never_known:
            raise _LeftError
        made.in_database = made.committing = draw.random() >= ABORT_RATE
        if self._life < LIVES and draw.random() < KILL_RATE:
            self._kill()
            await asyncio.sleep(3_600)  # the process is dead
        if draw.random() < LEFT_RATE or not made.in_database:
            raise _LeftError

    async def _check(self, found: UndecidedTransaction) -> CheckAnswer:
        """Say what the database has. What a former life did not commit is not committed any more."""
        made = self._rules.named(found.note.decode())
        assert made is not None, "each transaction has its name as its note"
        if made.never_known or made is self._working:
            return CheckAnswer.UNKNOWN
        if made.in_database is None:
            made.in_database = False
        return CheckAnswer.COMMIT if made.in_database else CheckAnswer.ABORT

    async def _check_as_stranger(self, found: UndecidedTransaction) -> CheckAnswer:
        self._rules.stranger_asked(found.note.decode())
        return CheckAnswer.UNKNOWN
