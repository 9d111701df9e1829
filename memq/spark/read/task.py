"""A Spark task: prefetches its batches from the store, and makes Arrow batches of blocks.

The task's thread makes notes for the audit. The I/O thread takes them while the task's thread waits for it. Connections
are made for the last report, and earlier only if the task takes longer than the interval of reports. A task that
reaches no broker ends at most 2 * STEP_S_MAX later; the auditor then knows that its report is missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.pointer_slot import part_between
from memq.client.consumer.record_filter import RecordFilter, filter_of
from memq.client.io_thread import io_thread
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.observers.audit_recorder import noted_runs
from memq.client.observers.reporter import STEP_S_MAX, JobReporter
from memq.errors import CorruptDataError, MemqError, NotFoundError, UnsupportedFormatError
from memq.format.batch import BlockPiece, NumberedEntry, missing_batch
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import BlockHeader, StoredBlock, is_sound
from memq.format.pointer import Pointer
from memq.format.report import ReportedDamage, Stage, damage_of
from memq.notification.dedup_window import DedupWindow, Novelty
from memq.notification.stored_blocks import claim_of, conflict_of, stored_block
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.spark.options import ReadOptions, fields_at
from memq.spark.read.arrow_rows import BlockOrigin, RowMaker
from memq.spark.read.planner import (
    BatchPart,
    Seen,
    Split,
    TaskAudit,
    TaskRange,
    TaskSettings,
    sound_blocks,
    sound_copies,
    split_parts,
    spread_bytes,
)
from memq.spark.read.pruning import ReadFilter
from memq.spark.stores import StoreUrls, TaskStores, begin_tasks
from memq.topic import Position

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

FETCHES_MAX = 32


def settings_of(options: ReadOptions, urls: StoreUrls, wanted: ReadFilter) -> TaskSettings:
    """Return the settings that all tasks share."""
    return TaskSettings(
        urls,
        wanted,
        options.prefetch_bytes,
        options.skip_damaged,
        options.dedup,
        options.missing_s,
        options.tags,
        options.where,
    )


def splits_of(parts: Sequence[BatchPart], options: ReadOptions, settings: TaskSettings) -> list[Split]:
    """Group the parts into the splits of tasks."""
    return split_parts(parts, spread_bytes(parts, options.partition_bytes), settings)


def read_task(split: Split, options: ReadOptions, schema: StructType) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of a split. Raises: as `read_split`."""
    from memq.spark.read.arrow_rows import Decoding, RowMaker, json_decoder  # they import pyarrow, which takes its time

    decoding = None
    if options.schema and options.value_format == "avro":
        from memq.spark.read.arrow_rows import avro_decoder  # an extra of its own

        decoding = Decoding(avro_decoder(options.avro_schema), options.fail_malformed)
    elif options.schema:
        decoding = Decoding(json_decoder, options.fail_malformed)
    fields = fields_at(schema.names, options.columns, options.schema)
    return read_split(split, RowMaker(schema, fields, decoding)) if split.settings is not None else iter(())


