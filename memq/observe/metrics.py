"""All metrics of memq: name, kind, unit, meaning, labels, bound of series.

What is exported, docs/metrics.md, the Grafana boards and the alert rules of deploy/ are checked against this table.
Whoever counts knows only the last part of a name (`Counters.acks` of the broker is `memq_broker_acks_total`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memq.topic import namespace_of

Kind = Literal["counter", "gauge", "histogram"]

NAMESPACE = "namespace"  # the label that `lines_of` derives from the label "topic"
OPERATIONS_MAX = 100  # rows of the table of operations
STORES_MAX = 16  # that a cluster may name
SUBJECTS_MAX = 21_000  # clients and principals that the brokers remember, and topics with a limit
CLIENTS_MAX = 1_000  # that one collector is given
AUDIT_SERIES_MAX = 20_000  # 1,000 topics with a group each have 14,000 latencies and words
QUEUE_SERIES_MAX = 32  # 8 service partitions, 4 states
QUEUE_EVENTS_MAX = 1_000  # 8 service partitions, 25 queues of each, 5 events
LAG_SERIES_MAX = 10_000  # groups times topics; further ones are counted, and only `memq lag` shows them


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    `name` is its family's: a counter's line ends in `_total`, a histogram has three.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    series_max: int = 1

    @property
    def exported(self) -> tuple[str, ...]:
        """Return the names of its lines."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


def _broker_counter(name: str, unit: str, doc: str) -> Definition:
    return Definition(f"memq_broker_{name}", "counter", unit, doc)


def _broker_gauge(name: str, unit: str, doc: str) -> Definition:
    return Definition(f"memq_broker_{name}", "gauge", unit, doc)


def _broker_histogram(name: str, doc: str) -> Definition:
    return Definition(f"memq_broker_{name}", "histogram", "seconds", doc)


def _store_counter(name: str, unit: str, doc: str) -> Definition:
    return Definition(f"memq_store_{name}", "counter", unit, doc, ("store",), STORES_MAX)


