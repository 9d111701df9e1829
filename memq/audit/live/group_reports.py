"""Reports of clients, read as an ordinary member of the group of auditors with the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memq.audit.live.audited_topics import FindTopic
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.errors import GenerationFencedError, InvalidRequestError, NotFoundError, PositionLostError
from memq.format.pointer import Pointer, read_pointer
from memq.format.report import AUDIT_TOPIC
from memq.notification import Entry
from memq.notification.log_reader import entries_between, valid_span
from memq.notification.remote import RemoteQueue
from memq.topic import Position, ReadPartition, Topic

BEYOND_S = 30.0  # how long a log must end before a position: a replica that lags shows an earlier end, too
BEYOND_TRIES = 7


@dataclass(frozen=True, slots=True)
class Page:
    """Reports of one home, in order, with their positions as text, and the position after them."""

    home: int
    reports: Sequence[tuple[str, bytes]]
    next: str


class GroupReports:
    """Reads `_memq_audit` as a member of the auditors' group. Raises: RetryableError."""

    def __init__(self, consumer: AsyncConsumer, queue: RemoteQueue, topic: Topic, find: FindTopic) -> None:
        self._consumer = consumer
        self._queue = queue
        self._resolver = OffsetResolver(queue)
        self._topic = topic
        self._find = find

    @property
    def topic_id(self) -> str:
        """The id of the topic that is read."""
        return self._topic.id

    async def check(self) -> None:
        """Check that the topic is the one that is read.

        Raises: NotFoundError when it is gone, or was created again.
        """
        if (await self._find(AUDIT_TOPIC)).id != self._topic.id:
            raise NotFoundError(f"topic {AUDIT_TOPIC} was deleted and created again")

    def homes(self) -> int:
        """Return how many homes there are; 0 while the cluster does not audit."""
        return len(self._topic.partitions)

    async def poll(self, timeout_s: float) -> Page | None:
        """Return the next page of an assigned home; None if none arrives within `timeout_s`."""
        try:
            batch = await self._consumer.poll(timeout_s)
        except InvalidRequestError:  # a log was cut before the group's position: `seek` and `end` judge that
            return None
        if batch is None:
            return None
        reports = [(str(record.position), record.value or b"") for record in batch]
        return Page(batch.partition, reports, batch.next.marked_text)

    def assigned(self) -> list[int]:
        """Return the homes that are assigned to this member."""
        return [partition for _, partition in self._consumer.position()]

    async def seek(self, home: int, position: str) -> bool:
        """Continue from a position, "" for the beginning; return False if the beginning replaced it.

        That happens if all answers of `BEYOND_S` end the log before the position: the log was cut or restored. It also
        happens if such a log has grown again; the mark of the position shows this.

        Raises: FencedError when another owns the home now.
        """
        if not position:
            await self._seek(home, "beginning")
            return True
        at = Position.parse(position)
        for number in range(BEYOND_TRIES):
            if number:
                await asyncio.sleep(BEYOND_S / (BEYOND_TRIES - 1))
            try:
                await self._seek(home, at)
                await self._resolver.checked_mark(self._log_of(home), at)
            except PositionLostError:
                break
            except InvalidRequestError:
                continue
            return True
        await self._seek(home, "beginning")
        return False

    async def _seek(self, home: int, to: Position | Literal["beginning"]) -> None:
        try:
            await self._consumer.seek(AUDIT_TOPIC, home, to)
        except InvalidRequestError as error:
            if home in self.assigned():
                raise
            # It went to another member while its state was read.
            raise GenerationFencedError(str(error)) from error

    async def end(self, home: int) -> int:
        """Return the offset at which the log of a home ends.

        Raises: FencedError if the log ends before the next report, or was cut before it and has grown again. Then the
        caller takes the home again, by `seek`.
        """
        end = (await valid_span(self._queue, self._log_of(home))).end
        position = self._next_of(home)
        if position is not None and position.pointer_offset > end:
            raise GenerationFencedError(f"partition {home} of {AUDIT_TOPIC} ends before position {position}")
        if position is not None:
            try:
                await self._resolver.checked_mark(self._log_of(home), position)
            except PositionLostError as error:
                raise GenerationFencedError(str(error)) from error
        return end

    async def has_returned(self, home: int, end: int) -> bool:
        """Whether all reports of a home before the offset `end` have been returned."""
        position = self._next_of(home)
        if position is None:
            return False
        async for left in entries_between(self._queue, self._log_of(home), position.pointer_offset, end):
            if any(_holds_records(entry) for entry in left):
                return False
        return True

    async def commit(self) -> None:
        """Commit the positions of the returned reports."""
        await self._consumer.commit()

    def _next_of(self, home: int) -> Position | None:
        return self._consumer.position().get(TopicPartition(AUDIT_TOPIC, home))

    def _log_of(self, home: int) -> ReadPartition:
        return ReadPartition(AUDIT_TOPIC, self._topic.id, home)


def _holds_records(entry: Entry) -> bool:
    """Whether a pointer may hold reports; pointers of owners and ends of producers hold none."""
    pointer = read_pointer(entry.body, newer="return")
    return not isinstance(pointer, Pointer) or pointer.kind == "data"
