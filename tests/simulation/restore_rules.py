"""Rules of a restore, tried on a copy of the store: interrupted and run again, it has each record once.

Tries of a task may have put a row into different blocks, some of which no pointer names, or only one that a log lost.
A restore has each such block once, and readers deliver them all. It remembers blocks for two dedup windows: a broker
may forward a block again so long after a cut that took its first copy.

Besides, it may bring back objects that retention released and no sweep has deleted yet, and no others. The trial takes
up to seconds of virtual time, and the cluster runs meanwhile: its retention may take the same objects from the store.
So the trial reads its copy alone, and compares it with the logs of the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from awscrt.checksums import crc32c

from memq.broker.restore.restore import Restorer
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.format.pointer import decode_pointer
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import Clock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import FindingError, ReferenceReader, Source, object_bytes, read_entry

STORE = "main"
READ_BYTES = 1 << 16


class KilledError(Exception):
    """The restore is killed."""


class LoopbackQueue(MemoryQueue):
    """A queue whose publisher is killed behind so many publications; -1: never."""

    left = -1

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        if not self.left:
            raise KilledError
        self.left -= 1
        return await super().publish(publication)


class RestoreRules:
    """Restores one topic of a cluster from its objects and logs, as they are when the rules are made."""

    def __init__(
        self,
        cluster: str,
        topic: Topic,
        objects: Mapping[str, bytes],
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        repeats: Callable[[bytes], bool] = lambda value: False,
    ) -> None:
        self._repeats = repeats  # whether a record is a row of a task that may run again
        self._cluster = cluster
        self._topic = topic
        self._objects = dict(objects)
        self._logs = {partition: log.snapshot() for partition, log in logs.items() if partition.topic_id == topic.id}
        self._fetch = partial(object_bytes, self._objects)
        self._fail = fail

    async def check(self, clock: Clock, draw: random.Random) -> None:
        """Restore into a new queue, and read it as one reads a log with compacted parts."""
        store, queue = MemoryHandler(clock), LoopbackQueue(clock)
        for key, body in self._objects.items():
            await store.put(key, [body], crc32c(body))
        queue.left = draw.randrange(1 + sum(len(log.entries) for log in self._logs.values()))
        try:
            report = await Restorer(self._cluster, STORE, store, queue, clock).restore(self._topic)
        except KilledError:
            queue.left = -1
            report = await Restorer(self._cluster, STORE, store, queue, clock).restore(self._topic)
        # A manifest may be there for longer than its objects, which retention has taken, or compaction has copied.
        findings = [each for each in report.findings if not each[1].startswith("retention took what was staged")]
        if findings:
            self._fail(f"a restore finds {findings[0]}")
        reader = CompactedLogReader(queue, ManifestFiles(self._cluster, store), clock)
        for partition, log in self._logs.items():
            try:
                await self._check_partition(partition, log, reader)
            except FindingError as error:
                self._fail(f"restored {partition}: {error}")

    async def _check_partition(self, partition: ReadPartition, log: ReadLog, reader: CompactedLogReader) -> None:
        found: dict[tuple[bytes, Source], None] = {}
        blocks: dict[tuple[Source, int, int, int], int] = {}  # when the batch of each was sealed first (Unix ms)
        records, at, newest_ms = ReferenceReader(), 0, 0
        while entries := await reader.read(partition, at, READ_BYTES):
            at = entries[-1].offset + 1
            for entry in entries:
                landed = read_entry(entry.offset, entry.time_ms, decode_pointer(entry.body), self._fetch)
                newest_ms = max(newest_ms, landed.pointer.sealed_ms)
                remembered_ms = newest_ms - 2 * self._topic.settings.dedup_window_ms
                for block in landed.blocks:
                    identity = (block.source, block.first, block.following, block.checksum)
                    if identity in blocks and blocks[identity] >= remembered_ms:
                        raise FindingError(f"block {block.first} to {block.following} of {block.source} is there twice")
                    blocks[identity] = landed.pointer.sealed_ms
                for each in records.take(landed):
                    if (each.value, each.source) in found and not self._repeats(each.value):
                        raise FindingError(f"record {each.value[:40]!r} is there twice")
                    found[each.value, each.source] = None
        stream = log.stream[log.begin_index :]
        missing = [each.value for each in stream if (each.value, each.source) not in found]
        if missing:
            raise FindingError(f"{len(missing)} records are not there, the first is {missing[0][:40]!r}")
