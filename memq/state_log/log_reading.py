"""Reads a whole state log without opening it, for the sweep and for `memq restore`.

Nothing is retried here: an answer that lacks entries is an error, and the caller changes nothing then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.format.state_log.entry import StateDecisions, StateSnapshot, decode_state_entry
from memq.limits import MIB
from memq.notification import PointerReader, Span
from memq.notification.log_reader import entries_between, valid_span
from memq.state_log.opening import LogScan
from memq.topic import ReadPartition

READ_BYTES = 1 * MIB


@dataclass(slots=True)
class StateLogReading:
    """The entries of a log as an opener takes them.

    `named` has the keys of all snapshots in its entries, also in void ones; `machines` those of its decisions.
    """

    scan: LogScan
    span: Span
    named: set[str] = field(default_factory=set)
    machines: set[str] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        """Whether the queue has no entry."""
        return self.span.begin == self.span.end


async def read_state_log(queue: PointerReader, partition: ReadPartition) -> StateLogReading:
    """Read a log from its begin to the end that the queue states first.

    Raises: QueueError when the queue shows less than this end; NotFoundError; CorruptDataError for a damaged entry;
    UnsupportedFormatError for one of a newer version.
    """
    span = await valid_span(queue, partition)
    reading = StateLogReading(LogScan(span.begin), span)
    async for entries in entries_between(queue, partition, span.begin, span.end, READ_BYTES):
        for entry in entries:
            decoded = decode_state_entry(entry.body)
            reading.scan.add(entry, decoded)
            if isinstance(decoded.content, StateSnapshot):
                reading.named.add(decoded.content.key)
            elif isinstance(decoded.content, StateDecisions):
                reading.machines.update(decision.machine for decision in decoded.content.decisions)
    if reading.scan.end < span.end:
        reading.scan.pass_over(span.end)
    return reading
