"""Permissions on items of queues: an id under another name, and records of a topic through a pop group."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

import memq
from memq.errors import DeniedError, NotFoundError
from memq.queues.decisions import ItemOutcome
from tests.certificates import Certificates
from tests.component.test_permissions import bounded, cluster, send

SHARDS = 8


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


def neighbour(queue: str) -> str:
    """Return the name of another queue in the same shard."""

    def shard(name: str) -> int:
        return zlib.crc32(name.encode()) % SHARDS

    return next(name for name in (f"own.{number}" for number in range(1_000)) if shard(name) == shard(queue))


def test_an_id_under_the_name_of_another_queue_reaches_no_item(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            for role in ("producer", "consumer", "operator"):
                await world.allow("eve", role, queue=["own.*"])
            async with (
                memq.aio.Queue(world.address, tls=world.tls("root")) as root,
                memq.aio.Queue(world.address, tls=world.tls("eve")) as eve,
            ):
                waiting, dead, leased = await root.enqueue_many("secret", [b"waiting", b"dead", b"leased"])
                _, died, held = await root.dequeue({"secret": 3})
                await root.nack(died, kind="dead")
                own = neighbour("secret")

                def renamed(item: str) -> str:
                    return item.replace("secret:", f"{own}:")

                for each in (waiting, dead, leased):
                    with pytest.raises(NotFoundError):
                        await eve.get(renamed(each))
                    assert await eve.cancel(renamed(each)) is ItemOutcome.UNKNOWN
                for settle in (eve.redrive, eve.purge):
                    assert await settle(own, [renamed(dead)]) == {renamed(dead): ItemOutcome.UNKNOWN}
                stolen = replace(held, id=renamed(held.id), queue=own)
                for change in (eve.ack(stolen), eve.nack(stolen), eve.extend(stolen, 60)):
                    with pytest.raises(NotFoundError):
                        await change
                assert [each.id for each in await root.dead("secret")] == [dead]
                await root.ack(held)
                assert await root.cancel(dead) is ItemOutcome.CANCELLED

    bounded(work)


def test_a_pop_group_shows_records_of_topics_that_the_principal_may_read(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("salaries")
            await send(world, "root", "salaries", b"100")
            await world.allow("eve", "consumer", queue=["*"])
            async with (
                memq.aio.Queue(world.address, tls=world.tls("root")) as root,
                memq.aio.Queue(world.address, tls=world.tls("eve")) as eve,
            ):
                await root.begin_pop("salaries", "g", start="beginning", lease=30)
                (item,) = await root.dequeue("salaries@g", wait=10)
                for refused in (eve.dequeue("salaries@g"), eve.peek("salaries@g"), eve.get(item.id)):
                    with pytest.raises(DeniedError, match="may not read topic 'salaries'"):
                        await refused
                await root.nack(item)
                await world.allow("eve", "consumer", topic=["salaries"])
                (item,) = await eve.dequeue("salaries@g", wait=10)
                assert item.payload == b"100"
                await eve.ack(item)

    bounded(work)
