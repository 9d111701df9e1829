"""`memq iam`: the policy of a role covers the calls that its programs make on the store, and no other call."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.broker.broker import Broker
from memq.cli import run
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.errors import InvalidNameError, InvalidRequestError
from memq.limits import TRANSACTION_TARGET_BYTES_MAX
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.s3.policies import GRANTS, ROLES, Grant, StoreCall, policy_of
from tests.brokers import run as bounded
from tests.component.cluster_rig import Rig, rig
from tests.sweeps import sweep_twice

METHODS = {
    "get": StoreCall.GET,
    "get_range": StoreCall.GET,
    "size": StoreCall.GET,
    "put": StoreCall.PUT,
    "delete": StoreCall.DELETE,
    "list": StoreCall.LIST,
}
# Grants whose calls may not come here: they need an outage, a restore, or a state of days, as in the tests of these.
SELDOM = ("shared", "staged", "state", "held")  # deleted by a sweep, if it finds some
RARE: dict[str, set[Grant]] = {
    "broker": {
        *(Grant(StoreCall.DELETE, f"{{cluster}}/{each}/*") for each in SELDOM),
    },
    "producer": {Grant(StoreCall.GET, "{cluster}/staged/*")},  # of a put whose answer was lost
    "auditor": {  # snapshots, and items whose payloads are held
        *(Grant(call, "{cluster}/state/*") for call in (StoreCall.GET, StoreCall.LIST)),
        Grant(StoreCall.GET, "{cluster}/held/*"),
    },
    "spark": {
        Grant(StoreCall.PUT, "{cluster}/topics/{topic}/*/cold/*"),  # copies of batches that are an hour old
        Grant(StoreCall.LIST, "{cluster}/staged/*"),  # for a manifest that a GET does not find
    },
    "operator": {
        *(Grant(call, "memq-check/*") for call in StoreCall if call is not StoreCall.LIST),  # `memq doctor`
        *(Grant(StoreCall.DELETE, f"{{cluster}}/{each}/*") for each in SELDOM),
        *(Grant(StoreCall.PUT, f"{{cluster}}/{each}") for each in ("state/*", "store-mark")),  # restore, accept-store
    },
}
Calls = dict[str, set[tuple[StoreCall, str]]]


class Recorder:
    """Notes the calls of all stores in folders, each under the role of its handler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.role = ""  # of handlers that are not named
        self.roles: dict[object, str] = {}
        self.calls: Calls = defaultdict(set)
        for name, call in METHODS.items():
            monkeypatch.setattr(FilesystemHandler, name, self._noting(getattr(FilesystemHandler, name), call))

    def _noting(self, method: Callable[..., Any], call: StoreCall) -> Callable[..., Any]:
        def noted(handler: FilesystemHandler, key: str = "", *arguments: Any, **more: Any) -> Any:
            self.calls[self.roles.get(handler, self.role)].add((call, key))
            return method(handler, key, *arguments, **more)

        return noted


def allows(policy: dict[str, Any], call: StoreCall, key: str) -> bool:
    """Decide on a call as AWS does, for the bucket `b` with the prefix `p/`."""
    for statement in policy["Statement"]:
        if statement["Effect"] != "Allow" or call.value[0] not in statement["Action"]:
            continue
        if call is StoreCall.LIST:
            assert statement["Resource"] == "arn:aws:s3:::b"
            patterns = statement["Condition"]["StringLike"]["s3:prefix"]
        else:
            patterns = [each.removeprefix("arn:aws:s3:::b/") for each in statement["Resource"]]
        if any(fnmatchcase(f"p/{key}", pattern) for pattern in patterns):
            return True
    return False