BROKER = (
    _broker_counter("received_bytes", "bytes", "bytes received on the memq port"),
    _broker_counter("received_blocks", "blocks", "blocks taken from producers"),
    _broker_counter("received_records", "records", "records taken from producers"),
    _broker_counter("duplicate_blocks", "blocks", "blocks dropped because the queue or the ring has them"),
    _broker_counter("conflicting_blocks", "blocks", "blocks with the sequences of another block and other content"),
    _broker_counter("refused_blocks", "blocks", "blocks that were refused: damaged, too old, out of sequence"),
    _broker_counter("throttled_blocks", "blocks", "blocks that were not taken because the ring was full"),
    _broker_counter("sealed_batches", "batches", "batches sealed"),
    _broker_counter("stored_objects", "objects", "objects written to the store"),
    _broker_counter("stored_bytes", "bytes", "bytes written to the store"),
    _broker_counter("store_retries", "tries", "puts that were tried again"),
    _broker_counter("published_pointers", "pointers", "pointers published in the queue"),
    _broker_counter("publish_retries", "tries", "publishes, and reads of the log before them, that were tried again"),
    _broker_counter("skipped_blocks", "blocks", "blocks that a pointer marks for readers to skip"),
    _broker_counter("late_pointers", "pointers", "pointers of earlier owners found after the opening"),
    _broker_counter("damaged_pointers", "pointers", "unreadable pointers, counted at each read"),
    _broker_counter("coordinator_failures", "rounds", "rounds in which the coordinator could not be read or written"),
    _broker_counter("openings", "epochs", "epochs opened"),
    _broker_counter("opening_retries", "tries", "retries of openings, because of queue, coordinator or a wrong clock"),
    _broker_counter("fenced", "epochs", "epochs lost to another owner"),
    _broker_counter(
        "suspicions", "suspicions", "reported brokers whose ports refused a connection of this broker, too"
    ),
    _broker_counter(
        "early_takeovers", "takeovers", "brokers whose partitions were assigned before their session ended"
    ),
    _broker_counter(
        "forwarded_blocks", "blocks", "blocks of lost epochs, acked with 1, that their new owner has published"
    ),
    _broker_counter("lost_held_blocks", "blocks", "held blocks that were missing or damaged when they were due"),
    _broker_counter("forward_retries", "tries", "attempts to forward blocks of a lost epoch that no owner accepted"),
    _broker_counter(
        "given_up_blocks", "blocks", "blocks acked with 1 that were given up, because no owner accepted them in time"
    ),
    _broker_counter("spooled_blocks", "blocks", "blocks written to the spool"),
    _broker_counter("spooled_bytes", "bytes", "bytes written to the spool"),
    _broker_counter("spool_syncs", "writes", "writes of the spool, each with one fsync"),
    _broker_counter(
        "spool_copied_bytes", "bytes", "bytes copied to the end of the spool, from segments of which little is needed"
    ),
    _broker_counter(
        "spool_refused_blocks", "blocks", "blocks not acked with 1, because the spool could not store them"
    ),
    _broker_counter("replayed_blocks", "blocks", "blocks of an earlier run in the spool, searched for in the queue"),
    _broker_counter("spool_damages", "ranges", "byte ranges of the spool that could not be read"),
    _broker_counter("spool_undecided_blocks", "blocks", "blocks in the spool that the queue may or may not have"),
    _broker_counter(
        "spool_kept_blocks",
        "blocks",
        "blocks given up that stay in the spool; the next start publishes them",
    ),
    _broker_counter("acks", "frames", "ack frames sent"),
    _broker_counter("read_requests", "requests", "READ requests"),
    _broker_counter("read_hot_requests", "requests", "READ requests served from memory"),
    _broker_counter("poll_batches", "batches", "batches that were sent with their pointers, in answers to POLL"),
    _broker_counter("read_bytes", "bytes", "bytes sent in answer to READ"),
    _broker_counter("connections", "connections", "connections accepted"),
    _broker_counter("rejected_connections", "connections", "connections closed because of forbidden or missing frames"),
    _broker_counter("turned_away_connections", "connections", "connections refused by a bound, in all or per address"),
    _broker_counter("slow_frames", "frames", "slow frames whose connections were closed because memory was short"),
    Definition(
        "memq_broker_denied_requests",
        "counter",
        "requests",
        "requests refused because their principal lacks a permission, by operation",
        ("operation",),
        OPERATIONS_MAX,
    ),
    _broker_counter("swept_objects", "objects", "objects deleted that no pointer named"),
    _broker_counter("swept_bytes", "bytes", "bytes of objects deleted that no pointer named"),
    _broker_counter(
        "kept_objects", "objects", "objects that a sweep kept, because the queue may have lost their pointers"
    ),
    _broker_counter("unnamed_objects", "objects", "objects without a pointer that a sweep found for the first time"),
    _broker_counter("retired_pointers", "pointers", "pointers deleted by retention"),
    _broker_counter("retired_objects", "objects", "objects deleted by retention"),
    _broker_counter("retention_cuts", "runs", "runs of retention that a group was too late for"),
    _broker_counter("expired_topics", "topics", "idle topics that this broker has deleted as the governor"),
    _broker_counter("delayed_records", "records", "delayed records that began to wait"),
    _broker_counter("delayed_delivered_records", "records", "delayed records that were due and came into their logs"),
    _broker_counter("delayed_cancelled_records", "records", "delayed records that were cancelled"),
    _broker_counter("committed_transactions", "transactions", "transactions that were committed"),
    _broker_counter("aborted_transactions", "transactions", "transactions that were rolled back, time-outs included"),
    _broker_counter("expired_transactions", "transactions", "transactions that were rolled back by their time-out"),
    _broker_counter("transaction_checks", "questions", "questions to producer groups about undecided transactions"),
    _broker_counter("queue_enqueued_items", "items", "items that came into queues"),
    _broker_counter("queue_leased_items", "items", "leases of queue items"),
    _broker_counter("queue_redelivered_items", "items", "leases of queue items that had one before"),
    _broker_counter("queue_acked_items", "items", "queue items that were acked"),
    _broker_counter("queue_nacked_items", "items", "queue items that were given back, unused ones included"),
    _broker_counter("queue_expired_items", "items", "queue items whose life ended without an ack"),
    _broker_counter("queue_dead_items", "items", "queue items that had all their attempts, or were given up"),
    _broker_counter("queue_cancelled_items", "items", "queue items that were cancelled"),
    _broker_histogram("queue_processing_seconds", "seconds from the first due time of a queue item to its ack"),
    _broker_histogram("delayed_late_seconds", "seconds from the due time of a delayed record to its place in the log"),
    _broker_histogram("store_seconds", "seconds of a put, its tries included"),
    _broker_histogram("publish_seconds", "seconds of a publish, its tries included"),
    _broker_histogram("ack_seconds", "seconds from a batch's first block to its ack"),
    _broker_gauge("memory_budget_bytes", "bytes", "the memory budget"),
    _broker_gauge("memory_leased_bytes", "bytes", "memory of blocks and incomplete frames"),
    _broker_gauge("memory_hot_bytes", "bytes", "memory of published batches"),
    _broker_gauge("spool_held_bytes", "bytes", "bytes in the spool"),
    _broker_gauge("spool_segments", "segments", "segments of the spool"),
    _broker_gauge("reading_paused", "0 or 1", "1 while the memory budget stops all reading"),
    _broker_gauge("open_connections", "connections", "connections now"),
    _broker_gauge("open_partitions", "partitions", "partitions that are open here"),
    _broker_gauge(
        "lost_partitions", "partitions", "partitions that are not opened, because the queue has lost their log"
    ),
    _broker_gauge(
        "sweep_pending_objects",
        "objects",
        "objects that wait now for a later sweep; at the governor",
    ),
    _broker_gauge("sweep_pending_bytes", "bytes", "bytes of objects that wait for a later sweep; at the governor"),
    _broker_gauge(
        "sweep_unproven_objects",
        "objects",
        "objects that the sweep keeps, because no batch has their records; at the governor",
    ),
    _broker_gauge("ring_batches", "batches", "batches that are not yet published"),
    _broker_gauge(
        "delayed_waiting_records", "records", "delayed records that wait; of the service partitions that are open here"
    ),
    _broker_gauge(
        "delayed_overdue_seconds", "seconds", "age of the oldest delayed record that is due and not in its log, or 0"
    ),
    Definition(
        "memq_broker_queue_items",
        "gauge",
        "items",
        "queue items of the shards that are open here, by state: ready, leased, delayed, dead; up to 5 s old",
        ("shard", "state"),
        QUEUE_SERIES_MAX,
    ),
    Definition(
        "memq_broker_queue_oldest_ready_seconds",
        "gauge",
        "seconds",
        "age of the oldest ready item of each shard of queues, or 0",
        ("shard",),
        QUEUE_SERIES_MAX,
    ),
    Definition(
        "memq_broker_queue_item_events",
        "counter",
        "items",
        "queue items by event, of the 25 queues of each shard that were used last here: enqueued, leased, redelivered,"
        " acked, dead",
        ("queue", "event"),
        QUEUE_EVENTS_MAX,
    ),
    _broker_gauge("open_transactions", "transactions", "open transactions whose coordinator is here"),
    _broker_gauge("prepared_transactions", "transactions", "prepared transactions that are undecided, parked included"),
    _broker_gauge("parked_transactions", "transactions", "prepared transactions that wait for an operator"),
    _broker_gauge("open_transaction_blocks", "blocks", "held blocks of open and prepared transactions"),
    _broker_gauge("oldest_transaction_seconds", "seconds", "age of the oldest open transaction, or 0"),
    Definition(
        "memq_broker_over_limit",
        "counter",
        "requests",
        "blocks and requests over a limit: counted only (observe), slowed (soft), refused (hard)",
        ("subject", "name", "mode"),
        SUBJECTS_MAX,
    ),
)

