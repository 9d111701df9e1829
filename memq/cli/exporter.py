"""`memq lag --serve` and `memq auditor metrics`: collected in rounds, and served to Prometheus."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from memq.audit.finding import EVIDENCE_MAX, Finding
from memq.audit.live.report_partition import Client
from memq.audit.live.view import AuditView, TopicSummary, latencies
from memq.audit.minutes import MINUTE_MS, QUEUE, CountSide, percentile_name
from memq.broker.http import HttpPort
from memq.client.admin import AsyncAdmin
from memq.client.group_admin import GroupDescription
from memq.client.listener.dead_letter_queue import waiting_letters
from memq.errors import MemqError, NotFoundError, RetryableError, UnreachableError
from memq.observe.metrics import LAG_SERIES_MAX, lines_of
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, format_address
from memq.runtime.process import Signals
from memq.runtime.runtime import Runtime

ROUND_S = 15.0
Ask = Callable[[], Awaitable[Sequence[Metric]]]
MINUTES = 60  # the period of verdicts and latencies
STAGES = ("sent", "acked", "committed")
VERDICTS = ("lost", "doubled", "corrupt", "late", "unknown")
Series = Iterable[tuple[Sequence[str], float]]


class RoundCollector:
    """The results of the last round; nothing after a failed round, so that no stale value is shown."""

    def __init__(self, name: str) -> None:
        """`name` is part of its own metrics: `memq_NAME_rounds` and `memq_NAME_failed_rounds`."""
        self.rounds = 0
        self.failed_rounds = 0
        self._name = name
        self._found: Sequence[Metric] | None = None

    @property
    def known(self) -> bool:
        """Whether the last round succeeded."""
        return self._found is not None

    def found(self, metrics: Sequence[Metric]) -> None:
        """Store the results of a successful round."""
        self.rounds += 1
        self._found = metrics

    def failed(self) -> None:
        """Count a failed round, and drop the last results."""
        self.rounds += 1
        self.failed_rounds += 1
        self._found = None

    def collect(self) -> Iterable[Metric]:
        """Yield the numbers of rounds, and the results of the last one."""
        yield lines_of(f"memq_{self._name}_rounds", [((), self.rounds)])
        yield lines_of(f"memq_{self._name}_failed_rounds", [((), self.failed_rounds)])
        yield from self._found or ()


async def export(name: str, ask: Ask, listen: Address, ready: Callable[[str], None], runtime: Runtime) -> int:
    """Ask in rounds, and serve the results, until SIGTERM or SIGINT; return the exit code.

    It calls `ready` with the address after the first round. Raises: UnreachableError when the port is taken.
    """
    collector, events, signals = RoundCollector(name), EventLog(runtime.clock), Signals()
    registry = CollectorRegistry()
    registry.register(collector)

    async def check() -> None:
        if not collector.known:
            raise UnreachableError("the last round failed", hint="the log says why")

    port = HttpPort(runtime.network, check, registry, events)
    try:
        address = format_address(await port.start(*listen))
        rounds = asyncio.create_task(_rounds(ask, collector, events, lambda: ready(address)))
        ended = asyncio.create_task(signals.first.wait())
        await asyncio.wait((rounds, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (rounds, ended):
            task.cancel()
        await asyncio.wait((rounds, ended))
        if not rounds.cancelled():
            rounds.result()
    finally:
        signals.close()
        await port.stop()
    return 0


async def _rounds(ask: Ask, collector: RoundCollector, events: EventLog, ready: Callable[[], None]) -> None:
    outage = events.outage("export-failed", "export-back")
    while True:
        try:
            collector.found(await ask())
            outage.passed()
        except MemqError as error:
            collector.failed()
            outage.failed(str(error))
        if collector.rounds == 1:
            ready()
        await asyncio.sleep(ROUND_S)


async def export_lag(brokers: str, names: tuple[str, ...], listen: Address, ready: Callable[[str], None]) -> int:
    """Serve the lag of these groups, of all without a name: see `export`."""
    runtime = Runtime()
    async with AsyncAdmin(brokers, runtime=runtime) as admin:

        async def ask() -> Sequence[Metric]:
            letters = await _letters(admin)
            shown = {group: count for group, count in letters.items() if not names or group in names}
            return lag_metrics(await _described(admin, names), shown)

        return await export("lag", ask, listen, ready, runtime)


async def _described(admin: AsyncAdmin, names: tuple[str, ...]) -> list[GroupDescription]:
    """Return the groups, without those that are deleted meanwhile."""
    found = []
    for name in names or await admin.groups():
        try:
            found.append(await admin.group(name))
        except NotFoundError:
            continue
    return found


async def _letters(admin: AsyncAdmin) -> dict[str, int]:
    """Return the waiting dead letters by group; none if a log does not answer."""
    try:
        return await waiting_letters(admin)
    except (RetryableError, NotFoundError):  # a topic may be deleted meanwhile
        return {}


def lag_metrics(groups: Sequence[GroupDescription], letters: Mapping[str, int]) -> list[Metric]:
    """Return the lag of each group in each topic: sums of its partitions, and the longest wait among them.

    `letters` has the waiting dead letters by group.

    If the lag of a partition is unknown, the group has no sums for that topic, only the number of such partitions.
    """
    lags, unknown = _lags(groups), _unknown(groups)
    return [
        lines_of("memq_lag_left_out_series", [((), max(0, len(lags) - LAG_SERIES_MAX))]),
        lines_of("memq_group_members", [((each.group,), len(each.members)) for each in groups]),
        lines_of("memq_group_dead_letters", [((group,), count) for group, count in letters.items()]),
        lines_of("memq_group_lag_records", [(labels, records) for labels, (records, _, _) in lags.items()]),
        lines_of("memq_group_lag_bytes", [(labels, size) for labels, (_, size, _) in lags.items()]),
        lines_of("memq_group_lag_seconds", [(labels, seconds) for labels, (_, _, seconds) in lags.items()]),
        lines_of("memq_group_lag_unknown_partitions", list(unknown.items())),
    ]


def _unknown(groups: Iterable[GroupDescription]) -> dict[tuple[str, str], int]:
    """Return the number of partitions with an unknown lag, by group and topic."""
    found: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for one in group.partitions:
            found[group.group, one.topic_partition.topic] += one.error is not None
    return found


def _lags(groups: Sequence[GroupDescription]) -> dict[tuple[str, str], tuple[int, int, float]]:
    """Return records, bytes and seconds by group and topic, where all partitions are known."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    unknown = _unknown(groups)
    for group in groups:
        for one in group.partitions:
            labels = (group.group, one.topic_partition.topic)
            if unknown[labels]:
                continue
            records, size, seconds = found.get(labels, (0, 0, 0.0))
            lag = one.lag
            found[labels] = (records + lag.records, size + lag.bytes, max(seconds, lag.seconds))
    return found


