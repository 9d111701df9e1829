"""Metrics that must be collected: the last round's results, served on /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from memq.broker.api.http import HttpPort
from memq.broker.signals import Signals
from memq.errors import MemqError, UnreachableError
from memq.observe.metrics import lines_of
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, Runtime, format_address

ROUND_S = 15.0
Ask = Callable[[], Awaitable[Sequence[Metric]]]


class RoundCollector:
    """The results of the last round; nothing after a failed round, so that no stale value is shown."""

    def __init__(self, name: str) -> None:
        """`name`: its own metrics are `memq_NAME_rounds` and `memq_NAME_failed_rounds`."""
        self.rounds = 0
        self.failed_rounds = 0
        self._name = name
        self._found: Sequence[Metric] | None = None

    @property
    def known(self) -> bool:
        """Whether the last round succeeded."""
        return self._found is not None

    def found(self, metrics: Sequence[Metric]) -> None:
        """Take what a round found."""
        self.rounds += 1
        self._found = metrics

    def failed(self) -> None:
        """Note that a round failed."""
        self.rounds += 1
        self.failed_rounds += 1
        self._found = None

    def collect(self) -> Iterable[Metric]:
        """Yield how many rounds there were, and what the last one found."""
        yield lines_of(f"memq_{self._name}_rounds", [((), self.rounds)])
        yield lines_of(f"memq_{self._name}_failed_rounds", [((), self.failed_rounds)])
        yield from self._found or ()


async def export(name: str, ask: Ask, listen: Address, ready: Callable[[str], None], runtime: Runtime) -> int:
    """Ask in rounds, and serve what came, until SIGTERM or SIGINT; return the exit code.

    `ready` is called with the address once the first round is over. Raises: UnreachableError when the port is taken.
    """
    collector, events, signals = RoundCollector(name), EventLog(runtime.clock), Signals()
    registry = CollectorRegistry()
    registry.register(collector)

    async def check() -> None:
        if not collector.known:
            raise UnreachableError("the last round failed", hint="the log says why")

    port = HttpPort(runtime.network, check, registry, events)
    try:
        address = format_address(await port.start(*listen))
        rounds = asyncio.create_task(_rounds(ask, collector, events, lambda: ready(address)))
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


async def _rounds(ask: Ask, collector: RoundCollector, events: EventLog, ready: Callable[[], None]) -> None:
    outage = events.outage("export-failed", "export-back")
    while True:
        try:
            collector.found(await ask())
            outage.passed()
        except MemqError as error:
            collector.failed()
            outage.failed(str(error))
        if collector.rounds == 1:
            ready()
        await asyncio.sleep(ROUND_S)
