"""Rules, users and quotas on a real ZooKeeper: all brokers know each change within 5 s, through faults and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.identity.networks import broker_networks
from memq.errors import DeniedError, MemqError, UnreachableError
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.notification.memory import MemoryQueue
from memq.permissions import AccessRule
from memq.quotas import QuotaRule
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq_localstack.servers import Server, start_zookeeper
from tests.certificates import Certificates
from tests.integration.zookeeper_proxy import Fault, Op, Phase, ZookeeperProxy
from tests.zookeeper_nodes import expire

CLOCK = SystemClock()
EFFECTIVE_S = 5.0  # docs/permissions.md
BUSY_S = 1.5  # of a machine that runs other tests
HANG_S = 90
SESSION_MS = 2_000
RULE = AccessRule(effect="allow", principal="ann", permission="operate", kind="cluster", name="*")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ZooKeeper that tests may stop."""
    with start_zookeeper(tmp_path_factory.mktemp("own")) as server:
        yield server


class World:
    """Brokers in this process, each with a session of its own through a proxy of its own."""

    def __init__(self, authority: Certificates, zookeeper: Server, path: str) -> None:
        self.brokers: dict[str, Broker] = {}
        self.proxies: dict[str, ZookeeperProxy] = {}
        self.path = path
        self._authority = authority
        self._coordinators: list[ZookeeperCoordinator] = []
        self._zookeeper = zookeeper
        self._queue, self._store = MemoryQueue(CLOCK), MemoryHandler(CLOCK)

    async def start(self, name: str) -> Broker:
        """Start a broker."""
        tls = self._authority.issue(f"broker-{name}", "127.0.0.1", again=True)
        files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
        section = {key: (value, "test") for key, value in {**files, "clients": "optional"}.items()}
        settings = BrokerSettings(
            port=0,
            http_port=-1,
            broker_id=name,
            audit=False,
            permissions=True,
            quotas=True,
            superusers="root",
            broker_principals="broker-*",
        )
        if name not in self.proxies:
            self.proxies[name] = ZookeeperProxy(int(self._zookeeper.address.rpartition(":")[2]))
        address = ZookeeperAddress(self.proxies[name].address, self.path)
        runtime = Runtime(network=broker_networks(section, EventLog(CLOCK)).data)
        coordinator = ZookeeperCoordinator(
            address, ZookeeperSettings(session_timeout_ms=SESSION_MS), Runtime(), "rules"
        )
        broker = Broker(settings, runtime, {"main": self._store}, self._queue, coordinator)
        self.brokers[name] = broker
        self._coordinators.append(coordinator)
        await broker.start()
        return broker

    async def stop(self) -> None:
        """Stop all brokers; their proxies stay."""
        brokers, self.brokers = list(self.brokers.values()), {}
        for broker in brokers:
            await broker.close()
        coordinators, self._coordinators = self._coordinators, []
        for coordinator in coordinators:
            await coordinator.close()

    def close(self) -> None:
        """End the proxies."""
        for proxy in self.proxies.values():
            proxy.close()

    def admin(self, broker: Broker, tls: Tls | None = None) -> memq.aio.Admin:
        """Return an operator's client of one broker, or that of a user."""
        return memq.aio.Admin(broker.address, tls=tls or self._authority.issue("root", again=True))

    def user(self, password: str) -> Tls:
        """Return the login of ann."""
        return Tls(ca_file=self._authority.trusted.ca_file, user="ann", password=password)


@asynccontextmanager
async def running(authority: Certificates, zookeeper: Server, path: str, count: int = 2) -> AsyncIterator[World]:
    world = World(authority, zookeeper, path)
    async with AsyncExitStack() as stack:
        stack.callback(world.close)
        stack.push_async_callback(world.stop)
        for number in range(count):
            await world.start(f"b{number}")
        yield world


