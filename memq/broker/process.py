"""The life of a process that is one broker: HTTP port, start, signals, housekeeping, drain, end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from memq import kernel
from memq.broker.broker import Broker
from memq.broker.http import HttpPort
from memq.broker.identity.networks import warn_if_exposed
from memq.broker.metrics import CounterCollector, PermissionCollector, QueueCollector, QuotaCollector, StoreCollector
from memq.broker.spool.forwarding import block_list
from memq.broker.upkeep.retention import run_upkeep
from memq.errors import InvalidSettingError, MemqError
from memq.limits import VERSION
from memq.runtime.network import Network, format_address
from memq.runtime.process import Signals
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings

if TYPE_CHECKING:
    from memq.broker.broker_traces import BrokerTraces
    from memq.transactions.coordinator import TransactionCounts

STORE_NAME = "main"
SWEEPS_PER_AGE = 4
Companion = Callable[[str], Coroutine[Any, Any, None]]  # runs next to a broker; gets its address


def calm_collector() -> None:
    """Collect reference cycles less often; for a process that runs only a broker.

    Theory: views and extents of blocks are created and freed by thousands, without cycles. With Python's defaults, the
    collector scans them again and again: 11 % of all CPU at 4 KiB blocks. Objects that exist after the imports are
    never scanned again.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def run_broker(
    broker: Broker,
    settings: BrokerSettings,
    runtime: Runtime,
    ready: Callable[[str], None],
    prepare: Callable[[], Awaitable[None]] | None = None,
    companion: Companion | None = None,
    http_network: Network | None = None,
) -> int:
    """Start a broker, serve until SIGTERM or SIGINT, drain it, close it, and return the exit code.

    `prepare` runs between the start and `ready`. `ready` is called with the address of the memq port when clients can
    connect. `companion` gets that address, and runs from then on until the drain. `http_network` is that of the HTTP
    port, if it has one of its own. A second signal gives up the drain:
    the held blocks are logged, and the exit code is 1. Raises: MemqError when the start fails.
    """
    registry = metrics_of(broker)
    events = broker.services.events
    http = HttpPort(http_network or runtime.network, broker.check, registry, events)
    signals = Signals()
    try:
        http_address = await _start_http(http, settings)
        await broker.start(http_address)
        if prepare is not None:
            await prepare()
        if http_address:
            events.info("http-ready", f"{http.scheme}://{http_address}/healthz, /readyz, /metrics")
        where = f"broker '{settings.broker_id}' at {broker.address}"
        warn_if_exposed(settings, events, encrypted=runtime.network.encrypted)
        events.info("broker-started", f"{where}, memq {VERSION}, kernel: {kernel.description()}")
        ready(broker.address)
        return await _run(broker, settings, signals, companion)
    finally:
        signals.close()
        await broker.close()
        await http.stop()


async def _start_http(http: HttpPort, settings: BrokerSettings) -> str:
    """Start the HTTP port, and return its address; "" if it is switched off. Raises: as `Network.listen`."""
    if settings.http_port < 0:
        return ""
    try:
        return format_address(await http.start(settings.host, settings.http_port))
    except MemqError as error:  # a user who changed only the port for clients must see which port it is
        error.hint = f"{error.hint}; this one has the settings host and http_port"
        raise


async def _run(broker: Broker, settings: BrokerSettings, signals: Signals, companion: Companion | None) -> int:
    """Serve until a signal or a failure, then drain."""
    events = broker.services.events
    house = asyncio.create_task(_keep_house(broker, settings), name="housekeeping")
    companions = [] if companion is None else [asyncio.create_task(companion(broker.address), name="companion")]
    try:
        await _first(signals.first.wait(), broker.failed.wait())
        if broker.failure is not None:
            _name_held(broker)
            return 1
        events.info("draining", "refusing new blocks, storing and acking the others; a second signal ends the drain")
        await _cancel(companions)
        drain = asyncio.create_task(broker.drain(), name="drain")
        await _first(asyncio.shield(drain), signals.second.wait(), broker.failed.wait())
        if drain.done():
            drain.result()
            return 0
        drain.cancel()
        _name_held(broker)
        return 1
    except MemqError as error:
        events.error("drain-failed", str(error))
        return 1
    finally:
        await _cancel([house, *companions])


