"""Sends reports like records, acked and deduplicated, on the connections of another client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from memq.client.link_pool import LinkPool
from memq.client.observers.reporter import Reporter
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import check_fields
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.format.report import AUDIT_TOPIC, Kind
from memq.limits import KIB, MIB
from memq.protocol.frames import AckLevel
from memq.runtime.logs import EventLog
from memq.runtime.network import Runtime
from memq.runtime.tasks import TaskOwner

_SETTINGS = ProducerSettings(
    acks=AckLevel.ALL, block_bytes=128 * KIB, pending_bytes_max=2 * MIB, full_wait_s=0.0, on_ack=lambda outcome: None
)


class _QuietLog(EventLog):
    """A failed report is no error for the user: the audit notices the gap."""

    def error(self, event: str, text: str, error: BaseException | None = None) -> None:
        """Log it for developers only."""
        super().debug(event, text)


class ReportCarrier:
    """See `memq.client.observers.reporter.Carrier`. At most 2 MiB of reports wait for their acks."""

    def __init__(self, runtime: Runtime, pool: LinkPool) -> None:
        self._core = ProducerCore(
            _SETTINGS, runtime, (), AsyncDelivery, self._wake, lambda: None, pool=pool, events=_QuietLog(runtime.clock)
        )
        self._route: Route | None = None

    async def homes(self) -> int:
        """See `Carrier.homes`."""
        self._route = await self._core.route(AUDIT_TOPIC)
        return len(self._route.buffers)

    def send(self, home: int, report: bytes) -> None:
        """See `Carrier.send`. Raises: BufferFullError, ClosedError."""
        assert self._route is not None, "who asks for the homes first has a route"
        self._core.buffer.put(self._route, check_fields(report, None, None, None, None), home)

    async def write(self, timeout_s: float) -> None:
        """See `Carrier.write`."""
        await self._core.write(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """See `Carrier.close`."""
        await self._core.leave(timeout_s)

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)


def reporting(kind: Kind, name: str) -> Callable[[Runtime, LinkPool, TaskOwner], Reporter]:
    """Return a maker of the observer that reports to the audit, where the cluster asks for reports."""
    return lambda runtime, pool, tasks: Reporter(kind, name, runtime, pool, tasks, ReportCarrier)
