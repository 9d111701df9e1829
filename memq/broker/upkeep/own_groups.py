"""Groups and held records as parts of this broker see them: asked through its own port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from memq.errors import MemqError, NotReadyError
from memq.groups.remote import RemoteGroups
from memq.notification.remote import ANSWER_S
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.hold_messages import DescribeHolds
from memq.protocol.link import Link, connect_link
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.topic import Committed, ReadPartition, Topic

Answer = TypeVar("Answer", bound=msgspec.Struct)
PROGRAM = "memq-upkeep"  # in the HELLO; not that of a broker, whose requests are not forwarded
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound to them here


class OwnGroups:
    """Asks for groups and held records. `address` is of this broker's port; without it, questions fail."""

    def __init__(self, runtime: Runtime) -> None:
        self.address: Address | None = None
        self.remote = RemoteGroups(self._ask)
        self._runtime = runtime
        self._link: Link | None = None
        self._connecting = asyncio.Lock()

    async def first_unread(self, groups: Sequence[str], partition: ReadPartition) -> Mapping[str, int]:
        """Return for each group the first pointer offset that it has not committed whole.

        0 for a group without a position, and for one whose positions are unknown. Two answers are asked for, and the
        lower one counts: data that are deleted never come back.
        """
        found = dict[str, int]()
        for group in groups:
            try:
                answers = [await self.remote.committed(group, [partition]) for _ in range(2)]
            except MemqError:
                found[group] = 0
                continue
            offsets = [_offset_in(answer, partition) for answer in answers]
            found[group] = min(offsets)
        return found

    async def holds_of(self, topic: Topic) -> bool:
        """Return whether delayed records or those of transactions are held for a topic. Raises: MemqError."""
        ask = DescribeHolds(topic=topic.name, topic_id=topic.id, undelivered=True)
        return bool((await self._ask(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=ANSWER_S)).waiting)

    def close(self) -> None:
        """Disconnect."""
        if self._link is not None:
            self._link.close()

    async def _ask(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        if self.address is None:
            raise NotReadyError("this broker is starting")
        async with self._connecting:
            if self._link is None or not self._link.open:
                address = (ANYWHERE.get(self.address[0], self.address[0]), self.address[1])
                self._link = await connect_link(self._runtime, None, address, client=PROGRAM)
        return await self._link.request(api, message, answer, timeout_s=timeout_s)


def _offset_in(answer: Mapping[ReadPartition, Committed], partition: ReadPartition) -> int:
    committed = answer.get(partition)
    return 0 if committed is None else committed.position.pointer_offset
