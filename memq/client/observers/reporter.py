"""Reports a client's work to the audit periodically, without delaying that work.

Reports travel like records, acked and deduplicated, on the connections of the client that they describe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from memq.client.link_pool import LinkPool
from memq.client.observers.audit_recorder import AuditRecorder, PartRecorder, ReadRecorder
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import check_fields
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.errors import MemqError
from memq.format.report import AUDIT_TOPIC, Kind, Report, encode_report
from memq.limits import KIB, MIB
from memq.protocol.frames import AckLevel
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner

CLOSE_S_MAX = 1.0  # what the last reports may add to a close of a client
# Time that reports may add to a step of a batch job; only if brokers do not answer.
STEP_S_MAX = 5.0
# A broker without free memory pauses connections that send blocks, and answers no heartbeat on them. So members of
# groups send their reports on connections of their own.
_READERS: tuple[Kind, ...] = ("consumer", "spark-reader")
_SETTINGS = ProducerSettings(
    acks=AckLevel.ALL, block_bytes=128 * KIB, pending_bytes_max=2 * MIB, full_wait_s=0.0, on_ack=lambda outcome: None
)


class _QuietLog(EventLog):
    """A failed report is no error for the user: the audit notices the gap."""

    def error(self, event: str, text: str, error: BaseException | None = None) -> None:
        """Log it for developers only."""
        super().debug(event, text)


class Carrier(Protocol):
    """Brings reports to the audit topic, over the connections of the client."""

    async def homes(self) -> int:
        """Return the number of partitions of the audit topic. Raises: MemqError when it can't be reached."""
        ...

    def send(self, home: int, report: bytes) -> None:
        """Send a report to a partition of the audit topic. Raises: MemqError when there is no room for it."""
        ...

    async def write(self, timeout_s: float) -> None:
        """Write what was sent to the sockets, as far as that goes within `timeout_s`."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Write what was sent to the sockets, within `timeout_s`, and let go; connections stay."""
        ...


class ReportCarrier:
    """Sends reports as a producer does. At most 2 MiB of reports wait for their acks."""

    def __init__(self, runtime: Runtime, pool: LinkPool) -> None:
        self._core = ProducerCore(
            *(_SETTINGS, runtime, (), AsyncDelivery, self._wake, lambda: None),
            pool=pool,
            events=_QuietLog(runtime.clock),
            internal=True,
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
        await self._core.write_and_close(timeout_s)

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)