def read_split(split: Split, rows: RowMaker) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of a split, one Arrow batch for each block.

    Raises: CorruptDataError naming object and block, unless damage is skipped; UnsupportedFormatError; RetryableError
    of the store, which Spark answers with another try of the task; DeniedError.
    """
    settings = split.settings
    assert settings is not None, "a split without settings has nothing to read"
    begin_tasks()
    thread = io_thread()
    stores = TaskStores(settings.urls, Runtime())
    report = thread.run(_report_of(split.audit)) if split.audit is not None else None
    records = filter_of(settings.tags, settings.where)
    ahead = _Ahead(stores.fetcher(settings.missing_s), split.parts, settings, audited=report is not None)
    whole = False
    try:
        while (found := thread.run(_next(ahead, report))) is not None:
            if report is not None:
                report.leave_out(found)
            yield from _rows_of(found, settings, rows, report, records)
        whole = True
    finally:
        thread.run(_close(ahead, stores, report, whole=whole))


async def _report_of(audit: TaskAudit) -> TaskReport:
    return TaskReport(audit, Runtime())


async def _next(ahead: _Ahead, report: TaskReport | None) -> _Fetched | None:
    if report is not None:
        await report.take()
    return await ahead.next()


async def _close(ahead: _Ahead, stores: TaskStores, report: TaskReport | None, *, whole: bool) -> None:
    await ahead.close()
    await stores.close()
    if report is not None:
        await report.close(whole=whole)


class _Fetched(NamedTuple):
    """A batch in pieces, its sequences that earlier batches had, and the blocks with some of them.

    `passed` are the blocks that were not fetched, because no record in them has a wanted tag.
    """

    part: BatchPart
    pieces: Sequence[BlockPiece]
    seen: Sequence[Seen] = ()
    copies: Sequence[StoredBlock] = ()
    passed: Sequence[NumberedEntry] = ()


class _Ahead:
    """Fetches batches in parallel within a byte budget, and hands them out in order.

    It lives on the I/O thread.
    """

    def __init__(
        self, fetcher: BatchFetcher, parts: Sequence[BatchPart], settings: TaskSettings, *, audited: bool = False
    ) -> None:
        """If `audited`, the blocks that are not fetched are wanted, too."""
        self._fetcher = fetcher
        self._audited = audited
        self._parts = deque(parts)
        self._settings = settings
        self._fetches: deque[tuple[BatchPart, asyncio.Task[_Fetched]]] = deque()
        self._held_bytes = 0

    async def next(self) -> _Fetched | None:
        """Return the next batch; None at the end."""
        self._fill()
        if not self._fetches:
            return None
        part, fetch = self._fetches.popleft()
        fetched = await fetch
        self._held_bytes -= part.bytes
        self._fill()
        return fetched

    async def close(self) -> None:
        """Cancel the running fetches."""
        fetches = [fetch for _, fetch in self._fetches]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    def _fill(self) -> None:
        """Start fetches once half of them were handed out: at least one, of any size.

        Many start together, because those of neighbours in one large object become one request.
        """
        if len(self._fetches) > FETCHES_MAX // 2:
            return
        while self._parts and len(self._fetches) < FETCHES_MAX:
            size = self._parts[0].bytes
            if self._fetches and self._held_bytes + size > self._settings.prefetch_bytes:
                return
            part = self._parts.popleft()
            self._held_bytes += size
            fetch = asyncio.get_running_loop().create_task(self._fetch(part), name="spark fetches")
            self._fetches.append((part, fetch))

    async def _fetch(self, part: BatchPart) -> _Fetched:
        if part.pointer is None:
            return _Fetched(part, [BlockPiece(0, 0, 0, None, memoryview(b""), part.cause)])
        if part.left_out is not None:
            return _Fetched(part, ())
        passed: Sequence[NumberedEntry] = ()
        if self._audited and (part.by_index or part.unwanted):
            pieces, passed = await self._split_by_index(part.pointer)
        else:
            pieces = await self._pieces(part.pointer, by_index=part.by_index)
        if not part.earlier:
            return _Fetched(part, pieces, part.seen, part.copies, passed)
        earlier = [(pointer, await self._pieces(pointer)) for pointer in part.earlier]
        seen = sound_copies(part.seen, earlier) if self._settings.skip_damaged else part.seen
        return _Fetched(part, pieces, seen, (*part.copies, *sound_blocks(earlier)), passed)

    async def _split_by_index(self, pointer: Pointer) -> tuple[Sequence[BlockPiece], Sequence[NumberedEntry]]:
        """Return the blocks that may have wanted records, and the index entries of the others."""
        bits = self._settings.wanted.option_bits
        try:
            found = await self._fetcher.fetch_records(pointer, 0, pointer.records, lambda each: not each & bits)
        except NotFoundError as error:
            return missing_batch(pointer, CorruptDataError(f"its object is missing: {error}")), ()
        return found.pieces, found.passed

    async def _pieces(self, pointer: Pointer, *, by_index: bool = False) -> Sequence[BlockPiece]:
        try:
            if by_index:
                return await self._fetcher.fetch_blocks(pointer, self._settings.wanted.may_match)
            return await self._fetcher.fetch(pointer)
        except NotFoundError as error:
            return missing_batch(pointer, CorruptDataError(f"its object is missing: {error}"))


def _rows_of(
    fetched: _Fetched,
    settings: TaskSettings,
    rows: RowMaker,
    report: TaskReport | None,
    records: RecordFilter | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the wanted `records` of one batch, without seen ones and those that its pointer skips."""
    part, pieces = fetched.part, fetched.pieces
    seen = DedupWindow(1)
    pointer = part.pointer
    writer, skip = (pointer.partition, frozenset(pointer.skip)) if pointer is not None else (0, frozenset())
    for producer, (first, next_) in fetched.seen:
        seen.note(writer, producer, first, next_)
    stored = list(fetched.copies)
    for piece in pieces:
        low, high = max(0, part.low - piece.first), piece.records
        if part.high is not None:
            high = min(high, part.high - piece.first)
        if piece.number in skip or (low >= high and piece.records):
            if piece.header is not None and piece.number not in skip:
                _judge(seen, writer, piece)
            continue
        if piece.header is None:
            yield from _damaged(part, piece, settings, rows, report)
            continue
        stage: Stage = "fetched"
        if settings.dedup and _judge(seen, writer, piece) is Novelty.SEEN and not _conflicts(part, piece, stored):
            stage = "dropped"
        stored.append(stored_block(piece.header))
        mask = None
        if stage == "fetched":
            try:
                reader = BlockReader(piece.data, piece.header)
                mask = _mask_of(records, reader)
                found = (
                    [rows.block(_origin_of(part, piece), reader, low, high, mask)] if _any_of(mask, low, high) else []
                )
            except CorruptDataError as error:
                yield from _damaged(part, piece._replace(header=None, cause=error), settings, rows, report)
                continue
            yield from found
        if report is not None:
            report.note(stage, part, piece.header, low, high, mask)


