"""Stores the live audit's state: each step in one transaction, by the owner of its home only.

Theory. One auditor at a time reads a partition of `_memq_audit`, but a paused auditor may not know that it lost the
partition. So an auditor that takes over a home writes its name into the home's row. A step is stored only under that
name, with the position up to which it has read. So the stored state is always the result of one reading, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from memq.audit.finding import Finding
from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client
from memq.audit.live.storage.database import Database, Execute
from memq.audit.live.storage.state import decode_state, encode_state
from memq.audit.minutes import MINUTE_MS, MinuteRow
from memq.errors import GenerationFencedError, NotFoundError
from memq.topic import PartitionKey

FINDINGS_KEPT_MAX = 100_000  # those that changed longest ago are deleted first
MINUTES_KEPT_MAX = 5_000_000


class GroupFacts(msgspec.Struct, frozen=True, array_like=True):
    """A group's progress in one write partition: last committed position and processed records."""

    committed: str
    processed: int


class PartitionFacts(msgspec.Struct, frozen=True, array_like=True):
    """The state of one write partition: pointers read, newest queue time (Unix ms), records queued."""

    next_offset: int
    queue_ms: int
    records: int
    producers: int
    groups: dict[str, GroupFacts]


@dataclass(slots=True)
class PartitionChanges:
    """The changes of one step in one write partition."""

    topic: str
    state: PartitionState
    rows: dict[int, MinuteRow]
    findings: list[Finding]

    @property
    def facts(self) -> PartitionFacts:
        """Return the summary of the state."""
        state = self.state
        groups = {
            name: GroupFacts(group.committed, sum(progress.ever.total for progress in group.progress.values()))
            for name, group in state.groups.items()
        }
        records = sum(stream.account.delivered.total for stream in state.streams.values()) + state.held.queued
        return PartitionFacts(state.next_offset, state.queue_ms, records, len(state.streams), groups)


@dataclass(slots=True)
class Step:
    """One transaction of an auditor: its progress in a home, and the results by write partition.

    `number` identifies the step of its owner. So a step whose answer was lost is stored once, although it is saved
    again.
    """

    home: int
    owner: str
    number: int
    position: str
    clients: dict[int, Client]
    changes: dict[PartitionKey, PartitionChanges] = field(default_factory=dict)


class AuditStore:
    """The writing side of the state; `memq.audit.live.view` reads. Raises everywhere: as `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def group(self, name: str) -> str:
        """Return the group of all auditors with this state; the first call sets it to `name`.

        Auditors with another state have another group. In one group, each state would have a part of the reports only.
        """
        return await self._database.run(lambda execute: _group(execute, name))

    async def take_home(self, home: int, owner: str) -> tuple[str, dict[int, Client]]:
        """Take over a home; return the position up to which it was read ("" for none) and its clients."""
        position, clients = await self._database.run(lambda execute: _take_home(execute, home, owner))
        return position, decode_state(dict[int, Client], clients) if clients else {}

    async def heard(self, home: int) -> tuple[str, int]:
        """Return a home's topic id, and the time up to which all its reports were read; "" and 0 if unknown.

        The time is in Unix ms.
        """
        return await self._database.run(lambda execute: _heard(execute, home))

    async def note_heard(self, owner: str, topic_id: str, homes: Mapping[int, int]) -> None:
        """Store the time up to which all reports of `homes` were read (Unix ms); skip homes of another owner."""
        await self._database.run(lambda execute: _note_heard(execute, owner, topic_id, homes))

    async def partition_state(self, key: PartitionKey) -> PartitionState | None:
        """Return the state of a write partition; None when nothing was stored."""
        found = await self._database.run(
            lambda execute: execute("SELECT books FROM audits WHERE topic_id = ? AND part = ?", key)
        )
        return decode_state(PartitionState, bytes(found[0][0])) if found else None

    async def save(self, step: Step) -> None:
        """Store a step. Raises: GenerationFencedError when another auditor has taken the home."""
        await self._database.run(lambda execute: _save(execute, step))

    async def acknowledge(self, finding: str, who: str, now_ms: int) -> None:
        """Note the operator that acknowledged a finding; "" removes the note. Raises: NotFoundError."""
        await self._database.run(lambda execute: _acknowledge(execute, finding, who, now_ms if who else 0))

    async def prune(self, before_ms: int) -> None:
        """Delete minutes before a time (Unix ms), findings closed before it, and the excess over the bounds."""
        await self._database.run(lambda execute: _prune(execute, before_ms))


def _group(execute: Execute, name: str) -> str:
    execute("UPDATE audit_version SET number = number", ())  # one auditor at a time
    execute("CREATE TABLE IF NOT EXISTS audit_group (name TEXT NOT NULL)", ())  # older states have none
    if not execute("SELECT name FROM audit_group", ()):
        execute("INSERT INTO audit_group VALUES (?)", (name,))
    found: str = execute("SELECT name FROM audit_group", ())[0][0]
    return found


def _take_home(execute: Execute, home: int, owner: str) -> tuple[str, bytes]:
    execute("UPDATE audit_version SET number = number", ())  # one auditor at a time
    execute("CREATE TABLE IF NOT EXISTS audit_steps (home BIGINT PRIMARY KEY, step TEXT NOT NULL)", ())  # as above
    found = execute("SELECT position, clients FROM homes WHERE home = ?", (home,))
    if found:
        execute("UPDATE homes SET owner = ? WHERE home = ?", (owner, home))
        return found[0][0], bytes(found[0][1])
    execute("INSERT INTO homes VALUES (?, ?, ?, ?)", (home, owner, "", b""))
    return "", b""


def make_heard(execute: Execute) -> None:
    """Create the table of the homes' last reading; older states have none."""
    execute(
        "CREATE TABLE IF NOT EXISTS audit_heard"
        " (home BIGINT PRIMARY KEY, topic_id TEXT NOT NULL, heard_ms BIGINT NOT NULL)",
        (),
    )


