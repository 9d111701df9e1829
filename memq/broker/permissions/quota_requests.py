"""Answers operators' requests about quotas: the rules at the coordinator, and use at this broker."""

from __future__ import annotations

from memq.broker.api import Answer, Call
from memq.broker.ingest.quota_book import QuotaSubject, ShareKey
from memq.broker.permissions.permission_requests import changed_at_coordinator
from memq.broker.services import Services
from memq.errors import NotFoundError, NotReadyError
from memq.governor.quota_shares import QuotaShares, ShareUse
from memq.permissions import RuleSet, changed_quotas
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.quota_messages import (
    ChangeQuotas,
    DescribeQuota,
    ListQuotas,
    QuotaAnswer,
    ShareQuotas,
    WireRate,
    WireShare,
    WireUse,
)


class QuotaRequests:
    """Shows and changes quotas, and shows their use at this broker. The governor gives out parts of them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._shares: QuotaShares[ShareKey] = QuotaShares()

    async def list_quotas(self, call: Call[ListQuotas]) -> Answer:
        """Return all quotas."""
        found = await self._services.coordinator.rules.read()
        return self._answer(version=found.version, quotas=list(found.quotas))

    async def change(self, call: Call[ChangeQuotas]) -> Answer:
        """Set and remove quotas, all or none.

        Raises: InvalidRequestError, TooLargeError; as `changed_at_coordinator`.
        """
        ask = call.ask

        def changed(stored: RuleSet) -> RuleSet:
            return changed_quotas(stored, ask.put, ask.remove)

        before, stored = await changed_at_coordinator(self._services, changed)
        put, removed = set(stored.quotas) - set(before.quotas), set(before.quotas) - set(stored.quotas)
        return self._answer(version=stored.version, put=sorted(put), removed=sorted(removed))

    async def describe(self, call: Call[DescribeQuota]) -> Answer:
        """Return the use at this broker. Raises: NotFoundError at another broker."""
        ask, settings = call.ask, self._services.settings
        if ask.broker != settings.broker_id:
            raise NotFoundError(
                f"this is broker '{settings.broker_id}', not '{ask.broker}'", hint="ask for the list of brokers again"
            )
        found = self._services.quotas.use_of(ask.kind, ask.name)
        use = WireUse(broker=settings.broker_id, quota=found.quota, connections=found.connections)
        if found.limiter is not None:
            use.waiting = found.limiter.waiting
            use.rates = [
                WireRate(rate=name, limit=bucket.rate, used=int(bucket.used), held=bucket.held)
                for name, bucket in found.limiter.buckets.items()
            ]
        return self._answer(use=use)

    async def share(self, call: Call[ShareQuotas]) -> Answer:
        """Return the parts of rates that a broker may give out.

        Raises: NotReadyError if another broker governs.
        """
        ask, services = call.ask, self._services
        governor = await services.coordinator.governor()
        if governor != services.settings.broker_id:
            raise NotReadyError(f"broker '{governor}' governs, not '{services.settings.broker_id}'")
        brokers = len(await services.coordinator.brokers())
        uses = {
            ShareKey(QuotaSubject(each.kind, each.name), each.rate): ShareUse(each.used, each.part, each.held)
            for each in ask.uses
        }
        now_s = services.runtime.clock.monotonic()
        parts = self._shares.grant(ask.broker, uses, brokers, now_s)
        self._shares.forget_ended(now_s)
        return self._answer(
            shares=[
                WireShare(kind=subject.kind, name=subject.name, rate=rate, part=part)
                for (subject, rate), part in parts.items()
            ]
        )

    def _answer(self, **fields: object) -> AdminAnswer:
        enforced = self._services.settings.quotas
        return AdminAnswer(quotas=QuotaAnswer(enforced=enforced, **fields))  # type: ignore[arg-type]