async def as_broker(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    await broker.services.store.check()
    async with memq.aio.Admin(broker.address) as admin:
        await admin.create_topic("small", settings={"shared_objects": True})
    async with memq.aio.Producer(broker.address) as producer:
        for topic in ("clicks", "small"):
            await (await producer.send(topic, b"v"))
        await (await producer.send("clicks", b"later", deliver_after=3_600))
    await sweep_deleted_topics(broker, broker.services.store)


async def sweep_deleted_topics(broker: Broker, store: StorageHandler) -> None:
    """Sweep objects of one topic, and those that it shares with others."""
    async with memq.aio.Admin(broker.address) as admin:
        for shared in (False, True):
            await admin.create_topic("gone", settings={"shared_objects": shared})
            async with memq.aio.Producer(broker.address) as producer:
                await (await producer.send("gone", b"v"))
            await admin.delete_topic("gone")
            await sweep_twice(replace(broker.services, stores={"main": store}), 0)


async def as_producer(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    size = 100_000
    producer = memq.aio.Producer(broker.address, transactional_id="pay", codec="none")
    async with producer, producer.transaction(visible=True) as transaction:
        for _ in range(TRANSACTION_TARGET_BYTES_MAX // size + 2):
            await transaction.send("clicks", b"x" * size)


async def as_consumer(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    topics = ["clicks", "small"]
    async with memq.aio.Consumer(broker.address, topics, start="beginning", end="end", read="direct") as consumer:
        assert {batch.topic async for batch in consumer} == set(topics)


async def as_spark(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    commits = StagedCommits(broker.address, "nightly")
    store = own_store(cluster)
    try:
        topics = await commits.topics(["clicks"])
        writer = StagedWriter(commits.cluster, topics, store, "nightly")
        await writer.add("clicks", b"staged", partition=0)
        objects = await writer.finish()
        await commits.commit(7, objects, store)
        await commits.commit(7, [], store)
        await command("compact", "clicks", "-b", broker.address, "--age", "0s", "--rest")
        await as_consumer(recorder, cluster, broker)
    finally:
        await commits.close()
        await store.close()


async def as_auditor(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    for topic in ("clicks", "small"):
        await command("audit", topic, "-b", broker.address)
    await command("queue", "audit", "-b", broker.address)


async def as_operator(recorder: Recorder, cluster: Rig, broker: Broker) -> None:
    store = own_store(cluster)
    await sweep_deleted_topics(broker, store)  # `memq sweep` is the sweep of a broker
    await store.close()
    await command("verify", "clicks", "-b", broker.address)


FLOWS: dict[str, Callable[[Recorder, Rig, Broker], Awaitable[None]]] = {
    "broker": as_broker,
    "producer": as_producer,
    "consumer": as_consumer,
    "spark": as_spark,
    "auditor": as_auditor,
    "operator": as_operator,
}


def own_store(cluster: Rig) -> FilesystemHandler:
    """Open the folder of the cluster again."""
    assert isinstance(cluster.store, FilesystemHandler)
    return FilesystemHandler(
        Path(cluster.store.url.removeprefix("file://")), Path(cluster.store.url[7:]).parent / "tmp"
    )


async def command(*arguments: str) -> None:
    assert await asyncio.to_thread(run.run, list(arguments)) == run.OK, arguments


def test_each_role_has_the_policy_of_its_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder(monkeypatch)

    async def work() -> None:
        async with rig() as cluster:
            for folder in ("objects", "tmp"):
                (tmp_path / folder).mkdir()
            cluster.store = FilesystemHandler(tmp_path / "objects", tmp_path / "tmp")  # type: ignore[assignment]
            recorder.roles[cluster.store] = "broker"
            broker = await cluster.start("a")
            for role, flow in FLOWS.items():
                recorder.role = role
                await flow(recorder, cluster, broker)
        await cluster.store.close()

    bounded(work())
    assert set(FLOWS) == set(ROLES)
    refused: dict[str, list[tuple[str, str]]] = {}
    unused: dict[str, set[Grant]] = {}
    for role in ROLES:
        policy, calls = policy_of(role, "b", "p/", "memq"), recorder.calls[role]
        refused[role] = sorted((call.name, key) for call, key in calls if not allows(policy, call, key))
        unused[role] = {
            grant for grant in GRANTS[role] if not any(call is grant.call and covers(grant, key) for call, key in calls)
        }
    assert not any(refused.values()), refused
    needless = {role: sorted(map(str, grants - RARE.get(role, set()))) for role, grants in unused.items()}
    assert not any(needless.values()), needless


def covers(grant: Grant, key: str) -> bool:
    return fnmatchcase(key, grant.keys.replace("{cluster}", "memq").replace("{topic}", "*"))


def test_the_command_prints_a_policy_for_the_bucket_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--store", "s3://logs/p?endpoint=http://127.0.0.1:1", "--cluster", "main"]
    assert run.run(["iam", "consumer", *store, "--topic", "clicks", "--kms", "arn:aws:kms:x:1:key/2"]) == run.OK
    assert json.loads(capsys.readouterr().out) == {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "Get",
                "Effect": "Allow",
                "Action": ["s3:GetObject"],
                "Resource": [
                    "arn:aws:s3:::logs/p/main/topics/clicks/*",
                    "arn:aws:s3:::logs/p/main/shared/*",
                    "arn:aws:s3:::logs/p/main/staged/*",
                ],
            },
            {
                "Sid": "Keys",
                "Effect": "Allow",
                "Action": ["kms:Decrypt"],
                "Resource": "arn:aws:kms:x:1:key/2",
            },
        ],
    }
    assert run.run(["iam", "broker", *store, "--no-delete", "--kms", "k"]) == run.OK
    policy = json.loads(capsys.readouterr().out)
    assert {each["Sid"] for each in policy["Statement"]} == {"Get", "Put", "List", "Keys"}
    assert "kms:GenerateDataKey" in policy["Statement"][-1]["Action"]
    assert run.run(["iam", "broker", "--store", "file:/tmp/x"]) != run.OK
    assert "is no bucket" in capsys.readouterr().err


def test_names_that_can_not_exist_get_no_policy() -> None:
    for topic in ("a/../b", "*", "a/*"):
        with pytest.raises(InvalidNameError):
            policy_of("consumer", "b", "", "memq", topics=[topic])
    with pytest.raises(InvalidNameError):
        policy_of("consumer", "b", "", "*")
    with pytest.raises(InvalidRequestError, match="role 'root' does not exist"):
        policy_of("root", "b", "", "memq")


def test_a_policy_for_one_topic_covers_no_other_one() -> None:
    policy = policy_of("consumer", "b", "p/", "memq", topics=["clicks"])
    assert allows(policy, StoreCall.GET, "memq/topics/clicks/ab12/1")
    for call, key in (
        (StoreCall.GET, "memq/topics/clicks2/ab12/1"),
        (StoreCall.GET, "memq/state/x"),
        (StoreCall.GET, "other/topics/clicks/ab12/1"),
        (StoreCall.PUT, "memq/topics/clicks/ab12/1"),
        (StoreCall.LIST, "memq/topics/clicks/"),
    ):
        assert not allows(policy, call, key)