class Named(Protocol):
    """A topic, as far as reports name it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def id(self) -> str:
        """Its id in 32 hex digits."""
        ...


# Makes a carrier on a client's connections; its own work is never reported.
MakeCarrier = Callable[[Runtime, LinkPool], Carrier]


class Reporter:
    """Reports for one client on its loop, to a cluster that asks for them.

    What can't be sent is dropped and counted in `lost`; the audit sees that by the numbers of the reports.
    """

    _close_s_max = CLOSE_S_MAX

    def __init__(
        self,
        kind: Kind,
        name: str,
        runtime: Runtime,
        pool: LinkPool,
        tasks: TaskOwner,
        carrier: MakeCarrier = ReportCarrier,
    ) -> None:
        self.lost = 0
        self._kind: Kind = kind
        self._name = name
        self._runtime = runtime
        self._pool = pool
        self._tasks = tasks
        self._make_carrier = carrier
        self._events = EventLog(runtime.clock)
        self._recorder: AuditRecorder | None = None
        self._carrier: Carrier | None = None
        self._carrier_pool: LinkPool | None = None
        self._early = asyncio.Event()
        self._closed = False

    def part(self, topic: Named, partition: int) -> PartRecorder | None:
        """Return the recorder of a write partition; None if the cluster wants no reports."""
        if not self.wanted(topic):
            return None
        if self._recorder is None:
            client = self._runtime.random.getrandbits(64)
            interval_ms, host = self._pool.audit_ms, self._runtime.host
            self._recorder = AuditRecorder(client, self._kind, self._name, host, interval_ms, self._early.set)
            self._tasks.start(self._run(self._recorder, interval_ms / 1000), "report to the audit")
        return self._recorder.part(topic.name, topic.id, partition, self.now_ms())

    def reading(self, topic: Named, writers: Sequence[int], *, commits: bool) -> ReadRecorder | None:
        """Return the recorder of a read partition; None if the cluster wants no reports."""
        return ReadRecorder(partial(self.part, topic), writers, commits=commits) if self.wanted(topic) else None

    def wanted(self, topic: Named) -> bool:
        """Whether the cluster wants to know of the work in a topic."""
        return self._pool.audit_ms > 0 and topic.name != AUDIT_TOPIC and not self._closed

    @property
    def noted(self) -> bool:
        """Whether there was anything to report."""
        return self._recorder is not None

    def now_ms(self) -> int:
        """Return the wall time (Unix ms)."""
        return self._runtime.clock.wall_ms()

    async def flush(self, timeout_s: float) -> None:
        """Send noted events at once, within `timeout_s`: the caller may be killed afterwards."""
        if self._recorder is None or self._closed:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._report(self._recorder)
                if self._carrier is not None:
                    await self._carrier.write(timeout_s)
        except (MemqError, TimeoutError) as error:
            self._drop(f"{error!r}")

    async def close(self, timeout_s: float | None = None) -> None:
        """Send the last reports, within `timeout_s` and the bound of this kind; nothing is noted any more."""
        if self._closed:
            return
        self._closed = True
        timeout_s = self._close_s_max if timeout_s is None else min(timeout_s, self._close_s_max)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (timeout_s if self._pool.sessions() else 0.0)
        if self._recorder is not None and until_s > loop.time():
            try:
                async with asyncio.timeout_at(until_s):
                    await self._report(self._recorder, last=True)
            except (MemqError, TimeoutError) as error:
                self._drop(f"{error!r}")
        if self._carrier is not None:
            await self._carrier.close(max(0.0, until_s - loop.time()))
        if self._carrier_pool is not None:
            await self._carrier_pool.close()

    # ---- inside ----------------------------------------------------------------------------------

    async def _run(self, recorder: AuditRecorder, interval_s: float) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._early.wait()
            self._early.clear()
            try:
                if recorder.due(self.now_ms()):
                    await self._report(recorder)
            except MemqError as error:
                self._drop(str(error))

    async def _report(self, recorder: AuditRecorder, *, last: bool = False) -> None:
        if self._carrier is None:
            if self._kind in _READERS:
                self._carrier_pool = self._pool.separate()
            self._carrier = self._make_carrier(self._runtime, self._carrier_pool or self._pool)
        homes = await self._carrier.homes()
        for home, report in recorder.take(self.now_ms(), homes, last=last):
            self._send(self._carrier, home, report)

    def _send(self, carrier: Carrier, home: int, report: Report) -> None:
        try:
            carrier.send(home, encode_report(report))
        except MemqError as error:
            self._drop(str(error))

    def _drop(self, cause: str) -> None:
        self.lost += 1
        self._events.info("audit.not-reported", f"a report to topic '{AUDIT_TOPIC}' is not sent: {cause}")


class JobReporter(Reporter):
    """A reporter for a job without a task owner: an error is logged and ends it, as does its close."""

    _close_s_max = STEP_S_MAX

    def __init__(
        self, kind: Kind, name: str, runtime: Runtime, pool: LinkPool, carrier: MakeCarrier = ReportCarrier
    ) -> None:
        events = EventLog(runtime.clock)
        self._own_tasks = TaskOwner(
            lambda error: events.info("audit.not-reported", f"nothing is reported any more: {error!r}"), events
        )
        super().__init__(kind, name, runtime, pool, self._own_tasks, carrier)

    async def close(self, timeout_s: float | None = None) -> None:
        """See `Reporter.close`."""
        await super().close(timeout_s)
        await self._own_tasks.stop()


def reporting(kind: Kind, name: str) -> Callable[[Runtime, LinkPool, TaskOwner], Reporter]:
    """Return a maker of the observer that reports to the audit, where the cluster asks for reports."""
    return lambda runtime, pool, tasks: Reporter(kind, name, runtime, pool, tasks)
