"""Answers operators' requests: brokers, the governor's plan, clients of a broker, its drain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from memq.broker.api import Answer, Call
from memq.broker.api.stream_requests import checked_sequence, producer_id_of
from memq.broker.ingest.quotas import RatePerSecond
from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.broker.spool.held_records import HeldRecords, Source
from memq.broker.upkeep.sealing import settle
from memq.errors import InvalidRequestError, MovedError, NotFoundError, TimedOutError
from memq.format.ranges import RangeSet
from memq.governor.governor import view_of
from memq.governor.planning import AssignmentChange, ClusterView
from memq.limits import HELD_RANGES_MAX, SOUGHT_RANGES_MAX
from memq.protocol.admin_messages import (
    AdminAnswer,
    DescribeClients,
    DescribeCluster,
    DescribeHeld,
    DescribeLoad,
    DrainBroker,
    ReportSuspicion,
    SettleTopic,
    WireRecords,
)
from memq.protocol.wire_types import WireBroker, WireChange, WireClient, WireLoad
from memq.storage_handlers import CountingStore


class ClusterRequests:
    """Answers about this broker and its cluster. `hand_over` moves all its partitions to other brokers."""

    def __init__(
        self,
        services: Services,
        partitions: Partitions,
        hand_over: Callable[[], Awaitable[None]],
        held: HeldRecords,
    ) -> None:
        self._services = services
        self._partitions = partitions
        self._hand_over = hand_over
        self._held = held

    async def describe_clients(self, call: Call[DescribeClients]) -> Answer:
        """Return the limits of clients at this broker."""
        await self._check_here(call.ask.broker)
        return AdminAnswer(clients=[_wire_client(*row) for row in self._services.limits.clients()])

    async def describe_load(self, call: Call[DescribeLoad]) -> Answer:
        """Return how full this broker is."""
        await self._check_here(call.ask.broker)
        return AdminAnswer(load=self._load())

    async def describe_held(self, call: Call[DescribeHeld]) -> Answer:
        """Return which of the sought records this broker holds, and why it may hold more of them."""
        ask = call.ask
        await self._check_here(ask.broker)
        topic, sought = await self._partitions.current_topic(ask.topic, ask.topic_id), _sought(ask.sought)
        found, unread = await self._held.find(topic.id, sought)
        return _held_answer(found, unread)

    async def settle_topic(self, call: Call[SettleTopic]) -> Answer:
        """Return which partitions of a sealed topic have their last record, and why others have not."""
        ask = call.ask
        await self._check_here(ask.broker)
        found = await settle(self._services, self._partitions, self._held, ask.topic, ask.topic_id)
        return AdminAnswer(settled=found.partitions, unread=found.reasons, former=found.former)

    async def report_suspicion(self, call: Call[ReportSuspicion]) -> Answer:
        """Note that a broker's port refused a connection; an unknown address is ignored."""
        if call.ask.address in self._partitions.brokers():
            self._services.suspicions.report(call.ask.address)
        return AdminAnswer()

    async def drain(self, call: Call[DrainBroker]) -> Answer:
        """Hand over all partitions of this broker. Raises: TimedOutError; the hand-over then continues."""
        broker = call.ask.broker
        await self._check_here(broker)
        try:
            await self._hand_over()
        except TimeoutError as error:
            raise TimedOutError(
                f"broker '{broker}' still holds partitions", hint="the drain continues; ask again"
            ) from error
        return AdminAnswer()

    def _load(self) -> WireLoad:
        services, at_work = self._services, self._partitions.at_work()
        counted = {
            name: handler.counts() for name, handler in services.stores.items() if isinstance(handler, CountingStore)
        }
        return WireLoad(
            memory_bytes=services.pool.leased_bytes,
            memory_bytes_max=services.pool.budget_bytes,
            ring_batches=sum(len(processor.ring) for processor in at_work),
            uploads=sum(processor.ring.uploads for processor in at_work),
            open_breakers=[
                name
                for name, counts in counted.items()
                if any(count.name == "breaker_open" and count.value for count in counts)
            ],
        )

    async def describe(self, call: Call[DescribeCluster]) -> Answer:
        """Return the brokers and the plan that the governor would make now; change nothing."""
        coordinator, planner = self._services.coordinator, self._services.planner
        view = await view_of(coordinator, self._services.runtime.clock.wall_ms())
        governor = await coordinator.governor()
        reshapes, plan = await planner.reshapes(view), await planner.plan(view)
        names = {topic.id: topic.name for topic in view.topics}
        return AdminAnswer(
            brokers=_brokers(view, governor),
            changes=[_wire_change(names, change) for change in plan.changes],
            notes=[*(f"topic '{change.topic.name}': {change.reason}" for change in reshapes), *plan.notes],
        )

    async def _check_here(self, broker: str) -> None:
        """Refuse a request for another broker. Raises: MovedError with its address; NotFoundError."""
        if broker == self._services.settings.broker_id:
            return
        for entry in await self._services.coordinator.brokers():
            if entry.id == broker:
                moved = MovedError(f"broker '{broker}' answers for itself", hint=f"ask it at {entry.address}")
                moved.address = entry.address
                raise moved
        raise NotFoundError(f"broker {broker[:60]!a} is not running", hint="memq broker list shows the running brokers")


