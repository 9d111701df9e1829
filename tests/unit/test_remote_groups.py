"""Groups through a broker: how a member names its partitions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from memq.errors import InvalidRequestError
from memq.groups.remote import RemoteGroups
from memq.protocol.frames import Api
from memq.protocol.group_messages import JoinRequest, MembershipAnswer
from memq.topic import ReadPartition

PARTS = [ReadPartition("clicks", "0a" * 16, number) for number in range(4)]


def test_a_member_joins_with_a_list_at_a_broker_that_knows_no_ranges() -> None:
    asked = list[JoinRequest]()

    async def ask(api: Api, message: msgspec.Struct, answer: type[Any], *, timeout_s: float) -> Any:
        assert isinstance(message, JoinRequest)
        asked.append(message)
        if not message.session_timeout_ms:
            raise InvalidRequestError("session timeout 0 ms is outside 100 to 3600000")
        return MembershipAnswer(generation=5, assigned=message.partitions)

    async def work() -> None:
        groups = RemoteGroups(ask)
        assert (await groups.join("g", "m", PARTS[:2], 900)).assigned == tuple(PARTS[:2])
        assert [(len(each.ranges), len(each.partitions), each.session_timeout_ms) for each in asked] == [
            (1, 0, 0),
            (0, 2, 900),
        ]
        await groups.join("g", "m", [], 900)
        assert len(asked) == 3, "without partitions there is nothing to name"

    asyncio.run(work())
