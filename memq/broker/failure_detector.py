"""Asks the ports of suspects, and takes their partitions over before their sessions end.

Theory. After a crash the host refuses connections at once, while the coordinator waits for the end of the session. A
refused connection is strong evidence, but no proof: a firewall also refuses. The queue fences owners, so a wrong
suspicion costs an epoch, and never a record. A time-out and a reset are no evidence: a paused broker causes both.

A suspicion concerns one registration. Its entry is read first, then its port is asked; the coordinator removes that
registration only. So a broker that has restarted at the same address keeps its new one. Each broker that gets a report
asks the port itself, and passes the report to the governor, which asks again. If the governor refuses, any broker takes
over its role. A broker makes one connection attempt a second for reports that prove wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from memq.broker.services import BROKER_PROGRAM, Services
from memq.errors import MemqError, UnreachableError
from memq.governor import BrokerEntry
from memq.governor.governor import Governor
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, ReportSuspicion
from memq.protocol.frames import Api
from memq.protocol.link import connect_link
from memq.runtime.network import parse_address
from memq.runtime.process import is_running

PROBE_S = 1.0  # time-out of a connection attempt
REST_S = 1.0  # pause after a report that led to no takeover, and between two checks of one address
REPORT_S = 2.0  # time-out of the governor for a report that is passed to it
# Checks of a process on this host, and the time between two: its port refuses shortly before its id is gone.
EXIT_CHECKS, EXIT_S = 20, 0.01


class FailureDetector:
    """Checks the suspicions of one broker.

    `assign` lets the governor assign partitions, if this broker is the governor.
    A broker without a `governor` checks and passes reports, but takes nothing over.
    """

    def __init__(self, services: Services, governor: Governor | None, assign: Callable[[], Awaitable[bool]]) -> None:
        self._services = services
        self._governor = governor
        self._assign = assign
        self._checked_s: dict[str, float] = {}  # address: when it was checked last, of the last REST_S

    async def run(self) -> None:
        """Check reports one after another, without end."""
        while True:
            address = await self._services.suspicions.next()
            try:
                rests = await self._check(address)
            except MemqError as error:
                self._services.events.info("suspicion-unchecked", f"address {address}: {error}")
                rests = True
            if rests:
                await asyncio.sleep(REST_S)

    async def _check(self, address: str) -> bool:
        """Check a report; return whether it cost a connection attempt without a takeover."""
        now_s = self._services.runtime.clock.monotonic()
        self._checked_s = {each: at_s for each, at_s in self._checked_s.items() if now_s - at_s < REST_S}
        if address in self._checked_s:
            return False
        self._checked_s[address] = now_s
        suspect = await self._registered(address)
        if suspect is None:
            return False
        if not await self._is_dead(suspect):
            return True
        self._services.counters.suspicions += 1
        self._services.events.info("suspicion", f"broker '{suspect.id}' at {address} refuses connections")
        return not await self._take_over(suspect)

    async def _registered(self, address: str) -> BrokerEntry | None:
        """Return the registration at an address whose loss would stop partitions or the governor; else None."""
        coordinator = self._services.coordinator
        brokers = await coordinator.brokers()
        suspect = next((each for each in brokers if each.address == address), None)
        if suspect is None or suspect.draining or not suspect.host or suspect.session == self._services.session:
            return None
        if all(each.draining for each in brokers if each is not suspect):
            return None
        if suspect.id != await coordinator.governor():
            entries = await coordinator.assignments()
            if all(suspect.id != entry.broker and suspect.session != entry.session for entry in entries):
                return None
        return suspect

    async def _is_dead(self, suspect: BrokerEntry) -> bool:
        """Whether the suspect's port refuses this broker, and, on the same host, its process is gone."""
        runtime = self._services.runtime
        host, port = parse_address(suspect.address)
        try:
            await runtime.network.connect(host, port, _Probe, timeout_s=PROBE_S)
        except UnreachableError as error:
            if not error.refused:
                return False
        else:
            return False
        if suspect.host != runtime.host:
            return True
        for _ in range(EXIT_CHECKS):
            if not is_running(suspect.pid):
                return True
            await asyncio.sleep(EXIT_S)
        return False

    async def _take_over(self, suspect: BrokerEntry) -> bool:
        """Take over as the governor, or from the governor; else pass the report. Return the success."""
        services, governor = self._services, self._governor
        governing = await services.coordinator.governor()
        if governor is not None and governing in ("", services.settings.broker_id):
            if not governor.term:
                await self._assign()
            return governor.term > 0 and await self._remove(suspect, governor.term)
        if governing == suspect.id:
            return governor is not None and await self._remove(suspect, 0)
        for broker in await services.coordinator.brokers():
            if broker.id == governing:
                return await self._report_to(suspect, broker)
        return False

    async def _remove(self, suspect: BrokerEntry, term: int) -> bool:
        """Remove the suspect from the membership, and assign its partitions; False if the coordinator refuses."""
        services = self._services
        now_ms = services.runtime.clock.wall_ms()
        if not await services.coordinator.take_over(suspect, term=term, now_ms=now_ms):
            return False
        services.counters.early_takeovers += 1
        where = f"broker '{suspect.id}' at {suspect.address} refuses connections"
        services.events.warning("early-takeover", f"{where}: others get its partitions before its session ends")
        await self._assign()
        return True

    async def _report_to(self, suspect: BrokerEntry, governor: BrokerEntry) -> bool:
        """Pass the report to the governor, or replace a governor that refuses, too. Return the success."""
        try:
            address = parse_address(governor.address)
            link = await connect_link(self._services.runtime, None, address, client=BROKER_PROGRAM, timeout_s=REPORT_S)
        except UnreachableError as error:
            dead = error.refused and self._governor is not None and await self._is_dead(governor)
            return dead and await self._remove(governor, 0) and await self._take_over(suspect)
        try:
            ask = AdminRequest(ask=ReportSuspicion(address=suspect.address))
            await link.request(Api.ADMIN, ask, AdminAnswer, timeout_s=REPORT_S)
        finally:
            link.close()
        return True


class _Probe(asyncio.BufferedProtocol):
    """A connection that ends as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        cast(asyncio.Transport, transport).abort()

    def get_buffer(self, sizehint: int) -> bytearray:
        """See `asyncio.BufferedProtocol`."""
        return bytearray(1)