def _brokers(view: ClusterView, governor: str) -> list[WireBroker]:
    owned = [entry.broker for entry in view.assignments]
    owners = {(entry.topic_id, entry.partition): entry.broker for entry in view.assignments}
    traffic = dict.fromkeys((broker.id for broker in view.brokers), 0)
    for load in view.loads:
        owner = owners.get((load.topic_id, load.partition), "")
        if owner in traffic:
            traffic[owner] += load.bytes_s
    return [
        WireBroker(
            broker=broker.id,
            address=broker.address,
            zone=broker.zone,
            draining=broker.draining,
            governs=broker.id == governor,
            partitions=owned.count(broker.id),
            bytes_s=traffic[broker.id],
            capacity_bytes_s=broker.capacity_bytes_s,
        )
        for broker in view.brokers
    ]


def _sought(records: Sequence[WireRecords]) -> dict[Source, RangeSet]:
    """Return the sought records by write partition and producer. Raises: InvalidRequestError."""
    count = sum(len(each.ranges) for each in records)
    if count > SOUGHT_RANGES_MAX:
        raise InvalidRequestError(f"{count} ranges are sought, {SOUGHT_RANGES_MAX} are allowed")
    sought: dict[Source, RangeSet] = {}
    for each in records:
        ranges = sought.setdefault((each.partition, producer_id_of(each.producer)), RangeSet())
        for first, next_ in each.ranges:
            if not checked_sequence(first) < checked_sequence(next_):
                raise InvalidRequestError(f"sequences {first} to {next_} are no range")
            ranges.add(first, next_)
    return sought


def _held_answer(found: Mapping[Source, RangeSet], unread: Sequence[str]) -> AdminAnswer:
    """Return the answer, cut at HELD_RANGES_MAX ranges."""
    records, room = list[WireRecords](), HELD_RANGES_MAX
    for (partition, producer), ranges in found.items():
        pieces = list(ranges)[:room]
        room -= len(pieces)
        records.append(WireRecords(partition=partition, producer=f"{producer:016x}", ranges=pieces))
        if len(pieces) < len(ranges):
            return AdminAnswer(held=records, unread=[*unread, f"it holds over {HELD_RANGES_MAX} ranges of them"])
    return AdminAnswer(held=records, unread=list(unread))


def _wire_client(name: str, limit: RatePerSecond, connections: int, over: int) -> WireClient:
    return WireClient(
        client=name,
        mode=limit.mode,
        bytes_s=limit.bytes_s,
        requests_s=limit.requests_s,
        connections=connections,
        over=over,
    )


def _wire_change(names: Mapping[str, str], change: AssignmentChange) -> WireChange:
    after = change.assignment
    topic = names.get(after.topic_id, after.topic_id)
    return WireChange(
        topic=topic, partition=after.partition, before=change.before, after=after.broker, reason=change.reason
    )
