"""A broker of a cluster, put together from its settings: store, queue and coordinator by their URLs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from memq.broker.broker import Broker
from memq.broker.data_folder import lock_folder, make_folder
from memq.broker.identity.networks import (
    TlsSettings,
    broker_networks,
    check_exposure,
    warn_of_anonymous,
)
from memq.broker.identity.tokens import TokenSettings, tokens_of
from memq.broker.ingest.quotas import client_limits
from memq.broker.process import STORE_NAME, run_broker, traces_of
from memq.broker.services import BROKER_PROGRAM
from memq.broker.spool.files import SpoolFiles
from memq.broker.start_steps import first_answer, start_step
from memq.broker.store_mark import StoreMark
from memq.broker.upkeep.lost_logs import LostLogs
from memq.errors import InvalidSettingError, LogLostError, MemqError
from memq.governor import Coordinator, MarkedCoordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.governor.zookeeper.settings import ZookeeperSettings, check_together
from memq.notification import NotificationQueue
from memq.notification.kafka.settings import kafka_settings
from memq.notification.sqlite.queue import SqliteQueue
from memq.protocol.link import connect_link
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import format_address, parse_address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings, PartSettings, did_you_mean, read_section
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler

EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound to them here
_NO_KAFKA = "kafka://none"  # for the check of a section without the URL of its queue
NAMESAKE_TIMEOUT_S = 3.0  # how long a start waits for an answer of the broker with the same id

Part = TypeVar("Part")
Open = Callable[[PartSettings, Runtime, str], Part]


def open_store(settings: PartSettings, runtime: Runtime, cluster: str) -> StorageHandler:
    """Return the store that the settings name. Raises: InvalidSettingError, and what its handler raises."""
    check_sections(settings)
    return _chosen("store", settings.store, STORES)(settings, runtime, cluster)


def open_queue(settings: PartSettings, runtime: Runtime, cluster: str) -> NotificationQueue:
    """Return the notification queue that the settings name. Raises: as `open_store`."""
    return _chosen("queue", settings.queue, QUEUES)(settings, runtime, cluster)


def open_coordinator(settings: PartSettings, runtime: Runtime, cluster: str) -> MarkedCoordinator:
    """Return the coordinator that the settings name. Raises: as `open_store`."""
    return _chosen("coordinator", settings.coordinator, COORDINATORS)(settings, runtime, cluster)


def check_sections(settings: PartSettings) -> None:
    """Refuse a misspelt key of a section, also of a section that these settings do not use.

    Without the extra `[s3]`, the section `s3` is not checked. Raises: UnknownSettingError, InvalidSettingError.
    """
    client_limits(settings.section("clients"))
    for name in ("kafka", "source"):
        kafka_settings(_NO_KAFKA, settings.section(name), name)
    check_together(read_section("zookeeper", settings.section("zookeeper"), ZookeeperSettings))
    read_section("tls", settings.section("tls"), TlsSettings)
    read_section("tokens", settings.section("tokens"), TokenSettings)
    if section := settings.section("s3"):
        with suppress(ModuleNotFoundError):
            from memq.storage_handlers.s3.settings import S3Settings

            read_section("s3", section, S3Settings)


@asynccontextmanager
async def opened_parts(
    settings: PartSettings, runtime: Runtime, cluster: str
) -> AsyncIterator[tuple[MarkedCoordinator, StorageHandler, NotificationQueue]]:
    """Open the three parts that the settings name, and close them at the end. Raises: as `open_store`."""
    async with AsyncExitStack() as opened:
        coordinator = open_coordinator(settings, runtime, cluster)
        opened.push_async_callback(coordinator.close)
        store = open_store(settings, runtime, cluster)
        opened.push_async_callback(store.close)
        queue = open_queue(settings, runtime, cluster)
        opened.push_async_callback(queue.close)
        yield coordinator, store, queue


async def check_part(
    name: str, parts: PartSettings, settings: BrokerSettings, *, runtime: Runtime | None = None
) -> str:
    """Open only the `store`, `queue` or `coordinator`, check it as a start does, and describe the result.

    Raises: the MemqError with which a start would fail.
    """
    runtime = runtime or Runtime()
    if name == "coordinator":
        coordinator = open_coordinator(parts, runtime, settings.cluster)
        await _closed_after(coordinator.brokers(), coordinator.close)
        return f"{parts.coordinator} answers"
    if name == "store":
        store = open_store(parts, runtime, settings.cluster)
        await _closed_after(store.check(deletes=settings.delete_objects), store.close)
        return f"{parts.store} answers, and lets memq do what it has to"
    queue = open_queue(parts, runtime, settings.cluster)
    await _closed_after(queue.check(), queue.close)
    return f"{parts.queue} answers, and lets memq do what it has to"


@asynccontextmanager
async def opened_mark(
    parts: PartSettings, settings: BrokerSettings, *, runtime: Runtime | None = None
) -> AsyncIterator[StoreMark]:
    """Open the store and the coordinator, and yield the `StoreMark` that compares their marks."""
    runtime = runtime or Runtime()
    coordinator = open_coordinator(parts, runtime, settings.cluster)
    try:
        store = open_store(parts, runtime, settings.cluster)
        try:
            yield StoreMark(settings.cluster, store, coordinator)
        finally:
            await store.close()
    finally:
        await coordinator.close()


async def check_mark(parts: PartSettings, settings: BrokerSettings) -> str:
    """Compare the store's mark with the coordinator's, and describe the result. Raises: MemqError."""
    async with opened_mark(parts, settings) as mark:
        await mark.compare()
        known = (await mark.read()).known
    return f"the store is the cluster's, {known}" if known else "no mark yet; the next start of a broker writes it"


async def check_pointers(
    parts: PartSettings, settings: BrokerSettings, *, runtime: Runtime | None = None
) -> list[LogLostError]:
    """Compare queue and store as a start does; return an error for each log that the queue has lost.

    Raises: as `LostLogs.check`.
    """
    async with opened_parts(parts, runtime or Runtime(), settings.cluster) as (coordinator, store, queue):
        return await LostLogs(settings.cluster, store, queue, coordinator).check()


async def _closed_after(check: Awaitable[object], close: Callable[[], Awaitable[None]]) -> None:
    try:
        await check
    finally:
        await close()


async def serve_cluster(
    settings: BrokerSettings, parts: PartSettings, ready: Callable[[str], None], *, runtime: Runtime | None = None
) -> int:
    """Run a broker of a cluster until SIGTERM or SIGINT, drain it, return the exit code.

    Store and queue are checked before clients can connect. Raises: MemqError when the start fails.
    """
    check_exposure(settings, parts.sections)
    events = EventLog(SystemClock())
    networks = broker_networks(parts.section("tls"), events)
    warn_of_anonymous(settings, parts.sections, events)
    runtime = runtime or Runtime(network=networks.data)
    opened: list[Callable[[], Awaitable[None]]] = []
    try:
        coordinator = open_coordinator(parts, runtime, settings.cluster)
        opened.append(coordinator.close)
        store = open_store(parts, runtime, settings.cluster)
        opened.append(store.close)
        queue = open_queue(parts, runtime, settings.cluster)
        opened.append(queue.close)
        # It fails if the coordinator is unreachable. Later steps retry.
        await first_answer(events, f"coordinator {parts.coordinator}", coordinator.governor)
        await _check_id(settings, coordinator, runtime)
        if settings.host in EVERY_INTERFACE and not settings.advertise:  # clients would connect to their own machine
            settings = dataclasses.replace(settings, advertise=format_address((runtime.host, 0)))
        limits = client_limits(parts.section("clients"))
        spool = SpoolFiles(Path(settings.spool)) if settings.spool else None
        if spool is not None:
            opened.append(spool.close)
        broker = Broker(
            settings,
            runtime,
            {STORE_NAME: store},
            queue,
            coordinator,
            client_limits=limits,
            spool_disk=spool,
            traces=traces_of(settings, runtime),
            tokens=tokens_of(parts.section("tokens"), runtime.clock, events),
        )
        await broker.check()
        mark = StoreMark(settings.cluster, store, coordinator)
        await start_step(
            runtime, broker.services.events, "compare the mark of the store", lambda: mark.settle(runtime.random)
        )
        return await run_broker(broker, settings, runtime, ready, http_network=networks.http)
    finally:
        for close in reversed(opened):
            await close()


async def _check_id(settings: BrokerSettings, coordinator: Coordinator, runtime: Runtime) -> None:
    """Refuse to replace a running broker with this id: it would end without a drain.

    A broker that does not answer is dead or hangs: this one replaces it.
    Raises: InvalidSettingError; as `Coordinator.brokers`.
    """
    for entry in await start_step(runtime, EventLog(runtime.clock), "read brokers", coordinator.brokers):
        if entry.id != settings.broker_id:
            continue
        try:
            async with asyncio.timeout(NAMESAKE_TIMEOUT_S):
                link = await connect_link(runtime, None, parse_address(entry.address), client=BROKER_PROGRAM)
        except (MemqError, TimeoutError):
            continue
        link.close()
        if (link.broker, link.cluster) == (settings.broker_id, settings.cluster):
            raise InvalidSettingError(
                f"a broker at {entry.address} runs under the id '{entry.id}' already",
                hint="give each broker a broker_id of its own, or stop that one first",
            )


# ---- the tables --------------------------------------------------------------------------------


def _chosen(name: str, url: str, table: dict[str, Open[Part]]) -> Open[Part]:
    scheme, colon, _ = url.partition(":")
    if colon and scheme in table:
        return table[scheme]
    raise InvalidSettingError(
        f"setting {name} = '{url[:200]}' is no known kind of {name}",
        hint=did_you_mean(scheme, table) if colon else f"write it as {' or '.join(f'{kind}:…' for kind in table)}",
    )


def _path(name: str, url: str) -> Path:
    """Return the file or folder of `file:FOLDER`, `file:///FOLDER`, `sqlite:FILE`, `standalone:FILE`."""
    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or not parts.path:
        raise InvalidSettingError(
            f"setting {name} = '{url[:200]}' names no path", hint=f"write {parts.scheme}:PATH or {parts.scheme}:///PATH"
        )
    return Path(url2pathname(parts.path))


def _file_store(settings: PartSettings, runtime: Runtime, cluster: str) -> StorageHandler:
    root = _path("store", settings.store)
    tmp = root.parent / f"{root.name}.tmp"  # next to it: on the same file system, and in no listing
    make_folder(root)
    make_folder(tmp)
    several = not settings.coordinator.startswith("standalone:")  # brokers on one folder: each of them deletes
    return FilesystemHandler(root, tmp, chance=runtime.random, shared=several)


def _s3_store(settings: PartSettings, runtime: Runtime, cluster: str) -> StorageHandler:
    from memq.storage_handlers.s3 import open_from_settings

    return open_from_settings(settings, runtime)


def _sqlite_queue(settings: PartSettings, runtime: Runtime, cluster: str) -> NotificationQueue:
    file = _path("queue", settings.queue)
    make_folder(file.parent)
    return SqliteQueue(file, runtime.clock)


def _kafka_queue(settings: PartSettings, runtime: Runtime, cluster: str) -> NotificationQueue:
    from memq.notification.kafka import open_from_settings

    return open_from_settings(settings, runtime)


def _standalone(settings: PartSettings, runtime: Runtime, cluster: str) -> MarkedCoordinator:
    """Open the coordinator of a single broker; its folder is locked until the process ends."""
    file = _path("coordinator", settings.coordinator)
    make_folder(file.parent)
    lock_folder(file.parent)
    return StandaloneCoordinator(file, cluster, runtime.clock)


def _zookeeper(settings: PartSettings, runtime: Runtime, cluster: str) -> MarkedCoordinator:
    from memq.governor.zookeeper import open_from_settings

    return open_from_settings(settings, runtime, cluster)


STORES: dict[str, Open[StorageHandler]] = {"file": _file_store, "s3": _s3_store}
QUEUES: dict[str, Open[NotificationQueue]] = {"sqlite": _sqlite_queue, "kafka": _kafka_queue}
COORDINATORS: dict[str, Open[MarkedCoordinator]] = {"standalone": _standalone, "zookeeper": _zookeeper}