def bounded(work: Callable[[], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(inside())


async def may(world: World, broker: Broker, password: str) -> bool:
    """Whether ann can log in at a broker and do what the rule allows. The answer comes from ZooKeeper."""
    async with world.admin(broker, world.user(password)) as ann:
        while True:
            try:
                await ann.quotas()
            except DeniedError:
                return False
            except UnreachableError:  # by the fault of a test
                continue
            return True


async def limit(world: World, name: str) -> int:
    """Return the records per second of the quota by which a broker bounds ann; 0 without a quota."""
    async with world.admin(world.brokers[name]) as root:
        (found,) = [use for use in await root.quota_use("ann") if use.broker == name]
    return 0 if found.quota is None else found.quota.records_s


async def effective(world: World, change: Callable[[memq.aio.Admin], Awaitable[object]], *, password: str) -> None:
    """Make a change through one broker, and wait until each broker has turned its answer to ann."""
    brokers = list(world.brokers.values())
    before = [await may(world, broker, password) for broker in brokers]
    async with world.admin(brokers[0]) as root:
        await change(root)
    until_s = CLOCK.monotonic() + EFFECTIVE_S + BUSY_S
    for broker, was in zip(brokers, before, strict=True):
        while await may(world, broker, password) is was:
            assert CLOCK.monotonic() < until_s, f"{broker.address} does not know the change"


async def put_ann(world: World, password: str) -> None:
    async with world.admin(next(iter(world.brokers.values()))) as root:
        await root.put_user("ann", password)


def spoil(world: World) -> None:
    """Spoil what three brokers read next: answers from before, connections that end, events that are lost."""
    world.proxies["b1"].arm(Fault(Op.GET_DATA, Phase.STALE, 1))
    world.proxies["b2"].arm(Fault(Op.SYNC, Phase.MIDDLE, 2))
    world.proxies["b3"].arm(Fault(Op.EVENT, Phase.BEFORE, 100))


def test_each_change_is_effective_at_all_brokers_in_time(authority: Certificates, zookeeper: Server) -> None:
    async def work() -> None:
        async with running(authority, zookeeper, "/rules/effective", count=4) as world:
            await put_ann(world, "first")
            spoil(world)
            await effective(world, lambda root: root.change_permissions(add=[RULE]), password="first")

            async def withdraw(root: memq.aio.Admin) -> None:
                await asyncio.to_thread(expire, zookeeper, f"{world.path}/brokers/b3")
                spoil(world)
                await root.change_permissions(remove=[RULE])

            await effective(world, withdraw, password="first")
            assert all(world.proxies[name].met for name in ("b1", "b2")), "both faults have had an operation"

    bounded(work)


def test_users_quotas_and_rules_are_there_after_restarts_and_at_a_broker_that_starts_meanwhile(
    authority: Certificates, own: Server
) -> None:
    async def work() -> None:
        async with running(authority, own, "/rules/restart") as world:
            await put_ann(world, "first")
            await effective(world, lambda root: root.change_permissions(add=[RULE]), password="first")
            await put_ann(world, "second")
            async with world.admin(world.brokers["b0"]) as root:
                starting = asyncio.create_task(world.start("b2"))
                for number in range(1, 21):
                    await root.change_quotas(put=[QuotaRule(name="ann", records_s=1_000 * number)])
                await starting
            await known_everywhere(world)
            await world.stop()
            await asyncio.to_thread(own.kill)
            await asyncio.to_thread(own.restart)
            await world.start("b0")
            await world.start("b1")
            await known_everywhere(world)

    bounded(work)


async def known_everywhere(world: World) -> None:
    """Wait until each broker has the last password, the rule and the last quota; never the first password again."""
    until_s = CLOCK.monotonic() + EFFECTIVE_S + BUSY_S
    for name, broker in world.brokers.items():
        while await limit(world, name) != 20_000 or not await allowed(world, broker):
            assert CLOCK.monotonic() < until_s, f"{name} does not know the last change"
        assert not await may(world, broker, "first")


async def allowed(world: World, broker: Broker) -> bool:
    try:
        return await may(world, broker, "second")
    except MemqError:
        return False
