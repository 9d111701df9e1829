"""The machine of one partition of `_memq_audit`: reports received, missing, and silent clients. Pure.

All reports about a write partition are in one such partition. So this machine detects missing ones: the numbers of a
client's reports are dense, and each report promises the next one. Clocks of clients are shown and not used. The
auditor's clock decides that a client is silent; the silence is withdrawn when the missing report arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memq.audit.live.partition import SPARK_READER, SPARK_TASK, PartitionAudit
from memq.audit.live.partition_state import ReceivedReport
from memq.audit.minutes import MINUTE_MS
from memq.format.report import Report
from memq.topic import PartitionKey

CLIENTS_MAX = 20_000
GRACE_MS = 30_000  # beyond the promise: a failover of the brokers may hold reports up
SILENT_MINUTES_MAX = 24 * 60
MISSED_MAX = 8  # of a client: gaps that are remembered for what it names later
READERS = ("consumer", SPARK_READER, SPARK_TASK)
# A stream without a driver has no unknown work: its checkpoint remains, and states its progress at the next start.
MAY_END_SILENTLY = (SPARK_READER, SPARK_TASK)


@dataclass(slots=True)
class Client:
    """One client and its last report. `skew_ms` is the least ms by which its clock is ahead."""

    kind: str
    name: str
    host: str
    next_number: int
    until_ms: int
    promised_ms: int  # how long after its last report the next one was to come
    heard_ms: int = 0
    skew_ms: int = -(1 << 62)
    silent: bool = False
    keys: dict[PartitionKey, None] = field(default_factory=dict)
    missed: list[tuple[int, int]] = field(default_factory=list)  # Unix minutes, half-open, of which reports are missing

    @property
    def group(self) -> str | None:
        """The group that it reads for; None for a producer, and for a reader without one."""
        return self.name or None if self.kind in READERS else None

    def silent_minutes(self, until_ms: int) -> range:
        """Return the minutes from its last word up to a time of its clock."""
        first, last = self.until_ms // MINUTE_MS, until_ms // MINUTE_MS
        return range(max(first, last - SILENT_MINUTES_MAX), last + 1)


class ReportPartitionAudit:
    """Takes the reports of one partition of `_memq_audit` and passes them to write partitions' audits.

    `audit_of` returns the audit of a topic id and write partition, None when there is no such topic any more.
    """

    def __init__(
        self,
        audit_of: Callable[[PartitionKey], PartitionAudit | None],
        clients: dict[int, Client] | None = None,
        taken_ms: int = -1,
    ) -> None:
        """Continue with the stored `clients`.

        Reports of other clients up to `taken_ms` (Unix ms) may have been taken before, and are skipped.
        """
        self._audit_of = audit_of
        self._taken_ms = taken_ms
        self.clients = clients if clients is not None else {}

    def take(self, report: Report, now_ms: int) -> None:
        """Take a report that was received at `now_ms`; skip one that was taken before."""
        client = self._take_number(report, now_ms)
        if client is None:
            return
        for part in report.parts:
            key = (part.topic_id, part.partition)
            audit = self._audit_of(key)
            if audit is not None:
                if key not in client.keys:
                    client.keys[key] = None
                    self._doubt(audit, report.client, client)
                audit.add_report(ReceivedReport(report.client, client.group, part, now_ms, client.kind))
        if report.last:
            del self.clients[report.client]

    def settle(self, now_ms: int) -> None:
        """Find the clients whose promised report is late. Call it after all present reports were taken."""
        for number, client in list(self.clients.items()):
            if client.silent or now_ms <= client.heard_ms + client.promised_ms + GRACE_MS:
                continue
            client.silent = True
            if client.kind == SPARK_TASK:
                del self.clients[number]
            else:
                self._silence(client, client.silent_minutes(client.until_ms + client.promised_ms), 1)
        for number in sorted(self.clients, key=lambda each: self.clients[each].heard_ms)[:-CLIENTS_MAX]:
            del self.clients[number]

    # ---- inside --------------------------------------------------------------------------------------

    def _take_number(self, report: Report, now_ms: int) -> Client | None:
        client = self.clients.get(report.client)
        promised_ms = report.next_ms - report.until_ms
        if client is None and report.until_ms <= self._taken_ms:
            return None
        if client is None:
            self._forget_driver(report)
            client = Client(report.kind, report.name, report.host, 0, report.since_ms, promised_ms)
            self.clients[report.client] = client
        if report.number < client.next_number:
            return None
        if client.silent:  # what was promised came late, or is still missing
            self._silence(client, client.silent_minutes(client.until_ms + client.promised_ms), -1)
            client.silent = False
        if report.number > client.next_number:
            self._miss(report, client)
        client.next_number = report.number + 1
        client.until_ms, client.promised_ms, client.heard_ms = report.until_ms, promised_ms, now_ms
        client.skew_ms = max(client.skew_ms, report.until_ms - now_ms)
        return client

    def _forget_driver(self, report: Report) -> None:
        """Forget an earlier driver of a stream that is silent."""
        for number, client in list(self.clients.items()):
            if client.silent and report.kind == client.kind == SPARK_READER and client.name == report.name:
                del self.clients[number]

    def _miss(self, report: Report, client: Client) -> None:
        """Note that reports are missing, for all write partitions that the client names now or later."""
        minutes = client.silent_minutes(report.since_ms)
        self._silence(client, minutes, 1)
        client.missed.append((minutes.start, minutes.stop))
        del client.missed[:-MISSED_MAX]
        for key in client.keys:
            audit = self._audit_of(key)
            if audit is not None and client.group is not None:
                audit.distrust(report.client, client.group, client.kind)

    def _doubt(self, audit: PartitionAudit, number: int, client: Client) -> None:
        """Note a client's first mention of a write partition: missing reports may concern it too."""
        for first, following in client.missed if client.kind not in MAY_END_SILENTLY else ():
            audit.silence(client.group, range(first, following), 1)
        if client.missed and client.group is not None:
            audit.distrust(number, client.group, client.kind)

    def _silence(self, client: Client, minutes: range, change: int) -> None:
        if client.kind in MAY_END_SILENTLY:
            return
        for key in client.keys:
            audit = self._audit_of(key)
            if audit is not None:
                audit.silence(client.group, minutes, change)
