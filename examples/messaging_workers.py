"""The programs that `messaging_demo.py` starts and kills: a listener of notices, and a biller with transactions.

Each appends a line to a file for each step, so that the demo knows what it did before it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import memq

FLIGHTS, INVOICES, LEDGER = "flights", "invoices", "ledger"
NOTICED_CARRIERS = "HA || WN || YV"
BILLED_CARRIERS = "FL || HA || VX || YV"
LATE_MIN = 60  # minutes of delay from which the first call of the handler fails
CALL_S = 0.004  # so that the kill comes while records are at work
BATCHES = 4  # of the flights, for one transaction
HANG_S = 50.0  # within the time-out of a transaction
SESSION_MS = 3_000
RETRY_DELAYS_S = (0.2, 0.5)


class PagerError(Exception):
    """The pager of the demo, which fails at the first call for a late flight."""


class Journal:
    """A file of JSON lines. A line is written by one call, so it survives SIGKILL of its program."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *values: object) -> None:
        """Append one line."""
        os.write(self._file, json.dumps(values).encode() + b"\n")


def read_journal(path: Path) -> list[list[Any]]:
    """Return the lines that were written so far."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def announce(flight: dict[str, Any], attempt: int) -> None:
    """Announce a flight. Raises: ValueError for a cancelled one; PagerError at the first call for a late one."""
    if flight["dep_time"] is None:
        raise ValueError(f"flight {flight['carrier']} {flight['flight']} was cancelled")
    if flight["dep_delay"] >= LATE_MIN and attempt == 1:
        raise PagerError("the pager did not answer")


def listen(brokers: str, journal: Journal, _: int) -> None:
    """Announce the flights of some carriers until SIGTERM."""

    def handle(message: memq.Message) -> None:
        time.sleep(CALL_S)
        announce(json.loads(message.value or b""), message.attempt)
        journal.write("done", str(message.position), message.attempt)

    listener = memq.Listener(
        brokers,
        FLIGHTS,
        "notices",
        handle,
        concurrency=4,
        tags=NOTICED_CARRIERS,
        retry_delays_s=RETRY_DELAYS_S,
        session_timeout_ms=SESSION_MS,
    )
    signal.signal(signal.SIGTERM, lambda *_: listener.stop())
    with listener:
        listener.run()


def bill(brokers: str, journal: Journal, hang_at: int) -> None:
    """Write an invoice and a ledger entry for each flight of some carriers, and commit with them, to the end.

    Transaction `hang_at` stays open, so that it is open when the demo kills this program; 0: none.
    """
    with (
        memq.Producer(brokers, transactional_id="billing-1", transaction_group="billing") as producer,
        memq.Consumer(
            brokers,
            FLIGHTS,
            group="billing",
            auto_commit=False,
            end="end",
            tags=BILLED_CARRIERS,
            session_timeout_ms=SESSION_MS,
        ) as consumer,
    ):
        batches = iter(consumer)
        for number in count(1):
            taken = list(islice(batches, BATCHES))
            if not taken:
                return
            records = [record for batch in taken for record in batch]
            with producer.transaction() as transaction:
                for record in records:
                    position = str(record.position)
                    transaction.send(INVOICES, position, key=record.key)
                    transaction.send(LEDGER, position, key=record.key)
                transaction.commit_positions(consumer)
                transaction.flush()
                if number == hang_at:
                    journal.write("open", number)
                    time.sleep(HANG_S)


WORKERS = {"listen": listen, "bill": bill}


if __name__ == "__main__":
    WORKERS[sys.argv[1]](sys.argv[2], Journal(Path(sys.argv[3])), int(sys.argv[4]))
