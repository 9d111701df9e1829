"""Asks the brokers of a cluster for records that no pointer has, and for the units of held records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

from memq.audit.held import HeldAnswer, Sought, Source
from memq.audit.released import ReleaseAnswer, ShardCounts
from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool
from memq.errors import MemqError, ProtocolError
from memq.format.ranges import Range, RangeSet
from memq.limits import SOUGHT_RANGES_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, DescribeCluster, DescribeHeld, WireRecords
from memq.protocol.frames import Api
from memq.protocol.hold_messages import DescribeHolds, WireHoldId, WireUnits
from memq.protocol.wire_types import WireBroker
from memq.runtime.network import parse_address
from memq.topic import Topic

ANSWER_S = 30.0  # a broker may have to read the whole spool of an earlier run
BROKER_S = 60.0  # for all answers of one broker


class Holders:
    """All present brokers; `ask` is a `memq.audit.held.AskHeld`, `ask_released` an `AskReleased`."""

    def __init__(self, pool: LinkPool, any_broker: BrokerRouter) -> None:
        self._pool = pool
        self._any = any_broker

    async def ask(self, topic: Topic, sought: Sequence[Sought]) -> HeldAnswer:
        """Return the answers of all brokers about records of a topic; the answer includes failures.

        A record of producer 0 stands for the held records of its partition: their shards are asked.
        """
        released = await self.ask_released(topic) if any(not each.producer for each in sought) else None
        if released is not None and all(not each.producer for each in sought):
            return HeldAnswer(released=released)
        try:
            request = AdminRequest(ask=DescribeCluster())
            brokers = (await self._any(Api.ADMIN, request, AdminAnswer, timeout_s=ANSWER_S)).brokers
        except MemqError as error:
            return HeldAnswer(error=str(error), released=released)
        held: dict[Source, RangeSet] = {}
        failed: dict[str, str] = {}
        for broker, answer in zip(
            brokers, await asyncio.gather(*(self._ask(each, topic, sought) for each in brokers)), strict=True
        ):
            if isinstance(answer, str):
                failed[broker.broker] = answer
                continue
            for source, ranges in _held_by(answer):
                for piece in ranges:
                    held.setdefault(source, RangeSet()).add(*piece)
            unread = dict.fromkeys(text for part in answer for text in part.unread)
            if unread:
                failed[broker.broker] = "; ".join(unread)
        answered = frozenset(each.broker for each in brokers if each.broker not in failed)
        return HeldAnswer(held, answered, failed, released=released)

    async def ask_released(self, topic: Topic) -> ReleaseAnswer:
        """Return what the shards of held records say of a topic; the answer includes failures."""
        ask = DescribeHolds(topic=topic.name, topic_id=topic.id, undelivered=True, units=True)
        try:
            answer = await self._any(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=ANSWER_S)
        except MemqError as error:
            return ReleaseAnswer(error=str(error))
        next_ms: dict[int, int] = {}
        for each in answer.waiting:
            if each.next_ms:
                next_ms[each.partition] = min(each.next_ms, next_ms.get(each.partition, each.next_ms))
        return ReleaseAnswer(
            shards=tuple(_counts_of(each.partition, each.units) for each in answer.waiting if each.units is not None),
            waiting=sum(each.blocks for each in answer.waiting),
            next_ms=next_ms,
        )

    async def state_of(self, topic: Topic, producer: int, first: int) -> str:
        """Return the state of a delayed record at its shard, "" if none knows it. Raises: MemqError."""
        hold = WireHoldId(producer=f"{producer:016x}", first=first)
        request = AdminRequest(ask=DescribeHolds(topic=topic.name, topic_id=topic.id, hold=hold))
        answer = await self._any(Api.ADMIN, request, AdminAnswer, timeout_s=ANSWER_S)
        return answer.holds[0] if answer.holds else ""

    async def _ask(self, broker: WireBroker, topic: Topic, sought: Sequence[Sought]) -> list[AdminAnswer] | str:
        """Return what one broker holds, or why it did not say that."""
        answers: list[AdminAnswer] = []
        try:
            async with asyncio.timeout(BROKER_S):
                link = (await self._pool.session(parse_address(broker.address))).link
                for part in _requests(sought):
                    ask = DescribeHeld(broker=broker.broker, topic=topic.name, topic_id=topic.id, sought=part)
                    answer = await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=ANSWER_S)
                    if answer.held is None:
                        return "its answer has nothing of that"
                    answers.append(answer)
        except TimeoutError:
            return f"it did not answer within {BROKER_S:g} s"
        except ProtocolError as error:
            return f"it is of a version that does not answer that: {error}"
        except MemqError as error:
            return f"it did not answer: {error}"
        return answers


def _counts_of(partition: int, units: WireUnits) -> ShardCounts:
    counts = (units.released, units.released_records, units.done, units.done_records, units.dropped)
    return ShardCounts(partition, int(units.shard, 16), *counts)


def _held_by(answers: Sequence[AdminAnswer]) -> Iterator[tuple[Source, list[Range]]]:
    """Yield the ranges of answers; invalid ranges are ignored."""
    for records in [each for answer in answers for each in answer.held or ()]:
        with suppress(ValueError):
            yield (
                (records.partition, int(records.producer, 16)),
                [(first, next_) for first, next_ in records.ranges if first < next_],
            )


def _requests(sought: Sequence[Sought]) -> Iterator[list[WireRecords]]:
    """Yield the sought records, in requests of SOUGHT_RANGES_MAX ranges."""
    part: list[WireRecords] = []
    room = SOUGHT_RANGES_MAX
    for each in sought:
        left = list(each.ranges)
        while left:
            pieces, left = left[:room], left[room:]
            part.append(WireRecords(partition=each.partition, producer=f"{each.producer:016x}", ranges=pieces))
            room -= len(pieces)
            if not room:
                yield part
                part, room = [], SOUGHT_RANGES_MAX
    if part:
        yield part
