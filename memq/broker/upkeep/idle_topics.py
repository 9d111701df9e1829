"""Deletes topics that had neither new records nor readers for their `expire_idle_ms`.

Theory. The governor compares what a topic's logs and groups show with a mark that is stored with the topic. So the time
counts on when another broker governs. A topic whose mark stays the same for long enough is sealed first: from then on
no record can come between a check and the deletion. When it has ended, all acked records are in its logs, and another
check must still show the same mark. Then the topic is deleted, by compare-and-set on its version; else it is unsealed.
So two checks must agree, with the seal between them. A check without an answer of a log or a group decides nothing. A
member of a group that holds a partition is a reader, also when it waits. Readers without a group are not known. A
topic with delayed records, or with records of a transaction that are not in its logs, is in use.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress

import msgspec

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.errors import MemqError, NotFoundError
from memq.format.pointer import Pointer, read_pointer
from memq.groups import GroupState
from memq.topic import AUDIT_GROUP, ReadPartition, Topic, is_internal, read_partitions

ROUND_S = 30.0  # at most; retention that runs more often checks idle topics as often
LOOK_BACK = 64  # entries at the end of a log, with the last totals of its write partitions
READ_BYTES = 1 << 20
NOTES_PER_TIME = 4  # marks of an active topic that are stored in the time of its setting
IN_USE = ""  # the mark of a topic that a group reads now, or with held records


class IdleTopics:
    """Checks topics with `expire_idle_ms` while this broker governs."""

    def __init__(self, services: Services, partitions: Partitions) -> None:
        self._services = services
        self._partitions = partitions

    async def run(self, governs: Callable[[], bool]) -> None:
        """Check all topics again and again, until cancelled."""
        while True:
            await asyncio.sleep(min(ROUND_S, self._services.settings.retention_interval_ms / 1000))
            if governs():
                await self.check(self._services.deletion_clock.wall_ms)

    async def check(self, now_ms: Callable[[], int]) -> None:
        """Check once each topic that may expire; `now_ms` returns the clock of deletions (Unix ms).

        Logs and groups may take long to answer. What they show was so when they were asked at the earliest, and when
        they have answered at the latest. A topic is not called idle for longer than both bounds say.
        """
        expiring = [each for each in self._partitions.topics() if each.settings.expire_idle_ms]
        if not expiring:
            return
        asked_ms = now_ms()
        try:
            groups = await self._groups()
        except MemqError:
            return
        for known in expiring:
            with suppress(MemqError):
                topic = await self._services.coordinator.current_topic(known.name)
                if topic is not None and not is_internal(topic.name) and topic.settings.expire_idle_ms:
                    mark = await self._mark(topic, groups)
                    await self._judge(topic, mark, asked_ms, now_ms())

    async def _judge(self, topic: Topic, mark: str, asked_ms: int, now_ms: int) -> None:
        """Take one step: note the mark, seal the topic, delete it, or let it take records again.

        The mark was read between `asked_ms` and `now_ms`.
        """
        idle_ms, limit_ms = asked_ms - topic.idle_since_ms, topic.settings.expire_idle_ms
        if mark == IN_USE or mark != topic.idle_mark:
            noted = msgspec.structs.replace(topic, idle_mark=mark, idle_since_ms=now_ms)
            if topic.expiring:
                own_seal = topic.sealed_ms > topic.idle_since_ms  # an operator's seal sets both
                seal = {"sealed_ms": 0, "ended": False} if own_seal else {}
                await self._store(msgspec.structs.replace(noted, expiring=False, **seal))
                self._services.events.info("topic-kept", f"topic '{topic.name}' is not idle any more")
            elif not 0 <= idle_ms < limit_ms // NOTES_PER_TIME:
                await self._store(noted)
        elif idle_ms < limit_ms:
            return
        elif not topic.expiring:
            await self._store(msgspec.structs.replace(topic, expiring=True, sealed_ms=topic.sealed_ms or now_ms))
            self._services.events.info("topic-idle", f"topic '{topic.name}' is sealed, to be deleted")
        elif topic.ended:
            await self._partitions.delete(topic)
            self._services.counters.expired_topics += 1
            text = f"topic '{topic.name}' with id {topic.id} had no records and no readers for {idle_ms} ms"
            self._services.events.warning("topic-expired", text)

    async def _store(self, topic: Topic) -> None:
        await self._services.coordinator.alter_topic(topic)
        await self._partitions.refresh()

    async def _groups(self) -> dict[str, GroupState]:
        """Return all groups but those of auditors. Raises: MemqError when one does not answer."""
        remote, found = self._services.groups.remote, dict[str, GroupState]()
        for name in await remote.groups():
            if not name.startswith(AUDIT_GROUP):
                with suppress(NotFoundError):  # it was deleted meanwhile
                    found[name] = await remote.describe(name)
        return found

    async def _mark(self, topic: Topic, groups: dict[str, GroupState]) -> str:
        """Return what changes with each record and each commit; IN_USE while the topic is in use.

        Raises: MemqError when a log, or an owner of held records, does not answer.
        """
        if await self._services.groups.holds_of(topic):
            return IN_USE
        partitions = read_partitions(topic)
        parts: list[str] = []
        for name, group in sorted(groups.items()):
            if any(each.topic_id == topic.id for held in group.members.values() for each in held):
                return IN_USE
            read = [
                f"{each.partition}={at.position}" for each, at in group.committed.items() if each.topic_id == topic.id
            ]
            parts += [f"{name}:{','.join(sorted(read))}"] if read else []
        for partition in partitions:
            records = await self._records(partition)
            parts.append(f"{partition.partition}:{sorted(records.items())}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    async def _records(self, partition: ReadPartition) -> dict[int, int]:
        """Return the total of records by write partition, of those that the end of a log shows.

        Pointers without records do not change it. Retention publishes such ones.
        """
        queue = self._services.queue
        span = await queue.span(partition)
        offset, records = max(span.begin, span.end - LOOK_BACK), dict[int, int]()
        while offset < span.end:
            entries = await queue.read(partition, offset, READ_BYTES)
            if not entries:
                raise NotFoundError(f"the queue shows nothing at offset {offset} of topic '{partition.topic}'")
            for entry in entries:
                pointer = read_pointer(entry.body, newer="raise")
                if isinstance(pointer, Pointer):
                    count = pointer.totals.records + (pointer.records if pointer.kind == "data" else 0)
                    records[pointer.partition] = max(count, records.get(pointer.partition, 0))
            offset = entries.next
        return {writer: count for writer, count in records.items() if count}