STORE = (
    _store_counter("requests", "requests", "requests sent to the store, of any kind, hedges and tries included"),
    _store_counter("put_requests", "requests", "requests that send an object or a part of one"),
    _store_counter("get_requests", "requests", "requests that read an object or a part of one"),
    _store_counter("retries", "requests", "requests that were sent again after a failure"),
    _store_counter("slow_downs", "answers", "answers by which the store asked for a lower rate"),
    _store_counter("timeouts", "requests", "requests that timed out"),
    _store_counter("damaged", "bodies", "bodies that did not match their checksum, in either direction"),
    _store_counter("hedges", "requests", "second requests sent because the first was slow"),
    _store_counter("hedges_won", "requests", "second requests that came back first"),
    _store_counter("lost_answers", "requests", "puts that succeeded although their answer was lost"),
    _store_counter("breaker_openings", "openings", "times that the circuit breaker opened"),
    Definition(
        "memq_store_breaker_open",
        "gauge",
        "0 or 1",
        "1 while the circuit breaker lets few requests through",
        ("store",),
        STORES_MAX,
    ),
)

LAG = (
    Definition(
        "memq_group_lag_records",
        "gauge",
        "records",
        "records between a group's position and the end, before dedup",
        ("group", "topic", NAMESPACE),
        LAG_SERIES_MAX,
    ),
    Definition(
        "memq_group_lag_bytes",
        "gauge",
        "bytes",
        "stored bytes between a group's position and the end, before dedup",
        ("group", "topic", NAMESPACE),
        LAG_SERIES_MAX,
    ),
    Definition(
        "memq_group_lag_seconds",
        "gauge",
        "seconds",
        "age of the oldest record that a group has not committed, 0 if there is none",
        ("group", "topic", NAMESPACE),
        LAG_SERIES_MAX,
    ),
    Definition(
        "memq_group_lag_unknown_partitions",
        "gauge",
        "partitions",
        "partitions whose log did not answer; if there is one, the lag of group and topic is not exported",
        ("group", "topic", NAMESPACE),
        LAG_SERIES_MAX,
    ),
    Definition("memq_group_members", "gauge", "members", "members that a group has now", ("group",), LAG_SERIES_MAX),
    Definition(
        "memq_group_dead_letters",
        "gauge",
        "records",
        "dead letters and parked records of a listener's group that wait",
        ("group",),
        LAG_SERIES_MAX,
    ),
    Definition("memq_lag_rounds", "counter", "rounds", "rounds in which the lag of all groups was read"),
    Definition(
        "memq_lag_failed_rounds", "counter", "rounds", "rounds that failed: no lag is exported until one succeeds"
    ),
    Definition(
        "memq_lag_left_out_series",
        "gauge",
        "series",
        f"groups times topics beyond {LAG_SERIES_MAX}, which are not exported",
    ),
)


