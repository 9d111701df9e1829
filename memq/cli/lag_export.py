"""`memq lag --serve`: the lag of all groups for Prometheus, asked for in rounds, in records, bytes and seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from memq.broker.http import HttpPort
from memq.broker.signals import Signals
from memq.client.aio_admin import AsyncAdmin
from memq.client.group_positions import GroupDescription
from memq.errors import MemqError, NotFoundError, UnreachableError
from memq.logs import EventLog
from memq.metrics import LAG_SERIES_MAX, lines_of
from memq.network import Address, Runtime, format_address

ROUND_S = 15.0


class LagCollector:
    """What the last round found; nothing of it when that failed: an old lag would look like a true one."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failed_rounds = 0
        self._groups: list[GroupDescription] | None = None

    @property
    def known(self) -> bool:
        """Whether the last round succeeded."""
        return self._groups is not None

    def found(self, groups: list[GroupDescription]) -> None:
        """Take what a round found."""
        self.rounds += 1
        self._groups = groups

    def failed(self) -> None:
        """Note that a round failed."""
        self.rounds += 1
        self.failed_rounds += 1
        self._groups = None

    def collect(self) -> Iterable[Metric]:
        """Yield the lag of each group in each topic: sums of its partitions, and the longest wait among them."""
        yield lines_of("memq_lag_rounds", [((), self.rounds)])
        yield lines_of("memq_lag_failed_rounds", [((), self.failed_rounds)])
        if self._groups is None:
            return
        lags = _lags(self._groups)
        yield lines_of("memq_lag_left_out_series", [((), max(0, len(lags) - LAG_SERIES_MAX))])
        yield lines_of("memq_group_members", [((each.group,), len(each.members)) for each in self._groups])
        yield lines_of("memq_group_lag_records", [(labels, records) for labels, (records, _, _) in lags.items()])
        yield lines_of("memq_group_lag_bytes", [(labels, size) for labels, (_, size, _) in lags.items()])
        yield lines_of("memq_group_lag_seconds", [(labels, seconds) for labels, (_, _, seconds) in lags.items()])


def _lags(groups: Iterable[GroupDescription]) -> dict[tuple[str, str], tuple[int, int, float]]:
    """Return records, bytes and seconds by group and topic."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    for group in groups:
        for one in group.partitions:
            labels = (group.group, one.place.topic)
            records, size, seconds = found.get(labels, (0, 0, 0.0))
            lag = one.lag
            found[labels] = (records + lag.records, size + lag.bytes, max(seconds, lag.seconds))
    return found


async def export_lag(brokers: str, names: tuple[str, ...], listen: Address, ready: Callable[[str], None]) -> int:
    """Serve the lag of these groups, of all without a name, until SIGTERM or SIGINT; return the exit code.

    `ready` is called with the address once the first round is over. Raises: UnreachableError when the port is taken.
    """
    runtime, collector = Runtime(), LagCollector()
    events = EventLog(runtime.clock)
    registry = CollectorRegistry()
    registry.register(collector)

    async def check() -> None:
        if not collector.known:
            raise UnreachableError("the last round over all groups failed", hint="its log says why")

    port = HttpPort(runtime.network, check, registry, events)
    signals = Signals()
    try:
        address = await port.start(*listen)
        async with AsyncAdmin(brokers, runtime=runtime) as admin:
            rounds = asyncio.create_task(
                _rounds(admin, names, collector, events, lambda: ready(format_address(address)))
            )
            ended = asyncio.create_task(signals.first.wait())
            await asyncio.wait((rounds, ended), return_when=asyncio.FIRST_COMPLETED)
            for task in (rounds, ended):
                task.cancel()
            await asyncio.wait((rounds, ended))
            if not rounds.cancelled():
                rounds.result()
    finally:
        signals.close()
        await port.stop()
    return 0


async def _rounds(
    admin: AsyncAdmin, names: tuple[str, ...], collector: LagCollector, events: EventLog, ready: Callable[[], None]
) -> None:
    """Ask for ever. A group that goes while it is asked for is left out."""
    outage = events.outage("lag-failed", "lag-back")
    while True:
        try:
            collector.found(await _described(admin, names))
            outage.passed()
        except MemqError as error:
            collector.failed()
            outage.failed(str(error))
        if collector.rounds == 1:
            ready()
        await asyncio.sleep(ROUND_S)


async def _described(admin: AsyncAdmin, names: tuple[str, ...]) -> list[GroupDescription]:
    found = []
    for name in names or await admin.groups():
        try:
            found.append(await admin.group(name))
        except NotFoundError:
            continue
    return found
