"""Checks each manifest of compaction as it lands: it names the entries that the queue had. Pure.

The highest manifest of a read partition is valid. After the end of its predecessor it may name further entries: those
that the queue had, with the same bytes. At the beginning it may name fewer, because of retention. No named object is
deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from memq.compaction.reader import FIRST_NUMBER
from memq.format.compaction_manifest import (
    CompactionManifest,
    PartRef,
    decode_compaction_manifest,
    decode_manifest_part,
)
from memq.format.key import compaction_manifest_number
from memq.format.pointer import decode_pointer
from memq.topic import ReadPartition
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Fetch, FindingError, read_entry


class CompactionRules:
    """All compacted parts of one run. `logs` are what landed in the queue, `objects` the store, `fetch` reads it."""

    def __init__(
        self,
        logs: Mapping[ReadPartition, ReadLog],
        objects: Mapping[str, bytes],
        fetch: Fetch,
        now: Callable[[], float],
    ) -> None:
        self.freed_s: dict[str, float] = {}  # key: when a later manifest outranked it
        self._logs = logs
        self._objects = objects
        self._fetch = fetch
        self._now = now
        self._highest: dict[ReadPartition, CompactionManifest] = {}
        self._named: dict[ReadPartition, dict[str, None]] = {}
        self._first: set[str] = set()  # the keys of manifests with the first number

    def names(self, key: str) -> bool:
        """Whether the highest manifest of a read partition names an object, or is it. The first one always stays."""
        return key in self._first or any(key in named for named in self._named.values())

    def stored(self, key: str) -> ReadPartition | None:
        """Take what was stored; return the read partition when it is its highest manifest from now on.

        Raises: FindingError; what the formats raise.
        """
        if "/cold/manifests/" not in key:
            return None
        manifest = decode_compaction_manifest(self._objects[key])
        partition = ReadPartition(manifest.topic, manifest.topic_id, manifest.partition)
        before = self._highest.get(partition)
        if compaction_manifest_number(key) != (manifest.partition, manifest.number):
            raise FindingError(f"manifest {manifest.number} lies at '{key}'")
        if before is not None and manifest.number <= before.number:
            self.freed_s[key] = self._now()
            return None  # its writer slept, its number was swept: nobody believes it
        if manifest.number == FIRST_NUMBER:
            self._first.add(key)
        log = self._logs[partition]
        self._check_parts(manifest, before, log)
        self._highest[partition] = manifest
        named = dict.fromkeys((key, *(each for part in manifest.parts for each in (part.key, *part.objects))))
        for gone in self._named.get(partition, {}):
            if gone not in named:
                self.freed_s[gone] = self._now()
        self._named[partition] = named
        log.keep_compacted(manifest.begin, manifest.next)
        return partition

    def _check_parts(self, manifest: CompactionManifest, before: CompactionManifest | None, log: ReadLog) -> None:
        known = () if before is None else before.parts
        kept = [part for part in manifest.parts if part in known]
        if kept != list(known[len(known) - len(kept) :]):
            raise FindingError(f"manifest {manifest.number} leaves out parts in the middle of those before it")
        added = manifest.parts[len(kept) :]
        end = 0 if before is None else before.next
        for part in added:
            if not end <= part.first <= max(end, log.queue_begin):
                raise FindingError(f"manifest {manifest.number} goes on at {part.first}, all up to {end} was there")
            if part.first > end and part is not manifest.parts[0]:
                raise FindingError(f"manifest {manifest.number} has a hole from {end} to {part.first}")
            self._check_part(part, log)
            end = part.next
        if manifest.next != end:
            raise FindingError(f"manifest {manifest.number} ends at {manifest.next}, its parts at {end}")

    def _check_part(self, part: PartRef, log: ReadLog) -> None:
        """Check that a part has the entries that were in the queue, and that their batches lie where it says."""
        entries = decode_manifest_part(self._objects[part.key]).entries
        if [entry.offset for entry in entries] != list(range(part.first, part.next)):
            raise FindingError(f"part '{part.key}' lacks entries of {part.first} to {part.next}")
        for entry in entries:
            was, pointer = log.entries[entry.offset], decode_pointer(entry.body)
            if entry.time_ms != was.time_ms or replace(pointer, locations=was.pointer.locations) != was.pointer:
                raise FindingError(f"the pointer at {entry.offset} is another one in part '{part.key}'")
            if read_entry(entry.offset, entry.time_ms, pointer, self._fetch).blocks != was.blocks:
                raise FindingError(f"the batch at {entry.offset} is another one in part '{part.key}'")
            missing = [location.key for location in pointer.locations if location.key not in part.objects]
            if missing:
                raise FindingError(f"part '{part.key}' does not say that it names '{missing[0]}'")
            log.moved[entry.offset] = pointer.locations