def _heard(execute: Execute, home: int) -> tuple[str, int]:
    make_heard(execute)
    found = execute("SELECT topic_id, heard_ms FROM audit_heard WHERE home = ?", (home,))
    return (found[0][0], found[0][1]) if found else ("", 0)


def _note_heard(execute: Execute, owner: str, topic_id: str, homes: Mapping[int, int]) -> None:
    make_heard(execute)
    for home, heard_ms in homes.items():
        execute(
            "INSERT INTO audit_heard SELECT home, ?, ? FROM homes WHERE home = ? AND owner = ?"
            " ON CONFLICT (home) DO UPDATE SET topic_id = excluded.topic_id, heard_ms = excluded.heard_ms",
            (topic_id, heard_ms, home, owner),
        )


def _save(execute: Execute, step: Step) -> None:
    stored = execute(
        "UPDATE homes SET position = ?, clients = ? WHERE home = ? AND owner = ? RETURNING home",
        (step.position, encode_state(step.clients), step.home, step.owner),
    )
    if not stored:
        raise GenerationFencedError(f"partition {step.home} of _memq_audit was given to another auditor")
    name = f"{step.owner} {step.number}"
    if execute("SELECT home FROM audit_steps WHERE home = ? AND step = ?", (step.home, name)):
        return  # it was stored before, and the answer was lost
    execute(
        "INSERT INTO audit_steps VALUES (?, ?) ON CONFLICT (home) DO UPDATE SET step = excluded.step", (step.home, name)
    )
    version = _next_version(execute) if step.changes else 0
    for key, changes in step.changes.items():
        state, facts = encode_state(changes.state), msgspec.msgpack.encode(changes.facts)
        execute(
            "INSERT INTO audits VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (topic_id, part) DO UPDATE SET"
            " topic = excluded.topic, home = excluded.home, books = excluded.books, facts = excluded.facts,"
            " version = excluded.version",
            (*key, changes.topic, step.home, state, facts, version),
        )
        for minute, row in changes.rows.items():
            _add_row(execute, key, changes.topic, minute, row, version)
        for finding in changes.findings:
            _put_finding(execute, finding, version)


def _next_version(execute: Execute) -> int:
    """Return the version of this step.

    Its row stays locked until the transaction ends, so steps become visible in the order of their versions.
    """
    number: int = execute("UPDATE audit_version SET number = number + 1 RETURNING number", ())[0][0]
    return number


def _add_row(execute: Execute, key: PartitionKey, topic: str, minute: int, row: MinuteRow, version: int) -> None:
    found = execute("SELECT counts FROM minutes WHERE topic_id = ? AND part = ? AND minute = ?", (*key, minute))
    total = decode_state(MinuteRow, bytes(found[0][0])) if found else MinuteRow()
    total.add(row)  # the row itself stays: its step may be saved again
    execute(
        "INSERT INTO minutes VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (topic_id, part, minute) DO UPDATE SET"
        " counts = excluded.counts, version = excluded.version",
        (*key, minute, topic, encode_state(total), version),
    )


def _put_finding(execute: Execute, finding: Finding, version: int) -> None:
    execute(
        "INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?, ?, '', 0, ?) ON CONFLICT (id) DO UPDATE SET"
        " body = excluded.body, resolved_ms = excluded.resolved_ms, version = excluded.version",
        (
            *(finding.id, finding.topic_id, finding.topic, finding.minute, int(finding.grave)),
            *(encode_state(finding), finding.resolved_ms, version),
        ),
    )


def _acknowledge(execute: Execute, finding: str, who: str, now_ms: int) -> None:
    found = execute(
        "UPDATE findings SET acknowledged_by = ?, acknowledged_ms = ?, version = ? WHERE id = ? RETURNING id",
        (who, now_ms, _next_version(execute), finding),
    )
    if not found:
        raise NotFoundError(f"finding '{finding[:40]}' does not exist", hint="memq auditor findings lists them")


def _prune(execute: Execute, before_ms: int) -> None:
    execute("DELETE FROM minutes WHERE minute < ?", (before_ms // MINUTE_MS,))
    execute("DELETE FROM findings WHERE resolved_ms > 0 AND resolved_ms < ?", (before_ms,))
    over = execute("SELECT count(*) FROM minutes", ())[0][0] - MINUTES_KEPT_MAX
    if over > 0:
        cut = execute("SELECT minute FROM minutes ORDER BY minute LIMIT 1 OFFSET ?", (over,))
        execute("DELETE FROM minutes WHERE minute < ?", cut[0])
    over = execute("SELECT count(*) FROM findings", ())[0][0] - FINDINGS_KEPT_MAX
    if over > 0:
        cut = execute("SELECT version FROM findings ORDER BY version LIMIT 1 OFFSET ?", (over,))
        execute("DELETE FROM findings WHERE version < ?", cut[0])
