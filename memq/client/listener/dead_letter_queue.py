"""The dead letters of a group: read, sent back to the group's handlers, or purged.

Theory. The letters are the dead-letter topic, from the position of its *reader group* on, which has the name of the
topic. A letter is handled when that position has passed it. `redrive` stores letters in the retry topic with acks=all
before it commits: a call that is killed loses none, and the next call sends those again that were not committed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from memq.client.admin import AsyncAdmin
from memq.client.arguments import check_number, encryption_of, public_name, runtime_of
from memq.client.consumer.batch import Batch, Record
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.lifecycle import AsyncClosing, Background, BlockingClient, KafkaHints
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.listener.parked_keys import handled_positions
from memq.client.listener.retry_records import (
    LETTERS_SUFFIX,
    LetterNote,
    LetterState,
    OriginalRecord,
    RetryNote,
    letters_topic,
    read_letter,
)
from memq.client.listener.retry_topics import RetryTopics, check_retry_topic
from memq.errors import InvalidRequestError, NotFoundError
from memq.format.blocks.columns import RecordHeaders
from memq.runtime.network import format_address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.topic import Position, Topic

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

LETTERS_MAX = 1_000  # that `letters` returns without another limit
_SESSION_MS = 3_000  # a call that was killed keeps the next one waiting for so long
Handle = Callable[[Batch], Awaitable[int]]


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter at `position`; `topic` and `origin` are the place of its record.

    `state` is "dead" or "parked", `attempts` the number of handler calls, `dead_ms` a Unix time. Value, key, headers,
    timestamp and tag are those of the record; with `cut`, value and headers are left out, because they are too large.
    """

    position: Position
    topic: str
    origin: Position
    state: LetterState
    attempts: int
    dead_ms: int
    cause: str
    cut: bool
    value: bytes | None
    key: bytes | None
    headers: RecordHeaders
    timestamp_ms: int
    tag: str | None


