"""Keys that are parked: those of parked letters that no one has sent back or purged.

Theory. The dead-letter topic itself is the list of parked keys, so it survives members. Letters before the position of
its reader group were sent back or purged. A member reads the letters from there to the end when it gets a partition,
and while keys are parked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.listener.open_records import OrderKey
from memq.client.listener.retry_records import letters_topic, read_letter
from memq.errors import InvalidRequestError, NotFoundError
from memq.runtime.runtime import Runtime
from memq.topic import Position

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

PARKED_CHECK_S = 2.0


class ParkedKeys:
    """Reads into `keys`: each parked key, with the position of its last letter as far as known."""

    def __init__(
        self,
        group: str,
        admin: AsyncAdmin,
        brokers: Sequence[str],
        runtime: Runtime,
        keys: dict[OrderKey, Position | None],
        encryption: Encryption | None = None,
    ) -> None:
        self._encryption = encryption
        self._topic = letters_topic(group)
        self._admin = admin
        self._brokers = brokers
        self._runtime = runtime
        self._keys = keys
        self._next: dict[int, Position] = {}
        self._unsure: set[OrderKey] = set()  # keys with a letter whose position is not known

    def add(self, key: OrderKey, at: Position | None) -> None:
        """Park a key, whose letter is stored at `at`, or at a position that is not known."""
        self._keys[key] = at
        if at is None:
            self._unsure.add(key)

    async def refresh(self) -> None:
        """Read the letters since the last call, and drop keys whose letters are all handled.

        If the position of a letter is not known, an earlier call may have read it, or it is handled already. So all
        letters that wait are read again then.
        Raises: as a consumer.
        """
        unsure, self._unsure = self._unsure, set()
        try:
            await self._read(again=bool(unsure))
        except BaseException:
            self._unsure |= unsure
            raise
        for key in unsure - self._unsure:
            if self._keys.get(key, True) is None:  # its letter did not wait any more
                del self._keys[key]

    async def _read(self, *, again: bool) -> None:
        handled = await handled_positions(self._admin, self._topic)
        later = _later({} if again else self._next, handled)
        start = {(self._topic, number): at for number, at in (handled | later).items()}
        async with AsyncConsumer(
            self._brokers,
            self._topic,
            start=start,
            end="end",
            on_expired="skip",
            audit=False,
            encryption=self._encryption,
            runtime=self._runtime,
        ) as consumer:
            async for batch in consumer:
                for record in batch:
                    self._note(record.headers, record.key, record.position)
                self._next[batch.partition] = batch.next
        for key, at in list(self._keys.items()):
            if at is not None and at < handled.get(at.read_partition, at):
                del self._keys[key]

    def _note(self, headers: tuple[tuple[str, bytes | None], ...], key: bytes | None, at: Position) -> None:
        try:
            note, _ = read_letter(headers)
        except InvalidRequestError:
            return
        if note.state == "parked" and key is not None:
            self._keys[note.origin.topic, key] = at


def _later(known: dict[int, Position], handled: dict[int, Position]) -> dict[int, Position]:
    return {number: at for number, at in known.items() if number not in handled or at > handled[number]}


async def handled_positions(admin: AsyncAdmin, topic: str) -> dict[int, Position]:
    """Return by partition the position before which all letters were sent back or purged."""
    try:
        described = await admin.group(topic)
    except NotFoundError:
        return {}
    return {
        part.topic_partition.partition: part.position
        for part in described.partitions
        if part.position is not None and part.topic_partition.topic == topic
    }
