"""Permissions on sockets, with principals by certificates: clients, lists, READ, and changes of rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.tls import broker_networks
from memq.errors import DeniedError, NotFoundError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.permissions import ResourceKind, rules_of_role
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.certificates import Certificates

HANG_S = 60
EFFECTIVE_S = 5.0
TOPIC, GROUP, QUEUE = ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.QUEUE


class Cluster:
    """Brokers with permissions, and certificates for principals."""

    def __init__(self, authority: Certificates, brokers: Sequence[Broker]) -> None:
        self.authority = authority
        self.brokers = brokers
        self.address = brokers[0].address
        self._known: dict[str, Tls] = {}

    def tls(self, principal: str) -> Tls:
        """Return the certificate of a principal."""
        if principal not in self._known:
            self._known[principal] = self.authority.issue(principal, again=True)
        return self._known[principal]

    def admin(self, principal: str = "root") -> memq.aio.Admin:
        return memq.aio.Admin(self.address, tls=self.tls(principal))

    async def allow(self, principal: str, role: str, **names: list[str]) -> None:
        """Give a principal a role, and wait until all brokers know it."""
        by_kind = {ResourceKind[kind.upper()]: given for kind, given in names.items()}
        await self._change(add=rules_of_role(role, principal, by_kind))

    async def forbid(self, principal: str, role: str, **names: list[str]) -> None:
        """Take a role away, and wait until all brokers know it."""
        by_kind = {ResourceKind[kind.upper()]: given for kind, given in names.items()}
        await self._change(remove=rules_of_role(role, principal, by_kind))

    async def _change(self, **change: Any) -> None:
        async with self.admin() as admin:
            done = await admin.change_permissions(**change)
            assert done.enforced
            assert done.added or done.removed
        for broker in self.brokers:
            await broker.services.permissions.refresh()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


@asynccontextmanager
async def cluster(authority: Certificates, brokers: int = 1) -> AsyncIterator[Cluster]:
    """Run brokers of one cluster on sockets."""
    shared, events = MemoryCluster(), EventLog(SystemClock())
    queue, store = MemoryQueue(SystemClock()), MemoryHandler(SystemClock())
    started: list[Broker] = []
    try:
        for number in range(brokers):
            tls = authority.issue(f"broker-{number}", "127.0.0.1", again=True)
            files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
            section = {name: (value, "test") for name, value in {**files, "clients": "optional"}.items()}
            settings = BrokerSettings(
                port=0,
                http_port=-1,
                broker_id=f"b{number}",
                audit=False,
                permissions=True,
                superusers="root",
                broker_principals="broker-*",
            )
            runtime = Runtime(network=broker_networks(section, events).data)
            broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(shared))
            started.append(broker)
            await broker.start()
        yield Cluster(authority, started)
    finally:
        for broker in started:
            await broker.close()


def bounded(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test on asyncio's loop, within a time limit."""

    async def inside() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(inside())


async def send(world: Cluster, principal: str, topic: str, value: bytes = b"v") -> memq.Ack:
    """Send a record with ack=all."""
    async with memq.aio.Producer(world.address, tls=world.tls(principal), connect_timeout_ms=2_000) as producer:
        return await (await producer.send(topic, value))


async def received(world: Cluster, principal: str, topic: str, **options: Any) -> list[bytes]:
    """Return all records of a topic."""
    tls = world.tls(principal)
    async with memq.aio.Consumer(world.address, topic, end="end", start="beginning", tls=tls, **options) as consumer:
        return [value or b"" async for batch in consumer for value in batch.values()]