def _mask_of(records: RecordFilter | None, reader: BlockReader) -> bytes | None:
    """Return 1 for each wanted record of a block; None if all are wanted. Raises: as `RecordFilter.mask`."""
    if records is None:
        return None
    return bytes(reader.count) if records.excludes_block(reader.header) else records.mask(reader)


def _any_of(mask: bytes | None, low: int, high: int) -> bool:
    return mask is None or 1 in mask[low:high]


def _judge(seen: DedupWindow, writer: int, piece: BlockPiece) -> Novelty:
    header = piece.header
    assert header is not None
    return seen.judge(writer, header.producer_id, header.first_sequence, header.next_sequence)


def _conflicts(part: BatchPart, piece: BlockPiece, stored: Sequence[StoredBlock]) -> bool:
    """Whether a block with seen sequences differs from the earlier blocks; that is logged."""
    header = piece.header
    assert header is not None
    claim = claim_of(header)
    other = [
        block
        for block in stored
        if block.producer_id == claim[0]
        and block.first_sequence < claim[2]
        and claim[1] < block.next_sequence
        and not block.is_copied_by(header)
    ]
    if other:
        origin = _origin_of(part, piece)
        where = (
            f"topic '{origin.topic}' at {Position(part.partition, part.offset, piece.first)}, object '{origin.object}'"
        )
        events = EventLog(Runtime().clock)
        events.error("spark.identity-conflict", f"{where}, read all the same: {conflict_of(header, other)}")
    return bool(other)


def _damaged(
    part: BatchPart, piece: BlockPiece, settings: TaskSettings, rows: RowMaker, report: TaskReport | None
) -> Iterator[pyarrow.RecordBatch]:
    """Skip a damaged block; its row goes to the column `damage` if that is read.

    A block with a right checksum came so from its producer, and no reader can ever read it. It is always skipped.
    Raises: see `read_split`.
    """
    cause = piece.cause
    assert cause is not None
    skip = settings.skip_damaged or is_sound(piece.data)
    origin = _origin_of(part, piece)
    if report is not None:
        report.damage(part, piece)
    if skip and piece.first < part.low:
        return  # reported by the reader of its first record, in the micro-batch before
    if not skip or isinstance(cause, UnsupportedFormatError):
        at = Position(part.partition, part.offset, piece.first)
        raise type(cause)(
            f"block {piece.number} of object '{origin.object}' at {at} of topic '{origin.topic}': {cause}",
            hint="run memq verify; with onDamaged = skip all others are read",
        ) from cause
    where = f"topic '{origin.topic}' at {Position(part.partition, part.offset, piece.first)}, object '{origin.object}'"
    events = EventLog(Runtime().clock)
    events.error("spark.damage-skipped", f"{where}, block {piece.number}: {cause}")
    row = rows.damage(origin, piece.number, piece.records, cause)
    if row is not None:
        yield row


