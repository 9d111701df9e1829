"""Copies Kafka topics into a topic: can be killed at any moment, continues, copies no record twice.

All state is at the two ends, so it survives a SIGKILL. The target's queue shows the progress of each source partition,
because the source's offsets are the sequences. The source's group stores the plan, which has the end of the last block
(`memq.client.bulk.block_cutter`). The copying machine stores nothing. The next run cuts the same blocks as a killed run
had in flight, so owners or readers drop the copies within the dedup window.

`ImportProgress` reads the progress of one producer, and the positions of sequences, from the target's queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from memq.client.admin import AsyncAdmin
from memq.client.arguments import runtime_of
from memq.client.broker_router import BrokerRouter
from memq.client.bulk.block_cutter import Cutter, decode_plan, encode_plan, producer_of
from memq.client.bulk.direct_writer import FixedIdentityWriter
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.offset_resolver import IndexOf
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.producer.fields import RecordFields
from memq.errors import InvalidNameError, InvalidRequestError, MemqError, NotFoundError, TooLargeError
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import PointerReader
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.reading.import_source import KafkaSource, SourceEnd, SourceRecord
from memq.notification.log_reader import entries_between, valid_span
from memq.notification.remote import RemoteQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position, ReadPartition, Topic

TAKE_S = 0.2
STORE_S = 1.0  # how often the positions are stored: what was copied since is found by the target's queue
STEP = 256  # pointers that are checked first, from the end; then four times as many


@dataclass(frozen=True, slots=True)
class Held:
    """A producer's progress: the sequence after its highest, and the seal time of that batch (Unix ms)."""

    next: int
    sealed_ms: int


class ImportProgress:
    """Reads the progress of one producer in one write partition from the pointers of a read partition."""

    def __init__(
        self, queue: PointerReader, index_of: IndexOf, partition: ReadPartition, writer: int, producer_id: int
    ) -> None:
        self._queue = queue
        self._index_of = index_of
        self._partition = partition
        self._writer = writer
        self._producer_id = producer_id

    async def held(self) -> Held | None:
        """Return the producer's progress; None if no remaining pointer names it.

        An owner publishes a producer's blocks in order, but a copy of an earlier block may come later. So the result
        is the highest sequence in the last part of the log that has any.
        """
        span = await valid_span(self._queue, self._partition)
        end, step = span.end, STEP
        while end > span.begin:
            first = max(span.begin, end - step)
            found = [
                Held(max(next_ for _, next_ in ranges), pointer.sealed_ms)
                async for _, pointer in self._pointers(first, end)
                if (ranges := await self._ranges(pointer))
            ]
            if found:
                return max(found, key=lambda held: held.next)
            end, step = first, step * 4
        return None

    async def positions(self, sequences: Sequence[int]) -> dict[int, Position]:
        """Return the first position of each sequence, or that of the next existing one.

        For a sequence after all others it is the end of the partition.
        """
        span = await valid_span(self._queue, self._partition)
        left, found = sorted(sequences), dict[int, Position]()
        number = self._partition.partition
        async for offset, pointer in self._pointers(span.begin, span.end):
            if not left:
                break
            ranges = await self._ranges(pointer)
            if ranges and left[0] < max(next_ for _, next_ in ranges):
                index = 0
                for block in await self._index_of(pointer):
                    while left and self._is_own(block.producer_id) and left[0] < block.first_sequence + block.count:
                        sequence = left.pop(0)
                        found[sequence] = Position(number, offset, index + max(0, sequence - block.first_sequence))
                    index += block.count
        return found | {sequence: Position(number, span.end, 0) for sequence in left}

    def _is_own(self, producer_id: int) -> bool:
        return producer_id == self._producer_id

    async def _ranges(self, pointer: Pointer) -> list[tuple[int, int]]:
        """Return the sequences of the producer in a batch."""
        found = [part for held in pointer.producers if self._is_own(held.producer) for part in held.ranges]
        if found or pointer.producers_complete:
            return [(first, next_) for first, next_ in found]
        return [
            (block.first_sequence, block.first_sequence + block.count)
            for block in await self._index_of(pointer)
            if self._is_own(block.producer_id)
        ]

    async def _pointers(self, first: int, end: int) -> AsyncIterator[tuple[int, Pointer]]:
        async for entries in entries_between(self._queue, self._partition, first, end):
            for entry in entries:
                try:
                    pointer = decode_pointer(entry.body)
                except MemqError:
                    continue  # unreadable: its batch is unknown
                if pointer.kind == "data" and pointer.partition == self._writer:
                    yield entry.offset, pointer


