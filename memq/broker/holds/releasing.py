"""Hands units of held records to the owners of their targets, here or at another broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from memq.broker.holds.staged_parts import mark_committed, take_staged_unit
from memq.broker.holds.taking import IncomingUnit, UnitBlock, take_unit
from memq.broker.partitions import Partitions, not_owner
from memq.broker.services import Services
from memq.errors import MovedError, NotFoundError, RetryableError
from memq.holds.decisions import ReleasedUnit
from memq.holds.machine import HoldMachine
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.hold_messages import ReleaseStagedUnit, ReleaseUnit, WireHoldId, WireUnitBlock
from memq.protocol.link import Link

RELEASE_TIMEOUT_S = 60.0
MARKED_MAX = 1_024
LinkTo = Callable[[str], Awaitable[Link]]


class UnitReleaser:
    """Releases the units of one service partition, whose id at the targets is `shard`."""

    def __init__(
        self, services: Services, partitions: Partitions, link: LinkTo, shard: int, machine: HoldMachine
    ) -> None:
        self._services = services
        self._partitions = partitions
        self._link = link
        self._shard = shard
        self._machine = machine
        self._marked: dict[str, None] = {}  # manifests whose mark was put

    async def release(self, released: ReleasedUnit) -> None:
        """Return when the target has the unit in its log, or its topic is deleted.

        Raises: MemqError: ask again.
        The caller asks for a number only when the target had the one before it.
        """
        target, number = released.unit.target, released.unit.r
        try:
            topic = await self._partitions.current_topic(target.topic, target.topic_id)
        except NotFoundError as error:
            if not await self._partitions.forwarder.deleted(target.topic_id):
                raise
            text = f"{len(released.holds)} held blocks of topic '{target.topic}' are dropped: {error}"
            self._services.events.warning("held-gone", text)
            return
        staged = next((hold.key for hold in released.holds if hold.is_staged), "")
        await self._mark(released)
        blocks = [UnitBlock(hold.key, hold.block.offset, hold.block.length, hold.block.id) for hold in released.holds]
        unit = IncomingUnit(self._shard, number, number - 1, blocks, released.total)
        try:
            if self._partitions.owns(topic, target.partition):
                take = take_staged_unit if staged else take_unit
                await take(self._partitions.processor(topic, target.partition), unit)
                return
            address = self._partitions.owners(topic)[target.partition].address
            if not address:
                raise not_owner(topic, target.partition, "")
            link = await self._link(address)
            request = AdminRequest(ask=_staged_message(released, unit, staged) if staged else _message(released, unit))
            await link.request(Api.ADMIN, request, AdminAnswer, timeout_s=RELEASE_TIMEOUT_S)
        except MovedError:
            await self._refresh()
            raise

    async def _refresh(self) -> None:
        try:
            await self._partitions.refresh()
        except RetryableError as error:
            self._services.events.info("refresh-failed", str(error))

    async def _mark(self, released: ReleasedUnit) -> None:
        """Mark a transaction with staged parts as committed, before any of its units is released.

        Else a target could have its blocks, and a restore would leave out the staged parts of the others.
        """
        lane = released.holds[0].lane if released.holds else ""
        units = [unit for each in self._machine.units.values() for unit in each.values() if unit.holds] if lane else []
        holds = (hold for unit in units if unit.holds[0].lane == lane for hold in unit.holds)
        for manifest in dict.fromkeys(hold.key for hold in holds if hold.is_staged):
            if manifest not in self._marked:
                await mark_committed(self._services, manifest)
                self._marked[manifest] = None
                if len(self._marked) > MARKED_MAX:
                    del self._marked[next(iter(self._marked))]


def _message(released: ReleasedUnit, unit: IncomingUnit) -> ReleaseUnit:
    target = released.unit.target
    return ReleaseUnit(
        topic=target.topic,
        topic_id=target.topic_id,
        partition=target.partition,
        shard=f"{unit.shard:016x}",
        number=unit.number,
        behind=unit.behind,
        records=unit.records,
        blocks=[_wire_block(each) for each in unit.blocks],
    )


def _staged_message(released: ReleasedUnit, unit: IncomingUnit, manifest: str) -> ReleaseStagedUnit:
    target = released.unit.target
    return ReleaseStagedUnit(
        topic=target.topic,
        topic_id=target.topic_id,
        partition=target.partition,
        shard=f"{unit.shard:016x}",
        number=unit.number,
        behind=unit.behind,
        records=unit.records,
        manifest=manifest,
    )


def _wire_block(block: UnitBlock) -> WireUnitBlock:
    hold = None if block.id is None else WireHoldId(producer=f"{block.id.producer:016x}", first=block.id.first)
    return WireUnitBlock(key=block.key, offset=block.offset, length=block.length, hold=hold)