def _origin_of(part: BatchPart, piece: BlockPiece) -> BlockOrigin:
    pointer = part.pointer
    if not isinstance(pointer, Pointer):
        return BlockOrigin("", part.partition, part.offset, 0, "")
    return BlockOrigin(pointer.topic, part.partition, part.offset, piece.first, pointer.locations[0].key, part.orphan)


class _Note(NamedTuple):
    """Records of a block that passed a stage."""

    stage: Stage
    part: BatchPart
    producer: int
    first: int
    next: int
    base_ms: int


class TaskReport:
    """The report of one task. The task's thread calls `note` and `damage`, the I/O thread the rest."""

    def __init__(self, audit: TaskAudit, runtime: Runtime) -> None:
        self._audit = audit
        self._topics = {stretch.id: stretch for stretch in audit.stretches}
        self._notes: list[_Note] = []
        self._damages: list[tuple[BatchPart, ReportedDamage]] = []
        self._pool = LinkPool(runtime, bootstrap_addresses(audit.brokers), client_id="spark")
        self._pool.audit_ms = audit.interval_ms  # from the driver; no broker was asked yet
        self._reporter = JobReporter("spark-task", audit.name, runtime, self._pool)

    def note(
        self, stage: Stage, part: BatchPart, header: BlockHeader, low: int, high: int, mask: bytes | None = None
    ) -> None:
        """Note that the records of a block from `low` up to `high` passed a stage: fetched, or dropped.

        Those with a 0 in `mask` were left out by the filter.
        """
        begin = header.first_sequence
        for wanted, (first, next_) in noted_runs(mask, low, high):
            at = stage if wanted else "passed"
            self._notes.append(_Note(at, part, header.producer_id, begin + first, begin + next_, header.base_ms))

    def leave_out(self, fetched: _Fetched) -> None:
        """Note the blocks of a batch that were not fetched, as far as they are in the part."""
        part, pointer = fetched.part, fetched.part.pointer
        for _, producer, first, next_, base_ms in part.left_out or ():
            self._notes.append(_Note("passed", part, producer, first, next_, base_ms))
        for number, at, entry in fetched.passed:
            low, high = part_between(at, entry.count, part.low, part.high)
            if low < high and pointer is not None and number not in pointer.skip:
                first = entry.first_sequence
                self._notes.append(_Note("passed", part, entry.producer_id, first + low, first + high, entry.least_ms))

    def damage(self, part: BatchPart, piece: BlockPiece) -> None:
        """Note an unreadable block; a block of a newer version is not damaged."""
        if part.pointer is None or isinstance(piece.cause, UnsupportedFormatError):
            return
        key = part.pointer.locations[0].key
        self._damages.append((part, damage_of(key, piece.number, part.offset, piece.records, piece.cause)))

    async def take(self) -> None:
        """Move the notes into the report."""
        now_ms = self._reporter.now_ms()
        notes, self._notes = self._notes, []
        damages, self._damages = self._damages, []
        for stage, part, producer, first, next_, base_ms in notes:
            recorder = self._reporter.part(self._topic_of(part), _writer_of(part))
            if recorder is not None:
                recorder.pass_stage(stage, producer, first, next_, base_ms, now_ms)
        for part, damage in damages:
            recorder = self._reporter.part(self._topic_of(part), _writer_of(part))
            if recorder is not None:
                recorder.damage(damage)

    async def close(self, *, whole: bool) -> None:
        """Send the last report. With `whole`, the task has read all its ranges, and the report states it."""
        await self.take()
        for stretch in self._audit.stretches if whole else ():
            for writer in stretch.writers:
                recorder = self._reporter.part(stretch, writer)
                if recorder is not None:
                    recorder.end(str(stretch.begin), str(stretch.end))
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
