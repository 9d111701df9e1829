"""Namespaces on sockets: defaults and limits of their topics, and that a foreign one is not seen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.cli import run as cli
from memq.errors import DeniedError, InvalidRequestError, NotFoundError
from memq.namespaces import Namespace
from memq.testing import Cluster
from tests.brokers import run, running_broker
from tests.certificates import Certificates
from tests.component.test_permissions import bounded, cluster, received, send


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


def test_new_topics_have_the_defaults_of_their_namespace() -> None:
    async def work() -> None:
        async with running_broker() as broker, memq.aio.Admin(broker.address) as admin:
            before = await admin.create_topic("billing/old")
            defaults = Namespace(name="billing", partitions=3, settings={"retention_ms": 86_400_000})
            done = await admin.change_namespaces(put=[defaults])
            assert (done.put, done.removed) == ((defaults,), ())
            async with memq.aio.Producer(broker.address, audit=False) as producer:  # which creates it
                await (await producer.send("billing/sent", b"v"))
            sent = (await admin.topic("billing/sent")).topic
            assert (len(sent.partitions), sent.settings.retention_ms) == (3, 86_400_000)
            own = await admin.create_topic("billing/own", partitions=2, settings={"retention_ms": 0})
            assert (len(own.partitions), own.settings.retention_ms) == (2, 0)
            for name in ("other/own", "billing.own", "billing"):
                assert len((await admin.create_topic(name)).partitions) == len(before.partitions)
            assert (await admin.topic("billing/old")).topic.settings == before.settings
            use = await admin.namespace("billing")
            assert (use.namespace, use.topics, use.partitions) == (defaults, 3, 5 + len(before.partitions))
            assert [each.namespace.name for each in await admin.namespaces()] == ["billing", "other"]
            assert (await admin.change_namespaces(remove=["billing"])).removed == ("billing",)
            assert (await admin.namespace("billing")).namespace == Namespace(name="billing")
            with pytest.raises(NotFoundError, match="namespace 'absent' does not exist"):
                await admin.namespace("absent")
            with pytest.raises(InvalidRequestError):
                await admin.change_namespaces(put=[Namespace(name="a", settings={"retention_ms": 1})])

    run(work())


def test_a_namespace_takes_no_more_topics_than_its_limits() -> None:
    async def work() -> None:
        async with running_broker() as broker, memq.aio.Admin(broker.address) as admin:
            await admin.change_namespaces(put=[Namespace(name="billing", topics_max=3, partitions_max=5)])
            made = await asyncio.gather(
                *(admin.create_topic(f"billing/{number}", partitions=1) for number in range(8)),
                return_exceptions=True,
            )
            refused = [each for each in made if isinstance(each, InvalidRequestError)]
            assert len(refused) == 5, "those at the same time find no room twice"
            assert "namespace 'billing' has 3 topics, 3 are allowed" in str(refused[0])
            assert "--topics-max" in refused[0].hint
            first = next(each for each in made if not isinstance(each, BaseException))
            assert (await admin.create_topic(first.name, exist_ok=True)).id == first.id
            async with memq.aio.Producer(broker.address, audit=False) as producer:
                with pytest.raises(InvalidRequestError, match="3 are allowed"):
                    await (await producer.send("billing/late", b"v"))
            await admin.delete_topic(first.name)
            with pytest.raises(InvalidRequestError, match="with 4 partitions does not fit"):
                await admin.create_topic("billing/wide", partitions=4)
            await admin.create_topic("billing/wide", partitions=3)
            await admin.create_topic("other/wide", partitions=40)

    run(work())


async def outcome(work: Any) -> tuple[str, str]:
    """Return type and text of an error, without the names of topics and groups."""
    with pytest.raises(memq.MemqError) as raised:
        await work
    return type(raised.value).__name__, str(raised.value).replace("foreign", "N").replace("absent", "N")


def test_a_foreign_namespace_looks_like_an_absent_one(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as world:
            async with world.admin() as admin:
                await admin.create_topic("mine/t")
                await admin.create_topic("foreign/t")
                await admin.change_namespaces(put=[Namespace(name="foreign", topics_max=1), Namespace(name="mine")])
            assert await received(world, "root", "foreign/t", group="foreign/g") == []
            async with memq.aio.Queue(world.address, tls=world.tls("root")) as queue:
                for name in ("mine/jobs", "foreign/jobs"):
                    await queue.enqueue(name, b"job")
            await world.allow("ann", "owner", **{kind: ["mine/*"] for kind in ("topic", "group", "queue")})
            async with world.admin("ann") as admin:
                assert [each.namespace.name for each in await admin.namespaces()] == ["mine"]
                assert [topic.name for topic in await admin.topics()] == ["mine/t"]
                assert (await admin.groups(), list(await admin.queues())) == ([], ["mine/jobs"])
                for ask in (
                    admin.namespace,
                    lambda name: admin.topic(f"{name}/t"),
                    lambda name: admin.create_topic(f"{name}/t"),
                    lambda name: admin.create_topic(f"{name}/new"),
                    lambda name: admin.delete_topic(f"{name}/t"),
                    lambda name: admin.alter_topic(f"{name}/t", settings={"retention_ms": 0}),
                    lambda name: admin.truncate_topic(f"{name}/t", "end"),
                    lambda name: admin.group(f"{name}/g"),
                    lambda name: admin.delete_group(f"{name}/g"),
                    lambda name: admin.begin_pop(f"{name}/t", "mine/pops"),
                    lambda name: send(world, "ann", f"{name}/t"),
                    lambda name: received(world, "ann", f"{name}/t"),
                    lambda name: received(world, "ann", "mine/t", group=f"{name}/g"),
                    lambda name: admin.change_namespaces(remove=[name]),
                ):
                    assert await outcome(ask("foreign")) == await outcome(ask("absent"))
                await admin.create_topic("mine/new")
                with pytest.raises(DeniedError):
                    await admin.change_namespaces(put=[Namespace(name="mine", topics_max=9)])
            async with world.admin("bob") as admin:
                assert await admin.namespaces() == []
            async with world.admin() as admin:
                assert [each.namespace.name for each in await admin.namespaces()] == ["foreign", "mine"]

    bounded(work)


def test_commands_set_show_and_remove_namespaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with Cluster() as broker:

        def command(*words: str) -> tuple[int, str]:
            code = cli.run([*words, "-b", broker.address])
            return code, "".join(capsys.readouterr())

        limits = ("--partitions", "2", "--topics-max", "5", "--partitions-max", "20", "--set", "retention_ms=1d")
        code, out = command("namespace", "set", "billing", *limits)
        assert (code, "+ namespace 'billing': partitions 2, topics_max 5" in out) == (0, True)
        assert command("namespace", "set", "billing", *limits) == (0, "nothing to change\n")
        assert command("topic", "create", "billing/invoices")[0] == 0
        code, out = command("namespace", "list")
        assert out.splitlines()[1].split() == ["billing", "1", "5", "2", "20"]
        code, out = command("namespace", "describe", "billing")
        assert "1 of 5" in out
        assert "retention_ms=86400000" in out
        code, out = command("namespace", "describe", "billing", "--json")
        assert json.loads(out)["namespace"]["topics_max"] == 5
        assert [each["topics"] for each in json.loads(command("namespace", "list", "--json")[1])] == [1]
        code, out = command("namespace", "describe", "absent")
        assert (code, "namespace 'absent' does not exist" in out) == (3, True)
        assert command("namespace", "set", "a/b")[0] != 0
        assert command("namespace", "remove", "billing")[1] == "- namespace 'billing'\n"
        code, out = command("acl", "allow", "ann", "--role", "consumer", "--namespace", "billing", "--json")
        names = {(rule["kind"], rule["name"]) for rule in json.loads(out)["added"]}
        assert {("topic", "billing/*"), ("group", "billing/*"), ("queue", "billing/*")} < names
        assert ("transactional-id", "billing/*") not in names
        code, out = command("acl", "allow", "bob", "read", "--namespace", "billing", "--topic", "x")
        assert "+ allow bob read topic 'x'" in out
        assert "+ allow bob read group 'billing/*'" in out
        assert command("acl", "allow", "bob", "read", "--namespace", "a/b")[0] != 0
        code, out = command("acl", "allow", "bob", "--role", "admin", "--namespace", "billing")
        assert (code != 0, "--role owner" in out) == (True, True)
