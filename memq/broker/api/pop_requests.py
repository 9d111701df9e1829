"""Answers requests about pop groups; any broker takes them, and asks the owners of their shards."""

from __future__ import annotations

from typing import Any

import msgspec

from memq.broker.api import Answer, Call
from memq.broker.api.service_lookup import ask_all_services, find_service, forward
from memq.broker.partitions import Partitions
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import Services
from memq.errors import InvalidRequestError, NotFoundError, NotReadyError
from memq.limits import POP_RECORD_BYTES_MAX, QUEUE_ATTEMPTS_MAX, QUEUE_LEASE_MS_MAX, QUEUE_LEASE_MS_MIN
from memq.notification import check_position
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.link import Link
from memq.protocol.pop_messages import BeginPop, ListPops, RemovePop, WirePop, WirePopPosition
from memq.protocol.queue_messages import QueueAnswer
from memq.queues.keeper import QueueKeeper
from memq.queues.pop.groups import BeginPopDecision, PopPosition, check_queue, is_pop_queue, topic_of
from memq.topic import Committed, Position, Topic, read_partitions

Home = QueueKeeper | Link


class PopRequests:
    """Begins, lists and removes pop groups."""

    def __init__(self, services: Services, hosts: ServiceHosts, partitions: Partitions) -> None:
        self._services = services
        self._hosts = hosts
        self._partitions = partitions

    async def begin(self, call: Call[BeginPop]) -> Answer:
        """Begin a pop group, or set the terms of one."""
        ask = call.ask
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        topic = await self._partitions.current_topic(topic_of(ask.queue), ask.topic_id)
        decision = _decision(ask, topic)
        if not await home.pop.begin(decision):
            await self._replace(home, decision)
        return AdminAnswer()

    async def _replace(self, home: QueueKeeper, decision: BeginPopDecision) -> None:
        """Let a group read the topic that was made in place of its former one. Raises: NotReadyError."""
        known = home.pop.groups.get(decision.queue)
        gone = known is not None and await self._services.coordinator.deleted(known.topic_id)
        replaced = known.topic_id if known is not None and gone else ""
        if not replaced or not await home.pop.begin(msgspec.structs.replace(decision, replaced=replaced)):
            raise NotReadyError(f"pop group '{decision.queue}' reads another topic of this name")

    async def remove(self, call: Call[RemovePop]) -> Answer:
        """Remove a pop group."""
        ask = call.ask
        home = await self._home(call, ask.queue)
        if isinstance(home, Link):
            return await forward(home, ask)
        if not await home.pop.remove(ask.queue):
            raise NotFoundError(f"pop group '{ask.queue}' does not exist")
        return AdminAnswer()

    async def list_groups(self, call: Call[ListPops]) -> Answer:
        """Return all pop groups; for another broker, those that are here."""

        async def groups_at(keeper: QueueKeeper) -> list[WirePop]:
            if call.ask.proven:
                await keeper.pop.prove()
            return [
                WirePop(
                    queue=each.queue,
                    topic_id=each.topic_id,
                    lease_ms=each.lease_ms,
                    attempts_max=each.attempts_max,
                    items=keeper.pop.left(each.queue),
                    positions=[_wire(at) for at in each.positions],
                )
                for each in keeper.pop.groups.values()
            ]

        found, covered = await ask_all_services(self._hosts, self._hosts.queues, call, groups_at, _pops_of)
        ordered = sorted(found, key=lambda each: each.queue)
        return AdminAnswer(queue=QueueAnswer(pops=ordered), covered=covered)

    async def _home(self, call: Call[Any], queue: str) -> Home:
        if not is_pop_queue(check_queue(queue)):
            raise InvalidRequestError(f"'{queue}' is no pop group", hint="name it topic@group")
        return await find_service(self._hosts, self._hosts.queues, queue, call)


def _decision(ask: BeginPop, topic: Topic) -> BeginPopDecision:
    """Return the decision that a request asks for. Raises: InvalidRequestError."""
    if not QUEUE_LEASE_MS_MIN <= ask.lease_ms <= QUEUE_LEASE_MS_MAX:
        text = f"{QUEUE_LEASE_MS_MIN} to {QUEUE_LEASE_MS_MAX} ms"
        raise InvalidRequestError(f"lease is {ask.lease_ms} ms, {text} are allowed")
    if not 0 <= ask.attempts_max <= QUEUE_ATTEMPTS_MAX:
        raise InvalidRequestError(f"attempts_max is {ask.attempts_max}, 0 to {QUEUE_ATTEMPTS_MAX} are allowed")
    if topic.settings.record_bytes_max > POP_RECORD_BYTES_MAX:
        text = f"topic '{topic.name}' takes records of {topic.settings.record_bytes_max} bytes"
        hint = "lower record_bytes_max of the topic"
        raise InvalidRequestError(f"{text}, a pop group at most {POP_RECORD_BYTES_MAX}", hint=hint)
    logs = read_partitions(topic)
    if [each.partition for each in ask.positions] != [log.partition for log in logs]:
        raise InvalidRequestError(f"topic '{topic.name}' has {len(logs)} read partitions: each one needs a position")
    for log, each in zip(logs, ask.positions, strict=True):
        check_position(log, Committed(Position(each.partition, each.offset, each.index), mark=each.mark))
    positions = tuple(PopPosition(each.partition, each.offset, each.index, each.mark) for each in ask.positions)
    return BeginPopDecision(ask.queue, ask.topic_id, ask.lease_ms, ask.attempts_max, positions)


def _wire(at: PopPosition) -> WirePopPosition:
    return WirePopPosition(at.partition, at.offset, at.index, at.mark)


def _pops_of(answer: AdminAnswer) -> list[WirePop]:
    return answer.about_queues.pops
