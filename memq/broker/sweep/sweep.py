"""The sweep: finds the objects that no pointer names, and deletes them when a later pass confirms it.

Theory. A key is used for half the safety age, counted from the first request that puts it. A batch that is not
published by then is stored under a new key (`memq.broker.partition.storing`). So a pointer to an object older than the
whole age is in the queue already, or never will be. A pass lists the objects first and reads the pointers last. Thus it
finds the objects without a pointer, in any process, without knowing what brokers hold. Staged objects have no pointer
until their batch is committed. So they have an age of their own, of which a commit may take half; the manifests of
commits are deleted at that age, too.

One pass can be wrong. It deletes only objects that an earlier pass, `confirm_ms` ago, also found and listed
(`memq.broker.sweep.sweep_lists`); it lists the objects that it finds first. No pass uses what another pass has read:
each is one `Sweep`, which asks store, queue and coordinator again.

Compaction moves pointers from the queue to a manifest, and stores the manifest first. So the sweep reads manifests
after the queue. The original objects of moved pointers stay for the safety age after the move. So do the objects of a
part that retention removes from a manifest.

If a queue has lost pointers, objects without a pointer may be data. The sweep keeps and reports objects that a log does
not account for (`memq.broker.sweep.log_coverage`). It also keeps objects of a topic that only the queue knows: the
coordinator may be an old backup, or one of another cluster. Objects whose records no batch of the log has stay until
retention has trimmed the older pointers (`memq.broker.sweep.unproven_objects`). So do staged objects that a commit
has named, with its manifest, and those that a transaction may still publish (`memq.broker.sweep.undecided_parts`).
Snapshots of state logs and objects of held blocks have their own rules (`memq.broker.sweep.unnamed_snapshots`,
`unnamed_held`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.broker.sweep.log_coverage import LogCoverage
from memq.broker.sweep.log_reading import READINGS_MAX, LogReading, keys_of
from memq.broker.sweep.orphan_objects import Claim, OrphanObjects, OrphanTopics, forgotten_topic
from memq.broker.sweep.sweep_lists import SweepLists
from memq.broker.sweep.undecided_parts import manifests_in_use, undecided_keys
from memq.broker.sweep.unnamed_held import UNHELD, UnnamedHeld
from memq.broker.sweep.unnamed_snapshots import (
    RUN_UNNAMED,
    SUPERSEDED,
    UnnamedSnapshots,
    log_of,
    partition_prefix,
    unknown_state_topic,
)
from memq.broker.sweep.unproven_objects import committed_objects, unproven_objects
from memq.compaction.reader import FIRST_NUMBER, ManifestFiles
from memq.errors import CorruptDataError, LogLostError, NotFoundError, QueueError, UnsupportedFormatError
from memq.format.key import (
    held_prefix,
    is_run_key,
    shared_prefix,
    staged_prefix,
    states_prefix,
    sweep_digest,
    topic_prefix,
    topic_prefix_of,
    topics_prefix,
)
from memq.format.packed_file import ListedObject
from memq.governor import Assignment
from memq.notification import PointerReader
from memq.runtime.clock import Clock
from memq.storage_handlers import CHECK_PREFIX, ObjectEntry, StorageHandler
from memq.topic import CLOCK_ERROR_MS, PartitionKey, ReadPartition, Topic, is_state_topic, read_partitions

SWEPT_KEYS_MAX = 100_000  # old objects of one prefix that are checked together; about 30 MB

UNNAMED = "no pointer names it"
NO_TOPIC = "its topic is gone"
CHECKED = "a check of the store left it"
UNPROVEN = "no pointer names it, and no batch of the log has its records"


class TopicDirectory(Protocol):
    """Lists all topics; a coordinator does."""

    async def topics(self) -> Sequence[Topic]:
        """Return the current topics."""
        ...

    async def assignments(self) -> Sequence[Assignment]:
        """Return the assignments of all partitions."""
        ...


@dataclass(frozen=True, slots=True)
class Unnamed:
    """One object that no pointer names: key, bytes, time of writing (Unix ms), and why it may be deleted.

    `since_ms` is when a pass found it first (Unix ms); `new`: this pass was the first. `goes`: the first one is at
    least `confirm_ms` ago, so that this pass deletes the object. `kept`: the object may be the only copy of acked
    records, so no pass deletes it.
    """

    key: str
    size: int
    modified_ms: int
    why: str
    since_ms: int
    new: bool
    goes: bool
    kept: bool = False


class Sweep:
    """One pass over the objects of one cluster.

    `note` gets a text for objects that stay although they may be garbage. `kept` counts objects that a lost log may
    have named, and objects of a topic that the coordinator does not know. Set `takes_unproven` if no log
    was cut: then the pass does not keep objects whose records no batch has.
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
        self.takes_unproven = False
        self._assignments = topics.assignments
        self._clock = clock
        self._note = note
        self._manifests = ManifestFiles(cluster, store)
        self.lists = SweepLists(cluster, store, note)
        self._confirm_ms = confirm_ms
        self._pending: dict[str, list[ObjectEntry]] = {}  # the lists of earlier passes, by the digest of their prefix
        self._now_ms = -1
        self.forgotten = OrphanTopics(store, queue)
        self._snapshots = UnnamedSnapshots(store, queue)
        self._held = UnnamedHeld(store, queue)
        self._staged_bound_ms = 0
        self._left_bound_ms = 0

    async def find(self, age_ms: int, staged_age_ms: int) -> AsyncIterator[Unnamed]:
        """Yield the objects that are older than `age_ms` and that no pointer names; changes nothing.

        For staged objects, `staged_age_ms` applies. Both ages must be the brokers' settings; `age_ms` may be 0 if no
        broker runs. Raises: MemqError of store, queue and coordinator.
        """
        async for _, found in self._found(age_ms, staged_age_ms):
            for each in found:
                yield each

    async def run(self, age_ms: int, staged_age_ms: int) -> AsyncIterator[Unnamed]:
        """Delete the objects of `find` that an earlier pass confirms, list the others, and yield all."""
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
        """Yield the objects without a pointer, prefix by prefix; call this once."""
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
        found: list[Unnamed] = []
        for key, entry in unnamed.items():
            if key in kept:
                continue
            since_ms = since.get(key, self._now_ms)
            facts = (key, entry.size, entry.modified_ms, why[key], since_ms)
            if why[key] == UNPROVEN and not self.takes_unproven:
                found.append(Unnamed(*facts, new=False, goes=False, kept=True))
            else:
                goes = key in since and since_ms <= self._now_ms - self._confirm_ms
                found.append(Unnamed(*facts, new=key not in since, goes=goes))
        return found

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
        """Return the prefix with which a key is swept: of a topic, a state log, or shared; "" for others."""
        for prefix in (shared_prefix(self._cluster), self._staged, CHECK_PREFIX):
            if key.startswith(prefix):
                return prefix
        if key.startswith(held_prefix(self._cluster)):
            return held_prefix(self._cluster)
        if key.startswith(topics_prefix(self._cluster)):
            return topic_prefix_of(key) or "/".join(key.split("/")[:4]) + "/"
        return partition_prefix(key, self._cluster)

    async def _why(self, prefix: str, keys: dict[str, ObjectEntry]) -> dict[str, str]:
        """Return the objects of `keys`, all of one prefix, that no pointer names, each with the reason.

        If a pointer is damaged, or a partition of the queue is gone, the names in it are unknown. Then nothing of the
        topic is swept, and no shared objects.
        """
        if prefix.startswith(states_prefix(self._cluster)):
            return await self._why_snapshots(prefix, keys)
        if prefix == held_prefix(self._cluster):
            return await self._why_held(prefix, keys)
        shared = prefix in (shared_prefix(self._cluster), self._staged)
        listed = frozenset(keys)
        # Current ones: a broker may have created a topic meanwhile. State logs have no pointers.
        topics = [topic for topic in await self.topics() if not is_state_topic(topic.name)]
        mine = [each for each in topics if shared or topic_prefix(self._cluster, each.name, each.id) == prefix]
        logs: dict[PartitionKey, LogCoverage] = {}
        for topic in mine:
            if not await self._strike_named(topic, keys, logs):
                return {}
        if shared or mine:
            unproven = await self._strike_unaccounted(mine, keys, logs)
            if prefix == self._staged and keys:
                kept = await undecided_keys(
                    self._cluster, self._store, self._held, await self.topics(), keys, self._note
                )
                kept |= await manifests_in_use(self._store, listed, keys)
                for key in kept:
                    del keys[key]
            return {key: UNPROVEN if key in unproven else UNNAMED for key in keys}
        try:
            owner = await self.forgotten.owner_of(keys.values())
        except UnsupportedFormatError as error:
            self._note(f"the objects below '{prefix}' are not swept: {error}")
            return {}
        if owner is not None:
            self._keep(forgotten_topic(owner), list(keys.values()))
            return {}
        return dict.fromkeys(keys, NO_TOPIC)

    async def _why_snapshots(self, prefix: str, keys: dict[str, ObjectEntry]) -> dict[str, str]:
        """Return the superseded ones of `keys`, snapshots of one state log, with the reason."""
        known = [
            topic.id
            for topic in await self.topics()
            if prefix.startswith(f"{states_prefix(self._cluster)}{topic.name}/{topic.id[:8]}/")
        ]
        if not known:
            self._keep(unknown_state_topic(prefix), list(keys.values()))
            return {}
        try:
            found = await self._snapshots.superseded(log_of(prefix, known[0]), keys)
        except (CorruptDataError, LogLostError, UnsupportedFormatError) as error:
            self._note(f"the snapshots below '{prefix}' are not swept: {error}")
            return {}
        if isinstance(found, Claim):
            self._keep(found, list(keys.values()))
            return {}
        return {key: RUN_UNNAMED if is_run_key(key) else SUPERSEDED for key in found}

    async def _why_held(self, prefix: str, keys: dict[str, ObjectEntry]) -> dict[str, str]:
        """Return those of `keys`, objects of held blocks, that no state log names, with the reason."""
        try:
            named = await self._held.named(await self.topics(), keys)
        except (LogLostError, CorruptDataError, UnsupportedFormatError) as error:
            self._note(f"the objects below '{prefix}' are not swept: {error}")
            return {}
        return {key: UNHELD for key in keys if key not in named}

    async def _strike_named(
        self, topic: Topic, keys: dict[str, ObjectEntry], logs: dict[PartitionKey, LogCoverage]
    ) -> bool:
        """Remove the objects that a topic's pointers name from `keys`; False if a pointer can't be read.

        `logs` gets the coverage of each write partition.
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
        self,
        topic: Topic,
        partition: ReadPartition,
        keys: dict[str, ObjectEntry],
        logs: dict[PartitionKey, LogCoverage],
    ) -> str:
        """Do the same for one read partition; return why a pointer can't be read, "" if all were read."""
        tries = 0
        while True:
            reading, shown = LogReading(self._queue, partition, self._note), dict[PartitionKey, LogCoverage]()
            async for entry, pointer in reading.entries():
                if pointer is None:
                    return "a pointer is damaged"
                writer = (topic.id, pointer.partition)
                shown.setdefault(writer, LogCoverage()).take(pointer, trimmed=reading.begin > 0, time_ms=entry.time_ms)
                for key in keys_of(pointer):
                    keys.pop(key, None)
            tries += 1
            if not reading.trimmed_meanwhile or tries == READINGS_MAX:
                break
        if reading.lost:
            for log in shown.values():
                log.note_holes()
            self._note(
                f"topic '{topic.name}' partition {partition.partition}: {reading.lost} pointers that the queue should"
                f" have are missing between {reading.begin} and its end; memq audit says which records they held"
            )
        logs |= shown
        return reading.fault

    async def _strike_unaccounted(
        self, topics: Sequence[Topic], keys: dict[str, ObjectEntry], logs: dict[PartitionKey, LogCoverage]
    ) -> set[str]:
        """Remove from `keys`, and report, the objects for which no log accounts; return the unproven ones."""
        if not keys:
            return set()
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
        unproven = set[str]()
        for (topic_id, number), entries in unaccounted.at_end.items():
            try:
                entries = await unproven_objects(self._store, self._queue, known[topic_id], number, entries, self._note)
            except (NotFoundError, QueueError) as error:
                self._note(f"topic '{known[topic_id].name}' partition {number}: objects are not compared: {error}")
            unproven.update(entry.key for entry in entries)
        age_ms = self._now_ms - self._staged_bound_ms  # a commit publishes within half of it
        staged = [
            entry
            for place, entries in unaccounted.staged.items()
            for entry in entries
            if logs[place].reaches_back_to(entry.modified_ms + age_ms)
        ]
        unproven |= await committed_objects(self._store, self._cluster, staged, self._note)
        return unproven & keys.keys()

    def _keep(self, claim: Claim, entries: Sequence[ObjectEntry]) -> None:
        self.kept += len(entries)
        self._note(
            f"{claim.text} {len(entries)} objects of {sum(entry.size for entry in entries)} bytes,"
            f" the first is '{entries[0].key}': they are kept; {claim.cure}"
        )

    async def _strike_compacted(self, topic: Topic, keys: dict[str, ObjectEntry]) -> bool:
        """Remove the objects that a topic's manifests name from `keys`; False if one can't be read."""
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
        keys = [self._manifests.manifest_key(partition, number) for number in {FIRST_NUMBER, manifest.number}]
        left = [each.part for each in manifest.left if each.since_ms >= self._left_bound_ms]
        for part in (*manifest.parts, *left):
            keys += (part.key, *part.objects)
            if part.created_ms >= self._left_bound_ms:
                keys += (await self._manifests.part(part)).originals
        return keys
