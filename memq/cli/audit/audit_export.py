"""`memq auditor metrics`: findings, verdicts of the last hour and latencies, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from memq.audit.finding import EVIDENCE_MAX, Finding
from memq.audit.live.report_partition import Client
from memq.audit.live.view import AuditView, TopicSummary, latencies
from memq.audit.minutes import MINUTE_MS, QUEUE, CountSide, percentile_name
from memq.cli.exporter import export
from memq.observe.metrics import lines_of
from memq.runtime.network import Address, Runtime

MINUTES = 60  # that verdicts and latencies are about
STAGES = ("sent", "acked", "committed")
VERDICTS = ("lost", "doubled", "corrupt", "late", "unknown")
Series = Iterable[tuple[Sequence[str], float]]


@dataclass(frozen=True, slots=True)
class Known:
    """The data of one round: topics with their last hour, open findings, reporting clients."""

    topics: Sequence[TopicSummary]
    findings: Sequence[Finding]
    clients: Sequence[Client]
    now_ms: int


async def export_audit(view: AuditView, listen: Address, ready: Callable[[str], None]) -> int:
    """Serve what the state of the auditors says: see `export`."""
    runtime = Runtime()

    async def ask() -> Sequence[Metric]:
        now_ms = runtime.clock.wall_ms()
        minute = now_ms // MINUTE_MS
        topics = await view.topics(minute - MINUTES, minute + 1)
        findings = await view.findings(limit=EVIDENCE_MAX)
        return audit_metrics(Known(topics, findings, [each.client for each in await view.clients()], now_ms))

    return await export("audit", ask, listen, ready, runtime)


def audit_metrics(known: Known) -> list[Metric]:
    """Return what was read as metrics.

    A topic without findings has zeros, so that an alert can fire on a change.
    """
    holding = Counter((finding.topic, finding.kind.value) for finding in known.findings)
    for topic in known.topics:
        for kind in ("lost", "doubled", "corrupt"):
            holding.setdefault((topic.topic, kind), 0)
    sides = [(topic, name, side) for topic in known.topics for name, side in sorted(topic.row.sides.items())]
    newest = [
        (topic.topic, max((part.queue_ms for part in topic.partitions.values()), default=0)) for topic in known.topics
    ]
    return [
        lines_of("memq_audit_findings", sorted(holding.items())),
        lines_of(
            "memq_audit_records",
            [((topic.topic, stage), topic.row.side(QUEUE)[stage]) for topic in known.topics for stage in STAGES],
        ),
        lines_of("memq_audit_verdict_records", _verdicts(sides)),
        lines_of(
            "memq_audit_in_flight_records",
            [((topic.topic, name), topic.row.in_flight(name)) for topic, name, _ in sides],
        ),
        lines_of("memq_audit_latency_seconds", _latencies(known.topics)),
        lines_of("memq_audit_newest_pointer_time_seconds", [((name,), time_ms / 1000) for name, time_ms in newest]),
        lines_of("memq_audit_clients", [((), len(known.clients))]),
        lines_of("memq_audit_silent_clients", [((), sum(client.silent for client in known.clients))]),
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