class AsyncDeadLetterQueue(KafkaHints, AsyncClosing):
    """The dead letters of one group, on the caller's event loop. Errors as of `memq.DeadLetterQueue`.

    `strangers`: where the last call of `letters` or `redrive` passed over records that are no letters.
    """

    @public_name("DeadLetterQueue")
    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        group: str,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        encryption: Encryption | str | None = None,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.group = group
        self._encryption = encryption_of(encryption)
        self.strangers: list[Position] = []
        self._topic = letters_topic(group)
        self._runtime = runtime_of(runtime, tls)
        addresses = bootstrap_addresses(brokers)
        self._brokers = [format_address(address) for address in addresses]
        self._admin = AsyncAdmin(self._brokers, connect_timeout_ms=connect_timeout_ms, runtime=self._runtime)
        self._topics = RetryTopics(
            group, self._runtime, addresses, self._admin, audit=True, encryption=self._encryption
        )

    async def close(self) -> None:
        """Disconnect."""
        await self._topics.close()
        await self._admin.close()

    async def letters(self, limit: int = LETTERS_MAX) -> list[Letter]:
        """Return the waiting letters, oldest first, at most `limit`."""
        check_number("limit", limit, 1, 1 << 40, int)
        found: list[Letter] = []
        self.strangers = []
        async for batch in self._waiting():
            for record in batch:
                found += self._letters_in(record)
                if len(found) == limit:
                    return found
        return found

    async def letter(self, position: Position) -> Letter:
        """Return one letter, also one that was handled and is not removed yet. Raises: NotFoundError."""
        if not isinstance(position, Position):
            raise TypeError(f"position must be a memq.Position, not {type(position).__name__}")
        await self._check()
        after = Position(position.read_partition, position.pointer_offset, position.record_index + 1)
        at = (self._topic, position.read_partition)
        missing = NotFoundError(
            f"topic '{self._topic}' has no letter at position {position}", hint=f"see memq dlq list {self.group}"
        )
        async with AsyncConsumer(
            self._brokers,
            self._topic,
            start={at: position},
            end={at: after},
            audit=False,
            encryption=self._encryption,
            runtime=self._runtime,
        ) as consumer:
            try:
                found = [each async for batch in consumer for each in batch if each.offset == position.offset]
            except InvalidRequestError as error:
                if type(error) is InvalidRequestError:  # the position is after the end of its batch, or of the log
                    raise missing from error
                raise
        if not found:
            raise missing
        return letter_of(found[0])

    async def redrive(self, count: int | None = None) -> int:
        """Send waiting letters back to the group's handlers, oldest first; return how many.

        Those that wait at the start of the call are sent, at most `count`. Their attempts begin at 1 again. They go to
        the retry topic, so other groups see nothing. If the call is killed or raises, call it again: letters that it
        has sent and not committed are sent twice.

        Letters whose value is left out can't be sent: they move to the end of the waiting ones. Records that are no
        letters are passed over, and wait no more.
        """
        await self._check()
        self.strangers = []
        await self._topics.make()  # the retry topic may have been deleted: one that a send makes lacks its settings
        return await self._handle(count, self._send_back)

    async def purge(self, count: int | None = None) -> int:
        """Drop waiting letters, oldest first, at most `count`; return how many. Their batches are removed.

        Raises: AlreadyExistsError for a topic of that name that is not the group's.
        """
        check_retry_topic(await self._check())
        purged = await self._handle(count, None)
        handled = await handled_positions(self._admin, self._topic)
        if handled:
            await self._admin.truncate_topic(self._topic, list(handled.values()))
        return purged

    # ---- inside ---------------------------------------------------------------------------------

    async def _check(self) -> Topic:
        try:
            return (await self._admin.topic(self._topic)).topic
        except NotFoundError as error:
            hint = "memq dlq list shows the groups that have one"
            raise NotFoundError(f"group '{self.group}' has no dead-letter topic", hint=hint) from error

    async def _waiting(self) -> AsyncIterator[Batch]:
        """Yield the letters from the position of the reader group to the present end."""
        await self._check()
        handled = await handled_positions(self._admin, self._topic)
        start = {(self._topic, number): at for number, at in handled.items()}
        async with AsyncConsumer(
            self._brokers,
            self._topic,
            start=start or "beginning",
            end="end",
            on_expired="skip",
            audit=False,
            encryption=self._encryption,
            runtime=self._runtime,
        ) as consumer:
            async for batch in consumer:
                yield batch

    async def _end(self, count: int | None) -> dict[tuple[str, int], Position]:
        """Return the position after the first `count` waiting letters, or after all."""
        ends: dict[tuple[str, int], Position] = {}
        left = count
        async for batch in self._waiting():
            place = (self._topic, batch.partition)
            if left is not None and len(batch) >= left:
                last = list(batch)[left - 1].position
                ends[place] = Position(last.read_partition, last.pointer_offset, last.record_index + 1)
                return ends
            ends[place] = batch.next
            left = None if left is None else left - len(batch)
        return ends

    async def _handle(self, count: int | None, handle: Handle | None) -> int:
        """Handle the letters that wait now, batch by batch, and commit each."""
        if count is not None:
            check_number("count", count, 1, 1 << 40, int)
        ends = await self._end(count)
        if not ends:
            return 0
        handled = 0
        async with AsyncConsumer(
            self._brokers,
            self._topic,
            group=self._topic,
            end=ends,
            auto_commit=False,
            session_timeout_ms=_SESSION_MS,
            on_expired="skip",
            audit=False,
            encryption=self._encryption,
            runtime=self._runtime,
        ) as consumer:
            async for batch in consumer:
                handled += len(batch) if handle is None else await handle(batch)
                await consumer.commit(batch)
        return handled

    def _letters_in(self, record: Record) -> list[Letter]:
        """Return a record as a letter; nothing for one that is none, so that it does not hide the others."""
        try:
            return [letter_of(record)]
        except InvalidRequestError:
            self.strangers.append(record.position)
            return []

    async def _send_back(self, batch: Batch) -> int:
        sent = []
        for letter in (letter for record in batch for letter in self._letters_in(record)):
            origin = OriginalRecord(letter.topic, letter.origin, letter.timestamp_ms)
            if letter.cut:
                note = LetterNote(origin, letter.state, letter.attempts, letter.dead_ms, letter.cause, cut=True)
                await self._topics.send_letter(note, None, letter.key, (), letter.tag)
                continue
            retry = RetryNote(origin, 1, self._runtime.clock.wall_ms(), str(letter.position), letter.cause)
            sent.append(await self._topics.enqueue_retry(retry, letter.value, letter.key, letter.headers, letter.tag))
        for delivery in sent:
            await delivery
        return len(sent)