def test_a_producer_needs_write_and_create(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            with pytest.raises(NotFoundError):
                await send(world, "ann", "clicks")
            await world.allow("ann", "producer", topic=["clicks"])
            with pytest.raises(NotFoundError):
                await send(world, "ann", "clicks")  # no right to create it
            async with world.admin() as admin:
                await admin.create_topic("clicks")
                await admin.create_topic("other")
            assert (await send(world, "ann", "clicks")).topic == "clicks"
            with pytest.raises(NotFoundError):
                await send(world, "ann", "other")

    bounded(work)


def test_a_principal_that_may_describe_alone_is_denied_with_the_command(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            await send(world, "root", "clicks")
            await world.allow("ann", "metadata-only", topic=["*"])
            with pytest.raises(DeniedError, match="principal 'ann' may not write topic 'clicks'") as raised:
                await send(world, "ann", "clicks")
            assert "memq acl allow ann write --topic clicks" in raised.value.hint
            with pytest.raises(DeniedError, match="may not read topic 'clicks'"):
                await received(world, "ann", "clicks")
            async with world.admin("ann") as admin:
                for refused in (admin.create_topic("x"), admin.delete_topic("clicks"), admin.permissions()):
                    with pytest.raises(DeniedError):
                        await refused

    bounded(work)


def test_a_consumer_reads_its_topics_alone(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            for topic in ("clicks", "secret"):
                async with world.admin() as admin:
                    await admin.create_topic(topic)
                await send(world, "root", topic, topic.encode())
            await world.allow("ann", "consumer", topic=["cl*"], group=["g*"])
            assert await received(world, "ann", "clicks", group="g1") == [b"clicks"]
            with pytest.raises(NotFoundError):
                await received(world, "ann", "secret", group="g1")
            with pytest.raises(DeniedError, match="group 'other'"):
                await received(world, "ann", "clicks", group="other")

    bounded(work)


def test_lists_have_what_the_principal_may_describe(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                for topic in ("a.one", "a.two", "b.one"):
                    await admin.create_topic(topic)
            async with memq.aio.Queue(world.address, tls=world.tls("root")) as queue:
                for name in ("a.jobs", "b.jobs"):
                    await queue.enqueue(name, b"job")
            for group in ("a.g", "b.g"):
                assert await received(world, "root", "a.one", group=group) == []
            await world.allow("ann", "metadata-only", topic=["a.*"], group=["a.*"], queue=["a.*"])
            async with world.admin("ann") as admin:
                assert [topic.name for topic in await admin.topics()] == ["a.one", "a.two"]
                assert await admin.groups() == ["a.g"]
                assert list(await admin.queues()) == ["a.jobs"]
                assert [each.broker for each in await admin.brokers()] == ["b0"]
            async with world.admin("bob") as admin:
                assert await admin.topics() == []
                assert await admin.groups() == []
                assert await admin.queues() == {}
                with pytest.raises(DeniedError):
                    await admin.brokers()

    bounded(work)


def test_queues_need_write_to_enqueue_and_read_to_dequeue(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            await world.allow("ann", "producer", queue=["jobs"])
            await world.allow("bob", "consumer", queue=["jobs"])
            async with memq.aio.Queue(world.address, tls=world.tls("ann")) as queue:
                await queue.enqueue("jobs", b"job")
                with pytest.raises(DeniedError, match="may not read queue 'jobs'"):
                    await queue.dequeue("jobs")
                with pytest.raises(DeniedError, match="may not write queue 'others'"):
                    await queue.enqueue("others", b"job")
            async with memq.aio.Queue(world.address, tls=world.tls("bob")) as queue:
                assert [item.payload for item in await queue.dequeue("jobs")] == [b"job"]
                with pytest.raises(DeniedError, match="may not write queue 'jobs'"):
                    await queue.enqueue("jobs", b"job")

    bounded(work)


def test_a_cluster_forwards_requests_under_the_name_of_its_brokers(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority, brokers=2) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks", partitions=4)
            await world.allow("ann", "producer", topic=["clicks"])
            await world.allow("ann", "consumer", topic=["clicks"], group=["*"], queue=["*"])
            for number in range(8):
                await send(world, "ann", "clicks", b"%d" % number)
            for group in ("g1", "g2", "g3", "g4"):
                assert len(await received(world, "ann", "clicks", group=group)) == 8

    bounded(work)


def test_the_command_changes_lists_and_tests_rules(
    authority: Certificates, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memq.cli import run

    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        async with cluster(authority) as world:
            tls = world.tls("root")
            for name in ("ca_file", "cert_file", "key_file"):
                monkeypatch.setenv(f"MEMQ_TLS_{name.upper()}", getattr(tls, name))

            async def command(*words: str) -> tuple[int, str]:
                code = await asyncio.to_thread(run.run, ["acl", *words, "-b", world.address])
                return code, "".join(capsys.readouterr())

            code, out = await command("allow", "ann", "--role", "producer", "--topic", "team.*")
            assert code == 0
            assert "+ allow ann write topic 'team.*'" in out
            assert (await command("deny", "ann", "write", "--topic", "team.x"))[0] == 0
            assert (await command("test", "ann", "write", "--topic", "team.y"))[0] == 0
            code, out = await command("test", "ann", "write", "--topic", "team.x")
            assert (code, "deny ann write topic 'team.x'" in out) == (1, True)
            code, out = await command("list", "ann", "--json")
            assert '"effect":"deny"' in out
            assert (await command("remove", "ann", "write", "--deny", "--topic", "team.x"))[0] == 0
            assert (await command("test", "ann", "write", "--topic", "team.x"))[0] == 0
            assert (await command("remove", "ann", "--role", "producer", "--topic", "team.*"))[0] == 0
            code, out = await command("list", "--json")
            assert out.strip() == "[]"
            for wrong in (("allow", "ann", "fly", "--topic", "x"), ("allow", "ann", "write"), ("allow", "ann")):
                code, _ = await command(*wrong)
                assert code not in (0, 1)

    bounded(work)
