"""Planted bugs in the filters of readers; see `tests.simulation.planted_bugs`."""

from __future__ import annotations

from tests.simulation.bug import Planted, before, omit, swap

FILTER_BUGS = (
    Planted(
        "a pointer lacks the bit of a tag",
        "memq.format.pointer",
        "_to_wire",
        swap("_hex(pointer.tag_bits)", "_hex(pointer.tag_bits & (pointer.tag_bits - 1))"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a filter leaves out the last block of a batch",
        "memq.client.consumer.fetch.partition_cursor",
        "PartitionCursor._assemble",
        swap(
            "self.wanted.excludes_block(piece.header)",
            "(self.wanted.excludes_block(piece.header) or (len(pieces) > 1 and piece is pieces[-1]))",
        ),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a position stays before what a filter leaves out",
        "memq.client.consumer.fetch.fetch_scheduler",
        "FetchScheduler._deliver",
        omit("assigned.ledger.passed"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a position moves over a wanted batch behind an unwanted one",
        "memq.client.consumer.fetch.partition_cursor",
        "PartitionCursor._leave_out",
        before("self._pass", "if len(self._slots) > 1 and self._slots[1].ready: del self._slots[1]"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "what a filter leaves out is reported as processed",
        "memq.client.observers.audit_recorder",
        "ReadRecorder.deliver",
        swap("self._commits and wanted", "self._commits"),
        level="calm",
        aspects=("filter", "reports"),
    ),
    Planted(
        "what a filter leaves out is not reported",
        "memq.client.observers.audit_recorder",
        "ReadRecorder.leave_out",
        swap("part is not None", "False"),
        level="calm",
        aspects=("filter", "reports"),
    ),
    Planted(
        "blocks that come with their pointer are not filtered",
        "memq.client.consumer.fetch.fetch_scheduler",
        "FetchScheduler.take_blocks",
        before("assigned.cursor.fetched", "assigned.cursor.wanted = None"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a header that is missing is a match",
        "memq.client.consumer.predicate",
        "_comparison",
        swap("if one is None or other is None: return None", "if one is None or other is None: return True"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "the opposite of unknown is true",
        "memq.client.consumer.predicate",
        "_inverse",
        swap("None if found is None else not found", "not found"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a condition that needs no header gets no block without headers",
        "memq.client.consumer.record_filter",
        "RecordFilter.excludes_block",
        swap("self._bare or header.flags & HEADERS", "header.flags & HEADERS"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "a tag that shares the bit of a wanted one is delivered",
        "memq.client.consumer.record_filter",
        "RecordFilter.mask",
        swap("bytes(map(self._tags.__contains__, reader.tags()))", "bytes((1,)) * reader.count"),
        level="calm",
        aspects=("filter",),
    ),
    Planted(
        "records after the end count as left out",
        "memq.client.consumer.fetch.partition_cursor",
        "PartitionCursor.identify",
        swap("min(entry.count, high - first)", "entry.count"),
        level="calm",
        aspects=("filter",),
    ),
)
