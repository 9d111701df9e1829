"""Everything in one process, on a folder: a broker with files, a SQLite queue, and no cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from memq.broker.broker import Broker
from memq.broker.data_folder import DataFolder
from memq.broker.identity.networks import broker_networks, warn_of_anonymous
from memq.broker.identity.tokens import Tokens, tokens_of
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, ClientLimits
from memq.broker.process import STORE_NAME, Companion, run_broker, traces_of
from memq.broker.spool.files import SpoolFiles
from memq.broker.sweep.broker_sweep import sweep
from memq.broker.sweep.log_reading import whole_log
from memq.errors import CorruptDataError
from memq.format.key import sweep_prefix
from memq.governor.standalone import StandaloneCoordinator
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import Network
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings, Section
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import is_state_topic


async def serve(
    settings: BrokerSettings,
    ready: Callable[[str], None],
    *,
    client_limits: ClientLimits = NO_CLIENT_LIMITS,
    runtime: Runtime | None = None,
    companion: Companion | None = None,
    sections: Mapping[str, Section] | None = None,
) -> int:
    """Run a broker on the folder `settings.data` until SIGTERM or SIGINT, drain it, return the exit code.

    `ready` is called with the address of the memq port when clients can connect. `companion` gets that address, and
    runs from then on until the drain. A second signal gives up the drain: the held blocks are logged, and the exit code
    is 1. `sections` are those of the settings: `tls`, `tokens`. Raises: MemqError when the start fails.
    """
    sections, events = sections or {}, EventLog(SystemClock())
    networks = broker_networks(sections.get("tls", {}), events)
    warn_of_anonymous(settings, sections, events)
    runtime = runtime or Runtime(network=networks.data)
    tokens = tokens_of(sections.get("tokens", {}), runtime.clock, events)
    folder = DataFolder.open(Path(settings.data), runtime.random, settings.cluster)
    try:
        settings = dataclasses.replace(settings, cluster=folder.cluster)
        return await _serve(settings, folder, runtime, ready, companion, client_limits, networks.http, tokens)
    finally:
        folder.close()


async def _serve(
    settings: BrokerSettings,
    folder: DataFolder,
    runtime: Runtime,
    ready: Callable[[str], None],
    companion: Companion | None,
    limits: ClientLimits,
    http_network: Network,
    tokens: Tokens | None,
) -> int:
    store = FilesystemHandler(folder.objects, folder.tmp, chance=runtime.random)
    queue = SqliteQueue(folder.queue, runtime.clock)
    coordinator = StandaloneCoordinator(folder.topics, settings.cluster, runtime.clock)
    spool = SpoolFiles(Path(settings.spool) if settings.spool else folder.spool)
    broker = Broker(
        settings,
        runtime,
        {STORE_NAME: store},
        queue,
        coordinator,
        client_limits=limits,
        spool_disk=spool,
        traces=traces_of(settings, runtime),
        alone=True,
        tokens=tokens,
    )

    async def clean() -> None:
        """Sweep with age 0: under the folder's lock, an object without a pointer is from an earlier run."""
        done = await sweep(broker.services, 0)
        if temporary.files or done.objects:
            files = f"{temporary.files} temporary files ({temporary.bytes} bytes)"
            unnamed = f"{done.objects} unnamed objects ({done.bytes} bytes)"
            broker.services.events.warning("swept-at-start", f"{files} and {unnamed} of an earlier run")

    try:
        await check_objects(folder, store, queue)
        temporary = await store.sweep_temp()
        return await run_broker(broker, settings, runtime, ready, clean, companion, http_network)
    finally:
        await queue.close()
        await store.close()
        await coordinator.close()
        await spool.close()


async def check_objects(folder: DataFolder, store: FilesystemHandler, queue: SqliteQueue) -> None:
    """Refuse a folder that lost all objects although its queue names some.

    Raises: CorruptDataError, as store and queue.
    """
    async for entry in store.list(f"{folder.cluster}/"):
        if not entry.key.startswith(sweep_prefix(folder.cluster)):
            return
    for partition in await queue.partitions():
        if is_state_topic(partition.topic):
            continue
        try:
            _, known = await whole_log(queue, partition, lambda text: None)
        except CorruptDataError:
            continue  # the broker logs the damage, and does not open the log
        named = next((pointer for _, pointer in known if pointer is not None and pointer.locations), None)
        if named is not None:
            raise CorruptDataError(
                f"data folder '{folder.path}' has no objects of cluster '{folder.cluster}', but its queue names"
                f" some, the first is '{named.locations[0].key}' of topic '{named.topic}'",
                hint=f"put '{folder.objects}' back from a copy ('memq verify {folder.path}' names what is missing);"
                " to begin without these records, start with another folder",
            )
