"""Brings sealed topics to their end: asks all brokers until no acked record is outside the logs.

Theory. The seal is stored with the topic at the coordinator. An owner that has read it refuses new blocks, and an
opening reads the topic after it has claimed its epoch. So a partition takes no more records from the moment that its
owner has read the seal and has then proved its epoch: every later owner opens after the seal. The governor asks. A
topic has `ended` when in one round each partition had such a proof, and each live broker held none of the topic's
records: neither in a ring, nor to forward, nor on its disk. A broker holds what it forwards until the queue shows it.
So no record slips from a broker that is asked later to one that was asked before. Where the queue refuses by age, a
pointer of an earlier owner may land until the owner is alone. The end is stored by compare-and-set on the version that
was read before the round.

A broker that is away during the round, because it is down or has lost its session, may hold records acked with ack=1.
The pointers name it: an epoch of it has no `closed`. So the end waits until it is back, AWAY_S at most. Records of one
that comes later land behind the end. The owner knows the epochs that its opening has read, of a dedup window at least.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from memq.broker.partitions import Partitions
from memq.broker.services import BROKER_PROGRAM, Services
from memq.broker.spool.held_records import HeldRecords
from memq.errors import MemqError, NotFoundError, NotReadyError, VersionConflictError
from memq.governor import BrokerEntry
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, SettleTopic
from memq.protocol.frames import Api
from memq.protocol.link import Link, connect_link
from memq.runtime.network import parse_address
from memq.topic import Topic

ROUND_S = 1.0
ASK_S = 20.0  # time-out for one broker
READY_S = 10.0  # time-out for the opening of one partition
AWAY_S = 60.0  # for which the end waits for brokers that are away


@dataclass(slots=True)
class SettledParts:
    """The answer of one broker: its settled partitions, and reasons why others are not.

    `former` are the brokers that have lost an epoch of these partitions without `closed`.
    """

    partitions: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    former: list[str] = field(default_factory=list)


async def settle(
    services: Services, partitions: Partitions, held: HeldRecords, name: str, topic_id: str
) -> SettledParts:
    """Return the partitions of a sealed topic that this broker owns and that take no more records.

    With records of the topic here, no partition is settled. Raises:
    NotReadyError when this broker has not read the seal; as `Partitions.current_topic`.
    """
    topic = await partitions.current_topic(name, topic_id)
    if not topic.sealed_ms:
        await partitions.refresh()
        topic = partitions.topic(name, topic_id)
        if not topic.sealed_ms:
            raise NotReadyError(f"broker '{services.settings.broker_id}' has not read that topic '{name}' is sealed")
    settled, former = SettledParts(), set[str]()
    for part in topic.partitions:
        if partitions.owns(topic, part.partition):
            try:
                former |= await _settle_partition(services, partitions, topic, part.partition)
            except (MemqError, TimeoutError) as error:
                settled.reasons.append(f"partition {part.partition}: {error!r}")
            else:
                settled.partitions.append(part.partition)
    if holds := await held.any_of(topic.id):
        settled.partitions, settled.reasons = [], [holds, *settled.reasons]
    settled.former = sorted(former)
    return settled


async def _settle_partition(services: Services, partitions: Partitions, topic: Topic, partition: int) -> set[str]:
    """Return the brokers of unclosed epochs when the owner has proved its epoch since it knows the seal.

    Raises: MemqError, TimeoutError.
    """
    processor = partitions.processor(topic, partition)
    async with asyncio.timeout(READY_S):
        await processor.ready()
    own = processor.owned()
    if not processor.topic.sealed_ms:
        raise NotReadyError("its owner has not read the seal")
    if services.queue.refuses_by_age and not own.is_alone(services.runtime.clock.monotonic()):
        raise NotReadyError("a pointer of an earlier owner may still land")
    processor.hurry()  # blocks that wait for a batch to fill
    await processor.proven_end()
    if processor.own is not own:
        raise NotReadyError("its epoch is over")
    return set(own.unclosed.values())


class Sealing:
    """Ends sealed topics while this broker governs."""

    def __init__(self, services: Services, partitions: Partitions, held: HeldRecords) -> None:
        self._services = services
        self._partitions = partitions
        self._held = held
        self._links: dict[str, Link] = {}
        self._away_s: dict[tuple[str, int], float] = {}  # seals whose end waits for brokers that are away; since when

    async def run(self, governs: Callable[[], bool]) -> None:
        """Ask about sealed topics that have not ended, until cancelled."""
        try:
            while True:
                await asyncio.sleep(ROUND_S)
                if governs():
                    for topic in self._partitions.topics():
                        if topic.sealed_ms and not topic.ended:
                            with suppress(MemqError):
                                await self.end(topic)
        finally:
            for link in self._links.values():
                link.close()

    async def end(self, known: Topic) -> bool:
        """Let a sealed topic end if no acked record is outside its logs; return whether it has ended.

        Raises: as the coordinator port.
        """
        services, coordinator = self._services, self._services.coordinator
        topic = await coordinator.current_topic(known.name)
        if topic is None or topic.id != known.id or not topic.sealed_ms or topic.ended:
            return topic is not None and topic.ended
        brokers = await coordinator.brokers()
        answers = await asyncio.gather(*(self._ask(broker, topic) for broker in brokers))
        reasons = [reason for answer in answers for reason in answer.reasons]
        settled = {partition for answer in answers for partition in answer.partitions}
        if missing := sorted({part.partition for part in topic.partitions} - settled):
            reasons.append(f"partitions {missing[:8]} are not settled")
        former = {broker for answer in answers for broker in answer.former}
        away = sorted(former - {broker.id for broker in brokers})
        if away and self._awaits(topic):
            reasons.append(f"brokers {away[:8]} are away, and may hold records that they acked with ack=1")
        if reasons:
            services.events.info("seal-waits", f"topic '{topic.name}': {reasons[0]}; {len(reasons)} reasons in all")
            return False
        try:
            await coordinator.alter_topic(msgspec.structs.replace(topic, ended=True))
        except (VersionConflictError, NotFoundError):
            return False  # the next round reads what was altered
        without = f" that live brokers have acked; brokers {away[:8]} are away" if away else ""
        services.events.info(
            "topic-ended", f"topic '{topic.name}' is sealed, and all of its records are in the queue{without}"
        )
        self._away_s.pop((topic.id, topic.sealed_ms), None)
        await self._partitions.refresh()
        return True

    def _awaits(self, topic: Topic) -> bool:
        """Whether the end of a topic still waits for brokers that are away."""
        now_s = self._services.runtime.clock.monotonic()
        return now_s - self._away_s.setdefault((topic.id, topic.sealed_ms), now_s) < AWAY_S

    async def _ask(self, broker: BrokerEntry, topic: Topic) -> SettledParts:
        """Ask one broker which partitions are settled; an error is a reason against it."""
        try:
            async with asyncio.timeout(ASK_S):
                if broker.id == self._services.settings.broker_id:
                    return await settle(self._services, self._partitions, self._held, topic.name, topic.id)
                ask = SettleTopic(broker=broker.id, topic=topic.name, topic_id=topic.id)
                link = await self._link(broker.address)
                answer = await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=ASK_S)
        except (MemqError, TimeoutError) as error:
            return SettledParts(reasons=[f"broker '{broker.id}': {error!r}"])
        return SettledParts(answer.settled, answer.unread, answer.former)

    async def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None or not link.open:
            connected = connect_link(self._services.runtime, None, parse_address(address), client=BROKER_PROGRAM)
            link = self._links[address] = await connected
        return link
