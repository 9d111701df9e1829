"""A producer of transactions: some end by a commit, some by a roll-back, some not before their time-out.

An operator commits some that were to be rolled back. The producer learns each end, also after a lost answer.
"""

from __future__ import annotations

import asyncio
import contextlib

from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.client.transactions.transaction import AsyncTransaction
from memq.errors import MemqError, OutcomeUnknownError, ProducerFencedError, TransactionCommittedError
from memq.simulation.world.node import SimNode
from tests.simulation.checker import Checker
from tests.simulation.plan import Plan
from tests.simulation.transaction_rules import SentTransaction, TransactionRules

TIMEOUT_MS = 4_000
ABORT_RATE, SLOW_RATE, EARLY_RATE, OPERATOR_RATE = 0.2, 0.1, 0.5, 0.3
RECORDS_MAX = 8
SIZES = (10, 300, 3_000)


class _RollBackError(Exception):
    pass


class TransactionLife:
    """One life of the process; `life` is its number."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        producer: AsyncProducer,
        admin: AsyncAdmin,
        checker: Checker,
        rules: TransactionRules,
        life: int,
    ) -> None:
        self._plan = plan
        self._node = node
        self._producer = producer
        self._admin = admin
        self._checker = checker
        self._rules = rules
        self._life = life

    async def run(self) -> None:
        """Make transactions until enough are committed, or another instance has begun."""
        committed = number = 0
        while committed < max(10, self._plan.blocks // self._life):
            number += 1
            made = self._rules.begin(f"{self._node.name}.{self._life}.{number}")
            transaction = self._producer.transaction()
            try:
                await self._make(made, transaction)
            except ProducerFencedError:
                if made.committing:
                    return  # its end is unknown: another life may know it
                self._rules.answered(made, committed=False)
                return
            except OutcomeUnknownError:
                await self._settle(made, transaction)
            except TransactionCommittedError:
                self._rules.answered(made, committed=True)
            except (_RollBackError, MemqError):
                await self._settle(made, transaction)
                await asyncio.sleep(0.2)
            else:
                self._rules.answered(made, committed=True)
                committed += 1
            await asyncio.sleep(self._node.random.uniform(0, self._plan.pace_s_max))
        with contextlib.suppress(MemqError):
            await self._producer.close()
            await self._admin.close()

    async def _settle(self, made: SentTransaction, transaction: AsyncTransaction) -> None:
        """Learn the end of a transaction; if no broker says it, the next one settles it."""
        with contextlib.suppress(MemqError):
            self._rules.answered(made, committed=await transaction.settle())

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
                await transaction.send("t", value, partition=partition)
                if draw.random() < EARLY_RATE:
                    await transaction.flush()
            if draw.random() < SLOW_RATE:
                await asyncio.sleep(TIMEOUT_MS / 1_000 * draw.uniform(0.5, 2))
            if draw.random() < ABORT_RATE:
                if draw.random() < OPERATOR_RATE:
                    await transaction.flush()  # an operator commits what is held
                    made.committing = True
                    with contextlib.suppress(MemqError):  # it may have landed
                        await self._admin.commit_transaction(self._node.name)
                raise _RollBackError
            made.committing = True
