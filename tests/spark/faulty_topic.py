"""A topic with injected loss, doubling, corruption and delay, in a file and a folder, and the truth about it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.audit.collector import audit
from memq.audit.verdict import Verdict
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, ProducerEnd, encode_pointer
from memq.notification import Publication
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import ReadPartition, Topic, equal_slots
from tests.unit.audited import TOPIC, block, data_pointer, pointer
from tests.unit.blocks import NOW_MS

PARTITIONS, PRODUCERS, BLOCKS, RECORDS = 2, 3, 24, 5
MINUTE_MS = 60_000
LATE_MINUTE, DOUBLED_MINUTE, END_MINUTE = 18, 60, 61  # W and what may be late are less than seven minutes
FATES = ("well",) * 14 + ("lost", "doubled", "copied", "corrupt", "missing", "late")
GROUP, GROUP_OFFSET = "half", 20  # a group that has processed so many pointers of partition 0
Stream = tuple[int, int]  # write partition, producer


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of one block, the minute in which it is published, and what is to become of it."""

    partition: int
    producer: int
    first: int
    epoch: int
    minute: int
    fate: str
    number: int = 0  # of its epoch

    @property
    def key(self) -> str:
        """The key of its object."""
        return f"memq/topics/clicks/01234567/aa/2026-01-01/00/{self.partition:05}-{self.epoch:010}-{self.number:016}"


@dataclass
class FaultyTopic:
    """Where the topic is, and the truth: how many records of each kind, by stream; and how many GROUP has processed."""

    queue: Path
    store: Path
    truth: dict[Stream, Counter[str]] = field(default_factory=dict)
    processed: int = 0

    @property
    def options(self) -> dict[str, str]:
        """What `format("memq")` takes for it."""
        return {"topics": TOPIC.name, "queue": f"sqlite:{self.queue}", "store": self.store.as_uri()}

    def audited(self) -> Verdict:
        """Return the verdict of `memq audit`."""
        return asyncio.run(self._audited())

    def trim(self, partition: int, before: int) -> None:
        """Take pointers as retention does."""
        asyncio.run(self._trim(ReadPartition(TOPIC.name, TOPIC.id, partition), before))

    async def _trim(self, partition: ReadPartition, before: int) -> None:
        queue = SqliteQueue(self.queue, SystemClock())
        try:
            await queue.trim(partition, before)
        finally:
            await queue.close()

    async def _audited(self) -> Verdict:
        queue, store = SqliteQueue(self.queue, SystemClock()), FilesystemHandler(self.store, self.store)

        async def read(location: Location, *, whole: bool) -> Buffer:
            assert whole
            return await store.get(location.key, checked=False)

        topic = Topic(name=TOPIC.name, id=TOPIC.id, created_ms=NOW_MS, partitions=equal_slots(PARTITIONS))
        try:
            return await audit(topic, queue, read, SystemClock().wall_ms())
        finally:
            await store.close()
            await queue.close()


def inject_faults(folder: Path, seed: int) -> FaultyTopic:
    """Make a topic of PARTITIONS x PRODUCERS x BLOCKS blocks, of which each has a fate that the seed draws."""
    made = FaultyTopic(folder / "queue.sqlite", folder / "objects")
    made.store.mkdir(parents=True)
    asyncio.run(_fill(made, random.Random(seed)))
    return made


async def _fill(made: FaultyTopic, draw: random.Random) -> None:
    queue, store = SqliteQueue(made.queue, SystemClock()), FilesystemHandler(made.store, made.store)
    partitions = [ReadPartition(TOPIC.name, TOPIC.id, number) for number in range(PARTITIONS)]
    await queue.create(partitions, 30_000)
    try:
        for partition in partitions:
            batches = list(_drawn(partition.partition, draw))
            ends = [producer for producer in range(1, PRODUCERS + 1) if draw.random() < 0.7]
            made.truth.update(_truth(batches, ends))
            log = _log(partition.partition, batches, ends)
            if partition.partition == 0:
                made.processed = _processed([batch for _, batch in log[:GROUP_OFFSET]])
            for minute, report in log:
                named = await _stored(store, report) if isinstance(report, Batch) else report
                time_ms = NOW_MS + minute * MINUTE_MS
                # the queue's own rule, for one epoch, so that older ones of the pointers may land late
                await queue.publish(Publication(partition, partition.partition, 1, time_ms, encode_pointer(named)))
    finally:
        await store.close()
        await queue.close()


