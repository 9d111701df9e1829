"""The live audit's memory with many records in flight (ten million in a soak), every second block missing."""

from __future__ import annotations

import tracemalloc

from memq.audit.live.partition import PartitionAudit
from memq.audit.live.partition_state import ReceivedReport
from memq.audit.live.storage.state import encode_state
from memq.format.ranges import Range
from memq.format.report import ReportPart, ReportSpan
from memq.limits import MIB
from tests.soak import repetitions
from tests.unit.audited import TOPIC, data_pointer
from tests.unit.blocks import NOW_MS
from tests.unit.live_audit_harness import MINUTE

ALL_PARTITIONS, PRODUCERS, BLOCKS, RECORDS = 50, 20, 100, 100  # ten million records
PARTITIONS = repetitions(3, ALL_PARTITIONS)
STATE_BYTES_MAX = 200 * MIB * PARTITIONS // ALL_PARTITIONS


def test_records_in_flight_fit_into_memory() -> None:
    tracemalloc.start()
    try:
        audits = [in_flight(PartitionAudit(TOPIC, 0)) for _ in range(PARTITIONS)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    waiting = sum(audit.take_rows()[MINUTE].in_flight("") for audit in audits)
    assert waiting * 2 == PARTITIONS * PRODUCERS * BLOCKS * RECORDS
    assert taken < STATE_BYTES_MAX, f"{taken / MIB:.0f} MiB"
    assert sum(len(encode_state(audit.state)) for audit in audits) < STATE_BYTES_MAX


def in_flight(audit: PartitionAudit) -> PartitionAudit:
    """Let all producers send all blocks, and every second one come into the queue, out of order."""
    everything: Range = (0, BLOCKS * RECORDS)
    for producer in range(1, PRODUCERS + 1):
        sent = ReportSpan(stage="sent", producer=producer, minute=MINUTE, ranges=(everything,), level=1)
        audit.add_report(
            ReceivedReport(
                producer, None, ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0, spans=(sent,)), NOW_MS
            )
        )
    for block in range(0, BLOCKS, 2):
        runs = [(producer, block * RECORDS, (block + 1) * RECORDS) for producer in range(1, PRODUCERS + 1)]
        audit.take_pointer(block, NOW_MS, data_pointer(runs, least_ms=NOW_MS, greatest_ms=NOW_MS))
    audit.settle(NOW_MS)
    return audit