AUDIT = (
    Definition(
        "memq_audit_findings",
        "gauge",
        "findings",
        "open findings: lost, doubled, corrupt and others",
        ("topic", "kind", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition(
        "memq_audit_records",
        "gauge",
        "records",
        "records of the last hour by stage: sent, acked, committed",
        ("topic", "stage", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition(
        "memq_audit_verdict_records",
        "gauge",
        "records",
        "records of the last hour that are lost, doubled, corrupt, late or unknown; group is empty for all readers",
        ("topic", "group", "verdict", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition(
        "memq_audit_in_flight_records",
        "gauge",
        "records",
        "records of the last hour that the group, or if it is empty the queue, has not received yet",
        ("topic", "group", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition(
        "memq_audit_latency_seconds",
        "gauge",
        "seconds",
        "from event time to a stage, in the last hour",
        ("topic", "group", "stage", "percentile", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition(
        "memq_audit_newest_pointer_time_seconds",
        "gauge",
        "seconds",
        "Unix time of the newest pointer that was audited",
        ("topic", NAMESPACE),
        AUDIT_SERIES_MAX,
    ),
    Definition("memq_audit_clients", "gauge", "clients", "clients whose reports are awaited"),
    Definition(
        "memq_audit_silent_clients",
        "gauge",
        "clients",
        "clients that have not reported as they promised: their work is unknown",
    ),
    Definition(
        "memq_audit_reports_read_time_seconds",
        "gauge",
        "seconds",
        "Unix time at which auditors had last read all reports of clients; later verdicts are unknown",
    ),
    Definition("memq_audit_rounds", "counter", "rounds", "rounds in which the state of the auditors was read"),
    Definition(
        "memq_audit_failed_rounds", "counter", "rounds", "rounds that failed: nothing is exported until one succeeds"
    ),
)


def _client(name: str, kind: Kind, unit: str, doc: str) -> Definition:
    return Definition(f"memq_{name}", kind, unit, doc, ("client",), CLIENTS_MAX)


CLIENTS = (
    _client("producer_acked_records", "counter", "records", "records that were acked"),
    _client("producer_failed_records", "counter", "records", "records that failed"),
    _client("producer_acked_blocks", "counter", "blocks", "blocks that were acked"),
    _client("producer_failed_blocks", "counter", "blocks", "blocks that failed"),
    _client("producer_block_writes", "counter", "writes", "blocks written to a socket; beyond those acked, sent again"),
    _client("producer_acked_bytes", "counter", "bytes", "bytes of sealed blocks that were acked"),
    _client("producer_pending_records", "gauge", "records", "records that are not acked yet"),
    _client("producer_pending_bytes", "gauge", "bytes", "unacked bytes, bounded by `pending_bytes_max`"),
    _client("consumer_records", "counter", "records", "records delivered"),
    _client("consumer_filtered_records", "counter", "records", "records that the filter of a consumer left out"),
    _client("consumer_duplicate_records", "counter", "records", "records dropped, because they were delivered before"),
    _client("consumer_overlapping_blocks", "counter", "blocks", "blocks of which a part was delivered before"),
    _client("consumer_conflicting_blocks", "counter", "blocks", "blocks delivered with the sequences of other blocks"),
    _client("consumer_damaged_blocks", "counter", "blocks", "damaged blocks skipped"),
    _client("consumer_damaged_records", "counter", "records", "records in skipped damaged blocks"),
    _client("consumer_gap_sequences", "counter", "records", "missing sequences of producers"),
    _client("consumer_expired_records", "counter", "records", "records that retention removed before they were read"),
    _client("consumer_expired_offsets", "counter", "pointers", "pointers that retention removed before they were read"),
    _client("consumer_retries", "counter", "tries", "polls and fetches that failed and were tried again"),
    _client("consumer_commits", "counter", "commits", "commits stored"),
    _client("consumer_dead_letters", "counter", "blocks", "damaged blocks sent to the dead-letter topic"),
    _client("consumer_transit_errors", "counter", "answers", "answers of stores that another fetch has contradicted"),
    _client("listener_done_records", "counter", "records", "records that handlers have completed"),
    _client("listener_retried_records", "counter", "records", "records that come again, counted at each retry"),
    _client("listener_dead_letters", "counter", "records", "records that became dead letters"),
    _client("listener_parked_records", "counter", "records", "records that were parked"),
    _client("listener_working_records", "gauge", "records", "records at work"),
    _client("listener_handler_seconds", "counter", "seconds", "seconds in handlers, all of their attempts added"),
)

METRICS: dict[str, Definition] = {metric.name: metric for metric in (*BROKER, *STORE, *LAG, *AUDIT, *CLIENTS)}


def lines_of(name: str, series: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a counter or gauge of `memq.observe.metrics.METRICS` with its series: label values, number.

    The namespace of the topic is added, "" without one, which Prometheus takes for no label.
    """
    metric = METRICS[name]
    topic = metric.labels.index("topic") if NAMESPACE in metric.labels else -1
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in islice(series, metric.series_max):
        family.add_metric(labels if topic < 0 else (*labels, namespace_of(labels[topic])), value)
    return family
