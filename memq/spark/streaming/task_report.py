"""A stream task's report to the audit: the records it delivered of a range, at its end.

The task's thread makes notes, and the I/O thread takes them while that one waits for it. Connections are made for the
last word, and before only where a task takes longer than a report may. Twice STEP_S_MAX at most is added to a task that
reaches no broker; that its word is missing then is known to the auditor.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.observers.report_carrier import ReportCarrier
from memq.client.observers.reporter import STEP_S_MAX, JobReporter
from memq.errors import MemqError, UnsupportedFormatError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import BlockHeader
from memq.format.report import ReportedDamage, Stage, damage_of
from memq.runtime.network import Runtime
from memq.spark.read.planner import BatchPart
from memq.spark.streaming.task_ranges import TaskAudit, TaskRange


class _Note(NamedTuple):
    """Records of a block that passed a stage."""

    stage: Stage
    part: BatchPart
    header: BlockHeader
    first: int
    next: int


class TaskReport:
    """The report of one task. Notes by its thread; all else on the I/O thread."""

    def __init__(self, audit: TaskAudit, runtime: Runtime) -> None:
        self._audit = audit
        self._topics = {stretch.id: stretch for stretch in audit.stretches}
        self._notes: list[_Note] = []
        self._damages: list[tuple[BatchPart, ReportedDamage]] = []
        self._pool = LinkPool(runtime, bootstrap_addresses(audit.brokers), client_id="spark")
        self._pool.audit_ms = audit.interval_ms  # as the driver heard it; no broker was asked yet
        self._reporter = JobReporter("spark-task", audit.name, runtime, self._pool, ReportCarrier)

    def note(self, stage: Stage, part: BatchPart, header: BlockHeader, low: int, high: int) -> None:
        """Note that the records of a block from `low` up to `high` were given out, or left out."""
        self._notes.append(_Note(stage, part, header, header.first_sequence + low, header.first_sequence + high))

    def damage(self, part: BatchPart, piece: BlockPiece) -> None:
        """Note a block that can't be read; one that is newer than this reader is not damaged."""
        if part.pointer is None or isinstance(piece.cause, UnsupportedFormatError):
            return
        key = part.pointer.locations[0].key
        self._damages.append((part, damage_of(key, piece.number, part.offset, piece.records, piece.cause)))

    async def take(self) -> None:
        """Take the notes."""
        now_ms = self._reporter.now_ms()
        notes, self._notes = self._notes, []
        damages, self._damages = self._damages, []
        for stage, part, header, first, next_ in notes:
            tally = self._reporter.part(self._topic_of(part), _writer_of(part))
            if tally is not None:
                tally.pass_stage(stage, header.producer_id, first, next_, header.base_ms, now_ms)
        for part, damage in damages:
            tally = self._reporter.part(self._topic_of(part), _writer_of(part))
            if tally is not None:
                tally.damage(damage)

    async def close(self, *, whole: bool) -> None:
        """Send what was noted; `whole`: the task has come to its end, and this is all."""
        await self.take()
        for stretch in self._audit.stretches if whole else ():
            for writer in stretch.writers:
                tally = self._reporter.part(stretch, writer)
                if tally is not None:
                    tally.end(str(stretch.begin), str(stretch.end))
        with suppress(MemqError):
            if self._reporter.noted:
                await self._pool.reach(STEP_S_MAX)
        await self._reporter.close(STEP_S_MAX)
        await self._pool.close()

    def _topic_of(self, part: BatchPart) -> TaskRange:
        assert part.pointer is not None, "only batches are noted"
        return self._topics[part.pointer.topic_id]


def _writer_of(part: BatchPart) -> int:
    assert part.pointer is not None, "only batches are noted"
    return part.pointer.partition
