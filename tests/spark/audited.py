"""Shared parts of the tests of Spark's reports: a broker that requests them, and an auditor in this process."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from memq.audit.finding import Finding
from memq.audit.live.service import live_audit
from memq.audit.live.storage.database import SqliteDatabase
from memq.audit.live.view import AuditView
from memq.audit.minutes import MinuteRow
from memq.format.pointer import ProducerRanges, decode_pointer
from memq.runtime.runtime import Runtime
from tests.processes import BrokerProcess

KEEP_MS, WAIT_S = 86_400_000, 240.0
Done = Callable[[MinuteRow, list[Finding]], bool]


@contextmanager
def auditing_broker(folder: Path) -> Iterator[BrokerProcess]:
    """Run a broker on a folder whose clients report often, without an auditor of its own."""
    config = folder / "memq.toml"
    config.write_text(
        f"""
        store = "file:{folder}/objects"
        queue = "sqlite:{folder}/queue.sqlite"
        coordinator = "standalone:{folder}/topics.sqlite"
        memory_bytes_max = "64MiB"
        audit = true
        audit_interval_ms = 100
        """
    )
    broker = BrokerProcess(config, "b1")
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


def audit_until(broker: BrokerProcess, folder: Path, topic: str, done: Done) -> None:
    """Audit, on the state that there is, until a topic's counts and all findings are as they should be."""
    asyncio.run(_audit_until(broker.address, folder, topic, done))


async def _audit_until(address: str, folder: Path, topic: str, done: Done) -> None:
    database = SqliteDatabase(folder / "audit.sqlite")
    view, row, findings = AuditView(database), MinuteRow(), list[Finding]()
    try:
        async with asyncio.timeout(WAIT_S), live_audit(address, database, KEEP_MS, Runtime()) as audit:
            while not done(row, findings):
                await audit.step()
                row = next((each.row for each in await view.topics(0, 1 << 40) if each.topic == topic), MinuteRow())
                findings = await view.findings(all_=True)
    except TimeoutError:
        pytest.fail(f"this is all that is known: {row.sides} {findings}")
    finally:
        await database.close()


def take_pointers_away(folder: Path, topic: str, batch_id: int) -> list[ProducerRanges]:
    """Let a staged batch vanish from the queue, and return whose records that were."""
    with closing(sqlite3.connect(folder / "queue.sqlite", timeout=60)) as queue:
        read = queue.execute("SELECT id, body FROM entries").fetchall()
        pointers = [(id_, decode_pointer(body)) for id_, body in read if body.startswith(b"{")]  # others: state logs
        gone = [
            (id_, pointer)
            for id_, pointer in pointers
            if pointer.topic == topic and pointer.kind == "data" and pointer.named[0].batch_id == str(batch_id)
        ]
        queue.executemany("DELETE FROM entries WHERE id = ?", [(id_,) for id_, _ in gone])
        queue.commit()
    return [entry for _, pointer in gone for entry in pointer.producers]
