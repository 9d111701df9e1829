"""Reads the results of the live audit: topics, minutes, groups, findings, latencies.

It reads the state that auditors store, so it has the results of all of them, and works while none runs. Every change
has a version: a page stores the last version that it has read, and asks for the changes since.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memq.audit.finding import Finding
from memq.audit.live.report_partition import Client
from memq.audit.live.storage.database import Database, Execute
from memq.audit.live.storage.state import decode_state
from memq.audit.live.storage.store import PartitionFacts, make_heard
from memq.audit.minutes import QUANTILES, UNKNOWN, MinuteRow, gravest, quantile_ms
from memq.errors import NotFoundError
from memq.runtime.waits import utc_text

ROWS_MAX = 200_000  # that one statement may read

BEHIND_MS = 60_000  # auditors note every 10 s that they have read all reports


@dataclass(frozen=True, slots=True)
class Minute:
    """The sums of one write partition in one minute (Unix minutes) so far."""

    topic: str
    topic_id: str
    partition: int
    minute: int
    row: MinuteRow


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """One topic: its write partitions with their facts, and the sums of the requested minutes."""

    topic: str
    topic_id: str
    partitions: dict[int, PartitionFacts]
    row: MinuteRow
    findings: int  # that hold and are grave


@dataclass(frozen=True, slots=True)
class Changed:
    """Changes since a version: the topics (name, id), their findings, and the next version to ask for."""

    version: int
    topics: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportingClient:
    """A reporting client: `home` is its partition of `_memq_audit`, `number` its number."""

    home: int
    number: int
    client: Client = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that pages show; the number as 16 hex digits."""
        plain = ("kind", "name", "host", "heard_ms", "skew_ms", "silent")
        shown = {name: getattr(self.client, name) for name in plain}
        return {"client": f"{self.number:016x}", **shown, "partitions": len(self.client.keys)}


