"""The live audit as a process: it reads through the brokers, and may die and start again.

Its state is in a database that outlives the process, as PostgreSQL does: a new process starts from the stored state.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any, cast

from memq.audit.finding import Finding
from memq.audit.live.service import live_audit
from memq.audit.live.storage.database import Answer, Execute, schema
from memq.audit.live.view import AuditView, TopicSummary
from memq.audit.minutes import MinuteRow
from memq.errors import AuditStateError, MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.world.node import SimNode
from memq.topic import Position

LIVE_AUDITOR = "live-auditor"
KEEP_MS = 10**10  # longer than a run
RETRY_S = 0.5
LATENCY_S_MAX = 0.05  # of a transaction, each way
FINDINGS_MAX = 100_000
MINUTES_END = 2**40


class AuditDatabase:
    """See `memq.audit.live.storage.database.Database`. `fails` says whether the next transaction fails.

    A transaction happens at one moment, and its answer comes later: an auditor may die before it hears that all is
    stored.
    """

    def __init__(self, draw: random.Random, fails: Callable[[], bool]) -> None:
        self._draw = draw
        self._fails = fails
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        for statement in schema("BIGINT", "BLOB"):
            self._connection.execute(statement)

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        """See `Database.run`."""
        await asyncio.sleep(self._draw.uniform(0, LATENCY_S_MAX))
        if self._fails():
            raise AuditStateError("the database does not answer")
        answer = self.at_once(work)
        await asyncio.sleep(self._draw.uniform(0, LATENCY_S_MAX))
        if self._fails():
            raise AuditStateError("the answer of the database is lost")
        return answer

    async def close(self) -> None:
        """See `Database.close`."""

    def at_once(self, work: Callable[[Execute], Answer]) -> Answer:
        """Run a transaction."""
        connection = self._connection
        connection.execute("BEGIN")
        try:
            answer = work(lambda statement, values: connection.execute(statement, values).fetchall())
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return answer

    def __del__(self) -> None:
        self._connection.close()  # a run may end anywhere


class StoredAudit:
    """The state that auditors have stored so far, read from outside of all processes."""

    def __init__(self, database: AuditDatabase) -> None:
        self._database = database
        self._view = AuditView(_AtOnce(database))

    def findings(self, topic: str) -> list[Finding]:
        """Return all findings of a topic, also those that are over."""
        return _ended(self._view.findings(topic, all_=True, limit=FINDINGS_MAX))

    def topics(self) -> list[TopicSummary]:
        """Return how far each topic is read."""
        return _ended(self._view.topics(0, 0))

    def homes(self) -> dict[int, Position]:
        """Return the position of the next report to read, by partition of the audit topic."""
        found = self._database.at_once(lambda execute: execute("SELECT home, position FROM homes", ()))
        return {home: Position.parse(position) for home, position in found if position}

    def rows(self, topic: str) -> dict[tuple[int, int], MinuteRow]:
        """Return the rows of a topic by partition and minute."""

        async def found() -> dict[tuple[int, int], MinuteRow]:
            minutes = self._view.minutes(topic, 0, MINUTES_END)
            return {(each.partition, each.minute): each.row async for each in minutes}

        return _ended(found())


class _AtOnce:
    def __init__(self, database: AuditDatabase) -> None:
        self._database = database

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        return self._database.at_once(work)

    async def close(self) -> None: ...


def _ended(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return what a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(Answer, end.value)
    raise AssertionError("it waits")


async def run_auditor(node: SimNode, runtime: Runtime, brokers: str, database: AuditDatabase) -> None:
    """Audit until the process dies; after an error begin again, as a process manager does."""
    while True:
        try:
            async with live_audit(brokers, database, KEEP_MS, runtime) as audit:
                await audit.run()
        except MemqError as error:
            node.world.trace.event(node.world.now, "auditor failed", type(error).__name__)
            await asyncio.sleep(RETRY_S)
