"""Consumer groups that an earlier release had in Kafka, until they are moved to state logs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicPartition

from memq.errors import InvalidRequestError, NotFoundError, QueueError
from memq.notification import (
    MARK_END,
    OFFSET_END,
    RECORD_INDEX_END,
    TOTAL_END,
    FormerGroup,
    active_members,
    check_position,
)
from memq.notification.kafka.admin import KafkaAdmin, KafkaPartition
from memq.notification.kafka.groups.requests import COORDINATOR_MOVES, KafkaGroupRequests, Positions
from memq.notification.kafka.settings import KafkaSettings, Names
from memq.topic import Committed, Position, ReadPartition, Totals, check_group

# The offset of a commit is that of a pointer. Its metadata has the record index, the totals and the mark of the
# position, in ASCII; Kafka accepts 4,095 UTF-16 units. A reset with Kafka's tools writes a commit without metadata: its
# position is the first record of the pointer. A commit of an older release has no mark.
_METADATA = re.compile(
    r"memq1 (\d{1,20}) (\d{1,20}) (\d{1,20})(?: (\d{1,10}))?\Z"
)  # record index, records, bytes, mark
MOVING_S_MAX = 5.0
MOVING_PAUSE_S = 0.1
Refusal = tuple[KafkaError, Sequence[TopicPartition]]  # an error, and the offsets that are not stored
_ACTIVE = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.STALE_MEMBER_EPOCH)


class FormerKafkaGroups:
    """See `memq.notification.FormerGroups`. No member joins Kafka's groups here."""

    def __init__(self, admin: KafkaAdmin, settings: KafkaSettings, names: Names, requests: KafkaGroupRequests) -> None:
        self._admin = admin
        self._names = names
        self._requests = requests
        self._stored = Positions(settings, admin.errors)

    async def close(self) -> None:
        """End the readers of positions."""
        await self._stored.close()

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`. Kafka may store a part of a failed call; a retry of the whole is harmless."""
        check_group(group)
        for partition, committed in positions.items():
            check_position(partition, committed)
        offsets = [
            TopicPartition(
                self._names.kafka_topic(partition),
                partition.partition,
                committed.position.pointer_offset,
                metadata=encode_metadata(committed),
            )
            for partition, committed in positions.items()
        ]
        await self._set(group, offsets)
        await self._check_stored(group, positions)

    def _refused(self, error: KafkaError, failed: Sequence[TopicPartition], group: str) -> Exception:
        names = ", ".join(f"{part.topic} {part.partition}" for part in failed[:5])
        return self._admin.errors.group_failure(error, f"setting {len(failed)} positions of group '{group}' ({names})")

    async def _set(self, group: str, offsets: list[TopicPartition]) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MOVING_S_MAX
        while (refused := await self._set_once(group, offsets)) is not None:
            error, failed = refused
            if error.code() not in COORDINATOR_MOVES or loop.time() >= until_s:
                if error.code() in _ACTIVE:
                    raise await self._active(group, "positions can't be set")
                raise self._refused(error, failed, group)
            await asyncio.sleep(MOVING_PAUSE_S)

    async def _check_stored(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """Read positions back.

        librdkafka has the same result for a stored position and for one that Kafka's answer lacks.
        Raises: QueueError, DeniedError.
        """
        kafka_partitions = [(self._names.kafka_topic(partition), partition.partition) for partition in positions]
        found = await self._positions(group, kafka_partitions)
        lacking = [partition for partition, committed in positions.items() if found.get(partition) != committed]
        if lacking:
            names = ", ".join(f"{each.topic} {each.partition}" for each in lacking[:5])
            raise QueueError(
                f"setting {len(positions)} positions of group '{group}': Kafka does not show those of {names}",
                hint="repeat the request, while no consumer of the group runs",
            )

    async def _set_once(self, group: str, offsets: list[TopicPartition]) -> Refusal | None:
        """Set the positions of a group without members; return the error and the refused offsets, or None."""
        try:
            stored = await self._requests.store(self._names.kafka_group(group), offsets)
        except KafkaException as error:
            return error.args[0], offsets
        return _refusal_in(stored, offsets)

    async def _positions(
        self, group: str, kafka_partitions: Sequence[KafkaPartition]
    ) -> dict[ReadPartition, Committed]:
        found: dict[ReadPartition, Committed] = {}
        for part in await self._stored.of(self._names.kafka_group(group), kafka_partitions):
            partition = self._names.read_partition(part.topic, part.partition)
            if partition is not None:
                committed = decode_commit(partition, part.offset, part.metadata)
                if committed is not None:
                    found[partition] = committed
        return dict(sorted(found.items()))

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        names = [self._names.group(each) for each in await self._admin.list_groups()]
        return sorted(name for name in names if name is not None)

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`. The generation is 0, as Kafka does not report it."""
        found = await self._describe(check_group(group))
        members = tuple(sorted(each.group_instance_id or each.client_id for each in found.members))
        return FormerGroup(group, 0, members, await self._positions(group, await self._kafka_partitions()))

    async def _kafka_partitions(self) -> list[KafkaPartition]:
        """Return the partitions of all Kafka topics of memq."""
        return [
            (topic, number)
            for topic, count in (await self._admin.partition_counts()).items()
            for number in range(count)
            if self._names.read_partition(topic, number) is not None
        ]

    async def _describe(self, group: str) -> Any:
        try:
            found = await self._requests.describe(self._names.kafka_group(group))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                raise _missing(group) from error
            raise self._admin.errors.group_failure(error, f"describing group '{group}'") from error
        if found.state == ConsumerGroupState.DEAD:
            raise _missing(group)
        return found

    async def _active(self, group: str, refusal: str) -> QueueError | InvalidRequestError:
        """Return the error for a request that an active group refuses; retryable if it now has no members."""
        count = len((await self._describe(group)).members)
        if not count:
            return QueueError(f"{refusal}: Kafka says that the group has members, and then that it has none")
        return active_members(refusal, count)

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Raises: InvalidRequestError when it has members."""
        try:
            await self._requests.delete(self._names.kafka_group(check_group(group)))
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.GROUP_ID_NOT_FOUND:
                raise _missing(group) from error
            if code in _ACTIVE:
                with suppress(NotFoundError):  # the group is deleted by now
                    raise await self._active(group, f"group '{group}' can't be deleted") from error
                return
            raise self._admin.errors.group_failure(error, f"deleting group '{group}'") from error