class AuditView:
    """The reader of the live audit's state. Every method raises as `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def version(self) -> int:
        """Return the version of the last change; each change has a higher one."""
        found = await self._ask("SELECT number FROM audit_version")
        return int(found[0][0])

    async def changes(self, since: int) -> Changed:
        """Return the changes after version `since`; without changes, the same version."""

        def work(execute: Execute) -> Changed:
            version = execute("SELECT number FROM audit_version", ())[0][0]
            if version <= since:
                return Changed(version)
            topics = execute("SELECT DISTINCT topic, topic_id FROM audits WHERE version > ? ORDER BY topic", (since,))
            findings = execute(f"{_FINDINGS} WHERE version > ? ORDER BY version", (since,))
            return Changed(version, tuple((name, id_) for name, id_ in topics), tuple(map(_finding, findings)))

        return await self._database.run(work)

    async def topics(self, first_minute: int, next_minute: int) -> list[TopicSummary]:
        """Return all audited topics by name, with the sums of their minutes `first_minute` to `next_minute`."""

        def work(execute: Execute) -> list[TopicSummary]:
            found: dict[tuple[str, str], TopicSummary] = {}
            holding: dict[str, int] = dict(execute(_HOLDING, ()))
            for topic, topic_id, part, facts in execute("SELECT topic, topic_id, part, facts FROM audits", ()):
                fresh = TopicSummary(topic, topic_id, {}, MinuteRow(), holding.get(topic_id, 0))
                summary = found.setdefault((topic, topic_id), fresh)
                summary.partitions[part] = _facts(facts)
            for topic, topic_id, counts in _rows_between(execute, first_minute, next_minute):
                if (topic, topic_id) in found:
                    found[topic, topic_id].row.add(decode_state(MinuteRow, bytes(counts)))
            return [found[key] for key in sorted(found)]

        return await self._database.run(work)

    async def heard_ms(self) -> int | None:
        """Return when the reports of clients were last read to their end (Unix ms); None if that is not known."""

        def work(execute: Execute) -> int | None:
            make_heard(execute)
            found: int | None = execute(_HEARD, ())[0][0]
            return found

        return await self._database.run(work)

    async def behind(self, now_ms: int) -> str:
        """Return why the results are old: no auditor runs, or it is behind the reports. "" if they are not.

        The state of an older release does not have it, and gives "".
        """
        heard_ms = await self.heard_ms()
        if heard_ms is None or now_ms - heard_ms <= BEHIND_MS:
            return ""
        return (
            f"the audit is behind: reports of clients were last read to their end at {utc_text(heard_ms / 1000)}; "
            "check that an auditor runs, and its log for audit.stopped"
        )

    async def minutes(
        self, topic: str, first_minute: int, next_minute: int, *, since: int = -1
    ) -> AsyncIterator[Minute]:
        """Yield the minutes of a topic, by partition and minute; reads some partitions at a time.

        With `since`, yield only rows that changed after that version.
        """
        parts = await self._ask("SELECT topic_id, part FROM audits WHERE topic = ? ORDER BY topic_id, part", (topic,))
        count = max(1, ROWS_MAX // max(1, next_minute - first_minute))
        for at in range(0, len(parts), count):
            ends = (*parts[at], *parts[at : at + count][-1])
            for name, id_, part, minute, row in await self._ask(
                MINUTES_QUERY, (topic, *ends, first_minute, next_minute, since)
            ):
                yield Minute(name, id_, part, minute, decode_state(MinuteRow, bytes(row)))

    async def findings(self, topic: str = "", *, all_: bool = False, limit: int = 1_000) -> list[Finding]:
        """Return valid, grave findings of one topic, or of all, newest first.

        With `all_`, also return withdrawn and unproven ones.
        """
        found = await self._ask(
            f"{_FINDINGS} WHERE (topic = ? OR ? = '') AND (resolved_ms = 0 AND grave = 1 OR ? = 1)"
            " ORDER BY version DESC LIMIT ?",
            (topic, topic, int(all_), limit),
        )
        return [_finding(each) for each in found]

    async def has(self, topic: str) -> bool:
        """Whether an auditor has seen records of a topic."""
        return bool(await self._ask("SELECT topic FROM audits WHERE topic = ? LIMIT 1", (topic,)))

    async def finding(self, id_: str) -> Finding:
        """Return one finding. Raises: NotFoundError."""
        found = await self._ask(f"{_FINDINGS} WHERE id = ?", (id_,))
        if not found:
            raise NotFoundError(f"finding '{id_[:40]}' does not exist", hint="memq auditor findings lists them")
        return _finding(found[0])

    async def clients(self) -> list[ReportingClient]:
        """Return the clients whose reports are awaited, with silence and clock error of each."""
        found = await self._ask("SELECT home, clients FROM homes ORDER BY home")
        return [
            ReportingClient(home, number, client)
            for home, data in found
            if data
            for number, client in decode_state(dict[int, Client], bytes(data)).items()
        ]

    async def _ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._database.run(lambda execute: execute(statement, values))


# Of the topic that was read last: homes of an earlier one are read by no auditor any more.
_HEARD = (
    "SELECT min(heard_ms) FROM audit_heard WHERE topic_id ="
    " (SELECT topic_id FROM audit_heard ORDER BY heard_ms DESC LIMIT 1)"
)
_HOLDING = "SELECT topic_id, count(*) FROM findings WHERE resolved_ms = 0 AND grave = 1 GROUP BY topic_id"
# By way of its write partitions, so that each is a range of the primary key: by time it would be rows of all topics.
MINUTES_QUERY = (
    "SELECT m.topic, m.topic_id, m.part, m.minute, m.counts FROM audits a CROSS JOIN minutes m"
    " WHERE a.topic = ? AND (a.topic_id, a.part) >= (?, ?) AND (a.topic_id, a.part) <= (?, ?)"
    " AND m.topic_id = a.topic_id AND m.part = a.part AND m.minute >= ? AND m.minute < ? AND m.version > ?"
    " ORDER BY m.topic_id, m.part, m.minute"
)
_ROWS = (
    "SELECT topic, topic_id, counts, minute, part FROM minutes WHERE minute < ?"
    " AND (minute, topic_id, part) > (?, ?, ?) ORDER BY minute, topic_id, part LIMIT ?"
)
_FINDINGS = "SELECT body, acknowledged_by, acknowledged_ms FROM findings"


def _rows_between(execute: Execute, first_minute: int, next_minute: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield topic, id and counts of all rows of some minutes, read in pages."""
    behind = (first_minute, "", -1)
    while page := execute(_ROWS, (next_minute, *behind, ROWS_MAX)):
        for topic, topic_id, counts, minute, part in page:
            yield topic, topic_id, counts
            behind = (minute, topic_id, part)


def _finding(found: tuple[Any, ...]) -> Finding:
    body, who, when = found
    finding = decode_state(Finding, bytes(body))
    return msgspec.structs.replace(finding, acknowledged_by=str(who), acknowledged_ms=when)


def _facts(data: bytes) -> PartitionFacts:
    return msgspec.msgpack.decode(bytes(data), type=PartitionFacts)


def latencies(rows: Iterable[MinuteRow]) -> dict[tuple[str, str], dict[float, float]]:
    """Return p50, p90 and p99 in ms of each stage, by group ("" for producers) and stage, over some rows."""
    total = MinuteRow()
    for row in rows:
        total.add(row)
    return {
        (name, stage): {part: quantile_ms(buckets, part) for part in QUANTILES}
        for name, side in sorted(total.sides.items())
        for stage, buckets in sorted(side.latency.items())
    }


def doubted(word: str, behind: str) -> str:
    """Return a verdict while the audit is `behind`: a clean one is unknown, a graver one stays."""
    return gravest((word, UNKNOWN)) if behind else word