class PartitionImport:
    """The copy of one source partition into one write partition: its plan, cutter and writer.

    `end` is the end of the current plan; `last_end` is the offset at which this run stops.
    """

    def __init__(
        self,
        partition: KafkaPartition,
        imported: ImportProgress,
        copier: FixedIdentityWriter,
        target: str,
        end: int,
        last_end: int,
    ) -> None:
        self.partition = partition
        self.imported = imported
        self.copier = copier
        self.end = end
        self.last_end = last_end
        self.begin = copier.acked
        self.records = 0
        self.reached = copier.acked >= end  # the plan's end was met in the source
        self._next = copier.acked  # the offset after the last record that was taken
        self._cutter = Cutter(target, partition[1])

    @property
    def position(self) -> tuple[int, str]:
        """The stored state of a copy: its confirmed progress, and its plan."""
        return self.copier.acked, encode_plan(self.end)

    @property
    def done(self) -> bool:
        """Whether all records are read."""
        return self.reached and self.end >= self.last_end

    async def take(self, record: SourceRecord, record_bytes_max: int) -> None:
        """Add the next record. Raises: TooLargeError; the error of an earlier block.

        A record that was taken before is left out. Kafka's client begins again at the first record of a partition if
        Kafka calls the requested offset out of range, as a node does that lags.
        """
        if self.reached or record.offset < self._next:
            return
        if record.offset >= self.end:
            self.reached = True
            return
        fields = RecordFields(record.value, record.key, record.headers, record.timestamp_ms, None)
        size = fields.size
        if size > record_bytes_max:
            raise TooLargeError(
                f"record {record.offset} of partition {self.partition[1]} of Kafka topic '{self.partition[0]}' has "
                f"{size} bytes, record_bytes_max of the topic is {record_bytes_max}",
                hint="memq topic alter TOPIC --set record_bytes_max=…, then start the import again",
            )
        self.records += 1
        self._next = record.offset + 1
        cut = self._cutter.add(record.offset, fields, size)
        if cut is not None:
            await self.copier.put(cut)

    def meet_end(self, offset: int) -> None:
        """Note that the source has no further record before `offset`."""
        self.reached = self.reached or offset >= self.end

    async def finish(self) -> None:
        """Send the rest of the plan and wait for its acks."""
        cut = self._cutter.end()
        if cut is not None:
            await self.copier.put(cut)
        await self.copier.drain()
        self.copier.acked = max(self.copier.acked, self.end)  # what lies between are no records

    def renew(self) -> None:
        """Begin the plan of this run after an earlier run's plan is complete."""
        self.end, self.reached = self.last_end, False


@dataclass(frozen=True, slots=True)
class ImportedPartition:
    """The copy of one source partition: records copied by this run, and its offsets."""

    topic: str
    partition: int
    records: int
    begin: int
    end: int