class DeadLetterQueue(KafkaHints, BlockingClient):
    """The dead letters of one group. Thread-safe.

    Every method raises UnreachableError if no broker answers for `connect_timeout_ms`, and NotFoundError if the group
    has no dead-letter topic: a listener makes it. `redrive` and `purge` raise AlreadyExistsError for a user's topic.
    """

    @public_name("DeadLetterQueue")
    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        group: str,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        encryption: Encryption | str | None = None,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._core = AsyncDeadLetterQueue(
            brokers,
            group,
            connect_timeout_ms=connect_timeout_ms,
            encryption=encryption,
            tls=tls,
            runtime=runtime,
        )
        self._background = Background("dead letter queue", self._core)
        self._closed = False

    @property
    def strangers(self) -> list[Position]:
        """Where the last call of `letters` or `redrive` passed over records that are no letters."""
        return self._core.strangers

    def letters(self, limit: int = LETTERS_MAX) -> list[Letter]:
        """Return the waiting letters, oldest first, at most `limit`."""
        return self._background.run(self._core.letters(limit))

    def letter(self, position: Position) -> Letter:
        """Return one letter, also one that was handled and is not removed yet. Raises: NotFoundError."""
        return self._background.run(self._core.letter(position))

    def redrive(self, count: int | None = None) -> int:
        """Send waiting letters back, oldest first, at most `count`; return how many.

        See `memq.aio.DeadLetterQueue.redrive`.
        """
        return self._background.run(self._core.redrive(count))

    def purge(self, count: int | None = None) -> int:
        """Drop waiting letters, oldest first, at most `count`; return how many. Their batches are removed."""
        return self._background.run(self._core.purge(count))

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()


def letter_of(record: Record) -> Letter:
    """Return a record of the dead-letter topic as a letter.

    Raises: InvalidRequestError for another record.
    """
    try:
        note, headers = read_letter(record.headers)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"the record at {record.position} is no dead letter: {error}",
            hint="only memq writes to the dead-letter topic of a group; truncate it behind this record",
        ) from error
    return Letter(
        position=record.position,
        topic=note.origin.topic,
        origin=note.origin.position,
        state=note.state,
        attempts=note.attempts,
        dead_ms=note.dead_ms,
        cause=note.cause,
        cut=note.cut,
        value=record.value,
        key=record.key,
        headers=headers,
        timestamp_ms=note.origin.timestamp_ms,
        tag=record.tag,
    )


async def waiting_letters(admin: AsyncAdmin) -> dict[str, int]:
    """Return how many letters wait, by group, for each group with a dead-letter topic.

    That is the lag of the topic's reader group. Without such a group it is all letters that were ever stored, also
    those that retention removed.
    """
    found: dict[str, int] = {}
    for topic in await admin.topics():
        if not topic.name.endswith(LETTERS_SUFFIX):
            continue
        group = topic.name.removesuffix(LETTERS_SUFFIX)
        with suppress(NotFoundError):
            described = await admin.group(topic.name)
            lags = [part.lag for part in described.partitions if part.topic_partition.topic == topic.name]
            if lags:
                found[group] = sum(lag.records for lag in lags)
                continue
        found[group] = sum(totals.records for totals in (await admin.end_totals(topic)).values())
    return found
