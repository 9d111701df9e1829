"""Reports of the audit: a principal reports only about topics and groups that it may use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import memq
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.observers.reporter import ReportCarrier
from memq.errors import InvalidRequestError
from memq.format.report import AUDIT_TOPIC, Kind, Report, ReportPart, decode_report, encode_report
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, PublishStaged
from memq.protocol.frames import Api
from memq.protocol.link import connect_link
from memq.runtime.network import client_network, parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Topic
from tests.certificates import Certificates
from tests.component.test_permissions import Cluster, bounded, cluster, received

CLIENT = 0xF0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


def report_of(topic: Topic, kind: Kind, *, name: str = "") -> bytes:
    part = ReportPart(topic=topic.name, topic_id=topic.id, partition=0)
    work = Report(client=CLIENT, kind=kind, number=0, since_ms=1, until_ms=2, next_ms=3, name=name, parts=(part,))
    return encode_report(work)


async def send_reports(world: Cluster, principal: str, *bodies: bytes) -> None:
    """Send each report by a producer of its own: a refused one ends its producer."""
    for body in bodies:
        runtime = Runtime(network=client_network(world.tls(principal)))
        pool = LinkPool(runtime, bootstrap_addresses(world.address))
        await pool.reach(5)
        carrier = ReportCarrier(runtime, pool)
        try:
            await carrier.homes()
            carrier.send(0, body)
            await carrier.write(2)
        finally:
            await carrier.close(1)
            await pool.close()


async def taken(world: Cluster) -> list[Any]:
    """Return the forged reports that are in the topic."""
    reports = [decode_report(body) for body in await received(world, "root", AUDIT_TOPIC)]
    return [(each.kind, each.parts[0].topic) for each in reports if each.client == CLIENT]


def test_a_report_about_a_topic_or_group_of_others_is_refused(
    authority: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with cluster(authority, audit=True) as world:
            async with world.admin() as admin:
                mine, secret = [await admin.create_topic(name) for name in ("mine", "secret")]
            await world.allow("ann", "producer", topic=["mine"])
            await world.allow("bob", "consumer", topic=["mine"], group=["g"])
            await send_reports(
                world,
                "ann",
                report_of(mine, "producer"),
                report_of(secret, "producer"),
                report_of(mine, "consumer"),
                b"{}",
            )
            await send_reports(
                world,
                "bob",
                report_of(mine, "consumer", name="g"),
                report_of(mine, "consumer", name="another"),
                report_of(mine, "spark-writer"),
                report_of(secret, "spark-task"),
            )
            expected = [("producer", "mine"), ("consumer", "mine")]
            async with asyncio.timeout(20):
                while (found := await taken(world)) != expected:
                    assert set(found) <= set(expected)

    bounded(work)
    lines = [each.getMessage() for each in caplog.records if "permission-denied" in each.getMessage()]
    for refused in (
        "'ann' may not write topic 'secret'",
        "'ann' may not read topic 'mine'",
        "'bob' may not read group 'another'",
        "'bob' may not write topic 'mine'",
        "'bob' may not read topic 'secret'",
    ):
        assert any(refused in line and "; report from 127.0.0.1" in line for line in lines), refused


def test_clients_with_permissions_report_as_before(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority, audit=True) as world:
            async with world.admin() as admin:
                await admin.create_topic("clicks")
            await world.allow("ann", "producer", topic=["clicks"])
            await world.allow("bob", "consumer", topic=["clicks"], group=["g"])
            async with memq.aio.Producer(world.address, tls=world.tls("ann")) as producer:
                await (await producer.send("clicks", b"v"))
            assert await received(world, "bob", "clicks", group="g") == [b"v"]

            async def kinds() -> set[str]:
                bodies = await received(world, "root", AUDIT_TOPIC)
                return {each.kind for each in map(decode_report, bodies) if each.parts}

            async with asyncio.timeout(20):
                while not await kinds() >= {"producer", "consumer"}:
                    pass

    bounded(work)


def test_no_staged_batch_brings_reports_past_the_check(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority, audit=True) as world:
            await world.allow("ann", "producer", topic=["mine"])
            topic = world.brokers[0].partitions.topic(AUDIT_TOPIC)
            network = client_network(world.tls("ann"))
            link = await connect_link(Runtime(network=network), None, parse_address(world.address), client="test")
            place: dict[str, Any] = {"topic": AUDIT_TOPIC, "topic_id": topic.id, "partition": 0}
            batch: dict[str, Any] = {"writer": "w", "batch_id": 1, "store": "main", "manifest": 1, "pieces_total": 0}
            ask = PublishStaged(**place, **batch, first=0, pieces=[])
            with pytest.raises(InvalidRequestError, match="takes no staged batches"):
                await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer)
            link.close()

    bounded(work)