def _name_held(broker: Broker) -> None:
    """Log accepted blocks that are not in the queue: those only in memory are lost with this process."""
    held = broker.held_blocks()
    if held:
        broker.services.events.error("given-up", block_list(held))


async def _keep_house(broker: Broker, settings: BrokerSettings) -> None:
    """Run retention at its interval and the sweep several times per safety age.

    Only the governor sweeps. Any broker could (`memq.broker.sweep.sweep`), but each listing costs requests. A new
    governor sweeps at once if it has not swept for that time: the former one may have ended just before its pass.
    """
    clock = broker.services.runtime.clock
    swept_s = clock.monotonic()
    while True:
        await asyncio.sleep(settings.retention_interval_ms / 1000)
        due = clock.monotonic() - swept_s >= settings.sweep_age_ms / 1000 / SWEEPS_PER_AGE
        sweeps = due and broker.governs and settings.delete_objects
        if sweeps:
            swept_s = clock.monotonic()
        if not broker.governs:
            broker.services.swept.forget()
        await run_upkeep(broker.services, broker.partitions, sweeps=sweeps)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _first(*works: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Wait until one of the works is done, and cancel the others."""
    tasks = [asyncio.create_task(work) if asyncio.iscoroutine(work) else work for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def traces_of(settings: BrokerSettings, runtime: Runtime) -> BrokerTraces | None:
    """Return the tracer of uploads and publishes; None if the setting is off. Raises: InvalidSettingError."""
    if not settings.traces:
        return None
    try:
        from memq.broker.broker_traces import global_traces
    except ImportError as error:
        raise InvalidSettingError(
            f"traces = true needs {error.name}, which is not installed", hint="pip install 'memq[otel]'"
        ) from error
    return global_traces(runtime.clock, settings.broker_id)


def metrics_of(broker: Broker) -> CollectorRegistry:
    """Return the registry of a broker: the metrics of brokers and stores in `memq.observe.metrics`."""
    registry = CollectorRegistry()
    registry.register(CounterCollector(broker.services.counters, _gauges(broker)))
    registry.register(PermissionCollector(lambda: broker.services.permissions.denied_requests))
    registry.register(StoreCollector(broker.services.stores))
    hosts = broker.hosts
    registry.register(QueueCollector(lambda: [each.meter for each in hosts.open_here(hosts.queues)]))
    registry.register(QuotaCollector(broker.services.limits, broker.services.quotas))
    return registry


def _gauges(broker: Broker) -> dict[str, Callable[[], float]]:
    services, hosts = broker.services, broker.hosts

    def counts() -> list[TransactionCounts]:
        return [each.counts() for each in hosts.open_here(hosts.transactions)]

    return {
        "memory_budget_bytes": lambda: services.pool.budget_bytes,
        "memory_leased_bytes": lambda: services.pool.leased_bytes,
        "memory_hot_bytes": lambda: services.recent_batches.pinned_bytes,
        "spool_held_bytes": lambda: services.spool.segments.bytes,
        "spool_segments": lambda: len(services.spool.segments),
        "reading_paused": lambda: broker.intake.starved,
        "open_connections": lambda: len(broker.intake.readers),
        "open_partitions": lambda: len(broker.partitions.processors),
        "lost_partitions": lambda: len(services.lost_logs),
        "sweep_pending_objects": lambda: services.swept.pending_objects,
        "sweep_pending_bytes": lambda: services.swept.pending_bytes,
        "sweep_unproven_objects": lambda: services.swept.unproven_objects,
        "ring_batches": lambda: sum(len(processor.ring) for processor in broker.partitions.at_work()),
        "delayed_waiting_records": lambda: sum(each.waiting_count for each in hosts.open_here(hosts.holds)),
        "delayed_overdue_seconds": lambda: max((each.overdue_s() for each in hosts.open_here(hosts.holds)), default=0),
        "open_transactions": lambda: sum(each.open for each in counts()),
        "prepared_transactions": lambda: sum(each.prepared for each in counts()),
        "parked_transactions": lambda: sum(each.parked for each in counts()),
        "open_transaction_blocks": lambda: sum(each.blocks for each in counts()),
        "oldest_transaction_seconds": lambda: max((each.oldest_s for each in counts()), default=0),
    }
