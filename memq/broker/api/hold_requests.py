"""Answers requests about held records; any broker takes them, and asks the owner of the shard."""

from __future__ import annotations

from memq.broker.api import Answer, Call
from memq.broker.api.service_lookup import ask_all_services, find_service, forward
from memq.broker.api.stream_requests import checked_sequence, producer_id_of
from memq.broker.holds.staged_parts import take_staged_unit
from memq.broker.holds.taking import IncomingUnit, UnitBlock, take_unit
from memq.broker.partition.appender import sealed_error
from memq.broker.partitions import Partitions
from memq.broker.service_partitions.hosts import ServiceHosts, shard_name
from memq.broker.services import Services
from memq.errors import (
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    TooLargeError,
    TooOldError,
    UnreachableError,
)
from memq.format.blocks.header import check_block, scope_of
from memq.format.held_object import HoldId, Target
from memq.format.key import is_manifest_key
from memq.holds.keeper import HoldKeeper
from memq.holds.machine import UnitCount
from memq.holds.storing import NewHold
from memq.limits import DELAY_MS_MAX, HOLDS_PER_REQUEST_MAX
from memq.permissions import Permission, ResourceKind
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ListDelayed,
    ReleaseStagedUnit,
    ReleaseUnit,
    WireDelayedTopic,
    WireHoldId,
    WireUnitBlock,
    WireUnits,
    WireWaiting,
)
from memq.protocol.link import Link
from memq.runtime.network import format_address
from memq.topic import CLOCK_ERROR_MS, Topic, is_internal


