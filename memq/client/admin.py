"""`Admin` for threads, `AsyncAdmin` for an event loop: topics, groups and brokers for operators.

`Admin` calls `AsyncAdmin` on the process's one I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memq.client.arguments import public_name
from memq.client.lifecycle import Background
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.permission_admin import AsyncPermissionAdmin, PermissionAdmin, quotas_in
from memq.client.topic_admin import ANSWER_S
from memq.errors import NotFoundError
from memq.protocol.admin_messages import (
    AdminAnswer,
    AdminRequest,
    DescribeClients,
    DescribeCluster,
    DescribeLoad,
    DrainBroker,
)
from memq.protocol.frames import Api
from memq.protocol.quota_messages import DescribeQuota, WireUse
from memq.protocol.wire_types import WireBroker, WireChange, WireClient, WireLoad
from memq.quotas import QuotaKind
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.topic import check_name

DRAIN_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class GovernorPlan:
    """Changes that the governor would make, and its notes to an operator."""

    changes: tuple[WireChange, ...]
    notes: tuple[str, ...]


class AsyncAdmin(AsyncPermissionAdmin):
    """Creates, alters and deletes topics; shows, resets and deletes groups; drains brokers.

    Any broker can answer.
    Every method raises UnreachableError if no broker answers for `connect_timeout_ms`, and the broker's errors.
    """

    async def brokers(self) -> list[WireBroker]:
        """Return the live brokers, by id."""
        return (await self._ask(AdminRequest(ask=DescribeCluster()))).brokers

    async def plan(self) -> GovernorPlan:
        """Return the changes that the governor would make now, without making them."""
        answer = await self._ask(AdminRequest(ask=DescribeCluster()))
        return GovernorPlan(tuple(answer.changes), tuple(answer.notes))

    async def clients(self, broker: str) -> list[WireClient]:
        """Return the limits of clients at one broker: "default", then by name. Raises: NotFoundError."""
        return (await self._ask_broker(broker, DescribeClients(broker=broker), ANSWER_S)).clients

    async def load(self, broker: str) -> WireLoad:
        """Return the load of one broker. Raises: NotFoundError."""
        load = (await self._ask_broker(broker, DescribeLoad(broker=broker), ANSWER_S)).load
        assert load is not None, "the broker answered without its load"
        return load

    async def quota_use(self, name: str, *, kind: QuotaKind = "principal") -> list[WireUse]:
        """Return what a principal or a namespace uses at each broker, by its id.

        Raises: DeniedError; NotFoundError when a broker has left meanwhile.
        """
        asks = [DescribeQuota(broker=each.broker, kind=kind, name=name) for each in await self.brokers()]
        found = [quotas_in(await self._ask_broker(ask.broker, ask, ANSWER_S)).use for ask in asks]
        return [use for use in found if use is not None]

    async def drain_broker(self, name: str) -> None:
        """Move all partitions of a broker to others; it owns none until it is restarted.

        Returns when all are moved. Raises: NotFoundError, InvalidRequestError without another broker, TimedOutError.
        """
        await self._ask_broker(name, DrainBroker(broker=name), DRAIN_ANSWER_S)

    async def _ask_broker(
        self, name: str, ask: DrainBroker | DescribeClients | DescribeLoad | DescribeQuota, timeout_s: float
    ) -> AdminAnswer:
        """Ask the broker of this name, and no other. Raises: NotFoundError."""
        check_name(name, "broker")
        addresses = [each.address for each in await self.brokers() if each.broker == name]
        if not addresses:
            raise NotFoundError(f"broker '{name}' is not running", hint="memq broker list shows the running brokers")
        session = await self._pool.session(parse_address(addresses[0]))
        return await session.link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=timeout_s)


class Admin(PermissionAdmin):
    """Creates, alters and deletes topics; shows, resets and deletes groups; drains brokers. Thread-safe.

    Every method raises UnreachableError if no broker answers for `connect_timeout_ms`, and the broker's errors.
    """

    _core: AsyncAdmin

    @public_name("Admin")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._core = AsyncAdmin(brokers, connect_timeout_ms=connect_timeout_ms, tls=tls, runtime=runtime)
        self._background = Background("admin", self._core)
        self._closed = False

    def brokers(self) -> list[WireBroker]:
        """Return the live brokers, by id."""
        return self._background.run(self._core.brokers())

    def plan(self) -> GovernorPlan:
        """Return the changes that the governor would make now, without making them."""
        return self._background.run(self._core.plan())

    def clients(self, broker: str) -> list[WireClient]:
        """Return the limits of clients at one broker: "default", then by name. Raises: NotFoundError."""
        return self._background.run(self._core.clients(broker))

    def load(self, broker: str) -> WireLoad:
        """Return the load of one broker. Raises: NotFoundError."""
        return self._background.run(self._core.load(broker))

    def quota_use(self, name: str, *, kind: QuotaKind = "principal") -> list[WireUse]:
        """Return what a principal or a namespace uses at each broker, by its id.

        Raises: DeniedError; NotFoundError when a broker has left meanwhile.
        """
        return self._background.run(self._core.quota_use(name, kind=kind))

    def drain_broker(self, name: str) -> None:
        """Move all partitions of a broker to others; it owns none until it is restarted.

        Returns when all are moved. Raises: NotFoundError, InvalidRequestError without another broker, TimedOutError.
        """
        self._background.run(self._core.drain_broker(name))
