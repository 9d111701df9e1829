"""Makes the retry topic and the dead-letter topic of a group, and sends records until they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from memq.client.admin import AsyncAdmin
from memq.client.listener.retry_records import (
    LANES,
    LetterNote,
    RetryNote,
    lane_of,
    letter_headers,
    letters_topic,
    retry_headers,
    retry_topic,
    retry_topic_settings,
)
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    AlreadyExistsError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    RetryableError,
    TooLargeError,
)
from memq.format.blocks.columns import RecordHeaders
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, format_address
from memq.runtime.runtime import Runtime
from memq.topic import Position, Topic

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

_RETRY_S_BASE = 0.1
_RETRY_S_MAX = 5.0
_CLOSE_S = 5.0


def check_retry_topic(topic: Topic) -> None:
    """Raises: AlreadyExistsError when a topic is not its group's, but that of a user with the same name.

    Listeners make their topics with a setting that names the reader group. No other topic has a use for it.
    """
    if topic.name not in topic.settings.waits_for:
        raise AlreadyExistsError(
            f"topic '{topic.name}' exists, and no listener has made it",
            hint="choose another group, whose topics are not there; if the topic is the group's, "
            f"memq topic alter {topic.name} --set retention_groups={topic.name} --set retention_groups_ms_max=366d",
        )


async def delete_retry_topics(admin: AsyncAdmin, group: str, *, dry_run: bool = False) -> list[str]:
    """Delete the two topics of a group, with their reader groups, and return their names.

    Raises: AlreadyExistsError, before anything is deleted, for a topic that is not the group's; InvalidRequestError for
    reader groups with members; as `AsyncAdmin.delete_topic`.
    """
    found = list[str]()
    for name in (retry_topic(group), letters_topic(group)):
        with suppress(NotFoundError):
            check_retry_topic((await admin.topic(name)).topic)
            found.append(name)
    if not dry_run:
        for name in found:
            with suppress(NotFoundError):
                await admin.delete_group(name)
            with suppress(NotFoundError):
                await admin.delete_topic(name)
    return found


class RetryTopics:
    """Sends to the two topics of a group. `admin` is open; the producer connects at the first record."""

    def __init__(
        self,
        group: str,
        runtime: Runtime,
        addresses: Sequence[Address],
        admin: AsyncAdmin,
        *,
        audit: bool,
        client_id: str = "",
        zone: str = "",
        encryption: Encryption | None = None,
    ) -> None:
        self.retry = retry_topic(group)
        self.letters = letters_topic(group)
        self._runtime = runtime
        self._admin = admin
        self._events = EventLog(runtime.clock)
        self._lanes = LANES
        self._options = {"audit": audit, "client_id": client_id, "zone": zone, "encryption": encryption}
        self._brokers = [format_address(address) for address in addresses]
        self._producer: AsyncProducer | None = None

    async def make(self) -> None:
        """Create the topics if they do not exist.

        Raises: AlreadyExistsError for a topic of such a name that is not the group's; as `AsyncAdmin.create_topic`.
        """
        made = await self._make(self.retry, LANES)
        self._lanes = len(made.taking)
        await self._make(self.letters, 1)

    async def _make(self, name: str, partitions: int) -> Topic:
        settings = retry_topic_settings(name)
        topic = await self._admin.create_topic(name, partitions=partitions, settings=settings, exist_ok=True)
        check_retry_topic(topic)
        return topic

    async def send_retry(
        self, note: RetryNote, value: bytes | None, key: bytes | None, headers: RecordHeaders, tag: str | None
    ) -> None:
        """Return when the record is stored in the lane of its delay.

        Raises: TooLargeError if it does not fit with memq's headers; errors that do not pass.
        """
        delay_s = (note.due_ms - self._runtime.clock.wall_ms()) / 1000
        lane = lane_of(round(delay_s, 1), self._lanes)  # 100 ms: the time since the delay was chosen
        await self._send(self.retry, value, key, retry_headers(note, headers), tag, lane)

    async def send_letter(
        self, note: LetterNote, value: bytes | None, key: bytes | None, headers: RecordHeaders, tag: str | None
    ) -> Position | None:
        """Return when the dead letter is stored: its position, None if that is not exact.

        A letter that is too large is sent without value and original headers; its origin says where they are.
        """
        try:
            return await self._send(self.letters, value, key, letter_headers(note, headers), tag, None)
        except TooLargeError:
            self._events.warning(
                "listener.large-letter",
                f"the record at {note.origin.position} of topic '{note.origin.topic}' is too large for "
                f"'{self.letters}': its dead letter has no value",
            )
            return await self._send(self.letters, None, key, letter_headers(note._replace(cut=True), ()), tag, None)

    async def enqueue_retry(
        self, note: RetryNote, value: bytes | None, key: bytes | None, headers: RecordHeaders, tag: str | None
    ) -> AsyncDelivery:
        """Send a record to the first lane of the retry topic; records are stored in the order of the calls.

        Raises: as `AsyncProducer.send`.
        """
        return await self._open().send(
            self.retry, value, key=key, headers=retry_headers(note, headers), tag=tag, partition=0
        )

    async def _send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RecordHeaders,
        tag: str | None,
        partition: int | None,
    ) -> Position | None:
        """Send until the record is stored.

        A record whose outcome is unknown is sent again, so it may come twice.
        """
        producer = self._open()
        for failures in count(1):
            try:
                delivery = await producer.send(topic, value, key=key, headers=headers, tag=tag, partition=partition)
                return (await delivery).position
            except (RetryableError, OutcomeUnknownError) as error:
                self._events.warning("listener.send-retry", f"to '{topic}': {type(error).__name__}: {error}; again")
            await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))
        raise AssertionError

    def _open(self) -> AsyncProducer:
        if self._producer is None:
            self._producer = AsyncProducer(
                self._brokers,
                acks="all",
                runtime=self._runtime,
                **self._options,  # type: ignore[arg-type]
            )
        return self._producer

    async def close(self) -> None:
        """Disconnect. A record that is not stored is no error: its original is not committed, and comes again."""
        if self._producer is not None:
            with suppress(MemqError):
                await self._producer.close(_CLOSE_S)