class HoldRequests:
    """Answers requests about held records: of producers, operators, and brokers that release them."""

    def __init__(self, services: Services, partitions: Partitions, hosts: ServiceHosts) -> None:
        self._services = services
        self._partitions = partitions
        self._hosts = hosts

    async def hold(self, call: Call[HoldRecords]) -> Answer:
        """Hold blocks until they are due; answer when that is in the state log."""
        ask, clock = call.ask, self._services.runtime.clock
        topic = await self._target(ask.topic, ask.topic_id, ask.partition)
        _check_count(len(ask.holds))
        if topic.sealed_ms:
            raise sealed_error(topic)
        sent_s = call.connection.ready_s + ask.sent_ms / 1_000
        if (clock.monotonic() - sent_s) * 1_000 > topic.settings.delivery_timeout_ms:
            raise TooOldError(f"the records were sent over {topic.settings.delivery_timeout_ms} ms ago")
        latest_ms = clock.wall_ms() + DELAY_MS_MAX + CLOCK_ERROR_MS
        target, scope = Target(topic.name, topic.id, ask.partition), scope_of(topic.id_bytes, ask.partition)
        holds: list[NewHold] = []
        for each in ask.holds:
            header = check_block(each.block, scope)
            if not 0 < each.due_ms <= latest_ms:
                raise InvalidRequestError(f"due time {each.due_ms} ms is over {DELAY_MS_MAX // 86_400_000} days away")
            hold = HoldId(header.producer_id, header.first_sequence)
            holds.append(NewHold(hold, header.next_sequence, target, "", each.due_ms, each.block))
        keeper = await self._keeper(call, topic.id, ask.partition)
        if isinstance(keeper, Link):
            ask.sent_ms = keeper.clock_ms(sent_s)
            try:
                return await forward(keeper, ask)
            except TooOldError as error:
                if (clock.monotonic() - sent_s) * 1_000 > topic.settings.delivery_timeout_ms:
                    raise
                # The answer to the handshake was late, so the clock of that connection is, too.
                slow = UnreachableError(f"the handshake with {format_address(keeper.address)} was too slow: {error}")
                keeper.abort(slow)
                raise NotReadyError(str(slow)) from error
        return AdminAnswer(holds=[state.name.lower() for state in await keeper.hold(holds)])

    async def cancel(self, call: Call[CancelHolds]) -> Answer:
        """Drop held blocks; answer what became of each."""
        ask = call.ask
        _check_count(len(ask.holds))
        topic = await self._target(ask.topic, ask.topic_id, ask.partition)
        keeper = await self._keeper(call, topic.id, ask.partition)
        if isinstance(keeper, Link):
            return await forward(keeper, ask)
        holds = [HoldId(producer_id_of(each.producer), checked_sequence(each.first)) for each in ask.holds]
        states = await keeper.cancel(holds, Target(topic.name, topic.id, ask.partition))
        return AdminAnswer(holds=["unknown" if state is None else state.name.lower() for state in states])

    async def describe(self, call: Call[DescribeHolds]) -> Answer:
        """Return how many blocks of a topic wait; for another broker, those that wait here."""
        topic = await self._partitions.current_topic(call.ask.topic, call.ask.topic_id)
        if call.ask.hold is not None:
            return await self._state_of(call, call.ask.hold, topic.id)

        async def waiting_at(keeper: HoldKeeper) -> list[WireWaiting]:
            waiting = await keeper.waiting(topic.id, undelivered=call.ask.undelivered)
            units = await keeper.units(topic.id) if call.ask.units else {}
            return [
                WireWaiting(
                    partition=target.partition,
                    blocks=blocks,
                    next_ms=next_ms,
                    units=_wire_units(keeper.shard, units[target]) if target in units else None,
                )
                for target, (blocks, next_ms) in (dict.fromkeys(units, (0, 0)) | waiting).items()
            ]

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.holds, call, waiting_at, lambda answer: answer.waiting)
        return AdminAnswer(waiting=sorted(found, key=lambda each: each.partition), covered=covered)

    async def _state_of(self, call: Call[DescribeHolds], asked: WireHoldId, topic_id: str) -> Answer:
        """Return the state of a hold, if a service partition knows it.

        A hidden one is as an unknown one: without `describe` on all topics, only holds of the named topic are known.
        """
        call.ask.of_topic |= not call.access.may_on_all(Permission.DESCRIBE, ResourceKind.TOPIC)
        only = topic_id if call.ask.of_topic else ""
        hold = HoldId(producer_id_of(asked.producer), checked_sequence(asked.first))

        async def state_at(keeper: HoldKeeper) -> list[str]:
            state = await keeper.state_of(hold, only)
            return [] if state is None else [state.name.lower()]

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.holds, call, state_at, lambda answer: answer.holds)
        return AdminAnswer(holds=found, covered=covered)

    async def list_delayed(self, call: Call[ListDelayed]) -> Answer:
        """Return how many blocks of each topic wait; for another broker, those that wait here.

        Those of a deleted topic do not count if there is another one of its name.
        """

        async def delayed_at(keeper: HoldKeeper) -> list[WireDelayedTopic]:
            if call.ask.proven:
                await keeper.prove()
            return [
                WireDelayedTopic(topic=target.topic, topic_id=target.topic_id, blocks=blocks, next_ms=next_ms)
                for target, (blocks, next_ms) in (await keeper.all_waiting()).items()
            ]

        hosts = self._hosts
        found, covered = await ask_all_services(hosts, hosts.holds, call, delayed_at, lambda answer: answer.delayed)
        ids = {topic.name: topic.id for topic in self._partitions.topics()}
        current = [each for each in found if ids.get(each.topic, each.topic_id) == each.topic_id]
        return AdminAnswer(delayed=_by_topic(current), covered=covered)

    async def release(self, call: Call[ReleaseUnit]) -> Answer:
        """Take a unit that another broker releases into the log of a partition of this broker."""
        ask = call.ask
        topic = await self._partitions.current_topic(ask.topic, ask.topic_id)
        processor = self._partitions.processor(topic, ask.partition)
        blocks = [_unit_block(each) for each in ask.blocks]
        await take_unit(processor, IncomingUnit(producer_id_of(ask.shard), ask.number, ask.behind, blocks, ask.records))
        return AdminAnswer()

    async def release_staged(self, call: Call[ReleaseStagedUnit]) -> Answer:
        """Publish the staged part of a transaction that another broker releases."""
        ask = call.ask
        topic = await self._partitions.current_topic(ask.topic, ask.topic_id)
        if not is_manifest_key(ask.manifest):
            raise InvalidRequestError(f"'{ask.manifest[:120]}' is no manifest")
        unit = IncomingUnit(
            producer_id_of(ask.shard), ask.number, ask.behind, [UnitBlock(ask.manifest, 0, 0, None)], ask.records
        )
        await take_staged_unit(self._partitions.processor(topic, ask.partition), unit)
        return AdminAnswer()

    async def _target(self, name: str, topic_id: str, partition: int) -> Topic:
        """Return the topic of a partition. Raises: NotFoundError; InvalidRequestError for memq's own topics."""
        topic = await self._partitions.current_topic(name, topic_id)
        if is_internal(topic.name):
            raise InvalidRequestError(f"topic '{topic.name}' is memq's own: its records can't be delayed")
        if not 0 <= partition < len(topic.partitions):
            raise NotFoundError(f"topic '{topic.name}' has {len(topic.partitions)} partitions, none is {partition}")
        return topic

    async def _keeper(
        self, call: Call[HoldRecords] | Call[CancelHolds], topic_id: str, partition: int
    ) -> HoldKeeper | Link:
        """Return the keeper of a partition's shard, or a link to its broker.

        Raises: as `find_service`.
        """
        return await find_service(self._hosts, self._hosts.holds, shard_name(topic_id, partition), call)


def _wire_units(shard: int, count: UnitCount) -> WireUnits:
    return WireUnits(
        shard=f"{shard:016x}",
        released=count.released,
        released_records=count.released_records,
        done=count.settled,
        done_records=count.settled_records,
        dropped=count.dropped,
    )


def _by_topic(found: list[WireDelayedTopic]) -> list[WireDelayedTopic]:
    """Return the sums of each topic, by name."""
    sums: dict[str, WireDelayedTopic] = {}
    for each in found:
        known = sums.setdefault(each.topic_id, each)
        if known is not each:
            known.blocks += each.blocks
            known.next_ms = min(filter(None, (known.next_ms, each.next_ms)), default=0)
    return sorted(sums.values(), key=lambda each: (each.topic, each.topic_id))


def _check_count(count: int) -> None:
    if count > HOLDS_PER_REQUEST_MAX:
        raise TooLargeError(f"{count} records in one request, {HOLDS_PER_REQUEST_MAX} are allowed")


def _unit_block(block: WireUnitBlock) -> UnitBlock:
    named = block.hold
    hold = None if named is None else HoldId(producer_id_of(named.producer), checked_sequence(named.first))
    return UnitBlock(block.key, block.offset, block.length, hold)
