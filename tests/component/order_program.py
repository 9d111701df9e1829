"""A program that keeps orders in a database, and sends records about each: it dies at moments of its own.

`python -m tests.component.order_program BROKERS DATABASE COUNT EVERY`: each EVERY-th of COUNT orders kills it. After
the last one it writes "done", and answers for its producer group until stdin ends.
"""

from __future__ import annotations

import os
import sqlite3
import sys

import memq

MOMENTS = ("held", "prepared", "decided")  # after which step it dies
TOPICS = ("out", "out", "other")  # of the records of an order
TABLES = "CREATE TABLE IF NOT EXISTS attempts (id INTEGER PRIMARY KEY); CREATE TABLE IF NOT EXISTS orders (id INTEGER)"


class OrderProgram:
    """One life of the program."""

    def __init__(self, database: str, every: int) -> None:
        self._file = database
        self._every = every
        self._database = sqlite3.connect(database)
        self._database.executescript(TABLES)
        self._present = 0  # the order that is being made

    def run(self, brokers: str, count: int) -> None:
        """Make the orders that no life has tried."""
        (last,) = self._database.execute("SELECT coalesce(max(id), 0) FROM attempts").fetchone()
        with memq.Producer(
            brokers, transactional_id="orders", producer_group="shop", transaction_checker=self.check
        ) as producer:
            for number in range(last + 1, count + 1):
                self._present = number
                self._insert("attempts", number)
                self._order(producer, number, MOMENTS[number // self._every % 3] if number % self._every == 0 else "")
                self._present = 0
            print("done", flush=True)
            sys.stdin.read()

    def _order(self, producer: memq.Producer, number: int, death: str) -> None:
        def step(moment: str) -> None:
            if moment == death:
                os._exit(9)

        with producer.transaction(note=str(number)) as transaction:
            for part, topic in enumerate(TOPICS):
                transaction.send(topic, f"{number}.{part}", key=f"{part}")
            transaction.flush()
            step("held")
            transaction.prepare()
            step("prepared")
            self._insert("orders", number)
            step("decided")

    def _insert(self, table: str, number: int) -> None:
        with self._database:
            self._database.execute(f"INSERT INTO {table} VALUES (?)", (number,))

    def check(self, found: memq.UndecidedTransaction) -> memq.CheckAnswer:
        """Say whether the database has an order; that of this life may still come."""
        number = int(found.note)
        if number == self._present:
            return memq.CheckAnswer.UNKNOWN
        database = sqlite3.connect(self._file)
        try:
            row = database.execute("SELECT 1 FROM orders WHERE id = ?", (number,)).fetchone()
        finally:
            database.close()
        return memq.CheckAnswer.COMMIT if row else memq.CheckAnswer.ABORT


if __name__ == "__main__":
    OrderProgram(sys.argv[2], int(sys.argv[4])).run(sys.argv[1], int(sys.argv[3]))