async def export_audit(view: AuditView, listen: Address, ready: Callable[[str], None]) -> int:
    """Serve the state of the auditors: see `export`."""
    runtime = Runtime()

    async def ask() -> Sequence[Metric]:
        minute = runtime.clock.wall_ms() // MINUTE_MS
        topics = await view.topics(minute - MINUTES, minute + 1)
        findings = await view.findings(limit=EVIDENCE_MAX)
        clients = [each.client for each in await view.clients()]
        return audit_metrics(topics, findings, clients, await view.heard_ms())

    return await export("audit", ask, listen, ready, runtime)


def audit_metrics(
    topics: Sequence[TopicSummary], findings: Sequence[Finding], clients: Sequence[Client], heard_ms: int | None
) -> list[Metric]:
    """Return topics with their last hour, open findings and reporting clients as metrics.

    `heard_ms` is the time at which reports were last read to their end (Unix ms), if it is known.

    A topic without findings has zeros, so that an alert can fire on a change.
    """
    holding = Counter((finding.topic, finding.kind.value) for finding in findings)
    for topic in topics:
        for kind in ("lost", "doubled", "corrupt"):
            holding.setdefault((topic.topic, kind), 0)
    sides = [(topic, name, side) for topic in topics for name, side in sorted(topic.row.sides.items())]
    newest = [(topic.topic, max((part.queue_ms for part in topic.partitions.values()), default=0)) for topic in topics]
    return [
        lines_of("memq_audit_findings", sorted(holding.items())),
        lines_of(
            "memq_audit_records",
            [((topic.topic, stage), topic.row.side(QUEUE)[stage]) for topic in topics for stage in STAGES],
        ),
        lines_of("memq_audit_verdict_records", _verdicts(sides)),
        lines_of(
            "memq_audit_in_flight_records",
            [((topic.topic, name), topic.row.in_flight(name)) for topic, name, _ in sides],
        ),
        lines_of("memq_audit_latency_seconds", _latencies(topics)),
        lines_of("memq_audit_newest_pointer_time_seconds", [((name,), time_ms / 1000) for name, time_ms in newest]),
        lines_of("memq_audit_clients", [((), len(clients))]),
        lines_of("memq_audit_silent_clients", [((), sum(client.silent for client in clients))]),
        lines_of("memq_audit_reports_read_time_seconds", [] if heard_ms is None else [((), heard_ms / 1000)]),
    ]


def _verdicts(sides: Iterable[tuple[TopicSummary, str, CountSide]]) -> Series:
    for topic, name, side in sides:
        for word in VERDICTS:
            yield (topic.topic, name, word), side[word]


def _latencies(topics: Iterable[TopicSummary]) -> Series:
    for topic in topics:
        for (name, stage), found in latencies([topic.row]).items():
            for part, latency_ms in found.items():
                yield (topic.topic, name, stage, percentile_name(part)), latency_ms / 1000