def _drawn(partition: int, draw: random.Random) -> Iterator[Batch]:
    """Give all blocks of all producers; batches of each epoch are numbered as they are published."""
    numbers: Counter[int] = Counter()
    for minute in range(BLOCKS):
        epoch = 1 if minute < BLOCKS // 2 else 2
        for producer in range(1, PRODUCERS + 1):
            fate = draw.choice(FATES)
            if fate == "late" and epoch == 2:
                fate = "well"
            batch = Batch(partition, producer, minute * RECORDS, epoch, minute, fate, numbers[epoch])
            numbers[epoch] += fate != "lost"
            yield batch


def _log(partition: int, batches: Sequence[Batch], ends: Sequence[int]) -> list[tuple[int, Batch | Pointer]]:
    """Return what is published, by minute."""
    log: list[tuple[int, Batch | Pointer]] = [
        (0, pointer(kind="opened", partition=partition)),
        (BLOCKS // 2, pointer(kind="opened", partition=partition, epoch=2)),
    ]
    for batch in batches:
        if batch.fate == "late":
            log.append((LATE_MINUTE, batch))
        elif batch.fate != "lost":
            log.append((batch.minute, batch))
        if batch.fate in ("copied", "doubled"):
            log.append((batch.minute + 1 if batch.fate == "copied" else DOUBLED_MINUTE, batch))
    ended = tuple(ProducerEnd(producer=producer, next_sequence=BLOCKS * RECORDS, acks=2) for producer in ends)
    log.append((END_MINUTE, pointer(kind="ended", partition=partition, epoch=2, ended=ended)))
    return sorted(log, key=lambda entry: entry[0])


def _truth(batches: Sequence[Batch], ends: Sequence[int]) -> dict[Stream, Counter[str]]:
    """Count the records of each kind. What nobody can know is not told: lost blocks behind all that was seen."""
    truth: dict[Stream, Counter[str]] = {}
    for batch in batches:
        counts = truth.setdefault((batch.partition, batch.producer), Counter())
        same = [each for each in batches if each.producer == batch.producer]
        known = batch.producer in ends or any(each.first > batch.first and each.fate != "lost" for each in same)
        if batch.fate == "lost":
            counts["lost" if batch.producer in ends else "unknown"] += RECORDS if known else 0
        elif batch.fate in ("corrupt", "missing"):
            counts["corrupt"] += RECORDS
        else:
            counts["delivered"] += RECORDS
        for fate, kind in (("late", "late"), ("doubled", "doubled"), ("copied", "copies")):
            counts[kind] += RECORDS if batch.fate == fate else 0
    return {stream: +counts for stream, counts in truth.items()}


def _processed(log: Sequence[Batch | Pointer]) -> int:
    well = {(batch.producer, batch.first) for batch in log if isinstance(batch, Batch) and _is_sound(batch)}
    return RECORDS * len(well)


def _is_sound(batch: Batch) -> bool:
    return batch.fate not in ("corrupt", "missing")


async def _stored(store: FilesystemHandler, batch: Batch) -> Pointer:
    """Store the object of a batch as its fate says, and return its pointer."""
    data = block(batch.producer, batch.first, batch.first + RECORDS, partition=batch.partition)
    header = parse_header(data)
    meta = ObjectMeta(cluster="memq", broker="b", topics=(ObjectTopic(TOPIC.name, TOPIC.id),), created_ms=NOW_MS)
    entry = BatchEntry(0, len(data), NOW_MS, batch.number, RECORDS, 0, 1, batch.partition, batch.epoch)
    body = bytearray(data + encode_index(meta, [entry], [BlockEntry.from_header(header, 0)], len(data)))
    if batch.fate == "corrupt":
        body[len(data) - 1] ^= 1
    if batch.fate != "missing":
        await store.put(batch.key, [body], crc32c(bytes(body)))
    named = data_pointer([(batch.producer, batch.first, batch.first + RECORDS)], partition=batch.partition)
    return replace(
        named,
        epoch=batch.epoch,
        batch_sequence=batch.number,
        locations=(Location(store="main", key=batch.key, offset=0, length=len(data)),),
        raw_bytes=header.raw_length,
        stored_bytes=len(data),
        least_ms=header.least_ms,
        greatest_ms=header.greatest_ms,
        slots=(header.slot_first, header.slot_last),
        tag_bits=header.tag_bits,
        checksum=crc32c(data),
    )