class KafkaImport:
    """One run: call `run`, then `copy_groups` if positions of groups are wanted, then `close`."""

    def __init__(
        self,
        source: KafkaSource,
        brokers: str | Sequence[str] | None,
        into: str,
        *,
        moved: Callable[[int], None] = lambda records: None,
        step: Callable[[str], None] = lambda text: None,
        runtime: Runtime | None = None,
    ) -> None:
        """`moved` receives the number of further records read, `step` what is done next."""
        self._source = source
        self._runtime = runtime_of(runtime)
        self._bootstrap = bootstrap_addresses(brokers)
        self._into = into
        self._moved = moved
        self._step = step
        self._admin = AsyncAdmin(brokers, runtime=self._runtime)
        self._pool = LinkPool(self._runtime, self._bootstrap)
        self._any = BrokerRouter(self._pool)
        self._queue = RemoteQueue(self._any)
        self._fetcher = BatchFetcher(
            "broker", self._any.read, lambda store: None, ConfirmedReads(EventLog(self._runtime.clock))
        )
        self._lanes: dict[KafkaPartition, PartitionImport] = {}
        self._group = ""

    async def run(self, topics: Sequence[str]) -> list[ImportedPartition]:
        """Copy all present records of the topics; partition N of each is copied into partition N.

        Raises: NotFoundError, InvalidRequestError, TooLargeError, DeniedError; GenerationFencedError if another run
        took over; errors of Kafka and memq, after which a new run continues.
        """
        self._step(f"asking Kafka for {', '.join(topics)}")
        cluster, found = await self._source.describe(topics)
        self._step(f"asking for topic {self._into}")
        target = await self._target(max(each.partitions for each in found.values()))
        self._group = f"memq-import.{target.id}"
        partitions = [(topic, number) for topic, each in found.items() for number in range(each.partitions)]
        self._step(f"joining group {self._group} of Kafka; it waits until an earlier import has left")
        await self._source.join(self._group, topics, partitions)
        self._step(f"asking Kafka where {len(partitions)} partitions begin and end")
        ends = await self._source.ends(partitions)
        stored = await self._source.stored(partitions)
        self._step("looking for records that an earlier import has copied")
        for partition in partitions:
            producer = producer_of(cluster, found[partition[0]].id, partition[1], target.id)
            self._lanes[partition] = await self._lane(
                partition, target, producer, ends[partition], stored.get(partition)
            )
        await self._source.store({partition: lane.position for partition, lane in self._lanes.items()})
        await self._source.start({partition: lane.begin for partition, lane in self._lanes.items()})
        self._step("reading the first records")
        await self._copy(target)
        self._step("closing")
        for lane in self._lanes.values():
            await lane.copier.close()
        return [
            ImportedPartition(*partition, lane.records, lane.begin, lane.end) for partition, lane in self._lanes.items()
        ]

    async def copy_groups(self) -> dict[str, int]:
        """Give the target's groups the positions of the source's groups of the same names.

        Returns the number of positions of each group; 0 if its name is invalid in memq. A group with members at the
        target is refused. Raises: InvalidRequestError, also if several topics were copied.
        """
        if len({topic for topic, _ in self._lanes}) > 1:
            raise InvalidRequestError(
                "positions of groups can't be copied from several topics into one", hint="import one topic at a time"
            )
        self._step("copying the positions of groups")
        found = await self._source.committed_of_others(list(self._lanes), self._group)
        wanted: dict[KafkaPartition, list[int]] = {}
        for offsets in found.values():
            for partition, offset in offsets.items():
                wanted.setdefault(partition, []).append(offset)
        known = {each: await self._lanes[each].imported.positions(offsets) for each, offsets in wanted.items()}
        copied: dict[str, int] = {}
        for group, offsets in found.items():
            positions: list[Position] = [known[partition][offset] for partition, offset in offsets.items()]
            try:
                await self._admin.reset_group(group, self._into, positions, new_ok=True)
            except InvalidNameError:
                positions = []
            copied[group] = len(positions)
        return copied

    async def close(self) -> None:
        """Leave the group and disconnect."""
        for lane in self._lanes.values():
            await lane.copier.abandon()
        await self._pool.close()
        await self._admin.close()
        await self._source.close()

    # ---- inside ---------------------------------------------------------------------------------

    async def _target(self, partitions: int) -> Topic:
        """Return the topic that is copied into, made as wide as the widest source when it is not there."""
        try:
            found = (await self._admin.topic(self._into)).topic
        except NotFoundError:
            return await self._admin.create_topic(self._into, partitions=partitions, exist_ok=True)
        if len(found.partitions) < partitions:
            raise InvalidRequestError(
                f"topic '{self._into}' has {len(found.partitions)} partitions, the source has {partitions}",
                hint="name a topic that does not exist: it is created with as many partitions as the source",
            )
        return found

    async def _lane(
        self,
        partition: KafkaPartition,
        target: Topic,
        producer: int,
        ends: tuple[int, int],
        stored: tuple[int, str] | None,
    ) -> PartitionImport:
        target_partition = target.read_partition_of(partition[1])
        imported = ImportProgress(self._queue, self._fetcher.index_of, target_partition, partition[1], producer)
        held = await imported.held()
        offset, planned = (stored[0], decode_plan(stored[1])) if stored is not None else (0, None)
        if planned is None and held is not None:
            await self._wait_out(target, held)
        begin = max(offset, held.next if held is not None else 0)
        if planned is None or begin >= planned:
            begin, planned = max(begin, ends[0]), max(ends[1], begin, ends[0])
        copier = FixedIdentityWriter(self._bootstrap, self._runtime, producer, begin)
        return PartitionImport(partition, imported, copier, target.name, planned, max(ends[1], planned))

    async def _wait_out(self, target: Topic, held: Held) -> None:
        """The plan of an earlier run is gone: wait until nothing of that run can be on its way any more."""
        age_ms = self._runtime.clock.wall_ms() - held.sealed_ms
        wait_s = max(0, target.settings.reader_window_ms - age_ms) / 1000
        self._step(f"waiting {wait_s:.0f} s, until nothing of an earlier import can be on its way")
        await asyncio.sleep(wait_s)

    async def _copy(self, target: Topic) -> None:
        record_bytes_max, stored_s = target.settings.record_bytes_max, self._runtime.clock.monotonic()
        left = {partition: lane for partition, lane in self._lanes.items() if not await self._advance(lane)}
        while left:
            taken = await self._source.take(TAKE_S)
            for each in taken:
                lane = left.get(each.partition)
                if lane is None:
                    continue
                if isinstance(each, SourceEnd):
                    lane.meet_end(each.offset)
                else:
                    await lane.take(each, record_bytes_max)
            self._moved(sum(1 for each in taken if not isinstance(each, SourceEnd)))
            left = {partition: lane for partition, lane in left.items() if not await self._advance(lane)}
            if left and self._runtime.clock.monotonic() - stored_s >= STORE_S:
                stored_s = self._runtime.clock.monotonic()
                await self._source.store({partition: lane.position for partition, lane in left.items()})

    async def _advance(self, lane: PartitionImport) -> bool:
        """Close a plan whose end was met, and begin the next; return True when nothing is left to copy."""
        if not lane.reached:
            return False
        await lane.finish()
        await self._source.store({lane.partition: lane.position})
        if lane.done:
            return True
        lane.renew()
        await self._source.store({lane.partition: lane.position})  # before the first record of it is sent
        await self._source.seek(lane.partition, lane.copier.acked)
        return False


async def import_topics(
    source: KafkaSource,
    brokers: str | Sequence[str] | None,
    topics: Sequence[str],
    into: str,
    *,
    groups: bool = False,
    moved: Callable[[int], None] = lambda records: None,
    step: Callable[[str], None] = lambda text: None,
) -> tuple[list[ImportedPartition], dict[str, int]]:
    """Copy topics, and the positions of groups if wanted. Raises: as `KafkaImport`."""
    job = KafkaImport(source, brokers, into, moved=moved, step=step)
    try:
        done = await job.run(topics)
        return done, await job.copy_groups() if groups else {}
    finally:
        with suppress(MemqError):
            await job.close()
