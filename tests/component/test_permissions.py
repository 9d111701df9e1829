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
from memq.broker.identity.networks import broker_networks
from memq.errors import DeniedError, NotFoundError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.permissions import ResourceKind, rules_of_role
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, DescribeHeld
from memq.protocol.frames import Api
from memq.protocol.group_messages import CommitAnswer, CommitRequest
from memq.protocol.link import connect_link
from memq.protocol.messages import PartitionRef, PollAnswer, PollEntries, PollFrom, PollRequest, ReadRequest
from memq.protocol.queue_messages import AwaitItems, DequeueItems
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import client_network, parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.settings import BrokerSettings
from memq.storage_handlers.confirmed_reads import read_index
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
async def cluster(authority: Certificates, brokers: int = 1, *, audit: bool = False) -> AsyncIterator[Cluster]:
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
                audit=audit,
                audit_interval_ms=100,
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


def test_a_request_that_names_a_hidden_topic_is_logged(
    authority: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            for topic in ("clicks", "absent"):
                with pytest.raises((DeniedError, NotFoundError)):
                    await send(world, "mallory", topic)

    bounded(work)
    lines = [record.getMessage() for record in caplog.records if "permission-hidden" in record.getMessage()]
    assert lines
    assert all("principal 'mallory' may not describe topic 'clicks', and asked for it; from 127" in it for it in lines)


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
                assert code != 0

    bounded(work)


def test_a_producer_that_lost_its_right_ends_with_a_typed_error(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            await world.allow("ann", "producer", topic=["clicks"])
            await world.allow("bob", "producer", topic=["clicks"])
            async with (
                memq.aio.Producer(world.address, tls=world.tls("ann")) as ann,
                memq.aio.Producer(world.address, tls=world.tls("bob")) as bob,
            ):
                for producer in (ann, bob):
                    await (await producer.send("clicks", b"before"))
                async with world.admin() as admin:  # the brokers learn it by themselves
                    gone = rules_of_role("producer", "ann", {TOPIC: ["clicks"]})
                    await admin.change_permissions(remove=gone)
                with pytest.raises((DeniedError, NotFoundError)):
                    await send_until_refused(ann)
                await (await bob.send("clicks", b"after"))
                await world.allow("ann", "producer", topic=["clicks"])
            values = await received(world, "root", "clicks")
            assert values.count(b"before") == 2
            assert values.count(b"after") == 1

    bounded(work)


async def consume_after_a_loss(world: Cluster) -> None:
    """Consume as `ann`, whose role is taken away after the first batch; brokers learn it by themselves."""
    async with memq.aio.Consumer(
        world.address, "clicks", group="g", start="beginning", tls=world.tls("ann")
    ) as consumer:
        assert (await anext(aiter(consumer))).values() == [b"first"]
        async with world.admin() as admin:
            gone = rules_of_role("consumer", "ann", {TOPIC: ["clicks"], GROUP: ["g"]})
            await admin.change_permissions(remove=gone)
        async with asyncio.timeout(EFFECTIVE_S):
            async for _ in consumer:
                raise AssertionError("no record follows")


async def send_until_refused(producer: memq.aio.Producer) -> None:
    """Send records again and again, within the time in which a change of rules is effective."""
    async with asyncio.timeout(EFFECTIVE_S):
        while True:
            await (await producer.send("clicks", b"later"))


async def pay(world: Cluster, value: bytes) -> None:
    """Send a record in a transaction, as `ann`."""
    async with memq.aio.Producer(world.address, tls=world.tls("ann"), transactional_id="pay") as producer:  # noqa: SIM117
        async with producer.transaction() as transaction:
            await transaction.send("out", value)


def test_a_consumer_that_lost_its_right_ends_within_5_s(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority, brokers=2) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks", partitions=2)
            await send(world, "root", "clicks", b"first")
            await world.allow("ann", "consumer", topic=["clicks"], group=["g"])
            with pytest.raises(DeniedError, match="principal 'ann' may not read"):
                await consume_after_a_loss(world)

    bounded(work)


def test_a_consumer_that_lost_its_right_closes_and_loses_no_record(
    authority: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            await send(world, "root", "clicks", b"first")
            consumer_role = {"topic": ["clicks"], "group": ["g"]}
            await world.allow("ann", "consumer", **consumer_role)
            options: dict[str, Any] = {"group": "g", "start": "beginning", "tls": world.tls("ann")}
            options["auto_commit_interval_ms"] = 60_000
            async with memq.aio.Consumer(world.address, "clicks", **options) as consumer:
                assert (await anext(aiter(consumer))).values() == [b"first"]
                await consumer.poll(0.1)  # the batch is finished
                await world.forbid("ann", "consumer", **consumer_role)
            await world.allow("ann", "consumer", **consumer_role)
            async with memq.aio.Consumer(world.address, "clicks", **options) as consumer:
                assert (await anext(aiter(consumer))).values() == [b"first"]

    bounded(work)
    assert "consumer.not-committed: closed without the last commit: principal 'ann' may not read" in caplog.text


def test_a_transaction_needs_its_permissions(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                for topic in ("in", "out"):
                    await admin.create_topic(topic)
            await world.allow("ann", "producer", topic=["out"], transactional_id=["pay"])
            await pay(world, b"paid")
            assert await received(world, "root", "out") == [b"paid"]
            await world.forbid("ann", "producer", transactional_id=["pay"])
            with pytest.raises(DeniedError, match="transactional-id 'pay'"):
                await pay(world, b"unpaid")
            assert await received(world, "root", "out") == [b"paid"]

    bounded(work)


@pytest.mark.parametrize("shared", [False, True])
def test_read_needs_each_topic_of_the_object(authority: Certificates, shared: bool) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                for topic in ("clicks", "secret"):
                    await admin.create_topic(topic, settings={"shared_objects": shared})
            await asyncio.gather(*(send(world, "root", topic, topic.encode()) for topic in ("clicks", "secret")))
            store = world.brokers[0].services.store
            entries = [entry async for entry in store.list("memq/")]
            objects = [entry for entry in entries if "/shared/" in entry.key or "/topics/" in entry.key]
            await world.allow("ann", "consumer", topic=["clicks"], group=["*"])
            await world.allow("bob", "consumer", topic=["clicks", "secret"], group=["*"])
            assert len(objects) == 2 - shared, "the batches of topics that share are in one object"
            for entry in objects:
                topics = {topic.name for topic in (await read_index(store, entry))[0].meta.topics}
                assert await reads(world, "bob", entry.key)
                assert await reads(world, "ann", entry.key) == (topics == {"clicks"})
                assert not await reads(world, "eve", entry.key)
            keys = [entry.key for entry in entries if entry not in objects]
            keys += [entry.key.replace("memq/", "other/", 1) for entry in objects]  # of another cluster in this store
            for key in [*keys, "memq/store-mark", "other/topics/clicks/x"]:
                assert not await reads(world, "bob", key)

    bounded(work)


async def reads(world: Cluster, principal: str, key: str) -> bool:
    """Return whether a principal may READ an object; no other error than DeniedError is expected."""
    network = client_network(world.tls(principal))
    link = await connect_link(Runtime(network=network), None, parse_address(world.address), client="test")
    try:
        ask = ReadRequest(store="main", key=key, offset=0, length=8)
        return bool(await link.read(ask))
    except DeniedError:
        return False
    finally:
        link.close()


def test_a_group_shows_and_takes_no_topic_that_the_principal_may_not_read(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                for topic in ("clicks", "secret"):
                    await admin.create_topic(topic)
            for topic in ("clicks", "secret"):
                await send(world, "root", topic)
                assert await received(world, "root", topic, group="g") == [b"v"]
            await world.allow("ann", "consumer", topic=["clicks"], group=["g"])
            async with world.admin("ann") as admin:
                found = await admin.group("g")
                assert {each.topic_partition.topic for each in found.partitions} == {"clicks"}
            link = await connect_link(
                Runtime(network=client_network(world.tls("ann"))), None, parse_address(world.address), client="test"
            )
            for topic in ("secret", "absent"):
                fetch = [PartitionRef(topic=topic, topic_id="0" * 32, partition=0)]
                with pytest.raises(DeniedError, match=f"may not read topic '{topic}'"):
                    await link.request(Api.COMMIT, CommitRequest(group="g", fetch=fetch), CommitAnswer)
            link.close()

    bounded(work)


def test_a_request_about_no_partition_tells_nothing_of_a_hidden_topic(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("secret")
            link = await connect_link(
                Runtime(network=client_network(world.tls("eve"))), None, parse_address(world.address), client="test"
            )
            for topic in ("secret", "absent"):
                ask = DescribeHeld(topic=topic, topic_id="", broker="b0", sought=[])
                with pytest.raises(DeniedError, match=f"may not describe topic '{topic}'"):
                    await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer)
            link.close()

    bounded(work)


def test_requests_that_wait_end_when_the_rules_change(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                topic = await admin.create_topic("clicks")
            await world.allow("ann", "consumer", topic=["clicks"], queue=["jobs"])
            partition = PartitionRef(topic="clicks", topic_id=topic.id, partition=0)
            poll = PollRequest(ask=PollEntries(partitions=[PollFrom(partition=partition, offset=0)], wait_ms=30_000))
            dequeue = AdminRequest(ask=DequeueItems(queues={"jobs": 1}, wait_ms=20_000))
            await_items = AdminRequest(ask=AwaitItems(queues=["jobs"], wait_ms=20_000))
            for api, message, answer in (
                (Api.POLL, poll, PollAnswer),
                (Api.ADMIN, dequeue, AdminAnswer),
                (Api.ADMIN, await_items, AdminAnswer),
            ):
                link = await connect_link(
                    Runtime(network=client_network(world.tls("ann"))), None, parse_address(world.address), client="test"
                )
                waiting = asyncio.create_task(link.request(api, message, answer, timeout_s=60))
                assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
                await world.forbid("ann", "consumer", topic=["clicks"], queue=["jobs"])
                with pytest.raises(DeniedError, match="principal 'ann' may not read"):
                    await asyncio.wait_for(waiting, EFFECTIVE_S)
                await world.allow("ann", "consumer", topic=["clicks"], queue=["jobs"])
                with pytest.raises(TimeoutError):  # the connection is as good as before
                    await asyncio.wait_for(link.request(api, message, answer, timeout_s=60), 0.5)
                link.close()

    bounded(work)


def test_a_listener_without_its_permissions_ends_with_a_typed_error(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            await send(world, "root", "clicks")
            await world.allow("ann", "metadata-only", topic=["clicks"], group=["g"])

            async def handle(message: memq.Message) -> None:
                raise AssertionError("no record is read without a permission")

            with pytest.raises(DeniedError, match=r"principal 'ann' may not create topic 'g\.retry'"):
                async with memq.aio.Listener(world.address, "clicks", "g", handle, tls=world.tls("ann")) as listener:
                    await listener.run()

    bounded(work)


def test_a_worker_needs_read_on_its_queues(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            await world.allow("ann", "producer", queue=["jobs"])

            async def handle(item: memq.QueueItem) -> None:
                raise AssertionError("no item is leased without a permission")

            with pytest.raises(DeniedError, match="may not read queue 'jobs'"):
                async with memq.aio.Worker(handle, "jobs", brokers=world.address, tls=world.tls("ann")) as worker:
                    await worker.run()

    bounded(work)
