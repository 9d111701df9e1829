"""One writer for one SQLite file: waiting requests share one transaction and one fsync.

A commit costs an fsync, milliseconds on many disks; a publish costs some 20 µs. So a task takes all waiting jobs, and a
thread runs them in one transaction. Jobs that arrive in the meantime are the next transaction.

A job that is refused raises a MemqError before its first write, and the other jobs of its transaction continue. A
job that fails otherwise has a bug or bad input: the transaction is rolled back and run again without it. When SQLite
fails, all jobs of the transaction fail. The writer retries none of them: after a failed commit the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memq.errors import ClosedError, MemqError
from memq.runtime.logs import EventLog
from memq.runtime.sqlite_file import SqliteFile
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]

JOBS_PER_TRANSACTION_MAX = 256


@dataclass(slots=True, eq=False)
class Pending:
    """A waiting job: `done` gets its result or its error."""

    job: Job[Any]
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = field(default_factory=lambda: ClosedError("the writer stopped before this was written"))

    def settle(self) -> None:
        """Pass the outcome to the caller, unless the caller was cancelled."""
        if self.done.done():
            return
        if self.error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(self.error)


class Writer:
    """Runs jobs in transactions, in order of `run`. It belongs to the event loop of its first job."""

    def __init__(self, file: SqliteFile, events: EventLog) -> None:
        self._file = file
        self._connection = file.connect()
        self._pool = ThreadPool(f"writer of {file.what}", 1)
        self._jobs: deque[Pending] = deque()
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._tasks = TaskOwner(self._fail, events)
        self._closed: BaseException | None = None

    async def run(self, job: Job[T]) -> T:
        """Run a job in the next transaction; return after the commit and its fsync.

        After a cancellation, the job may have been run, or may run later. Raises: ClosedError.
        """
        if self._closed is not None:
            raise ClosedError(f"{self._file.what} '{self._file.path}' is closed") from self._closed
        if not len(self._tasks):
            self._tasks.start(self._work(), f"writer of {self._file.what}")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.append(Pending(job, done))
        self._drained.clear()
        self._arrived.set()
        return await done

    async def close(self) -> None:
        """Refuse new jobs, finish waiting ones, close the file; closing twice is fine."""
        if self._closed is None:
            self._closed = ClosedError("closed by its owner")
        await self._drained.wait()
        await self._tasks.stop()
        await self._pool.close()
        self._connection.close()

    async def _work(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                while self._jobs:
                    await self._commit_waiting()
                self._arrived.clear()
                self._drained.set()
        except asyncio.CancelledError:  # by `close`, or by the end of the event loop: then `close` must not wait
            self._fail(self._closed or ClosedError("its task was cancelled"))
            raise

    async def _commit_waiting(self) -> None:
        batch = [self._jobs.popleft() for _ in range(min(len(self._jobs), JOBS_PER_TRANSACTION_MAX))]
        batch = [pending for pending in batch if not pending.done.done()]
        try:
            await self._pool.run(self._transact, batch)
        finally:
            for pending in batch:
                pending.settle()

    def _fail(self, error: BaseException) -> None:
        """Fail all waiting and all later calls, because the task died."""
        self._closed = error
        while self._jobs:
            pending = self._jobs.popleft()
            pending.error = ClosedError(f"the writer of {self._file.what} died: {error}")
            pending.settle()
        self._drained.set()

    # ---- in the thread -----------------------------------------------------------------------

    def _transact(self, batch: Sequence[Pending]) -> None:
        """Commit all jobs except those that fail by themselves, or fail all if SQLite fails."""
        todo = list(batch)
        try:
            while failed := self._attempt(todo):
                todo.remove(failed)
        except sqlite3.Error as error:
            for pending in todo:
                pending.error = self._file.error(error)
                pending.error.__cause__ = error

    def _attempt(self, todo: Sequence[Pending]) -> Pending | None:
        """Run the jobs in one transaction and commit it, or roll it back and return the job that failed."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for pending in todo:
                if not self._try(pending):
                    connection.execute("ROLLBACK")
                    return pending
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return None

    def _try(self, pending: Pending) -> bool:
        """Run one job; return whether the transaction may continue."""
        changes = self._connection.total_changes
        pending.error = None
        try:
            pending.result = pending.job(self._connection)
        except MemqError as error:
            pending.error = error
            return self._connection.total_changes == changes
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
                raise  # an error of the file, the disk or a lock: it affects all other jobs, too
            pending.error = self._file.error(error)
            return False
        except Exception as error:  # noqa: BLE001 - any error of a job is passed to its caller
            pending.error = error
            return False
        return True
