"""The sweep: finds the objects that no pointer names, and deletes them when a later pass confirms it.

Theory. A key is used for half the safety age, counted from the first request that puts it: a batch whose pointer is
not out by then is stored under a new key (`memq.broker.partition.storing`). So a pointer to what is older than the
whole age lies in the queue already, or never will: a pass that lists first and reads the pointers last finds what
they do not name, in any process, without knowing what brokers hold. What writers stage lies there without a pointer
until its batch is committed, so it has an age of its own, of which a commit may take half; the manifests of commits
go at that age, too.

A pass is one witness, and a witness can be wrong. It deletes only what an earlier pass, `confirm_ms` ago, found too
and wrote down (`memq.broker.upkeep.sweep_lists`); what it finds first it writes down itself. Nothing that a pass has
read is used by another: each is one `Sweep`, which asks store, queue and coordinator again.

Compaction moves pointers from the queue to a manifest, and stores the manifest first: so manifests are read after the
queue. What such a pointer named in the queue, and what retention takes of a manifest, stays for the safety age from
then on.

A queue may lose what it held: then what is unnamed may be data. What a log does not account for
(`memq.broker.upkeep.log_coverage`) stays, and is named in a note. So does what belongs to a topic that the queue has
and the coordinator does not know: that one may be an old backup, or another's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.broker.upkeep.log_coverage import LogCoverage
from memq.broker.upkeep.log_reading import READINGS_MAX, LogReading, keys_of
from memq.broker.upkeep.orphan_objects import Claim, OrphanObjects, OrphanTopics, Place, forgotten_topic
from memq.broker.upkeep.sweep_lists import SweepLists
from memq.compaction.reader import ManifestFiles
from memq.errors import CorruptDataError, NotFoundError
from memq.format.key import shared_prefix, staged_prefix, sweep_digest, topic_prefix
from memq.format.packed_file import ListedObject
from memq.governor import Assignment
from memq.notification import PointerReader
from memq.runtime.clock import Clock
from memq.storage_handlers import CHECK_PREFIX, ObjectEntry, StorageHandler
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, read_partitions

SWEPT_KEYS_MAX = 100_000  # old objects of one prefix that are checked together; about 30 MB

UNNAMED = "no pointer names it"
NO_TOPIC = "its topic is gone"
CHECKED = "a check of the store left it"


class TopicDirectory(Protocol):
    """Lists all topics; a coordinator does."""

    async def topics(self) -> Sequence[Topic]:
        """Return all topics as they are now."""
        ...

    async def assignments(self) -> Sequence[Assignment]:
        """Return the assignments of all partitions."""
        ...


@dataclass(frozen=True, slots=True)
class Unnamed:
    """One object that no pointer names: key, bytes, time of writing (Unix ms), and why it may go.

    `since_ms` is when a pass found it first, this one when it is `new`; of one that `goes`, that was long enough ago.
    """

    key: str
    size: int
    modified_ms: int
    why: str
    since_ms: int
    new: bool
    goes: bool


class Sweep:
    """One pass over the objects of one cluster.

    `note` is called with what is left alone though it may be garbage.
    `kept` counts the objects that a lost log may have named, or that of a topic which the coordinator does not know.
    """

    def __init__(
        self,
        cluster: str,
        store: StorageHandler,
        queue: PointerReader,
        topics: TopicDirectory,
        clock: Clock,
        note: Callable[[str], None],
        confirm_ms: int,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._queue = queue
        self.topics = topics.topics
        self.kept = 0
        self._assignments = topics.assignments
        self._clock = clock
        self._note = note
        self._manifests = ManifestFiles(cluster, store)
        self.lists = SweepLists(cluster, store, note)
        self._confirm_ms = confirm_ms
        self._pending: dict[str, list[ObjectEntry]] = {}  # the lists of earlier passes, by the digest of their prefix
        self._now_ms = -1
        self.forgotten = OrphanTopics(store, queue)
        self._staged_bound_ms = 0
        self._left_bound_ms = 0

    async def find(self, age_ms: int, staged_age_ms: int) -> AsyncIterator[Unnamed]:
        """Yield the objects that are older than `age_ms` and that no pointer names.

        Staged ones by their own age.
        The ages must be those of the brokers; `age_ms` is 0 where none is at work. Changes nothing.
        Raises: MemqError of store, queue and coordinator.
        """
        async for _, found in self._found(age_ms, staged_age_ms):
            for each in found:
                yield each

    async def run(self, age_ms: int, staged_age_ms: int) -> AsyncIterator[Unnamed]:
        """Delete what `find` finds and an earlier pass confirms, write down the rest, and yield all of it."""
        async for prefix, found in self._found(age_ms, staged_age_ms):
            for each in found:
                if each.goes:
                    await self._store.delete(each.key)
            new = [ListedObject(each.key, each.size, each.modified_ms, each.why) for each in found if each.new]
            await self.lists.add(prefix, new, self._now_ms)
            for each in found:
                yield each
        await self.lists.drop(self._pending, self._now_ms - self._confirm_ms)

    async def _found(self, age_ms: int, staged_age_ms: int) -> AsyncIterator[tuple[str, list[Unnamed]]]:
        """Yield what no pointer names of one prefix after the other, once."""
        assert self._now_ms < 0, "a sweep is one pass"
        self._now_ms = now_ms = self._clock.wall_ms()
        bound_ms = now_ms - age_ms
        self._staged_bound_ms = now_ms - staged_age_ms
        self._left_bound_ms = bound_ms - CLOCK_ERROR_MS
        self._pending = await self.lists.pending()
        async for prefix, entries in self._old(f"{self._cluster}/", bound_ms):
            yield prefix, await self._judged(prefix, entries, await self._why(prefix, entries.copy()))
        async for prefix, entries in self._old(CHECK_PREFIX, bound_ms):
            yield prefix, await self._judged(prefix, entries, dict.fromkeys(entries, CHECKED))

    async def _judged(self, prefix: str, entries: dict[str, ObjectEntry], why: dict[str, str]) -> list[Unnamed]:
        """Return the deletable objects of a prefix, with earlier passes' times, without kept ones."""
        if not why:
            return []
        unnamed = {key: entries[key] for key in why}
        lists = self._pending.get(sweep_digest(prefix), [])
        since = await self.lists.waiting(prefix, lists, unnamed, self._now_ms)
        kept = await self.lists.kept(prefix)
        if kept is None:
            return []
        return [
            Unnamed(
                key,
                entry.size,
                entry.modified_ms,
                why[key],
                since.get(key, self._now_ms),
                key not in since,
                key in since and since[key] <= self._now_ms - self._confirm_ms,
            )
            for key, entry in unnamed.items()
            if key not in kept
        ]

    async def _old(self, start: str, bound_ms: int) -> AsyncIterator[tuple[str, dict[str, ObjectEntry]]]:
        """Yield the old objects, grouped by topic or shared: a listing is in order of keys."""
        prefix, entries = "", dict[str, ObjectEntry]()
        async for entry in self._store.list(start):
            if entry.modified_ms > (self._staged_bound_ms if entry.key.startswith(self._staged) else bound_ms):
                continue
            if not prefix or not entry.key.startswith(prefix) or len(entries) == SWEPT_KEYS_MAX:
                if entries:
                    yield prefix, entries
                prefix, entries = self._prefix_of(entry.key), {}
            if prefix:
                entries[entry.key] = entry
        if entries:
            yield prefix, entries

    @property
    def _staged(self) -> str:
        return staged_prefix(self._cluster)

    def _prefix_of(self, key: str) -> str:
        """Return the prefix with which a key is swept: a topic's or a shared one; "" for foreign keys."""
        for prefix in (shared_prefix(self._cluster), self._staged, CHECK_PREFIX):
            if key.startswith(prefix):
                return prefix
        return "/".join(key.split("/")[:4]) + "/" if key.startswith(f"{self._cluster}/topics/") else ""

    async def _why(self, prefix: str, keys: dict[str, ObjectEntry]) -> dict[str, str]:
        """Return why those of `keys`, all of one prefix, may go that no pointer names.

        None of them when a pointer is damaged or a partition of the queue is gone: nobody knows what was named, so
        nothing of the topic is swept, and nothing that topics share.
        """
        shared = prefix in (shared_prefix(self._cluster), self._staged)
        topics = await self.topics()  # as they are now: a broker may have made one meanwhile
        mine = [each for each in topics if shared or topic_prefix(self._cluster, each.name, each.id) == prefix]
        logs: dict[Place, LogCoverage] = {}
        for topic in mine:
            if not await self._strike_named(topic, keys, logs):
                return {}
        if shared or mine:
            await self._strike_unaccounted(mine, keys, logs)
            return dict.fromkeys(keys, UNNAMED)
        owner = await self.forgotten.owner_of(keys.values())
        if owner is not None:
            self._keep(forgotten_topic(owner), list(keys.values()))
            return {}
        return dict.fromkeys(keys, NO_TOPIC)

    async def _strike_named(self, topic: Topic, keys: dict[str, ObjectEntry], logs: dict[Place, LogCoverage]) -> bool:
        """Take what the pointers of a topic name out of `keys`; False when they can't all be read.

        `logs` gets what they show of each write partition.
        """
        for partition in read_partitions(topic):
            try:
                fault = await self._strike_log(topic, partition, keys, logs)
            except (NotFoundError, CorruptDataError) as error:
                fault = str(error)
            if fault:
                self._note(f"topic '{topic.name}' is not swept: {fault}")
                return False
        return await self._strike_compacted(topic, keys)

    async def _strike_log(
        self, topic: Topic, partition: ReadPartition, keys: dict[str, ObjectEntry], logs: dict[Place, LogCoverage]
    ) -> str:
        """Do that for one read partition; return why its pointers can't all be read, "" when they were."""
        tries = 0
        while True:
            reading, shown = LogReading(self._queue, partition, self._note), dict[Place, LogCoverage]()
            async for _entry, pointer in reading.entries():
                if pointer is None:
                    return "a pointer is damaged"
                place = (topic.id, pointer.partition)
                shown.setdefault(place, LogCoverage()).take(pointer, cut=reading.begin > 0)
                for key in keys_of(pointer):
                    keys.pop(key, None)
            tries += 1
            if not reading.cut or tries == READINGS_MAX:
                break
        if reading.lost:
            for log in shown.values():
                log.lose()
            self._note(
                f"topic '{topic.name}' partition {partition.partition}: {reading.lost} pointers that the queue should"
                f" have are missing between {reading.begin} and its end; memq audit says which records they held"
            )
        logs |= shown
        return reading.fault

    async def _strike_unaccounted(
        self, topics: Sequence[Topic], keys: dict[str, ObjectEntry], logs: dict[Place, LogCoverage]
    ) -> None:
        """Remove from `keys`, and report, objects that a log may have lost or that no log accounts for."""
        if not keys:
            return
        claimed = {(each.topic_id, each.partition) for each in await self._assignments() if each.epoch}
        known = {topic.id: topic for topic in topics}
        unaccounted = OrphanObjects(self._store, known, logs, claimed, self.forgotten)
        kept: dict[Claim, list[ObjectEntry]] = {}
        for entry in list(keys.values()):
            claim = await unaccounted.claim_on(entry)
            if claim is not None:
                del keys[entry.key]
                kept.setdefault(claim, []).append(entry)
        for claim, entries in kept.items():
            self._keep(claim, entries)

    def _keep(self, claim: Claim, entries: Sequence[ObjectEntry]) -> None:
        self.kept += len(entries)
        self._note(
            f"{claim.text} {len(entries)} objects of {sum(entry.size for entry in entries)} bytes,"
            f" the first is '{entries[0].key}': they are kept; {claim.cure}"
        )

    async def _strike_compacted(self, topic: Topic, keys: dict[str, ObjectEntry]) -> bool:
        """Take what the manifests of a topic name out of `keys`; False when they can't all be read."""
        numbers = await self._manifests.partitions(topic.name, topic.id)
        try:
            for number in numbers:
                for key in await self._compaction_keys(ReadPartition(topic.name, topic.id, number)):
                    keys.pop(key, None)
        except CorruptDataError as error:
            self._note(f"topic '{topic.name}' is not swept: {error}")
            return False
        return True

    async def _compaction_keys(self, partition: ReadPartition) -> list[str]:
        """Return the keys that the manifest of a read partition names, and those of its own files."""
        manifest = await self._manifests.highest(partition)
        if manifest is None:
            return []
        keys = [self._manifests.manifest_key(partition, manifest.number)]
        left = [each.part for each in manifest.left if each.since_ms >= self._left_bound_ms]
        for part in (*manifest.parts, *left):
            keys += (part.key, *part.objects)
            if part.created_ms >= self._left_bound_ms:
                keys += (await self._manifests.part(part)).originals
        return keys
