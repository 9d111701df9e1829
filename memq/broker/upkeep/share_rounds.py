"""Asks the governor once a second for this broker's parts of the quotas in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from memq.broker.ingest.quota_book import QuotaSubject, ShareKey
from memq.broker.services import Services
from memq.errors import MemqError, NotReadyError
from memq.governor.quota_shares import LEASE_S, REPORT_INTERVAL_S, ShareUse
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import Link
from memq.protocol.quota_messages import QuotaAnswer, ShareQuotas, WireShare

REPORTED_MAX = 4_000  # rates in one report; each broker gives out equal parts of the others


class ShareRounds:
    """Reports the use of rates, and applies the parts that the governor answers with.

    Without an answer, the parts end after LEASE_S, and become equal ones.
    """

    def __init__(self, services: Services, link: Callable[[str], Awaitable[Link]]) -> None:
        self._services = services
        self._link = link
        self._unshared = services.events.outage("quotas-unshared", "quotas-shared")

    async def run(self) -> None:
        """Ask again and again, without end."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                async with asyncio.timeout(LEASE_S / 2):
                    await self.ask()
            except (MemqError, TimeoutError) as error:
                self._unshared.failed(f"{error!r}; this broker gives out equal parts of quotas")
            else:
                self._unshared.passed()

    async def ask(self) -> None:
        """Ask once. Raises: MemqError when the governor does not answer."""
        services, clock = self._services, self._services.runtime.clock
        if not services.quotas.limits_rates:
            return
        brokers = await services.coordinator.brokers()
        uses, until_s = services.quotas.sample(len(brokers)), clock.monotonic() + LEASE_S
        if not uses or len(brokers) <= 1:
            return
        governor = await services.coordinator.governor()
        addresses = [each.address for each in brokers if each.id == governor]
        if not addresses:
            raise NotReadyError("the cluster has no governor now")
        most_used = sorted(uses.items(), key=lambda item: -item[1].used)[:REPORTED_MAX]
        wire = [_wire(key, use) for key, use in most_used]
        ask = AdminRequest(ask=ShareQuotas(broker=services.settings.broker_id, uses=wire))
        link = await self._link(addresses[0])
        answer = (await link.request(Api.ADMIN, ask, AdminAnswer, timeout_s=LEASE_S / 2)).quotas
        if isinstance(answer, QuotaAnswer):
            parts = {ShareKey(QuotaSubject(each.kind, each.name), each.rate): each.part for each in answer.shares}
            services.quotas.grant(parts, until_s)


def _wire(key: ShareKey, use: ShareUse) -> WireShare:
    kind, name = key.subject
    return WireShare(kind=kind, name=name, rate=key.rate, part=use.part, used=use.used, held=use.held)