def _missing(group: str) -> NotFoundError:
    return NotFoundError(f"group '{group}' is not in Kafka", hint="memq group migrate --dry-run shows those that are")


def _refusal_in(stored: Sequence[TopicPartition], offsets: Sequence[TopicPartition]) -> Refusal | None:
    """Return the error and the refused offsets of Kafka's answer to a commit; None if all are stored.

    An offset without an answer is not stored.
    """
    failed: list[Any] = [part for part in stored if part.error is not None]
    if failed:
        return failed[0].error, failed
    answered = {(part.topic, part.partition) for part in stored}
    missing = [part for part in offsets if (part.topic, part.partition) not in answered]
    return (KafkaError(KafkaError._BAD_MSG, "Kafka's answer lacks them"), missing) if missing else None


def encode_metadata(committed: Committed) -> str:
    """Return the metadata of a commit, at most 76 characters."""
    position, totals = committed.position, committed.totals
    mark = f" {committed.mark}" if committed.mark else ""
    return f"memq1 {position.record_index} {totals.records} {totals.bytes}{mark}"


def decode_commit(partition: ReadPartition, offset: int, metadata: str | None) -> Committed | None:
    """Return the position in a commit; None when the offset is out of bounds.

    Metadata that memq has not written is ignored.
    """
    if not 0 <= offset < OFFSET_END:
        return None
    found = _METADATA.match(metadata or "")
    index, records, size, mark = (int(part) for part in found.groups("0")) if found else (0, 0, 0, 0)
    if not (index < RECORD_INDEX_END and records < TOTAL_END and size < TOTAL_END and mark < MARK_END):
        index, records, size, mark = 0, 0, 0, 0
    return Committed(Position(partition.partition, offset, index), Totals(records, size), mark)
